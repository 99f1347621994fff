"""The learning rate against eq. 3 written out, the paper's figures, and the shapes of the other decays."""

import pytest
import torch

from transformer.config.settings import Decay, paper_peak
from transformer.training.optimizer import learning_rate

WARMUP = 4_000


def eq3(update: int, d_model: int, warmup: int) -> float:
    return d_model**-0.5 * min(update**-0.5, update * warmup**-1.5)


def paper_rate(step: int, d_model: int, warmup: int = WARMUP) -> float:
    peak = paper_peak(d_model, warmup)
    return learning_rate(step, peak=peak, warmup_steps=warmup, decay=Decay.inverse_sqrt, max_steps=100_000)


@pytest.mark.parametrize("d_model", [512, 1024, 256])
@pytest.mark.parametrize("warmup", [1, 17, 4_000, 8_000])
@pytest.mark.parametrize("update", [1, 2, 16, 17, 18, 3_999, 4_000, 4_001, 8_000, 100_000, 300_000])
def test_learning_rate_of_update_u_from_zero_is_eq3_at_u_plus_one(update: int, warmup: int, d_model: int) -> None:
    assert paper_rate(update - 1, d_model, warmup) == pytest.approx(eq3(update, d_model, warmup), rel=1e-12)


@pytest.mark.parametrize(
    ("update", "rate"),
    [
        (1, 1.746928e-7),  # 512^-0.5 * 4000^-1.5
        (4_000, 6.987712e-4),  # 512^-0.5 * 4000^-0.5
        (100_000, 1.397542e-4),  # 512^-0.5 * 100000^-0.5
    ],
)
def test_learning_rate_of_the_base_model(update: int, rate: float) -> None:
    assert paper_rate(update - 1, 512) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize(("d_model", "peak"), [(512, 6.99e-4), (1024, 4.94e-4)])
def test_paper_peak_is_the_papers_to_three_digits(d_model: int, peak: float) -> None:
    rates = [paper_rate(step, d_model) for step in range(6_000)]
    assert float(f"{max(rates):.2e}") == peak
    assert rates.index(max(rates)) == WARMUP - 1
    assert float(f"{paper_peak(d_model, WARMUP):.2e}") == peak


def linear(step: int, *, peak: float = 0.5, warmup_steps: int = 10, max_steps: int = 110) -> float:
    return learning_rate(step, peak=peak, warmup_steps=warmup_steps, decay=Decay.linear, max_steps=max_steps)


def test_learning_rate_rises_linearly_from_one_warmup_th_to_the_peak() -> None:
    assert linear(0) == pytest.approx(0.05, rel=1e-12)
    assert linear(4) == pytest.approx(0.25, rel=1e-12)
    assert linear(9) == pytest.approx(0.5, rel=1e-12)
    assert max(linear(step) for step in range(111)) == pytest.approx(0.5, rel=1e-12)


def test_learning_rate_falls_linearly_to_zero_at_the_last_step_and_stays() -> None:
    assert linear(10) == pytest.approx(0.5, rel=1e-12)
    assert linear(60) == pytest.approx(0.25, rel=1e-12)
    assert linear(109) == pytest.approx(0.005, rel=1e-12)
    assert linear(110) == 0.0
    assert linear(1_000) == 0.0


def test_learning_rate_falls_linearly_with_one_slope() -> None:
    drops = {round(linear(step) - linear(step + 1), 15) for step in range(10, 110)}
    assert drops == {0.005}


def test_learning_rate_still_rises_where_the_warmup_outlasts_the_run() -> None:
    assert linear(3, warmup_steps=100, max_steps=5) == pytest.approx(0.5 * 4 / 100, rel=1e-12)


def cosine(step: int, *, peak: float = 0.5, warmup_steps: int = 10, max_steps: int = 110) -> float:
    return learning_rate(step, peak=peak, warmup_steps=warmup_steps, decay=Decay.cosine, max_steps=max_steps)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.05),  # a tenth of the warm-up
        (9, 0.5),
        (10, 0.5),
        (35, 0.4267766952966369),  # a quarter of the way down: (1 + sqrt(1/2)) / 4
        (60, 0.25),
        (85, 0.07322330470336313),  # (1 - sqrt(1/2)) / 4
        (109, 0.0001233599085671),  # (1 - cos(pi / 100)) / 4
        (110, 0.0),
        (1_000, 0.0),
    ],
)
def test_learning_rate_falls_by_half_a_cosine_to_zero_at_the_last_step(step: int, rate: float) -> None:
    assert cosine(step) == pytest.approx(rate, rel=1e-9)


def test_learning_rate_under_a_cosine_is_torchs_behind_the_warmup() -> None:
    """torch's scheduler, which counts from the peak."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for step in range(10, 111):
        assert cosine(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("decay", Decay)
def test_decay_says_whether_its_rates_depend_on_the_last_step(decay: Decay) -> None:
    one, other = (
        [learning_rate(step, peak=0.5, warmup_steps=10, decay=decay, max_steps=last) for step in range(100)]
        for last in (100, 120)
    )
    assert (one != other) == decay.ends_at_the_last_step


@pytest.mark.parametrize("decay", [decay for decay in Decay if decay is not Decay.inverse_sqrt])
def test_learning_rate_never_falls_where_the_warmup_outlasts_the_run(decay: Decay) -> None:
    rates = [learning_rate(step, peak=0.5, warmup_steps=100, decay=decay, max_steps=5) for step in range(5)]
    assert rates == pytest.approx([0.005, 0.01, 0.015, 0.02, 0.025], rel=1e-12)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.05), (4, 0.25), (9, 0.5), (10, 0.5), (110, 0.5), (10**6, 0.5)])
def test_learning_rate_stays_at_a_constant_peak(step: int, rate: float) -> None:
    found = learning_rate(step, peak=0.5, warmup_steps=10, decay=Decay.constant, max_steps=110)
    assert found == pytest.approx(rate, rel=1e-12)
