"""It learns: the demo reaches what the README promises, and a tiny model copies and reverses strings it never saw."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.corpora import finish, start, write_pair
from support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_train_of_the_demo_learns_its_grammar(tmp_path: Path) -> None:
    """80 BLEU on sentences like the training ones, and 60 to 97 on combinations that training never showed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "transformer", "train"], cwd=tmp_path, env=environment, check=True)
    results = json.loads((tmp_path / "runs/demo/results.json").read_text(encoding="utf-8"))
    scores = {name: found["bleu"] for name, found in results["test_sets"].items()}
    assert scores["test"] >= 80
    assert 60 <= scores["test_compositional"] <= 97
    assert share_of_words_aligned(tmp_path / "runs/demo") > 0.65


# Words of the demo's grammar that have one translation.
LEXICON = {
    **{"Bruder": "brother", "Onkel": "uncle", "Mutter": "mother", "Koch": "chef", "Wien": "Vienna"},
    **{"Küche": "kitchen", "Jacken": "jackets", "Gedicht": "poem", "weil": "because", "dass": "that"},
    **{"sollte": "should", "kaufen": "buy", "backen": "bake", "geliebt": "loved", "freundlicher": "friendly"},
}


def share_of_words_aligned(run_dir: Path) -> float:
    """Of the words of the lexicon that the model writes, how many are aligned to the word that they translate."""
    with (ROOT / "data/demo/test.en").open(encoding="utf-8") as source:
        command = start("translate", f"run_dir={run_dir}", "align=true", "format=jsonl", cwd=run_dir, stdin=source)
        out, _ = finish(command, 0)

    right = total = 0
    for line in out.split("\n")[:-1]:
        [found] = json.loads(line)["translations"]
        sources, targets = (words_of(found[side]) for side in ("source_pieces", "pieces"))
        for piece, word in zip(found["source_of"], targets, strict=True):
            if word in LEXICON and LEXICON[word] in sources:
                total += 1
                right += sources[piece] == LEXICON[word]
    assert total > 100
    return right / total


def words_of(pieces: list[str]) -> list[str]:
    """For each piece the word that it is a part of, without its punctuation."""
    text = "".join(pieces).split("▁")[1:]
    starts = [piece.startswith("▁") for piece in pieces]
    return [text[sum(starts[: n + 1]) - 1].strip(".,?!") for n in range(len(pieces))]


ALPHABET = "abcdefghijklmnopqr"
RECIPE = """experiment=base run_dir=run model.n_layers=2 model.d_model=128 model.d_ff=256 model.n_heads=4
    data.train.src=train.en data.train.tgt=train.de data.dev.src=dev.en data.dev.tgt=dev.de data.filter.max_length=20
    tokenizer.vocab_size=64 train.max_steps=1200 train.tokens_per_step=2048 train.learning_rate=1e-3
    train.warmup_steps=200 train.log_every=100 train.save_every=100 train.validate_every=1200 train.samples=0"""


def draw_strings(count: int) -> list[str]:
    """So many different strings of 3 to 10 symbols; a space on either side makes each symbol a piece of its own."""
    draw, seen = random.Random(1), dict[str, None]()
    while len(seen) < count:
        seen[" ".join(draw.choices(ALPHABET, k=draw.randint(3, 10)))] = None
    return list(seen)


@pytest.mark.parametrize("answer", [lambda text: text, lambda text: text[::-1]], ids=["copy", "reverse"])
def test_train_of_a_tiny_model_learns_copy_and_reverse(tmp_path: Path, answer: Callable[[str], str]) -> None:
    """Over 95 % of strings that training never showed come out right to the last symbol."""
    strings = draw_strings(12_300)
    parts = {"train": strings[:12_000], "dev": strings[12_000:12_050], "test": strings[12_050:]}
    for name, part in parts.items():
        write_pair(tmp_path, name, [(text, answer(text)) for text in part])
    finish(start("train", *RECIPE.split(), cwd=tmp_path), 0, timeout=500)
    with (tmp_path / "test.en").open(encoding="utf-8") as source:
        out, _ = finish(start("translate", "run_dir=run", cwd=tmp_path, stdin=source), 0)
    wanted = [answer(text) for text in parts["test"]]
    right = sum(one == other for one, other in zip(out.splitlines(), wanted, strict=True))
    assert right > 0.95 * len(wanted), f"{right} of {len(wanted)}"
