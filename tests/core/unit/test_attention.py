"""`attention_weights` against its three scores written out and torch's module; `attend` against the formula, torch's
function and `attention_weights`, in both layouts; multi-head attention against torch's module; and what the additive
score may hold in memory.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.observers import Largest
from transformer.config.settings import Score
from transformer.data.packing import pack
from transformer.kernels.attention import dense_attention
from transformer.layout import Layout, Mask, Packed, Padded
from transformer.model import attention
from transformer.model.attention import (
    AttentionSpec,
    KeyValueCache,
    KeyValues,
    MultiHeadAttention,
    additive_scores,
    attend,
    attention_weights,
)
from transformer.model.transformer import mask_dtype

pytestmark = pytest.mark.usefixtures("float64")

HEADS = 2
WIDTHS = [(4, 4), (3, 7), (8, 2)]
every_score = pytest.mark.parametrize("score", list(Score), ids=lambda score: score.name)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def draw_qkv(b: int, t: int, s: int, d_k: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(b, t, HEADS, d_k, seed=1), draw(b, s, HEADS, d_k, seed=2), draw(b, s, HEADS, d_v, seed=3)


def how(score: Score, d_k: int) -> dict[str, Any]:
    """The arguments of `attend` that ask for this score."""
    return {
        "scale": d_k**-0.5 if score is Score.scaled else 1.0,
        "score_vector": draw(HEADS, d_k, seed=5) if score is Score.additive else None,
    }


def scores_of(score: Score, q: Tensor, k: Tensor, vector: Tensor | None) -> Tensor:
    """The three scores of q `(B, T, H, K)` and k `(B, S, H, K)`, one head and one pair of positions at a time."""
    rows = []
    for b, h in ((b, h) for b in range(q.shape[0]) for h in range(q.shape[2])):
        for t, s in ((t, s) for t in range(q.shape[1]) for s in range(k.shape[1])):
            x, y = q[b, t, h], k[b, s, h]
            match score:
                case Score.scaled:
                    rows.append((x * y).sum() / math.sqrt(len(x)))
                case Score.unscaled:
                    rows.append((x * y).sum())
                case Score.additive:
                    assert vector is not None
                    rows.append((vector[h] * torch.tanh(x + y)).sum())
    return torch.stack(rows).view(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def eq1(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, score: Score = Score.scaled, vector: Tensor | None = None
) -> Tensor:
    """Eq. 1, or with another score, with an explicit mask `(B, T, S)`."""
    return torch.einsum("bhts,bshv->bthv", weights_of(q, k, visible, score, vector), v)


def weights_of(q: Tensor, k: Tensor, visible: Tensor, score: Score, vector: Tensor | None) -> Tensor:
    """The softmax of the scores, `(B, H, T, S)`, with minus infinity where `visible` `(B, T, S)` says so."""
    return scores_of(score, q, k, vector).masked_fill(~visible.unsqueeze(1), -math.inf).softmax(-1)


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


# The weights


ROLES = {
    "self, full": ([5, 5, 5], [5, 5, 5], False),
    "self, padded": ([5, 2, 3], [5, 2, 3], False),
    "causal, full": ([5, 5, 5], [5, 5, 5], True),
    "causal, padded": ([1, 5, 3], [1, 5, 3], True),
    "cross, full": ([4, 4, 4], [6, 6, 6], False),
    "cross, padded": ([4, 1, 2], [2, 6, 1], False),
}
every_role = pytest.mark.parametrize(("targets", "sources", "causal"), list(ROLES.values()), ids=list(ROLES))


@every_role
@every_score
def test_attention_weights_are_the_softmax_written_out(
    score: Score, targets: list[int], sources: list[int], causal: bool
) -> None:
    """Values and gradients, one pair of positions at a time; rows sum to 1, and hidden keys weigh exactly 0."""
    t, s = max(targets), max(sources)
    q, k = draw(3, t, HEADS, 4, seed=1), draw(3, s, HEADS, 4, seed=2)
    layouts: dict[str, Any] = {"queries": Padded.of(targets, t), "keys": Padded.of(sources, s)}
    options = how(score, 4)
    vector = options["score_vector"]
    ours = attention_weights(q, k, **layouts, causal=causal, **options)
    assert ours.shape == (3, HEADS, t, s)

    visible = visible_keys(sources, t, s, causal=causal)
    theirs = weights_of(q, k, visible, score, vector)
    is_query = real(targets, t).transpose(1, 2)  # (B, 1, T, 1)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4)) * is_query
    assert_same(ours, theirs, [q, k] + [vector] * (vector is not None), upstream)

    torch.testing.assert_close(ours.sum(-1), torch.ones(3, HEADS, t), rtol=1e-14, atol=1e-14)
    hidden = (~visible.unsqueeze(1) & (is_query > 0)).expand_as(ours)
    assert torch.equal(ours[hidden], torch.zeros_like(ours[hidden]))


@pytest.mark.parametrize("score", [Score.scaled, Score.unscaled])
@pytest.mark.parametrize("lengths", [[5, 5, 5], [2, 5, 3]])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_weights_are_those_of_torchs_module(score: Score, lengths: list[int], causal: bool) -> None:
    """With the same projections. torch always divides by sqrt(d_k): to be unscaled, its queries are multiplied."""
    torch.manual_seed(0)
    n_heads, d_k = 3, 4
    ours, theirs = twins(12, n_heads)
    if score is Score.unscaled:
        with torch.no_grad():
            theirs.in_proj_weight[:12] *= math.sqrt(d_k)

    x, layout = draw(3, 5, 12, seed=1), Padded.of(lengths, 5)
    q, k = (projection(x).view(3, 5, n_heads, d_k) for projection in (ours.W_q, ours.W_k))
    weights = attention_weights(q, k, queries=layout, keys=layout, causal=causal, **how(score, d_k))

    hidden = torch.tensor([[i >= length for i in range(5)] for length in lengths])
    later = torch.tensor([[j > i for j in range(5)] for i in range(5)]) if causal else None
    options = {"key_padding_mask": hidden, "attn_mask": later, "need_weights": True, "average_attn_weights": False}
    _, their_weights = theirs(x, x, x, **options)

    is_query = real(lengths, 5).transpose(1, 2)  # (B, 1, T, 1)
    upstream = torch.randn(weights.shape, generator=torch.Generator().manual_seed(4)) * is_query
    looked_at = (upstream != 0).expand_as(weights)
    torch.testing.assert_close(weights[looked_at], their_weights[looked_at], rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad((weights * upstream).sum(), [x, ours.W_q.weight, ours.W_k.weight])
    d_x, d_in = torch.autograd.grad((their_weights * upstream).sum(), [x, theirs.in_proj_weight])
    d_q = d_in[:12] * (math.sqrt(d_k) if score is Score.unscaled else 1.0)
    for a, b in zip(got, (d_x, d_q, d_in[12:24]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@every_score
def test_attention_weights_of_an_empty_row_look_at_its_first_position(score: Score, causal: bool) -> None:
    q, k = draw(2, 3, HEADS, 4, seed=1), draw(2, 3, HEADS, 4, seed=2)
    layout = Padded.of([0, 3], 3)
    weights = attention_weights(q, k, queries=layout, keys=layout, causal=causal, **how(score, 4))
    rows = weights[0] if not causal else weights[0, :, :1]  # a later causal query is padding, and sees padding
    assert torch.equal(rows, torch.tensor([1.0, 0.0, 0.0]).expand_as(rows))
    for gradient in torch.autograd.grad(weights.square().sum(), [q, k]):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
@every_score
def test_attention_weights_come_from_a_softmax_in_fp32_at_least(
    score: Score, dtype: torch.dtype, expected: torch.dtype
) -> None:
    """A row of 12 half-precision weights would miss 1 by a rounding or more."""
    layout, options = Padded.of([12], 12), how(score, 4)
    if score is Score.additive:
        options["score_vector"] = options["score_vector"].to(dtype)
    q, k = draw(1, 12, HEADS, 4, seed=1).to(dtype), draw(1, 12, HEADS, 4, seed=2).to(dtype)
    weights = attention_weights(q, k, queries=layout, keys=layout, causal=False, **options)
    assert weights.dtype == expected
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, HEADS, 12, dtype=expected), rtol=0, atol=1e-6)


# Their products with the values


@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 3], [1, 1, 4]])
@pytest.mark.parametrize("causal", [False, True])
@every_score
def test_attend_to_itself_is_eq1(score: Score, lengths: list[int], causal: bool, d_k: int, d_v: int) -> None:
    q, k, v = draw_qkv(3, 5, 5, d_k, d_v)
    layout, options = Padded.of(lengths, 5), how(score, d_k)
    ours = attend(q, k, v, AttentionSpec(queries=layout, keys=layout, causal=causal, dropout=0.0, **options))
    assert ours.shape == (3, 5, HEADS, d_v)
    vector = options["score_vector"]
    theirs = eq1(q, k, v, visible_keys(lengths, 5, 5, causal=causal), score, vector)
    upstream = torch.randn(3, 5, HEADS, d_v, generator=torch.Generator().manual_seed(4)) * real(lengths, 5)
    assert_same(ours, theirs, [q, k, v] + [vector] * (vector is not None), upstream)


@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
@pytest.mark.parametrize(
    ("targets", "sources"), [([4, 4], [6, 6]), ([4, 1], [6, 2]), ([2, 4], [3, 6]), ([1, 1], [6, 5])]
)
@every_score
def test_attend_over_another_sequence_is_eq1(
    score: Score, targets: list[int], sources: list[int], d_k: int, d_v: int
) -> None:
    t, s = max(targets), max(sources)
    q, k, v = draw_qkv(2, t, s, d_k, d_v)
    layouts: dict[str, Any] = {"queries": Padded.of(targets, t), "keys": Padded.of(sources, s)}
    options = how(score, d_k)
    ours = attend(q, k, v, AttentionSpec(**layouts, causal=False, dropout=0.0, **options))
    vector = options["score_vector"]
    theirs = eq1(q, k, v, visible_keys(sources, t, s, causal=False), score, vector)
    upstream = torch.randn(2, t, HEADS, d_v, generator=torch.Generator().manual_seed(4)) * real(targets, t)
    assert_same(ours, theirs, [q, k, v] + [vector] * (vector is not None), upstream)


@pytest.mark.parametrize(("d_k", "d_v"), WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_attend_over_a_padded_batch_is_torchs_function_on_each_sentence_alone(causal: bool, d_k: int, d_v: int) -> None:
    lengths = [5, 2, 3]
    q, k, v = draw_qkv(3, 5, 5, d_k, d_v)
    layout = Padded.of(lengths, 5)
    ours = attend(
        q, k, v, AttentionSpec(queries=layout, keys=layout, causal=causal, dropout=0.0, **how(Score.scaled, d_k))
    )
    theirs = torch.zeros_like(ours)
    for row, n in enumerate(lengths):
        one_q, one_k, one_v = (x[row : row + 1, :n].transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=causal).transpose(1, 2)
        theirs = theirs + F.pad(out, (0, 0, 0, 0, 0, 5 - n, row, 2 - row))
    upstream = torch.randn(3, 5, HEADS, d_v, generator=torch.Generator().manual_seed(4)) * real(lengths, 5)
    assert_same(ours, theirs, [q, k, v], upstream)


@pytest.mark.parametrize("causal", [False, True])
def test_attend_gives_a_weighted_mean_computed_by_hand(causal: bool) -> None:
    """Two keys, d_k = 4, q . k = 2 ln 3 and 0: weights 3/4 and 1/4 where the scale is 1/sqrt(4)."""
    q = torch.tensor([[2 * math.log(3.0), 0.0, 0.0, 0.0]] * 2).view(1, 2, 1, 4)
    k = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]).view(1, 2, 1, 4)
    v = torch.tensor([[8.0], [16.0]]).view(1, 2, 1, 1)
    layout = Padded.of([2], 2)
    options: dict[str, Any] = {"scale": 0.5, "score_vector": None}
    out = (
        attend(q, k, v, AttentionSpec(queries=layout, keys=layout, causal=causal, dropout=0.0, **options))
        .flatten()
        .tolist()
    )
    assert out == pytest.approx([8.0 if causal else 10.0, 10.0], rel=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@every_score
def test_attend_is_finite_in_an_empty_slot_which_contributes_nothing(score: Score, causal: bool) -> None:
    q, k, v = draw_qkv(3, 4, 4, 3, 5)
    layout, options = Padded.of([4, 0, 2], 4), how(score, 3)
    out = attend(q, k, v, AttentionSpec(queries=layout, keys=layout, causal=causal, dropout=0.0, **options))
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
        AttentionSpec(queries=layout.select(others), keys=layout.select(others), causal=causal, dropout=0.0, **options),
    )
    torch.testing.assert_close(out[0], alone[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out[2, :2], alone[1, :2], rtol=1e-12, atol=1e-12)


@every_score
def test_attend_over_an_empty_source_is_finite(score: Score) -> None:
    q, k, v = draw_qkv(2, 3, 4, 3, 5)
    layouts: dict[str, Any] = {"queries": Padded.of([3, 3], 3), "keys": Padded.of([0, 4], 4)}
    out = attend(q, k, v, AttentionSpec(**layouts, causal=False, dropout=0.0, **how(score, 3)))
    assert bool(out.isfinite().all())
    for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", ["padded", "packed"])
@pytest.mark.parametrize("causal", [False, True])
@every_score
def test_attend_drops_weights_and_keeps_their_mean(score: Score, causal: bool, shape: str, dtype: torch.dtype) -> None:
    """With the identity as values the result is the weights: each is dropped, or kept and divided by 1 - p."""
    s, p = 12, 0.25
    layout = Padded.of([s], s) if shape == "padded" else pack(np.array([[s, s]]), (s, s))[0]
    rows = (1, s) if shape == "padded" else (s,)
    q, k, options = draw(*rows, 1, 4, seed=1).to(dtype), draw(*rows, 1, 4, seed=2).to(dtype), how(score, 4)
    if score is Score.additive:
        options["score_vector"] = options["score_vector"][:1].to(dtype)
    v = torch.eye(s, dtype=dtype).view(*rows, 1, s)
    plain = attend(q, k, v, AttentionSpec(queries=layout, keys=layout, causal=causal, dropout=0.0, **options)).view(
        s, s
    )
    torch.manual_seed(3)
    share = []
    for _ in range(20):
        dropped = attend(q, k, v, AttentionSpec(queries=layout, keys=layout, causal=causal, dropout=p, **options)).view(
            s, s
        )
        kept = dropped != 0
        unit = 1e-12 if dtype == torch.float64 else 2**-6
        torch.testing.assert_close(dropped[kept], plain[kept] / (1 - p), rtol=unit, atol=0)
        share.append(kept[plain > 0].double().mean().item())
    assert sum(share) / len(share) == pytest.approx(1 - p, abs=0.05)


# Packed sentences


def packed_layouts(lengths: list[tuple[int, int]], capacities: tuple[int, int]) -> tuple[Packed, Packed]:
    return pack(np.array(lengths, dtype=np.int32), capacities)


def alone(
    q: Tensor, k: Tensor, v: Tensor, spans: list[tuple[slice, slice]], *, causal: bool, score: Score, vector: Any
) -> Tensor:
    """Each sentence by itself, its queries and its keys cut out; zero in empty slots."""
    out = torch.zeros(len(q), HEADS, v.shape[-1], dtype=q.dtype)
    for of_q, of_k in spans:
        t, s = of_q.stop - of_q.start, of_k.stop - of_k.start
        visible = visible_keys([s], t, s, causal=causal)
        row = eq1(q[of_q][None], k[of_k][None], v[of_k][None], visible, score, vector)[0]
        out = torch.cat((out[: of_q.start], row.to(out.dtype), out[of_q.stop :]))
    return out


def spans_of(lengths: list[tuple[int, int]]) -> list[tuple[slice, slice]]:
    spans, starts = [], (0, 0)
    for pair in lengths:
        ends = starts[0] + pair[0], starts[1] + pair[1]
        spans.append((slice(starts[0], ends[0]), slice(starts[1], ends[1])))
        starts = ends
    return spans


PACKED = {
    "empty slots": ([(3, 2), (1, 4), (5, 1)], (12, 9)),
    "full": ([(3, 2), (1, 4), (5, 1)], (9, 7)),
    "one": ([(4, 3)], (5, 4)),
    "one token each": ([(1, 1), (1, 1), (1, 1)], (4, 4)),
}
PADDED_GROUPS = pytest.mark.parametrize("small", [256, 0], ids=["one group", "many groups"])


@pytest.mark.parametrize(("lengths", "capacities"), list(PACKED.values()), ids=list(PACKED))
@pytest.mark.parametrize("causal", [False, True])
@PADDED_GROUPS
@every_score
def test_attend_over_packed_sentences_is_eq1_on_each_alone(
    score: Score,
    lengths: list[tuple[int, int]],
    capacities: tuple[int, int],
    causal: bool,
    small: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also: NaN in empty slots reaches nothing, the result there is 0, and so is the gradient, whoever asks for it."""
    monkeypatch.setattr("transformer.data.packing._ALIKE", 1)
    monkeypatch.setattr("transformer.data.packing._SMALL", small)
    if causal:  # self-attention: one layout
        lengths, capacities = [(s, s) for s, _ in lengths], (capacities[0], capacities[0])
    layouts = packed_layouts(lengths, capacities)
    options = how(score, 3)
    vector = options["score_vector"]
    inputs = [
        draw(capacities[side], HEADS, width, seed=seed) for side, width, seed in ((0, 3, 1), (1, 3, 2), (1, 5, 3))
    ]
    with torch.no_grad():
        for x, side in zip(inputs, (0, 1, 1), strict=True):
            x[sum(pair[side] for pair in lengths) :] = math.nan
    q, k, v = inputs
    ours = attend(q, k, v, AttentionSpec(queries=layouts[0], keys=layouts[1], causal=causal, dropout=0.0, **options))
    theirs = alone(q, k, v, spans_of(lengths), causal=causal, score=score, vector=vector)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4))  # empty slots are asked too
    assert_same(ours, theirs, [q, k, v] + [vector] * (vector is not None), upstream)


def weights_times_values(q: Tensor, k: Tensor, v: Tensor, *, queries: Layout, keys: Layout, **options: Any) -> Tensor:
    """What `attend` is to be. Packed sentences are padded and taken a group at a time, as `attention_weights` says."""
    if isinstance(queries, Padded):
        assert isinstance(keys, Padded)
        weights = attention_weights(q, k, queries=queries, keys=keys, **options)
        return torch.einsum("bhts,bshv->bthv", weights, v)
    assert isinstance(keys, Packed)
    assert queries.groups is not None
    assert keys.groups is not None
    padded = (queries.groups.pad(q), keys.groups.pad(k), keys.groups.pad(v))
    groups = zip(*padded, queries.groups.layouts, keys.groups.layouts, strict=True)
    return queries.groups.unpad(
        [weights_times_values(*qkv, queries=of_q, keys=of_k, **options) for *qkv, of_q, of_k in groups]
    )


FORMS = {
    "padded, float64": ("padded", torch.float64, 1e-12),  # torch's function, or the additive formula
    "padded, float32": ("padded", torch.float32, 2e-6),
    "padded, bfloat16": ("padded", torch.bfloat16, 2 * 2**-7),  # the dense kernel
    "packed, float64": ("packed", torch.float64, 1e-12),  # in groups; the kernel for packed sentences needs a GPU
    "packed, bfloat16": ("packed", torch.bfloat16, 2 * 2**-7),
}


@pytest.mark.parametrize(("layout", "dtype", "tolerance"), list(FORMS.values()), ids=list(FORMS))
@pytest.mark.parametrize("role", ["self", "causal", "cross"])
@every_score
def test_attend_is_attention_weights_times_values(
    score: Score, role: str, layout: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and all gradients, the reference in float64 on the same rounded numbers; errors relative to the norm."""
    monkeypatch.setattr("transformer.data.packing._ALIKE", 1)
    monkeypatch.setattr("transformer.data.packing._SMALL", 0)  # more groups than one
    pairs = [(3, 2), (1, 4), (5, 1), (2, 2)] if role == "cross" else [(3, 3), (1, 1), (5, 5), (2, 2)]
    sides: tuple[Layout, Layout]
    rows: list[tuple[int, ...]]
    if layout == "packed":
        sides = packed_layouts(pairs, (13, 13))
        rows = [(13,), (13,), (13,)]
    else:
        sides = Padded.of([t for t, _ in pairs], 5), Padded.of([s for _, s in pairs], 5)
        rows = [(4, 5), (4, 5), (4, 5)]

    options = how(score, 4)
    drawn = [
        draw(*shape, HEADS, width, seed=seed) for seed, (shape, width) in enumerate(zip(rows, (4, 4, 7), strict=True))
    ]
    drawn += [options.pop("score_vector")] * (score is Score.additive)
    inputs = [x.detach().to(dtype).requires_grad_() for x in drawn]
    exact = [x.detach().double().requires_grad_() for x in inputs]

    q, k, v, *vector = inputs
    options |= {"queries": sides[0], "keys": sides[1], "causal": role == "causal"}
    ours = attend(q, k, v, AttentionSpec(dropout=0.0, **options | {"score_vector": vector[0] if vector else None}))
    q, k, v, *vector = exact
    theirs = weights_times_values(q, k, v, **options | {"score_vector": vector[0] if vector else None})

    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    if layout == "padded":
        upstream = upstream * real([t for t, _ in pairs], 5).to(dtype)  # rows of padding mean nothing
    looked_at = (upstream != 0).double()
    got = torch.autograd.grad(ours, inputs, upstream)
    expected = torch.autograd.grad(theirs, exact, upstream.double())
    for a, b in zip((ours * looked_at, *got), (theirs * looked_at, *expected), strict=True):
        assert (a.double() - b).norm().item() <= tolerance * b.norm().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@every_score
def test_attend_in_half_precision_is_eq1_but_for_rounding(
    score: Score, layout: str, causal: bool, dtype: torch.dtype
) -> None:
    """Rounding to the type is allowed a few times over; the formula sees the same rounded inputs in float64."""
    options = how(score, 8)
    vector = None if options["score_vector"] is None else options["score_vector"].detach().to(dtype).requires_grad_()
    options["score_vector"] = vector
    lengths = [(7, 7), (7, 7)]
    inputs = [draw(14, HEADS, 8, seed=seed).detach().to(dtype).requires_grad_() for seed in (1, 2, 3)]
    if layout == "packed":
        of_q, of_k = packed_layouts(lengths, (14, 14))
        ours = attend(
            inputs[0],
            inputs[1],
            inputs[2],
            AttentionSpec(queries=of_q, keys=of_k, causal=causal, dropout=0.0, **options),
        )
    else:
        full = Padded.full_rows(2, 7, torch.device("cpu"))
        rows = [x.view(2, 7, HEADS, 8) for x in inputs]
        ours = attend(
            rows[0], rows[1], rows[2], AttentionSpec(queries=full, keys=full, causal=causal, dropout=0.0, **options)
        ).flatten(0, 1)
    assert ours.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in [*inputs, *([] if vector is None else [vector])]]
    q, k, v = exact[:3]
    theirs = alone(q, k, v, spans_of(lengths), causal=causal, score=score, vector=exact[-1])
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    got = torch.autograd.grad(ours, [*inputs, *([] if vector is None else [vector])], upstream)
    expected = torch.autograd.grad(theirs, exact, upstream.double())
    unit = torch.finfo(dtype).eps
    for a, b in zip((ours, *got), (theirs, *expected), strict=True):
        assert (a.double() - b).norm().item() < 2 * unit * b.norm().item()


@pytest.mark.parametrize(
    ("dtype", "with_gradient", "expected"),
    [
        (torch.bfloat16, True, 1),
        (torch.float16, True, 1),
        (torch.bfloat16, False, 0),  # torch's is the faster one forwards
        (torch.float32, True, 0),
    ],
)
def test_attend_uses_the_kernel_of_low_precision_where_it_pays(
    dtype: torch.dtype, with_gradient: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def counted(*x: Any, **options: Any) -> Any:
        calls.append(x)
        return dense_attention(*x, **options)

    monkeypatch.setattr(attention, "dense_attention", counted)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in draw_qkv(2, 3, 3, 4, 4))
    layout = Padded.of([3, 2], 3)
    with torch.set_grad_enabled(with_gradient):
        attend(q, k, v, AttentionSpec(queries=layout, keys=layout, causal=False, dropout=0.0, **how(Score.scaled, 4)))
    assert len(calls) == expected


# The additive score


@pytest.mark.parametrize(("elements", "chunks"), [(1, 7), (2 * 120, 4), (3 * 120 + 119, 3), (7 * 120, 1)])
def test_attend_computes_additive_scores_in_chunks_of_queries(
    elements: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B 2, H 3, T 7, S 5, K 4: a query's sums are 120 numbers. The last chunk may be shorter."""
    q, k, vector = draw(2, 3, 7, 4, seed=1), draw(2, 3, 5, 4, seed=2), draw(3, 4, seed=3)
    plain = scores_of(Score.additive, q.transpose(1, 2), k.transpose(1, 2), vector)
    monkeypatch.setattr(attention, "_ADDITIVE_ELEMENTS", elements)
    calls: list[Any] = []
    original = attention._additive

    def counted(*x: Any) -> Any:
        calls.append(x)
        return original(*x)

    monkeypatch.setattr(attention, "_additive", counted)
    with Largest() as largest:
        ours = additive_scores(q, k, vector)
        upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4))
        ours_grad = torch.autograd.grad((ours * upstream).sum(), [q, k, vector])
    assert len(calls) == 2 * chunks, "each chunk once, and once more in the backward"
    assert largest.elements <= max(elements, 2 * 3 * 7 * 5)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    their_grad = torch.autograd.grad((plain * upstream).sum(), [q, k, vector])
    for a, b in zip(ours_grad, their_grad, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_attend_keeps_no_additive_sums_for_the_backward() -> None:
    """B 2, H 3, T 7, S 5, K 4: all sums are 840 numbers, and what is kept is no larger than the scores."""
    q, k, vector = draw(2, 3, 7, 4, seed=1), draw(2, 3, 5, 4, seed=2), draw(3, 4, seed=3)
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        scores = additive_scores(q, k, vector).softmax(-1)
    assert scores.requires_grad
    assert kept, "the softmax keeps its result"
    assert max(kept) <= 210


# Multi-head attention


def test_key_value_cache_reads_what_was_written() -> None:
    first = KeyValues(torch.arange(12.0).view(2, 2, 1, 3), torch.arange(4.0).view(2, 2, 1, 1))  # two sentences
    second = KeyValues(-first.keys, -first.values)

    cache = KeyValueCache.of(first)
    assert cache.size == 2
    longer = cache.grow(5)
    assert longer.size == 5
    longer.write(second, slice(2, 4))

    found = longer.read(4)
    assert found.keys[:, :, 0, 0].tolist() == [[0, 3, 0, -3], [6, 9, -6, -9]]
    assert found.values[:, :, 0, 0].tolist() == [[0, 1, 0, -1], [2, 3, -2, -3]]
    assert longer.read(1).keys[:, :, 0, 2].tolist() == [[2], [8]]

    chosen = longer.select(torch.tensor([1])).read(3)
    assert chosen.keys[:, :, 0, 0].tolist() == [[6, 9, -6]]
    assert chosen.values[:, :, 0, 0].tolist() == [[2, 3, -2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sentences", [2, 40])  # 40 sentences of two heads are many, in half precision
def test_attend_shows_a_hypothesis_its_own_past_alone(sentences: int, dtype: torch.dtype) -> None:
    """Three hypotheses over four positions: the weights by hand, one query at a time."""
    torch.manual_seed(4)
    q = torch.randn(sentences, 3, 2, 8, dtype=dtype)
    k = torch.randn(sentences, 12, 2, 8, dtype=dtype)
    v = torch.randn(sentences, 12, 2, 5, dtype=dtype)
    places = torch.tensor([[0, 3, 7, 9], [2, 3, 8, 10], [0, 5, 7, 11]])  # that each hypothesis may see
    is_past = torch.zeros(sentences, 3, 12, dtype=torch.bool)
    is_past[:, torch.arange(3)[:, None], places] = True

    with torch.no_grad():
        out = attend(
            q,
            k,
            v,
            AttentionSpec(
                queries=Padded.full_rows(sentences, 3, q.device),
                keys=Mask.of(is_past, mask_dtype(k)),
                causal=False,
                dropout=0.0,
                scale=0.5,
                score_vector=None,
            ),
        )

    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for query in range(3):
        for head in range(2):
            keys = k[:, places[query], head].double()  # (B, 4, 8)
            values = v[:, places[query], head].double()
            weights = torch.softmax(0.5 * (keys @ q[:, query, head].double().unsqueeze(2)).squeeze(2), 1)
            expected = (weights.unsqueeze(2) * values).sum(1)
            torch.testing.assert_close(out[:, query, head].double(), expected, atol=tolerance, rtol=tolerance)


def twins(d_model: int, n_heads: int) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Ours and torch's, with the same weights."""
    width = d_model // n_heads
    ours = MultiHeadAttention(d_model, n_heads, d_k=width, d_v=width, score=Score.scaled, biases=False, dropout=0.0)
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
def test_multi_head_attention_to_itself_is_torchs_module(lengths: list[int], causal: bool) -> None:
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
def test_multi_head_attention_over_another_sequence_is_torchs_module(targets: list[int], sources: list[int]) -> None:
    torch.manual_seed(0)
    ours, theirs = twins(12, 4)
    x, memory = draw(2, 4, 12, seed=1), draw(2, 6, 12, seed=2)
    layouts = {"queries": Padded.of(targets, 4), "keys": Padded.of(sources, 6)}
    out = ours(x, ours.keys_values(memory), **layouts, causal=False)
    hidden = torch.tensor([[i >= length for i in range(6)] for length in sources])
    their_out, _ = theirs(x, memory, memory, key_padding_mask=hidden, need_weights=False)
    upstream = draw(2, 4, 12, seed=3).detach() * real(targets, 4).squeeze(-1)
    assert_same_modules(ours, theirs, out, their_out, inputs=[x, memory], upstream=upstream)


@every_score
def test_multi_head_attention_has_free_head_widths_and_no_bias(score: Score) -> None:
    module = MultiHeadAttention(10, 3, d_k=4, d_v=7, score=score, biases=False, dropout=0.0)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == ({"score_vector": (3, 4)} if score is Score.additive else {}) | {
        "W_q.weight": (12, 10),
        "W_k.weight": (12, 10),
        "W_v.weight": (21, 10),
        "W_o.weight": (10, 21),
    }


def test_multi_head_attention_has_xavier_bounds_for_each_projection() -> None:
    """sqrt(6 / (in + out)) of each matrix; one fused matrix of all three would have a smaller bound."""
    torch.manual_seed(0)
    module = MultiHeadAttention(96, 4, d_k=16, d_v=40, score=Score.scaled, biases=False, dropout=0.0)
    for projection, outer in ((module.W_q, 64), (module.W_k, 64), (module.W_v, 160), (module.W_o, 160)):
        bound = math.sqrt(6.0 / (96 + outer))
        largest = projection.weight.abs().max().item()
        assert 0.99 * bound < largest <= bound
        assert projection.weight.std().item() == pytest.approx(bound / math.sqrt(3.0), rel=0.03)


def test_multi_head_attention_draws_its_score_vector_with_variance_one_over_d_k() -> None:
    """Bounds of four standard errors over 10,000 draws."""
    torch.manual_seed(0)
    vector = MultiHeadAttention(4, 400, d_k=25, d_v=1, score=Score.additive, biases=False, dropout=0.0).score_vector
    assert vector is not None
    assert vector.mean().item() == pytest.approx(0.0, abs=4 * 0.2 / 100)
    assert vector.std().item() == pytest.approx(0.2, rel=4 / math.sqrt(20_000))
    assert (vector / 0.2).pow(4).mean().item() == pytest.approx(3.0, abs=4 * math.sqrt(96) / 100)  # not uniform


@every_score
def test_multi_head_attention_drops_in_training_only(score: Score) -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2, d_k=4, d_v=4, score=score, biases=False, dropout=0.5)
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
