"""What other toolkits call the keys here: for the hint on an unknown key, and for a table in docs/training.md.

The names are in foreign.tsv.

python scripts/foreign_names.py --write      bring that table up to date
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TOOLKITS = {
    "fairseq": "fairseq",
    "marian": "Marian",
    "sockeye": "Sockeye",
    "joeynmt": "JoeyNMT",
    "opennmt": "OpenNMT-py, Eole",
    "hugging_face": "Hugging Face",
}


@dataclass(frozen=True)
class Foreign:
    """What the toolkits call one thing: names as they are typed there, with spaces between.

    `keys` are those that a command may have for it, the best first. A foreign name is answered with the first that the
    command has, or with `here`, a sentence, where the two are not the same. `also` are names of no toolkit in
    particular, or such as stand under a group: they are not in the table.
    """

    keys: str
    here: str = ""
    fairseq: str = ""
    marian: str = ""
    sockeye: str = ""
    joeynmt: str = ""
    opennmt: str = ""
    hugging_face: str = ""
    also: str = ""

    def names(self) -> Iterator[str]:
        """Every name, as `normal` has it."""
        for toolkit in (*TOOLKITS, "also"):
            yield from map(normal, getattr(self, toolkit).split())


def normal(name: str) -> str:
    """A name without what the toolkits write differently: `--max-tokens` -> `max_tokens`."""
    return name.lstrip("-").replace("-", "_").lower()


@cache
def foreign() -> list[Foreign]:
    """The rows of foreign.tsv, which is read when somebody has typed a key that there is not."""
    header, *lines = Path(__file__).with_name("foreign.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
    names = header.split("\t")
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [Foreign(**dict(zip(names[: len(row)], row, strict=True))) for row in rows]  # no empty cells at their end


def row_of(name: str, known: set[str]) -> tuple[str, str] | None:
    """What answers to a foreign name in a command that has the keys `known`: the key, and a sentence or "".

    None where the name is unknown, or no key of the command is meant by it.
    """
    for row in foreign():
        if name in row.names():
            key = next((key for key in row.keys.split() if key in known), None)
            if key is not None:
                return key, row.here.replace("KEY", key)
    return None
