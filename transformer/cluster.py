"""Ranks that `srun` starts, without torchrun: Slurm's variables in the place of torchrun's.

    SLURM_PROCID, SLURM_STEP_NUM_TASKS    RANK, WORLD_SIZE
    SLURM_LOCALID, tasks of this node     LOCAL_RANK, LOCAL_WORLD_SIZE
    first node of the step                MASTER_ADDR
    job and step                          MASTER_PORT

Nothing here imports torch.
"""

import os
import re

from transformer.errors import InputError

FIRST_PORT = 20_000
PORTS = 20_000


def read_slurm() -> None:
    """Set torchrun's variables in a step of several tasks that srun has started; those that are set stay.

    A batch script's own variables, which describe its job, say nothing: `transformer train` in a batch script is one
    process. Raises InputError for a variable that is not as Slurm writes it.
    """
    tasks = _number("SLURM_STEP_NUM_TASKS", default=1)
    if tasks == 1 or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return

    port = FIRST_PORT + (_number("SLURM_JOB_ID") + 101 * _number("SLURM_STEP_ID", default=0)) % PORTS
    found = {
        "RANK": _number("SLURM_PROCID"),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": _number("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": _tasks_of_node(_text("SLURM_STEP_TASKS_PER_NODE"), _number("SLURM_NODEID", default=0)),
        "MASTER_ADDR": _first_node(_text("SLURM_STEP_NODELIST")),
        "MASTER_PORT": port,
    }
    for name, value in found.items():
        os.environ.setdefault(name, str(value))


def _text(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise InputError(f"srun started this process, but {name} is not set: set RANK and the like, or use torchrun")
    return value


def _number(name: str, *, default: int | None = None) -> int:
    if default is not None and name not in os.environ:
        return default
    value = _text(name)
    if not value.isdecimal():
        raise InputError(f"{name}={value!r} is not a number: set RANK and the like, or use torchrun")
    return int(value)


def _tasks_of_node(counts: str, node: int) -> int:
    """The tasks of one node of those that `8(x2),4` describes: two nodes of 8 tasks, and one of 4."""
    per_node: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE={counts!r} is not a list of numbers: use torchrun")
        per_node += [int(match[1])] * int(match[2] or 1)
    if node >= len(per_node):
        raise InputError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={counts!r}: use torchrun")
    return per_node[node]


def _first_node(names: str) -> str:
    """The first of the nodes that `gpu[03-07,12],cpu1` names: gpu03."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", names).partition(",")[0]
