"""`transformer verify`: train the first steps of a run again, and compare what they come to with what it wrote then.

    run.json, the text -> open_run -> train_loop, up to a mark -> both history.json, side by side -> Verification

It trains in a temporary directory, as `train` does. The run directory stays as it is. Under the conditions of the run,
all is the same bit for bit. Under others (`CONDITIONS`), sums are rounded otherwise, and numbers may differ by what the
bounds below allow; then nothing can be said of the last bits, nor of the weights.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

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
from transformer.records import Mark, Results, RunRecord, Start
from transformer.run_dir import DEV, RunDir
from transformer.tools.metrics import read_curves
from transformer.tools.verify.job import ALL, VerifyJob
from transformer.training.finish import finish
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
    goal = _goal(directory, job.steps)
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
                world.from_rank0(lambda: write_sets(run.directory, {DEV: run.dev.pairs, **run.test}))
            now = None if results is None else finish(run)

            def compare() -> Verification:
                others = _other_conditions(_starts(directory, record), run, step=goal.step)
                compared = [*_compare_marks(goal, run.directory, is_exact=not others)]
                if results is not None and now is not None:
                    compared += _compare_results(results, now, is_exact=not others)
                return Verification(str(directory.path), run.progress.step, others, compared)

            return world.share(compare, pack=to_json, unpack=partial(from_json, Verification))


def require_agreement(verification: Verification) -> None:
    """Raise FindingsError, whose exit status is for scripts, where something does not agree."""
    found = verification.difference
    if found is not None:
        raise FindingsError(
            f"{verification.run_dir}: not the same again, first {found.name}: {found.before} then, {found.now} now"
        )


# ---- what is repeated -----------------------------------------------------------------------------------------------


def _goal(directory: RunDir, steps: str) -> _Goal:
    """The marks up to the first one at or after `steps`; the last one, where there is none so late."""
    marks = directory.read_history().marks
    if not marks:
        logged = _first_logged(directory)
        return _Goal(step=logged.step, marks=[], logged=logged)
    later = [] if steps == ALL else [mark.step for mark in marks if mark.step >= int(steps)]
    last = min(later, default=marks[-1].step)
    return _Goal(step=last, marks=[mark for mark in marks if mark.step <= last], logged=None)


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


def _compare_marks(goal: _Goal, again: RunDir, *, is_exact: bool) -> Iterator[Compared]:
    """Loss, gradient norm and weights at each mark; or what was logged first."""
    if goal.logged is not None:
        logged = _first_logged(again)
        yield from _compare_measured(f"steps 1 to {logged.step}", goal.logged, logged, is_exact=is_exact)
        return

    marks = {mark.step: mark for mark in again.read_history().marks}
    for before in goal.marks:
        now = marks[before.step]
        yield from _compare_measured(f"step {now.step}", before, now, is_exact=is_exact)
        digests = before.weights_sha256, now.weights_sha256
        name = f"the weights after step {now.step}"
        yield Compared(name, *digests, agrees=not is_exact or digests[0] == digests[1])


def _compare_measured(name: str, before: Mark, now: Mark, *, is_exact: bool) -> Iterator[Compared]:
    """The loss and the gradient norm of a step, or their means over some."""
    loss_bound = _bound(LOSS_BOUNDS, now.step, is_exact=is_exact)
    norm_bound = _bound(NORM_BOUNDS, now.step, is_exact=is_exact)
    yield _compare_numbers(f"the loss of {name}", before.loss, now.loss, bound=loss_bound)
    yield _compare_numbers(f"the gradient norm of {name}", before.gradient_norm, now.gradient_norm, bound=norm_bound)


def _bound(bounds: tuple[float, float], step: int, *, is_exact: bool) -> float:
    """How far apart, relatively, a number of a step may be."""
    if is_exact:
        return 0.0
    early, late = bounds
    share = min(1.0, max(0.0, (step - EARLY) / (LATE - EARLY)))
    return float(early * (late / early) ** share)


def _compare_numbers(name: str, before: float, now: float, *, bound: float) -> Compared:
    """Two numbers; those of a step without finite ones agree where neither is finite."""
    are_nan = math.isnan(before) and math.isnan(now)
    deviation = 0.0 if before == now or are_nan else abs(now - before) / max(abs(before), 1e-30)
    return Compared(name, repr(before), repr(now), agrees=deviation <= bound, deviation=deviation)


def _compare_results(before: Results, now: Results, *, is_exact: bool) -> Iterator[Compared]:
    """How long it was trained, what was averaged, and the scores."""
    facts = [("the steps of the whole run", before.steps, now.steps), ("averaged", before.averaged, now.averaged)]
    for name, then, here in facts:
        yield Compared(name, str(then), str(here), agrees=then == here)

    tested = {**before.test_sets, **({} if before.dev is None else {DEV: before.dev})}
    again = {**now.test_sets, **({} if now.dev is None else {DEV: now.dev})}
    for name, scores in tested.items():
        if name not in again or before.test_digest != now.test_digest:
            yield Compared(f"the text of data.test.{name}", "what was scored", "changed", agrees=False)
            continue
        scores_again = named(again[name])
        for field, score in named(scores).items():
            if field not in scores_again:  # of another package, and not measured: the log says so
                continue
            here = scores_again[field].value
            apart = abs(here - score.value)
            yield Compared(
                f"{score.name} of {name}",
                repr(score.value),
                repr(here),
                agrees=apart <= (0.0 if is_exact else _score_bound(field, score.value)),
                deviation=apart,
            )


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
    lines += [f"another condition: {condition}" for condition in verification.other_conditions]

    place = f"{verification.run_dir}, steps 1 to {verification.step}"
    if verification.difference is not None:
        lines.append(f"{place}: not the same again")
    elif verification.is_exact:
        lines.append(f"{place}: the same again, to the last bit")
    else:
        lines.append(f"{place}: the same again, as far as can be said under other conditions")
    return "".join(f"{line}\n" for line in lines)
