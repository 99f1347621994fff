"""From raw text to what training reads: corpus -> tokenizer -> store.

A prepared corpus is named by a digest of the training text, the filters, the tokenizer's settings and the versions of
the formats, so it is built once and shared by every run that agrees on these. Whoever builds holds a file lock; others
wait, then use it. Nothing is written before every file of the configuration has been read to its end. The surprise:
training text is read three times (check, tokenizer, ids), since memory must not grow with the corpus.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer.compute import resolve_threads
from transformer.config import FilterConfig, PairConfig, TokenizerConfig, TrainJob
from transformer.data.corpus import Pair, clean_pairs, read_pairs
from transformer.data.store import STORE_VERSION, Store, StoreWriter, digest_file, sync
from transformer.errors import InputError, StorageError
from transformer.tokenizer import Tokenizer, read_model, sample_lines, train_tokenizer

PREPARE_VERSION = 1
BLOCK = 10_000  # pairs that are in memory at a time
REASONS = ("empty", "identical", "duplicate", "no_pieces", "too_long", "ratio")  # in the order of asking

Pieces = list[list[int]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What training needs; development and test sentences are never filtered."""

    store: Store
    tokenizer: bytes  # the model file's content
    report: dict[str, object]  # JSON: what was read, dropped and kept
    dev: list[Pair]
    test: dict[str, list[Pair]]


class _Corpus(NamedTuple):
    """The training text and all that decides what becomes of it."""

    source: Path
    target: Path
    filters: FilterConfig
    tokenizer: TokenizerConfig
    model: bytes | None  # a tokenizer model that is given
    threads: int

    def pairs(self, dropped: Counter[str]) -> Iterator[Pair]:
        return clean_pairs(read_pairs(self.source, self.target), self.filters, dropped)


def prepare(job: TrainJob) -> Prepared:
    """Read and check every file, then build the prepared corpus or find it already built.

    Raises InputError for bad files and settings, StorageError where the store cannot be written.
    """
    began = time.monotonic()
    corpus, files = _corpus(job), _describe(job)
    dev = _read_all(job.data.dev, "data.dev")
    test = {name: _read_all(pair, f"data.test.{name}") for name, pair in job.data.test.items()}
    digest = _identity(corpus, [str(files[f"train.{side}"]["sha256"]) for side in ("src", "tgt")])
    root = Path(job.data.store_dir) if job.data.store_dir is not None else Path(job.run_dir).parent / ".store"
    store, model, built = _open_or_build(root / digest[:16], corpus)
    for name, pairs in {"dev": dev, **{f"test.{name}": pairs for name, pairs in test.items()}}.items():
        files[f"{name}.src"]["lines"] = files[f"{name}.tgt"]["lines"] = len(pairs)
    files["train.src"]["lines"] = files["train.tgt"]["lines"] = built["pairs_read"]
    report = {"digest": digest, "src_lang": job.data.src_lang, "tgt_lang": job.data.tgt_lang, "files": files, **built}
    log.info("data ready: %s; %.1f s", _summary(built), time.monotonic() - began)
    return Prepared(store, model, report, dev, test)


def _summary(built: dict[str, Any]) -> str:
    read, kept = built["pairs_read"], built["pairs_kept"]
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in built["dropped"].items() if count)
    share = f"{1 - kept / read:.2%} dropped" + (f": {reasons}" if reasons else "")
    tokens = " + ".join(f"{count:,}" for count in built["tokens"].values())
    return f"{kept:,} of {read:,} pairs ({share}), {tokens} tokens, {built['vocab_size']:,} pieces"


def _paths(pair: PairConfig, key: str) -> tuple[Path, Path]:
    for side, value in (("src", pair.src), ("tgt", pair.tgt)):
        if not value:
            raise InputError(f"{key}.{side} is not set: name a text file")
    return Path(pair.src), Path(pair.tgt)


def _corpus(job: TrainJob) -> _Corpus:
    paths, threads = _paths(job.data.train, "data.train"), resolve_threads(job.train.threads)
    return _Corpus(*paths, job.data.filter, job.tokenizer, _given_model(job), threads)


def _given_model(job: TrainJob) -> bytes | None:
    """The tokenizer that is not to be trained: that of `tokenizer.model`, or of the run where the weights come from."""
    given = None if job.tokenizer.model is None else Path(job.tokenizer.model)
    model = None if given is None else read_model(given)
    if job.init_from is not None:
        origin = _home(job.run_dir, job.init_from) / "tokenizer.model"
        carried = read_model(origin)
        if model not in (None, carried):
            raise InputError(f"tokenizer.model={given} is not {origin}, which init_from brings along: leave it out")
        given, model = origin, carried
    if model is not None:
        Tokenizer(model, str(given))  # refuses a bad one
    return model


def _home(run_dir: str, init_from: str) -> Path:
    """The run whose tokenizer is taken: once this one has a checkpoint, itself, for the other may be gone by then."""
    if any(Path(run_dir, "checkpoints").glob("step-*")):
        return Path(run_dir)
    source = Path(init_from).absolute()
    around = (folder for folder in (source, *source.parents[:2]) if (folder / "tokenizer.model").is_file())
    home = next(around, None) if source.is_dir() else None
    if home is None:
        raise InputError(f"init_from={init_from}: no run directory with a tokenizer.model, nor a checkpoint inside one")
    return home


def _describe(job: TrainJob) -> dict[str, dict[str, Any]]:
    """Path, size and digest of every file of the configuration, by its key."""
    sets = {"train": job.data.train, "dev": job.data.dev}
    sets |= {f"test.{name}": pair for name, pair in job.data.test.items()}
    files: dict[str, dict[str, Any]] = {}
    for name, pair in sets.items():
        for side, path in zip(("src", "tgt"), _paths(pair, f"data.{name}"), strict=True):
            try:
                size, digest = digest_file(path)
            except OSError as error:
                raise InputError(
                    f"{path}: cannot be read ({error.strerror or error}): check data.{name} and data.root"
                ) from error
            files[f"{name}.{side}"] = {"path": str(path), "bytes": size, "sha256": digest}
    return files


def _read_all(pair: PairConfig, key: str) -> list[Pair]:
    pairs = list(read_pairs(*_paths(pair, key)))
    if not pairs:
        raise InputError(f"{pair.src}: there is no sentence in it: check {key}")
    return pairs


def _identity(corpus: _Corpus, digests: list[str]) -> str:
    """The SHA-256 of everything that the prepared corpus depends on."""
    if corpus.model is not None:
        tokenizer: object = hashlib.sha256(corpus.model).hexdigest()
    else:
        tokenizer = {k: v.value if isinstance(v, Enum) else v for k, v in asdict(corpus.tokenizer).items()}
    parts = [PREPARE_VERSION, STORE_VERSION, digests, asdict(corpus.filters), tokenizer]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _open_or_build(path: Path, corpus: _Corpus) -> tuple[Store, bytes, dict[str, Any]]:
    """Use what is there; else check the training text, then build under a lock, unless somebody else just has."""
    try:
        if os.path.exists(path):
            return _open(path)
    except InputError as error:
        log.warning("%s: built again", error)
    dropped: Counter[str] = Counter()
    kept = sum(1 for _ in corpus.pairs(dropped))
    _refuse_nothing(kept, corpus, dropped)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")):
            if not _usable(path):
                _build(path, corpus, kept, dropped)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{path}: cannot be written ({reason}): free space or set data.store_dir") from error
    return _open(path)


def _refuse_nothing(kept: int, corpus: _Corpus, dropped: Counter[str]) -> None:
    if kept == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items()) or "the files are empty"
        raise InputError(f"{corpus.source}: no sentence pair is left to train on ({reasons}): check data.filter")


def _usable(path: Path) -> bool:
    try:
        Store.open(path)
    except InputError:
        return False
    return True


def _open(path: Path) -> tuple[Store, bytes, dict[str, Any]]:
    store = Store.open(path)
    model = (path / "tokenizer.model").read_bytes()
    return store, model, json.loads((path / "report.json").read_bytes())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel gives back when this process dies."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares the same corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: Path, corpus: _Corpus, kept: int, dropped: Counter[str]) -> None:
    """Build under a temporary name and rename, so that whatever has the name is complete."""
    temporary = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a builder that was killed
    temporary.mkdir()
    try:
        _fill(temporary, corpus, kept, dropped)
        shutil.rmtree(path, ignore_errors=True)  # damaged, or it would have been used
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(path: Path, corpus: _Corpus, kept: int, dropped: Counter[str]) -> None:
    """Write the store, with the tokenizer's model and the report beside it; `kept` pairs passed the text filters."""
    pairs_read = kept + dropped.total()
    model = corpus.model if corpus.model is not None else _train(corpus, kept)
    tokenizer = Tokenizer.from_bytes(model)
    with closing(StoreWriter(path, tokenizer.vocab_size)) as writer:
        for source, target in _encoded(corpus, tokenizer):
            keep = _keep(source, target, corpus.filters, dropped)
            writer.add(list(compress(source, keep)), list(compress(target, keep)))
        _refuse_nothing(len(writer), corpus, dropped)
        report = {
            "pairs_read": pairs_read,
            "pairs_kept": len(writer),
            "dropped": {reason: dropped[reason] for reason in REASONS},
            "filters": asdict(corpus.filters),
            "tokens": {"src": writer.tokens(0), "tgt": writer.tokens(1)},
            "vocab_size": tokenizer.vocab_size,
        }
        writer.finish({"tokenizer.model": model, "report.json": json.dumps(report, indent=1).encode()})


def _train(corpus: _Corpus, kept: int) -> bytes:
    lines = (text for pair in corpus.pairs(Counter()) for text in pair)
    sample = sample_lines(lines, total=2 * kept, limit=corpus.tokenizer.sample_lines)
    return train_tokenizer(sample, corpus.tokenizer)


def _encoded(corpus: _Corpus, tokenizer: Tokenizer) -> Iterator[tuple[Pieces, Pieces]]:
    """The pieces of both sides, block by block; one block is encoded while the one before it is written."""

    def encode(block: list[Pair]) -> tuple[Pieces, Pieces]:
        source, target = ([pair[side] for pair in block] for side in (0, 1))
        return tokenizer.encode(source, corpus.threads), tokenizer.encode(target, corpus.threads)

    pairs = corpus.pairs(Counter())
    with ThreadPoolExecutor(1) as pool:
        pending = None
        while block := list(islice(pairs, BLOCK)):
            done, pending = pending, pool.submit(encode, block)
            if done is not None:
                yield done.result()
        if pending is not None:
            yield pending.result()


def _keep(source: Pieces, target: Pieces, filters: FilterConfig, dropped: Counter[str]) -> list[bool]:
    """Which pairs pass the filters that look at pieces."""
    counts = np.array([list(map(len, source)), list(map(len, target))])
    shorter, longer = counts.min(axis=0), counts.max(axis=0)
    empty = shorter == 0  # such as lone zero-width spaces
    too_long = ~empty & (longer > filters.max_length)
    ratio = ~empty & ~too_long & (longer > filters.max_ratio * shorter)
    for reason, found in (("no_pieces", empty), ("too_long", too_long), ("ratio", ratio)):
        dropped[reason] += int(found.sum())
    keep: list[bool] = (~(empty | too_long | ratio)).tolist()
    return keep
