"""The versions of what the package depends on: what is installed, what is declared, and what is known to be unsafe."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = PROJECT["optional-dependencies"]
OPTIONAL = [Requirement(text) for extra in EXTRAS.values() for text in extra]
LOCKED = [Requirement(text) for name, extra in EXTRAS.items() if name != "marian" for text in extra]  # by .ci/run
LOCKS = sorted((ROOT / ".ci").glob("requirements-*.txt"))

# The first version without the hole.
SOUND = {
    "datasets": "5.1",  # earlier ones read what files of this machine a README names; before 4.0, they run scripts
    "hydra-core": "1.3.8",  # CVE-2026-68508, GHSA-37p2-j732-x8pj
    "pyarrow": "23.0.1",  # CVE-2026-25087
    "sentencepiece": "0.2.3",  # CVE-2026-1260, and signals by hostile model files up to 0.2.1
    "torch": "2.10",  # CVE-2025-32434, CVE-2026-24747
}


def floor(requirement: Requirement) -> Version:
    (lowest,) = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
    return Version(lowest)


@pytest.mark.parametrize("requirement", [*REQUIREMENTS, *OPTIONAL], ids=lambda requirement: str(requirement))
def test_requirements_allow_the_installed_version(requirement: Requirement) -> None:
    if requirement.name == PROJECT["name"]:
        return
    if requirement.name == "triton" and torch.version.cuda is not None:
        pytest.skip("this build of torch has brought its own")
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        if requirement in REQUIREMENTS:
            raise
        pytest.skip("optional, and not installed")
    assert requirement.specifier.contains(installed, prereleases=True), f"{requirement.name} {installed}"


def test_requirements_have_floors_above_every_known_hole() -> None:
    floors = {requirement.name: floor(requirement) for requirement in REQUIREMENTS}
    assert {name: str(floors[name]) for name in SOUND if floors[name] < Version(SOUND[name])} == {}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_locks_name_each_requirement_once_with_a_version_that_is_declared_and_a_hash(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line and not line.startswith("#")]
    assert [line for line in lines if re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) is None] == []
    locked = {line.partition("==")[0]: line.partition("==")[2].partition(" ")[0] for line in lines}
    assert len(locked) == len(lines)
    names = {name.replace("_", "-"): text for name, text in locked.items()}
    for requirement in [*REQUIREMENTS, *LOCKED]:
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(names[requirement.name]), requirement


def test_locks_are_there() -> None:
    assert LOCKS
