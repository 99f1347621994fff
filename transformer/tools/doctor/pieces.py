"""Checks of the tokenizer and of the plan: what becomes of the text in pieces, and of the pieces in steps.

    text -> check_characters -> prepare, as training does it -> check_pieces, check_longest   sampled text, in pieces
                                                                check_dropped, check_plan     prepared corpus, in steps

What preparing reports is used as it is. Measured here is what it leaves out: how much of the text is unknown to the
tokenizer, whether decoding restores the source, and what the vocabulary is spent on.
"""

import re
from collections.abc import Sequence

from transformer.config.jobs import TrainJob
from transformer.config.settings import Algorithm, TokenizerConfig
from transformer.data.corpus import with_tag
from transformer.data.prepare import Prepared
from transformer.data.round_trip import RoundTrip
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.tools.doctor.findings import Check, Level, failed, measured, passed, percent
from transformer.tools.doctor.survey import SIDES, Survey
from transformer.tools.preview import Preview
from transformer.vocabulary import EOS, UNK

MOST_TEXTS = 10_000  # of a side that are cut into pieces

# Behind each limit stands the most that was seen on sound corpora, with the settings of their experiments.
MOST_UNKNOWN = 0.002  # of the pieces; seen: 0.0003 (newstest2013)
MOST_BYTES = 0.05  # of the pieces, as bytes spell what has no piece; seen: 0.01 (KFTT)
MOST_SINGLE = 0.5  # of the vocabulary, as characters or bytes; seen: 0.21 (KFTT), and 0.26 before training it
MOST_CHANGED = 0.02  # of the sentences, by decoding; seen: 0.01 (newstest2013, whose vocabulary 2,000 pairs made)
MOST_DROPPED = 0.05  # of the pairs, by their lengths; seen: 0.0005 (KFTT)
MOST_PADDING = 0.5  # of the positions of a step; seen: 0.14 (KFTT)

_BYTE = re.compile("<0x[0-9A-F]{2}>")


def check_characters(surveys: Sequence[Survey], job: TrainJob) -> list[Check]:
    """Whether each vocabulary has room for every character, before a tokenizer is trained for minutes."""
    characters: tuple[set[str], set[str]] = (set(), set())  # of either side
    for survey in surveys:
        if survey.is_training:
            characters[0].update(*survey.sources)
            characters[1].update(*survey.targets)

    models = job.tokenizer.models()
    if len(models) == 1:
        return [
            _check_characters(characters[0] | characters[1], model, key=key, where="vocabulary", job=job)
            for key, model in models.items()
        ]
    return [
        _check_characters(of_side, model, key=key, where=f"{side} vocabulary", job=job)
        for of_side, (key, model), side in zip(characters, models.items(), SIDES, strict=True)
    ]


def _check_characters(characters: set[str], model: TokenizerConfig, *, key: str, where: str, job: TrainJob) -> Check:
    """Whether a vocabulary has room for these characters; `key` is the group of its settings."""
    if model.model is not None or job.init_from is not None:
        return passed("characters", where, found=f"{len(characters):,}, and a tokenizer that is given")

    may_be_all = model.algorithm is Algorithm.char or model.character_coverage < 1.0
    return measured(
        "characters",
        where,
        found=f"{len(characters):,} different characters in the training text, {model.vocab_size:,} pieces",
        value=len(characters) / model.vocab_size,
        limit=1.0 if may_be_all else MOST_SINGLE,
        level=Level.error,
        remedy=f"set {key}.vocab_size to {8 * len(characters):,} or so, or {key}.character_coverage=0.9995 "
        f"{key}.byte_fallback=true, which spell rare characters as bytes",
        places=[],
    )


def check_pieces(surveys: Sequence[Survey], tokenizers: Tokenizers) -> list[Check]:
    """What the vocabulary consists of, and for each side of each set its unknown pieces, bytes and round trip."""
    if tokenizers.is_shared:
        keys = ["tokenizer", "tokenizer"]
        checks = [_check_vocabulary(tokenizers.source, "vocabulary", key="tokenizer")]
    else:
        keys = ["tokenizer", "tokenizer.target"]
        checks = [
            _check_vocabulary(tokenizer, f"{side} vocabulary", key=key)
            for tokenizer, side, key in zip(tokenizers.sides, SIDES, keys, strict=True)
        ]
    for survey in surveys:
        for side, tokenizer in enumerate(tokenizers.sides):
            checks += _check_side(survey, side, tokenizer=tokenizer, key=keys[side])
    return checks


def _check_vocabulary(tokenizer: Tokenizer, where: str, *, key: str) -> Check:
    """What a vocabulary consists of; `key` is the group of its settings."""
    pieces = [tokenizer.piece(index) for index in range(EOS + 1, tokenizer.vocab_size)]
    single = sum(len(piece) == 1 for piece in pieces) + len(_bytes_ids(tokenizer))
    return measured(
        "single characters",
        where,
        found=f"{single:,} of {tokenizer.vocab_size:,} pieces are single characters or bytes",
        value=single / tokenizer.vocab_size,
        limit=1.0 if single == len(pieces) else MOST_SINGLE,  # of a model of characters all are
        level=Level.warning,
        remedy=f"raise {key}.vocab_size, or lower {key}.character_coverage (0.9995) with {key}.byte_fallback=true: "
        "hardly a word is a piece",
        places=[],
    )


def _bytes_ids(tokenizer: Tokenizer) -> set[int]:
    """The pieces that stand for a byte."""
    return {index for index in range(EOS + 1, tokenizer.vocab_size) if _BYTE.fullmatch(tokenizer.piece(index))}


def _check_side(survey: Survey, side: int, *, tokenizer: Tokenizer, key: str) -> list[Check]:
    """Cut the texts of one side into pieces, and look at these; `key` is the group of its tokenizer's settings."""
    # Encode, a sample where there are many.
    stride = -(-len(survey.lines) // MOST_TEXTS) or 1
    texts = survey.side(side)[::stride]
    lines = survey.lines[::stride]
    encoded = tokenizer.encode(texts)

    # Count.
    total = max(1, sum(map(len, encoded)))
    characters = sum(map(len, texts))
    bytes_ids = _bytes_ids(tokenizer)
    unknown = sum(ids.count(UNK) for ids in encoded)
    spelled = sum(index in bytes_ids for ids in encoded for index in ids)
    lines_with_unknown = [line for line, ids in zip(lines, encoded, strict=True) if UNK in ids]

    # Decode again.
    trip = RoundTrip.of(texts, tokenizer)
    example = f", such as {trip.example.text!r} -> {trip.example.decoded!r}" if trip.example else ""

    where = f"{survey.name} {SIDES[side]}"
    return [
        measured(
            "unknown pieces",
            where,
            found=f"{percent(unknown / total)} of {total:,} pieces are unknown; "
            f"a piece has {characters / total:.2f} characters on average",
            value=unknown / total,
            limit=MOST_UNKNOWN,
            level=Level.error,
            remedy=f"{key}.byte_fallback=true spells them as bytes; or raise {key}.vocab_size and "
            f"{key}.character_coverage=1.0",
            places=survey.places(lines_with_unknown, side),
        ),
        measured(
            "pieces of bytes",
            where,
            found=f"{percent(spelled / total)} of {total:,} pieces are bytes",
            value=spelled / total,
            limit=MOST_BYTES,
            level=Level.warning,
            remedy=f"raise {key}.vocab_size or {key}.character_coverage: characters are spelled out",
            places=[],
        ),
        measured(
            "round trip",
            where,
            found=f"{trip.changed:,} of {trip.checked:,} sentences change when they are encoded and decoded{example}",
            value=trip.changed / max(1, trip.checked),
            limit=MOST_CHANGED,
            level=Level.warning,
            remedy=f"{key}.byte_fallback=true and {key}.normalization=identity keep them as they are",
            places=[],
        ),
    ]


# ---- lengths --------------------------------------------------------------------------------------------------------


def check_longest(surveys: Sequence[Survey], job: TrainJob, tokenizers: Tokenizers) -> list[Check]:
    """The longest sentences of a training set against the step, of an evaluation set against the model's positions."""
    tags = {name: pair.tag for name, pair in job.data.sets().items()}
    checks = []
    for survey in surveys:
        if survey.is_training:
            key = "train.tokens_per_step"
            limit = job.train.tokens_per_step
            remedy = (
                "split these lines: line ends are missing there, and what is longer than "
                f"data.filter.max_length={job.data.filter.max_length} is not trained on"
            )
        else:
            key = "model.max_positions"
            limit = job.model.max_positions
            remedy = "split these lines: what is longer is cut off"

        tag = tags[survey.name]
        lengths = {line: _tokens(tokenizers, with_tag(source, tag), target) for line, source, target in survey.longest}
        longest = max(lengths.values(), default=0)
        too_long = [line for line, length in lengths.items() if length > limit]

        found = f"the longest sentence has {longest:,} tokens; {key}={limit}"
        if too_long:
            places = survey.places(too_long)
            check = failed(
                "longest sentence", survey.name, found=found, level=Level.warning, remedy=remedy, places=places
            )
        else:
            check = passed("longest sentence", survey.name, found=found)
        checks.append(check)
    return checks


def _tokens(tokenizers: Tokenizers, source: str, target: str) -> int:
    """The tokens of a pair's longer side, with EOS."""
    [source_ids] = tokenizers.source.encode([source])
    [target_ids] = tokenizers.target.encode([target])
    return max(len(source_ids), len(target_ids)) + 1


def check_dropped(prepared: Prepared, job: TrainJob) -> Check:
    """The pairs that the filters drop because of their lengths, as preparing has counted them."""
    report = prepared.report
    reasons = ("empty", "no_pieces", "too_long", "ratio")
    dropped = {reason: report.dropped[reason] for reason in reasons}
    share = sum(dropped.values()) / max(1, report.pairs_read)

    counted = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
    filters = job.data.filter
    return measured(
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
    """How much of a step is padding, and how often the training reads the corpus."""
    epochs = job.train.max_steps / preview.steps
    return measured(
        "padding",
        "plan",
        found=f"{preview.first_epoch}, so train.max_steps={job.train.max_steps} are {epochs:,.1f} epochs; "
        f"{preview.padding}",
        value=preview.padding_share,
        limit=MOST_PADDING,
        level=Level.warning,
        remedy="lower train.max_tokens, or set train.layout=packed: most of what is computed is padding",
        places=[],
    )
