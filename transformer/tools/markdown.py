"""Tables in Markdown."""

from collections.abc import Collection, Iterable, Sequence


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int]) -> list[str]:
    """The lines of a table; the columns with the numbers `left`, from 0, are to the left, all others to the right."""
    rule = ["---" if number in left else "---:" for number in range(len(titles))]
    return ["| " + " | ".join(cells) + " |" for cells in (titles, rule, *rows)]
