"""`transformer doctor`: corpus, tokenizer, model and machine, examined before the hours of a training are spent.

The text is examined first, as it lies in its files; then the corpus is prepared as training would prepare it, which
training finds done; then the model learns a few pairs by heart. Every check is one figure against one limit. The limits
stand beside what they are for, with what real corpora come to.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer.config.jobs import DoctorJob, TrainJob
from transformer.data.prepare import configured_sets, prepare
from transformer.data.source import resolve_source, store_beside
from transformer.data.tokenizer import Tokenizer
from transformer.errors import FindingsError, InputError
from transformer.tools.doctor.alignment import check_alignment
from transformer.tools.doctor.findings import Check, Level, failed
from transformer.tools.doctor.languages import check_languages
from transformer.tools.doctor.pieces import check_characters, check_dropped, check_lengths, check_pieces, check_plan
from transformer.tools.doctor.survey import KnownTexts, Survey, survey
from transformer.tools.doctor.text import check_text
from transformer.tools.doctor.training import check_cost, check_leak, check_overfit
from transformer.training.preview import preview_epoch
from transformer.training.resolve import batching_of, resolve_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetRead:
    """How much of a set was looked at."""

    pairs: int
    sampled: int


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found."""

    sets: dict[str, SetRead]
    checks: list[Check]

    @property
    def findings(self) -> list[Check]:
        """The checks that are not ok, errors first."""
        found = [check for check in self.checks if check.level is not Level.ok]
        return sorted(found, key=lambda check: check.level is not Level.error)


def doctor(job: DoctorJob) -> Diagnosis:
    """Examine what `transformer train` would train on, and how.

    Raises InputError where the text cannot be read, or a setting is wrong; StorageError where the prepared corpus
    cannot be written.
    """
    surveys = _read(job)
    checks = [
        *check_text(surveys, job.data.filter),
        *check_languages(surveys, (job.data.src_lang, job.data.tgt_lang)),
        *check_alignment(surveys),
        check_characters(surveys, job),
    ]
    if not job.text_only:
        checks += _check_training(job, surveys)
    return Diagnosis({survey.name: SetRead(survey.pairs_read, len(survey.lines)) for survey in surveys}, checks)


def require_health(diagnosis: Diagnosis) -> None:
    """Raise FindingsError, whose exit status is for scripts, where a check is not ok."""
    findings = diagnosis.findings
    if findings:
        errors = sum(check.level is Level.error for check in findings)
        raise FindingsError(
            f"errors: {errors}, warnings: {len(findings) - errors}, first {findings[0].name} in {findings[0].where}: "
            "the report has a remedy for each"
        )


def _read(job: TrainJob) -> list[Survey]:
    """Every set: the training sets first, `train` before the others, then the evaluation sets, dev first."""
    store_dir = Path(job.data.store_dir) if job.data.store_dir is not None else store_beside(job.run_dir)
    languages = (job.data.src_lang, job.data.tgt_lang)
    sources = {
        name: resolve_source(pair, f"data.{name}", languages=languages, store_dir=store_dir)
        for name, pair in configured_sets(job.data).items()
    }
    training = sorted((name for name in sources if _is_trained_on(name)), key=lambda name: name != "train")
    evaluation = sorted((name for name in sources if not _is_trained_on(name)), key=lambda name: name != "dev")

    log.info("reading %s", ", ".join([*training, *evaluation]))
    evaluated = {name: survey(name, sources[name], None) for name in evaluation}
    known = KnownTexts(evaluated)
    read = [*(survey(name, sources[name], known) for name in training), *evaluated.values()]
    for one in read:
        if not one.lines:
            raise InputError(f"{one.paths[0]}: there is no sentence in it: check data.{one.name}")
    return read


def _is_trained_on(name: str) -> bool:
    return name == "train" or name.startswith("extra.")


def _check_training(job: TrainJob, surveys: list[Survey]) -> list[Check]:
    """Prepare as training does, and examine what comes of it; where that fails, the error is a finding."""
    try:
        prepared = prepare(job)
        resolved = resolve_settings(job, world_size=1)
        tokenizer = Tokenizer.from_bytes(prepared.tokenizer_model)
        batching = batching_of(job, resolved, lengths=prepared.store.lengths, mixture=prepared.mixture)
        preview = preview_epoch(prepared.store.lengths, batching, model=job.model, vocab_size=tokenizer.vocab_size)
    except InputError as error:
        remedy = "this is what `transformer train` would say, too: see the findings above it"
        return [failed("preparing", "plan", found=str(error), level=Level.error, remedy=remedy, places=[])]

    checks = [
        *check_pieces(surveys, tokenizer),
        *check_lengths(surveys, job, tokenizer),
        check_dropped(prepared, job),
        check_plan(preview, job),
    ]
    log.info("the model learns a few pairs by heart")
    vocab_size = tokenizer.vocab_size
    with _threads(resolved.threads):
        return [
            *checks,
            check_leak(job, prepared.store, vocab_size=vocab_size, batching=batching, resolved=resolved),
            check_overfit(job, prepared.store, vocab_size=vocab_size, batching=batching, resolved=resolved),
            *check_cost(job, prepared, resolved=resolved, vocab_size=vocab_size, batching=batching, preview=preview),
        ]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads, as training would."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- for people -----------------------------------------------------------------------------------------------------


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """A line for each finding, with its remedy and its places below it, and one for each check that is ok.

    A check that looks at several texts is ok where all of them are; its line has the one that is nearest to its limit.
    """
    lines = [
        f"{name}: {read.pairs:,} pairs" + ("" if read.sampled == read.pairs else f", {read.sampled:,} of them sampled")
        for name, read in diagnosis.sets.items()
    ]
    for name in dict.fromkeys(check.name for check in diagnosis.checks):
        checks = [check for check in diagnosis.checks if check.name == name]
        findings = [check for check in checks if check.level is not Level.ok]
        for check in findings:
            lines += _finding_lines(check)
        if not findings:
            lines.append(_line(max(checks, key=_nearness)))
    return "".join(f"{line}\n" for line in lines)


def _nearness(check: Check) -> float:
    return check.value / check.limit if check.value is not None and check.limit else 0.0


def _line(check: Check) -> str:
    return f"{check.level.value:<8} {check.name:<18} {check.where}: {check.found}"


def _finding_lines(check: Check) -> list[str]:
    places = [f"{place.path}:{','.join(map(str, place.lines))}" for place in check.places if place.lines]
    return [_line(check), f"           remedy: {check.remedy}", *(f"           {place}" for place in places)]
