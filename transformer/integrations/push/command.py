"""`transformer push`: a run goes to the Hugging Face hub, with what translating needs, and a card that says what it is.

    run -> Subject -> _write       run.json, data.json, results.json, metrics.jsonl, tokenizers, averaged/, hypotheses/
                   -> format_card  README.md
                   -> seal_run     MANIFEST.json -> one commit

The moments, the other checkpoints, the log and text of the training stay here, and so do the names of this machine's
folders: see `portable`. No file of the run is copied: each is read as any command reads it, following no link, and what
was understood of it is written anew.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformer import __version__
from transformer.checkpoint import Checkpoint, commit, find_checkpoint
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.data.report import read_report
from transformer.data.tokenizer import Tokenizers, read_models
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.judgements import read_judgements
from transformer.evaluation.sets import (
    Sets,
    check_kept,
    keep_translations,
    read_set,
    read_translations,
    write_sets,
)
from transformer.files import list_names, make_directories, storage_error, write_file, write_json
from transformer.integrations.hub import push_folder
from transformer.integrations.published.hub_run import CARD, RUN_FILE, check_sealed, seal_run
from transformer.integrations.push.card import Subject, format_card
from transformer.integrations.push.job import LICENCES, PushJob
from transformer.integrations.push.portable import portable_job, portable_record, portable_report
from transformer.integrations.push.tokenizer_file import without_origin
from transformer.plugins import JudgedText
from transformer.records import Results, Scores
from transformer.run_dir import HYPOTHESIS, MODEL, SOURCE, RunDir, is_dev
from transformer.tools.metrics import only_numbers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pushed:
    """What was sent, or would be."""

    repo: str
    private: bool
    address: str | None  # of the repository; None: nothing was sent
    revision: str | None  # the commit
    files: dict[str, int]  # bytes, by name
    card: str


def push(job: PushJob) -> Pushed:
    """Send a run to the hub, in one commit; with `dry_run`, only make what would be sent.

    Raises InputError where a key is missing, where there is no run or model, and where the hub does not take it;
    CheckpointError where the run is damaged; StorageError where there is no room for a copy of it.
    """
    if not job.repo:
        raise InputError("repo is not set: name a repository of the hub as OWNER/NAME")
    if not job.license:
        raise InputError(
            f"license is not set, and nobody can guess it: name the licence under which others may use the model: "
            f"{LICENCES}, or another that the hub knows; those of the data may limit the choice"
        )

    subject = _read(job)
    with _folder(job) as folder:
        card = format_card(subject, job)
        try:
            _write(subject, folder, with_texts=job.texts)
            write_file(folder / CARD, card.encode())
            seal_run(folder)
        except OSError as error:
            raise storage_error(folder, error=error) from error
        check_sealed(folder)
        _check_private(folder)

        files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        address = revision = None
        if not job.dry_run:
            log.info("%s: sending %d files, %.1f MB", job.repo, len(files), sum(files.values()) / 1e6)
            address, revision = push_folder(
                folder,
                job.repo,
                private=job.private,
                message=f"Push {subject.record.id} at step {subject.checkpoint.step} by transformer-mt {__version__}",
                is_ours=lambda name: RUN_FILE.fullmatch(name) is not None,
            )
    return Pushed(job.repo, job.private, address, revision, files=dict(sorted(files.items())), card=card)


def format_pushed(pushed: Pushed) -> str:
    """What was sent and how it is used; of a dry run, the files and the card."""
    size = f"{len(pushed.files)} files, {sum(pushed.files.values()) / 1e6:.1f} MB"
    seen_by = "private" if pushed.private else "public"
    if pushed.revision is not None:
        return (
            f"{pushed.address}: {size}, {seen_by}, revision {pushed.revision}\n"
            f"transformer translate run_dir=hf:{pushed.repo} < in.txt\n"
        )
    width = max(map(len, pushed.files))
    lines = [f"{name:<{width}}  {count:>13,}" for name, count in pushed.files.items()]
    head = f"dry run, nothing is sent: {pushed.repo} would have {size}, {seen_by}"
    return "".join(f"{line}\n" for line in [head, "", *lines, "", f"{CARD}:", ""]) + pushed.card


# ---- what is read ---------------------------------------------------------------------------------------------------


def _read(job: PushJob) -> Subject:
    """The run, with its scores where they are those of the weights that are sent."""
    run = RunDir(Path(job.run_dir))
    run.check_folders()
    checkpoint = find_checkpoint(run.path, "auto")
    record = run.read_record()
    models = _read_tokenizers(run)
    report = read_report(run) if run.data.exists() else None
    results = run.read_results() if run.results.exists() else None
    if results is not None and not _are_of(results, checkpoint):
        log.warning(
            "%s: of step %d, unlike the model that is sent: the scores are left out", run.results, results.steps
        )
        results = None

    sets = _read_sets(run)
    if results is not None:
        check_kept(run, {name: pairs for name, pairs in sets.items() if not is_dev(name)})
    return Subject(
        run=run,
        record=portable_record(record, models),
        checkpoint=checkpoint,
        report=None if report is None else portable_report(report),
        results=results,
        models=models,
        metrics=_read_metrics(run.metrics),
        sets=sets,
        translations={
            name: read_translations(run, name)
            for name in sets
            if results is not None and os.path.lexists(run.text(name, HYPOTHESIS))  # the dev set has none
        },
        scores={} if results is None else {name: _judged(run, name, one) for name, one in results.scores.items()},
    )


def _read_tokenizers(run: RunDir) -> dict[str, bytes]:
    """The tokenizers' files, without where they were trained. Raises CheckpointError and InputError."""
    models = read_models(run.path)
    run.check_tokenizers(models)
    Tokenizers.of(models, run.path)
    try:
        return {name: without_origin(model) for name, model in models.items()}
    except ValueError as error:
        raise InputError(f"{run.tokenizer}: not a SentencePiece model: {error}") from error


def _read_sets(run: RunDir) -> Sets:
    """The text that the run keeps, by the name of the set. Raises InputError."""
    for name in run.set_names():
        path = run.text(name, SOURCE)
        if not RUN_FILE.fullmatch(f"{run.hypotheses.name}/{path.name}"):
            raise InputError(f"{path}: not the name of a set: take it out of the run")
    return {name: read_set(run, name) for name in run.set_names()}


def _read_metrics(path: Path) -> bytes | None:
    """The numbers in metrics.jsonl: `report` draws its curves, `summary` takes its speed. Raises InputError."""
    try:
        metrics, damaged = only_numbers(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): take it out of the run") from error
    if damaged:
        log.warning("%s: %d lines are not measurements and are not sent", path, damaged)
    return metrics


def _judged(run: RunDir, name: str, scores: Scores) -> Scores:
    """The scores of a set, with what judges have said of these translations."""
    if not run.judge_names(name) or not run.text(name, HYPOTHESIS).exists():
        return scores
    text = JudgedText.of(read_set(run, name), read_translations(run, name))
    return replace(scores, judges=read_judgements(run, name, text))


def _are_of(results: Results, checkpoint: Checkpoint) -> bool:
    return (results.steps, results.averaged) == (checkpoint.step, checkpoint.run_state().averaged)


# ---- what is written ------------------------------------------------------------------------------------------------


@contextmanager
def _folder(job: PushJob) -> Iterator[Path]:
    """The directory `output`, which is made; else one that is gone at the end. Raises InputError where it is there."""
    if job.output is None:
        with tempfile.TemporaryDirectory(prefix="transformer-push-") as temporary:
            yield Path(temporary)
        return

    output = Path(job.output)
    if output.is_symlink() or (output.exists() and (not output.is_dir() or list_names(output))):
        raise InputError(f"{output}: exists already and is not empty: choose another output, or remove it")
    try:
        make_directories(output)
    except OSError as error:
        raise storage_error(output, error=error) from error
    yield output


def _write(subject: Subject, folder: Path, *, with_texts: bool) -> None:
    """Write the files of the run, but for card and manifest. Raises OSError and StorageError."""
    there = RunDir(folder)
    there.write_record(subject.record)
    for name, content in subject.models.items():
        write_file(folder / name, content)
    if subject.report is not None:
        write_json(there.data, to_json(subject.report))
    if with_texts:
        write_sets(there, subject.sets)
        keep_translations(there, subject.translations)
    if subject.results is not None:
        there.write_results(subject.results)
    if subject.metrics is not None:
        write_file(there.metrics, subject.metrics)

    # The weights that `translate` takes, as an average, whatever they were here.
    checkpoint = subject.checkpoint
    state = checkpoint.run_state()
    commit(
        folder,
        step=checkpoint.step,
        tensors={MODEL: checkpoint.weights()},
        state=to_json(state) | {"training": None},
        config=to_json(portable_job(_job_of(checkpoint))),
        averaged=True,
    )


def _job_of(checkpoint: Checkpoint) -> TrainJob:
    try:
        return from_json(TrainJob, checkpoint.config)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: not the settings of a run: {error}") from None


def _check_private(folder: Path) -> None:
    """Raise InputError for a document that names the user's home directory: that is nobody's business.

    What is known to have paths was taken out. This is for what a run has from elsewhere, such as an error's message.
    """
    home = str(Path.home())
    for path in sorted(folder.rglob("*")):
        is_document = path.suffix in (".json", ".md")
        if is_document and len(home) > 1 and f"{home}/" in path.read_text(encoding="utf-8"):
            raise InputError(
                f"{path.relative_to(folder)}: names a folder under {home}, which everybody could read: take it "
                "out of the run's own file of that name"
            )
