"""The list of planted defects is kept up with the code: each can be planted, and names a test that is there."""

import ast
from pathlib import Path

import pytest

from support.paths import TESTS
from support.scripts import load_script

mutants = load_script("mutants")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_can_be_planted(mutant: object, tmp_path: Path) -> None:
    assert isinstance(mutant, mutants.Mutant)
    target = tmp_path / "transformer" / mutant.file
    target.parent.mkdir(parents=True)
    text = (mutants.ROOT / "transformer" / mutant.file).read_text(encoding="utf-8")
    target.write_text(text, encoding="utf-8")
    mutants.plant(mutant, tmp_path)
    ast.parse(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_names_a_test(mutant: object) -> None:
    assert isinstance(mutant, mutants.Mutant)
    file, _, test = mutant.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (TESTS / file).read_text(encoding="utf-8")


def test_plant_names_a_mutant_whose_text_is_gone(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "files.py").write_text("pass\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mutant 'gone': its text is 0 times in files\.py"):
        mutants.plant(mutants.Mutant("gone", "files.py", "os.fsync(file)", "", "unit/test_x.py::test_y"), tmp_path)


def test_mutants_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)
