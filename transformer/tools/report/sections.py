"""The sections of a report that are notes and tables, and what they say of each run."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from transformer import __version__
from transformer.config.jobs import ReportJob, TrainJob
from transformer.config.keys import as_typed, leaves
from transformer.config.primitives import to_json
from transformer.cost import parameters
from transformer.data.report import DataReport
from transformer.data.tokenizer import Tokenizer
from transformer.errors import TransformerError
from transformer.evaluation.sets import read_set
from transformer.records import RunRecord, Validation
from transformer.tools import significance
from transformer.tools.compare_format import SIGNIFICANT
from transformer.tools.page import Component
from transformer.tools.report.blocks import Block, Cell, Command, Marked, Note, Scale, Score, Table, section
from transformer.tools.report.reading import RunReading
from transformer.tools.report.scores import AVERAGED, CheckpointScore, Scored, SetScores
from transformer.tools.significance import Interval, MetricComparison, SystemScore
from transformer.training.progress import perplexity
from transformer.vocabulary import UNK

UNKNOWN = "unknown"
NOT_A_SETTING = ("run_dir",)  # differs between any two runs
CORPUS = "data."
FILTER = "data.filter."
DIGITS = 12  # of a digest


def overview(runs: Sequence[RunReading], scored: Sequence[Scored]) -> Component:
    """The runs side by side, a column each."""
    rows: list[list[Cell]] = [
        ["state", *(_state(run) for run in runs)],
        ["model", *(_of_record(run, _model) for run in runs)],
        ["parameters", *(_parameters(run) for run in runs)],
        ["languages", *(_of_record(run, _languages) for run in runs)],
        ["training pairs", *(UNKNOWN if run.data is None else f"{run.data.pairs_kept:,}" for run in runs)],
        ["target tokens seen", *(_target_tokens(run) for run in runs)],
        ["training time", *(_time(run) for run in runs)],
        ["target tokens a second", *(_speed(run) for run in runs)],
        ["best dev BLEU, greedy", *(_best_dev(run) for run in runs)],
    ]
    for name in dict.fromkeys(of.name for group in scored for of in group.sets):
        rows.append([f"BLEU, {name}", *(_test_bleu(run, name, scored) for run in runs)])
    return section("At a glance", [Table("Runs", ["", *(run.name for run in runs)], rows, is_numeric=False)])


def _state(run: RunReading) -> Cell:
    if run.results is not None:
        return f"finished at step {run.results.steps:,}"
    of = "" if run.record is None else f" of {run.record.config.train.max_steps:,}"
    return Marked(f"not finished: at step {run.last_step:,}{of}")


def _of_record(run: RunReading, say: Callable[[RunRecord], str]) -> str:
    return UNKNOWN if run.record is None else say(run.record)


def _model(record: RunRecord) -> str:
    model = record.config.model
    return f"{model.n_layers} + {model.n_layers} layers, d_model {model.d_model}, {model.n_heads} heads"


def _languages(record: RunRecord) -> str:
    return f"{record.config.data.src_lang} → {record.config.data.tgt_lang}"


def _parameters(run: RunReading) -> str:
    if run.results is not None:
        return f"{run.results.parameters:,}"
    if run.record is None or run.data is None:
        return UNKNOWN
    return f"{parameters(run.record.config.model, run.data.vocab_size):,}"


def _target_tokens(run: RunReading) -> str:
    if run.results is None:
        return UNKNOWN
    return f"{run.results.target_tokens:,}, up to epoch {run.results.epochs + 1}"


def _time(run: RunReading) -> str:
    if run.results is None or not math.isfinite(run.results.training_seconds):
        return UNKNOWN
    minutes, seconds = divmod(round(run.results.training_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min {seconds:02} s"


def _speed(run: RunReading) -> str:
    if run.results is not None and run.results.training_seconds > 0:
        return f"{run.results.target_tokens / run.results.training_seconds:,.0f}"
    curve = run.curves.get("speed/target_tokens_per_second")
    return f"{fmean(value for _, value in curve):,.0f}" if curve else UNKNOWN


def _best_dev(run: RunReading) -> str:
    if not run.validations:
        return UNKNOWN
    best = max(run.validations, key=lambda validation: validation.bleu)
    return f"{best.bleu:.2f} at step {best.step:,}"


def _test_bleu(run: RunReading, name: str, scored: Sequence[Scored]) -> Cell:
    for group in scored:
        for of in group.sets:
            if of.name == name and run.name in group.names:
                bleu = of.scores[0].systems[group.names.index(run.name)]
                return f"{bleu.score:.2f} ± {bleu.half_width:.2f}"
    return "not scored"


def missing(runs: Sequence[RunReading]) -> Component | None:
    """What could not be read; None where everything was."""
    notes: list[Block] = [Note(text, is_warning=True) for run in runs for text in dict.fromkeys(run.missing)]
    return section("What is missing", notes) if notes else None


# ---- settings -------------------------------------------------------------------------------------------------------


def settings(runs: Sequence[RunReading]) -> Component:
    """What was trained, as a difference from the paper's base model and recipe."""
    paper = leaves(to_json(TrainJob()))
    of_runs = [None if run.record is None else leaves(to_json(run.record.config)) for run in runs]
    known = [of for of in of_runs if of is not None]
    keys = [
        key
        for key in dict.fromkeys(key for of in (paper, *known) for key in of)
        if key not in NOT_A_SETTING and any(of.get(key) != paper.get(key) for of in known)
    ]

    blocks: list[Block] = [
        Note("Settings that are not listed are those of the paper's base model and recipe.", is_warning=False),
    ]
    is_corpus = {key: key.startswith(CORPUS) and not key.startswith(FILTER) for key in keys}
    for caption, of_corpus in (("Different from the paper's base", False), ("The corpus", True)):
        rows = [_setting(key, paper, of_runs) for key in keys if is_corpus[key] is of_corpus]
        head = ["key", *([] if of_corpus else ["paper"]), *(run.name for run in runs)]
        if of_corpus:
            rows = [[name, *cells] for name, _, *cells in rows]
        blocks.append(Table(caption, head, rows, is_numeric=False))
    return section("What was trained", blocks)


def _setting(key: str, paper: Mapping[str, Any], of_runs: Sequence[Mapping[str, Any] | None]) -> list[Cell]:
    """The key, the paper's value, and that of each run; marked where it differs from the first that is known."""
    values = [UNKNOWN if of is None else as_typed(of.get(key)) for of in of_runs]
    first = next((value for value in values if value != UNKNOWN), UNKNOWN)
    cells: list[Cell] = [Marked(value) if value not in (UNKNOWN, first) else value for value in values]
    return [key, as_typed(paper.get(key)), *cells]


# ---- scores ---------------------------------------------------------------------------------------------------------


def scores(scored: Sequence[Scored], reasons: Sequence[str]) -> Component:
    """The scores of the test sets with their intervals, by sentence length too, and the tests of significance."""
    blocks: list[Block] = [Note(reason, is_warning=True) for reason in reasons]
    for group in scored:
        blocks += [Note(note, is_warning=True) for note in group.notes]
        for of in group.sets:
            blocks.append(_score_table(group, of))
            blocks.append(_length_table(group, of))
    if scored:
        blocks.append(Note(_about_scores(scored), is_warning=False))
    return section("Scores", blocks)


def _score_table(group: Scored, of: SetScores) -> Table:
    """A row for each run; BLEU first, which is drawn, too."""
    bleu, *others = of.scores
    scale = Scale.of([_interval(bleu, system) for system in bleu.systems])
    head = ["", bleu.metric, *(other.metric for other in others)]
    has_tests = len(group.names) > 1
    if has_tests:
        head += [f"p, {other.metric}" for other in of.scores]

    rows: list[list[Cell]] = []
    for number, name in enumerate(group.names):
        row: list[Cell] = [name, Score(_interval(bleu, bleu.systems[number]), scale)]
        row += [_plain_score(other.systems[number]) for other in others]
        if has_tests:
            row += [_p_values(other.systems[number], is_baseline=number == 0) for other in of.scores]
        rows.append(row)
    return Table(f"{of.name}: {of.sentences:,} sentences", head, rows, is_numeric=True)


def _interval(metric: MetricComparison, system: SystemScore) -> Interval:
    return Interval(system.score, system.half_width, metric.signature)


def _plain_score(system: SystemScore) -> str:
    return f"{system.score:.2f} ± {system.half_width:.2f}"


def _p_values(system: SystemScore, *, is_baseline: bool) -> Cell:
    """Those of the paired bootstrap and of approximate randomisation; marked where both find a difference."""
    if is_baseline:
        return "baseline"
    if system.p_bootstrap is None or system.p_randomisation is None:
        return "same text"
    text = f"{system.p_bootstrap:.4f}, {system.p_randomisation:.4f}"
    return Marked(text) if max(system.p_bootstrap, system.p_randomisation) <= SIGNIFICANT else text


def _length_table(group: Scored, of: SetScores) -> Table:
    scale = Scale.of([bleu for row in of.by_length for bleu in row.bleu])
    rows: list[list[Cell]] = [
        [_range(row.least, row.most), f"{row.sentences:,}", *(Score(bleu, scale) for bleu in row.bleu)]
        for row in of.by_length
    ]
    names = ["BLEU"] if len(group.names) == 1 else [f"BLEU of {name}" for name in group.names]
    return Table(f"{of.name}, by words of the reference", ["words", "sentences", *names], rows, is_numeric=True)


def _range(least: int, most: int | None) -> str:
    return f"{least} and more" if most is None else f"{least} to {most}"


def _about_scores(scored: Sequence[Scored]) -> str:
    metrics = [metric for group in scored for of in group.sets for metric in of.scores]
    signatures = dict.fromkeys(f"{metric.metric} {metric.signature}" for metric in metrics)
    text = (
        f"Each score has its 95 % interval, from {significance.RESAMPLES:,} resamples of the test set. "
        "Of TER, less is better."
    )
    if any(len(group.names) > 1 for group in scored):
        text += (
            " p is the probability of such a difference from the first run by chance, by paired bootstrap and by "
            f"approximate randomisation, of {significance.TRIALS:,} trials. "
            f"It stands out where both are {SIGNIFICANT} or less."
        )
    return f"{text} Signatures: {'; '.join(signatures)}."


def checkpoints(runs: Sequence[RunReading], found: Mapping[str, Sequence[CheckpointScore]]) -> Component | None:
    """The dev scores of each run by checkpoint: what validation measured, and intervals; None without any."""
    blocks: list[Block] = []
    for run in runs:
        of_run = found[run.name]
        by_step = {of.step: of for of in of_run}
        validations = {validation.step: validation for validation in run.validations}
        known = sorted({*validations, *(step for step in by_step if step is not None)})
        steps: list[int | None] = [*known, *([None] if None in by_step else [])]
        if not steps:
            continue
        scale = Scale.of([of.bleu for of in of_run])
        rows = [_measured_then(step, validations) for step in steps]
        if of_run:
            for step, row in zip(steps, rows, strict=True):
                row.append(Score(by_step[step].bleu, scale) if step in by_step else "")
        head = ["checkpoint", "loss", "perplexity", "BLEU then", "chrF then", *(["BLEU now"] if of_run else [])]
        blocks.append(Table(f"{run.name}, dev set", head, rows, is_numeric=True))
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


def _measured_then(step: int | None, validations: Mapping[int, Validation]) -> list[Cell]:
    """The name of a checkpoint, and what validation measured there, if it did."""
    if step is None:
        return [AVERAGED, "", "", "", ""]
    name = f"step {step:,}"
    if step not in validations:
        return [name, "", "", "", ""]
    then = validations[step]
    return [name, f"{then.loss:.3f}", f"{perplexity(then.nll):.2f}", f"{then.bleu:.2f}", f"{then.chrf:.2f}"]


# ---- data -----------------------------------------------------------------------------------------------------------


def data(runs: Sequence[RunReading]) -> Component:
    """What was read, filtered and tokenised; once for all runs with the same report."""
    blocks: list[Block] = []
    shown: dict[str, list[RunReading]] = {}
    for run in runs:
        if run.data is not None:
            shown.setdefault(run.data.digest, []).append(run)
    for of_digest in shown.values():
        names = ", ".join(run.name for run in of_digest)
        of = "" if len(shown) == 1 else f" of {names}"
        first = of_digest[0]
        if first.data is not None:
            blocks += [_pairs(first.data, of), _filters(first.data, of), _tokenizer(first, first.data, of)]
            blocks += _pieces(first, of)
    blocks.append(_padding(runs))
    return section("Data", blocks)


def _pairs(report: DataReport, of: str) -> Table:
    rows: list[list[Cell]] = []
    for name, one in report.sets.items():
        kept = "all" if one.pairs_kept is None else f"{one.pairs_kept:,}"
        changed = "" if one.references is None else f"{one.references.changed:,} of {one.references.checked:,}"
        size = f"{sum(file.bytes for file in one.files.values()) / 1e6:,.2f} MB"
        digests = " ".join(file.sha256[:DIGITS] for file in one.files.values())
        rows.append([name, f"{one.pairs_read:,}", kept, size, changed, digests])
    head = ["set", "pairs read", "kept", "size", "references that no translation can equal", "SHA-256 of the files"]
    return Table(f"Sentence pairs{of}", head, rows, is_numeric=True)


def _filters(report: DataReport, of: str) -> Table:
    limits = {
        "too_long": f"above {report.filters.max_length} pieces",
        "ratio": f"one side above {report.filters.max_ratio:g} times the other",
        "identical": "dropped" if report.filters.drop_identical else "kept",
        "duplicate": "dropped" if report.filters.drop_duplicates else "kept",
    }
    rows: list[list[Cell]] = [
        [reason.replace("_", " "), f"{count:,}", limits.get(reason, "")] for reason, count in report.dropped.items()
    ]
    return Table(f"Pairs that filters dropped{of}", ["reason", "pairs", "rule"], rows, is_numeric=False)


def _tokenizer(run: RunReading, report: DataReport, of: str) -> Table:
    pairs = max(1, report.pairs_kept)
    rows: list[list[Cell]] = [
        ["vocabulary", f"{report.vocab_size:,} pieces"],
        ["source tokens", f"{report.tokens.src:,}, {report.tokens.src / pairs:.1f} a sentence with its end mark"],
        ["target tokens", f"{report.tokens.tgt:,}, {report.tokens.tgt / pairs:.1f} a sentence with its end mark"],
        ["targets that do not come back", f"{report.targets.changed:,} of {report.targets.checked:,} that were tried"],
    ]
    if run.record is not None:
        config = run.record.config.tokenizer
        chosen = {key: as_typed(value) for key, value in leaves(to_json(config)).items() if value is not None}
        rows.append(["settings", ", ".join(f"{key}={value}" for key, value in chosen.items())])
    return Table(f"Tokenizer{of}", [], rows, is_numeric=False)


def _pieces(run: RunReading, of: str) -> list[Block]:
    """How long the kept sets are in pieces, and what of them is unknown or cut."""
    if run.record is None:
        return []
    most = run.record.config.model.max_positions - 1  # one is for the end mark
    try:
        tokenizer = Tokenizer.load(run.directory.tokenizer)
        sets = {name: read_set(run.directory, name) for name in run.directory.set_names()}
    except TransformerError as error:
        run.missing.append(str(error))
        return []

    rows: list[list[Cell]] = []
    for name, pairs in sets.items():
        sources = tokenizer.encode([source for source, _ in pairs])
        targets = tokenizer.encode([target for _, target in pairs])
        unknown = sum(UNK in ids for ids in [*sources, *targets])
        cut = sum(len(ids) > most for ids in sources)
        rows.append([name, f"{len(pairs):,}", _lengths(sources), _lengths(targets), f"{unknown:,}", f"{cut:,}"])
    head = ["set", "sentences", "source pieces: mean, most", "target pieces", "with an unknown piece", "cut to fit"]
    return [Table(f"Sets in pieces{of}", head, rows, is_numeric=True)]


def _lengths(pieces: Sequence[Sequence[int]]) -> str:
    lengths = [len(ids) for ids in pieces]
    return f"{fmean(lengths):.1f}, {max(lengths)}" if lengths else ""


def _padding(runs: Sequence[RunReading]) -> Table:
    rows: list[list[Cell]] = []
    for run in runs:
        curves = (run.curves.get(name) for name in ("speed/padding_share", "speed/data_wait_share"))
        shares = [f"{100 * fmean(value for _, value in curve):.1f} %" if curve else UNKNOWN for curve in curves]
        rows.append([run.name, *shares])
    head = ["", "slots that are padding", "time that waits for data"]
    return Table("While training, on average", head, rows, is_numeric=True)


# ---- provenance -----------------------------------------------------------------------------------------------------


def provenance(runs: Sequence[RunReading]) -> Component:
    """Where the runs come from: versions, machine, commit, digests, seeds; a column each."""
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for of in facts for name in of)
    rows: list[list[Cell]] = [[name, *(of.get(name, UNKNOWN) for of in facts)] for name in names]
    return section(
        "Provenance", [Table("Origin of the runs", ["", *(run.name for run in runs)], rows, is_numeric=False)]
    )


def _facts(run: RunReading) -> dict[str, str]:
    facts: dict[str, str] = {}
    record = run.record
    if record is not None:
        resolved = to_json(record.resolved)
        facts |= {
            "run id": record.id,
            "started": record.started,
            "machine": record.machine or UNKNOWN,
            "commit": record.commit or UNKNOWN,
            "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
            "computed with": ", ".join(f"{name} {as_typed(value)}" for name, value in resolved.items()),
            "seed": str(record.config.train.seed),
            "data digest": record.data_digest,
            "tokenizer SHA-256": record.tokenizer_sha256,
        }
        if record.init_from is not None:
            facts["weights from"] = f"{record.init_from.path}, step {record.init_from.step:,}"
    if run.results is not None:
        search = to_json(run.results.search)
        facts |= {
            "mean of steps": ", ".join(map(str, run.results.averaged)) or "none",
            "search": ", ".join(f"{name} {as_typed(value)}" for name, value in search.items()),
            "skipped updates": str(run.results.skipped_updates),
            "test sets SHA-256": run.results.test_digest,
        }
    return facts


def commands(runs: Sequence[RunReading], job: ReportJob) -> Component:
    """The command lines that train, score and compare the same again."""
    blocks: list[Block] = []
    for run in runs:
        if run.record is not None:
            blocks.append(_training_command(run, run.record))
            again = f"Translate and score the test sets of {run.name} again:"
            blocks.append(Command(again, _line("evaluate", [f"run_dir={run.name}"])))
    names = [run.name for run in runs]
    if len(names) > 1:
        blocks.append(Command("Compare the runs:", _line("compare", names)))
    blocks.append(Command(f"Make this page again (transformer-mt {__version__}):", _line("report", _arguments(job))))
    return section("Commands", blocks)


def _arguments(job: ReportJob) -> list[str]:
    """What was given to `transformer report`: the runs, and the keys that are not at their defaults."""
    defaults = leaves(to_json(ReportJob()))
    given = {key: value for key, value in leaves(to_json(job)).items() if key != "runs" and value != defaults[key]}
    return [*job.runs, *(f"{key}={as_typed(value)}" for key, value in given.items())]


def _training_command(run: RunReading, record: RunRecord) -> Command:
    where = f", at commit {record.commit}" if record.commit else ""
    job = replace(record.config, run_dir=f"{run.name}-again")
    return Command(f"Train {run.name} again, in another run directory{where}:", _line("train", train_overrides(job)))


def train_overrides(job: TrainJob) -> list[str]:
    """What to give `transformer train` for this job: all that differs from the paper's base."""
    paper = leaves(to_json(TrainJob()))
    of_job = leaves(to_json(job))
    changed = {key: value for key, value in of_job.items() if key not in paper or value != paper[key]}
    return ["experiment=base", *(f"{key}={as_typed(value)}" for key, value in changed.items())]


def _line(command: str, arguments: Sequence[str]) -> str:
    return " ".join(["transformer", command, *map(shlex.quote, arguments)])
