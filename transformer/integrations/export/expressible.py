"""What each format can express of our models: a model is refused before anything is written."""

from transformer.config.settings import Activation, DataConfig, ModelConfig, Norm, Positions, Score, Start
from transformer.data.tokenizer import Tokenizers
from transformer.errors import InputError
from transformer.integrations.engine.ctranslate2 import MOST_INPUT
from transformer.integrations.engine.weights import Heads
from transformer.integrations.export.job import IN_BERGAMOT, Target
from transformer.integrations.published.marian_form import order_of

NAMES = {
    Target.ctranslate2: "CTranslate2",
    Target.argos: "CTranslate2",
    Target.marian: "Marian",
    Target.bergamot: "Bergamot",
    Target.browser: "Bergamot",
    Target.huggingface: "Hugging Face's Marian",
}


OWN_FORM = (Target.marian, *IN_BERGAMOT)  # Marian's own


def check_expressible(config: ModelConfig, target: Target) -> None:
    """Raise InputError, which names the setting, where a format cannot express what the model computes."""
    if target is Target.onnx:
        return

    name = NAMES[target]
    if config.score is Score.additive:
        raise InputError(f"model.score=additive: {name} has dot products only; to=onnx can express it")

    other = "to=ctranslate2 and to=onnx can express it"
    is_marian = target in (*OWN_FORM, Target.huggingface)
    if is_marian and config.positions is Positions.learned:
        raise InputError(f"model.positions=learned: {name} computes sinusoids and stores no positions; {other}")
    if is_marian:
        marian_heads(config, name)

    if target is Target.huggingface:
        if config.norm is Norm.pre:
            raise InputError(f"model.norm=pre: {name} has its norms after the residual sum only; {other}")
        if config.positions is Positions.marian:
            raise InputError(f"model.positions=marian: {name} computes the paper's sinusoids; {other}")

    if target in OWN_FORM:
        if config.norm is Norm.pre:
            raise InputError(
                f"model.norm=pre: {name} applies the norm before keys and values in training, but not when "
                f"decoding; {other}"
            )
        if config.start is Start.learned:
            raise InputError(
                f"model.start=learned: {name}'s decoder starts from zeros: train with model.start=zeros; "
                f"to=huggingface, {other}"
            )
        if config.positions is Positions.sinusoidal:
            raise InputError(
                f"model.positions=sinusoidal: {name}'s sinusoids have other frequencies: train with "
                f"model.positions=marian; to=huggingface, {other}"
            )
        if config.activation is Activation.gelu:
            raise InputError(f"model.activation=gelu: {name} only approximates it, by x * sigmoid(1.702 x); {other}")

    if target is Target.argos and config.positions is Positions.learned and config.max_positions <= MOST_INPUT:
        raise InputError(
            f"model.max_positions={config.max_positions}: Argos passes sources of up to {MOST_INPUT} pieces, more "
            "than the learned positions cover; to=ctranslate2 can express it"
        )


def check_tags(data: DataConfig, target: Target) -> None:
    """Raise InputError for a model that needs a tag in front of each source, where the other library puts none."""
    tags = data.required_tags()
    if tags and target is Target.argos:
        raise InputError(f"data.train.tag={tags[0]}: Argos puts no tag before a source; use to=ctranslate2")


def check_pieces(tokenizers: Tokenizers, target: Target) -> None:
    """Raise InputError for ids that SentencePiece does not give, where a format takes ids and no pieces.

    And for two models, where a format has one.
    """
    if target is Target.argos and not tokenizers.is_shared:
        raise InputError("tokenizer.target: Argos has one SentencePiece model for both languages; use to=ctranslate2")
    if target in OWN_FORM and all(order_of(tokenizer) is not None for tokenizer in tokenizers.sides):
        return
    if target in (Target.onnx, *OWN_FORM) and any(tokenizer.is_listed for tokenizer in tokenizers.sides):
        raise InputError(
            f"to={target.value}: this run takes its ids from a list of pieces, as Marian's models do, not from "
            "SentencePiece; to=ctranslate2 and to=huggingface can express it"
        )


def marian_heads(config: ModelConfig, name: str = "Marian") -> Heads:
    """The fewest heads that divide d_model among them, as Marian's do; the heads beyond ours are zeros.

    Raises InputError where such heads are too narrow for ours.
    """
    counts = range(config.n_heads, config.d_model + 1)
    count = next(count for count in counts if config.d_model % count == 0)
    width = config.d_model // count

    for key, needed in (("d_k", config.key_width), ("d_v", config.value_width)):
        if needed > width:
            raise InputError(
                f"model.{key}={needed}: {name} divides model.d_model={config.d_model} among the heads, {width} "
                f"for each of {count}; to=ctranslate2 and to=onnx can express it"
            )
    return Heads(count, width)
