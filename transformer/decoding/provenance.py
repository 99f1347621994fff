"""The settings that make an output, as JSON: an unfinished or finished output is compared with them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer.config.jobs import ScoreJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.data.tokenizer import read_models
from transformer.decoding.input_file import Text
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.files import read_json
from transformer.run_dir import tokenizer_digests

FORMAT = 1  # of the files, and of how an input is cut: an output begun in another format is not continued
FORMAT_OF_PAIRS = 2  # which have the number of their line, too

# Keys that do not change the text, or that `settings_of` says in other words.
_OTHER_KEYS = {"run_dir", "checkpoint", "ensemble", "device", "precision", "threads", "search"}
_OTHER_KEYS |= {"input", "output", "prefix", "src", "tgt"}

Settings = Mapping[str, Any]


def settings_of(job: TranslateJob | ScoreJob, translator: Translator, texts: Mapping[str, Text]) -> Settings:
    """All that the text depends on, as JSON: `texts` are the files that the job's keys name.

    Not the size of a batch, the threads and the device: they change it by rounding alone.
    """
    settings: dict[str, Any] = {
        "version": FORMAT if getattr(job, "keep", None) is None else FORMAT_OF_PAIRS,
        "weights": list(translator.weights),
        "tokenizers": list(tokenizer_digests(read_models(Path(job.run_dir)))),
        "precision": translator.precision.value,
    }
    search = replace(translator.search, batch_tokens=None, cuda_graphs=None)
    settings |= {f"search.{name}": value for name, value in to_json(search).items()}
    for name, value in to_json(job).items():
        if isinstance(value, dict) and name not in _OTHER_KEYS:
            settings |= {f"{name}.{key}": one for key, one in value.items()}
        elif name not in _OTHER_KEYS:
            settings[name] = value
    for key, text in texts.items():
        settings |= {f"{key}: sha256": text.sha256, f"{key}: lines": text.lines}
    return settings


def differences(then: Settings, now: Settings) -> str:
    """What is set otherwise, with both values; empty if nothing is."""
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return ", ".join(f"{key}={_shown(then.get(key))}, not {_shown(now.get(key))}" for key in keys)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_settings(path: Path, remedy: str) -> dict[str, Any]:
    """The settings in a file. Raises InputError, with the remedy, where it cannot be read."""
    try:
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}): {remedy}") from error
    return settings
