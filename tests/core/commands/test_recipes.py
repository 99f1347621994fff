"""The recipes that come with the package: their values against tables written by hand, and what overrides them."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from support.command_line import HYDRA_NODES, RECIPES, assert_refused, enter, flat
from support.corpora import metrics_of, results_of, run
from support.paths import ROOT
from transformer.cli.commands import compose
from transformer.config.jobs import TrainJob
from transformer.config.keys import shipped
from transformer.config.primitives import to_json

pytestmark = pytest.mark.usefixtures("in_empty_folder")

FOLDER = ROOT / "configs" / "recipe"

# Sections 5 and 6.1 of the paper, for its base model, and from section 3 what other recipes change.
PAPER: dict[str, Any] = {
    "model.dropout": 0.1,
    "model.attention_dropout": 0.0,
    "model.relu_dropout": 0.0,
    "model.norm": "post",
    "tokenizer.algorithm": "bpe",
    "tokenizer.vocab_size": 37_000,
    "train.max_steps": 100_000,
    "train.tokens_per_step": 25_000,
    "train.learning_rate": None,  # equation 3
    "train.learning_rate_scale": 1.0,
    "train.warmup_steps": 4_000,
    "train.decay": "inverse_sqrt",
    "train.optimizer": "adam",
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.98,
    "train.adam_eps": 1e-9,
    "train.weight_decay": 0.0,
    "train.label_smoothing": 0.1,
    "train.clip_norm": None,
    **{f"train.augment.{name}": 0.0 for name in ("unmarked", "typos", "title", "upper", "noise")},
    "train.ema_decay": None,
    "train.save_every": 1_500,
    "train.keep_last": 5,
    "train.average": 5,
    "search.beam_size": 4,
    "search.length_penalty": 0.6,
    "search.max_extra": 50,
}
# tensor2tensor/models/transformer.py, transformer_base_v3: twice equation 3, at a warm-up of 8,000 steps.
TENSOR2TENSOR = PAPER | {
    "model.norm": "pre",
    "model.attention_dropout": 0.1,
    "model.relu_dropout": 0.1,
    "train.warmup_steps": 8_000,
    "train.learning_rate_scale": 2.0,
    "train.adam_beta2": 0.997,
}
# Ott et al. (2018) with 402,000 tokens a step and "2x lr"; fairseq's examples/scaling_nmt.
SCALING_NMT = PAPER | {
    "model.dropout": 0.3,
    "tokenizer.vocab_size": 32_768,
    "train.max_steps": 24_000,
    "train.tokens_per_step": 402_000,
    "train.learning_rate": 1e-3,
    "train.adam_eps": 1e-8,
    "train.save_every": 343,
    "train.keep_last": 10,
    "train.average": 10,
}
# Chosen on Multi30k, and compared on Tatoeba: scripts/benchmark/results/low-resource-two-zen4-cores.md.
LOW_RESOURCE = PAPER | {
    "model.dropout": 0.3,
    "model.norm": "pre",
    "tokenizer.vocab_size": 10_000,
    "train.max_steps": 8_000,
    "train.tokens_per_step": 4_096,
    "train.learning_rate_scale": 1.5,
    "train.warmup_steps": 500,
    "train.decay": "cosine",
    "train.optimizer": "muon",
    "train.weight_decay": 0.3,
    "train.save_every": 200,
    "train.keep_last": 10,
    "train.average": 10,
}
# mozilla/translations, the OpusTrainer settings of its students.
ROBUST = PAPER | {
    "train.augment.unmarked": 0.2,
    "train.augment.typos": 0.05,
    "train.augment.title": 0.05,
    "train.augment.upper": 0.07,
    "train.augment.noise": 0.0005,
}
GOLDEN = {
    "paper": PAPER,
    "tensor2tensor": TENSOR2TENSOR,
    "scaling_nmt": SCALING_NMT,
    "low_resource": LOW_RESOURCE,
    "robust": ROBUST,
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def composed(*overrides: str) -> dict[str, Any]:
    """Every key of the job, dotted."""
    return flat(to_json(compose("train", overrides)))


def written(name: str) -> dict[str, Any]:
    """The keys that a recipe's file sets, as it sets them."""
    return flat(dict(OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))))  # type: ignore[arg-type]


# ---- their values ---------------------------------------------------------------------------------------------------


def test_recipes_are_these() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(GOLDEN) == list(RECIPES)


@every_recipe
def test_recipe_has_the_values_of_its_source(name: str) -> None:
    """Each key that any recipe sets; all the others are those of no recipe at all."""
    job = composed(f"recipe={name}", "experiment=base")
    assert {key: job[key] for key in PAPER} == GOLDEN[name]
    defaults = flat(to_json(TrainJob()))
    assert {key: value for key, value in job.items() if key not in PAPER} == {
        key: value for key, value in defaults.items() if key not in PAPER
    }


def test_recipe_paper_is_the_defaults() -> None:
    """Key by key, to the type: the file says what the defaults are, and can never say anything else."""
    defaults = flat(to_json(TrainJob()))
    keys = written("paper")
    assert list(keys) == list(PAPER), "every value of the table, in its order"
    assert {key: (value, type(value)) for key, value in keys.items()} == {
        key: (defaults[key], type(defaults[key])) for key in keys
    }
    assert compose("train", ["experiment=base", "recipe=paper"]) == compose("train", ["experiment=base"]) == TrainJob()


@pytest.mark.parametrize("name", ["low_resource", "robust", "scaling_nmt", "tensor2tensor"])
def test_recipe_sets_only_what_deviates_from_the_paper(name: str) -> None:
    expected = {key for key in PAPER if GOLDEN[name][key] != PAPER[key]}
    if "train.learning_rate_scale" in expected:
        expected.add("train.learning_rate")  # null: where an experiment has a rate of its own, the log says so
    assert set(written(name)) == expected


@every_recipe
def test_recipe_begins_with_its_command(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").split("\n")
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# transformer train ")
    assert f"recipe={name}" in lines[1].split()
    assert lines[2].startswith("# ")


@every_recipe
def test_recipe_has_a_command_that_composes(name: str) -> None:
    line = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").split("\n")[1]
    job = compose("train", line.removeprefix("# transformer train ").split())
    if name == "scaling_nmt":  # the paper's big model with this recipe, nothing of the paper's left in the way
        found = flat(to_json(job))
        assert {key: found[key] for key in PAPER} == SCALING_NMT
        assert (job.model.d_model, job.model.d_ff, job.model.n_heads) == (1024, 4096, 16)


@pytest.mark.parametrize(
    ("overrides", "peak"),
    [
        (["experiment=big"], 6.987712429686842e-4),  # 2 / sqrt(1024 * 8000)
        (["experiment=base", "train.warmup_steps=2000"], 1.976423537605237e-3),  # 2 / sqrt(512 * 2000)
        (["experiment=small"], 1e-3),  # the experiment's own
        (["experiment=base", "train.learning_rate=0.5"], 0.5),
        (["experiment=base", "train.learning_rate_scale=1"], 4.941058844013093e-4),  # 1 / sqrt(512 * 8000)
    ],
    ids=["big", "warm-up", "small", "given", "equation 3"],
)
def test_recipe_tensor2tensor_doubles_equation_3_for_the_model_at_hand(overrides: list[str], peak: float) -> None:
    job = compose("train", ["recipe=tensor2tensor", *overrides])
    assert job.train.peak(job.model.d_model) == pytest.approx(peak, rel=1e-12)


def test_recipe_tensor2tensor_with_the_big_model_is_its_transformer_big() -> None:
    job = composed("recipe=tensor2tensor", "experiment=wmt14_en_de_big")
    names = ("d_model", "d_ff", "n_heads", "dropout", "attention_dropout", "relu_dropout", "norm")
    assert [job[f"model.{name}"] for name in names] == [1024, 4096, 16, 0.3, 0.1, 0.1, "pre"]


def test_scale_of_equation_3_beside_the_rate_of_an_experiment_is_refused() -> None:
    """It would have no effect. A recipe's own is overridden by the experiment, which the log says."""
    for rate, peak in (("null", 2 / math.sqrt(512 * 1000)), ("0.5", 0.5)):
        job = compose("train", ["experiment=small", "train.learning_rate_scale=2", f"train.learning_rate={rate}"])
        assert job.train.peak(512) == pytest.approx(peak)


# ---- what overrides a recipe ----------------------------------------------------------------------------------------

OVERRIDES = "experiment=small overrides recipe=tensor2tensor: "


@pytest.mark.parametrize(
    ("overrides", "own"),
    [
        ([], "train.warmup_steps=1000, train.learning_rate=0.001"),
        (["train.warmup_steps=900"], "train.learning_rate=0.001"),
        (["+train.warmup_steps=1000", "++train.learning_rate=null"], None),
    ],
    ids=["experiment", "one key given", "both given"],
)
def test_recipe_gives_way_to_the_experiment_and_the_log_says_where(
    caplog: pytest.LogCaptureFixture, overrides: list[str], own: str | None
) -> None:
    result = enter("train", "experiment=small", "recipe=tensor2tensor", *overrides)
    assert result.status == 0
    assert caplog.messages == ([] if own is None else [f"{OVERRIDES}{own}"])
    (job,) = result.jobs
    assert (job.model.norm.name, job.train.adam_beta2) == ("pre", 0.997)
    if not overrides:
        assert (job.train.warmup_steps, job.train.learning_rate) == (1000, 1e-3)


def test_experiment_names_its_recipe_and_the_command_line_another() -> None:
    """What the recipe sets is the experiment's where the command line names none, and gone where it names one."""
    experiment = {"search.length_penalty": 1.4}  # what it sets itself, whatever the recipe
    own = composed("experiment=multi30k_en_de", "data.root=x")
    assert {key: own[key] for key in PAPER} == LOW_RESOURCE | experiment
    assert own == composed("experiment=multi30k_en_de", "data.root=x", "recipe=low_resource")

    other = composed("experiment=multi30k_en_de", "data.root=x", "recipe=tensor2tensor")
    assert {key: other[key] for key in PAPER} == TENSOR2TENSOR | experiment


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ([], []),
        (
            ["recipe=low_resource"],
            [
                "experiment=tatoeba_en_de overrides recipe=low_resource: "
                "model.dropout=0.2, tokenizer.vocab_size=8000, train.max_steps=12000"
            ],
        ),
    ],
    ids=["the experiment's own", "asked for"],
)
def test_recipe_that_nobody_asked_for_is_not_talked_about(
    caplog: pytest.LogCaptureFixture, asked: list[str], messages: list[str]
) -> None:
    enter("train", "experiment=tatoeba_en_de", "data.root=x", *asked)
    assert caplog.messages == messages


def test_recipe_may_stand_anywhere_among_the_overrides() -> None:
    one = composed("experiment=small", "train.seed=3", "recipe=tensor2tensor")
    assert one == composed("recipe=tensor2tensor", "train.seed=3", "experiment=small")


def test_recipe_paper_is_not_talked_about(caplog: pytest.LogCaptureFixture) -> None:
    enter("train", "experiment=small", "recipe=paper")
    assert caplog.messages == []


@pytest.mark.parametrize("command", ["train", "prepare", pytest.param("summary", marks=pytest.mark.plugins)])
def test_recipe_is_for_the_commands_that_train(command: str) -> None:
    (job,) = enter(command, "experiment=base", "recipe=tensor2tensor").jobs
    assert job.train.adam_beta2 == 0.997


def test_multirun_over_recipes() -> None:
    jobs = enter("train", "-m", "experiment=base", "recipe=paper,tensor2tensor").jobs
    assert [job.run_dir for job in jobs] == ["runs/base/recipe-paper", "runs/base/recipe-tensor2tensor"]
    assert [job.train.adam_beta2 for job in jobs] == [0.98, 0.997]


# ---- recipes of one's own -------------------------------------------------------------------------------------------


def write_recipe(folder: Path, text: str) -> str:
    """Write recipe `mine`; gives the folder for --config-dir."""
    path = folder / "mine" / "recipe" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"{text}\n", encoding="latin-1")
    return str(folder / "mine")


def test_recipe_takes_the_ending_of_its_file(caplog: pytest.LogCaptureFixture) -> None:
    given = ["experiment=small", "recipe=low_resource"]
    (job,) = enter("train", *given[:-1], f"{given[-1]}.yaml").jobs
    first = caplog.messages
    caplog.clear()
    assert enter("train", *given).jobs == [job]
    assert [message.replace(".yaml", "") for message in first] == caplog.messages


def test_recipe_of_one_s_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "# @package _global_\ndefaults: [tensor2tensor, _self_]\ntrain: {clip_norm: 1.0, warmup_steps: 9}"
    folder = write_recipe(tmp_path, text)
    (job,) = enter("train", "--config-dir", folder, "experiment=small", "recipe=mine").jobs
    assert (job.train.clip_norm, job.train.adam_beta2, job.train.warmup_steps) == (1.0, 0.997, 1000)
    assert caplog.messages == ["experiment=small overrides recipe=mine: train.warmup_steps=1000"]
    assert compose("train", ["experiment=small", "recipe=mine"], config_dir=folder) == job
    all_recipes = ", ".join(sorted([*RECIPES, "mine"]))
    assert f"\nrecipe: {all_recipes}\n" in enter("train", "--help", "--config-dir", folder).out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {max_steps: 5}", ["recipe/mine", "# @package _global_"]),
        ("# @package _global_\ntrain: {max_stps: 5}", ["max_stps"]),
        ("# @package _global_\nrecipe: 1", ["recipe"]),
        ("# @package _global_\n# für", ["recipe=mine experiment=base is not UTF-8 at its byte 24: save it as UTF-8"]),
        ("# @package _global_\nmodel: {_target_: os.getcwd}", ["_target_"]),
        *((f"# @package _global_\n{HYDRA_NODES[case]}", ["configure Hydra"]) for case in ("callbacks", "launcher")),
    ],
    ids=["no package", "unknown key", "unknown node", "not UTF-8", "target", "callbacks", "launcher"],
)
def test_recipe_that_is_bad_is_refused_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    folder = write_recipe(tmp_path, text)
    assert_refused(enter("train", "--config-dir", folder, "recipe=mine", "experiment=base"), *words)


# ---- they train -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _small_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo corpus is a few of its lines."""
    folder = tmp_path / "data" / "demo"
    folder.mkdir(parents=True)
    for source in (ROOT / "data" / "demo").glob("*.??"):
        with source.open(encoding="utf-8") as lines:
            text = "".join(islice(lines, 300 if source.stem == "train" else 4))
        (folder / source.name).write_text(text, encoding="utf-8")

    def small(name: str) -> Path:
        return tmp_path / "data" if name == "data" else shipped(name)

    monkeypatch.setattr("transformer.config.compose.shipped", small)


RATES: dict[str, Callable[[int], float]] = {  # of step n of the demo: d_model 128, warm-up 400
    "low_resource": lambda n: 1.5 * 128**-0.5 * n * 400**-1.5,
    "paper": lambda n: 128**-0.5 * n * 400**-1.5,
    "tensor2tensor": lambda n: 2.0 * 128**-0.5 * n * 400**-1.5,
    "robust": lambda n: 128**-0.5 * n * 400**-1.5,
    "scaling_nmt": lambda n: 1e-3 * n / 400,
}


@pytest.mark.usefixtures("_small_demo")
@every_recipe
@pytest.mark.ci
def test_recipe_trains(name: str, tmp_path: Path) -> None:
    small = ["train.max_steps=2", "train.log_every=1", "train.threads=1", "train.precision=fp32", "search.max_extra=5"]
    folder = run(compose("train", [f"recipe={name}", f"run_dir={tmp_path}/run", *small]))
    assert results_of(folder)["steps"] == 2
    rates = [row["train/rate"] for row in metrics_of(folder) if "train/rate" in row]
    assert rates == [pytest.approx(RATES[name](n), rel=1e-6) for n in (1, 2)]
