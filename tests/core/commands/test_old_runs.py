"""A run directory of commit 1bd6cd8 still translates, scores, evaluates, exports and resumes.

What is expected is what that commit gave: its numbers, but for the rounding of another processor.
"""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import transformer
from support.corpora import read, typed_in_a_child
from support.paths import ROOT, TESTS
from transformer.config.primitives import from_json
from transformer.config.settings import Kernels, TrainConfig
from transformer.run_dir import RunDir

JOB = [
    "experiment=small",
    "run_dir=old_run",
    *("data.train.src=train.en", "data.train.tgt=train.de", "data.dev.src=dev.en", "data.dev.tgt=dev.de"),
    *("data.test.test.src=test.en", "data.test.test.tgt=test.de", "data.src_lang=en", "data.tgt_lang=de"),
    *("model.n_layers=1", "model.d_model=32", "model.d_ff=64", "model.n_heads=2", "tokenizer.vocab_size=400"),
    *("train.validate_every=300", "train.save_every=300", "train.average=2", "train.keep_last=2", "train.threads=1"),
    *("train.precision=fp32", "train.tokens_per_step=1024", "train.learning_rate=5e-3", "train.warmup_steps=100"),
    *("train.device=cpu", "train.log_every=100", "train.ema_decay=0.9"),
]


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run in the folder of its texts, which is the working directory."""
    shutil.copytree(TESTS / "data" / "run_of_1bd6cd8", tmp_path / "old_run")
    for name, lines in (("train", 3_000), ("dev", 40), ("test", 40)):
        for language in ("en", "de"):
            text = (ROOT / "data" / "demo" / f"{name}.{language}").read_text(encoding="utf-8")
            head = "".join(f"{line}\n" for line in text.split("\n")[:lines])
            (tmp_path / f"{name}.{language}").write_text(head, encoding="utf-8", newline="\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "old_run"


def lines_of(name: str, count: int) -> list[str]:
    return Path(name).read_text(encoding="utf-8").split("\n")[:count]


def test_old_run_translates_and_scores(old_run: Path) -> None:
    translator = transformer.load(old_run)
    sources = lines_of("test.en", 8)
    n_best = translator.translate_n_best(sources, 2)
    assert [best.text for best, _ in n_best[:3]] == [
        "Diese Kellnerin seine Tanzt.",
        "Ichde Kellner.",
        "Diese Kellnerinderbe Kochzen.",
    ]
    approx: Any = pytest.approx
    best, second = n_best[6]
    assert (best.log_prob, second.log_prob) == approx((-15.712226, -16.437694), abs=1e-3)

    scored = translator.score(sources, lines_of("test.de", 8))
    expected = [-49.380034, -59.065521, -63.100797, -105.711107, -93.992877, -62.253639, -42.857718, -62.474964]
    assert [pair.log_prob for pair in scored] == approx(expected, abs=1e-3)


def test_old_run_translates_from_its_last_and_its_best_checkpoint(old_run: Path) -> None:
    for checkpoint in ("last", "best", "step-00000600"):
        (translation,) = transformer.load(old_run, checkpoint=checkpoint).translate(["I am dancing."])
        assert translation


@pytest.mark.ci
def test_old_run_evaluates_and_exports_through_the_command_line(old_run: Path) -> None:
    evaluated = typed_in_a_child("evaluate", "run_dir=old_run", "format=json", cwd=old_run.parent)
    scores = json.loads(evaluated.printed)["test_sets"]["test"]
    assert scores["bleu"] == pytest.approx(1.3062713160525186, abs=0.3)
    assert scores["chrf"] == pytest.approx(13.053170136478215, abs=0.3)
    assert RunDir(old_run).read_results().test_sets["test"].chrf_plus_plus is None, "its own scores have none"

    pytest.importorskip("ctranslate2")
    exported = typed_in_a_child("export", "run_dir=old_run", "to=ctranslate2", "output=out", cwd=old_run.parent)
    assert exported.status == 0, exported.said
    assert Path("out", "model.bin").exists()


def test_old_run_goes_on(old_run: Path) -> None:
    transformer.train(transformer.compose("train", [*JOB, "train.max_steps=620"]))
    (validation,) = read(old_run / "checkpoints" / "step-00000620" / "state.json")["training"]["progress"][
        "validations"
    ][-1:]
    assert validation["step"] == 620
    assert validation["loss"] == pytest.approx(3.4323608756414954, rel=1e-4)


def test_old_run_of_a_table_goes_on(old_run: Path) -> None:
    """Its digest was of the table's bytes; now it is of the text, and the same as that of text files."""
    rows = zip(lines_of("train.en", 3_000), lines_of("train.de", 3_000), strict=True)
    Path("train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    record = read(old_run / "run.json")
    of_text = record["data_digest"]
    columns_and_bytes = [["1", "2"], sha256(Path("train.tsv").read_bytes()).hexdigest()]
    parts = [3, 1, [columns_and_bytes], record["config"]["data"]["filter"], record["config"]["tokenizer"]]
    record["data_digest"] = sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    (old_run / "run.json").write_text(json.dumps(record), encoding="utf-8")

    table = ["data.train.src=''", "data.train.tgt=''", "data.train.dataset=train.tsv"]
    transformer.train(transformer.compose("train", [*JOB, *table, "train.max_steps=602"]))
    assert read(old_run / "run.json")["data_digest"] == of_text
    assert read(old_run / "data.json")["digest"] == of_text


@pytest.mark.parametrize(
    ("stored", "kernels"),
    [
        ({"attention_kernel": "varlen", "fused_loss": False, "attention_images": True}, Kernels.torch),
        ({"attention_kernel": "flex", "fused_loss": False}, Kernels.torch),
        ({"attention_kernel": "auto"}, Kernels.torch),
        ({"attention_kernel": "triton", "fused_loss": False}, Kernels.triton),
        ({"attention_kernel": "varlen", "fused_loss": True}, Kernels.triton),
        ({"kernels": "triton"}, Kernels.triton),
    ],
)
def test_from_json_reads_the_kernels_of_earlier_versions(stored: dict[str, Any], kernels: Kernels) -> None:
    assert from_json(TrainConfig, stored) == TrainConfig(kernels=kernels)


@pytest.mark.parametrize("stored", [{"attention_kernel": "cudnn"}, {"fused_loss": "yes"}, {"attention_images": []}])
def test_from_json_refuses_what_no_earlier_version_wrote(stored: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^train\.{next(iter(stored))}="):
        from_json(TrainConfig, stored)
