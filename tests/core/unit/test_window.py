"""How far a run has come: the best validation, patience, the JSON of state.json, and the means that are logged."""

import itertools
import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import ranks
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import Metric, TrainConfig
from transformer.distributed import World, join_world
from transformer.files import read_json, write_json
from transformer.loss import perplexity
from transformer.records import DevScores, Progress, Validation, WindowTotals
from transformer.training.step import StepResult
from transformer.training.window import (
    GradientNorms,
    LogWindow,
    bar_text,
    describe,
    report_window,
    validation_scalars,
)

NAN = math.nan


@dataclass(frozen=True)
class FakeStep:
    """What `LogWindow` reads of a step."""

    epoch: int = 2
    index: int = 7
    sentences: int = 10
    source_tokens: int = 90
    target_tokens: int = 110
    slots: int = 250


def result(loss: float = 220.0, nll: float = 110.0, norm: float = 3.0) -> StepResult:
    """What an update measured."""
    loss_sum, nll_sum, grad_norm = (torch.tensor(x, dtype=torch.float64) for x in (loss, nll, norm))
    return StepResult(loss_sum=loss_sum, nll_sum=nll_sum, grad_norm=grad_norm, applied=torch.isfinite(grad_norm))


def validation(step: int, metric: Metric, value: float) -> Validation:
    """A validation whose `metric` is worth `value`, of which more is better; the others say the opposite."""
    worth = {one: value if one is metric else -value for one in Metric}
    return Validation(step, loss=-worth[Metric.loss], nll=1.0, bleu=worth[Metric.bleu], chrf=worth[Metric.chrf])


def restored(progress: Progress) -> Progress:
    """As it comes back from state.json."""
    return from_json(Progress, json.loads(json.dumps(to_json(progress), allow_nan=False)), complete=True)


# values, larger is better -> which of them are a new best, how long it has stalled after each, and the ranking
SCRIPTS: dict[str, tuple[list[float], list[bool], list[int], list[int]]] = {
    "improves": ([1, 2, 3], [True, True, True], [0, 0, 0], [3, 2, 1]),
    "equal is not better": ([2, 2, 2], [True, False, False], [0, 1, 2], [1, 2, 3]),
    "worse, then better": ([2, 1, 1.5, 3, 2], [True, False, False, True, False], [0, 1, 2, 0, 1], [4, 1, 5, 3, 2]),
    "starts with NaN": ([NAN, 1, NAN, 2], [False, True, False, True], [1, 0, 1, 0], [4, 2]),
    "only NaN": ([NAN, NAN, NAN], [False, False, False], [1, 2, 3], []),
    "ends with NaN": ([2, NAN, NAN], [True, False, False], [0, 1, 2], [1]),
    "infinities": ([math.inf, -math.inf, 1], [False, False, True], [1, 2, 0], [3]),
    "below zero": ([-3, -2, -2.5], [True, True, False], [0, 0, 1], [2, 3, 1]),
}


@pytest.mark.parametrize("interrupted", [False, True], ids=["straight", "interrupted"])
@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("case", SCRIPTS)
def test_progress_records_the_best_and_the_patience_of_a_script(case: str, metric: Metric, interrupted: bool) -> None:
    values, better, stalled, ranking = SCRIPTS[case]
    progress = Progress()
    config = TrainConfig(patience=2, metric=metric)
    for number, value in enumerate(values):
        assert progress.record(validation(number + 1, metric, value), metric) == better[number]
        assert progress.stalled(metric) == stalled[number]
        assert progress.has_ended(config) == (stalled[number] >= 2)
        assert not progress.has_ended(TrainConfig(metric=metric))
        progress = restored(progress) if interrupted else progress
    assert progress.best_steps(metric) == ranking


@pytest.mark.parametrize("metric", Metric)
def test_progress_decides_the_same_after_an_interruption(metric: Metric) -> None:
    for values in itertools.product([1.0, 2.0, NAN], repeat=4):
        straight, broken = Progress(), Progress()
        for step, value in enumerate(values):
            entered = validation(step, metric, value)
            assert straight.record(entered, metric) == broken.record(entered, metric)
            broken = restored(broken)
            assert straight.best_steps(metric) == broken.best_steps(metric)
            assert straight.stalled(metric) == broken.stalled(metric)


def test_progress_of_many_directions_never_outgrows_what_is_read_back(tmp_path: Path) -> None:
    """Of a hundred dev sets, the last 400 validations have each; the means, and what follows from them, stay."""
    sets = {f"devs.{number}": DevScores(loss=2 / 3, nll=1 / 3, bleu=100 / 7, chrf=100 / 3) for number in range(100)}
    progress = Progress(step=2_000)
    for step in range(1, 1_001):
        assert progress.record(Validation.of(step, sets), Metric.bleu) == (step == 1)
    assert [len(validation.sets) for validation in progress.validations] == [0] * 600 + [100] * 400
    assert len({validation.bleu for validation in progress.validations}) == 1
    write_json(tmp_path / "state.json", to_json(progress))
    assert from_json(Progress, read_json(tmp_path / "state.json"), complete=True) == progress


def test_progress_ranks_random_validations_as_sorting_would() -> None:
    draw = random.Random(3)
    for metric in Metric:
        values = [draw.choice([NAN, float(draw.randint(0, 9))]) for _ in range(30)]
        progress = Progress()
        for step, value in enumerate(values):
            progress.record(validation(step, metric, value), metric)
        finite = [step for step, value in enumerate(values) if not math.isnan(value)]
        assert progress.best_steps(metric) == sorted(finite, key=lambda step: (-values[step], step))


def test_progress_has_ended_at_the_last_step_or_the_end_of_patience() -> None:
    config = TrainConfig(max_steps=10, patience=3)
    assert [Progress(step=step).has_ended(config) for step in (9, 10, 11)] == [False, True, True]
    best, worse = validation(0, Metric.bleu, 2.0), validation(0, Metric.bleu, 1.0)
    assert [Progress(validations=[best, *[worse] * n]).has_ended(config) for n in (2, 3)] == [False, True]


def test_progress_counts_patience_under_the_metric_of_now() -> None:
    """Recorded under BLEU, which fell each time; the loss, by which a resumed run goes on, fell each time, too."""
    progress = Progress()
    for step, (bleu, loss) in enumerate([(30.0, 3.0), (20.0, 2.0), (10.0, 1.0)], 1):
        progress.record(Validation(step=step, loss=loss, nll=loss, bleu=bleu, chrf=50.0), Metric.bleu)
    assert progress.has_ended(TrainConfig(metric=Metric.bleu, patience=2))
    assert not progress.has_ended(TrainConfig(metric=Metric.loss, patience=2))


def test_progress_advances_by_a_step() -> None:
    progress = Progress(step=4, sentences=100, target_tokens=1000, seconds=1.5, skipped=1)
    for _ in range(3):
        progress.advance(epoch=2, chapter=1, step_in_chapter=8, sentences=10, target_tokens=110)
    assert (progress.step, progress.epoch, progress.chapter, progress.step_in_chapter) == (7, 2, 1, 8)
    assert (progress.sentences, progress.target_tokens, progress.seconds) == (130, 1330, 1.5)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (0, 0, 0, None)),
        ("...", (0, 0, 0, None)),
        ("x..", (1, 0, 1, 1)),
        (".xx.x", (3, 1, 2, 2)),
        ("xxx..xx", (5, 2, 3, 1)),
    ],
)
@pytest.mark.parametrize("interrupted", [False, True], ids=["straight", "interrupted"])
def test_gradient_norms_count_skipped_updates(
    flags: str, expected: tuple[int, int, int, int | None], interrupted: bool
) -> None:
    """`x` is an update that was skipped: how many, the streak at the end, the longest one, and the first one's step."""
    norms, progress = GradientNorms(), Progress()
    for flag in flags:
        progress.step += 1
        norms.add(torch.tensor(1.5 if flag == "." else NAN, dtype=torch.float64))
        if interrupted:
            norms.read_into(progress)
            norms = GradientNorms()
            progress = restored(progress)
    norms.read_into(progress)
    assert (progress.skipped, progress.streak, progress.longest_streak, progress.first_skipped) == expected


def count_norms(norms: list[float]) -> Progress:
    """The progress after updates of these norms."""
    progress = Progress()
    for norm in norms:
        progress.step += 1
        progress.add_norm(norm, step=progress.step)
    return progress


def test_gradient_norms_have_a_usual_one_that_is_a_mean_and_later_a_running_mean() -> None:
    assert count_norms([2.0, 4.0, 9.0]).usual_norm == pytest.approx(5.0, rel=1e-12)
    assert count_norms([2.0, NAN, 4.0, math.inf, 9.0]).usual_norm == pytest.approx(5.0, rel=1e-12)
    many = [3.0] * 500 + [5.0]
    assert count_norms(many).usual_norm == pytest.approx(3.0 + 2.0 / 100, rel=1e-12)


@pytest.mark.parametrize(
    ("norms", "spikes", "last"),
    [
        ([1.0] * 20 + [10.0], 0, None),  # ten times, and no more
        ([1.0] * 20 + [10.1], 1, 21),
        ([1.0] * 19 + [10.1], 0, None),  # the first twenty updates are what norms are compared with
        ([1.0] * 19 + [NAN, 10.1], 0, None),  # and a skipped one is none of them
        ([1.0] * 20 + [math.inf], 0, None),
        ([1.0] * 20 + [1e300, 1.0, 1e300], 2, 23),  # a spike hardly moves the mean, so that the next one shows, too
        ([1.0] * 99 + [30.0, 1.0, 30.0], 2, 102),
        ([1000.0] * 20 + [1.0] * 200, 0, None),
    ],
)
def test_gradient_norms_above_ten_times_the_usual_one_are_spikes(
    norms: list[float], spikes: int, last: int | None
) -> None:
    progress = count_norms(norms)
    assert (progress.spikes, progress.last_spike) == (spikes, last)
    assert progress.usual_norm < 1e4


def test_progress_comes_back_from_json_with_null_for_what_is_no_number() -> None:
    progress = Progress(
        step=9, epoch=1, chapter=2, step_in_chapter=4, sentences=5, target_tokens=6, seconds=0.1, skipped=2, streak=1
    )
    progress.record(Validation(step=5, loss=2.5, nll=2.0, bleu=12.5, chrf=30.0), Metric.bleu)
    progress.record(Validation(step=9, loss=NAN, nll=math.inf, bleu=0.0, chrf=-math.inf), Metric.bleu)
    data = to_json(progress)
    assert data["validations"][1] == {"step": 9, "loss": None, "nll": None, "bleu": 0.0, "chrf": None, "sets": {}}
    again = restored(progress)
    assert to_json(again) == data
    assert again.validations[0] == progress.validations[0]
    assert math.isnan(again.validations[1].loss)
    assert (again.step, again.stalled(Metric.bleu), again.streak) == (9, 1, 1)


GOOD: dict[str, Any] = to_json(Progress(validations=[Validation(1, 2.0, 3.0, 4.0, 5.0)]))


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "x",
        {},
        {**GOOD, "colour": "red"},
        {**GOOD, "validations": None},
        {**GOOD, "validations": [3]},
        {**GOOD, "validations": [{"step": 1}]},
        {**GOOD, "validations": [{**GOOD["validations"][0], "colour": "red"}]},
        {**GOOD, "step": "many"},
        {**GOOD, "validations": [{**GOOD["validations"][0], "bleu": "good"}]},
    ],
    ids=["null", "list", "text", "empty", "key", "no list", "number", "short", "row", "step", "bleu"],
)
def test_progress_refuses_any_other_json(data: Any) -> None:
    with pytest.raises(ValueError, match="Progress"):
        from_json(Progress, data, complete=True)


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (math.log(5), 5.0), (1e6, math.inf), (math.inf, math.inf), (NAN, NAN)]
)
def test_perplexity_has_no_overflow(loss: float, expected: float) -> None:
    assert perplexity(loss) == pytest.approx(expected, nan_ok=True)


def test_validation_says_both_perplexities() -> None:
    shown = Validation(step=1, loss=math.log(8), nll=math.log(4), bleu=27.3, chrf=55.5)
    assert validation_scalars(shown) == pytest.approx(
        {"dev/loss": 2.0794, "dev/perplexity": 4, "dev/smoothed_perplexity": 8, "dev/bleu": 27.3, "dev/chrf": 55.5},
        abs=1e-3,
    )
    assert describe(shown) == "loss 2.079, perplexity 4.00, greedy BLEU 27.30, chrF 55.50"


class Recorder:
    """Keeps what a tracker would write."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float | None]]] = []

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        self.rows.append((step, values))


def add(
    window: LogWindow, step: FakeStep, measured: StepResult, *, seconds: float, waited: float, flops: float
) -> None:
    """One step that took `seconds`."""
    window.add(step, measured, waited=waited, flops=flops)  # type: ignore[arg-type]
    window.add_seconds(seconds)


def logged(window: LogWindow, recorder: Recorder, step: int, epoch: int = 0) -> dict[str, float | None]:
    """The row that a window gives."""
    totals = window.totals(World(0, 1, {}))
    progress = Progress(step=step, epoch=epoch)
    report_window(totals, recorder, progress, rate=1e-3, device=torch.device("cpu"), ranks=1)  # type: ignore[arg-type]
    window.clear()
    return recorder.rows[-1][1]


def test_log_window_logs_means_and_begins_again() -> None:
    window, recorder = LogWindow(torch.device("cpu")), Recorder()
    second = FakeStep(target_tokens=50, slots=190)
    add(window, FakeStep(), result(), seconds=2.0, waited=0.5, flops=3e12)
    add(window, second, result(loss=20.0, nll=50.0), seconds=2.0, waited=0.5, flops=1e12)
    row = logged(window, recorder, 12, epoch=3)
    assert recorder.rows[0][0] == 12
    assert row["train/loss"] == pytest.approx(240 / 160)
    assert row["train/perplexity"] == pytest.approx(math.e)
    assert row["train/rate"] == 1e-3
    assert row["train/gradient_norm"] == pytest.approx(3.0)
    assert row["train/epoch"] == 3.0
    assert row["speed/target_tokens_per_second"] == pytest.approx(40.0)
    assert row["speed/padding_share"] == pytest.approx(1 - 340 / 440)
    assert row["speed/data_wait_share"] == pytest.approx(0.25)
    assert row["speed/model_tflops"] == pytest.approx(1.0)
    assert row["speed/utilisation"] is None

    add(window, FakeStep(), result(), seconds=0.5, waited=0.0, flops=0.0)
    add(window, FakeStep(), result(loss=NAN, nll=math.inf, norm=math.inf), seconds=0.5, waited=0.0, flops=0.0)
    row = logged(window, recorder, 13)
    assert row["train/loss"] == pytest.approx(2.0)  # those of the update that was applied
    assert row["train/perplexity"] == pytest.approx(math.e)
    assert row["train/gradient_norm"] == pytest.approx(3.0)
    assert row["speed/target_tokens_per_second"] == pytest.approx(220.0)


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA H100 80GB HBM3", 0.25), ("GeForce", None)])
def test_report_window_divides_by_the_peak_of_all_gpus(
    name: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs of 989 TFLOP/s, and a step of 989 TFLOP that takes them two seconds."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    totals = WindowTotals(target_tokens=10, slots=20, seconds=2.0, flops=989e12)
    recorder = Recorder()
    report_window(totals, recorder, Progress(step=1), rate=1e-3, device=torch.device("cuda"), ranks=2)  # type: ignore[arg-type]
    assert recorder.rows[-1][1]["speed/utilisation"] == pytest.approx(expected)


def test_log_window_of_nothing_but_skipped_updates_has_no_loss() -> None:
    window, recorder = LogWindow(torch.device("cpu")), Recorder()
    add(window, FakeStep(), result(loss=NAN, nll=NAN, norm=NAN), seconds=0.5, waited=0.0, flops=0.0)
    totals = window.totals(World(0, 1, {}))
    assert (totals.loss, totals.nll, totals.gradient_norm, totals.applied, totals.applied_tokens) == (
        0.0,
        0.0,
        0.0,
        0,
        0,
    )
    row = logged(window, recorder, 13)
    assert all(math.isnan(row[name] or 0.0) for name in ("train/loss", "train/gradient_norm"))
    assert row["speed/target_tokens_per_second"] == pytest.approx(220.0)


def test_log_window_shows_skipped_updates_and_spikes() -> None:
    window, recorder = LogWindow(torch.device("cpu")), Recorder()
    add(window, FakeStep(), result(), seconds=0.5, waited=0.0, flops=0.0)
    totals, progress = window.totals(World(0, 1, {})), Progress(step=30, skipped=4, spikes=2)
    report_window(totals, recorder, progress, rate=1e-3, device=torch.device("cpu"), ranks=1)  # type: ignore[arg-type]
    (row,) = (row for _, row in recorder.rows)
    assert (row["train/skipped_updates"], row["train/gradient_spikes"]) == (4.0, 2.0)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(6.7, "00:00:06"), (86_399.0, "23:59:59"), (90_061.0, "25:01:01"), (900_000.0, "250:00:00")]
)
def test_report_window_says_how_long_the_training_has_taken(
    seconds: float, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    totals = WindowTotals(target_tokens=10, slots=20, seconds=1.0)
    caplog.set_level("INFO")
    progress = Progress(step=30, seconds=seconds)
    report_window(totals, Recorder(), progress, rate=1e-3, device=torch.device("cpu"), ranks=1)  # type: ignore[arg-type]
    assert caplog.messages[-1].endswith(f", epoch 1, {shown}")


def test_bar_text_shows_loss_and_speed_of_a_window_and_the_last_bleu() -> None:
    totals = WindowTotals(loss=240.0, applied_tokens=160, target_tokens=20_000, seconds=4.0)
    assert bar_text(totals, Progress(step=1)) == "loss 1.500, 5,000 tokens/s"
    validated = Progress(step=9, validations=[validation(8, Metric.bleu, 27.3)])
    assert bar_text(totals, validated) == "loss 1.500, 5,000 tokens/s, BLEU 27.30"
    assert bar_text(replace(totals, applied_tokens=0), validated).startswith("loss nan, ")


def test_log_window_goes_on_from_a_checkpoint() -> None:
    """Cut after the first of two steps, it gives the row of the straight run; other ranks begin with nothing."""
    straight, first = LogWindow(torch.device("cpu")), LogWindow(torch.device("cpu"))
    for window in (straight, first):
        add(window, FakeStep(), result(), seconds=2.0, waited=0.5, flops=3e12)
    saved = from_json(WindowTotals, json.loads(json.dumps(to_json(first.totals(World(0, 1, {}))))), complete=True)
    again, other = LogWindow(torch.device("cpu")), LogWindow(torch.device("cpu"))
    again.restore(saved, rank=0)
    other.restore(saved, rank=1)
    for window in (straight, again):
        add(window, FakeStep(), result(20.0, 50.0, 1.0), seconds=1.0, waited=0.1, flops=1e12)
    assert again.totals(World(0, 1, {})) == straight.totals(World(0, 1, {}))
    assert (other.totals(World(0, 1, {})).loss, other.totals(World(0, 1, {})).nll) == (0.0, 0.0)


def test_log_window_sums_over_ranks_what_each_has_of_its_own(tmp_path: Path) -> None:
    """The losses are of a rank's share of the step; its norm and its tokens are those of all ranks already."""

    def assert_sums() -> None:
        with join_world(torch.device("cpu")) as world:
            window = LogWindow(torch.device("cpu"))
            measured = [result(), result(loss=20.0, nll=50.0)][world.rank]
            add(window, FakeStep(), measured, seconds=2.0, waited=0.5, flops=3e12)
            totals = window.totals(world)
            assert (totals.loss, totals.nll) == (240.0, 160.0)
            assert (totals.gradient_norm, totals.applied, totals.applied_tokens) == (3.0, 1, 110)
            assert (totals.source_tokens, totals.target_tokens, totals.slots) == (90, 110, 250)
            assert (totals.seconds, totals.waited, totals.flops) == (2.0, 0.5, 3e12)

    assert ranks(2, assert_sums, tmp_path) == [0] * 2
