"""`transformer verify`: train the first steps of a run again, and compare the results with what the run recorded.

    run.json, the text -> open_run -> train_loop, up to a mark -> both history.json, side by side -> Verification

It trains in a temporary directory, as `train` does. The run directory is not changed. Its weights are compared with its
own history.json, averages with the checkpoints that went into them. Under the conditions of the run, everything is the
same bit for bit. Under others (`CONDITIONS`), sums are rounded differently, and numbers may differ within the bounds
below; then nothing can be said of the last bits or of the weights.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformer.average import mean_weights
from transformer.checkpoint import Checkpoint, load_checkpoint
from transformer.compute import memory_errors_named, resolve_device
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Device
from transformer.data.source import store_beside
from transformer.distributed import join_world
from transformer.errors import CheckpointError, FindingsError, InputError, Stopped
from transformer.evaluation.metrics import METRICS, named
from transformer.evaluation.sets import write_sets
from transformer.machine import most_threads
from transformer.numerics import relative
from transformer.records import DevScores, Mark, Results, RunRecord, Start, Validation
from transformer.run_dir import DEV, EMA, MODEL, RunDir, list_steps
from transformer.tools.metrics import read_curves
from transformer.tools.verify.job import ALL, VerifyJob
from transformer.training.finish import finish
from transformer.training.history import digest_tensors
from transformer.training.loop import train_loop
from transformer.training.process import process_settings_restored
from transformer.training.start import Run, open_run

LOSS = "train/loss"  # of metrics.jsonl
NORM = "train/gradient_norm"
UNKNOWN = "unknown"

# Under other conditions: how far apart, relatively, rounding may have brought a loss, and the norm of a gradient.
# The bounds are the first of each pair up to step EARLY, the second from step LATE on, and grow in between. The demo in
# bf16, with AVX2 for AVX-512, came to 1.4e-5 and 7e-4 by step 50, and later to at most 0.028 and 0.25.
EARLY, LATE = 50, 200
LOSS_BOUNDS = (1e-3, 0.1)
NORM_BOUNDS = (1e-2, 0.5)
SCORE_BOUND = 2.0  # points of BLEU or chrF: three standard deviations of the difference between two seeds, about
OTHER_SCORE_BOUND = 0.05  # as much, of 40 points


@dataclass(frozen=True)
class Compared:
    """Something that the run wrote, and what the repeated training came to."""

    name: str
    before: str
    now: str
    agrees: bool  # to the last bit under the conditions of the run, within a bound under others
    deviation: float | None = None  # of numbers, relative to the first; of scores, in points


@dataclass(frozen=True)
class Verification:
    """What was compared, in the order of the training."""

    run_dir: str
    step: int  # the last one that was trained again
    other_conditions: list[str]  # than those of the run; none: every bit is to be the same
    compared: list[Compared]
    not_compared: list[str]  # what of the run was not, and why

    @property
    def is_exact(self) -> bool:
        """Whether everything is the same to the last bit, under whatever conditions."""
        return all(item.before == item.now for item in self.compared)

    @property
    def difference(self) -> Compared | None:
        """The first that does not agree."""
        return next((item for item in self.compared if not item.agrees), None)


@dataclass(frozen=True)
class _Goal:
    """What of a run is compared: its marks, or in a run of an earlier version the first line of its log."""

    step: int  # the last one that is to be trained again
    marks: list[Mark]
    logged: Mark | None  # means over the steps up to it, without weights
    beyond: list[int]  # steps of marks that no training of the run comes to


def verify(job: VerifyJob) -> Verification:
    """Train the first `job.steps` of a run again, or as many as it takes to its next mark, and compare.

    Every rank returns the same. Raises InputError where there is no such run, its text is gone, or there is nothing to
    compare; CheckpointError where its documents are damaged; FindingsError where its text has changed; and what `train`
    raises.
    """
    directory = RunDir(Path(job.run_dir))
    if not directory.path.is_dir():
        raise InputError(f"{directory.path}: no such run directory")
    record = directory.read_record()
    record = _with_steps_of(directory, record)
    goal = _goal(directory, job.steps, most=record.config.train.max_steps)
    results = _results(directory) if job.steps == ALL else None

    with (
        process_settings_restored(),
        ExitStack() as held,
        join_world(resolve_device(record.resolved.device)) as world,
        memory_errors_named("training again", remedy="end what else uses it"),
    ):
        folder = world.from_rank0(lambda: held.enter_context(TemporaryDirectory(prefix="transformer-verify-")))
        again = _job_again(record, goal, directory=directory, folder=Path(folder), is_whole=results is not None)
        with open_run(again, world, like=directory) as run:
            _train(run, goal, is_whole=results is not None)
            if results is not None:
                world.from_rank0(lambda: write_sets(run.directory, {**run.dev_texts, **run.test}))
            now = None if results is None else finish(run)

            def compare() -> Verification:
                others = _other_conditions(_starts(directory, record), run, step=goal.step)
                found = _Findings(is_exact=not others)
                _compare_marks(found, goal, run.directory, most=record.config.train.max_steps)
                _compare_weights(found, directory, run.directory, is_whole=results is not None)
                _compare_dev(found, record, run.directory.read_record())
                if results is not None and now is not None:
                    _compare_results(found, results, now)
                return Verification(str(directory.path), run.progress.step, others, found.compared, found.left)

            return world.share(compare, pack=to_json, unpack=partial(from_json, Verification))


def require_agreement(verification: Verification) -> None:
    """Raise FindingsError, whose exit status is for scripts, where something does not agree."""
    found = verification.difference
    if found is not None:
        raise FindingsError(
            f"{verification.run_dir}: not the same again, first {found.name}: {found.before} then, {found.now} now"
        )


# ---- what is repeated -----------------------------------------------------------------------------------------------


def _with_steps_of(directory: RunDir, record: RunRecord) -> RunRecord:
    """The record, with as many steps as the run has: `train.max_steps` may have been lowered when it was finished."""
    train = record.config.train
    try:
        steps = max(train.max_steps, directory.read_results().steps)
    except CheckpointError:
        return record
    return replace(record, config=replace(record.config, train=replace(train, max_steps=steps)))


def _goal(directory: RunDir, steps: str, *, most: int) -> _Goal:
    """The marks up to the first one at or after `steps`; the last one, where there is none so late."""
    marks = directory.read_history().marks
    beyond = [mark.step for mark in marks if mark.step > most]
    marks = [mark for mark in marks if mark.step <= most]
    if not marks:
        logged = _first_logged(directory)
        return _Goal(step=logged.step, marks=[], logged=logged, beyond=beyond)
    later = [] if steps == ALL else [mark.step for mark in marks if mark.step >= int(steps)]
    last = min(later, default=marks[-1].step)
    return _Goal(step=last, marks=[mark for mark in marks if mark.step <= last], logged=None, beyond=beyond)


def _first_logged(directory: RunDir) -> Mark:
    """The first line of metrics.jsonl with a loss. Raises InputError where there is none."""
    try:
        curves, _ = read_curves(directory.metrics)
        step, loss = curves[LOSS][0]
        return Mark(step=step, loss=loss, gradient_norm=dict(curves[NORM])[step], weights_sha256=UNKNOWN)
    except (OSError, KeyError, ValueError):
        raise InputError(
            f"{directory.path}: neither {directory.history.name} nor {directory.metrics.name} says what a step came "
            "to: there is nothing to compare"
        ) from None


def _results(directory: RunDir) -> Results:
    """The scores of the run. Raises InputError where it has none yet."""
    try:
        return directory.read_results()
    except CheckpointError as error:
        raise InputError(f"{error}: steps={ALL} is for a finished run; give a number of steps") from None


def _job_again(record: RunRecord, goal: _Goal, *, directory: RunDir, folder: Path, is_whole: bool) -> TrainJob:
    """The job of the run as it was first started, in a directory of its own, without what only measures."""
    config = record.config
    resolved = record.resolved
    train = replace(
        config.train,
        device=resolved.device,
        threads=min(resolved.threads, most_threads()),
        max_tokens=resolved.max_tokens,
        compile=resolved.compile,
        fit_memory=False,
        profile=None,
        samples=0,
    )
    if not is_whole:
        train = replace(train, validate_every=goal.step + 1, save_every=goal.step + 1)
    if goal.logged is not None:
        train = replace(train, log_every=goal.step)
    data = replace(
        config.data,
        store_dir=config.data.store_dir or str(store_beside(str(directory.path))),
        scores=config.data.scores if is_whole else [],
    )
    return replace(config, run_dir=str(folder / "run"), train=train, data=data)


def _train(run: Run, goal: _Goal, *, is_whole: bool) -> None:
    """The loop of every training, with the marks of the run."""
    try:
        train_loop(run, [mark.step for mark in goal.marks], until=None if is_whole else goal.step)
    except Stopped:  # what it has committed is removed: nothing goes on from here
        raise KeyboardInterrupt from None


# ---- under which conditions -----------------------------------------------------------------------------------------


def _starts(directory: RunDir, record: RunRecord) -> list[Start]:
    """The starts of a run; the first is as run.json knows it, where an earlier version wrote no history.json."""
    starts = directory.read_history().starts
    if starts and starts[0].step == 0:
        return starts
    first = Start(0, UNKNOWN, record.resolved.micro_batch_multiple, record.resolved, record.versions)
    return [first, *starts]


def _other_conditions(starts: Sequence[Start], run: Run, *, step: int) -> list[str]:
    """What is other now than it was up to a step, and what keeps the last bits from being the same at all."""
    (now,) = run.directory.read_history().starts
    here = _conditions(now)
    others: dict[str, None] = {}  # in their order, each once
    for start in starts:
        if start.step < step:
            before = _conditions(start)
            differing = [name for name in here if name in before and before[name] != here[name]]
            others |= dict.fromkeys(f"{name}: {before[name]} then, {here[name]} now" for name in differing)

    if now.resolved.device is Device.cuda and not run.job.train.deterministic:
        others["train.deterministic=false on a GPU"] = None
    if now.ranks > 2:
        others[f"{now.ranks} ranks, whose sums are added in an order of their own at each start"] = None
    return list(others)


def _conditions(start: Start) -> dict[str, str]:
    """What the last bits depend on, by name."""
    packages = {
        name: version
        for name, version in start.packages.items()
        if name in ("torch", "triton", "transformer-mt") or name.startswith("nvidia-")
    }
    resolved = {name: str(value) for name, value in to_json(start.resolved).items()}
    return {"processor": start.processor, "ranks": str(start.ranks), **resolved, **packages}


# ---- whether it is the same -----------------------------------------------------------------------------------------


@dataclass
class _Findings:
    """What is being compared."""

    is_exact: bool  # whether the repetition must come to every bit
    compared: list[Compared] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what was not compared, and why

    def same(self, name: str, before: object, now: object) -> None:
        """Compare what is the same under any conditions."""
        self.compared.append(Compared(name, str(before), str(now), agrees=before == now))

    def bits(self, name: str, before: str, now: str) -> None:
        """Compare digests of what rounding may change."""
        self.compared.append(Compared(name, before, now, agrees=not self.is_exact or before == now))

    def number(self, name: str, before: float, now: float, *, bounds: tuple[float, float], step: int) -> None:
        """Compare numbers of a step; those of one without finite ones agree where neither is finite."""
        deviation = 0.0 if repr(before) == repr(now) else relative(now, before)
        bound = 0.0 if self.is_exact else _bound(bounds, step)
        self.compared.append(Compared(name, repr(before), repr(now), agrees=deviation <= bound, deviation=deviation))

    def score(self, name: str, before: float, now: float, *, bound: float) -> None:
        """Compare scores, in points."""
        apart = abs(now - before)
        agrees = apart <= (0.0 if self.is_exact else bound)
        self.compared.append(Compared(name, repr(before), repr(now), agrees=agrees, deviation=apart))


def _compare_marks(found: _Findings, goal: _Goal, again: RunDir, *, most: int) -> None:
    """Loss, gradient norm and weights at each mark; or what was logged first."""
    found.left += [f"the mark of step {step}: the run has {most} steps" for step in goal.beyond]
    if goal.logged is not None:
        logged = _first_logged(again)
        _compare_measured(found, f"steps 1 to {logged.step}", goal.logged, logged)
        return

    marks = {mark.step: mark for mark in again.read_history().marks}
    for before in goal.marks:
        if before.step not in marks:  # patience has ended this training before
            found.same(f"the mark of step {before.step}", "there", "not there")
            continue
        now = marks[before.step]
        _compare_measured(found, f"step {now.step}", before, now)
        found.bits(f"the weights after step {now.step}", before.weights_sha256, now.weights_sha256)


def _compare_measured(found: _Findings, name: str, before: Mark, now: Mark) -> None:
    """The loss and the gradient norm of a step, or their means over some."""
    found.number(f"the loss of {name}", before.loss, now.loss, bounds=LOSS_BOUNDS, step=now.step)
    norms = before.gradient_norm, now.gradient_norm
    found.number(f"the gradient norm of {name}", *norms, bounds=NORM_BOUNDS, step=now.step)


def _bound(bounds: tuple[float, float], step: int) -> float:
    """How far apart, relatively, a number of a step may be under other conditions."""
    early, late = bounds
    share = min(1.0, max(0.0, (step - EARLY) / (LATE - EARLY)))
    return float(early * (late / early) ** share)


def _compare_weights(found: _Findings, directory: RunDir, again: RunDir, *, is_whole: bool) -> None:
    """The weights that `translate` loads: those of the checkpoints, their moving averages, and the average of some.

    A checkpoint is compared with the mark of its step, which a repetition up to there confirms; an average with the
    checkpoints that it is of. These are the same bits on any machine.
    """
    marks = {mark.step: mark.weights_sha256 for mark in directory.read_history().marks}
    sound: set[int] = set()  # steps of checkpoints that can be averaged
    for step in list_steps(directory.path):
        place = f"checkpoints/{directory.checkpoint(step).name}"
        try:
            checkpoint = load_checkpoint(directory.checkpoint(step))
        except CheckpointError as error:
            found.left.append(f"the weights in {place}: {error}")
            continue
        sound.add(step)
        if step in marks:
            found.same(f"the weights in {place}", marks[step], digest_tensors(checkpoint.tensors(MODEL)))
        else:
            found.left.append(f"the weights in {place}: {directory.history.name} has no mark of step {step}")
        if checkpoint.holds(EMA):
            _compare_moving_average(found, f"the moving average in {place}", checkpoint, again, is_whole=is_whole)

    if directory.averaged.is_dir():
        name = "the weights in averaged"
        try:
            _compare_average(found, name, directory, again, sound=sound, is_whole=is_whole)
        except CheckpointError as error:
            found.left.append(f"{name}: {error}")


def _compare_average(
    found: _Findings, name: str, directory: RunDir, again: RunDir, *, sound: set[int], is_whole: bool
) -> None:
    """Compare the average with the mean of its checkpoints; if some are gone, with the repeated average."""
    average = load_checkpoint(directory.averaged)
    averaged = average.run_state().averaged
    if averaged and set(averaged) <= sound:
        mean, _ = mean_weights(directory.path, averaged)
        found.same(name, digest_tensors(mean), digest_tensors(average.weights()))
    elif is_whole:
        repeated = load_checkpoint(again.averaged)
        found.bits(name, digest_tensors(average.weights()), digest_tensors(repeated.weights()))
    else:
        shown = ", ".join(map(str, averaged))
        found.left.append(f"{name}: not all of the steps {shown} are there; it is repeated by steps={ALL} alone")


def _compare_moving_average(
    found: _Findings, name: str, checkpoint: Checkpoint, again: RunDir, *, is_whole: bool
) -> None:
    """Compare the checkpoint of a step with the repeated one: no mark has its digest."""
    if not is_whole:
        found.left.append(f"{name}: it is repeated by steps={ALL} alone")
    elif checkpoint.step not in list_steps(again.path):
        found.left.append(f"{name}: the repeated training keeps no checkpoint of step {checkpoint.step}")
    else:
        repeated = load_checkpoint(again.checkpoint(checkpoint.step))
        found.bits(name, digest_tensors(checkpoint.tensors(EMA)), digest_tensors(repeated.tensors(EMA)))


def _compare_dev(found: _Findings, before: RunRecord, now: RunRecord) -> None:
    """The text by which checkpoints are chosen; that of the training was compared before it began."""
    if before.dev_digest is None:
        found.left.append("the text of data.dev: a run of this version does not say what it was")
    else:
        found.same("the text of data.dev", before.dev_digest, now.dev_digest)


def _compare_results(found: _Findings, before: Results, now: Results) -> None:
    """How long it was trained, how it was validated, what was averaged, and the scores."""
    found.same("the steps of the whole run", before.steps, now.steps)
    found.same("averaged", before.averaged, now.averaged)

    validations = {validation.step: validation for validation in now.validations}
    for then in before.validations:
        if then.step in validations:
            _compare_validations(found, then, validations[then.step])
        else:
            found.left.append(f"the validation of step {then.step}: by train.validate_every there is none now")

    again = now.scores
    for name, scores in before.scores.items():
        if name not in again or before.test_digest != now.test_digest:
            found.same(f"the text of data.test.{name}", "what was scored", "changed")
            continue
        scores_again = named(again[name])
        for field_name, score in named(scores).items():
            if field_name in scores_again:  # else it is of another package, and not measured: the log says so
                bound = _score_bound(field_name, score.value)
                found.score(f"{score.name} of {name}", score.value, scores_again[field_name].value, bound=bound)


def _compare_validations(found: _Findings, before: Validation, now: Validation) -> None:
    """The scores on the dev set; on several, those on each and their mean."""
    step = now.step
    again: dict[str, Validation | DevScores] = {DEV: now, **now.sets}
    earlier: dict[str, Validation | DevScores] = {DEV: before, **before.sets}
    for name, then in earlier.items():
        if name not in again:
            found.left.append(f"the validation of step {step} on {name}: there is none now")
            continue
        scores = again[name]
        found.number(f"the {name} loss of step {step}", then.loss, scores.loss, bounds=LOSS_BOUNDS, step=step)
        found.number(f"the {name} nll of step {step}", then.nll, scores.nll, bounds=LOSS_BOUNDS, step=step)
        found.score(f"the {name} BLEU of step {step}", then.bleu, scores.bleu, bound=SCORE_BOUND)
        found.score(f"the {name} chrF of step {step}", then.chrf, scores.chrf, bound=SCORE_BOUND)


def _score_bound(field: str, value: float) -> float:
    """How far apart a score may be under other conditions; of one with another scale, relative to itself."""
    return SCORE_BOUND if field in METRICS else OTHER_SCORE_BOUND * abs(value)


# ---- in words -------------------------------------------------------------------------------------------------------


def format_verification(verification: Verification) -> str:
    """What was compared, a line each, under which conditions, and what follows from it."""
    lines = []
    for item in verification.compared:
        if item.before == item.now:
            lines.append(f"{item.name}: {item.now}, the same")
        else:
            apart = "" if item.deviation is None else f", {item.deviation:.1e} apart"
            lines.append(f"{item.name}: {item.before} then, {item.now} now{apart}")
    lines += [f"not compared: {left}" for left in verification.not_compared]
    lines += [f"another condition: {condition}" for condition in verification.other_conditions]

    place = f"{verification.run_dir}, steps 1 to {verification.step}"
    if verification.difference is not None:
        lines.append(f"{place}: not the same again")
    elif verification.is_exact:
        lines.append(f"{place}: the same again, to the last bit")
    else:
        lines.append(f"{place}: the same again, as far as can be said under other conditions")
    return "".join(f"{line}\n" for line in lines)
