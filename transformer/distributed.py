"""Several processes, one training: which rank this is, and what the ranks tell each other.

torchrun starts the ranks. Gradients travel over NCCL between GPUs and gloo between CPUs; control messages (a signal,
what rank 0 found, translations) over a gloo group of their own, so that they never wait behind a kernel. Every rank
runs the same control flow; rank 0 alone writes. Alone, all of this is nothing: no group, no message.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from transformer.errors import InputError, PeerError, TransformerError

T = TypeVar("T")

PATIENCE = timedelta(minutes=10)  # for a gradient: a rank that is later than this has hung
LONG = timedelta(hours=24)  # for a control message: rank 0 may be preparing a large corpus; a dead peer shows at once


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    control: Any  # a gloo process group; None when alone

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.sum(torch.tensor([float(flag)]))[0] > 0)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, on the CPU in float64."""
        total = values.detach().to("cpu", torch.float64, copy=True)
        if self.control is not None:
            with _peers():
                dist.all_reduce(total, group=self.control)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Values are JSON: nothing is unpickled."""
        if self.control is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        with _peers():
            dist.all_reduce(sizes, group=self.control)
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(data)] = data
            found = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(found, padded, group=self.control)
        return [json.loads(bytes(part[:size].tolist())) for part, size in zip(found, sizes.tolist(), strict=True)]

    def from_first(self, action: Callable[[], T]) -> T:
        """What `action` returns (JSON) on rank 0, the only one that runs it; its error ends every rank."""
        if self.control is None:
            return action()
        value, failure = None, None
        if self.is_first:
            try:
                value = action()
            except TransformerError as error:
                failure = error
        found = self.gather({"value": value, "failure": str(failure) if failure else None})[0]
        if failure is not None:
            raise failure
        if found["failure"] is not None:
            raise PeerError(f"rank 0: {found['failure']}")
        return found["value"]

    def first_then_all(self, action: Callable[[], T]) -> T:
        """`action` on rank 0, then on the others, who find what it has made."""
        done: list[T] = []
        self.from_first(lambda: done.append(action()))
        return done[0] if done else action()

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, with gradients averaged over the ranks."""
        return module if self.control is None else DistributedDataParallel(module, gradient_as_bucket_view=True)


def unsynchronised(module: nn.Module) -> AbstractContextManager[None]:
    """No all-reduce behind this forward and backward: a later micro-batch of the step brings it."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def local_device(device: torch.device) -> torch.device:
    """The GPU of this rank, where GPUs are used."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device.type == "cuda" else device


@contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """The ranks that torchrun started, or this process alone.

    Raises PeerError where they do not find each other, InputError where there are more of them than GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(0, 1, None)
        return
    if device.type == "cuda":
        ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if ranks > gpus:
            raise InputError(f"{ranks} ranks on a machine with {gpus} GPUs: torchrun --nproc-per-node={gpus}")
        torch.cuda.set_device(local_device(device))
    with _peers():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        control = dist.new_group(backend="gloo", timeout=LONG)
    try:
        yield World(dist.get_rank(), size, control)
    finally:
        dist.destroy_process_group()


@contextmanager
def _peers() -> Iterator[None]:
    """A message that fails means that a peer has died or hangs."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"another rank does not answer: {str(error).partition(chr(10))[0]}") from error
