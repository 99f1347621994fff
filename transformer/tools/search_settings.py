"""`evaluate` with `sweep.*`: search settings compared on the development set; the test sets are left alone.

    the run's dev set and model -> a trial for each beam size and length penalty -> the best, and a command to use it

Every beam size is tried with every length penalty (alpha), but decoded only once: see `Translator.translate_sweep`.
"""

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from transformer.config.jobs import EvaluateJob
from transformer.config.keys import overrides_of
from transformer.config.settings import DataConfig, Format, SearchConfig, SweepConfig, TrainConfig
from transformer.data.corpus import Pair
from transformer.decoding.loading import build_translator
from transformer.decoding.ranks import build_by_turns, in_shares
from transformer.decoding.translator import Translator
from transformer.distributed import World
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.score import Bleu, measure_bleu
from transformer.evaluation.sets import describe_origin, digest_sets, joined_to_evaluate, read_set, share_checkpoint
from transformer.machine import resolve_threads
from transformer.run_dir import SOURCE, RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """What one pair of search settings came to on the development set; on several, the means over them."""

    beam_size: int
    length_penalty: float
    bleu: float
    length_ratio: float  # tokens of the translations over those of the references, as BLEU counts them


@dataclass(frozen=True)
class Sweep:
    """The trials, the best of them, and what they depend on."""

    trials: list[Trial]
    best: Trial
    command: str  # the command line that evaluates the test sets with the best
    sentences: int
    bleu_signature: str
    checkpoint: str
    averaged: list[int]
    steps: int
    max_extra: int
    seed: int
    data_digest: str


def sweep(job: EvaluateJob) -> Sweep:
    """Translate the run's development set with all the settings that the job compares, and choose among them.

    The ranks that torchrun started share the translations, and return the same.

    Raises InputError where there is no model or no development set; CheckpointError where one of them is damaged;
    PeerError where another rank fails.
    """
    with joined_to_evaluate(job) as world:
        return _sweep(job, world)


def _sweep(job: EvaluateJob, world: World) -> Sweep:
    # The model, and the text that it translates.
    run = RunDir(Path(job.run_dir))
    checkpoint = share_checkpoint(job, world)
    data = checkpoint.settings("data", DataConfig)
    recipe = checkpoint.settings("train", TrainConfig)
    dev = _read_dev(run)

    torch.set_num_threads(resolve_threads(job.threads))
    build = partial(
        build_translator, run.path, checkpoint, search=job.search, device=job.device, precision=job.precision
    )
    translator = build_by_turns(build, world)

    # The trials, one beam size after the other.
    beam_sizes = sorted(set(job.sweep.beam_size or [translator.search.beam_size]))
    alphas = sorted(set(job.sweep.length_penalty or [translator.search.length_penalty]))
    metrics = {
        name: partial(
            measure_bleu,
            tgt_lang=job.data.tgt_lang or data.tgt_lang_of(name),
            tokenize=job.bleu_tokenize or data.bleu_tokenize,
            lowercase=job.lowercase,
        )
        for name in dev
    }
    n_sentences = sum(map(len, dev.values()))
    trials: list[Trial] = []
    signature = ""
    for beam_size in beam_sizes:
        started = time.perf_counter()
        of_beam = translator.with_search(replace(translator.search, beam_size=beam_size))
        trials_of_beam, signature = _try_alphas(of_beam, dev, world, alphas=alphas, metrics=metrics)
        trials += trials_of_beam
        log.info("beam %d: %d dev sentences in %.1f s", beam_size, n_sentences, time.perf_counter() - started)

    # The choice, with all that it depends on.
    best = choose(trials)
    state = checkpoint.run_state()
    return Sweep(
        trials=trials,
        best=best,
        command=_command(job, best),
        sentences=n_sentences,
        bleu_signature=signature,
        checkpoint=checkpoint.path.name,
        averaged=state.averaged,
        steps=checkpoint.step,
        max_extra=translator.search.max_extra,
        seed=recipe.seed,
        data_digest=state.data_digest,
    )


def _read_dev(run: RunDir) -> dict[str, list[Pair]]:
    """The development sets that the run keeps.

    Raises InputError where there is none; CheckpointError where they are not those that run.json names, if that is
    there.
    """
    names = run.dev_names()
    source = run.text(names[0], SOURCE)
    if not source.exists():
        raise InputError(f"{source}: the run keeps no development set to compare settings on")
    dev = {name: read_set(run, name) for name in names}

    digest = run.read_record().dev_digest if run.record.exists() else None
    if digest not in (None, digest_sets(dev)):
        raise CheckpointError(
            f"{source}: this is not the text that the run was validated on (its sha256 differs): copy it again from "
            "where the run came from"
        )
    return dev


def _try_alphas(
    translator: Translator,
    dev: Mapping[str, Sequence[Pair]],
    world: World,
    *,
    alphas: Sequence[float],
    metrics: Mapping[str, Callable[..., Bleu]],
) -> tuple[list[Trial], str]:
    """A trial for each alpha, and the signature of their BLEU: of the first set, where these differ."""

    def by_text(texts: list[str], _: list[int]) -> list[list[str]]:
        return [list(of_text) for of_text in zip(*translator.translate_sweep(texts, alphas).values(), strict=True)]

    sources = {name: [source for source, _ in pairs] for name, pairs in dev.items()}
    found = in_shares(translator, sources, world, by_text)

    def score(name: str) -> list[list[Any]]:
        """BLEU of a set by each alpha."""
        references = [reference for _, reference in dev[name]]
        by_alpha = map(list, zip(*found[name], strict=True))
        return [list(astuple(metrics[name](hypotheses, references))) for hypotheses in by_alpha]

    scored = world.from_rank0(lambda: [score(name) for name in dev])
    trials = []
    for n, alpha in enumerate(alphas):
        of_sets = [Bleu(*by_alpha[n]) for by_alpha in scored]
        bleu = fmean(one.score for one in of_sets)
        ratio = fmean(one.length_ratio for one in of_sets)
        trials.append(Trial(translator.search.beam_size, alpha, bleu=bleu, length_ratio=ratio))
    return trials, Bleu(*scored[0][0]).signature


def choose(trials: Sequence[Trial]) -> Trial:
    """The trial of the highest BLEU, to the two decimals that are shown.

    Among equals it is the one with the smaller beam, then the one whose alpha is nearer to the paper's 0.6.
    """
    return min(trials, key=_preference)


def _preference(trial: Trial) -> tuple[float, int, float]:
    """What decides between two trials; the lesser is chosen."""
    distance = abs(trial.length_penalty - SearchConfig().length_penalty)
    return -round(trial.bleu, 2), trial.beam_size, distance


def _command(job: EvaluateJob, best: Trial) -> str:
    """The command line that evaluates the run's test sets with the best settings, and else with those of the job."""
    chosen = replace(
        job,
        sweep=SweepConfig(),
        format=Format.text,
        search=replace(job.search, beam_size=best.beam_size, length_penalty=best.length_penalty),
    )
    run_dir = f"run_dir={job.run_dir}"  # the default one, too
    others = [text for text in overrides_of(chosen) if text != run_dir]
    return shlex.join(["transformer", "evaluate", run_dir, *others])


def format_sweep(run_dir: Path, result: Sweep) -> str:
    """A table with a row for each beam size and a column for each alpha, and what to do with the best of them."""
    # The cells.
    by_settings = {(trial.beam_size, trial.length_penalty): trial for trial in result.trials}
    beam_sizes = sorted({beam_size for beam_size, _ in by_settings})
    alphas = sorted({alpha for _, alpha in by_settings})
    rows = [["", *(f"alpha {alpha:g}" for alpha in alphas)]]
    for beam_size in beam_sizes:
        trials = [by_settings[beam_size, alpha] for alpha in alphas]
        rows.append([f"beam {beam_size}", *(f"{trial.bleu:.2f} ({trial.length_ratio:.3f})" for trial in trials)])

    # In columns of one width.
    width = max(len(cell) for row in rows for cell in row) + 2
    lines = ["".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
    table = "".join(f"{line}\n" for line in lines)

    best = result.best
    origin = describe_origin(result.averaged, steps=result.steps, seed=result.seed, data_digest=result.data_digest)
    return (
        f"{run_dir}: BLEU (and length ratio) on its {result.sentences} dev sentences; {origin}; "
        f"source + {result.max_extra} at most; {result.bleu_signature}\n"
        f"{table}"
        f"best: beam {best.beam_size}, alpha {best.length_penalty:g}, BLEU {best.bleu:.2f}; to use it:\n"
        f"  {result.command}\n"
    )
