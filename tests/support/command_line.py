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
    "little",
    "mafand_en_swa",
    "mafand_swa_en",
    "multi30k_en_de",
    "multi30k_en_fr",
    "multi30k_six",
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


def enter(*arguments: str, then: Callable[[], float | None] | None = lambda: None) -> Result:
    """Run the command line with the command itself replaced by `then`, if any, and put Hydra's globals back."""
    jobs: list[Any] = []
    do = commands.run_command

    def run(name: str, job: Any) -> float | None:
        jobs.append(job)
        return do(name, job) if then is None else then()

    sigterm = signal.getsignal(signal.SIGTERM)
    logger = logging.getLogger("transformer")
    level = logger.level
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n"), io.StringIO()
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
    out.seek(0)
    return Result(code or 0, out.read(), err.getvalue(), jobs)


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
    missing = [word for word in "...".join(words).split("...") if word not in result.err]
    assert not missing, result.err
    assert "To append" not in result.err, "advice that the door itself refuses"
    assert (result.status, result.out, result.jobs) == (2, "", [])
    assert not list(Path().rglob("*")), "left behind"


# Lines that are refused, and words of what is said, between dots.
REFUSED = [
    ("train train.sed=3", "train.sed=3...'train.seed'"),
    ("train ++train.sed=3", "train.sed=3...'train.seed'"),
    ("train colour=red", "colour=red...--help"),
    ("train format=json", "format=json"),
    ("train =3", "'=3'"),
    ("average ''", ""),
    ("train +model._target_=os.getcwd", "model._target_"),
    ("train train.seed=many", "train.seed...many...Integer"),
    ("translate strict=perhaps", "strict...perhaps...bool"),
    ("train train.precision=bfloat16", "train.precision=...did you mean 'bf16'?"),
    ("train train.device=gpu", "train.device=gpu: ...did you mean 'cuda'?"),
    ("train train.device=GPU", "train.device=GPU: ...did you mean 'cuda'?"),
    ("train train.device=mps", "train.device=mps: ...a Mac's GPU is not supported: its CPU is"),
    ("train train.device=cpus", "train.device=cpus: ...did you mean 'cpu'?"),
    ("translate device=gpu", "device=gpu: ...did you mean 'cuda'?"),
    ("translate device=GPU", "device=GPU: ...did you mean 'cuda'?"),
    ("translate device=mps", "device=mps: ...a Mac's GPU is not supported: its CPU is"),
    ("translate device=cpus", "device=cpus: ...did you mean 'cpu'?"),
    ("train -m model.norm=pre,pst", "model.norm=pst...did you mean 'post'?"),
    (
        "train run_dir=hf:ours/en-de",
        "init_from=hf:ours/en-de begins with the model of that one",
    ),
    ("doctor run_dir=hf:ours/en-de", "run_dir=hf:ours/en-de: ...name one of this machine"),
    ("average run_dir=hf:ours/en-de", "run_dir=hf:ours/en-de: ...checkpoints of a training, which are not on the hub"),
    ("replay run_dir=hf:ours/en-de", "run_dir=hf:ours/en-de: ...text of the training, which is not on the hub"),
    ("verify run_dir=hf:ours/en-de", "run_dir=hf:ours/en-de: ...on its text, which is not on the hub"),
    ("import run_dir=hf:ours/en-de", "run_dir=hf:ours/en-de: ...what is on the hub is named by from"),
    ("push run_dir=hf:ours/en-de", "run_dir=hf:ours/en-de: ...is on the hub already"),
    ("export run_dir=hf:a/b", "run_dir=hf:a/b is on the hub: set output"),
    ("push repo=en-de", "repo=en-de: ...OWNER/NAME"),
    ("push 'license=\"CC BY 4.0\"'", "license=CC BY 4.0: ...cc-by-4.0"),
    ("import from=null", "from=null: from cannot be null"),
    ("train train.seed=null", "train.seed=null...cannot be null"),
    ("train -m hydra/sweeper=optun", "hydra/sweeper/optun...basic"),
    ("train train.max_steps==5", "train.max_steps==5: ...a sign"),
    ("train 'train.seed='\"'\"''", "train.seed=': ...a quote"),
    ("train seed=3", "'seed'...did you mean 'train.seed'?"),
    ("train model.norm=mid", "model.norm...mid...post...pre"),
    ("translate search.beam_size=0", " search.beam_size=0...at least 1"),
    ("translate n_best=4", "n_best=4...format=tsv or format=jsonl"),
    ("translate sample.top_k=5 search.beam_size=4", "search.beam_size=4...sample"),
    ("score src=a.en", "src and tgt belong together"),
    ("score search.beam_size=4", "search.beam_size=4...leave it out"),
    (
        "evaluate hypotheses=a references=b device=cpu search.beam_size=1",
        "without a run and its model: leave device, search out",
    ),
    ("evaluate search.length_penalty=nan", "search.length_penalty=nan"),
    (f"average last={'9' * 400}", "last"),
    ("train model.d_model=130", "model.d_model=130...model.n_heads=4"),
    ("attention 'text=for ${x}'", "text: ...'x'...\\${"),
    ("attention 'text=a ${'", "text=...\\${"),
    ("train 'train.seed=???'", "train.seed=VALUE"),
    ("train experiment=small 'data.root=???' 'run_dir=${data.root}'", "value: data.root"),
    ("train '~train.seed'", "~train.seed"),
    ("train experiment=multi30k_en_de data.root=x '~data.test.test_2016_flickr.tag'", "tag...cannot be removed"),
    ("train experiment=multi30k_en_de data.root=x '~data.test.flickr'", "'data.test.flickr' does not exist"),
    ("train experiment=bigg", "...".join(["bigg", *(name for name in EXPERIMENTS if "/" not in name)])),
    ("train recipe=papr", "...".join(["papr", *RECIPES, "did you mean 'paper'?"])),
    ("evaluate recipe=paper", "recipes are for training...run_dir=DIR"),
    ("train experiment=small,base", "experiment=small,base: give one value, or --multirun"),
    ("train model=tiny", "model=tiny...model.KEY=VALUE"),
    ("train test.newstest2014.src=a", "did you mean 'data.test.NAME.src'?"),
    ("train data.test=mine", "data.test=mine...data.test.NAME.KEY=VALUE...'~data.test.NAME' removes a set"),
    ("train train.seed=99999999999999999999", "train.seed=99999999999999999999...is too large"),
    ("evaluate test.dev.src=x", "test.dev"),
    ("evaluate test.-/x.src=x", "test.-/x"),
    ("train data.test.mine.source=x", "data.test.mine.source...data.test.NAME.src"),
    ("evaluate test.2014dev.src=x", "the name '2014dev' must begin with a letter"),
    ("train experiment=small data.extra.bt.weight=0", "data.extra.bt.weight=0.0"),
    ("train data.extra.bt.src=x", "data.extra...experiment=demo"),
    ("train data.devs.en_fr.src=x", "data.devs...experiment=demo"),
    ("train experiment=small data.dev.src=x data.devs.en_fr.src=x", "data.dev and data.devs are both set"),
    ("train experiment=small data.devs.dev.src=x", "data.devs.dev"),
    ("train experiment=small data.devs.en_fr.sorce=x", "data.devs.en_fr.sorce...'data.devs.NAME.src'"),
    ("train data.extra.bt.wieght=2", "'data.extra.NAME.weight'"),
    ("train data.test.news.weight=2", "data.test.news.weight"),
    ("average last", "last: settings are written key=value; --help lists the keys"),
    ("train table3/base", "key=value, such as experiment=table3/base;"),
    ("evaluate sweep.beam_size=", "sweep.beam_size names no value"),
    ("evaluate sweep.beam_size=4,0", "sweep.beam_size=[4, 0]...from 1 to 1024"),
    ("evaluate sweep.beam_size=1 search.beam_size=2", "cannot both be set"),
    ("evaluate sweep.beam_size=1 test.news.src=x", "leave test.NAME"),
    ("average last=2 best=3", "last=2 and best=3: choose one"),
    ("average --experimental-rerun config.pickle", "--experimental-rerun"),
    ("train 'run_dir=\udcff\udcfe'", "not UTF-8"),
    ("average --config-dir", "--config-dir needs a value"),
    ("train --cfg jobs", "--cfg jobs...job, hydra, all"),
    ("train -q --verbose", "--quiet and --verbose: choose one"),
    ("train --multrun", "--multrun...did you mean '--multirun'?"),
    ("average --config-dir nowhere", "nowhere"),
    ("trian", "'trian'...did you mean 'train'?"),
    ("frobnicate", "'frobnicate'...--help"),
    ("--verison", "did you mean '--version'?"),
    ("train train.attention_kernel=triton", "did you mean 'train.kernels'?"),
    ("train train.fused_loss=true", "did you mean 'train.kernels'?"),
    ("train data.train.src=my.en", "data.train...demo...small...base...big"),
    ("prepare ++data.train.tgt=my.de", "data.train...demo...small...base...big"),
    ("train data.train.src=my.en +experiment=demo", "data.train...demo...small...base...big"),
    ("train data.train.src=my.en experiment=./demo.yaml", "data.train...demo...small...base...big"),
    ("--completion tcsh", "bash, zsh"),
    ("--completion", "bash, zsh"),
    ("compare a runs=[b]", "a: runs= names the runs already"),
    ("train -m experiment=glob(multi30k_*_es)", "the sweep has no run...experiment=glob(multi30k_*_es)"),
    ("train --multirun train.sed=1,2", "train.sed"),
    ("train --help=most", "--help most: choose one of all"),
    ("compare a '\udcff'", "not UTF-8"),
]


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
