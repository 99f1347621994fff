"""What is left to rules is settled once, by static rules: layout, compilation, the slots of a packed batch."""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.corpora import read, run, tiny_job, write_corpus
from transformer.compute import has_compiler
from transformer.config.jobs import TrainJob
from transformer.config.settings import (
    AttentionKernel,
    Decay,
    Device,
    Kernels,
    LayoutKind,
    ModelConfig,
    Precision,
    Score,
    TrainConfig,
)
from transformer.data.plan import Batching, packed_capacities
from transformer.data.store import Store
from transformer.errors import InputError
from transformer.training import resolve
from transformer.training.resolve import batching_of, resolve_again, resolve_settings, warn_of_idle_ranks
from transformer.training.start import find_device

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has a GPU, 80 GB of memory and a compiler."""
    properties = type("Properties", (), {"total_memory": 80 * 2**30, "major": 9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("transformer.compute.gpu_obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 2**30, 80 * 2**30))
    monkeypatch.setattr(resolve, "has_compiler", lambda device: True)
    monkeypatch.setattr(resolve, "has_triton", lambda device: device.type == "cuda")


def job(model: dict[str, Any] | None = None, **recipe: Any) -> TrainJob:
    return TrainJob(model=ModelConfig(**model or {}), train=TrainConfig(**recipe))


def test_resolve_settings_on_a_cpu_packs_and_does_not_compile() -> None:
    resolved = resolve_settings(job(device=Device.cpu), 1)
    assert (resolved.layout, resolved.compile) == (LayoutKind.packed, False)


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_on_a_gpu_packs_and_compiles_the_base_model() -> None:
    resolved = resolve_settings(job(), 2)
    assert (resolved.device, resolved.precision) == (Device.cuda, Precision.bf16)
    assert (resolved.layout, resolved.compile) == (LayoutKind.packed, True)
    assert (resolved.max_tokens, resolved.micro_batch_multiple) == (32_768, 2)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ({}, {"precision": Precision.fp32}),
        ({"attention_dropout": 0.1}, {}),
        ({"score": Score.additive}, {}),
        ({"d_k": 64, "d_v": 32}, {}),
        ({"d_k": 12, "d_v": 12}, {}),
    ],
)
def test_resolve_settings_pads_what_has_no_packed_kernel(model: dict[str, Any], recipe: dict[str, Any]) -> None:
    assert resolve_settings(job(model, **recipe), 1).layout is LayoutKind.padded
    asked = resolve_settings(job(model, layout=LayoutKind.packed, **recipe), 1)
    assert (asked.layout, asked.compile) == (LayoutKind.packed, False)


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_pads_on_a_gpu_of_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    older = type("Properties", (), {"total_memory": 16 * 2**30, "major": 7})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: older)
    resolved = resolve_settings(job(precision=Precision.fp16), 1)
    assert (resolved.layout, resolved.compile, resolved.max_tokens) == (LayoutKind.padded, False, 8_192)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("recipe", "compiles"),
    [
        ({}, True),  # base: 100,000 steps
        ({"max_steps": 8_000}, False),  # Multi30k: it ends before compiling has paid
        ({"max_steps": 8_000, "cuda_graphs": False}, True),  # or not, where the host launches every kernel
        ({"max_steps": 1_000, "cuda_graphs": False}, False),  # the demo
        ({"max_steps": 1_000, "compile": True}, True),
        ({"compile": False}, False),
        ({"layout": LayoutKind.padded}, False),
        ({"layout": LayoutKind.padded, "compile": True}, True),
    ],
)
def test_resolve_settings_compiles_where_the_training_is_long(recipe: dict[str, Any], compiles: bool) -> None:
    assert resolve_settings(job(**recipe), 1).compile is compiles


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_says_why_batches_are_padded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    resolve_settings(job({"attention_dropout": 0.1}), 1)
    resolve_settings(job(precision=Precision.fp32), 1)
    resolve_settings(job({"d_v": 32}), 1)
    padded = [record.getMessage() for record in caplog.records if "padded" in record.getMessage()]
    assert padded == [
        "batches are padded: torch's kernel for packed ones has no dropout on weights (model.attention_dropout)",
        "batches are padded: torch's kernel for packed ones does not compute in fp32",
        "batches are padded: torch's kernel for packed ones needs d_k and d_v to be one multiple of 8 up to 256, "
        "not 64 and 32",
    ]


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_says_that_half_precision_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a T4, which has no bf16."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert resolve_settings(job(), 1).precision is Precision.fp32
    assert "train.precision=fp16 is several times as fast" in caplog.text


def test_resolve_settings_says_why_a_gpu_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in ("transformer.compute", "transformer.training.resolve"):
        monkeypatch.setattr(f"{module}.gpu_obstacle", lambda: "the NVIDIA driver here is for CUDA 12.4")
    assert resolve_settings(job(), 1).device is Device.cpu
    assert caplog.messages == ["training on the CPU: the NVIDIA driver here is for CUDA 12.4"]
    with pytest.raises(InputError, match=r"^device=cuda, but the NVIDIA driver here is for CUDA 12\.4$"):
        resolve_settings(job(device=Device.cuda), 1)


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_on_amd_is_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    resolved = resolve_settings(job(), 1)
    assert (resolved.layout, resolved.compile, resolved.attention_kernel) == (LayoutKind.padded, False, None)
    assert "this package is untested on AMD GPUs" in caplog.text
    assert "torch's kernel for packed ones needs an NVIDIA GPU since Ampere" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_does_not_compile_additive_attention() -> None:
    assert not resolve_settings(job({"score": Score.additive}, compile=True), 1).compile


@pytest.mark.parametrize("decay", [decay.name for decay in Decay if decay.ends_at_the_last_step])
def test_resolve_settings_says_that_a_rate_never_falls(decay: str, caplog: pytest.LogCaptureFixture) -> None:
    said = "train.warmup_steps=500, but train.max_steps=400: the rate never falls"
    resolve_settings(job(device=Device.cpu, decay=Decay[decay], warmup_steps=500, max_steps=400, learning_rate=1e-3), 1)
    assert said in caplog.text
    caplog.clear()
    resolve_settings(job(device=Device.cpu, decay=Decay[decay], warmup_steps=300, max_steps=400, learning_rate=1e-3), 1)
    resolve_settings(job(device=Device.cpu, warmup_steps=500, max_steps=400), 1)
    assert caplog.text == ""


def test_warn_of_idle_ranks_where_a_step_has_fewer_micro_batches_than_there_are_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = resolve_settings(job(device=Device.cpu, max_tokens=4096, tokens_per_step=8000), 1)
    warn_of_idle_ranks(alone, tokens_per_step=8000, ranks=2)
    assert caplog.text == ""
    warn_of_idle_ranks(alone, tokens_per_step=8000, ranks=3)
    assert "a step has 2 micro-batches for 3 ranks" in caplog.text
    assert "train.max_tokens=2667" in caplog.text
    caplog.clear()
    warn_of_idle_ranks(replace(alone, micro_batch_multiple=3), tokens_per_step=8000, ranks=3)
    assert caplog.text == ""


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_does_what_is_asked_for() -> None:
    resolved = resolve_settings(job(layout=LayoutKind.padded, compile=False), 1)
    assert (resolved.layout, resolved.compile) == (LayoutKind.padded, False)


# ---- this package's own kernels --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_takes_kernels_that_no_gpu_has_run_only_when_asked_for() -> None:
    resolved = resolve_settings(job(), 1)
    assert (resolved.attention_kernel, resolved.loss_rows) == (AttentionKernel.varlen, None)
    assert resolve_settings(job({"score": Score.additive}), 1).attention_kernel is None
    assert resolve_settings(job(device=Device.cpu), 1).attention_kernel is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ({}, {}),
        ({"attention_dropout": 0.1}, {}),  # which torch's kernel has not
        ({}, {"precision": Precision.fp32}),
        ({"d_k": 64, "d_v": 32}, {}),
    ],
)
def test_resolve_settings_takes_triton_for_attention_and_loss(model: dict[str, Any], recipe: dict[str, Any]) -> None:
    resolved = resolve_settings(job(model, kernels=Kernels.triton, **recipe), 1)
    assert resolved.attention_kernel is AttentionKernel.triton
    assert resolved.loss_rows is not None
    assert (resolved.layout, resolved.compile) == (LayoutKind.packed, True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [
        ({"score": Score.additive}, {}, "does not support model.score=additive"),
        ({"d_k": 256}, {}, "heads of at most 128, and here they have 256"),
        ({}, {"precision": Precision.fp64}, "does not support train.precision=fp64"),
    ],
)
def test_resolve_settings_refuses_triton_where_it_cannot(
    model: dict[str, Any], recipe: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=rf"^train\.kernels=triton .*{message}: set it to torch$"):
        resolve_settings(job(model, kernels=Kernels.triton, **recipe), 1)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kernels", [Kernels.triton, Kernels.fused])
def test_resolve_settings_refuses_kernels_without_triton_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    monkeypatch.setattr(resolve, "has_triton", lambda device: False)
    with pytest.raises(InputError, match=rf"train\.kernels={kernels.name} needs Triton"):
        resolve_settings(job(kernels=kernels), 1)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("model", [{}, {"attention_dropout": 0.1}, {"d_k": 128, "d_v": 128}, {"d_k": 16, "d_v": 32}])
def test_resolve_settings_takes_whole_sentences_where_kernels_are_fused(model: dict[str, Any]) -> None:
    resolved = resolve_settings(job(model, kernels=Kernels.fused), 1)
    assert resolved.attention_kernel is AttentionKernel.sentences
    assert resolved.loss_rows is not None
    assert (resolved.layout, resolved.compile) == (LayoutKind.packed, True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("model", "recipe", "kernel", "why"),
    [
        ({"n_heads": 1, "d_k": 512, "d_v": 512}, {}, None, "heads of at most 128 on this GPU, and here they have 512"),
        ({"d_k": 256, "d_v": 256}, {}, AttentionKernel.varlen, "heads of at most 128"),
        ({"score": Score.additive}, {}, None, "has no additive scores"),
        ({}, {"precision": Precision.fp32}, None, "does not attend in fp32"),
    ],
)
def test_resolve_settings_takes_torchs_attention_where_fused_kernels_have_none(
    model: dict[str, Any],
    recipe: dict[str, Any],
    kernel: AttentionKernel | None,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one is table 3's A_h1."""
    caplog.set_level("INFO")
    resolved = resolve_settings(job(model, kernels=Kernels.fused, **recipe), 1)
    assert resolved.attention_kernel is kernel
    assert resolved.loss_rows is not None
    assert why in caplog.text


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_takes_wide_heads_whole_only_in_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "has_wide_tiles", lambda device: False)
    for width, kernel in ((64, AttentionKernel.sentences), (128, AttentionKernel.varlen)):
        model = {"d_k": width, "d_v": width}
        assert resolve_settings(job(model, kernels=Kernels.fused), 1).attention_kernel is kernel


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_gives_the_fused_loss_the_rows_that_fit_and_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An eighth of 8 GiB holds 14,464 rows of 37,000 in bf16; a run that goes on adds in the order of before."""
    made = job(kernels=Kernels.triton)
    resolved = resolve_settings(made, 1)
    assert resolved.loss_rows == 14_464
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    assert resolve_again(made, resolved).loss_rows == 14_464
    assert resolve_again(job(), resolved).loss_rows is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["avx2", "amx"])
def test_resolve_again_asks_anew_whether_to_compile_on_another_kind_of_device(
    kind: str, processor: Callable[[str], None]
) -> None:
    """On a CPU a run is compiled only if that is asked for, on a GPU by rule: in bf16, and not in fp32."""
    processor(kind)
    on_cpu, on_gpu = (job(device=device) for device in (Device.cpu, Device.cuda))
    asked = job(device=Device.cpu, layout=LayoutKind.padded, compile=True)
    refused = job(device=Device.cuda, compile=False)
    began = {name: resolve_settings(made, 1) for name, made in (("cpu", on_cpu), ("gpu", on_gpu), ("asked", asked))}
    assert resolve_again(on_gpu, began["cpu"]).compile == (kind == "amx"), "the run keeps its precision"
    assert not resolve_again(on_cpu, began["gpu"]).compile
    assert resolve_again(on_cpu, began["asked"]).compile, "kept, where the device is of the same kind"
    assert not resolve_again(on_gpu, resolve_settings(refused, 1)).compile
    padded = resolve_settings(job(device=Device.cuda, layout=LayoutKind.padded), 1)
    assert not padded.compile
    assert resolve_again(asked, padded).compile, "what a command sets is done"


@pytest.mark.usefixtures("gpu")
def test_resolve_settings_records_steps_wherever_a_gpu_can_replay_them(caplog: pytest.LogCaptureFixture) -> None:
    """Packed for one kernel, and not in fp16; a run that goes on is asked anew."""
    caplog.set_level(logging.INFO)
    resolved = resolve_settings(job(), 1)
    assert resolved.cuda_graphs
    assert resolve_again(job(), replace(resolved, cuda_graphs=False)).cuda_graphs
    assert not resolve_again(job(cuda_graphs=False), resolved).cuda_graphs
    assert not resolve_settings(job(cuda_graphs=False), 1).cuda_graphs
    assert not resolve_settings(job(layout=LayoutKind.padded), 1).cuda_graphs
    assert not resolve_settings(job(precision=Precision.fp16), 1).cuda_graphs
    assert not resolve_settings(job(device=Device.cpu), 1).cuda_graphs
    several = resolve_settings(job(max_steps=8_000), 2)
    assert (several.cuda_graphs, several.compile) == (False, True), (
        "ranks launch their steps, and compiling pays sooner"
    )
    assert resolve_settings(job(cuda_graphs=True), 2).cuda_graphs, "unless they are asked to replay them"
    assert "steps are not recorded" not in caplog.text
    assert not resolve_settings(job(layout=LayoutKind.padded, cuda_graphs=True), 1).cuda_graphs
    assert "steps are not recorded: CUDA graphs need packed batches" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_resolve_again_fits_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    """That is of the first start: its micro-batches stay."""
    caplog.set_level(logging.INFO)
    before = replace(resolve_settings(job(fit_memory=True), 1), max_tokens=12_345)
    assert resolve_again(job(fit_memory=True), before).max_tokens == 12_345
    assert "train.fit_memory works at the first start only: micro-batches still have 12345 tokens" in caplog.text


def test_find_device_is_that_of_the_run_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun on the CPU of a machine with a GPU, and resumed by a command that does not say so."""
    made = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"), max_steps=1, average=1, device=Device.cpu)
    by_rule = replace(made, train=replace(made.train, device=Device.auto))
    asked = replace(made, train=replace(made.train, device=Device.cuda))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr("transformer.compute.gpu_obstacle", lambda: None)
        assert find_device(by_rule).type == "cuda", "there is no run yet"
    run(made)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("transformer.compute.gpu_obstacle", lambda: None)
    assert find_device(by_rule).type == "cpu"
    assert find_device(asked).type == "cuda"

    # What is wrong with a run, `open_run` says. One without a checkpoint begins anew.
    record = (tmp_path / "a" / "run.json").read_text(encoding="utf-8")
    (tmp_path / "a" / "run.json").write_text("{}", encoding="utf-8")
    assert find_device(by_rule).type == "cuda"
    (tmp_path / "a" / "run.json").write_text(record, encoding="utf-8")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert find_device(by_rule).type == "cuda"


def test_resolve_settings_uses_no_kernel_of_gpus_on_a_cpu() -> None:
    asked = job(device=Device.cpu, kernels=Kernels.triton)
    resolved = resolve_settings(asked, 1)
    assert (resolved.attention_kernel, resolved.loss_rows) == (None, None)


def test_resolve_settings_without_a_compiler_is_eager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, the decision in run.json, and the run goes through."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not has_compiler(torch.device("cpu"))
    wanted: dict[str, Any] = {"layout": LayoutKind.padded, "compile": True}
    run_dir = run(tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"), max_steps=2, average=1, **wanted))
    assert read(run_dir / "run.json")["resolved"]["compile"] is False
    assert [m for m in caplog.messages if m.startswith("no compiler")] == [
        "no compiler is installed here: training is not compiled"
    ]


def test_resolve_settings_stays_for_a_run_that_goes_on(tmp_path: Path) -> None:
    """A packed run that resumes under auto stays packed; the other layout is another run."""
    corpus = write_corpus(tmp_path / "corpus")
    packed: dict[str, Any] = {"layout": LayoutKind.packed, "average": 1, "save_every": 1}
    run_dir = run(tiny_job(tmp_path / "a", corpus, max_steps=1, **packed))
    assert read(run_dir / "run.json")["resolved"]["layout"] == "packed"
    run(tiny_job(tmp_path / "a", corpus, max_steps=2, **packed))
    assert read(run_dir / "results.json")["steps"] == 2


def test_resolve_settings_takes_fewer_threads_where_a_run_goes_on_with_fewer_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that came later, or a smaller machine; more cores change nothing, and what is asked for is done."""
    corpus = write_corpus(tmp_path / "corpus")
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.delenv("OMP_NUM_THREADS")
    for step, cores, asked in ((1, 4, None), (2, 8, None), (3, 2, None), (4, 2, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        run(tiny_job(tmp_path / "a", corpus, max_steps=step, average=1, save_every=1, threads=asked))
    assert used[::3] == [4, 4, 2, 3]  # `train` and the test put back what they found
    assert "threads: 4 -> 2, as this rank has no more cores" in caplog.text


@pytest.mark.parametrize(
    ("lengths", "tokens", "most", "multiple", "expected"),
    [
        ([[10, 10]] * 9000, 4096, 5120, 1, (4096, 4096)),  # a step in one piece
        ([[10, 10]] * 9000, 4000, 5120, 1, (4096, 4096)),  # up to a multiple of 128
        ([[5, 10]] * 9000, 4096, 5120, 1, (2560, 4096)),  # half as many on the source side, and a quarter more
        ([[10, 5]] * 9000, 4096, 5120, 1, (4096, 2560)),
        ([[10, 9]] * 9000, 4096, 5120, 1, (4096, 4096)),  # nearly as many: no more than the step
        ([[10, 10]] * 9000, 25_000, 8192, 1, (6272, 6272)),  # four pieces of 6,250 and a sentence
        ([[10, 10]] * 9000, 25_000, 32_768, 4, (6272, 6272)),  # as many pieces as ranks
        ([[10, 10]] * 9000, 25_000, 5120, 4, (3200, 3200)),  # two for each rank: 3,125 and a sentence
        ([[300, 10], *[[10, 10]] * 99], 256, 512, 1, (384, 256)),  # room for the longest
        ([[300, 10], *[[10, 10]] * 9000], 25_000, 512, 1, (512, 512)),  # and never more than max_tokens
        ([[10, 10]] * 9, 25_000, 32_768, 1, (128, 128)),  # a corpus that is smaller than a step
    ],
)
def test_packed_capacities_by_hand(
    lengths: list[list[int]], tokens: int, most: int, multiple: int, expected: tuple[int, int]
) -> None:
    given = {"tokens_per_step": tokens, "max_tokens": most, "micro_batch_multiple": multiple}
    assert packed_capacities(np.array(lengths, np.int32), **given) == expected


@pytest.mark.parametrize(("layout", "capacities"), [("packed", (256, 256)), ("padded", None)])
def test_batching_of_fixes_the_shapes_of_a_run(layout: str, capacities: tuple[int, int] | None) -> None:
    """A third of 700 tokens and a sentence, rounded up; a CPU has no kernel for packed sentences."""
    made = job(device=Device.cpu, layout=LayoutKind[layout], tokens_per_step=700, max_tokens=900, seed=5)
    store = Store.from_pieces([[7] * 4] * 200, [[7] * 5] * 200)
    mixture = ((150, 1.0), (50, 2.5))
    expected = Batching(
        mixture=mixture,
        seed=5,
        tokens_per_step=700,
        max_tokens=900,
        micro_batch_multiple=3,
        capacities=capacities,
        kernel=None,
        is_one_shape=False,
    )
    resolved = resolve_settings(made, 3)
    assert batching_of(made, resolved, lengths=store.lengths, mixture=mixture) == expected
    on_gpu = batching_of(made, replace(resolved, device=Device.cuda), lengths=store.lengths, mixture=mixture)
    assert on_gpu == replace(expected, is_one_shape=True)
