"""Pairs to train on, made of text and its translations, for back-translation and distillation: `translate keep=0.9`.

    a block -> Pairs.draft      a row for each translation that is sound by itself; the others are counted
    all rows -> Pairs.finish    of these, the pairs of usual lengths; and of those, the most probable ones

Usual lengths, and the least probability to keep, are known only after everything is translated. They come from counts
of rounded numbers, so memory does not grow with the text.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer.checkpoint import find_checkpoint
from transformer.config.jobs import TranslateJob
from transformer.config.settings import DataConfig, LineFormat
from transformer.data.compression import COMPRESSIONS
from transformer.data.corpus import is_blank
from transformer.data.table import format_of
from transformer.decoding.bulk import is_file
from transformer.decoding.output import Translation, json_row, rounded, tsv_row
from transformer.decoding.stream import Output, Tally
from transformer.errors import InputError
from transformer.tools.detectors.alignment import Lengths
from transformer.tools.detectors.lexicon import Floats
from transformer.tools.detectors.text import is_copy, is_loop

MEAN = "mean_log_prob"  # the column of the log-probability a piece
LINE = "line"  # that of the number of the source, counted from 1

KEPT = "kept"
# Why a pair is dropped, in the order of the checks.
REASONS = ("empty", "unfinished", "copies", "loops", "lengths", "improbable")
EMPTY, UNFINISHED, COPIES, LOOPS, LENGTHS, IMPROBABLE = REASONS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pairs:
    """Which pairs a job writes, and how."""

    keep: float  # share of the sound pairs
    kind: LineFormat  # tsv or jsonl
    columns: tuple[str, str]  # names of the source's and of the translation's

    @classmethod
    def of(cls, job: TranslateJob) -> "Pairs | None":
        """Those of a job with `keep`. Raises InputError where its output is no file that can be trained on."""
        if job.keep is None or job.output is None:
            return None
        if not is_file(job.output):
            raise InputError(
                f"output={job.output}: not a file: keep={job.keep} chooses only after everything is translated"
            )
        if format_of(job.output) not in ("tsv", "jsonl"):
            raise InputError(
                f"output={job.output}: keep={job.keep} leaves lines out, so it writes pairs: end the name in .tsv or "
                f".jsonl, or compressed, as in .tsv{COMPRESSIONS[0]}"
            )
        kind = LineFormat[format_of(job.output)]
        return cls(job.keep, kind, _languages(job))

    def draft(self, sources: Sequence[str], translations: Sequence[Translation], *, first_line: int) -> Output:
        """A row of JSON for each translation that is sound by itself: source, text, log-probability a piece, line.

        A translation that says no log-probability is as good as any other.
        """
        tally = Counter[str]()
        rows = []
        for line, (source, translation) in enumerate(zip(sources, translations, strict=True), first_line):
            if reason := _fault(source, translation):
                tally[reason] += 1
            else:
                row = [source.removesuffix("\r"), translation.text, _mean_log_prob(translation), line]
                rows.append(json.dumps(row))
        return Output("".join(f"{row}\n" for row in rows), tally)

    def finish(self, read: Callable[[], Iterator[str]]) -> Iterator[Output]:
        """The lines to write; `read` gives the drafts of all blocks, anew each time."""
        ratios = Counter[float]()
        for block in map(_Block.of, read()):
            ratios.update(block.lengths.log_ratios.round(2).tolist())
        usual = reached_by(0.5, ratios)

        means = Counter[float]()
        for block in map(_Block.of, read()):
            means.update(block.means[~block.lengths.are_outliers(usual)].tolist())
        least = reached_by(self.keep, means)

        yield Output(_header(self.kind, self.columns), {})
        for block in map(_Block.of, read()):
            is_unusual = block.lengths.are_outliers(usual)
            is_kept = ~is_unusual & (block.means >= least)
            rows = [
                _pair(self.kind, self.columns, pair, mean_log_prob=block.told[n], line=block.lines[n])
                for n, pair in enumerate(block.pairs)
                if is_kept[n]
            ]
            n_unusual, n_kept = int(is_unusual.sum()), int(is_kept.sum())
            tally = {LENGTHS: n_unusual, IMPROBABLE: len(block.pairs) - n_unusual - n_kept, KEPT: n_kept}
            yield Output("".join(rows), tally)

    def report(self, tally: Tally) -> None:
        """Log how many pairs were kept, and for what others were dropped."""
        dropped = {reason: int(tally.get(reason, 0)) for reason in REASONS}
        kept = int(tally.get(KEPT, 0))
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items() if count)
        of_lines = f"{kept:,} of {kept + sum(dropped.values()):,} lines"
        log.info("kept %s as pairs to train on; dropped: %s", of_lines, reasons or "none")


@dataclass(frozen=True)
class _Block:
    """The sound pairs of a block."""

    pairs: list[tuple[str, str]]
    told: list[float | None]  # log-probability a piece
    means: Floats  # the same, `(b,)`; 0 for None
    lines: list[int]
    lengths: Lengths

    @classmethod
    def of(cls, draft: str) -> "_Block":
        rows = [json.loads(row) for row in draft.split("\n")[:-1]]
        pairs = [(source, target) for source, target, _, _ in rows]
        told = [mean for _, _, mean, _ in rows]
        means = np.array([mean or 0.0 for mean in told], dtype=np.float64)
        return cls(
            pairs,
            told,
            means,
            [line for *_, line in rows],
            Lengths.of([source for source, _ in pairs], [target for _, target in pairs]),
        )


def _fault(source: str, translation: Translation) -> str | None:
    """Why a translation is not to be trained on, whatever the others are."""
    if is_blank(translation.text):
        return EMPTY
    if not translation.finished:
        return UNFINISHED
    if is_copy(source, translation.text):
        return COPIES
    return LOOPS if is_loop(source, translation.text) else None


def _mean_log_prob(translation: Translation) -> float | None:
    """Rounded as it is written, so that what is written can be chosen from as it is here."""
    if translation.log_prob is None:
        return None
    assert translation.length is not None
    return round(translation.log_prob / translation.length, 4)


def reached_by(share: float, counts: "Counter[float]") -> float:
    """The largest value that at least this share of what was counted reaches; 0 where nothing was."""
    needed = share * counts.total() - 1e-6  # 0.55 * 100 is more than 55
    for value in sorted(counts, reverse=True):
        needed -= counts[value]
        if needed <= 0.0:
            return value
    return 0.0


def _languages(job: TranslateJob) -> tuple[str, str]:
    """The codes of the source's language and of the translations', by which a training finds its columns."""
    data = find_checkpoint(Path(job.run_dir), job.checkpoint).settings("data", DataConfig)
    source, target = data.languages_under(job.tag)
    return (source, target) if source != target else ("source", "target")


def _header(kind: LineFormat, columns: tuple[str, str]) -> str:
    """What stands above pairs: the names of the columns in tsv, nothing in jsonl."""
    return tsv_row(*columns, MEAN, LINE) + "\n" if kind is LineFormat.tsv else ""


def _pair(
    kind: LineFormat, columns: tuple[str, str], pair: tuple[str, str], *, mean_log_prob: float | None, line: int
) -> str:
    """A source and its translation, as a line of tsv or jsonl that a training reads; `line` is that of the source."""
    if kind is LineFormat.tsv:
        return tsv_row(*pair, "" if mean_log_prob is None else f"{mean_log_prob:.4f}", line) + "\n"
    row = {**dict(zip(columns, pair, strict=True)), MEAN: rounded(mean_log_prob), LINE: line}
    return json_row(row) + "\n"
