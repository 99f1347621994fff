"""Parallel corpora by the names that mtdata has for them, such as `Statmt-europarl-10-deu-eng`.

    read_corpus  --name-->  a process with mtdata  --a line of JSON for each pair, then a CorpusRecord-->  read_corpus

mtdata knows where some hundred thousand corpora are, and how the files of each are read. It has a process of its own,
because its list takes half a gigabyte of memory, and because it takes over the log. What it downloads lies in a
temporary folder, and is deleted when the pairs have been read; its list stays where mtdata itself keeps it.
"""

import bz2
import errno
import gzip
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

from transformer.config.keys import did_you_mean
from transformer.config.languages import language_of
from transformer.config.primitives import from_json, to_json
from transformer.errors import InputError
from transformer.plugins import CorpusRecord, Download
from transformer.registry import install_command

PREFIX = "mtdata:"

Send = Callable[[object], None]


def find_sides(dataset: str, key: str, *, languages: tuple[str, str]) -> tuple[str, str]:
    """The two codes of language in the name of a corpus, that of the run's sources first.

    `key` is what the configuration names the set by. Region and script count where they tell the two apart. Raises
    InputError where the corpus is not of the run's languages.
    """
    setting = f"{key}.dataset={dataset}"
    codes = dataset.removeprefix(PREFIX).split("-")[3:]
    if len(codes) == 1:
        raise InputError(f"{setting}: it has one language, {codes[0]}: name a corpus of pairs")
    if len(codes) != 2:
        raise InputError(
            f"{setting}: not an mtdata name, such as {PREFIX}Statmt-europarl-10-deu-eng: `mtdata list -id` has them"
        )

    run = (language_of(languages[0], "data.src_lang"), language_of(languages[1], "data.tgt_lang"))
    own = (language_of(codes[0], f"{key}.dataset"), language_of(codes[1], f"{key}.dataset"))
    exact_run = tuple(_with_subtags(*item) for item in zip(run, languages, strict=True))
    exact_own = tuple(_with_subtags(*item) for item in zip(own, codes, strict=True))
    for given, wanted in ((exact_own, exact_run), (own, run)):
        if given == wanted:
            return codes[0], codes[1]
        if given == wanted[::-1]:
            return codes[1], codes[0]

    is_of_training = key.startswith("data.")  # `evaluate` has the key without it, and the languages of the run
    remedy = "set data.src_lang and data.tgt_lang" if is_of_training else "choose a corpus in the run's languages"
    raise InputError(
        f"{setting}: it has {codes[0]} and {codes[1]}, but the run translates from {languages[0]} to "
        f"{languages[1]}: {remedy}"
    )


def _with_subtags(language: str, code: str) -> tuple[str, ...]:
    """A code as its language, and script and region if it has them."""
    return (language, *re.split("[-_]", code.lower())[1:])


# ---- here -----------------------------------------------------------------------------------------------------------


def read_corpus(
    dataset: str, setting: str, *, sides: tuple[str, str], folder: Path, write: Callable[[str, str], None]
) -> CorpusRecord:
    """Have mtdata download a corpus into `folder` for the time being, and `write` its pairs, `sides[0]` first.

    `setting` is what errors begin with. Raises InputError where mtdata is missing, does not know the corpus, or can
    neither download nor read it; OSError where the disk is full.
    """
    if find_spec("mtdata") is None:
        raise InputError(f"{setting} needs mtdata: {install_command('corpora')}")

    name = dataset.removeprefix(PREFIX)
    is_swapped = name.split("-")[3:] != list(sides)
    with TemporaryDirectory(prefix="downloads-", dir=folder) as downloads, _messages(name, downloads) as messages:
        for message in messages:
            if isinstance(message, list):
                first, second = message
                write(*((second, first) if is_swapped else (first, second)))
            elif "error" in message:
                raise InputError(f"{setting}: {message['error']}")
            elif "errno" in message:
                raise OSError(message["errno"], os.strerror(message["errno"]))
            else:
                return from_json(CorpusRecord, message)
    raise InputError(f"{setting}: mtdata's process was ended before it had read everything: run this again")


@contextmanager
def _messages(name: str, downloads: str) -> Iterator[Iterator[Any]]:
    """What a process with mtdata sends; it ends with the context, or with this process."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, name, str(Path(downloads).absolute())],
        stdin=subprocess.PIPE,  # closed when this process dies
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # progress bars, and a log that repeats the errors
        cwd=downloads,  # mtdata executes any mtdata*.py where it is
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield map(json.loads, process.stdout)
        finally:
            process.kill()


# ---- there ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Read the corpus of the first argument, downloaded into the folder of the second, and send what it has."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        os.dup2(2, 1)  # whatever else prints

        def send(message: object) -> None:
            out.write(f"{json.dumps(message)}\n")

        send(answer(sys.argv[1], Path(sys.argv[2]), send))


def answer(name: str, folder: Path, send: Send) -> dict[str, Any]:
    """The last message, after those for each pair: a CorpusRecord, or what went wrong."""
    try:
        return to_json(_read(name, folder, send))
    except InputError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"errno": error.errno} if _is_full(error) else {"error": f"cannot be read ({_words(error)})"}


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


def _read(name: str, folder: Path, send: Send) -> CorpusRecord:
    """Send the pairs of a corpus as mtdata gives them. Raises InputError, and whatever its files bring about."""
    entry, citations = _look_up(name)
    if entry.ext == "hfds":
        raise InputError(_name_on_hub(entry.meta))

    # Of an archive a member might lead elsewhere, through a link.
    if hasattr(tarfile, "data_filter"):  # Python 3.11.4
        tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    paths, downloads = _download(entry, folder)

    left_out = sent = 0
    try:
        for first, second in _rows(entry, paths):
            if entry.is_noisy(first, second):
                left_out += 1
            else:
                send([_one_line(first or ""), _one_line(second or "")])
                sent += 1
    except Exception as error:
        if _is_full(error):
            raise
        place = f"after pair {sent + left_out}: " if sent + left_out else ""
        raise InputError(f"{place}cannot be read ({_words(error)})") from error
    if not sent:
        raise InputError("there is no pair in it: choose another corpus")
    return CorpusRecord(version("mtdata"), citations, _licence(entry), downloads, left_out)


def _look_up(name: str) -> tuple[Any, dict[str, str]]:
    """mtdata's entry of a corpus, and its citations. Raises InputError where it has none."""
    try:
        from mtdata.entry import DatasetId
        from mtdata.index import INDEX
    except Exception as error:  # of whatever the file with the list has become
        folder = os.environ.get("MTDATA", "~/.mtdata")
        raise InputError(
            f"mtdata's list of corpora cannot be read or made ({_words(error)}): delete {folder}/mtdata.index.*, "
            "or name another folder in the environment variable MTDATA"
        ) from error

    try:
        entry = INDEX.entries[DatasetId.parse(name)]
    except Exception as error:  # of a name that cannot be one, or is none
        codes = name.split("-")[3:]
        languages = {language_of(code, "dataset") for code in codes}
        known = [str(did) for did in INDEX.entries if {language_of(code.lang, "") for code in did.langs} == languages]
        raise InputError(
            f"mtdata has no such corpus{did_you_mean(name, known)}; `mtdata list -id -l {'-'.join(codes)}` names them"
        ) from error
    return entry, {key: INDEX.ref_db.get_bibtex(key) for key in entry.cite or ()}


def _name_on_hub(meta: dict[str, Any]) -> str:
    """How a run names a data set of the hub that mtdata has a name for, too."""
    subset, fields = meta.get("config"), meta.get("fields") or {}
    if isinstance(subset, list) or meta.get("data_files"):
        return (
            f"mtdata makes it of {meta['orig_id']} of the hub by rules of its own: have mtdata write it to text files"
        )
    keys = {"dataset": meta["orig_id"], "subset": subset, "split": meta.get("split")}
    columns = {"src": fields.get("source"), "tgt": fields.get("target")}
    shown = ", ".join(f"{key}={value}" for key, value in (keys | columns).items() if value)
    return f"it is on the hub: name it there, which keeps its revision, too: {shown} (src and tgt as the run goes)"


def _download(entry: Any, folder: Path) -> tuple[Any, list[Download]]:
    """The files of a corpus, as mtdata's parser takes them, and what was downloaded. Raises InputError."""
    from mtdata.cache import Cache

    cache = Cache(folder)
    is_one = isinstance(entry.url, str)
    downloads = []
    for url in [entry.url] if is_one else entry.url:
        try:
            path = cache.get_local_path(url, filename=entry.filename if is_one else None, entry=entry)
        except Exception as error:
            if _is_full(error):
                raise
            raise InputError(
                f"{url} cannot be downloaded ({_cause_of_network(error)}): run `transformer prepare` where it can, or "
                "choose another corpus"
            ) from error
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            downloads.append(Download(url, file.tell(), sha256))

    paths = cache.get_entry(entry)
    if entry.is_archive and isinstance(paths, Path):
        raise InputError(f"{entry.url}: the download is neither a zip nor a tar archive: choose another corpus")
    return paths, downloads


def _rows(entry: Any, paths: Any) -> Iterator[tuple[str | None, str | None]]:
    """The two texts of each row, in the order of the languages in the name."""
    from mtdata import utils
    from mtdata.parser import Parser

    # mtdata's own end lines at carriage returns, too, or take the end of a program for the end of the text.
    for ending, package in ((".gz", gzip), (".bz2", bz2), (".xz", lzma)):
        utils.COMPRESSORS[ending] = partial(package.open, newline="\n")
    for row in Parser(paths, ext=entry.in_ext or None, ent=entry).read_segs(show_pbar=False):
        if not isinstance(row, list | tuple) or len(row) < 2:
            raise InputError("a row has one text, not two")
        yield row[0], row[1]


def _one_line(text: str) -> str:
    return re.sub(r"[\n\r\t]", " ", text.strip())


def _licence(entry: Any) -> str | None:
    """The licence of a corpus, as far as mtdata has it: in its lists, not in its entries."""
    from mtdata.index import allenai_nllb, elrc_share, flores

    if entry.did.group == "ELRC":
        with elrc_share.REFS_FILE.open(encoding="utf-8") as lines:
            licences = {fields[6]: fields[7] for fields in (line.split("\t") for line in lines)}
        return licences.get(entry.url)
    module = {"AllenAi": allenai_nllb, "Flores": flores}.get(entry.did.group)
    return getattr(module, "_LICENSE", None)


def _is_full(error: Exception) -> TypeGuard[OSError]:
    """Whether the disk is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _cause_of_network(error: BaseException) -> str:
    """What began a chain of errors, in words."""
    if isinstance(error, AssertionError):  # by which mtdata says what a server answered
        return f"status {error}"
    while error.__context__ is not None:
        error = error.__context__
    return _words(error)


def _words(error: BaseException) -> str:
    """The message of an error on one line, with the names of temporary files instead of their paths."""
    words = re.sub(r"PosixPath\('[^']*?([^'/]+)'\)", r"\1", " ".join(str(error).split()))
    return f"{words or type(error).__name__:.200}"


if __name__ == "__main__":
    main()
