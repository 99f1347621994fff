"""Validation: what its scores are of."""

import pytest
import torch

from transformer.config.settings import ModelConfig, Precision
from transformer.distributed import World
from transformer.model.transformer import Transformer
from transformer.training.step import Objective
from transformer.training.validate import DevSet, validate

REFERENCES = ["Der Hund von Frau Weiß bellt laut.", "Im Garten steht ein alter Baum.", "Wir fahren morgen nach Wien."]


class Letters:
    """A tokenizer of one piece a letter."""

    def encode(self, lines: list[str]) -> list[list[int]]:
        return [[4 + ord(letter) % 50 for letter in line] for line in lines]


class Answers:
    """A translator that gives these answers."""

    device, precision = torch.device("cpu"), Precision.fp32

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers

    def translate(self, sources: list[str], **options: object) -> list[str]:
        assert sources == ["a", "b", "c"]
        return self.answers


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
    dev = DevSet.of(list(zip("abc", REFERENCES, strict=True)), Letters(), max_pieces=100)
    validation, hypotheses = validate(
        Objective(model, 0.1),
        Answers(answers),
        dev,
        World(0, 1, {}),
        step=7,
        max_tokens=100,
        tgt_lang="de",
        check=lambda: None,
    )
    assert hypotheses == answers
    assert (validation.step, validation.bleu) == (7, pytest.approx(bleu, abs=1e-4))
