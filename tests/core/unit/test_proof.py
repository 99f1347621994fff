"""The proof of a device: whatever computes wrong is left, and the training is the one of the way that is taken.

A CPU stands in for a GPU, with faults in the form of attention that packed sentences take there; what a GPU's own
kernel may do wrong, in half precision, is tried with the stand-in of support/varlen.py.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import register_backend

from support import varlen
from support.corpora import read, run, steps_of, tiny_job, write_corpus
from support.ranks import ranks
from support.tiers import tiers
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    AttentionKernel,
    DataConfig,
    Device,
    LayoutKind,
    ModelConfig,
    Precision,
    SearchConfig,
)
from transformer.data.batch import Batch
from transformer.data.prepare import prepare
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.loading import load
from transformer.decoding.proof import FULL, FUSED, PLAIN, in_way, prove_search, search_deviation
from transformer.distributed import World
from transformer.errors import InputError, Stopped
from transformer.model import attention
from transformer.model.transformer import DecoderState, Transformer
from transformer.numerics import TOLERANCES, DeviatesError
from transformer.records import Proof, Resolved
from transformer.run_dir import RunDir
from transformer.training import proof
from transformer.training.deviation import Gradient, UnrecordedError, compare
from transformer.training.proof import Prover, compiled_deviation, first_sound, name_of, stages_of
from transformer.training.resolve import batching_of, resolve_settings
from transformer.training.step import Computation, Objective

CPU = torch.device("cpu")
PACKED = "packed, not compiled, fp32"
PADDED = "padded, not compiled, fp32"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def padded(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The losses of the plain way."""
    return losses(run(job(tmp_path_factory.mktemp("padded") / "a", corpus, layout=LayoutKind.padded, proof=None)))


def job(folder: Path, corpus: DataConfig, **recipe: Any) -> TrainJob:
    settings = {"proof": True, "max_steps": 4, "validate_every": 4, "average": 1}
    return tiny_job(folder, corpus, **settings | recipe)


@pytest.mark.parametrize(
    ("name", "share", "half", "is_close"),
    [
        ("vector", 0.29, True, True),
        ("vector", 0.31, True, False),
        ("vector", 0.29, False, True),
        ("matrix", 0.14, True, True),
        ("matrix", 0.16, True, False),
        ("matrix", 0.009, False, True),
        ("matrix", 0.011, False, False),
    ],
)
def test_compare_takes_rounding_for_what_it_is(name: str, share: float, half: bool, is_close: bool) -> None:
    """A gradient that differs by this share of its norm, at a right angle to it."""
    plain = Gradient(2.0, {"vector": torch.tensor([3.0, 4.0]), "matrix": torch.tensor([[3.0, 4.0], [0.0, 0.0]])})
    wrong = plain.by_name[name] + share * plain.by_name[name].flip(-1) * torch.tensor([1.0, -1.0])
    found = Gradient(2.0, plain.by_name | {name: wrong})
    with nullcontext() if is_close else pytest.raises(DeviatesError, match=rf"gradient of {name} differs by {share} "):
        compare(found, plain, TOLERANCES[half])


@pytest.mark.parametrize(("factor", "is_close"), [(1.02, True), (1.1, False), (0.9, False)])
def test_compare_sees_a_matrix_whose_gradient_is_too_large(factor: float, is_close: bool) -> None:
    """In half precision, as a wrong factor in a kernel makes it: nearer than rounding is, but all in one direction."""
    plain = Gradient(2.0, {"matrix": torch.tensor([[3.0, 4.0], [0.0, 0.0]])})
    with (
        nullcontext()
        if is_close
        else pytest.raises(DeviatesError, match=r"^the norm of the gradient of matrix differs by 0\.1 \(0\.03 ")
    ):
        compare(Gradient(2.0, {"matrix": factor * plain.by_name["matrix"]}), plain, TOLERANCES[True])


def test_compare_leaves_out_a_gradient_that_is_next_to_nothing() -> None:
    plain = Gradient(2.0, {"vector": torch.tensor([1e-6, 0.0]), "matrix": torch.tensor([[3.0, 4.0], [0.0, 0.0]])})
    compare(Gradient(2.0, plain.by_name | {"vector": torch.tensor([0.0, 1e-6])}), plain, TOLERANCES[True])


def losses(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if "loss" in key or key == "step"} for row in rows]


def found(folder: Path) -> Any:
    return read(folder / "run.json")["proof"]


# ---- what may go wrong in a step ------------------------------------------------------------------------------------

Attend = Callable[..., Tensor]


def raises(attend: Attend, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")


def gives_nan(attend: Attend, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
    return attend(q, k, v, spec) * math.nan


def forgets_the_mask(attend: Attend, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
    return attend(q, k, v, replace(spec, causal=False))


def scales_wrong(attend: Attend, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
    return attend(q, k, v, replace(spec, scale=1.05 * spec.scale))


def drops_keys(attend: Attend, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
    kept = (torch.arange(len(k)) % 8 != 7)[:, None, None]
    return attend(q, torch.where(kept, k, 0.0), torch.where(kept, v, 0.0), spec)


@contextmanager
def faulty(fault: Callable[..., Tensor]) -> Iterator[None]:
    """Attention over packed sentences, with this fault."""
    sound = attention._attend_in_groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_attend_in_groups", lambda *given: fault(sound, *given))
        yield


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (raises, "RuntimeError: CUDA error: no kernel image is available"),
        pytest.param(gives_nan, "the loss differs by nan (0.0001 allowed)", marks=pytest.mark.ci),
        (forgets_the_mask, "the loss differs by "),
        pytest.param(scales_wrong, "the loss differs by ", marks=pytest.mark.ci),
        pytest.param(drops_keys, "the loss differs by ", marks=pytest.mark.ci),
    ],
)
def test_proof_leaves_what_computes_wrong_for_the_plain_way(
    fault: Callable[..., Tensor],
    said: str,
    padded: list[dict[str, Any]],
    corpus: DataConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loss curve is that of a training that never took the faulty way; one line says which, and why."""
    with faulty(fault):
        folder = run(job(tmp_path / "a", corpus))
        kept = found(folder)
        assert kept["way"] == PADDED
        assert list(kept["failures"]) == [PACKED]
        assert said in kept["failures"][PACKED]
        assert (kept["trying"], kept["search"]) == (None, FUSED)
        assert losses(folder) == padded
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and PACKED in r.getMessage()]
        assert len(warnings) == 1

        # A resume takes the same way, and compares nothing again.
        run(job(tmp_path / "a", corpus, max_steps=5))
        assert found(folder) == kept


def test_proof_finds_a_sound_way_sound_and_changes_nothing(corpus: DataConfig, tmp_path: Path) -> None:
    proven = run(job(tmp_path / "a", corpus))
    plain = run(job(tmp_path / "b", corpus, proof=None))
    assert losses(proven) == losses(plain)
    assert found(plain) is None
    assert found(proven)["way"] == PACKED
    assert 0.0 < found(proven)["deviation"] < 1e-4


def test_proof_sees_a_leak_that_the_gradient_does_not_show(
    monkeypatch: pytest.MonkeyPatch, corpus: DataConfig, tmp_path: Path
) -> None:
    monkeypatch.setattr(proof, "largest_leak", lambda model, batch: 0.5 if batch.source.dim() == 1 else 0.0)
    kept = found(run(job(tmp_path / "a", corpus)))
    assert kept["failures"] == {PACKED: "what is predicted before a token that changes differs by 0.5 (0.001 allowed)"}


def test_proof_ends_in_words_where_no_way_is_sound(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "largest_leak", lambda model, batch: math.nan)
    with pytest.raises(
        InputError, match=r"no training step computes correctly on .* \(packed.*; padded.*\): set train.device=cpu"
    ):
        run(job(tmp_path / "a", corpus))


def test_proof_ends_in_words_where_the_device_computes_nothing(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors ..."
        )

    monkeypatch.setattr(proof, "plain_gradient", fail)
    with pytest.raises(
        InputError, match=r"not even a plain step computes correctly on .* \(CUDA error: no kernel .*device\): set tr"
    ):
        run(job(tmp_path / "a", corpus))


def test_proof_takes_another_way_after_one_that_ended_the_process(
    padded: list[dict[str, Any]], corpus: DataConfig, tmp_path: Path
) -> None:
    def end(*_: Any) -> Tensor:
        os._exit(9)

    child = os.fork()
    if child == 0:
        with faulty(end):
            run(job(tmp_path / "a", corpus))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert found(tmp_path / "a")["trying"] == PACKED

    folder = run(job(tmp_path / "a", corpus))
    assert found(folder)["way"] == PADDED
    assert found(folder)["failures"] == {PACKED: "the process died while trying it"}
    assert losses(folder) == padded


def test_proof_does_not_hold_a_signal_against_a_way(corpus: DataConfig, tmp_path: Path) -> None:
    def interrupt(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    with faulty(interrupt), pytest.raises(KeyboardInterrupt):
        run(job(tmp_path / "a", corpus))
    assert (found(tmp_path / "a")["trying"], found(tmp_path / "a")["failures"]) == (None, {})


@pytest.mark.ci
def test_proof_takes_the_same_way_on_every_rank(corpus: DataConfig, tmp_path: Path) -> None:
    """Of two ranks, the second one's attention raises, in a step and in a search."""

    def train() -> None:
        if os.environ["RANK"] == "0":
            run(job(tmp_path / "a", corpus))
        else:
            with faulty(raises), faulty_search(search_raises):
                run(job(tmp_path / "a", corpus))

    assert ranks(2, train, tmp_path) == [0, 0]
    kept = found(tmp_path / "a")
    assert (kept["way"], kept["failures"]) == (PADDED, {PACKED: "it failed on another rank"})
    assert kept["search"] == PLAIN
    plain = job(tmp_path / "b", corpus, proof=None, layout=LayoutKind.padded)
    assert ranks(2, lambda: run(plain), tmp_path) == [0, 0]
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.fake_gpu
def test_proof_of_kernels_in_half_precision(tmp_path: Path) -> None:
    """The stand-in of a GPU's kernel in bf16, sound and with each fault: see support/varlen.py."""
    packed, padded = "packed (varlen), not compiled, bf16", "padded, not compiled, bf16"
    [ways] = varlen.forked(1, varlen.proof, tmp_path)
    assert ways == {"sound": packed, **dict.fromkeys(("raises", "NaN", "not causal", "scale", "keys dropped"), padded)}


def test_proof_compares_as_much_as_memory_holds(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same way is taken, and the losses are those of a training that compares nothing."""
    asked = []

    def runs_out(attend: Attend, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
        asked.append(len(q))
        if len(q) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return attend(q, k, v, spec)

    with faulty(runs_out):
        folder = run(job(tmp_path / "a", corpus, max_tokens=256))
    assert max(asked) > 600
    assert (found(folder)["way"], found(folder)["failures"]) == (PACKED, {})
    assert losses(folder) == losses(run(job(tmp_path / "b", corpus, max_tokens=256, proof=None)))


def test_proof_that_runs_out_of_memory_holds_nothing_against_a_way(corpus: DataConfig, tmp_path: Path) -> None:
    """Not even the longest pair fits: one line says what to change, and the same command goes on."""

    def runs_out(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with (
        faulty(runs_out),
        pytest.raises(InputError, match=r"^out of GPU memory while the device is tried: lower train"),
    ):
        run(job(tmp_path / "a", corpus))
    assert (found(tmp_path / "a")["trying"], found(tmp_path / "a")["failures"]) == (None, {})
    folder = run(job(tmp_path / "a", corpus))
    assert losses(folder) == losses(run(job(tmp_path / "b", corpus, proof=None)))


# ---- what may go wrong where steps are replayed ---------------------------------------------------------------------

REPLAYED = Resolved(
    device=Device.cuda,
    precision=Precision.bf16,
    threads=1,
    max_tokens=4_096,
    layout=LayoutKind.packed,
    compile=True,
    micro_batch_multiple=1,
    attention_kernel=AttentionKernel.varlen,
    cuda_graphs=True,
)
STAGES = [f"packed (varlen), {stage}, bf16" for stage in ("not compiled", "compiled", "compiled, CUDA graphs")]


def ways_tried(known: Proof | None, failing: dict[str, Exception]) -> tuple[list[str], str, Proof]:
    """The stages that are compared, of which some fail; the way that is taken; and what is kept."""
    kept: list[Proof] = []
    prover = Prover(CPU, World(0, 1, {}), known=known, keep=kept.append, compares=True)
    if known is not None:
        prover.proof = known  # of this device
    compared: list[str] = []

    def deviation(name: str) -> float:
        compared.append(name)
        if name in failing:
            raise failing[name]
        return 0.01

    def build(way: Resolved) -> str:
        for stage in stages_of(way):
            prover.prove(stage, partial(deviation, name_of(stage)))
        return name_of(way)

    try:
        taken = first_sound(prover, REPLAYED, build)
    except Stopped as error:
        taken = f"Stopped: {error}"
    return compared, taken, prover.proof


def test_first_sound_compares_each_stage_once_and_goes_on_with_what_is_left() -> None:
    assert ways_tried(None, {})[:2] == (STAGES, STAGES[2])

    # A compiler that computes wrong: replayed without it. Nothing is compared twice.
    without = "packed (varlen), not compiled, CUDA graphs, bf16"
    compared, taken, kept = ways_tried(None, {STAGES[1]: DeviatesError("the loss is 3")})
    assert (compared, taken) == ([*STAGES[:2], without], without)
    assert kept.failures == {STAGES[1]: "the loss is 3"}

    # Graphs that do: compiled without them. A resume, which is resolved to want both, remembers what was found.
    compared, taken, kept = ways_tried(None, {STAGES[2]: DeviatesError("its gradient differs by 0.5")})
    assert (compared, taken) == (STAGES, STAGES[1])
    assert ways_tried(kept, {})[:2] == ([], STAGES[1])


def test_prove_ends_the_process_in_which_a_step_could_not_be_recorded() -> None:
    """Torch's allocator is left in disorder. The same command takes the way that was sound before."""
    _, taken, kept = ways_tried(None, {STAGES[2]: UnrecordedError("operation not permitted")})
    assert taken == (
        "Stopped: a step could not be recorded (operation not permitted): the same command goes on, with every kernel "
        "launched by the host"
    )
    assert kept.failures == {STAGES[2]: "operation not permitted"}
    assert ways_tried(kept, {})[:2] == ([], STAGES[1])


@pytest.mark.parametrize("size", tiers([1], [2], pytest.mark.ci))
def test_train_ends_with_a_commit_where_a_step_could_not_be_recorded(
    size: int, corpus: DataConfig, tmp_path: Path
) -> None:
    """On the last rank, in the third step: nothing is lost, run.json has it, and the same command goes on."""

    def train() -> None:
        is_last = os.environ["RANK"] == str(size - 1)
        rates: list[float] = []
        update = Computation.update

        def counted(computation: Computation, rate: float) -> Any:
            rates.append(rate)
            return update(computation, rate)

        def fail(_: Computation) -> str | None:
            return "operation not permitted" if is_last and len(rates) >= 3 else None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Computation, "failure", property(fail))
            patch.setattr(Computation, "update", counted)
            run(made)

    made = job(tmp_path / "a", corpus, proof=None, max_steps=8, validate_every=8)
    assert ranks(size, train, tmp_path) == [75] * size
    (step,) = steps_of(tmp_path / "a")
    assert step == (3 if size == 1 else 4)  # ranks agree a step later
    assert found(tmp_path / "a")["failures"] == {PACKED: "operation not permitted"}
    said = (tmp_path / f"rank-{size - 1}").read_text(encoding="utf-8")
    assert f"a step could not be recorded (operation not permitted), step {step} is saved: the same command" in said

    assert ranks(size, lambda: run(made), tmp_path) == [0] * size
    undisturbed = job(tmp_path / "b", corpus, proof=None, max_steps=8, validate_every=8)
    assert ranks(size, lambda: run(undisturbed), tmp_path) == [0] * size
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


# ---- what may go wrong in a compiler --------------------------------------------------------------------------------


@register_backend
def failing(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    raise OSError("undefined symbol: cuModuleGetFunction")


@register_backend
def doubling(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    return lambda *given: [2.0 * output if output.is_floating_point() else output for output in graph(*given)]


@register_backend
def greedy(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    def runs_out(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return runs_out


@register_backend
def sound(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    return graph.forward


@pytest.mark.fake_gpu
@pytest.mark.parametrize(
    ("backend", "is_kept", "said"),
    [("failing", False, "undefined symbol"), ("doubling", False, "the loss differs by "), ("sound", True, "")],
)
def test_proof_leaves_a_compiler_that_fails(
    backend: str, is_kept: bool, said: str, corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded batches, which a CPU compiles, too; what is then trained is the uncompiled step."""
    torch._dynamo.reset()
    compile_by = Objective.compile
    monkeypatch.setattr(Objective, "compile", lambda self: compile_by(self, backend=backend))
    monkeypatch.setattr("transformer.training.resolve.has_compiler", lambda device: True)
    folder = run(job(tmp_path / "a", corpus, layout=LayoutKind.padded, compile=True))

    compiled = "padded, compiled, fp32"
    assert found(folder)["way"] == (compiled if is_kept else PADDED)
    assert said in found(folder)["failures"].get(compiled, "")
    assert RunDir(folder).read_record().resolved.compile is is_kept
    if not is_kept:
        plain = run(job(tmp_path / "b", corpus, layout=LayoutKind.padded, proof=None))
        assert losses(folder) == losses(plain)


@pytest.mark.fake_gpu
def test_proof_of_a_compiled_step_that_does_not_fit_names_the_key(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command goes on once it does."""
    torch._dynamo.reset()
    backend = "greedy"
    compile_by = Objective.compile
    monkeypatch.setattr(Objective, "compile", lambda self: compile_by(self, backend=backend))
    monkeypatch.setattr("transformer.training.resolve.has_compiler", lambda device: True)
    settings = {"layout": LayoutKind.padded, "compile": True}
    with pytest.raises(
        InputError, match=r"^out of GPU memory while the device is tried: lower train.max_tokens \(padded, co"
    ):
        run(job(tmp_path / "a", corpus, **settings))
    assert found(tmp_path / "a")["failures"] == {}

    torch._dynamo.reset()
    backend = "sound"
    folder = run(job(tmp_path / "a", corpus, **settings))
    assert found(folder)["way"] == "padded, compiled, fp32"
    assert losses(folder) == losses(run(job(tmp_path / "b", corpus, **settings, proof=None)))


class OtherMasks(torch.nn.Module):
    """A sound step that draws other dropout masks than an uncompiled one with the same seed."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.module = objective

    def forward(self, batch: Batch) -> Any:
        torch.manual_seed(torch.initial_seed() + 1000 * self.round)
        return self.module(batch)

    round = 0


def test_proof_does_not_take_other_masks_for_another_computation(corpus: DataConfig, tmp_path: Path) -> None:
    """In a step of 300 tokens, whose loss other masks change by a percent."""
    made = job(tmp_path / "a", corpus, precision=Precision.bf16)
    resolved = resolve_settings(made, 1)
    store = prepare(made).store
    batching = batching_of(made, resolved, lengths=store.lengths, mixture=((len(store), 1.0),))
    torch.manual_seed(1)
    objective = Objective(Transformer(made.model, made.tokenizer.vocab_sizes), 0.1).train()
    step = OtherMasks(objective)

    refused = 0
    for step.round in range(1, 13):
        try:
            compiled_deviation(
                resolved,
                objective=objective,
                parallel=step,
                store=store,
                batching=batching,
                device=torch.device("cpu"),
            )
        except DeviatesError:
            refused += 1
    assert refused == 0


# ---- what may go wrong in a search ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(job(tmp_path_factory.mktemp("trained") / "a", corpus, proof=None))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_search_deviation_is_rounding(trained: Path, precision: Any) -> None:
    decoder = load(trained, precision=precision).decoder
    deviation = search_deviation(decoder)
    assert deviation < {"fp32": 1e-5, "bf16": 0.03, "fp64": 1e-12}[precision]
    assert search_deviation(in_way(decoder, FULL)) < 1e-5


Sdpa = Callable[..., Tensor]


def search_raises(sdpa: Sdpa, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def search_gives_nan(sdpa: Sdpa, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return sdpa(q, k, v, **how) * math.nan


def search_forgets_the_mask(sdpa: Sdpa, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return sdpa(q, k, v, **how | {"attn_mask": None})


def search_scales_wrong(sdpa: Sdpa, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return sdpa(q, k, v, **how | {"scale": 1.05 * how["scale"]})


def search_drops_keys(sdpa: Sdpa, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    kept = (torch.arange(k.shape[2]) % 8 != 7)[:, None]
    return sdpa(q, torch.where(kept, k, 0.0), torch.where(kept, v, 0.0), **how)


@contextmanager
def faulty_search(fault: Callable[..., Tensor]) -> Iterator[None]:
    """Attention of one query of a sentence, as a greedy search has it, with this fault where torch chooses a kernel."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(q: Tensor, *given: Any, **how: Any) -> Tensor:
        is_fused = torch.backends.cuda.flash_sdp_enabled() and q.shape[2] == 1 and not torch.is_grad_enabled()
        return fault(sdpa, q, *given, **how) if is_fused else sdpa(q, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        yield


@pytest.fixture(scope="module")
def validated(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a training measures whose searches are plain."""
    return measured(run(job(tmp_path_factory.mktemp("validated") / "a", corpus)))


def measured(folder: Path) -> list[dict[str, Any]]:
    """Losses, and what the searches of the validation found."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if "loss" in key or "dev/" in key} for row in rows]


@pytest.mark.parametrize(
    "fault",
    tiers(
        [search_raises, search_forgets_the_mask],
        [search_gives_nan, search_scales_wrong, search_drops_keys],
        pytest.mark.ci,
    ),
)
def test_train_takes_plain_searches_where_fused_ones_compute_wrong(
    fault: Callable[..., Tensor], validated: list[dict[str, Any]], corpus: DataConfig, tmp_path: Path
) -> None:
    with faulty_search(fault):
        folder = run(job(tmp_path / "a", corpus))
    assert (found(folder)["way"], found(folder)["search"]) == (PACKED, PLAIN)
    assert measured(folder) == validated


def test_train_takes_plain_searches_after_one_that_ended_the_process(
    validated: list[dict[str, Any]], corpus: DataConfig, tmp_path: Path
) -> None:
    child = os.fork()
    if child == 0:
        with faulty_search(lambda *given, **how: os._exit(9)):
            run(job(tmp_path / "a", corpus))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert found(tmp_path / "a")["trying"] == f"searches with {FUSED}"

    folder = run(job(tmp_path / "a", corpus))
    assert (found(folder)["way"], found(folder)["search"]) == (PACKED, PLAIN)
    assert found(folder)["failures"] == {f"searches with {FUSED}": "the process died while trying it"}
    assert measured(folder) == validated


def test_train_whose_search_runs_out_of_memory_says_so_and_goes_on(
    validated: list[dict[str, Any]], corpus: DataConfig, tmp_path: Path
) -> None:
    def runs_out(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with (
        faulty_search(runs_out),
        pytest.raises(InputError, match=r"^out of GPU memory while measuring the dev loss: lo"),
    ):
        run(job(tmp_path / "a", corpus))
    assert (found(tmp_path / "a")["trying"], found(tmp_path / "a")["failures"]) == (None, {})
    assert measured(run(job(tmp_path / "a", corpus))) == validated


@pytest.mark.parametrize("positions", [3, 32, 64])
def test_search_deviation_fits_into_few_positions(positions: int) -> None:
    """Where a translation does not end, forced decoding reads BOS and as many pieces."""
    torch.manual_seed(1)
    model = Transformer(ModelConfig(n_layers=1, d_model=32, d_ff=32, n_heads=2, max_positions=positions), 200)
    decoder = BatchedDecoder.of(model, SearchConfig(), device=torch.device("cpu"), precision=Precision.fp32)
    assert search_deviation(decoder) < 1e-5


def test_prove_search_leaves_a_fused_kernel_that_computes_wrong(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plain way does not use gives noise: torch is told not to take it, and the translations are right."""
    translator = load(trained, precision="fp32")
    texts = ["one two three", "four five six seven", "eight nine"]
    expected = translator.translate(texts)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def noisy(*given: Any, **how: Any) -> Tensor:
        out = sdpa(*given, **how)
        return out + torch.randn_like(out) if torch.backends.cuda.flash_sdp_enabled() else out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noisy)
    way = prove_search(translator.decoder)
    assert way == PLAIN
    assert replace(translator, decoder=in_way(translator.decoder, way)).translate(texts) == expected


def test_prove_search_ends_in_words_where_the_search_itself_is_wrong(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not see the position before it."""

    of_slots = DecoderState.slots

    def short(self: DecoderState) -> tuple[slice | Tensor, int]:
        if self.position == 3:
            self.past_mask[:, :, 2] = -torch.inf
        return of_slots(self)

    monkeypatch.setattr(DecoderState, "slots", short)
    with pytest.raises(InputError, match=r"no search computes correctly on .* \(fused attention: .*\): set device=cpu"):
        prove_search(load(trained, precision="fp64", beam_size=1).decoder)


def test_train_in_half_precision_has_its_searches_proven(corpus: DataConfig, tmp_path: Path) -> None:
    kept = found(run(job(tmp_path / "a", corpus, precision=Precision.bf16)))
    assert (kept["way"], kept["search"], kept["failures"]) == ("packed, not compiled, bf16", FUSED, {})
