"""Device, precision and what the machine can run, chosen by static rules: nothing is timed."""

import importlib.util
import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.amp import GradScaler

from transformer.config.settings import Device, Precision
from transformer.errors import InputError

HALF = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def resolve_device(device: Device) -> torch.device:
    """`auto` is the GPU where there is one. Raises InputError where a GPU is asked for and absent."""
    if device is Device.cuda and not torch.cuda.is_available():
        remedy = "set device=cpu (train.device=cpu under train), or install a CUDA build of torch"
        raise InputError(f"device=cuda, but torch sees no GPU here: {remedy}")
    use_gpu = device is Device.cuda or (device is Device.auto and torch.cuda.is_available())
    return torch.device("cuda" if use_gpu else "cpu")


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """`auto` is bf16 on a GPU and on a CPU that multiplies it in hardware, fp32 elsewhere."""
    if precision is not Precision.auto:
        return precision
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else _cpu_multiplies_bf16()
    return Precision.bf16 if fast else Precision.fp32


def _cpu_multiplies_bf16() -> bool:
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # private in torch: absent means no
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)


def dtype_of(precision: Precision) -> torch.dtype:
    """The type of the parameters: bf16 and fp16 runs keep them in fp32 and cast on the way."""
    return torch.float64 if precision is Precision.fp64 else torch.float32


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    return torch.autocast(device.type, dtype=HALF[precision]) if precision in HALF else nullcontext()


def loss_scaler(device: torch.device, precision: Precision) -> GradScaler:
    """Under fp16, what keeps gradients inside its range; elsewhere it does nothing, and its scale is 1."""
    return GradScaler(device.type, enabled=precision is Precision.fp16)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """`x` in the type that autocast multiplies in; unchanged where autocast is off."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, for what half precision cannot add up; fp64 stays fp64."""
    return x if x.dtype is torch.float64 else x.float()


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile finds what it needs: a C++ compiler and Python's headers, and Triton for a GPU."""
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    compiler = headers and shutil.which(os.environ.get("CXX", "g++")) is not None
    if not compiler or device.type == "cpu":
        return compiler
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_properties(device).major >= 7


def has_varlen_kernel(device: torch.device, dtype: torch.dtype, *, d_k: int, d_v: int) -> bool:
    """Whether torch has one kernel for attention over packed sentences: in half precision, on GPUs since Ampere."""
    fits = dtype.itemsize == 2 and d_k == d_v and d_k % 8 == 0 and d_k <= 256
    return fits and device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 8
