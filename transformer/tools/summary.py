"""`transformer summary`: what a model costs, from numbers alone; nothing is read and nothing is trained."""

import json

from transformer.config.jobs import SummaryJob
from transformer.config.settings import Format, Precision
from transformer.cost import PEAK_FLOPS, parameters, step_flops

MEAN_LENGTH = 27.0  # tokens of a sentence, as in WMT news text


def summary(job: SummaryJob) -> str:
    """The report, as text or JSON: parameters, training FLOPs, bytes of weights and of a training state."""
    copies = 4 if job.train.ema_decay is None else 5  # weights, gradient, Adam's two moments, and their average
    vocab_size, tokens = job.tokenizer.vocab_size, job.train.tokens_per_step
    count = parameters(job.model, vocab_size)
    width = 8 if job.train.precision is Precision.fp64 else 4
    flops = step_flops(job.model, vocab_size, source=tokens, target=tokens, mean_length=MEAN_LENGTH)
    figures: dict[str, float] = {
        "parameters": count,
        "vocab_size": vocab_size,
        "step_flops": flops,
        "training_flops": flops * job.train.max_steps,
        "weight_bytes": count * width,
        "training_state_bytes": count * width * copies,
    }
    if job.format is Format.json:
        return json.dumps(figures, indent=2) + "\n"
    hours = flops * job.train.max_steps / (0.4 * PEAK_FLOPS["H200"]) / 3600
    return (
        f"parameters         {count:,} with {vocab_size:,} pieces\n"
        f"a training step    {flops / 1e12:.2f} TFLOP for {tokens:,} + {tokens:,} tokens\n"
        f"the training       {flops * job.train.max_steps:.2e} FLOP in {job.train.max_steps:,} steps\n"
        f"weights            {count * width / 2**20:,.0f} MiB\n"
        f"training state     {count * width * copies / 2**20:,.0f} MiB, and activations\n"
        f"on an H200         {hours:.2f} hours at 40 % of its bf16 peak\n"
    )
