"""How long a training's state takes to save, verify and load, beside torch.save and torch.load of the same state.

    python scripts/benchmark/checkpoint.py --output out.json

The state is weights and Adam's moments, in fp32. `save` ends when the disk has it: for torch.save, too, whose file is
fsynced. `verify` reads every byte and compares digests, which torch does not do; `load` ends when model and optimizer
hold the state, from files that the system still has in memory. The two take turns; ratios are formed within a round.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from contest import among, machine, positive, ratios, row, spread

from transformer.checkpoint import commit, load_checkpoint
from transformer.config.primitives import to_json
from transformer.config.settings import ModelConfig, Precision, TrainConfig
from transformer.records import CheckpointState, WindowTotals
from transformer.training.state import TrainState

SIZES = {
    "tiny": (ModelConfig(n_layers=1, d_model=32, d_ff=64, n_heads=2), 1_000),  # to try this script
    "small": (ModelConfig(n_layers=3, d_model=256, d_ff=1024, n_heads=4), 10_000),
    "base": (ModelConfig(), 37_000),
    "big": (ModelConfig(d_model=1024, d_ff=4096, n_heads=16), 37_000),
}  # and the pieces of the vocabulary

Seconds = dict[str, list[float]]


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    results = []
    for size in args.sizes:
        print(f"{size} ...", file=sys.stderr)
        with TemporaryDirectory(dir=args.folder) as folder:
            results.append({"size": size} | measure(*SIZES[size], folder=Path(folder), rounds=args.rounds))
    facts = {
        "command": shlex.join(["python", "scripts/benchmark/checkpoint.py", *arguments]),
        **machine(),
        "torch": torch.__version__,
        "results": results,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(page(facts)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=among(*SIZES), default="small,base,big", help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    parser.add_argument("--output", type=Path, help="write every number here, as JSON")
    return parser.parse_args(arguments)


def measure(config: ModelConfig, vocab_size: int, *, folder: Path, rounds: int) -> dict[str, Any]:
    """Ours and torch's in turns; a first round, in which memory and disk are new, is not counted."""
    state = build(config, vocab_size)
    other = build(config, vocab_size)  # what is loaded into
    ours: Seconds = {"save": [], "verify": [], "load": []}
    torchs: Seconds = {"save": [], "load": []}
    for number in range(1 + rounds):
        path = folder / "checkpoints" / f"step-{number + 1:08d}"
        file = folder / f"{number}.pt"

        found = [
            (ours["save"], lambda n=number: save(state, config, vocab_size, folder=folder, step=n + 1)),
            (torchs["save"], lambda f=file: torch_save(state, f)),
            (ours["verify"], lambda p=path: load_checkpoint(p)),
            (ours["load"], lambda p=path: other.restore(load_checkpoint(p), rank=0)),
            (torchs["load"], lambda f=file: torch_load(other, f)),
        ]
        for seconds, work in found:
            seconds.append(seconds_of(work))
        size = {"ours": sum(part.stat().st_size for part in path.iterdir()), "torch": file.stat().st_size}
        shutil.rmtree(path)
        file.unlink()

    counted = {name: {part: s[1:] for part, s in kinds.items()} for name, kinds in (("ours", ours), ("torch", torchs))}
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    return {"parameters": parameters, "bytes": size, **counted}


def build(config: ModelConfig, vocab_size: int) -> TrainState:
    """A state after one step, so that Adam has moments."""
    state = TrainState.at_start(
        config,
        TrainConfig(),
        vocab_size=vocab_size,
        device=torch.device("cpu"),
        precision=Precision.fp32,
        source=None,
    )
    for parameter in state.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return state


def save(state: TrainState, config: ModelConfig, vocab_size: int, *, folder: Path, step: int) -> None:
    """As a training commits."""
    state.progress.step = step
    record = CheckpointState(
        vocab_size, data_digest="", training=state.to_record(WindowTotals(), dev_digest="", plan_version=1)
    )
    commit(folder, step=step, tensors=state.tensors(), state=to_json(record), config={"model": to_json(config)})


def torch_save(state: TrainState, path: Path) -> None:
    """As one writes it by hand, and brought to the disk."""
    with path.open("wb") as file:
        torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(state: TrainState, path: Path) -> None:
    """As one writes it by hand."""
    found = torch.load(path, weights_only=True)
    state.model.load_state_dict(found["model"])
    state.optimizer.load_state_dict(found["optimizer"])


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def page(facts: dict[str, Any]) -> Iterator[str]:
    """The report, in Markdown."""
    yield f"`{facts['command']}`"
    yield ""
    yield f"{facts['processor']}, {facts['cores']} cores, Python {facts['python']}, torch {facts['torch']}."
    yield ""
    yield (
        "Seconds, the median of the rounds and their range; the ratio of times is formed within each round. `load` "
        "verifies as well."
    )
    yield ""
    columns = ["size", "parameters", "GB", "part", "time of ours / torch's", "range"]
    yield row([*columns, "ours, s", "range", "torch, s", "range"])
    yield row(["---", "---:", "---:", "---", *["---:"] * 6])
    for result in facts["results"]:
        for part, seconds in result["ours"].items():
            rival = result["torch"].get(part, [])
            cells = [result["size"], f"{result['parameters']:,}", f"{result['bytes']['ours'] / 1e9:.2f}", part]
            cells += [*spread(ratios(seconds, rival) if rival else [], ".2f"), *spread(seconds, ".2f")]
            yield row([*cells, *spread(rival, ".2f")])


if __name__ == "__main__":
    main(sys.argv[1:])
