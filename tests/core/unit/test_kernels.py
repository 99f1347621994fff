"""The fast forms against plain ones: formulas in float64, numerical gradients, and the rates of the masks."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from support.observers import Largest
from transformer.kernels import loss as kernel
from transformer.kernels.attention import dense_attention
from transformer.kernels.dropout import Dropout, add_dropout, dropout, keep_mask
from transformer.kernels.loss import linear_cross_entropy

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(*shape, seed=seed, dtype=dtype).requires_grad_()


def relative(a: Tensor, b: Tensor) -> float:
    """How far `a` is from `b`, as a share of its length."""
    return ((a.detach().double() - b.detach()).norm() / b.detach().norm()).item()


# Dropout


@pytest.mark.parametrize("probability", [0.9, 0.7, 0.5, 0.25, 0.001])
def test_keep_mask_has_the_probability_asked_for_in_every_part_of_a_word(probability: float) -> None:
    """Four 16-bit parts of 100,000 words, each within five standard errors, and no two of them related."""
    torch.manual_seed(0)
    parts = keep_mask(torch.empty(100_000, 4), probability).double()
    error = math.sqrt(probability * (1 - probability) / 100_000)
    for part in range(4):
        assert parts[:, part].mean().item() == pytest.approx(probability, abs=5 * error + 2**-17)
    assert (torch.corrcoef(parts.T) - torch.eye(4, dtype=torch.float64)).abs().max().item() < 5 / math.sqrt(100_000)
    neighbours = torch.corrcoef(torch.stack((parts[:-1, 0], parts[1:, 0])))  # from one word to the next
    assert neighbours[0, 1].abs().item() < 5 / math.sqrt(100_000)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (4,), (5,), (2, 3, 7)])
def test_keep_mask_has_any_shape(shape: tuple[int, ...]) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        mask = keep_mask(torch.empty(shape, dtype=dtype), 0.5)
        assert (mask.shape, mask.dtype) == (shape, dtype)
        assert set(mask.flatten().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_zeroes_with_p_and_scales_the_rest_and_its_gradient(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = leaf(301, 333, seed=2, dtype=dtype)
    out = dropout(x.t(), p, training=True).t()  # not contiguous
    kept = out != 0
    count = out.numel()
    assert kept.sum().item() == pytest.approx(count * (1 - p), abs=5 * math.sqrt(count * p * (1 - p)) + 2)
    exact = x.detach().double() / (1 - p)
    torch.testing.assert_close(out.double(), exact * kept, rtol=2 * torch.finfo(dtype).eps, atol=0)
    upstream = draw(301, 333, seed=3, dtype=dtype)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    assert (out.dtype, gradient.dtype) == (dtype, dtype)
    torch.testing.assert_close(
        gradient.double(), upstream.double() / (1 - p) * kept, rtol=2 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_add_dropout_is_the_residual_plus_dropout(dtype: torch.dtype) -> None:
    inputs = [leaf(31, 33, seed=seed, dtype=dtype) for seed in (2, 3)]
    upstream = draw(31, 33, seed=4, dtype=dtype)

    torch.manual_seed(1)
    fused = add_dropout(inputs[0], inputs[1], 0.3, training=True)
    torch.manual_seed(1)
    plain = inputs[0] + dropout(inputs[1], 0.3, training=True)

    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)
    ours, expected = (torch.autograd.grad(out, inputs, upstream) for out in (fused, plain))
    for gradient, other in zip(ours, expected, strict=True):
        assert torch.equal(gradient, other)


def test_add_dropout_of_two_types_gives_the_wider_one() -> None:
    x = torch.ones(100, dtype=torch.bfloat16)
    out = add_dropout(torch.ones(100), x, 0.5, training=True)
    assert out.dtype is torch.float32
    assert set(out.tolist()) == {1.0, 3.0}
    assert torch.equal(add_dropout(torch.ones(100), x, 0.5, training=False), torch.full((100,), 2.0))


def test_dropout_follows_the_seed() -> None:
    x = torch.ones(1000)
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs += [dropout(x, 0.5, training=True), dropout(x, 0.5, training=True)]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[4])


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (0.0, False)])
def test_dropout_that_drops_nothing_is_the_identity_and_draws_nothing(p: float, training: bool) -> None:
    x, before = torch.ones(10), torch.get_rng_state()
    assert dropout(x, p, training=training) is x
    assert Dropout(p).train(training)(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_module_drops_in_training() -> None:
    torch.manual_seed(0)
    by_module = Dropout(0.5)(torch.ones(100))
    torch.manual_seed(0)
    assert torch.equal(by_module, dropout(torch.ones(100), 0.5, training=True))
    assert 20 < by_module.count_nonzero() < 80


# Attention

B, H, T, S = 2, 3, 4, 5
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "padding": torch.tensor([[False, False, False, True, True], [False] * 5]).view(B, 1, 1, S),
    "causal": torch.ones(T, S, dtype=torch.bool).triu(1),
    "each": torch.rand(B, H, T, S, generator=torch.Generator().manual_seed(0)) < 0.3,
}
assert MASKS["each"] is not None
MASKS["each"][..., 0] = False
every_mask = pytest.mark.parametrize("hidden", list(MASKS.values()), ids=list(MASKS))


def qkv(dtype: torch.dtype = torch.float64, d_k: int = 4, d_v: int = 6) -> list[Tensor]:
    shapes = ((B, H, T, d_k), (B, H, S, d_k), (B, H, S, d_v))
    return [leaf(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


@every_mask
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.5])
def test_dense_attention_is_torchs(hidden: Tensor | None, scale: float) -> None:
    inputs = qkv()
    ours = dense_attention(*inputs, masked=hidden, scale=scale, dropout=0.0)
    mask = None if hidden is None else ~hidden
    q, k, v = inputs
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    assert ours.shape == (B, H, T, 6)
    upstream = draw(B, H, T, 6, seed=9)
    pairs = zip(torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True)
    for a, b in [(ours, theirs), *pairs]:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_keys", [1, 15, 16, 17])
def test_dense_attention_is_torchs_whatever_a_vector_register_holds(n_keys: int) -> None:
    """Fewer keys than 16 are widened for the softmax: by nothing that weighs or has a gradient."""
    inputs = [leaf(B, H, T, 4, seed=0), leaf(B, H, n_keys, 4, seed=1), leaf(B, H, n_keys, 6, seed=2)]
    hidden = draw(B, H, T, n_keys, seed=3) < -0.5
    hidden[..., 0] = False
    ours = dense_attention(*inputs, masked=hidden, scale=0.5, dropout=0.0)
    q, k, v = inputs
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=0.5)
    upstream = draw(B, H, T, 6, seed=9)
    pairs = zip(torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True)
    for a, b in [(ours, theirs), *pairs]:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_dense_attention_takes_heads_that_lie_behind_positions() -> None:
    """As `attend` passes them: transposed, not contiguous."""
    inputs = qkv()
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not moved[0].is_contiguous()
    ours, theirs = (dense_attention(*x, masked=None, scale=0.5, dropout=0.0) for x in (moved, inputs))
    upstream = draw(B, T, H, 6, seed=9).transpose(1, 2)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@every_mask
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_dense_attention_is_exact_but_for_rounding(hidden: Tensor | None, dtype: torch.dtype) -> None:
    inputs = qkv(dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours = dense_attention(*inputs, masked=hidden, scale=0.5, dropout=0.0)
    q, k, v = exact
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=None if hidden is None else ~hidden, scale=0.5)
    upstream = draw(B, H, T, 6, seed=9, dtype=dtype)
    got = torch.autograd.grad(ours, inputs, upstream)
    expected = torch.autograd.grad(theirs, exact, upstream.double())
    for a, b in zip((ours, *got), (theirs, *expected), strict=True):
        assert a.dtype == dtype
        assert relative(a, b) < 2 * torch.finfo(dtype).eps


@every_mask
def test_dense_attention_drops_the_same_on_the_way_back(hidden: Tensor | None) -> None:
    """The mask is read off with the identity as values, then put into the formula, which torch differentiates."""
    q, k, v = inputs = qkv()
    torch.manual_seed(5)
    weights = dense_attention(
        q, k, torch.eye(S, dtype=q.dtype).expand(B, H, S, S), masked=hidden, scale=0.5, dropout=0.4
    )
    kept = (weights != 0).double()
    assert 0.2 < kept.mean() < 0.8
    torch.manual_seed(5)
    ours = dense_attention(*inputs, masked=hidden, scale=0.5, dropout=0.4)
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) * 0.5
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    theirs = (scores.softmax(-1) * kept / 0.6) @ v
    upstream = draw(B, H, T, 6, seed=9)
    pairs = zip(torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True)
    for a, b in [(ours, theirs), *pairs]:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dense_attention_drops_weights(p: float) -> None:
    """With the identity as values the result is the weights: each is 0, or itself divided by 1 - p."""
    torch.manual_seed(0)
    q, k, v = draw(8, 4, 25, 6, seed=1), draw(8, 4, 25, 6, seed=2), torch.eye(25, dtype=torch.float64)
    v = v.expand(8, 4, 25, 25)
    plain, dropped = (dense_attention(q, k, v, masked=None, scale=0.4, dropout=rate) for rate in (0.0, p))
    kept = dropped != 0
    torch.testing.assert_close(dropped, plain / (1 - p) * kept, rtol=1e-12, atol=0)
    count = kept.numel()
    assert kept.sum().item() == pytest.approx(count * (1 - p), abs=5 * math.sqrt(count * p * (1 - p)) + 2)


# The loss

N, D, V = 8, 5, 11
TARGETS = {
    "some empty": [3, 0, 10, 1, 0, 0, 7, 3],
    "none empty": [3, 2, 10, 1, 4, 4, 7, 3],
    "the first and last": [0, 2, 10, 1, 4, 4, 7, 0],
    "a whole block": [3, 2, 10, 0, 0, 0, 7, 3],
    "one real": [0, 0, 0, 0, 0, 0, 0, 5],
}
every_target = pytest.mark.parametrize("targets", list(TARGETS.values()), ids=list(TARGETS))
both_smoothings = pytest.mark.parametrize("eps", [0.0, 0.1])
blocks = pytest.mark.parametrize("rows", [1, 3, 4, 8, 512])


def written_out(
    hidden: Tensor, matrix: Tensor, targets: list[int], eps: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The cross-entropy against 1 - eps for the class and eps / (V - 1) for each other one, a real row at a time."""
    zero = (hidden.sum() + matrix.sum()) * 0.0
    smoothed, plain = zero, zero
    for row, target in zip(hidden, targets, strict=True):
        if target != 0:
            logits = matrix @ row
            log_p = (logits if bias is None else logits + bias).log_softmax(0)
            q = torch.full_like(log_p, eps / (len(matrix) - 1))
            q[target] = 1.0 - eps
            smoothed, plain = smoothed - (q * log_p).sum(), plain - log_p[target]
    return smoothed, plain


@every_target
@both_smoothings
@blocks
@pytest.mark.parametrize(("factor", "has_bias"), [(1.0, False), (0.37, False), (0.37, True)])
def test_linear_cross_entropy_and_its_gradients_are_those_written_out(
    targets: list[int], eps: float, rows: int, factor: float, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "rows_per_block", lambda _: rows)
    bias = leaf(1, V, seed=3).detach()[0].requires_grad_() if has_bias else None
    inputs = [leaf(N, D, seed=1), leaf(V, D, seed=2)]
    ours, plain = linear_cross_entropy(inputs[0], inputs[1], torch.tensor(targets), bias=bias, label_smoothing=eps)
    expected, nll = written_out(inputs[0], inputs[1], targets, eps, bias)
    inputs += [] if bias is None else [bias]
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    assert plain.item() == pytest.approx(nll.item(), rel=1e-12)
    assert not plain.requires_grad
    got = torch.autograd.grad(ours * factor, inputs)
    for a, b in zip(got, torch.autograd.grad(expected * factor, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    empty = [i for i, target in enumerate(targets) if target == 0]
    assert not got[0][empty].any()


@both_smoothings
def test_linear_cross_entropy_has_the_numerical_gradient(eps: float) -> None:
    targets = torch.tensor(TARGETS["some empty"])
    inputs = [leaf(N, D, seed=1), leaf(V, D, seed=2)]
    assert torch.autograd.gradcheck(
        lambda h, m: linear_cross_entropy(h, m, targets, bias=None, label_smoothing=eps)[0], inputs
    )


@both_smoothings
@pytest.mark.parametrize("targets", [[], [0] * N], ids=["no rows", "empty rows"])
def test_linear_cross_entropy_of_nothing_is_zero_with_a_zero_gradient(targets: list[int], eps: float) -> None:
    inputs = [leaf(len(targets), D, seed=1), leaf(V, D, seed=2)]
    ours, plain = linear_cross_entropy(
        inputs[0], inputs[1], torch.tensor(targets, dtype=torch.int64), bias=None, label_smoothing=eps
    )
    assert (ours.item(), plain.item()) == (0.0, 0.0)
    for gradient in torch.autograd.grad(ours, inputs):
        assert not gradient.any()


@every_target
@both_smoothings
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_linear_cross_entropy_is_exact_but_for_rounding(
    targets: list[int], eps: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states in `dtype`, the matrix in float32 as training keeps it: sums and its gradient stay there."""
    monkeypatch.setattr(kernel, "rows_per_block", lambda _: 3)
    hidden, matrix = leaf(N, D, seed=1, dtype=dtype), leaf(V, D, seed=2, dtype=torch.float32)
    ours, plain = linear_cross_entropy(hidden, matrix, torch.tensor(targets), bias=None, label_smoothing=eps)
    exact = [hidden.detach().double().requires_grad_(), matrix.detach().double().requires_grad_()]
    expected, nll = written_out(exact[0], exact[1], targets, eps)
    assert ours.dtype == plain.dtype == torch.float32
    real, unit = sum(target != 0 for target in targets), torch.finfo(dtype).eps
    for a, b in ((ours, expected), (plain, nll)):
        assert a.item() == pytest.approx(b.item(), abs=4 * unit * real)  # a few roundings of each row
    got = torch.autograd.grad(ours, [hidden, matrix])
    assert [gradient.dtype for gradient in got] == [dtype, torch.float32]
    for a, b in zip(got, torch.autograd.grad(expected, exact), strict=True):
        assert relative(a, b) < 3 * unit


def test_linear_cross_entropy_rounds_no_factor_to_the_type_of_the_hidden_states() -> None:
    """In bf16, 1 / 1003 would be larger by 0.24 %: a gradient that is a sum over tokens is divided by such numbers."""
    hidden, matrix = leaf(200, 16, seed=1, dtype=torch.bfloat16), leaf(V, 16, seed=2, dtype=torch.float32)
    targets = torch.arange(200) % (V - 4) + 4
    ours, _ = linear_cross_entropy(hidden, matrix, targets, bias=None, label_smoothing=0.1)
    (whole,) = torch.autograd.grad(ours, hidden, retain_graph=True)
    (divided,) = torch.autograd.grad(ours / 1003, hidden)
    assert divided.dtype is torch.bfloat16
    assert (divided.double().abs().sum() / whole.double().abs().sum()).item() == pytest.approx(1 / 1003, rel=5e-4)


@pytest.mark.parametrize("dtype", HALVES)
def test_linear_cross_entropy_lowers_the_products_alone_under_autocast(dtype: torch.dtype) -> None:
    targets = torch.tensor(TARGETS["some empty"])
    hidden, matrix = leaf(N, D, seed=1, dtype=torch.float32), leaf(V, D, seed=2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        ours, plain = linear_cross_entropy(hidden, matrix, targets, bias=None, label_smoothing=0.1)
    lowered = hidden.detach().to(dtype).requires_grad_()
    same, same_plain = linear_cross_entropy(lowered, matrix, targets, bias=None, label_smoothing=0.1)
    assert (ours.item(), plain.item()) == (same.item(), same_plain.item())
    got, expected = torch.autograd.grad(ours, [hidden, matrix]), torch.autograd.grad(same, [lowered, matrix])
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("gap", [5.0, 10.0, 14.0, 200.0])
def test_linear_cross_entropy_of_a_hopeless_target_is_much_and_not_infinite(dtype: torch.dtype, gap: float) -> None:
    """Its probability is exp(-gap): fp16 tells numbers apart down to 2**-24, which is exp(-16.6)."""
    hidden, matrix = torch.tensor([[gap]], dtype=dtype), torch.zeros(V, 1)
    matrix[7] = 1.0
    hidden.requires_grad_()
    ours, plain = linear_cross_entropy(hidden, matrix, torch.tensor([3]), bias=None, label_smoothing=0.0)
    expected = math.log(math.exp(gap) + V - 1)
    least = 16.6 if dtype is torch.float16 else 87.0
    assert plain.item() == pytest.approx(min(expected, least), rel=0.01)
    assert ours.item() == plain.item()
    (gradient,) = torch.autograd.grad(ours, hidden)
    assert gradient.item() == pytest.approx(1.0, abs=0.1)


def test_linear_cross_entropy_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "rows_per_block", lambda _: 10)
    hidden, matrix = leaf(400, 3, seed=1), leaf(50, 3, seed=2)
    with Largest() as largest:
        linear_cross_entropy(hidden, matrix, torch.ones(400, dtype=torch.int64), bias=None, label_smoothing=0.1)[
            0
        ].backward()
    assert largest.elements <= 400 * 3  # the hidden states; two buffers of 10 rows are 1,000, all logits 20,000
