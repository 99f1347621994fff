"""Slurm's variables in the place of torchrun's."""

import os

import pytest

from transformer.cluster import read_slurm
from transformer.errors import InputError

# Of the second of two tasks on the second of three nodes, as srun sets them.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> dict[str, str]:
    """What a process with these variables is then told about its rank."""
    for name in [*RANKS, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    read_slurm()
    return {name: os.environ[name] for name in RANKS if name in os.environ}


def test_read_slurm_says_which_rank_srun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, STEP) == {
        "RANK": "5",
        "WORLD_SIZE": "10",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "24913",
    }


@pytest.mark.parametrize(
    ("node", "counts", "tasks"), [("0", "2", "2"), ("2", "4(x2),2", "2"), ("1", "1(x2)", "1"), ("3", "8(x3),1", "1")]
)
def test_read_slurm_counts_the_ranks_of_this_node(
    node: str, counts: str, tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read(monkeypatch, STEP | {"SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": counts})
    assert found["LOCAL_WORLD_SIZE"] == tasks


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu1", "gpu1"),
        ("a,b", "a"),
        ("node[7,9-12],other1", "node7"),
        ("rack[1-2]-node[03,05]", "rack1-node03"),
        ("n[010-020].cluster.org", "n010.cluster.org"),
    ],
)
def test_read_slurm_meets_on_the_first_node(names: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, STEP | {"SLURM_STEP_NODELIST": names})["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script's own
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_read_slurm_leaves_one_process_alone(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, variables) == {}


def test_read_slurm_leaves_what_a_launcher_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2"}
    assert read(monkeypatch, STEP | given) == given
    assert read(monkeypatch, STEP | {"MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a number"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x"}, "SLURM_STEP_TASKS_PER_NODE='4"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
    ],
)
def test_read_slurm_names_a_variable_that_cannot_be(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as raised:
        read(monkeypatch, STEP | variables)
    assert said in str(raised.value)
