"""`transformer score`: how probable given translations are, pair by pair, in order, whatever their number.

The pairs are lines of two files, or rows `source TAB target` on standard input. Bad text is an error, never repaired:
the score would be that of another sentence.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch

from transformer.config.jobs import ScoreJob
from transformer.data.corpus import LONGEST_LINE, Pair, read_pairs, with_tag
from transformer.decoding.loading import load_for
from transformer.decoding.output import format_log_probs
from transformer.decoding.stream import read_blocks, throughput, warn_of_missing_tag
from transformer.errors import InputError
from transformer.loss import perplexity
from transformer.machine import resolve_threads

log = logging.getLogger(__name__)

BLOCK = 2_000  # pairs of files that are scored together, before anything is written
STDIN = "standard input"


def run(job: ScoreJob, stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Score until the pairs end, flushing after each block, and log the perplexity of all.

    Raises InputError where there is no model, where a file cannot be read or has another number of lines, for a row
    that is no pair, text that is not UTF-8, and a side that is longer than the model has positions for.
    """
    torch.set_num_threads(resolve_threads(job.threads))
    translator = load_for(job)
    origins = (str(job.src or STDIN), str(job.tgt or STDIN))

    line = 1  # of the next pair
    total = 0.0  # log-probability
    length = 0  # target pieces
    n_blank = 0
    is_warned = job.tag is not None
    with throughput("pair", stdin, stdout) as advance:
        for pairs in _blocks(job, stdin):
            sources = [with_tag(source, job.tag) for source, _ in pairs]
            is_warned = is_warned or warn_of_missing_tag(sources, translator.tags, first_line=line, key="tag")
            targets = [target for _, target in pairs]
            results = translator.score(sources, targets, first_line=line, origins=origins)
            stdout.write(format_log_probs(results, job.format, first_line=line, by_piece=job.pieces).encode("utf-8"))
            stdout.flush()

            total += math.fsum(scored.log_prob for scored in results if scored.log_prob is not None)
            length += sum(len(scored.pieces) for scored in results)
            n_blank += sum(scored.log_prob is None for scored in results)
            line += len(pairs)
            advance(len(pairs))

    left_out = f"; {n_blank} with a blank side have no score" if n_blank else ""
    log.info(
        "%d pairs of %d target pieces (EOS counted): log-probability %.4f, perplexity %.4f%s",
        line - 1 - n_blank,
        length,
        total,
        perplexity(-total / max(length, 1)),
        left_out,
    )


def _blocks(job: ScoreJob, stdin: BinaryIO) -> Iterator[list[Pair]]:
    """The pairs, many at a time; never an empty block."""
    # Rows of standard input, as they come.
    if job.src is None or job.tgt is None:
        line = 1
        for rows in read_blocks(stdin):
            yield [_pair(row, line + n) for n, row in enumerate(rows)]
            line += len(rows)
        return

    # Lines of two files.
    with closing(read_pairs(Path(job.src), Path(job.tgt))) as pairs:
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
