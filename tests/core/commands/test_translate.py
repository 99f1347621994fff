"""Text in, text out: a tiny model with random weights under a real tokenizer: what is tested is the plumbing."""

import io
import json
import logging
import math
import os
import random
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import transformer
from support.corpora import run_command
from support.translations import CONFIG, SEARCH, network, sentences, state_of, translator_with, write_run
from transformer.average import average
from transformer.checkpoint import commit, find_checkpoint
from transformer.config.jobs import AverageJob, EvaluateJob, ScoredText, TrainJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.config.settings import (
    DataConfig,
    Device,
    FilterConfig,
    Format,
    LayoutKind,
    Metric,
    ModelConfig,
    PairConfig,
    Precision,
    SearchConfig,
    SearchOverride,
)
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.loading import load_translator
from transformer.decoding.output import BLANK, Translation
from transformer.decoding.search import Hypothesis, beam_search, length_penalty, sweep_penalties
from transformer.decoding.translate_stream import run as translate
from transformer.decoding.translator import Translator
from transformer.distributed import World
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.score import measure, score
from transformer.evaluation.sets import (
    digest_sets,
    evaluate,
    format_results,
    keep_translations,
    read_sets,
    score_sets,
    translate_pairs,
    write_sets,
)
from transformer.files import write_json
from transformer.layout import Padded
from transformer.model.transformer import parameters_by_name
from transformer.plugins import ScoreSettings
from transformer.records import Best, Resolved, Results, RunRecord, Scores, Validation
from transformer.run_dir import RunDir
from transformer.vocabulary import BOS, EOS, PAD


@pytest.fixture(scope="module")
def run_dir(spm: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, their stand-in for an average, and two test sets."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(spm)
    size = Tokenizer(spm).vocab_size
    config = to_json(TrainJob(model=CONFIG, search=SEARCH, data=DataConfig(filter=FilterConfig(max_length=50))))
    for step in (10, 20, 30):
        model = {"model": parameters_by_name(network(size, step))}
        commit(folder, step=step, tensors=model, state=state_of(size), config=config)
    average = state_of(size, averaged=[20, 30])
    mean = {"model": parameters_by_name(network(size, 25))}
    commit(folder, averaged=True, step=30, tensors=mean, state=average, config=config)
    RunDir(folder).write_best(Best(20, Metric.bleu))
    pairs = [(text, text) for text in sentences(12)]
    write_sets(RunDir(folder), {"dev": pairs, "news": pairs, "talks": [*pairs[:5], ("", "")]})
    return folder


def job(run_dir: Path, **changes: Any) -> TranslateJob:
    return TranslateJob(run_dir=str(run_dir), device=Device.cpu, precision=Precision.fp32, threads=1, **changes)


# --- the other sentences of a batch change a translation by rounding alone


def test_translator_finds_the_same_in_any_batch_order_and_padding(translator: Translator) -> None:
    texts = sentences(40)
    sources = translator.tokenizers.source.encode(texts)
    alone = translator.with_search(replace(SEARCH, batch_tokens=1))
    expected = alone.hypotheses(sources, n_best=2)
    assert len({tuple(best.tokens) for best, _ in expected}) > 30
    assert {best.finished for best, _ in expected} == {True, False}
    for batch_tokens in (300, 10**6):
        order = random.Random(batch_tokens).sample(range(40), 40)
        other = translator.with_search(replace(SEARCH, batch_tokens=batch_tokens))
        found = other.hypotheses([sources[n] for n in order], n_best=2)
        for n, hypotheses in zip(order, found, strict=True):
            for one, wanted in zip(hypotheses, expected[n], strict=True):
                assert (one.tokens, one.finished) == (wanted.tokens, wanted.finished)
                assert one.log_prob == pytest.approx(wanted.log_prob, rel=1e-12)


def test_translator_in_float32_agrees_up_to_its_rounding(translator: Translator) -> None:
    texts = sentences(30)
    single = translator_with(
        translator.model.float(), translator.tokenizers.source, search=replace(SEARCH, batch_tokens=1)
    )
    together = single.with_search(replace(SEARCH, batch_tokens=10**6))
    pairs = list(zip(single.translate(texts), together.translate(texts), strict=True))
    assert sum(one == other for one, other in pairs) == 30


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_hypotheses_of_batches_side_by_side_are_those_of_one_after_the_other(
    translator: Translator, two_threads: None
) -> None:
    many = translator.with_search(replace(SEARCH, batch_tokens=100))
    ids = translator.tokenizers.source.encode(sentences(30))
    checks: list[int] = []
    found = many.hypotheses(ids, n_best=2, check=lambda: checks.append(torch.get_num_threads()))
    assert torch.get_num_threads() == 2
    assert len(checks) > 5
    assert set(checks) == {2}, "the thread that asks keeps its threads"

    torch.set_num_threads(1)
    expected = many.hypotheses(ids, n_best=2)
    assert [[h.tokens for h in of_one] for of_one in found] == [[h.tokens for h in of_one] for of_one in expected]
    torch.set_num_threads(2)


def test_hypotheses_end_with_the_error_of_a_check(translator: Translator, two_threads: None) -> None:
    many = translator.with_search(replace(SEARCH, batch_tokens=100))
    calls: list[int] = []

    def fail_at_the_fifth() -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        many.hypotheses(translator.tokenizers.source.encode(sentences(60)), n_best=1, check=fail_at_the_fifth)
    assert len(calls) == 5
    assert torch.get_num_threads() == 2


def test_translator_equals_a_search_by_hand(translator: Translator) -> None:
    """One sentence, its tensors written out: source with EOS, lengths by the rule of section 6.1."""
    text = "two old dog near the tree"
    ids = translator.tokenizers.source.encode([text])[0]
    model = translator.model.eval()
    layout = Padded.of([len(ids) + 1], len(ids) + 1)
    with torch.inference_mode():
        memory = model.encode(torch.tensor([[*ids, EOS]]), layout)
        [expected] = beam_search(
            model.decode_step,
            model.start(memory, layout, beam_size=4),
            beam_size=4,
            n_best=3,
            max_lengths=torch.tensor([len(ids) + 8]),
            penalty=length_penalty(0.6),
            bos=BOS,
            eos=EOS,
        )
    assert translator.translate([text]) == translator.tokenizers.source.decode([expected[0].tokens])
    assert translator.hypotheses([ids], n_best=3) == [expected]
    assert len(expected) == 3
    assert not {PAD, BOS, EOS} & {token for hypothesis in expected for token in hypothesis.tokens}


def test_hypotheses_are_ranked_by_the_penalty_that_is_given(translator: Translator) -> None:
    """A penalty that grows fast prefers long translations, as a large alpha does; without one, alpha decides."""
    sources = translator.tokenizers.source.encode(sentences(6))
    steep = translator.with_search(replace(translator.search, length_penalty=3.0))

    def found(of: Translator, penalty: Callable[[int], float] | None = None) -> list[list[int]]:
        hypotheses = of.hypotheses(sources, n_best=1, penalty=penalty)
        return [best.tokens for [best] in hypotheses]

    assert found(translator, lambda length: ((5 + length) / 6) ** 3) == found(steep)
    assert found(steep, lambda length: ((5 + length) / 6) ** 0.6) == found(translator) != found(steep)


def test_translator_keeps_batches_within_batch_tokens(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    encode = translator.decoder.ready[0].encode

    def noted(x: Tensor, layout: Padded) -> Tensor:
        shapes.append(tuple(x.shape))
        return encode(x, layout)

    monkeypatch.setattr(translator.decoder.ready[0], "encode", noted)
    texts = sentences(40)
    found = translator.with_search(replace(SEARCH, batch_tokens=200)).translate(texts)
    assert len(found) == sum(rows for rows, _ in shapes) == 40
    assert all(rows * 4 * width <= 200 or rows == 1 for rows, width in shapes)
    assert len(shapes) < 40


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16, Precision.fp16])
def test_translator_translates_in_other_arithmetic(translator: Translator, precision: Precision) -> None:
    fast = translator_with(translator.model.float(), translator.tokenizers.source, precision=precision)
    assert len([text for text in fast.translate(sentences(10)) if text]) > 5


class Casts(TorchDispatchMode):
    """Counts how often each tensor was cast, by its place in memory, which is kept so that no other takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[int]()
        self.kept: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.counts[args[0].data_ptr()] += 1
            self.kept.append(args[0].untyped_storage())
        return function(*args, **(kwargs or {}))


def test_translator_casts_weights_once_and_not_at_each_step(translator: Translator) -> None:
    small = replace(SEARCH, batch_tokens=300)
    with Casts() as casts:
        half = translator_with(
            translator.model.float(), translator.tokenizers.source, search=small, precision=Precision.bf16
        )
        assert len(half.translate(sentences(8))) == 8
    matrices = [p.data_ptr() for name, p in half.model.named_parameters() if "W_" in name and p.dim() == 2]
    assert len(matrices) == 16  # of a layer of each kind: twelve of attention, four of feed-forward networks
    assert [casts.counts[matrix] for matrix in matrices] == [1] * 16


# --- several length penalties at once


def test_translate_sweep_gives_what_each_alpha_would_give_alone(translator: Translator) -> None:
    alphas = [1.4, 0.0, 0.6, 8.0]
    texts = [*sentences(30), "", "\u200b", *sentences(5)]
    small = translator.with_search(replace(SEARCH, batch_tokens=600))
    found = small.translate_sweep(texts, alphas)
    assert list(found) == alphas
    for alpha in alphas:
        assert found[alpha] == small.with_search(replace(small.search, length_penalty=alpha)).translate(texts)
        assert found[alpha][30:32] == ["", ""]
    assert len({tuple(translations) for translations in found.values()}) > 2


def test_translate_sweep_searches_once(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    searched: list[int] = []
    encode = translator.decoder.ready[0].encode

    def noted(x: Tensor, layout: Padded) -> Tensor:
        rows.append(len(x))
        return encode(x, layout)

    def counted(*batch: Any, **how: Any) -> list[list[Hypothesis]]:
        searched.append(1)
        return sweep_penalties(*batch, **how)

    monkeypatch.setattr(translator.decoder.ready[0], "encode", noted)
    monkeypatch.setattr("transformer.decoding.batched.sweep_penalties", counted)
    small = translator.with_search(replace(SEARCH, batch_tokens=600))
    small.translate_sweep(sentences(40), [0.0, 0.6, 1.0])
    assert sum(rows) == 40
    assert len(searched) == len(rows) > 1


@pytest.mark.parametrize(
    ("texts", "alphas", "message"),
    [
        ("a dog", [0.6], r"^texts must be a list of texts: for a single one, give \[text\]"),
        (["a dog"], [], "at least one length penalty"),
        (["a dog"], [0.6, -0.1], r"^length_penalty=-0\.1 must be at least 0"),
        (["a dog"], ["0.6"], "^length_penalty='0.6' must be a number$"),
        (["a dog"], [0.6, None], "^length_penalty=None must be a number$"),
    ],
)
def test_translate_sweep_refuses(translator: Translator, texts: Any, alphas: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        translator.translate_sweep(texts, alphas)


# --- what never reaches the model, and what is cut


@pytest.mark.parametrize(
    "blank", ["", " ", "\t", "\u3000", "\u200b", "\ufeff\u200b ", "\x00", "\r", "\u2028", "\u202e"]
)
def test_translator_gives_blank_for_blank_without_the_model(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, blank: str
) -> None:
    monkeypatch.setattr(translator.decoder.ready[0], "encode", None)
    assert translator.translate([blank, "", blank]) == ["", "", ""]
    assert translator.translate([]) == []


def test_translator_cuts_a_source_too_long_and_reports_it(
    translator: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    long = " ".join(["dog"] * 200)
    cut = translator.tokenizers.source.decode([translator.tokenizers.source.encode([long])[0][:59]])[0]
    texts = ["a cat .", long, "a dog .", cut]
    with caplog.at_level(logging.WARNING):
        found = translator.translate(texts, first_line=41)
    assert found[1] == found[3] != ""
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["line 42"]
    with pytest.raises(InputError, match=r"line 42: \d+ pieces"):
        translator.translate(texts, first_line=41, strict=True)


def test_translator_writes_no_more_than_the_model_can(translator: Translator) -> None:
    """Sources up to the model's last position, translations that never end."""
    model = translator.model
    norm = "decoder.0.feed_forward_norm"
    with torch.no_grad():
        model.get_parameter(f"{norm}.weight").zero_()
        model.get_parameter(f"{norm}.bias").fill_(1.0)
        model.output[:] = torch.arange(model.vocab_size).eq(7).unsqueeze(1).double()  # piece 7, always
    wordy = translator_with(model, translator.tokenizers.source, search=replace(SEARCH, max_extra=1_000))
    [[hypothesis]] = wordy.hypotheses([[5] * 59], n_best=1)
    assert (hypothesis.tokens, hypothesis.finished) == ([7] * 60, False)


def test_translator_stops_when_asked_and_leaves_the_model_as_it_was(translator: Translator) -> None:
    model = translator.model.train()
    small = translator_with(model, translator.tokenizers.source, search=replace(SEARCH, batch_tokens=1))
    asked: list[int] = []

    def at_the_third() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small.translate(sentences(9), check=at_the_third)
    assert len(asked) == 3
    expected = small.translate(sentences(9))
    assert model.training

    evaluated = translator_with(model.eval(), translator.tokenizers.source, search=small.search)
    assert evaluated.translate(sentences(9)) == expected  # no dropout while it translates
    assert not model.training


def test_translator_says_how_to_need_less_gpu_memory(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(translator.decoder.ready[0], "encode", too_much)
    with pytest.raises(
        InputError, match=r"^out of GPU memory while translating: lower search.batch_tokens \(now \d+\)$"
    ):
        translator.translate(sentences(2))


# --- from a run directory


def weights(translator: Translator) -> list[float]:
    return translator.model.output[:2, 0].tolist()


@pytest.mark.parametrize(
    ("name", "seed"),
    [("auto", 25), ("averaged", 25), ("last", 30), ("best", 20), ("step-10", 10), ("step-00000010", 10)],
)
def test_load_translator_chooses_the_checkpoint(run_dir: Path, name: str, seed: int) -> None:
    options: dict[str, Any] = {"search": SearchOverride(beam_size=2), "device": Device.cpu, "precision": Precision.fp32}
    found = load_translator(run_dir, checkpoint=name, **options)
    assert weights(found) == network(found.tokenizers.source.vocab_size, seed).output[:2, 0].tolist()
    assert found.search == SearchConfig(beam_size=2, length_penalty=0.6, max_extra=8, batch_tokens=2_000)
    assert not found.model.training


def record(folder: Path, device: Device, precision: Precision) -> RunRecord:
    """run.json of a run whose tokenizer is the one in `folder`."""
    resolved = Resolved(
        device=device,
        precision=precision,
        threads=1,
        max_tokens=1000,
        layout=LayoutKind.packed,
        compile=False,
        micro_batch_multiple=1,
    )
    return RunRecord(
        format=2,
        id="0",
        started="",
        versions={},
        data_digest="0",
        prepare_version=1,
        tokenizer_sha256=sha256((folder / "tokenizer.model").read_bytes()).hexdigest(),
        init_from=None,
        resolved=resolved,
        config=TrainJob(),
    )


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        (Device.cpu, Precision.fp64, Precision.fp64),
        (Device.cpu, Precision.fp16, Precision.fp16),
        (Device.cuda, Precision.fp16, Precision.fp32),  # another kind of device: by rule
        (Device.cpu, Precision.bf16, Precision.fp32),  # this one does not multiply it
        (None, None, Precision.fp32),  # a model can be used without run.json
    ],
)
def test_translator_computes_as_the_run_did(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: Device | None,
    precision: Precision | None,
    expected: Precision,
) -> None:
    monkeypatch.setattr("transformer.compute._cpu_multiplies_bf16", lambda: False)
    own = Path(shutil.copytree(run_dir, tmp_path / "run"))
    if device is not None and precision is not None:
        RunDir(own).write_record(record(own, device, precision))
    translator = load_translator(
        own, checkpoint="last", search=SearchOverride(), device=Device.cpu, precision=Precision.auto
    )
    assert translator.precision is expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_sha256": "0" * 64}, r"tokenizer\.model: not the tokenizer of this run"),
        ({"resolved": {"precision": "fp64"}}, r"run\.json: .*resolved has no key 'device'"),
        ({"format": 1}, r"run\.json: written by another version of this package \(format 1, not 2\)"),
        ({"colour": "red"}, r"run\.json: .*unknown keys: \['colour'\]"),
    ],
)
def test_translator_refuses_a_run_record_that_is_wrong(
    run_dir: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    own = Path(shutil.copytree(run_dir, tmp_path / "run"))
    write_json(own / "run.json", to_json(record(own, Device.cpu, Precision.fp32)) | change)
    with pytest.raises(CheckpointError, match=message):
        load_translator(own, checkpoint="last", search=SearchOverride(), device=Device.cpu, precision=Precision.fp32)


@pytest.mark.parametrize("place", ["run.json", "results.json", "step-00000040", "averaged"])
def test_what_another_version_wrote_is_refused_with_its_name(
    run_dir: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the commit is another, as of code that was changed."""
    own = RunDir(Path(shutil.copytree(run_dir, tmp_path / "run")))
    monkeypatch.setattr("transformer.run_dir.source_commit", lambda _: "c0de")
    written = to_json(record(own.path, Device.cpu, Precision.fp32))
    read: Callable[[], object] = own.read_record
    if place == "run.json":
        written["config"]["model"]["kv_heads"] = 2
    elif place == "results.json":
        write_json(own.results, {"kv_heads": 2})
        read = own.read_results
    else:
        size = Tokenizer.load(own.tokenizer).vocab_size
        model = {"model": parameters_by_name(network(size, 1))}
        config = {"model": {**to_json(CONFIG), "kv_heads": 2}}
        is_average = place == "averaged"
        made = commit(own.path, step=40, tensors=model, state=state_of(size), config=config, averaged=is_average)
        read = partial(made.settings, "model", ModelConfig)

    for version, its_commit in (("9.9.9", None), (transformer.__version__, "feed-dirty")):
        write_json(own.record, written | {"versions": {"transformer-mt": version}, "commit": its_commit})
        theirs = version if its_commit is None else f"{version}, commit {its_commit}"
        with pytest.raises(CheckpointError) as raised:
            read()
        assert str(raised.value).endswith(
            f"has unknown keys: ['kv_heads'] (the run was begun by version {theirs}; "
            f"this is version {transformer.__version__}, commit c0de)"
        )

    unknown: dict[str, object] = {"versions": []}
    for same in ({"versions": {"transformer-mt": transformer.__version__}, "commit": "c0de"}, unknown):
        write_json(own.record, written | same)
        with pytest.raises(CheckpointError, match=r"(has unknown keys: \['kv_heads'\]|versions=.*)$"):
            read()


def test_translator_refuses_one_flipped_bit_of_the_tokenizer(run_dir: Path, tmp_path: Path) -> None:
    """Most of them would silently give other pieces or another text."""
    own = Path(shutil.copytree(run_dir, tmp_path / "run"))
    RunDir(own).write_record(record(own, Device.cpu, Precision.fp32))
    sound = (own / "tokenizer.model").read_bytes()
    for place in range(0, len(sound), len(sound) // 50):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        (own / "tokenizer.model").write_bytes(damaged)
        with pytest.raises((CheckpointError, InputError), match=r"tokenizer\.model"):
            load_translator(
                own, checkpoint="last", search=SearchOverride(), device=Device.cpu, precision=Precision.fp32
            )


def test_translator_refuses_weights_that_are_not_finite(run_dir: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(run_dir, tmp_path / "run"))
    size = Tokenizer.load(own / "tokenizer.model").vocab_size
    tensors = {name: tensor.clone() for name, tensor in parameters_by_name(network(size, 1)).items()}
    tensors["encoder.0.feed_forward.W_1.bias"][3] = math.nan
    config = to_json(TrainJob(model=CONFIG, search=SEARCH, data=DataConfig(filter=FilterConfig(max_length=50))))
    commit(own, step=40, tensors={"model": tensors}, state=state_of(size), config=config)
    with pytest.raises(CheckpointError, match=r"step-00000040/model.*W_1\.bias.* not finite"):
        load_translator(own, checkpoint="last", search=SearchOverride(), device=Device.cpu, precision=Precision.fp32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 50}, "made for another tokenizer"),
        ({"d_ff": 16}, r"settings describe a model of 7200 parameters, but it holds 8256"),
        ({"n_layers": 2}, r"settings describe a model of 13632 parameters, but it holds 8256"),
        ({"n_decoder_layers": 2}, r"settings describe a model of 11472 parameters, but it holds 8256"),
        ({"n_layers": "6"}, "n_layers='6' is not of type int"),
        ({"code": 1}, r"unknown keys: \['code'\]"),
    ],
)
def test_load_translator_refuses_what_does_not_fit(
    tmp_path: Path, spm: bytes, change: dict[str, object], message: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm)
    size = Tokenizer(spm).vocab_size
    config = {"model": {**to_json(CONFIG), **change}, "search": to_json(SEARCH)}
    vocab_size = config["model"].pop("vocab_size", size)
    model = {"model": parameters_by_name(network(size, 1))}
    commit(tmp_path, step=1, tensors=model, state=state_of(vocab_size), config=config)
    options: dict[str, Any] = {"search": SearchOverride(), "device": Device.cpu, "precision": Precision.fp32}
    with pytest.raises(CheckpointError, match=message):
        load_translator(tmp_path, checkpoint="last", **options)


@pytest.mark.parametrize("command", ["evaluate", "average"])
def test_evaluate_and_average_name_settings_that_are_not_there(command: str, tmp_path: Path, spm: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm)
    size = Tokenizer(spm).vocab_size
    config = {"model": to_json(CONFIG), "search": to_json(SEARCH)}
    model = {"model": parameters_by_name(network(size, 1))}
    commit(tmp_path, step=1, tensors=model, state=state_of(size), config=config)
    missing = {"evaluate": "data", "average": "train"}[command]
    with pytest.raises(CheckpointError, match=rf"step-00000001/config\.json: not the settings of a run: '{missing}'"):
        evaluate(evaluation(tmp_path)) if command == "evaluate" else average(AverageJob(run_dir=str(tmp_path)))


def test_find_checkpoint_passes_over_a_damaged_average(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied = shutil.copytree(run_dir, tmp_path / "copied")
    (copied / "averaged" / "state.json").write_text("{}", encoding="utf-8")
    assert find_checkpoint(copied, "auto").path.name == "step-00000030"
    assert "averaged/state.json" in caplog.text
    with pytest.raises(CheckpointError, match=r"averaged/state\.json"):
        find_checkpoint(copied, "averaged")


# --- the command


def nasty_lines(n: int) -> list[bytes]:
    draw = random.Random(n)
    special = ["", " ", "\t ", "\u3000", "\u200b", "\ufeff", "\u00a0", "\u2028", "\u0085", "\r", "\x0b\x0c", "\x00"]
    special += ["<s>", "</s>", "<unk>", "<pad>", "▁", "⁇", " ⁇ ", "a\rb", "a\u2028b", "a\x85b", "a\x00b", "\u202eabc"]
    special += ["dog " * 25_000, "x" * 100_000, "👩‍👩‍👧", "e\u0301" * 30, "a dog .\r"]
    lines = [text.encode("utf-8") for text in special]
    lines += [draw.randbytes(draw.randint(1, 80)).replace(b"\n", b"") for _ in range(n // 3)]
    lines += [text.encode("utf-8") for text in sentences(n - len(lines))]
    return draw.sample(lines, len(lines))


def test_translate_gives_as_many_lines_as_it_is_given_whatever_the_bytes(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = nasty_lines(150)
    stdout = io.BytesIO()
    with caplog.at_level(logging.WARNING):
        translate(job(run_dir), io.BytesIO(b"\n".join(lines)), stdout)  # no newline at the end
    assert stdout.getvalue().endswith(b"\n")
    found = stdout.getvalue().decode("utf-8").split("\n")[:-1]
    assert len(found) == len(lines) == 150
    assert not any("\r" in text for text in found)
    translator = load_translator(
        run_dir, checkpoint="auto", search=SearchOverride(), device=Device.cpu, precision=Precision.fp32
    )
    for line, text in list(zip(lines, found, strict=True))[::7]:  # in order: each as it is alone
        assert translator.translate([line.decode("utf-8", "replace")]) == [text]
    blank = [text for line, text in zip(lines, found, strict=True) if not line.decode("utf-8", "replace").strip()]
    assert set(blank) == {""}
    bad = {n for n, line in enumerate(lines, start=1) if line.decode("utf-8", "ignore").encode("utf-8") != line}
    reported = [record.getMessage() for record in caplog.records if "not UTF-8" in record.getMessage()]
    assert reported == [text for n in sorted(bad) for text in reported if text.startswith(f"line {n}: ")]
    assert len(reported) == len(bad) > 25


@pytest.mark.parametrize(
    ("given", "n_lines"), [(b"", 0), (b"\n", 1), (b"\n\n", 2), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"a\n\n\nb\n", 4)]
)
def test_translate_ends_lines_at_the_newline_only(run_dir: Path, given: bytes, n_lines: int) -> None:
    stdout = io.BytesIO()
    translate(job(run_dir), io.BytesIO(given), stdout)
    assert stdout.getvalue().count(b"\n") == n_lines


def test_translate_joins_lines_that_the_pipe_cut_anywhere(run_dir: Path) -> None:
    given = b"\n".join(nasty_lines(60)[:40]) + b"\n"

    class Dripping(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return super().read1(random.Random(self.tell()).choice((1, 7, 50, 60_000)))

    expected, found = io.BytesIO(), io.BytesIO()
    translate(job(run_dir), io.BytesIO(given), expected)
    translate(job(run_dir), Dripping(given), found)
    assert found.getvalue() == expected.getvalue()


@pytest.mark.parametrize("size", [1, 2, 1 << 20])
def test_translate_takes_a_byte_order_mark_for_no_text(run_dir: Path, size: int) -> None:
    """As `data.train.src` does. A pipe may hand out the mark in pieces; inside the text it is a character."""

    class Pieces(io.BytesIO):
        def read1(self, _: int | None = -1, /) -> bytes:
            return super().read1(size)

    for given in (b"the dog .\ntwo cat\n", b"", b"\xef\xbb\n", b"a\n\xef\xbb\xbfa\n"):
        expected, found = io.BytesIO(), io.BytesIO()
        translate(job(run_dir), io.BytesIO(given), expected)
        translate(job(run_dir), Pieces(b"\xef\xbb\xbf" + given), found)
        assert found.getvalue() == expected.getvalue()


def on_pipes(talk: Callable[[int, int], None], job: TranslateJob) -> BaseException | None:
    """Run the command between two pipes while `talk` holds their other ends; what the command raised, if anything."""
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    raised: list[BaseException] = []

    def command() -> None:
        stdin, stdout = os.fdopen(read_in, "rb"), os.fdopen(write_out, "wb")  # buffered, as the standard streams are
        try:
            translate(job, stdin, stdout)
        except BaseException as error:
            raised.append(error)
        finally:
            stdin.close()
            with suppress(BrokenPipeError):
                stdout.close()

    thread = threading.Thread(target=command, daemon=True)
    thread.start()
    talk(write_in, read_out)
    thread.join(timeout=60)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_translate_answers_before_the_input_ends(run_dir: Path) -> None:
    def talk(write_in: int, read_out: int) -> None:
        for line in (b"the dog .\n", b"two cat\n\n"):
            os.write(write_in, line)
            answer = b""
            while answer.count(b"\n") < line.count(b"\n"):
                answer += os.read(read_out, 4096)
        os.close(write_in)
        assert os.read(read_out, 1) == b""
        os.close(read_out)

    assert on_pipes(talk, job(run_dir)) is None


def test_translate_ends_when_its_reader_leaves(run_dir: Path) -> None:
    def talk(write_in: int, read_out: int) -> None:
        os.close(read_out)
        os.write(write_in, b"the dog .\n")
        os.close(write_in)

    assert isinstance(on_pipes(talk, job(run_dir)), BrokenPipeError)  # the dispatcher ends quietly on it


def test_translate_strict_names_the_line(run_dir: Path) -> None:
    text = b"a dog\n" * 3 + b"dog " * 300 + b"\n"
    with pytest.raises(InputError, match=r"line 4: \d+ pieces"):
        translate(job(run_dir, strict=True), io.BytesIO(text), io.BytesIO())


@pytest.mark.parametrize("is_bulk", [False, True])
@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        ("a\nb\n\nc\n", ["3 of 3 translations are empty: the model has hardly learnt"]),
        ("a\nb\n\nlearnt\n", []),
        ("\n \n", []),
        ("", []),
    ],
)
def test_translate_warns_where_all_translations_are_empty(
    text: str,
    warnings: list[str],
    is_bulk: bool,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def search(self: Translator, texts: Sequence[str], n: int, **how: Any) -> list[list[Translation]]:
        return [[replace(BLANK, text="gelernt" if text == "learnt" else "")] for text in texts]

    monkeypatch.setattr(Translator, "translate_n_best", search)
    (tmp_path / "in").write_text(text)
    files = {"input": str(tmp_path / "in"), "output": str(tmp_path / "out")} if is_bulk else {}
    translate(job(run_dir, **files), io.BytesIO(text.encode()), io.BytesIO())
    assert [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING] == warnings


def test_translate_passes_search_overrides_to_the_search(run_dir: Path) -> None:
    outputs = []
    for search in (SearchOverride(), SearchOverride(beam_size=1), SearchOverride(max_extra=1)):
        stdout = io.BytesIO()
        translate(job(run_dir, search=search), io.BytesIO("\n".join(sentences(30)).encode()), stdout)
        outputs.append(stdout.getvalue())
    assert len(set(outputs)) == 3


# --- evaluation


def evaluation(run_dir: Path, **changes: Any) -> EvaluateJob:
    return EvaluateJob(run_dir=str(run_dir), device=Device.cpu, precision=Precision.fp32, threads=1, **changes)


def test_evaluate_scores_the_run_s_sets(run_dir: Path) -> None:
    results = evaluate(evaluation(run_dir))
    assert list(results.test_sets) == ["news", "talks"]
    assert results.averaged == [20, 30]
    assert results.search == SEARCH
    news, talks = results.test_sets["news"], results.test_sets["talks"]
    assert format_results(run_dir, results).splitlines() == [
        f"news   BLEU {news.bleu:.2f}, chrF {news.chrf:.2f}, chrF++ {news.chrf_plus_plus:.2f}, TER {news.ter:.2f}",
        f"talks  BLEU {talks.bleu:.2f}, chrF {talks.chrf:.2f}, chrF++ {talks.chrf_plus_plus:.2f}, TER {talks.ter:.2f}",
        f"  model: {run_dir}, mean of steps 20, 30, seed 1, data unknown",
        "  search: beam 4, alpha 0.6, source + 8 at most",
        f"  BLEU: {news.bleu_signature}",
        f"  chrF: {news.chrf_signature}",
        f"  chrF++: {news.chrf_plus_plus_signature}",
        f"  TER: {news.ter_signature}",
    ]
    assert not list((run_dir / "hypotheses").glob("*.hyp"))


@pytest.mark.plugins
@pytest.mark.needs("sacremoses")
def test_evaluate_scores_as_it_is_told(run_dir: Path) -> None:
    """In the language that is given, without case, with the papers' BLEU beside the score."""
    german = evaluate(evaluation(run_dir, lowercase=True, paper_bleu=True)).test_sets["news"]
    assert "|case:lc|eff:no|tok:13a|" in german.bleu_signature
    assert "|case:lc|" in german.chrf_signature
    assert german.paper_bleu_signature is not None
    assert "|case:lc|eff:no|tok:moses-de+hyphens-split|" in german.paper_bleu_signature
    chinese = evaluate(evaluation(run_dir, data=ScoredText(tgt_lang="zh-Hant"))).test_sets["news"]
    assert "|case:mixed|eff:no|tok:zh|" in chinese.bleu_signature


def test_evaluate_scores_each_set_in_its_own_language(run_dir: Path, tmp_path: Path) -> None:
    """What is said of a set counts before what is said of all; and each signature says of which sets it is."""
    for name in ("src", "tgt"):
        (tmp_path / name).write_text("今天天气很好。\n", encoding="utf-8")
    files = str(tmp_path / "src"), str(tmp_path / "tgt")
    sets = {"one": PairConfig(*files), "two": PairConfig(*files, tgt_lang="zh"), "three": PairConfig(*files)}
    results = evaluate(evaluation(run_dir, test=sets, data=ScoredText(tgt_lang="fr")))
    tokenizers = [re.findall(r"tok:(\w+)", scores.bleu_signature)[0] for scores in results.test_sets.values()]
    assert tokenizers == ["13a", "zh", "13a"]
    printed = format_results(run_dir, results)
    assert f"\n  one, three: BLEU: {results.test_sets['one'].bleu_signature}\n" in printed
    assert f"\n  two: BLEU: {results.test_sets['two'].bleu_signature}\n" in printed
    assert f"\n  chrF: {results.test_sets['two'].chrf_signature}\n" in printed


def test_evaluate_prints_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("evaluate", evaluation(run_dir, format=Format.json))
    found = json.loads(capsys.readouterr().out)
    assert list(found["test_sets"]) == ["news", "talks"]
    names = ("bleu", "chrf", "chrf_plus_plus", "ter", "paper_bleu")
    assert list(found["test_sets"]["news"]) == [
        *(key for name in names for key in (name, f"{name}_signature")),
        *("others", "judges"),
    ]
    assert (found["averaged"], found["search"]["beam_size"]) == ([20, 30], 4)


def test_evaluate_scores_other_files(run_dir: Path, tmp_path: Path) -> None:
    src, tgt = tmp_path / "src", tmp_path / "tgt"
    src.write_bytes(b"a dog\nthe cat .\n")
    tgt.write_bytes(b"ein Hund\ndie Katze.\n")
    results = evaluate(evaluation(run_dir, checkpoint="step-20", test={"mine": PairConfig(str(src), str(tgt))}))
    assert list(results.test_sets) == ["mine"]
    assert (results.averaged, results.steps, results.checkpoint) == ([], 20, "step-00000020")
    assert f"\n  model: {run_dir}, step 20, seed 1, data unknown\n" in format_results(run_dir, results)
    assert list(read_sets(RunDir(run_dir))) == ["news", "talks"]


@pytest.mark.parametrize(("given", "place"), [(True, "elsewhere"), (False, "runs/.store")])
def test_evaluate_copies_a_data_set_to_where_it_is_told(given: bool, place: str, spm: bytes, tmp_path: Path) -> None:
    """Or beside the run: never to where the checkpoint says, which may come from anybody."""
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(spm)
    size = Tokenizer(spm).vocab_size
    data = DataConfig(filter=FilterConfig(max_length=50), store_dir=str(tmp_path / "the checkpoint's"))
    config = to_json(TrainJob(model=CONFIG, search=SEARCH, data=data))
    model = {"model": parameters_by_name(network(size, 1))}
    commit(folder, step=1, tensors=model, state=state_of(size), config=config)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_bytes(b'{"de": "ein Hund", "en": "a dog"}\n{"de": "zwei", "en": "two"}\n')
    mine = PairConfig(dataset=str(tmp_path / "set"), split="test")
    evaluate(evaluation(folder, test={"mine": mine}, store_dir=str(tmp_path / "elsewhere") if given else None))
    (copy,) = tmp_path.rglob("source.txt")
    assert copy.parents[2] == tmp_path / place
    assert copy.read_bytes() == b"a dog\ntwo\n"


def test_evaluate_refuses_tokenised_translations(
    run_dir: Path, tmp_path: Path, translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command refuses; the end of a training keeps and scores the same translations all the same."""
    monkeypatch.setattr(Translator, "translate", lambda _self, texts, **_: [f"{text.rstrip('.')} ." for text in texts])
    pair = PairConfig(str(tmp_path / "src"), str(tmp_path / "tgt"))
    for path in (pair.src, pair.tgt):
        Path(path).write_text("".join(f"{text}.\n" for text in ("a dog", "a cat", "the tree")), encoding="utf-8")
    with pytest.raises(InputError, match="the hypotheses are tokenised"):
        evaluate(evaluation(run_dir, test={"mine": pair}))
    pairs = {"mine": [("a dog", "a dog."), ("a cat", "a cat.")]}
    translations = translate_pairs(translator, pairs, World(0, 1, {}))
    assert translations == {"mine": ["a dog .", "a cat ."]}
    assert (
        score_sets(pairs, translations, scorers={"mine": partial(measure, text=ScoreSettings("de"))})["mine"].chrf > 0
    )


def test_score_sets_scores_what_was_written(translator: Translator, tmp_path: Path) -> None:
    class Echo(BatchedDecoder):
        def hypotheses(self, sources: Sequence[Any], **options: Any) -> list[list[Hypothesis]]:
            return [[Hypothesis(ids, 0.0, True)] for ids in sources]

    of = translator.decoder
    echo = Translator(translator.tokenizers, Echo(of.models, of.ready, of.search, of.device, of.precision))
    own = RunDir(tmp_path)
    write_sets(own, {"same": [(text, text) for text in sentences(20)]})
    sets = read_sets(own)
    translations = translate_pairs(echo, sets, World(0, 1, {}))
    keep_translations(own, translations)
    scores = score_sets(sets, translations, scorers={"same": partial(score, text=ScoreSettings("en"))})
    assert scores["same"].bleu == pytest.approx(100)
    found = [(tmp_path / "hypotheses" / f"same.{kind}").read_bytes() for kind in ("src", "ref", "hyp")]
    assert found[0] == found[1] == found[2]


def test_read_sets_gives_back_every_character_that_was_written(tmp_path: Path) -> None:
    """Of a corpus, a BOM and a carriage return at the end of a line are no text; of what a run keeps, they are."""
    own = RunDir(tmp_path)
    pairs = [("\ufeffone\r", "uno\r\r"), ("", "\r"), ("a\u2028b\x85c\rd", "\ufeff"), ("x" * 300_000, "")]
    sets = {"strange": pairs, "none": [], "blank": [("", "")]}
    write_sets(own, sets)
    assert read_sets(own) == sets


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\n", r"talks\.src has 2 lines, .*talks\.ref has 1: copy it again"),
        (b"one\n\xff\n", r"talks\.ref: not UTF-8 at byte 5: copy it again"),
        (None, r"talks\.ref: cannot be read \(No such file or directory\): copy it again"),
    ],
)
def test_read_sets_refuses_a_damaged_copy(content: bytes | None, message: str, tmp_path: Path) -> None:
    own = RunDir(tmp_path)
    write_sets(own, {"talks": [("a", "b"), ("c", "d")]})
    path = tmp_path / "hypotheses" / "talks.ref"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_sets(own)


def test_evaluate_after_a_resumed_run_has_other_test_sets(run_dir: Path, tmp_path: Path) -> None:
    own = RunDir(tmp_path / "run")
    shutil.copytree(run_dir, own.path)
    kept = read_sets(own)
    results = Results(
        test_sets={name: Scores(1.0, "b", 2.0, "c") for name in kept},
        averaged=[],
        steps=10,
        epochs=1,
        sentences=1,
        skipped_updates=0,
        target_tokens=1,
        training_seconds=1.0,
        parameters=1,
        search=SEARCH,
        seed=1,
        data_digest="d",
        test_digest=digest_sets(kept),
        validations=[Validation(step=10, loss=1.0, nll=1.0, bleu=0.0, chrf=0.0)],
    )
    own.write_results(results)
    write_sets(own, {"dev": kept["news"][:1], **kept})
    assert own.read_results() == results, "they are of this very text"

    write_sets(own, {"dev": kept["news"][:1], "news": kept["news"]})  # a resume that leaves out talks
    assert not own.results.exists()
    assert list(evaluate(evaluation(own.path)).test_sets) == ["news"]


def test_evaluate_without_sets(run_dir: Path) -> None:
    (run_dir / "hypotheses").rename(run_dir / "elsewhere")
    try:
        with pytest.raises(InputError, match=r"no test set; name one with test\.NAME"):
            evaluate(evaluation(run_dir))
    finally:
        (run_dir / "elsewhere").rename(run_dir / "hypotheses")


def test_load_translator_keeps_weights_of_float64(spm: bytes, tmp_path: Path) -> None:
    """As a run trained in fp64 has them, which no float32 holds; in other precisions they are rounded once."""
    run_dir = write_run(tmp_path / "run", spm, seed=1)
    exact = {name: weight.double() / 3 for name, weight in find_checkpoint(run_dir, "last").weights().items()}
    checkpoint = find_checkpoint(run_dir, "last")
    commit(run_dir, step=2, tensors={"model": exact}, state=checkpoint.state, config=checkpoint.config)
    for precision, dtype in ((Precision.fp64, torch.float64), (Precision.fp32, torch.float32)):
        translator = load_translator(
            run_dir, checkpoint="last", search=SearchOverride(), device=Device.cpu, precision=precision
        )
        for name, weight in parameters_by_name(translator.model).items():
            assert torch.equal(weight, exact[name].to(dtype)), name
