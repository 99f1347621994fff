"""The sections of a report with what `scores` computes: of the test sets, and of the dev set by checkpoint."""

from collections.abc import Mapping, Sequence
from itertools import chain

from transformer.loss import perplexity
from transformer.records import DevScores, Validation
from transformer.run_dir import DEV
from transformer.tools import significance
from transformer.tools.compare.format import format_range
from transformer.tools.page import Component
from transformer.tools.report.blocks import Block, Cell, Marked, Note, Scale, Score, Table, section
from transformer.tools.report.reading import RunReading
from transformer.tools.report.scores import AVERAGED, CheckpointScore, Scored, SetScores
from transformer.tools.significance import ABOUT_BOOTSTRAP, NOT_TESTED, SIGNIFICANT, SystemScore, about_metrics


def scores_section(scored: Sequence[Scored], reasons: Sequence[str]) -> Component:
    """The scores of the test sets with their intervals, by sentence length too, and the tests of significance."""
    blocks: list[Block] = [Note(reason, is_warning=True) for reason in reasons]
    for group in scored:
        blocks += [Note(note, is_warning=True) for note in group.notes]
        for test_set in group.sets:
            blocks.append(_score_table(group, test_set))
            blocks.append(_length_table(group, test_set))
    if scored:
        blocks.append(Note(_about_scores(scored), is_warning=False))
    return section("Scores", blocks)


def _score_table(group: Scored, test_set: SetScores) -> Table:
    """A row for each run: BLEU, whose interval is drawn, the other metrics, and the tests against the first run."""
    bleu, *others = test_set.scores
    scale = Scale.of((system.score, system.half_width or 0.0) for system in bleu.systems)
    has_tests = len(group.names) > 1

    head = ["", bleu.metric, *(other.metric for other in others)]
    if has_tests:
        head += [f"p, {metric.metric}" for metric in test_set.scores]

    rows: list[list[Cell]] = []
    for number, name in enumerate(group.names):
        of_run = bleu.systems[number]
        row: list[Cell] = [name, Score(of_run.score, of_run.half_width or 0.0, scale)]
        row += [_plain_score(other.systems[number], other.digits) for other in others]
        if has_tests:
            row += [_p_values(metric.systems[number], is_baseline=number == 0) for metric in test_set.scores]
        rows.append(row)
    return Table(f"{test_set.name}: {test_set.sentences:,} sentences", head, rows, is_numeric=True)


def _plain_score(system: SystemScore, digits: int) -> str:
    interval = "" if system.half_width is None else f" ± {system.half_width:.{digits}f}"
    return f"{system.score:.{digits}f}{interval}"


def _p_values(system: SystemScore, *, is_baseline: bool) -> Cell:
    """The p of approximate randomisation and of the paired bootstrap; marked where the first finds a difference."""
    if not system.has_interval:
        return NOT_TESTED
    if is_baseline:
        return "baseline"
    if system.p_bootstrap is None or system.p_randomisation is None:
        return "same text"

    text = f"{system.p_randomisation:.4f}, {system.p_bootstrap:.4f}"
    return Marked(text) if system.is_significant else text


def _length_table(group: Scored, test_set: SetScores) -> Table:
    """A row for each range of sentence lengths, with the BLEU of each run."""
    intervals = [[*zip(row.bleu, row.bleu_half_width, strict=True)] for row in test_set.by_length]
    scale = Scale.of(chain.from_iterable(intervals))
    rows: list[list[Cell]] = [
        [format_range(row.least, row.most), f"{row.sentences:,}", *(Score(*bleu, scale) for bleu in of_row)]
        for row, of_row in zip(test_set.by_length, intervals, strict=True)
    ]
    names = ["BLEU"] if len(group.names) == 1 else [f"BLEU of {name}" for name in group.names]
    head = ["words", "sentences", *names]
    return Table(f"{test_set.name}, by words of the reference", head, rows, is_numeric=True)


def _about_scores(scored: Sequence[Scored]) -> str:
    """How to read the tables, and the signatures of the metrics."""
    metrics = [metric for group in scored for test_set in group.sets for metric in test_set.scores]
    text = (
        f"Each score has its 95 % interval, from {significance.RESAMPLES:,} resamples of the test set. "
        f"{about_metrics(metrics)}"
    )
    if any(len(group.names) > 1 for group in scored):
        text += (
            " p is the probability of a difference from the first run at least as large as this one by chance, by "
            f"approximate randomisation with {significance.TRIALS:,} trials; it stands out where it is {SIGNIFICANT} "
            f"or less. Behind it is that of the paired bootstrap. {ABOUT_BOOTSTRAP}"
        )

    signatures = dict.fromkeys(f"{metric.metric} {metric.signature}" for metric in metrics)
    return f"{text} Signatures: {'; '.join(signatures)}."


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoints_section(
    runs: Sequence[RunReading], scores_of_runs: Mapping[str, Sequence[CheckpointScore]]
) -> Component | None:
    """The dev scores of each run by checkpoint: what validation measured, and intervals; None without any."""
    blocks: list[Block] = []
    for run in runs:
        # The one dev set, or the mean of several; then each of them.
        then: dict[str, dict[int, Validation | DevScores]] = {DEV: {}}
        for validation in run.validations:
            then[DEV][validation.step] = validation
            for name, scores in validation.sets.items():
                then.setdefault(name, {})[validation.step] = scores
        for name in dict.fromkeys([*then, *(score.dev for score in scores_of_runs[run.name])]):
            now = [score for score in scores_of_runs[run.name] if score.dev == name]
            table = _checkpoint_table(run, name, then.get(name, {}), now)
            if table is not None:
                blocks.append(table)
    if not blocks:
        return None

    blocks.append(
        Note(
            "“Then” is what validation measured during training. “Now”, where it was asked for, is the dev set "
            "translated again with checkpoints that are kept, greedily as then, with a 95 % interval: the two agree "
            "unless this machine rounds otherwise.",
            is_warning=False,
        )
    )
    return section("Checkpoints", blocks)


def _checkpoint_table(
    run: RunReading, dev: str, then: Mapping[int, Validation | DevScores], scores_now: Sequence[CheckpointScore]
) -> Table | None:
    """A row for each step that was validated or scored, and for the average; None without any."""
    now = {score.step: score.bleu for score in scores_now}

    # Steps in their order, then the average, which has none.
    steps: list[int | None] = []
    steps += sorted(then.keys() | {step for step in now if step is not None})
    if None in now:
        steps.append(None)
    if not steps:
        return None

    head = ["checkpoint", "loss", "perplexity", "BLEU then", "chrF then"]
    rows = [_measured_then(step, then) for step in steps]
    if now:
        head.append("BLEU now")
        scale = Scale.of((bleu.bleu, bleu.half_width) for bleu in now.values())
        for step, row in zip(steps, rows, strict=True):
            row.append(Score(now[step].bleu, now[step].half_width, scale) if step in now else "")
    return Table(f"{run.name}, {'dev set' if dev == DEV else dev}", head, rows, is_numeric=True)


def _measured_then(step: int | None, validations: Mapping[int, Validation | DevScores]) -> list[Cell]:
    """The name of a checkpoint, and what validation measured there, if it did."""
    if step is None:
        return [AVERAGED, "", "", "", ""]
    name = f"step {step:,}"
    if step not in validations:
        return [name, "", "", "", ""]

    validation = validations[step]
    return [
        name,
        f"{validation.loss:.3f}",
        f"{perplexity(validation.nll):.2f}",
        f"{validation.bleu:.2f}",
        f"{validation.chrf:.2f}",
    ]
