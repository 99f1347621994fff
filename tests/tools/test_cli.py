"""The command line: what stops at the door, what passes it unchanged, and with which status a command ends.

Most cases run in this process through `main`, with the command itself replaced; a few are processes of their own.
"""

import argparse
import errno
import itertools
import json
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from support.command_line import (
    BAD_YAML,
    EXPERIMENTS,
    HYDRA_NODES,
    RECIPES,
    REFUSED,
    assert_refused,
    composed,
    enter,
    write_experiment,
)
from support.corpora import overrides, tiny_job, typed_in_a_child, write_corpus
from support.paths import ROOT
from support.tiers import tiers
from transformer import __version__, errors
from transformer.cli import commands
from transformer.cli.application import _name_of
from transformer.cli.commands import COMMANDS
from transformer.cli.completion import complete
from transformer.cli.overrides import parse_arguments
from transformer.config.jobs import AverageJob, EvaluateJob, Job, PrepareJob, ScoreJob, TrainJob, TranslateJob
from transformer.config.keys import keys_of
from transformer.config.settings import (
    Algorithm,
    Decay,
    Device,
    ExtraConfig,
    Format,
    Metric,
    Norm,
    OptimizerKind,
    PairConfig,
    Positions,
    Precision,
    SearchConfig,
    Start,
    SweepConfig,
)
from transformer.integrations.export.job import ExportJob
from transformer.integrations.imports.job import ImportJob
from transformer.integrations.push.job import PushJob
from transformer.tools.attention.job import AttentionJob
from transformer.tools.compare.job import CompareJob
from transformer.tools.doctor.job import DoctorJob
from transformer.tools.replay.job import ReplayJob
from transformer.tools.report.job import ReportJob
from transformer.tools.summary.job import SummaryJob
from transformer.tools.tables.job import TableJob
from transformer.tools.tables.rows import output_of
from transformer.tools.teach.job import TeachJob
from transformer.tools.verify.job import VerifyJob

pytestmark = pytest.mark.usefixtures("in_empty_folder")

JOBS = {
    "prepare": PrepareJob,
    "train": TrainJob,
    "translate": TranslateJob,
    "score": ScoreJob,
    "evaluate": EvaluateJob,
    "compare": CompareJob,
    "report": ReportJob,
    "teach": TeachJob,
    "average": AverageJob,
    "summary": SummaryJob,
    "doctor": DoctorJob,
    "replay": ReplayJob,
    "verify": VerifyJob,
    "export": ExportJob,
    "import": ImportJob,
    "push": PushJob,
    "table": TableJob,
    "attention": AttentionJob,
}


@dataclass(frozen=True)
class Printed:
    """The help of every command, in short and with all keys, and the slow packages that printing it imported."""

    short: dict[str, str]
    texts: dict[str, str]
    imported: list[str]


@pytest.fixture(scope="module")
def experiments() -> dict[str, TrainJob]:
    """The job of every experiment that comes with the package, but for the rows of Table 3 (see test_paper_tables)."""
    names = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
    return {name: enter("train", f"experiment={name}").jobs[0] for name in names}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What `transformer COMMAND --help` and `--help all` print, in a process of their own."""
    code = (
        "import io, json, sys, contextlib\n"
        "from transformer.cli.main import main\n"
        "def printed(*arguments):\n"
        "    sys.argv, out = ['transformer', *arguments], io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "    return out.getvalue()\n"
        f"short = {{command: printed(command, '--help') for command in {list(JOBS)!r}}}\n"
        "texts = {command: printed(command, '--help', 'all') for command in short}\n"
        "slow = ['torch', 'numpy', 'hydra', 'omegaconf', 'sacrebleu', 'sentencepiece', 'tensorboard', 'safetensors']\n"
        "print(json.dumps([short, texts, [name for name in slow if name in sys.modules]]))\n"
    )
    folder = tmp_path_factory.mktemp("help")
    out, err = python("-c", code, cwd=folder).communicate(timeout=60)
    assert err == ""
    assert not list(folder.iterdir())
    return Printed(*json.loads(out))


def python(*arguments: str, cwd: Path, **options: Any) -> "subprocess.Popen[str]":
    """Another Python, its output piped."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, *arguments], cwd=cwd, env=environment, **pipes)


def leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Every key of a job as (dotted key, type, default, help), without the table of test sets."""
    kinds = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(kinds[field.name]):
            yield from leaves(kinds[field.name], f"{prefix}{field.name}.")
        elif field.default is not MISSING:
            yield (
                prefix + field.name.removesuffix("_"),
                kinds[field.name],
                field.default,
                field.metadata.get("help", ""),
            )


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_main_refuses_a_wrong_argument_in_one_line(line: str, words: str) -> None:
    assert_refused(enter(*shlex.split(line)), words)


def test_main_refuses_alike_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert_refused(enter("average", "last=many"), "last")


def test_main_runs_a_command_without_hydra_s_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse, "ArgumentParser", None)
    assert enter("summary", "experiment=base").jobs == [SummaryJob(run_dir="runs/base")]
    assert_refused(enter("summary", "experiment=bse"), "did you mean 'base'?")


def test_main_sweeps_where_argparse_checks_help_as_that_of_python_3_14_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses one of Hydra's arguments."""
    container: Any = argparse._ActionsContainer
    add = container.add_argument

    def check_help(parser: Any, action: argparse.Action) -> None:
        if action.help and hasattr(parser, "_get_formatter"):
            try:
                assert "%" not in action.help or action.help % vars(action)
            except TypeError as error:
                raise ValueError("badly formed help string") from error

    def add_checked(parser: Any, *names: str, **settings: Any) -> Any:
        action = add(parser, *names, **settings)
        parser._check_help(action)
        return action

    if sys.version_info < (3, 14):
        monkeypatch.setattr(container, "_check_help", check_help, raising=False)
        monkeypatch.setattr(container, "add_argument", add_checked)
    with pytest.raises(ValueError, match="badly formed help string"):
        get_args_parser()
    assert [job.train.seed for job in enter("train", "--multirun", "train.seed=1,2").jobs] == [1, 2]
    assert enter("train", "--cfg", "job").out.startswith("run_dir: runs/demo\n")
    with pytest.raises(ValueError, match="badly formed help string"):
        get_args_parser()


@pytest.mark.parametrize("argument", ["train.sed=3", "train.seed=${nope}"])
def test_main_says_the_same_in_a_process_of_its_own(argument: str) -> None:
    process = python("-m", "transformer", "train", argument, cwd=Path())
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("transformer: error: ")
    assert not list(Path().iterdir())


# ---- a folder of one's own experiments ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BAD_YAML)
def test_experiment_with_bad_yaml_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    text, words = BAD_YAML[case]
    folder = write_experiment(tmp_path, text)
    assert_refused(enter("summary", "--config-dir", folder, "experiment=mine"), *words)


@pytest.mark.parametrize(
    ("case", "flags"),
    [*((case, []) for case in HYDRA_NODES), ("callbacks", ["--multirun"]), ("callbacks", ["--cfg", "all"])],
)
def test_experiment_that_configures_hydra_is_refused(tmp_path: Path, case: str, flags: list[str]) -> None:
    """Hydra would call what it finds there, whichever command is run."""
    folder = write_experiment(tmp_path, HYDRA_NODES[case])
    callback = "x: {_target_: builtins.open, file: touched, mode: w}\n"
    (Path(folder) / "second.yaml").write_text(callback, encoding="utf-8")
    if case == "logging of another group":
        handler = "x: {class: logging.FileHandler, filename: touched}"
        path = Path(folder) / "hydra" / "job_logging" / "mine.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"version: 1\nhandlers: {{{handler}}}\nroot: {{handlers: [x]}}\n", encoding="utf-8")
    assert_refused(enter("summary", "--config-dir", folder, "experiment=mine", *flags), "configure Hydra")


@pytest.mark.parametrize("name", ["summary_job", "summary_schema", "quiet_hydra"])
def test_config_dir_cannot_hide_a_config_of_the_package(tmp_path: Path, name: str) -> None:
    folder = write_experiment(tmp_path, "run_dir: runs/mine")
    callback = "hydra: {callbacks: {x: {_target_: builtins.open, file: touched, mode: w}}}\n"
    (Path(folder) / f"{name}.yaml").write_text(callback, encoding="utf-8")
    assert_refused(enter("summary", "--config-dir", folder, "experiment=mine"), f"{name}.yaml", "rename")


@pytest.mark.parametrize("name", ["experiment/small", "experiment/table3/base", "recipe/paper"])
def test_config_dir_cannot_change_what_the_package_has(tmp_path: Path, name: str) -> None:
    """Hydra would read the package's, without a word."""
    folder = write_experiment(tmp_path, "run_dir: runs/mine")
    path = Path(folder) / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "configs" / f"{name}.yaml", path)
    assert enter("summary", "--config-dir", folder, "experiment=mine").status == 0

    path.write_text(f"{path.read_text(encoding='utf-8')}\n", encoding="utf-8")
    assert_refused(enter("summary", "--config-dir", folder, "experiment=mine"), f"{name}.yaml", "reads its own: rename")
    path.unlink()
    path.mkdir()
    assert_refused(enter("summary", "--config-dir", folder, "experiment=mine"), f"{name}.yaml", "reads its own: rename")


def test_overrides_may_configure_hydra(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path, "run_dir: runs/mine")
    result = enter("summary", "--config-dir", folder, "experiment=mine", "hydra.job.name=mine", "--cfg", "hydra")
    assert (result.status, yaml.safe_load(result.out)["hydra"]["job"]["name"]) == (0, "mine")


def test_experiment_without_its_first_line_is_told_which(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path, "train: {max_steps: 5}")
    path = Path(folder) / "experiment" / "mine.yaml"
    path.write_text(path.read_text(encoding="utf-8").partition("\n")[2], encoding="utf-8")
    assert_refused(enter("train", "--config-dir", folder, "experiment=mine"), "experiment/mine", "# @package _global_")


def test_experiment_of_a_good_yaml_composes(tmp_path: Path) -> None:
    text = (
        "defaults: [small, _self_]\nrun_dir: runs/mine\n"
        "data: {test: {news: {src: a.en, tgt: a.de}}}\ntrain: {learning_rate: 5e-4}"
    )
    (job,) = enter("train", "--config-dir", write_experiment(tmp_path, text), "experiment=mine", "train.seed=7").jobs
    assert (job.run_dir, job.train.learning_rate, job.train.seed) == ("runs/mine", 5e-4, 7)
    assert (job.model.d_model, job.data.test) == (256, {"news": PairConfig("a.en", "a.de")})


def test_experiment_with_a_bare_no_is_not_taken_for_norwegian(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path, "data: {src_lang: 'no'}")
    (job,) = enter("train", "--config-dir", folder, "experiment=mine").jobs
    assert job.data.src_lang == "no"
    folder = write_experiment(tmp_path / "other", "data: {tgt_lang: no}")
    found = enter("train", "--config-dir", folder, "experiment=mine")
    assert found.status == 2
    assert "data.tgt_lang=False: quote it" in found.err


# ---- the demo's corpus stays the demo's -----------------------------------------------------------------------------


def test_train_takes_another_corpus_under_a_real_experiment() -> None:
    (job,) = enter("train", "experiment=small", "data.train.src=my.en", "data.train.tgt=my.de").jobs
    assert (job.data.train, job.run_dir) == (PairConfig("my.en", "my.de"), "runs/small")


# ---- what passes ----------------------------------------------------------------------------------------------------

TEXT_KEYS = (
    "run_dir",
    "data.src_lang",
    "data.tgt_lang",
    "data.root",
    "data.train.src",
    "data.train.tgt",
    "data.dev.src",
    "data.dev.tgt",
    "data.store_dir",
    "tokenizer.model",
)
TEXTS = (
    "Übung/日本語/मराठी",
    "it's (really) 100% mine, yes!",
    "say \"hello\", then 'bye'",
    "epoch=3,step=4.pt",
    "a;b#c{d}[e]<f>|g&h*?",
    "  led and trailed by spaces  ",
    "C:\\data\\",
    'back\\slash\\\\"quote',
    "two\\\\",
    "$HOME/$x",
    "tab\there",
    "true",
    "1e3",
    "[a, b]",
    "{a: b}",
    "a: b",
    "none",
    "+x",
    "-",
    "a/~/b",
    "@x",
    "'half",
    'half"',
    "'",
    "'one' and 'two'",
)


def through_hydra(key: str, text: str) -> object:
    """A text as Hydra's grammar reads it, once the command line has quoted it."""
    (override,) = OverridesParser.create().parse_overrides(parse_arguments("train", [f"{key}={text}"]).overrides)
    assert override.key_or_group == key
    return override.value()


@pytest.mark.parametrize("text", TEXTS)
def test_overrides_pass_text_through_the_grammar_unchanged(text: str) -> None:
    is_list = text == "[a, b]"  # which names two files, where a key names files
    for key in TEXT_KEYS:
        assert through_hydra(key, text) == (["a", "b"] if is_list and key.endswith((".src", ".tgt")) else text)


def test_overrides_pass_random_text_through_the_grammar_unchanged() -> None:
    draw = random.Random(1)
    letters = " \\\"'(),=:;[]{}#%&*!?<>|~@+-/.^`éßΩ日😀aZ09\t"
    texts = ["x" + "".join(draw.choices(letters, k=draw.randint(1, 12))) for _ in range(300)]
    assert [through_hydra("data.root", text) for text in texts] == texts


@pytest.mark.parametrize("texts", [TEXTS[:10], TEXTS[10:20]], ids=["first", "second"])
def test_overrides_bring_text_into_the_job_unchanged(texts: tuple[str, ...]) -> None:
    (job,) = enter("train", "experiment=small", *map("=".join, zip(TEXT_KEYS, texts, strict=True))).jobs
    assert tuple(attrgetter(key)(job) for key in TEXT_KEYS) == texts


def test_overrides_take_a_leading_tilde_for_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me (ü)")
    assert through_hydra("run_dir", "~/data, x") == "/home/me (ü)/data, x"
    assert through_hydra("data.test.news.src", "~") == "/home/me (ü)"


def test_overrides_of_new_test_sets_need_no_plus() -> None:
    sets = ["data.test.news.src=news (1).en", "data.test.news.tgt=news.de", "+data.test.web-2.src=web.en"]
    (job,) = enter("train", "experiment=small", *sets).jobs
    assert job.data.test == {"news": PairConfig("news (1).en", "news.de"), "web-2": PairConfig("web.en", "")}
    (job,) = enter("evaluate", "test.news.src=a=b.en", "test.news.tgt=é.de").jobs
    assert job.test == {"news": PairConfig("a=b.en", "é.de")}


def test_overrides_may_call_a_test_set_by_its_year() -> None:
    (job,) = enter("evaluate", "test.2014.src=a.en", "test.2014.tgt=a.de").jobs
    assert job.test == {"2014": PairConfig("a.en", "a.de")}


def test_overrides_of_new_extra_corpora_need_no_plus() -> None:
    sets = ["data.extra.bt.src=news (1).en", "+data.extra.bt.tgt=news.de", "++data.extra.bt.weight=0.5"]
    tables = [
        "data.extra.web-2.dataset=wmt/wmt14",
        "data.extra.web-2.subset=de-en",
        "+data.extra.web-2.split=train[:9]",
    ]
    (job,) = enter("train", "experiment=small", *sets, *tables, "data.train.dataset=a, b.tsv", "data.train.src=3").jobs
    web = ExtraConfig(dataset="wmt/wmt14", subset="de-en", split="train[:9]")
    assert job.data.extra == {"bt": ExtraConfig("news (1).en", "news.de", weight=0.5), "web-2": web}
    assert job.data.train == PairConfig("3", "", dataset="a, b.tsv")
    (job,) = enter(
        "evaluate", "test.news.dataset=news.jsonl.gz", "+test.wmt.dataset=wmt/wmt14", "test.wmt.split=test"
    ).jobs
    assert job.test == {
        "news": PairConfig(dataset="news.jsonl.gz"),
        "wmt": PairConfig(dataset="wmt/wmt14", split="test"),
    }


def test_experiment_may_have_extra_corpora(tmp_path: Path) -> None:
    text = "defaults: [small, _self_]\ndata: {extra: {bt: {dataset: bt.tsv, weight: 2}}, test: {n: {dataset: n.jsonl}}}"
    folder = write_experiment(tmp_path, text)
    (job,) = enter("train", "--config-dir", folder, "experiment=mine", "data.extra.bt.src=2").jobs
    assert job.data.extra == {"bt": ExtraConfig(src="2", dataset="bt.tsv", weight=2.0)}
    assert job.data.test == {"n": PairConfig(dataset="n.jsonl")}


def test_overrides_of_every_type_are_typed() -> None:
    given = ["train.seed=1_000", "train.clip_norm=1", "train.patience=null", "train.deterministic=true"]
    (job,) = enter("summary", *given, "model.norm=pre", "++train.max_steps=5", "format=json").jobs
    assert isinstance(job, SummaryJob)
    assert (job.train.seed, job.train.clip_norm, job.train.patience) == (1000, 1.0, None)
    assert (job.train.deterministic, job.model.norm, job.train.max_steps) == (True, Norm.pre, 5)
    assert job.format is Format.json
    assert isinstance(job.train.clip_norm, float)


@pytest.mark.parametrize("brackets", ["{}", "[{}]", "[ {} ]"], ids=["plain", "list", "spaced list"])
def test_overrides_of_a_list_need_no_brackets(brackets: str) -> None:
    given = {"sweep.beam_size": "1,4,8", "sweep.length_penalty": "0, 0.6,1"}
    (job,) = enter("evaluate", *(f"{key}={brackets.format(value)}" for key, value in given.items())).jobs
    assert job.sweep == SweepConfig(beam_size=[1, 4, 8], length_penalty=[0.0, 0.6, 1.0])
    assert [type(value) for value in job.sweep.length_penalty] == [float] * 3
    assert job.sweep.is_wanted
    (job,) = enter("evaluate", "sweep.beam_size=4", "++sweep.length_penalty=null").jobs
    assert job.sweep == SweepConfig(beam_size=[4])
    assert not enter("evaluate").jobs[0].sweep.is_wanted


def test_multirun_over_lists() -> None:
    jobs = enter("evaluate", "-m", "sweep.beam_size=[1,4],[8]").jobs
    assert [job.sweep.beam_size for job in jobs] == [[1, 4], [8]]


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (r"\${run_dir}", "${run_dir}"),
        (r"runs/\${oc.env:HOME}", "runs/${oc.env:HOME}"),
        (r"costs \${x} and \${y}", "costs ${x} and ${y}"),
        (r"\\\${x}", r"\${x}"),
        ("\\\\${run_dir}", "\\runs/demo"),
        ("in ${run_dir}", "in runs/demo"),
    ],
)
def test_overrides_read_an_interpolation_once(typed: str, text: str) -> None:
    """An escaped one is text; were it read again, it could read the environment, and a run would store it."""
    (job,) = enter("attention", f"text={typed}").jobs
    assert job.text == text


def test_experiment_reads_an_interpolation_once(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path, r"run_dir: runs/\${oc.env:HOME}")
    (job,) = enter("train", "--config-dir", folder, "experiment=mine").jobs
    assert job.run_dir == "runs/${oc.env:HOME}"


# ---- the experiments ------------------------------------------------------------------------------------------------

PAPER_BASE = {
    "model.n_layers": 6,
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.n_heads": 8,
    "model.key_width": 64,
    "model.value_width": 64,
    "model.dropout": 0.1,
    "model.attention_dropout": 0.0,
    "model.relu_dropout": 0.0,
    "model.norm": Norm.post,
    "model.positions": Positions.sinusoidal,
    "model.start": Start.learned,
    "model.tie_embeddings": True,
    "data.src_lang": "en",
    "data.tgt_lang": "de",
    "tokenizer.algorithm": Algorithm.bpe,
    "tokenizer.vocab_size": 37_000,
    "train.max_steps": 100_000,
    "train.tokens_per_step": 25_000,
    "train.learning_rate": None,  # equation 3
    "train.learning_rate_scale": 1.0,
    "train.warmup_steps": 4000,
    "train.decay": Decay.inverse_sqrt,
    "train.optimizer": OptimizerKind.adam,
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.98,
    "train.adam_eps": 1e-9,
    "train.weight_decay": 0.0,
    "train.label_smoothing": 0.1,
    "train.clip_norm": None,
    "train.ema_decay": None,
    "train.save_every": 1500,
    "train.average": 5,
    "train.keep_last": 5,
    "train.patience": None,
    "train.metric": Metric.bleu,
    "train.precision": Precision.auto,
    "train.device": Device.auto,
    "search.beam_size": 4,
    "search.length_penalty": 0.6,
    "search.max_extra": 50,
    "run_dir": "runs/base",
}
PAPER_BIG = PAPER_BASE | {
    "model.d_model": 1024,
    "model.d_ff": 4096,
    "model.n_heads": 16,
    "model.dropout": 0.3,
    "train.max_steps": 300_000,
    "train.save_every": 600,
    "train.average": 20,
    "train.keep_last": 20,
    "run_dir": "runs/big",
}
SMALL = {
    "model.n_layers": 3,
    "model.d_model": 256,
    "model.d_ff": 1024,
    "model.n_heads": 4,
    "model.dropout": 0.1,
    "tokenizer.vocab_size": 8000,
    "search.beam_size": 4,
    "train.label_smoothing": 0.1,
    "run_dir": "runs/small",
}


@pytest.mark.parametrize(
    ("name", "expected"), [("base", PAPER_BASE), ("big", PAPER_BIG), ("small", SMALL)], ids=["base", "big", "small"]
)
def test_experiment_has_the_values_it_promises(
    experiments: dict[str, TrainJob], name: str, expected: dict[str, Any]
) -> None:
    assert type(experiments[name]) is TrainJob
    assert {key: attrgetter(key)(experiments[name]) for key in expected} == expected


def test_experiment_base_is_the_defaults(experiments: dict[str, TrainJob]) -> None:
    assert experiments["base"] == TrainJob()


def test_experiment_demo_is_the_default_and_reads_the_packages_corpus(experiments: dict[str, TrainJob]) -> None:
    job, data = experiments["demo"], ROOT / "data" / "demo"
    assert enter("train").jobs == [job]
    assert job.run_dir == "runs/demo"
    assert job.data.train == PairConfig(f"{data}/train.en", f"{data}/train.de")
    assert job.data.dev == PairConfig(f"{data}/dev.en", f"{data}/dev.de")
    names = ("test", "test_compositional")
    assert job.data.test == {name: PairConfig(f"{data}/{name}.en", f"{data}/{name}.de") for name in names}
    assert job.model.d_model <= 256
    assert job.train.max_steps <= 5000


def test_experiment_multi30k_points_below_the_root() -> None:
    (job,) = enter("train", "experiment=multi30k_en_de", "data.root=/some where").jobs
    folder, name = "/some where/multi30k", "test_2016_flickr"
    assert job.run_dir == "runs/multi30k_en_de"
    assert job.data.train == PairConfig(f"{folder}/train.en", f"{folder}/train.de")
    assert job.data.dev == PairConfig(f"{folder}/val.en", f"{folder}/val.de")
    assert job.data.test == {name: PairConfig(f"{folder}/{name}.en", f"{folder}/{name}.de")}
    assert (job.data.src_lang, job.data.tgt_lang) == ("en", "de")


def test_experiment_of_every_name_composes_into_its_own_run(experiments: dict[str, TrainJob]) -> None:
    assert {name for name in EXPERIMENTS if "/" not in name} <= set(experiments)
    assert {name: job.run_dir for name, job in experiments.items()} == {name: f"runs/{name}" for name in experiments}


# ---- --help, --cfg, --multirun --------------------------------------------------------------------------------------


def shown(value: object) -> str:
    names = {None: "null", True: "true", False: "false"}
    if isinstance(value, Enum):
        return value.name
    return names[value] if value is None or isinstance(value, bool) else str(value)


def unwrapped(text: str) -> str:
    """Help with the lines that were too long put together again: their rest is indented by 2 or by 8."""
    return re.sub(r"(?<=[^:])\n(  |        )(?=\S)(?!\S+=|transformer|data\.)", " ", text)


@pytest.mark.parametrize("command", JOBS)
def test_help_lists_every_key_with_default_and_meaning(printed: Printed, command: str) -> None:
    for key, kind, default, meaning in leaves(JOBS[command]):
        if key.startswith(("data.dev.", "data.devs.")):
            assert f"\n  {key}=" not in printed.texts[command], "explained once, for data.train"
            assert "data.dev.KEY data.devs.NAME.KEY data.test.NAME.KEY data.extra.NAME.KEY\n" in printed.texts[command]
            continue
        pattern = rf"^ +{re.escape(f'{key}={shown(default)}')}\n +{re.escape(meaning)}(.*)$"
        line = re.search(pattern, unwrapped(printed.texts[command]), re.MULTILINE)
        assert meaning, key
        assert line, key
        choices = list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []
        assert all(choice in line[1] for choice in choices), key


@pytest.mark.parametrize("command", JOBS)
def test_help_of_a_training_shows_the_fifteen_keys_that_most_need(printed: Printed, command: str) -> None:
    """With the command's own, and the text before the model; other commands have few keys, which are shown at once."""
    text = printed.short[command]
    if not issubclass(JOBS[command], TrainJob):
        assert text == printed.texts[command]
        return
    shown_keys = re.findall(r"^  ([a-zA-Z_.]+)=", text, re.MULTILINE)
    every = {name: key.help for name, key in keys_of(JOBS[command]).items()}
    own = {name for name in every if "." not in name} - {"run_dir", "init_from"}
    assert len(set(shown_keys) - own) == 15
    assert own < set(shown_keys) < set(every)
    assert all(every[key] in unwrapped(text) for key in shown_keys)
    assert shown_keys.index("data.train.src") < shown_keys.index("tokenizer.vocab_size")
    assert f"\n`transformer {command} --help all` lists all {len(keys_of(JOBS[command]))} keys.\n" in text
    assert "data.dev.KEY data.devs.NAME.KEY data.test.NAME.KEY data.extra.NAME.KEY\n" in text
    assert 3 * len(text.splitlines()) < len(printed.texts[command].splitlines())


@pytest.mark.parametrize("command", JOBS)
def test_help_offers_experiments_where_they_can_be_chosen(printed: Printed, command: str) -> None:
    text = unwrapped(printed.texts[command])
    lines = re.findall(r"^experiment:(.*)$", text, re.MULTILINE)
    assert lines == ([" " + ", ".join(EXPERIMENTS)] if issubclass(JOBS[command], TrainJob) else [])
    lines = re.findall(r"^recipe:(.*)$", text, re.MULTILINE)
    assert lines == ([" " + ", ".join(RECIPES)] if issubclass(JOBS[command], TrainJob) else [])


@pytest.mark.parametrize("command", JOBS)
def test_help_has_lines_that_fit_a_terminal(printed: Printed, command: str) -> None:
    lines = (printed.texts[command] + printed.short[command]).splitlines()
    too_long = [line for line in lines if len(line) > 100 and "=" not in line]
    assert too_long == []


@pytest.mark.parametrize("is_demo", [False, True])
def test_what_next_composes(is_demo: bool, caplog: pytest.LogCaptureFixture) -> None:
    shown = commands.WHAT_NEXT % commands._what_next(Path("my runs/a"), tags=["<2de>"], is_demo=is_demo)
    lines = [line for line in shown.split("\n") if line.startswith("  transformer ")]
    jobs = [composed(line) for line in lines]
    assert (jobs[0].run_dir, jobs[0].tag) == ("my runs/a", "<2de>")
    assert [type(job).__name__ for job in jobs[1:]] == ["TrainJob" if is_demo else "ReportJob"]


EXAMPLES = [example for command in commands.COMMANDS.values() for example in command.examples]


@pytest.mark.ci
@pytest.mark.parametrize("example", EXAMPLES)
def test_help_shows_examples_that_compose(
    example: str, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("base: {}\n")
    assert f"\n  {example}\n" in printed.texts[example.split()[1]]
    assert f"\n  {example}\n" in printed.short[example.split()[1]]
    composed(example)


def test_help_is_instant(printed: Printed) -> None:
    assert printed.imported == []


@pytest.mark.parametrize("flags", [["--help"], ["-h"], ["--help", "--cfg", "job"]], ids=" ".join)
def test_help_comes_first(flags: list[str]) -> None:
    result = enter("train", *flags, "experiment=nowhere")
    assert (result.status, result.jobs, result.err) == (0, [], "")
    assert result.out.startswith("usage: transformer train ")


def test_help_lists_the_experiments_of_a_folder(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path, "run_dir: runs/mine")
    out = unwrapped(enter("train", "--help", "all", "--config-dir", folder).out)
    assert "\nexperiment: " + ", ".join(sorted([*EXPERIMENTS, "mine"])) + "\n" in out


@pytest.mark.parametrize("flag", ["-cn", "--config-name", "-cp", "--config-path"])
def test_main_refuses_hydra_s_flags_for_a_configuration_of_one_s_own(flag: str) -> None:
    """The configuration that Hydra begins with holds the schema, and so no other one can take its place."""
    assert_refused(enter("train", flag, "mine"), f"unknown flag {flag}")
    assert_refused(enter("train", f"{flag}=mine"), f"unknown flag {flag}")
    assert f"{flag} " not in complete(f"transformer train {flag}")


def test_main_has_a_command_for_every_job() -> None:
    assert list(commands.COMMANDS) == list(JOBS)


@pytest.mark.parametrize("flag", [["--info"], ["-i", "searchpath"], ["--info=defaults"]], ids=" ".join)
def test_main_runs_nothing_where_information_is_asked_for(flag: list[str]) -> None:
    result = enter("train", *flag, "experiment=small")
    assert (result.status, result.jobs) == (0, [])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("transformer tr", ["train ", "translate "]),
        ("transformer --v", ["--version "]),
        ("transformer --c", ["--completion "]),
        ("transformer train tokenizer.v", ["tokenizer.vocab_size="]),
        ("transformer translate search.", ["search.beam_size=", "search.length_penalty="]),
        (
            "transformer train data.test.news.s",
            ["data.test.news.src=", "data.test.news.subset=", "data.test.news.split="],
        ),
        ("transformer train data.test.", []),
        ("transformer train model.norm=", ["model.norm=post ", "model.norm=pre "]),
        ("transformer train model.tie_embeddings=f", ["model.tie_embeddings=false "]),
        ("transformer train experiment=multi30k_en_", ["experiment=multi30k_en_de ", "experiment=multi30k_en_fr "]),
        ("transformer train -m recipe=paper,te", ["recipe=paper,tensor2tensor "]),
        ("transformer train data.train.src=", []),
        ("transformer train --mul", ["--multirun "]),
        ("transformer train --cfg ", ["job ", "hydra ", "all "]),
        ("transformer train --cfg=j", ["--cfg=job "]),
        ("transformer train --info de", ["defaults ", "defaults-tree "]),
        ("transformer train --info model.no", ["model.norm="]),
        ("transformer train --config-dir ", []),
        ("transformer help tra", ["train ", "translate "]),
        ("transformer --completion ", ["bash ", "zsh "]),
        ("transformer evaluate format=", ["format=text ", "format=json "]),
        ("transformer score format=", ["format=text ", "format=tsv ", "format=jsonl "]),
        ("transformer translate sample.", ["sample.temperature=", "sample.top_k=", "sample.top_p=", "sample.seed="]),
        ("transformer evaluate experiment=", []),
        ("transformer nothing model.", []),
        ("transformer", []),
        ("", []),
    ],
)
def test_complete_offers_what_the_last_word_may_become(line: str, words: list[str]) -> None:
    assert set(words) <= set(complete(line))
    assert words or complete(line) == []


def test_complete_finds_the_experiments_of_a_folder_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").touch()
    assert "experiment=mine " in complete(f"transformer train --config-dir {tmp_path} experiment=m")
    assert "experiment=mine " in complete(f"transformer train --config-dir={tmp_path} experiment=m")
    assert "experiment=mine " not in complete("transformer train experiment=m")


def test_complete_escapes_what_standard_output_cannot_say(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "größe.yaml").touch()
    line = f"transformer train --config-dir={tmp_path} experiment=gr"
    command = [sys.executable, "-m", "transformer", "--complete", line]
    result = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert b"experiment=gr\\xf6\\xdfe" in result.stdout


def test_complete_offers_no_name_that_a_shell_would_run_or_expand(tmp_path: Path) -> None:
    """A shell puts what is offered into the line as it is: Enter would run `$(...)`."""
    (tmp_path / "experiment" / "table").mkdir(parents=True)
    strange = (
        "z$(touch x)",
        "z`touch x`",
        "z;touch x",
        "z&",
        "z*",
        "z?",
        "z\ny",
        "z\x1b[2J",
        "z\udcff",
        "z y",
        "z'",
        "z~",
    )
    for name in (*strange, "z.1_ä-B", "table/z"):
        (tmp_path / "experiment" / f"{name}.yaml").touch()
    found = complete(f"transformer train --config-dir {tmp_path} experiment=")
    assert [word for word in found if "z" in word] == ["experiment=table/z ", "experiment=z.1_ä-B "]


@pytest.mark.parametrize(
    ("line", "reply"), [("transformer summ", ["summary "]), ("transformer train model.norm=pr", ["pre "])]
)
def test_completion_works_in_bash(line: str, reply: list[str]) -> None:
    """The program is a function here, so that this checkout answers; bash replaces what follows the `=`."""
    program = f'transformer() {{ {sys.executable} -m transformer "$@"; }}'
    evaluate = 'eval "$(transformer --completion bash)"'
    ask = f'COMP_LINE="{line}" COMP_POINT={len(line)}; _transformer transformer'
    show = 'printf "%s\\n" "${COMPREPLY[@]}"'
    shell = ["bash", "--norc", "-c", "; ".join((program, evaluate, ask, show))]
    assert subprocess.check_output(shell, cwd=ROOT, text=True).split("\n") == [*reply, ""]


def test_version_names_the_formats_and_what_it_computes_with() -> None:
    result = enter("--version")
    assert (result.status, result.err) == (0, "")
    first, second, third = result.out.splitlines()
    assert first == f"transformer {__version__}"
    assert second == "run directories of format 2, checkpoints of format 3"
    assert re.fullmatch(r"Python 3\.\d+\.\d+, torch 2\.\S+, sentencepiece 0\.\S+, sacrebleu 2\.\S+", third)


@pytest.mark.ci
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        pytest.param("transformer summ", "transformer summary ", marks=pytest.mark.ci),
        ("transformer train model.norm=pr", "transformer train model.norm=pre "),
        pytest.param("true | X=1 transformer summ", "true | X=1 transformer summary ", marks=pytest.mark.ci),
    ],
)
def test_completion_works_in_zsh(line: str, completed: str, tmp_path: Path) -> None:
    """In a terminal, as somebody types: zsh completes only there."""
    program = tmp_path / "transformer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m transformer "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment = {"TERM": "dumb", "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    terminal, of_zsh = pty.openpty()
    zsh = subprocess.Popen(
        ["zsh", "-f", "-i"],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=of_zsh,
        stdout=of_zsh,
        stderr=of_zsh,
        start_new_session=True,
    )
    os.close(of_zsh)
    try:
        os.write(terminal, b'PS1="> "; eval "$(transformer --completion zsh)"; print is_ready=$?\n')
        read_until(terminal, b"is_ready=0")
        os.write(terminal, f"{line}\t".encode())
        read_until(terminal, completed.encode())
    finally:
        zsh.kill()
        zsh.wait()
        os.close(terminal)


def read_until(terminal: int, wanted: bytes) -> None:
    """Read what a terminal shows until it has shown this. Fails after a minute."""
    shown_so_far = b""
    until = time.monotonic() + 60
    while wanted not in shown_so_far:
        ready, _, _ = select.select([terminal], [], [], until - time.monotonic())
        assert ready, f"{wanted!r} is not in {shown_so_far!r}"
        shown_so_far += os.read(terminal, 4096)


def test_help_without_a_command_lists_every_command() -> None:
    for arguments, status in (["--help"], 0), (["help"], 0), ([], 2):
        result = enter(*arguments)
        assert result.status == status
        assert [name for name in JOBS if re.search(rf"^ +{name} +\w", result.out, re.MULTILINE)] == list(JOBS)
        for word in ("--version", "--completion", "--quiet (-q)", "--verbose (-v)", "TRANSFORMER_DEBUG=1"):
            assert word in result.out


@pytest.mark.parametrize("command", JOBS)
def test_main_shows_what_is_in_force_under_cfg_job(command: str) -> None:
    names = [field.name for field in fields(JOBS[command])]
    keys = {"run_dir": "run_dir", "output": "output", "data": "data.tgt_lang"}
    key = next(keys[name] for name in keys if name in names)
    result = enter(command, "--cfg", "job", f"{key}=mine, ü")
    composed = yaml.safe_load(result.out)
    assert (result.status, result.err, result.jobs) == (0, "", [])
    assert list(composed) == names
    assert (composed["data"]["tgt_lang"] if key == "data.tgt_lang" else composed[key]) == "mine, ü"


# ---- paths in place of keys -----------------------------------------------------------------------------------------


def test_compare_takes_run_directories_as_arguments() -> None:
    (job,) = enter("compare", "runs/a", "format=json", "b c", "x,y", 'it\'s "good"').jobs
    assert job == CompareJob(runs=["runs/a", "b c", "x,y", 'it\'s "good"'], format=Format.json)
    (job,) = enter("compare", "runs=[a,b]").jobs
    assert job.runs == ["a", "b"]
    Path("runs/seed=1").mkdir(parents=True)
    assert enter("compare", "runs/seed=1", "runs/b").jobs == [CompareJob(runs=["runs/seed=1", "runs/b"])]


def test_evaluate_takes_no_paths() -> None:
    Path("demo").mkdir()
    assert "demo: settings are written key=value, such as run_dir=demo; " in enter("evaluate", "demo").err
    assert "such as 'run_dir=my/$(runs)'; " in enter("evaluate", "my/$(runs)").err


def test_help_of_a_command_can_be_asked_for_in_two_ways() -> None:
    assert enter("help", "train") == enter("train", "--help")
    assert enter("help", "train", "all") == enter("train", "--help", "all") == enter("train", "-h=all")
    assert enter("train", "--help", "train.seed=2") == enter("train", "--help")
    assert enter("help") == enter("--help")
    assert "unknown command 'trian'; did you mean 'train'?" in enter("help", "trian").err


def test_multirun_gives_each_job_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    result = enter("train", "--multirun", "experiment=small,base", "train.seed=1,2", "data.dev.src=a/b.en")
    assert result.status == 0
    assert [job.run_dir for job in result.jobs] == [
        f"runs/{name}/experiment-{name},train.seed-{seed}" for name in ("small", "base") for seed in (1, 2)
    ]
    assert [job.train.seed for job in result.jobs] == [1, 2, 1, 2]
    assert [job.data.dev.src for job in result.jobs] == ["a/b.en"] * 4
    assert not list(Path().rglob("*"))
    assert not [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()]


def test_multirun_takes_any_path_that_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["run_dir=~/my runs", "data.dev.src=a=b/c d.en", "data.dev.tgt=~/[x]{y}.de"]
    jobs = enter("train", "-m", "experiment=small", *paths, "data.train.dataset=a.tsv,b/c.tsv").jobs
    assert [(job.data.dev.src, job.data.dev.tgt) for job in jobs] == [("a=b/c d.en", "/home/me/[x]{y}.de")] * 2
    assert [job.data.train.dataset for job in jobs] == ["a.tsv", "b/c.tsv"]
    assert [job.run_dir for job in jobs] == [
        f"/home/me/my runs/data.train.dataset-{end}" for end in ("a.tsv", "b-c.tsv-c9d78f53")
    ]


def test_multirun_gives_two_runs_two_folders_whatever_the_values() -> None:
    jobs = enter("train", "-m", "experiment=small", "data.dev.src=a-b,a/b,'语料一','语料二'").jobs
    assert [job.run_dir for job in jobs] == [
        f"runs/small/data.dev.src-{end}" for end in ("a-b", "a-b-306e0c38", "----bd240a6a", "----995c5838")
    ]


def test_name_of_tells_all_values_apart_and_quotes_make_no_difference() -> None:
    values = ["", "a", "a-b", "a/b", "a b", "a=b", "a,b", 'a"b', "a'b", "a\nb"]
    values += ["x" * 200 + end for end in ("", "/", "-")]
    names = [_name_of([f"data.dev.src={value}", "train.seed=1"]) for value in values]
    assert len(set(names)) == len(values)
    assert max(map(len, names)) < 200
    assert not [name for name in names if "/" in name]
    assert _name_of(['data.dev.src="a/b"']) == _name_of(["data.dev.src='a/b'"]) == _name_of(["data.dev.src=a/b"])


def test_name_of_shortens_fractions_and_still_tells_them_apart() -> None:
    """To four digits, with a hash of all of them; what has no more digits stays as it is written."""
    values = ["0.0027583475549164766", "0.0027583475549164767", "2.7583475549164766e-05", "-123456.75"]
    names = [_name_of([f"train.learning_rate={value}"]) for value in values]
    assert len(set(names)) == len(values)
    shown = ["0.002758", "0.002758", "2.758e-05", "-1.235e+05"]
    for name, number in zip(names, shown, strict=True):
        assert re.fullmatch(rf"train\.learning_rate-{re.escape(number)}-[0-9a-f]{{8}}", name), name
    for value in ("0.0001", "0.00001", "1e-3", "0.3000", "12345678", "v1.23456789"):
        assert _name_of([f"train.learning_rate={value}"]) == f"train.learning_rate-{value}"


@pytest.mark.ci
def test_multirun_over_run_dirs_keeps_them() -> None:
    jobs = enter("train", "-m", "run_dir=x,y/z", "train.seed=range(1,3)").jobs
    assert [job.run_dir for job in jobs] == [f"{path}/train.seed-{seed}" for path in ("x", "y/z") for seed in (1, 2)]


@pytest.mark.ci
def test_multirun_names_a_run_after_what_the_sweep_changes() -> None:
    """Nothing else, however it is written: another `train.max_steps` is for the same run to go on."""
    jobs = enter(
        "train", "-m", "run_dir=x", "++train.max_steps=1_000", "train.learning_rate=1e-3", "+train.seed=2,3"
    ).jobs
    assert [job.run_dir for job in jobs] == ["x/train.seed-2", "x/train.seed-3"]
    fixed = ("experiment=multi30k_en_de", "run_dir=x", "~data.test.test_2016_flickr")
    assert [job.run_dir for job in enter("train", "-m", *fixed, "train.seed=2,3").jobs] == [job.run_dir for job in jobs]
    assert [job.run_dir for job in enter("train", "-m", "run_dir=x", "train.seed=2").jobs] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "outputs"),
    [
        ([], ["runs/demo/model.norm-pre-mine", "runs/demo/model.norm-post-mine"]),
        (["output=x"], ["x/model.norm-pre", "x/model.norm-post"]),
    ],
    ids=["neither", "output"],
)
def test_multirun_gives_each_table_a_folder(arguments: list[str], outputs: list[str]) -> None:
    jobs = enter("table", "-m", "table=mine.yaml", "model.norm=pre,post", *arguments).jobs
    assert [str(output_of(job)) for job in jobs] == outputs


def test_multirun_gives_each_run_a_folder_where_the_key_is_fixed_first() -> None:
    jobs = enter("train", "-m", "experiment=small", "run_dir=x", "train.seed=5", "train.seed=2,3").jobs
    assert [(job.train.seed, job.run_dir) for job in jobs] == [(2, "x/train.seed-2"), (3, "x/train.seed-3")]


def test_multirun_over_outputs_keeps_them() -> None:
    jobs = enter("table", "-m", "table=mine.yaml", "output=x,y").jobs
    assert [str(output_of(job)) for job in jobs] == ["x", "y"]


def test_main_shows_as_much_of_the_log_as_is_asked_for(tmp_path: Path) -> None:
    """Of standard error: train.log has every line, but for what only --verbose asks for."""
    run_dir = tmp_path / "a"
    job = tiny_job(run_dir, write_corpus(tmp_path), max_steps=2, validate_every=2, save_every=2, average=1)
    job = replace(job, search=SearchConfig(beam_size=1, max_extra=1))

    quiet = typed_in_a_child("train", "--quiet", *overrides(job), cwd=tmp_path)
    assert (quiet.status, quiet.said) == (0, "")
    logged = (run_dir / "train.log").read_text(encoding="utf-8")
    assert re.search(r" INFO [\d,]+ parameters; device cpu, precision \w+, threads \d+\n", logged)
    assert "micro_batch_multiple" not in logged

    verbose = typed_in_a_child("train", *overrides(job), "-v", cwd=tmp_path)
    logged = (run_dir / "train.log").read_text(encoding="utf-8")
    assert " INFO step 2: saved\n" in logged

    assert verbose.status == 0
    (line,) = [line for line in verbose.said.splitlines() if "finished at step 2 already" in line]
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} INFO {run_dir}: finished at step 2 .*", line)

    assert re.search(r" DEBUG max_tokens \d+, layout \w+, .*micro_batch_multiple 1", verbose.said), verbose.said


def test_overrides_leave_room_for_flags_anywhere() -> None:
    Path("configs").mkdir()
    result = enter("train", "experiment=small", "-m", "--config-dir", "configs", "train.seed=1,2", "run_dir=x")
    assert (result.status, [job.train.seed for job in result.jobs]) == (0, [1, 2])


def test_multirun_of_a_reading_command_reads_the_run_that_is_there() -> None:
    jobs = enter("evaluate", "-m", "run_dir=runs/mine", "search.beam_size=1,4").jobs
    assert [(job.run_dir, job.search.beam_size) for job in jobs] == [("runs/mine", 1), ("runs/mine", 4)]


# ---- how a command ends ---------------------------------------------------------------------------------------------

STATUSES = {
    "InputError": 2,
    "LockedError": 3,
    "CheckpointError": 4,
    "StorageError": 5,
    "NumericalError": 6,
    "PeerError": 7,
    "FindingsError": 8,
    "Stopped": 75,
    "TooEarly": 75,
}


def test_errors_have_statuses_of_their_own() -> None:
    assert {kind.__name__: kind.exit_status for kind in errors.TransformerError.__subclasses__()} == STATUSES


@pytest.mark.parametrize("name", STATUSES)
def test_main_turns_an_error_into_one_line_and_its_status(name: str) -> None:
    def fail() -> None:
        raise getattr(errors, name)("somewhere.txt: it went wrong (ü)")

    result = enter("average", then=fail)
    assert (result.status, result.out) == (STATUSES[name], "")
    begins = "transformer: " if name == "Stopped" else "transformer: error: "  # who stops a command has made no error
    assert result.err == f"{begins}somewhere.txt: it went wrong (ü)\n"


@pytest.mark.ci
@pytest.mark.parametrize("override", tiers(["{}=1"], ["train.seed={}", "experiment={}"], pytest.mark.ci))
def test_main_shortens_a_line_of_100_000_letters(override: str) -> None:
    result = enter("train", override.format("x" * 100_000))
    assert result.err.startswith("transformer: error: ")
    assert " [...] " in result.err
    assert len(result.err) < 4_100
    assert (result.status, result.jobs) == (2, [])


def interrupt_in_the_middle() -> None:
    """What a library would put back on the way out fails, and hides where its error arose: OmegaConf does."""
    try:
        raise KeyboardInterrupt
    finally:
        try:
            int("half done")
        except ValueError:
            raise AttributeError("full_key: hydra") from None


@pytest.mark.parametrize(
    ("command", "is_replaced"), [*((command, False) for command in JOBS), ("train", True), ("average", True)]
)
def test_main_says_at_an_interrupt_whether_the_command_can_go_on(command: str, is_replaced: bool) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    result = enter(command, then=interrupt_in_the_middle if is_replaced else interrupt)
    if command in ("prepare", "train", "teach", "table"):
        assert result.status == 75
        assert result.err == "transformer: stopped; to go on, give the same command again\n"
    else:
        assert result.status == 130
        assert result.err == "transformer: stopped\n"


@pytest.mark.parametrize(("kind", "status"), [(errors.InputError, 75), (errors.StorageError, 5)])
def test_main_takes_no_interrupted_composing_for_bad_input(kind: type[errors.TransformerError], status: int) -> None:
    """What Hydra raises is put into words as an InputError; a disk that is full while a training stops is news."""

    def compose() -> None:
        try:
            interrupt_in_the_middle()
        except AttributeError as error:
            raise kind("full_key: hydra") from error

    assert enter("train", then=compose).status == status


def test_main_lets_an_interrupt_end_a_dialogue_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    found = enter("translate", then=interrupt)
    assert (found.status, found.err) == (130, "")
    assert enter("score", then=interrupt).err == "transformer: stopped\n"


def interrupt(job: Job) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "job",
    [TranslateJob(input="y", output="x"), ScoreJob(src="y", tgt="z", output="x"), TranslateJob(), EvaluateJob()],
    ids=lambda job: type(job).__name__,
)
def test_run_lets_a_command_go_on_whose_output_grows_block_by_block(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is stopped before the first block."""
    command = type(job).__name__.removesuffix("Job").lower()
    monkeypatch.setitem(COMMANDS, command, replace(COMMANDS[command], run=interrupt))
    goes_on = getattr(job, "output", None) is not None
    with pytest.raises(errors.Stopped if goes_on else KeyboardInterrupt):
        commands.run_command(command, job)


RUN = (
    "import os, sys, time, warnings\n"
    "from transformer.cli import commands\n"
    "from transformer.cli.main import main\n"
    "commands.run_command = lambda name, job: {}\n"
    "sys.argv = ['transformer', *sys.argv[1:]]\n"
    "main()"
)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("train", signal.SIGTERM),
        ("prepare", signal.SIGINT),
        pytest.param("prepare", signal.SIGHUP, marks=pytest.mark.ci),
        pytest.param("train", signal.SIGUSR1, marks=pytest.mark.ci),
    ],
)
def test_main_says_how_to_go_on_at_a_signal_before_the_loop(
    tmp_path: Path, command: str, number: signal.Signals
) -> None:
    process = python("-c", RUN.format("(print('ready', flush=True), time.sleep(60))"), command, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (75, "")
    assert err == "transformer: stopped; to go on, give the same command again\n"


def test_main_calls_an_unexpected_exception_a_bug() -> None:
    def fail() -> None:
        raise ZeroDivisionError("division\nby zero")

    result = enter("train", then=fail)
    assert (result.status, result.out) == (1, "")
    assert result.err == (
        "transformer: error: this is a bug: ZeroDivisionError: division\\nby zero; please report it with the output of "
        "TRANSFORMER_DEBUG=1, which shows where it happened\n"
    )


@pytest.mark.parametrize(
    ("code", "flags"),
    [("1 / 0", []), ("(_ for _ in ()).throw(OSError('libcuda.so.1: cannot open shared object file'))", ["-m"])],
    ids=["run", "multirun"],
)
def test_main_calls_a_bug_one_in_one_line_in_a_process_of_its_own(tmp_path: Path, code: str, flags: list[str]) -> None:
    code = RUN.format(code)
    process = python("-c", code, "train", *flags, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    *before, last = err.split("\n")[:-1]
    assert (process.returncode, out, len(before)) == (1, "", len(flags)), err
    assert last.startswith("transformer: error: this is a bug: ")
    assert all(line.startswith("run 1 of the sweep failed") for line in before)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("division by zero"), "error: this is a bug: "),
        (errors.InputError("somewhere.txt: it went wrong"), "error: somewhere.txt"),
        (KeyboardInterrupt(), "stopped; to go on"),
        (errors.Stopped("stopped by a signal, step 4 is saved"), "stopped by a signal, step 4"),
    ],
    ids=["bug", "expected", "interrupt", "stopped"],
)
def test_main_shows_the_traceback_under_transformer_debug(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setenv("TRANSFORMER_DEBUG", "1")
    shown = enter("train", then=fail).err
    assert "Traceback (most recent call last)" in shown
    assert "in fail" in shown
    assert shown.rstrip("\n").rpartition("\n")[2].startswith(f"transformer: {words}")


# ---- errors of the file system --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.EIO, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ESTALE),
    ],
    ids=errno.errorcode.get,
)
def test_main_ends_with_5_where_a_place_cannot_be_written(code: int) -> None:
    def fail() -> None:
        raise OSError(code, "the reason", "runs/a/train.log")

    result = enter("train", then=fail)
    assert (result.status, result.err) == (5, "transformer: error: runs/a/train.log: the reason\n")


@pytest.mark.parametrize("code", [None, errno.ENOENT, errno.EBADF, errno.EINVAL, errno.ECONNREFUSED])
def test_main_calls_another_error_of_the_system_a_bug(code: int | None) -> None:
    def fail() -> None:
        raise OSError("libcuda.so.1: cannot open") if code is None else OSError(code, "the reason", "a.txt")

    result = enter("train", then=fail)
    assert result.status == 1
    assert result.err.startswith("transformer: error: this is a bug: ")


def _raised(error: BaseException, *later: BaseException) -> Callable[[], None]:
    """What raises an error, and each of the later ones because of the one before."""

    def fail() -> None:
        for earlier, after in itertools.pairwise((error, *later)):
            after.__cause__ = earlier
        raise (error, *later)[-1]

    return fail


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (
            _raised(OSError(errno.EMFILE, "Too many open files", "a.txt")),
            "a.txt: no file can be opened (Too many open ",
        ),
        (
            _raised(OSError(errno.ENFILE, "Too many open files in system")),
            "no file can be opened (Too many open files in",
        ),
        (
            _raised(OSError(errno.EMFILE, "Too many open files"), errors.InputError("train.en: check the path")),
            "no file can be opened (Too many open files): raise `ulimit -n`, which is ",
        ),
        (
            _raised(OSError(errno.EMFILE, "Too many open files"), errors.StorageError("store: free space")),
            "no file can be opened (Too many open files): raise `ulimit -n`, which is ",
        ),
        (
            _raised(RuntimeError("can't start new thread")),
            "no thread can be started: end other programs, raise `ulimit",
        ),
        (_raised(RuntimeError("Resource temporarily unavailable")), "no thread can be started: end other programs, "),
        (
            _raised(RuntimeError("Resource temporarily unavailable"), errors.InputError("tokenizer.vocab_size")),
            "no thread can be started: end other programs, ",
        ),
        (_raised(MemoryError()), "no memory is left: end other programs, or raise `ulimit -v`"),
        (_raised(OSError(errno.ENOMEM, "Cannot allocate memory")), "no memory is left: end other programs, "),
        (_raised(RuntimeError("std::bad_alloc")), "no memory is left: end other programs, "),
        (_raised(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")), "no memory is left: "),
        (_raised(ImportError("libtorch_cpu.so: failed to map segment from shared object")), "no memory is left: "),
    ],
)
def test_main_ends_with_5_where_the_machine_has_no_more(fail: Callable[[], None], words: str) -> None:
    """Nothing is wrong with this package, nor with the file that could not be opened."""
    result = enter("train", then=fail)
    assert (result.status, result.out) == (5, "")
    assert result.err.startswith(f"transformer: error: {words}")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("fail", "status"),
    [
        (_raised(MemoryError(), errors.InputError("out of memory while training: lower train.max_tokens")), 2),
        (_raised(RuntimeError("the peer said: Resource temporarily unavailable")), 1),
        (_raised(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")), 1),
    ],
)
def test_main_keeps_the_words_of_other_errors(fail: Callable[[], None], status: int) -> None:
    assert enter("train", then=fail).status == status


@pytest.mark.ci
def test_main_ends_with_5_where_no_file_can_be_opened(tmp_path: Path) -> None:
    """For real: the corpus of the demo, in a process that may have six files open."""
    code = (
        "import resource, torch, transformer.training.loop\n"
        "from transformer.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))\n"
        "main()"
    )
    process = python("-c", code, "train", cwd=tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 5, err
    assert re.search(r"error: .*no file can be opened \(Too many open files\): raise `ulimit -n`, which is 6, or", err)


def test_main_ends_with_5_on_a_full_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = python("-m", "transformer", "summary", cwd=tmp_path, stdout=full)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (5, "transformer: error: output: No space left on device\n")


# ---- closed standard streams ----------------------------------------------------------------------------------------


def through_shell(command: str, *, cwd: Path) -> tuple[int, str, str]:
    """Status, output and errors of `transformer COMMAND` with a shell's redirections."""
    line = f"{sys.executable} -m transformer {command}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize("command", ["--help", "train"])
def test_main_says_in_one_line_that_standard_output_is_closed(tmp_path: Path, command: str) -> None:
    status, _, err = through_shell(f"{command} >&-", cwd=tmp_path)
    assert (status, err.count("\n")) == (5, 1), err
    assert err.startswith("transformer: error: standard output is closed")
    assert not list(tmp_path.glob("runs"))


@pytest.mark.ci
def test_translate_minds_a_closed_standard_input(tmp_path: Path) -> None:
    status, out, err = through_shell("translate <&-", cwd=tmp_path)
    assert (status, out) == (2, "")
    assert err == "transformer: error: standard input is closed: there is nothing to translate\n"


def test_main_keeps_its_status_where_standard_error_is_closed(tmp_path: Path) -> None:
    assert through_shell("average last=many 2>&-", cwd=tmp_path) == (2, "", "")


def test_main_keeps_its_status_where_all_streams_are_closed(tmp_path: Path) -> None:
    assert through_shell("summary <&- >&- 2>&-", cwd=tmp_path)[0] == 5


def test_main_ends_quietly_when_its_reader_has_left(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = python("-m", "transformer", "--help", cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 141


@pytest.mark.ci
def test_summary_runs_from_anywhere() -> None:
    process = python("-m", "transformer", "summary", "experiment=base", "format=json", cwd=Path())
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert yaml.safe_load(out)["parameters"]["total"] == 63_045_632
    assert not list(Path().iterdir())


# ---- the number of keys ---------------------------------------------------------------------------------------------


def test_jobs_have_no_more_keys_than_one_can_look_through() -> None:
    keys = {command: {key for key, _, _, _ in leaves(job)} for command, job in JOBS.items()}
    assert 60 <= len(keys["train"]) <= 115
    own = {command: len(of_command - keys["train"]) for command, of_command in keys.items()}
    assert {command: count for command, count in own.items() if count > 20} == {}


def test_jobs_have_null_only_where_a_rule_fills_in() -> None:
    for job in JOBS.values():
        for key, kind, default, _ in leaves(job):
            assert (default is None) == (type(None) in get_args(kind)), key
