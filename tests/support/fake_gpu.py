"""A CUDA device that is not there, and what the package's training step becomes on it.

    PYTHONPATH=tests python tests/support/fake_gpu.py --layers 6

A CPU build of torch is given an H200: a guard and hooks in C++ (fake_gpu.cpp, compiled on the spot), answers in the
place of torch.cuda's, and a driver for Triton. Nothing can be computed on it. Under FakeTensorMode, where tensors have
a device, a type and a shape but no values, the package's own code runs all the same: autocast, autograd, dynamo, AOT
autograd, inductor and Triton, down to the machine code of every kernel. Whatever reads a value on the host fails.

None of this can be undone, and torch looks for its hooks when it is imported. So the script starts itself again with
the library in place, and that process prints what it found as JSON.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from support.scripts import load_script
from transformer.compute import autocast, loss_scaler
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import Kernels, ModelConfig, TrainConfig
from transformer.data.loader import Position, Step, load_steps
from transformer.data.store import Store
from transformer.model.transformer import Transformer
from transformer.records import Resolved
from transformer.training.optimizer import build_optimizer
from transformer.training.resolve import batching_of, resolve_settings
from transformer.training.step import Computation, Objective, train_step

DEVICE = torch.device("cuda", 0)
VOCAB_SIZE = 37_000
TOKENS = 25_000  # of a step, on each side
H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "total_memory": 139 * 2**30,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65_536,
    "max_threads_per_multi_processor": 2_048,
    "max_threads_per_block": 1_024,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_block_optin": 232_448,
    "shared_memory_per_multiprocessor": 233_472,
    "L2_cache_size": 60 * 2**20,
    "gcnArchName": "",
}


# ---- the device -----------------------------------------------------------------------------------------------------


def compile_library(folder: Path) -> Path:
    """The C++ part, compiled in `folder`."""
    library = folder / "fake_gpu.so"
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    lib = torch_folder / "lib"
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{include}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(["g++", *options, source, "-ltorch_cpu", "-lc10", "-o", library], check=True)
    return library


def _answer_for_the_device() -> None:
    """Replace what torch.cuda asks its driver by constants."""
    properties = object.__new__(torch.cuda._CudaDeviceProperties)  # dynamo knows values of this class
    for name, value in H200.items():
        setattr(properties, name, value)

    answers: dict[str, Any] = {
        "is_available": True,
        "get_device_capability": (9, 0),
        "get_arch_list": ["sm_90"],
        "get_device_name": "NVIDIA H200",
        "is_initialized": True,
        "device_count": 1,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "synchronize": None,
        "_lazy_init": None,
        "_is_in_bad_fork": False,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_get_device_properties": properties,
        "mem_get_info": (H200["total_memory"], H200["total_memory"]),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))

    # Functions of torch's C++ that a CPU build does not have.
    missing = {"_cuda_getDevice": 0, "_cuda_exchangeDevice": 0, "_cuda_maybeExchangeDevice": 0, "_cuda_setDevice": None}
    missing |= {"_cuda_getDeviceCount": 1, "_cuda_getCurrentRawStream": 0, "_cuda_isInBadFork": False}
    for name, answer in missing.items():
        setattr(torch._C, name, _always(answer))
    torch.version.cuda = "13.0"


def _always(answer: Any) -> Any:
    """A function that gives the same answer whatever it is asked."""
    return lambda *args, **kwargs: answer


# ---- the compiler ---------------------------------------------------------------------------------------------------


@dataclass
class Graph:
    """What inductor made of one graph."""

    backward: bool
    launches: int  # of Triton kernels
    calls: dict[str, int]  # of everything else: products, and operators that inductor has no code for
    gigabytes: float  # read and written by all of it, as inductor counts them
    code: str = field(repr=False)


@contextmanager
def lowering() -> Iterator[list[Graph]]:
    """Inductor writes its code, which is recorded in the list and never run: to run it raises NotImplementedError."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import triton
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    driver = types.SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", 90, 32)),  # sm_90, 32 threads a warp
        get_current_device=_always(0),
        get_current_stream=_always(0),
        get_active_torch_device=_always(DEVICE),
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = _always(None)

    # These passes look for what the model does not hold, and need real tensors on the device to be set up.
    fuse_attention._sfdp_init = _always(None)
    pad_mm._pad_mm_init = _always(None)
    inductor.joint_graph_constant_folding = False

    # The backward pass is compiled with the forward pass, since nothing ever runs.
    functorch.force_non_lazy_backward_lowering = True
    functorch.enable_autograd_cache = False
    inductor.fx_graph_cache = False
    inductor.compile_threads = 1
    inductor.use_static_triton_launcher = False  # what it returns has no machine code to look at

    graphs: list[Graph] = []

    def record(self: Any, wrapper_code: Any) -> types.SimpleNamespace:
        graphs.append(_read(wrapper_code.value, self))
        return types.SimpleNamespace(call=_refuse, __file__="", runner=None)

    with mock.patch.object(GraphLowering, "_compile_to_module_lines", record):
        yield graphs


def _refuse(*args: Any) -> None:
    raise NotImplementedError("there is no device to run this on")


def _read(code: str, lowered: Any) -> Graph:
    calls = Counter(re.findall(r"(?:extern_kernels|torch\.ops|aten)\.([\w.]+)\(", code))
    return Graph(
        backward=lowered.is_backward,
        launches=len(re.findall(r"triton_\w+\.run\(", code)),
        calls=dict(sorted(calls.items())),
        gigabytes=sum(node.get_read_write_buffers_sizes() for node in lowered.scheduler.nodes) / 1e9,
        code=code,
    )


# ---- machine code ---------------------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """One Triton kernel as machine code for sm_90."""

    name: str
    registers: int  # of a thread
    stack: int  # bytes of a thread: more than 0 where registers did not suffice


def cubins(code: str, folder: Path) -> list[Kernel]:
    """The Triton kernels in a module that inductor wrote, each compiled as inductor would before its first launch."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernels = []
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.DOTALL):
        module = PyCodeCache.load(source)
        tuner = getattr(module, name)
        assert isinstance(tuner, CachingAutotuner)
        for config in tuner.configs:
            result = tuner._precompile_config(config)
            kernels.append(_resources(name, result.kernel.asm["cubin"], folder))
    return kernels


def _resources(name: str, cubin: bytes, folder: Path) -> Kernel:
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Kernel(name, int(found[1]), int(found[2]))


# ---- the training step ----------------------------------------------------------------------------------------------


def first_step(job: TrainJob, resolved: Resolved) -> Step:
    """A packed step of sentences as long as those of WMT, as a real run would load it."""
    store: Store = load_script("benchmark/steps").make_corpus(TOKENS * 12, VOCAB_SIZE)
    batching = batching_of(job, resolved, lengths=store.lengths, mixture=((len(store), 1.0),))
    return next(load_steps(lambda epoch: store, batching, rank=0, world_size=1, position=Position(0, 0, 0), prefetch=0))


def without_values(item: Any, mode: FakeTensorMode) -> Any:
    """The same step, batch or layout, its tensors fake."""
    if isinstance(item, torch.Tensor):
        return mode.from_tensor(item)
    if isinstance(item, (list, tuple)):
        return type(item)(without_values(part, mode) for part in item)
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{part.name: without_values(getattr(item, part.name), mode) for part in fields(item)})
    return item


@dataclass
class Report:
    """What the base model's training step became."""

    resolved: dict[str, Any]  # the package's own choices for this device
    capacities: tuple[int, int]
    breaks: dict[str, int]
    compiled: int  # graphs that dynamo handed to the compiler
    graphs: list[Graph]
    kernels: list[Kernel]


def measure(layers: int, folder: Path, *, kernels: Kernels) -> Report:
    """The step of the base model with so many layers, uncompiled and compiled. Raises where it reads a value."""
    train = TrainConfig(tokens_per_step=TOKENS, kernels=kernels)
    job = replace(TrainJob(), model=ModelConfig(n_layers=layers), train=train)
    resolved = resolve_settings(job, 1)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    step = without_values(first_step(job, resolved), mode)

    with mode, lowering() as graphs:
        with DEVICE:
            model = Transformer(job.model, VOCAB_SIZE)
        objective = Objective(model, job.train.label_smoothing, loss_rows=resolved.loss_rows).train()
        update(objective, job, step, resolved)

        ((_, batch),) = step.micro_batches
        objective.compile()
        with suppress(NotImplementedError), autocast(DEVICE, resolved.precision):
            objective(batch.to(DEVICE))

    return Report(
        resolved=to_json(resolved),
        capacities=(len(batch.source), len(batch.target_in)),
        breaks=dict(counters["graph_break"]),
        compiled=counters["stats"]["unique_graphs"],
        graphs=graphs,
        kernels=[kernel for graph in graphs for kernel in cubins(graph.code, folder)],
    )


def update(objective: Objective, job: TrainJob, step: Step, resolved: Resolved) -> None:
    """One update as training makes it, not compiled."""
    optimizer, scaler = build_optimizer(objective.model, job.train), loss_scaler(DEVICE, resolved.precision)
    computation = Computation(objective, optimizer, scaler, 1.0, DEVICE, resolved.precision)
    train_step(computation, step, world_size=1, rate=1e-3, seed=job.train.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a training step becomes on a CUDA device that is not there.")
    parser.add_argument("--layers", type=int, default=6, help="of encoder and decoder (default: %(default)s)")
    parser.add_argument(
        "--kernels",
        choices=[kernels.name for kernels in Kernels],
        default="torch",
        help="train.kernels (default: %(default)s)",
    )
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.environ.pop("LD_PRELOAD", None) is None:
            environment = os.environ | {
                "LD_PRELOAD": str(compile_library(folder)),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
                "TRITON_CACHE_DIR": str(folder / "triton"),
            }
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)

        _answer_for_the_device()
        report = measure(args.layers, folder, kernels=Kernels[args.kernels])
        json.dump(asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
