"""The public Python API: what `import transformer` gives, what it waits for, and how it answers mistakes."""

import copy
import inspect
import io
import json
import logging
import math
import os
import pickle
import pydoc
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

import transformer
from support.corpora import assert_same_tensors, step_dir, tiny_job, write_corpus
from support.paths import ROOT
from support.scripts import load_script
from transformer.config.jobs import TranslateJob
from transformer.config.settings import (
    DataConfig,
    Device,
    FilterConfig,
    PairConfig,
    Precision,
    SearchConfig,
    SearchOverride,
    TokenizerConfig,
)
from transformer.decoding.proof import PLAIN, in_way
from transformer.errors import InputError, TransformerError
from transformer.run_dir import RunDir

FUNCTIONS = ["attention_weights", "compose", "load", "run", "train"]
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
    from transformer import Padded, Results, Translator, attention_weights, compose, load, run, train

    named: list[Any] = [Padded, Results, TransformerError, Translator, attention_weights, compose, load, run, train]
    assert [f"{found.__module__}.{found.__qualname__}" for found in named] == [
        "transformer.layout.Padded",
        "transformer.records.Results",
        "transformer.errors.TransformerError",
        "transformer.decoding.translator.Translator",
        "transformer.model.attention.attention_weights",
        "transformer.cli.commands.compose",
        "transformer.decoding.loading.load",
        "transformer.cli.commands.run",
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


def test_api_page_is_what_the_docstrings_say() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert page == load_script("api").page(), "bring the page up to date: python scripts/api.py --write"

    headings = re.findall(r"^### (?:transformer\.)?(\S+)$", page, re.MULTILINE)
    assert set(FUNCTIONS + CLASSES) <= set(headings)
    for line in (
        "    beam_size: int | None = None,",  # a signature
        "- `beam_size`: how many hypotheses the search keeps (section 6.1); 1 is greedy search.",  # an argument
        "- `lengths: Tensor`: (B,) int64: real tokens in each row",  # a field with its comment
        "- `max_extra: int`: a translation has at most this many pieces more than its source",  # ... with its help
        "- `device: torch.device`: The device that it computes on.",  # a property
        "| `InputError` | 2 | Bad input or configuration. |",
    ):
        assert f"\n{line}\n" in page


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
    assert translator.search == SearchConfig(beam_size=2, length_penalty=1.5, max_extra=3, batch_tokens=100)
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
    "engine": ({"engine": "marian"}, "engine=marian is not one of torch, ctranslate2"),
    "type of torch": ({"engine": "torch", "engine_type": "int8"}, "engine_type=int8 is for search.engine=ctranslate2"),
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


# ---- what a caller can get wrong ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translator(run_dir: Path) -> transformer.Translator:
    return transformer.load(run_dir, beam_size=2)


# A text is a sequence of texts, too: each letter would be translated.
NOT_TEXTS: dict[str, tuple[Any, str]] = {
    "a text": ("one two", r"NAME must be a list of texts: for a single one, give \[text\]"),
    "bytes": (b"one", "NAME=b'one' must be a list of texts, or another ordered iterable"),
    "a path": (Path("in.txt"), r"NAME=PosixPath\('in.txt'\) must be a list of texts"),
    "a number": (7, "NAME=7 must be a list of texts"),
    "a set": ({"one"}, "NAME={'one'} must be a list of texts, or another ordered iterable"),
    "a dict": ({"one": "two"}, "NAME={'one': 'two'} must be a list of texts"),
    "None in it": (["one", None], r'NAME\[1\]=None must be a text \(str\): a blank one is ""'),
    "bytes in it": ([b"one"], r"NAME\[0\]=b'one' must be a text \(str\): decode it first"),
    "a path in it": ([Path("in.txt")], r"NAME\[0\]=.* must be a text \(str\): read its lines first"),
    "a number in it": (["one", 2.5], r"NAME\[1\]=2.5 must be a text \(str\)$"),
    "texts in it": ([["one"]], r"NAME\[0\]=\['one'\] must be a text \(str\)$"),
    "an array in it": ([np.zeros((9, 99))], r"NAME\[0\]=array.* must be a text \(str\)$"),
}
TAKES_TEXTS: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "translate": ("texts", lambda t, x: t.translate(x)),
    "translate_n_best": ("texts", lambda t, x: t.translate_n_best(x, 2)),
    "sample": ("texts", lambda t, x: t.sample(x, 2)),
    "translate_sweep": ("texts", lambda t, x: t.translate_sweep(x, [0.6])),
    "sources": ("sources", lambda t, x: t.score(x, ["one"])),
    "targets": ("targets", lambda t, x: t.score(["one"], x)),
    "prefixes": ("prefixes", lambda t, x: t.translate_n_best(["one", "two"], 1, prefixes=x)),
}


@pytest.mark.parametrize("wrong", NOT_TEXTS)
@pytest.mark.parametrize("method", TAKES_TEXTS)
def test_translator_refuses_what_are_no_texts(translator: transformer.Translator, method: str, wrong: str) -> None:
    name, call = TAKES_TEXTS[method]
    given, message = NOT_TEXTS[wrong]
    _assert_refused(lambda: call(translator, given), message.replace("NAME", name))


TEXT = ["one two"]
api: Any = transformer  # for arguments that type checkers refuse, too
CALLS: dict[str, tuple[Callable[[Any, Any], object], str]] = {  # of a translator and its run
    # load
    "load None": (lambda t, run: api.load(None), "run_dir=None must be a path"),
    "load a number": (lambda t, run: api.load(7), "run_dir=7 must be a path"),
    "load bytes": (lambda t, run: api.load(b"run"), "run_dir=b'run' must be"),
    "load nothing": (lambda t, run: api.load(""), "run_dir='' must be a path"),
    "load a null byte": (lambda t, run: api.load("a\0b"), r"run_dir='a\\x00b' must be a path"),
    "load a long name": (lambda t, run: api.load("a" * 5000), "a{5000}: no such run directory"),
    "load a file": (lambda t, run: api.load(run / "run.json"), ".*run.json: no such run directory"),
    "load a list": (lambda t, run: api.load([run]), "run_dir=.* must be a path"),
    "checkpoint 60": (lambda t, run: api.load(run, checkpoint=60), "checkpoint=60 must be a name"),
    "checkpoint None": (lambda t, run: api.load(run, checkpoint=None), "checkpoint=None must be a name"),
    "ensemble None": (lambda t, run: api.load(run, ensemble=None), "ensemble=None must be a list of runs"),
    "ensemble of None": (
        lambda t, run: api.load(run, ensemble=[None]),
        "a run of ensemble=None must be a path",
    ),
    "ensemble of one": (lambda t, run: api.load(run, ensemble=run), "ensemble takes a list of runs"),
    "ensemble of none": (lambda t, run: api.load(run, ensemble=["nowhere"]), "nowhere: no such run directory"),
    "device None": (lambda t, run: api.load(run, device=None), "device=None is not one of auto, cpu, cuda"),
    "device list": (lambda t, run: api.load(run, device=["cpu"]), r"device=\['cpu'\] is not one of"),
    "beam True": (lambda t, run: api.load(run, beam_size=True), "beam_size=True must be a whole number"),
    "beam too large": (lambda t, run: api.load(run, beam_size=10**30), "beam_size=1000.* is too large"),
    "penalty NaN": (lambda t, run: api.load(run, length_penalty=math.nan), "length_penalty=nan must be"),
    "penalty of complex": (
        lambda t, run: api.load(run, length_penalty=1j),
        "length_penalty=1j must be a number",
    ),
    # translate and its kin
    "first line in text": (lambda t, run: t.translate(TEXT, first_line="1"), "first_line='1' must be a whole number"),
    "first line below 0": (lambda t, run: t.sample(TEXT, 1, first_line=-1), "first_line=-1 must be at least 0"),
    "first line None": (lambda t, run: t.score(TEXT, TEXT, first_line=None), "first_line=None must be a whole number"),
    "lines a number": (lambda t, run: t.translate(TEXT, lines=1), "lines=1 must be a list of whole numbers"),
    "lines in text": (lambda t, run: t.translate(TEXT, lines=["1"]), "a line of lines='1' must be a whole number"),
    "too many lines": (lambda t, run: t.translate(TEXT, lines=range(2)), "2 lines for 1 texts: give one for each"),
    "strict in text": (lambda t, run: t.translate(TEXT, strict="no"), "strict='no' must be True or False"),
    "check a number": (lambda t, run: t.translate(TEXT, check=5), "check=5 must be a function"),
    "align in text": (lambda t, run: t.translate_n_best(TEXT, 1, align="yes"), "align='yes' must be True or False"),
    "align None": (lambda t, run: t.sample(TEXT, 1, align=None), "align=None must be True or False"),
    "n_best 0": (lambda t, run: t.translate_n_best(TEXT, 0), "n_best=0 must be from 1 to search.beam_size=2"),
    "n_best 3": (lambda t, run: t.translate_n_best(TEXT, 3), "n_best=3 must be from 1 to search.beam_size=2"),
    "n_best None": (lambda t, run: t.translate_n_best(TEXT, None), "n_best=None must be a whole number"),
    "too few prefixes": (lambda t, run: t.translate_n_best(TEXT, 1, prefixes=[]), "0 prefixes for 1 texts"),
    "n_samples 0": (lambda t, run: t.sample(TEXT, 0), "n_samples=0 must be from 1 to 1024"),
    "n_samples in text": (lambda t, run: t.sample(TEXT, "2"), "n_samples='2' must be a whole number"),
    "temperature 0": (lambda t, run: t.sample(TEXT, 1, temperature=0), "temperature=0 must be above 0"),
    "temperature None": (lambda t, run: t.sample(TEXT, 1, temperature=None), "temperature=None must be a number"),
    "temperature 10**400": (
        lambda t, run: t.sample(TEXT, 1, temperature=10**400),
        r"temperature=1000\d*\.\.\.0* is too",
    ),
    "top_p 10**400": (lambda t, run: t.sample(TEXT, 1, top_p=-(10**400)), r"top_p=-1000\d*\.\.\.0* is too large"),
    "alpha 10**400": (
        lambda t, run: t.translate_sweep(TEXT, [10**400]),
        r"length_penalty=1000\d*\.\.\.0* is too large",
    ),
    "top_k 0": (lambda t, run: t.sample(TEXT, 1, top_k=0), "top_k=0 must be at least 1"),
    "top_k 1.5": (lambda t, run: t.sample(TEXT, 1, top_k=1.5), r"top_k=1\.5 must be a whole number"),
    "top_p 2": (lambda t, run: t.sample(TEXT, 1, top_p=2.0), r"top_p=2\.0 must be in \(0, 1\]"),
    "top_p in text": (lambda t, run: t.sample(TEXT, 1, top_p="0.9"), "top_p='0.9' must be a number"),
    "seed -1": (lambda t, run: t.sample(TEXT, 1, seed=-1, top_k=2), "seed=-1 must be at least 0"),
    "seed None": (lambda t, run: t.sample(TEXT, 1, seed=None), "seed=None must be a whole number"),
    "no alpha": (lambda t, run: t.translate_sweep(TEXT, []), "translate_sweep needs at least one length penalty"),
    "one alpha": (lambda t, run: t.translate_sweep(TEXT, 0.6), r"length_penalties=0\.6 must be a list of numbers"),
    "alphas in text": (
        lambda t, run: t.translate_sweep(TEXT, "0.6"),
        "length_penalties='0.6' must be a list of numbers",
    ),
    "alpha None": (lambda t, run: t.translate_sweep(TEXT, [None]), "length_penalty=None must be a number"),
    "alpha True": (lambda t, run: t.translate_sweep(TEXT, [True]), "length_penalty=True must be a number"),
    "alpha -1": (lambda t, run: t.translate_sweep(TEXT, np.array([-1.0])), r"length_penalty=-1\.0 must be at least 0"),
    "two targets": (lambda t, run: t.score(TEXT, ["eins", "zwei"]), "1 sources, but 2 targets"),
    "origins in text": (lambda t, run: t.score(TEXT, TEXT, origins="ab"), "origins='ab' must be the names of"),
    "origins of None": (lambda t, run: t.score(TEXT, TEXT, origins=(None, "b")), "origins=.* must be the names of"),
    "too long to score": (lambda t, run: t.score(["one " * 2000], TEXT), "sources:1: the source has .* shorten it"),
    "too long to translate": (lambda t, run: t.translate(["one " * 2000], strict=True), "line 1: .* split the line"),
    # ids
    "ids None": (lambda t, run: t.hypotheses(None, n_best=1), "sources=None must be a list of lists of ids"),
    "ids in text": (lambda t, run: t.hypotheses(["one"], n_best=1), r"sources\[0\]='one' must be a list of ids"),
    "ids of a text": (lambda t, run: t.hypotheses([["one"]], n_best=1), r"an id of sources\[0\]='one' must be a whole"),
    "one list of ids": (lambda t, run: t.hypotheses([5, 6], n_best=1), r"sources\[0\]=5 must be a list of ids"),
    "an id below 0": (lambda t, run: t.hypotheses([[-1]], n_best=1), r"an id of sources\[0\]=-1 must be at least 0"),
    "an id of no piece": (lambda t, run: t.hypotheses([[5, 9999]], n_best=1), r"sources\[0\] has the id 9999, and"),
    "too many ids": (lambda t, run: t.hypotheses([[5] * 5000], n_best=1), r"sources\[0\] has 5000 pieces, but"),
    "n_best of ids": (lambda t, run: t.hypotheses([[5]], n_best=9), "n_best=9 must be from 1 to search.beam_size=2"),
    "penalty a number": (lambda t, run: t.hypotheses([[5]], n_best=1, penalty=1), "penalty=1 must be a function"),
    # other search settings
    "search None": (
        lambda t, run: t.with_search(None),
        "search=None must be a SearchConfig, such as translator.search",
    ),
    "search a dict": (lambda t, run: t.with_search({"beam_size": 4}), "search={'beam_size': 4} must be a SearchConfig"),
    "search changed": (
        lambda t, run: t.with_search(_changed(SearchConfig(), beam_size=0)),
        "search.beam_size=0 must be",
    ),
    "search misspelt": (
        lambda t, run: t.with_search(_changed(SearchConfig(), beam=2)),
        r"search has unknown keys: \['beam'\]",
    ),
    "search changed later": (
        lambda t, run: _with_changed_search(t).translate(TEXT),
        "search.beam_size='2' is not of type int",
    ),
    "search changed for scores": (
        lambda t, run: _with_changed_search(t).score(TEXT, TEXT),
        "search.beam_size='2' is not",
    ),
    # compose
    "command None": (lambda t, run: api.compose(None, []), "unknown command None"),
    "command a list": (lambda t, run: api.compose(["train"], []), r"unknown command \['train'\]"),
    "command misspelt": (
        lambda t, run: api.compose("trian", []),
        "unknown command 'trian'; did you mean 'train'",
    ),
    "overrides None": (
        lambda t, run: api.compose("train", None),
        "overrides=None must be a list of key=values",
    ),
    "half a character": (lambda t, run: api.compose("train", ["\ud800=1"]), r"'\\ud800=1': not UTF-8"),
    "overrides in text": (lambda t, run: api.compose("train", "a=b"), "compose takes a list of overrides"),
    "overrides in a dict": (lambda t, run: api.compose("train", {"a": 1}), "overrides={'a': 1} must be a list"),
    "an override 1": (
        lambda t, run: api.compose("train", [1]),
        r"overrides\[0\]=1 must be a key=value \(str\)",
    ),
    "an override None": (lambda t, run: api.compose("train", [None]), r"overrides\[0\]=None must be"),
    "a flag": (
        lambda t, run: api.compose("train", ["--multirun"]),
        "--multirun: a flag is for the command line",
    ),
    "no value": (
        lambda t, run: api.compose("train", ["train.seed"]),
        "train.seed: settings are written key=value",
    ),
    "a value in text": (lambda t, run: api.compose("train", ["train.seed=x"]), "train.seed=x: "),
    "config_dir too long": (
        lambda t, run: api.compose("train", [], config_dir="a" * 5000),
        "a{5000}: no such folder of experiments",
    ),
    "a NUL": (lambda t, run: api.compose("train", ["run_dir=a\0b"]), r"'run_dir=a\\x00b': a NUL is in it"),
    "config_dir 5": (lambda t, run: api.compose("train", [], config_dir=5), "config_dir=5 must be a path"),
    "config_dir nowhere": (
        lambda t, run: api.compose("train", [], config_dir="nowhere"),
        "nowhere: no such folder",
    ),
    # train
    "train None": (
        lambda t, run: api.train(None),
        "expected a TrainJob, not a NoneType: make one with transformer.compose",
    ),
    "train a name": (lambda t, run: api.train("demo"), "expected a TrainJob, not a str"),
    "train overrides": (lambda t, run: api.train(["experiment=demo"]), "expected a TrainJob, not a list"),
    "train another job": (lambda t, run: api.train(TranslateJob()), "expected a TrainJob, not a TranslateJob"),
    # equation 1
    "lengths above": (
        lambda t, run: api.Padded.of([3], width=2),
        r"lengths=\[3\] must be a list of whole numbers from 0",
    ),
    "lengths in text": (lambda t, run: api.Padded.of(["1"], width=2), r"lengths=\['1'\] must be"),
    "width None": (lambda t, run: api.Padded.of([1], width=None), r"lengths=\[1\] .* width=None"),
    "lengths None": (lambda t, run: api.Padded.of(None, width=2), "lengths=None must be"),
    "q a list": (lambda t, run: _weights(q=[1.0]), "q must be a tensor of real numbers"),
    "q of two dimensions": (
        lambda t, run: _weights(q=torch.zeros(2, 2)),
        "q must be a tensor of real numbers: .*heads",
    ),
    "q of integers": (
        lambda t, run: _weights(q=torch.zeros(1, 2, 1, 2, dtype=torch.int64)),
        "q must be a tensor of real",
    ),
    "k of another width": (lambda t, run: _weights(k=torch.zeros(1, 3, 1, 4)), r"q .* and k .*4\) differ in sentences"),
    "k of another type": (
        lambda t, run: _weights(k=torch.zeros(1, 3, 1, 2).double()),
        "q is torch.float32 on cpu, and k",
    ),
    "queries None": (lambda t, run: _weights(queries=None), "queries must be a Padded"),
    "keys of another width": (
        lambda t, run: _weights(keys=api.Padded.of([2], 2)),
        "keys has 1 lengths on cpu and width 2",
    ),
    "queries of two": (lambda t, run: _weights(queries=api.Padded.of([2, 1], 2)), "queries has 2 lengths"),
    "scale in text": (lambda t, run: _weights(scale="1"), "scale='1' must be a number"),
    "score vector": (
        lambda t, run: _weights(score_vector=torch.zeros(2)),
        r"score_vector must be a tensor \(heads, width\)",
    ),
}


def _changed(settings: Any, **values: object) -> Any:
    for name, value in values.items():
        setattr(settings, name, value)
    return settings


def _with_changed_search(translator: transformer.Translator) -> transformer.Translator:
    other = translator.with_search(SearchConfig())
    other.search.beam_size = "2"  # type: ignore[assignment]
    return other


def _weights(**given: Any) -> torch.Tensor:
    q, k = torch.zeros(1, 2, 1, 2), torch.zeros(1, 3, 1, 2)
    layouts = {"queries": transformer.Padded.of([2], 2), "keys": transformer.Padded.of([3], 3)}
    arguments = {"q": q, "k": k, **layouts, "causal": False, "scale": 1.0, "score_vector": None}
    return transformer.attention_weights(**arguments | given)


def _assert_refused(call: Callable[[], object], message: str) -> None:
    """It raises a TransformerError of one line that can be printed."""
    with pytest.raises(transformer.TransformerError, match=f"^{message}") as refused:
        call()
    assert "\n" not in str(refused.value)
    assert str(refused.value).encode(), "it can be printed"


@pytest.mark.parametrize("case", CALLS)
def test_api_refuses_what_a_caller_got_wrong(run_dir: Path, translator: transformer.Translator, case: str) -> None:
    call, message = CALLS[case]
    _assert_refused(lambda: call(translator, run_dir), message)


def test_translator_takes_every_iterable_of_texts(translator: transformer.Translator) -> None:
    texts = ["one two three", "", "four five"]
    expected = translator.translate(texts)
    for given in (iter(texts), tuple(texts), (f"{text}\n" for text in texts), np.array(texts)):
        assert translator.translate(given) == expected
    best = translator.translate_n_best(iter(texts), 1, prefixes=iter([""] * 3))
    assert [translation.text for [translation] in best] == expected
    assert len(translator.score(iter(texts), iter(texts))) == 3
    assert translator.translate_sweep(iter(texts), iter([0.6]))[0.6] == translator.translate_sweep(texts, [0.6])[0.6]
    assert len(translator.hypotheses(iter([(5, 6)]), n_best=1)) == 1


def test_run_does_what_commands_do_and_returns_what_they_find(
    run_dir: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def done(command: str, *overrides: str) -> Any:
        return transformer.run(transformer.compose(command, overrides))

    here = shutil.copytree(run_dir, tmp_path / "run")
    evaluation = done("evaluate", f"run_dir={here}")
    assert evaluation.test_sets["test"].bleu == RunDir(here).read_results().test_sets["test"].bleu
    assert done("average", f"run_dir={here}", "last=1").run_state().averaged == [4]
    (tmp_path / "in.en").write_text("eins zwei\n", encoding="utf-8")
    done("translate", f"run_dir={here}", f"input={tmp_path / 'in.en'}", f"output={tmp_path / 'out.de'}")
    assert (tmp_path / "out.de").read_text(encoding="utf-8").count("\n") == 1
    assert capsysbinary.readouterr().out == b""

    with pytest.raises(InputError, match=r"^no command takes a str: make a job with transformer\.compose$"):
        transformer.run("train")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, 1j, {1: 2}, b"out", "\ud800", None])
def test_run_checks_a_job_that_was_changed_again(run_dir: Path, value: object) -> None:
    job = transformer.compose("translate", [f"run_dir={run_dir}"])
    job.run_dir = value  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"run_dir"):
        transformer.run(job)


@pytest.mark.plugins
def test_run_returns_what_a_tool_finds(run_dir: Path) -> None:
    summary = transformer.run(transformer.compose("summary", [f"run={run_dir}"]))
    assert summary.parameters.total == sum(tensor.numel() for tensor in transformer.load(run_dir).model.parameters())


def test_compose_takes_every_iterable_of_overrides() -> None:
    assert transformer.compose("train", iter(["train.seed=7"])).train.seed == 7


def test_attention_weights_takes_what_belongs_together() -> None:
    assert _weights().shape == (1, 1, 2, 3)


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_translator_is_copied_and_pickled(run_dir: Path, translator: transformer.Translator) -> None:
    """Its models are kept as they are; the form of them that computes is made anew."""
    texts = ["one two three", "four"]
    of_two = transformer.load(run_dir, ensemble=[run_dir], precision="fp64")
    for one in (translator, of_two):
        for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert other.translate(texts) == one.translate(texts)
            assert (other.search, other.precision, other.device) == (one.search, one.precision, one.device)


def test_copied_batches_compute_in_the_way_that_was_proven(translator: transformer.Translator) -> None:
    """A GPU whose fused kernels are unsound has them in no copy."""
    plain = in_way(translator.decoder, PLAIN)
    for other in (copy.copy(plain), copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert other.is_plain
    assert not copy.copy(translator.decoder).is_plain


def test_ensemble_computes_as_plainly_as_any_of_its_models_has_to(translator: transformer.Translator) -> None:
    """A fused kernel may be unsound for the shape of one alone."""
    fused, plain = translator.decoder, in_way(translator.decoder, PLAIN)
    assert fused.joined(plain).is_plain
    assert plain.joined(fused).is_plain
    assert not fused.joined(fused).is_plain


FORKS = """
import os, signal, sys, torch, transformer
torch.set_num_threads(2)
translator = transformer.load(sys.argv[1], beam_size=2)
expected = translator.translate(["one two three"] * 8)  # one batch, on which two threads compute
child = os.fork()
signal.alarm(120)  # a child that hangs is ended, and so is its parent
if not child:
    os._exit(0 if translator.translate(["one two three"] * 8) == expected and torch.get_num_threads() == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), translator.translate(["one two three"] * 8) == expected)
"""


@pytest.mark.ci
def test_forked_child_translates_where_its_parent_has(run_dir: Path) -> None:
    """OpenMP's threads are not in the child, which would wait for them for ever."""
    environment = {**os.environ, "GOMP_SPINCOUNT": "10000"}  # threads that wait are to leave the processor to others
    command = [sys.executable, "-c", FORKS, str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0 True\n"


def test_errors_are_of_one_line_whatever_a_run_is_called(tmp_path: Path) -> None:
    """From Python as from the command line."""
    name = f"{tmp_path}/a\nwarning: b"
    for read in (
        lambda: transformer.load(name),
        lambda: transformer.run(transformer.compose("evaluate", [f"run_dir='{name}'"])),
    ):
        with pytest.raises(InputError) as raised:
            read()
        assert str(raised.value).startswith(f"{tmp_path}/a\\nwarning: b: no such run directory; ")
        assert "\n" not in str(raised.value)


# ---- train ----------------------------------------------------------------------------------------------------------


_ENDLESS: dict[str, Any] = {}
_ENDLESS["x"] = _ENDLESS
FIELDS: dict[str, tuple[object, str]] = {
    "model.d_model": (-5, "model.d_model=-5 must be at least 1"),
    "model.n_heads": (3, "model.d_model=32 is not a multiple of model.n_heads=3"),
    "model.dropout": (2, r"model.dropout=2\.0 must be in \[0, 1\)"),
    "model.n_layers": ("2", "job.model.n_layers='2' is not of type int"),
    "model.norm": ("middle", "job.model.norm='middle' is not of type Norm"),
    "model.tie_embeddings": ("no", "job.model.tie_embeddings='no' is not of type bool"),
    "model": (None, "job.model=None is not of type ModelConfig"),
    "train.max_steps": ("6", "job.train.max_steps='6' is not of type int"),
    "train.max_step": (6, r"job.train has unknown keys: \['max_step'\]"),
    "train.seed": (1.5, r"job.train.seed=1\.5 is not of type int"),
    "train.save_every": (True, "job.train.save_every=True is not of type int"),
    "train.label_smoothing": (5, r"train.label_smoothing=5\.0 must be in \[0, 1\)"),
    "train.learning_rate": (math.nan, "job.train.learning_rate=nan is not a finite number"),
    "train.adam_eps": (0, r"train.adam_eps=0\.0 must be above 0"),
    "train.clip_norm": ("1", "job.train.clip_norm='1' is not a finite number"),
    "train.precision": (None, "job.train.precision=None is not of type Precision"),
    "train.keep_last": (2, "train.keep_last=2 must be at least train.average=3: raise it"),
    "train.tokens_per_step": (5, "train.tokens_per_step=5 cannot hold a sentence"),
    "search.beam_size": (0, "search.beam_size=0 must be at least 1"),
    "search.length_penalty": (-1, r"search.length_penalty=-1\.0 must be at least 0"),
    "tokenizer.vocab_size": (2, "tokenizer.vocab_size=2 must be at least 8"),
    "tokenizer.model": (Path("a.model"), r"job.tokenizer.model=PosixPath\('a.model'\) is not of type str"),
    "data.src_lang": (7, "job.data.src_lang=7 is not of type str"),
    "data.train": ("train.en", "job.data.train='train.en' is not of type PairConfig"),
    "data.test": ([], "job.data.test=.* is not of type dict"),
    "data.dev.src": (b"dev.en", "job.data.dev.src=b'dev.en' is not of type str"),
    "run_dir": (Path("run"), r"job.run_dir=PosixPath\('run'\) is not of type str"),
    "tokenizer": (
        TokenizerConfig(model="a\0"),
        r"job.tokenizer.model='a\\x00' is not text: it has a NUL, or half of a c",
    ),
    "data.root": ("\ud800", r"job.data.root='\\ud800' is not text: it has a NUL, or half of a character"),
    "init_from": (7, "job.init_from=7 is not of type str"),
    "data.train.src": (["a", "a\0b"], r"job.data.train.src\[1\]='a\\x00b' is not text: it has a NUL, or half of a c"),
    "data.extra": (_ENDLESS, "job contains itself, or is nested without end"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_train_checks_a_job_that_was_changed_again(tmp_path: Path, field: str) -> None:
    """Before anything is written: a run.json with such a value could never be read."""
    train, dev = (PairConfig(str(tmp_path / "none.en"), str(tmp_path / "none.de")) for _ in range(2))
    job = tiny_job(tmp_path / "run", DataConfig(train=train, dev=dev, filter=FilterConfig(max_length=40)))
    value, message = FIELDS[field]
    *groups, name = field.split(".")
    setattr(reduce(getattr, groups, job), name, value)
    _assert_refused(lambda: transformer.train(job), message)
    assert list(tmp_path.iterdir()) == []


def test_train_finds_no_run_under_a_name_that_is_too_long(run_dir: Path, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "run", write_corpus(tmp_path / "corpus"), max_steps=1, average=1)
    job.init_from = "a" * 5000
    _assert_refused(lambda: transformer.train(job), "a{5000}: no such run directory")


def test_train_takes_the_names_of_choices(run_dir: Path, tmp_path: Path) -> None:
    """As on the command line: a field that is a choice may be changed to the name of another one."""
    job = tiny_job(tmp_path / "run", write_corpus(tmp_path / "corpus"), max_steps=1, average=1)
    job.train.decay = "constant"  # type: ignore[assignment]
    assert transformer.train(job).steps == 1
    assert json.loads((tmp_path / "run/run.json").read_bytes())["config"]["train"]["decay"] == "constant"


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
