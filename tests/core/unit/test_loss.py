"""The smoothed loss against a literal table, cross-entropy written out, and torch's own with its other convention."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from transformer.loss import smoothed_cross_entropy

pytestmark = pytest.mark.usefixtures("float64")

EPS = (0.0, 0.1, 0.2, 0.4)


def draw(n: int, vocab_size: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(n, vocab_size, generator=generator) * scale
    return logits.requires_grad_(), torch.randint(1, vocab_size, (n,), generator=generator)  # 0 is PAD


def distribution(target: int, vocab_size: int, eps: float) -> list[float]:
    return [1.0 - eps if v == target else eps / (vocab_size - 1) for v in range(vocab_size)]


def test_smoothed_cross_entropy_has_the_distribution_of_the_papers_table() -> None:
    """The gradient of a cross-entropy is softmax minus the target distribution, which therefore can be read off."""
    logits, targets = draw(4, 6)[0], torch.tensor([1, 2, 5, 2])
    smoothed_cross_entropy(logits, targets, label_smoothing=0.1)[0].backward()
    assert logits.grad is not None
    table = [
        [0.02, 0.90, 0.02, 0.02, 0.02, 0.02],
        [0.02, 0.02, 0.90, 0.02, 0.02, 0.02],
        [0.02, 0.02, 0.02, 0.02, 0.02, 0.90],
        [0.02, 0.02, 0.90, 0.02, 0.02, 0.02],
    ]
    torch.testing.assert_close(logits.detach().softmax(1) - logits.grad, torch.tensor(table), rtol=0, atol=1e-14)


@pytest.mark.parametrize("eps", EPS)
def test_smoothed_cross_entropy_is_the_sum_written_out(eps: float) -> None:
    logits, targets = draw(5, 7)
    loss, nll = smoothed_cross_entropy(logits, targets, label_smoothing=eps)
    expected_loss = expected_nll = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        total = math.log(math.fsum(math.exp(z) for z in row))
        expected_loss += sum(q * (total - z) for q, z in zip(distribution(target, 7, eps), row, strict=True))
        expected_nll += total - row[target]
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert nll.item() == pytest.approx(expected_nll, rel=1e-12)


@pytest.mark.parametrize("eps", EPS)
def test_smoothed_cross_entropy_differs_from_a_kl_divergence_by_the_entropy_alone(eps: float) -> None:
    logits, targets = draw(6, 9)
    q = torch.tensor([distribution(target, 9, eps) for target in targets.tolist()])
    kl = F.kl_div(logits.log_softmax(1), q, reduction="sum")
    entropy = -torch.special.xlogy(q, q).sum()
    loss, _ = smoothed_cross_entropy(logits, targets, label_smoothing=eps)
    torch.testing.assert_close(loss, kl + entropy, rtol=1e-12, atol=0)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize(("n", "vocab_size"), [(1, 2), (8, 11), (50, 301)])
def test_smoothed_cross_entropy_equals_torchs_at_eps_v_over_v_minus_one(n: int, vocab_size: int, eps: float) -> None:
    logits, targets = draw(n, vocab_size)
    loss, _ = smoothed_cross_entropy(logits, targets, label_smoothing=eps)
    theirs = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=eps * vocab_size / (vocab_size - 1))
    torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=0)
    ours_grad, their_grad = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(theirs, logits)[0]
    torch.testing.assert_close(ours_grad, their_grad, rtol=1e-12, atol=1e-14)


def test_smoothed_cross_entropy_gives_a_plain_nll_without_gradient() -> None:
    logits, targets = draw(5, 7)
    loss, nll = smoothed_cross_entropy(logits, targets, label_smoothing=0.1)
    assert loss.requires_grad
    assert not nll.requires_grad
    torch.testing.assert_close(nll, F.cross_entropy(logits.detach(), targets, reduction="sum"), rtol=1e-13, atol=0)


def test_smoothed_cross_entropy_without_smoothing_gives_the_nll_twice() -> None:
    loss, nll = smoothed_cross_entropy(*draw(5, 7), label_smoothing=0.0)
    assert torch.equal(loss.detach(), nll)


@pytest.mark.parametrize("eps", EPS)
def test_smoothed_cross_entropy_is_a_sum_not_a_mean(eps: float) -> None:
    logits, targets = draw(4, 7)
    whole = smoothed_cross_entropy(logits, targets, label_smoothing=eps)
    twice = smoothed_cross_entropy(logits.repeat(2, 1), targets.repeat(2), label_smoothing=eps)
    parts = [smoothed_cross_entropy(logits[i : i + 1], targets[i : i + 1], label_smoothing=eps) for i in range(4)]
    for k in range(2):
        torch.testing.assert_close(twice[k], 2 * whole[k], rtol=1e-13, atol=0)
        torch.testing.assert_close(sum(part[k] for part in parts), whole[k], rtol=1e-13, atol=0)


@pytest.mark.parametrize("eps", EPS)
def test_smoothed_cross_entropy_of_no_tokens_is_zero_with_a_zero_gradient(eps: float) -> None:
    weight = torch.randn(7, 3, requires_grad=True)
    loss, nll = smoothed_cross_entropy(
        torch.zeros(0, 3) @ weight.T, torch.zeros(0, dtype=torch.int64), label_smoothing=eps
    )
    assert (loss.item(), nll.item()) == (0.0, 0.0)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert torch.equal(gradient, torch.zeros(7, 3))


@pytest.mark.parametrize("eps", EPS)
def test_smoothed_cross_entropy_counts_nothing_for_a_row_of_class_pad(eps: float) -> None:
    logits, targets = draw(6, 7)
    targets[[0, 3, 5]] = 0
    found = smoothed_cross_entropy(logits, targets, label_smoothing=eps)
    expected = smoothed_cross_entropy(logits[[1, 2, 4]], targets[[1, 2, 4]], label_smoothing=eps)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    (gradient,), (alone,) = (torch.autograd.grad(loss, logits) for loss, _ in (found, expected))
    assert not gradient[[0, 3, 5]].any()
    torch.testing.assert_close(gradient, alone, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", EPS)
def test_smoothed_cross_entropy_computes_half_precision_logits_in_float32(dtype: torch.dtype, eps: float) -> None:
    logits, targets = draw(600, 50)
    half = logits.detach().to(dtype).requires_grad_()
    loss, nll = smoothed_cross_entropy(half, targets, label_smoothing=eps)
    assert loss.dtype == nll.dtype == torch.float32
    exact = half.detach().double()
    torch_eps = eps * 50 / 49
    expected = F.cross_entropy(exact, targets, reduction="sum", label_smoothing=torch_eps)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # half precision itself is good to 1e-3
    loss.backward()
    assert half.grad is not None
    assert half.grad.dtype == dtype
    assert bool(half.grad.isfinite().all())


@pytest.mark.parametrize("eps", EPS)
def test_smoothed_cross_entropy_of_large_logits_does_not_overflow(eps: float) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], dtype=torch.float32, requires_grad=True)
    loss, nll = smoothed_cross_entropy(logits, torch.tensor([1]), label_smoothing=eps)
    assert nll.item() == pytest.approx(1e4)
    assert loss.item() == pytest.approx((1 - eps) * 1e4 + eps / 2 * 2e4)
    loss.backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
