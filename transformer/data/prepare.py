"""From raw text to what training reads: corpus -> tokenizer -> store.

A prepared corpus is named by a digest of the training text, the filters, the tokenizer's settings and the versions of
the formats, so it is built once and shared by every run that agrees on these. Whoever builds holds a file lock; others
wait, then use it. Nothing but copies of hub data sets is written before every text has been read to its end. The
surprise: training text is read three times (check, tokenizer, ids), since memory must not grow with the corpus.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, FilterConfig, PairConfig, TokenizerConfig
from transformer.data.corpus import DUPLICATE, EMPTY, IDENTICAL, KEPT, Pair, judge
from transformer.data.plan import Ids
from transformer.data.source import Source, is_copied, locate, store_beside
from transformer.data.store import STORE_VERSION, Sentences, Store, StoreWriter, build_once, digest_file
from transformer.data.tokenizer import Tokenizer, read_model, sample_lines, train_tokenizer
from transformer.errors import InputError, StorageError
from transformer.machine import resolve_threads, trim_heap

PREPARE_VERSION = 2
BLOCK = 10_000  # pairs that are in memory at a time
REASONS = ("empty", "identical", "duplicate", "no_pieces", "too_long", "ratio")  # in the order of asking
TEXT_REASONS = {EMPTY: "empty", IDENTICAL: "identical", DUPLICATE: "duplicate"}

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

    sources: list[Source]  # one after the other in the store
    filters: FilterConfig
    tokenizer: TokenizerConfig
    model: bytes | None  # a tokenizer model that is given
    threads: int

    def pairs(self, fit: bytes) -> Iterator[Pair]:
        """Those with a 1 in `fit`, which has a byte for each pair of all the sources."""
        return compress(chain.from_iterable(source.pairs() for source in self.sources), fit)


class _Judged(NamedTuple):
    """What the first reading found."""

    verdicts: list[bytes]  # of each source, as `judge` gives them

    @property
    def fit(self) -> bytes:
        return b"".join(self.verdicts).translate(_FIT)

    @property
    def kept(self) -> int:
        return sum(verdicts.count(KEPT) for verdicts in self.verdicts)

    @property
    def dropped(self) -> Counter[str]:
        return Counter({reason: sum(v.count(code) for v in self.verdicts) for code, reason in TEXT_REASONS.items()})


_FIT = bytes(code == KEPT for code in range(256))


def prepare(job: TrainJob) -> Prepared:
    """Read and check every file, then build the prepared corpus or find it already built.

    Raises InputError for bad files and settings, StorageError where the store cannot be written.
    """
    began = time.monotonic()
    root = Path(job.data.store_dir) if job.data.store_dir is not None else store_beside(job.run_dir)
    languages = (job.data.src_lang, job.data.tgt_lang)
    weights, model = _weights(job.data), _given_model(job)
    sources: dict[str, Source] = {}
    sets: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[Pair]] = {}
    for name, pair in _sets(job.data).items():
        sources[name] = locate(pair, f"data.{name}", languages=languages, store_dir=root)
        sets[name] = _describe(sources[name], f"data.{name}")
        if name not in weights:
            texts[name] = sources[name].load(f"data.{name}")
    threads = resolve_threads(job.train.threads)
    corpus = _Corpus([sources[name] for name in weights], job.data.filter, job.tokenizer, model, threads)
    digest = _identity(corpus, [sets[name] for name in weights])
    store, model, built = _open_or_build(root / digest[:16], corpus)
    for (name, weight), counts in zip(weights.items(), built.pop("sources"), strict=True):
        sets[name] |= {"weight": weight, **counts}
    for name, pairs in texts.items():
        sets[name]["pairs_read"] = len(pairs)
    store.mixture = tuple((sets[name]["pairs_kept"], weight) for name, weight in weights.items())
    report = {"digest": digest, "src_lang": languages[0], "tgt_lang": languages[1], "sets": sets, **built}
    if len(weights) > 1:
        for name, weight in weights.items():
            kept, read = (f"{sets[name][count]:,}" for count in ("pairs_kept", "pairs_read"))
            log.info("data.%s: %s of %s pairs, weight %g", name, kept, read, weight)
    log.info("data ready: %s; %.1f s", _summary(built), time.monotonic() - began)
    test = {name: texts[f"test.{name}"] for name in job.data.test}
    return Prepared(store, model, report, texts["dev"], test)


def _sets(data: DataConfig) -> dict[str, PairConfig]:
    """Every set of pairs that is configured, by its key; those first whose faults show soon: small ones, and here."""
    named = {"dev": data.dev, **{f"test.{name}": pair for name, pair in data.test.items()}}
    named |= {"train": data.train, **{f"extra.{name}": pair for name, pair in data.extra.items()}}
    return dict(sorted(named.items(), key=lambda item: is_copied(item[1])))


def _summary(built: dict[str, Any]) -> str:
    read, kept = built["pairs_read"], built["pairs_kept"]
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in built["dropped"].items() if count)
    share = f"{1 - kept / read:.2%} dropped" + (f": {reasons}" if reasons else "")
    tokens = " + ".join(f"{count:,}" for count in built["tokens"].values())
    return f"{kept:,} of {read:,} pairs ({share}), {tokens} tokens, {built['vocab_size']:,} pieces"


def _weights(data: DataConfig) -> dict[str, float]:
    """The sets that are trained on, in the order that they have in the store, and how often an epoch has each."""
    return {"train": 1.0, **{f"extra.{name}": extra.weight for name, extra in sorted(data.extra.items())}}


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


def _describe(source: Source, key: str) -> dict[str, Any]:
    """What a set consists of: path, size and digest of each file, and of a table its columns."""
    files = {}
    for part, path in source.files.items():
        try:
            if path.is_fifo():
                raise InputError(f"{path}: a pipe, but text is read several times: write it to a file for {key}")
            size, digest = digest_file(path)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read ({error.strerror or error}): check {key} and data.root"
            ) from error
        files[part] = {"path": str(path), "bytes": size, "sha256": digest}
    return {"files": files, "columns": source.columns, "origin": source.origin}


def _identity(corpus: _Corpus, sets: list[dict[str, Any]]) -> str:
    """The SHA-256 of everything that the prepared corpus depends on."""
    if corpus.model is not None:
        tokenizer: object = hashlib.sha256(corpus.model).hexdigest()
    else:
        tokenizer = {k: v.value if isinstance(v, Enum) else v for k, v in asdict(corpus.tokenizer).items()}
    text = [[described["columns"], *(file["sha256"] for file in described["files"].values())] for described in sets]
    parts = [PREPARE_VERSION, STORE_VERSION, text, asdict(corpus.filters), tokenizer]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _open_or_build(path: Path, corpus: _Corpus) -> tuple[Store, bytes, dict[str, Any]]:
    """Use what is there; else check the training text, then build under a lock, unless somebody else just has."""
    try:
        if os.path.exists(path):
            return _open(path)
    except InputError as error:
        log.warning("%s: built again", error)
    judged = _Judged(judge([source.pairs() for source in corpus.sources], corpus.filters))
    _refuse_nothing(judged.kept, corpus, judged.dropped)
    try:
        build_once(path, lambda folder: _fill(folder, corpus, judged), usable=_usable)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{path}: cannot be written ({reason}): free space or set data.store_dir") from error
    return _open(path)


def _refuse_nothing(kept: int, corpus: _Corpus, dropped: Counter[str]) -> None:
    if kept == 0:
        files = ", ".join(str(path) for source in corpus.sources for path in source.files.values())
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count) or "the files are empty"
        remedy = "data.train" if dropped.total() == dropped["empty"] else "data.filter"  # which does not ask for those
        raise InputError(f"{files}: no sentence pair is left to train on ({reasons}): check {remedy}")


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


def _fill(path: Path, corpus: _Corpus, judged: _Judged) -> None:
    """Write the store, with the tokenizer's model and the report beside it."""
    fit, dropped = judged.fit, judged.dropped
    model = corpus.model if corpus.model is not None else _train(corpus, judged)
    tokenizer = Tokenizer.from_bytes(model)
    log.info("encoding %s pairs", f"{judged.kept:,}")
    kept = bytearray()  # 1 for each fit pair whose pieces are fit, too
    with closing(StoreWriter(path, tokenizer.vocab_size)) as writer:
        for source, target in _encoded(corpus, fit, tokenizer):
            keep = _keep(source.counts, target.counts, corpus.filters, dropped)
            kept += keep.tobytes()
            writer.add(source.select(keep), target.select(keep))
        _refuse_nothing(len(writer), corpus, dropped)
        report = {
            "pairs_read": len(fit),
            "pairs_kept": len(writer),
            "sources": _counts(judged, kept),
            "dropped": {reason: dropped[reason] for reason in REASONS},
            "filters": asdict(corpus.filters),
            "tokens": {"src": writer.tokens(0), "tgt": writer.tokens(1)},
            "vocab_size": tokenizer.vocab_size,
        }
        writer.finish({"tokenizer.model": model, "report.json": json.dumps(report, indent=1).encode()})


def _counts(judged: _Judged, kept: bytearray) -> list[dict[str, int]]:
    """For each source how many pairs it has, and how many of them are in the store."""
    counts, start = [], 0
    for verdicts in judged.verdicts:
        end = start + verdicts.count(KEPT)
        counts.append({"pairs_read": len(verdicts), "pairs_kept": kept.count(1, start, end)})
        start = end
    return counts


def _train(corpus: _Corpus, judged: _Judged) -> bytes:
    lines = chain.from_iterable(corpus.pairs(judged.fit))
    total, limit = 2 * judged.kept, corpus.tokenizer.sample_lines
    log.info("training the tokenizer on %s of %s lines", f"{min(total, limit):,}", f"{total:,}")
    model = train_tokenizer(sample_lines(lines, total=total, limit=limit), corpus.tokenizer)
    trim_heap()  # a gigabyte, beside which the store of tens of millions of pairs would need as much again
    return model


def _encoded(corpus: _Corpus, fit: bytes, tokenizer: Tokenizer) -> Iterator[tuple[Sentences, Sentences]]:
    """Both sides as pieces, block by block.

    A thread takes a whole block: to share each block among the threads would have them wait for each other at its end.
    """

    def encode(block: list[Pair]) -> tuple[Sentences, Sentences]:
        source, target = map(list, zip(*block, strict=True))
        return Sentences.of(tokenizer.encode(source)), Sentences.of(tokenizer.encode(target))

    pairs, ahead = corpus.pairs(fit), deque[Future[tuple[Sentences, Sentences]]]()
    with ThreadPoolExecutor(corpus.threads) as pool:
        while block := list(islice(pairs, BLOCK)):
            ahead.append(pool.submit(encode, block))
            if len(ahead) > corpus.threads:  # one more than are encoded: no thread waits for the next
                yield ahead.popleft().result()
        yield from (future.result() for future in ahead)


def _keep(source: Ids, target: Ids, filters: FilterConfig, dropped: Counter[str]) -> npt.NDArray[np.bool_]:
    """Which pairs pass the filters that look at pieces, of which they have so many."""
    shorter, longer = np.minimum(source, target), np.maximum(source, target)
    empty = shorter == 0  # such as lone zero-width spaces
    too_long = ~empty & (longer > filters.max_length)
    ratio = ~empty & ~too_long & (longer > filters.max_ratio * shorter)
    for reason, found in (("no_pieces", empty), ("too_long", too_long), ("ratio", ratio)):
        dropped[reason] += int(found.sum())
    return ~(empty | too_long | ratio)
