"""Published models of Marian, as `transformers` saves them, imported: against `transformers` itself."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import transformer
from support.command_line import composed
from support.corpora import Shell, in_a_child, overrides, read, run, run_command, tiny_job, write_corpus
from support.hub import client_of, model_hub
from support.marian import ENGLISH, GERMAN, SCRIPTS, VARIANTS, save, sentences
from support.ranks import ranks
from support.tiers import tiers
from transformer.config.jobs import EvaluateJob, TrainJob, TranslateJob
from transformer.config.settings import (
    Activation,
    DataConfig,
    Device,
    PairConfig,
    Precision,
    SearchConfig,
    SearchOverride,
    Start,
)
from transformer.data.tokenizer import Tokenizers
from transformer.decoding.loading import load_translator
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.integrations.export.command import export
from transformer.integrations.export.job import ExportJob, Target
from transformer.integrations.imports.command import import_run
from transformer.integrations.imports.job import ImportJob
from transformer.integrations.published.marian import read_marian
from transformer.integrations.published.run import import_model, run_path
from transformer.layout import Padded
from transformer.model.transformer import parameters_by_name
from transformer.tools.replay.command import replay
from transformer.tools.replay.job import ReplayJob
from transformer.training.step import Objective
from transformer.vocabulary import BOS, EOS, PAD, UNK

pytest.importorskip("transformers")

every_variant = pytest.mark.parametrize("variant", list(VARIANTS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Path]]:
    """The folder of a variant, the model in it, and the run that it was imported to."""
    made: dict[str, tuple[Path, Any, Path]] = {}

    def of(variant: str) -> tuple[Path, Any, Path]:
        if variant not in made:
            folder = tmp_path_factory.mktemp("marian")
            model = save(folder / "saved", VARIANTS[variant])
            import_model(str(folder / "saved"), folder / "run", key="from")
            made[variant] = (folder / "saved", model, folder / "run")
        return made[variant]

    return of


Saved = Callable[[str], tuple[Path, Any, Path]]


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(read(path) | values), encoding="utf-8")


def translator_of(run_dir: Path, precision: Precision = Precision.fp64) -> Translator:
    return load_translator(run_dir, checkpoint="auto", search=SearchOverride(), device=Device.cpu, precision=precision)


def their_tokenizer(folder: Path) -> Any:
    from transformers import MarianTokenizer

    return MarianTokenizer.from_pretrained(folder)


def their_ids(folder: Path, tokenizers: Tokenizers, *, side: int) -> list[int]:
    """The id of theirs that each of ours is, by the text of its piece; -1 for none. BOS is their start."""
    name = "target_vocab.json" if side == 1 and (folder / "target_vocab.json").exists() else "vocab.json"
    ids = json.loads((folder / name).read_text("utf-8"))
    theirs = [ids.get(piece, -1) for piece in tokenizers.sides[side].pieces()]
    theirs[BOS] = json.loads((folder / "config.json").read_text("utf-8"))["decoder_start_token_id"]
    if theirs[PAD] == theirs[BOS]:
        theirs[PAD] = -1
    return theirs


# ---- pieces ---------------------------------------------------------------------------------------------------------


@every_variant
def test_import_cuts_text_as_marian_tokenizer_does(variant: str, saved: Saved) -> None:
    """Piece by piece, in ten scripts and more, on both sides."""
    folder, _, run_dir = saved(variant)
    theirs = their_tokenizer(folder)
    ours = Tokenizers.load(run_dir)
    texts = [*SCRIPTS, *sentences(ENGLISH, 20, seed=3), *sentences(GERMAN, 20, seed=3)]
    for side, key in enumerate(("text", "text_target")):
        to_theirs = their_ids(folder, ours, side=side)
        found = ours.sides[side].encode(texts)
        for text, ids in zip(texts, found, strict=True):
            expected = theirs(**{key: text.replace("\t", " ")}, add_special_tokens=False)["input_ids"]
            assert [to_theirs[index] for index in ids] == expected, text
    assert UNK in found[SCRIPTS.index("한국어 문장")]


@every_variant
def test_import_writes_text_as_marian_tokenizer_does(variant: str, saved: Saved) -> None:
    folder, _, run_dir = saved(variant)
    theirs = their_tokenizer(folder)
    ours = Tokenizers.load(run_dir)
    to_theirs = their_ids(folder, ours, side=1)
    for text in sentences(GERMAN, 30, seed=4):
        [ids] = ours.target.encode([text])
        if UNK not in ids:
            expected = theirs.decode([to_theirs[index] for index in ids], skip_special_tokens=True)
            assert ours.target.decode([[*ids, EOS]]) == [expected]
    assert ours.target.decode([[], [BOS, EOS]]) == ["", ""]


def test_import_keeps_one_vocabulary_for_two_models(saved: Saved) -> None:
    folder, _, run_dir = saved("OPUS-MT")
    tokenizers = Tokenizers.load(run_dir)
    ids = json.loads((folder / "vocab.json").read_text("utf-8"))
    assert tokenizers.has_one_vocabulary
    assert not tokenizers.is_shared
    assert tokenizers.vocab_sizes == len(ids) + 1  # one more for PAD
    assert tokenizers.target.pieces()[:4] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert tokenizers.source.sentencepiece_model == (folder / "source.spm").read_bytes()
    assert tokenizers.target.sentencepiece_model == (folder / "target.spm").read_bytes()
    assert tokenizers.source.has_word(">>de<<")
    assert not tokenizers.source.has_word(">>xx<<")


# ---- numbers --------------------------------------------------------------------------------------------------------


def forced(model: Any, source: list[int], target_in: list[int]) -> Tensor:
    """Their logits `(T, V)` for ids of theirs."""
    output = model(
        input_ids=torch.tensor([source]),
        attention_mask=torch.ones(1, len(source), dtype=torch.long),
        decoder_input_ids=torch.tensor([target_in]),
    )
    logits: Tensor = output.logits[0]
    return logits


def our_logits(model: Any, source: list[int], target_in: list[int]) -> Tensor:
    logits: Tensor = model(
        torch.tensor([source]),
        torch.tensor([target_in]),
        source_layout=Padded.of([len(source)], len(source)),
        target_layout=Padded.of([len(target_in)], len(target_in)),
    )[0]
    return logits


@every_variant
def test_import_computes_their_logits(variant: str, saved: Saved) -> None:
    """In float64; and what is no class of Marian's has no probability."""
    folder, model, run_dir = saved(variant)
    exact = copy.deepcopy(model).double()
    translator = translator_of(run_dir)
    tokenizers = translator.tokenizers
    of_source, of_target = (their_ids(folder, tokenizers, side=side) for side in (0, 1))
    first = PAD if variant == "another start" else EOS  # class that they have, too; UNK lies between
    classes = [UNK, *(index for index in range(first, len(of_target)) if index != UNK and of_target[index] >= 0)]
    columns = [of_target[index] for index in classes]
    assert len(classes) == len(of_target) - (0 if variant == "another start" else 2)
    for source_text, target_text in zip(sentences(ENGLISH, 5, seed=5), sentences(GERMAN, 5, seed=6), strict=True):
        [source] = tokenizers.source.encode([source_text])
        [target] = tokenizers.target.encode([target_text])
        with torch.no_grad():
            ours = our_logits(translator.model, [*source, EOS], [BOS, *target])
            theirs = forced(exact, [of_source[i] for i in [*source, EOS]], [of_target[i] for i in [BOS, *target]])
        torch.testing.assert_close(ours[:, classes], theirs[:, columns], rtol=0, atol=1e-9)
        assert columns != list(range(len(columns))), "another order"
        torch.testing.assert_close(
            ours.log_softmax(1)[:, classes], theirs[:, columns].log_softmax(1), rtol=0, atol=1e-9
        )


def test_import_has_biases_of_attention_where_that_of_the_output_is_zero(tmp_path: Path) -> None:
    """As of a model trained from nothing with `transformers`, to which the output's is no parameter."""
    model = save(tmp_path / "saved", VARIANTS["another start"])
    model.final_logits_bias.zero_()
    model.save_pretrained(tmp_path / "saved")
    import_model(str(tmp_path / "saved"), tmp_path / "run", key="from")
    translator = translator_of(tmp_path / "run")
    of_source, of_target = (their_ids(tmp_path / "saved", translator.tokenizers, side=side) for side in (0, 1))
    [source] = translator.tokenizers.source.encode(sentences(ENGLISH, 1, seed=5))
    [target] = translator.tokenizers.target.encode(sentences(GERMAN, 1, seed=6))
    with torch.no_grad():
        ours = our_logits(translator.model, [*source, EOS], [BOS, *target])
        theirs = forced(model.double(), [of_source[i] for i in [*source, EOS]], [of_target[i] for i in [BOS, *target]])
    torch.testing.assert_close(ours, theirs[:, of_target], rtol=0, atol=1e-9)


def test_import_takes_their_beam_and_a_penalty_that_grows_like_theirs(saved: Saved, tmp_path: Path) -> None:
    """At 25 tokens |Y|^1 and ((5 + |Y|) / 6)^1.2 grow alike: the slopes of their logarithms, 1/25 and 1.2/30."""
    folder = Path(shutil.copytree(saved("OPUS-MT")[0], tmp_path / "saved"))
    for exponent, alpha in ((1.0, 1.2), (0.5, 0.6), (0.0, 0.0)):
        edit_json(folder / "generation_config.json", num_beams=6, length_penalty=exponent)
        assert read_marian(folder).search == SearchConfig(beam_size=6, length_penalty=alpha)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_import_names_what_changes_their_translations_and_is_not_done(
    name: str, saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Older models have such keys in config.json."""
    folder = Path(shutil.copytree(saved("OPUS-MT")[0], tmp_path / "saved"))
    padding = read(folder / "config.json")["pad_token_id"]
    if name == "config.json":
        (folder / "generation_config.json").unlink()
    nothing: dict[str, Any] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None}
    edit_json(folder / name, **nothing, min_length=0, do_sample=False, bad_words_ids=[[padding]])
    read_marian(folder)
    assert caplog.text == ""

    something: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [7]}
    edit_json(folder / name, **something, min_length=4, do_sample=True, bad_words_ids=[[padding], [5, 6]])
    read_marian(folder)
    (said,) = caplog.messages
    assert said == (
        f"{folder / name}: these settings are not supported here, so translations may differ: bad_words_ids, "
        "do_sample, min_length, no_repeat_ngram_size, repetition_penalty, suppress_tokens"
    )


@pytest.mark.parametrize("variant", tiers([*VARIANTS][:2], [*VARIANTS][2:], pytest.mark.ci))
def test_import_translates_as_generate_does(variant: str, saved: Saved) -> None:
    """Greedily, and with a beam under their penalty."""
    folder, model, run_dir = saved(variant)
    translator = translator_of(run_dir, Precision.fp32)
    of_source, of_target = (their_ids(folder, translator.tokenizers, side=side) for side in (0, 1))
    sources = translator.tokenizers.source.encode(sentences(ENGLISH, 6, seed=7))
    compared = 0
    for beam_size in (1, 4):
        search = SearchConfig(beam_size=beam_size, max_extra=6)
        decoder = translator.with_search(search).decoder
        found = decoder.hypotheses(sources, n_best=1, penalty=lambda length: float(length))
        for source, [best] in zip(sources, found, strict=True):
            generated = model.generate(
                input_ids=torch.tensor([[of_source[i] for i in [*source, EOS]]]),
                num_beams=beam_size,
                length_penalty=1.0,
                early_stopping="never" if beam_size > 1 else False,
                renormalize_logits=True,  # without padding, as the models of OPUS-MT ask for it
                max_length=1 + len(source) + 6,
            )[0, 1:]
            expected = [index for index in generated.tolist() if index not in (of_target[EOS], of_target[BOS])]
            if best.finished == (of_target[EOS] in generated.tolist()):  # ours ranks first what has ended
                assert [of_target[index] for index in best.tokens] == expected
                compared += 1
    assert compared >= len(sources)


@every_variant
def test_import_starts_from_zeros_where_marian_does(variant: str, saved: Saved) -> None:
    _, _, run_dir = saved(variant)
    model = read(run_dir / "averaged" / "config.json")["model"]
    assert model["start"] == ("learned" if variant == "another start" else "zeros")


def test_import_takes_a_start_that_was_trained_as_it_is(saved: Saved, tmp_path: Path) -> None:
    """As fine-tuning by `transformers` leaves it: its output moves the row of padding."""
    folder = Path(shutil.copytree(saved("OPUS-MT")[0], tmp_path / "tuned"))
    tensors = load_file(folder / "model.safetensors")
    padding = json.loads((folder / "config.json").read_text("utf-8"))["pad_token_id"]
    tensors["model.shared.weight"][padding] = 0.5
    save_file(tensors, folder / "model.safetensors")
    found = read_marian(folder)
    assert (found.model.start, found.model.biases) == (Start.learned, True)
    assert found.weights["embedding"][BOS].eq(0.5).all()
    assert found.weights["output_bias"][[PAD, BOS]].tolist() == [-100.0, -100.0]


def test_import_trains_as_autograd_on_their_model(saved: Saved) -> None:
    """Three updates of Adam in float64, every weight of theirs to 1e-9; the row of the start stays zero in both."""
    folder, model, run_dir = saved("OPUS-MT")
    theirs = copy.deepcopy(model).double().train()
    bias = theirs.final_logits_bias.clone().requires_grad_()  # a buffer of theirs
    theirs.final_logits_bias = torch.zeros_like(bias)

    translator = translator_of(run_dir)
    ours = Objective(translator.model, 0.0).train()
    for parameter in ours.parameters():
        parameter.requires_grad_()
    recipe: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-9}
    optimizers = [
        torch.optim.Adam([*(p for name, p in theirs.named_parameters() if "positions" not in name), bias], **recipe),
        torch.optim.Adam(ours.parameters(), **recipe),
    ]
    of_source, of_target = (their_ids(folder, translator.tokenizers, side=side) for side in (0, 1))
    for step in range(3):
        [source] = translator.tokenizers.source.encode(sentences(ENGLISH, 1, seed=10 + step))
        [target] = translator.tokenizers.target.encode(sentences(GERMAN, 1, seed=20 + step))
        logits = forced(theirs, [of_source[i] for i in [*source, EOS]], [of_target[i] for i in [BOS, *target]]) + bias
        logits = logits.index_fill(1, torch.tensor([of_target[BOS]]), -torch.inf)  # padding is no class of Marian's
        expected = F.cross_entropy(logits, torch.tensor([of_target[i] for i in [*target, EOS]]), reduction="sum")
        hidden_logits = our_logits(ours.model, [*source, EOS], [BOS, *target])
        found = F.cross_entropy(hidden_logits, torch.tensor([*target, EOS]), reduction="sum")
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        for optimizer, loss in zip(optimizers, (expected, found), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        theirs.final_logits_bias.copy_(bias)
    folder_after = run_dir.parent / "after"
    theirs.save_pretrained(folder_after)
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        shutil.copy(folder / name, folder_after / name)
    expected_weights = read_marian(folder_after).weights
    for name, weight in parameters_by_name(ours.model).items():
        if name == "embedding":
            assert not weight[[PAD, BOS]].any()
        if "W_k.bias" in name:
            continue  # has no gradient but rounding, which Adam makes as large as any other
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-9, msg=name)


# ---- the commands ---------------------------------------------------------------------------------------------------


def texts_of(folder: Path, count: int = 12) -> PairConfig:
    """Two files in words that the tokenizers know."""
    paths = [folder / name for name in ("text.en", "text.de")]
    for path, words in zip(paths, (ENGLISH, GERMAN), strict=True):
        path.write_text("".join(f"{line}\n" for line in sentences(words, count, seed=8)), encoding="utf-8")
    return PairConfig(*map(str, paths))


def test_import_makes_a_run_that_every_command_takes(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = saved("OPUS-MT")
    theirs = shutil.copytree(folder, tmp_path / "saved")
    (theirs / "README.md").write_text("---\nlanguage: en\nlicense: cc-by-4.0\n---\n# A model\n", encoding="utf-8")
    run_dir = tmp_path / "run"
    run_command("import", ImportJob(from_=str(theirs), run_dir=str(run_dir)))
    printed = capsys.readouterr().out
    assert "licence     cc-by-4.0" in printed
    to_translate, to_train = (composed(line) for line in printed.split("\n") if line.startswith("transformer "))
    assert to_translate.run_dir == str(run_dir)
    assert (to_train.init_from, to_train.data.src_lang, to_train.data.tgt_lang) == (str(run_dir), "en", "de")
    assert "en to de" in printed
    record = read(run_dir / "run.json")["imported"]
    assert (record["source"], record["revision"], record["licence"]) == (str(theirs), None, "cc-by-4.0")
    assert "# A model" in record["card"]
    assert set(record["sha256"]) == {path.name for path in folder.iterdir()} - {"special_tokens_map.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "saved"]

    pair = texts_of(tmp_path)
    run_command("evaluate", EvaluateJob(run_dir=str(run_dir), test={"news": pair}, threads=1))
    assert "news" in capsys.readouterr().out
    ended = in_a_child("translate", TranslateJob(run_dir=str(run_dir), threads=1), tmp_path, "the old dog\n")
    assert (ended.status, ended.printed.count("\n")) == (0, 1), ended.said
    exported = export(
        ExportJob(
            run_dir=str(run_dir),
            to=Target.huggingface,
            output=str(tmp_path / "back"),
            src=pair.src,
            tgt=pair.tgt,
            threads=1,
        )
    )
    assert exported.parity.bound == 1e-9
    assert exported.parity.cut_alike == exported.parity.sentences
    assert (tmp_path / "back" / "source.spm").read_bytes() == (folder / "source.spm").read_bytes()
    with pytest.raises(InputError, match="to=onnx: this run takes its ids from a list of pieces"):
        export(ExportJob(run_dir=str(run_dir), to=Target.onnx, output=str(tmp_path / "onnx"), src=pair.src))
    with pytest.raises(InputError, match=r"model\.positions=sinusoidal: Marian's sinusoids have other frequencies"):
        export(ExportJob(run_dir=str(run_dir), to=Target.marian, output=str(tmp_path / "marian"), src=pair.src))


def test_import_in_ctranslate2_translates_as_their_own_converter_has_it(saved: Saved, tmp_path: Path) -> None:
    """From transformers' files to CTranslate2 in one step, or through a run: the same pieces, at the same scores."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    folder, _, run_dir = saved("OPUS-MT")
    pair = texts_of(tmp_path)
    theirs = ctranslate2.converters.TransformersConverter(str(folder)).convert(str(tmp_path / "theirs"))
    ours = tmp_path / "ours"
    export(
        ExportJob(run_dir=str(run_dir), to=Target.ctranslate2, output=str(ours), src=pair.src, tgt=pair.tgt, threads=1)
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(ours / "tokenizer.model"))
    sources = pieces.encode(Path(pair.src).read_text("utf-8").splitlines(), out_type=str)
    found = []
    for model, end in ((ours, []), (theirs, ["</s>"])):  # which theirs leaves to its caller
        translator = ctranslate2.Translator(str(model), intra_threads=1)
        results = translator.translate_batch(
            [[*source, *end] for source in sources], max_decoding_length=12, return_scores=True, min_decoding_length=0
        )
        found.append([(result.hypotheses[0], pytest.approx(result.scores[0], abs=1e-4)) for result in results])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "changes",
    tiers([{"start": Start.zeros, "biases": True}], [{}, {"start": Start.zeros}], pytest.mark.ci),
    ids=["biases", "learned", "zeros"],
)
def test_import_of_an_export_of_a_run_is_that_run(changes: dict[str, Any], tmp_path: Path) -> None:
    """There and back: the same settings, tokenizer and weights, bit for bit."""
    data = write_corpus(tmp_path / "corpus")
    model = {"activation": Activation.swish, **changes}
    run_dir = run(tiny_job(tmp_path / "run", data, model, max_steps=2, average=1))
    export(ExportJob(run_dir=str(run_dir), to=Target.huggingface, output=str(tmp_path / "saved"), threads=1))
    import_model(str(tmp_path / "saved"), tmp_path / "back", key="from")
    models = [read(path / "averaged" / "config.json")["model"] for path in (run_dir, tmp_path / "back")]
    assert models[0] == models[1]
    for name in ("tokenizer.model", "averaged/model.safetensors"):
        assert (run_dir / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    assert not (tmp_path / "back" / "tokenizer.target.model").exists()


def job_on(data: DataConfig, run_dir: Path, init_from: Path, **recipe: Any) -> TrainJob:
    return replace(tiny_job(run_dir, data, **recipe), init_from=str(init_from))


@pytest.mark.ci
def test_init_from_a_published_model_goes_on_from_it(saved: Saved, tmp_path: Path) -> None:
    """From the folder itself and from the imported run: the same training, with the source's model and pieces."""
    folder, _, imported = saved("OPUS-MT")
    data = write_corpus(tmp_path / "corpus")
    recipe: dict[str, Any] = {"max_steps": 2, "average": 1, "learning_rate": 1e-4}
    runs = [run(job_on(data, tmp_path / name, source, **recipe)) for name, source in (("a", folder), ("b", imported))]
    weights = [load_file(run_dir / "averaged" / "model.safetensors") for run_dir in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert weights[0].keys() == weights[1].keys()
    start = load_file(imported / "averaged" / "model.safetensors")
    assert all((weights[0][name] - start[name]).abs().max() < 1e-3 for name in start)

    record = read(runs[0] / "run.json")
    assert record["config"]["init_from"] == str(folder)
    assert record["init_from"]["imported"]["source"] == str(folder)
    model = record["config"]["model"]
    assert (model["activation"], model["biases"], model["d_model"]) == ("swish", True, 16)
    for name in ("tokenizer.model", "tokenizer.target.model"):
        assert (runs[0] / name).read_bytes() == (imported / name).read_bytes()

    # It goes on without its source, and is exported.
    hidden = folder.rename(folder.with_name("hidden"))
    try:
        run(job_on(data, tmp_path / "a", folder, **recipe | {"max_steps": 3}))
    finally:
        hidden.rename(folder)
    assert read(runs[0] / "results.json")["steps"] == 3
    for target in (Target.ctranslate2, Target.huggingface):
        exported = export(ExportJob(run_dir=str(runs[0]), to=target, output=str(tmp_path / target.value), threads=1))
        assert exported.parity.problems == []


@pytest.mark.ci
def test_init_from_a_published_model_is_imported_by_one_rank_for_all(saved: Saved, tmp_path: Path) -> None:
    folder, _, imported = saved("two vocabularies")
    job = job_on(write_corpus(tmp_path / "corpus"), tmp_path / "run", folder, max_steps=1, average=1, max_tokens=100)
    job.train.learning_rate = 1e-30
    assert ranks(2, lambda: run(job), tmp_path) == [0, 0]
    weights = [load_file(path / "averaged" / "model.safetensors") for path in (imported, tmp_path / "run")]
    assert all(torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=1e-29) for name in weights[0])


# ---- what is refused ------------------------------------------------------------------------------------------------


def with_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), encoding="utf-8")

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return write


def with_text(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return write


def with_a_pickle(folder: Path) -> None:
    """Of an object that is no tensor, which would have to be made by running something."""
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Path("x")}, folder / "pytorch_model.bin")


def with_pickled(change: Callable[[dict[Any, Any]], object]) -> Callable[[Path], None]:
    """The tensors as a pickle, changed."""

    def write(folder: Path) -> None:
        tensors: dict[Any, Any] = dict(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        change(tensors)
        torch.save(tensors, folder / "pytorch_model.bin")

    return write


def replaced(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something else in the place of a file."""

    def write(folder: Path) -> None:
        for path in (folder / name, folder / ("model.safetensors" if name == "pytorch_model.bin" else name)):
            path.unlink(missing_ok=True)
        make(folder / name)

    return write


def of_a_tensor(make: Callable[[], Tensor]) -> Callable[[Path], None]:
    return with_pickled(lambda held: held.update({"junk": make()}))


HOSTILE_TENSORS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(5).to_sparse(),
    "sparse rows": lambda: torch.eye(5).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "nested with offsets": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "meta": lambda: torch.zeros(2, device="meta"),
    "expanded": lambda: torch.zeros(1).expand(2, 2),
    "of 40 GB": lambda: torch.zeros(1).expand(10**5, 10**5),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    "complex": lambda: torch.zeros(2, dtype=torch.complex64),
    "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
}
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "another kind": (with_config(model_type="bart"), "config.json: model_type='bart': not marian"),
    "a decoder": (with_config(architectures=["MarianForCausalLM"]), "config.json: architectures="),
    "no scale": (with_config(scale_embedding=False), "config.json: scale_embedding=False: embeddings here"),
    "an unknown activation": (with_config(activation_function="mish"), "activation_function='mish': not one of relu, "),
    "heads": (with_config(decoder_attention_heads=4), "encoder_attention_heads=2: differs from decoder_attention"),
    "widths": (with_config(encoder_ffn_dim=32), "encoder_ffn_dim=32: differs from decoder_ffn_dim=24"),
    "heads that do not divide": (
        with_config(encoder_attention_heads=3, decoder_attention_heads=3),
        "config.json: model.d_model=16 is not a multiple of model.n_heads=3",
    ),
    "a text for a number": (with_config(d_model="16"), "config.json: d_model='16': not a whole number"),
    "no configuration": (without("config.json"), "config.json: missing: MarianMTModel.save_pretrained writes it"),
    "no JSON": (with_text("config.json", "{"), "config.json: not JSON: "),
    "no vocabulary": (without("vocab.json"), "vocab.json: missing"),
    "no pieces": (without("source.spm"), "source.spm: cannot be read (No such file or directory)"),
    "bad pieces": (with_text("target.spm", "none"), "target.spm: not a SentencePiece model"),
    "no weights": (without("model.safetensors"), "neither model.safetensors nor pytorch_model.bin"),
    "damaged weights": (with_text("model.safetensors", "none"), "model.safetensors: not a safetensors file: "),
    "a pickle": (with_a_pickle, "pytorch_model.bin: a pickle that torch's weights-only loader does not read"),
    "a size that does not fit": (with_config(vocab_size=50, decoder_vocab_size=50), "vocab.json: it has "),
    "another end": (with_config(eos_token_id=1), "vocab.json: </s> is 0, but eos_token_id of config.json is 1"),
    "a start that is the end": (
        with_config(decoder_start_token_id=0),
        "vocab.json: decoder_start_token_id=0 of config.json is not a piece of its own here",
    ),
    "more layers": (with_config(encoder_layers=3), "model.encoder.layers.2.self_attn.q_proj.weight is missing"),
    "very many layers": (with_config(encoder_layers=10**9), "fewer layers than config.json asks for"),
    "fewer layers": (with_config(decoder_layers=1), "model.decoder.layers.1."),
    "another width": (
        with_tensors(lambda held: held.update({"model.encoder.layers.0.fc1.weight": torch.zeros(24, 8)})),
        "model.encoder.layers.0.fc1.weight is (24, 8), with d_model=16",
    ),
    "a weight that is unknown": (
        with_tensors(lambda held: held.update({"model.extra": torch.zeros(2)})),
        "'model.extra' has no place in the model",
    ),
    "not a number": (
        with_tensors(lambda held: held["final_logits_bias"].fill_(float("nan"))),
        "'final_logits_bias' holds numbers that are not finite",
    ),
    "other positions": (
        with_tensors(lambda held: held.update({"model.encoder.embed_positions.weight": torch.ones(64, 16)})),
        "model.encoder.embed_positions.weight is not the table of sinusoids",
    ),
    "a key that is no text": (
        with_pickled(lambda held: held.update({5: torch.zeros(2)})),
        "pytorch_model.bin: not a dictionary of tensors",
    ),
    "a list": (with_pickled(lambda held: held.update({"x": [torch.zeros(2)]})), "not a dictionary of tensors"),
    **{
        f"a tensor that is {kind}": (of_a_tensor(make), "pytorch_model.bin: 'junk' is ")
        for kind, make in HOSTILE_TENSORS.items()
    },
    **{
        f"a pipe as {name}": (replaced(name, os.mkfifo), f"{name}: cannot be read (not a regular file)")
        for name in ("config.json", "vocab.json", "source.spm", "model.safetensors", "pytorch_model.bin")
    },
    **{
        f"{name} that links to itself": (
            replaced(name, lambda path: path.symlink_to(path.name)),
            f"{name}: cannot be read (Too many levels of ",
        )
        for name in ("config.json", "generation_config.json", "tokenizer_config.json", "vocab.json")
    },
    **{
        f"{name} that links to itself": (
            replaced(name, lambda path: path.symlink_to(path.name)),
            f"{name}: cannot be read (Too many levels of ",
        )
        for name in ("source.spm", "target.spm", "model.safetensors", "pytorch_model.bin")
    },
    **{
        f"{name} that is empty": (with_text(name, ""), f"{name}: not a SentencePiece model")
        for name in ("source.spm", "target.spm")
    },
    **{
        f"{key} beyond a float": (with_config(**{key: 10**400}), f"config.json: {key}=1000")
        for key in ("dropout", "attention_dropout", "activation_dropout", "d_model", "encoder_layers", "vocab_size")
    },
    **{
        f"{key} beyond a float": (with_config(**{key: 10**400}), f"config.json: {key}=1000")
        for key in ("max_position_embeddings", "decoder_start_token_id", "eos_token_id")
    },
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about rare kinds of tensors
@pytest.mark.parametrize("case", REFUSED)
def test_import_refuses_in_a_line(case: str, saved: Saved, tmp_path: Path) -> None:
    """Which names the file, and leaves nothing behind."""
    change, words = REFUSED[case]
    folder = shutil.copytree(saved("OPUS-MT")[0], tmp_path / "saved")
    change(folder)
    with pytest.raises(InputError) as refused:
        import_run(ImportJob(from_=str(folder), run_dir=str(tmp_path / "run")))
    message = str(refused.value)
    assert words in message
    assert str(folder) in message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


def test_import_reads_a_pickle_of_tensors_alone(saved: Saved, tmp_path: Path) -> None:
    """As most models of OPUS-MT were published, with their tables of positions, and matrices several times."""
    folder, model, run_dir = saved("OPUS-MT")
    theirs = shutil.copytree(folder, tmp_path / "saved")
    (theirs / "model.safetensors").unlink()
    tensors = dict(model.state_dict())
    assert any(name.endswith("embed_positions.weight") for name in tensors)
    torch.save(tensors, theirs / "pytorch_model.bin")
    (theirs / "README.md").write_text("---\ntags: x\n---\nlicense: mine\n", encoding="utf-8")
    import_model(str(theirs), tmp_path / "run", key="from")
    assert read(tmp_path / "run" / "run.json")["imported"]["licence"] is None  # the front matter has none
    paths = [path / "averaged" / "model.safetensors" for path in (run_dir, tmp_path / "run")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_import_refuses_what_is_there_already_and_what_is_no_folder(saved: Saved, tmp_path: Path) -> None:
    folder, _, run_dir = saved("OPUS-MT")
    with pytest.raises(InputError, match="exists already and is not empty: choose another run_dir"):
        import_model(str(folder), run_dir, key="from")
    with pytest.raises(InputError, match="from=nothing: no such folder; a model of the hub is named hf:OWNER/NAME"):
        import_model("nothing", tmp_path / "run", key="from")
    with pytest.raises(InputError, match="from=hf:x: name a model of the hub as hf:OWNER/NAME"):
        import_model("hf:x", tmp_path / "run", key="from")
    with pytest.raises(InputError, match="from is not set: name a folder"):
        import_run(ImportJob())


def test_import_asks_for_languages_that_nobody_names(saved: Saved, tmp_path: Path) -> None:
    folder = shutil.copytree(saved("OPUS-MT")[0], tmp_path / "saved")
    with_text("tokenizer_config.json", json.dumps({"source_lang": "eng", "target_lang": "ROMANCE"}))(folder)
    with pytest.raises(InputError, match="tgt_lang is not set, and the model says"):
        import_model(str(folder), tmp_path / "run", key="from")
    import_model(str(folder), tmp_path / "run", key="from", tgt_lang="ro")
    data = read(tmp_path / "run" / "run.json")["config"]["data"]
    assert (data["src_lang"], data["tgt_lang"]) == ("eng", "ro")


def test_train_refuses_an_imported_run_as_its_own(saved: Saved, tmp_path: Path) -> None:
    run_dir = shutil.copytree(saved("OPUS-MT")[2], tmp_path / "run")
    before = (run_dir / "averaged" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="a new start would remove the averaged model: train with init_from="):
        run(tiny_job(run_dir, write_corpus(tmp_path / "corpus")))
    assert (run_dir / "averaged" / "model.safetensors").read_bytes() == before


def test_replay_of_an_imported_run_is_refused(saved: Saved) -> None:
    _, _, run_dir = saved("OPUS-MT")
    with pytest.raises(InputError, match="an imported model, without a record of its training"):
        replay(ReplayJob(run_dir=str(run_dir)))


# ---- the hub, played by a server ------------------------------------------------------------------------------------


def test_run_dir_of_a_published_model_on_the_hub_is_imported_once(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, run_dir = saved("OPUS-MT")
    texts = sentences(ENGLISH, 3, seed=9)
    with model_hub() as hub:
        client_of(hub, monkeypatch, tmp_path / "home", token=None)
        revision = hub.put("theirs/opus", folder)
        theirs = transformer.load("hf:theirs/opus").translate(texts)
        assert theirs == transformer.load(run_dir).translate(texts)
        hub.asked.clear()
        path = run_path("hf:theirs/opus", "run_dir")
        assert hub.asked == ["api/models/theirs/opus"]
    record = read(path / "run.json")["imported"]
    assert (record["source"], record["revision"], path.name) == ("hf:theirs/opus", revision, revision)


@pytest.mark.ci
def test_import_fetches_a_model_of_the_hub_at_a_revision(saved: Saved, tmp_path: Path) -> None:
    """Over HTTP: what is needed, and nothing else; a training from it asks once."""
    folder = shutil.copytree(saved("OPUS-MT")[0], tmp_path / "served")
    (folder / "README.md").write_text("---\ntags:\n- translation\nlicense: apache-2.0\n---\n", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle that nobody asks for")
    (folder / "tf_model.h5").write_bytes(b"of another library")
    data = write_corpus(tmp_path / "corpus")
    job = job_on(data, tmp_path / "runs" / "tuned", Path("hf:ours/en-de"), max_steps=1, average=1)
    with model_hub() as hub:
        commit = hub.put("ours/en-de", folder)
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        with Shell(tmp_path, "transformer.training.loop", **environment, HF_HUB_OFFLINE="0") as shell:
            status, log = shell.run("import", "from=hf:ours/en-de@main", f"run_dir={tmp_path / 'run'}")
            assert (status, "Traceback" in log) == (0, False), log
            assert f"fetching hf:ours/en-de@main at revision {commit}" in log
            fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
            assert fetched == {path.name for path in folder.iterdir()} - {"pytorch_model.bin", "tf_model.h5"}
            status, log = shell.run("import", "from=hf:no/such", f"run_dir={tmp_path / 'none'}")
            assert status == 2, log
            assert "from=hf:no/such: not found on the hub" in log
            assert log.count("\n") == 1

            given = [text for text in overrides(job) if not text.startswith("model.")]
            for steps in (1, 2):
                status, log = shell.run("train", *given, f"train.max_steps={steps}")
                assert status == 0, log
            status, log = shell.run("train", *given, "model.d_ff=32")
            assert status == 2
            assert "model.d_ff=32: init_from=hf:ours/en-de brings its own model: leave model.d_ff out" in log

            # A repository that is a run is taken as one.
            hub.put("ours/en-de", tmp_path / "runs" / "tuned")
            status, log = shell.run("import", "from=hf:ours/en-de", f"run_dir={tmp_path / 'theirs'}")
            assert status == 0, log
    theirs, tuned = (tmp_path / name for name in ("theirs", "runs/tuned"))
    assert (theirs / "averaged/model.safetensors").read_bytes() == (tuned / "averaged/model.safetensors").read_bytes()
    assert (theirs / "hypotheses/test.hyp").exists()
    assert not (theirs / "checkpoints").exists()
    assert read(theirs / "run.json")["imported"]["source"] == "hf:ours/en-de"
    record = read(tmp_path / "run" / "run.json")["imported"]
    assert (record["source"], record["revision"]) == ("hf:ours/en-de@main", commit)
    assert record["licence"] == "apache-2.0"
    weights = [path for path in hub.asked if path.endswith("model.safetensors") and "averaged" not in path]
    assert len(weights) <= 4  # HEAD and GET of each import
    (imported,) = (tmp_path / "corpus" / "store" / "imports").glob("hf-ours-en-de-*/run.json")
    assert read(imported)["imported"]["revision"] == commit
    assert read(tmp_path / "runs" / "tuned" / "run.json")["init_from"]["path"] == str(imported.parent / "averaged")
