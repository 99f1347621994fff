"""`transformer table table=scores`: what is observed of attention, what scores cost, and what is said of both."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.command_line import enter
from support.corpora import read, run_command, step_dir, tiny_job, write_corpus
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json
from transformer.config.settings import ModelConfig, Score
from transformer.data.batch import Batch, collate
from transformer.data.store import Store
from transformer.errors import CheckpointError, InputError
from transformer.layout import Padded
from transformer.model.attention import MultiHeadAttention
from transformer.model.transformer import Transformer
from transformer.tools.markdown import plain
from transformer.tools.paper import command as tables
from transformer.tools.paper.rows import score_rows
from transformer.tools.paper.score_study import costs as costs_module
from transformer.tools.paper.score_study import study as study_module
from transformer.tools.paper.score_study.costs import HeadsCost, ScoreCost, cost_of_heads, cost_of_scores, peak_bytes
from transformer.tools.paper.score_study.format import format_study, write_study
from transformer.tools.paper.score_study.study import (
    AttentionState,
    Observed,
    ScoreStudy,
    observe,
    score_statistics,
    study_scores,
)
from transformer.tools.significance import Interval
from transformer.tools.tables.job import TableJob
from transformer.tools.tables.measured import Measured, Table, TableRow
from transformer.training.step import Objective

pytestmark = pytest.mark.ci

CPU = torch.device("cpu")
EVERY_SCORE = list(Score)


# ---- attention, written down once more ------------------------------------------------------------------------------


@dataclass
class Seen:
    """What one attention does, collected sentence by sentence."""

    scores: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    traces: list[float] = field(default_factory=list)

    def add(self, visible_scores: np.ndarray[Any, Any], scale: float) -> None:
        """One query's scores, before any scale, with the keys that it sees."""
        self.scores += visible_scores.tolist()
        n = len(visible_scores)
        if n < 2:
            return
        powers = np.exp(scale * (visible_scores - visible_scores.max()))
        weights = powers / powers.sum()
        positive = weights[weights > 0]
        self.entropies.append(float(-(positive * np.log(positive)).sum() / math.log(n)))
        self.traces.append(float((1 - (weights**2).sum()) / (1 - 1 / n)))

    @property
    def means(self) -> tuple[float, float, float]:
        return float(np.var(self.scores, ddof=1)), float(np.mean(self.entropies)), float(np.mean(self.traces))


def score_of(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], vector: np.ndarray[Any, Any] | None) -> float:
    return float(q @ k) if vector is None else float(vector @ np.tanh(q + k))


def statistics(
    attention: MultiHeadAttention,
    x: Tensor,
    context: Tensor,
    *,
    queries: list[int],
    keys: list[int],
    causal: bool,
    scale: float,
) -> tuple[float, float, float]:
    """The three figures by loops over sentences, heads, queries and keys, from the projections' weights."""
    n_heads = attention.n_heads
    w_q = attention.W_q.weight.detach().numpy()
    w_k = attention.W_k.weight.detach().numpy()
    width = len(w_q) // n_heads
    vectors = None if attention.score_vector is None else attention.score_vector.detach().numpy()

    seen = Seen()
    for b in range(len(x)):
        for h in range(n_heads):
            rows = slice(h * width, (h + 1) * width)
            vector = None if vectors is None else vectors[h]
            for t in range(queries[b]):
                q = w_q[rows] @ x[b, t].numpy()
                last = min(keys[b], t + 1) if causal else keys[b]
                found = [score_of(q, w_k[rows] @ context[b, s].numpy(), vector) for s in range(last)]
                seen.add(np.array(found), scale)
    return seen.means


def found_statistics(
    attention: MultiHeadAttention, x: Tensor, context: Tensor, *, queries: Padded, keys: Padded, causal: bool
) -> tuple[float, float, float]:
    with torch.no_grad():
        kv = attention.keys_values(context)
        found = score_statistics(attention, x, kv, queries=queries, keys=keys, causal=causal)
    return found.variance, found.entropy, found.softmax_gradient


@pytest.mark.parametrize("score", EVERY_SCORE)
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [([4, 4], [4, 4], False), ([5, 2, 1], [5, 2, 1], False), ([5, 2, 1], [5, 2, 1], True), ([3, 2], [1, 6], False)],
    ids=["full", "padded", "causal", "cross"],
)
@pytest.mark.usefixtures("float64")
def test_score_statistics_are_those_of_the_loops(
    score: Score, queries: list[int], keys: list[int], *, causal: bool
) -> None:
    """Sentences of length 1 and first positions see one key: they count in the variance alone."""
    torch.manual_seed(0)
    attention = MultiHeadAttention(12, 3, d_k=4, d_v=4, score=score, biases=False, dropout=0.0)
    x = 2 * torch.randn(len(queries), max(queries), 12)
    context = x if queries == keys else 2 * torch.randn(len(keys), max(keys), 12)
    expected = statistics(
        attention,
        x,
        context,
        queries=queries,
        keys=keys,
        causal=causal,
        scale=0.5 if score is Score.scaled else 1.0,
    )
    layouts = Padded.of(queries, max(queries)), Padded.of(keys, max(keys))
    found = found_statistics(attention, x, context, queries=layouts[0], keys=layouts[1], causal=causal)
    assert found == pytest.approx(expected, rel=1e-10)


def test_score_statistics_of_equal_weights() -> None:
    """Queries of zero: all scores are 0, and all weights equal, also where padding hides keys."""
    attention = MultiHeadAttention(8, 2, d_k=4, d_v=4, score=Score.scaled, biases=False, dropout=0.0)
    torch.nn.init.zeros_(attention.W_q.weight)
    layout = Padded.of([3, 2], 3)
    x = torch.randn(2, 3, 8)
    assert found_statistics(attention, x, x, queries=layout, keys=layout, causal=True) == pytest.approx((0, 1, 1))


@pytest.mark.parametrize("d_k", [8, 64, 512])
def test_score_statistics_show_footnote_4(d_k: int) -> None:
    """Independent inputs of variance 1 under square Xavier projections: the variance of q.k is d_k."""
    torch.manual_seed(d_k)
    attention = MultiHeadAttention(512, 512 // d_k, d_k=d_k, d_v=d_k, score=Score.unscaled, biases=False, dropout=0.0)
    layout = Padded.full_rows(8, 48, CPU)
    x = torch.randn(8, 48, 512)
    context = torch.randn(8, 48, 512)
    variance, _, _ = found_statistics(attention, x, context, queries=layout, keys=layout, causal=False)
    assert variance == pytest.approx(d_k, rel=0.04)


# ---- a model, written down once more --------------------------------------------------------------------------------


@dataclass
class PlainModel:
    """One layer a side, post-norm, on one sentence at a time: no padding and no masks. Weights by their names."""

    weights: dict[str, Tensor]  # float64
    d_k: int
    score: Score
    seen: dict[str, Seen] = field(default_factory=dict)

    def loss(self, source: list[int], target: list[int]) -> Tensor:
        """The summed negative log-likelihood of the target and its end mark."""
        memory = self._embed([*source, 3])
        memory = self._norm("encoder.0.self_attention", memory + self._attend("encoder.0.self_attention", memory))
        memory = self._norm("encoder.0.feed_forward", memory + self._feed("encoder.0", memory))

        x = self._embed([2, *target])
        x = self._norm("decoder.0.self_attention", x + self._attend("decoder.0.self_attention", x, causal=True))
        x = self._norm("decoder.0.cross_attention", x + self._attend("decoder.0.cross_attention", x, memory))
        x = self._norm("decoder.0.feed_forward", x + self._feed("decoder.0", x))

        logits = x @ self.weights["embedding"].T
        return F.cross_entropy(logits, torch.tensor([*target, 3]), reduction="sum")

    def _embed(self, ids: list[int]) -> Tensor:
        d_model = self.weights["embedding"].shape[1]
        angles = [[t / 10_000 ** (2 * (i // 2) / d_model) for i in range(d_model)] for t in range(len(ids))]
        table = [[math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(row)] for row in angles]
        return self.weights["embedding"][ids] * math.sqrt(d_model) + torch.tensor(table, dtype=torch.float64)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        gain, bias = self.weights[f"{name}_norm.weight"], self.weights[f"{name}_norm.bias"]
        centred = x - x.mean(-1, keepdim=True)
        return gain * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + bias

    def _feed(self, layer: str, x: Tensor) -> Tensor:
        w = {name: self.weights[f"{layer}.feed_forward.{name}"] for name in ("W_1.weight", "W_1.bias", "W_2.weight")}
        inner = (x @ w["W_1.weight"].T + w["W_1.bias"]).clamp(min=0)
        return inner @ w["W_2.weight"].T + self.weights[f"{layer}.feed_forward.W_2.bias"]

    def _attend(self, name: str, x: Tensor, context: Tensor | None = None, *, causal: bool = False) -> Tensor:
        context = x if context is None else context
        w = {letter: self.weights[f"{name}.W_{letter}.weight"] for letter in "qkvo"}
        vectors = self.weights.get(f"{name}.score_vector")
        scale = 1 / math.sqrt(self.d_k) if self.score is Score.scaled else 1.0
        seen = self.seen.setdefault(name, Seen())

        heads = []
        for h in range(len(w["q"]) // self.d_k):
            rows = slice(h * self.d_k, (h + 1) * self.d_k)
            q, k, v = x @ w["q"][rows].T, context @ w["k"][rows].T, context @ w["v"][rows].T
            out = []
            for t in range(len(q)):
                last = t + 1 if causal else len(k)
                raw = k[:last] @ q[t] if vectors is None else torch.tanh(k[:last] + q[t]) @ vectors[h]
                seen.add(raw.detach().numpy(), scale)
                out.append(torch.softmax(scale * raw, 0) @ v[:last])
            heads.append(torch.stack(out))
        return torch.cat(heads, 1) @ w["o"].T


def plain_state(
    weights: dict[str, Tensor], pairs: list[tuple[list[int], list[int]]], *, d_k: int, score: Score
) -> AttentionState:
    """What `observe` should find, by a plain forward and its own backward pass."""
    leaves = {name: tensor.double().clone().requires_grad_() for name, tensor in weights.items()}
    model = PlainModel(leaves, d_k, score)
    total = torch.stack([model.loss(source, target) for source, target in pairs]).sum()
    (total / sum(len(target) + 1 for _, target in pairs)).backward()

    squares: list[float] = []
    for name, leaf in leaves.items():
        if re.search(r"\.W_[qk]\.", name):
            assert leaf.grad is not None
            squares += leaf.grad.square().flatten().tolist()
    assert set(model.seen) == {"encoder.0.self_attention", "decoder.0.self_attention", "decoder.0.cross_attention"}
    variance, entropy, trace = np.mean([seen.means for seen in model.seen.values()], axis=0)
    return AttentionState(float(variance), float(entropy), float(trace), math.sqrt(np.mean(squares)))


def assert_close(found: AttentionState, expected: AttentionState, tolerance: float) -> None:
    for name in ("variance", "entropy", "softmax_gradient", "weight_gradient"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=tolerance), name


PAIRS = [([4, 9, 5], [6, 7]), ([8], [10, 11, 4, 5]), ([4, 5, 6, 7, 8, 9], [12])]


def small_model(score: Score) -> tuple[Transformer, Batch]:
    torch.manual_seed(1)
    config = ModelConfig(n_layers=1, d_model=16, d_ff=24, n_heads=2, score=score, dropout=0.3, max_positions=16)
    store = Store.from_pieces([source for source, _ in PAIRS], [target for _, target in PAIRS])
    return Transformer(config, 14), collate(store, np.arange(len(PAIRS)))


@pytest.mark.parametrize("score", EVERY_SCORE)
@pytest.mark.usefixtures("float64")
def test_observe_is_that_of_a_plain_model(score: Score) -> None:
    """In training mode, and with dropout: neither is to be seen."""
    model, batch = small_model(score)
    expected = plain_state({name: p.detach() for name, p in model.named_parameters()}, PAIRS, d_k=8, score=score)
    assert_close(observe(model.train(), batch), expected, 1e-10)


def test_observe_leaves_the_model_as_it_was() -> None:
    model, batch = small_model(Score.additive)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    kept = torch.ones_like(model.output)
    model.output.grad = kept

    first = observe(model, batch)
    assert observe(model, batch) == first, "nothing adds up"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {"embedding"}
    assert model.output.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert not any(module._forward_hooks for module in model.modules())
    assert not model.training


def test_observe_removes_its_hooks_when_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise MemoryError

    model, batch = small_model(Score.scaled)
    monkeypatch.setattr(Objective, "forward", fail)
    with pytest.raises(MemoryError):
        observe(model, batch)
    assert not any(module._forward_hooks for module in model.modules())


# ---- what it costs --------------------------------------------------------------------------------------------------


BEFORE = torch.zeros(1000)  # is there before the work begins, and is not counted


def make_two() -> None:
    first = torch.zeros(100)  # 400 bytes
    second = first + 1  # 400 more
    assert second.shape == first.shape


def make_views() -> None:
    whole = torch.zeros(10, 10)  # 400 bytes
    parts = [whole.view(100), whole.t(), whole[2:, ::3], whole.expand(5, 10, 10), whole.detach()]
    assert len(parts) == 5


def change_in_place() -> None:
    BEFORE.view(10, 100).mul_(2).add_(1).t().zero_()


def read_what_was_there() -> None:
    doubled = BEFORE.t() * 2  # 4,000 bytes
    assert len(doubled) == 1000


def free_before_the_next() -> None:
    first = torch.zeros(1000)  # 4,000 bytes
    del first
    second = torch.zeros(500)
    third = torch.zeros(250)
    assert len(second) > len(third)


def step_by_step() -> None:
    x = torch.zeros(1000, dtype=torch.float64)  # 8,000 bytes, twice while the next is made
    for _ in range(5):
        x = x + 1


def keep_a_view_of_what_is_dropped() -> None:
    part = torch.zeros(1000)[:1]  # 4,000 bytes stay
    other = torch.zeros(100)
    assert len(other) > len(part)


def five_exponentials(x: Tensor) -> Tensor:
    return x.exp().exp().exp().exp().exp()


def leaf() -> Tensor:
    return torch.full((1000,), -1.0, requires_grad=True)


@pytest.mark.parametrize(
    ("work", "size"),
    [
        (make_two, 800),
        (make_views, 400),
        (change_in_place, 0),
        (read_what_was_there, 4000),
        (free_before_the_next, 4000),
        (step_by_step, 16_000),
        (keep_a_view_of_what_is_dropped, 4400),
    ],
)
def test_peak_bytes_counts_each_storage_while_it_is_held(work: Callable[[], None], size: int) -> None:
    assert peak_bytes(work) == size


def test_peak_bytes_of_a_backward_pass() -> None:
    """Each exponential keeps its result: five; two sums of one number; and one gradient at a time beside them.

    A gradient replaces the result that it was made with.
    """
    x = leaf()

    def work() -> None:
        torch.autograd.backward(five_exponentials(x).sum())

    assert peak_bytes(partial(five_exponentials, x)) == 20_000, "kept for a backward pass"
    assert peak_bytes(work) == 24_008


def test_peak_bytes_of_a_checkpoint() -> None:
    """Forward, two results at a time; backward makes all five again, beside the one that came out."""
    x = leaf()

    def forward() -> Tensor:
        out: Tensor = checkpoint(five_exponentials, x, use_reentrant=False)
        return out

    def both() -> None:
        out = forward()
        torch.autograd.backward(out.sum())

    assert peak_bytes(forward) == 8_000
    assert peak_bytes(both) == 28_008


def test_cost_of_heads_counts_the_papers_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four projections, 2048 x 512 x 512 each, and two products, 2048 x 64 x 512 each: however many heads."""
    monkeypatch.setattr(costs_module, "REPEATS", 1)
    costs = cost_of_heads(CPU)
    assert [(cost.n_heads, cost.d_k, cost.multiply_adds) for cost in costs] == [
        (8, 64, 2_281_701_376),
        (1, 512, 2_281_701_376),
    ]
    assert all(cost.milliseconds > 0 for cost in costs)


def test_cost_of_scores_measures_every_score_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap(monkeypatch)
    costs = cost_of_scores([8, 32], d_model=32, device=CPU)
    assert [(cost.n, cost.d_k, cost.score.name) for cost in costs] == [
        (n, d_k, score) for n in (4, 16) for d_k in (8, 32) for score in ("scaled", "unscaled", "additive")
    ]
    assert all(cost.milliseconds > 0 for cost in costs)
    # 64 tokens x 32 numbers of 4 bytes are 8 KiB; additive scores make, at n = 16, a sum of 16 for each of these.
    of_dot_products = {cost.mebibytes for cost in costs if cost.score is not Score.additive}
    of_sums = [cost.mebibytes for cost in costs if cost.score is Score.additive and cost.n == 16]
    assert max(of_dot_products) < 16 * 8 / 1024 < min(of_sums)
    assert cost_of_scores([], d_model=32, device=CPU) == []


def cheap(patch: pytest.MonkeyPatch) -> None:
    """Six of the sixteen sentences are observed; costs are of a few tokens, measured once."""
    patch.setattr(study_module, "SENTENCES", 6)
    for name, value in {"LENGTHS": (4, 16), "TOKENS": 64, "REPEATS": 1, "WIDTH": 64}.items():
        patch.setattr(costs_module, name, value)


# ---- rows -----------------------------------------------------------------------------------------------------------


def scores_job(folder: Path, model: dict[str, Any] | None = None, **settings: Any) -> TableJob:
    """The study on the corpus of digits, three steps a row."""
    recipe = {"max_steps": 3, "save_every": 2, "validate_every": 3} | settings.pop("recipe", {})
    job = tiny_job(folder / "run", write_corpus(folder / "corpus"), model, **recipe)
    own = {field.name: getattr(job, field.name) for field in fields(TrainJob)}
    return TableJob(**own | {"table": "scores"} | settings)


SETTINGS_OF_32 = {
    "dk8_scaled": (4, 8, 8, "scaled"),
    "dk8_unscaled": (4, 8, 8, "unscaled"),
    "dk8_additive": (4, 8, 8, "additive"),
    "dk16_scaled": (2, 16, 16, "scaled"),
    "dk16_unscaled": (2, 16, 16, "unscaled"),
    "dk16_additive": (2, 16, 16, "additive"),
    "dk32_scaled": (1, 32, 32, "scaled"),
    "dk32_unscaled": (1, 32, 32, "unscaled"),
    "dk32_additive": (1, 32, 32, "additive"),
}


@pytest.mark.parametrize(
    "model",
    [{}, {"d_k": 4, "d_v": 12}, {"n_heads": 3, "d_k": 8, "d_v": 8}, {"score": Score.additive}],
    ids=["plain", "own widths", "heads that do not divide", "own score"],
)
def test_score_rows_have_heads_that_fill_the_width(tmp_path: Path, model: dict[str, Any]) -> None:
    """Whatever of this the user's model has."""
    rows = score_rows(scores_job(tmp_path, model))
    models = {row.name: row.job.model for row in rows.rows}
    assert {name: (m.n_heads, m.key_width, m.value_width, m.score.name) for name, m in models.items()} == SETTINGS_OF_32
    assert list(models) == list(SETTINGS_OF_32)
    assert rows.rows[5].changes == "model.n_heads=2 model.score=additive"
    assert rows.title == "Scores of attention, in a model of width 32"


@pytest.mark.parametrize(
    ("d_model", "widths"), [(8, [8]), (24, [8]), (96, [8, 16, 32]), (128, [8, 16, 32, 64, 128]), (72, [8])]
)
def test_score_rows_are_powers_of_two_that_divide_the_width(tmp_path: Path, d_model: int, widths: list[int]) -> None:
    rows = score_rows(scores_job(tmp_path, {"d_model": d_model})).rows
    assert [row.name for row in rows] == [f"dk{d_k}_{score.name}" for d_k in widths for score in Score]


def test_score_rows_are_chosen_by_name(tmp_path: Path) -> None:
    rows = score_rows(scores_job(tmp_path, rows="dk32_s,dk8_add")).rows
    assert [row.name for row in rows] == ["dk8_additive", "dk32_scaled"]
    with pytest.raises(InputError, match="rows=dk64: no row begins with 'dk64'"):
        score_rows(scores_job(tmp_path, rows="dk64"))


def test_scores_job_takes_a_model_of_its_own() -> None:
    """Unlike the paper's tables: it is the model that the rows are made of."""
    result = enter("table", "table=scores", "model.n_layers=1", "model.d_model=64", "rows=dk8")
    assert (result.status, result.jobs[0].model.d_model, result.jobs[0].rows) == (0, 64, "dk8")


# ---- the public command, on a tiny corpus ---------------------------------------------------------------------------

ROWS = ("dk8_scaled", "dk8_additive", "dk32_unscaled")


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TableJob]:
    """The study's output; three rows of one seed, the weights with a moving average."""
    job = scores_job(tmp_path_factory.mktemp("scores"), rows="dk8_s,dk8_a,dk32_u", recipe={"ema_decay": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        cheap(patch)
        run_command("table", job)
    return Path(job.run_dir).with_name("run-scores"), job


def test_scores_command_writes_the_study(studied: tuple[Path, TableJob]) -> None:
    output, _ = studied
    written = {path.name for path in output.iterdir() if path.is_file()}
    assert written - {".lock"} == {"table.json", "table.md", "table.csv"}

    study = read(output / "table.json")
    assert [row["name"] for row in study["table"]["rows"]] == list(ROWS)
    assert [row["errors"] for row in study["table"]["rows"]] == [[]] * 3
    assert [(one["row"], one["seed"], one["score"], one["d_k"]) for one in study["observed"]] == [
        ("dk8_scaled", 1, "scaled", 8),
        ("dk8_additive", 1, "additive", 8),
        ("dk32_unscaled", 1, "unscaled", 32),
    ]
    assert {cost["d_k"] for cost in study["costs"]} == {8, 32}
    assert [cost["n_heads"] for cost in study["heads"]] == [8, 1]
    assert study["machine"].startswith("cpu, 1 thread, torch 2.")

    headings = [line for line in (output / "table.md").read_text().splitlines() if line.startswith("#")]
    assert headings == [
        "# Scores of attention, in a model of width 32",
        "## Attention before and after training",
        "## Time and memory of one layer",
        "## What the paper says of scores",
    ]


def dev_pairs(run: Path) -> list[tuple[list[int], list[int]]]:
    """The pieces of the first sentences, by sentencepiece itself."""
    tokenizer = SentencePieceProcessor(model_file=str(run / "tokenizer.model"))
    source, target = (
        (run / "hypotheses" / f"dev.{kind}").read_text(encoding="utf-8").splitlines() for kind in ("src", "ref")
    )
    pairs = [(tokenizer.encode(left), tokenizer.encode(right)) for left, right in zip(source, target, strict=True)]
    return pairs[:6]


def observed_of(output: Path) -> dict[str, dict[str, Any]]:
    return {one["row"]: one for one in read(output / "table.json")["observed"]}


@pytest.mark.parametrize("row", ["dk8_scaled", "dk8_additive", "dk32_unscaled"])
def test_study_observes_the_weights_that_are_validated(studied: tuple[Path, TableJob], row: str) -> None:
    """Those of the last step's moving average, by a plain model that reads the run directory; not the averaged ones."""
    output, _ = studied
    run = output / row / "seed-1"
    weights = load_file(step_dir(run, 3) / "ema.safetensors")
    of_row = SETTINGS_OF_32[row]
    expected = plain_state(weights, dev_pairs(run), d_k=of_row[1], score=Score[of_row[3]])
    assert_close(AttentionState(**observed_of(output)[row]["trained"]), expected, 1e-3)


def test_study_observes_the_weights_before_the_first_step(tmp_path: Path) -> None:
    """A step at a rate of next to nothing changes none: drawn again from the seed, they are the same."""
    job = scores_job(
        tmp_path,
        rows="dk16_u",
        recipe={"max_steps": 1, "learning_rate": 1e-12, "average": 1, "seed": 7},
    )
    with pytest.MonkeyPatch.context() as patch:
        cheap(patch)
        run_command("table", job)
    one = observed_of(tmp_path / "run-scores")["dk16_unscaled"]
    assert one["seed"] == 7
    assert_close(AttentionState(**one["at_start"]), AttentionState(**one["trained"]), 1e-6)
    weights = load_file(step_dir(tmp_path / "run-scores" / "dk16_unscaled" / "seed-7", 1) / "model.safetensors")
    pairs = dev_pairs(tmp_path / "run-scores" / "dk16_unscaled" / "seed-7")
    assert_close(AttentionState(**one["at_start"]), plain_state(weights, pairs, d_k=16, score=Score.unscaled), 1e-3)


def table_of(output: Path) -> Table:
    """The table of the study, read again: nothing is trained or measured for it."""
    return from_json(Table, read(output / "table.json")["table"])


def test_scores_command_trains_nothing_twice(
    studied: tuple[Path, TableJob], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is observed comes out the same; only what is timed may differ."""
    output, job = studied
    cheap(monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/*/checkpoints/*/*")}
    observed = read(output / "table.json")["observed"]
    run_command("table", job)
    assert {path: path.stat().st_mtime_ns for path in output.glob("*/*/checkpoints/*/*")} == before
    assert read(output / "table.json")["observed"] == observed
    assert capsys.readouterr().out == (output / "table.md").read_text()


@contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    """The file holds something else, or is not there."""
    kept = path.read_bytes()
    try:
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        yield
    finally:
        path.write_bytes(kept)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("checkpoints/step-00000003/ema.safetensors", b"damage", CheckpointError),
        ("checkpoints/step-00000003/MANIFEST.json", None, CheckpointError),
        ("tokenizer.model", b"damage", InputError),
        ("hypotheses/dev.src", None, InputError),
    ],
)
def test_study_reports_a_damaged_run_and_keeps_the_others(
    studied: tuple[Path, TableJob],
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    content: bytes | None,
    error: type[Exception],
) -> None:
    """The checkpoint of step 2 is whole, but is not what was trained."""
    output, job = studied
    cheap(monkeypatch)
    with damaged(output / "dk8_additive" / "seed-1" / name, content):
        study, errors = study_scores(job, table_of(output))

    (found,) = errors
    assert isinstance(found, error)
    assert name in str(found)
    assert "\n" not in str(found)
    assert [one.row for one in study.observed] == ["dk8_scaled", "dk32_unscaled"]
    assert [row.errors for row in study.table.rows] == [[], [str(found)], []]
    assert [len(row.runs) for row in study.table.rows] == [1, 1, 1], "its BLEU is what it was"
    assert f"\n- {plain('dk8_additive')} failed: {plain(str(found))}" in format_study(study)


def test_scores_command_writes_the_study_before_it_reports_a_damaged_run(
    studied: tuple[Path, TableJob], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, job = studied
    cheap(monkeypatch)
    table = table_of(output)
    monkeypatch.setattr(tables, "make_table", lambda job, asked: (table, []))
    kept = (output / "table.json").read_bytes()
    with (
        damaged(output / "dk8_additive" / "seed-1" / "tokenizer.model", b""),
        pytest.raises(InputError, match="not a SentencePiece model"),
    ):
        run_command("table", job)

    text = capsys.readouterr().out
    assert text == (output / "table.md").read_text()
    assert f"\n- {plain('dk8_additive')} failed: " in text
    (output / "table.json").write_bytes(kept)


def test_study_without_a_single_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row failed: the table says so, and what needs no run is measured."""
    cheap(monkeypatch)
    job = scores_job(tmp_path, rows="dk8")
    job = replace(job, data=replace(job.data, train=replace(job.data.train, src="nowhere.en")))
    with pytest.raises(InputError, match=r"nowhere\.en"):
        run_command("table", job)
    text = (tmp_path / "run-scores" / "table.md").read_text()
    assert text.count(" failed: ") == 3
    assert "## Time and memory of one layer" in text


# ---- what is said of it ---------------------------------------------------------------------------------------------


def measured(bleu: float | None, seed: int = 1) -> Measured:
    found = {} if bleu is None else {"test": Interval(bleu, half_width=0.6, signature="nrefs:1")}
    return Measured(seed, "runs/x", 5.0, 10.0, found, 65_000_000, 10, 1e15, 120.0)


def state(variance: float = 1.0, softmax: float = 0.5, weights: float = 0.25) -> AttentionState:
    return AttentionState(variance=variance, entropy=0.75, softmax_gradient=softmax, weight_gradient=weights)


def study_of(
    bleu: dict[str, list[float | None]],
    states: dict[str, AttentionState] | None = None,
    costs: dict[tuple[str, int, int], tuple[float, float]] | None = None,
    heads: list[HeadsCost] | None = None,
) -> ScoreStudy:
    """A study with these rows, by `score d_k`, and a BLEU score for each seed."""
    rows = []
    observed = []
    for name, of_seeds in bleu.items():
        score, d_k = name.split()
        row = f"dk{d_k}_{score}"
        rows.append(TableRow(row, "", None, [measured(one, seed) for seed, one in enumerate(of_seeds, 1)], []))
        at_start = (states or {}).get(name, state())
        observed += [
            Observed(row, seed, Score[score], int(d_k), at_start, state(2.0)) for seed in range(1, len(of_seeds) + 1)
        ]
    return ScoreStudy(
        table=Table("Scores", ["Corpus: none."], rows),
        observed=observed,
        costs=[ScoreCost(Score[score], d_k, n, *cost) for (score, d_k, n), cost in (costs or {}).items()],
        heads=heads or [],
        machine="cpu",
    )


# ---- how it is shown ------------------------------------------------------------------------------------------------


def test_write_study_writes_the_same_bytes_for_the_same_study(tmp_path: Path) -> None:
    for bleu in ({"additive 16": [20.0]}, {"scaled 8": [20.0], "unscaled 8": [19.0], "unscaled 64": [20.0]}):
        contents = []
        for _ in range(2):
            write_study(tmp_path, study_of({name: [*scores] for name, scores in bleu.items()}))
            contents.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
        assert contents[0] == contents[1]
        assert contents[0].keys() == {"table.json", "table.md", "table.csv"}


def test_format_study_shows_each_quantity_before_and_after_and_the_costs() -> None:
    """Means over seeds; d_k down, scores across."""
    costs = {("scaled", 8, 16): (1.25, 9.0), ("unscaled", 8, 16): (1.0, 9.0), ("additive", 8, 16): (3.5, 52.06)}
    before = {"scaled 8": state(12.34, 0.9876, 0.00123)}
    heads = [HeadsCost(8, 64, 2_147_483, 12.34), HeadsCost(1, 512, 2_147_480, 11.0)]
    study = study_of({"scaled 8": [20.0, 21.0], "unscaled 16": [20.0]}, before, costs, heads)
    second = study.observed[1]
    study.observed[1] = replace(second, at_start=replace(second.at_start, variance=14.34))
    text = format_study(study)
    for row in (
        *("| 8 | 13.3 → 2 |  |  |", "| 16 |  | 1 → 2 |  |"),  # the variance
        *("| 8 | 0.750 → 0.750 |  |  |", "| 8 | 0.988 → 0.500 |  |  |", "| 8 | 1.2e-03 → 2.5e-01 |  |  |"),
        "| 16 | 8 | 1.2 ms, 9.0 MiB | 1.0 ms, 9.0 MiB | 3.5 ms, 52.1 MiB |",
        "| 8 | 64 | 2,147,483 | 12.3 |",
        "| 1 | 512 | 2,147,480 | 11.0 |",
    ):
        assert row in text
