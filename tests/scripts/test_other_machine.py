"""The machine that TRANSFORMER_TEST_MACHINE=other makes of this one, and the order of its tests."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.machine import EXTRAS, MACHINE, SEED, shuffle
from support.paths import ROOT
from support.scripts import load_script

# A process that becomes the other machine says what it and one that it starts find.
ASK = """
import importlib.util, json, time
import torch.cpu
from transformer.compute import multiplies_int8, resolve_precision
from transformer.config.settings import Precision
from transformer.machine import cores
extras = ("MeCab", "ctranslate2", "matplotlib", "transformers", "hydra_plugins")
print(json.dumps({
    "extras": [name for name in extras if importlib.util.find_spec(name)],
    "precision": resolve_precision(Precision.auto, torch.device("cpu")).name,
    "int8": multiplies_int8(),
    "cores": cores(),
    "zone": time.tzname,
}))
"""
BECOME = f"""
import subprocess, sys
from support.machine import become_the_machine_that_is_asked_for
become_the_machine_that_is_asked_for()
ask = {ASK!r}
exec(ask)
print(subprocess.check_output([sys.executable, "-c", ask], text=True))
"""


@pytest.mark.ci
def test_other_machine_has_no_extras_and_another_processor_in_all_its_processes() -> None:
    path = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    environment = os.environ | {MACHINE: "other", "PYTHONPATH": path}
    said = subprocess.check_output([sys.executable, "-c", BECOME], env=environment, text=True)
    own, of_child = map(json.loads, said.split("\n")[:2])
    assert own == of_child
    assert own == {"extras": [], "precision": "fp32", "int8": False, "cores": 1, "zone": ["NST", "NDT"]}


def test_other_machine_hides_what_the_core_is_tested_without() -> None:
    plugins = {"hydra_optuna_sweeper", "hydra_submitit_launcher"}  # below hydra_plugins, which is hidden
    assert load_script("core_alone").optional_packages() - plugins <= {*EXTRAS}


def order(seed: str | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Of four tests in each of ten files."""
    monkeypatch.delenv(SEED, raising=False)
    if seed is not None:
        monkeypatch.setenv(SEED, seed)
    items: list[Any] = [SimpleNamespace(path=path, number=number) for path in "abcdefghij" for number in range(4)]
    shuffle(cast(list[pytest.Item], items))
    return [(item.path, item.number) for item in items]


def test_shuffle_keeps_the_tests_of_a_file_together(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, first, second = (order(seed, monkeypatch) for seed in (None, "1", "2"))
    assert plain == sorted(plain)
    assert first == order("1", monkeypatch), "the seed says all"
    assert first != second
    for found in (first, second):
        assert sorted(found) == plain
        assert len({path for path, _ in found[::4]}) == 10
        assert [path for path, _ in found] != [path for path, _ in plain]
        assert [number for _, number in found] != [number for _, number in plain]
