"""Device, precision and what the machine can run, chosen by static rules: nothing is timed."""

import gc
import importlib.util
import os
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.amp import GradScaler

from transformer.config.settings import Device, Precision
from transformer.errors import InputError, StorageError
from transformer.machine import NO_MEMORY, end_threads_before_forks, lack_of

end_threads_before_forks()

HALF = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


def resolve_device(device: Device) -> torch.device:
    """`auto` is the GPU where there is one that torch can use. Raises InputError where a GPU is asked for in vain."""
    if device is Device.cpu:
        return torch.device("cpu")
    obstacle = gpu_obstacle()
    if obstacle is None and _sees_gpu():
        return torch.device("cuda")
    if device is Device.cuda:
        remedy = "set device=cpu (train.device=cpu under train), or install a CUDA build of torch"
        raise InputError(f"device=cuda, but {obstacle or f'torch sees no GPU here: {remedy}'}")
    return torch.device("cpu")


def gpu_obstacle() -> str | None:
    """Why a GPU of this machine cannot be used, and what to do; None where it can, or where there is none."""
    built_for = torch.version.cuda
    if _sees_gpu():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, as it begins on a GPU that it has no code for
            capability = torch.cuda.get_device_capability()
        if torch.version.hip is not None or _has_code_for(capability, torch.cuda.get_arch_list()):
            return None
        name = torch.cuda.get_device_name()
        return f"torch {torch.__version__} has no code for {name}: install one built for an older CUDA (12.6 for Volta)"

    # Torch sees none.
    if built_for is not None and 0 < (driver := _driver_version()) < _as_number(built_for):
        found = f"{driver // 1000}.{driver % 1000 // 10}"
        newer = "update the driver, or install a torch built for an older CUDA"
        return f"the NVIDIA driver here is for CUDA {found}, and torch {torch.__version__} needs {built_for}: {newer}"
    if built_for is None and Path("/dev/nvidia0").exists():
        return f"torch {torch.__version__} is built for CPUs: install a CUDA build to use the NVIDIA GPU here"
    if torch.backends.mps.is_available():
        return "Apple's GPU (mps) is not supported: its CPU is (device=cpu)"
    return None


NEWEST_TRIED = (2, 15)  # of torch: the tests ran with it


def untried_torch(version: str) -> str | None:
    """One line where this version of torch is newer than any that the package was tried with."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers <= NEWEST_TRIED:
        return None
    newest = ".".join(map(str, NEWEST_TRIED))
    return f"torch {version} is newer than {newest}, the newest that this package was tried with"


def _sees_gpu() -> bool:
    """Whether torch finds a GPU. Where the driver is too old it warns, which `gpu_obstacle` says better."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def _has_code_for(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a GPU runs what torch was built for: `sm_XY` of its own generation, or `compute_XY` up to it."""
    own = 10 * capability[0] + capability[1]
    for architecture in built_for:
        kind, _, number = architecture.partition("_")
        version = int("".join(filter(str.isdecimal, number)) or 0)  # sm_90a
        if version <= own and (kind == "compute" or version // 10 == capability[0]):
            return True
    return not built_for  # torch does not say


def _driver_version() -> int:
    """The CUDA version of a driver that is too old for torch, such as 12040, from what torch says; 0: it is not that.

    There is no function to ask: builds for Linux have none.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        found = re.search(r"too old \(found version (\d+)\)", str(error))
        return int(found[1]) if found else 0
    return 0


def _as_number(version: str) -> int:
    """`13.0` as the driver writes it: 13000."""
    major, _, minor = version.partition(".")
    return 1000 * int(major) + 10 * int(minor or 0)


def avoid_cudnn_attention(device: torch.device) -> None:
    """Before computing on a GPU: keep torch's attention away from cuDNN, from now on in this whole process.

    cuDNN takes up to a second to plan for each new shape: every step of a search has one, and so has every padded
    batch.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def uses_cudnn_attention() -> bool:
    """Whether torch may choose cuDNN for attention on a GPU."""
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed what torch draws on a device, and on the CPU.

    `torch.manual_seed` seeds every kind of device besides, and keeps the whole stack of the caller for each that has
    not been used yet: a twentieth of a small step on a CPU, and half of what the host does for one that a GPU replays.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """`auto` is bf16 on a GPU and on a CPU that multiplies it in hardware, fp32 elsewhere."""
    if precision is not Precision.auto:
        return precision
    if device.type == "cuda":
        multiplies_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        multiplies_bf16 = _cpu_multiplies_bf16()
    return Precision.bf16 if multiplies_bf16 else Precision.fp32


def _cpu_multiplies_bf16() -> bool:
    """Whether torch says so, by functions that it keeps private: where one is absent, it does not."""
    probes = [getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")]
    return any(probe is not None and probe() for probe in probes)


def multiplies_int8() -> bool:
    """Whether this CPU multiplies 8-bit integers in hardware, four at a time; others do it in steps that saturate."""
    probes = [getattr(torch.cpu, name, None) for name in ("_is_vnni_supported", "_is_avx512_vnni_supported")]
    return any(probe is not None and probe() for probe in probes)


def dtype_of(precision: Precision) -> torch.dtype:
    """The type of the parameters: bf16 and fp16 runs keep them in fp32, and autocast casts them for each product."""
    return torch.float64 if precision is Precision.fp64 else torch.float32


def product_dtype(precision: Precision) -> torch.dtype:
    """The type in which a forward pass multiplies."""
    return HALF.get(precision, dtype_of(precision))


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The context of a forward pass: autocast to half precision, or nothing."""
    return torch.autocast(device.type, dtype=HALF[precision]) if precision in HALF else nullcontext()


def loss_scaler(device: torch.device, precision: Precision) -> GradScaler:
    """Under fp16, the scaler that keeps gradients inside its range; elsewhere it does nothing, and its scale is 1."""
    return GradScaler(device.type, enabled=precision is Precision.fp16)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A context in which Python looks for no garbage, as around what a GPU records.

    Among it may be a kernel of Triton, which from 3.7 on unloads itself at its end: then the recording would fail.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def memory_errors_named(phase: str, *, remedy: str) -> Iterator[None]:
    """Raise InputError where memory, a GPU's or the machine's, runs out: with what was done and what to change.

    Raises StorageError where the system starts no thread.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(f"out of GPU memory while {phase}: {remedy}") from error
    except (MemoryError, RuntimeError) as error:
        lack = lack_of(error)
        if lack is None:
            raise
        if lack != NO_MEMORY:
            raise StorageError(f"{phase}: {lack}") from error
        raise InputError(f"out of memory while {phase}: {remedy}") from error


def to_autocast_dtype(x: Tensor) -> Tensor:
    """`x` in the type that autocast multiplies in; unchanged where autocast is off."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, for what half precision cannot add up; fp64 stays fp64."""
    return x if x.dtype is torch.float64 else x.float()


def is_exporting() -> bool:
    """Whether a graph is traced for another program, in which lengths are free.

    torch.compile traces, too, and there some versions of torch answer the first question with yes.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile finds what it needs: a C++ compiler and Python's headers, and Triton for a GPU."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    has_cpp_compiler = has_headers and shutil.which(os.environ.get("CXX", "g++")) is not None
    if not has_cpp_compiler or device.type == "cpu":
        return has_cpp_compiler

    # Triton takes GPUs of Volta and later; on AMD's, nobody has tried it here.
    return _is_triton_installed() and torch.version.hip is None and torch.cuda.get_device_properties(device).major >= 7


def has_triton(device: torch.device) -> bool:
    """Whether kernels written in Triton can run on this device: Triton is there, and the GPU is of Ampere or later."""
    return device.type == "cuda" and _is_triton_installed() and is_ampere_or_later(device)


def has_wide_tiles(device: torch.device) -> bool:
    """Whether a GPU multiplies tiles of 128 x 128 from its shared memory: Hopper and Blackwell, but not in GeForce."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major in (9, 10)


def _is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_ampere_or_later(device: torch.device) -> bool:
    """Whether a GPU is NVIDIA's, and of Ampere or later."""
    return torch.version.hip is None and torch.cuda.get_device_properties(device).major >= 8


def free_gpu_memory(device: torch.device) -> int:
    """Bytes of a GPU that no process has taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free


def has_much_memory(device: torch.device) -> bool:
    """Whether a GPU is one of those made for training: more than 36 GiB."""
    return torch.cuda.get_device_properties(device).total_memory > 36 * 2**30


def default_batch_tokens(device: torch.device) -> int:
    """The default of `search.batch_tokens`: source pieces x beam of a batch that is translated.

    A CPU is as fast with a small batch, and holds one for each of several threads. A GPU needs a large one: a step of
    the search takes as long for 75 sentences as for a thousand.
    """
    if device.type != "cuda":
        return 8_192
    return 131_072 if has_much_memory(device) else 32_768
