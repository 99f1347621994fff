"""The commonest faults of text, looked for in the first pairs of each set at every start; `doctor` looks for more.

A fault is said only where it is plain: who trains on sound text should never read of one.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from transformer.config.languages import language_of, name_of
from transformer.config.settings import is_training_set
from transformer.data.corpus import Pair
from transformer.errors import InputError
from transformer.tools.detectors.languages import are_exchanged

FEWEST_TOLD = 10  # pairs, of which copies are a share
MOST_COPIES = 0.5  # of a set
LEAST_SHARE = 0.05  # of an evaluation set that may be trained on
FEWEST_PAIRS = 50  # of an evaluation set
SHORT = 40  # characters of both sides: such pairs recur by chance

HEADINGS = {"source", "target", "src", "tgt", "trg", "original", "translation", "reference", "sentence1", "sentence2"}
HEADINGS |= {f"{side} {what}" for side in ("source", "target") for what in ("text", "sentence", "language")}


def warnings_of(sets: Mapping[str, Sequence[Pair]], languages: Mapping[str, tuple[str, str]]) -> list[str]:
    """What is plainly wrong, each in a line: a code that is none, a header, copies or exchanged sides in a set, and a
    set for evaluation that is trained on.

    `sets` has the first pairs of each set by its name, `languages` the codes of its two sides.
    """
    found = _bad_codes(languages)
    for name, pairs in sets.items():
        source, target = languages[name]
        if pairs and is_header(pairs[0], languages[name]):
            shown = " / ".join(pairs[0])
            found.append(f"data.{name}: its first pair is a header ({shown}), and no text: remove that line")
        if copies := _copies(name, pairs):
            found.append(copies)
        elif are_exchanged([pair[0] for pair in pairs], [pair[1] for pair in pairs], (_code(source), _code(target))):
            found.append(
                f"data.{name}: its sources look like {target}, and its targets like {source}: exchange "
                f"data.{name}.src and data.{name}.tgt, or data.src_lang and data.tgt_lang"
            )
    trained_on = set(filter(is_training_set, sets))
    for name in sorted(sets.keys() - trained_on):
        found += [text for training in sorted(trained_on) if (text := _overlap(name, training, sets))]
    return found


def _bad_codes(languages: Mapping[str, tuple[str, str]]) -> list[str]:
    """What to say of the language of the sources, where that is no code; of the targets it is refused."""
    found = []
    sets = {source: name for name, (source, _) in languages.items()}
    for code, name in sets.items():
        try:
            language_of(code, "data.src_lang" if len(sets) == 1 else f"data.{name}.src_lang")
        except InputError as error:
            found.append(str(error))
    return found


def is_header(pair: Pair, languages: tuple[str, str]) -> bool:
    """Whether both sides name what stands below them."""
    words = [re.sub(r"[\W_]+", " ", side).strip().lower() for side in pair]
    names = {name.lower() for code in languages for name in (code, _code(code), name_of(_code(code)))}
    return words[0] != words[1] and all(word in names or word in HEADINGS for word in words)


def _code(language: str) -> str:
    """The code by which the tables know a language; one that is no code stays as it is."""
    with suppress(InputError):
        return language_of(language, "data.src_lang")
    return language


def _copies(name: str, pairs: Sequence[Pair]) -> str:
    """What to say of a set with more copies than translations; nothing of copies that are trained on by design."""
    told = [source.strip() == target.strip() for source, target in pairs if source.strip() and target.strip()]
    copies = sum(told)
    if name.startswith("extra.") or len(told) < FEWEST_TOLD or copies <= MOST_COPIES * len(told):
        return ""
    return (
        f"data.{name}: {copies:,} of {len(told):,} targets equal their sources: name the file of translations by "
        f"data.{name}.tgt, or a table of both sides by data.{name}.dataset"
    )


def _overlap(name: str, training: str, sets: Mapping[str, Sequence[Pair]]) -> str:
    """What to say of pairs of a set for evaluation that are among the first of a training set; nothing of a few."""
    pairs = {pair for pair in sets[name] if sum(map(len, pair)) >= SHORT}
    known = pairs & set(sets[training])
    if len(pairs) < FEWEST_PAIRS or len(known) < LEAST_SHARE * len(pairs):
        return ""
    return (
        f"data.{name}: {len(known):,} of {len(pairs):,} pairs are among the first {len(sets[training]):,} of "
        f"data.{training}: scores on what was trained on say nothing, so take them out of one of the two"
    )
