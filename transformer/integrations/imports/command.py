"""`transformer import`: a published model becomes a run directory, which every command takes."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from transformer.config.keys import own_text
from transformer.config.settings import DataConfig, ModelConfig
from transformer.cost import count_parameters
from transformer.errors import InputError
from transformer.integrations.imports.job import ImportJob
from transformer.integrations.published.run import import_model
from transformer.run_dir import RunDir
from transformer.vocabulary import describe_vocab_size


@dataclass(frozen=True)
class Made:
    """The run that was made, and of what."""

    run_dir: str
    source: str
    revision: str | None
    licence: str | None
    languages: list[str]
    parameters: int
    vocabulary: str  # its size
    model: ModelConfig


def import_run(job: ImportJob) -> Made:
    """Make a run directory of a published model. Raises what `import_model` does."""
    if not job.from_:
        raise InputError(
            "from is not set: name a folder, a model.npz of Marian's, or a model of the hub as hf:OWNER/NAME"
        )
    run = RunDir(Path(job.run_dir))
    checkpoint = import_model(
        job.from_,
        run.path,
        key="from",
        vocabularies=job.vocabularies,
        src_lang=job.data.src_lang,
        tgt_lang=job.data.tgt_lang,
    )
    imported = run.read_record().imported
    assert imported is not None
    model = checkpoint.settings("model", ModelConfig)
    data = checkpoint.settings("data", DataConfig)
    sizes = checkpoint.run_state().vocab_sizes
    return Made(
        run_dir=job.run_dir,
        source=imported.source,
        revision=imported.revision,
        licence=imported.licence,
        languages=[data.src_lang, data.tgt_lang],
        parameters=count_parameters(model, sizes).total,
        vocabulary=describe_vocab_size(sizes),
        model=model,
    )


def format_made(made: Made) -> str:
    """What was made, and what can be done with it."""
    revision = f" at revision {made.revision}" if made.revision else ""
    licence = made.licence or "none named: look at the model's card before you share what you make of it"
    src_lang, tgt_lang = made.languages
    to_train = shlex.join([f"init_from={made.run_dir}", f"data.src_lang={src_lang}", f"data.tgt_lang={tgt_lang}"])
    return (
        f"{made.run_dir}: {made.source}{revision}, {' to '.join(made.languages)}\n"
        f"parameters  {made.parameters:,} with {made.vocabulary}\n"
        f"licence     {licence}\n"
        f"transformer translate {shlex.quote(f'run_dir={made.run_dir}')} < in.txt\n"
        f"transformer train experiment=base run_dir=runs/mine {to_train} {own_text(src_lang, tgt_lang)}\n"
    )
