"""Test sets by name, from a hub that is played as others read it: what is copied, once, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from support.corpora import Shell, read, write_corpus
from support.hub import COMMIT, TOKEN, DatasetHandler, Hub, client_of, serving
from transformer.config.settings import PairConfig
from transformer.data.source import Source, resolve_source
from transformer.errors import InputError
from transformer.integrations import testsets

EN_DE = ("en", "de")
NUMBERS = range(7)
WORDS = {"eng_Latn": "one", "deu_Latn": "eins", "cmn_Hans": "一", "cmn_Hant": "壹"}


class Handler(DatasetHandler):
    """A folder for each owner."""

    owners = ("openlanguagedata", "mteb", "google", "facebook")
    gated = ("openlanguagedata",)


def card(subsets: dict[str, dict[str, str]]) -> str:
    lines = ["---", "configs:"]
    for subset, files in subsets.items():
        lines += [f"- config_name: {subset}", "  data_files:"]
        lines += [line for split, path in files.items() for line in (f"  - split: {split}", f"    path: {path}")]
    return "\n".join([*lines, "---", ""])


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def flores(folder: Path) -> None:
    """A table for each language; one is in another order."""
    for code, word in WORDS.items():
        rows = [{"id": n, "text": f"{word} {n}", "topic": "x"} for n in NUMBERS]
        write_lines(folder / f"devtest/{code}.jsonl", rows[::-1] if code == "deu_Latn" else rows)
    subsets = {code: {"devtest": f"devtest/{code}.jsonl"} for code in WORDS}
    (folder / "README.md").write_text(card(subsets), encoding="utf-8")


def ntrex(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    columns = {code: [f"{word} {n}" for n in NUMBERS] for code, word in WORDS.items()}
    parquet.write_table(pyarrow.table(columns), folder / "data/test.parquet")
    (folder / "README.md").write_text(card({"default": {"test": "data/test.parquet"}}), encoding="utf-8")


def wmt24pp(folder: Path) -> None:
    for code, word in (("de_DE", "eins"), ("zh_CN", "一"), ("zh_TW", "壹")):
        rows = [
            {"lp": f"en-{code}", "source": f"one {n}", "target": f"{word}\n{n}", "is_bad_source": n == 0}
            for n in NUMBERS
        ]
        write_lines(folder / f"en-{code}.jsonl", rows)
    subsets = {f"en-{code}": {"train": f"en-{code}.jsonl"} for code in ("de_DE", "zh_CN", "zh_TW")}
    (folder / "README.md").write_text(card(subsets), encoding="utf-8")


def bouquet(folder: Path) -> None:
    """Paragraphs beside sentences; one of German is missing."""
    for code in ("eng_Latn", "deu_Latn"):
        rows = [{"uniq_id": f"P-{n}", "level": "sentence_level", "src_text": f"{WORDS[code]} {n}"} for n in NUMBERS]
        rows.append({"uniq_id": "P", "level": "paragraph_level", "src_text": "long"})
        write_lines(folder / f"test/{code}.jsonl", rows[1:] if code == "deu_Latn" else rows)
    subsets = {code: {"test": f"test/{code}.jsonl"} for code in ("eng_Latn", "deu_Latn")}
    (folder / "README.md").write_text(card(subsets), encoding="utf-8")


WRITE = {"flores": flores, "ntrex": ntrex, "wmt24pp": wmt24pp, "bouquet": bouquet}


@pytest.fixture
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    WRITE[request.param](tmp_path / "hub")
    with serving(tmp_path / "hub", Handler) as server:
        client_of(server, monkeypatch, tmp_path / "home", token=TOKEN)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.url)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        yield server


def find(dataset: str, store: Path, languages: tuple[str, str] = EN_DE) -> Source:
    return resolve_source(PairConfig(dataset=dataset), "data.test.a", languages=languages, store_dir=store)


@pytest.mark.parametrize(
    ("hub", "dataset", "languages", "columns", "expected"),
    [
        ("flores", "flores:devtest", EN_DE, ["eng_Latn", "deu_Latn"], [(f"one {n}", f"eins {n}") for n in NUMBERS]),
        (
            "flores",
            "flores:devtest/eng_Latn-cmn_Hant",
            ("en", "zh"),
            ["eng_Latn", "cmn_Hant"],
            [(f"one {n}", f"壹 {n}") for n in NUMBERS],
        ),
        (
            "flores",
            "flores:devtest",
            ("deu", "zh-Hans"),
            ["deu_Latn", "cmn_Hans"],
            [(f"eins {n}", f"一 {n}") for n in reversed(NUMBERS)],
        ),
        ("ntrex", "ntrex:test", ("de", "en"), ["deu_Latn", "eng_Latn"], [(f"eins {n}", f"one {n}") for n in NUMBERS]),
        ("wmt24pp", "wmt24pp:test", EN_DE, ["en", "de_DE"], [(f"one {n}", f"eins {n}") for n in NUMBERS if n]),
        (
            "wmt24pp",
            "wmt24pp:test/en-zh_TW",
            ("zh", "en"),
            ["zh_TW", "en"],
            [(f"壹 {n}", f"one {n}") for n in NUMBERS if n],
        ),
        ("bouquet", "bouquet:test", EN_DE, ["eng_Latn", "deu_Latn"], [(f"one {n}", f"eins {n}") for n in NUMBERS if n]),
    ],
    indirect=["hub"],
)
def test_test_set_is_copied_in_the_languages_of_the_run(
    hub: Hub, dataset: str, languages: tuple[str, str], columns: list[str], expected: list[Any], tmp_path: Path
) -> None:
    """At one revision, with its licence; from then on without the hub."""
    found = find(dataset, tmp_path / "store", languages)
    assert list(found.pairs()) == expected
    assert found.origin is not None
    assert (found.origin.revision, found.origin.columns) == (COMMIT, columns)
    assert found.origin.corpus is not None
    assert found.origin.corpus.licence == testsets.SETS[dataset.partition(":")[0]].licence
    assert found.origin.corpus.left_out == len(NUMBERS) - len(expected)
    hub.shutdown()
    hub.server_close()
    asked = len(hub.asked)
    assert find(dataset, tmp_path / "store", languages) == found
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("hub", "dataset", "languages", "message"),
    [
        ("flores", "flores:devtest", ("en", "fr"), "has no fr, only 'eng_Latn, deu_Latn, "),
        ("flores", "flores:devtest", ("en", "zh"), "cmn_Hans and cmn_Hant for zh: name one instead of zh, as"),
        (
            "wmt24pp",
            "wmt24pp:test",
            ("fr", "de"),
            "google/wmt24pp pairs English with one other language: the run has fr and de",
        ),
    ],
    indirect=["hub"],
)
def test_test_set_names_what_the_hub_has(
    hub: Hub, dataset: str, languages: tuple[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        find(dataset, tmp_path / "store", languages)
    assert str(caught.value).startswith(f"data.test.a.dataset={dataset}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD: dict[str, dict[str, Any]] = {
    "flores:devtest": {"id": 1, "text": "a"},
    "ntrex:test": {"eng_Latn": "a", "deu_Latn": "b"},
    "wmt24pp:test": {"source": "a", "target": "b", "is_bad_source": False},
    "bouquet:test": {"uniq_id": "P-1", "level": "sentence_level", "src_text": "a"},
}
OTHERWISE = [
    *(("flores:devtest", "id", cell) for cell in ([1], {"a": 1}, 1.5)),
    *(("flores:devtest", "text", cell) for cell in (5, True, ["a"], {"a": "b"})),
    *(("ntrex:test", "deu_Latn", cell) for cell in (5, ["a"])),
    *(("wmt24pp:test", column, 5) for column in ("source", "target", "is_bad_source")),
    *(("bouquet:test", column, ["a"]) for column in ("uniq_id", "src_text")),
]


@pytest.mark.parametrize(("dataset", "column", "cell"), OTHERWISE)
def test_test_set_that_is_laid_out_otherwise_is_refused_in_a_line(
    dataset: str, column: str, cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testsets, "dataset_revision", lambda name: COMMIT)
    subsets = ["en-de_DE"] if dataset == "wmt24pp:test" else ["eng_Latn", "deu_Latn"]
    monkeypatch.setattr(testsets, "hub_subsets", lambda name, revision: subsets)
    rows = {"something else": {**GOOD[dataset], column: cell}}
    if dataset != "ntrex:test":  # whose columns are the languages that it has
        rows["nothing"] = {name: value for name, value in GOOD[dataset].items() if name != column}
    for kind, row in rows.items():
        table = pyarrow.Table.from_pylist([row])
        monkeypatch.setattr(testsets, "stream_tables", lambda wanted, revision, table=table: [table])
        with pytest.raises(InputError) as caught:
            find(dataset, tmp_path / "store")
        message = str(caught.value)
        where = f"in column {column} of {testsets.SETS[dataset.partition(':')[0]].repository} at revision {COMMIT}"
        assert message.startswith(f"data.test.a.dataset={dataset}: {where} is {kind}")
    assert not list((tmp_path / "store").rglob("about.json"))


def test_test_set_takes_no_cell_for_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": None, "text": "a"}, {"id": 1, "text": None}, {"id": 2, "text": "c"}]
    monkeypatch.setattr(testsets, "dataset_revision", lambda name: COMMIT)
    monkeypatch.setattr(testsets, "hub_subsets", lambda name, revision: ["eng_Latn", "deu_Latn"])
    monkeypatch.setattr(testsets, "stream_tables", lambda wanted, revision: [pyarrow.Table.from_pylist(rows)])
    assert list(find("flores:devtest", tmp_path).pairs()) == [("a", "a"), ("c", "c")]


def test_test_set_shows_hostile_names_in_a_line() -> None:
    hub = testsets.Hub("data.test.a.dataset=ntrex:test", "mteb/NTREX", COMMIT)
    with pytest.raises(InputError, match=r"has eng_Latn\\x1b\[31m\\n and eng_Cyrl for en: name one") as caught:
        hub.choose(["eng_Latn\x1b[31m\n", "eng_Cyrl"], "en")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("flores:test", "it has dev and devtest: write flores:devtest"),
        ("ntrex:", "it has test: write ntrex:test"),
        (
            "flores:dev/eng_Latn-fra_Latn",
            "eng_Latn-fra_Latn are not varieties of en and de, the run's languages",
        ),
        ("flores:dev/deu_Latn", "deu_Latn are not varieties of en and de"),
    ],
)
def test_test_set_is_refused_by_its_name_before_the_hub_is_asked(dataset: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^data\.test\.a\.dataset={dataset}: {message}"):
        find(dataset, tmp_path / "store")


@pytest.mark.parametrize(
    ("status", "header", "value"),
    [(200, "ETag", '"{}"'), (200, "ETag", 'W/"x/../../../../../../../../../../{}"'), (404, "X-Repo-Commit", "{}")],
)
def test_test_set_writes_nothing_where_a_header_leads(
    status: int, header: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client names files by headers: what it fetched, and that something is not there."""
    flores(tmp_path / "hub")
    (tmp_path / "thesis").mkdir()
    forged = {header: value.format(tmp_path / "thesis/chapter2")}

    class Forger(Handler):
        def reply(self, answered: int, body: bytes, headers: dict[str, str]) -> None:
            is_forged = self.command == "HEAD" and answered == status
            super().reply(answered, body, headers | forged if is_forged else headers)

    with serving(tmp_path / "hub", Forger) as server:
        client_of(server, monkeypatch, tmp_path / "home", token=TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", server.url)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        with pytest.raises(InputError, match=rf"cannot be read \(as {header} it names '"):
            find("flores:devtest", tmp_path / "store")
    assert list((tmp_path / "thesis").iterdir()) == []


def test_test_set_takes_no_columns(tmp_path: Path) -> None:
    pair = PairConfig("en", dataset="flores:dev")
    with pytest.raises(InputError, match=r"^data\.test\.a\.src=en does not apply to .*\.dataset=flores:dev:"):
        resolve_source(pair, "data.test.a", languages=EN_DE, store_dir=tmp_path)


@pytest.mark.ci
def test_prepare_keeps_a_gated_test_set(tmp_path: Path) -> None:
    """As one types it: without a token one line tells how to get at it; with one it is copied, once."""
    flores(tmp_path / "hub")
    data = write_corpus(tmp_path / "corpus")
    text = [f"data.train.src={data.train.src}", f"data.train.tgt={data.train.tgt}"]
    text += [f"data.dev.src={data.dev.src}", f"data.dev.tgt={data.dev.tgt}"]
    words = ["prepare", "experiment=small", "run_dir=runs/a", "tokenizer.vocab_size=50", *text]
    words.append("data.test.flores.dataset=flores:devtest")
    with serving(tmp_path / "hub", Handler) as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        imports = "transformer.data.prepare, datasets, time; time.sleep = lambda seconds: None"
        with Shell(tmp_path, imports, **environment) as shell:
            status, log = shell.run(*words)
            assert status == 2
            (line,) = [line for line in log.split("\n") if "error" in line]
            assert "openlanguagedata/flores_plus" in line
            assert "it is gated: log in to the hub in a browser, accept the conditions on its page" in line
        with Shell(tmp_path, imports, **environment, HF_TOKEN=TOKEN) as shell:
            status, log = shell.run(*words)
            assert status == 0, log
    (about,) = (tmp_path / "runs/.store/copies").glob("*/about.json")
    origin = read(about)["origin"]
    assert (origin["dataset"], origin["revision"]) == ("flores:devtest", COMMIT)
    assert origin["corpus"]["licence"] == "CC-BY-SA-4.0"
