"""Parameters and FLOPs of a model, from numbers alone, and the peaks of the GPUs that compute them.

A FLOP is a multiplication or an addition of the forward pass's matrix products, times three for forward and backward;
padding, recomputation and masked positions are never counted, nor are the elementwise operations.
"""

import re
from dataclasses import dataclass

from transformer.config.settings import ModelConfig, Norm, Positions, Score
from transformer.vocabulary import VocabSize, own_source_size, source_size, target_size

# Dense bf16 (or fp16) FLOP/s of the matrix units, from the makers' data sheets. The first entry counts whose words are
# all in the device's name, and so a card that is slower than its chip can be comes before the chip.
PEAK_FLOPS = {
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}
UTILISATION = 0.4  # of that peak: what good training of these models comes to (MLPerf v0.7, big model: 41 % on A100)


@dataclass(frozen=True)
class StackParameters:
    """The parameters of all layers of the encoder or of the decoder, and of the norm at a pre-norm stack's end."""

    total: int
    self_attention: int
    cross_attention: int  # 0 in an encoder
    feed_forward: int
    norms: int


@dataclass(frozen=True)
class Parameters:
    """How many numbers are trained, by part."""

    total: int
    embeddings: int  # the source's and the target's, or the one matrix for both
    positions: int  # 0 for sinusoids
    encoder: StackParameters
    decoder: StackParameters
    output: int  # its bias, and its matrix unless that is the target's embedding


def count_parameters(config: ModelConfig, vocab_size: VocabSize) -> Parameters:
    """The parameters of a model, by part."""
    d_model = config.d_model
    heads = config.n_heads
    learned = config.positions is Positions.learned

    # One attention, one feed-forward network, one LayerNorm.
    attention = d_model * heads * (2 * config.key_width + 2 * config.value_width)
    attention += heads * config.key_width if config.score is Score.additive else 0
    attention += heads * (2 * config.key_width + config.value_width) + d_model if config.biases else 0
    feed_forward = 2 * d_model * config.d_ff + config.d_ff + d_model
    norm = 2 * d_model

    # The stacks: an encoder layer has two sub-layers, a decoder layer three, each with a norm.
    final_norm = norm if config.norm is Norm.pre else 0
    encoder = _stack(
        self_attention=config.n_layers * attention,
        cross_attention=0,
        feed_forward=config.n_layers * feed_forward,
        norms=2 * config.n_layers * norm + final_norm,
    )
    decoder = _stack(
        self_attention=config.decoder_layers * attention,
        cross_attention=config.decoder_layers * attention,
        feed_forward=config.decoder_layers * feed_forward,
        norms=3 * config.decoder_layers * norm + final_norm,
    )

    # What is outside of the stacks.
    target_matrix = target_size(vocab_size) * d_model
    if config.tie_embeddings:
        embeddings = target_matrix + (own_source_size(vocab_size) or 0) * d_model
        output = 0
    else:
        embeddings = target_matrix + source_size(vocab_size) * d_model
        output = target_matrix
    output += target_size(vocab_size) if config.biases else 0
    positions = 2 * config.max_positions * d_model if learned else 0
    return Parameters(
        total=embeddings + positions + encoder.total + decoder.total + output,
        embeddings=embeddings,
        positions=positions,
        encoder=encoder,
        decoder=decoder,
        output=output,
    )


def _stack(*, self_attention: int, cross_attention: int, feed_forward: int, norms: int) -> StackParameters:
    return StackParameters(
        total=self_attention + cross_attention + feed_forward + norms,
        self_attention=self_attention,
        cross_attention=cross_attention,
        feed_forward=feed_forward,
        norms=norms,
    )


def step_flops(config: ModelConfig, vocab_size: VocabSize, *, source: int, target: int, mean_length: float) -> float:
    """FLOPs of one training step over `source` and `target` real tokens in sentences of `mean_length` tokens.

    The products of attention are quadratic in the length; they are counted at the mean length, which is a little low.
    """
    d_model = config.d_model
    heads = config.n_heads
    d_k = config.key_width
    d_v = config.value_width

    # Multiply-adds of a token in one attention, and in one feed-forward network.
    projections = 2 * d_model * heads * (d_k + d_v)  # W_q and W_k, W_v and W_o
    scores = heads * (d_k + d_v) * mean_length  # its queries with all keys, and its weights with all values
    feed_forward = 2 * d_model * config.d_ff

    # In one layer, for each token that goes through it. The decoder sees half of its own sentence on average; W_k and
    # W_v of its encoder-decoder attention read source tokens.
    encoder = projections + scores + feed_forward
    cross_reads = d_model * heads * (d_k + d_v)
    decoder = projections + scores / 2 + (projections - cross_reads) + scores + feed_forward

    # In all layers, and in the output. The backward pass has twice the products of the forward pass, and a
    # multiply-add is two FLOPs.
    layers = config.n_layers * source * encoder
    layers += config.decoder_layers * (source * cross_reads + target * decoder)
    output = target * target_size(vocab_size) * d_model
    return 3.0 * 2.0 * (layers + output)


def peak_flops(device_name: str) -> float | None:
    """The device's peak for bf16 products, or None where it is not known."""
    words = set(re.split(r"[\s-]+", device_name))
    return next((peak for name, peak in PEAK_FLOPS.items() if words.issuperset(name.split())), None)
