"""The demo corpus: its files as they are known, and what data/README.md says of them."""

import hashlib
import re

import pytest

from support.paths import ROOT

DATA = ROOT / "data" / "demo"
SPLITS = {"train": 20_000, "dev": 500, "test": 500, "test_compositional": 500}
ALIGNED = ("dev", "test", "test_compositional")


def read(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[str]]:
    return {f"{split}.{language}": read(f"{split}.{language}") for split in SPLITS for language in ("en", "de")}


def digest(names: list[str]) -> str:
    """Of files laid end to end."""
    whole = hashlib.sha256()
    for name in names:
        whole.update((DATA / name).read_bytes())
    return whole.hexdigest()


def test_demo_files_are_the_known_ones() -> None:
    text = [f"{split}.{language}" for split in SPLITS for language in ("en", "de")]
    alignments = [f"{name}.align" for name in ALIGNED]
    assert sorted(path.name for path in DATA.iterdir()) == sorted(text + alignments)
    assert digest(text) == "fefcf1fb3ceb7e7fad413262d6bd2153aae31946aec8886b5f8b7594d13079b5"
    assert digest(alignments) == "57785a947dd5ffbdb2d11360693b08aab9c29e8812aab063a2ee248f16f2d9b5"


def test_demo_lines_have_their_counts_and_form(corpus: dict[str, list[str]]) -> None:
    for name, lines in corpus.items():
        assert len(lines) == SPLITS[name.split(".")[0]]
        for line in lines:
            assert re.fullmatch(r"[A-ZÄÖÜ0-9].*[\w°][.?]", line), line
            assert not re.search(r"  | [,.?]|,,|,[^ \d]", line), line


def test_demo_sentences_occur_once(corpus: dict[str, list[str]]) -> None:
    for language in ("en", "de"):
        lines = [line for split in SPLITS for line in corpus[f"{split}.{language}"]]
        assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("name", ALIGNED)
def test_demo_alignments_link_nearly_all_words_and_none_that_is_not_there(name: str) -> None:
    """What has no counterpart: Sie in a request, a conjunction that one of the languages leaves out, an article."""
    linked, words = 0, 0
    for en, de, links in zip(read(f"{name}.en"), read(f"{name}.de"), read(f"{name}.align"), strict=True):
        found = [tuple(map(int, re.split("[-p]", link))) for link in links.split()]
        assert all(source < len(en.split()) and target < len(de.split()) for source, target in found), en
        linked += len({target for _, target in found})
        words += len(de.split())
    assert 0.99 * words < linked < words
