"""The command line in this process, and what must be refused of what is typed there."""

import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from transformer.cli import commands
from transformer.cli.main import main
from transformer.machine import KERNEL_CACHES

EXPERIMENTS = (
    "americasnlp_es_gn",
    "base",
    "big",
    "demo",
    "kftt_ja_en",
    "kftt_ja_en_small",
    "mafand_en_swa",
    "mafand_swa_en",
    "multi30k_en_de",
    "multi30k_en_fr",
    "small",
    "table3/A_h1",
    "table3/A_h16",
    "table3/A_h32",
    "table3/A_h4",
    "table3/B_dk16",
    "table3/B_dk32",
    "table3/C_d1024",
    "table3/C_d256",
    "table3/C_ff1024",
    "table3/C_ff4096",
    "table3/C_n2",
    "table3/C_n4",
    "table3/C_n8",
    "table3/D_ls0",
    "table3/D_ls2",
    "table3/D_p0",
    "table3/D_p2",
    "table3/E_learned",
    "table3/base",
    "table3/big",
    "tatoeba_en_de",
    "wmt14_en_de_base",
    "wmt14_en_de_big",
    "wmt14_en_fr_base",
    "wmt14_en_fr_big",
)


CORPUS = ("experiment=multi30k_en_de", "data.root=x")
SMALL = "experiment=small"
RECIPES = ("low_resource", "paper", "robust", "scaling_nmt", "tensor2tensor")


@dataclass(frozen=True)
class Result:
    """How a command ended, what it printed, and the typed jobs that would have run."""

    status: int
    out: str
    err: str
    jobs: list[Any]


def enter(*arguments: str, then: Callable[[], float | None] = lambda: None) -> Result:
    """Run the command line with the command itself replaced by `then`, and put Hydra's globals back."""
    jobs: list[Any] = []

    def run(name: str, job: Any) -> float | None:
        jobs.append(job)
        return then()

    sigterm = signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("transformer")
    level = logger.level
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "1"))  # what the dispatcher sets, undone
        for name in (*KERNEL_CACHES, "GOMP_SPINCOUNT"):
            patch.setenv(name, "1")
        patch.setattr(commands, "run_command", run)
        patch.setattr(sys, "argv", ["transformer", *arguments])
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            HydraConfig.instance().cfg = None  # `--cfg` leaves it
            signal.signal(signal.SIGTERM, sigterm)
            logger.setLevel(level)
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return Result(code or 0, out.getvalue(), err.getvalue(), jobs)


def composed(line: str) -> Any:
    """The job of a command as a shell takes it, up to its redirections."""
    program, command, *arguments = takewhile(lambda word: word not in "<>", shlex.split(line))
    result = enter(command, *arguments)
    assert (program, result.status, result.err, len(result.jobs)) == ("transformer", 0, "", 1), result.err
    return result.jobs[0]


def assert_refused(result: Result, *words: str) -> None:
    """One line that holds these words, status 2, and nothing else."""
    assert result.err.startswith("transformer: error: "), result.err
    assert result.err.endswith("\n"), result.err
    assert result.err.count("\n") == 1, result.err
    missing = [word for word in words if word not in result.err]
    assert not missing, result.err
    assert "To append" not in result.err, "advice that the door itself refuses"
    assert (result.status, result.out, result.jobs) == (2, "", [])
    assert not list(Path().rglob("*")), "left behind"


REFUSED = {
    "wrong key": ("train", ["train.sed=3"], ["train.sed=3", "'train.seed'"]),
    "wrong key, ++": ("train", ["++train.sed=3"], ["train.sed=3", "'train.seed'"]),
    "no such key": ("train", ["colour=red"], ["colour=red", "--help"]),
    "key of another command": ("train", ["format=json"], ["format=json"]),
    "empty key": ("train", ["=3"], ["'=3'"]),
    "empty argument": ("average", [""], []),
    "target": ("train", ["+model._target_=os.getcwd"], ["model._target_"]),
    "text for int": ("train", ["train.seed=many"], ["train.seed", "many", "Integer"]),
    "text for bool": ("translate", ["strict=perhaps"], ["strict", "perhaps", "bool"]),
    "wrong enum, nearest": ("train", ["train.precision=bfloat16"], ["train.precision=", "did you mean 'bf16'?"]),
    **{
        f"{key}={typed}": (command, [f"{key}={typed}"], [f"{key}={typed}: ", clause])
        for command, key in (("train", "train.device"), ("translate", "device"))
        for typed, clause in (
            ("gpu", "did you mean 'cuda'?"),
            ("GPU", "did you mean 'cuda'?"),
            ("mps", "a Mac's GPU is not supported: its CPU is"),
            ("cpus", "did you mean 'cpu'?"),
        )
    },
    "wrong enum of a sweep": ("train", ["-m", "model.norm=pre,pst"], ["model.norm=pst", "did you mean 'post'?"]),
    **{
        f"{command} of a run on the hub": (command, ["run_dir=hf:ours/en-de"], ["run_dir=hf:ours/en-de: ", why])
        for command, why in {
            "train": "init_from=hf:ours/en-de begins with the model of that one",
            "doctor": "name one of this machine",
            "average": "checkpoints of a training, which are not on the hub",
            "replay": "text of the training, which is not on the hub",
            "verify": "on its text, which is not on the hub",
            "import": "what is on the hub is named by from",
            "push": "is on the hub already",
        }.items()
    },
    "export of a run on the hub": ("export", ["run_dir=hf:a/b"], ["run_dir=hf:a/b is on the hub: set output"]),
    "repository without its owner": ("push", ["repo=en-de"], ["repo=en-de: ", "OWNER/NAME"]),
    "licence with spaces": ("push", ['license="CC BY 4.0"'], ["license=CC BY 4.0: ", "cc-by-4.0"]),
    "null for a source": ("import", ["from=null"], ["from=null: from cannot be null"]),
    "null for a number": ("train", ["train.seed=null"], ["train.seed=null", "cannot be null"]),
    "unknown sweeper": ("train", ["-m", "hydra/sweeper=optun"], ["hydra/sweeper/optun", "basic"]),
    "a sign too many": ("train", ["train.max_steps==5"], ["train.max_steps==5: ", "a sign"]),
    "a quote too few": ("train", ["train.seed='"], ["train.seed=': ", "a quote"]),
    "last part of a key": ("train", ["seed=3"], ["'seed'", "did you mean 'train.seed'?"]),
    "wrong enum": ("train", ["model.norm=mid"], ["model.norm", "mid", "post", "pre"]),
    "below": ("translate", ["search.beam_size=0"], [" search.beam_size=0", "at least 1"]),
    "n best as plain text": ("translate", ["n_best=4"], ["n_best=4", "format=tsv or format=jsonl"]),
    "sampling with a beam": ("translate", ["sample.top_k=5", "search.beam_size=4"], ["search.beam_size=4", "sample"]),
    "score, one file": ("score", ["src=a.en"], ["src and tgt belong together"]),
    "score, a search": ("score", ["search.beam_size=4"], ["search.beam_size=4", "leave it out"]),
    "files on a device": (
        "evaluate",
        ["hypotheses=a", "references=b", "data.tgt_lang=de", "device=cpu", "search.beam_size=1"],
        ["without a run and its model: leave device, search out"],
    ),
    "nan": ("evaluate", ["search.length_penalty=nan"], ["search.length_penalty=nan"]),
    "huge int": ("average", ["last=" + "9" * 400], ["last"]),
    "two keys at odds": ("train", ["model.d_model=130"], ["model.d_model=130", "model.n_heads=4"]),
    "interpolation of no key": ("attention", ["text=for ${x}"], ["text: ", "'x'", r"\${"]),
    "interpolation, unclosed": ("attention", ["text=a ${"], ["text=", r"\${"]),
    "no value yet, number": ("train", ["train.seed=???"], ["train.seed=VALUE"]),
    "no value yet, used by others": ("train", [SMALL, "data.root=???", "run_dir=${data.root}"], ["value: data.root"]),
    "removed": ("train", ["~train.seed"], ["~train.seed"]),
    "removed key of a set": ("train", [*CORPUS, "~data.test.test_2016_flickr.tag"], ["tag", "cannot be removed"]),
    "removed set that is not there": ("train", [*CORPUS, "~data.test.flickr"], ["'data.test.flickr' does not exist"]),
    "unknown experiment": ("train", ["experiment=bigg"], ["bigg", *(name for name in EXPERIMENTS if "/" not in name)]),
    "unknown recipe": ("train", ["recipe=papr"], ["papr", *RECIPES, "did you mean 'paper'?"]),
    "recipe where there is none": ("evaluate", ["recipe=paper"], ["recipes are for training", "run_dir=DIR"]),
    "two experiments": ("train", ["experiment=small,base"], ["experiment=small,base: give one value, or --multirun"]),
    "group": ("train", ["model=tiny"], ["model=tiny", "model.KEY=VALUE"]),
    "test set of an evaluation": ("train", ["test.newstest2014.src=a"], ["did you mean 'data.test.NAME.src'?"]),
    "test sets": (
        "train",
        ["data.test=mine"],
        ["data.test=mine", "data.test.NAME.KEY=VALUE", "'~data.test.NAME' removes a set"],
    ),
    "integer beyond 64 bits": ("train", ["train.seed=" + "9" * 20], ["train.seed=" + "9" * 20, "is too large"]),
    "test set called dev": ("evaluate", ["test.dev.src=x"], ["test.dev"]),
    "test set outside the run": ("evaluate", ["test.-/x.src=x"], ["test.-/x"]),
    "test set, wrong side": ("train", ["data.test.mine.source=x"], ["data.test.mine.source", "data.test.NAME.src"]),
    "test set, half a number": ("evaluate", ["test.2014dev.src=x"], ["the name '2014dev' must begin with a letter"]),
    "extra corpus, weight 0": ("train", [SMALL, "data.extra.bt.weight=0"], ["data.extra.bt.weight=0.0"]),
    "demo with an extra corpus": ("train", ["data.extra.bt.src=x"], ["data.extra", "experiment=demo"]),
    "extra corpus, wrong key": ("train", ["data.extra.bt.wieght=2"], ["'data.extra.NAME.weight'"]),
    "test set with a weight": ("train", ["data.test.news.weight=2"], ["data.test.news.weight"]),
    "missing =": ("average", ["last"], ["last: settings are written key=value; --help lists the keys"]),
    "missing =, experiment": ("train", ["table3/base"], ["key=value, such as experiment=table3/base;"]),
    "sweep, empty": ("evaluate", ["sweep.beam_size="], ["sweep.beam_size names no value"]),
    "sweep, below": ("evaluate", ["sweep.beam_size=4,0"], ["sweep.beam_size=[4, 0]", "from 1 to 1024"]),
    "sweep, one value twice set": ("evaluate", ["sweep.beam_size=1", "search.beam_size=2"], ["cannot both be set"]),
    "sweep, with a test set": ("evaluate", ["sweep.beam_size=1", "test.news.src=x"], ["leave test.NAME"]),
    "two averages": ("average", ["last=2", "best=3"], ["last=2 and best=3: choose one"]),
    "a pickle": ("average", ["--experimental-rerun", "config.pickle"], ["--experimental-rerun"]),
    "not UTF-8": ("train", ["run_dir=\udcff\udcfe"], ["not UTF-8"]),
    "flag without its value": ("average", ["--config-dir"], ["--config-dir needs a value"]),
    "flag of another value": ("train", ["--cfg", "jobs"], ["--cfg jobs", "job, hydra, all"]),
    "quiet and verbose": ("train", ["-q", "--verbose"], ["--quiet and --verbose: choose one"]),
    "unknown flag": ("train", ["--multrun"], ["--multrun", "did you mean '--multirun'?"]),
    "missing folder": ("average", ["--config-dir", "nowhere"], ["nowhere"]),
}


BAD_YAML = {
    "unknown key": ("model: {d_modl: 8}", ["experiment/mine", "model.d_modl", "did you mean 'model.d_model'?"]),
    "unknown key of a set": ("data: {test: {news: {scr: a}}}", ["data.test.news.scr", "'data.test.NAME.src'"]),
    "dotted key": ("train.seed: 3", ["train.seed: ", "nested"]),
    "null": ("train:\n  seed:", ["train.seed: ", "None"]),
    "out of range": ("model: {dropout: 7}", ["model.dropout=7.0"]),
    "null for a group": ("train: null", ["experiment/mine", " train: "]),
    "target": ("_target_: os.getcwd", ["_target_"]),
    "unknown parent": ("defaults: [smal, _self_]", ["experiment/smal", "did you mean 'small'?"]),
    "number for a group": ("train: 3", ["experiment/mine", "TrainConfig", "3"]),
    "no settings": ("- a", ["experiment/mine"]),
    "syntax": ("model: [1", ["experiment/mine.yaml", "line 2"]),
    "not text": ("\udcff\udcfe", ["mine"]),
}


def write_experiment(folder: Path, text: str) -> str:
    """Write experiment `mine`; gives the folder for --config-dir."""
    path = folder / "mine" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{text}\n", encoding="utf-8", errors="surrogateescape")
    return str(folder / "mine")


HYDRA_NODES = {
    "callbacks": "hydra: {callbacks: {x: {_target_: builtins.open, file: touched, mode: w}}}",
    "job_logging": "hydra: {job_logging: {handlers: {x: {class: logging.FileHandler, filename: touched}}}}",
    "hydra_logging": "hydra: {hydra_logging: {handlers: {x: {class: logging.FileHandler, filename: touched}}}}",
    "launcher": "hydra: {launcher: {_target_: builtins.open, file: touched, mode: w}}",
    "sweeper": "hydra: {sweeper: {_target_: builtins.open, file: touched, mode: w}}",
    "output_subdir": "hydra: {output_subdir: touched}",
    "environment": "hydra: {job: {env_set: {TOUCHED: yes}}}",
    "callbacks of a second file": "defaults: [/second@hydra.callbacks, _self_]",
    "logging of another group": "defaults: [small, {override /hydra/job_logging: mine}]",
}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys, dotted."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
