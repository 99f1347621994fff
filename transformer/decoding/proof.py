"""The proof of a search, a numerical self-check: compares its log-probabilities with those of plain forced decoding.

A search computes one position after the other, with cached keys and values, masks of its own, and fused kernels on a
GPU. The plain way computes all positions at once, in full precision, with attention by products and a softmax. So the
proof translates a few made-up sources and scores their pieces in the plain way; it also compares attention by itself. A
search that raises, deviates or is not finite falls back to a plainer form.
"""

import logging
from collections.abc import Callable, Container
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer.compute import HALF, product_dtype
from transformer.config.settings import Precision, Score, SearchConfig
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.forced import piece_log_probs
from transformer.decoding.search import length_penalty
from transformer.errors import CheckpointError, InputError, StorageError
from transformer.layout import Mask, Padded
from transformer.model.attention import AttentionSpec, attend
from transformer.model.transformer import mask_dtype
from transformer.numerics import DeviatesError, check, distance, failures_in_words, largest, tolerance_of
from transformer.records import Proof
from transformer.run_dir import RunDir
from transformer.vocabulary import UNK

log = logging.getLogger(__name__)

SOURCES = 8
LONGEST = 24  # pieces of the longest of them

FUSED = "fused attention"
PLAIN = "plain attention"
FULL = "plain attention, fp32"
SEARCHES = (FUSED, PLAIN, FULL)  # each with less that can go wrong


def in_way(decoder: BatchedDecoder, way: str) -> BatchedDecoder:
    """The same models and settings, computing as `way` says: FUSED, PLAIN or FULL."""
    if way == FULL and decoder.precision in HALF:
        (model,) = decoder.models
        decoder = BatchedDecoder.of(model, decoder.search, device=decoder.device, precision=Precision.fp32)
    return replace(decoder, is_plain=way != FUSED, replay=None)


def prove_search(
    decoder: BatchedDecoder, *, left: Container[str] = (), begin: Callable[[str], None] = lambda name: None
) -> str:
    """The first sound way to search with one model, for `in_way`. Raises InputError where there is none.

    `begin` is told the name under which a way is tried, before it is; names in `left` are not tried.
    """
    failures = []
    for way in SEARCHES:
        name = f"searches with {way}"
        if name in left:
            continue
        begin(name)
        try:
            with failures_in_words():
                deviation = _checked_deviation(in_way(decoder, way))
        except DeviatesError as error:
            log.warning("%s: not taken: %.300s", name, error)
            failures.append(f"{way}: {error}")
        else:
            log.info("searches agree with the plain computation: a piece's log-probability differs by %.2g", deviation)
            return way
    raise InputError(f"no search computes correctly on {decoder.device} ({'; '.join(failures)}): set device=cpu")


def prove_replay(decoder: BatchedDecoder) -> BatchedDecoder:
    """The same search with its steps replayed, where that is sound; else as it is, and one line says why."""
    name = "searches with replayed steps"
    made = decoder.replayed()
    try:
        with failures_in_words():
            deviation = _checked_deviation(made)
            check("the score of a translation", replay_loss(made, decoder), tolerance_of(made.precision).log_prob)
    except DeviatesError as error:
        log.warning("%s: not taken: %.300s", name, error)
        return decoder

    if made.replay is None or not made.replay.is_recording:
        return decoder  # it has said why
    log.info("%s: a piece's log-probability differs by %.2g from the plain computation", name, deviation)
    return made


def _checked_deviation(decoder: BatchedDecoder) -> float:
    """`search_deviation`. Raises DeviatesError where that, or attention, is too far from the plain way."""
    tolerance = tolerance_of(decoder.precision)
    check("attention", attention_deviation(decoder), tolerance.attention)
    deviation = search_deviation(decoder)
    check("the log-probability of a piece", deviation, tolerance.log_prob)
    return deviation


def replay_loss(replayed: BatchedDecoder, launched: BatchedDecoder) -> float:
    """How much worse a piece is in the best translations of a search than in those of another one, in the worst case.

    By score: where two searches round otherwise, they may decide between equals otherwise, but hardly for the worse.
    """
    sources, search = _made_up(replayed)
    found = [replace(one, search=search).hypotheses(sources, n_best=1) for one in (replayed, launched)]
    penalty = length_penalty(search.length_penalty)
    losses = []
    for [one], [other] in zip(*found, strict=True):
        loss = other.score(penalty) - one.score(penalty)
        losses.append(loss * penalty(one.length) / max(1, one.length))
    return largest(losses)


def attention_deviation(decoder: BatchedDecoder) -> float:
    """How far attention in a step of a search is from the formula, for random queries, keys and values.

    With those of a new model it is nearly uniform, and hardly depends on its scale.
    """
    (model,) = decoder.models
    config = model.config
    if config.score is Score.additive:
        return 0.0  # no kernel computes it
    draw = torch.Generator().manual_seed(0)
    beam_size = decoder.search.beam_size
    written = LONGEST * beam_size

    def drawn(positions: int, width: int) -> Tensor:
        return torch.randn(SOURCES, positions, config.n_heads, width, generator=draw).to(decoder.device)

    q = drawn(beam_size, config.key_width)
    k = drawn(written, config.key_width)
    v = drawn(written, config.value_width)
    is_past = torch.rand(SOURCES, beam_size, written, generator=draw) < 0.5
    is_past[:, :, 0] = True
    queries = Padded.full_rows(SOURCES, beam_size, decoder.device)
    source = Padded.of([written - row for row in range(SOURCES)], written)

    def spec(visible: Tensor, seen: Tensor) -> AttentionSpec:
        mask = Mask.of(visible.to(decoder.device), mask_dtype(seen))
        return AttentionSpec(queries, mask, causal=False, scale=config.key_width**-0.5, score_vector=None, dropout=0.0)

    deviations = []
    for visible in (is_past, source.visible().unsqueeze(1)):
        with torch.no_grad():
            with sdpa_kernel(SDPBackend.MATH):
                plain = attend(q, k, v, spec(visible, k))
            with sdpa_kernel(SDPBackend.MATH) if decoder.is_plain else nullcontext():
                dtype = product_dtype(decoder.precision)
                found = attend(q.to(dtype), k.to(dtype), v.to(dtype), spec(visible, k.to(dtype)))
        deviations.append(distance([found], [plain]))
    return largest(deviations)


def search_deviation(decoder: BatchedDecoder) -> float:
    """How far the mean log-probability of a piece is from that of plain forced decoding, in the worst translation."""
    (model,) = decoder.models
    sources, search = _made_up(decoder)
    best = [found[0] for found in replace(decoder, search=search).hypotheses(sources, n_best=1)]

    was_training = model.training
    model.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        pairs = [(source, hypothesis.tokens) for source, hypothesis in zip(sources, best, strict=True)]
        plain = piece_log_probs([model], pairs, decoder.device)
    model.train(was_training)

    deviations = [
        abs(hypothesis.log_prob - sum(log_probs[: hypothesis.length])) / max(1, hypothesis.length)
        for hypothesis, log_probs in zip(best, plain, strict=True)
    ]
    return largest(deviations)


def _made_up(decoder: BatchedDecoder) -> tuple[list[list[int]], SearchConfig]:
    """Sources, and settings with which their translations fit into forced decoding, which reads BOS, too."""
    draw = np.random.default_rng(0)
    longest = max(1, min(LONGEST, decoder.max_positions // 2))
    lengths = np.linspace(1, longest, SOURCES).astype(int).tolist()
    vocab_size = decoder.models[0].source_vocab_size
    sources = [draw.integers(UNK, vocab_size, size=length).tolist() for length in lengths]
    most_extra = max(1, decoder.max_positions - 1 - longest)
    return sources, replace(decoder.search, max_extra=min(decoder.search.max_extra, most_extra))


def sound_on_gpu(decoder: BatchedDecoder, run: RunDir) -> BatchedDecoder:
    """On a GPU, a search in a way that is sound there, which the run knows or which is proven now; else as it is."""
    if decoder.device.type != "cuda":
        return decoder
    return in_way(decoder, known_way(run, decoder.device) or prove_search(decoder))


def known_way(run: RunDir, device: torch.device) -> str | None:
    """The way to search that a run has found sound on this device with this torch; None where it has not."""
    with suppress(CheckpointError, StorageError):  # run.json is optional for inference
        proof: Proof | None = run.read_record().proof
        if proof is not None and (proof.device, proof.torch) == (torch.cuda.get_device_name(device), torch.__version__):
            return proof.search
    return None
