"""The public Python API: what `import transformer` gives, what it waits for, and how it answers mistakes."""

import inspect
import io
import json
import logging
import pydoc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

import transformer
from support.corpora import assert_same_tensors, step_dir, tiny_job, write_corpus
from support.paths import ROOT
from transformer.config.jobs import TranslateJob
from transformer.config.settings import Device, Precision, SearchOverride
from transformer.errors import InputError, TransformerError

FUNCTIONS = ["attention_weights", "compose", "load", "train"]
CLASSES = ["Padded", "Results", "TransformerError", "Translator"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps."""
    folder = tmp_path_factory.mktemp("api")
    job = tiny_job(folder / "run", write_corpus(folder / "corpus"), max_steps=4, validate_every=4)
    transformer.train(job)
    return folder / "run"


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Training puts every signal handler back."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# ---- names ----------------------------------------------------------------------------------------------------------


def test_package_waits_neither_for_torch_nor_for_hydra() -> None:
    code = (
        "import json, sys, transformer\n"
        "slow = ('torch', 'numpy', 'hydra', 'omegaconf', 'sentencepiece', 'sacrebleu')\n"
        "listed = dir(transformer)\n"
        "transformer.errors.InputError, transformer.TransformerError, transformer.__version__\n"
        "before = [name for name in slow if name in sys.modules]\n"
        "transformer.compose('train', ['experiment=demo'])\n"
        "print(json.dumps([listed, before, 'hydra' in sys.modules, 'torch' in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    listed, before, knows_hydra, knows_torch = json.loads(done.stdout)
    assert set(FUNCTIONS + CLASSES) <= set(listed)
    assert before == []
    assert (knows_hydra, knows_torch) == (True, False), "composing a job takes no torch"


def test_package_gives_the_names_of_the_modules_that_define_them() -> None:
    from transformer import Padded, Results, Translator, attention_weights, compose, load, train

    named: list[Any] = [Padded, Results, TransformerError, Translator, attention_weights, compose, load, train]
    assert [f"{found.__module__}.{found.__qualname__}" for found in named] == [
        "transformer.layout.Padded",
        "transformer.records.Results",
        "transformer.errors.TransformerError",
        "transformer.decoding.translator.Translator",
        "transformer.model.attention.attention_weights",
        "transformer.cli.commands.compose",
        "transformer.decoding.loading.load",
        "transformer.training.loop.train",
    ]


def test_package_lists_its_names() -> None:
    public = sorted([*FUNCTIONS, *CLASSES, "__version__"])
    assert sorted(transformer.__all__) == public
    assert set(public) <= set(dir(transformer))
    assert dir(transformer) == sorted(set(dir(transformer)))
    namespace: dict[str, Any] = {}
    exec("from transformer import *", namespace)
    assert set(public) <= namespace.keys()


def test_package_raises_an_attribute_error_for_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'transformer' has no attribute 'lode'"):
        getattr(transformer, "lode")  # noqa: B009 (type checkers know that it is not there)
    assert not hasattr(transformer, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'lode' from 'transformer'"):
        exec("from transformer import lode", {})


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_package_has_help_for_every_name(name: str) -> None:
    found = getattr(transformer, name)
    assert len(inspect.getdoc(found) or "") > 50
    out = io.StringIO()
    pydoc.Helper(output=out).help(found)
    assert name in out.getvalue()


def test_load_explains_every_keyword() -> None:
    parameters = list(inspect.signature(transformer.load).parameters)
    assert [name for name in parameters if f"\n{name}: " not in str(inspect.getdoc(transformer.load))] == []


# ---- load -----------------------------------------------------------------------------------------------------------


def test_load_takes_what_the_command_takes() -> None:
    """The same words for device and precision, and every key of the search."""
    hints = get_type_hints(transformer.load)
    assert get_args(hints["device"]) == tuple(device.name for device in Device)
    assert get_args(hints["precision"]) == tuple(precision.name for precision in Precision)
    defaults = {name: p.default for name, p in inspect.signature(transformer.load).parameters.items()}
    assert {name for name, default in defaults.items() if default is None} == vars(SearchOverride()).keys()
    job = TranslateJob()
    assert [defaults["checkpoint"], defaults["device"], defaults["precision"]] == [
        job.checkpoint,
        job.device.name,
        job.precision.name,
    ]


def test_load_translates_as_many_lines(run_dir: Path) -> None:
    translator = transformer.load(run_dir)
    assert isinstance(translator, transformer.Translator)
    assert (translator.search.beam_size, translator.search.max_extra) == (4, 4)
    translations = translator.translate(["one two three", "", "four five"])
    assert len(translations) == 3
    assert translations[1] == ""
    assert translator.translate([]) == []
    assert transformer.load(str(run_dir)).translate(["one two three", "", "four five"]) == translations


def test_load_takes_every_setting(run_dir: Path) -> None:
    translator = transformer.load(
        run_dir,
        checkpoint="step-4",
        device="cpu",
        precision="fp64",
        beam_size=2,
        length_penalty=np.float64(1.5),
        max_extra=3,
        batch_tokens=100,
    )
    assert (translator.device.type, translator.precision) == ("cpu", Precision.fp64)
    assert vars(translator.search) == {"beam_size": 2, "length_penalty": 1.5, "max_extra": 3, "batch_tokens": 100}
    assert len(translator.translate(["one two"])) == 1


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device": "gpu"}, "device='gpu' is not one of auto, cpu, cuda"),
    "precision": ({"precision": 16}, "precision=16 is not one of auto, fp32, bf16, fp16, fp64"),
    "checkpoint": ({"checkpoint": "newest"}, "checkpoint=newest is not one of averaged, best, last, step-N, auto"),
    "no such step": ({"checkpoint": "step-3"}, "checkpoint=step-3: .* is not there; there are: step-4"),
    "beam of zero": ({"beam_size": 0}, "beam_size=0 must be at least 1"),
    "beam in text": ({"beam_size": "4"}, "beam_size='4' must be a whole number"),
    "half a beam": ({"beam_size": 2.5}, r"beam_size=2\.5 must be a whole number"),
    "penalty": ({"length_penalty": -1.0}, r"length_penalty=-1\.0 must be at least 0"),
    "penalty in text": ({"length_penalty": "0.6"}, r"length_penalty='0\.6' must be a number"),
    "extra": ({"max_extra": 0}, "max_extra=0 must be at least 1"),
    "batch": ({"batch_tokens": 1e4}, r"batch_tokens=10000\.0 must be a whole number"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_load_refuses_a_value_that_cannot_be(run_dir: Path, case: str) -> None:
    given, message = MISTAKES[case]
    with pytest.raises(InputError, match=f"^{message}") as refused:
        transformer.load(run_dir, **given)
    assert "\n" not in str(refused.value)


def test_load_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(transformer.TransformerError, match="runs/none: no such run directory"):
        transformer.load(tmp_path / "runs/none")


def test_translate_refuses_a_single_text(run_dir: Path) -> None:
    """A text is a sequence of texts, too: each letter would be translated."""
    with pytest.raises(InputError, match=r"^texts must be a list of texts: for a single one, give \[text\]"):
        transformer.load(run_dir).translate("one two three")


# ---- train ----------------------------------------------------------------------------------------------------------


def test_train_is_silent_until_logging_is_configured(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = write_corpus(tmp_path / "corpus")
    transformer.train(tiny_job(tmp_path / "silent", data, max_steps=2, average=1))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []

    with caplog.at_level(logging.INFO):
        transformer.train(tiny_job(tmp_path / "loud", data, max_steps=2, average=1))
    assert "step 2: saved" in caplog.messages
    assert capfd.readouterr().out == ""


def test_train_works_outside_the_main_thread(run_dir: Path, tmp_path: Path) -> None:
    """Python installs signal handlers in the main thread alone. The weights are those of the main thread."""
    job = tiny_job(tmp_path / "run", write_corpus(tmp_path / "corpus"), max_steps=4, validate_every=4)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(transformer.train(job)))
    thread.start()
    thread.join()
    (results,) = found
    assert isinstance(results, transformer.Results)
    assert results.steps == 4
    assert_same_tensors(*(step_dir(path, 4) / "model.safetensors" for path in (run_dir, tmp_path / "run")))
