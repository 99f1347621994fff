"""Which settings and places `train` takes: every recipe, bad input, and what may differ when a run goes on."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transformer
from support.corpora import (
    assert_same_end,
    assert_same_tensors,
    in_a_child,
    metrics_of,
    read,
    results_of,
    run,
    step_dir,
    steps_of,
    tiny_job,
    write_corpus,
)
from support.resumed_runs import stop_at, with_value
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    Activation,
    BleuTokenizer,
    DataConfig,
    Decay,
    Norm,
    OptimizerKind,
    Positions,
    Precision,
    SearchConfig,
    Start,
    paper_peak,
)
from transformer.data import building
from transformer.data.tokenizer import train_tokenizer
from transformer.errors import CheckpointError, InputError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A short run; tests copy it."""
    job = tiny_job(tmp_path_factory.mktemp("finished") / "a", corpus, max_steps=4, save_every=2, keep_last=3)
    job.tokenizer.vocab_size = 300  # room for the 256 of byte_fallback
    run(job)
    return job


@pytest.fixture
def copy(finished: TrainJob, tmp_path: Path) -> TrainJob:
    shutil.copytree(finished.run_dir, tmp_path / "copy")
    return replace(finished, run_dir=str(tmp_path / "copy"))


# ---- every recipe ---------------------------------------------------------------------------------------------------

STATELESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what a checkpoint holds nothing of
    "no label smoothing": ({}, {"label_smoothing": 0.0}),
    "clipping": ({}, {"clip_norm": 0.1}),
    "linear decay": ({}, {"decay": Decay.linear, "warmup_steps": 2}),
    "the paper's rate": ({}, {"learning_rate": None}),
    "deep encoder": ({"n_layers": 3, "n_decoder_layers": 1}, {}),
    "GELU": ({"activation": Activation.gelu}, {}),
    "swish": ({"activation": Activation.swish}, {}),
    "biases": ({"biases": True}, {}),
    "pre-norm": ({"norm": Norm.pre}, {}),
    "learned positions": ({"positions": Positions.learned}, {}),
    "untied": ({"tie_embeddings": False}, {}),
    "as Marian": ({"start": Start.zeros, "positions": Positions.marian}, {}),
    "no prefetch": ({}, {"prefetch": 0}),
    "deterministic": ({}, {"deterministic": True}),
    "one micro-batch": ({}, {"max_tokens": 4096}),
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cosine decay": ({}, {"decay": Decay.cosine, "warmup_steps": 2}),
    "float64": ({}, {"precision": Precision.fp64}),
    "bfloat16": ({}, {"precision": Precision.bf16}),
    "float16": ({}, {"precision": Precision.fp16}),
    "moving average": ({}, {"ema_decay": 0.9}),
    "moving average in float16": ({}, {"ema_decay": 0.2, "precision": Precision.fp16}),
    "weight decay": ({}, {"weight_decay": 0.1}),
    "Muon": ({}, {"optimizer": OptimizerKind.muon, "weight_decay": 0.1}),
    "Muon in bfloat16": ({}, {"optimizer": OptimizerKind.muon, "precision": Precision.bf16}),
    "Muon in float16": (
        {},
        {
            "optimizer": OptimizerKind.muon,
            "weight_decay": 0.3,
            "precision": Precision.fp16,
            "clip_norm": 0.1,
            "ema_decay": 0.9,
        },
    ),
    "all dropouts": ({"dropout": 0.2, "attention_dropout": 0.1, "relu_dropout": 0.1}, {}),
}
OF_EVERY_RUN = ("cosine decay", "float16", "moving average", "Muon")
RECIPES = [
    *(
        pytest.param(*VARIANTS[name], id=name, marks=[] if name in OF_EVERY_RUN else pytest.mark.ci)
        for name in VARIANTS
    ),
    *(pytest.param(*STATELESS[name], id=name, marks=pytest.mark.faults) for name in STATELESS),
]


@pytest.mark.parametrize(("model", "recipe"), RECIPES)
def test_train_resumes_under_every_recipe(
    corpus: DataConfig, tmp_path: Path, model: dict[str, Any], recipe: dict[str, Any]
) -> None:
    settings = {"max_steps": 5, "validate_every": 5} | recipe
    untested = replace(corpus, test={})
    calm = run(tiny_job(tmp_path / "calm", untested, model, **settings))
    job = tiny_job(tmp_path / "stopped", untested, model, **settings)
    stop_at(job, 3)
    run(job)
    assert_same_end(tmp_path / "stopped", calm)
    tensors = load_file(step_dir(calm, 5) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {
        torch.float64 if recipe.get("precision") is Precision.fp64 else torch.float32
    }
    losses = [row["train/loss"] for row in metrics_of(calm) if "train/loss" in row]
    assert losses[-1] < losses[0]


# ---- what may change under way --------------------------------------------------------------------------------------

FREE = {
    *("run_dir", "search.beam_size", "search.length_penalty", "search.max_extra", "search.batch_tokens"),
    *(
        "data.check",
        "data.scores",
        "data.root",
        "data.store_dir",
        "train.max_steps",
        "train.log_every",
        "train.save_every",
    ),
    *("train.validate_every", "train.keep_last", "train.keep_best", "train.metric", "train.patience"),
    *("train.average", "train.samples", "train.trackers", "train.prefetch", "train.proof", "train.profile"),
    *("data.dev.tag", "data.train.tgt_lang", "data.dev.tgt_lang", "data.dev.augment"),
    *("data.train.src_lang", "data.dev.src_lang"),
}
NOTED = {"train.max_tokens", "train.threads", "train.device", "train.compile"}
NOTED |= {"train.kernels", "train.cuda_graphs"}
PARTS = ("src", "tgt", "dataset", "subset", "split")
FILES = {f"data.{pair}.{part}" for pair in ("train", "dev", "test.test", "test.other") for part in PARTS}
NOT_HERE = {
    "search.engine",
    "search.engine_type",
    "search.cuda_graphs",
    "tokenizer.model",
    "tokenizer.target.model",
    "train.fit_memory",
}
NOT_HERE |= {
    f"data.test.{name}.{key}" for name in ("test", "other") for key in ("tag", "src_lang", "tgt_lang", "augment")
}  # of their own
NOT_HERE.add("data.train.augment")  # of no training set
NOT_HERE.add("train.learning_rate_scale")  # changes nothing beside a rate
CHOSEN = {  # where twice or half would be no value, or takes time
    "model.n_decoder_layers": 2,
    "model.d_k": 8,
    "model.d_v": 8,
    **{f"data.{pair}.tag": "<x>" for pair in ("train", "dev")},
    **{f"data.{pair}.{side}_lang": "fr" for pair in ("train", "dev") for side in ("src", "tgt")},
    "data.dev.augment": "upper",
    "data.filter.doctor": ["copies"],
    "data.bleu_tokenize": BleuTokenizer["intl"],
    "data.scores": ["bleu"],
    "data.store_dir": "",
    "data.temperature": 2.0,
    "tokenizer.character_coverage": 0.99,
    "tokenizer.target.algorithm": "unigram",
    "tokenizer.target.vocab_size": 50,
    "tokenizer.target.normalization": "nfkc",
    "tokenizer.target.byte_fallback": False,
    "tokenizer.target.character_coverage": 0.99,
    "tokenizer.target.sample_lines": 500,
    "search.batch_tokens": 4096,
    "train.proof": False,
    "train.compile": True,
    "train.cuda_graphs": False,
    "train.profile": 2,
    "train.weight_decay": 0.1,
    "train.clip_norm": 0.5,
    "train.subword_sampling": 0.1,
    "train.ema_decay": 0.9,
    "train.patience": 2,
    "train.trackers": [],
    "train.average": 1,
    "train.keep_last": 5,
    "train.device": "cpu",
}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a job, dotted, with its value."""
    table = config if isinstance(config, dict) else {f.name: getattr(config, f.name) for f in fields(config)}
    for name, value in table.items():
        if is_dataclass(value) or isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def another(key: str, value: Any, folder: Path) -> Any:
    if key == "data.store_dir":
        return str(folder / "another store")
    if key == "train.device":
        return type(value).cpu
    if key in CHOSEN:
        return CHOSEN[key]
    if isinstance(value, Enum):
        return next(member for member in reversed(type(value)) if member is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 or 0.25
    return value * 2 if isinstance(value, int) else f"{value}x"


KEYS = [key for key, _ in leaves(tiny_job(Path("a"), DataConfig()))]
KEYS = [key for key in KEYS if key not in FILES | NOT_HERE | {"run_dir"}]


def as_typed(value: object) -> str:
    """How a user writes it on the command line."""
    words = {"None": "null", "True": "true", "False": "false"}
    if isinstance(value, list):
        return str([as_typed(item) for item in value])
    text = value.name if isinstance(value, Enum) else str(value)
    return words.get(text, text)


# The verdicts of a screen have a version, which is a plug-in's; what changes a set is one.
OF_PLUGINS = {key: pytest.param(key, marks=pytest.mark.plugins) for key in ("data.filter.doctor", "data.dev.augment")}


@pytest.mark.parametrize("key", [OF_PLUGINS.get(key, key) for key in KEYS if key not in FREE | NOTED])
def test_resume_refuses_what_changes_the_mathematics(copy: TrainJob, tmp_path: Path, key: str) -> None:
    before = dict(leaves(copy))[key]
    now = another(key, before, tmp_path)
    shown = as_typed(before), as_typed(now)
    with pytest.raises(CheckpointError, match=re.escape(f"{key}: {shown[0]} -> {shown[1]}")) as refused:
        run(with_value(copy, key, now))
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 4


def test_resume_accepts_at_once_what_does_not_change_the_mathematics(
    copy: TrainJob, finished: TrainJob, tmp_path: Path
) -> None:
    check_that_it_is_free([key for key in KEYS if key in FREE and key not in OF_PLUGINS], copy, finished, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("key", [OF_PLUGINS.get(key, key) for key in KEYS if key in FREE])
def test_resume_accepts_what_does_not_change_the_mathematics(
    copy: TrainJob, finished: TrainJob, tmp_path: Path, key: str
) -> None:
    check_that_it_is_free([key], copy, finished, tmp_path)


def check_that_it_is_free(keys: list[str], copy: TrainJob, finished: TrainJob, tmp_path: Path) -> None:
    """Two of the four steps are made under other values: the weights come out the same."""
    run_dir, straight = Path(copy.run_dir), Path(finished.run_dir)
    for folder in (step_dir(run_dir, 4), run_dir / "averaged"):
        shutil.rmtree(folder)
    for name in ("results.json", "best.json"):
        (run_dir / name).unlink()

    job = copy
    for key in keys:
        job = with_value(job, key, another(key, dict(leaves(copy))[key], tmp_path))
    run(job)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(step_dir(run_dir, 4) / name, step_dir(straight, 4) / name)


@pytest.mark.parametrize("key", sorted(NOTED))
def test_resume_accepts_and_logs_what_may_change_the_last_bits(copy: TrainJob, tmp_path: Path, key: str) -> None:
    before = dict(leaves(copy))[key]
    now = another(key, before, tmp_path)
    shown = as_typed(before), as_typed(now)
    run(with_value(copy, key, now))
    assert f"{key}: {shown[0]} -> {shown[1]}" in (Path(copy.run_dir) / "train.log").read_text(encoding="utf-8")


def test_resume_decides_on_every_key(copy: TrainJob) -> None:
    """A new key must be put on one of the lists here."""
    assert (FREE | NOTED) - set(KEYS) == {"run_dir"}
    assert {key for key, _ in leaves(copy)} - set(KEYS) - {"run_dir"} == FILES | NOT_HERE


@pytest.mark.parametrize("decay", [decay for decay in Decay if decay.ends_at_the_last_step])
def test_resume_refuses_another_length_where_the_decay_ends_at_the_last_step(
    corpus: DataConfig, tmp_path: Path, decay: Decay
) -> None:
    recipe: dict[str, Any] = {"decay": decay, "warmup_steps": 2}
    run(tiny_job(tmp_path / "a", corpus, max_steps=4, **recipe))
    with pytest.raises(CheckpointError, match=r"train\.max_steps: 4 -> 6"):
        run(tiny_job(tmp_path / "a", corpus, max_steps=6, **recipe))


def test_resume_extends_a_run_at_a_constant_rate(corpus: DataConfig, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"decay": Decay.constant, "warmup_steps": 2}
    run(tiny_job(tmp_path / "a", corpus, max_steps=4, **recipe))
    extended = run(tiny_job(tmp_path / "a", corpus, max_steps=6, **recipe))
    straight = run(tiny_job(tmp_path / "b", corpus, max_steps=6, **recipe))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(step_dir(extended, 6) / name, step_dir(straight, 6) / name)


def test_resume_takes_a_rate_for_what_the_scale_of_equation_3_makes_of_it(corpus: DataConfig, tmp_path: Path) -> None:
    """Runs of 0.1.0 have the rate of their recipe as a number."""
    recipe: dict[str, Any] = {"decay": Decay.constant, "warmup_steps": 2}
    rate = 1.5 * paper_peak(32, 2)
    scaled: dict[str, Any] = recipe | {"learning_rate": None, "learning_rate_scale": 1.5}
    run(tiny_job(tmp_path / "a", corpus, max_steps=4, learning_rate=rate, **recipe))
    refused = re.escape(f"train.learning_rate: {rate} -> null; train.learning_rate_scale: 1.0 -> 2.0")
    with pytest.raises(CheckpointError, match=refused):
        run(tiny_job(tmp_path / "a", corpus, max_steps=6, **scaled | {"learning_rate_scale": 2.0}))
    resumed = run(tiny_job(tmp_path / "a", corpus, max_steps=6, **scaled))
    straight = run(tiny_job(tmp_path / "b", corpus, max_steps=6, learning_rate=rate, **recipe))
    assert_same_tensors(step_dir(resumed, 6) / "model.safetensors", step_dir(straight, 6) / "model.safetensors")


def changed_line(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[3] += " eins"
    path.write_text("\n".join(lines), encoding="utf-8", newline="\n")


@pytest.fixture
def own_text(corpus: DataConfig, tmp_path: Path) -> DataConfig:
    """The corpus in a folder of its own, which a test may change."""
    return write_corpus(tmp_path / "text")


def test_resume_refuses_a_changed_training_text(own_text: DataConfig, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "a", own_text, max_steps=6)
    stop_at(job, 3)
    changed_line(Path(own_text.train.tgt))
    with pytest.raises(CheckpointError, match="training data") as refused:
        run(job)
    assert "\n" not in str(refused.value)


def test_resume_refuses_a_run_that_was_prepared_otherwise_which_translates_still(
    own_text: DataConfig, tmp_path: Path
) -> None:
    """Its run.json has no key that came later."""
    job = tiny_job(tmp_path / "a", own_text, max_steps=6)
    path = stop_at(job, 3) / "run.json"
    papers = read(path)
    del papers["config"]["tokenizer"]["normalization"]
    path.write_text(json.dumps(papers | {"prepare_version": 2, "data_digest": "0" * 64}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"how data are prepared: version 2 -> 3") as refused:
        run(job)
    assert "\n" not in str(refused.value)
    assert len(transformer.load(job.run_dir, device="cpu").translate(["one two"])) == 1


def test_resume_refuses_another_tokenizer_of_the_same_text(
    own_text: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest names text and settings; of these another release may make other pieces, if the store is rebuilt."""
    job = tiny_job(tmp_path / "a", own_text, max_steps=6)
    stop_at(job, 3)
    shutil.rmtree(str(own_text.store_dir))
    trained = train_tokenizer
    monkeypatch.setattr(building, "train_tokenizer", lambda lines, config, **_: trained(list(lines)[:60], config))
    with pytest.raises(CheckpointError, match=r"tokenizer: SentencePiece \S+ trained another one") as refused:
        run(job)
    assert "\n" not in str(refused.value)
    assert steps_of(Path(job.run_dir)) == [3]


def test_resume_accepts_changed_development_and_test_texts(
    own_text: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, warning = tiny_job(tmp_path / "a", own_text, max_steps=6), "the text of data.dev has changed"
    stop_at(job, 3)
    stop_at(job, 4)
    assert warning not in caplog.text
    changed_line(Path(own_text.dev.tgt))
    changed_line(Path(own_text.test["test"].tgt))
    run(job)
    assert caplog.text.count(warning) == 1
    kept = Path(job.run_dir) / "hypotheses" / "test.ref"
    assert kept.read_bytes() == Path(own_text.test["test"].tgt).read_bytes()


def test_resume_accepts_a_run_and_a_corpus_that_moved(own_text: DataConfig, tmp_path: Path) -> None:
    straight = run(tiny_job(tmp_path / "straight", own_text))
    run_dir = stop_at(tiny_job(tmp_path / "a", own_text), 5)
    there = shutil.move(run_dir, tmp_path / "there")
    shutil.rmtree(tmp_path / "text")
    moved = tiny_job(Path(there), write_corpus(tmp_path / "other place"))
    assert moved.data.train != own_text.train
    run(moved)
    assert_same_end(Path(there), straight)


def test_resume_knows_a_given_tokenizer_by_its_content(corpus: DataConfig, tmp_path: Path) -> None:
    trained = run(tiny_job(tmp_path / "first", corpus, max_steps=1, average=1)) / "tokenizer.model"
    paths = [shutil.copy(trained, tmp_path / name) for name in ("one.model", "two.model")]
    job = with_value(tiny_job(tmp_path / "a", corpus, max_steps=4), "tokenizer.model", str(paths[0]))
    run(job)
    run(with_value(job, "tokenizer.model", str(paths[1])))
    with pytest.raises(CheckpointError, match="tokenizer"):
        run(with_value(job, "tokenizer.model", None))


def test_resume_takes_other_search_settings_for_the_rest_of_the_run(corpus: DataConfig, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "a", corpus)
    stop_at(job, 9)
    run(replace(job, search=SearchConfig(beam_size=2, max_extra=12)))
    results = results_of(Path(job.run_dir))
    assert results["search"]["beam_size"] == 2
    assert read(Path(job.run_dir) / "averaged" / "config.json")["search"]["beam_size"] == 2


# ---- places and inputs that will not do -----------------------------------------------------------------------------


def unequal(data: DataConfig) -> None:
    with open(data.dev.src, "a", encoding="utf-8") as file:
        file.write("one more\n")


def not_utf8(data: DataConfig) -> None:
    content = Path(data.train.tgt).read_bytes().split(b"\n")
    content[2] += b"\xff"
    Path(data.train.tgt).write_bytes(b"\n".join(content))


BAD = {
    "missing": (lambda data: Path(data.test["other"].tgt).unlink(), "other.de"),
    "unequal": (unequal, "17 lines"),
    "not UTF-8": (not_utf8, "train.de:3"),
    "empty": (lambda data: [Path(path).write_bytes(b"") for path in (data.train.src, data.train.tgt)], "train"),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_train_makes_no_run_directory_for_bad_input(
    own_text: DataConfig, tmp_path: Path, spoil: Callable[[DataConfig], object], words: str
) -> None:
    spoil(own_text)
    with pytest.raises(InputError, match=re.escape(words)) as refused:
        run(tiny_job(tmp_path / "runs" / "a", own_text))
    assert refused.value.exit_status == 2
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs" / "a").exists()


def test_train_ends_with_the_documented_statuses(
    corpus: DataConfig, own_text: DataConfig, copy: TrainJob, tmp_path: Path
) -> None:
    """One line on standard error and the documented status."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    not_utf8(own_text)
    cases = [
        (2, "train.de:3", tiny_job(tmp_path / "runs" / "a", own_text)),
        (4, "train.seed: 1 -> 2", with_value(copy, "train.seed", 2)),
        (5, "Not a directory", tiny_job(tmp_path / "file" / "a", corpus)),
    ]
    for status, words, job in cases:
        found = in_a_child("train", job, tmp_path)
        assert found.status == status
        (line,) = [line for line in found.said.splitlines() if "error" in line]
        assert line.startswith("transformer: error: ")
        assert words in line
    assert not (tmp_path / "runs" / "a").exists()
