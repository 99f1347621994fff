"""A comparison of systems as Markdown, in columns that can be read in a terminal, too."""

from collections.abc import Sequence

from transformer.terminal import printable
from transformer.tools.compare import Change, Comparison, LengthRow, RarityRow, SetComparison
from transformer.tools.significance import MetricComparison, SystemScore

SIGNIFICANT = 0.05  # p-values up to here are marked, as sacreBLEU marks them


def format_comparison(comparison: Comparison) -> str:
    """The comparison for people: for each test set its scores, its tables by length and rarity, and what changed."""
    baseline, *others = comparison.systems
    parts = [f"# {', '.join(others)} against {baseline}\n"]
    parts += [f"{note}\n" for note in [*comparison.notes, _about_tests(comparison)]]
    for name, found in comparison.test_sets.items():
        parts += [f"## {name}: {found.sentences:,} sentences\n", *_format_set(comparison.systems, found)]
    return "\n".join([*parts, _format_signatures(comparison)])


def _format_set(systems: Sequence[str], found: SetComparison) -> list[str]:
    names = ", ".join(systems)
    parts = [
        _format_scores(systems, found.scores),
        f"### By length of the reference, in words: BLEU and chrF of {names}\n",
        _format_lengths(found.by_length),
        f"### By how often a word occurs in {found.counted_in}: F1 of {names}\n",
        _format_rarity(found.by_rarity),
    ]
    for name, changes in found.changed.items():
        parts.append(f"### What changed most in {name}\n")
        parts += [_format_change(change, systems[0], name) for change in changes]
        parts += [] if changes else ["Nothing, or nothing is to be shown.\n"]
    return parts


def _format_scores(systems: Sequence[str], scores: Sequence[MetricComparison]) -> str:
    """A row for each system with its scores, and below it two rows with its p-values."""
    rows = [["", *(f"{of.metric} (μ ± 95% CI)" for of in scores)]]
    for number, system in enumerate(systems):
        of_system = [of.systems[number] for of in scores]
        rows.append([system, *(_format_score(score) for score in of_system)])
        if number > 0:
            rows.append(["p, paired bootstrap", *(_format_p(score.p_bootstrap) for score in of_system)])
            rows.append(["p, approximate randomisation", *(_format_p(score.p_randomisation) for score in of_system)])
    return _format_table(rows)


def _format_score(score: SystemScore) -> str:
    return f"{score.score:.2f} ({score.mean:.2f} ± {score.half_width:.2f})"


def _format_p(p: float | None) -> str:
    if p is None:
        return "same text"
    return f"{p:.4f}" + ("*" if p <= SIGNIFICANT else "")


def _about_tests(comparison: Comparison) -> str:
    return (
        f"p is the probability of such a difference from {comparison.systems[0]} or a larger one by chance, if both "
        f"were the same system: * is {SIGNIFICANT} or less. Of TER, less is better. sacreBLEU's tests, with "
        f"{comparison.resamples:,} resamples and {comparison.trials:,} randomisations, seed {comparison.seed}.\n"
    )


def _format_signatures(comparison: Comparison) -> str:
    """The signatures of the scores, each once."""
    scores = [of for found in comparison.test_sets.values() for of in found.scores]
    lines = dict.fromkeys(f"- {of.metric} signature: `{of.signature}`\n" for of in scores)
    return "".join(lines)


def _format_lengths(rows: Sequence[LengthRow]) -> str:
    header = ["words", "sentences", "BLEU", "chrF"]
    return _format_table(
        [
            header,
            *(
                [_format_range(row.least, row.most), str(row.sentences), _format_all(row.bleu), _format_all(row.chrf)]
                for row in rows
            ),
        ]
    )


def _format_rarity(rows: Sequence[RarityRow]) -> str:
    header = ["times", "words", "F1"]
    lines = [[_format_range(row.least, row.most), f"{row.words:,}", _format_all(row.f1)] for row in rows]
    return _format_table([header, *lines])


def _format_range(least: int, most: int | None) -> str:
    if most is None:
        return f"{least} and more"
    return str(least) if least == most else f"{least} to {most}"


def _format_all(figures: Sequence[float]) -> str:
    return ", ".join(f"{figure:.2f}" for figure in figures)


def _format_change(change: Change, baseline: str, system: str) -> str:
    """A list item: what was to be translated, the reference, and both translations with their chrF."""
    width = max(len(baseline), len(system), len("reference"))
    lines = [] if change.source is None else [f"{'source':{width}}        {change.source}"]
    lines += [f"{'reference':{width}}        {reference}" for reference in change.references]
    lines.append(f"{baseline:{width}} {change.baseline_chrf:6.2f} {change.baseline}")
    lines.append(f"{system:{width}} {change.chrf:6.2f} {change.translation}")
    indented = "".join(f"      {printable(line)}\n" for line in lines)  # as code: no character of it is Markdown
    return f"- line {change.line}: chrF {change.chrf - change.baseline_chrf:+.2f}\n\n{indented}"


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of which the first row is the header; all columns but the first are to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    header, *body = [
        "| "
        + " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |\n"
        for row in rows
    ]
    rule = "| " + " | ".join(_rule(width, is_first=column == 0) for column, width in enumerate(widths)) + " |\n"
    return "".join([header, rule, *body])


def _rule(width: int, *, is_first: bool) -> str:
    return "-" * width if is_first else "-" * (width - 1) + ":"
