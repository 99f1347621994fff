"""scripts/benchmark/hours.py: the hours of a training, from the rates of a machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.scripts import load_script
from transformer.config.settings import Device, LayoutKind, ModelConfig, Precision, TrainConfig
from transformer.errors import InputError
from transformer.records import Resolved
from transformer.tools.memory import estimate_memory
from transformer.tools.summary.job import SummaryJob

speed, hours = (load_script(f"benchmark/{name}") for name in ("speed", "hours"))

RATES = {"tokens_per_step": 25_000, "seconds_per_flop": 1e-12, "seconds_per_byte": 2e-10, "seconds_per_parameter": 3e-9}


def write_rates(path: Path, *items: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"rates": list(items), "processor": "any"}), encoding="utf-8")
    return path


def test_rates_add_up_what_each_part_of_a_step_takes() -> None:
    rates = speed.Rates(Device.cpu, Precision.bf16, 25_000, 2.0, 5.0, 11.0)
    assert rates.seconds(speed.Work(flops=3.0, bytes=7.0, parameters=13.0)) == 6.0 + 35.0 + 143.0


def test_step_work_has_the_logits_of_all_targets() -> None:
    """1,000 more pieces: 300 targets times 1,000 logits of 2 bytes, and 64,000 more parameters."""
    config = ModelConfig(n_layers=1, d_model=64, d_ff=128, n_heads=2)
    resolved = Resolved(Device.cpu, Precision.bf16, 1, 512, LayoutKind.packed, False, 1)

    def work(vocab_size: int) -> Any:
        return speed.step_work(config, vocab_size, resolved=resolved, source=200, target=300, mean_length=20.0)

    small, large = work(1_000), work(2_000)
    per_side = estimate_memory(config, 1_000, resolved=resolved, slots=250, mean_length=20.0, has_ema=False)
    assert small.bytes == per_side.activations + 300 * 1_000 * 2  # of (200 + 300) / 2 positions a side
    assert large.bytes - small.bytes == 300 * 1_000 * 2
    assert large.parameters - small.parameters == 64_000
    assert large.flops - small.flops == 6 * 300 * 1_000 * 64


def test_hours_follow_from_the_rates_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp32 = {"device": "cpu", "precision": "fp32", **RATES}
    bf16 = {"device": "cpu", "precision": "bf16", **RATES, "seconds_per_flop": 0.0, "seconds_per_byte": 0.0}
    path = write_rates(tmp_path / "rates.json", fp32, bf16)
    train = TrainConfig(precision=Precision.bf16, device=Device.cpu, max_steps=1_200)
    assert hours.predicted_speed(path, SummaryJob(train=train)) == pytest.approx(25_000 / (63_045_632 * 3e-9))

    # 63 million parameters at 3 ns each, 1,200 times: 0.06 hours.
    settings = ["experiment=base", "train.precision=bf16", "train.device=cpu", "train.max_steps=1200"]
    hours.main([str(path), *settings, "tokenizer.vocab_size=37000"])
    assert "  0.06 h   given: 132,179 target tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "cannot be read"),
        (json.dumps({"rates": []}), "it has no rates for cpu in fp64: set train.precision"),
        (
            json.dumps({"rates": [{"device": "cpu", "precision": "fp32", **RATES}]}),
            "only for cpu in fp32",
        ),
        (json.dumps({"rates": [{"device": "cpu", "precision": "fp64"}]}), "Rates has no key"),
        (
            json.dumps(
                {
                    "rates": [
                        {"device": "cpu", "precision": "fp64", **dict.fromkeys(RATES, 0.0), "tokens_per_step": 25_000}
                    ]
                }
            ),
            "not all 0",
        ),
        (json.dumps({"rates": [{"device": "cpu", "precision": "fp64", **RATES, "tokens_per_step": 9}]}), "of 9 tokens"),
        (json.dumps({"rates": [{"device": "cpu", "precision": "fp64", **RATES, "seconds_per_flop": -1.0}]}), "0 or"),
    ],
)
def test_hours_refuses_rates_that_it_cannot_use(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    train = TrainConfig(precision=Precision.fp64, device=Device.cpu)
    with pytest.raises(InputError) as error:
        hours.predicted_speed(path, SummaryJob(train=train))
    assert words in str(error.value)
    assert str(error.value).startswith(f"rates={path}: ")
