"""`transformer score`: how probable given translations are, pair by pair, in order, whatever their number.

The pairs are lines of two files, or rows `source TAB target` on standard input. Bad text is an error, never repaired:
the score would be that of another sentence.
"""

import logging
import math
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch

from transformer.config.jobs import ScoreJob
from transformer.data.corpus import LONGEST_LINE, Pair, read_pairs, with_tag
from transformer.decoding.bulk import choose_device, from_files
from transformer.decoding.loading import load_for
from transformer.decoding.output import format_log_probs
from transformer.decoding.stream import Output, Tally, read_blocks, stream
from transformer.errors import InputError
from transformer.loss import perplexity
from transformer.machine import resolve_threads

log = logging.getLogger(__name__)

BLOCK = 2_000  # pairs of files that are scored together, before anything is written
STDIN = "standard input"
UNIT = "pair"


def run(job: ScoreJob, stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Score until the pairs end, flushing after each block, and log the perplexity of all.

    From files to a file, blocks are kept, and the same command goes on where it was killed: see `bulk`.

    Raises InputError where there is no model, where a file cannot be read or has another number of lines, for a row
    that is no pair, text that is not UTF-8, and a side that is longer than the model has positions for; Stopped where a
    signal comes and blocks are kept.
    """
    choose_device(job)
    torch.set_num_threads(resolve_threads(job.threads))
    work = _Work(job)

    tally: Tally | None
    if job.src is None or job.tgt is None:
        is_dialogue = stdin.isatty() or stdout.isatty()
        tally = stream(_rows(stdin), work, stdout, unit=UNIT, is_dialogue=is_dialogue)
    else:
        source, target = job.src, job.tgt
        tally = from_files(
            job,
            lambda: _pairs(source, target),
            work,
            translator=work.translator,
            files={"src": source, "tgt": target},
            stdout=stdout,
            unit=UNIT,
            finish=None,
        )
    if tally is not None:
        _log_perplexity(tally)


class _Work:
    """What is done with a block of pairs."""

    def __init__(self, job: ScoreJob) -> None:
        self._job = job
        self._origins = (str(job.src or STDIN), str(job.tgt or STDIN))
        self.translator = load_for(job)

    def __call__(self, pairs: list[Pair], line: int) -> Output:
        """The lines of output for some pairs, the first of which is that of `line`."""
        job = self._job
        sources = [with_tag(source, job.tag) for source, _ in pairs]
        targets = [target for _, target in pairs]
        results = self.translator.score(sources, targets, first_line=line, origins=self._origins)
        tally = {
            "pairs": sum(scored.log_prob is not None for scored in results),
            "pairs with a blank side": sum(scored.log_prob is None for scored in results),
            "pieces": sum(len(scored.pieces) for scored in results),
            "log-probability": math.fsum(scored.log_prob for scored in results if scored.log_prob is not None),
        }
        return Output(format_log_probs(results, job.format, first_line=line, by_piece=job.pieces), tally)


def _log_perplexity(tally: Tally) -> None:
    total = tally.get("log-probability", 0.0)
    length = tally.get("pieces", 0)
    n_blank = tally.get("pairs with a blank side", 0)
    log.info(
        "%d pairs of %d target pieces (EOS counted): log-probability %.4f, perplexity %.4f%s",
        tally.get("pairs", 0),
        length,
        total,
        perplexity(-total / max(length, 1)),
        f"; {n_blank} with a blank side have no score" if n_blank else "",
    )


def _rows(stdin: BinaryIO) -> Iterator[list[Pair]]:
    """The pairs of standard input, as they come."""
    line = 1
    for rows in read_blocks(getattr(stdin, "read1", stdin.read)):
        yield [_pair(row, line + n) for n, row in enumerate(rows)]
        line += len(rows)


def _pairs(source: str, target: str) -> Generator[list[Pair], None, None]:
    """The pairs of two files, many at a time."""
    with closing(read_pairs(Path(source), Path(target))) as pairs:
        while block := list(islice(pairs, BLOCK)):
            yield block


def _pair(row: bytes, number: int) -> Pair:
    """Source and target of a row of standard input."""
    place = f"{STDIN}:{number}"
    if len(row) > LONGEST_LINE:
        raise InputError(f"{place}: longer than {LONGEST_LINE} bytes: leave the pair out")

    try:
        cells = row.decode("utf-8").removesuffix("\r").split("\t")
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 at byte {error.start + 1}: mend the line or convert the text") from None

    if len(cells) != 2:
        raise InputError(f"{place}: {len(cells)} columns, not 2: separate source and target by one tab")
    return cells[0], cells[1]
