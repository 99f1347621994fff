"""CTranslate2 in torch's place: the same translations, kept in the run, made again where they are not sound."""

import io
import json
import logging
import math
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sacrebleu import corpus_bleu
from torch.nn import functional as F

import transformer
from support.corpora import run, tiny_job, write_corpus
from support.paths import ROOT
from support.tiers import tiers
from support.translations import CONFIG, SEARCH, sentences, state_of
from transformer.checkpoint import commit
from transformer.compute import multiplies_int8
from transformer.config.jobs import EvaluateJob, ScoreJob, TrainJob, TranslateJob
from transformer.config.primitives import to_json
from transformer.config.settings import (
    DataConfig,
    Device,
    EngineType,
    FilterConfig,
    LineFormat,
    Precision,
    SampleConfig,
    Score,
    SearchConfig,
    SearchOverride,
)
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.score_stream import run as score
from transformer.decoding.search import Hypothesis, length_penalty
from transformer.decoding.translate_stream import run as translate
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.evaluation.sets import evaluate, format_results
from transformer.integrations.engine import ctranslate2, make, searcher
from transformer.integrations.engine.files import seal_engine
from transformer.model.transformer import Transformer, parameters_by_name
from transformer.run_dir import RunDir
from transformer.vocabulary import BOS, EOS, PAD

pytest.importorskip("ctranslate2")

# CTranslate2 multiplies 8-bit integers by a library of Intel's. Where the processor has no instruction for it, that
# adds up products in 16 bits, which saturate: a model of random weights comes out far off.
needs_exact_int8 = pytest.mark.skipif(not multiplies_int8(), reason="int8 saturates on this processor, and is refused")

FLOAT32 = SearchOverride(engine="ctranslate2", engine_type=EngineType.float32)
TEXTS = [*sentences(60), "", " ", "a " * 70]  # blank ones, and one that is too long for the model


def model_that_ends(vocab_size: int, seed: int, config: Any = CONFIG) -> Transformer:
    """Random weights, of which most translations end by themselves, at many lengths, and some do not."""
    torch.manual_seed(seed)
    model = Transformer(config, vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.output[PAD] = 0.0
        model.output[BOS] = 0.0
        norms = [weight for name, weight in model.named_parameters() if name.endswith("norm.bias")]
        model.output[EOS] += 3.5 * F.normalize(norms[-1], dim=0)  # around which hidden states are spread
    return model


def write_run(folder: Path, spm: bytes, *, seed: int = 1, search: SearchConfig = SEARCH, config: Any = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(spm)
    size = Tokenizer(spm).vocab_size
    job = TrainJob(model=config, search=SEARCH, data=DataConfig(filter=FilterConfig(max_length=50)))
    commit(
        folder,
        step=1,
        tensors={"model": parameters_by_name(model_that_ends(size, seed, config))},
        state=state_of(size),
        config=to_json(job) | {"search": to_json(search)},
    )
    return folder


@pytest.fixture(scope="module")
def kept(spm: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its engine in float32."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "kept", spm)
    load(folder)
    return folder


@pytest.fixture
def run_dir(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept, tmp_path / "run")
    return tmp_path / "run"


def load(folder: Path, **settings: Any) -> Translator:
    chosen: dict[str, Any] = {"device": "cpu", "precision": "fp32", "engine": "ctranslate2", "engine_type": "float32"}
    return transformer.load(folder, **chosen | settings)


def by_torch(folder: Path, **settings: Any) -> Translator:
    return load(folder, engine="torch", engine_type=None, **settings)


def nothing_is_left_to_torch(self: BatchedDecoder, sources: Sequence[list[int]], *_: object, **__: object) -> list[Any]:
    assert not sources
    return []


def output_of(folder: Path, given: str, **changes: Any) -> str:
    job: dict[str, Any] = {"device": Device.cpu, "precision": Precision.fp32, "threads": 1, "search": FLOAT32}
    stdout = io.BytesIO()
    translate(TranslateJob(run_dir=str(folder), **job | changes), io.BytesIO(given.encode()), stdout)
    return stdout.getvalue().decode()


def engines_of(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "engines").iterdir()) if path.is_dir()]


# ---- the same translations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"beam_size": 1}, {"length_penalty": 0.0}, {"beam_size": 2, "length_penalty": 0}])
@pytest.mark.parametrize("threads", tiers([2], [1], pytest.mark.ci))
def test_engine_finds_what_torch_finds(
    kept: Path, settings: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promised without a length penalty, and greedily: in float32, log-probabilities, blank and long texts included."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        settings = {"batch_tokens": 200, **settings}  # many batches
        ours = by_torch(kept, **settings).translate_n_best(TEXTS, 1)
        monkeypatch.setattr(BatchedDecoder, "_search", nothing_is_left_to_torch)
        theirs = load(kept, **settings).translate_n_best(TEXTS, 1)
    finally:
        torch.set_num_threads(before)
    assert [[one.text for one in line] for line in theirs] == [[one.text for one in line] for line in ours]
    assert {one.finished for [one] in ours} == {True, False}, "some reach their maximum"
    for [left], [right] in zip(ours, theirs, strict=True):
        assert right.log_prob == (None if left.log_prob is None else pytest.approx(left.log_prob, abs=1e-4))
        assert right.score == (None if left.score is None else pytest.approx(left.score, abs=1e-4))


def test_engine_leaves_to_torch_what_a_live_hypothesis_may_beat(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large penalty, longer ones win, and of some lines they are still live when CTranslate2 ends."""
    settings = {"length_penalty": 2.0}
    ours = by_torch(kept, **settings).translate(TEXTS)
    monkeypatch.setattr(searcher, "LOSS_OF_A_PIECE", 0.0)
    asked = []
    search = BatchedDecoder._search

    def noted(self: BatchedDecoder, sources: Sequence[list[int]], *args: Any, **others: Any) -> list[Any]:
        asked.append(len(sources))
        return search(self, sources, *args, **others)

    monkeypatch.setattr(BatchedDecoder, "_search", noted)
    theirs = load(kept, **settings).translate(TEXTS)
    assert theirs == ours
    assert 0 < sum(asked) < len(TEXTS)


# penalty |Y|, loss of a piece 0.7 x 1, at most 20 pieces: the last finished one has log-probability `last` at |Y| = 10,
# and the best one -5 at 5, so that a live one wins with more than -|Y|.
@pytest.mark.parametrize(("last", "may"), [(-10.1, True), (-13.2, False), (-12.9, True)])
def test_engine_doubts_what_a_live_hypothesis_may_beat(last: float, may: bool) -> None:
    found = [Hypothesis([9] * 4, -5.0, finished=True), Hypothesis([9] * 9, last, finished=True)]
    answer = SimpleNamespace(hypotheses=[["a"] * 5, ["a"] * 10])
    asked = searcher.Asked([[9]], [20], None, 4, 1, float, lambda: None)
    assert asked.may_be_beaten(0, found, answer, longest=20) is may


def test_engine_gives_n_best_by_our_penalty_in_order(kept: Path) -> None:
    texts = sentences(40)
    translator = load(kept, length_penalty=1.0)
    forced = by_torch(kept, length_penalty=1.0)
    penalty = length_penalty(1.0)
    sources = translator.tokenizers.source.encode(texts)
    for source, found in zip(sources, translator.hypotheses(sources, n_best=3), strict=True):
        scores = [one.score(penalty) for one in found if one.finished]  # torch puts what has not ended behind
        assert len(found) == 3
        assert scores == sorted(scores, reverse=True)
        for one in found:
            [log_probs] = forced.decoder.log_probs([(source, one.tokens)])
            assert one.log_prob == pytest.approx(sum(log_probs[: one.length]), abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engine_is_within_a_tenth_of_a_bleu_of_torch(tmp_path: Path) -> None:
    """A hardly trained model repeats itself: at 1.4, CTranslate2 as it is deviates by more than two BLEU here."""
    settings = ["train.max_steps=200", "train.validate_every=200", "train.save_every=200"]
    run_dir = tmp_path / "run"
    job = transformer.compose("train", ["experiment=demo", f"run_dir={run_dir}", *settings])
    assert isinstance(job, TrainJob)
    transformer.train(job)

    sources, references = (
        (ROOT / f"data/demo/test.{side}").read_text(encoding="utf-8").split("\n")[:200] for side in ("en", "de")
    )
    ours, theirs = (made.translate_sweep(sources, [0.6, 1.0, 1.4]) for made in (by_torch(run_dir), load(run_dir)))
    for alpha, texts in ours.items():
        scores = [corpus_bleu(found, [references]).score for found in (texts, theirs[alpha])]
        assert scores[1] == pytest.approx(scores[0], abs=0.1), alpha


def test_engine_begins_with_prefixes(kept: Path) -> None:
    texts = sentences(12)
    prefixes = ["the cat", "", "old", *[""] * 8, "two small birds near the water"]
    settings = {"length_penalty": 0.0}
    ours = by_torch(kept, **settings).translate_n_best(texts, 1, prefixes=prefixes)
    theirs = load(kept, **settings).translate_n_best(texts, 1, prefixes=prefixes)
    for [left], [right], prefix in zip(ours, theirs, prefixes, strict=True):
        assert right.text == left.text
        assert right.text.startswith(prefix)
        assert right.log_prob == pytest.approx(left.log_prob, abs=1e-4)


def test_engine_sweeps_penalties(kept: Path) -> None:
    swept = load(kept).translate_sweep(TEXTS, [0.0, 1.0])
    for alpha, found in swept.items():
        assert found == load(kept, length_penalty=alpha).translate(TEXTS)


@pytest.fixture
def any_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 is taken as it is, also where it saturates."""
    monkeypatch.setattr(make, "MOST_LOSS", math.inf)


@pytest.mark.usefixtures("any_loss")
def test_engine_has_smaller_batches_by_default_than_torch_and_the_smallest_in_int8(run_dir: Path) -> None:
    """Sentences of 32 pieces in the first batch: 8,192, 2,048 and 1,024 pieces x the beam."""
    search = replace(SEARCH, beam_size=4, batch_tokens=None)
    found = [by_torch(run_dir), load(run_dir), load(run_dir, engine_type="int8")]
    batches = [replace(translator.decoder, search=search) for translator in found]
    assert [len(one.cut([32] * 100)[0]) for one in batches] == [64, 16, 8]


def test_engine_calls_check_before_each_batch(kept: Path) -> None:
    called = []
    translator = load(kept, batch_tokens=100)
    translator.translate(sentences(30), check=lambda: called.append(1))
    assert len(called) > 5

    def refuse() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        translator.translate(sentences(30), check=refuse)


def test_engine_streams_lines_in_every_format(kept: Path) -> None:
    given = "".join(f"{text}\n" for text in TEXTS)
    plain = SearchOverride(length_penalty=0.0)
    fast = replace(FLOAT32, length_penalty=0.0)
    assert output_of(kept, given, search=fast) == output_of(kept, given, search=plain)
    rows = output_of(kept, given, search=fast, format=LineFormat.tsv, n_best=2).split("\n")
    assert [row.split("\t")[1] for row in rows[:4]] == ["1", "2", "1", "2"]


@pytest.mark.usefixtures("any_loss")
@pytest.mark.parametrize(
    ("engine_type", "penalty", "finished"), [("float32", 0.0, 1.5), ("int8", 0.0, 1.0), ("int8", 0.6, 1.5)]
)
def test_engine_waits_for_more_hypotheses_where_that_is_promised(
    engine_type: str, penalty: float, finished: float, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many as the beam is wide end a sentence, or half as many more."""
    asked = []
    open_translator = ctranslate2.open_translator

    def noted(*args: Any, **settings: Any) -> Any:
        translator = open_translator(*args, **settings)

        def translate_batch(*args: Any, **settings: Any) -> Any:
            asked.append(settings["patience"])
            return translator.translate_batch(*args, **settings)

        return SimpleNamespace(translate_batch=translate_batch)

    monkeypatch.setattr("transformer.integrations.engine.searcher.open_translator", noted)
    load(run_dir, engine_type=engine_type, length_penalty=penalty).translate(sentences(4))
    assert set(asked) == {finished}


@needs_exact_int8
def test_engine_in_int8_translates_much_the_same(run_dir: Path) -> None:
    translator = load(run_dir, engine_type="int8", length_penalty=0.0)
    ours = by_torch(run_dir, length_penalty=0.0).translate(TEXTS)
    same = sum(left == right for left, right in zip(ours, translator.translate(TEXTS), strict=True))
    assert same > 0.6 * len(TEXTS)
    assert translator.engine is not None
    assert translator.engine.endswith("in int8")


@pytest.mark.parametrize("keep", [pickle.dumps, None])
def test_engine_survives_pickle_and_refuses_a_fork(
    kept: Path, keep: Callable[[Translator], bytes] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = load(kept)
    expected = translator.translate(TEXTS)
    if keep is not None:
        assert pickle.loads(keep(translator)).translate(TEXTS) == expected
        return
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InputError, match="cannot be used after a fork"):
        translator.translate(TEXTS)


# ---- in the run -----------------------------------------------------------------------------------------------------


def no_writing(*_: object, **__: object) -> None:
    raise AssertionError("the engine is there")


@pytest.mark.usefixtures("any_loss")
def test_engine_is_made_once_for_each_type(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [float32] = engines_of(run_dir)
    assert float32.name.endswith("-float32")
    assert sorted(path.name for path in float32.iterdir()) == [
        "MANIFEST.json",
        "config.json",
        "model.bin",
        "shared_vocabulary.json",
    ]
    load(run_dir, engine_type="int8")
    assert len(engines_of(run_dir)) == 2
    monkeypatch.setattr(make, "write", no_writing)
    load(run_dir)
    load(run_dir, engine_type="int8")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda folder: flip(folder / "model.bin"),
    "cut": lambda folder: os.truncate(folder / "model.bin", 100),
    "no vocabulary": lambda folder: (folder / "shared_vocabulary.json").unlink(),
    "no manifest": lambda folder: (folder / "MANIFEST.json").unlink(),
    "manifest of nothing": lambda folder: (folder / "MANIFEST.json").write_text('{"files": {}}', encoding="utf-8"),
    "a link": lambda folder: link_away(folder / "model.bin"),
    "a file": lambda folder: replace_by_file(folder),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"")


def link_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", DAMAGE)
def test_engine_that_is_damaged_is_made_again(run_dir: Path, damage: str) -> None:
    expected = load(run_dir).translate(TEXTS)
    [folder] = engines_of(run_dir)
    before = (folder / "model.bin").read_bytes()
    DAMAGE[damage](folder)
    assert load(run_dir).translate(TEXTS) == expected
    assert (folder / "model.bin").read_bytes() == before


@pytest.mark.parametrize("forged", [b'["a"]', b"{}", b"[" * 100_000, b"\xff", b""])
def test_engine_whose_vocabulary_was_forged_with_its_manifest_is_refused(run_dir: Path, forged: bytes) -> None:
    [folder] = engines_of(run_dir)
    (folder / "shared_vocabulary.json").write_bytes(forged)
    (folder / "MANIFEST.json").unlink()
    seal_engine(folder)
    with pytest.raises(InputError, match=f"^{folder}: its vocabulary is not the run's: remove the folder"):
        load(run_dir).translate(TEXTS)
    shutil.rmtree(folder)
    assert load(run_dir).translate(TEXTS)


def test_engine_of_other_weights_is_another(run_dir: Path, spm: bytes, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", spm, seed=2)
    shutil.rmtree(run_dir / "checkpoints")
    shutil.copytree(other / "checkpoints", run_dir / "checkpoints")
    assert load(run_dir, length_penalty=0.0).translate(TEXTS) == by_torch(other, length_penalty=0.0).translate(TEXTS)
    assert len(engines_of(run_dir)) == 2


def test_engine_lives_in_a_temporary_folder_where_the_run_cannot_be_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run_dir / "engines")
    (run_dir / "engines").write_bytes(b"")  # as root, a read-only directory could be written
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    translator = load(run_dir)
    assert "converting in a temporary folder" in caplog.text
    assert len(list(temporary.iterdir())) == 1
    assert translator.translate(TEXTS)
    del translator
    assert list(temporary.iterdir()) == []


def test_engine_of_few_positions_is_compared_with_translations_that_do_not_end(
    spm: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pieces, with BOS in front of them, are more than there are positions."""
    monkeypatch.setitem(globals(), "model_that_ends", lambda size, seed, config: Transformer(config, size))
    few, search = replace(CONFIG, max_positions=52), replace(SEARCH, max_extra=90)
    folder = write_run(tmp_path / "few", spm, config=few, search=search)
    assert load(folder).translate(TEXTS[:2]) == by_torch(folder).translate(TEXTS[:2])


def test_engine_is_compared_on_made_up_texts_of_the_source_s_pieces(spm: bytes, tmp_path: Path) -> None:
    tokenizer = Tokenizer(spm)
    translator = SimpleNamespace(
        decoder=SimpleNamespace(max_positions=100),
        model=SimpleNamespace(vocab_size=10_000, source_vocab_size=tokenizer.vocab_size),
        tokenizers=SimpleNamespace(source=tokenizer),
    )
    texts = [*islice(make._texts(RunDir(tmp_path), cast(Translator, translator)), 50)]
    assert len(set(texts)) == 50


def test_engine_that_computes_something_else_is_not_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run_dir / "engines")
    write = ctranslate2.write

    def write_another(model: Transformer, pieces: ctranslate2.Vocabularies, folder: Path, **settings: Any) -> None:
        write(model_that_ends(len(pieces.target), 3), pieces, folder, **settings)

    monkeypatch.setattr(make, "write", write_another)
    with pytest.raises(InputError, match=r"^search\.engine=ctranslate2: in float32 it does not compute .*=torch$"):
        load(run_dir)
    with pytest.raises(InputError, match=r"in int8 .*the mean log-probability differs by [0-9.]+ \(0\.1 allowed\)"):
        load(run_dir, engine_type="int8")
    assert engines_of(run_dir) == []


def test_engine_of_auto_is_float32_where_int8_loses_too_much(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(make, "multiplies_int8", lambda: True)
    monkeypatch.setattr(make, "MOST_LOSS", 0.0005)
    translator = load(run_dir, engine_type="auto")
    assert translator.search.engine_type is EngineType.float32
    assert "float32 is used" in caplog.text


def test_engine_that_is_refused_leaves_no_temporary_folder(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run_dir / "engines")
    (run_dir / "engines").write_bytes(b"")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(make, "MOST_LOSS", 1e-9)
    with pytest.raises(InputError, match="in int8 it does not compute what the model does"):
        load(run_dir, engine_type="int8")
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("any_loss")
def test_engine_of_auto_is_int8_only_where_the_processor_multiplies_it(
    run_dir: Path, processor: Callable[[str], None]
) -> None:
    for kind, chosen in (("avx2", EngineType.float32), ("vnni", EngineType.int8), ("amx", EngineType.int8)):
        processor(kind)
        assert load(run_dir, engine_type="auto").search.engine_type is chosen


def test_engine_in_int8_is_checked_again_on_a_processor_on_which_it_saturates(
    run_dir: Path, processor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a check has found elsewhere says nothing of it: the run may have been copied. float32 is the same."""
    processor("vnni")
    with monkeypatch.context() as patch:
        patch.setattr(make, "MOST_LOSS", math.inf)
        load(run_dir, engine_type="int8")
    monkeypatch.setattr(make, "MOST_LOSS", 1e-9)
    load(run_dir, engine_type="int8")
    processor("avx2")
    with pytest.raises(
        InputError, match=r"in int8 .* \(the mean log-probability differs by .*\): set search\.engine_type=float32$"
    ):
        load(run_dir, engine_type="int8")
    monkeypatch.setattr(make, "write", no_writing)
    load(run_dir)


def test_engine_is_not_made_through_a_link(run_dir: Path, tmp_path: Path) -> None:
    shutil.move(run_dir / "engines", tmp_path / "outside")
    (run_dir / "engines").symlink_to(tmp_path / "outside")
    with pytest.raises(transformer.TransformerError, match="engines: a link, which is not followed"):
        load(run_dir)


# ---- what it cannot do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: TranslateJob(search=FLOAT32, ensemble=["runs/b"]), "ensemble needs torch"),
        (lambda: TranslateJob(search=FLOAT32, align=True, format=LineFormat.jsonl), "align needs torch"),
        (lambda: TranslateJob(search=FLOAT32, sample=SampleConfig(top_k=3)), r"sample\.\* needs torch"),
        (lambda: ScoreJob(search=FLOAT32), r"search\.engine=ctranslate2 is for a search"),
        (lambda: SearchConfig(engine_type=EngineType.int8), r"search\.engine_type=int8 is for search\.engine=ctransl"),
        (
            lambda: TrainJob(
                model=replace(CONFIG, score=Score.additive),
                data=DataConfig(filter=FilterConfig(max_length=50)),
                search=SearchConfig(engine="ctranslate2"),
            ),
            r"search\.engine=ctranslate2 has no additive attention \(model\.score=additive\)",
        ),
    ],
)
def test_engine_refuses_by_key_what_it_cannot_do(made: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_engine_of_the_run_refuses_by_key_what_it_cannot_do(spm: bytes, tmp_path: Path) -> None:
    """Where the command does not name the engine."""
    search = replace(SEARCH, engine="ctranslate2", engine_type=EngineType.float32)
    folder = write_run(tmp_path / "run", spm, search=search)
    own = SearchOverride()
    with pytest.raises(InputError, match=r"^align needs torch: set search\.engine=torch$"):
        output_of(folder, "a dog\n", search=own, align=True, format=LineFormat.jsonl)
    with pytest.raises(InputError, match=r"^ensemble needs torch: set search\.engine=torch$"):
        output_of(folder, "a dog\n", search=own, ensemble=[str(folder)])
    with pytest.raises(InputError, match=r"^score needs torch"):
        transformer.load(folder, device="cpu").score(["a dog"], ["a cat"])
    assert output_of(folder, "a dog\n", search=own, sample=SampleConfig(top_k=3)).count("\n") == 1

    # `score` searches nothing, so it is the same in such a run.
    stdout = io.BytesIO()
    score(ScoreJob(run_dir=str(folder), device=Device.cpu, threads=1), io.BytesIO(b"a dog\ta cat\n"), stdout)
    assert float(stdout.getvalue()) < 0.0


def test_engine_refuses_what_the_machine_or_the_model_has_not(
    run_dir: Path, spm: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "supported_types", lambda device: {"float32", "int8"})
    with pytest.raises(
        InputError, match=r"^search\.engine_type=float16: CTranslate2 computes in float32, int8 on this"
    ):
        load(run_dir, engine_type="float16")
    additive = write_run(tmp_path / "additive", spm, config=replace(CONFIG, score=Score.additive))
    with pytest.raises(InputError, match=r"model\.score=additive"):
        load(additive)
    monkeypatch.setattr(make, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'ctranslate2>="):
        load(run_dir)


def test_with_search_leaves_the_choice_of_an_engine_to_load(kept: Path) -> None:
    translator = load(kept)
    plain = translator.with_search(replace(SEARCH, beam_size=1))
    assert plain.engine is None
    assert translator.with_search(replace(translator.search, beam_size=1)).engine == translator.engine
    with pytest.raises(InputError, match=r"search\.engine=ctranslate2 is chosen by load"):
        plain.with_search(translator.search)


# ---- training and evaluating ----------------------------------------------------------------------------------------


def test_training_with_an_engine_scores_its_test_sets_by_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = tiny_job(tmp_path / "run", write_corpus(tmp_path / "corpus"), max_steps=2)
    job.search.engine = "ctranslate2"
    job.search.engine_type = EngineType.float32
    run(job)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["engine"].startswith("CTranslate2 ")

    # Evaluated again by torch, and by the run's own engine.
    with_engine = evaluate(EvaluateJob(run_dir=job.run_dir, device=Device.cpu))
    assert "at most, by CTranslate2 " in format_results(tmp_path, with_engine)
    by_torch = evaluate(EvaluateJob(run_dir=job.run_dir, device=Device.cpu, search=SearchOverride(engine="torch")))
    assert by_torch.engine is None
    assert with_engine.test_sets["test"].bleu == pytest.approx(by_torch.test_sets["test"].bleu, abs=0.1)
    assert RunDir(tmp_path / "run").read_results().search == job.search
