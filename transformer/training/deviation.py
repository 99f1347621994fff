"""How far a way of computing deviates from the plain one: in loss, gradient, attention, and what the causal mask hides.

The plain way is padded, uncompiled, in full precision, with attention by products and a softmax, and the loss by its
formula. `proof` decides what is compared, and what becomes of a way that deviates.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer.compute import autocast, dtype_of, product_dtype
from transformer.config.settings import LayoutKind, ModelConfig, Precision
from transformer.data.batch import Batch, collate
from transformer.data.plan import slots_for, split_step
from transformer.data.store import Ids, Store
from transformer.distributed import unsynchronised
from transformer.layout import Packed
from transformer.loss import smoothed_cross_entropy
from transformer.model.attention import AttentionSpec, attend
from transformer.model.transformer import Transformer
from transformer.numerics import DeviatesError, Tolerance, check, distance, norm, relative, tolerance_of
from transformer.records import Resolved
from transformer.vocabulary import PAD

SLICE = 2_000  # tokens of a side that the plain way computes at once, so that it fits wherever a step does
FP16_SCALE = 2.0**12  # of the loss: without it, gradients in fp16 would vanish


class UnrecordedError(DeviatesError):
    """A step could not be recorded, which leaves torch's allocator in disorder: the message says why."""


@dataclass(frozen=True)
class Gradient:
    """The loss of some sentences, a mean over target tokens, and its gradient by the name of a parameter."""

    loss: float
    by_name: dict[str, Tensor]

    def distance(self, other: "Gradient") -> float:
        """The norm of the difference, relative to the norm of `other`."""
        return distance([self.by_name[name] for name in other.by_name], other.by_name.values())


# ---- loss and gradient ----------------------------------------------------------------------------------------------


def compared_batch(way: Resolved, store: Store, ids: Ids) -> Batch:
    """The pairs in the layout of this way."""
    if way.layout is LayoutKind.padded:
        return collate(store, ids)
    return collate(store, ids, slots_for(store.lengths[ids]), kernel=way.attention_kernel)


def plain_gradient(
    model: Transformer, store: Store, ids: Ids, *, label_smoothing: float, device: torch.device
) -> Gradient:
    """The loss and its gradient in the plain way, a slice of the pairs after the other."""
    model.zero_grad(set_to_none=True)
    lengths = store.lengths
    tokens = int(lengths[ids][:, 1].sum())
    total = 0.0
    most = max(min(SLICE, tokens), int(lengths[ids].max()))
    for part in split_step(ids, lengths, max_tokens=most, micro_batch_multiple=1):
        batch = collate(store, part).to(device)
        layouts = {"source_layout": batch.source_layout, "target_layout": batch.target_layout}
        with sdpa_kernel(SDPBackend.MATH):
            logits = model(batch.source, batch.target_in, **layouts).flatten(0, 1)[batch.target_rows]  # (N, V)
            loss, _ = smoothed_cross_entropy(logits, batch.target_out, label_smoothing=label_smoothing)
            torch.autograd.backward(loss / tokens)
        total += float(loss.detach())
    return _taken(model, total / tokens)


def gradient_of(module: nn.Module, batch: Batch, *, device: torch.device, precision: Precision) -> Gradient:
    """The loss of a batch and its gradient as `module` computes them; no rank waits for another."""
    tokens = int((batch.target_out != PAD).sum())
    scale = FP16_SCALE if precision is Precision.fp16 else 1.0
    module.zero_grad(set_to_none=True)
    with unsynchronised(module):
        with autocast(device, precision):
            loss, _ = module(batch)
        torch.autograd.backward(loss * (scale / tokens))
    return _taken(module, float(loss.detach()) / tokens, scale=scale)


def _taken(module: nn.Module, loss: float, *, scale: float = 1.0) -> Gradient:
    """The gradient, which the module then has no more."""
    by_name = {
        name.removeprefix("module.").removeprefix("model."): parameter.grad.detach() / scale  # a copy
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    module.zero_grad(set_to_none=True)
    return Gradient(loss, by_name)


def compare(found: Gradient, plain: Gradient, tolerance: Tolerance) -> None:
    """Raise DeviatesError where the loss or a gradient is too far from the plain one."""
    check("the loss", relative(found.loss, plain.loss), tolerance.loss)
    if found.by_name.keys() != plain.by_name.keys():
        raise DeviatesError("some parameters have no gradient")

    # Each parameter by itself, but for those whose gradient is next to nothing. The gradient of a vector is a sum over
    # all tokens that nearly cancel: rounding alone changes much of it.
    least = 1e-4 * norm(plain.by_name.values())
    for name, wanted in plain.by_name.items():
        length = float(wanted.norm())
        if length < least:
            continue
        given = found.by_name[name]
        is_vector = wanted.dim() < 2
        limit = tolerance.vector if is_vector else tolerance.gradient
        check(f"the gradient of {name}", distance([given], [wanted]), limit)
        if not is_vector:
            check(f"the norm of the gradient of {name}", relative(float(given.norm()), length), tolerance.norm)


def compare_whole(found: Gradient, wanted: Gradient, *, loss: float, gradient: float) -> float:
    """How far a gradient is from another one. Raises DeviatesError where that, or the loss, is beyond its limit."""
    check("the loss", relative(found.loss, wanted.loss), loss)
    difference = found.distance(wanted)
    check("the gradient", difference, gradient)
    return difference


# ---- a kernel of attention ------------------------------------------------------------------------------------------


def compare_kernel(way: Resolved, config: ModelConfig, store: Store, ids: Ids, *, device: torch.device) -> None:
    """Raise DeviatesError unless the kernel attends to packed sentences as the formula does, in its three roles.

    Queries, keys and values are random, so that scores vary: with those of a new model, attention is nearly uniform,
    and hardly depends on its scale.
    """
    batch = compared_batch(way, store, ids).to(device)
    in_groups = compared_batch(replace(way, attention_kernel=None), store, ids).to(device)
    limit = tolerance_of(way.precision).attention

    plain_roles = _roles(in_groups, config)
    for role, spec in _roles(batch, config).items():
        found = _attend_randomly(spec, config, dtype=product_dtype(way.precision))
        with sdpa_kernel(SDPBackend.MATH):
            plain = _attend_randomly(plain_roles[role], config, dtype=dtype_of(way.precision))
        for name, given, wanted in zip(("output", "dq", "dk", "dv"), found, plain, strict=True):
            check(f"the {name} of {role}", distance([given], [wanted]), limit)


def _roles(batch: Batch, config: ModelConfig) -> dict[str, AttentionSpec]:
    """The roles of attention in a batch, by their names (section 3.2.3): whose queries read whose keys."""
    plain = AttentionSpec(
        queries=batch.source_layout,
        keys=batch.source_layout,
        causal=False,
        scale=config.key_width**-0.5,
        score_vector=None,
        dropout=0.0,
    )
    return {
        "self-attention": plain,
        "masked self-attention": replace(plain, queries=batch.target_layout, keys=batch.target_layout, causal=True),
        "encoder-decoder attention": replace(plain, queries=batch.target_layout),
    }


def _attend_randomly(spec: AttentionSpec, config: ModelConfig, *, dtype: torch.dtype) -> list[Tensor]:
    """What attention gives for random queries `(N, H, d_k)`, keys and values, and the gradients of the three."""
    assert isinstance(spec.queries, Packed)
    assert isinstance(spec.keys, Packed)
    draw = torch.Generator().manual_seed(0)
    of_queries, of_keys = (len(layout.positions()) for layout in (spec.queries, spec.keys))
    widths = ((of_queries, config.key_width), (of_keys, config.key_width), (of_keys, config.value_width))
    q, k, v = (
        torch.randn(slots, config.n_heads, width, generator=draw)
        .to(spec.queries.offsets.device, dtype)
        .requires_grad_()
        for slots, width in widths
    )
    out = attend(q, k, v, spec)
    upstream = torch.randn(out.shape, generator=draw).to(out.device, dtype)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]


# ---- the causal mask ------------------------------------------------------------------------------------------------


def largest_leak(model: Transformer, batch: Batch) -> float:
    """The largest change of a log-probability when the target tokens after the middle of each sentence are changed.

    `model` and `batch` are on one device; only what is predicted before the changed tokens is compared.
    """
    # Other tokens in the second half of each target.
    is_later = _is_in_later_half(batch)
    changed = batch.target_in.clone()
    changed[is_later] = (changed[is_later] + 1) % model.vocab_size

    with torch.no_grad():
        memory = model.encode(batch.source, batch.source_layout)
        log_probs = _log_probs(model, batch.target_in, batch, memory)  # (B, T, V)
        log_probs_changed = _log_probs(model, changed, batch, memory)

    # What that changes in the first half.
    difference = (log_probs - log_probs_changed).abs().amax(-1)  # (B, T)
    return float(difference[~is_later & (batch.target_in != PAD)].max())


def _log_probs(model: Transformer, tokens: Tensor, batch: Batch, memory: Tensor) -> Tensor:
    """What the model predicts behind these target tokens of the batch, `(B, T, V)`."""
    decoded = model.decode(tokens, batch.target_layout, memory=memory, memory_layout=batch.source_layout)
    return model.unembed(decoded).float().log_softmax(-1)


def _is_in_later_half(batch: Batch) -> Tensor:
    """The slots in the second half of each target sentence: bool, in the layout's shape."""
    layout = batch.target_layout
    if isinstance(layout, Packed):
        is_later = torch.zeros_like(batch.target_in, dtype=torch.bool)
        for start, end in pairwise(layout.offsets.tolist()):
            is_later[(start + end + 1) // 2 : end] = True
    else:
        half = (layout.lengths + 1) // 2
        is_later = layout.positions() >= half.unsqueeze(1)
    return is_later & (batch.target_in != PAD)
