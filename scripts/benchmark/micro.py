"""What the parts of a training step cost, one by one: facts of the machine, products, attention, the loss, copies.

    python scripts/benchmark/micro.py --output micro.jsonl               all but the last three groups of measurements
    python scripts/benchmark/micro.py --output micro.jsonl gemm loss     some groups

One line of JSON a measurement. Times are of the device, from events around several calls: the median of five such
groups. Products and attention take their operands from several copies in turn, so that no cache holds them. TFLOP/s
count what the formula needs, never what a kernel wastes on tiles or masks.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._inductor.config
from kernel_times import kernel_table, kernel_times
from measured import Measured, Numbers, judged
from steps import LONGEST, MEAN, SPREAD, cudnn_attention, make_corpus, sdpa_flags, wait_for
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer.compute import avoid_cudnn_attention, has_compiler, has_triton, resolve_device
from transformer.config.settings import AttentionKernel, Device, Norm
from transformer.data.batch import Batch, collate
from transformer.data.packing import pack
from transformer.data.plan import packed_capacities, plan_chapter
from transformer.kernels.loss import linear_cross_entropy
from transformer.kernels.packed_attention import triton_attention
from transformer.kernels.triton_loss import triton_linear_cross_entropy
from transformer.layout import Packed
from transformer.loss import smoothed_cross_entropy
from transformer.model.attention import AttentionSpec, attend
from transformer.model.layers import AddNorm

CACHE = 2**28  # bytes: no cache of a device is larger


class Scale(NamedTuple):
    """How large everything is."""

    rows: tuple[int, ...]  # slots of a step on one side: the paper's 25,000 tokens, and an eighth of them
    widths: tuple[int, ...]  # d_model of base and of big
    layers: int
    vocab_size: int
    head: int  # width of a head
    heads: int
    square: int  # of the product that shows what the device can do
    copied: int  # bytes of the copy that does
    steps: tuple[int, ...]  # sentences of a step of 25,088 slots: as WMT has most, long ones, and short ones


FULL = Scale((25_088, 3_200), (512, 1024), 6, 37_000, 64, 8, 8192, 2**32, (900, 250, 2_900))
TINY = Scale((512, 256), (32,), 2, 500, 16, 2, 64, 2**20, (900,))  # to try this script


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    device = torch.device(args.device)
    scale = TINY if args.size == "tiny" else FULL
    measured = Measured(args.output, seconds=args.seconds)
    torch.manual_seed(1)
    for group in args.groups or [name for name in GROUPS if name not in UNTRIED]:
        GROUPS[group](measured, scale, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{group}: done", file=sys.stderr, flush=True)
    return measured.status()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--size", choices=["tiny", "full"], default="full", help="default: %(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="write every number here, as lines of JSON")
    args = parser.parse_args(arguments)
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(GROUPS)}")
    return args


# ---- the clock


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The device's time for one call of `run`: the median of five groups of calls, each of about 10 ms."""
    for _ in range(2):
        run()
    calls = max(1, min(100, int(10.0 / max(1e-3, span(run, 1, device)))))
    return statistics.median(span(run, calls, device) for _ in range(5)) / calls


def span(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Milliseconds for so many calls, one after the other."""
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return 1e3 * (time.perf_counter() - begun)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def host_milliseconds(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """What a caller waits until `run` returns, and until the device is done with it: medians of 20 calls."""
    returned, finished = [], []
    for _ in range(22):
        wait_for(device)
        begun = time.perf_counter()
        run()
        returned.append(1e3 * (time.perf_counter() - begun))
        wait_for(device)
        finished.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(returned[2:]), statistics.median(finished[2:])


def normal(*shape: int, device: torch.device) -> Tensor:
    """Normal numbers in bf16."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def in_turn(make: Callable[[], tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Operands, again and again, from as many copies as no cache holds."""
    first = make()
    size = sum(x.numel() * x.element_size() for x in first)
    return cycle([first, *(make() for _ in range(min(7, CACHE // size)))])


# ---- facts


def facts(measured: Measured, scale: Scale, device: torch.device) -> None:
    """The machine, what attention uses on it, and how fast it multiplies and copies at best."""
    measured.take("facts/sdpa_before", sdpa_flags)
    avoid_cudnn_attention(device)
    measured.take("facts/sdpa", sdpa_flags)
    card(measured, scale, device)
    for role, positions in (("decoding", (1, 27)), ("decoding_masked", (1, 27)), ("validation", (27, 27))):
        run = partial(attend_padded, scale, device, *positions, masked=role == "decoding_masked")
        measured.take(f"facts/sdpa_kernel/{role}", partial(kernel_names, run, device))
    for cudnn in (False, True) if device.type == "cuda" else (False,):
        measured.take(f"facts/new_shapes/{'cudnn' if cudnn else 'no_cudnn'}", partial(new_shapes, scale, device, cudnn))


def card(measured: Measured, scale: Scale, device: torch.device) -> None:
    """The scale of all other figures."""
    measured.take("facts/versions", partial(versions, device))
    measured.take("facts/anchors", partial(anchors, scale, device))
    avoid_cudnn_attention(device)
    measured.take("facts/log_softmax", partial(log_softmax, scale, device))
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH) if device.type == "cuda" else (SDPBackend.MATH,):
        name = f"facts/search_attention/{backend.name.lower()}"
        measured.take(name, partial(search_attention, scale, device, backend))


def versions(device: torch.device) -> Numbers:
    """Of everything below us, and the clocks of the device."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.total"
    smi = ""
    if device.type == "cuda":
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        with suppress(FileNotFoundError):  # a driver may come without it
            smi = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.partition("\n")[0]
    return {
        "device": str(resolve_device(Device[device.type])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "has_compiler": has_compiler(device),
        "nvidia_smi": dict(zip(query.split(","), smi.split(", "), strict=True)) if smi else None,
    }


def anchors(scale: Scale, device: torch.device) -> Numbers:
    """A large product and a large copy: what the other figures are shares of."""
    a, b = (normal(scale.square, scale.square, device=device) for _ in range(2))
    for _ in range(200):  # 0.3 s: an idle device has a sixth of its clock
        a @ b
    product = milliseconds(lambda: a @ b, device)
    source = torch.empty(scale.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source), device)
    return {"product_tflops": 2 * scale.square**3 / product / 1e9, "copy_tb_s": 2 * scale.copied / copy / 1e9}


def log_softmax(scale: Scale, device: torch.device) -> Numbers:
    """Of the logits of a search of 1,024 sentences in a beam of four: in fp32, straight from bf16.

    It could replace what such a search does with them now, which the profile of `decode.py` lists.
    """
    logits = normal(min(4_096, scale.rows[0]), scale.vocab_size, device=device)
    return {"ms": milliseconds(lambda: torch.log_softmax(logits, 1, dtype=torch.float32), device)}


def search_attention(scale: Scale, device: torch.device, backend: SDPBackend) -> Numbers:
    """Of such a search at its 32nd position: torch's kernel has tiles of 64 queries, of which four are filled."""
    rows = min(1_024, scale.rows[0])
    q, k, v = (normal(rows, scale.heads, n, scale.head, device=device) for n in (4, 128, 128))
    mask = torch.zeros(rows, 1, 4, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad(), sdpa_kernel(backend):
        return {"ms": replayed(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), device)}


def attend_padded(scale: Scale, device: torch.device, queries: int, keys: int, *, masked: bool) -> Tensor:
    """scaled_dot_product_attention over 300 rows."""
    q, k, v = (normal(300, scale.heads, n, scale.head, device=device) for n in (queries, keys, keys))
    mask = torch.ones(300, 1, 1, keys, dtype=torch.bool, device=device) if masked else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def kernel_names(run: Callable[[], object], device: torch.device) -> Numbers:
    """The kernels behind a call."""
    run()
    rows = kernel_times(run, device, 1)["rows"]
    return {"kernels": [row["kernel"] for row in rows if "distribution" not in row["kernel"]]}


def new_shapes(scale: Scale, device: torch.device, cudnn: bool) -> Numbers:
    """What attention takes on shapes that it has not seen: a plan may be built for each."""
    times = []
    with cudnn_attention(cudnn):
        attend_padded(scale, device, 1, 7, masked=False)
        for keys in (8, 9, 10, 12, 15, 20):
            wait_for(device)
            begun = time.perf_counter()
            attend_padded(scale, device, 1, keys, masked=False)
            wait_for(device)
            times.append(round(1e3 * (time.perf_counter() - begun), 3))
    return {"milliseconds": times, "median": statistics.median(times)}


# ---- matrix products


def gemm(measured: Measured, scale: Scale, device: torch.device) -> None:
    """The products of a step: of one projection, of several at once, of the feed-forward network, and the logits."""
    for rows in scale.rows:
        for d_model in scale.widths:
            shapes = {
                "projection": (d_model, d_model),
                "key_value": (d_model, 2 * d_model),
                "query_key_value": (d_model, 3 * d_model),
                "cross_of_all_layers": (d_model, 2 * scale.layers * d_model),
                "ffn_in": (d_model, 4 * d_model),
                "ffn_out": (4 * d_model, d_model),
                "logits": (d_model, scale.vocab_size),
            }
            for name, (inner, outer) in shapes.items():
                for pass_ in ("forward", "d_input", "d_weight"):
                    key = f"gemm/{rows}/{name}/{inner}x{outer}/{pass_}"
                    measured.take(key, partial(product, rows, inner, outer, pass_=pass_, device=device))


def product(rows: int, inner: int, outer: int, *, pass_: str, device: torch.device) -> Numbers:
    """One of the three products of a linear map: `(rows, inner) @ (outer, inner).T`, and its two gradients."""

    def operands() -> tuple[Tensor, ...]:
        match pass_:
            case "forward":
                return normal(rows, inner, device=device), normal(outer, inner, device=device).t()
            case "d_input":
                return normal(rows, outer, device=device), normal(outer, inner, device=device)
            case _:
                return normal(rows, outer, device=device).t(), normal(rows, inner, device=device)

    turn = in_turn(operands)
    ms = milliseconds(lambda: torch.mm(*next(turn)), device)
    return {"ms": ms, "tflops": 2 * rows * inner * outer / ms / 1e9}


# ---- attention


def attention(measured: Measured, scale: Scale, device: torch.device) -> None:
    """Over the sentences of a packed step, forward and backward: torch's kernel for them, and padded rows."""
    for entries in (3_328, 1_024):
        for longest in (LONGEST + 1, 128):
            for causal in (False, True):
                key = f"attention/varlen/{entries}/{longest}/{'causal' if causal else 'full'}"
                measured.take(key, partial(varlen, scale, device, entries=entries, longest=longest, causal=causal))
    for causal in (False, True):
        measured.take(f"attention/padded/{'causal' if causal else 'full'}", partial(padded, scale, device, causal))


def sentences(slots: int, longest: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Lengths like WMT's that fill all but the last of the slots."""
    draw = np.random.default_rng(1)
    lengths = np.exp(np.log(MEAN) - SPREAD**2 / 2 + SPREAD * draw.standard_normal(slots))
    lengths = np.clip(np.rint(lengths), 2, longest).astype(np.int64)
    return lengths[lengths.cumsum() < slots]


def both_ways(run: Callable[..., Tensor], inputs: Iterator[tuple[Tensor, ...]], device: torch.device) -> Numbers:
    """Milliseconds of the forward pass, and of both; `inputs` end with the gradient of the result."""

    def forward() -> Tensor:
        return run(*next(inputs)[:-1])

    def both() -> None:
        *operands, upstream = next(inputs)
        torch.autograd.grad(run(*operands), operands, upstream)

    return {"forward_ms": milliseconds(forward, device), "both_ms": milliseconds(both, device)}


def packed_inputs(scale: Scale, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """q, k, v and a gradient, each `(N, H, K)`."""

    def make() -> tuple[Tensor, ...]:
        *inputs, upstream = (normal(scale.rows[0], scale.heads, scale.head, device=device) for _ in range(4))
        return *(x.requires_grad_() for x in inputs), upstream

    return in_turn(make)


def varlen(scale: Scale, device: torch.device, *, entries: int, longest: int, causal: bool) -> Numbers:
    """torch's kernel for packed sentences, told of so many sentences, most of them empty, of at most such a length."""
    lengths = sentences(scale.rows[0], longest)
    offsets = np.full(max(entries, len(lengths) + 1), lengths.sum(), dtype=np.int32)
    offsets[: len(lengths) + 1] = np.concatenate(([0], lengths.cumsum()))
    bounds = torch.from_numpy(offsets).to(device)
    window = (-1, 0) if causal else (-1, -1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if device.type != "cuda":
            return one_by_one(q, k, v, offsets.tolist(), causal)
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=window)
        assert isinstance(out, Tensor)
        return out

    found = both_ways(run, packed_inputs(scale, device), device)
    return found | {"sentences": len(lengths), "tokens": int(lengths.sum()), "entries": len(offsets)}


def one_by_one(q: Tensor, k: Tensor, v: Tensor, offsets: list[int], causal: bool) -> Tensor:
    """The same where torch has no such kernel: to try this script."""
    parts = [torch.zeros_like(q[offsets[-1] :])]
    for start, end in reversed([*pairwise(offsets)]):
        if end > start:
            one_q, one_k, one_v = (x[start:end].transpose(0, 1) for x in (q, k, v))
            parts.append(F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=causal).transpose(0, 1))
    return torch.cat(parts[::-1])


def padded(scale: Scale, device: torch.device, causal: bool) -> Numbers:
    """As many slots in rows of 32, all full: what padded batches of sorted sentences come to at best."""
    rows = scale.rows[0] // 32

    def make() -> tuple[Tensor, ...]:
        *inputs, upstream = (normal(rows, 32, scale.heads, scale.head, device=device).transpose(1, 2) for _ in range(4))
        return *(x.requires_grad_() for x in inputs), upstream

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return both_ways(run, in_turn(make), device)


# ---- attention for short sentences

FORMS = [
    (AttentionKernel.varlen, 0.0),
    (AttentionKernel.triton, 0.0),
    (AttentionKernel.sentences, 0.0),
    (AttentionKernel.triton, 0.1),
    (AttentionKernel.sentences, 0.1),
]


def short_attention(measured: Measured, scale: Scale, device: torch.device) -> None:
    """One of a step's 18 attentions, forward and backward, by each kernel for packed sentences and in each role.

    Each form first computes what the formula does in float64. The promise of whole sentences is 0.15 ms on an H200.
    """
    for count in scale.steps:
        for role in ("encoder", "causal", "cross"):
            for kernel, dropout in FORMS:
                key = f"short_attention/{count}/{role}/{kernel.name}/{dropout}"
                run = partial(one_attention, scale, device, count=count, kernel=kernel, role=role, dropout=dropout)
                measured.take(key, run)


def one_attention(
    scale: Scale, device: torch.device, *, count: int, kernel: AttentionKernel, role: str, dropout: float
) -> Numbers:
    """Milliseconds of one attention, replayed: what its kernels take, without a host.

    As many as the model has layers read operands of their own, so that no cache holds them. Ranges of keys, which all
    layers share, are made before. (On a CPU attention is in groups of padded sentences: to try this script.)
    """
    lengths, capacities = step_of(scale, count)
    exact = sides_of(role, pack(lengths, capacities), device)
    sides = sides_of(role, pack(lengths, capacities, kernel=kernel), device) if device.type == "cuda" else exact
    run = by_kernel(*sides, causal=role == "causal")

    def make() -> tuple[Tensor, ...]:
        slots = [len(side.position_ids) for side in (sides[0], sides[1], sides[1])]
        return tuple(normal(n, scale.heads, scale.head, device=device).requires_grad_() for n in slots)

    inputs = [make() for _ in range(scale.layers)]
    upstream = [torch.randn_like(q) for q, _, _ in inputs]
    in_groups = by_kernel(*exact, causal=role == "causal")
    errors = errors_of(partial(run, dropout=0.0), partial(in_groups, dropout=0.0), inputs[0])

    def forward() -> list[Tensor]:
        return [run(*operands, dropout=dropout) for operands in inputs]

    def both() -> object:
        return torch.autograd.grad(forward(), [x for operands in inputs for x in operands], upstream)

    found: Numbers = {
        "forward_ms": replayed(forward, device) / scale.layers,
        "both_ms": replayed(both, device) / scale.layers,
    }
    if count == scale.steps[0]:
        found["kernels"] = kernels_of(both, device, scale.layers)
    return judged(found, errors) | {
        "sentences": len(lengths),
        "tokens": lengths.sum(0).tolist(),
        "longest": int(lengths.max()),
        "tiles": tiles_of(lengths, capacities, role),
    }


@cache
def step_of(scale: Scale, count: int) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], tuple[int, int]]:
    """The lengths of the pairs of a step as a plan makes it, that of about so many sentences, and the slots for it."""
    tokens = scale.rows[0] - scale.rows[0] // 64
    count = count * scale.rows[0] // FULL.rows[0]
    store = make_corpus(100 * tokens, scale.vocab_size)
    plan = plan_chapter(store.lengths, mixture=((len(store), 1.0),), seed=1, epoch=0, chapter=0, tokens_per_step=tokens)
    ids = min(plan, key=lambda ids: abs(len(ids) - count))
    capacities = packed_capacities(store.lengths, tokens_per_step=tokens, max_tokens=4 * tokens, micro_batch_multiple=1)
    return store.lengths[ids], capacities


def sides_of(role: str, sides: tuple[Packed, Packed], device: torch.device) -> tuple[Packed, Packed]:
    """Whose queries read whose keys."""
    source, target = (side.to(device) for side in sides)
    return {"encoder": (source, source), "causal": (target, target), "cross": (target, source)}[role]


def by_kernel(queries: Packed, keys: Packed, *, causal: bool) -> Callable[..., Tensor]:
    """Attention by the kernel that the layouts name: q, k, v and `dropout`."""
    of_queries, of_keys = queries.ranges_in(keys), keys.ranges_in(queries)
    if causal:
        of_queries, of_keys = of_queries.up_to_itself(), of_keys.from_itself()

    def run(q: Tensor, k: Tensor, v: Tensor, *, dropout: float) -> Tensor:
        scale = q.shape[-1] ** -0.5
        if queries.kernel is AttentionKernel.triton:
            return triton_attention(q, k, v, keys=of_queries, queries=of_keys, dropout=dropout, scale=scale)
        return attend(
            q, k, v, AttentionSpec(queries, keys, causal=causal, scale=scale, score_vector=None, dropout=dropout)
        )

    return run


def tiles_of(lengths: np.ndarray[Any, Any], capacities: tuple[int, int], role: str) -> list[int]:
    """How many tiles of each size there are."""
    sides = pack(lengths, capacities, kernel=AttentionKernel.sentences)
    queries, _ = sides_of(role, sides, torch.device("cpu"))
    assert queries.tiles is not None
    tiles = queries.tiles.cross if role == "cross" else queries.tiles.own
    assert tiles is not None
    return tiles.any(-1).sum(-1).tolist()


def errors_of(run: Callable[..., Tensor], exact: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> list[float]:
    """How far the result and the gradients of operands are from those in float64."""
    found = run(*operands)
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, operands, upstream)
    doubles = tuple(x.detach().double().requires_grad_() for x in operands)
    wanted = exact(*doubles)
    expected = torch.autograd.grad(wanted, doubles, upstream.double())

    pairs = zip((found, *gradients), (wanted, *expected), strict=True)
    return [float(((one.double() - two).norm() / two.norm()).detach()) for one, two in pairs]


def replayed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call, recorded and replayed: of the device alone."""
    if device.type != "cuda":
        return milliseconds(run, device)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return milliseconds(graph.replay, device)


def kernels_of(run: Callable[[], object], device: torch.device, runs: int) -> object:
    """The longest kernels of a call, or what the profiler says."""
    found = kernel_table(run, device, runs)
    return found["rows"][:8] if "rows" in found else found


# ---- residual connection, dropout and norm

SWITCHES: dict[str, dict[str, bool]] = {
    "inductor": {},
    "inductor_no_mix_order": {"triton.mix_order_reduction": False},
    "inductor_split_size": {"triton.mix_order_reduction_autotune_split_size": True},
    "inductor_autotune": {"max_autotune_pointwise": True},
    "inductor_all": {"triton.mix_order_reduction": False, "max_autotune_pointwise": True},
}  # of TORCHINDUCTOR_MIX_ORDER_REDUCTION=0, TORCHINDUCTOR_MIX_ORDER_REDUCTION_AUTOTUNE_SPLIT_SIZE=1, and no variable


def add_norm(measured: Measured, scale: Scale, device: torch.device) -> None:
    """One of a step's 30 norms with what is before it, forward and backward: our kernel, and inductor's.

    Each first computes what the formula does in float64. The promise is 0.045 ms forward and 0.06 backward at 25,088 x
    512, where the memory of an H200 allows 0.024 each.
    """
    kernel = ["kernel"] if has_triton(device) else []
    base, *others = scale.widths
    forms = [(base, form) for form in (*kernel, *(SWITCHES if device.type == "cuda" else ["inductor"]))]
    forms += [(d_model, form) for d_model in others for form in (*kernel, "inductor")]
    for d_model, form in forms:
        key = f"add_norm/{scale.rows[0]}x{d_model}/{form}"
        measured.take(key, partial(one_add_norm, form, scale.rows[0], d_model, layers=scale.layers, device=device))


def one_add_norm(form: str, rows: int, d_model: int, *, layers: int, device: torch.device) -> Numbers:
    """Milliseconds of one, replayed, under dropout of 0.1; there are as many as the model has layers."""
    torch._dynamo.reset()
    module = AddNorm(d_model, Norm.post, dropout=0.1).to(device).train()
    parameters = (module.weight, module.bias)

    def call(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return module(x, y, fused=form == "kernel")

    one = call if form == "kernel" else torch.compile(call, dynamic=False)
    operands = [tuple(normal(rows, d_model, device=device).requires_grad_() for _ in range(2)) for _ in range(layers)]
    upstream = [normal(rows, d_model, device=device) for _ in range(layers)]

    def forward() -> list[Tensor]:
        return [one(*pair) for pair in operands]

    def both() -> object:
        return [
            torch.autograd.grad(out, (*pair, *parameters), gradient)
            for out, pair, gradient in zip(forward(), operands, upstream, strict=True)
        ]

    def exact(x: Tensor, y: Tensor) -> Tensor:
        return F.layer_norm(x + y, (d_model,), module.weight.double(), module.bias.double(), module.eps)

    begun = time.monotonic()
    with torch._inductor.config.patch(SWITCHES.get(form, {})):
        module.dropout = 0.0
        errors = errors_of(one, exact, operands[0])
        module.dropout = 0.1
        both()
        wait_for(device)
        compiling = time.monotonic() - begun
        found = {"forward_ms": replayed(forward, device) / layers, "both_ms": replayed(both, device) / layers}
        kernels = kernels_of(both, device, layers)
    found["backward_ms"] = found["both_ms"] - found["forward_ms"]
    return judged(found, errors) | {"compile_seconds": compiling, "kernels": kernels}


# ---- the loss


def loss(measured: Measured, scale: Scale, device: torch.device) -> None:
    """The logits and their smoothed loss, forward and backward, beside the three products without which none goes."""
    kinds: dict[str, Callable[..., None]] = {"products": three_products, "ours": our_loss}
    kinds |= {
        "eager": partial(plain_loss, cross_entropy),
        "compiled": partial(plain_loss, torch.compile(cross_entropy, dynamic=False)),
    }
    for rows in scale.rows:
        for d_model in scale.widths:
            for kind, run in kinds.items():
                key = f"loss/{rows}/{d_model}/{kind}"
                measured.take(key, partial(time_loss, run, rows, d_model, vocab_size=scale.vocab_size, device=device))


def triton_loss(measured: Measured, scale: Scale, device: torch.device) -> None:
    """The loss by a Triton kernel, and as a multiple of the three products: 1.25 is the promise, 1.1 the ambition."""
    kinds: dict[str, Callable[..., None]] = {"products": three_products, "ours": our_loss}
    if has_triton(device):
        kinds["fused"] = our_triton_loss
    for rows in scale.rows:
        for d_model in scale.widths:
            place = f"loss/{rows}/{d_model}"
            checked = triton_smoothed if has_triton(device) else our_smoothed
            measured.take(f"{place}/errors", partial(loss_errors, checked, d_model, scale, device))
            for kind, run in kinds.items():
                time = partial(time_loss, run, rows, d_model, vocab_size=scale.vocab_size, device=device)
                measured.take(f"{place}/{kind}", time)
            measured.take(f"{place}/over_products", partial(over_products, measured, place, list(kinds)))


def over_products(measured: Measured, place: str, kinds: list[str]) -> Numbers:
    """The time of each kind over that of the first."""
    times = {kind: (measured.get(f"{place}/{kind}") or {})["ms"] for kind in kinds}
    return {kind: times[kind] / times[kinds[0]] for kind in kinds}


def time_loss(run: Callable[..., None], rows: int, d_model: int, *, vocab_size: int, device: torch.device) -> Numbers:
    """Milliseconds, and the most memory taken on the way."""
    hidden = normal(rows, d_model, device=device).requires_grad_()
    matrix = torch.randn(vocab_size, d_model, device=device).mul_(d_model**-0.5).requires_grad_()
    targets = torch.randint(4, vocab_size, (rows,), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ms = milliseconds(lambda: run(hidden, matrix, targets), device)
    gib = (torch.cuda.max_memory_allocated() - before) / 2**30 if device.type == "cuda" else None
    return {"ms": ms, "tflops": 6 * rows * d_model * vocab_size / ms / 1e9, "gib": gib}


def three_products(hidden: Tensor, matrix: Tensor, targets: Tensor) -> None:
    """Logits, gradient of the hidden states, gradient of the matrix: nothing else, and the logits as their gradient."""
    with torch.no_grad():
        weights = matrix.to(hidden.dtype)
        logits = hidden @ weights.t()
        logits @ weights
        logits.t() @ hidden


def our_smoothed(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """The package's kernel."""
    with torch.autocast(hidden.device.type, torch.bfloat16):
        return linear_cross_entropy(hidden, matrix, targets, bias=None, label_smoothing=0.1)[0]


def triton_smoothed(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """The package's Triton kernel, all rows in one block."""
    with torch.autocast(hidden.device.type, torch.bfloat16):
        return triton_linear_cross_entropy(hidden, matrix, targets, bias=None, label_smoothing=0.1, rows=len(hidden))[0]


def our_loss(hidden: Tensor, matrix: Tensor, targets: Tensor) -> None:
    """The package's kernel, with its gradients."""
    torch.autograd.grad(our_smoothed(hidden, matrix, targets), (hidden, matrix))


def our_triton_loss(hidden: Tensor, matrix: Tensor, targets: Tensor) -> None:
    """The Triton kernel, with its gradients."""
    torch.autograd.grad(triton_smoothed(hidden, matrix, targets), (hidden, matrix))


def loss_errors(run: Callable[..., Tensor], d_model: int, scale: Scale, device: torch.device) -> Numbers:
    """How far the loss of some rows and its gradients are from the formula in float64."""
    rows = min(2_048, scale.rows[0])
    hidden = normal(rows, d_model, device=device).requires_grad_()
    matrix = torch.randn(scale.vocab_size, d_model, device=device).mul_(d_model**-0.5).requires_grad_()
    targets = torch.randint(4, scale.vocab_size, (rows,), device=device)

    def exact(hidden: Tensor, matrix: Tensor) -> Tensor:
        return smoothed_cross_entropy(hidden @ matrix.t(), targets, label_smoothing=0.1)[0]

    return judged({}, errors_of(lambda *operands: run(*operands, targets), exact, (hidden, matrix)))


def cross_entropy(hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    """torch's, on all logits at once."""
    logits = F.linear(hidden, matrix)
    return F.cross_entropy(logits, targets, ignore_index=0, label_smoothing=0.1, reduction="sum")


def plain_loss(function: Callable[..., Tensor], hidden: Tensor, matrix: Tensor, targets: Tensor) -> None:
    """That under autocast, with its gradients."""
    with torch.autocast(hidden.device.type, torch.bfloat16):
        smoothed = function(hidden, matrix, targets)
    torch.autograd.grad(smoothed, (hidden, matrix))


# ---- copies to the device


def copies(measured: Measured, scale: Scale, device: torch.device) -> None:
    """The packed batch of a step: as it is sent, its tensors by themselves from either kind of memory, and as one."""
    batch = step_batch(scale)
    tensors = list(tensors_of(batch))
    count = sum(x.numel() * x.element_size() for x in tensors)
    about = {"tensors": len(tensors), "bytes": count}

    def pinned(x: Tensor) -> Tensor:
        return x.pin_memory() if device.type == "cuda" else x.clone()

    def send(sources: list[Tensor]) -> Numbers:
        returned, finished = host_milliseconds(lambda: [x.to(device, non_blocking=True) for x in sources], device)
        return about | {"returned_ms": returned, "finished_ms": finished}

    def send_batch() -> Numbers:
        returned, finished = host_milliseconds(lambda: batch.to(device), device)
        return about | {"returned_ms": returned, "finished_ms": finished}

    measured.take("copies/batch", send_batch)
    measured.take("copies/pageable", lambda: send(tensors))
    measured.take("copies/pinned", lambda: send([pinned(x) for x in tensors]))
    measured.take("copies/one_pageable", lambda: send([torch.zeros(count, dtype=torch.uint8)]))
    measured.take("copies/one_pinned", lambda: send([pinned(torch.zeros(count, dtype=torch.uint8))]))


def step_batch(scale: Scale) -> Batch:
    """A micro-batch as a packed step has it."""
    tokens = scale.rows[0] - scale.rows[0] // 64
    store = make_corpus(4 * tokens, scale.vocab_size)
    plan = plan_chapter(store.lengths, mixture=((len(store), 1.0),), seed=1, epoch=0, chapter=0, tokens_per_step=tokens)
    capacities = packed_capacities(store.lengths, tokens_per_step=tokens, max_tokens=4 * tokens, micro_batch_multiple=1)
    return collate(store, plan[0], capacities, kernel=AttentionKernel.varlen)


def tensors_of(thing: object) -> Iterator[Tensor]:
    """Those in a batch, wherever its dataclasses hold them."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for item in thing:
            yield from tensors_of(item)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from tensors_of(getattr(thing, field.name))


GROUPS = {
    "card": card,
    "facts": facts,
    "copies": copies,
    "attention": attention,
    "gemm": gemm,
    "loss": loss,
    "short_attention": short_attention,
    "add_norm": add_norm,
    "triton_loss": triton_loss,
}  # the most valuable first, and last what may not work
UNTRIED = {"short_attention", "add_norm", "triton_loss"}  # kernels that no GPU has timed yet: only when asked for

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
