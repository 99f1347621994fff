"""Several ranks are one training: the same weights, the same files, and all of them end together."""

import contextlib
import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from support.corpora import (
    assert_same_tensors,
    is_verified,
    last_logged,
    overrides,
    results_of,
    run,
    run_command,
    step_dir,
    steps_of,
    tiny_job,
    wait_for,
    write_corpus,
)
from support.interventions import after_each_update, before_each_pass, before_each_update, spoilt_gradients
from support.paths import ROOT
from support.ranks import ranks
from support.tiers import tiers
from transformer import distributed, sealed_folder
from transformer.config.jobs import EvaluateJob, TrainJob
from transformer.config.settings import (
    DataConfig,
    Device,
    Format,
    LayoutKind,
    OptimizerKind,
    Precision,
    SearchConfig,
    SweepConfig,
)
from transformer.data import training_text
from transformer.decoding.translator import Translator
from transformer.distributed import Vote, Wait, World, _summary, choose_local_device, join_world
from transformer.errors import InputError, PeerError
from transformer.evaluation.sets import evaluate
from transformer.run_dir import RunDir
from transformer.training.step import Objective


def state(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def order(run_dir: Path) -> list[str]:
    return [line.split(b'"time"')[0].decode() for line in (run_dir / "metrics.jsonl").read_bytes().split(b"\n")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def job(run_dir: Path, corpus: DataConfig, **recipe: Any) -> TrainJob:
    settings = {"max_tokens": 100, "max_steps": 20, "save_every": 10, "validate_every": 10, "keep_last": 5, **recipe}
    return tiny_job(run_dir, corpus, precision=Precision.fp64, **settings)


RECIPES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "Muon": {"optimizer": OptimizerKind.muon, "weight_decay": 0.3, "clip_norm": 0.5},
}


@pytest.mark.ci  # test_elastic.py has one schedule of each in every run of the tests
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("sizes", [(2, 1), (4, 2), (2, 3), (1, 4)])
def test_train_goes_on_with_other_ranks(
    tmp_path: Path, corpus: DataConfig, sizes: tuple[int, int], recipe: dict[str, Any]
) -> None:
    """Twenty steps in float64 with dropout: three on `sizes[0]` ranks, then on `sizes[1]`, against the first alone."""
    first, second = sizes
    assert ranks(first, lambda: run(job(tmp_path / "straight", corpus, **recipe)), tmp_path) == [0] * first
    assert ranks(first, lambda: run(job(tmp_path / "moved", corpus, max_steps=3, **recipe)), tmp_path) == [0] * first
    assert ranks(second, lambda: run(job(tmp_path / "moved", corpus, **recipe)), tmp_path) == [0] * second
    assert_equal(tmp_path / "straight", tmp_path / "moved")


@pytest.mark.ci
def test_train_with_muon_goes_on_with_two_ranks(tmp_path: Path, corpus: DataConfig) -> None:
    """Stopped after three steps and resumed: to the last bit, in float32."""
    recipe = {**RECIPES["Muon"], "max_steps": 6, "average": 1}

    def train(name: str, **changed: Any) -> None:
        run(tiny_job(tmp_path / name, corpus, max_tokens=100, **{**recipe, **changed}))

    assert ranks(2, lambda: train("straight"), tmp_path) == [0, 0]
    assert ranks(2, lambda: train("stopped", max_steps=3), tmp_path) == [0, 0]
    assert ranks(2, lambda: train("stopped"), tmp_path) == [0, 0]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(step_dir(tmp_path / "straight", 6) / name, step_dir(tmp_path / "stopped", 6) / name)


@pytest.mark.ci
def test_train_step_of_packed_batches_is_shared_by_ranks(tmp_path: Path, corpus: DataConfig) -> None:
    """Begun on two ranks, then alone: the same, with dropout; and without it, what padding gives."""
    packed = {"layout": LayoutKind.packed}
    assert ranks(2, lambda: run(job(tmp_path / "two", corpus, **packed)), tmp_path) == [0, 0]
    assert ranks(2, lambda: run(job(tmp_path / "one", corpus, max_steps=3, **packed)), tmp_path) == [0, 0]
    run(job(tmp_path / "one", corpus, **packed))
    assert_equal(tmp_path / "one", tmp_path / "two")
    for name, layout in (("packed", LayoutKind.packed), ("padded", LayoutKind.padded)):
        exact = job(tmp_path / name, corpus, layout=layout)
        exact.model.dropout = 0.0
        run(exact)
    assert_equal(tmp_path / "packed", tmp_path / "padded")


def assert_equal(left: Path, right: Path) -> None:
    one, other = state(left, 20), state(right, 20)
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-9


@pytest.mark.faults
def test_train_stops_every_rank_at_a_signal_to_torchrun(tmp_path: Path, corpus: DataConfig) -> None:
    """torchrun passes SIGTERM on: the ranks commit the step in progress together, and the same command goes on."""
    settings = overrides(job(tmp_path / "a", corpus, max_steps=4000, save_every=4000, validate_every=4000))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def launch(*more: str) -> "subprocess.Popen[str]":
        arguments = [*command, "-m", "transformer", "train", *settings, *more]
        return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    first = launch()
    wait_for(lambda: last_logged(tmp_path / "a") > 0)
    first.send_signal(signal.SIGTERM)
    log, _ = first.communicate(timeout=120)
    assert first.returncode != 0
    assert len(steps_of(tmp_path / "a")) == 1, log
    done = steps_of(tmp_path / "a")[0]
    assert is_verified(step_dir(tmp_path / "a", done))
    assert f"step {done}: saved" in (tmp_path / "a" / "train.log").read_text(encoding="utf-8")
    second = launch(f"train.max_steps={done + 3}")
    log, _ = second.communicate(timeout=120)
    assert second.returncode == 0, log
    assert results_of(tmp_path / "a")["steps"] == done + 3


@pytest.mark.ci
def test_train_joins_the_ranks_on_the_device_of_the_run_that_resumes(tmp_path: Path, corpus: DataConfig) -> None:
    """Begun with train.device=cpu on a machine that has GPUs, fewer than ranks, and resumed without."""

    def action(steps: int, **recipe: Any) -> Callable[[], None]:
        def train() -> None:
            pytest.MonkeyPatch().setattr(torch.cuda, "is_available", lambda: True)
            pytest.MonkeyPatch().setattr(
                torch.accelerator, "current_accelerator", lambda **_: None
            )  # Adam asks its stream
            pytest.MonkeyPatch().setattr("transformer.compute.gpu_obstacle", lambda: None)
            run(job(tmp_path / "a", corpus, max_steps=steps, save_every=1, validate_every=2, average=1, **recipe))

        return train

    assert ranks(2, action(1, device=Device.cpu), tmp_path) == [0, 0], (tmp_path / "rank-0").read_text()
    assert ranks(2, action(2), tmp_path) == [0, 0], (tmp_path / "rank-0").read_text()
    assert results_of(tmp_path / "a")["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "seed"), [((4, 6), 1), ((4, 10), 2), ((9, 30), 3)])
def test_train_step_is_shared_by_ranks(tmp_path: Path, lengths: tuple[int, int], seed: int) -> None:
    """A step's micro-batches on one rank or on four, some of them idle: the same weights and moments to 1e-9."""
    corpus = write_corpus(tmp_path / "corpus", seed)
    corpus.filter.max_length = 40
    budget = {"tokens_per_step": 60 * lengths[0], "max_tokens": 20 * lengths[0]}
    for name, size in (("four", 4), ("two", 2)):
        start = job(tmp_path / name, corpus, max_steps=1, **budget)
        assert ranks(2, partial(run, start), tmp_path) == [0, 0]
        go_on = job(tmp_path / name, corpus, **budget)
        assert ranks(size, partial(run, go_on), tmp_path) == [0] * size
    assert_equal(tmp_path / "two", tmp_path / "four")


@pytest.mark.parametrize("kind", tiers([OptimizerKind.adam], [OptimizerKind.muon], pytest.mark.ci))
def test_train_step_takes_an_overflow_on_one_rank_for_one_on_all(
    tmp_path: Path, corpus: DataConfig, kind: OptimizerKind
) -> None:
    """In fp16 every rank skips the same updates at the same scales, though only one has met the infinity."""

    def action() -> None:
        trained: list[Objective] = []
        before: list[torch.Tensor] = []
        was_applied: list[bool] = []
        scales: list[float] = []
        update = torch.amp.GradScaler.update

        def copy_weights() -> None:
            before[:] = [parameter.detach().clone() for parameter in trained[-1].parameters()]

        def compare_weights() -> None:
            pairs = zip(before, trained[-1].parameters(), strict=True)
            was_applied.append(not all(torch.equal(old, new) for old, new in pairs))

        def note_scale(scaler: torch.amp.GradScaler) -> None:
            scales.append(scaler.get_scale())
            update(scaler)

        pytest.MonkeyPatch().setattr(torch.amp.GradScaler, "update", note_scale)  # this process ends with the test
        recipe: dict[str, Any] = {"optimizer": kind, "max_tokens": 100, "max_steps": 4, "average": 1}
        with (
            before_each_pass(trained.append),
            before_each_update(copy_weights),
            after_each_update(compare_weights),
            spoilt_gradients((3,) if os.environ["RANK"] == "1" else (), factor=math.inf),
        ):
            run(tiny_job(tmp_path / "a", corpus, precision=Precision.fp16, **recipe))
        sys.stdout.write(f"\n{list(zip(was_applied, scales, strict=True))}")

    assert ranks(2, action, tmp_path) == [0, 0]
    seen = [(tmp_path / name).read_text(encoding="utf-8").rpartition("\n")[2] for name in ("rank-0", "rank-1")]
    assert seen[0] == seen[1] == "[(True, 65536.0), (True, 65536.0), (False, 65536.0), (True, 32768.0)]"


@pytest.mark.ci
def test_train_writes_on_one_rank(tmp_path: Path, corpus: DataConfig) -> None:
    """Only rank 0 logs and prints results, and no step stands twice in what it writes."""

    def action() -> None:
        logging.getLogger("transformer").addHandler(logging.StreamHandler(sys.stdout))
        run(job(tmp_path / "a", corpus))

    assert ranks(2, action, tmp_path) == [0, 0]
    assert "BLEU" in said(tmp_path, 0)
    assert said(tmp_path, 1) == ""
    lines = [line for line in order(tmp_path / "a") if line]
    assert len(lines) == len(set(lines)) + 2  # a training line and a validation line at steps 10 and 20


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}").read_text(encoding="utf-8")


@pytest.mark.plugins
@pytest.mark.needs("sacremoses")
def test_ranks_share_the_test_sets_at_the_end_and_in_evaluate(tmp_path: Path, corpus: DataConfig) -> None:
    """With the scores of one rank, which it finds again; rank 0 alone writes, and prints."""
    train = job(tmp_path / "a", corpus, max_steps=10)
    train.search = SearchConfig(max_extra=4, batch_tokens=100)
    counts: list[int] = []
    translate = Translator.translate

    def counted(translator: Translator, texts: list[str], **options: Any) -> list[str]:
        counts.append(len(texts))
        return translate(translator, texts, **options)

    def action() -> None:
        run(train)
        sys.stdout.write(f"\n{counts}")

    evaluations = [
        EvaluateJob(run_dir=train.run_dir, threads=1, paper_bleu=True, format=Format.json),
        EvaluateJob(run_dir=train.run_dir, threads=1, sweep=SweepConfig(beam_size=[1, 3], length_penalty=[0.0, 1.0])),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Translator, "translate", counted)
        assert ranks(2, action, tmp_path) == [0, 0], [said(tmp_path, rank) for rank in range(2)]
    per_rank = [json.loads(said(tmp_path, rank).rpartition("\n")[2]) for rank in range(2)]
    n_texts = sum(len(Path(pair.src).read_text(encoding="utf-8").splitlines()) for pair in corpus.test.values())
    assert sum(map(sum, per_rank)) == n_texts
    assert min(map(sum, per_rank)) > n_texts // 3

    assert (
        evaluate(EvaluateJob(run_dir=train.run_dir, threads=1)).test_sets
        == RunDir(tmp_path / "a").read_results().test_sets
    )
    for evaluation in evaluations:
        alone = io.StringIO()
        with contextlib.redirect_stdout(alone):
            run_command("evaluate", evaluation)
        assert ranks(2, partial(run_command, "evaluate", evaluation), tmp_path) == [0, 0], said(tmp_path, 1)
        assert said(tmp_path, 0) == alone.getvalue() != ""
        assert said(tmp_path, 1) == ""


def test_train_ends_every_rank_at_bad_input(tmp_path: Path, corpus: DataConfig) -> None:
    broken = job(tmp_path / "a", corpus)
    broken.data = write_corpus(tmp_path / "corpus")
    Path(broken.data.train.tgt).write_text("one line too few\n", encoding="utf-8")
    assert ranks(2, lambda: run(broken), tmp_path) == [InputError.exit_status, PeerError.exit_status]
    assert not (tmp_path / "a").exists()


def test_world_any_ends_the_ranks_that_one_left_by_its_death(tmp_path: Path) -> None:
    def action() -> None:
        with join_world(torch.device("cpu")) as world:
            if world.rank == 1:
                os._exit(9)
            for _ in range(100):
                world.any(False)

    assert ranks(3, action, tmp_path) == [PeerError.exit_status, 9, PeerError.exit_status]


def test_train_has_rank_0_alone_read_the_corpus(tmp_path: Path, corpus: DataConfig) -> None:
    """The other ranks map the store without hashing it, and never open the raw text; they train all the same."""

    def action() -> None:
        opened: list[str] = []

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str | os.PathLike):
                opened.append(os.fspath(arguments[0]))

        sys.addaudithook(note)
        hashed: list[Path] = []

        def note_digest(digest: Callable[[Path], Any], path: Path) -> Any:
            hashed.append(path)
            return digest(path)

        for module, name in (sealed_folder, "digest_file"), (training_text, "digest_lines"):
            pytest.MonkeyPatch().setattr(module, name, partial(note_digest, getattr(module, name)))
        run(job(tmp_path / "a", corpus))
        texts = {corpus.train.src, corpus.train.tgt, corpus.dev.src, corpus.dev.tgt, corpus.test["test"].src}
        sys.stdout.write(f"\n{sorted({Path(path).name for path in opened if path in texts})}; {len(hashed) > 0}")

    assert ranks(2, action, tmp_path) == [0, 0]
    seen = [(tmp_path / name).read_text(encoding="utf-8").rpartition("\n")[2] for name in ("rank-0", "rank-1")]
    assert seen == ["['dev.de', 'dev.en', 'test.en', 'train.de', 'train.en']; True", "[]; False"]


def with_timeouts(step: float, long: float) -> None:
    """How long this process, which ends with the test, waits for its peers, in seconds."""
    distributed.TIMEOUTS[Wait.step] = timedelta(seconds=step)
    distributed.TIMEOUTS[Wait.work] = timedelta(seconds=long)


@pytest.mark.ci
@pytest.mark.parametrize("sleeper", tiers([1], [0], pytest.mark.ci))
def test_world_any_gives_up_after_the_timeout_of_a_step(tmp_path: Path, sleeper: int) -> None:
    """A rank that hangs before its vote is waited for no longer than a step may take: never for the long timeout."""
    given_up = tmp_path / "given-up"

    def action() -> None:
        with_timeouts(5, 600)
        try:
            with join_world(torch.device("cpu")) as world:
                assert not world.any(False)
                if world.rank == sleeper:
                    wait_for(given_up.exists)
                    os._exit(9)
                world.any(False)
        finally:
            given_up.touch()

    expected = [PeerError.exit_status, PeerError.exit_status]
    expected[sleeper] = 9
    assert ranks(2, action, tmp_path) == expected
    (error,) = (tmp_path / f"rank-{1 - sleeper}").read_text(encoding="utf-8").splitlines()
    assert error.startswith("PeerError: another rank does not answer: "), "it lives: no rank can be named"


@pytest.mark.ci
def test_from_rank0_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    """Rank 0 takes longer than a step may: the others wait without an error, and the votes go on."""

    def action() -> None:
        with_timeouts(5, 60)
        with join_world(torch.device("cpu")) as world:

            def slow() -> str:
                time.sleep(6)
                return "done"

            assert world.from_rank0(slow, wait=Wait.work) == "done"
            assert world.any(world.rank == 1)

    assert ranks(2, action, tmp_path) == [0, 0], [(tmp_path / f"rank-{n}").read_text() for n in range(2)]


@pytest.mark.parametrize("end", ["dies", pytest.param("hangs", marks=pytest.mark.faults)])
def test_train_step_calls_a_peer_that_does_not_answer_by_name(tmp_path: Path, corpus: DataConfig, end: str) -> None:
    """In the gradient's all-reduce, too: exit status 7, and no traceback."""

    given_up = tmp_path / "given-up"

    def action() -> None:
        def leave(_objective: Objective) -> None:
            if os.environ["RANK"] == "1":
                wait_for(lambda: end == "dies" or given_up.exists())
                os._exit(9)

        with_timeouts(60 if end == "dies" else 5, 60)
        try:
            with before_each_pass(leave):
                run(job(tmp_path / "a", corpus))
        finally:
            given_up.touch()

    assert ranks(2, action, tmp_path) == [PeerError.exit_status, 9], (tmp_path / "rank-0").read_text(encoding="utf-8")
    who = "rank 1" if end == "dies" else "another rank"
    assert f"PeerError: {who} does not answer: " in (tmp_path / "rank-0").read_text(encoding="utf-8")


def test_join_world_refuses_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="3 ranks on a machine with 2 GPUs"), join_world(torch.device("cuda")):
        pass


@pytest.mark.parametrize(("rank", "gpu"), [("0", 0), ("1", 1), ("2", 0)])
def test_choose_local_device_lets_ranks_share_a_gpu_where_the_environment_says_so(
    rank: str, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    for name, value in (("TRANSFORMER_SHARE_GPUS", "1"), ("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    choose_local_device(torch.device("cuda"))
    assert chosen == [torch.device("cuda", gpu)]


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ({"WORLD_SIZE": "2"}, r"variable RANK expected.* RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT$"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "variable MASTER_ADDR expected"),
        ({"WORLD_SIZE": "two"}, r"^WORLD_SIZE=two: must be the number of processes, a whole number$"),
    ],
)
def test_join_world_names_what_a_launcher_forgot(
    world: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message), join_world(torch.device("cpu")):
        pass


def test_join_world_leaves_no_process_group_where_the_ranks_do_not_meet(tmp_path: Path) -> None:
    """A second training of the same process could not begin otherwise."""

    def lose_the_network(**options: object) -> None:
        raise RuntimeError("[file.cpp:1] Connection closed by peer")

    def meet() -> None:
        pytest.MonkeyPatch().setattr(dist, "new_group", lose_the_network)
        with pytest.raises(PeerError, match="cannot reach each other"), join_world(torch.device("cpu")):
            pass
        assert not dist.is_initialized()

    assert ranks(2, meet, tmp_path) == [0, 0]


def test_world_passes_messages_and_sums_between_ranks(tmp_path: Path) -> None:
    def action() -> None:
        with join_world(torch.device("cpu")) as world:
            assert world.gather({"rank": world.rank, "text": "ü" * world.rank}) == [
                {"rank": n, "text": "ü" * n} for n in range(3)
            ]
            assert world.any(world.rank == 2)
            assert not world.any(False)
            assert world.sum(torch.tensor([1.0, world.rank], dtype=torch.float32)).tolist() == [3.0, 3.0]
            assert world.from_rank0(lambda: ["made by", world.rank]) == ["made by", 0]

    assert ranks(3, action, tmp_path) == [0, 0, 0], [(tmp_path / f"rank-{n}").read_text() for n in range(3)]


def test_vote_answers_a_step_later(tmp_path: Path) -> None:
    """Rank 1 asks for the end in the second step: both ranks hear of it in the third."""

    def action() -> None:
        with join_world(torch.device("cpu")) as world:
            vote = Vote(world)
            answers = [vote.ask(world.rank == 1 and step == 2) for step in range(1, 5)]
            assert answers == [False, False, True, False]
            assert not world.any(False), "a vote does not meet the question that is still on its way"

    assert ranks(2, action, tmp_path) == [0, 0], [(tmp_path / f"rank-{n}").read_text() for n in range(2)]


@pytest.mark.parametrize("end", tiers(["dies"], ["hangs"], pytest.mark.ci))
def test_vote_gives_up_on_a_peer_that_does_not_answer(tmp_path: Path, end: str) -> None:
    given_up = tmp_path / "given-up"

    def action() -> None:
        with_timeouts(60 if end == "dies" else 5, 60)
        try:
            with join_world(torch.device("cpu")) as world:
                vote = Vote(world)
                vote.ask(False)
                if world.rank == 1:
                    wait_for(lambda: end == "dies" or given_up.exists())
                    os._exit(9)
                for _ in range(3):
                    vote.ask(False)
        finally:
            given_up.touch()

    assert ranks(2, action, tmp_path) == [PeerError.exit_status, 9]


def test_world_of_one_rank_has_no_group() -> None:
    world = World(0, 1, {})
    vote = Vote(world)
    assert (vote.ask(False), vote.ask(True)) == (False, True)
    assert world.gather(["x"]) == [["x"]]
    assert (world.any(True), world.any(False)) == (True, False)
    assert world.from_rank0(lambda: 5) == 5
    module = torch.nn.Linear(1, 1)
    assert world.wrap(module) is module
    with contextlib.redirect_stdout(io.StringIO()), join_world(torch.device("cpu")) as found:
        assert found == world


def test_summary_says_what_gloo_says_and_no_more() -> None:
    told = "Connection closed by peer [127.0.0.1]:23987. Check the logs of the remote worker."
    found = _summary(RuntimeError(f"[/pytorch/gloo/transport/tcp/pair.cc:553] {told} GLHF! \U0001f3d6\ufe0f\nmore"))
    assert found == told
