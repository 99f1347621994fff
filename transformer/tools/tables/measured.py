"""What a table holds: its rows, and what their runs measured, all of it read from finished run directories."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from transformer.config.jobs import TrainJob
from transformer.config.settings import Metric
from transformer.cost import step_flops
from transformer.data.report import read_report
from transformer.data.tokenizer import Tokenizers
from transformer.evaluation.judgements import read_judgements
from transformer.evaluation.sets import read_set, read_translations
from transformer.loss import perplexity
from transformer.plugins import JudgedText
from transformer.records import Results
from transformer.run_dir import RunDir
from transformer.tools.significance import Interval, bootstrap_bleu


@dataclass(frozen=True)
class Published:
    """The figures that the paper prints of one row; None where it prints nothing."""

    perplexity: float | None  # per piece, on newstest2013
    bleu: float  # tokenised, not sacreBLEU: newstest2013 in Table 3, newstest2014 in Table 2
    millions: float | None  # of parameters
    flops: float | None  # training cost as the paper counts it: time x GPUs x sustained FLOP/s


@dataclass(frozen=True)
class Measured:
    """One training. Perplexities are of the development set, without label smoothing; EOS is counted."""

    seed: int
    run_dir: str
    perplexity: float  # per piece
    word_perplexity: float  # per word between spaces
    scores: dict[str, Interval]  # of each test set; of the development set where there is no test set
    parameters: int
    steps: int
    flops: float  # of the training's matrix products
    seconds: float  # of training, without validation and the final scores
    judges: dict[str, float] = field(default_factory=dict)  # what external judges said, by judge and test set
    mean_bleu: float | None = None  # over test sets of several directions
    best_dev: float = math.nan  # of its best validation: by `train.metric`, or the table's `best_first`


@dataclass(frozen=True)
class TableRow:
    """One row as it is shown: a run for each seed that has finished, a line for each that has failed."""

    name: str
    changes: str
    published: Published | None
    runs: list[Measured]
    errors: list[str]


@dataclass(frozen=True)
class Table:
    """A table that is measured: `table.json`."""

    title: str
    notes: list[str]
    rows: list[TableRow]
    best_first: Metric | None = None  # what the rows are sorted by; None: they have an order of their own


def measure(job: TrainJob, results: Results) -> Measured:
    """What a finished run measured; all of it is read from the run directory, or follows from what is there.

    Raises CheckpointError and InputError where something in the run directory is missing or damaged.
    """
    run = RunDir(Path(job.run_dir))

    # BLEU of the sets that the averaged model was scored on, from the translations that the run keeps.
    scores = {}
    judges = {}
    for name in results.scores:
        text = JudgedText.of(read_set(run, name), read_translations(run, name))
        scores[name] = bootstrap_bleu(
            text.hypotheses, text.references, tgt_lang=job.data.tgt_lang_of(name), tokenize=job.data.bleu_tokenize
        )

        for judge, judgement in read_judgements(run, name, text).items():
            judges[f"{judge}, {name}"] = judgement.system

    # Perplexity per piece and per word: the same loss is spread over fewer words than pieces.
    dev = [reference for name in run.dev_names() for _, reference in read_set(run, name)]
    tokenizers = Tokenizers.load(run.path)
    pieces = sum(len(ids) + 1 for ids in tokenizers.target.encode(dev))
    words = sum(len(text.split()) + 1 for text in dev)
    nll = results.validations[-1].nll  # of the last step, which is always validated; of several dev sets, their mean

    # FLOPs: a run counts the target tokens that it has seen. Their source tokens follow from the corpus' ratio.
    report = read_report(run)
    flops = step_flops(
        job.model,
        tokenizers.vocab_sizes,
        source=round(results.target_tokens * report.tokens.src / report.tokens.tgt),
        target=results.target_tokens,
        mean_length=results.target_tokens / results.sentences,
    )
    return Measured(
        seed=results.seed,
        run_dir=job.run_dir,
        perplexity=perplexity(nll),
        word_perplexity=perplexity(nll * pieces / words),
        scores=scores,
        judges=judges,
        mean_bleu=results.mean.get("bleu"),
        parameters=results.parameters,
        steps=results.steps,
        flops=flops,
        seconds=results.training_seconds,
        best_dev=results.best_validation(job.train.metric).value(job.train.metric),
    )
