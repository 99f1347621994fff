"""Turns screened pairs into a prepared corpus: tokenizers, a store, and the report beside it.

    second reading    train the tokenizer on a sample of the lines     -> tokenizer.model, or one for each side
    third reading     encode, filter by the number of pieces, write    -> the store, and report.json

Memory must not grow with the text: pairs are encoded block by block.
"""

import json
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.config.primitives import from_json, to_json
from transformer.config.settings import FilterConfig
from transformer.data.corpus import Pair, has_several_sentences
from transformer.data.report import BuildReport, LineCounts, PairCounts, TokenCounts
from transformer.data.round_trip import RoundTrip
from transformer.data.screening import Screened, TextCounts, refuse_empty
from transformer.data.store import Ids, Sentences, Store, StoreWriter
from transformer.data.tokenizer import Tokenizers, sample_lines, train_tokenizer
from transformer.data.training_text import Model, TrainingText
from transformer.errors import InputError
from transformer.files import read_json
from transformer.machine import trim_heap

REPORT = "report.json"  # beside the files of the store, as TOKENIZER is
BLOCK = 10_000  # pairs that are in memory at a time
SAMPLED_TARGETS = 2_000  # training targets, at least, of which the round trip through the tokenizer is checked

# Why a pair is dropped for its number of pieces, in the order of the checks: behind what `screening` drops it for.
REASONS = ("no_pieces", "too_long", "ratio")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PieceCounts:
    """What encoding tells of some pairs that are kept by their text."""

    kept: list[int]  # pairs of each set that are kept by their pieces, too
    dropped: dict[str, int]  # the others, by reason
    several_sentences: int  # kept sources that have more than one
    lengths: list[int]  # how many kept sources have so many pieces
    targets: RoundTrip  # of a sample of the targets


@dataclass(frozen=True)
class _EncodedBlock:
    """Some pairs that are kept by their text, as pieces, and what only their text tells."""

    source: Sentences
    target: Sentences
    has_several_sentences: npt.NDArray[np.bool_]  # of the sources
    sampled_targets: list[str]


# ---- a prepared corpus ----------------------------------------------------------------------------------------------


def open_built(path: Path) -> tuple[Store, Tokenizers, BuildReport]:
    """The prepared corpus at `path`. Raises InputError where it is missing, damaged or incomplete."""
    store = Store.open(path)
    try:
        tokenizers = Tokenizers.load(path)
        report = from_json(BuildReport, read_json(path / REPORT))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a complete prepared corpus ({error})") from error
    return store, tokenizers, report


def build(path: Path, corpus: TrainingText, screened: Screened) -> None:
    """Write the store into the directory `path`, with the tokenizer's model and the report beside it."""
    text = screened.counts
    kept_by_text = screened.kept_by_text
    tokenizers = Tokenizers.of(train_models(corpus, kept_by_text), path)

    log.info("encoding %s pairs", f"{sum(text.kept):,}")
    with closing(store_writer(path, tokenizers)) as writer:
        pieces = encode_pairs(
            corpus.tagged_pairs(kept_by_text),
            writer,
            tokenizers,
            corpus=corpus,
            kept_by_text=text.kept,
            total=sum(text.kept),
        )
        tokens = TokenCounts(writer.tokens(0), writer.tokens(1))
        writer.finish(
            {**tokenizers.models, REPORT: report_of(corpus, text, pieces, tokens=tokens, tokenizers=tokenizers)}
        )


def report_of(
    corpus: TrainingText, text: TextCounts, pieces: PieceCounts, *, tokens: TokenCounts, tokenizers: Tokenizers
) -> bytes:
    """The content of report.json. Raises InputError where no pair is kept."""
    dropped = text.dropped | pieces.dropped
    refuse_empty(sum(pieces.kept), corpus, dropped)

    lengths = np.array(pieces.lengths)
    report = BuildReport(
        pairs_read=sum(text.read),
        pairs_kept=sum(pieces.kept),
        sources=[PairCounts(read, kept) for read, kept in zip(text.read, pieces.kept, strict=True)],
        dropped=dropped,
        filters=corpus.filters,
        tokens=tokens,
        vocab_size=tokenizers.target.vocab_size,
        targets=pieces.targets,
        lines=LineCounts(pieces.several_sentences, int(lengths.cumsum().searchsorted(0.9999 * lengths.sum()))),
        samples=text.samples,
    )
    return json.dumps(_report_json(report), indent=1).encode()


def _report_json(report: BuildReport) -> dict[str, Any]:
    """The report as it was written before there were detectors, unless they were asked for."""
    primitives = to_json(report)
    if not report.filters.doctor:
        del primitives["samples"], primitives["filters"]["doctor"]
    return primitives


# ---- the tokenizers -------------------------------------------------------------------------------------------------


def train_models(corpus: TrainingText, kept_by_text: bytes) -> dict[str, bytes]:
    """The tokenizers by the name of their file: each is given, or trained in a reading of the text of its own.

    `kept_by_text` has a byte for each pair of all the sets, 1 for one that is kept.
    """
    models = {}
    for side, model in enumerate(corpus.models):
        models[model.file] = model.given or _train_tokenizer(corpus, kept_by_text, model, side=side)
    return models


def _train_tokenizer(corpus: TrainingText, kept_by_text: bytes, model: Model, *, side: int) -> bytes:
    """Train a tokenizer on the pairs that are kept by their text: on both sides of them, or on its own.

    `side` is 0 for the source's, 1 for the target's.
    """
    pairs = corpus.pairs(kept_by_text)
    is_shared = len(corpus.models) == 1
    lines = chain.from_iterable(pairs) if is_shared else (pair[side] for pair in pairs)  # source and target in turn
    total = (2 if is_shared else 1) * kept_by_text.count(1)
    limit = model.config.sample_lines
    whose = "" if is_shared else (" of the source", " of the target")[side]
    log.info("training the tokenizer%s on %s of %s lines", whose, f"{min(total, limit):,}", f"{total:,}")

    content = train_tokenizer(
        sample_lines(lines, total=total, limit=limit),
        model.config,
        tags=corpus.tags if side == 0 else [],  # which stand in front of sources
        key=model.key,
    )
    trim_heap()  # a gigabyte, beside which the store of tens of millions of pairs would need as much again
    return content


# ---- encoding -------------------------------------------------------------------------------------------------------


def store_writer(path: Path, tokenizers: Tokenizers) -> StoreWriter:
    """A writer into the directory `path`, of ids that have room for the pieces of either side."""
    return StoreWriter(path, max(tokenizer.vocab_size for tokenizer in tokenizers.sides))


def encode_pairs(
    pairs: Iterator[Pair],
    writer: StoreWriter,
    tokenizers: Tokenizers,
    *,
    corpus: TrainingText,
    kept_by_text: Sequence[int],
    total: int,
) -> PieceCounts:
    """Encode pairs, with the tags of their sets, and write those whose numbers of pieces pass the filters.

    `kept_by_text` is how many of them are of each set, and `total` how many there are in the whole corpus, of which
    they may be a part.
    """
    filters = corpus.filters
    sampled_every = max(1, total // SAMPLED_TARGETS)  # how far apart those are, in a block, that are checked
    kept = bytearray()  # 1 for a pair that is written
    dropped = Counter(dict.fromkeys(REASONS, 0))
    sampled_targets: list[str] = []
    several_sentences = 0
    lengths = np.zeros(filters.max_length + 1, np.int64)

    for block in _encode_blocks(pairs, tokenizers, threads=corpus.threads, sampled_every=sampled_every):
        keep = _filter_by_pieces(block.source.counts, block.target.counts, filters, dropped=dropped)
        writer.add(block.source.select(keep), block.target.select(keep))
        kept += keep.tobytes()
        sampled_targets += block.sampled_targets
        several_sentences += int(block.has_several_sentences[keep].sum())
        lengths += np.bincount(block.source.counts[keep], minlength=len(lengths))

    borders = pairwise(accumulate(kept_by_text, initial=0))
    return PieceCounts(
        kept=[kept.count(1, start, end) for start, end in borders],
        dropped=dict(dropped),
        several_sentences=several_sentences,
        lengths=lengths.tolist(),
        targets=RoundTrip.of(sampled_targets, tokenizers.target),
    )


def _encode_blocks(
    pairs: Iterator[Pair], tokenizers: Tokenizers, *, threads: int, sampled_every: int
) -> Iterator[_EncodedBlock]:
    """The pairs block by block, in order.

    A thread takes a whole block: to share each block among the threads would have them wait for each other at its end.
    """
    ahead = deque[Future[_EncodedBlock]]()
    with ThreadPoolExecutor(threads) as pool:
        while block := list(islice(pairs, BLOCK)):
            ahead.append(pool.submit(_encode, block, tokenizers, sampled_every=sampled_every))
            if len(ahead) > threads:  # one more than are encoded: no thread waits for the next
                yield ahead.popleft().result()
        yield from (future.result() for future in ahead)


def _encode(block: list[Pair], tokenizers: Tokenizers, *, sampled_every: int) -> _EncodedBlock:
    sources = [source for source, _ in block]
    targets = [target for _, target in block]
    return _EncodedBlock(
        source=Sentences.of(tokenizers.source.encode(sources)),
        target=Sentences.of(tokenizers.target.encode(targets)),
        has_several_sentences=np.fromiter(map(has_several_sentences, sources), np.bool_, len(sources)),
        sampled_targets=targets[::sampled_every],
    )


def _filter_by_pieces(
    source_counts: Ids, target_counts: Ids, filters: FilterConfig, *, dropped: Counter[str]
) -> npt.NDArray[np.bool_]:
    """Which pairs `(b,)` to keep, by their numbers of pieces; those that are not kept are counted in `dropped`."""
    shorter = np.minimum(source_counts, target_counts)
    longer = np.maximum(source_counts, target_counts)

    empty = shorter == 0  # such as lone zero-width spaces
    too_long = ~empty & (longer > filters.max_length)
    ratio = ~empty & ~too_long & (longer > filters.max_ratio * shorter)
    for reason, is_dropped in zip(REASONS, (empty, too_long, ratio), strict=True):
        dropped[reason] += int(is_dropped.sum())
    return ~(empty | too_long | ratio)


def sum_counts(counts: Sequence[PieceCounts]) -> PieceCounts:
    """What encoding all the pairs at once would have told."""
    dropped = Counter[str]()
    for some in counts:
        dropped.update(some.dropped)
    return PieceCounts(
        kept=[sum(of_set) for of_set in zip(*(some.kept for some in counts), strict=True)],
        dropped=dict(dropped),
        several_sentences=sum(some.several_sentences for some in counts),
        lengths=[sum(of_length) for of_length in zip(*(some.lengths for some in counts), strict=True)],
        targets=RoundTrip.sum([some.targets for some in counts]),
    )
