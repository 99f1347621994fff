"""A comparison of systems as Markdown: what `compare` returns in, one text out.

Its tables have columns of one width, so that they can be read in a terminal, too.
"""

from collections.abc import Sequence

from transformer.terminal import printable
from transformer.tools.compare.command import Change, Comparison, SetComparison
from transformer.tools.compare.kept import KeptRow
from transformer.tools.compare.lengths import LengthRow
from transformer.tools.compare.words import RarityRow
from transformer.tools.significance import (
    ABOUT_BOOTSTRAP,
    NOT_TESTED,
    SIGNIFICANT,
    MetricComparison,
    SystemScore,
    about_metrics,
)


def format_comparison(comparison: Comparison) -> str:
    """The comparison for people: for each test set its scores, its tables by length and rarity, and what changed."""
    systems = [printable(name) for name in comparison.systems]
    baseline, *others = systems
    parts = [f"# {', '.join(others)} against {baseline}\n"]
    for note in (*comparison.notes, _about_tests(comparison)):
        parts.append(f"{printable(note)}\n")
    for name, test_set in comparison.test_sets.items():
        parts.append(f"## {printable(name)}: {test_set.sentences:,} sentences\n")
        parts += _format_set(systems, test_set)
    parts.append(_format_signatures(comparison))
    return "\n".join(parts)


def _format_set(systems: Sequence[str], test_set: SetComparison) -> list[str]:
    """The paragraphs of one test set."""
    names = ", ".join(systems)
    parts = [
        _format_scores(systems, test_set.scores),
        f"### By length of the reference, in words: BLEU and chrF of {names}\n",
        _format_lengths(test_set.by_length),
        f"### By how often a word occurs in {printable(test_set.counted_in)}: F1 of {names}\n",
        _format_rarity(test_set.by_rarity),
    ]
    if test_set.kept:
        parts += [f"### What arrives of the source, in {names}\n", _format_kept(test_set.kept)]
        parts += [_format_lost(systems, row) for row in test_set.kept if any(row.lost)]
    for name, changes in zip(systems[1:], test_set.changed.values(), strict=True):
        parts.append(f"### What changed most in {name}\n")
        parts += [_format_change(change, systems[0], name) for change in changes]
        if not changes:
            parts.append("No translation changed, or changed=0 leaves them out.\n")
    return parts


# ---- scores ---------------------------------------------------------------------------------------------------------


def _format_scores(systems: Sequence[str], scores: Sequence[MetricComparison]) -> str:
    """A row for each system with its scores; all but the baseline have two rows with p-values below it."""
    rows = [["", *(f"{of_metric.metric} (μ ± 95% CI)" for of_metric in scores)]]
    for number, system in enumerate(systems):
        of_system = [of_metric.systems[number] for of_metric in scores]
        rows.append([system, *(_format_score(of_metric.systems[number], of_metric.digits) for of_metric in scores)])
        if number > 0:
            marked = [_format_p(score, score.p_randomisation) + "*" * score.is_significant for score in of_system]
            rows.append(["p, approximate randomisation", *marked])
            rows.append(["p, paired bootstrap", *(_format_p(score, score.p_bootstrap) for score in of_system)])
    return _format_table(rows)


def _format_score(score: SystemScore, digits: int) -> str:
    if score.mean is None or score.half_width is None:
        return f"{score.score:.{digits}f}"
    return f"{score.score:.{digits}f} ({score.mean:.{digits}f} ± {score.half_width:.{digits}f})"


def _format_p(score: SystemScore, p: float | None) -> str:
    if not score.has_interval:
        return NOT_TESTED
    return "same text" if p is None else f"{p:.4f}"


def _about_tests(comparison: Comparison) -> str:
    metrics = [metric for test_set in comparison.test_sets.values() for metric in test_set.scores]
    return (
        f"p is the probability of a difference from {comparison.systems[0]} at least as large as this one by chance, "
        f"if both were the same system, by approximate randomisation; * marks {SIGNIFICANT} or less. {ABOUT_BOOTSTRAP} "
        f"{about_metrics(metrics)} The tests are sacreBLEU's, with {comparison.resamples:,} resamples and "
        f"{comparison.trials:,} randomisations, seed {comparison.seed}."
    )


def _format_signatures(comparison: Comparison) -> str:
    """The signatures of the scores, each once."""
    lines: dict[str, None] = {}  # in order, each once
    for test_set in comparison.test_sets.values():
        for of_metric in test_set.scores:
            signature = of_metric.signature.replace("`", "'")
            lines[f"- {of_metric.metric} signature: `{signature}`\n"] = None
    return "".join(lines)


# ---- lengths and frequencies ----------------------------------------------------------------------------------------


def _format_lengths(rows: Sequence[LengthRow]) -> str:
    cells = [["words", "sentences", "BLEU", "chrF"]]
    for row in rows:
        words = format_range(row.least, row.most)
        cells.append([words, str(row.sentences), _format_all(row.bleu), _format_all(row.chrf)])
    return _format_table(cells)


def _format_rarity(rows: Sequence[RarityRow]) -> str:
    cells = [["times", "words", "F1"]]
    for row in rows:
        times = format_range(row.least, row.most)
        cells.append([times, f"{row.words:,}", _format_all(row.f1)])
    return _format_table(cells)


def _format_kept(rows: Sequence[KeptRow]) -> str:
    cells = [["", "in the sources", "arrive, %"]]
    for row in rows:
        cells.append([row.kind, f"{row.pieces:,}", _format_all([100 * kept / row.pieces for kept in row.kept])])
    return _format_table(cells)


def _format_lost(systems: Sequence[str], row: KeptRow) -> str:
    """A list item with examples of each system that did not keep all."""
    lines = [
        f"{system}, line {lost.line}, {', '.join(lost.pieces)}: {lost.translation}"
        for system, of_system in zip(systems, row.lost, strict=True)
        for lost in of_system
    ]
    indented = "".join(f"      {printable(line)}\n" for line in lines)
    return f"- {row.kind} that did not arrive:\n\n{indented}"


def format_range(least: int, most: int | None) -> str:
    """A range of numbers in words: `1 to 5`; `most` is None where it has no end."""
    if most is None:
        return f"{least} and more"
    return str(least) if least == most else f"{least} to {most}"


def _format_all(figures: Sequence[float]) -> str:
    return ", ".join(f"{figure:.2f}" for figure in figures)


# ---- changes --------------------------------------------------------------------------------------------------------


def _format_change(change: Change, baseline: str, system: str) -> str:
    """A list item: what was to be translated, the reference, and both translations with their chrF."""
    width = max(len(baseline), len(system), len("reference"))
    lines = []
    if change.source is not None:
        lines.append(f"{'source':{width}}        {change.source}")
    lines += [f"{'reference':{width}}        {reference}" for reference in change.references]
    lines.append(f"{baseline:{width}} {change.baseline_chrf:6.2f} {change.baseline}")
    lines.append(f"{system:{width}} {change.chrf:6.2f} {change.translation}")

    indented = "".join(f"      {printable(line)}\n" for line in lines)  # as code, in which no character is Markdown
    return f"- line {change.line}: chrF {change.chrf - change.baseline_chrf:+.2f}\n\n{indented}"


# ---- tables ---------------------------------------------------------------------------------------------------------


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of which the first row is the header; all columns but the first are to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    header, *body = rows
    return "".join(_format_row(row, widths) for row in (header, rule, *body))


def _format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a table, its cells as wide as the columns."""
    first = cells[0].ljust(widths[0])
    others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join([first, *others]) + " |\n"
