"""A published model as a run directory: translated with, scored, exported and trained from like any other run.

import_model   a folder, or `hf:OWNER/NAME` -> read_marian -> RUN/{tokenizer.model, run.json, averaged/}
               Marian's own model.npz       -> read_npz    -> the same
located        what `init_from` names -> the run directory to begin from, imported once beside the prepared corpora
run_path       what `run_dir` names -> the run directory to read; of a run on the hub, or a model of Marian's, its copy
               in the cache of the hub's client
"""

import hashlib
import logging
import os
import platform
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import sentencepiece
import torch

from transformer import __version__
from transformer.checkpoint import Checkpoint, commit, find_checkpoint, is_checkpoint
from transformer.config.jobs import ON_HUB, TrainJob
from transformer.config.languages import language_of
from transformer.config.primitives import to_json
from transformer.config.settings import DataConfig, Device, FilterConfig, LayoutKind, Precision, TokenizerConfig
from transformer.data.hub import COMMIT, Unreachable
from transformer.data.training_text import store_dir_of
from transformer.errors import CheckpointError, InputError, StorageError
from transformer.files import (
    MANIFEST,
    build_once,
    digest_file,
    is_sound,
    list_names,
    open_regular,
    storage_error,
    write_file,
)
from transformer.integrations.hub import HubModel, copies_of, fetch, find_model, is_on_hub, name_on_hub
from transformer.integrations.published.hub_run import CARD, RUN_FILE, copy_run, is_intact, is_run
from transformer.integrations.published.marian import (
    FILES,
    PICKLE,
    TOKENIZER_CONFIG,
    WEIGHTS,
    Published,
    is_marian,
    read_marian,
)
from transformer.integrations.published.marian_npz import MarianFiles, find_files, is_npz, read_npz
from transformer.records import RUN_FORMAT, CheckpointState, Imported, Resolved, RunRecord
from transformer.run_dir import MODEL, RunDir, list_steps, tokenizer_digests
from transformer.vocabulary import own_source_size, target_size

LARGEST_CARD = 1 << 18  # bytes of it that run.json keeps

_LICENCE = re.compile(r"\A---\n(?:(?!---).*\n)*?license:[ \t]*([\w.+-]+)")  # in the front matter of a card

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """A folder with the files of a model, and where they are from."""

    folder: Path
    source: str
    revision: str | None
    npz: MarianFiles | None = None  # Marian's own files, in place of a folder

    @property
    def files(self) -> dict[str, Path]:
        """The files of the model that are there, by name."""
        paths = [self.folder / name for name in FILES] if self.npz is None else self.npz.paths
        return {path.name: path for path in paths if os.path.isfile(path)}  # a name may be too long


def import_model(
    source: str,
    run_dir: Path,
    *,
    key: str,
    vocabularies: Sequence[str] | None = None,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
) -> Checkpoint:
    """Write a run directory with the model that `source` names: a folder, `hf:OWNER/NAME`, or Marian's model.npz.

    `vocabularies` are the SentencePiece models of the last; None takes those that its settings name.
    Raises InputError, which names the setting `key`, where it cannot be imported, and where `run_dir` is there already;
    StorageError where that cannot be written.
    """
    if run_dir.is_symlink() or (run_dir.exists() and (not run_dir.is_dir() or list_names(run_dir))):
        raise InputError(f"{run_dir}: exists already and is not empty: choose another run_dir, or remove it")
    with _found(source, key, vocabularies) as place:
        _write(place, run_dir, src_lang=src_lang, tgt_lang=tgt_lang)
    with suppress(OSError):  # of `build_once`: from now on nobody builds this directory
        run_dir.with_name(f"{run_dir.name}.lock").unlink()
    return find_checkpoint(run_dir, "auto")  # verified, as it will be read


@contextmanager
def _found(source: str, key: str, vocabularies: Sequence[str] | None = None) -> Iterator[_Place]:
    """The files that a source names, for as long as the context lasts."""
    if is_npz(source):
        files = find_files(Path(source), vocabularies)
        yield _Place(files.model.parent, source, revision=None, npz=files)
        return
    if vocabularies is not None:
        raise InputError(
            f"vocabularies={','.join(vocabularies)} apply to a model.npz of Marian's only, which {key}={source} is not"
        )
    if not is_on_hub(source):
        folder = Path(source)
        if not folder.is_dir():
            raise InputError(f"{key}={source}: no such folder; a model of the hub is named hf:OWNER/NAME")
        yield _Place(folder, source, revision=None)
        return

    with _fetched(find_model(source, key), source, key) as place:
        yield place


@contextmanager
def _fetched(model: HubModel, source: str, key: str) -> Iterator[_Place]:
    """The files of a model on the hub: the copy of a run, or those of Marian's, for as long as the context lasts."""
    if is_run(model):
        yield _Place(copy_run(model, f"{key}={source}"), source, model.revision)
        return
    with tempfile.TemporaryDirectory(prefix="transformer-hub-") as temporary, _named_for(source, Path(temporary)):
        log.info("fetching %s at revision %s", source, model.revision)
        fetch(model, _files_of_marian(model.files), Path(temporary))
        yield _Place(Path(temporary), source, model.revision)


@contextmanager
def _named_for(source: str, folder: Path) -> Iterator[None]:
    """Have errors about the files in a folder that will be gone name where those are from."""
    try:
        yield
    except (CheckpointError, InputError) as error:
        error.args = (str(error).replace(f"{folder}/", f"{source}: ").replace(str(folder), source),)
        raise


def _files_of_marian(names: Sequence[str]) -> list[str]:
    """Of the files of a repository, those of the model, and its card; of the weights, no pickle beside safetensors."""
    return [name for name in (*FILES, CARD) if name in names and not (name == PICKLE and WEIGHTS in names)]


def _write(place: _Place, run_dir: Path, *, src_lang: str | None, tgt_lang: str | None) -> None:
    """Read the model, and write the run, complete or not at all."""
    imported = _describe(place)
    fill = partial(_copy_run, place.folder, imported=imported)
    if place.npz is not None or not RunDir(place.folder).record.exists():
        published = read_marian(place.folder) if place.npz is None else read_npz(place.npz)
        job = _job(published, run_dir, src_lang=src_lang, tgt_lang=tgt_lang)
        fill = partial(_fill, published=published, job=job, imported=imported)
    elif place.revision is None:
        raise InputError(f"{place.source}: already a run directory: every command takes it as it is")
    try:
        build_once(run_dir, fill, is_usable=_is_usable, marks=[RunDir(run_dir).record.name])
    except OSError as error:
        raise storage_error(run_dir, error=error) from error
    log.info("%s: imported from %s", run_dir, imported.describe())


def _describe(place: _Place) -> Imported:
    """What run.json says of where the model is from."""
    card = None
    with suppress(OSError), open_regular(place.folder / CARD) as file:
        card = file.read(LARGEST_CARD).decode(errors="replace")
    licence = None if card is None else _LICENCE.search(card)
    return Imported(
        source=place.source if place.revision else str(Path(place.source).absolute()),
        revision=place.revision,
        licence=None if licence is None else licence[1],
        card=card,
        sha256=_digests(place.files),
    )


def _job(published: Published, run_dir: Path, *, src_lang: str | None, tgt_lang: str | None) -> TrainJob:
    """The settings of the run."""
    longest = min(FilterConfig().max_length, published.model.max_positions - 1)
    try:
        return TrainJob(
            run_dir=str(run_dir),
            model=published.model,
            data=DataConfig(
                src_lang=_language(src_lang, published.src_lang, "data.src_lang"),
                tgt_lang=_language(tgt_lang, published.tgt_lang, "data.tgt_lang"),
                filter=FilterConfig(max_length=longest),
            ),
            tokenizer=TokenizerConfig(vocab_size=max(8, published.tokenizers.source.vocab_size)),
            search=published.search,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def _language(given: str | None, found: str | None, key: str) -> str:
    """The language that is given, or found. Raises InputError where that is not a code."""
    code = given or found
    if code is None:
        raise InputError(
            f"{key} is not set, and no {TOKENIZER_CONFIG} of the model names it: give it to `transformer import`"
        )
    try:
        language_of(code, key)
    except InputError as error:
        if given is not None:
            raise
        raise InputError(f"{key} is not set, and the model says {found!r:.40}: name a code of ISO 639") from error
    return code


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    """The SHA-256 of each file of a model, by its name; in the cache of the hub's client they are links."""
    return {name: digest_file(path.resolve()).sha256 for name, path in files.items()}


def _copy_run(source: Path, folder: Path, *, imported: Imported) -> None:
    """Copy a run that was fetched and verified, and say in its record where it is from."""
    record = RunDir(source).read_record()
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        if path.is_file() and RUN_FILE.fullmatch(name) and name != MANIFEST:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with open_regular(path) as file:
                write_file(folder / name, file.read())
    if record.imported is not None:  # the run was itself of a published model
        imported = replace(imported, licence=imported.licence or record.imported.licence)
    RunDir(folder).write_record(replace(record, imported=imported))


def _fill(folder: Path, *, published: Published, job: TrainJob, imported: Imported) -> None:
    """Write the files of the run into a folder, which gets its name later."""
    run = RunDir(folder)
    models = published.tokenizers.models
    for name, content in models.items():
        write_file(folder / name, content)

    digest = hashlib.sha256("".join(imported.sha256.values()).encode()).hexdigest()
    tokenizer_sha256, target_tokenizer_sha256 = tokenizer_digests(models)
    run.write_record(
        RunRecord(
            format=RUN_FORMAT,
            id=secrets.token_hex(8),
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            versions={
                "transformer-mt": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "sentencepiece": sentencepiece.__version__,
            },
            data_digest=digest,
            prepare_version=0,  # nothing was prepared
            tokenizer_sha256=tokenizer_sha256,
            target_tokenizer_sha256=target_tokenizer_sha256,
            init_from=None,
            resolved=Resolved(
                device=Device.cpu,
                precision=Precision.fp32,
                threads=1,
                max_tokens=job.data.filter.max_length + 1,
                layout=LayoutKind.packed,
                compile=False,
                micro_batch_multiple=1,
            ),
            config=job,
            imported=imported,
        )
    )

    sizes = published.tokenizers.vocab_sizes
    state = CheckpointState(vocab_size=target_size(sizes), data_digest=digest, source_vocab_size=own_source_size(sizes))
    commit(
        folder,
        step=0,
        tensors={MODEL: published.weights},
        state=to_json(state),
        config=to_json(job),
        averaged=True,
    )


# ---- run_dir --------------------------------------------------------------------------------------------------------


def run_path(source: str, key: str) -> Path:
    """The run directory that a setting names: a path as it is; of one on the hub, the copy on this machine.

    It is fetched where it is not here yet, and where it is damaged. Where the hub does not answer, the copy of the
    revision that it had the last time serves. Raises InputError, with the setting `key`, where there is no such run,
    CheckpointError where it is damaged on the hub, and StorageError where there is no room for it.
    """
    if not is_on_hub(source):
        return Path(source)
    name, revision = name_on_hub(source, key)
    copies = copies_of(name)
    is_commit = revision is not None and COMMIT.fullmatch(revision)
    if is_commit and _is_here(copies / str(revision)):
        return copies / str(revision)

    last_time = copies / f"{quote(revision or 'main', safe='')}.commit"
    try:
        model = find_model(source, key)
    except Unreachable as error:
        with suppress(OSError, UnicodeDecodeError), open_regular(last_time) as file:
            commit = file.read(41).decode()  # a commit has 40 digits
            if COMMIT.fullmatch(commit) and _is_here(copies / commit):
                log.warning("%s; using the copy fetched last time, revision %s", error, commit)
                return copies / commit
        raise

    path = copies / model.revision
    if not _is_here(path):
        with _fetched(model, source, key) as place:
            if place.folder != path:
                _write(place, path, src_lang=None, tgt_lang=None)
    if not is_commit:
        with suppress(StorageError):  # copies that are another user's serve as well
            write_file(last_time, model.revision.encode())
    return path


def _is_here(path: Path) -> bool:
    """Whether the copy of a run is here and intact, or what was made of a model of Marian's."""
    return is_intact(path) if (path / MANIFEST).exists() else _is_usable(path)


def pinned(source: str, key: str) -> str:
    """The same name; of a run on the hub with its commit, so that it stays that run. Raises what `run_path` does."""
    if not is_on_hub(source):
        return source
    return f"{ON_HUB}{name_on_hub(source, key)[0]}@{run_path(source, key).name}"


# ---- init_from ------------------------------------------------------------------------------------------------------


def located(job: TrainJob) -> TrainJob:
    """The job with `init_from` as a run directory or checkpoint: what was published is imported first, once.

    Once the run has a checkpoint of its own, nothing is looked for. Raises InputError and StorageError.
    """
    source = job.init_from
    if source is None or list_steps(Path(job.run_dir)):
        return job
    is_published = is_on_hub(source) or is_npz(source) or is_marian(Path(source))
    if not is_published or is_checkpoint(Path(source)):
        return job

    path = store_dir_of(job) / "imports" / _name(source)
    if not _is_usable(path):
        with _found(source, "init_from") as place:
            log.info("%s: importing %s, once", path, source)
            _write(place, path, src_lang=job.data.src_lang, tgt_lang=job.data.tgt_lang)
    return replace(job, init_from=str(path))


def _name(source: str) -> str:
    """Of an import: for people, and another one where the source's files are others."""
    if is_on_hub(source):
        identity = [source]
        title = source
    else:
        folder = Path(source).absolute()
        title = folder.name
        with _found(source, "init_from") as place:
            identity = list(_digests(place.files).values())
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', title).strip('-.')[:80]}-{digest}"


def _is_usable(path: Path) -> bool:
    return is_sound(partial(find_checkpoint, name="auto"), path)
