"""Test sets: the text that a run keeps, its translations, and their scores.

A run keeps the text of its own sets, so that it can be scored wherever it is copied to: `hypotheses/NAME.src` and
`NAME.ref`, and beside them the translations, `NAME.hyp`. A score is shown with everything that it depends on.

    train:     write_sets ... translate_pairs -> keep_translations, score_sets -> NAME.hyp, results.json
    evaluate:  read_sets, checked against results.json (or other sets, that the job names) -> the same two

Only training writes these: what `evaluate` adds is an engine of CTranslate2, and what external judges say of the
translations, in `judges/`, so results.json is always about the translations beside it.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from transformer import registry
from transformer.checkpoint import Checkpoint, find_checkpoint, load_weights
from transformer.compute import resolve_device
from transformer.config.jobs import EvaluateJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import (
    DataConfig,
    Device,
    Metric,
    Precision,
    SearchConfig,
    SearchOverride,
    TrainConfig,
)
from transformer.data.corpus import Pair
from transformer.data.source import resolve_source, store_beside
from transformer.decoding.loading import build_translator
from transformer.decoding.ranks import build_by_turns, translate_sets
from transformer.decoding.stream import summed
from transformer.decoding.translator import Translator
from transformer.distributed import Wait, World, join_world
from transformer.errors import CheckpointError, InputError, StorageError
from transformer.evaluation.judgements import check_judges, judged, keep_judgements, read_judgements
from transformer.evaluation.metrics import choose, mean_of
from transformer.evaluation.score import Scorer, choose_scorer, format_mean, format_scores, format_signatures
from transformer.files import open_regular, remove, write_file
from transformer.machine import resolve_threads
from transformer.plugins import JudgedText, LineChecker, ScoreSettings
from transformer.records import Judgement, Results, Scores
from transformer.run_dir import HYPOTHESIS, REFERENCE, SOURCE, RunDir, is_dev
from transformer.terminal import printable

log = logging.getLogger(__name__)

LARGEST_TEXT = 1 << 28  # bytes of one side of a set that a run keeps

_COPY_AGAIN = "copy it again from where the run came from"

Sets = Mapping[str, Sequence[Pair]]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` returns: scores, and what they depend on."""

    test_sets: dict[str, Scores]
    checkpoint: str
    averaged: list[int]
    steps: int
    search: SearchConfig
    seed: int
    data_digest: str
    engine: str | None  # what searched in place of torch, with its version and type
    mean: dict[str, float]  # of each score over the sets, where they are of directions


@dataclass(frozen=True)
class _Translated:
    """Translations of sets, by name, and what searched for them."""

    search: SearchConfig
    engine: str | None
    hypotheses: dict[str, list[str]]


# ---- the command `evaluate` -----------------------------------------------------------------------------------------


def evaluate(job: EvaluateJob) -> Evaluation:
    """Evaluate the run's test sets, or those of the job; what the job's judges say is all that is added to the run.

    The ranks that torchrun started share the translations, and return the same.

    Raises InputError where there is no model or no test set, or a set cannot be scored; CheckpointError where the
    model or the text of a set is damaged; PeerError where another rank fails.
    """
    with joined_to_evaluate(job) as world:
        return _evaluate(job, world)


def _evaluate(job: EvaluateJob, world: World) -> Evaluation:
    run = RunDir(Path(job.run_dir))
    run.check_folders()
    checkpoint = share_checkpoint(job, world)
    data = checkpoint.settings("data", DataConfig)
    recipe = checkpoint.settings("train", TrainConfig)

    # What can be wrong with the scorer and the sets is found before anything is translated.
    sets = share_sets(lambda: _sets_of(job, run, data), world)
    scorers: dict[str, Scorer] = {}  # of rank 0, which scores

    def prepare_scores() -> None:
        metrics = choose([*job.score_names(), *data.scores])
        for name in sets:
            tokenize = job.bleu_tokenize or data.bleu_tokenize
            text = ScoreSettings(_direction(job, data, name)[1], tokenize, job.lowercase)
            scorers[name] = choose_scorer(text, metrics)
        check_judges(job, have_sources=True)

    world.from_rank0(prepare_scores)

    # The translations: new ones, unless the run keeps the same, and it is judges that are asked.
    find_kept = partial(_kept_translations, job, run, checkpoint)
    translated = world.share(
        find_kept, pack=lambda kept: kept is not None, unpack=lambda is_kept: find_kept() if is_kept else None
    )
    if translated is None:
        translated = _translate(job, run, checkpoint, sets=sets, world=world)
    by_name = translated.hypotheses

    # Their scores, and what judges say.
    def score_all() -> dict[str, Scores]:
        return {
            name: replace(scores, judges=_judge(job, run, name, sets[name], by_name[name]))
            for name, scores in score_sets(sets, by_name, scorers=scorers).items()
        }

    test_sets = world.share(
        score_all,
        pack=lambda scores: {name: to_json(one) for name, one in scores.items()},
        unpack=lambda packed: {name: from_json(Scores, one) for name, one in packed.items()},
        wait=Wait.work,
    )
    state = checkpoint.run_state()
    return Evaluation(
        test_sets=test_sets,
        checkpoint=checkpoint.path.name,
        averaged=state.averaged,
        steps=checkpoint.step,
        search=translated.search,
        engine=translated.engine,
        seed=recipe.seed,
        data_digest=state.data_digest,
        mean=mean_of(test_sets, {name: _direction(job, data, name) for name in test_sets}),
    )


@contextmanager
def joined_to_evaluate(job: EvaluateJob) -> Iterator[World]:
    """The ranks that share a job; rank 0 alone says what it does."""
    with join_world(resolve_device(job.device)) as world:
        if not world.is_rank0:
            logging.getLogger("transformer").setLevel(logging.WARNING)
        yield world


def share_checkpoint(job: EvaluateJob, world: World) -> Checkpoint:
    """The checkpoint that rank 0 finds, on every rank: a training may write newer ones meanwhile."""
    return world.share(
        lambda: find_checkpoint(Path(job.run_dir), job.checkpoint),
        pack=lambda checkpoint: str(checkpoint.path),
        unpack=lambda path: load_weights(Path(path)),
    )


def _kept_translations(job: EvaluateJob, run: RunDir, checkpoint: Checkpoint) -> _Translated | None:
    """The translations that the run keeps; None where they do not serve.

    They serve where only judges are asked, and of this checkpoint.

    A judge is to read what results.json is about: other hardware would translate some lines in another way.
    """
    is_plain = (job.search, job.device, job.precision) == (SearchOverride(), Device.auto, Precision.auto)
    if job.test or not job.scorer or not is_plain or not run.results.exists():
        return None
    results = run.read_results()
    if (results.steps, results.averaged) != (checkpoint.step, checkpoint.run_state().averaged):
        return None

    log.info("%s: the judges read the translations that the run keeps", run.path)
    kept = {name: read_translations(run, name) for name in run.set_names() if not is_dev(name)}
    return _Translated(results.search, results.engine, kept)


def _judge(
    job: EvaluateJob, run: RunDir, name: str, pairs: Sequence[Pair], hypotheses: Sequence[str]
) -> dict[str, Judgement]:
    """What judges say of the translations: what was said before, and those of the job.

    It is kept with the run if these are the run's own translations.
    """
    text = JudgedText.of(pairs, hypotheses)
    new = judged(job, text, place=name)
    if job.test or not (new or run.judge_names(name)) or not run.text(name, HYPOTHESIS).exists():
        return new

    own = None
    with suppress(InputError):  # a training may be replacing them
        own = read_translations(run, name)
    if own == list(hypotheses):
        keep_judgements(run, name, new)
        return {**read_judgements(run, name, text), **new}
    if new:
        log.warning("%s: the judges' scores are not kept: the run's own translations are different", name)
    return new


def _translate(job: EvaluateJob, run: RunDir, checkpoint: Checkpoint, *, sets: Sets, world: World) -> _Translated:
    torch.set_num_threads(resolve_threads(job.threads))
    build = partial(
        build_translator, run.path, checkpoint, search=job.search, device=job.device, precision=job.precision
    )
    translator = build_by_turns(build, world)
    world.from_rank0(partial(_check_lines, job, run, translator, sets))

    hypotheses = translate_pairs(translator, sets, world)
    translated = _Translated(translator.search, translator.engine, hypotheses)
    del translator
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # a judge may need the memory
    return translated


def _check_lines(job: EvaluateJob, run: RunDir, translator: Translator, sets: Sets) -> None:
    """Log how many lines have several sentences. Raises InputError for a direction that the model has not learnt."""
    for name, pair in job.test.items():
        translator.check_tag(pair.tag, key=f"test.{name}.tag")
    for name, pairs in sets.items():
        for line, (source, _) in enumerate(pairs, 1):
            translator.check_direction(source, f"{name}, line {line}")

    if registry.has("lines", "check"):
        line_check: LineChecker = registry.find("lines", "check")(run.path, translator.tokenizers.source)
        tally = summed(line_check.count([source for source, _ in pairs]) for pairs in sets.values())
        line_check.warn(
            tally, "such lines are scored as they come; sets of a sentence a line tell what the model can do"
        )


def _direction(job: EvaluateJob, data: DataConfig, name: str) -> tuple[str, str, str | None]:
    """Both languages and the tag of a set: what the job says of the set, or of all text; else what the run says."""
    of_text = job.data.tgt_lang
    if name in job.test:
        pair = job.test[name]
        return pair.src_lang or data.src_lang, pair.tgt_lang or of_text or data.tgt_lang, pair.tag
    source, target, tag = data.direction_of(name)
    return source, of_text or target, tag


def _sets_of(job: EvaluateJob, run: RunDir, data: DataConfig) -> Sets:
    """The sets that the job names, else those that the run keeps."""
    if job.test:
        return _given_sets(job, data)

    kept = read_sets(run)
    check_kept(run, kept)
    if not kept:
        raise InputError(f"{run.path}: the run has no test set; name one with test.NAME.src=FILE test.NAME.tgt=FILE")
    return kept


def _given_sets(job: EvaluateJob, data: DataConfig) -> Sets:
    """The sets that the job names."""
    store_dir = store_beside(job.run_dir) if job.store_dir is None else Path(job.store_dir)
    given = {}
    for name, pair in job.test.items():
        languages = _direction(job, data, name)[:2]
        source = resolve_source(pair, f"test.{name}", languages=languages, store_dir=store_dir)
        given[name] = source.load(f"test.{name}")
    return given


def check_kept(run: RunDir, kept: Sets) -> None:
    """Raise CheckpointError if results.json is of another text; a run without results has nothing to compare with."""
    if not run.results.exists():
        return
    results = run.read_results()
    own = {name: pairs for name, pairs in kept.items() if name in results.test_sets}
    if digest_sets(own) != results.test_digest:
        raise CheckpointError(
            f"{run.hypotheses}: not the text that {run.results.name} was scored on (its sha256 differs): "
            f"{_COPY_AGAIN}, or name the sets with test.NAME.src and test.NAME.tgt"
        )


# ---- translating and scoring ----------------------------------------------------------------------------------------


def share_sets(find: Callable[[], Sets], world: World) -> Sets:
    """The sets that rank 0 finds, on every rank: the others read no text."""
    return world.share(
        find,
        pack=dict,
        unpack=lambda packed: {
            name: [(source, reference) for source, reference in pairs] for name, pairs in packed.items()
        },
    )


def translate_pairs(translator: Translator, sets: Sets, world: World) -> dict[str, list[str]]:
    """The translations of each set, on every rank: see `translate_sets`."""
    sources = {name: [source for source, _ in pairs] for name, pairs in sets.items()}
    return translate_sets(translator, sources, world)


def score_sets(
    sets: Sets, translations: Mapping[str, Sequence[str]], *, scorers: Mapping[str, Scorer]
) -> dict[str, Scores]:
    """The scores of each set.

    A scorer is `score` for the language of its set, which refuses text that cannot be compared fairly; or, at the end
    of a training, `measure`: a doubt about the text must not cost a run its results.
    """
    return {
        name: scorers[name](
            translations[name], [reference for _, reference in pairs], sources=[source for source, _ in pairs]
        )
        for name, pairs in sets.items()
    }


def keep_translations(run: RunDir, translations: Mapping[str, Sequence[str]]) -> None:
    """Write the translations of the run's own sets, as NAME.hyp. Raises StorageError."""
    for name, hypotheses in translations.items():
        _write_lines(run.text(name, HYPOTHESIS), hypotheses)


# ---- scores, for people ---------------------------------------------------------------------------------------------


def format_results(run_dir: Path, results: Results | Evaluation) -> str:
    """A line of scores for each test set; below them what they depend on: model, search, and signatures.

    For a run without a test set, the scores are those of its dev sets. Those of directions have a line for their mean.
    """
    search = results.search
    origin = describe_origin(results.averaged, steps=results.steps, seed=results.seed, data_digest=results.data_digest)
    depends_on = [
        f"model: {run_dir}, {origin}",
        f"search: beam {search.beam_size}, alpha {search.length_penalty}, source + {search.max_extra} at most"
        f"{'' if results.engine is None else f', by {results.engine}'}",
    ]

    sets = results.scores if isinstance(results, Results) else results.test_sets
    if isinstance(results, Results) and not results.test_sets:
        best = results.best_validation(Metric.bleu)
        depends_on.append(f"best validation: step {best.step}, greedy BLEU {best.bleu:.2f}, chrF {best.chrf:.2f}")
        depends_on.append("there is no test set (data.test.NAME.src, data.test.NAME.tgt)")

    width = max(map(len, [*sets, *(["mean"] if results.mean else [])]), default=0)
    lines = [f"{name:<{width}}  {format_scores(scores)}" for name, scores in sets.items()]
    if results.mean:
        lines.append(f"{'mean':<{width}}  {format_mean(results.mean, sets)}")
    depends_on += _format_signatures(sets)
    lines += [f"  {line}" for line in depends_on]
    return "".join(f"{printable(line)}\n" for line in lines)  # names and digests are what files say


def _format_signatures(sets: Mapping[str, Scores]) -> list[str]:
    """The signatures, each once; where sets are scored in different ways, each with the names of its sets."""
    names_of: dict[str, list[str]] = {}
    for name, scores in sets.items():
        for signature in format_signatures(scores):
            names_of.setdefault(signature, []).append(name)
    return [
        signature if len(names) == len(sets) else f"{', '.join(names)}: {signature}"
        for signature, names in names_of.items()
    ]


def describe_origin(averaged: Sequence[int], *, steps: int, seed: int, data_digest: str) -> str:
    """Which model translated: its steps, its seed and the beginning of its data's digest."""
    model = f"mean of steps {', '.join(map(str, averaged))}" if averaged else f"step {steps}"
    return f"{model}, seed {seed}, data {data_digest[:12]}"


# ---- the text that a run keeps --------------------------------------------------------------------------------------


def write_sets(run: RunDir, sets: Sets) -> None:
    """Write the source and reference text of the run's sets, and remove that of all others. Raises StorageError."""
    # Results of other test sets go first: `evaluate` would take the new text for a damaged copy of the old.
    test_sets = {name: pairs for name, pairs in sets.items() if not is_dev(name)}
    if run.results.exists() and not _has_results_of(run, digest_sets(test_sets)):
        remove(run.results)

    for name in run.set_names():
        if name not in sets:
            for kind in (SOURCE, REFERENCE, HYPOTHESIS):
                run.text(name, kind).unlink(missing_ok=True)

    for name, pairs in sets.items():
        _write_lines(run.text(name, SOURCE), [source for source, _ in pairs])
        _write_lines(run.text(name, REFERENCE), [reference for _, reference in pairs])


def _has_results_of(run: RunDir, test_digest: str) -> bool:
    """Whether the run's results are of the test sets with this digest."""
    try:
        return run.read_results().test_digest == test_digest
    except CheckpointError:
        return False


def digest_sets(sets: Sets) -> str:
    """The SHA-256 of the sets' names and text, in whichever order they come."""
    text = json.dumps({name: list(pairs) for name, pairs in sets.items()}, sort_keys=True)
    return sha256(text.encode()).hexdigest()


def read_sets(run: RunDir) -> dict[str, list[Pair]]:
    """The test sets that the run keeps, by name. Raises InputError where one cannot be read."""
    return {name: read_set(run, name) for name in run.set_names() if not is_dev(name)}


def read_set(run: RunDir, name: str, target: str = REFERENCE) -> list[Pair]:
    """A set that the run keeps, with its references, or with translations.

    Raises InputError where a file cannot be read, is a link or a pipe, or has fewer lines than the other one.
    """
    source_path = run.text(name, SOURCE)
    target_path = run.text(name, target)
    sources = _read_lines(source_path)
    targets = _read_lines(target_path)
    if len(sources) != len(targets):
        raise InputError(f"{source_path} has {len(sources)} lines, {target_path} has {len(targets)}: {_COPY_AGAIN}")
    return list(zip(sources, targets, strict=True))


def read_translations(run: RunDir, name: str) -> list[str]:
    """The translations of a set that the run keeps. Raises InputError as `read_set` does."""
    return [hypothesis for _, hypothesis in read_set(run, name, HYPOTHESIS)]


def _read_lines(path: Path) -> list[str]:
    """What `_write_lines` has written, character by character: a BOM, or a carriage return at the end, is text here.

    Raises InputError.
    """
    try:
        with open_regular(path, limit=LARGEST_TEXT) as file:
            text = file.read().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): {_COPY_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start + 1}: {_COPY_AGAIN}") from error
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]  # the last newline ends a line, and begins none


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    """Replace a file of lines atomically, unless it has these lines already. Raises StorageError."""
    content = "".join(f"{line}\n" for line in lines).encode("utf-8")
    with suppress(OSError), open_regular(path, limit=LARGEST_TEXT) as file:
        if file.read() == content:
            return

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
    write_file(path, content)
