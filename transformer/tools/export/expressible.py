"""What each format can express of our models: a model is refused before anything is written."""

from transformer.config.settings import ModelConfig, Norm, Positions, Score
from transformer.data.tokenizer import Tokenizers
from transformer.decoding.engine.weights import Heads
from transformer.errors import InputError
from transformer.tools.export.job import Target


def check_expressible(config: ModelConfig, target: Target) -> None:
    """Raise InputError, which names the setting, where a format cannot express what the model computes."""
    if target is Target.onnx:
        return

    name = {Target.ctranslate2: "CTranslate2", Target.marian: "Hugging Face's Marian"}[target]
    if config.score is Score.additive:
        raise InputError(f"model.score=additive: {name} has dot products only; to=onnx can express it")

    if target is Target.marian:
        other = "to=ctranslate2 and to=onnx can express it"
        if config.norm is Norm.pre:
            raise InputError(f"model.norm=pre: {name} has its norms after the residual sum only; {other}")
        if config.positions is Positions.learned:
            raise InputError(f"model.positions=learned: {name} computes sinusoids and stores no positions; {other}")
        marian_heads(config)


def check_pieces(tokenizers: Tokenizers, target: Target) -> None:
    """Raise InputError for ids that SentencePiece does not give, where a format takes ids and no pieces."""
    if target is Target.onnx and any(tokenizer.is_listed for tokenizer in tokenizers.sides):
        raise InputError(
            "to=onnx: the ids of this run's pieces are those of a list, as in Marian's models, and not SentencePiece's "
            "own; to=ctranslate2 and to=marian can express it"
        )


def marian_heads(config: ModelConfig) -> Heads:
    """The fewest heads that divide d_model among them, as Marian's do; the heads beyond ours are zeros.

    Raises InputError where such heads are too narrow for ours.
    """
    counts = range(config.n_heads, config.d_model + 1)
    count = next(count for count in counts if config.d_model % count == 0)
    width = config.d_model // count

    for key, needed in (("d_k", config.key_width), ("d_v", config.value_width)):
        if needed > width:
            raise InputError(
                f"model.{key}={needed}: the heads of Hugging Face's Marian share model.d_model={config.d_model}, "
                f"{width} for each of {count}; to=ctranslate2 and to=onnx can express it"
            )
    return Heads(count, width)
