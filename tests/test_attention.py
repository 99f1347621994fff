"""`attend` against eq. 1 written out and torch's own function, and multi-head attention against torch's module."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer.layout import Padded
from transformer.model.attention import KeyValues, MultiHeadAttention, attend

pytestmark = pytest.mark.usefixtures("float64")

HEADS = 2
WIDTHS = [(4, 4), (3, 7), (8, 2)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def draw_qkv(b: int, t: int, s: int, d_k: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(b, t, HEADS, d_k, seed=1), draw(b, s, HEADS, d_k, seed=2), draw(b, s, HEADS, d_v, seed=3)


def eq1(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Eq. 1 with an explicit mask `(B, T, S)`: minus infinity before the softmax."""
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible.unsqueeze(1), -math.inf).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def visible_keys(lengths: list[int], t: int, s: int, *, causal: bool) -> Tensor:
    rows = [[[j < length and (not causal or j <= i) for j in range(s)] for i in range(t)] for length in lengths]
    return torch.tensor(rows)


def real(lengths: list[int], width: int) -> Tensor:
    """1.0 at real positions: `(B, T, 1, 1)`."""
    return torch.tensor([[float(i < length) for i in range(width)] for length in lengths])[:, :, None, None]


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor], upstream: Tensor) -> None:
    """Equal where `upstream` looks, and equal gradients of every input."""
    looked_at = (upstream != 0).expand_as(ours)
    torch.testing.assert_close(ours[looked_at], theirs[looked_at], rtol=1e-12, atol=1e-12)
    ours_grad = torch.autograd.grad((ours * upstream).sum(), inputs)
    their_grad = torch.autograd.grad((theirs * upstream).sum(), inputs)
    for a, b in zip(ours_grad, their_grad, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 3], [1, 1, 4]])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_is_eq1(lengths: list[int], causal: bool, d_k: int, d_v: int) -> None:
    q, k, v = draw_qkv(3, 5, 5, d_k, d_v)
    layout = Padded.of(lengths, 5)
    ours = attend(q, k, v, queries=layout, keys=layout, causal=causal, dropout=0.0)
    assert ours.shape == (3, 5, HEADS, d_v)
    theirs = eq1(q, k, v, visible_keys(lengths, 5, 5, causal=causal))
    upstream = torch.randn(3, 5, HEADS, d_v, generator=torch.Generator().manual_seed(4)) * real(lengths, 5)
    assert_same(ours, theirs, [q, k, v], upstream)


@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
@pytest.mark.parametrize(
    ("targets", "sources"), [([4, 4], [6, 6]), ([4, 1], [6, 2]), ([2, 4], [3, 6]), ([1, 1], [6, 5])]
)
def test_attention_over_another_sequence_is_eq1(targets: list[int], sources: list[int], d_k: int, d_v: int) -> None:
    t, s = max(targets), max(sources)
    q, k, v = draw_qkv(2, t, s, d_k, d_v)
    ours = attend(q, k, v, queries=Padded.of(targets, t), keys=Padded.of(sources, s), causal=False, dropout=0.0)
    theirs = eq1(q, k, v, visible_keys(sources, t, s, causal=False))
    upstream = torch.randn(2, t, HEADS, d_v, generator=torch.Generator().manual_seed(4)) * real(targets, t)
    assert_same(ours, theirs, [q, k, v], upstream)


@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_batch_is_torchs_function_on_each_sentence_alone(causal: bool, d_k: int, d_v: int) -> None:
    lengths = [5, 2, 3]
    q, k, v = draw_qkv(3, 5, 5, d_k, d_v)
    layout = Padded.of(lengths, 5)
    ours = attend(q, k, v, queries=layout, keys=layout, causal=causal, dropout=0.0)
    theirs = torch.zeros_like(ours)
    for row, n in enumerate(lengths):
        parts = (x[row : row + 1, :n].transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2)
        theirs = theirs + F.pad(out, (0, 0, 0, 0, 0, 5 - n, row, 2 - row))
    upstream = torch.randn(3, 5, HEADS, d_v, generator=torch.Generator().manual_seed(4)) * real(lengths, 5)
    assert_same(ours, theirs, [q, k, v], upstream)


@pytest.mark.parametrize("causal", [False, True])
def test_a_weighted_mean_computed_by_hand(causal: bool) -> None:
    """Two keys, d_k = 4, q . k = 2 ln 3 and 0: weights 3/4 and 1/4, so that the scale 1/sqrt(4) shows."""
    q = torch.tensor([[2 * math.log(3.0), 0.0, 0.0, 0.0]] * 2).view(1, 2, 1, 4)
    k = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]).view(1, 2, 1, 4)
    v = torch.tensor([[8.0], [16.0]]).view(1, 2, 1, 1)
    layout = Padded.of([2], 2)
    out = attend(q, k, v, queries=layout, keys=layout, causal=causal, dropout=0.0).flatten().tolist()
    assert out == pytest.approx([8.0 if causal else 10.0, 10.0], rel=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_slot_is_finite_and_contributes_nothing(causal: bool) -> None:
    q, k, v = draw_qkv(3, 4, 4, 3, 5)
    layout = Padded.of([4, 0, 2], 4)
    out = attend(q, k, v, queries=layout, keys=layout, causal=causal, dropout=0.0)
    assert bool(out.isfinite().all())
    assert torch.equal(out[1, 0], v[1, 0])  # it sees itself
    for gradient in torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True):  # even if somebody looked at it
        assert bool(gradient.isfinite().all())
    upstream = torch.randn(3, 4, HEADS, 5, generator=torch.Generator().manual_seed(4)) * real([4, 0, 2], 4)
    for gradient in torch.autograd.grad((out * upstream).sum(), [q, k, v]):
        assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    others = torch.tensor([0, 2])
    alone = attend(
        q[others],
        k[others],
        v[others],
        queries=layout.select(others),
        keys=layout.select(others),
        causal=causal,
        dropout=0.0,
    )
    torch.testing.assert_close(out[0], alone[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out[2, :2], alone[1, :2], rtol=1e-12, atol=1e-12)


def test_an_empty_source_is_finite_for_the_queries_that_read_it() -> None:
    q, k, v = draw_qkv(2, 3, 4, 3, 5)
    out = attend(q, k, v, queries=Padded.of([3, 3], 3), keys=Padded.of([0, 4], 4), causal=False, dropout=0.0)
    assert bool(out.isfinite().all())
    for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_is_on_the_weights_and_keeps_their_mean(causal: bool) -> None:
    """With the identity as values the result is the weights: each is dropped, or kept and divided by 1 - p."""
    s, p = 12, 0.25
    q, k = draw(1, s, 1, 4, seed=1), draw(1, s, 1, 4, seed=2)
    v = torch.eye(s).view(1, s, 1, s)
    layout = Padded.of([s], s)
    plain = attend(q, k, v, queries=layout, keys=layout, causal=causal, dropout=0.0).view(s, s)
    torch.manual_seed(3)
    share = []
    for _ in range(20):
        dropped = attend(q, k, v, queries=layout, keys=layout, causal=causal, dropout=p).view(s, s)
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], plain[kept] / (1 - p), rtol=1e-12, atol=0)
        share.append(kept[plain > 0].double().mean().item())
    assert sum(share) / len(share) == pytest.approx(1 - p, abs=0.05)


def test_key_values_append_and_select() -> None:
    keys, values = torch.arange(12.0).view(3, 2, 1, 2), torch.arange(6.0).view(3, 2, 1, 1)
    read = KeyValues(keys, values)
    longer = read.append(KeyValues(-keys[:, :1], -values[:, :1]))
    assert longer.keys[:, :, 0, 0].tolist() == [[0, 2, 0], [4, 6, -4], [8, 10, -8]]
    assert longer.values[:, :, 0, 0].tolist() == [[0, 1, 0], [2, 3, -2], [4, 5, -4]]
    chosen = longer.select(torch.tensor([2, 0, 2]))
    assert chosen.keys[:, :, 0, 0].tolist() == [[8, 10, -8], [0, 2, 0], [8, 10, -8]]
    assert chosen.values[:, :, 0, 0].tolist() == [[4, 5, -4], [0, 1, 0], [4, 5, -4]]


def twins(d_model: int, n_heads: int) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Ours and torch's, with the same weights."""
    width = d_model // n_heads
    ours = MultiHeadAttention(d_model, n_heads, d_k=width, d_v=width, dropout=0.0)
    theirs = nn.MultiheadAttention(d_model, n_heads, bias=False, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat((ours.W_q.weight, ours.W_k.weight, ours.W_v.weight)))
        theirs.out_proj.weight.copy_(ours.W_o.weight)
    return ours, theirs


def assert_same_modules(
    ours: MultiHeadAttention,
    theirs: nn.MultiheadAttention,
    out: Tensor,
    their_out: Tensor,
    *,
    inputs: list[Tensor],
    upstream: Tensor,
) -> None:
    looked_at = (upstream != 0).expand_as(out)
    torch.testing.assert_close(out[looked_at], their_out[looked_at], rtol=1e-12, atol=1e-12)
    weights = [ours.W_q.weight, ours.W_k.weight, ours.W_v.weight, ours.W_o.weight]
    got = torch.autograd.grad((out * upstream).sum(), [*inputs, *weights])
    their_weights = [theirs.in_proj_weight, theirs.out_proj.weight]
    *expected, joint, output = torch.autograd.grad((their_out * upstream).sum(), [*inputs, *their_weights])
    for a, b in zip(got, [*expected, *joint.chunk(3), output], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [2, 5, 3]])
@pytest.mark.parametrize("causal", [False, True])
def test_self_and_masked_self_attention_are_torchs_module(lengths: list[int], causal: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = twins(12, 3)
    x, layout = draw(3, 5, 12, seed=1), Padded.of(lengths, 5)
    out = ours(x, ours.keys_values(x), queries=layout, keys=layout, causal=causal)
    hidden = torch.tensor([[i >= length for i in range(5)] for length in lengths])
    later = torch.tensor([[j > i for j in range(5)] for i in range(5)])
    mask = later if causal else None
    their_out, _ = theirs(x, x, x, key_padding_mask=hidden, attn_mask=mask, need_weights=True)
    upstream = draw(3, 5, 12, seed=2).detach() * real(lengths, 5).squeeze(-1)
    assert_same_modules(ours, theirs, out, their_out, inputs=[x], upstream=upstream)


@pytest.mark.parametrize(("targets", "sources"), [([4, 4], [6, 6]), ([4, 2], [3, 6])])
def test_encoder_decoder_attention_is_torchs_module(targets: list[int], sources: list[int]) -> None:
    torch.manual_seed(0)
    ours, theirs = twins(12, 4)
    x, memory = draw(2, 4, 12, seed=1), draw(2, 6, 12, seed=2)
    layouts = {"queries": Padded.of(targets, 4), "keys": Padded.of(sources, 6)}
    out = ours(x, ours.keys_values(memory), **layouts, causal=False)
    hidden = torch.tensor([[i >= length for i in range(6)] for length in sources])
    their_out, _ = theirs(x, memory, memory, key_padding_mask=hidden, need_weights=False)
    upstream = draw(2, 4, 12, seed=3).detach() * real(targets, 4).squeeze(-1)
    assert_same_modules(ours, theirs, out, their_out, inputs=[x, memory], upstream=upstream)


def test_head_widths_are_free_and_no_projection_has_a_bias() -> None:
    module = MultiHeadAttention(10, 3, d_k=4, d_v=7, dropout=0.0)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {
        "W_q.weight": (12, 10),
        "W_k.weight": (12, 10),
        "W_v.weight": (21, 10),
        "W_o.weight": (10, 21),
    }


def test_each_projection_has_xavier_bounds_of_its_own() -> None:
    """sqrt(6 / (in + out)) of each matrix; one fused matrix of all three would have a smaller bound."""
    torch.manual_seed(0)
    module = MultiHeadAttention(96, 4, d_k=16, d_v=40, dropout=0.0)
    for projection, outer in ((module.W_q, 64), (module.W_k, 64), (module.W_v, 160), (module.W_o, 160)):
        bound = math.sqrt(6.0 / (96 + outer))
        largest = projection.weight.abs().max().item()
        assert 0.99 * bound < largest <= bound
        assert projection.weight.std().item() == pytest.approx(bound / math.sqrt(3.0), rel=0.03)


def test_module_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2, d_k=4, d_v=4, dropout=0.5)
    x, layout = draw(1, 6, 8, seed=1), Padded.of([6], 6)

    def run() -> Tensor:
        return module(x, module.keys_values(x), queries=layout, keys=layout, causal=False)

    module.eval()
    assert torch.equal(run(), run())
    without = run()
    module.train()
    assert not torch.allclose(run(), run())
    module.dropout = 0.0
    torch.testing.assert_close(run(), without, rtol=1e-14, atol=1e-14)
