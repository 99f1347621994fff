"""The end of a run: its last checkpoints averaged, its test sets scored with the average, and results.json written.

Rank 0 averages, scores and writes; all ranks translate.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformer.average import average_checkpoints, scheduled_steps, warn_of_early_average
from transformer.checkpoint import Checkpoint, open_checkpoint
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import SearchOverride
from transformer.decoding.loading import build_translator
from transformer.decoding.ranks import build_by_turns
from transformer.distributed import Wait
from transformer.errors import CheckpointError
from transformer.evaluation.metrics import ALWAYS, bleu_metric, choose, mean_of, named
from transformer.evaluation.score import measure
from transformer.evaluation.sets import Sets, digest_sets, keep_translations, score_sets, share_sets, translate_pairs
from transformer.files import remove
from transformer.plugins import ScoreMetric, ScoreSettings
from transformer.records import Results, Scores
from transformer.run_dir import DEV
from transformer.training.start import Run

log = logging.getLogger(__name__)


def is_finished(run: Run) -> bool:
    """Whether results.json is there, for this step, average and search, and the sets that it has scores of."""
    try:
        results = run.directory.read_results()
    except CheckpointError:  # missing, or damaged
        return False

    return (
        run.progress.has_ended(run.job.train)
        and results.steps == run.progress.step
        and results.average in (None, run.job.train.average)
        and results.search == run.job.search
        and results.test_digest == digest_sets(run.test)
        and results.dev_digest in (None, run.dev_digest)
        and all(_has_words_of(run, name, scores) for name, scores in results.scores.items())
        and all(_chosen(run).keys() - ALWAYS.keys() <= named(scores).keys() for scores in results.scores.values())
    )


def _chosen(run: Run) -> dict[str, ScoreMetric]:
    """The metrics of the run; the log named the unavailable ones at its start."""
    return choose(run.job.data.scores, level=logging.DEBUG)


def _has_words_of(run: Run, name: str, scores: Scores) -> bool:
    """Whether BLEU cut this set into words as it would now: `data.test.NAME.tgt_lang` may have changed."""
    data = run.job.data
    metric = bleu_metric(data.tgt_lang_of(name), tokenize=data.bleu_tokenize)
    kind = str(metric.tokenizer_signature).partition("-mecab")[0]  # MeCab's version follows, which may be another now
    return f"|tok:{kind}" in scores.bleu_signature


def finish(run: Run) -> Results:
    """The results of a run that has trained to its end, made and written where they are not there yet.

    Every rank must call it, and returns the same.
    """
    world = run.world
    if not world.from_rank0(lambda: is_finished(run)):
        _evaluate(run)
    return world.share(run.directory.read_results, pack=to_json, unpack=partial(from_json, Results))


def _evaluate(run: Run) -> None:
    """Average the last checkpoints, and translate each test set once with the result; the dev sets, if there is none.

    All ranks translate; rank 0 averages, scores and writes.
    """
    world = run.world
    checkpoint = world.share(
        lambda: _average(run),
        pack=lambda checkpoint: str(checkpoint.path),
        unpack=lambda path: open_checkpoint(Path(path)),
        wait=Wait.work,
    )
    build = partial(
        build_translator,
        run.directory.path,
        checkpoint,
        search=SearchOverride(),
        device=run.resolved.device,
        precision=run.resolved.precision,
    )
    # A set of a direction that was not learnt costs a run no results: `prepare` has warned of it.
    translator = replace(build_by_turns(build, world), is_tagged=False)

    world.from_rank0(run.directory.check_folders)  # before any time is spent
    sets = share_sets(lambda: run.test or run.dev_texts, world)
    translations = translate_pairs(translator, sets, world)

    def write() -> None:
        remove(run.directory.results)  # perhaps of another average: they are of the translations that are replaced
        keep_translations(run.directory, translations)
        scores = _score(run, sets, translations)
        run.directory.write_results(_results(run, checkpoint, scores, engine=translator.engine))

    world.from_rank0(write, wait=Wait.work)


def _average(run: Run) -> Checkpoint:
    """Average the last checkpoints."""
    job = run.job
    path = run.directory.path
    steps = scheduled_steps(path, save_every=job.train.save_every, last=job.train.average)
    checkpoint = average_checkpoints(path, steps, job=job)
    warn_of_early_average(checkpoint.run_state().averaged[0], run.progress.step)
    return checkpoint


def _score(run: Run, sets: Sets, translations: Mapping[str, Sequence[str]]) -> dict[str, Scores]:
    """The scores of each set."""
    data = run.job.data
    metrics = _chosen(run)
    scorers = {
        name: partial(measure, text=ScoreSettings(data.tgt_lang_of(name), data.bleu_tokenize), metrics=metrics)
        for name in sets
    }
    return score_sets(sets, translations, scorers=scorers)


def _results(run: Run, checkpoint: Checkpoint, scores: Mapping[str, Scores], *, engine: str | None) -> Results:
    """The results with these scores."""
    job = run.job
    progress = run.progress

    return Results(
        test_sets={name: scores[name] for name in run.test},
        averaged=checkpoint.run_state().averaged,
        steps=progress.step,
        epochs=progress.epoch,
        sentences=progress.sentences,
        skipped_updates=progress.skipped,
        target_tokens=progress.target_tokens,
        training_seconds=round(progress.seconds, 1),
        parameters=sum(parameter.numel() for parameter in run.state.model.parameters()),
        search=job.search,
        seed=job.train.seed,
        data_digest=run.data_digest,
        test_digest=digest_sets(run.test),
        validations=progress.validations,
        dev=scores.get(DEV),
        dev_digest=None if run.test else run.dev_digest,
        average=job.train.average,
        engine=engine,
        devs={name: scores[name] for name in run.dev if name in scores and name != DEV},
        mean=mean_of(scores, {name: job.data.direction_of(name) for name in scores}),
    )
