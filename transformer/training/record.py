"""What a run is started with (`start_run`), and what may change when the same command resumes it (`resume_run`).

Settings that change the mathematics are refused with a list of the differences: mixing two recipes in one run would
make its results meaningless. What `auto` means is resolved at the first start and kept in run.json, wherever the run
goes on later. The policy of each key is beside the key, in `config.settings`.
"""

import json
import logging
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import sacrebleu
import sentencepiece
import torch

from transformer import __version__, registry
from transformer.checkpoint import Checkpoint
from transformer.config.jobs import TrainJob
from transformer.config.keys import PACKAGE, as_typed, generic_key, keys_of, leaves, names_of_plugins
from transformer.config.primitives import to_json
from transformer.config.settings import Device, OnResume
from transformer.data.plan import plan_version
from transformer.data.prepare import Prepared
from transformer.data.report import read_report
from transformer.data.store import Mixture
from transformer.data.tokenizer import read_model
from transformer.data.training_text import PREPARE_VERSION
from transformer.errors import CheckpointError, FindingsError, InputError, StorageError
from transformer.evaluation.sets import digest_sets
from transformer.files import MANIFEST, remove, write_file, write_json
from transformer.machine import describe_processor, source_commit
from transformer.records import RUN_FORMAT, Imported, Origin, Proof, Resolved, RunRecord
from transformer.run_dir import RunDir, tokenizer_digests
from transformer.training.resolve import resolve_again, resolve_settings

log = logging.getLogger(__name__)


def start_run(
    job: TrainJob, prepared: Prepared, source: Checkpoint | None, *, world_size: int, like: RunDir | None = None
) -> Resolved:
    """Write what a new run is started with, and remove what an earlier one left here. Raises StorageError.

    `source` is the checkpoint whose weights it begins with; None: they are drawn from the seed. `like` is a run that it
    is to repeat, resolved in the same way. Raises FindingsError where what that was trained on differs.
    """
    run = RunDir(Path(job.run_dir))
    if like is not None:
        _check_same_data(like, prepared, source)

    # A run whose checkpoints were taken away may have left these.
    for stale in (run.history, run.results, run.best, run.metrics, run.target_tokenizer):
        remove(stale)

    resolved = resolve_settings(job, world_size) if like is None else resolve_again(job, like.read_record().resolved)
    tokenizer_sha256, target_tokenizer_sha256 = tokenizer_digests(prepared.tokenizers.models)
    record = RunRecord(
        format=RUN_FORMAT,
        id=secrets.token_hex(8),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions=_versions(job),
        data_digest=prepared.report.digest,
        prepare_version=PREPARE_VERSION,
        tokenizer_sha256=tokenizer_sha256,
        init_from=None if source is None else _origin(source),
        resolved=resolved,
        config=job,
        machine=_machine(resolved, world_size=world_size),
        commit=source_commit(PACKAGE.parent),
        dev_digest=digest_sets(prepared.dev),
        test_digest=digest_sets(prepared.test),
        proof=_earlier_proof(run),
        target_tokenizer_sha256=target_tokenizer_sha256,
    )

    _write(run, record, prepared)
    _write_tokenizers(run, prepared)
    return resolved


def _check_same_data(run: RunDir, prepared: Prepared, source: Checkpoint | None) -> None:
    """Raise FindingsError unless a run was started on these data, with this tokenizer, from this checkpoint."""
    record = run.read_record()
    changed = _changed_text(prepared, record)
    if changed:
        files = _changed_files(run, prepared)
        raise FindingsError(f"{run.path}: was trained on different data: {'; '.join(files or changed)}")

    manifest = None if source is None else _origin(source).manifest_sha256
    before = None if record.init_from is None else record.init_from.manifest_sha256
    if manifest != before:
        raise FindingsError(f"{run.path}: init_from={record.config.init_from} has had its weights changed since then")


def _changed_files(run: RunDir, prepared: Prepared) -> list[str]:
    """The training files that differ from those of the run, as its data.json has them; none where that is unknown."""
    with suppress(CheckpointError):
        before = read_report(run).sets
        return [
            f"data.{name}.{key} ({file.path}) has changed"
            for name, files in prepared.report.sets.items()
            if files.weight is not None and name in before
            for key, file in files.files.items()
            if key in before[name].files and before[name].files[key].sha256 != file.sha256
        ]
    return []


def _earlier_proof(run: RunDir) -> Proof | None:
    """What a start before this one has found of its device, and perhaps did not come back from."""
    with suppress(CheckpointError, StorageError):  # there was none, or nothing that can be read
        return run.read_record().proof
    return None


def resume_run(job: TrainJob, prepared: Prepared, checkpoint: Checkpoint) -> Resolved:
    """Check that this job may go on from the checkpoint, and write down what it changes.

    Raises CheckpointError with the differences that may not be, and StorageError.
    """
    run = RunDir(Path(job.run_dir))
    record = run.read_record()
    _compare(job, prepared, record=record, checkpoint=checkpoint)
    _write_tokenizers(run, prepared)

    now = replace(
        record,
        config=job,
        data_digest=prepared.report.digest,
        dev_digest=digest_sets(prepared.dev),
        test_digest=digest_sets(prepared.test),
    )
    if now != record:
        _write(run, now, prepared)
    return resolve_again(job, record.resolved)


def _write_tokenizers(run: RunDir, prepared: Prepared) -> None:
    """Write the model files that are not there as they should be: scoring reads them when the training has ended."""
    for name, content in prepared.tokenizers.models.items():
        with suppress(InputError):  # it is not there, or no file
            if read_model(run.path / name) == content:
                continue
        write_file(run.path / name, content)


def _write(run: RunDir, record: RunRecord, prepared: Prepared) -> None:
    """Write what preparing has counted, the settings for people, and the record.

    The record is last: after a crash in between it is still the old one, and all is written again.
    """
    write_json(run.data, to_json(prepared.report))
    write_file(run.config, "".join(_yaml(to_json(record.config), "")).encode())
    run.write_record(record)


def _origin(source: Checkpoint) -> Origin:
    """How run.json names the checkpoint that the weights come from."""
    manifest = (source.path / MANIFEST).read_bytes()  # it names every file's digest
    return Origin(
        path=str(source.path.absolute()),
        step=source.step,
        manifest_sha256=sha256(manifest).hexdigest(),
        imported=_imported(source),
    )


def _imported(source: Checkpoint) -> Imported | None:
    """The published model that a checkpoint's run was imported from, or began from; None where it is of none."""
    for folder in source.path.absolute().parents[:2]:  # of RUN/averaged, or RUN/checkpoints/step-N
        with suppress(CheckpointError):
            record = RunDir(folder).read_record()
            return record.imported or (None if record.init_from is None else record.init_from.imported)
    return None


def _machine(resolved: Resolved, *, world_size: int) -> str:
    """What the run starts on, as rank 0 sees it."""
    processor = describe_processor()
    if resolved.device is Device.cuda:
        return f"{world_size} x {torch.cuda.get_device_name()}; {processor}"
    return processor if world_size == 1 else f"{world_size} processes on {processor}"


def _versions(job: TrainJob) -> dict[str, str]:
    """The versions of what decides on the numbers, other packages' plug-ins among them."""
    return {
        **registry.versions(names_of_plugins(job)),
        "transformer-mt": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sentencepiece": sentencepiece.__version__,
        "sacrebleu": sacrebleu.__version__,
    }


def _yaml(config: dict[str, Any], indent: str) -> Iterator[str]:
    """Lines of config.yaml: values are written as JSON, which YAML reads, too."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:\n"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}\n"


def _compare(job: TrainJob, prepared: Prepared, *, record: RunRecord, checkpoint: Checkpoint) -> None:
    """Compare settings, data and versions with those of the start. Raises CheckpointError for what may not differ."""
    before = leaves(to_json(record.config))
    now = leaves(to_json(job))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    width = job.model.d_model
    if record.config.train.peak(width) == job.train.peak(width):  # runs of 0.1.0 have their recipe's rate as a number
        changed = [key for key in changed if key not in ("train.learning_rate", "train.learning_rate_scale")]

    # What may not differ.
    refused = [
        f"{key}: {as_typed(before.get(key))} -> {as_typed(now.get(key))}"
        for key in changed
        if _policy(key, job) is OnResume.refuse
    ]
    refused += _changed_text(prepared, record)
    refused += changed_order(job, prepared.mixture, checkpoint=checkpoint)
    if refused:
        raise CheckpointError(
            f"{job.run_dir}: cannot be resumed under other settings ({'; '.join(refused)}): "
            "put them back, or choose another run_dir"
        )

    # What may, and is worth a line of the log.
    for key in changed:
        if _policy(key, job) is OnResume.note:
            log.info(
                "%s: %s -> %s: the data stay as they were; dropout masks and rounding may differ",
                key,
                as_typed(before.get(key)),
                as_typed(now.get(key)),
            )
    versions = {name: version for name, version in _versions(job).items() if record.versions.get(name) != version}
    if versions:
        log.info("versions have changed since the start: %s; numbers may differ in the last bits", versions)


def _changed_text(prepared: Prepared, record: RunRecord) -> list[str]:
    """What differs of the training data and the pieces, as one item or none."""
    changed = []
    if not prepared.is_of(record.data_digest):
        changed.append(
            "the training data, its filters or the tokenizer's settings"
            if record.prepare_version == PREPARE_VERSION
            else f"how data are prepared: version {record.prepare_version} -> {PREPARE_VERSION}"
        )
    elif (record.tokenizer_sha256, record.target_tokenizer_sha256) != tokenizer_digests(prepared.tokenizers.models):
        # The digest of the data is of the tokenizer's settings.
        before = record.versions.get("sentencepiece")
        now = sentencepiece.__version__
        changed.append(f"the tokenizer: SentencePiece {before} trained another one than {now} does")
    return changed


def changed_order(job: TrainJob, mixture: Mixture, *, checkpoint: Checkpoint) -> list[str]:
    """What differs of the order of the data since the checkpoint was written, as one item or none."""
    training = checkpoint.run_state().training
    before = None if training is None else training.plan_version
    now = plan_version(job, mixture)
    return [] if before == now else [f"the order of the data and its pieces: version {before} -> {now}"]


def _policy(key: str, job: TrainJob) -> OnResume:
    """Whether a key may change when a run is resumed."""
    if key == "train.max_steps" and job.train.decay.ends_at_the_last_step:
        return OnResume.refuse

    # Development and test sets only measure: all of their keys may change, the tag, too.
    if key.startswith(("data.dev.", "data.devs.", "data.test.")):
        return OnResume.allow
    return keys_of(TrainJob)[generic_key(key)].on_resume
