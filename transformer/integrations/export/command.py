"""`transformer export`: writes the model of a run in the files of another library, and checks it there.

    run -> Original -> ExportFormat.write -> a folder with a temporary name
                       ExportFormat.load  -> a Peer, which runs the exported model
    Original, Peer and sentences -> parity.compare -> Parity, and ExportFormat.ask -> Asked -> the folder gets its name

`formats` says what a format is; `ctranslate2`, `argos`, `marian`, `bergamot`, `browser`, `huggingface` and `onnx`
are the seven of them.
CTranslate2's writer, the check and the folding of weights are those of `integrations/engine`. A folder with the final
name is complete, and was checked.
"""

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from transformer.checkpoint import find_checkpoint
from transformer.config.primitives import to_json
from transformer.config.settings import TORCH, DataConfig, Device, ModelConfig, Precision, Quantization
from transformer.data.corpus import read_lines, read_pairs
from transformer.decoding.loading import build_translator
from transformer.errors import InputError
from transformer.evaluation.sets import read_set
from transformer.files import (
    UNFINISHED,
    list_names,
    make_directories,
    remove,
    storage_error,
    sync,
    temporary_name,
    write_file,
    write_json,
)
from transformer.integrations.engine.parity import TIE, Parity, SearchParity, choose_sentences, compare, mean_length
from transformer.integrations.engine.peer import exponent_near
from transformer.integrations.export import (
    argos,
    bergamot,
    browser,
    ctranslate2,
    huggingface,
    marian,
    marian_engine,
    onnx,
)
from transformer.integrations.export.expressible import check_expressible, check_pieces, check_tags
from transformer.integrations.export.formats import Asked, Original
from transformer.integrations.export.job import ExportJob, Target
from transformer.machine import resolve_threads
from transformer.registry import install_command
from transformer.run_dir import RunDir, is_dev
from transformer.tools.markdown import plain
from transformer.tools.program import ProgramError

PARITY = "parity.json"
README = "README.md"
SHOWN = 10  # differences that are printed

# to=marian was Hugging Face's form before 0.2.0; to be said until 0.3.0.
RENAMED = "to=marian writes Marian's own files; those of Hugging Face's MarianMTModel are to=huggingface now"

FORMATS = {
    Target.ctranslate2: ctranslate2.FORMAT,
    Target.argos: argos.FORMAT,
    Target.marian: replace(marian.FORMAT, ask=marian_engine.ask),
    Target.bergamot: bergamot.FORMAT,
    Target.browser: browser.FORMAT,
    Target.huggingface: huggingface.FORMAT,
    Target.onnx: onnx.FORMAT,
}


class ParityError(Exception):
    """An export does not compute what the model computes, although nothing was to be lost: a bug, here or there."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how exactly it agrees with the model of the run."""

    output: str
    run_dir: str
    checkpoint: str
    to: Target
    quantization: Quantization
    megabytes: float
    checked_on: str  # the set of the run, or the file, with the sentences
    parity: Parity
    engine: Asked = field(default_factory=Asked)  # what to=marian is told by Marian itself


def export(job: ExportJob) -> Exported:
    """Write the model of a run for another library, and check what was written.

    Raises InputError where the package of that library is missing, where it cannot express the model, where the output
    is there already, where there is no model or no sentence to check it with, and where the library's own engine fails;
    CheckpointError where the model is damaged; StorageError where the output cannot be written; ParityError where the
    check fails.
    """
    # Refuse what can be refused without reading a model.
    export_format = FORMATS[job.to]
    output = Path(job.output or f"{Path(job.run_dir)}-{job.to.value}")
    _check_output(output)
    _check_packages(job.to, export_format.packages)
    run = RunDir(Path(job.run_dir))
    checkpoint = find_checkpoint(run.path, job.checkpoint)
    data = checkpoint.settings("data", DataConfig)
    check_expressible(checkpoint.settings("model", ModelConfig), job.to)
    check_tags(data, job.to)

    # Read the model, and the sentences to check it with.
    threads = resolve_threads(job.threads)
    torch.set_num_threads(threads)
    translator = build_translator(
        run.path,
        checkpoint,
        search=replace(export_format.search or job.search, engine=TORCH),
        device=Device.cpu,
        precision=Precision.fp32,
    )
    check_pieces(translator.tokenizers, job.to)
    pairs, checked_on = _read_sentences(job, run)
    sentences = choose_sentences(pairs, translator=translator, count=job.sentences)
    if not sentences:
        raise InputError(f"{checked_on}: no sentence to check the export with: name a file with src=FILE")

    # What the format needs to know.
    exponent = exponent_near(mean_length(sentences, translator), translator.search.length_penalty)
    original = Original(
        translator=translator,
        src_lang=data.src_lang,
        tgt_lang=data.tgt_lang,
        quantization=job.quantization,
        exponent=exponent,
        origin=plain(f"{run.path} ({checkpoint.path.name})"),
        output=output,
        sentences=sentences,
        run=run,
        checkpoint=checkpoint.path.name,
        engine=None if job.engine is None else Path(job.engine),
    )
    export_format.check(original)

    with _renamed_when_done(output) as folder:
        # Write.
        with _disk_errors_named(output):
            export_format.write(original, folder)
            write_file(folder / README, export_format.readme(original).encode())

        # Check. Only float32 loses nothing that a bound could allow for.
        is_exact = job.quantization is Quantization.float32
        bound = export_format.bound(translator.model.config) if is_exact else None
        peer = export_format.load(original, folder, threads)
        parity = compare(translator, peer, sentences, bound=bound, tgt_lang=data.tgt_lang)
        _refuse_problems(parity, output, run)
        try:
            with _disk_errors_named(output):
                asked = export_format.ask(original, peer, folder, threads)
        except ProgramError as error:
            raise InputError(
                f"{output}: not written: the engine itself fails with it: {error} (where it is not installed, it is "
                "not asked)"
            ) from error
        if asked.parity is not None:
            _refuse_problems(asked.parity, output, run)

        # Say so.
        exported = Exported(
            output=str(output),
            run_dir=str(run.path),
            checkpoint=checkpoint.path.name,
            to=job.to,
            quantization=job.quantization,
            megabytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6,
            checked_on=checked_on,
            parity=parity,
            engine=asked,
        )
        write_json(folder / PARITY, to_json(exported))
    return exported


def _refuse_problems(parity: Parity, output: Path, run: RunDir) -> None:
    """Raise ParityError where there are problems, with the versions of the library in which they show."""
    if parity.problems:
        why = f"{'; '.join(parity.problems)} (with {_versions(parity)})"
        raise ParityError(f"{output}: not written: it does not compute what the model of {run.path} does: {why}")


def _versions(parity: Parity) -> str:
    return ", ".join(f"{name} {version}" for name, version in parity.versions.items())


# ---- what is needed -------------------------------------------------------------------------------------------------


def _check_packages(target: Target, packages: Sequence[str]) -> None:
    """Raise InputError where a package of the format is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InputError(f"to={target.value} needs {', '.join(missing)}: {install_command('export')}")


def _read_sentences(job: ExportJob, run: RunDir) -> tuple[Iterable[tuple[str, str | None]], str]:
    """Sentences to check with, their references where there are any, and the name of the set or file they are from."""
    # From files.
    if job.src is not None and job.tgt is not None:
        return read_pairs(Path(job.src), Path(job.tgt)), job.src
    if job.src is not None:
        return ((line, None) for line in read_lines(Path(job.src))), job.src

    # From a set that the run keeps.
    names = sorted(run.set_names(), key=lambda name: not is_dev(name))  # the development sets first
    if not names:
        raise InputError(f"{run.hypotheses}: no sentence to check the export with: name a file with src=FILE")
    return read_set(run, names[0]), names[0]


# ---- the directory --------------------------------------------------------------------------------------------------


def _check_output(output: Path) -> None:
    """Raise InputError where the output exists and is not an empty directory."""
    if os.path.lexists(output) and (not output.is_dir() or list_names(output)):
        raise InputError(f"{output}: exists already and is not empty: choose another output, or remove it")


@contextmanager
def _renamed_when_done(output: Path) -> Iterator[Path]:
    """A new directory that gets the name `output` at the end of the block, or is removed. Raises StorageError.

    What exports to `output` left that were killed is removed: an export that is alive holds a lock on its directory.
    """
    temporary = temporary_name(output.absolute(), UNFINISHED)  # "." has no name
    lock = None
    try:
        with _disk_errors_named(output):
            make_directories(output.parent)
            _clear_killed(output.absolute())
            temporary.mkdir()
            lock = os.open(temporary, os.O_RDONLY)
            with suppress(OSError):  # some file systems have no locks: then nothing is ever cleared
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary
        with _disk_errors_named(output):
            for path in temporary.rglob("*"):
                sync(path)
            sync(temporary)
            temporary.rename(output)
            sync(output.parent)
    finally:
        remove(temporary)
        if lock is not None:
            os.close(lock)


def _clear_killed(output: Path) -> None:
    """Remove the unfinished directories of exports to `output` that nobody holds. Raises StorageError."""
    unfinished = re.compile(rf"{re.escape(UNFINISHED + output.name)}-[0-9]+-[0-9a-f]{{8}}")  # of `temporary_name`
    for name in filter(unfinished.fullmatch, list_names(output.parent)):
        path = output.with_name(name)
        with suppress(OSError):  # an export that is alive
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
            finally:
                os.close(lock)


@contextmanager
def _disk_errors_named(output: Path) -> Iterator[None]:
    """Raise StorageError, with the output's name, for an error of the disk."""
    try:
        yield
    except OSError as error:
        raise storage_error(output, error=error) from error


# ---- for people -----------------------------------------------------------------------------------------------------


def format_exported(exported: Exported) -> str:
    """What was written, and the check."""
    lines = [
        *([RENAMED] if exported.to is Target.marian else []),
        f"{exported.output}: {exported.to.value} in {exported.quantization.value}, {exported.megabytes:.1f} MB, "
        f"of {exported.run_dir} ({exported.checkpoint}); {README} in it says how to load it",
        f"checked on sentences of {exported.checked_on}:",
    ]
    return "".join(f"{line}\n" for line in lines) + format_parity(exported.parity) + format_asked(exported.engine)


def format_asked(asked: Asked) -> str:
    """What an engine itself does with the export, or why it was not asked, in a line."""
    if asked.parity is None:
        return f"{asked.why_not}\n" if asked.why_not else ""
    parity = asked.parity
    searches = [
        f"{search.name}: {search.identical} identical"
        + (f", {search.ties} within {TIE:.0e} in score" if search.ties else "")
        + (f", {search.others + search.degenerate} others" if search.others + search.degenerate else "")
        for search in parity.searches
    ]
    return (
        f"the engine itself, {_versions(parity)}, on {parity.sentences} sentences: {'; '.join(searches)}; "
        f"log-probabilities of {parity.tokens} tokens: at most {parity.log_probs:.1e} apart{_allowed(parity)}\n"
    )


def format_parity(parity: Parity) -> str:
    """The comparison as lines of text."""
    allowed = _allowed(parity)
    lines = [
        f"{parity.sentences} sentences, {parity.cut_alike} of them cut into the same pieces; "
        f"{_versions(parity)} in {parity.arithmetic}",
        f"log-probabilities of {parity.tokens} tokens: at most {parity.log_probs:.1e} apart{allowed}",
    ]
    if parity.logits is not None:
        lines.append(f"logits of all pieces there: at most {parity.logits:.1e} apart{allowed}")
    for search in parity.searches:
        lines += _format_search(search, parity.sentences)
    return "".join(f"{line}\n" for line in lines)


def _allowed(parity: Parity) -> str:
    return "" if parity.bound is None else f" ({parity.bound:.0e} allowed)"


def _format_search(search: SearchParity, sentences: int) -> list[str]:
    line = f"{search.name}: {search.identical} of {sentences} translations are identical"
    if search.differences:
        line += f", {search.ties} within {TIE:.0e} in score, {search.degenerate} degenerate, {search.others} others"
    if search.bleu is not None and search.their_bleu is not None:
        line += f"; BLEU {search.their_bleu:.2f} (ours {search.bleu:.2f})"

    lines = [line]
    for difference in search.differences[:SHOWN]:
        better = "ours" if difference.gap >= 0.0 else "theirs"
        gap = f"{better} better by {abs(difference.gap):.1e}"
        lines.append(f"  line {difference.line}, {gap}: {difference.theirs} | {difference.ours}")
    unlisted = len(search.differences) - SHOWN
    if unlisted > 0:
        lines.append(f"  and {unlisted} more")
    return lines
