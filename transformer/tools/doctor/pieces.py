"""Tokenizer and plan: what becomes of the text in pieces, and of the pieces in steps.

The corpus is prepared by the code that training uses, and what that reports is used here; only what it does not look at
is measured: the source's way through the tokenizer, how much is unknown, what the vocabulary is spent on.
"""

import re
from collections.abc import Sequence

from transformer.config.jobs import TrainJob
from transformer.data.prepare import Prepared
from transformer.data.round_trip import RoundTrip
from transformer.data.tokenizer import Tokenizer
from transformer.tools.doctor.findings import Check, Level, failed, judged, passed, percent, place
from transformer.tools.doctor.survey import Survey
from transformer.training.preview import Preview, describe_preview
from transformer.vocabulary import EOS, UNK

SIDES = ("source", "target")
MOST_TEXTS = 10_000  # of a side that are cut into pieces

# Behind each limit stands the most that was seen on sound corpora, with the settings of their experiments.
MOST_UNKNOWN = 0.002  # of the pieces; seen: 0.0003 (newstest2013)
MOST_BYTES = 0.05  # of the pieces, as bytes spell what has no piece; seen: 0.01 (KFTT)
MOST_SINGLE = 0.5  # of the vocabulary, as characters or bytes; seen: 0.21 (KFTT), and 0.26 before training it
MOST_CHANGED = 0.02  # of the sentences do not come back; seen: 0.01 (newstest2013, whose vocabulary 2,000 pairs made)
MOST_DROPPED = 0.05  # of the pairs, by their lengths; seen: 0.0005 (KFTT)
MOST_PADDING = 0.5  # of the positions of a step; seen: 0.14 (KFTT)

_BYTE = re.compile("<0x[0-9A-F]{2}>")


def check_characters(surveys: Sequence[Survey], job: TrainJob) -> Check:
    """Whether the vocabulary has room for every character, before a tokenizer is trained for minutes."""
    characters = set[str]()
    for survey in surveys:
        if survey.is_training:
            characters.update(*survey.sources, *survey.targets)

    found = f"{len(characters):,} different characters in the training text, {job.tokenizer.vocab_size:,} pieces"
    if job.tokenizer.model is not None or job.init_from is not None:
        return passed("characters", "vocabulary", found=f"{len(characters):,}, and a tokenizer that is given")
    return judged(
        "characters",
        "vocabulary",
        found=found,
        value=len(characters) / job.tokenizer.vocab_size,
        limit=MOST_SINGLE if job.tokenizer.character_coverage == 1.0 else 1.0,
        level=Level.error,
        remedy=f"set tokenizer.vocab_size to {8 * len(characters):,} or so, or tokenizer.character_coverage=0.9995 "
        "tokenizer.byte_fallback=true, which spell rare characters as bytes",
        places=[],
    )


def check_pieces(surveys: Sequence[Survey], tokenizer: Tokenizer) -> list[Check]:
    """Unknown pieces and the way back, of each side of each set; what the vocabulary consists of."""
    pieces = [tokenizer.piece(index) for index in range(EOS + 1, tokenizer.vocab_size)]
    is_byte = {index for index, piece in enumerate(pieces, EOS + 1) if _BYTE.fullmatch(piece)}
    single = sum(len(piece) == 1 for piece in pieces) + len(is_byte)
    checks = [
        judged(
            "single characters",
            "vocabulary",
            found=f"{single:,} of {tokenizer.vocab_size:,} pieces are single characters or bytes",
            value=single / tokenizer.vocab_size,
            limit=MOST_SINGLE,
            level=Level.warning,
            remedy="raise tokenizer.vocab_size, or lower tokenizer.character_coverage (0.9995) with "
            "tokenizer.byte_fallback=true: hardly a word is a piece",
            places=[],
        )
    ]
    for survey in surveys:
        for side in (0, 1):
            checks += _check_side(survey, side, tokenizer, is_byte)
    return checks


def _check_side(survey: Survey, side: int, tokenizer: Tokenizer, is_byte: set[int]) -> list[Check]:
    stride = -(-len(survey.lines) // MOST_TEXTS) or 1
    texts = survey.side(side)[::stride]
    lines = survey.lines[::stride]
    encoded = tokenizer.encode(texts)
    total = max(1, sum(map(len, encoded)))
    characters = sum(map(len, texts))
    unknown = sum(ids.count(UNK) for ids in encoded)
    spelled = sum(index in is_byte for ids in encoded for index in ids)
    trip = RoundTrip.of(texts, tokenizer)
    shown = f", such as {trip.example.text!r} -> {trip.example.decoded!r}" if trip.example else ""

    where = f"{survey.name} {SIDES[side]}"
    with_unknown = [line for line, ids in zip(lines, encoded, strict=True) if UNK in ids]
    return [
        judged(
            "unknown pieces",
            where,
            found=f"{percent(unknown / total)} of {total:,} pieces, of {characters / total:.2f} characters each",
            value=unknown / total,
            limit=MOST_UNKNOWN,
            level=Level.error,
            remedy="tokenizer.byte_fallback=true spells them as bytes; or raise tokenizer.vocab_size and "
            "tokenizer.character_coverage=1.0",
            places=[place(survey.paths[side], with_unknown)],
        ),
        judged(
            "pieces of bytes",
            where,
            found=f"{percent(spelled / total)} of {total:,} pieces are bytes",
            value=spelled / total,
            limit=MOST_BYTES,
            level=Level.warning,
            remedy="raise tokenizer.vocab_size or tokenizer.character_coverage: characters are spelled out",
            places=[],
        ),
        judged(
            "round trip",
            where,
            found=f"{trip.changed:,} of {trip.checked:,} sentences do not come back from the tokenizer{shown}",
            value=trip.changed / max(1, trip.checked),
            limit=MOST_CHANGED,
            level=Level.warning,
            remedy="tokenizer.byte_fallback=true and tokenizer.normalization=identity bring them back",
            places=[],
        ),
    ]


# ---- lengths --------------------------------------------------------------------------------------------------------


def check_lengths(surveys: Sequence[Survey], job: TrainJob, tokenizer: Tokenizer) -> list[Check]:
    """The longest sentences of each set against the step, and of an evaluation set against the model's positions."""
    checks = []
    for survey in surveys:
        limit = job.train.tokens_per_step if survey.is_training else job.model.max_positions
        key = "train.tokens_per_step" if survey.is_training else "model.max_positions"
        lengths = [_tokens(tokenizer, source, target) for _, source, target in survey.longest]
        longest = max(lengths, default=0)
        found = f"the longest sentence has {longest:,} tokens; {key}={limit:,}"
        too_long = [line for (line, _, _), length in zip(survey.longest, lengths, strict=True) if length > limit]
        if too_long:
            checks.append(
                failed(
                    "longest sentence",
                    survey.name,
                    found=found,
                    level=Level.warning,
                    remedy="split these lines: line ends are missing there, and what is longer than "
                    f"data.filter.max_length={job.data.filter.max_length} is not trained on"
                    if survey.is_training
                    else "split these lines: what is longer is cut off",
                    places=[place(path, too_long) for path in dict.fromkeys(survey.paths)],
                )
            )
        else:
            checks.append(passed("longest sentence", survey.name, found=found))
    return checks


def _tokens(tokenizer: Tokenizer, source: str, target: str) -> int:
    return max(len(ids) for ids in tokenizer.encode([source, target])) + 1


def check_dropped(prepared: Prepared, job: TrainJob) -> Check:
    """The pairs that the filters drop for their lengths, as preparing has counted them."""
    report = prepared.report
    reasons = ("empty", "no_pieces", "too_long", "ratio")
    dropped = {reason: report.dropped[reason] for reason in reasons}
    share = sum(dropped.values()) / max(1, report.pairs_read)
    counted = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
    filters = job.data.filter
    return judged(
        "dropped pairs",
        "plan",
        found=f"{percent(share)} of {report.pairs_read:,} pairs are dropped ({counted})",
        value=share,
        limit=MOST_DROPPED,
        level=Level.warning,
        remedy=f"raise data.filter.max_length={filters.max_length} or data.filter.max_ratio={filters.max_ratio:g}, or "
        "mend the text: blank lines, and sentences of unlike lengths",
        places=[],
    )


def check_plan(preview: Preview, job: TrainJob) -> Check:
    """Padding, and how often the corpus is seen."""
    epochs = job.train.max_steps / preview.steps
    described = describe_preview(preview)
    return judged(
        "padding",
        "plan",
        found=f"{described[0]}, so train.max_steps={job.train.max_steps:,} are {epochs:,.1f} epochs; {described[2]}",
        value=preview.padding_share,
        limit=MOST_PADDING,
        level=Level.warning,
        remedy="lower train.max_tokens, or set train.layout=packed: most of what is computed is padding",
        places=[],
    )
