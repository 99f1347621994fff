"""Public test sets by name, in the run's languages: FLORES+, NTREX-128, WMT24++ and BOUQuET, as the hub has them.

    flores:devtest                      the varieties of the run's languages, where there is one of each
    flores:devtest/eng_Latn-cmn_Hans    these, by the names that the set has for them

A set has a table for each language (FLORES+, BOUQuET), whose rows belong together by a number, or one for each pair
(WMT24++), or a column for each language (NTREX-128). What the varieties are called is read from the hub.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer.config.languages import language_of
from transformer.data.corpus import Pair, is_blank
from transformer.data.hub import dataset_revision
from transformer.data.source import DatasetOrigin, hub_subsets, stream_tables
from transformer.errors import InputError
from transformer.plugins import CorpusRecord
from transformer.terminal import printable

Sides = tuple[str, str]

# Codes of ISO 639-3 that stand for a language which the tables of the package know by the code of its family.
_MEMBERS = {
    **{
        "als": "sq",
        "arb": "ar",
        "ayr": "ay",
        "azj": "az",
        "ekk": "et",
        "fil": "tl",
        "fuv": "ff",
        "gaz": "om",
        "gug": "gn",
    },
    **{
        "khk": "mn",
        "kmr": "ku",
        "lvs": "lv",
        "npi": "ne",
        "nob": "no",
        "ory": "or",
        "pbt": "ps",
        "pes": "fa",
        "plt": "mg",
    },
    **{"quy": "qu", "swh": "sw", "uzn": "uz", "ydd": "yi", "zsm": "ms"},
}


class Hub(NamedTuple):
    """A data set of the hub, at one commit."""

    setting: str  # that names it
    repository: str
    revision: str

    def rows(self, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
        """The rows of a split. Raises InputError."""
        for table in stream_tables(DatasetOrigin(self.repository, subset, split, []), self.revision):
            yield from table.to_pylist()

    def cell(self, row: Mapping[str, Any], column: str, *kinds: type) -> Any:
        """A cell of a row, which may be empty: None. Raises InputError where it is of another kind, or not there."""
        cell = row.get(column, row)
        if cell is not None and not isinstance(cell, kinds):
            is_there = f"something else than {kinds[0].__name__}" if column in row else "nothing"
            raise InputError(
                f"{self.setting}: in column {column} of {self.repository} at revision {self.revision} is {is_there}: "
                "it is not laid out as it was when this package was made: name text files by src and tgt"
            )
        return cell

    def choose(self, known: Sequence[str], language: str) -> str:
        """The one of these names that is of the language. Raises InputError where there are none, or several."""
        found = [name for name in known if _is_of(name, language)]
        if language in known:
            return language
        if len(found) == 1:
            return found[0]
        if not found:
            raise InputError(f"{self.setting}: {self.repository} has no {language}, only {', '.join(known)!r:.300}")
        names = printable(" and ".join(found))
        raise InputError(
            f"{self.setting}: {self.repository} has {names:.300} for {language}: name one instead of {language}, "
            f"as in {self.setting.partition('=')[2].partition('/')[0]}/SOURCE-TARGET"
        )


def _is_of(name: str, language: str) -> bool:
    """Whether `cmn_Hans` or `zh_CN` is of a language, such as `zh` or `zh-Hans`."""
    (code, *subtags), (_, *wanted) = (re.split("[-_]", text.lower()) for text in (name, language))
    try:
        of_name = _MEMBERS.get(code) or language_of(code, "")
    except InputError:
        return False
    return of_name == language_of(language, "data.src_lang") and set(wanted) <= set(subtags)


# ---- how the sets are laid out --------------------------------------------------------------------------------------


def _read_tables(hub: Hub, split: str, sides: Sides, *, text: str, number: str) -> Iterator[tuple[Sides, Pair]]:
    """A table for each language."""
    known = hub_subsets(hub.repository, hub.revision)
    source, target = (hub.choose(known, side) for side in sides)
    sources, targets = (
        {
            hub.cell(row, number, int, str): hub.cell(row, text, str) or ""
            for row in hub.rows(subset, split)
            if row.get("level", SENTENCES) == SENTENCES
        }
        for subset in (source, target)
    )
    for key, line in sources.items():
        yield (source, target), (line, targets.get(key, ""))


SENTENCES = "sentence_level"  # of BOUQuET, which has paragraphs, too


def _read_columns(hub: Hub, split: str, sides: Sides) -> Iterator[tuple[Sides, Pair]]:
    """One table with a column for each language."""
    names: Sides | None = None
    for row in hub.rows(None, split):
        if names is None:
            source, target = (hub.choose(list(row), side) for side in sides)
            names = (source, target)
        yield names, (hub.cell(row, names[0], str) or "", hub.cell(row, names[1], str) or "")


def _read_from_english(hub: Hub, split: str, sides: Sides) -> Iterator[tuple[Sides, Pair]]:
    """A table for each language into which English was translated; lines that it calls bad are empty."""
    are_english = [_is_of("en", side) for side in sides]
    if sum(are_english) != 1:
        raise InputError(
            f"{hub.setting}: {hub.repository} pairs English with one other language: the run has {' and '.join(sides)}"
        )
    known = [name.removeprefix("en-") for name in hub_subsets(hub.repository, hub.revision)]
    other = hub.choose(known, sides[are_english.index(False)])
    names = ("en", other) if are_english[0] else (other, "en")
    for row in hub.rows(f"en-{other}", split):
        pair = (hub.cell(row, "source", str) or "", hub.cell(row, "target", str) or "")
        if hub.cell(row, "is_bad_source", bool):
            pair = ("", "")
        yield names, pair if are_english[0] else (pair[1], pair[0])


def _read_flores(hub: Hub, split: str, sides: Sides) -> Iterator[tuple[Sides, Pair]]:
    return _read_tables(hub, split, sides, text="text", number="id")


def _read_bouquet(hub: Hub, split: str, sides: Sides) -> Iterator[tuple[Sides, Pair]]:
    return _read_tables(hub, split, sides, text="src_text", number="uniq_id")


class TestSet(NamedTuple):
    """A set of the hub."""

    repository: str
    licence: str
    splits: Mapping[str, str]  # what the hub calls them
    read: Callable[[Hub, str, Sides], Iterator[tuple[Sides, Pair]]]


SETS = {
    "flores": TestSet(
        "openlanguagedata/flores_plus", "CC-BY-SA-4.0", {"dev": "dev", "devtest": "devtest"}, _read_flores
    ),
    "ntrex": TestSet("mteb/NTREX", "CC-BY-SA-4.0", {"test": "test"}, _read_columns),
    "wmt24pp": TestSet("google/wmt24pp", "Apache-2.0", {"test": "train"}, _read_from_english),
    "bouquet": TestSet("facebook/bouquet", "CC-BY-SA-4.0", {"dev": "dev", "test": "test"}, _read_bouquet),
}


# ---- a catalogue of them --------------------------------------------------------------------------------------------


def find_sides(dataset: str, key: str, *, languages: Sides) -> Sides:
    """The languages of the two sides, as the set is asked for: the run's, or the varieties that the name has.

    The network is not asked. Raises InputError.
    """
    setting = f"{key}.dataset={dataset}"
    name, _, rest = dataset.partition(":")
    split, _, varieties = rest.partition("/")
    if split not in SETS[name].splits:
        raise InputError(
            f"{setting}: it has {' and '.join(SETS[name].splits)}: write {name}:{[*SETS[name].splits][-1]}"
        )
    for code, of_run in zip(languages, ("data.src_lang", "data.tgt_lang"), strict=True):
        language_of(code, of_run)
    if not varieties:
        return languages

    source, dash, target = varieties.partition("-")
    for own in ((source, target), (target, source)):
        if dash and all(_is_of(*side) for side in zip(own, _without_subtags(languages), strict=True)):
            return own
    raise InputError(
        f"{setting}: {varieties} are not varieties of {languages[0]} and {languages[1]}, the run's languages: write "
        f"them as {name}:{split}/SOURCE-TARGET"
    )


def _without_subtags(languages: Sides) -> Sides:
    source, target = (re.split("[-_]", language)[0] for language in languages)
    return source, target


def read_corpus(
    dataset: str, setting: str, *, sides: Sides, folder: Path, write: Callable[[str, str], None]
) -> CorpusRecord:
    """`write` the pairs of a set, in the order of the source's table. Raises InputError."""
    name, _, rest = dataset.partition(":")
    test_set = SETS[name]
    hub = Hub(setting, test_set.repository, dataset_revision(test_set.repository))
    columns = sides
    left_out = 0
    for names, pair in test_set.read(hub, test_set.splits[rest.partition("/")[0]], sides):
        columns = names
        if any(map(is_blank, pair)):
            left_out += 1
        else:
            source, target = (" ".join(text.split("\n")) for text in pair)
            write(source, target)
    return CorpusRecord("", {}, test_set.licence, [], left_out, revision=hub.revision, columns=list(columns))
