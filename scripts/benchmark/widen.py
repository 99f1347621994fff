"""A run of a larger shape that translates exactly as a small one does: to time large models without training one.

    python scripts/benchmark/widen.py runs/small runs/wide --n-layers 6 --d-model 512 --d-ff 2048 --n-heads 8

Every vector of the wide model holds that of the small one several times over, each head and each inner unit is there
several times, and what reads them divides by that number (Chen et al., 2016, "Net2Net"). Further layers add nothing to
their input. The arithmetic is that of any model of this shape, and none of it is skipped. The small model has to be
pre-norm, whose layers pass their input on. Positions are a table, as sinusoids of another width are other numbers.

The run is removed again unless both models give a sentence the same log-probability, in float64.
"""

import argparse
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from contest import positive
from torch import Tensor

import transformer
from transformer.checkpoint import commit, find_checkpoint
from transformer.config.primitives import to_json
from transformer.config.settings import ModelConfig, Norm, Positions
from transformer.model.layers import sinusoids
from transformer.model.transformer import Transformer
from transformer.run_dir import MODEL, TOKENIZER, RunDir

CLOSE = 1e-6  # nats: weights are stored in float32
NOTHING = 1e-12
SENTENCES = ("A man is sleeping.", "Ein Hund läuft.")  # in any language


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("small", type=Path)
    parser.add_argument("wide", type=Path)
    for size in ("n-layers", "d-model", "d-ff", "n-heads"):
        parser.add_argument(f"--{size}", type=positive, required=True)
    args = parser.parse_args(arguments)

    checkpoint = find_checkpoint(args.small, "auto")
    record = RunDir(args.small).read_record()
    small = record.config.model
    sizes = {"n_layers": args.n_layers, "d_model": args.d_model, "d_ff": args.d_ff, "n_heads": args.n_heads}
    wide = replace(small, **sizes, n_decoder_layers=None, positions=Positions.learned)
    refuse(small, wide)

    args.wide.mkdir(parents=True)
    run = RunDir(args.wide)
    config = replace(record.config, model=wide, run_dir=str(args.wide))
    run.write_record(replace(record, config=config))
    shutil.copy(args.small / TOKENIZER, args.wide)
    shutil.copytree(RunDir(args.small).hypotheses, run.hypotheses)
    state = replace(checkpoint.run_state(), training=None)
    weights = widen(checkpoint.weights(), small, wide, vocab_size=state.vocab_size)
    commit(
        args.wide,
        step=checkpoint.step,
        tensors={MODEL: weights},
        state=to_json(state),
        config=to_json(config),
        averaged=True,
    )

    source, target = SENTENCES
    narrow_score, wide_score = (
        transformer.load(path, precision="fp64").score([source], [target])[0].piece_log_probs
        for path in (args.small, args.wide)
    )
    if not all(math.isclose(*pair, abs_tol=CLOSE) for pair in zip(narrow_score, wide_score, strict=True)):
        shutil.rmtree(args.wide)
        sys.exit(f"error: they are not the same: {narrow_score} and {wide_score} nats")


def refuse(small: ModelConfig, wide: ModelConfig) -> None:
    """Ends the program where the one cannot be made of the other."""
    if small.norm is not Norm.pre or not small.tie_embeddings or small.positions is not Positions.sinusoidal:
        sys.exit("error: the small model must be pre-norm, with one embedding matrix and sinusoids")
    if wide.n_layers < max(small.n_layers, small.decoder_layers):
        sys.exit("error: the wide model must have as many layers at least")
    for name in ("d_model", "d_ff", "n_heads", "key_width", "value_width"):
        if getattr(wide, name) % getattr(small, name):
            sys.exit(f"error: {name} must be a multiple of {getattr(small, name)}")


def widen(weights: dict[str, Tensor], small: ModelConfig, wide: ModelConfig, *, vocab_size: int) -> dict[str, Tensor]:
    """The parameters of the wide model."""
    width = wide.d_model // small.d_model
    inner = wide.d_ff // small.d_ff
    root = math.sqrt(width)

    def linear(weight: Tensor, outputs: int, inputs: int) -> Tensor:
        """A map from vectors that are there `inputs` times to vectors that are there `outputs` times."""
        return weight.double().tile(outputs, inputs) / inputs

    def to_heads(weight: Tensor, times: int) -> Tensor:
        """A projection to heads, whose vectors are longer by `times`, and of which there are more."""
        heads = weight.view(small.n_heads, -1, small.d_model).tile(wide.n_heads // small.n_heads, times, 1)
        return linear(heads.flatten(0, 1), 1, width)

    def from_heads(weight: Tensor) -> Tensor:
        """The projection of all heads' values to a vector."""
        times = wide.value_width // small.value_width
        more = wide.n_heads // small.n_heads
        heads = weight.view(small.d_model, small.n_heads, -1).tile(1, more, times)
        return linear(heads.flatten(1), width, 1) / (more * times)

    def widened(name: str, weight: Tensor) -> Tensor:
        *_, module, kind = name.split(".")
        match module, kind:
            case ("W_q", _):  # (q tiled) . (k tiled) / sqrt(wider) is q . k / sqrt(width)
                times = wide.key_width // small.key_width
                return to_heads(weight, times) / math.sqrt(times)
            case ("W_k", _):
                return to_heads(weight, wide.key_width // small.key_width)
            case ("W_v", _):
                return to_heads(weight, wide.value_width // small.value_width)
            case ("W_o", _):
                return from_heads(weight)
            case ("W_1", "weight"):
                return linear(weight, inner, width)
            case ("W_1", "bias"):
                return weight.tile(inner)
            case ("W_2", "weight"):
                return linear(weight, width, inner)
            case ("decoder_norm", _):  # the logits are sums over all copies, of embeddings that are smaller by the root
                return weight.tile(width) / root
            case _:  # norms, and the bias of W_2
                return weight.tile(width)

    found = {"embedding": weights["embedding"].double().tile(1, width) / root}  # the model multiplies by sqrt(d_model)
    for name, _ in Transformer(wide, vocab_size).named_parameters():
        if name.endswith(".table"):
            found[name] = sinusoids(wide.max_positions, small.d_model).tile(1, width)
        elif name != "embedding":
            found[name] = widened(name, in_small(name, weights, small))
    return {name: tensor.float().contiguous() for name, tensor in found.items()}


def in_small(name: str, weights: dict[str, Tensor], small: ModelConfig) -> Tensor:
    """The parameter of the small model that the wide one's is made of."""
    stack, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    layers = small.n_layers if stack == "encoder" else small.decoder_layers
    if not number.isdigit() or int(number) < layers:
        return weights[name]
    # A further layer: the numbers of the first in other places, as CTranslate2 stores equal matrices once. What it adds
    # to its input is nothing that float32 could tell.
    like = weights[f"{stack}.0.{rest}"].roll(int(number), dims=0)
    adds = rest.split(".")[-2] in ("W_o", "W_2")
    return NOTHING * like if adds else like


if __name__ == "__main__":
    main(sys.argv[1:])
