"""The table of docs/training.md that says what the names of other toolkits are here, from `transformer.config.foreign`.

python scripts/foreign_names.py            print the table
python scripts/foreign_names.py --write    bring the page up to date
"""

import sys
from pathlib import Path

from transformer.config.foreign import TOOLKITS, Foreign, foreign

PAGE = Path(__file__).resolve().parents[1] / "docs/training.md"
BEGIN, END = "<!-- foreign names: begin -->\n", "<!-- foreign names: end -->\n"


def table() -> str:
    """The table, as Markdown: a row for each thing that a toolkit of the table has a name for."""
    rows = [["here", *TOOLKITS.values()], ["---"] * (1 + len(TOOLKITS))]
    rows += [_cells(row) for row in foreign() if any(_cells(row)[1:])]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cells(row: Foreign) -> list[str]:
    here = row.here.replace("KEY", row.keys.split()[0]) or f"`{row.keys.split()[0]}`"
    by_toolkit = [str(getattr(row, toolkit)).split() for toolkit in TOOLKITS]
    return [here, *(", ".join(f"`{name}`" for name in names) for names in by_toolkit)]


def table_in(page: str) -> str:
    """The table that a page has between its two marks."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Print the table, or write it."""
    if sys.argv[1:] == ["--write"]:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8", newline="\n")
    else:
        sys.stdout.write(table())


if __name__ == "__main__":
    main()
