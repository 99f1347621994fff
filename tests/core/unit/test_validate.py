"""Validation: what its scores and its losses are of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from support.corpora import results_of, run, step_dir, tiny_job, write_corpus
from support.ranks import ranks
from transformer.config.settings import ModelConfig, Precision
from transformer.data.tokenizer import Tokenizers
from transformer.decoding.search import Hypothesis
from transformer.distributed import World, join_world
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.records import Validation
from transformer.training.step import Objective
from transformer.training.validate import DevSet, dev_loss, translate_dev, validate

EOS, BOS = 3, 2
EPS = 0.1

REFERENCES = ["Der Hund von Frau Weiß bellt laut.", "Im Garten steht ein alter Baum.", "Wir fahren morgen nach Wien."]


class Letters:
    """A tokenizer of one piece a letter."""

    def encode(self, lines: list[str]) -> list[list[int]]:
        return [[4 + ord(letter) % 50 for letter in line] for line in lines]


LETTERS: Any = Letters()  # in the place of a Tokenizer
BOTH = Tokenizers(LETTERS, LETTERS)


class Answers:
    """In the place of `BatchedDecoder` and of a tokenizer: gives each source its answer, which is one piece."""

    device, precision = torch.device("cpu"), Precision.fp64

    def __init__(self, answers: dict[str, str]) -> None:
        self.sources = LETTERS.encode(list(answers))
        self.answers = list(answers.values())
        self.asked: list[list[int]] = []

    def hypotheses(self, sources: list[list[int]], *, n_best: int, check: object) -> list[list[Hypothesis]]:
        assert n_best == 1
        self.asked += sources
        return [[Hypothesis([self.sources.index(ids)], 0.0, finished=True)] for ids in sources]

    def decode(self, hypotheses: list[list[int]]) -> list[str]:
        return [self.answers[piece] for [piece] in hypotheses]


@pytest.mark.parametrize(
    ("answers", "bleu"),
    [
        (REFERENCES, 100.0),
        ([reference.lower() for reference in REFERENCES], 19.9602),  # of the sacrebleu command line, which is cased
    ],
    ids=["cased", "lower-cased"],
)
def test_validate_scores_cased_text(answers: list[str], bleu: float) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(n_layers=1, d_model=8, d_ff=8, n_heads=2), 54)
    dev = DevSet.of(list(zip("abc", REFERENCES, strict=True)), BOTH, max_pieces=100)
    answering: Any = Answers(dict(zip("abc", answers, strict=True)))
    validation, hypotheses = validate(
        Objective(model, 0.1),
        answering,
        {"dev": dev},
        World(0, 1, {}),
        tokenizer=answering,
        step=7,
        max_tokens=100,
        tgt_langs={"dev": "de"},
        tokenize=None,
        check=lambda: None,
    )
    assert hypotheses == {"dev": answers}
    assert (validation.step, validation.sets) == (7, {})
    assert validation.bleu == pytest.approx(bleu, abs=1e-4)


def test_translate_dev_asks_for_what_is_not_blank_and_as_long_as_the_model_has_positions_for() -> None:
    answering: Any = Answers({"aaa": "short", "bb": "B"})
    sources = ["aaaaa", "", " ", "\u200b", "bb"]
    dev = DevSet.of([(source, "x") for source in sources], BOTH, max_pieces=3)
    assert translate_dev(answering, dev, World(0, 1, {}), tokenizer=answering) == ["short", "", "", "", "B"]
    assert answering.asked == LETTERS.encode(["aaa", "bb"])


@pytest.mark.usefixtures("float64")
def test_validate_on_three_ranks_is_that_of_one(tmp_path: Path) -> None:
    """Of seven sentences, which three ranks cannot share equally: each has its losses and its translation once."""
    torch.manual_seed(0)
    objective = Objective(Transformer(ModelConfig(n_layers=1, d_model=8, d_ff=8, n_heads=2), 54), EPS)
    sources = [*REFERENCES, "ja", "Wo ist hier der Bahnhof?", "Es regnet.", "Ein Satz, der länger als die anderen ist."]
    dev = DevSet.of([(source, source.upper()) for source in sources], BOTH, max_pieces=100)
    upper: Any = Answers({source: source.upper() for source in sources})

    few = DevSet.of([(source, source.upper()) for source in sources[:2]], BOTH, max_pieces=100)

    def validate_on(world: World) -> tuple[Validation, dict[str, list[str]]]:
        return validate(
            objective,
            upper,
            {"devs.all": dev, "devs.few": few},
            world,
            tokenizer=upper,
            step=7,
            max_tokens=60,
            tgt_langs={"devs.all": "de", "devs.few": "de"},
            tokenize=None,
            check=lambda: None,
        )

    references = {"devs.all": dev.references, "devs.few": few.references}
    alone, hypotheses = validate_on(World(0, 1, {}))
    assert hypotheses == references
    assert alone.bleu == pytest.approx(100.0)

    def assert_same() -> None:
        with join_world(torch.device("cpu")) as world:
            assert world.size == 3
            shared, translations = validate_on(world)
            assert translations == references
            assert shared.bleu == pytest.approx(100.0)
            assert (shared.loss, shared.nll) == pytest.approx((alone.loss, alone.nll), rel=1e-12)
            for name, scores in alone.sets.items():
                found = shared.sets[name]
                assert (found.loss, found.nll) == pytest.approx((scores.loss, scores.nll), rel=1e-12)

    assert ranks(3, assert_same, tmp_path) == [0] * 3


Ids = list[int]


def losses(model: Transformer, pairs: Sequence[tuple[Ids, Ids]], eps: float) -> tuple[float, float]:
    """The smoothed and the plain loss, a sentence at a time: sums over targets with EOS, by the number of these."""
    smoothed = plain = 0.0
    tokens = 0
    for source, target in pairs:
        read, written, classes = [*source, EOS], [BOS, *target], [*target, EOS]
        logits = model(
            torch.tensor([read]),
            torch.tensor([written]),
            source_layout=Padded.of([len(read)], len(read)),
            target_layout=Padded.of([len(written)], len(written)),
        )[0]
        vocab_size = logits.shape[1]
        wanted = torch.full_like(logits, eps / (vocab_size - 1))  # (T, V): what is left is spread over the others
        wanted[torch.arange(len(classes)), classes] = 1.0 - eps
        smoothed += float(F.cross_entropy(logits, wanted, reduction="sum"))
        plain += float(F.cross_entropy(logits, torch.tensor(classes), reduction="sum"))
        tokens += len(classes)
    return smoothed / tokens, plain / tokens


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("max_tokens", [40, 4000])
def test_dev_loss_is_a_mean_over_target_tokens_with_their_ends(max_tokens: int) -> None:
    """Sentences of very different lengths, an empty one among them, in one batch or in several."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(n_layers=1, d_model=8, d_ff=8, n_heads=2, dropout=0.3), 54)
    texts = [*zip(REFERENCES, ["ja", "", "Ein Satz, der länger als die anderen ist."], strict=True)]
    dev = DevSet.of(texts, BOTH, max_pieces=100)
    found = dev_loss(
        Objective(model, EPS),
        dev.store,
        World(0, 1, {}),
        max_tokens=max_tokens,
        device=torch.device("cpu"),
        precision=Precision.fp64,
    )
    pairs = [(Letters().encode([source])[0], Letters().encode([target])[0]) for source, target in texts]
    with torch.no_grad():
        expected = losses(model.eval(), pairs, EPS)
    assert found == pytest.approx(expected, rel=1e-12)
    assert abs(expected[0] - expected[1]) > 0.01, "the two losses could be exchanged"


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_validate_records_the_loss_of_the_committed_weights(tmp_path: Path, smoothing: float) -> None:
    """From results.json of a run in float32, against its weights, its pieces and its dev text in float64."""
    data = write_corpus(tmp_path / "corpus")
    data.test = {}
    recipe: dict[str, Any] = {"max_steps": 4, "save_every": 2, "validate_every": 2, "label_smoothing": smoothing}
    job = tiny_job(tmp_path / "a", data, **recipe)
    run_dir = run(job)

    processor = sentencepiece.SentencePieceProcessor(model_file=str(run_dir / "tokenizer.model"))
    texts = [Path(path).read_text(encoding="utf-8").splitlines() for path in (data.dev.src, data.dev.tgt)]
    pairs = list(zip(*map(processor.encode, texts), strict=True))
    assert len(pairs) == 16

    rows = results_of(run_dir)["validations"]
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        model = Transformer(job.model, processor.get_piece_size()).double().eval()
        model.load_state_dict(load_file(step_dir(run_dir, row["step"]) / "model.safetensors"), strict=False)
        with torch.no_grad():
            smoothed, plain = losses(model, pairs, smoothing)
        assert row["loss"] == pytest.approx(smoothed, rel=1e-5)
        assert row["nll"] == pytest.approx(plain, rel=1e-5)
