"""What `to=marian` writes, in Marian itself, and what Marian has trained, here: needs pymarian and the marker `marian`.

Marian is in this environment, or in that of the Python that TRANSFORMER_MARIAN names.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import transformer
from support.paths import ROOT
from support.scripts import load_script

pytestmark = [pytest.mark.marian, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def engine() -> str:
    python = os.environ.get("TRANSFORMER_MARIAN", sys.executable)
    if subprocess.run([python, "-c", "import pymarian"], capture_output=True).returncode:
        pytest.skip("pymarian is not installed")
    return python


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmark/marian_engine")


@pytest.mark.parametrize("shape", load_script("benchmark/marian_engine").SHAPES)
def test_marian_translates_and_scores_as_the_run_does(
    shape: str, engine: str, script: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Models that say something, on the 500 sentences of the demo's dev set."""
    run_dir = tmp_path_factory.getbasetemp() / shape  # which Bergamot's tests translate with, too
    script.train(shape, run_dir, 800)
    found = script.compare(run_dir, engine, tmp_path / "marian")
    assert found.version == "1.12.42"
    assert found.sentences == 500
    assert found.bleu > 10.0
    assert found.largest < 1e-3
    assert found.mean < 5e-5
    assert found.greedy >= 495  # ties, and what the number under the root of a norm decides
    assert found.beam >= 480  # Marian's search ends earlier
    assert abs(found.bleu - found.their_bleu) < 0.5


def test_marian_decoder_takes_the_settings_beside_the_model(engine: str, script: Any, tmp_path: Path) -> None:
    """From another folder, with empty lines, long lines and pieces that are unknown: a line for a line."""
    script.train("plain", tmp_path / "run", 30)
    script._transformer("export", f"run_dir={tmp_path / 'run'}", "to=marian", f"output={tmp_path / 'out'}", "threads=1")
    (tmp_path / "in.txt").write_text("the old lamp\n\n日本語\n" + "lamp " * 3000 + "\n", encoding="utf-8")
    words = ["decode", "-c", f"{tmp_path}/out/decoder.yml", "-i", f"{tmp_path}/in.txt", "--cpu-threads", "1"]
    assert len(script._marian(engine, *words, "--quiet")) == 4


TRAINING = (
    "--type transformer --train-sets in.en in.de --model model.npz --vocabs vocab.spm vocab.spm --dim-vocabs 300 300 "
    "--dim-emb 32 --transformer-dim-ffn 64 --transformer-heads 4 --enc-depth 2 --dec-depth 1 --transformer-dropout 0 "
    "--mini-batch 32 --maxi-batch 10 --mini-batch-fit false --workspace 200 --after-batches 600 --cpu-threads 1 "
    "--seed 1 --max-length 50 --overwrite --learn-rate 0.003 --lr-warmup 10 --quiet-translation --quiet"
)


def test_marian_trains_on_a_list_of_pieces_that_is_imported_as_it_is(engine: str, script: Any, tmp_path: Path) -> None:
    """As OPUS-MT's models are made: text cut by a SentencePiece model for each side, and `vocab.yml` by Marian."""
    import sentencepiece

    odd = ["\"no\" & 'yes' \\ # : * ! % @ ` | > { } [ ] , ? - ~ = null"] * 40
    for language, name in (("en", "source"), ("de", "target")):
        lines = (ROOT / "data" / "demo" / f"train.{language}").read_text("utf-8").split("\n")
        prefix = tmp_path / name
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*odd, *lines[:2000]]),
            model_prefix=str(prefix),
            vocab_size=220,
            character_coverage=1.0,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        prefix.with_suffix(".model").rename(prefix.with_suffix(".spm"))
        processor = sentencepiece.SentencePieceProcessor(model_file=str(prefix.with_suffix(".spm")))
        for part, texts in {"in": [*odd, *lines[:2000]], "dev": lines[2000:2100]}.items():
            cut = [" ".join(processor.encode(text, out_type=str)) for text in texts]
            (tmp_path / f"{part}.{language}").write_text("".join(f"{line}\n" for line in cut), encoding="utf-8")
            (tmp_path / f"{part}.text.{language}").write_text("".join(f"{line}\n" for line in texts), encoding="utf-8")
    train = "import sys, pymarian; pymarian.Trainer(sys.argv[1]).train()"
    training = TRAINING.replace("vocab.spm vocab.spm --dim-vocabs 300 300", "vocab.yml vocab.yml --tied-embeddings-all")
    command = [engine, "-c", train, f"{training} --task transformer-base"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)

    languages = ("data.src_lang=en", "data.tgt_lang=de")
    script._transformer("import", f"from={tmp_path / 'model.npz'}", f"run_dir={tmp_path / 'run'}", *languages)
    model = ("-m", str(tmp_path / "model.npz"), "-v", *[str(tmp_path / "vocab.yml")] * 2)
    sources, targets = (str(tmp_path / f"dev.{language}") for language in ("en", "de"))
    texts, references = (
        (tmp_path / f"dev.text.{language}").read_text("utf-8").split("\n")[:-1] for language in ("en", "de")
    )
    scored = script._marian(engine, "score", *model, "-t", sources, targets, "--cpu-threads", "1", "--quiet")
    ours = transformer.load(tmp_path / "run", precision="fp64", device="cpu").score(texts, references)
    assert max(abs((one.log_prob or 0.0) - float(line)) for one, line in zip(ours, scored, strict=True)) < 0.01
    greedy = ("--beam-size", "1", "--normalize", "0", "--allow-unk", "--max-length-factor", "5")
    cut = script._marian(engine, "decode", *model, *greedy, "-i", sources, "--cpu-threads", "1", "--quiet")
    theirs = [line.replace(" ", "").replace("\u2581", " ").strip() for line in cut]
    found = transformer.load(tmp_path / "run", precision="fp32", device="cpu", beam_size=1).translate(texts)
    assert sum(a == b for a, b in zip(found, theirs, strict=True)) >= 95


@pytest.mark.parametrize("task", ["transformer-base", "transformer-base-prenorm"])
def test_marian_trains_a_model_that_is_imported_as_it_is(task: str, engine: str, script: Any, tmp_path: Path) -> None:
    """It translates and scores here as there; pre-norm, where Marian's decoder differs from its scorer, it scores."""
    for language in ("en", "de"):
        lines = (ROOT / "data" / "demo" / f"train.{language}").read_text("utf-8").split("\n")
        (tmp_path / f"in.{language}").write_text("\n".join(lines[:2000]) + "\n", encoding="utf-8")
        (tmp_path / f"dev.{language}").write_text("\n".join(lines[2000:2100]) + "\n", encoding="utf-8")
    train = "import sys, pymarian; pymarian.Trainer(sys.argv[1]).train()"
    subprocess.run([engine, "-c", train, f"{TRAINING} --task {task}"], check=True, capture_output=True, cwd=tmp_path)

    script._transformer(
        *("import", f"from={tmp_path / 'model.npz'}", f"run_dir={tmp_path / 'run'}"),
        *("data.src_lang=en", "data.tgt_lang=de"),
    )
    model = ("-m", str(tmp_path / "model.npz"), "-v", str(tmp_path / "vocab.spm"), str(tmp_path / "vocab.spm"))
    sources, targets = (str(tmp_path / f"dev.{language}") for language in ("en", "de"))
    texts, references = (Path(path).read_text("utf-8").split("\n")[:-1] for path in (sources, targets))
    scored = script._marian(engine, "score", *model, "-t", sources, targets, "--cpu-threads", "1", "--quiet")
    ours = transformer.load(tmp_path / "run", precision="fp64", device="cpu").score(texts, references)
    assert max(abs((one.log_prob or 0.0) - float(line)) for one, line in zip(ours, scored, strict=True)) < 0.01
    if task == "transformer-base":
        greedy = ("--beam-size", "1", "--normalize", "0", "--allow-unk", "--max-length-factor", "5")
        theirs = script._marian(engine, "decode", *model, *greedy, "-i", sources, "--cpu-threads", "1", "--quiet")
        found = transformer.load(tmp_path / "run", precision="fp32", device="cpu", beam_size=1).translate(texts)
        assert sum(a == b for a, b in zip(found, theirs, strict=True)) >= 95
