"""The documents of a run without the traces of this machine: folders are left out, the names of files stay.

    run.json, data.json, config.json of a checkpoint -> portable_record, portable_report, portable_job

    tokenizer.model                            -> `tokenizer_file.without_origin`, whose digests run.json then has

What `translate`, `evaluate`, `export` and `init_from` read stays as it is. Text of the training is left out, too.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer import registry
from transformer.config.jobs import ON_HUB, TrainJob
from transformer.config.settings import DataConfig, PairConfig
from transformer.data.report import DataReport, FileReport, SetReport
from transformer.data.source import DatasetOrigin
from transformer.data.testset import PREFIX
from transformer.records import Imported, Origin, RunRecord
from transformer.run_dir import tokenizer_digests

_BY_NAME = (ON_HUB, PREFIX, *(f"{catalogue}:" for catalogue in registry.OWN["corpora"]))
_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a data set


def portable_record(record: RunRecord, models: Mapping[str, bytes]) -> RunRecord:
    """run.json, beside these tokenizers.

    What was found out about the device is left out, too: elsewhere it is found out again.
    """
    tokenizer_sha256, target_tokenizer_sha256 = tokenizer_digests(models)
    return replace(
        record,
        tokenizer_sha256=tokenizer_sha256,
        target_tokenizer_sha256=target_tokenizer_sha256,
        config=portable_job(record.config),
        init_from=None if record.init_from is None else _portable_origin(record.init_from),
        imported=None if record.imported is None else _portable_import(record.imported),
        proof=None,
    )


def portable_job(job: TrainJob) -> TrainJob:
    """The settings of a training."""
    data = job.data
    target = job.tokenizer.target
    return replace(
        job,
        run_dir=Path(job.run_dir).absolute().name or job.run_dir,
        init_from=None if job.init_from is None else _place(job.init_from),
        data=replace(
            data,
            root=DataConfig().root,
            store_dir=None,
            train=_portable_pair(data.train),
            dev=_portable_pair(data.dev),
            devs={name: _portable_pair(pair) for name, pair in data.devs.items()},
            test={name: _portable_pair(pair) for name, pair in data.test.items()},
            extra={name: replace(pair, **_places(pair)) for name, pair in data.extra.items()},
        ),
        tokenizer=replace(
            job.tokenizer,
            model=None if job.tokenizer.model is None else _place(job.tokenizer.model),
            target=replace(target, model=None if target.model is None else _place(target.model)),
        ),
    )


def portable_report(report: DataReport) -> DataReport:
    """data.json."""
    return replace(
        report,
        sets={name: _portable_set(of_set) for name, of_set in report.sets.items()},
        targets=replace(report.targets, example=None),
        samples={},
    )


def _portable_set(of_set: SetReport) -> SetReport:
    trip = of_set.references
    return replace(
        of_set,
        files={key: _portable_file(file) for key, file in of_set.files.items()},
        origin=None if of_set.origin is None else _portable_dataset(of_set.origin),
        references=None if trip is None else replace(trip, example=None),
    )


def _portable_file(file: FileReport) -> FileReport:
    return replace(file, path=Path(file.path).name)


def _portable_dataset(origin: DatasetOrigin) -> DatasetOrigin:
    is_folder = origin.revision is None and origin.corpus is None
    return replace(origin, dataset=Path(origin.dataset).name) if is_folder else origin


def _portable_origin(origin: Origin) -> Origin:
    """The checkpoint that a run began with, by its last two names: RUN/averaged, checkpoints/step-N."""
    imported = None if origin.imported is None else _portable_import(origin.imported)
    return replace(origin, path="/".join(Path(origin.path).parts[-2:]).lstrip("/"), imported=imported)


def _portable_import(imported: Imported) -> Imported:
    return replace(imported, source=_place(imported.source))


def _portable_pair(pair: PairConfig) -> PairConfig:
    return replace(pair, **_places(pair))


def _places(pair: PairConfig) -> Mapping[str, Any]:
    """The keys of a set that name files; with a data set, `src` and `tgt` are names of columns."""
    of_text = ("src", "tgt") if pair.dataset is None else ("dataset",)
    return {key: _names(getattr(pair, key)) for key in of_text}


def _names(value: str | list[str]) -> str | list[str]:
    return [_place(one) for one in value] if isinstance(value, list) else _place(value)


def _place(text: str) -> str:
    """What is known by its name as it is; of a path, the last part."""
    is_known = text.startswith(_BY_NAME) or (_ON_HUB.fullmatch(text) and not Path(text).exists())
    return text if is_known else Path(text).name
