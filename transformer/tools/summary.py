"""`transformer summary`: what a model costs, from numbers alone; nothing is read and nothing is trained."""

from dataclasses import dataclass

from transformer.config.jobs import SummaryJob
from transformer.config.settings import Precision, TrainConfig
from transformer.cost import PEAK_FLOPS, parameters, step_flops

MEAN_LENGTH = 27.0  # tokens of a sentence, as in WMT news text
UTILISATION = 0.4  # of the peak, as good training reaches it


@dataclass(frozen=True)
class Summary:
    """What a model costs. A training state is the weights, their gradient, Adam's moments, and the moving average."""

    parameters: int
    vocab_size: int
    step_flops: float
    training_flops: float
    weight_bytes: int
    training_state_bytes: int


def summarise(job: SummaryJob) -> Summary:
    """Parameters, training FLOPs, and the bytes of the weights and of a training state."""
    vocab_size, tokens = job.tokenizer.vocab_size, job.train.tokens_per_step
    count = parameters(job.model, vocab_size)
    flops = step_flops(job.model, vocab_size, source=tokens, target=tokens, mean_length=MEAN_LENGTH)

    width = 8 if job.train.precision is Precision.fp64 else 4  # bytes
    copies = 4 if job.train.ema_decay is None else 5  # weights, gradient, Adam's two moments, and their average
    return Summary(
        parameters=count,
        vocab_size=vocab_size,
        step_flops=flops,
        training_flops=flops * job.train.max_steps,
        weight_bytes=count * width,
        training_state_bytes=count * width * copies,
    )


def format_summary(summary: Summary, recipe: TrainConfig) -> str:
    """The summary of a model under this recipe, for people."""
    tokens = recipe.tokens_per_step
    hours = summary.training_flops / (UTILISATION * PEAK_FLOPS["H200"]) / 3600
    return (
        f"parameters         {summary.parameters:,} with {summary.vocab_size:,} pieces\n"
        f"a training step    {summary.step_flops / 1e12:.2f} TFLOP for {tokens:,} + {tokens:,} tokens\n"
        f"the training       {summary.training_flops:.2e} FLOP in {recipe.max_steps:,} steps\n"
        f"weights            {summary.weight_bytes / 2**20:,.0f} MiB\n"
        f"training state     {summary.training_state_bytes / 2**20:,.0f} MiB, and activations\n"
        f"on an H200         {hours:.2f} hours at {100 * UTILISATION:.0f} % of its bf16 peak\n"
    )
