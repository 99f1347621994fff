"""`transformer doctor`: examines corpus, tokenizer, model and machine before the hours of a training are spent.

    a run that has begun -> curves
    files -> survey -> text, languages, alignment, pieces    checks of the text, as it is in its files
          -> prepare, as training does it -> pieces, vocabulary  checks of tokenizer and plan; training finds this done
          -> training                                        checks of the model, which learns a few pairs, and of costs
    all of them -> findings: Checks -> Diagnosis

A check compares one figure with one limit. Each limit stands in the module of its check, with the value of sound
corpora.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from transformer.compute import avoid_cudnn_attention
from transformer.config.jobs import TrainJob
from transformer.config.settings import is_training_set
from transformer.data.prepare import prepare
from transformer.data.source import resolve_source
from transformer.data.training_text import configured_sets, store_dir_of
from transformer.errors import CheckpointError, FindingsError, InputError
from transformer.run_dir import is_dev
from transformer.run_names import resolve_init_from
from transformer.tools.doctor.alignment import check_alignment
from transformer.tools.doctor.curves import check_curves
from transformer.tools.doctor.findings import Check, Level, failed, passed
from transformer.tools.doctor.job import DoctorJob
from transformer.tools.doctor.languages import check_languages
from transformer.tools.doctor.pieces import check_characters, check_dropped, check_longest, check_pieces, check_plan
from transformer.tools.doctor.survey import KnownTexts, Survey, survey
from transformer.tools.doctor.text import check_text
from transformer.tools.doctor.training import check_cost, check_device, check_leak, check_overfit
from transformer.tools.doctor.vocabulary import check_sizes
from transformer.tools.preview import preview_epoch
from transformer.training.resolve import batching_of, resolve_settings
from transformer.training.warm_start import find_source, with_model_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetRead:
    """How much of a set was read, and how much of that is in the sample."""

    pairs: int
    sampled: int


@dataclass(frozen=True)
class Diagnosis:
    """The sets that were examined, and the result of every check."""

    sets: dict[str, SetRead]
    checks: list[Check]

    @property
    def findings(self) -> list[Check]:
        """The checks that are not ok, errors first."""
        errors = [check for check in self.checks if check.level is Level.error]
        warnings = [check for check in self.checks if check.level is Level.warning]
        return errors + warnings


def doctor(job: DoctorJob) -> Diagnosis:
    """Examine what `transformer train` would train on, and how.

    Raises InputError where the text cannot be read, or a setting is wrong; StorageError where the prepared corpus
    cannot be written.
    """
    languages = check_languages(_read_sets(job), job.data)
    surveys = languages.surveys
    checks = [
        *check_curves(Path(job.run_dir)),
        *check_text(surveys, job.data, looks=languages.looks),
        *languages.checks,
        *check_alignment(surveys, looks=languages.looks),
        *check_characters(surveys, job),
    ]
    if languages.are_mixed_up and not job.text_only:
        found = "tokenizer, model and machine are looked at when the languages of the text are in order"
        checks.append(passed("preparing", "plan", found=found))
    elif not job.text_only:
        checks += _check_training(job, surveys)

    sets = {survey.name: SetRead(survey.pairs_read, len(survey.lines)) for survey in surveys}
    return Diagnosis(sets, checks)


def require_health(diagnosis: Diagnosis) -> None:
    """Raise FindingsError, whose exit status is for scripts, where a check is not ok."""
    findings = diagnosis.findings
    if not findings:
        return

    errors = sum(check.level is Level.error for check in findings)
    warnings = len(findings) - errors
    raise FindingsError(
        f"errors: {errors}, warnings: {warnings}, first {findings[0].name} in {findings[0].where}: "
        "the report has a remedy for each"
    )


def _read_sets(job: TrainJob) -> list[Survey]:
    """Every set: the training sets first, `train` before the others, then the evaluation sets, dev first."""
    # Where each set is.
    store_dir = store_dir_of(job)
    sources = {
        name: resolve_source(pair, f"data.{name}", languages=job.data.languages_of(name), store_dir=store_dir)
        for name, pair in configured_sets(job.data).items()
    }
    training = [name for name in sources if is_training_set(name)]
    training.sort(key=lambda name: name != "train")
    evaluation = [name for name in sources if not is_training_set(name)]
    evaluation.sort(key=lambda name: not is_dev(name))

    # The evaluation sets are read first, because their sentences are looked for in the training sets.
    log.info("reading %s", ", ".join([*training, *evaluation]))
    of_evaluation = {name: survey(name, sources[name], None) for name in evaluation}
    known = KnownTexts(of_evaluation)
    of_training = [survey(name, sources[name], known) for name in training]

    surveys = [*of_training, *of_evaluation.values()]
    for read in surveys:
        if not read.lines:
            raise InputError(f"{read.path(0)}: there is no sentence in it: check data.{read.name}")
    return surveys


def _check_training(job: TrainJob, surveys: list[Survey]) -> list[Check]:
    """Prepare as training does, and examine the result; where that fails, the error is a finding."""
    # Prepare. A checkpoint to begin with brings its own model.
    try:
        source = find_source(job)
        if source is not None:
            job = with_model_of(source, job)
        unchecked = replace(job, data=replace(job.data, check=False))  # the text has been checked
        prepared = prepare(resolve_init_from(unchecked))
        resolved = resolve_settings(job, world_size=1)
        tokenizers = prepared.tokenizers
        vocab_size = tokenizers.vocab_sizes
        batching = batching_of(job, resolved, lengths=prepared.store.lengths, mixture=prepared.mixture)
        preview = preview_epoch(prepared.store.lengths, batching)
    except (InputError, CheckpointError) as error:
        remedy = "`transformer train` would end with the same error: see the findings above it"
        return [failed("preparing", "plan", found=str(error), level=Level.error, remedy=remedy, places=[])]

    # Tokenizer and plan.
    checks = [
        *check_pieces(surveys, tokenizers),
        *check_sizes(prepared, job),
        *check_longest(surveys, job, tokenizers),
        check_dropped(prepared, job),
        check_plan(preview, job),
    ]

    # Model and machine.
    log.info("the model learns a few pairs by heart")
    torch.set_num_threads(resolved.threads)
    avoid_cudnn_attention(torch.device(resolved.device.name))
    return [
        *checks,
        *check_device(job, prepared.store, vocab_size=vocab_size, resolved=resolved),
        check_leak(job, prepared.store, vocab_size=vocab_size, batching=batching, resolved=resolved),
        check_overfit(job, prepared.store, vocab_size=vocab_size, batching=batching, resolved=resolved),
        *check_cost(job, prepared, resolved=resolved, vocab_size=vocab_size),
    ]


# ---- for people -----------------------------------------------------------------------------------------------------


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """A line for each finding, with its remedy and its places below it, and one for each check that is ok.

    A check of several texts is ok where all of them are; its line is of the text that is nearest to the limit.
    """
    lines = []
    for name, read in diagnosis.sets.items():
        sampled = "" if read.sampled == read.pairs else f", {read.sampled:,} of them sampled"
        lines.append(f"{name}: {read.pairs:,} pairs{sampled}")

    for name in dict.fromkeys(check.name for check in diagnosis.checks):
        checks = [check for check in diagnosis.checks if check.name == name]
        findings = [check for check in checks if check.level is not Level.ok]
        for check in findings:
            lines += _finding_lines(check)
        if not findings:
            lines.append(_line(max(checks, key=_nearness)))
    return "".join(f"{line}\n" for line in lines)


def _nearness(check: Check) -> float:
    """How near a check is to its limit: the share of the limit that its figure is."""
    if check.value is None or not check.limit:
        return 0.0
    return check.value / check.limit


def _line(check: Check) -> str:
    return f"{check.level.value:<8} {check.name:<18} {check.where}: {check.found}"


def _finding_lines(check: Check) -> list[str]:
    lines = [_line(check), f"           remedy: {check.remedy}"]
    for place in check.places:
        if place.lines:
            numbers = ",".join(map(str, place.lines))
            lines.append(f"           {place.path}:{numbers}")
    return lines
