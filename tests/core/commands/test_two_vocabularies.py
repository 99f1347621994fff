"""A vocabulary for each language (`tokenizer.target`): whatever reads or writes pieces takes those of its side."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor

import transformer
from support.corpora import (
    assert_same_tensors,
    read,
    run,
    spell,
    step_dir,
    texts,
    tiny_job,
    typed_in_a_child,
    write_corpus,
)
from support.resumed_runs import stop_at, with_value
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    Algorithm,
    DataConfig,
    Device,
    Precision,
    SearchOverride,
    TargetTokenizerConfig,
    TokenizerConfig,
)
from transformer.data.epochs import epoch_stores
from transformer.data.prepare import Prepared, prepare
from transformer.data.store import Store
from transformer.data.tokenizer import train_tokenizer
from transformer.decoding.loading import load_translator
from transformer.errors import CheckpointError, InputError
from transformer.training.validate import DevSet

FILES = ("tokenizer.model", "tokenizer.target.model")
PLAIN: Any = {"search": SearchOverride(), "device": Device.cpu, "precision": Precision.fp32}


def two(job: TrainJob, **target: Any) -> TrainJob:
    """The job with a target vocabulary of its own."""
    return replace(job, tokenizer=replace(job.tokenizer, target=TargetTokenizerConfig(**target or {"vocab_size": 45})))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    job = two(tiny_job(tmp_path_factory.mktemp("runs") / "two", corpus, subword_sampling=0.2))
    run(job)
    return job


@pytest.fixture
def copied(finished: TrainJob, tmp_path: Path) -> Path:
    """The finished run in a folder that a test may damage."""
    return Path(shutil.copytree(finished.run_dir, tmp_path / "two"))


def processors(folder: Path) -> list[SentencePieceProcessor]:
    """SentencePiece itself with the model of either side."""
    return [SentencePieceProcessor(model_file=str(folder / name)) for name in FILES]


def lines_of(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").split("\n")[:-1]


def ids_of(store: Store, side: int) -> list[list[int]]:
    return [store.gather(np.array([n]), side).pieces.tolist() for n in range(len(store))]


def test_engine_searches_with_both_vocabularies(copied: Path, corpus: DataConfig) -> None:
    """By the same pieces on either side, in a folder that is verified when it is read again."""
    pytest.importorskip("ctranslate2")
    lines = lines_of(corpus.train.src)[:20]
    settings: dict[str, Any] = {"device": "cpu", "precision": "fp32", "beam_size": 1}
    by_torch = transformer.load(copied, **settings).translate(lines)
    for _ in range(2):
        translator = transformer.load(copied, **settings, engine="ctranslate2", engine_type="float32")
        assert translator.translate(lines) == by_torch
    [engine] = [path for path in (copied / "engines").iterdir() if path.is_dir()]
    assert {path.name for path in engine.iterdir()} >= {"source_vocabulary.json", "target_vocabulary.json"}


# ---- preparing ------------------------------------------------------------------------------------------------------


def test_prepare_trains_a_tokenizer_on_each_side_and_encodes_with_it(corpus: DataConfig, tmp_path: Path) -> None:
    prepared = prepare(two(tiny_job(tmp_path / "a", corpus), vocab_size=45, algorithm=Algorithm.unigram))
    of_sides = processors(prepared.path)
    settings = (TokenizerConfig(vocab_size=60), TokenizerConfig(vocab_size=45, algorithm=Algorithm.unigram))
    for side, path in enumerate((corpus.train.src, corpus.train.tgt)):
        lines = lines_of(path)
        assert (prepared.path / FILES[side]).read_bytes() == train_tokenizer(lines, settings[side])
        assert ids_of(prepared.store, side) == of_sides[side].encode(lines)

    sizes = [of_side.get_piece_size() for of_side in of_sides]
    assert (prepared.report.source_vocab_size, prepared.report.vocab_size) == tuple(sizes)
    assert sizes[0] != sizes[1]


def test_prepare_of_one_vocabulary_is_the_same_as_it_was(corpus: DataConfig, tmp_path: Path) -> None:
    """Its digest is of what it was of before there was `tokenizer.target`."""
    job = tiny_job(tmp_path / "a", corpus)
    tokenizer = {"algorithm": "bpe", "vocab_size": 60, "normalization": "identity", "byte_fallback": False}
    tokenizer |= {"character_coverage": 1.0, "sample_lines": 1_000_000, "model": None}
    filters = {"max_length": job.data.filter.max_length, "max_ratio": job.data.filter.max_ratio}
    filters |= {"drop_identical": False, "drop_duplicates": False}
    files = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (corpus.train.src, corpus.train.tgt)]
    expected = hashlib.sha256(json.dumps([3, 1, [[None, *files]], filters, tokenizer], sort_keys=True).encode())
    prepared = prepare(job)
    assert prepared.report.digest == expected.hexdigest()
    assert not (prepared.path / FILES[1]).exists()
    assert prepared.report.source_vocab_size is None


@pytest.mark.parametrize(
    "target",
    [
        {"vocab_size": 60},
        {"vocab_size": 45},
        {"vocab_size": 45, "algorithm": Algorithm.unigram},
        {"vocab_size": 45, "sample_lines": 100},
    ],
    ids=str,
)
def test_prepare_has_another_digest_for_each_target_vocabulary(
    corpus: DataConfig, tmp_path: Path, target: dict[str, Any]
) -> None:
    job = tiny_job(tmp_path / "a", corpus)
    digests = {prepare(job).report.digest, prepare(two(job)).report.digest, prepare(two(job, **target)).report.digest}
    assert len(digests) == (2 if target == {"vocab_size": 45} else 3)


def test_prepare_gives_tags_to_the_source_alone(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text")
    corpus = replace(corpus, train=replace(corpus.train, tag="<2de>"))
    prepared = prepare(two(tiny_job(tmp_path / "a", corpus)))
    source, target = processors(prepared.path)
    tag = source.piece_to_id("\u2581<2de>")
    assert source.id_to_piece(tag) == "\u2581<2de>"
    assert all(ids[0] == tag for ids in ids_of(prepared.store, 0))
    assert target.piece_to_id("\u2581<2de>") == target.unk_id()
    assert [text.partition(" ")[0] for text, _ in texts(prepared)[:3]] == ["<2de>"] * 3


def test_prepare_takes_models_that_are_given(
    corpus: DataConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    built = prepare(two(tiny_job(tmp_path / "a", corpus)))
    given = TokenizerConfig(
        model=str(built.path / FILES[0]), target=TargetTokenizerConfig(model=str(built.path / FILES[1]))
    )
    job = replace(tiny_job(tmp_path / "b", corpus), tokenizer=given)
    again = prepare(job)
    assert [ids_of(again.store, side) for side in (0, 1)] == [ids_of(built.store, side) for side in (0, 1)]
    assert (
        f"{built.path / FILES[1]}, {built.report.vocab_size} pieces; the other keys of tokenizer.target" in caplog.text
    )

    # One of them, and the other is trained.
    given.model = None
    given.vocab_size = 60
    half = prepare(job)
    assert [(half.path / name).read_bytes() for name in FILES] == [(built.path / name).read_bytes() for name in FILES]

    given.target.model = str(tmp_path / "missing")
    with pytest.raises(InputError, match=r"missing: cannot be read"):
        prepare(job)


def test_prepare_names_the_keys_of_the_target_where_references_do_not_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_corpus(tmp_path / "text")
    Path(corpus.dev.tgt).write_text("eins Ω\n" * 16, encoding="utf-8")
    prepare(two(tiny_job(tmp_path / "a", corpus)))
    assert "set tokenizer.target.byte_fallback=true" in caplog.text


def test_prepare_names_the_keys_of_the_target_that_cannot_be_trained(corpus: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"check tokenizer\.target\.vocab_size, tokenizer\.target\.character_coverage"):
        prepare(two(tiny_job(tmp_path / "a", corpus), vocab_size=8))


def test_epoch_stores_sample_each_side_with_its_own_tokenizer(corpus: DataConfig, tmp_path: Path) -> None:
    prepared = prepare(two(tiny_job(tmp_path / "a", corpus), vocab_size=45, algorithm=Algorithm.unigram))
    stores = epoch_stores(prepared.store, prepared.tokenizers, mixture=prepared.mixture, rate=0.3, seed=1)
    sampled = stores.make(0)
    stores.close()
    for side, of_side in enumerate(processors(prepared.path)):
        ids, plain = ids_of(sampled, side), ids_of(prepared.store, side)
        assert of_side.decode(ids) == of_side.decode(plain)
        assert ids != plain


def test_dev_set_is_in_the_pieces_of_each_side(corpus: DataConfig, tmp_path: Path) -> None:
    prepared = prepare(two(tiny_job(tmp_path / "a", corpus)))
    dev = DevSet.of(prepared.dev["dev"], prepared.tokenizers, max_pieces=100)
    for side, path in enumerate((corpus.dev.src, corpus.dev.tgt)):
        assert ids_of(dev.store, side) == processors(prepared.path)[side].encode(lines_of(path))


# ---- training, and what reads a run ---------------------------------------------------------------------------------


@pytest.mark.plugins
def test_train_writes_both_tokenizers_and_two_matrices(finished: TrainJob) -> None:
    from transformer.tools.summary.command import format_summary, summarise
    from transformer.tools.summary.job import SummaryJob

    run_dir = Path(finished.run_dir)
    sizes = [of_side.get_piece_size() for of_side in processors(run_dir)]
    weights = load_file(run_dir / "averaged" / "model.safetensors")
    rows = {name: len(weight) for name, weight in weights.items() if weight.shape[1:] == (32,) and "." not in name}
    assert rows == {"embedding": sizes[1]}
    assert len(weights["source_embedding.matrix"]) == sizes[0]
    for folder in (step_dir(run_dir, 12), run_dir / "averaged"):
        state = read(folder / "state.json")
        assert [state["source_vocab_size"], state["vocab_size"]] == sizes

    record = read(run_dir / "run.json")
    digests = [hashlib.sha256((run_dir / name).read_bytes()).hexdigest() for name in FILES]
    assert [record["tokenizer_sha256"], record["target_tokenizer_sha256"]] == digests
    held = sum(weight.numel() for weight in weights.values())
    assert read(run_dir / "results.json")["parameters"] == held
    summary = summarise(SummaryJob(run=str(run_dir)))
    assert summary.parameters.total == held
    assert f"with {sizes[0]} source and {sizes[1]} target pieces" in format_summary(summary)


def test_train_resumes_exactly(finished: TrainJob, tmp_path: Path) -> None:
    job = replace(finished, run_dir=str(tmp_path / "b"))
    stop_at(job, 7)
    run(job)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(step_dir(Path(job.run_dir), 12) / name, step_dir(Path(finished.run_dir), 12) / name)


def test_train_anew_with_one_vocabulary_leaves_no_second_tokenizer(copied: Path, corpus: DataConfig) -> None:
    for model in ("checkpoints", "averaged"):
        shutil.rmtree(copied / model)
    run(tiny_job(copied, corpus, max_steps=2, average=1, save_every=2, validate_every=2))
    assert (copied / FILES[0]).exists()
    assert not (copied / FILES[1]).exists()
    assert transformer.load(copied, device="cpu").translate(["one two"])


def test_translator_reads_sources_and_writes_targets(finished: TrainJob, corpus: DataConfig) -> None:
    translator = transformer.load(finished.run_dir, device="cpu", precision="fp64")
    sources = lines_of(corpus.test["test"].src)[:4]
    source, target = processors(Path(finished.run_dir))
    for text, n_best in zip(sources, translator.translate_n_best(sources, 2, align=True), strict=True):
        for one in n_best:
            assert one.alignment is not None
            assert one.alignment.source_pieces == source.encode(text, out_type=str)
            assert target.decode_pieces(one.alignment.pieces) == one.text

    # What a search found has the score that forced decoding gives the same pieces.
    for scored, text in zip(translator.score(sources, lines_of(corpus.test["test"].tgt)[:4]), sources, strict=True):
        assert scored.pieces[-1] == "</s>"
        assert set(scored.pieces) <= {target.id_to_piece(n) for n in range(target.get_piece_size())}, text
    [[best]] = translator.hypotheses(translator.tokenizers.source.encode(["one"]), n_best=1)
    text = translator.translate(["one"])[0]
    assert target.decode(best.tokens) == text
    with pytest.raises(InputError, match=rf"and there are {source.get_piece_size()} pieces"):
        translator.hypotheses([[source.get_piece_size()]], n_best=1)


def test_translator_begins_with_a_prefix_of_the_target(finished: TrainJob) -> None:
    translator = transformer.load(finished.run_dir, device="cpu")
    word = spell([5])[1]
    [[found]] = translator.translate_n_best(["five two"], 1, prefixes=[word])
    assert found.text.startswith(word)


@pytest.mark.ci
def test_commands_read_a_run_of_two_vocabularies(finished: TrainJob, tmp_path: Path) -> None:
    run_dir = finished.run_dir
    (tmp_path / "in.txt").write_text("one two\n", encoding="utf-8")
    (tmp_path / "ref.txt").write_text("eins zwei\n", encoding="utf-8")
    translated = typed_in_a_child("translate", f"run_dir={run_dir}", cwd=tmp_path, text="one two\n\n")
    assert translated.printed.count("\n") == 2, translated.said
    scored = typed_in_a_child("score", f"run_dir={run_dir}", "src=in.txt", "tgt=ref.txt", cwd=tmp_path)
    assert float(scored.printed) < 0.0, scored.said
    evaluated = typed_in_a_child("evaluate", f"run_dir={run_dir}", "format=json", cwd=tmp_path)
    kept = read(Path(run_dir) / "results.json")["test_sets"]["test"]
    assert json.loads(evaluated.printed)["test_sets"]["test"] == kept, evaluated.said
    reported = typed_in_a_child("report", run_dir, "output=report.html", cwd=tmp_path)
    assert reported.status == 0, reported.said
    assert "target tokenizer SHA-256" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.plugins
def test_inspect_shows_the_pieces_of_each_side(finished: TrainJob) -> None:
    from transformer.tools.attention.sentence import inspect

    translator = load_translator(Path(finished.run_dir), checkpoint="auto", **PLAIN)
    text, translation = spell([1, 2, 3])
    found = inspect(translator, (text, translation), most_weights=1 << 20)
    source, target = processors(Path(finished.run_dir))
    assert found.source == [*source.encode(text, out_type=str), "</s>"]
    assert found.predicts == [*target.encode(translation, out_type=str), "</s>"]
    assert found.reads == ["<s>", *found.predicts[:-1]]


@pytest.mark.plugins
def test_doctor_looks_at_both_vocabularies(corpus: DataConfig, tmp_path: Path) -> None:
    from transformer.tools.doctor.command import doctor
    from transformer.tools.doctor.job import DoctorJob

    job = two(tiny_job(tmp_path / "a", corpus), vocab_size=30)  # hardly more than there are characters
    checks = doctor(DoctorJob(**vars(job))).checks
    for name in ("characters", "single characters"):
        assert [check.where for check in checks if check.name == name] == ["source vocabulary", "target vocabulary"]
    remedies = {check.where: check.remedy for check in checks if check.name == "single characters"}
    assert "tokenizer.target.vocab_size" in str(remedies["target vocabulary"])


@pytest.mark.plugins
def test_replay_runs_the_step_that_was(finished: TrainJob) -> None:
    from transformer.tools.replay.command import replay
    from transformer.tools.replay.job import ReplayJob

    run_dir = Path(finished.run_dir)
    [logged] = [row for row in map(json.loads, lines_of(str(run_dir / "metrics.jsonl"))) if row["step"] == 7]
    found = replay(ReplayJob(run_dir=str(run_dir), step=7))
    assert found.loss == pytest.approx(logged["train/loss"], rel=1e-6)
    assert found.finding is None


# ---- what is refused ------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def swap(path: Path) -> None:
    shutil.copy(path.with_name(FILES[0]), path)


@pytest.mark.parametrize("change", [flip, swap, Path.unlink], ids=["one bit", "the source's", "missing"])
def test_translator_refuses_another_target_tokenizer(copied: Path, change: Callable[[Path], None]) -> None:
    change(copied / FILES[1])
    with pytest.raises(CheckpointError, match=r"tokenizer\.target\.model: not the tokenizer of this run") as refused:
        transformer.load(copied, device="cpu")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("change", [swap, Path.unlink], ids=["the source's", "missing"])
def test_translator_refuses_another_target_tokenizer_without_run_json(
    copied: Path, change: Callable[[Path], None]
) -> None:
    change(copied / FILES[1])
    (copied / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"does not fit: made for another tokenizer than \S+tokenizer") as refused:
        transformer.load(copied, device="cpu")
    assert "\n" not in str(refused.value)


def test_ensemble_refuses_another_target_tokenizer(finished: TrainJob, corpus: DataConfig, tmp_path: Path) -> None:
    few: Any = {"max_steps": 2, "average": 1, "save_every": 2, "validate_every": 2}
    same = run(two(tiny_job(tmp_path / "same", corpus, **few)))
    other = run(two(tiny_job(tmp_path / "other", corpus, **few), vocab_size=40))
    both = load_translator(Path(finished.run_dir), checkpoint="auto", ensemble=[same], **PLAIN)
    assert len(both.translate(["one two"])) == 1
    with pytest.raises(InputError, match="its tokenizer is not that of"):
        load_translator(Path(finished.run_dir), checkpoint="auto", ensemble=[other], **PLAIN)


def test_resume_refuses_another_target_vocabulary(copied: Path, finished: TrainJob) -> None:
    job = replace(finished, run_dir=str(copied))
    with pytest.raises(CheckpointError, match=r"tokenizer\.target\.vocab_size: 45 -> 40"):
        run(with_value(job, "tokenizer.target.vocab_size", 40))
    with pytest.raises(CheckpointError, match=r"tokenizer\.target\.vocab_size: 45 -> null"):
        run(with_value(job, "tokenizer.target.vocab_size", None))


# ---- init_from ------------------------------------------------------------------------------------------------------

STILL: Any = {"max_steps": 1, "average": 1, "learning_rate": 1e-30}


def test_init_from_takes_both_vocabularies(finished: TrainJob, corpus: DataConfig, tmp_path: Path) -> None:
    """Whether it is asked for two or not; once it has begun, the other run may go."""
    source = Path(shutil.copytree(finished.run_dir, tmp_path / "source"))
    job = replace(tiny_job(tmp_path / "warm", corpus, **STILL), init_from=str(source))
    run_dir = run(job)
    for name in FILES:
        assert (run_dir / name).read_bytes() == (source / name).read_bytes()
    before, after = (load_file(path / "averaged" / "model.safetensors") for path in (source, run_dir))
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-29) for name in {**before, **after})

    shutil.rmtree(source)
    job.train.max_steps = 2
    run(job)


def test_init_from_refuses_a_vocabulary_that_its_run_has_not(
    finished: TrainJob, corpus: DataConfig, tmp_path: Path
) -> None:
    one = run(tiny_job(tmp_path / "one", corpus, max_steps=2, average=1, save_every=2, validate_every=2))
    job = replace(two(tiny_job(tmp_path / "warm", corpus, **STILL)), init_from=str(one))
    with pytest.raises(
        InputError, match=r"one: that run has one vocabulary for both languages: leave tokenizer\.target"
    ):
        run(job)

    job = replace(two(job, model=str(one / FILES[0])), init_from=finished.run_dir)
    with pytest.raises(InputError, match=r"tokenizer\.target\.model=\S+ is not \S+tokenizer\.target\.model, which"):
        run(job)


def test_prepared_corpus_is_opened_by_other_processes(corpus: DataConfig, tmp_path: Path) -> None:
    prepared = prepare(two(tiny_job(tmp_path / "a", corpus)))
    prepared.dev["dev"][0] = ("a\0b\u2028", "ü\x85\ud7ff")  # whatever a line of a file may hold
    opened = Prepared.of_shared(json.loads(json.dumps(prepared.to_share())))
    assert opened.dev == prepared.dev
    assert opened.tokenizers.models == prepared.tokenizers.models
    assert list(opened.tokenizers.models) == list(FILES)
