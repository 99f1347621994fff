"""history.json: each start of a training, and marks: what its numbers came to at some of its steps.

A training that is repeated under the conditions of its starts comes to the same marks, bit for bit: see `tools.verify`.
So does one that is killed and goes on: it writes the marks behind its checkpoint again. Rank 0 writes.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

import torch
from torch import Tensor

from transformer.data.loader import Step
from transformer.errors import CheckpointError
from transformer.machine import describe_processor, installed_packages
from transformer.model.transformer import parameters_by_name
from transformer.records import History, Mark, Start
from transformer.training.start import Run
from transformer.training.step import StepResult

log = logging.getLogger(__name__)

MARKED = frozenset({10, 50})  # steps that are marked in every training; the others are those of its commits
MOST_MARKS = 10_000  # of a training: the file is written whole each time


def begin_history(run: Run) -> None:
    """Drop what history.json has of later steps than this training begins with, and note this start."""
    step = run.progress.step
    history = _read(run).before(step + 1)
    start = Start(
        step=step,
        processor=_processor(run.device),
        ranks=run.world.size,
        resolved=run.resolved,
        # PyPI's wheel of torch does not say in its metadata for which CUDA it was built.
        packages=installed_packages() | {"torch": torch.__version__},
    )
    is_as_before = bool(history.starts) and replace(history.starts[-1], step=step) == start
    starts = history.starts if is_as_before else [*history.starts, start]
    run.directory.write_history(replace(history, starts=starts))


def add_mark(run: Run, step: Step, result: StepResult) -> None:
    """Mark the step that was just taken; every rank must call it. Waits for the device."""
    loss = float(run.world.sum(result.loss_sum)) / step.target_tokens

    def write() -> None:
        mark = Mark(
            step=run.progress.step,
            loss=loss,
            gradient_norm=float(result.grad_norm),
            weights_sha256=digest_tensors(parameters_by_name(run.state.model)),
        )
        history = _read(run)
        earlier = [other for other in history.marks if other.step < mark.step]
        run.directory.write_history(replace(history, marks=[*earlier, mark][:MOST_MARKS]))

    run.world.from_rank0(write)


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of all weights: of each, by sorted name, its name, type and shape as a line, then its bytes."""
    digest = sha256()
    for name, weight in sorted(tensors.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(_bytes_of(weight))
    return digest.hexdigest()


def _bytes_of(weight: Tensor) -> memoryview:
    """The bytes of a tensor as they are; a copy only where it is on a GPU."""
    return weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _read(run: Run) -> History:
    """Read history.json; empty if it is damaged, and the training goes on without the earlier entries."""
    try:
        return run.directory.read_history()
    except CheckpointError as error:
        log.warning("%s: it is begun anew", error)
        return History()


def _processor(device: torch.device) -> str:
    """The GPU; or the processor, and which of its instructions torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{describe_processor().partition(',')[0]}, {torch.backends.cpu.get_cpu_capability()}"
