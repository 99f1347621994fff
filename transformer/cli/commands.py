"""The commands: each calls one function of the package, and prints what it returned.

    application    settings -> typed job
    this module    job -> the function of the command -> standard output
    tools, core    do the work, and never write to standard output

A command's module is imported when it is run, so that `--help` does not wait for torch; the classes of jobs are plain
Python. A command of `tools/` or `integrations/` is a row of COMMANDS and a folder there, with its job.
"""

import copy
import io
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from transformer import registry
from transformer.config.jobs import (
    AverageJob,
    EvaluateJob,
    Job,
    PrepareJob,
    ScoreJob,
    TrainJob,
    TranslateJob,
    checked,
)
from transformer.config.keys import did_you_mean, names_of_plugins, own_text, shipped
from transformer.config.primitives import to_primitive
from transformer.config.settings import Format
from transformer.errors import InputError, Stopped
from transformer.plugins import Command
from transformer.terminal import printable

if TYPE_CHECKING:
    from transformer.checkpoint import Checkpoint
    from transformer.data.prepare import Prepared
    from transformer.evaluation.sets import Evaluation
    from transformer.records import Results, Scores
    from transformer.tools.search_settings import Sweep

log = logging.getLogger(__name__)

R = TypeVar("R")  # what a command finds

NAMES_OF_RUNS = ("run_dir", "ensemble", "run", "runs", "teacher", "reverse")  # keys that may name a run on the hub

WHAT_NEXT = """everything is in %s: checkpoints, logs, translations, results.json. What next:
  transformer translate %s < in.txt > out.txt
  tensorboard --logdir %s
  %s"""
OWN_TEXT = own_text("en", "de")
AFTER_DEMO = f"transformer train experiment=small run_dir=runs/mine {OWN_TEXT}"


def run_command(command: str, job: Job) -> float | None:
    """Run a command, and write what it found. Returns what a sweep makes best, if the command has such a figure."""
    row = COMMANDS[command]
    try:
        found = _find(row, job)
    except KeyboardInterrupt:
        if command in ("translate", "score") and getattr(job, "output", None) is not None:  # a file, block by block
            raise Stopped("stopped; to go on, give the same command again") from None
        raise

    best: float | None = None
    if row.write is not None:
        best = registry.load(row.write)(job, found)
    elif row.show is not None and is_rank0():
        _show(job, found, registry.load(row.show))
    sys.stdout.flush()
    if row.check is not None:
        registry.load(row.check)(found)
    return best


def run(job: Job) -> Any:
    """Do what a job of `compose` says, as its command does, and return what it finds; nothing is written for people.

    The results are typed: `Results` of a TrainJob, `Evaluation` of an EvaluateJob (`Scores` where it names files,
    `Sweep` where it sweeps), `Comparison` of a CompareJob, `Checkpoint` of an AverageJob, and so on: what the function
    returns that the job's command names. `translate` and `score` write to `job.output`, or standard output, and return
    None. Raises TransformerError.
    """
    kind = type(job)
    for row in COMMANDS.values():
        if row.takes in (kind, f"{kind.__module__}:{kind.__qualname__}"):
            return _find(row, checked(row.job, job))  # whose fields may have been changed since
    raise InputError(f"no command takes a {type(job).__name__:.80}: make a job with transformer.compose")


def _find(row: Command, job: Job) -> Any:
    """What the command of a job finds, by the plug-ins that the job names: no run has yet been asked for others."""
    registry.allow(*names_of_plugins(job), settings=getattr(job, "plugins", None))
    return registry.load(row.run)(_with_runs_here(job))


def is_rank0() -> bool:
    """Whether this is the first of torchrun's processes, or the only one; known before torch is there."""
    return os.environ.get("RANK", "0") == "0"


def _with_runs_here(job: Job) -> Job:
    """The job with the runs that it names on the hub as the copies on this machine, fetched where they are not here.

    What is shown or recorded stays as it is, but for the commit, by which it is found again: see `Job.PINNED`.
    """
    named = {key: getattr(job, key) for key in NAMES_OF_RUNS if getattr(job, key, None)}
    if not any(
        registry.is_elsewhere(name)
        for names in named.values()
        for name in ([names] if isinstance(names, str) else names)
    ):
        return job

    from transformer.run_names import pinned, run_path

    here = copy.copy(job)
    for key, names in named.items():
        find = pinned if key in job.PINNED else run_path
        found = [str(find(name, key)) for name in ([names] if isinstance(names, str) else names)]
        setattr(here, key, found[0] if isinstance(names, str) else found)
    return here


@overload
def compose(
    command: Literal["train"], overrides: Iterable[str], *, config_dir: str | Path | None = None
) -> TrainJob: ...


@overload
def compose(
    command: Literal["prepare"], overrides: Iterable[str], *, config_dir: str | Path | None = None
) -> PrepareJob: ...


@overload
def compose(command: str, overrides: Iterable[str], *, config_dir: str | Path | None = None) -> Job: ...


def compose(command: str, overrides: Iterable[str], *, config_dir: str | Path | None = None) -> Job:
    """The job of `transformer COMMAND OVERRIDES`, composed and checked as on the command line; nothing is run.

    An override is written as on the command line, `"train.max_steps=20"`, without a shell's quotes. `config_dir` is a
    folder of experiments and recipes of one's own. Flags, --multirun among them, belong to the command line.

    The job is a dataclass, with a field for every key: `job.train.max_steps`. Hydra's global state is put back, so a
    running command may compose other jobs; two threads must not compose at the same time. Raises InputError.
    """
    from transformer.config.compose import compose_job

    return compose_job(command, job_of(command), overrides, config_dir=config_dir)


def job_of(command: str) -> type[Job]:
    """The class of a command's job. Raises InputError for a command that is none."""
    if not isinstance(command, str) or command not in COMMANDS:
        raise InputError(
            f"unknown command {command!r:.80}{did_you_mean(str(command), COMMANDS)}; there are {', '.join(COMMANDS)}"
        )
    return COMMANDS[command].job


# ---- what each command does -----------------------------------------------------------------------------------------


def _prepare(job: PrepareJob) -> "Prepared | None":
    from transformer.data.parts import prepare_part
    from transformer.data.prepare import prepare

    found: TrainJob = job
    if job.init_from is not None:  # a model, which torch reads: without one, no second is spent on its import
        from transformer.run_names import resolve_init_from

        found = resolve_init_from(job)
    share = job.share()
    if share is None:
        return prepare(found)
    prepare_part(found, *share)
    return None


def _write_training(job: TrainJob, results: "Results") -> float | None:
    """Returns the best dev BLEU or dev loss, by `train.metric`: equal on every rank, None if not finite."""
    if is_rank0():
        from transformer.evaluation.sets import format_results

        run_dir = Path(job.run_dir)
        _write(format_results(run_dir, results))
        sys.stdout.flush()
        is_demo = Path(job.data.train.title).parent == shipped("data") / "demo"
        log.info(WHAT_NEXT, *_what_next(run_dir, tags=job.data.required_tags(), is_demo=is_demo))

    best = results.best_validation(job.train.metric).value(job.train.metric)
    return best if math.isfinite(best) else None


def _what_next(run_dir: Path, *, tags: Sequence[str], is_demo: bool) -> tuple[str, str, str, str]:
    """Where everything is, and what WHAT_NEXT shows of commands for it, as a shell takes them.

    A run that needs one of several `tags` is shown with the first.
    """
    to_translate = [f"run_dir={run_dir}", *(f"tag={tag}" for tag in tags[:1])]
    report = f"transformer report {shlex.quote(str(run_dir))}"
    folder = shlex.quote(str(run_dir.parent))
    return str(run_dir), shlex.join(to_translate), folder, AFTER_DEMO if is_demo else report


def _translate(job: TranslateJob) -> None:
    from transformer.decoding.translate_stream import run as translate

    choose = None
    if job.rerank is not None:
        from transformer.tools.risk import least_risk

        choose = least_risk(job)
    if sys.stdin is not None:
        translate(job, sys.stdin.buffer, sys.stdout.buffer, choose=choose)
    elif job.input is not None:
        translate(job, io.BytesIO(), sys.stdout.buffer, choose=choose)  # the file of the job is translated
    else:
        raise InputError("standard input is closed: there is nothing to translate")


def _score(job: ScoreJob) -> None:
    from transformer.decoding.score_stream import run as score

    if sys.stdin is not None:
        score(job, sys.stdin.buffer, sys.stdout.buffer)
    elif job.src is not None:
        score(job, io.BytesIO(), sys.stdout.buffer)  # the files of the job are scored
    else:
        raise InputError("standard input is closed: there is nothing to score")


def _evaluate(job: EvaluateJob) -> "Evaluation | Scores | Sweep":
    """The scores of a run's test sets, of files, or of search settings on the dev set."""
    if job.scorers is not None:
        from transformer.config.compose import read_commands
        from transformer.run_dir import check_no_run

        check_no_run(Path(job.scorers), key="scorers")
        job = replace(job, scorers=None, scorer={**read_commands(Path(job.scorers)), **job.scorer})
    if job.hypotheses is not None:
        from transformer.evaluation.files import score_files

        return score_files(job)
    if job.sweep.is_wanted:
        from transformer.tools.search_settings import sweep

        return sweep(job)

    from transformer.evaluation.sets import evaluate

    return evaluate(job)


def _write_evaluation(job: EvaluateJob, found: Any) -> None:
    if not is_rank0():
        return
    if job.hypotheses is not None:
        from transformer.evaluation.files import format_file_scores

        _show(job, found, partial(format_file_scores, job))
    elif job.sweep.is_wanted:
        from transformer.tools.search_settings import format_sweep

        _show(job, found, partial(format_sweep, Path(job.run_dir)))
    else:
        from transformer.evaluation.sets import format_results

        _show(job, found, partial(format_results, Path(job.run_dir)))


def _write_average(job: AverageJob, checkpoint: "Checkpoint") -> None:
    averaged = checkpoint.run_state().averaged  # the steps of the checkpoints that it is the mean of
    if job.format is Format.json:
        _write(json.dumps({"averaged": averaged, "path": str(checkpoint.path)}) + "\n")
    else:
        _write(f"{checkpoint.path}: mean of steps {', '.join(map(str, averaged))}\n")


def _show(job: Job, result: R, in_words: Callable[[R], str]) -> None:
    """Write a result to standard output: in words for people, or all of it as JSON where the job asks for that."""
    if getattr(job, "format", None) is Format.json:
        _write(json.dumps(to_primitive(result), indent=2) + "\n")
    else:
        _write(in_words(result))


def _write(text: str) -> None:
    """Write lines to standard output, without the control characters that a terminal would obey."""
    sys.stdout.write(printable(text, keep="\n"))


class _Commands(dict[str, Command]):
    """The package's own by name; another package's command is found where its name is asked for."""

    def __missing__(self, name: str) -> Command:
        registry.allow(name)
        self[name] = registry.find("command", name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or registry.is_known("command", str(name))


COMMANDS = _Commands(
    {
        "prepare": Command(
            PrepareJob,
            _prepare,
            "read, filter and tokenise a corpus, ready for training",
            (
                f"transformer prepare experiment=small run_dir=runs/mine {OWN_TEXT}",
                "transformer prepare experiment=wmt14_en_fr_base part=3/64",
            ),
            goes_on=True,
        ),
        "train": Command(
            TrainJob,
            "transformer.training.loop:train",
            "train a model, or go on with one; then average checkpoints and score the test sets",
            (
                "transformer train",
                f"transformer train experiment=small run_dir=runs/mine {OWN_TEXT}",
                "transformer train experiment=multi30k_en_de data.root=corpora train.seed=2 run_dir=runs/second",
            ),
            write=_write_training,
            goes_on=True,
        ),
        "translate": Command(
            TranslateJob,
            _translate,
            "translate standard input to standard output, or a file to a file, line for line",
            (
                "transformer translate run_dir=runs/mine < in.txt > out.txt",
                "transformer translate run_dir=runs/mine n_best=4 format=jsonl < in.txt > out.jsonl",
                "transformer translate run_dir=runs/mine input=news.en.gz output=news.de.gz",
                "transformer translate run_dir=runs/reverse input=news.de output=news.bt.tsv keep=0.9",
                "transformer translate run_dir=hf:OWNER/NAME < in.txt > out.txt",
            ),
        ),
        "score": Command(
            ScoreJob,
            _score,
            "measure the log-probability of given translations, pair by pair, and their perplexity",
            (
                "transformer score run_dir=runs/mine src=test.en tgt=test.de",
                "transformer score run_dir=runs/mine format=jsonl < pairs.tsv",
            ),
        ),
        "evaluate": Command(
            EvaluateJob,
            _evaluate,
            "score the test sets, or files, with sacreBLEU; or compare search settings",
            (
                "transformer evaluate run_dir=runs/mine checkpoint=best search.beam_size=8",
                "transformer evaluate hypotheses=out.de references=ref.de data.tgt_lang=de",
                "transformer evaluate run_dir=runs/mine scorer.mine='python judge.py {src} {hyp} {ref} {out}'",
                "transformer evaluate run_dir=runs/mine sweep.beam_size=1,4,8 sweep.length_penalty=0,0.6,1",
            ),
            write=_write_evaluation,
        ),
        "compare": Command(
            "transformer.tools.compare.job:CompareJob",
            "transformer.tools.compare.command:compare",
            "compare the translations of runs, or files, with tests of significance",
            (
                "transformer compare runs/a runs/b",
                "transformer compare hypotheses=a.de,b.de references=ref.de data.tgt_lang=de",
            ),
            show="transformer.tools.compare.format:format_comparison",
        ),
        "report": Command(
            "transformer.tools.report.job:ReportJob",
            "transformer.tools.report.command:report",
            "make one page on runs: settings, curves, scores, samples, attention, data, origin",
            ("transformer report runs/a runs/b",),
            show="transformer.tools.report.command:format_written",
        ),
        "teach": Command(
            "transformer.tools.teach.job:TeachJob",
            "transformer.tools.teach.command:teach",
            "train a model on what a run, several runs or any program translates, and compare them",
            (
                f"transformer teach teacher=runs/big run_dir=runs/small experiment=small {OWN_TEXT}",
                "transformer teach teacher='python llm.py {src} {out}' experiment=multi30k_en_de data.root=corpora",
            ),
            show="transformer.tools.teach.command:format_taught",
            goes_on=True,
        ),
        "average": Command(
            AverageJob,
            "transformer.average:average",
            "average a run's newest checkpoints, or its best",
            ("transformer average run_dir=runs/mine best=5",),
            write=_write_average,
        ),
        "summary": Command(
            "transformer.tools.summary.job:SummaryJob",
            "transformer.tools.summary.command:summarise",
            "tell the parameters, FLOPs, memory and hours of a training",
            ("transformer summary experiment=base tokens_per_second=1800",),
            show="transformer.tools.summary.command:format_summary",
        ),
        "doctor": Command(
            "transformer.tools.doctor.job:DoctorJob",
            "transformer.tools.doctor.command:doctor",
            "check corpus, tokenizer, model and machine before a training; exit status 8 for findings",
            (f"transformer doctor experiment=small {OWN_TEXT}",),
            show="transformer.tools.doctor.command:format_diagnosis",
            check="transformer.tools.doctor.command:require_health",
        ),
        "replay": Command(
            "transformer.tools.replay.job:ReplayJob",
            "transformer.tools.replay.command:replay",
            "run one step of a training again, to find where numbers are not finite",
            ("transformer replay run_dir=runs/mine step=1234",),
            show="transformer.tools.replay.command:format_replay",
        ),
        "verify": Command(
            "transformer.tools.verify.job:VerifyJob",
            "transformer.tools.verify.command:verify",
            "train the first steps of a run again, and tell whether they come to the same; exit status 8 if not",
            ("transformer verify run_dir=runs/mine steps=50", "transformer verify run_dir=runs/mine steps=all"),
            show="transformer.tools.verify.command:format_verification",
            check="transformer.tools.verify.command:require_agreement",
        ),
        "export": Command(
            "transformer.integrations.export.job:ExportJob",
            "transformer.integrations.export.command:export",
            "write a model for CTranslate2, Argos, Marian, Bergamot, Hugging Face or ONNX, and check it",
            (
                "transformer export run_dir=runs/mine to=ctranslate2 output=model",
                "transformer export run_dir=runs/mine to=browser engine=package output=site",
            ),
            show="transformer.integrations.export.command:format_exported",
        ),
        "import": Command(
            "transformer.integrations.imports.job:ImportJob",
            "transformer.integrations.imports.command:import_run",
            "make a run from a published Marian model, such as one of OPUS-MT, or from a model.npz",
            (
                "transformer import from=hf:Helsinki-NLP/opus-mt-en-de run_dir=runs/opus",
                "transformer import from=saved/model run_dir=runs/theirs data.src_lang=en data.tgt_lang=de",
                "transformer import from=model.npz vocabularies=[vocab.spm] data.src_lang=en data.tgt_lang=de",
            ),
            show="transformer.integrations.imports.command:format_made",
        ),
        "push": Command(
            "transformer.integrations.push.job:PushJob",
            "transformer.integrations.push.command:push",
            "send a run to the Hugging Face hub, with a model card made from it",
            (
                "transformer push run_dir=runs/mine repo=OWNER/NAME license=cc-by-4.0 dry_run=true",
                "transformer push run_dir=runs/mine repo=OWNER/NAME license=cc-by-4.0 private=false",
            ),
            show="transformer.integrations.push.command:format_pushed",
        ),
        "table": Command(
            "transformer.tools.tables.job:TableJob",
            "transformer.tools.paper.command:table",
            "train and measure the rows of a table: the paper's tables, or your own",
            (
                "transformer table table=3 rows=base,A width=128",
                "transformer table table=mine.yaml experiment=small seeds=3",
            ),
            show="transformer.tools.paper.command:text_of",
            check="transformer.tools.paper.command:require_rows",
            goes_on=True,
        ),
        "attention": Command(
            "transformer.tools.attention.job:AttentionJob",
            "transformer.tools.attention.command:attention",
            "show who attends to whom: figures, a page, the weights; or what each head does",
            (
                'transformer attention run_dir=runs/mine text="It is raining." output=rain',
                "transformer attention run_dir=runs/mine set=test sentences=500",
            ),
            show="builtins:str",
        ),
    }
)
