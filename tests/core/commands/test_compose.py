"""A job composed in this process: the same job as the command's, the same errors, and nothing left behind."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from support.command_line import CORPUS, HYDRA_NODES, REFUSED, enter, write_experiment
from support.corpora import (
    assert_same_tensors,
    overrides,
    run,
    step_dir,
    steps_of,
    tiny_job,
    typed_in_a_child,
    write_corpus,
)
from support.tiers import tiers
from transformer.cli.commands import compose
from transformer.config.jobs import AverageJob, EvaluateJob, Job, TrainJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.config.settings import Norm, PairConfig
from transformer.errors import InputError


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Composing leaves no global of Hydra's behind, and writes nothing."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    stored = set(ConfigStore.instance().repo)
    yield
    assert GlobalHydra.instance().hydra is None
    assert HydraConfig.instance().cfg is None
    assert {name for name in ConfigStore.instance().repo if name.endswith(".yaml")} <= stored
    assert not list(Path().iterdir())


def composed(kind: type, command: str, *overrides: str, **options: Any) -> Any:
    job = compose(command, overrides, **options)
    assert type(job) is kind
    return job


# ---- the job --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("[a.en,b.en]", ["a.en", "b.en"]),
        ("t/*.en.zst", "t/*.en.zst"),
        ("[t/*.en, 'a, b.en']", ["t/*.en", "a, b.en"]),
        ("[ab]*.en", "[ab]*.en"),
        ('"[ab].[ed]"', "[ab].[ed]"),
        ("2", "2"),
    ],
)
def test_compose_takes_several_files(typed: str, value: object) -> None:
    keys = ("data.train.src", "data.dev.tgt", "data.test.x.src", "data.extra.y.dataset")
    data = composed(TrainJob, "train", "experiment=base", *(f"{key}={typed}" for key in keys)).data
    assert [data.train.src, data.dev.tgt, data.test["x"].src, data.extra["y"].dataset] == [value] * len(keys)


def test_compose_takes_lists_of_files_from_yaml(tmp_path: Path) -> None:
    folder = write_experiment(
        tmp_path,
        "data: {root: c, train: {src: ['${data.root}/a.en', b.en], tgt: [1]}, dev: {dataset: d.tsv, src: 2, tgt: 1}}",
    )
    data = composed(TrainJob, "train", "experiment=mine", config_dir=folder).data
    assert data.train == PairConfig(["c/a.en", "b.en"], ["1"])
    assert data.dev == PairConfig("2", "1", dataset="d.tsv")
    changed = composed(TrainJob, "train", "experiment=mine", "data.train.src=x.en", config_dir=folder).data
    assert changed.train.src == "x.en"

    folder = write_experiment(tmp_path / "norwegian", "data: {dev: {dataset: d.tsv, src: en, tgt: no}}")
    with pytest.raises(InputError, match=r"^data\.dev\.tgt=False: quote it"):  # not the column False
        composed(TrainJob, "train", "experiment=mine", config_dir=folder)
    for number, value in enumerate(("null", "{a: b}", "[[a]]")):
        folder = write_experiment(tmp_path / str(number), f"data: {{train: {{src: {value}}}}}")
        with pytest.raises(InputError, match=r"^data\.train\.src=.* is neither a name nor a list of names$"):
            composed(TrainJob, "train", "experiment=mine", config_dir=folder)


def test_compose_gives_the_paper_s_base() -> None:
    assert composed(TrainJob, "train", "experiment=base") == TrainJob()


@pytest.mark.parametrize(
    ("command", "job"),
    [
        ("translate", TranslateJob()),
        ("evaluate", EvaluateJob()),
        ("average", AverageJob()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compose_gives_each_command_its_own_job(command: str, job: Job) -> None:
    assert composed(type(job), command) == job


CASES: dict[str, tuple[str, list[str]]] = {
    "demo": ("train", []),
    "prepare": ("prepare", ["tokenizer.vocab_size=500"]),
    "types": (
        "prepare",
        ["train.seed=1_000", "train.clip_norm=1", "model.norm=pre", "experiment=small"],
    ),
    "plus": ("train", ["experiment=small", "+train.seed=3", "++train.max_steps=5"]),
    "text": ("train", ["experiment=base", "run_dir=it's (really), 100% mine", "data.root=${run_dir}/x"]),
    "sets": ("train", ["experiment=small", "data.test.news.src=a (1).en", "+data.extra.bt.weight=2"]),
    "corpus": ("train", ["experiment=multi30k_en_de", "data.root=/some where"]),
    "no test set": ("train", [*CORPUS, "~data.test.test_2016_flickr"]),
    "evaluate": ("evaluate", ["run_dir=runs/mine", "test.2014.src=a=b.en", "search.beam_size=1", "checkpoint=best"]),
    "hydra's own": ("average", ["last=3", "hydra.verbose=true"]),
}


OF_EVERY_RUN = ("demo", "text", "sets", "evaluate")


@pytest.mark.parametrize(
    "case", tiers(OF_EVERY_RUN, [case for case in CASES if case not in OF_EVERY_RUN], pytest.mark.ci)
)
def test_compose_gives_what_the_command_runs_and_what_cfg_shows(case: str) -> None:
    command, given = CASES[case]
    job = compose(command, given)
    assert enter(command, *given).jobs == [job]
    shown = enter(command, *given, "--cfg", "job", "--resolve")
    assert shown.status == 0
    assert yaml.safe_load(shown.out) == yaml.safe_load(yaml.safe_dump(to_json(job)))


@pytest.mark.parametrize(
    "command", ["prepare", "train", *(pytest.param(name, marks=pytest.mark.plugins) for name in ("table", "doctor"))]
)
def test_compose_removes_a_set_of_the_experiment(command: str) -> None:
    """A training may do without the experiment's test sets, so that no choice can rest on them."""
    kept = compose(command, CORPUS)
    assert isinstance(kept, TrainJob)
    assert list(kept.data.test) == ["test_2016_flickr"]
    bare = replace(kept, data=replace(kept.data, test={}))
    assert compose(command, [*CORPUS, "~data.test.test_2016_flickr"]) == bare


def test_compose_reads_a_folder_of_experiments(tmp_path: Path) -> None:
    text = "defaults: [small, _self_]\nrun_dir: runs/mine\ndata: {test: {news: {src: a.en, tgt: a.de}}}"
    folder = write_experiment(tmp_path, text)
    for config_dir in (folder, Path(folder), os.path.relpath(folder)):
        job = composed(TrainJob, "train", "experiment=mine", "train.seed=7", config_dir=config_dir)
        assert (job.run_dir, job.train.seed, job.model.d_model) == ("runs/mine", 7, 256)
        assert job.data.test == {"news": PairConfig("a.en", "a.de")}


def test_compose_reads_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "a b, 'c' [d]=e", "run_dir: runs/mine")
    assert composed(TrainJob, "train", "experiment=mine", config_dir=folder).run_dir == "runs/mine"


def test_compose_starts_afresh_each_time() -> None:
    """The first job's sets and values are not in the second, nor does a change of one job reach the next."""
    first = composed(TrainJob, "train", "experiment=small", "data.test.news.src=a.en", "train.seed=9")
    first.model.d_model = 2
    second = composed(TrainJob, "train", "experiment=small")
    assert (second.data.test, second.train.seed, second.model.d_model) == ({}, 1, 256)
    with pytest.raises(InputError):
        compose("train", ["train.seed=x"])
    assert composed(TrainJob, "train", "experiment=small") == second


def test_compose_leaves_the_environment_and_the_arguments() -> None:
    before = dict(os.environ), list(sys.argv), Path.cwd()
    compose("train", ["experiment=small"])
    assert (dict(os.environ), sys.argv, Path.cwd()) == before


def test_compose_works_inside_a_command() -> None:
    """Another job of the same command, and of another one; the command's own composing goes on undisturbed."""
    inside: list[Any] = []

    def compose_two() -> None:
        inside.append(compose("train", ["experiment=base", "data.test.other.src=b.en"]))
        inside.append(compose("prepare", ["experiment=big"]))

    result = enter("train", "experiment=small", "data.test.news.src=a.en", then=compose_two)
    assert result.status == 0, result.err
    assert result.jobs[0].data.test == {"news": PairConfig("a.en")}
    assert inside[0] == replace(TrainJob(), data=replace(TrainJob().data, test={"other": PairConfig("b.en")}))
    assert inside[1].model.d_model == 1024


@pytest.mark.ci
def test_compose_works_inside_every_job_of_a_sweep() -> None:
    inside: list[Any] = []
    sweep = ["--multirun", "experiment=small", "data.test.news.src=a.en,b.en", "model.norm=pre,post"]
    result = enter("train", *sweep, then=lambda: inside.append(compose("train", ["experiment=base"])))
    assert result.status == 0, result.err
    assert inside == [TrainJob()] * 4
    assert [(job.data.test["news"].src, job.model.norm) for job in result.jobs] == [
        (src, norm) for src in ("a.en", "b.en") for norm in (Norm.pre, Norm.post)
    ]
    assert len({job.run_dir for job in result.jobs}) == 4


# ---- what it refuses ------------------------------------------------------------------------------------------------

LINES = [line for line, _ in REFUSED if " " in line and not re.search(r"(^| )-[a-z-]|^compare", line)]


OF_THE_CORE = ("prepare", "train", "average", "translate", "score", "evaluate")


def of_line(line: str) -> Any:
    """A line of the table as a case: one of a command that the core has not needs the plug-ins."""
    marks = () if line.startswith(OF_THE_CORE) else pytest.mark.plugins
    return pytest.param(line, marks=marks, id=line)


@pytest.mark.parametrize("line", [of_line(line) for line in LINES[::9]])
def test_compose_refuses_what_the_command_refuses_in_the_same_words(line: str) -> None:
    command, *given = shlex.split(line)
    with pytest.raises(InputError) as refused:
        compose(command, given)
    said = enter(command, *given).err.replace("key=\\'value1,value2\\'", "key='value1,value2'")  # as for a shell
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(refused.value))
    assert said == f"transformer: error: {shown}\n"


def test_compose_refuses_an_unknown_command() -> None:
    with pytest.raises(InputError, match=r"unknown command 'trian'; did you mean 'train'\?"):
        compose("trian", [])


@pytest.mark.parametrize("flag", ["--multirun", "-m", "--cfg", "--config-dir=x", "--"])
def test_compose_refuses_flags(flag: str) -> None:
    with pytest.raises(InputError, match="a flag is for the command line only"):
        compose("train", [flag])


def test_compose_refuses_a_single_text() -> None:
    """A text is a sequence of texts, too: each letter would be taken for an override."""
    with pytest.raises(InputError, match=r"write \['train\.seed=1'\]"):
        compose("train", "train.seed=1")


def test_compose_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: no such folder"):
        compose("train", [], config_dir=tmp_path / "nowhere")


@pytest.mark.parametrize("case", [case for case in HYDRA_NODES if "another group" not in case and "second" not in case])
def test_compose_refuses_an_experiment_that_configures_hydra(tmp_path: Path, case: str) -> None:
    folder = write_experiment(tmp_path, HYDRA_NODES[case])
    with pytest.raises(InputError, match=r"experiment/mine.*cannot configure Hydra"):
        compose("prepare", ["experiment=mine"], config_dir=folder)


# ---- what it trains -------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_compose_gives_a_job_that_trains_to_the_bits_of_the_command(tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "typed", write_corpus(tmp_path / "corpus"), max_steps=4)
    by_command = replace(job, run_dir=str(tmp_path / "command"))
    assert typed_in_a_child("train", *overrides(by_command), cwd=tmp_path).status == 0
    by_hand = composed(TrainJob, "train", *overrides(replace(job, run_dir=str(tmp_path / "composed"))))
    run(by_hand)
    assert steps_of(tmp_path / "composed") == steps_of(tmp_path / "command")
    for name in ("model", "optimizer"):
        assert_same_tensors(*(step_dir(tmp_path / of, 4) / f"{name}.safetensors" for of in ("command", "composed")))
