"""What a run was started with, and what may change when the same command resumes it.

Settings that change the mathematics are refused with a diff: a run whose second half follows another recipe is neither
one. What `auto` means is settled at the first start and kept in run.json, wherever the run goes on later.
"""

import json
import logging
import platform
import secrets
import shutil
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import sacrebleu
import sentencepiece
import torch

from transformer import __version__
from transformer.checkpoint import Checkpoint, read_json, write_file, write_json
from transformer.config.jobs import TrainJob
from transformer.config.keys import generic_key, keys_of
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Decay, LayoutKind, OnResume
from transformer.data.plan import PLAN_VERSION
from transformer.data.prepare import PREPARE_VERSION, Prepared
from transformer.errors import CheckpointError
from transformer.training.resolve import Settled, settle, settle_again

log = logging.getLogger(__name__)


def open_run(
    job: TrainJob, prepared: Prepared, checkpoint: Checkpoint | None, source: Checkpoint | None, *, world_size: int
) -> Settled:
    """Write a new run's papers, or check that this job may resume the run. Raises CheckpointError with a diff.

    `source` is where a new run's weights come from, if they do.
    """
    run_dir = Path(job.run_dir)
    if checkpoint is None:
        settled = settle(job, world_size)
        _write_papers(run_dir, job, prepared, settled, source)
        return settled
    try:
        papers = read_json(run_dir / "run.json")
        _compare(job, prepared, papers, checkpoint)
        older = {"layout": LayoutKind.padded.name, "compile": False}  # of a run begun before there was a choice
        return settle_again(job, from_json(Settled, older | papers["settled"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{run_dir / 'run.json'}: not the papers of a run: {error}") from None


def _write_papers(
    run_dir: Path, job: TrainJob, prepared: Prepared, settled: Settled, source: Checkpoint | None
) -> None:
    config = to_json(job)
    papers = {
        "id": secrets.token_hex(8),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": _versions(),
        "data_digest": prepared.report["digest"],
        "prepare_version": PREPARE_VERSION,
        "tokenizer_sha256": sha256(prepared.tokenizer).hexdigest(),
        "init_from": None if source is None else _origin(source),
        "settled": to_json(settled),
        "config": config,
    }
    for stale in ("results.json", "best.json", "averaged"):  # of a run whose checkpoints were taken away
        path = run_dir / stale
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    write_json(run_dir / "run.json", papers)
    write_json(run_dir / "data.json", prepared.report)
    write_file(run_dir / "tokenizer.model", prepared.tokenizer)
    write_file(run_dir / "config.yaml", "".join(_yaml(config, "")).encode())


def _origin(source: Checkpoint) -> dict[str, object]:
    manifest = (source.path / "MANIFEST.json").read_bytes()  # it names every file's digest
    return {"path": str(source.path.absolute()), "step": source.step, "manifest_sha256": sha256(manifest).hexdigest()}


def _versions() -> dict[str, str]:
    return {
        "transformer-mt": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sentencepiece": sentencepiece.__version__,
        "sacrebleu": sacrebleu.__version__,
    }


def _yaml(config: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:\n"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}\n"


def _compare(job: TrainJob, prepared: Prepared, papers: dict[str, Any], checkpoint: Checkpoint) -> None:
    started = from_json(TrainJob, papers["config"])  # a key that it did not have yet takes its default
    before, now = dict(_flat(to_json(started))), dict(_flat(to_json(job)))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    refused = [f"{key}: {before.get(key)} -> {now.get(key)}" for key in changed if _policy(key, job) is OnResume.refuse]
    if papers["data_digest"] != prepared.report["digest"]:
        before_version = papers.get("prepare_version", 1)
        refused.append(
            "the training data, its filters or the tokenizer's settings"
            if before_version == PREPARE_VERSION
            else f"how data are prepared: version {before_version} -> {PREPARE_VERSION}"
        )
    elif papers["tokenizer_sha256"] != sha256(prepared.tokenizer).hexdigest():  # the digest is of its settings
        theirs, ours = papers["versions"].get("sentencepiece"), sentencepiece.__version__
        refused.append(f"the tokenizer: SentencePiece {theirs} trained another one than {ours} does")
    if checkpoint.state.get("plan_version") != PLAN_VERSION:
        refused.append(f"the order of the data: version {checkpoint.state.get('plan_version')} -> {PLAN_VERSION}")
    if refused:
        raise CheckpointError(
            f"{job.run_dir}: cannot be resumed under other settings ({'; '.join(refused)}): "
            "put them back, or choose another run_dir"
        )
    for key in changed:
        if _policy(key, job) is OnResume.note:
            log.info("%s: %s -> %s: the data stay as they were, dropout masks may differ", key, before[key], now[key])
    changes = {name: version for name, version in _versions().items() if papers["versions"].get(name) != version}
    if changes:
        log.info("other versions than at the start: %s; numbers may differ in the last bits", changes)


def _policy(key: str, job: TrainJob) -> OnResume:
    """What stands at the key's option; but under linear decay the rate of every step depends on `train.max_steps`."""
    if key == "train.max_steps" and job.train.decay is Decay.linear:
        return OnResume.refuse
    return keys_of(TrainJob)[generic_key(key)].on_resume


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
