"""Marian's own files as runs: against scores of Marian itself, against what an export wrote, and files that lie.

`tests/data/marian` has the models: see `test_marian`, and `prenorm`, whose SentencePiece model has Marian's own ids.
"""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import yaml

import transformer
from support.corpora import run, tiny_job, write_corpus
from support.marian_own import MARIAN_DATA, SHAPES, original_of, random_translator
from support.paths import ROOT
from transformer.config.settings import Norm, Positions, Start
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.integrations.export import marian
from transformer.integrations.export.command import export
from transformer.integrations.export.job import ExportJob, Target
from transformer.integrations.imports.command import import_run
from transformer.integrations.imports.job import ImportJob, Languages
from transformer.integrations.published.marian_form import SETTINGS, order_of, read_ids, read_settings
from transformer.model.transformer import parameters_by_name
from transformer.vocabulary import BOS, PAD

SCORES = json.loads((MARIAN_DATA / "scores.json").read_text("utf-8"))
EN_DE = Languages(src_lang="en", tgt_lang="de")


def imported(model: Path, run_dir: Path, **settings: Any) -> Translator:
    """The run of a model file, in float64."""
    import_run(ImportJob(from_=str(model), run_dir=str(run_dir), data=EN_DE, **settings))
    return transformer.load(run_dir, device="cpu", precision="fp64")


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def trained_spm(size: int) -> bytes:
    """As many pieces of the demo's text as this, with our special ids."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "data" / "demo" / "train.en").read_text("utf-8").split("\n")[:2000]),
        model_writer=file,
        vocab_size=size,
        model_type="bpe",
        character_coverage=0.99,
        normalization_rule_name="identity",
        minloglevel=2,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
    )
    return file.getvalue()


@pytest.fixture
def published(tmp_path: Path) -> Callable[[str], tuple[Path, list[str]]]:
    """A model that Marian has trained, alone in a folder, and its vocabularies."""

    def of(name: str) -> tuple[Path, list[str]]:
        folder = tmp_path / name
        folder.mkdir()
        np.savez(folder / "model.npz", **arrays_of(MARIAN_DATA / f"{name}.npz"))  # as Marian does: not compressed
        if name == "prenorm":
            shutil.copy(MARIAN_DATA / "prenorm.spm", folder / "vocab.spm")
            return folder / "model.npz", [str(folder / "vocab.spm")]
        sizes = [80] if name == "shared" else [74, 78]
        for size in sizes:
            (folder / f"{size}.spm").write_bytes(trained_spm(size))
        return folder / "model.npz", [str(folder / f"{size}.spm") for size in sizes]

    return of


Files = Callable[[str], tuple[Path, list[str]]]


@pytest.mark.parametrize("name", ["shared", "separate"])
def test_import_scores_as_marian_does(name: str, published: Files, tmp_path: Path) -> None:
    """Ids of Marian's, in our order: its `<pad>` and `<s>` are classes like any other, and count."""
    model, vocabularies = published(name)
    translator = imported(model, tmp_path / "run", vocabularies=vocabularies)
    sides = [dict(enumerate(order_of(side) or [])) for side in translator.tokenizers.sides]
    assert {PAD, BOS}.isdisjoint(sides[1].values())
    for one in SCORES[name]:
        source, target = (
            [ids[index] for index in one[key]] for ids, key in zip(sides, ("source", "target"), strict=True)
        )
        [found] = translator.decoder.log_probs([(source, target)])
        np.testing.assert_allclose(found, one["scores"], rtol=0, atol=1e-4)


def test_import_of_a_pre_norm_model_scores_as_marian_does(
    published: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From text to text, under the ids of a SentencePiece model that Marian reads: `</s>` 0 and `<unk>` 1."""
    model, vocabularies = published("prenorm")
    translator = imported(model, tmp_path / "run", vocabularies=vocabularies)
    config = translator.model.config
    assert (config.norm, config.start, config.positions) == (Norm.pre, Start.zeros, Positions.marian)
    assert "marian-decoder 1.12 differs" in caplog.text
    for one in SCORES["prenorm"]:
        [scored] = translator.score([one["source"]], [one["target"]])
        np.testing.assert_allclose(scored.piece_log_probs, one["scores"], rtol=0, atol=1e-4)


# ---- there and back -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(spm: bytes) -> Tokenizers:
    one = Tokenizer(spm)
    return Tokenizers(one, one)


@pytest.mark.parametrize("shape", SHAPES)
def test_import_of_an_export_is_exported_as_it_was(shape: str, shared: Tokenizers, tmp_path: Path) -> None:
    """The same arrays, bit for bit, settings and SentencePiece models; and where nothing is padded, the same run."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    translator = random_translator(SHAPES[shape], shared)
    marian.write(original_of(translator), tmp_path / "one")
    back = imported(tmp_path / "one" / "model.npz", tmp_path / "run")
    marian.write(replace(original_of(back), exponent=0.45), tmp_path / "other")
    arrays, again = (arrays_of(tmp_path / name / "model.npz") for name in ("one", "other"))
    assert arrays.keys() == again.keys()
    for name, array in arrays.items():
        assert array.dtype == again[name].dtype, name
        np.testing.assert_array_equal(array, again[name], err_msg=name)
    assert (tmp_path / "one" / "vocab.spm").read_bytes() == (tmp_path / "other" / "vocab.spm").read_bytes()
    assert not any(side.is_listed for side in back.tokenizers.sides)
    assert (back.search.beam_size, back.search.length_penalty) == (4, 0.54)  # of the exponent 0.45, at 25 pieces
    if shape != "narrow heads":
        ours, theirs = parameters_by_name(translator.model), parameters_by_name(back.model)
        assert {name: weight.shape for name, weight in ours.items()} == {name: w.shape for name, w in theirs.items()}
        assert all(torch.equal(weight, theirs[name].float()) for name, weight in ours.items())


@pytest.mark.parametrize("name", ["shared", "separate"])
def test_import_of_a_model_of_marian_is_exported_as_it_was(name: str, published: Files, tmp_path: Path) -> None:
    """Its arrays and settings, and its SentencePiece models, whose ids are not ours."""
    model, vocabularies = published(name)
    imported(model, tmp_path / "run", vocabularies=vocabularies)
    (tmp_path / "in.txt").write_text("the old lamp\nthe red house\n", encoding="utf-8")
    job = ExportJob(
        run_dir=str(tmp_path / "run"), to=Target.marian, output=str(tmp_path / "out"), src=str(tmp_path / "in.txt")
    )
    found = export(replace(job, threads=1, sentences=2))
    assert found.parity.problems == []
    arrays, again = arrays_of(model), arrays_of(tmp_path / "out" / "model.npz")
    assert arrays.keys() == again.keys()
    for key in arrays.keys() - {SETTINGS}:
        np.testing.assert_array_equal(arrays[key], again[key], err_msg=key)
    settings = [yaml.safe_load(each[SETTINGS].tobytes().rstrip(b"\0")) for each in (arrays, again)]
    assert settings[0] | {"version": ""} == {key: settings[1][key] for key in settings[0]} | {"version": ""}
    names = ["vocab.spm"] if name == "shared" else ["source.spm", "target.spm"]
    for path, written in zip(vocabularies, names, strict=True):
        assert Path(path).read_bytes() == (tmp_path / "out" / written).read_bytes()


def test_init_from_a_model_file_goes_on_from_it(published: Files, tmp_path: Path) -> None:
    """From the file itself, whose settings name the vocabulary: every weight that may move has moved in two steps."""
    model, [vocabulary] = published("prenorm")
    settings = (
        f"vocabs:\n  - /elsewhere/{Path(vocabulary).name}\n  - /elsewhere/{Path(vocabulary).name}\nbeam-size: 8\n"
    )
    model.with_name("model.npz.decoder.yml").write_text(settings + "normalize: 1\nword-penalty: 0\n", encoding="utf-8")
    data = write_corpus(tmp_path / "corpus")
    before = parameters_by_name(imported(model, tmp_path / "imported").model)
    job = replace(tiny_job(tmp_path / "run", data, max_steps=2, average=1), init_from=str(model))
    after = transformer.load(run(job), device="cpu", precision="fp64")
    for name, weight in parameters_by_name(after.model).items():
        assert not torch.equal(weight, before[name]), name
    assert not after.model.target_embedding.matrix[[PAD, BOS]].any()
    assert after.model.config.norm is Norm.pre


# ---- files that lie -------------------------------------------------------------------------------------------------


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A model file with other arrays."""

    def write(folder: Path) -> None:
        arrays = arrays_of(folder / "model.npz")
        change(arrays)
        np.savez(folder / "model.npz", **arrays)

    return write


def with_setting(key: str, value: str | None) -> Callable[[Path], object]:
    """A model file whose settings have another value; None: without this one."""

    def change(arrays: dict[str, Any]) -> None:
        lines = arrays[SETTINGS].tobytes().rstrip(b"\0").decode().split("\n")
        start = next((place for place, line in enumerate(lines) if line.startswith(f"{key}:")), len(lines))
        end = start + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        lines[start:end] = [] if value is None else [f"{key}: {value}"]
        arrays[SETTINGS] = np.frombuffer("\n".join(lines).encode() + b"\0", dtype=np.int8)

    return changed(change)


def with_member(name: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> Callable[[Path], object]:
    """A model file with one more member."""

    def write(folder: Path) -> None:
        with zipfile.ZipFile(folder / "model.npz", "a", compression) as archive:
            archive.writestr(name, content)

    return write


def npy(shape: str, dtype: str = "<f4", data: bytes = b"") -> bytes:
    """An .npy file that says so."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Path("x")], dtype=object), allow_pickle=True)
    return file.getvalue()


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def with_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def set_to(name: str, value: Any) -> Callable[[Path], object]:
    return changed(lambda arrays: arrays.update({name: value}))


BOMB = "a: &a [x, x]\nvocabs: [*a, *a, *a]\n"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another kind": (with_setting("type", "s2s"), "special:model.yml: type='s2s': not transformer"),
    "GELU": (with_setting("transformer-ffn-activation", "gelu"), "transformer-ffn-activation='gelu': Marian only"),
    "an unknown activation": (with_setting("transformer-ffn-activation", "mish"), "'mish': not relu or swish"),
    "other norms": (with_setting("transformer-postprocess", "dn"), "transformer-postprocess='dn': norms stand after"),
    "a norm of embeddings": (with_setting("transformer-postprocess-emb", "nd"), "transformer-postprocess-emb='nd': "),
    "an SSRU": (with_setting("transformer-decoder-autoreg", "rnn"), "transformer-decoder-autoreg='rnn': a model here"),
    "positions that are trained": (with_setting("transformer-train-positions", "true"), "train-positions='true': "),
    "from right to left": (with_setting("right-left", "true"), "right-left='true': a model here has 'false'"),
    "an unknown setting": (with_setting("moe-experts", "4"), "moe-experts='4': an unknown setting"),
    "no depth": (with_setting("enc-depth", None), "enc-depth=None: not a whole number below 10^9"),
    "very many layers": (with_setting("enc-depth", "999999999"), "fewer layers than its settings ask for"),
    "more layers": (with_setting("enc-depth", "3"), "encoder_l3_self_Wq is missing"),
    "fewer layers": (with_setting("enc-depth", "1"), " has no place in the model that its settings describe"),
    "heads that do not divide": (
        with_setting("transformer-heads", "3"),
        "model.d_model=16 is not a multiple of model.n_h",
    ),
    "another width": (with_setting("dim-emb", "32"), " is 16 wide, but dim-emb is 32"),
    "one vocabulary": (with_setting("dim-vocabs", "80"), "dim-vocabs='80': not two whole numbers"),
    "other vocabularies": (
        with_setting("dim-vocabs", "\n  - 80\n  - 90"),
        "80.spm: it has 80 pieces, but the model has 90",
    ),
    "an anchor": (with_setting("type", "&x transformer"), "special:model.yml: line "),
    "a type": (with_setting("type", "!!python/object:os.system"), "special:model.yml: line "),
    "nested settings": (with_setting("type", "transformer\n    deep: 1"), "is neither a setting nor an item of a list"),
    "a setting twice": (with_setting("new", "1\nnew: 2"), "special:model.yml: line "),
    "settings of numbers": (
        set_to(SETTINGS, np.zeros(4, np.float32)),
        "special:model.yml: it should be the text of Marian's settings, but is 4 numbers of type float32",
    ),
    "settings without end": (
        set_to(SETTINGS, np.full(1 << 17, 35, np.int8)),
        "special:model.yml: it should be the text of Marian's settings, but is 131072 numbers",
    ),
    "settings that are no text": (set_to(SETTINGS, np.full(9, -1, np.int8)), "special:model.yml: it is not UTF-8"),
    "no settings": (
        changed(lambda arrays: arrays.pop(SETTINGS)),
        "it has no special:model.yml: not a Marian model",
    ),
    "an unknown array": (set_to("extra", np.zeros((1, 2), np.float32)), "'extra' has no place in the model"),
    "an array of two rows": (
        set_to("encoder_l1_self_bq", np.zeros((2, 16), np.float32)),
        "encoder_l1_self_bq is (2, 16): not one row",
    ),
    "a number alone": (set_to("encoder_l1_self_Wq", np.float32(1.0)), "encoder_l1_self_Wq is (): not a matrix"),
    "another size": (
        set_to("encoder_l1_ffn_W1", np.zeros((16, 8), np.float32)),
        "encoder_l1_ffn_W1 makes a encoder.0.feed_forward.W_1.weight of (8, 16)",
    ),
    "rows too few": (
        set_to("Wemb", np.zeros((79, 16), np.float32)),
        "Wemb has 79 rows, but the vocabulary has 80 pieces",
    ),
    "not a number": (set_to("Wemb", np.full((80, 16), np.nan, np.float32)), "'Wemb' holds numbers that are not finite"),
    "whole numbers": (set_to("Wemb", np.zeros((80, 16), np.int32)), "'Wemb' is of type torch.int32"),
    "a pickle": (with_member("evil.npy", pickled()), "'evil' is an array of object"),
    "an array of text": (with_member("x.npy", npy("(1,)", "<U1", b"abcd")), "'x' is an array of <U1"),
    "a size beyond any memory": (
        with_member("x.npy", npy("(1000000000000,)")),
        "'x' is (1000000000000,) of float32, but has 0",
    ),
    "a size below nothing": (with_member("x.npy", npy("(-1, -1)", data=b"abcd")), "'x' is (-1, -1) of float32"),
    "a size of truths": (with_member("x.npy", npy("(True, True)", data=b"abcd")), "'x' is (True, True) of float32"),
    "a header that is code": (with_member("x.npy", npy("print(1)")), "'x' is not a numpy array"),
    "no array": (with_member("x.npy", b"none"), "'x' is not a numpy array"),
    "an array twice": (with_member("Wemb.npy", npy("(1,)", data=b"abcd")), "'Wemb' occurs twice"),
    "a bomb": (with_member("x.npy", bytes(1 << 22), zipfile.ZIP_DEFLATED), "its arrays are compressed"),
    "no archive": (with_text("model.npz", "none"), "model.npz: not an .npz file"),
    "no pieces": (with_text("80.spm", "none"), "80.spm: not a SentencePiece model"),
    "a list of pieces without SentencePiece models": (
        with_text("decoder.yml", "vocabs:\n- vocab.yml\n- vocab.yml\n"),
        "source.spm: cannot be read (No such file",
    ),
    "two lists of pieces": (
        with_text("decoder.yml", "vocabs:\n- vocab.en.yml\n- vocab.de.yml\n"),
        "vocab.de.yml: a list of pieces for each language",
    ),
    "a bomb of YAML": (with_text("decoder.yml", BOMB), "decoder.yml: not a Marian settings file: line 1"),
    "YAML without end": (with_text("decoder.yml", "x" * (1 << 21)), "decoder.yml: cannot be read (larger than 1048576"),
    "settings without vocabularies": (with_text("decoder.yml", "beam-size: 4\n"), "decoder.yml: it names no vocabs"),
    "a beam that is no number": (
        with_text("decoder.yml", "vocabs:\n- 80.spm\nbeam-size: nan\n"),
        "beam-size='nan': not a",
    ),
    "three vocabularies": (
        with_text("decoder.yml", "vocabs:\n- 80.spm\n- 80.spm\n- 80.spm\n"),
        "3 vocabularies: name one",
    ),
    "no vocabulary there": (
        with_text("decoder.yml", "vocabs:\n- ../../no.spm\n"),
        "no.spm: cannot be read (No such file",
    ),
    "a vocabulary that is the folder": (
        with_text("decoder.yml", "vocabs:\n- .\n"),
        "not a SentencePiece model (.spm)",
    ),
    "a vocabulary whose name nothing has": (
        with_text("decoder.yml", "vocabs:\n- a\0.spm\n"),
        "cannot be read (embedded null byte)",
    ),
    "a vocabulary whose name is too long": (
        with_text("decoder.yml", f"vocabs:\n- {'a' * 300}.spm\n"),
        ".spm: cannot be read (File name too long)",
    ),
    "a pipe as decoder.yml": (replaced("decoder.yml", os.mkfifo), "decoder.yml: cannot be read (not a regular file)"),
    "a pipe as 80.spm": (replaced("80.spm", os.mkfifo), "80.spm: cannot be read (not a regular file)"),
    "a link as 80.spm": (replaced("80.spm", lambda path: path.symlink_to("/etc/hostname")), "80.spm: cannot be read"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")  # of zipfile, which writes it for the test
@pytest.mark.parametrize("case", REFUSED)
def test_import_refuses_a_model_file_in_a_line(case: str, published: Files, tmp_path: Path) -> None:
    """Which names the file, and leaves nothing behind."""
    change, words = REFUSED[case]
    model, _ = published("shared")
    (model.parent / "decoder.yml").write_text("vocabs:\n  - 80.spm\n  - 80.spm\n", encoding="utf-8")
    change(model.parent)
    with pytest.raises(InputError) as refused:
        import_run(ImportJob(from_=str(model), run_dir=str(tmp_path / "run"), data=EN_DE))
    message = str(refused.value)
    assert words in message
    assert str(model.parent) in message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


def test_import_refuses_pre_norm_of_another_version(published: Files, tmp_path: Path) -> None:
    """Marian has not always put a norm before keys and values."""
    model, vocabularies = published("prenorm")
    with_setting("version", "v1.9.0 ba94c5b9 2020-05-17 10:42:17 +0100")(model.parent)
    with pytest.raises(InputError, match=r"version='v1\.9\.0 .*: a pre-norm model of a version other than v1\.12: "):
        import_run(ImportJob(from_=str(model), run_dir=str(tmp_path / "run"), vocabularies=vocabularies, data=EN_DE))


def test_import_refuses_vocabularies_of_what_has_its_own(tmp_path: Path) -> None:
    job = ImportJob(from_=str(tmp_path), run_dir=str(tmp_path / "run"), vocabularies=["a.spm"], data=EN_DE)
    with pytest.raises(InputError, match=r"vocabularies=a\.spm apply to a model\.npz"):
        import_run(job)


def test_import_asks_for_the_languages_of_a_model_file(published: Files, tmp_path: Path) -> None:
    model, vocabularies = published("shared")
    with pytest.raises(InputError, match=r"data\.src_lang is not set"):
        import_run(ImportJob(from_=str(model), run_dir=str(tmp_path / "run"), vocabularies=vocabularies))


# ---- a list of pieces, as OPUS-MT has it ----------------------------------------------------------------------------


def as_in_opus(published: Files) -> Path:
    """The model `shared` under other ids, which `vocab.yml` gives.

    There is one SentencePiece model for each side, and neither has these ids.
    """
    model, [vocabulary] = published("shared")
    processor = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
    order = np.random.default_rng(1).permutation(len(processor)).tolist()
    arrays = arrays_of(model)
    arrays["Wemb"] = arrays["Wemb"][order]
    arrays["decoder_ff_logit_out_b"] = arrays["decoder_ff_logit_out_b"][:, order]
    np.savez(model, **arrays)
    lines = [f"{json.dumps(processor.id_to_piece(old), ensure_ascii=False)}: {new}" for new, old in enumerate(order)]
    (model.parent / "vocab.yml").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (model.parent / "decoder.yml").write_text("vocabs:\n  - vocab.yml\n  - vocab.yml\n", encoding="utf-8")
    shutil.move(vocabulary, model.parent / "source.spm")
    (model.parent / "target.spm").write_bytes(trained_spm(74))
    return model


def test_import_of_a_list_of_pieces_scores_as_marian_does(published: Files, tmp_path: Path) -> None:
    """Marian's scores of a model are those of the same model under other ids; each side is cut by its own model."""
    model = as_in_opus(published)
    translator = imported(model, tmp_path / "run")
    pieces = translator.tokenizers.target.pieces()
    assert translator.tokenizers.source.pieces() == pieces
    source = sentencepiece.SentencePieceProcessor(model_file=str(model.parent / "source.spm"))
    ids = [pieces.index(source.id_to_piece(index)) for index in range(len(source))]
    for one in SCORES["shared"]:
        source_ids, target_ids = ([ids[index] for index in one[key]] for key in ("source", "target"))
        [found] = translator.decoder.log_probs([(source_ids, target_ids)])
        np.testing.assert_allclose(found, one["scores"], rtol=0, atol=1e-4)

    target = sentencepiece.SentencePieceProcessor(model_file=str(model.parent / "target.spm"))
    text = "the old lamp is red"
    for tokenizer, processor in zip(translator.tokenizers.sides, (source, target), strict=True):
        assert [pieces[index] for [*each] in tokenizer.encode([text]) for index in each] == processor.encode(
            text, out_type=str
        )
    named = [str(model.parent / name) for name in ("vocab.yml", "target.spm", "source.spm")]
    swapped = imported(model, tmp_path / "swapped", vocabularies=named)
    assert swapped.tokenizers.source.encode([text]) == translator.tokenizers.target.encode([text])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace(": 7\n", ": x\n"), "is no piece with its id"),
        (lambda text: text.replace(": 7\n", ": 8\n"), "its ids are not 0 to the last, each once"),
        (lambda text: f"{text}new: 80\n", "it has 81 pieces, and the model 80 and 80"),
        (lambda text: text.replace("</s>", "</t>"), "it has no </s> or no <unk>"),
        (lambda text: "&a " + text, "line 1 is no piece with its id"),
        (lambda text: "{a: 1}", "line 1 is no piece with its id"),
        (lambda text: "x" * ((1 << 24) + 1), "larger than 16777216"),
    ],
)
def test_import_refuses_a_list_of_pieces_in_a_line(
    change: Callable[[str], str], words: str, published: Files, tmp_path: Path
) -> None:
    model = as_in_opus(published)
    path = model.parent / "vocab.yml"
    path.write_text(change(path.read_text("utf-8")), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        imported(model, tmp_path / "run")
    message = str(refused.value)
    assert words in message
    assert message.startswith(str(path))
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


OF_MARIAN = r"""</s>: 0
<unk>: 1
▁: 2
",": 3
"?": 4
"'": 5
":": 6
"\"": 7
"-": 8
"#": 9
"&": 10
\: 11
"]": 12
"~": 13
日: 14
😀: 15
▁is-it: 16
x'y"z: 17
"\x41\u00e9\U0001F600\\\t": 18
'it''s': 19
"""


def test_read_ids_reads_what_marian_writes() -> None:
    """Lines that Marian 1.12.42 wrote, and others that YAML has: PyYAML is the judge."""
    expected = {piece: int(index) for piece, index in yaml.load(OF_MARIAN, yaml.BaseLoader).items()}
    assert read_ids(OF_MARIAN) == expected
    for bad in (
        "a: 0\na: 1",
        '"\\q": 0',
        '"\\ud800": 0',
        "a #b: 0",
        "a: b: 0",
        "? a\n: 0",
        "a: 0 # x",
        "- a: 0",
        "  a: 0",
        "a:0",
    ):
        with pytest.raises(ValueError, match=r"^line \d"):
            read_ids(bad)


def test_read_settings_reads_what_marian_writes() -> None:
    text = (
        "relative-paths: true\nvocabs:\n  - a.spm\n  - 'it''s.spm'\nname: \"\"\nshortlist:\n- lex.bin\n- false\n"
        "input-types:\n  []\nnone: []\n# a remark\nbeam-size: 6\n"
    )
    assert read_settings(text) == yaml.safe_load(text) | {
        "relative-paths": "true",
        "beam-size": "6",
        "shortlist": ["lex.bin", "false"],
    }
