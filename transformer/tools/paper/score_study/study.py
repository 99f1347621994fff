"""`transformer table table=scores`: measures what the paper says of scores (section 3.2.1, footnote 4).

    table       every model is trained on the same data for as many steps, and scored: `tables`
    observed    the attention of each on sentences of the development set, before the first step and after the last
    costs       time and memory of one layer with each score, against d_k and the length: `costs`

Each model has one score, scaled q.k / sqrt(d_k), plain q.k or additive, at one d_k. A model of width D has D / d_k
heads, as in the paper: the projections to queries and keys are then square, and Xavier's initialisation leaves the
variance of what they project as it is. With the number of heads fixed instead, it would hide what d_k does.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from transformer.checkpoint import Checkpoint, find_checkpoint
from transformer.compute import avoid_cudnn_attention, resolve_device
from transformer.config.settings import ModelConfig, Score
from transformer.data.batch import Batch, collate
from transformer.data.tokenizer import Tokenizers
from transformer.errors import CheckpointError, TransformerError
from transformer.evaluation.sets import read_set
from transformer.layout import Padded
from transformer.machine import resolve_threads
from transformer.model.attention import KeyValues, MultiHeadAttention, additive_scores
from transformer.model.transformer import Transformer, load_parameters
from transformer.run_dir import DEV, STEP_PREFIX, RunDir
from transformer.tools.paper.score_study.costs import HeadsCost, ScoreCost, cost_of_heads, cost_of_scores
from transformer.tools.tables.job import TableJob
from transformer.tools.tables.measured import Measured, Table, TableRow
from transformer.training.state import draw_model
from transformer.training.step import Objective
from transformer.training.validate import DevSet

log = logging.getLogger(__name__)

SENTENCES = 128  # of the development set, the first ones


@dataclass(frozen=True)
class AttentionState:
    """The attention of a model on some sentences, without dropout.

    The first three figures are means over the attention modules of all layers and roles, and over the heads of each.
    """

    variance: float  # of q.k before any scale, or of additive scores, over all pairs of a query and a key that it sees
    entropy: float  # of a query's weights, as a share of the entropy of equal weights
    softmax_gradient: float  # trace of the softmax's Jacobian, 1 - sum of squared weights, as a share of the same
    weight_gradient: float  # root mean square, over W_q and W_k, of the gradient of the mean loss of a token


@dataclass(frozen=True)
class Observed:
    """The attention of one training, before its first step and after its last."""

    row: str
    seed: int
    score: Score
    d_k: int
    at_start: AttentionState
    trained: AttentionState


@dataclass(frozen=True)
class ScoreStudy:
    """Everything that is measured; written as `table.json`."""

    table: Table
    observed: list[Observed]
    costs: list[ScoreCost]
    heads: list[HeadsCost]
    machine: str  # on which the costs were measured


def study_scores(job: TableJob, table: Table) -> tuple[ScoreStudy, list[Exception]]:
    """Observe the attention of each run of the table, and measure what the scores cost on this machine.

    Also returns the errors of the runs that cannot be observed; their rows name them, and keep what was measured.
    """
    device = resolve_device(job.train.device)
    avoid_cudnn_attention(device)
    threads = resolve_threads(job.train.threads)
    torch.set_num_threads(threads)

    # Observe the runs of each row.
    observed: list[Observed] = []
    errors: list[Exception] = []
    rows: list[TableRow] = []
    for row in table.rows:
        row_errors: list[str] = []
        for run in row.runs:
            try:
                observed.append(_observe_run(row.name, run))
            except TransformerError as error:  # a damaged run directory is the failure of its own row alone
                log.error("run %s cannot be observed: %s", run.run_dir, error)
                errors.append(error)
                row_errors.append(str(error))
        rows.append(replace(row, errors=[*row.errors, *row_errors]))

    # Measure one layer on this machine.
    machine = f"{device.type}, {threads} thread{'' if threads == 1 else 's'}, torch {torch.__version__}, fp32"
    widths = sorted({one.d_k for one in observed})
    study = ScoreStudy(
        table=replace(table, rows=rows),
        observed=observed,
        costs=cost_of_scores(widths, d_model=job.model.d_model, device=device),
        heads=cost_of_heads(device),
        machine=machine,
    )
    return study, errors


def _observe_run(row: str, run: Measured) -> Observed:
    """The attention of one run; the weights before its first step are drawn again from its seed.

    The trained weights are the ones with which its perplexity was measured: the last step's, or their moving average
    where the run keeps one. Where that checkpoint is damaged, no earlier one takes its place. Raises InputError or
    CheckpointError.
    """
    directory = RunDir(Path(run.run_dir))
    checkpoint = find_checkpoint(directory.path, f"{STEP_PREFIX}{run.steps}")
    config = checkpoint.settings("model", ModelConfig)
    tokenizers = Tokenizers.load(directory.path)
    batch = _dev_batch(directory, tokenizers, config)

    model = draw_model(config, seed=run.seed, vocab_size=tokenizers.vocab_sizes)
    at_start = observe(model, batch)

    _load(model, checkpoint)
    return Observed(
        row=row,
        seed=run.seed,
        score=config.score,
        d_k=config.key_width,
        at_start=at_start,
        trained=observe(model, batch),
    )


def _load(model: Transformer, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint. Raises CheckpointError where they are another model's."""
    try:
        load_parameters(model, checkpoint.weights())
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit: {error}") from error


def _dev_batch(run: RunDir, tokenizers: Tokenizers, config: ModelConfig) -> Batch:
    """The first sentences of the run's development set."""
    pairs = read_set(run, DEV)[:SENTENCES]
    dev = DevSet.of(pairs, tokenizers, max_pieces=config.max_positions - 1)
    return collate(dev.store, np.arange(len(pairs)))


# ---- observing ------------------------------------------------------------------------------------------------------


def observe(model: Transformer, batch: Batch) -> AttentionState:
    """What the model's attention does with a padded batch, and how its loss depends on queries and keys.

    The model is left in evaluation mode, and otherwise as it was.
    """
    model.eval()
    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]

    # Forward, with a look at every attention module.
    statistics: list[ScoreStatistics] = []

    def look(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
        assert isinstance(attention, MultiHeadAttention)
        with torch.no_grad():
            statistics.append(score_statistics(attention, *args, **kwargs))

    with ExitStack() as hooks:
        for attention in attentions:
            hooks.callback(attention.register_forward_hook(look, with_kwargs=True).remove)
        loss, _ = Objective(model, 0.0)(batch)

    # Backward, to the projections that the scores depend on.
    weights = []
    for attention in attentions:
        weights += [attention.W_q.weight, attention.W_k.weight]
    gradients = torch.autograd.grad(loss / len(batch.target_out), weights)
    all_gradients = torch.cat([gradient.flatten() for gradient in gradients])

    variance, entropy, softmax_gradient = (fmean(of_modules) for of_modules in zip(*statistics, strict=True))
    return AttentionState(variance, entropy, softmax_gradient, float(all_gradients.square().mean().sqrt()))


class ScoreStatistics(NamedTuple):
    """What one attention module does with one batch; see `AttentionState`."""

    variance: float
    entropy: float
    softmax_gradient: float


def score_statistics(
    attention: MultiHeadAttention, x: Tensor, kv: KeyValues, *, queries: Padded, keys: Padded, causal: bool
) -> ScoreStatistics:
    """The variance of the scores before any scale, the weights' entropy and the trace of the softmax's Jacobian.

    x `(B, T, D)`. The last two are means over heads and over real queries that see at least two keys, each as a share
    of what equal weights have: `log n` and `1 - 1 / n` where a query sees n keys.
    """
    weights = attention.weights(x, kv, queries=queries, keys=keys, causal=causal)  # (B, H, T, S)

    # The pairs of a real query and a key that it sees.
    visible = queries.visible()[:, None, :, None] & keys.visible()[:, None, None, :]  # (B, 1, T, S)
    if causal:
        visible = visible.tril()

    # The scores, in one list.
    q = attention.W_q(x).unflatten(-1, (attention.n_heads, -1)).transpose(1, 2)  # (B, H, T, K)
    k = kv.keys.transpose(1, 2)  # (B, H, S, K)
    vector = attention.score_vector
    raw = q @ k.transpose(2, 3) if vector is None else additive_scores(q, k, vector)  # (B, H, T, S)
    variance = raw.masked_select(visible).var()

    # The weights, query by query.
    n_visible = visible.sum(-1)  # (B, 1, T)
    has_choice = n_visible > 1
    equal = n_visible.clamp(min=2)
    entropy = torch.special.entr(weights).sum(-1) / equal.log()  # (B, H, T)
    trace = (1 - weights.square().sum(-1)) / (1 - 1 / equal)
    return ScoreStatistics(
        variance=float(variance),
        entropy=float(entropy.masked_select(has_choice).mean()),
        softmax_gradient=float(trace.masked_select(has_choice).mean()),
    )
