"""What several rooms share: one thread, float64 where a test wants twelve digits, and a model that translates."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.machine import become_the_machine_that_is_asked_for, describe_machine, shuffle

CORES = len(os.sched_getaffinity(0))  # before another machine says that it has one
become_the_machine_that_is_asked_for()
sys.dont_write_bytecode = False  # workers, commands and the next run need not compile everything anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["OMP_NUM_THREADS"] = "1"  # what a test leaves to the machine; a second thread spins while it waits

import torch
import torch._dynamo  # which the first optimizer imports: a second less of each process that a test forks
import torch.utils.tensorboard

from support.translations import network, sentences, translator_with
from transformer.config.settings import TokenizerConfig
from transformer.data.tokenizer import Tokenizer, train_tokenizer
from transformer.decoding.translator import Translator


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for commands, ranks and signals for a tenth of their time."""
    return CORES + 1


def pytest_report_header() -> str | None:
    return describe_machine()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Once more, for -q has no header: with this line, the tests run as they have."""
    if (machine := describe_machine()) is not None:
        terminalreporter.write_line(machine)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shuffle(items)


def pytest_collection_finish() -> None:
    """Let the collector of garbage pass over what stays until the end: a twentieth of all the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test, and no fixture of a test, begins with what the one before has left.

    Tests are small: more threads only wait for each other, and sums keep one order. CTranslate2 shares OpenMP with
    torch, and by default asks it for all cores. A command shows its log lines: Hydra sets the level of the root, `main`
    that of the package.
    """
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("transformer").setLevel(logging.NOTSET)
    for needs in item.iter_markers("needs"):
        for package in needs.args:
            pytest.importorskip(package)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """A dead process loses nothing that it wrote; what a power cut would leave, its own tests judge by the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True, scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the hub's client keeps things: it looks when it is imported, whichever test does that."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        yield folder


@pytest.fixture
def in_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test runs in an empty folder: what a command does must not depend on what lies around it."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture
def float64() -> Iterator[None]:
    """Tensors and modules made in this test are float64, sinusoids included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Decides what torch says that this machine's processor multiplies in hardware, by a kind of processor's name.

    `avx2`: neither bf16 nor 8-bit integers; `vnni`: 8-bit integers; `amx`: both.
    """
    answers = {
        "_is_amx_tile_supported": ["amx"],
        "_is_avx512_bf16_supported": ["amx"],
        "_is_vnni_supported": ["vnni", "amx"],
        "_is_avx512_vnni_supported": ["vnni", "amx"],  # the same question by another name, in other versions
    }

    def choose(kind: str) -> None:
        for question, kinds in answers.items():
            monkeypatch.setattr(torch.cpu, question, lambda answer=kind in kinds: answer, raising=False)

    return choose


@pytest.fixture(scope="session")
def spm() -> bytes:
    return train_tokenizer(sentences(400), TokenizerConfig(vocab_size=60))


@pytest.fixture
def translator(spm: bytes) -> Translator:
    tokenizer = Tokenizer(spm)
    return translator_with(network(tokenizer.vocab_size, 1, torch.float64), tokenizer)


def pytest_configure() -> None:
    """In the background, or under nohup, tests would ignore Ctrl-C or SIGHUP, and so every command that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
