"""Corpora by mtdata's names, from a list of them that the test writes, behind a server of its own."""

import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from support.corpora import tiny_job, write_corpus
from support.paths import ROOT
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import ExtraConfig, PairConfig
from transformer.data.prepare import prepare
from transformer.data.report import DataReport
from transformer.data.source import Source, resolve_source
from transformer.errors import InputError, StorageError
from transformer.integrations.mtdata import find_sides
from transformer.tools.report import data_tables

LANGUAGES = ("en", "de")
PAIRS = [("one\u2028 1", "eins"), ("two", "zwei \x85"), ("three", "drei")]  # English and German; lines end at \n alone
GERMAN = "".join(f"{target}\n" for _, target in PAIRS).encode()
ENGLISH = "".join(f"{text}\n" for text, _ in PAIRS).encode()
ROWS = "".join(f"{target}\t{text}\tmore\n" for text, target in PAIRS).encode()
TMX = """<tmx version="1.4"><body>
<tu><tuv xml:lang="en-GB"><seg>one
line</seg></tuv><tuv xml:lang="de"><seg>eine &amp; Zeile</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>alone</seg></tuv></tu>
</body></tmx>"""


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(files: Mapping[str, bytes], link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if link is not None:
            member = tarfile.TarInfo("a/x.de")
            member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member)
    return buffer.getvalue()


TEXTS = {"a/x.de": GERMAN, "a/x.en": ENGLISH}
ZIP = zipped(TEXTS)
FILES = {
    "x.zip": ZIP,
    "x.tgz": tarred(TEXTS),
    "link.tgz": tarred({"a/x.en": ENGLISH}, link="/etc/hostname"),
    "x.tsv": ROWS,
    "x.tsv.gz": gzip.compress(ROWS),
    "cut.tsv.gz": gzip.compress(ROWS * 9999)[:-20],
    "x.tsv.xz": lzma.compress(b"\t\nein\rs\tone\n \tnone\ndrei\t\n"),
    "bad.tsv": b"eins\tone\nzwei\n",
    "x.de.gz": gzip.compress(GERMAN),
    "x.en.bz2": bz2.compress(ENGLISH),
    "short.en": ENGLISH[:-6],
    "x.de": GERMAN,
    "tmx.zip": zipped({"x.tmx": TMX.encode()}),
    "page.zip": b"<html>gone</html>\n",
    "empty.tsv": b"",
}


# mtdata's own class would fill it with all that there is: sixteen seconds, and half a gigabyte.
MAKE_INDEX = """
import json, pickle, sys, types
from pathlib import Path
from mtdata import __version__
from mtdata.entry import Entry

folder = Path(sys.argv[1])
given = json.loads((folder / "entries.json").read_bytes())
at_server = lambda name: name if "://" in name else f"{given['server']}/{name}"

sys.modules["mtdata.index"] = module = types.ModuleType("mtdata.index")
exec("class Index: ...\\nclass ReferenceDb: ...", module.__dict__)
index = module.Index()
index.ref_db = module.ReferenceDb()
index.entries = {}
for did, fields in given["entries"].items():
    url = fields.pop("url")
    cite = tuple(fields.pop("cite", ()))
    url = at_server(url) if isinstance(url, str) else tuple(map(at_server, url))
    entry = Entry(did, url=url, cite=cite, **fields)
    index.entries[entry.did] = entry
(folder / f"mtdata.index.{__version__}.pkl").write_bytes(pickle.dumps(index))
"""

READ_ALL = """
import json, sys
from pathlib import Path
from tempfile import TemporaryDirectory
from transformer.integrations import mtdata

found = {}
for name in sys.argv[2:]:
    pairs = []
    with TemporaryDirectory(dir=sys.argv[1]) as folder:
        found[name] = mtdata.answer(name, Path(folder), pairs.append) | {"pairs": pairs}
(Path(sys.argv[1]) / "found.json").write_text(json.dumps(found), encoding="utf-8")
"""

IN_ORDER = [(target.strip(), text.strip()) for text, target in PAIRS]
KINDS = {
    "Statmt-zip-1-deu-eng": (IN_ORDER, ["x.zip"], 0),
    "Statmt-tar-1-deu-eng": (IN_ORDER, ["x.tgz"], 0),
    "Statmt-tsv-1-deu-eng": (IN_ORDER, ["x.tsv"], 0),
    "Statmt-gz-1-deu_AT-eng_GB": (IN_ORDER, ["x.tsv.gz"], 0),
    "Flores-xz-1-deu-eng": ([("ein s", "one")], ["x.tsv.xz"], 3),
    "Statmt-two-1-deu-eng": (IN_ORDER, ["x.de.gz", "x.en.bz2"], 0),
    "Statmt-tmx-1-deu-eng": ([("eine & Zeile", "one line")], ["tmx.zip"], 0),
}
FAULTS = {
    "Statmt-uneven-1-deu-eng": r"^after pair 2: cannot be read \(\[x\.de, short\.en\] have unequal number of .*\)$",
    "Statmt-link-1-deu-eng": r"^cannot be read \('a/x.de' is a link to an absolute path\)$",
    "Statmt-cut-1-deu-eng": r"^after pair \d+: cannot be read \(Compressed file ended before .*\)$",
    "Statmt-bad-1-deu-eng": r"^after pair 1: cannot be read \(.*\)$",
    "Statmt-torn-1-deu-eng": r"/torn\.zip cannot be downloaded \(.*IncompleteRead.*\): run `transformer prepare` where",
    "Statmt-gone-1-deu-eng": r"^http://\S+/nothing\.tsv cannot be downloaded \(status 404\): run",
    "Statmt-page-1-deu-eng": r"^http://\S+/page\.zip: the download is neither a zip nor a tar archive: choose another",
    "Statmt-empty-1-deu-eng": r"^there is no pair in it: choose another corpus$",
    "Statmt-xlsx-1-deu-eng": r"^cannot be read \(openpyxl is required .* pip install openpyxl\)$",
    "Google-hub-1-eng-deu_DE": r"^it is on the hub: .* dataset=google/x, subset=en-de_DE, split=train, src=s \(",
    "Statmt-zop-1-deu-eng": r"^mtdata has no such corpus; did you mean 'Statmt-zip-1-deu-eng'\?; `mtdata list ",
    "Statmt-zip-1-deu-fra": r"^mtdata has no such corpus; `mtdata list -id -l deu-fra` names them$",
}


class Server(BaseHTTPRequestHandler):
    """Sends FILES; of what is called `torn`, half of what it promises; of `slow.tsv`, nothing."""

    asked_for_slow = threading.Event()
    ends = threading.Event()

    def do_GET(self) -> None:
        name = self.path[1:]
        if name == "slow.tsv":
            self.asked_for_slow.set()
            self.ends.wait()
        content = FILES.get(name, ZIP if name == "torn.zip" else None)
        self.send_response(200 if content is not None else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write((content or b"")[: len(ZIP) // 2 if name == "torn.zip" else None])

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


def mtdata_run(folder: Path, code: str, *arguments: str) -> None:
    """A program with mtdata, in a process of its own."""
    environment = {**os.environ, "MTDATA": str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-P", "-c", code, *arguments], env=environment, cwd=folder, check=True)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("mtdata")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        Server.ends.set()
        listening.shutdown()


@pytest.fixture(scope="module")
def folder(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mtdata's folder with a list of a few corpora. mtdata itself is not imported here, where it would take the log."""
    from_archive = {"in_paths": ["*/x.de", "*/x.en"], "in_ext": "txt"}
    cite = {"cite": ("koehn2005europarl",)}
    entries: dict[str, dict[str, Any]] = {
        "Statmt-zip-1-deu-eng": {"url": "x.zip", **from_archive, **cite},
        "Statmt-tar-1-deu-eng": {"url": "x.tgz", **from_archive},
        "Statmt-tsv-1-deu-eng": {"url": "x.tsv"},
        "Statmt-gz-1-deu_AT-eng_GB": {"url": "x.tsv.gz"},
        "Flores-xz-1-deu-eng": {"url": "x.tsv.xz"},
        "Statmt-two-1-deu-eng": {"url": ("x.de.gz", "x.en.bz2"), "ext": "txt", "in_ext": "txt"},
        "Statmt-uneven-1-deu-eng": {"url": ("x.de", "short.en"), "ext": "txt", "in_ext": "txt"},
        "Statmt-tmx-1-deu-eng": {"url": "tmx.zip", "in_paths": ["*.tmx"], "in_ext": "tmx"},
        "Statmt-link-1-deu-eng": {"url": "link.tgz", **from_archive},
        "Statmt-cut-1-deu-eng": {"url": "cut.tsv.gz"},
        "Statmt-bad-1-deu-eng": {"url": "bad.tsv"},
        "Statmt-torn-1-deu-eng": {"url": "torn.zip", **from_archive},
        "Statmt-gone-1-deu-eng": {"url": "nothing.tsv"},
        "Statmt-slow-1-deu-eng": {"url": "slow.tsv"},
        "Statmt-page-1-deu-eng": {"url": "page.zip", **from_archive},
        "Statmt-empty-1-deu-eng": {"url": "empty.tsv"},
        "Statmt-xlsx-1-deu-eng": {"url": "x.zip", "ext": "xlsx", "in_ext": "xlsx"},
        "Google-hub-1-eng-deu_DE": {
            "url": "https://huggingface.co/datasets/google/x",
            "ext": "hfds",
            "in_ext": "hfds",
            "in_paths": ["default"],
            "meta": {"orig_id": "google/x", "config": "en-de_DE", "split": "train", "fields": {"source": "s"}},
        },
    }
    folder = tmp_path_factory.mktemp("mtdata")
    (folder / "entries.json").write_text(json.dumps({"server": server, "entries": entries}), encoding="utf-8")
    mtdata_run(folder, MAKE_INDEX, str(folder))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What becomes of each corpus, all read by one process, as each is by one of its own."""
    mtdata_run(folder, READ_ALL, str(folder), *KINDS, *FAULTS)
    return dict(json.loads((folder / "found.json").read_bytes()))


@pytest.mark.parametrize("name", KINDS)
def test_read_gives_the_pairs_of_any_kind_of_file(found: dict[str, Any], server: str, name: str) -> None:
    pairs, files, left_out = KINDS[name]
    record = found[name]
    assert [tuple(pair) for pair in record["pairs"]] == pairs
    assert record["downloads"] == [
        {"url": f"{server}/{file}", "bytes": len(FILES[file]), "sha256": hashlib.sha256(FILES[file]).hexdigest()}
        for file in files
    ]
    assert record["left_out"] == left_out
    assert (record["licence"] or "").startswith("https://creativecommons.org") == name.startswith("Flores")


@pytest.mark.parametrize("name", FAULTS)
def test_read_says_what_is_wrong_in_one_line(found: dict[str, Any], name: str) -> None:
    error = found[name]["error"]
    assert re.search(FAULTS[name], error), error
    assert "\n" not in error


# ---- copies ---------------------------------------------------------------------------------------------------------


def find(name: str, store: Path, languages: tuple[str, str] = LANGUAGES, **given: Any) -> Source:
    pair = PairConfig(dataset=f"mtdata:{name}", **given)
    return resolve_source(pair, "data.train", languages=languages, store_dir=store)


def test_resolve_source_copies_a_corpus_once(
    folder: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTDATA", str(folder))
    before = sorted(folder.rglob("*"))
    found = find("Statmt-zip-1-deu-eng", tmp_path)
    assert list(found.pairs()) == [(text.strip(), target.strip()) for text, target in PAIRS]
    assert found.origin is not None
    assert found.origin.columns == ["eng", "deu"]
    record = found.origin.corpus
    assert record is not None
    assert record.mtdata == version("mtdata")
    assert record.citations["koehn2005europarl"].startswith("@inproceedings{koehn2005europarl,")
    assert [download.url for download in record.downloads] == [f"{server}/x.zip"]

    # Nothing else is left, and nothing was printed.
    (copy,) = (path for path in (tmp_path / "copies").iterdir() if path.is_dir())
    assert sorted(path.name for path in copy.iterdir()) == ["about.json", "source.txt", "target.txt"]
    assert sorted(folder.rglob("*")) == before
    assert capfd.readouterr() == ("", "")

    # It is read from there, also where there is no mtdata.
    monkeypatch.setattr("transformer.integrations.mtdata.find_spec", lambda _: None)
    assert find("Statmt-zip-1-deu-eng", tmp_path) == found
    with pytest.raises(InputError, match=r"^data\.train\.dataset=\S+ needs mtdata: pip install 'mtdata[<>]"):
        find("Statmt-zip-1-deu-eng", tmp_path, ("de", "en"))


def test_resolve_source_reports_the_errors_of_mtdata(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTDATA", str(folder))
    with pytest.raises(
        InputError, match=r"^data\.train\.dataset=mtdata:Statmt-zap-1-deu-eng: mtdata has no such corpus"
    ):
        find("Statmt-zap-1-deu-eng", tmp_path)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("messages", "kind", "error"),
    [
        ([["a", "b"], {"errno": errno.ENOSPC}], StorageError, r"\(No space left on device\): free space or set data\."),
        ([["a", "b"]], InputError, r"^data\.train\.dataset=\S+: mtdata's process was ended before it had read"),
    ],
    ids=["full", "killed"],
)
def test_resolve_source_keeps_no_half_of_a_copy(
    messages: list[object], kind: type[Exception], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer.integrations.mtdata.find_spec", bool)
    monkeypatch.setattr("transformer.integrations.mtdata._messages", lambda *_: nullcontext(iter(messages)))
    with pytest.raises(kind, match=error):
        find("Statmt-zip-1-deu-eng", tmp_path)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def test_main_ends_with_the_process_that_started_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTDATA", str(folder))
    command = [sys.executable, "-m", "transformer.integrations.mtdata", "Statmt-slow-1-deu-eng", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        assert Server.asked_for_slow.wait(60)
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()  # as the end of the other process does
        assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("codes", "languages", "sides"),
    [
        ("deu-eng", ("en", "de"), ("eng", "deu")),
        ("deu-eng", ("deu", "eng"), ("deu", "eng")),
        ("deu_AT-eng_GB", ("en-US", "de"), ("eng_GB", "deu_AT")),
        ("zho_Hant-eng", ("zh", "en"), ("zho_Hant", "eng")),
        ("srp_Latn-srp", ("sr", "sr-Latn"), ("srp", "srp_Latn")),
        ("srp_Latn-srp", ("sr-Latn", "sr"), ("srp_Latn", "srp")),
    ],
)
def test_find_sides_puts_the_languages_in_the_order_of_the_run(
    codes: str, languages: tuple[str, str], sides: tuple[str, str]
) -> None:
    assert find_sides(f"mtdata:A-b-1-{codes}", "data.train", languages=languages) == sides


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        (
            "A-b-1-deu-fra",
            {},
            r"^data\.train\.dataset=\S+: it has deu and fra, but the run translates from en to de: set data",
        ),
        ("A-b-1-deu", {}, r"^data\.train\.dataset=\S+: it has one language, deu: name a corpus of pairs$"),
        (
            "europarl",
            {},
            r"^data\.train\.dataset=\S+: not an mtdata name, such as mtdata:Statmt-europarl-10-deu-eng: ",
        ),
        ("A-b-1-d-eng", {}, r"^data\.train\.dataset=d: not a code of ISO 639"),
        (
            "A-b-1-deu-eng",
            {"split": "train"},
            r"^data\.train\.split=train does not apply to data\.train\.dataset=mtdata:A",
        ),
        ("A-b-1-deu-eng", {"src": "eng"}, r"^data\.train\.src=eng does not apply to data\.train\.dataset=mtdata:A"),
    ],
)
def test_resolve_source_refuses_a_name_without_asking_mtdata(
    name: str, given: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=error):
        find(name, tmp_path, **given)


# ---- a run ----------------------------------------------------------------------------------------------------------


def test_prepare_records_where_a_corpus_comes_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTDATA", str(folder))
    data = write_corpus(tmp_path / "corpus")
    data.extra["europarl"] = ExtraConfig(dataset="mtdata:Statmt-zip-1-deu-eng")
    data.src_lang, data.tgt_lang = LANGUAGES
    job = tiny_job(tmp_path / "run", data)
    written = to_json(prepare(job).report)
    report = from_json(DataReport, written)
    assert report.sets["extra.europarl"].pairs_read == len(PAIRS)
    table = data_tables._origins(report, "")
    ((name, dataset, revision, licence, citations, digests),) = table.rows
    assert (name, dataset) == ("extra.europarl", "mtdata:Statmt-zip-1-deu-eng")
    assert (revision, licence, citations) == (f"mtdata {version('mtdata')}", "unknown", "koehn2005europarl")
    assert digests == hashlib.sha256(ZIP).hexdigest()[:12]

    # Before there were such corpora, nothing was said of them.
    del written["sets"]["extra.europarl"]["origin"]["corpus"]
    origin = from_json(DataReport, written).sets["extra.europarl"].origin
    assert origin is not None
    assert origin.corpus is None
