"""The typed configuration: what it refuses, naming the key, and its JSON, which is read back from checkpoints."""

import copy
import json
import random
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from transformer.config.jobs import AverageJob, EvaluateJob, PrepareJob, TrainJob, TranslateJob
from transformer.config.keys import generic_key, keys_of
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import (
    Activation,
    Algorithm,
    DataConfig,
    Decay,
    Device,
    FilterConfig,
    Format,
    Metric,
    ModelConfig,
    Norm,
    Normalization,
    OnResume,
    OptimizerKind,
    PairConfig,
    Positions,
    Precision,
    SearchConfig,
    SearchOverride,
    Start,
    SweepConfig,
    TargetTokenizerConfig,
    TokenizerConfig,
    TrainConfig,
    option,
)


def random_job(draw: random.Random) -> TrainJob:
    """Any valid job: every key is drawn, none is left at its default."""
    heads, average, longest = draw.randint(1, 16), draw.randint(1, 9), draw.randint(1, 2000)

    def text() -> str:
        return "x" + "".join(draw.choices("ab/ é日'\"\\$={}.", k=5))

    def maybe(value: Any) -> Any:
        return draw.choice([None, value])

    def pair() -> PairConfig:
        return PairConfig(text(), text(), tag=maybe(f"<{draw.randrange(9)}>"))

    return TrainJob(
        run_dir=text(),
        init_from=maybe(text()),
        model=ModelConfig(
            n_layers=draw.randint(1, 12),
            n_decoder_layers=maybe(draw.randint(1, 12)),
            d_model=2 * heads * draw.randint(1, 40),
            d_ff=draw.randint(1, 4096),
            n_heads=heads,
            d_k=maybe(draw.randint(1, 128)),
            d_v=maybe(draw.randint(1, 128)),
            activation=draw.choice(list(Activation)),
            dropout=draw.random(),
            attention_dropout=draw.random(),
            relu_dropout=draw.random(),
            norm=draw.choice(list(Norm)),
            positions=draw.choice(list(Positions)),
            max_positions=longest + draw.randint(1, 100),
            start=draw.choice(list(Start)),
            tie_embeddings=draw.random() < 0.5,
        ),
        data=DataConfig(
            src_lang=text(),
            tgt_lang=text(),
            root=text(),
            train=pair(),
            dev=pair(),
            test={f"news{draw.randint(0, 99)}_-X": pair() for _ in range(draw.randint(0, 3))},
            temperature=maybe(1.0 + 9 * draw.random()),
            filter=FilterConfig(longest, 1.0 + 9 * draw.random(), draw.random() < 0.5, draw.random() < 0.5),
            store_dir=maybe(text()),
        ),
        tokenizer=TokenizerConfig(
            algorithm=draw.choice(list(Algorithm)),
            vocab_size=draw.randint(8, 60_000),
            normalization=draw.choice(list(Normalization)),
            byte_fallback=draw.random() < 0.5,
            character_coverage=0.98 + 0.02 * draw.random(),
            sample_lines=draw.randint(1, 10**9),
            model=maybe(text()),
            target=TargetTokenizerConfig(
                algorithm=maybe(draw.choice(list(Algorithm))),
                vocab_size=maybe(draw.randint(8, 60_000)),
                byte_fallback=maybe(draw.random() < 0.5),
                model=maybe(text()),
            ),
        ),
        train=TrainConfig(
            seed=draw.randint(0, 2**63),
            max_steps=draw.randint(1, 10**6),
            tokens_per_step=longest + draw.randint(1, 10**5),
            max_tokens=maybe(longest + draw.randint(1, 10**5)),
            learning_rate=maybe(draw.random() + 1e-9),
            learning_rate_scale=draw.random() + 1e-9,
            warmup_steps=draw.randint(1, 10**5),
            decay=draw.choice(list(Decay)),
            adam_beta1=draw.random(),
            adam_beta2=draw.random(),
            optimizer=draw.choice(list(OptimizerKind)),
            adam_eps=10.0 ** -draw.randint(1, 20),
            weight_decay=draw.random(),
            label_smoothing=draw.random(),
            clip_norm=maybe(draw.random() + 1e-9),
            ema_decay=maybe(0.1 + 0.8 * draw.random()),
            precision=draw.choice(list(Precision)),
            device=draw.choice(list(Device)),
            threads=maybe(draw.randint(1, 99)),
            deterministic=draw.random() < 0.5,
            prefetch=draw.randint(0, 9),
            log_every=draw.randint(1, 999),
            save_every=draw.randint(1, 999),
            validate_every=draw.randint(1, 999),
            keep_last=max(2, average + draw.randint(0, 9)),
            keep_best=draw.randint(0, 9),
            metric=draw.choice(list(Metric)),
            patience=maybe(draw.randint(1, 9)),
            average=average,
            samples=draw.randint(0, 9),
        ),
        search=SearchConfig(draw.randint(1, 99), 2 * draw.random(), draw.randint(1, 999), draw.randint(1, 10**5)),
    )


def through_json(job: Any) -> Any:
    return from_json(type(job), json.loads(json.dumps(to_json(job), allow_nan=False)))


def test_from_json_gives_back_any_job() -> None:
    for seed in range(200):
        job = random_job(random.Random(seed))
        again = through_json(job)
        assert again == job
        assert types_of(again) == types_of(job)


def types_of(config: Any) -> list[Any]:
    """The type of every value: 1 == 1.0 == True would hide a change."""
    values = [getattr(config, field.name) for field in fields(config)]
    return [types_of(value) if is_dataclass(value) else type(value) for value in values]


@pytest.mark.parametrize("kind", [TrainJob, PrepareJob, TranslateJob, EvaluateJob, AverageJob])
def test_from_json_gives_back_the_defaults_of_every_job(kind: type) -> None:
    assert through_json(kind()) == kind()


def test_from_json_takes_the_default_of_a_missing_key() -> None:
    assert from_json(TrainJob, {"model": {"d_model": 64}}) == TrainJob(model=ModelConfig(d_model=64))


@pytest.mark.plugins
def test_to_json_names_choices_and_keeps_nesting() -> None:
    from transformer.tools.summary.job import SummaryJob

    data = to_json(SummaryJob(format=Format.json, model=ModelConfig(norm=Norm.pre)))
    assert (data["format"], data["model"]["norm"]) == ("json", "pre")
    names = ("dataset", "subset", "split", "tag", "augment", "src_lang", "tgt_lang")
    nothing = {"src": "", "tgt": "", **dict.fromkeys(names)}
    assert (data["data"]["train"], data["data"]["test"]) == (nothing, {})


# Where, what is put there, and what the message must name.
REFUSED: dict[str, tuple[str, object, list[str]]] = {
    "unknown key": ("model.d_modl", 8, ["model", "d_modl"]),
    "unknown group": ("modle", {}, ["modle"]),
    "target": ("_target_", "os.system", ["_target_"]),
    "target in a group": ("model._target_", "os.system", ["model", "_target_"]),
    "target in a test set": ("data.test", {"news": {"_target_": "os.system"}}, ["data.test.news", "_target_"]),
    "test set outside the run": ("data.test", {"../news": {}}, ["data.test", "../news"]),
    "test set without a name": ("data.test", {"": {}}, ["data.test"]),
    "dev set called dev": ("data.devs", {"dev": {}}, ["data.devs.dev"]),
    "bad tag of a dev set": ("data.devs", {"x": {"tag": "de"}}, ["data.devs.x.tag=de", "such as <bt>"]),
    "test set called dev": ("data.test", {"dev": {}}, ["data.test.dev"]),
    "text for int": ("train.seed", "1", ["train.seed", "'1'"]),
    "float for int": ("train.seed", 1.0, ["train.seed", "1.0"]),
    "bool for int": ("train.seed", True, ["train.seed", "True"]),
    "bool for float": ("model.dropout", False, ["model.dropout", "False"]),
    "int for bool": ("train.deterministic", 1, ["train.deterministic"]),
    "int for text": ("run_dir", 1, ["run_dir"]),
    "null": ("train.seed", None, ["train.seed", "None"]),
    "null for a group": ("model", None, ["model"]),
    "list for a group": ("model", [], ["model"]),
    "text for a group": ("data.train", "a.en", ["data.train"]),
    "text for test sets": ("data.test", "a.en", ["data.test"]),
    "unknown choice": ("model.norm", "mid", ["model.norm", "mid"]),
    "choice as number": ("model.norm", 0, ["model.norm"]),
    "huge int for float": ("train.clip_norm", 10**400, ["train.clip_norm"]),
    "huge int": ("train.seed", 10**400, ["train.seed"]),
    "nan": ("model.dropout", float("nan"), ["model.dropout=nan"]),
    "nan, optional": ("train.learning_rate", float("nan"), ["train.learning_rate=nan"]),
    "inf": ("search.length_penalty", float("inf"), ["search.length_penalty=inf"]),
    "no layers": ("model.n_layers", 0, ["model.n_layers=0"]),
    "no decoder": ("model.n_decoder_layers", 0, ["model.n_decoder_layers=0"]),
    "odd width": ("model.d_model", 511, ["model.d_model=511", "even"]),
    "indivisible width": ("model.n_heads", 7, ["model.d_model=512", "model.n_heads=7"]),
    "no key width": ("model.d_k", 0, ["model.d_k=0"]),
    "dropout of one": ("model.dropout", 1.0, ["model.dropout=1.0"]),
    "negative dropout": ("model.relu_dropout", -0.1, ["model.relu_dropout=-0.1"]),
    "no length": ("data.filter.max_length", 0, ["data.filter.max_length=0"]),
    "ratio below one": ("data.filter.max_ratio", 0.5, ["data.filter.max_ratio=0.5"]),
    "tiny vocabulary": ("tokenizer.vocab_size", 7, ["tokenizer.vocab_size=7"]),
    "low coverage": ("tokenizer.character_coverage", 0.5, ["tokenizer.character_coverage=0.5"]),
    "nan coverage": ("tokenizer.character_coverage", float("nan"), ["tokenizer.character_coverage=nan"]),
    "tiny target vocabulary": ("tokenizer.target.vocab_size", 7, ["tokenizer.target.vocab_size=7"]),
    "low target coverage": ("tokenizer.target.character_coverage", 0.5, ["tokenizer.target.character_coverage=0.5"]),
    "negative seed": ("train.seed", -1, ["train.seed=-1"]),
    "no steps": ("train.max_steps", 0, ["train.max_steps=0"]),
    "no rate": ("train.learning_rate", 0, ["train.learning_rate=0"]),
    "no rate's scale": ("train.learning_rate_scale", 0.0, ["train.learning_rate_scale=0.0"]),
    "no epsilon": ("train.adam_eps", 0.0, ["train.adam_eps=0"]),
    "negative weight decay": ("train.weight_decay", -0.1, ["train.weight_decay=-0.1"]),
    "endless weight decay": ("train.weight_decay", float("inf"), ["train.weight_decay=inf"]),
    "beta of one": ("train.adam_beta2", 1.0, ["train.adam_beta2=1.0"]),
    "smoothing of one": ("train.label_smoothing", 1.0, ["train.label_smoothing=1.0"]),
    "negative clip": ("train.clip_norm", -1.0, ["train.clip_norm=-1.0"]),
    "a decay that keeps nothing": ("train.ema_decay", 0.0, ["train.ema_decay=0.0"]),
    "a decay that moves nothing": ("train.ema_decay", 1.0, ["train.ema_decay=1.0"]),
    "nan decay": ("train.ema_decay", float("nan"), ["train.ema_decay=nan"]),
    "tag of a bare word": ("data.train", {"tag": "de"}, ["data.train.tag=de", "such as <bt>"]),
    "tag of two words": ("data.dev", {"tag": "<a b>"}, ["data.dev.tag=<a b>"]),
    "tag of nothing": ("data.train", {"tag": ""}, ["data.train.tag="]),
    "tag of marks": ("data.test", {"news": {"tag": "<->"}}, ["data.test.news.tag=<->"]),
    "tag of no ASCII": ("data.extra", {"bt": {"tag": "<\u00fc>"}}, ["data.extra.bt.tag=<\u00fc>"]),
    "tag with a line end": ("data.extra", {"bt": {"tag": "<bt>\n"}}, ["data.extra.bt.tag=<bt>"]),
    "tag that is EOS": ("data.extra", {"bt": {"tag": "</s>"}}, ["data.extra.bt.tag=</s>"]),
    "tag that is BOS": ("data.train", {"tag": "<s>"}, ["data.train.tag=<s>"]),
    "tag that is unknown": ("data.train", {"tag": "<unk>"}, ["data.train.tag=<unk>"]),
    "tag that is padding": ("data.train", {"tag": "<pad>"}, ["data.train.tag=<pad>"]),
    "files by number": ("data.train", {"src": 3}, ["data.train.src=3"]),
    "files by mapping": ("data.train", {"dataset": {"a": "b"}}, ["dataset={'a': 'b'}"]),
    "files in a list of lists": ("data.dev", {"src": [["a"]]}, ["src=[['a']]"]),
    "cold mixture": ("data.temperature", 0.5, ["data.temperature=0.5"]),
    "endless temperature": ("data.temperature", float("inf"), ["temperature=inf"]),
    "no threads": ("train.threads", 0, ["train.threads=0"]),
    "no patience": ("train.patience", 0, ["train.patience=0"]),
    "one checkpoint": ("train.keep_last", 1, ["train.keep_last=1"]),
    "too few to average": ("train.average", 6, ["train.keep_last=5", "train.average=6"]),
    "no beam": ("search.beam_size", 0, ["search.beam_size=0"]),
    "negative penalty": ("search.length_penalty", -0.1, ["search.length_penalty=-0.1"]),
    "no run": ("run_dir", "", ["run_dir"]),
    "no room": ("model.max_positions", 256, ["data.filter.max_length=256", "model.max_positions=256"]),
    "small step": ("train.tokens_per_step", 256, ["train.tokens_per_step=256", "data.filter.max_length=256"]),
    "small micro-batch": ("train.max_tokens", 256, ["train.max_tokens=256", "data.filter.max_length=256"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_from_json_refuses_a_bad_value_by_name(case: str) -> None:
    key, value, words = REFUSED[case]
    data: Any = copy.deepcopy(to_json(TrainJob()))
    *groups, last = key.split(".")
    place = data
    for group in groups:
        place = place[group]
    place[last] = value
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the words follow)
        from_json(TrainJob, data)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("data", [None, [], "x", 3, [["run_dir", "x"]]])
def test_from_json_refuses_a_job_that_is_no_mapping(data: object) -> None:
    with pytest.raises(ValueError, match="TrainJob"):
        from_json(TrainJob, data)


@pytest.mark.parametrize(
    ("key", "value"), [("d_model", 2), ("d_k", 1), ("dropout", 0.999), ("max_positions", 257), ("n_layers", 1)]
)
def test_from_json_takes_the_edge_of_what_is_allowed(key: str, value: Any) -> None:
    heads = {"n_heads": 1} if key == "d_model" else {}
    assert getattr(from_json(TrainJob, {"model": {key: value, **heads}}).model, key) == value


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        (ModelConfig(), (64, 64)),
        (ModelConfig(d_k=16), (16, 64)),
        (ModelConfig(d_v=32), (64, 32)),
        (ModelConfig(n_heads=7, d_k=16, d_v=32), (16, 32)),
    ],
    ids=["base", "d_k", "d_v", "free"],
)
def test_model_config_has_head_widths_of_the_model_unless_given(config: ModelConfig, widths: tuple[int, int]) -> None:
    assert (config.key_width, config.value_width) == widths


def test_model_config_has_a_decoder_as_deep_as_the_encoder_unless_given() -> None:
    assert ModelConfig(n_layers=3).decoder_layers == 3
    assert ModelConfig(n_layers=3, n_decoder_layers=1).decoder_layers == 1


# What may happen to each key of a training job when the run goes on under another value: r refuse, a allow, n note.
ON_RESUME = {
    "run_dir": "a",
    "init_from": "r",
    "model.n_layers": "r",
    "model.n_decoder_layers": "r",
    "model.d_model": "r",
    "model.d_ff": "r",
    "model.n_heads": "r",
    "model.d_k": "r",
    "model.d_v": "r",
    "model.score": "r",
    "model.activation": "r",
    "model.biases": "r",
    "model.dropout": "r",
    "model.attention_dropout": "r",
    "model.relu_dropout": "r",
    "model.norm": "r",
    "model.positions": "r",
    "model.max_positions": "r",
    "model.start": "r",
    "model.tie_embeddings": "r",
    "data.src_lang": "r",
    "data.tgt_lang": "r",
    "data.bleu_tokenize": "r",
    "data.scores": "a",
    "data.root": "a",
    "data.train.src": "a",
    "data.train.tgt": "a",
    "data.train.dataset": "a",
    "data.train.subset": "a",
    "data.train.split": "a",
    "data.train.src_lang": "a",
    "data.train.tgt_lang": "a",
    "data.train.augment": "a",
    "data.train.tag": "r",
    "data.dev.src": "a",
    "data.dev.tgt": "a",
    "data.dev.dataset": "a",
    "data.dev.subset": "a",
    "data.dev.split": "a",
    "data.dev.src_lang": "a",
    "data.dev.tgt_lang": "a",
    "data.dev.augment": "a",
    "data.dev.tag": "r",  # but see test_tags
    "data.devs.NAME.src": "a",
    "data.devs.NAME.tgt": "a",
    "data.devs.NAME.dataset": "a",
    "data.devs.NAME.subset": "a",
    "data.devs.NAME.split": "a",
    "data.devs.NAME.src_lang": "a",
    "data.devs.NAME.tgt_lang": "a",
    "data.devs.NAME.augment": "a",
    "data.devs.NAME.tag": "r",  # but see test_tags
    "data.test.NAME.src": "a",
    "data.test.NAME.tgt": "a",
    "data.test.NAME.dataset": "a",
    "data.test.NAME.subset": "a",
    "data.test.NAME.split": "a",
    "data.test.NAME.src_lang": "a",
    "data.test.NAME.tgt_lang": "a",
    "data.test.NAME.augment": "a",
    "data.test.NAME.tag": "r",  # the same
    "data.extra.NAME.src": "a",
    "data.extra.NAME.tgt": "a",
    "data.extra.NAME.dataset": "a",
    "data.extra.NAME.subset": "a",
    "data.extra.NAME.split": "a",
    "data.extra.NAME.src_lang": "a",
    "data.extra.NAME.tgt_lang": "a",
    "data.extra.NAME.augment": "a",
    "data.extra.NAME.tag": "r",
    "data.extra.NAME.weight": "r",
    "data.temperature": "r",
    "data.check": "a",
    "data.filter.max_length": "r",
    "data.filter.max_ratio": "r",
    "data.filter.drop_identical": "r",
    "data.filter.drop_duplicates": "r",
    "data.filter.doctor": "r",
    "data.store_dir": "a",
    "tokenizer.algorithm": "r",
    "tokenizer.vocab_size": "r",
    "tokenizer.normalization": "r",
    "tokenizer.byte_fallback": "r",
    "tokenizer.character_coverage": "r",
    "tokenizer.sample_lines": "r",
    "tokenizer.model": "a",
    "tokenizer.target.algorithm": "r",
    "tokenizer.target.vocab_size": "r",
    "tokenizer.target.normalization": "r",
    "tokenizer.target.byte_fallback": "r",
    "tokenizer.target.character_coverage": "r",
    "tokenizer.target.sample_lines": "r",
    "tokenizer.target.model": "a",
    "train.seed": "r",
    "train.max_steps": "a",
    "train.tokens_per_step": "r",
    "train.max_tokens": "n",
    "train.fit_memory": "a",
    "train.learning_rate": "r",
    "train.learning_rate_scale": "r",
    "train.warmup_steps": "r",
    "train.decay": "r",
    "train.optimizer": "r",
    "train.adam_beta1": "r",
    "train.adam_beta2": "r",
    "train.adam_eps": "r",
    "train.weight_decay": "r",
    "train.label_smoothing": "r",
    "train.clip_norm": "r",
    "train.subword_sampling": "r",
    **{f"train.augment.{name}": "r" for name in ("unmarked", "typos", "title", "upper", "noise")},
    "train.ema_decay": "r",
    "train.precision": "r",
    "train.device": "n",
    "train.layout": "r",
    "train.compile": "n",
    "train.cuda_graphs": "n",
    "train.kernels": "n",
    "train.threads": "n",
    "train.deterministic": "r",
    "train.prefetch": "a",
    "train.proof": "a",
    "train.profile": "a",
    "train.log_every": "a",
    "train.save_every": "a",
    "train.validate_every": "a",
    "train.keep_last": "a",
    "train.keep_best": "a",
    "train.metric": "a",
    "train.patience": "a",
    "train.average": "a",
    "train.samples": "a",
    "train.trackers": "a",
    "search.beam_size": "a",
    "search.length_penalty": "a",
    "search.max_extra": "a",
    "search.batch_tokens": "a",
    "search.engine": "a",
    "search.engine_type": "a",
    "search.cuda_graphs": "a",
    "plugins.NAME.KEY": "r",
}


def test_train_job_has_these_keys_and_policies_on_resume() -> None:
    assert {name: key.on_resume.name[0] for name, key in keys_of(TrainJob).items()} == ON_RESUME


@pytest.mark.parametrize(
    ("key", "generic"),
    [
        ("data.test.news-2014_x.src", "data.test.NAME.src"),
        ("data.extra.test.weight", "data.extra.NAME.weight"),
        ("data.devs.en_fr.src", "data.devs.NAME.src"),
        ("test.2014.tgt", "test.NAME.tgt"),
        ("data.train.src", "data.train.src"),
        ("train.test.x.src", "train.test.x.src"),
    ],
)
def test_generic_key_replaces_the_name_of_a_set(key: str, generic: str) -> None:
    assert generic_key(key) == generic


def test_option_refuses_on_resume_unless_it_says_otherwise() -> None:
    """A key that nobody thought about must not change under way."""
    assert option(1, "a key").metadata["on_resume"] is OnResume.refuse


def test_search_override_replaces_the_settings_of_the_run() -> None:
    run = SearchConfig(beam_size=7, length_penalty=1.0, max_extra=9, batch_tokens=99)
    assert SearchOverride().over(run) == run
    assert SearchOverride(beam_size=1, length_penalty=0.0).over(run) == SearchConfig(1, 0.0, 9, 99)
    with pytest.raises(ValueError, match=r"search\.beam_size=0"):
        SearchOverride(beam_size=0)


def test_from_json_gives_back_a_sweep() -> None:
    job = EvaluateJob(sweep=SweepConfig(beam_size=[1, 4], length_penalty=[0.0, 0.6]), format=Format.json)
    assert through_json(job) == job
    data = to_json(job)
    data["sweep"]["beam_size"] = [1, "4"]
    with pytest.raises(ValueError, match=r"EvaluateJob\.sweep\.beam_size\[1\]='4' is not of type int"):
        from_json(EvaluateJob, data)


@pytest.mark.parametrize("kind", [Activation, Norm, Positions, Decay, Precision, Device, Algorithm, Metric, Format])
def test_settings_name_choices_as_they_are_typed(kind: Any) -> None:
    assert all(member.name == member.value == member.name.lower() for member in kind)


def test_train_job_shares_nothing_with_another() -> None:
    first, second = TrainJob(), TrainJob()
    first.data.test["news"] = PairConfig("a", "b")
    first.model.d_model = 2
    assert (second.data.test, second.model.d_model) == ({}, 512)
