"""Test sets by sacreBLEU's names, from a cache that the test fills by hand: nothing is fetched."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import sacrebleu.dataset

from support.corpora import finish, run, start, tiny_job, write_corpus
from transformer.config.jobs import EvaluateJob
from transformer.config.settings import PairConfig
from transformer.data.source import resolve_source
from transformer.data.testset import find_test_set
from transformer.errors import InputError
from transformer.evaluation.sets import evaluate

SOURCES = "a dog\nthe small house\nthree\n"
REFERENCES = "ein Hund\ndas kleine Haus\ndrei\n"


def fill(cache: Path, name: str, pair: str, **texts: str) -> Path:
    """The files that sacreBLEU leaves when it has fetched a set."""
    folder = cache / name
    folder.mkdir(parents=True, exist_ok=True)
    for field in ("src", "ref", "docid", "genre", "origlang"):
        path = folder / f"{name.replace('/', '_')}.{pair}.{field}"
        path.write_text(texts.get(field, "x\nx\nx\n"), encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in the place of sacreBLEU's, and no network."""

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("Network is unreachable")

    cache = tmp_path / "cache"
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr("transformer.data.testset.SACREBLEU_DIR", str(cache))
    for name in ("wmt14/full", "wmt20/tworefs", "wmt13"):
        test_set = sacrebleu.dataset.DATASETS[name]
        monkeypatch.setattr(test_set, "_outdir", str(cache / name))
        monkeypatch.setattr(test_set, "_rawdir", str(cache / name / "raw"))
    return cache


@pytest.mark.parametrize("languages", [("en", "de"), ("eng", "deu"), ("en-GB", "de_DE")])
def test_find_test_set_takes_the_pair_of_the_run(cache: Path, languages: tuple[str, str]) -> None:
    folder = fill(cache, "wmt14/full", "en-de", src=SOURCES, ref=REFERENCES)
    found = find_test_set("sacrebleu:wmt14/full", "data.dev", languages=languages)
    assert found == (folder / "wmt14_full.en-de.src", folder / "wmt14_full.en-de.ref")


def test_resolve_source_reads_a_test_set(cache: Path, tmp_path: Path) -> None:
    fill(cache, "wmt14/full", "en-de", src=SOURCES, ref=REFERENCES)
    pair = PairConfig(dataset="sacrebleu:wmt14/full")
    source = resolve_source(pair, "test.wmt14", languages=("en", "de"), store_dir=tmp_path / "store")
    assert source.load("test.wmt14") == [
        ("a dog", "ein Hund"),
        ("the small house", "das kleine Haus"),
        ("three", "drei"),
    ]
    assert not (tmp_path / "store").exists()


def empty(cache: Path) -> None:
    """Nothing is there."""


def two_references(cache: Path) -> None:
    folder = fill(cache, "wmt20/tworefs", "en-de")
    for number in "01":
        (folder / f"wmt20_tworefs.en-de.ref-{number}").write_text("x\n", encoding="utf-8")


REFUSED = {
    "another name": ("sacrebleu:wmt14/ful", ("en", "de"), empty, r"^test\.a\.dataset=\S+: .*mean 'wmt14/full'\?"),
    "no name": ("sacrebleu:", ("en", "de"), empty, "has no such test set; `sacrebleu --list` names them"),
    "another pair": ("sacrebleu:wmt13", ("de", "fi"), empty, r"it has no de-fi, only .*en-de.*: choose a set"),
    "no code": ("sacrebleu:wmt13", ("german", "en"), empty, r"^data\.src_lang=german: not a code"),
    "two references": (
        "sacrebleu:wmt20/tworefs",
        ("en", "de"),
        two_references,
        r"2 references, but a run's test set can have only one; .* 'references=\[\S+ref-0,\S+ref-1\]'",
    ),
    "no network": (
        "sacrebleu:wmt14/full",
        ("en", "de"),
        empty,
        r"cannot be fetched into \S+/cache/wmt14/full \(.*unreachable.*\): run this where there is a network, then",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_find_test_set_refuses_in_one_line(cache: Path, case: str) -> None:
    dataset, languages, prepare_cache, message = REFUSED[case]
    prepare_cache(cache)
    with pytest.raises(InputError, match=message) as refused:
        find_test_set(dataset, "test.a", languages=languages)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("cache")
def test_find_test_set_names_keys_that_the_command_has() -> None:
    """`evaluate` has no languages to set: they are the run's."""
    for key, remedy in {
        "data.test.a": "set data.src_lang and data.tgt_lang",
        "test.a": "in the run's languages",
    }.items():
        with pytest.raises(InputError, match=f"^{key}.dataset=.*{remedy}$"):
            find_test_set("sacrebleu:wmt13", key, languages=("de", "fi"))


def test_find_test_set_reports_an_archive_that_is_not_the_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sacreBLEU ends the process then."""

    def ends(*_: Any) -> Any:
        raise SystemExit(1)

    monkeypatch.setattr("transformer.data.testset.get_source_file", ends)
    with pytest.raises(InputError, match="cannot be fetched into"):
        find_test_set("sacrebleu:wmt14/full", "test.a", languages=("en", "de"))


@pytest.mark.ci
def test_train_and_evaluate_take_test_sets_by_name(cache: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    fill(cache, "wmt14/full", "en-de", src=SOURCES, ref=REFERENCES)
    corpus.test = {"news": PairConfig(dataset="sacrebleu:wmt14/full")}
    run_dir = run(tiny_job(tmp_path / "a", corpus, max_steps=2, save_every=2, validate_every=2))
    assert (run_dir / "hypotheses" / "news.ref").read_text(encoding="utf-8") == REFERENCES

    fill(cache, "wmt13", "en-de", src=SOURCES, ref=REFERENCES)
    job = EvaluateJob(run_dir=str(run_dir), threads=1, test={"old": PairConfig(dataset="sacrebleu:wmt13")})
    assert list(evaluate(job).test_sets) == ["old"]

    # The command, in a process whose cache the environment names.
    again = start(
        *("evaluate", f"run_dir={run_dir}", "threads=1", "test.wmt14.dataset=sacrebleu:wmt14/full", "format=json"),
        cwd=tmp_path,
        driver=f"import os; os.environ['SACREBLEU'] = {str(cache)!r}",
    )
    out, _ = finish(again, 0)
    assert '"wmt14": {' in out
    assert "SACREBLEU" not in os.environ
