"""Device and precision are settled by static rules."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from transformer.compute import (
    at_least_fp32,
    autocast,
    avoid_cudnn_attention,
    default_batch_tokens,
    dtype_of,
    gpu_obstacle,
    loss_scaler,
    memory_errors_named,
    resolve_device,
    resolve_precision,
    seed_draws,
    to_autocast_dtype,
    untried_torch,
    uses_cudnn_attention,
    without_garbage_collection,
)
from transformer.config.settings import Device, Precision
from transformer.errors import InputError, StorageError

CPU = torch.device("cpu")
BF16_PROBES = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")


@pytest.mark.parametrize(
    ("asked", "gpu", "expected"),
    [
        (Device.auto, False, "cpu"),
        (Device.auto, True, "cuda"),
        (Device.cpu, True, "cpu"),
        (Device.cpu, False, "cpu"),
        (Device.cuda, True, "cuda"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, asked: Device, gpu: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("transformer.compute.gpu_obstacle", lambda: None)
    assert resolve_device(asked).type == expected


PIP_WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # of torch 2.13


@pytest.mark.parametrize(
    ("capability", "built_for", "said"),
    [
        ((9, 0), PIP_WHEEL, None),
        ((8, 9), PIP_WHEEL, None),  # Ada runs Ampere's code
        ((9, 0), ["sm_90a"], None),
        ((7, 0), PIP_WHEEL, "has no code for Tesla V100"),
        ((10, 3), ["sm_90"], "has no code for Tesla V100"),
        ((12, 0), ["sm_80", "compute_90"], None),  # compiled by the driver
    ],
)
def test_gpu_obstacle_is_a_card_that_torch_has_no_code_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built_for: list[str], said: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    found = gpu_obstacle()
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("torch_says", "said"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver",
            f"the NVIDIA driver here is for CUDA 12.4, and torch {torch.__version__} needs 13.0: update the driver",
        ),
        ("Found no NVIDIA driver on your system.", None),
        ("No CUDA GPUs are available", None),
    ],
)
def test_gpu_obstacle_is_a_driver_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, torch_says: str, said: str | None
) -> None:
    def init() -> None:
        raise RuntimeError(torch_says)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    found = gpu_obstacle()
    assert found is None if said is None else str(found).startswith(said)


def test_gpu_obstacle_is_another_build_or_another_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_obstacle() is None
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "Apple's GPU" in str(gpu_obstacle())
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    assert "is built for CPUs" in str(gpu_obstacle())


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [
        ("2.11.0+cu130", True),
        ("2.14.1", True),
        ("2.15.0+cu132", True),
        ("2.16.0+cu132", False),
        ("2.16.0a0+git12", False),
        ("3.0.0", False),
    ],
)
def test_untried_torch_is_one_that_is_newer(version: str, is_tried: bool) -> None:
    said = f"torch {version} is newer than 2.15, the newest that this package was tried with"
    assert untried_torch(version) == (None if is_tried else said)


@pytest.fixture
def cudnn_as_torch_has_it() -> Iterator[None]:
    before = uses_cudnn_attention()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("cudnn_as_torch_has_it")
def test_avoid_cudnn_attention_is_for_gpus() -> None:
    avoid_cudnn_attention(torch.device("cpu"))
    assert uses_cudnn_attention()

    avoid_cudnn_attention(torch.device("cuda", 1))
    assert not uses_cudnn_attention()


@pytest.mark.usefixtures("cudnn_as_torch_has_it")
def test_resolve_device_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("transformer.compute.gpu_obstacle", lambda: None)
    resolve_device(Device.auto)
    assert uses_cudnn_attention()


def test_memory_errors_named_says_what_to_change() -> None:
    with (
        pytest.raises(InputError, match=r"^out of GPU memory while training: lower train\.max_tokens$"),
        memory_errors_named("training", remedy="lower train.max_tokens"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError, match="another"), memory_errors_named("training", remedy=""):
        raise RuntimeError("another")


def test_memory_errors_named_says_that_no_thread_can_be_started() -> None:
    with (
        pytest.raises(StorageError, match=r"^translating: no thread can be started: "),
        memory_errors_named("translating", remedy="lower search.batch_tokens"),
    ):
        raise RuntimeError("Resource temporarily unavailable")


def test_memory_errors_named_knows_those_of_the_machine() -> None:
    """A CPU's allocator raises a plain RuntimeError."""
    for size in (2**50, 2**58):
        with (
            pytest.raises(InputError, match=r"^out of memory while training: lower train\.max_tokens$"),
            memory_errors_named("training", remedy="lower train.max_tokens"),
        ):
            torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "gib", "expected"),
    [("cpu", 0, 8_192), ("cuda", 24, 32_768), ("cuda", 80, 131_072)],
)
def test_default_batch_tokens_follows_the_memory(
    kind: str, gib: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert default_batch_tokens(torch.device(kind)) == expected


def test_resolve_device_refuses_a_gpu_that_is_absent_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device=cpu") as caught:
        resolve_device(Device.cuda)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("asked", [precision for precision in Precision if precision is not Precision.auto])
def test_resolve_precision_gives_what_is_asked_for(asked: Precision) -> None:
    assert resolve_precision(asked, CPU) is asked


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("avx512", [False, True])
def test_resolve_precision_auto_on_a_cpu_asks_the_hardware(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512: bool
) -> None:
    for probe, answer in zip(BF16_PROBES, (amx, avx512), strict=True):
        monkeypatch.setattr(torch.cpu, probe, lambda answer=answer: answer, raising=False)
    assert resolve_precision(Precision.auto, CPU) is (Precision.bf16 if amx or avx512 else Precision.fp32)


def test_resolve_precision_auto_without_the_private_probes_is_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in BF16_PROBES:
        monkeypatch.delattr(torch.cpu, probe, raising=False)
    assert resolve_precision(Precision.auto, CPU) is Precision.fp32


@pytest.mark.parametrize("supported", [False, True])
def test_resolve_precision_auto_on_a_gpu_asks_the_gpu(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: supported and not including_emulation
    )
    chosen = resolve_precision(Precision.auto, torch.device("cuda"))
    assert chosen is (Precision.bf16 if supported else Precision.fp32)


def test_dtype_of_parameters_is_never_of_half_the_bytes() -> None:
    kept = {precision: dtype_of(precision) for precision in Precision if precision is not Precision.auto}
    narrow = dict.fromkeys((Precision.fp32, Precision.bf16, Precision.fp16), torch.float32)
    assert kept == {**narrow, Precision.fp64: torch.float64}


def test_loss_scaler_scales_in_fp16_alone() -> None:
    scalers = {precision: loss_scaler(CPU, precision) for precision in Precision}
    assert [precision for precision, scaler in scalers.items() if scaler.is_enabled()] == [Precision.fp16]
    assert scalers[Precision.fp16].get_scale() == 65536.0
    assert scalers[Precision.bf16].get_scale() == 1.0


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        (Precision.bf16, torch.float32, torch.bfloat16),
        (Precision.fp16, torch.float32, torch.float16),
        (Precision.fp32, torch.float32, torch.float32),
        (Precision.fp64, torch.float64, torch.float64),
    ],
)
def test_autocast_multiplies_in_that_precision(precision: Precision, dtype: torch.dtype, expected: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with autocast(CPU, precision):
        assert (x @ x).dtype == expected
    assert (x @ x).dtype == dtype


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision.fp32, torch.float32),
        (Precision.fp64, torch.float32),
        (Precision.bf16, torch.bfloat16),
        (Precision.fp16, torch.float16),
    ],
)
def test_to_autocast_dtype_is_the_type_of_autocast_where_it_is_on(precision: Precision, expected: torch.dtype) -> None:
    x = torch.ones(2, dtype=torch.float32)
    with autocast(CPU, precision):
        assert to_autocast_dtype(x).dtype == expected
    assert to_autocast_dtype(x) is x


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_at_least_fp32_widens_half_precision_alone(dtype: torch.dtype, expected: torch.dtype) -> None:
    x = torch.ones(2, dtype=dtype)
    assert at_least_fp32(x).dtype == expected
    assert (at_least_fp32(x) is x) == (dtype == expected)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_without_garbage_collection_leaves_it_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with suppress(ValueError), without_garbage_collection():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_seed_draws_on_a_cpu_draws_what_manual_seed_does() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    seed_draws(7, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
