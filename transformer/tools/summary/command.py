"""`transformer summary`: parameters, FLOPs, memory and hours of a training, from numbers alone: nothing is trained.

    settings or a run -> _Subject -> cost               -> Parameters, Flops
                                     tools.memory       -> Memory
                                     rates in tokens/s  -> Paces          all of them: Summary -> format_summary

FLOPs are counted in two ways that must not be confused, so both are shown. The model's arithmetic, which `cost` counts,
is the multiplications and additions of its matrix products. The paper's training cost (Table 2) is a time: hours x GPUs
x the FLOP/s that a GPU is taken to sustain. For the paper's own runs it is 3.45 (base) and 2.38 times (big) the first.
"""

import logging
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from transformer.compute import HALF
from transformer.config.jobs import TrainJob
from transformer.config.settings import Device, LayoutKind, ModelConfig, Precision, TrainConfig
from transformer.cost import PEAK_FLOPS, UTILISATION, Parameters, StackParameters, count_parameters, step_flops
from transformer.data.plan import SLOTS
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.errors import InputError
from transformer.records import Resolved
from transformer.run_dir import RunDir
from transformer.tools.memory import Memory, estimate_memory
from transformer.tools.metrics import SPEED, read_curves
from transformer.tools.summary.job import SummaryJob
from transformer.training.resolve import resolve_settings
from transformer.training.warm_start import find_source, with_model_of
from transformer.vocabulary import (
    VocabSize,
    VocabSizes,
    describe_vocab_size,
    own_source_size,
    target_size,
    vocab_size_of,
)

log = logging.getLogger(__name__)

MEAN_LENGTH = 27.0  # tokens of a sentence, as in WMT news text
NAMED_GPUS = ("H200", "A100", "V100", "T4")
GPU_TOKENS = 32_768  # of a micro-batch on a GPU that is not here: what training chooses above 36 GB

# The paper's own training cost: section 5.2 has the times, a footnote of section 6.1 the rate, Table 2 the products.
PAPER_GPUS = 8
PAPER_FLOPS = 9.5e12  # FLOP/s that a P100 is taken to sustain
PAPER_VOCABULARY = 37_000
PAPER_TOKENS = 25_000
BASE = ModelConfig()
SHORTEST_STEP = 0.045  # seconds; in a shorter one kernels are too small for that share: a step of base by an H200
BIG = ModelConfig(d_model=1024, d_ff=4096, n_heads=16)


@dataclass(frozen=True)
class Flops:
    """The arithmetic of a training whose steps are as full as `train.tokens_per_step` allows."""

    step: float
    target_token: float
    training: float
    steps: int
    tokens_per_step: int  # on each side
    mean_length: float  # tokens of a sentence, assumed


@dataclass(frozen=True)
class Pace:
    """How long the training takes at a rate of tokens a second."""

    source: str  # where the rate comes from
    target_tokens_per_second: float
    flops_per_second: float
    hours: float


@dataclass(frozen=True)
class PaperCost:
    """What one of the paper's trainings cost, counted in both ways."""

    name: str
    hours: float
    by_time: float  # FLOPs, as Table 2 has them: hours x GPUs x sustained FLOP/s
    by_arithmetic: float  # FLOPs of the same training, as `Flops` counts them


@dataclass(frozen=True)
class OtherVocabularies:
    """What the model would count with two vocabularies in place of its one, or one in place of its two."""

    vocab_size: int  # of the target
    source_vocab_size: int | None  # None: it is the target's vocabulary, too
    parameters: int


@dataclass(frozen=True)
class Summary:
    """What a training costs."""

    vocab_size: int  # of the target
    source_vocab_size: int | None  # None: it is the target's vocabulary, too
    parameters: Parameters
    other_vocabularies: list[OtherVocabularies]
    flops: Flops
    memory: Memory  # at the mean length
    longest_memory: Memory  # of a batch of the longest sentences that are let through
    resolved: Resolved  # what the memory is estimated for
    paces: list[Pace]
    paper: list[PaperCost]


@dataclass(frozen=True)
class _Subject:
    """The training to be summed up: of given settings, or of a run."""

    job: TrainJob
    vocab_size: VocabSize
    resolved: Resolved


def summarise(job: SummaryJob) -> Summary:
    """Sum up the training that the settings describe or, with `run`, the training of that run.

    Raises InputError and CheckpointError where `run` is no run directory, or has not measured anything yet.
    """
    subject = _subject_of_settings(job) if job.run is None else _subject_of_run(Path(job.run))
    model = subject.job.model
    flops = _flops(model, subject.job.train, subject.vocab_size)
    longest = subject.job.data.filter.max_length + 1  # with EOS

    return Summary(
        vocab_size=target_size(subject.vocab_size),
        source_vocab_size=own_source_size(subject.vocab_size),
        parameters=count_parameters(model, subject.vocab_size),
        other_vocabularies=_other_vocabularies(model, subject.vocab_size),
        flops=flops,
        memory=_memory(subject, mean_length=MEAN_LENGTH),
        longest_memory=_memory(subject, mean_length=longest),
        resolved=subject.resolved,
        paces=_paces(job, flops),
        paper=[
            _paper_cost("base", BASE, hours=12.0, steps=100_000),
            _paper_cost("big", BIG, hours=3.5 * 24, steps=300_000),
        ],
    )


# ---- the training to be summed up -----------------------------------------------------------------------------------


def _subject_of_settings(job: SummaryJob) -> _Subject:
    if os.path.exists(RunDir(Path(job.run_dir)).record):
        log.warning(
            "%s is a run: run=%s sums it up; this summary is of the settings given here", job.run_dir, job.run_dir
        )
    source = find_source(job)
    if source is None:
        return _Subject(job, _vocab_sizes(job), _resolve(job))
    with_source = with_model_of(source, job)
    return _Subject(with_source, source.run_state().vocab_sizes, _resolve(with_source))


def _vocab_sizes(job: TrainJob) -> VocabSize:
    """The number of pieces asked for, or that of the tokenizer that is given; or both of them."""
    sizes = [
        config.vocab_size if config.model is None else Tokenizer.load(Path(config.model).resolve()).vocab_size
        for config in job.tokenizer.models().values()
    ]
    return sizes[0] if len(sizes) == 1 else VocabSizes(*sizes)


def _resolve(job: TrainJob) -> Resolved:
    """Resolve the settings as training would on this machine.

    Where `train.device=cuda` and this machine has no GPU, as training would on one of 40 GB or more since Ampere.
    """
    train = job.train
    if train.device is not Device.cuda or torch.cuda.is_available():
        return resolve_settings(job, world_size=1)

    # A GPU that is not here.
    precision = Precision.bf16 if train.precision is Precision.auto else train.precision
    layout = train.layout
    if layout is LayoutKind.auto:
        layout = LayoutKind.packed if precision in HALF else LayoutKind.padded
    return Resolved(
        device=Device.cuda,
        precision=precision,
        threads=1,
        max_tokens=train.max_tokens or max(GPU_TOKENS, job.data.filter.max_length + 1),
        layout=layout,
        compile=train.compile is not False,
        micro_batch_multiple=1,
    )


def _subject_of_run(path: Path) -> _Subject:
    if not path.is_dir():
        raise InputError(f"run={path}: no such run directory")
    run = RunDir(path)
    record = run.read_record()
    tokenizers = Tokenizers.load(run.path)
    return _Subject(record.config, tokenizers.vocab_sizes, record.resolved)


# ---- one vocabulary or two ------------------------------------------------------------------------------------------


def _other_vocabularies(model: ModelConfig, vocab_size: VocabSize) -> list[OtherVocabularies]:
    """Two as large as the one, and two that divide its pieces; or one of the pieces of both, and the target's alone."""
    if isinstance(vocab_size, VocabSizes):
        others: list[VocabSize] = [vocab_size.source + vocab_size.target, vocab_size.target]
    else:
        half = vocab_size // 2
        others = [VocabSizes(vocab_size, vocab_size), VocabSizes(vocab_size - half, half)]
    return [
        OtherVocabularies(target_size(other), own_source_size(other), count_parameters(model, other).total)
        for other in others
    ]


# ---- FLOPs and hours ------------------------------------------------------------------------------------------------


def _flops(model: ModelConfig, train: TrainConfig, vocab_size: VocabSize) -> Flops:
    """The arithmetic of full steps, in sentences of the mean length."""
    tokens = train.tokens_per_step
    step = step_flops(model, vocab_size, source=tokens, target=tokens, mean_length=MEAN_LENGTH)
    return Flops(
        step=step,
        target_token=step / tokens,
        training=step * train.max_steps,
        steps=train.max_steps,
        tokens_per_step=tokens,
        mean_length=MEAN_LENGTH,
    )


def _paces(job: SummaryJob, flops: Flops) -> list[Pace]:
    """The training at the given rate, at the run's measured rate, and at those of a few GPUs."""
    paces = []

    # Rates of this training.
    if job.tokens_per_second is not None:
        paces.append(_pace("given", job.tokens_per_second, flops))
    if job.run is not None:
        speed, log_lines = _measured_speed(RunDir(Path(job.run)))
        paces.append(_pace(f"measured in {job.run} (median of {log_lines} log lines)", speed, flops))

    # GPUs that reach the usual share of their peak, where a step is long enough for that.
    share = f"{100 * UTILISATION:.0f} %"
    for name in NAMED_GPUS:
        speed = UTILISATION * PEAK_FLOPS[name] / flops.target_token
        if flops.tokens_per_step / speed < SHORTEST_STEP:
            continue
        paces.append(_pace(f"one {name} at {share} of its bf16 or fp16 peak", speed, flops))
    return paces


def _pace(source: str, tokens_per_second: float, flops: Flops) -> Pace:
    seconds = flops.steps * flops.tokens_per_step / tokens_per_second
    return Pace(
        source=source,
        target_tokens_per_second=tokens_per_second,
        flops_per_second=flops.target_token * tokens_per_second,
        hours=seconds / 3600,
    )


def _measured_speed(run: RunDir) -> tuple[float, int]:
    """The median of the target tokens a second in a run's log lines, and how many such lines there are.

    Raises InputError where the run has no log line of training yet, or its file cannot be read.
    """
    try:
        curves, damaged = read_curves(run.metrics)
    except OSError as error:
        raise InputError(f"{run.metrics}: the run's speed cannot be read: {error}") from error
    if damaged:
        log.warning("%s: %d of its lines are damaged, and left out", run.metrics, damaged)
    speeds = [speed for _, speed in curves.get(SPEED, [])]
    if not speeds:
        raise InputError(f"{run.metrics}: nothing is measured yet: wait for the run's first log line")

    return statistics.median(speeds), len(speeds)


def _paper_cost(name: str, model: ModelConfig, *, hours: float, steps: int) -> PaperCost:
    """One of the paper's two trainings."""
    flops = step_flops(model, PAPER_VOCABULARY, source=PAPER_TOKENS, target=PAPER_TOKENS, mean_length=MEAN_LENGTH)
    seconds = hours * 3600
    return PaperCost(
        name=name,
        hours=hours,
        by_time=seconds * PAPER_GPUS * PAPER_FLOPS,
        by_arithmetic=steps * flops,
    )


# ---- memory ---------------------------------------------------------------------------------------------------------


def _memory(subject: _Subject, *, mean_length: float) -> Memory:
    """The memory of a full micro-batch of sentences of this length."""
    train = subject.job.train
    resolved = subject.resolved

    slots = min(resolved.max_tokens, train.tokens_per_step)
    if resolved.layout is LayoutKind.packed:
        slots = -(-slots // SLOTS) * SLOTS  # rounded up

    return estimate_memory(
        subject.job.model,
        subject.vocab_size,
        resolved=resolved,
        slots=slots,
        mean_length=mean_length,
        has_ema=train.ema_decay is not None,
    )


# ---- for people -----------------------------------------------------------------------------------------------------


def format_summary(summary: Summary) -> str:
    """The summary as lines of text."""
    lines = [
        *_parameter_lines(summary.parameters, vocab_size_of(summary.vocab_size, summary.source_vocab_size)),
        *_vocabulary_lines(summary),
        *_flop_lines(summary.flops, summary.paper),
        *_memory_lines(summary),
        *_time_lines(summary.paces),
    ]
    return "".join(f"{line}\n" for line in lines)


def _parameter_lines(parameters: Parameters, vocab_size: VocabSize) -> list[str]:
    is_tied = parameters.output <= target_size(vocab_size)  # a bias at most
    if not is_tied:
        matrices = "source and target"
    elif isinstance(vocab_size, VocabSizes):
        matrices = "the source's, and a matrix that target and output share"
    else:
        matrices = "source, target and output share one matrix"

    lines = [
        f"parameters       {parameters.total:,} with {describe_vocab_size(vocab_size)}",
        f"  embeddings     {parameters.embeddings:,}: {matrices}",
    ]
    if parameters.positions:
        lines.append(f"  positions      {parameters.positions:,}")
    lines += [
        f"  encoder        {_stack_line(parameters.encoder)}",
        f"  decoder        {_stack_line(parameters.decoder)}",
    ]
    if parameters.output:
        lines.append(f"  output         {parameters.output:,}")
    return lines


def _vocabulary_lines(summary: Summary) -> list[str]:
    lines = []
    for other in summary.other_vocabularies:
        number = "one" if other.source_vocab_size is None else "two"
        sizes = describe_vocab_size(vocab_size_of(other.vocab_size, other.source_vocab_size))
        more = other.parameters - summary.parameters.total
        difference = f"{abs(more):,} {'more' if more > 0 else 'fewer'}" if more else "as many"
        softmax = f"a softmax over {other.vocab_size:,}"
        lines.append(f"  {number} instead    {other.parameters:,} with {sizes}: {difference}, {softmax}")
    return lines


def _stack_line(stack: StackParameters) -> str:
    cross = f"encoder-decoder attention {stack.cross_attention:,}, " if stack.cross_attention else ""
    return (
        f"{stack.total:,}: self-attention {stack.self_attention:,}, {cross}"
        f"feed-forward {stack.feed_forward:,}, norms {stack.norms:,}"
    )


def _flop_lines(flops: Flops, paper: list[PaperCost]) -> list[str]:
    tokens = f"{flops.tokens_per_step:,}"
    lines = [
        f"FLOPs            {flops.training:.2e} in {flops.steps:,} steps, by the model's arithmetic",
        f"  a step         {flops.step:.2e} for {tokens} + {tokens} tokens in sentences of {flops.mean_length:.0f}",
        f"  a target token {flops.target_token:.2e}",
    ]

    gpus = f"{PAPER_GPUS} GPUs x {PAPER_FLOPS / 1e12:.1f} TFLOP/s"
    for cost in paper:
        lines.append(
            f"  paper's {cost.name:<6} {cost.by_time:.2e} as Table 2 counts: {cost.hours:.0f} h x {gpus}; "
            f"by arithmetic {cost.by_arithmetic:.2e}"
        )
    return lines


def _memory_lines(summary: Summary) -> list[str]:
    memory = summary.memory
    longest = summary.longest_memory
    resolved = summary.resolved

    state = memory.total - memory.activations - memory.transient
    average = f", average {_mib(memory.ema)}" if memory.ema else ""
    slots = f"{memory.slots:,} + {memory.slots:,} {resolved.layout.name} slots"

    return [
        f"memory           {_mib(memory.total)} MiB of tensors in training, estimated; "
        f"{_mib(longest.total)} MiB where all sentences are as long as data.filter.max_length",
        f"  state          {_mib(state)} MiB: weights {_mib(memory.weights)}, gradients {_mib(memory.gradients)}, "
        f"moments {_mib(memory.adam)}{average}",
        f"  activations    {_mib(memory.activations)} MiB of a micro-batch of {slots}, in {resolved.precision.name} on "
        f"{resolved.device.name}",
        f"  loss           {_mib(memory.transient)} MiB at the peak, which is there or where the backward pass begins",
    ]


def _mib(size: int) -> str:
    """Bytes as whole MiB."""
    return f"{size / 2**20:,.0f}"


def _time_lines(paces: list[Pace]) -> list[str]:
    lines = ["time             if every step is full; no GPU is listed whose step would be bound by its launches"]
    for pace in paces:
        tokens = f"{pace.target_tokens_per_second:,.0f} target tokens/s"
        flops = f"{pace.flops_per_second / 1e12:.3g} TFLOP/s"
        lines.append(f"  {pace.hours:>10,.2f} h   {pace.source}: {tokens}, {flops}")
    return lines
