"""Lines of several sentences: a warning if training had hardly any, or translation sentence by sentence.

    lines -> LineCheck.count ... warn   what a run has not been trained for is said once
    lines -> Sentences.split -> texts, a sentence each -> translations -> Sentences.join -> lines

A model that was trained on single sentences often translates only one of several, and nothing in its output shows it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformer.checkpoint import find_checkpoint
from transformer.config.jobs import TranslateJob
from transformer.config.languages import language_of
from transformer.config.settings import DataConfig
from transformer.data.corpus import has_several_sentences
from transformer.data.report import DataReport, read_report
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.stream import Tally
from transformer.errors import CheckpointError, InputError
from transformer.registry import install_command
from transformer.run_dir import RunDir

HARDLY_EVER = 0.01  # share of the training sources

log = logging.getLogger(__name__)


class LineCheck:
    """Counts the lines that are unlike the sources that a run was trained on, so that it can be said at the end.

    A run whose data.json is missing, or was written when these were not counted, has no opinion.
    """

    def __init__(self, run_dir: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._report = _report_of(run_dir)

    def count(self, texts: Sequence[str]) -> Tally:
        """What there is of these lines: what all are to be judged by, once it is added up."""
        if self._report is None or self._report.lines is None:
            return {}
        longest = self._report.lines.usual_pieces
        return {
            "lines": len(texts),
            "of several sentences": sum(map(has_several_sentences, texts)),
            "of more pieces than usual": sum(len(ids) > longest for ids in self._tokenizer.encode(list(texts))),
        }

    def warn(self, tally: Tally, remedy: str) -> None:
        """Log how many of the lines the model was hardly trained for, if any, and what to do about it."""
        if self._report is None or self._report.lines is None or "lines" not in tally:
            return
        lines, several, long = tally["lines"], tally["of several sentences"], tally["of more pieces than usual"]
        usual = self._report.lines
        share = usual.several_sentences / max(1, self._report.pairs_kept)

        found = []
        if several and share < HARDLY_EVER:
            found.append(f"{several:,} have several sentences, as {share:.2%} of the training sources have")
        if long:
            found.append(f"{long:,} have more than {usual.usual_pieces} pieces, as hardly a training source has")
        if found:
            log.warning(
                "of %s lines, %s: the model may translate a part of them alone: %s",
                f"{lines:,}",
                ", and ".join(found),
                remedy,
            )


def _report_of(run_dir: Path) -> DataReport | None:
    """What the run was trained on, if its data.json can be read."""
    try:
        return read_report(RunDir(run_dir))
    except CheckpointError:
        return None


@dataclass(frozen=True)
class Sentences:
    """Cuts lines into sentences, and puts what comes of these into lines again."""

    segment: Callable[[str, str], list[str]]  # sentencex: a language and a text -> its sentences
    language: str  # of the lines
    between: str  # two sentences of a translation

    @classmethod
    def of(cls, job: TranslateJob) -> "Sentences":
        """For the languages of a run, or of its direction under `job.tag`. Raises InputError without sentencex."""
        try:
            from sentencex import segment
        except ImportError as error:
            raise InputError(f"split=true needs sentencex: {install_command('split')}") from error

        data = find_checkpoint(Path(job.run_dir), job.checkpoint).settings("data", DataConfig)
        source, target = data.languages_under(job.tag)
        with suppress(InputError):  # it may be any name, for which sentencex has general rules
            source = language_of(source, "data.src_lang")
        has_space = language_of(target, "data.tgt_lang") not in ("ja", "zh")  # which in Thai is all that ends one
        return cls(segment, source, between=" " if has_space else "")

    def split(self, lines: Iterable[str]) -> list[list[str]]:
        """The sentences of each line, at least one; a blank line is one."""
        return [self._sentences(line) or [line] for line in lines]

    def _sentences(self, line: str) -> list[str]:
        return [sentence.strip() for sentence in self.segment(self.language, line) if sentence.strip()]

    def join(self, translations: Iterable[str], counts: Iterable[int]) -> list[str]:
        """A line of as many translations as each of these counts says."""
        following = iter(translations)
        return [self.between.join(filter(None, islice(following, count))) for count in counts]
