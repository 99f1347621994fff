"""Parameters, FLOPs and bytes of a model, from numbers alone.

A FLOP is a multiplication or an addition of the forward pass's matrix products, times three for forward and backward;
padding, recomputation and masked positions are never counted, nor are the elementwise operations.
"""

import re

from transformer.config.settings import ModelConfig, Norm, Positions, Score

# Dense bf16 (or fp16) FLOP/s of the matrix units, from the makers' data sheets, by a word of the device's name.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}


def parameters(config: ModelConfig, vocab_size: int) -> int:
    """How many numbers are trained."""
    d, heads = config.d_model, config.n_heads
    attention = d * heads * (2 * config.key_width + 2 * config.value_width)
    attention += heads * config.key_width if config.score is Score.additive else 0
    feed_forward = 2 * d * config.d_ff + config.d_ff + d
    norm = 2 * d
    layers = config.n_layers * ((attention + feed_forward + 2 * norm) + (2 * attention + feed_forward + 3 * norm))
    matrices = (1 if config.tie_embeddings else 3) * vocab_size * d
    positions = 2 * config.max_positions * d if config.positions is Positions.learned else 0
    return layers + matrices + positions + (2 * norm if config.norm is Norm.pre else 0)


def step_flops(config: ModelConfig, vocab_size: int, *, source: int, target: int, mean_length: float) -> float:
    """FLOPs of one training step over `source` and `target` real tokens in sentences of `mean_length` tokens.

    The products of attention are quadratic in the length; they are counted at the mean length, which is a little low.
    """
    d, heads, keys, values = config.d_model, config.n_heads, config.key_width, config.value_width
    projections = 2 * d * heads * (keys + values)  # multiply-adds of W_q, W_k, W_v and W_o for a token
    scores = heads * (keys + values) * mean_length
    feed_forward = 2 * d * config.d_ff
    encoder = projections + scores + feed_forward
    cross_reads = d * heads * (keys + values)  # W_k and W_v of the encoder-decoder attention, for each source token
    decoder = projections + scores / 2 + (projections - cross_reads) + scores + feed_forward
    forward = config.n_layers * (source * (encoder + cross_reads) + target * decoder) + target * vocab_size * d
    return 3.0 * 2.0 * forward


def peak_flops(device_name: str) -> float | None:
    """The device's peak for bf16 products, or None where it is not known."""
    words = re.split(r"[\s-]+", device_name)
    return next((peak for word, peak in PEAK_FLOPS.items() if word in words), None)
