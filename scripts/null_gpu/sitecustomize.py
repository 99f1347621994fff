"""What a null GPU cannot give, replaced here and nowhere else; and a report of what was done on it.

Python imports this file by itself in every process that run.sh starts. Kernels have computed nothing, so whatever the
host reads from the device is left over from something else. What is replaced, as soon as its module is imported:

    torch                            a floating-point number that the host reads is 1, a truth is true; integers are
                                     what memory holds, and one of them is 1 at least. A mask selects everything, and
                                     `Tensor.nonzero` finds nothing
    transformer.decoding.search      a search takes all its steps, and then has translations that are made up;
    transformer.decoding.replay      replayed, too
    transformer.numerics             whatever the device computes is near enough to the plain way: what is compared is
                                     computed all the same, in each of the ways that are tried
    transformer.training.optimizer   moments are finite and not below 0
    transformer.tools.inspection     attention is uniform
    measured                         a kernel that a benchmark times is near enough to float64

The package itself knows nothing of this. Tensors that are copied to the host as such, as those of a checkpoint, are
what memory holds: weights that nothing has changed. NULL_GPU_DEVIATES=1 leaves the proofs as they are: they fail.

Where NULL_GPU_REPORT names a file, each process writes there as JSON, at its end, what runtime.cpp has counted, up to
each update of the weights and in all; the allocator's peak; and what dynamo says of its graphs. Ranks after the first
add their number to the name.
"""

import atexit
import ctypes
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls a function with its module as soon as that has been imported, once."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        function = self._functions.pop(name, None)
        spec = None if function is None else importlib.util.find_spec(name)  # by all other finders
        if function is None or spec is None or spec.loader is None:
            return None

        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


# ---- numbers --------------------------------------------------------------------------------------------------------


def replace_readings(torch: Any) -> None:
    """What the host reads from the device is 1 and true. It still waits for the device, and the copy is made."""

    def is_made_up(x: Any) -> bool:
        return x.is_floating_point() or x.dtype is torch.bool

    plain_tolist = torch.Tensor.tolist

    def tolist(x: Any) -> Any:
        return plain_tolist(torch.ones_like(x.cpu()) if x.is_cuda and is_made_up(x) else x)

    def item(x: Any) -> Any:
        on_host = x.cpu()
        return (torch.ones_like(on_host) if is_made_up(x) else on_host.clamp(min=1)).item()

    def all_indices(x: Any) -> Any:
        torch.cuda.current_stream(x.device).synchronize()  # as the real one does, to know how many there are
        return torch.ones(x.shape).nonzero().to(x.device)

    plain_nonzero = torch.Tensor.nonzero

    def no_indices(x: Any) -> Any:
        return plain_nonzero(x)[:0] if x.is_cuda else plain_nonzero(x)

    torch.Tensor.tolist = tolist
    torch.Tensor.nonzero = no_indices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a replaced kernel
        replaced.append(torch.library.Library("aten", "IMPL"))
        replaced[0].impl("_local_scalar_dense", item, "CUDA")
        replaced[0].impl("nonzero", all_indices, "CUDA")

    report_at_exit(torch)


replaced: list[Any] = []  # torch puts its own kernels back when this is gone


def make_up_translations(search: Any) -> None:
    """No sentence is ever done: at the end of its steps a search has no results where it looks for them."""
    plain_search = search.beam_search

    def beam_search(step: Any, state: Any, *, max_lengths: Any, n_best: int, **others: Any) -> list[list[Any]]:
        try:
            return plain_search(step, state, max_lengths=max_lengths, n_best=n_best, **others)
        except KeyError:
            if max_lengths.is_cpu:
                raise
            made_up = [search.Hypothesis([5 + rank], -1.0 - rank, finished=True) for rank in range(n_best)]
            return [list(made_up) for _ in range(len(max_lengths))]

    search.beam_search = beam_search


def make_up_replayed_translations(replay: Any) -> None:
    """Replayed steps have no results either: what their places hold is no translation."""

    def results_of(beams: Any) -> Any:
        raise KeyError

    replay.results_of = results_of


def allow_any_deviation(numerics: Any) -> None:
    """A step and a search are compared with plain ones: losses, gradients, log-probabilities, attention, masks."""
    any_number = numerics.Tolerance(*[ANY] * len(numerics.Tolerance._fields))
    numerics.TOLERANCES = dict.fromkeys(numerics.TOLERANCES, any_number)


ANY = 1e30  # near enough to anything


def make_moments_sane(optimizer: Any) -> None:
    """No kernel has set them to zero."""
    plain_moments = optimizer.moments_by_name

    def moments_by_name(model: Any, of: Any) -> dict[str, Any]:
        moments = plain_moments(model, of)
        return {name: x.cpu().nan_to_num().clamp(0, 1) if x.is_cuda else x for name, x in moments.items()}

    optimizer.moments_by_name = moments_by_name


def make_attention_uniform(inspection: Any) -> None:
    """Weights that add up to 1, which the computed ones do not."""
    plain_maps = inspection.attention_maps

    def attention_maps(*args: Any, device: Any, **others: Any) -> Any:
        maps = plain_maps(*args, device=device, **others)
        if device.type == "cuda":
            maps = replace(maps, **{f.name: uniform(getattr(maps, f.name)) for f in fields(maps)})
        return maps

    def uniform(weights: Any) -> Any:
        return weights.new_full(weights.shape, 1 / weights.shape[-1])

    inspection.attention_maps = attention_maps


# ---- the report -----------------------------------------------------------------------------------------------------


def report_at_exit(torch: Any) -> None:
    """Count at each update, and write the report at the end."""
    path = os.environ.get("NULL_GPU_REPORT")
    if not path:
        return

    updates: list[dict[str, Any]] = []

    def count(*_: Any) -> None:
        totals = {kind: sum(names.values()) for kind, names in counted().items()}
        updates.append(totals | {"peak": torch.cuda.max_memory_allocated()})

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(count)

    def write() -> None:
        if not updates:  # a process that only compiles, or only starts others
            return
        dynamo = sys.modules.get("torch._dynamo.utils")
        report = {
            "updates": updates,
            "counts": counted(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "dynamo": {} if dynamo is None else {name: dict(values) for name, values in dynamo.counters.items()},
        }
        rank = os.environ.get("RANK", "0")
        Path(path + ("" if rank == "0" else f".{rank}")).write_text(json.dumps(report), encoding="utf-8")

    atexit.register(write)


def counted() -> dict[str, dict[str, int]]:
    """How often each name of each kind was called since the process began."""
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.null_gpu_counts.restype = ctypes.c_char_p
    counts: dict[str, dict[str, int]] = {}
    for line in runtime.null_gpu_counts().decode().splitlines():
        kind, name, count = line.split("\t")
        counts.setdefault(kind, {})[name] = int(count)
    return counts


def allow_any_kernel(measured: Any) -> None:
    """Benchmarks compare a kernel before they time it."""
    measured.NEAR = ANY


REPLACED = {
    "torch": replace_readings,
    "transformer.decoding.search": make_up_translations,
    "transformer.decoding.replay": make_up_replayed_translations,
    "transformer.numerics": allow_any_deviation,
    "transformer.training.optimizer": make_moments_sane,
    "transformer.tools.inspection": make_attention_uniform,
    "measured": allow_any_kernel,
}
if os.environ.get("NULL_GPU_DEVIATES") == "1":
    del REPLACED["transformer.numerics"]
sys.meta_path.insert(0, AfterImport(REPLACED))
