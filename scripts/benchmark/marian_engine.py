"""Models of several shapes, exported by `to=marian`, in Marian itself: translations and log-probabilities beside ours.

    python scripts/benchmark/marian_engine.py --engine PYTHON [--work FOLDER] [--steps 800] [SHAPE ...]

PYTHON is that of an environment with `pip install pymarian==1.12.42` (Python 3.11; 604 MB). Each shape is trained on
the demo for some hundred steps, unless FOLDER has the run already; `--run RUN` takes a finished one in their place. On
the dev set of the run:

- greedy: `decode -c decoder.yml --beam-size 1`, and ours
- a beam of 4: `decode -c decoder.yml`, and ours under the exponent of the length that is written there
- `score --word-scores` of the references, and ours in float64

Our side computes in float32, on as many threads as Marian. The searches end by different rules: where their
translations differ, the score of each under our model in float64 says which search has found the better one.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import transformer
from transformer.decoding.translator import Translator

TRAINING = (
    "experiment=demo model.d_model=64 model.d_ff=256 model.n_heads=4 model.dropout=0 tokenizer.vocab_size=500 "
    "model.start=zeros model.positions=marian train.threads=1 train.tokens_per_step=1500 train.log_every=100 "
    "train.optimizer=muon train.learning_rate=0.005 train.decay=cosine train.warmup_steps=60 train.average=1"
)
SHAPES = {
    "plain": "",
    "untied": "model.tie_embeddings=false",
    "two vocabularies": "tokenizer.target.vocab_size=450",
    "two vocabularies, untied": "tokenizer.target.vocab_size=450 model.tie_embeddings=false",
    "4 + 1 layers": "model.n_layers=4 model.n_decoder_layers=1",
    "biases": "model.biases=true",
    "Swish": "model.activation=swish",
    "Swish, biases, 4 + 1 layers": (
        "model.activation=swish model.biases=true model.n_layers=4 model.n_decoder_layers=1"
    ),
    "unscaled, narrow heads": "model.score=unscaled model.d_k=8 model.d_v=16",
}
ENGINE = "import sys, _pymarian; _pymarian.main(sys.argv[1:])"


@dataclass(frozen=True)
class Found:
    """How Marian and this package agree on a run."""

    version: str  # of pymarian
    sentences: int
    greedy: int  # translations that are the same
    beam: int
    ours_better: int  # of those that differ with a beam
    theirs_better: int
    tokens: int  # of the references, their ends counted
    largest: float  # difference of a log-probability
    mean: float
    bleu: float  # of ours, with a beam
    their_bleu: float


def train(shape: str, run_dir: Path, steps: int) -> None:
    """Train a model of this shape on the demo, if it is not there."""
    if (run_dir / "averaged").exists():
        return
    every = f"train.max_steps={steps} train.save_every={steps} train.validate_every={steps}"
    _transformer("train", *TRAINING.split(), *every.split(), *SHAPES[shape].split(), f"run_dir={run_dir}")


def compare(run_dir: Path, engine: str, folder: Path) -> Found:
    """Export a run into a folder that is not there, and compare the two on its dev set."""
    _transformer("export", f"run_dir={run_dir}", "to=marian", f"output={folder}", "threads=1")
    sources, references = (folder.with_name(f"{folder.name}.{side}") for side in ("src", "ref"))
    sources.write_bytes((run_dir / "hypotheses" / "dev.src").read_bytes())
    references.write_bytes((run_dir / "hypotheses" / "dev.ref").read_bytes())
    texts, targets = (path.read_text("utf-8").split("\n")[:-1] for path in (sources, references))

    # Marian.
    decoder = folder / "decoder.yml"
    decode = ("decode", "-c", str(decoder), "-i", str(sources), "--cpu-threads", "1", "--quiet")
    their_greedy = _marian(engine, *decode, "--beam-size", "1")
    their_beam = _marian(engine, *decode)
    settings = decoder.read_text("utf-8")
    vocabs = [str(folder / name) for name in ("source.spm", "target.spm")]
    if (folder / "vocab.spm").exists():
        vocabs = [str(folder / "vocab.spm")] * 2
    scored = _marian(
        engine,
        *("score", "-m", str(folder / "model.npz"), "-v", *vocabs, "-t", str(sources), str(references)),
        *("--word-scores", "--cpu-threads", "1", "--quiet"),
    )
    their_scores = [[float(number) for number in line.partition("WordScores=")[2].split()] for line in scored]

    # Ours.
    exponent = next(float(line.split()[1]) for line in settings.splitlines() if line.startswith("normalize:"))
    ours = transformer.load(run_dir, precision="fp32", device="cpu")
    exact = transformer.load(run_dir, precision="fp64", device="cpu")
    greedy = _translate(transformer.load(run_dir, precision="fp32", device="cpu", beam_size=1), texts, exponent)
    beam = _translate(ours, texts, exponent)
    our_scores = [one.piece_log_probs or [] for one in exact.score(texts, targets)]

    # Beside each other.
    gaps = []
    for one, other in zip(our_scores, their_scores, strict=True):
        if len(one) != len(other):
            raise SystemExit(f"{folder}: Marian cuts a reference into {len(other)} pieces, and ours into {len(one)}")
        gaps += [abs(a - b) for a, b in zip(one, other, strict=True)]
    different = [(text, a, b) for text, a, b in zip(texts, beam, their_beam, strict=True) if a != b]
    better = [_score(exact, text, a, exponent) - _score(exact, text, b, exponent) for text, a, b in different]
    version = subprocess.run(
        [engine, "-c", "import pymarian; print(pymarian.__version__)"], check=True, capture_output=True, text=True
    )
    return Found(
        version=version.stdout.strip(),
        sentences=len(texts),
        greedy=sum(a == b for a, b in zip(greedy, their_greedy, strict=True)),
        beam=len(texts) - len(different),
        ours_better=sum(gap > 0 for gap in better),
        theirs_better=sum(gap < 0 for gap in better),
        tokens=len(gaps),
        largest=max(gaps),
        mean=math.fsum(gaps) / len(gaps),
        bleu=_bleu(beam, targets),
        their_bleu=_bleu(their_beam, targets),
    )


def _translate(translator: Translator, texts: Sequence[str], exponent: float) -> list[str]:
    """Our best translations under Marian's penalty."""
    sources = translator.tokenizers.source.encode(list(texts))
    found = translator.hypotheses(sources, n_best=1, penalty=lambda length: float(length**exponent))
    return translator.tokenizers.target.decode([best.tokens for [best] in found])


def _score(exact: Translator, source: str, translation: str, exponent: float) -> float:
    """What both rank by; nothing at all is ranked last."""
    [one] = exact.score([source], [translation])
    return one.log_prob / len(one.piece_log_probs) ** exponent if one.log_prob is not None else -math.inf


def _bleu(translations: list[str], references: list[str]) -> float:
    import sacrebleu

    return sacrebleu.corpus_bleu(translations, [references]).score


def _transformer(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "transformer", *words], check=True, stdout=sys.stderr)


def _marian(engine: str, *words: str) -> list[str]:
    """The lines that a command of Marian's prints."""
    ended = subprocess.run([engine, "-c", ENGINE, *words], capture_output=True, text=True, timeout=3600)
    if ended.returncode:
        raise SystemExit(f"pymarian {words[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stdout.split("\n")[:-1]


def row_of(name: str, found: Found) -> str:
    """A row of the table."""
    others = found.sentences - found.beam
    better = f"ours is better in {found.ours_better}, Marian's in {found.theirs_better}"
    differ = f"; of the other {others}, {better}" if others else ""
    return (
        f"| {name} | {found.greedy} of {found.sentences} | {found.beam} of {found.sentences}{differ} | "
        f"{found.largest:.1e} | {found.mean:.1e} | {found.bleu:.2f}, {found.their_bleu:.2f} |"
    )


HEAD = """| shape | greedy, identical | beam 4, identical | largest log-probability gap | mean | BLEU: ours, Marian's |
| --- | --- | --- | --- | --- | --- |"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--engine", required=True, metavar="PYTHON")
    parser.add_argument("--work", type=Path, default=Path("runs/marian"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--run", type=Path, help="a finished run in place of the shapes")
    given = parser.parse_args(arguments)
    if unknown := set(given.shapes) - SHAPES.keys():
        parser.error(f"no such shape: {', '.join(unknown)}")

    print(HEAD)
    with TemporaryDirectory() as temporary:
        if given.run is not None:
            print(row_of(given.run.name, compare(given.run, given.engine, Path(temporary, "run"))), flush=True)
            return
        for number, shape in enumerate(given.shapes or SHAPES):
            run_dir = given.work / shape.replace(", ", "-").replace(" ", "-").replace("+", "and")
            train(shape, run_dir, given.steps)
            print(row_of(shape, compare(run_dir, given.engine, Path(temporary, str(number)))), flush=True)


if __name__ == "__main__":
    main()
