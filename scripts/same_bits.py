"""Whether two commits train the same model: the demo, on one thread, with each; weights and scores are compared.

    python scripts/same_bits.py HEAD~1 HEAD
    python scripts/same_bits.py A B --steps 300 train.precision=fp32      further settings are those of `train`

Exit status 0 if every weight is the same to the last bit and so are the scores, else 1. Each commit is checked out
into a temporary folder, and runs with the packages that are installed.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Train at both commits, print what differs; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs=2, metavar="COMMIT")
    parser.add_argument("--steps", type=int, default=300)
    args, settings = parser.parse_known_args(arguments)

    with TemporaryDirectory(prefix="same-bits-") as temporary:
        found = []
        for number, commit in enumerate(args.commits):
            run = Path(temporary, f"run-{number}")
            train(commit, Path(temporary, f"tree-{number}"), run, steps=args.steps, settings=settings)
            found.append((weights_of(run), scores_of(run)))
    (weights, scores), (other_weights, other_scores) = found

    differing = [name for name in sorted({*weights, *other_weights}) if weights.get(name) != other_weights.get(name)]
    print(f"weights: {len(weights)} tensors, {len(differing)} differ{''.join(f' {name}' for name in differing[:5])}")
    print(f"scores:  {scores}" if scores == other_scores else f"scores:  {scores} and {other_scores}")
    return int(bool(differing) or scores != other_scores)


def train(commit: str, tree: Path, run: Path, *, steps: int, settings: list[str]) -> None:
    """The demo by the command line of a commit."""
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x"], cwd=tree, input=archive.stdout, check=True)
    schedule = [
        f"train.max_steps={steps}",
        f"train.save_every={steps}",
        f"train.validate_every={steps}",
        "train.average=1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    where = f"import transformer; assert transformer.__file__.startswith({str(tree)!r}), transformer.__file__"
    subprocess.run([sys.executable, "-P", "-c", where], env=environment, check=True)
    command = [sys.executable, "-P", "-m", "transformer", "train", f"run_dir={run}", "train.threads=1", *schedule]
    subprocess.run([*command, *settings], cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)


def weights_of(run: Path) -> dict[str, str]:
    """The digest of each tensor of the averaged model, by name."""
    with safe_open(run / "averaged/model.safetensors", framework="pt") as file:
        return {
            name: hashlib.sha256(file.get_tensor(name).numpy().tobytes()).hexdigest()  # saved in fp32
            for name in file.keys()  # noqa: SIM118 (it is no dictionary)
        }


def scores_of(run: Path) -> dict[str, Any]:
    """BLEU and chrF of each test set."""
    test_sets = json.loads((run / "results.json").read_text(encoding="utf-8"))["test_sets"]
    return {name: (scores["bleu"], scores["chrf"]) for name, scores in test_sets.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
