"""Several processes, one training: which rank this is, and what the ranks tell each other.

torchrun starts the ranks. Every rank runs the same control flow; rank 0 alone writes.

    gradients          DistributedDataParallel, or one message where steps are replayed: NCCL between GPUs, gloo between
                       CPUs, and where ranks share a GPU
    control messages   World, Vote: gloo on the CPU, so that they never wait behind a kernel

Control messages carry signals, what rank 0 has read, and translations. They travel in one process group for each of the
timeouts (`Wait`). With one process no group is created.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from transformer.errors import InputError, PeerError, Rank0Error, Stopped, TransformerError
from transformer.liveness import Watch, ending_with_launcher, keeping_status, meeting_in_time
from transformer.machine import cores, local_world_size, resolve_threads

T = TypeVar("T")


class Wait(Enum):
    """What a rank waits for, which decides how long it waits before it takes the others for dead."""

    step = "step"  # a gradient, or the vote that ends a step
    task = "task"  # a share of a validation, or what rank 0 commits or reads
    work = "work"  # rank 0 prepares a corpus or scores translations, or a share of the test sets


SHARE_GPUS = "TRANSFORMER_SHARE_GPUS"  # the environment variable that lets ranks share a GPU

# A peer whose process has ended shows at once; these are for one that hangs.
TIMEOUTS = {Wait.step: timedelta(minutes=10), Wait.task: timedelta(minutes=30), Wait.work: timedelta(hours=24)}


class _NoAnswer(PeerError):
    """A message that failed: a rank has died, or hangs. `join_world` finds out which."""


@dataclass(frozen=True)
class World:
    """One rank: this process, and its messages to the others."""

    rank: int
    size: int
    groups: Mapping[Wait, Any]  # a gloo process group for each timeout; none when alone

    @property
    def is_rank0(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; every rank must ask."""
        return bool(self.sum(torch.tensor([float(flag)]), wait=Wait.step)[0] > 0)

    def sum(self, values: Tensor, *, wait: Wait = Wait.task) -> Tensor:
        """The sum over the ranks, on the CPU in float64."""
        total = values.detach().to("cpu", torch.float64, copy=True)
        if self.groups:
            with _peers():
                dist.all_reduce(total, group=self.groups[wait])
        return total

    def gather(self, value: Any, *, wait: Wait = Wait.task) -> list[Any]:
        """Every rank's value, by rank. Values are JSON: nothing is unpickled."""
        if not self.groups:
            return [value]
        group = self.groups[wait]
        data = _encode(value)

        # Tell the sizes first: all_gather wants tensors of one size.
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        with _peers():
            dist.all_reduce(sizes, group=group)
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(data)] = data
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=group)
        return [_decode(part[:size]) for part, size in zip(parts, sizes.tolist(), strict=True)]

    def from_rank0(self, action: Callable[[], T], *, wait: Wait = Wait.task) -> T:
        """What `action` returns (JSON) on rank 0, the only one that runs it; its error ends every rank.

        `wait` says how long the other ranks wait for it; rank 0 has the threads of their machine for `Wait.work`.
        """
        if not self.groups:
            return action()

        value = None
        failure = None
        if self.is_rank0:
            try:
                with self.threads_of({0}) if wait is Wait.work else nullcontext():
                    value = action()
            except TransformerError as error:
                failure = error

        answer = self._broadcast({"value": value, "failure": str(failure) if failure else None}, wait=wait)
        if failure is not None:
            raise failure
        if answer["failure"] is not None:
            raise Rank0Error(f"rank 0: {answer['failure']}")
        return answer["value"]

    def share(
        self, make: Callable[[], T], *, pack: Callable[[T], Any], unpack: Callable[[Any], T], wait: Wait = Wait.task
    ) -> T:
        """What `make` gives on rank 0, the only one that runs it; the others unpack what it was packed into (JSON).

        Errors and `wait` are those of `from_rank0`.
        """
        made: list[T] = []

        def make_and_pack() -> Any:
            made.append(make())
            return pack(made[0])

        answer = self.from_rank0(make_and_pack, wait=wait)
        return made[0] if made else unpack(answer)

    def _broadcast(self, value: Any, *, wait: Wait) -> Any:
        """Rank 0's value on every rank."""
        group = self.groups[wait]
        data = _encode(value)
        size = torch.tensor([len(data)])
        with _peers():
            dist.broadcast(size, src=0, group=group)
            if not self.is_rank0:
                data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=group)
        return _decode(data)

    @contextmanager
    def threads_of(self, busy: Collection[int]) -> Iterator[None]:
        """A context in which only the `busy` ranks compute, with the torch threads of all ranks of their machine.

        There are never more threads than cores, unless there were before. Raises StorageError if none can be started.
        """
        first = self.rank - _local_rank()
        neighbours = range(first, first + local_world_size())
        n_busy = sum(rank in busy for rank in neighbours)
        if self.rank not in busy or n_busy == len(neighbours):
            yield
            return

        own = torch.get_num_threads()
        torch.set_num_threads(resolve_threads(max(own, min(own * len(neighbours) // n_busy, cores()))))
        try:
            yield
        finally:
            torch.set_num_threads(own)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, with its gradients averaged over the ranks."""
        if not self.groups:
            return module
        with collective_errors_named():
            parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)

        # Buffers are constants, the tables of positions: DDP would send those of rank 0 at every step. Its argument for
        # this has another name from torch 2.13 on; the attribute has both.
        parallel.broadcast_buffers = False
        return parallel


class Vote:
    """Whether any rank's flag is set, asked at every step without waiting: the answer is that of one step before.

    An all-reduce over gloo takes 0.2 to 0.5 ms, and a step begins only when the answer is known. So each question
    travels while the next step is computed. A process alone answers at once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._earlier: tuple[Tensor, Any] | None = None  # of the last question: the sum of the flags, and its message

    def ask(self, flag: bool) -> bool:
        """The answer to the question before this one; every rank must ask as often. Raises PeerError."""
        if not self._world.groups:
            return flag

        earlier = self._earlier
        total = torch.tensor([float(flag)])
        with _peers():
            message = dist.all_reduce(total, group=self._world.groups[Wait.step], async_op=True)
            self._earlier = (total, message)
            if earlier is None:
                return False
            earlier_total, earlier_message = earlier
            earlier_message.wait()
        return bool(earlier_total[0] > 0)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def unsynchronised(module: nn.Module) -> AbstractContextManager[None]:
    """A context for all micro-batches but the last: their backward passes do not share gradients with other ranks."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def is_rank0() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return world_size() == 1 or os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """How many processes torchrun started; 1 without it. Raises InputError where another launcher says no number."""
    size = os.environ.get("WORLD_SIZE") or "1"
    if not size.isdecimal():
        raise InputError(f"WORLD_SIZE={size}: must be the number of processes, a whole number")
    return int(size)


def local_device(device: torch.device) -> torch.device:
    """The GPU of this rank, where GPUs are used."""
    if device.type != "cuda":
        return device
    number = _local_rank()
    return torch.device("cuda", number % torch.cuda.device_count() if _shares_gpus() else number)


def _local_rank() -> int:
    """The number of this rank among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_local_device(device: torch.device) -> None:
    """Compute on the GPU of this rank, where GPUs are used.

    Raises InputError where there are more ranks than GPUs, and they are not allowed to share.
    """
    if device.type == "cuda":
        ranks = local_world_size()
        gpus = torch.cuda.device_count()
        if ranks > gpus and not _shares_gpus():
            raise InputError(f"{ranks} ranks on a machine with {gpus} GPUs: torchrun --nproc-per-node={gpus}")
        torch.cuda.set_device(local_device(device))


def _shares_gpus() -> bool:
    """Whether several ranks may compute on one GPU, as to try them where there is one."""
    return os.environ.get(SHARE_GPUS) == "1"


@contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """The ranks that torchrun started, or this process alone.

    Raises PeerError where they do not find each other, InputError where there are more of them than GPUs. A PeerError
    that leaves the block names the rank that failed or does not answer, where that can be known.
    """
    with ending_with_launcher():
        if world_size() == 1:
            yield World(0, 1, {})
            return

        choose_local_device(device)

        # The ranks find each other, and make the groups that messages travel in.
        with meeting_in_time(), _meeting():
            long, step = TIMEOUTS[Wait.work], TIMEOUTS[Wait.step]  # the meeting has an end of its own
            store, rank, size = next(dist.rendezvous("env://", timeout=long))  # type: ignore[attr-defined]
            store = dist.PrefixStore(_agree_on_name(store, rank, size), store)  # type: ignore[attr-defined]
            backend = "nccl" if device.type == "cuda" and not _shares_gpus() else "gloo"  # NCCL wants a GPU for each
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=step)
            groups = {wait: dist.new_group(backend="gloo", timeout=timeout) for wait, timeout in TIMEOUTS.items()}

        # A store that waits for a key lets nobody else ask: the watch has a connection of its own.
        with Watch(store.clone(), rank, size) as watch:  # type: ignore[attr-defined]
            try:
                yield World(rank, size, groups)
            except _NoAnswer as error:
                with keeping_status():
                    message = watch.describe_loss(str(error))
                raise PeerError(message) from error
            except Stopped:  # on every rank
                raise
            except BaseException as error:
                with keeping_status():
                    watch.report_failure(error)
                raise
            finally:
                dist.destroy_process_group()


def _agree_on_name(store: Any, rank: int, size: int) -> str:
    """A name that these processes alone share, for a store may still hold the keys of others.

    torchrun keeps its store over restarts, and a process may train more than once. Each rank leaves a token. Rank 0
    proposes all of them as the name, until every rank has agreed to the same: `meeting_in_time` sees to an end.
    """
    token = secrets.token_hex(4)
    store.set(f"token/{rank}", token)

    while True:
        if rank == 0 and store.check([f"token/{other}" for other in range(size)]):
            name = "-".join(store.get(f"token/{other}").decode() for other in range(size))
            store.set("name", name)
            if store.check([f"agreed/{name}/{other}" for other in range(1, size)]):
                store.set(f"begun/{name}", "")
                return name
        elif rank != 0 and store.check(["name"]):
            name = store.get("name").decode()
            if name.split("-")[rank : rank + 1] == [token]:
                store.set(f"agreed/{name}/{rank}", "")
                if store.check([f"begun/{name}"]):
                    return name
        time.sleep(0.02)


@contextmanager
def _peers() -> Iterator[None]:
    """Around a control message: where it fails, a peer has died or hangs."""
    try:
        yield
    except RuntimeError as error:
        raise _NoAnswer(_summary(error)) from error


@contextmanager
def _meeting() -> Iterator[None]:
    """Around the messages by which the ranks meet. Where one fails, what there is of a process group is destroyed."""
    try:
        yield
    except ValueError as error:
        remedy = "each process needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        raise InputError(
            f"the ranks were not started by torchrun, and a setting is missing ({error}): {remedy}"
        ) from error
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        remedy = "check MASTER_ADDR, MASTER_PORT and the network"
        raise PeerError(f"the ranks cannot reach each other ({_summary(error)}): {remedy}") from error


@contextmanager
def collective_errors_named() -> Iterator[None]:
    """Around a step, in which ranks share gradients: raises PeerError where gloo or NCCL fails; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise _NoAnswer(_summary(error)) from error
        raise


def _summary(error: RuntimeError) -> str:
    """What gloo or NCCL says, without its source lines and gloo's wish of good luck."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(" GLHF!")[0]
