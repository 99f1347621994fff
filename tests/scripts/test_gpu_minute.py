"""`gpu.sh minute`: parts that hang, die or write garbage cost themselves alone, and numbers decide what they should."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.scripts import load_script
from transformer.config.jobs import TrainJob
from transformer.config.settings import Device, Kernels, LayoutKind, Precision, TrainConfig
from transformer.decoding import buffers

gpu, decisions, decode, measured, steps, variants = (
    load_script(f"benchmark/{name}") for name in ("gpu", "decisions", "decode", "measured", "steps", "variants")
)

RECORD = b'{"name": "speed", "milliseconds": 4.0}\n'
FAST = decisions.Decision(
    "fast",
    (decisions.Condition("a step", ("speed",), "milliseconds", "ms", most=5.0),),
    "it is the default",
    "it is not",
    ("kernels=triton",),
)


def part(program: str, seconds: float = 1.0, most: float = 60.0) -> Any:
    """A part that is this Python program, in a process of its own; argv[1] is where numbers go."""

    def run(place: Any) -> Any:
        status = gpu.call(place, [sys.executable, "-c", program, str(place.results)], place.limit)
        return gpu.Found(status, status == 0, "ran")

    return gpu.Part(run, seconds, most)


def append(line: bytes) -> str:
    return f"import sys; open(sys.argv[1], 'ab').write({line!r})"


@pytest.fixture
def minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """The status of a stage of such parts, how each of them ended, and what was printed."""

    def run(parts: dict[str, Any], *arguments: str, seconds: float = 600.0) -> tuple[int, dict[str, Any], str]:
        known = {"minute": gpu.Stage(parts, seconds, (FAST,)), "minute --second": gpu.Stage(parts, 90.0, (FAST,))}
        folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        status = gpu.main(["minute", *folders, *arguments], known)
        summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
        return status, summary["stages"]["minute"], capsys.readouterr().out

    return run


def decision(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = measured.read(folder / "out" / "minute.jsonl")["decision/fast"]
    return found


# ---- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_minute_goes_on_behind_parts_that_hang_die_and_write_garbage(minute: Any, tmp_path: Path) -> None:
    """What they wrote before stays: the number of the one that hangs counts."""
    parts = {
        "hangs": part(append(RECORD) + "; import time; time.sleep(600)", most=2.0),
        "dies": part("import os; os.abort()"),
        "writes": part(append(b'{"name": 3}\n[1]\nNaN\n\xff\x00{"name": "spe')),
        "raises": gpu.Part(lambda place: json.loads("{"), 1.0, 60.0),
        "last": part(append(b'\n{"name": "other", "milliseconds": 1.0}\n')),
    }
    status, ended, printed = minute(parts)
    assert status == 1
    assert {name: one["passed"] for name, one in ended.items()} == {
        "hangs": False,
        "dies": False,
        "writes": True,
        "raises": False,
        "last": True,
    }
    assert ended["hangs"]["exit_status"] is None
    assert ended["dies"]["exit_status"] == -6
    assert measured.read(tmp_path / "out" / "minute.jsonl").keys() == {"speed", "decision/fast", "other"}
    assert decision(tmp_path)["verdict"] == "yes"
    assert printed.count("fast: a step 4 ms (at most 5): yes: it is the default") == 1


def test_minute_skips_a_part_that_no_longer_fits(minute: Any, tmp_path: Path) -> None:
    parts = {"first": part("pass"), "long": part("pass", seconds=900.0, most=1_000.0), "short": part(append(RECORD))}
    status, ended, printed = minute(parts)
    assert status == 1
    assert [one["passed"] for one in ended.values()] == [True, False, True]
    assert ended["long"]["said"].startswith("skipped: it takes 900 s, and ")
    assert "long: skipped: it takes 900 s, and " in printed

    # When the call is over, nothing is begun, and what is known is still said.
    late = ["--begun", str(time.time() - 1_000), "--out", str(tmp_path / "late")]
    assert gpu.main(["minute", *late], {"minute": gpu.Stage(parts, 550.0, (FAST,))}) == 1
    ended = json.loads((tmp_path / "late" / "summary.json").read_bytes())["stages"]["minute"]
    assert {one["said"] for one in ended.values()} == {
        "skipped: it takes 1 s, and 0 s are left",
        "skipped: it takes 900 s, and 0 s are left",
    }


def test_limit_of_a_part_is_its_own_and_never_more_than_what_is_left() -> None:
    parts = gpu.Part(None, 50.0, 90.0), gpu.Part(None, 50.0)
    found = [[gpu.limit_of(one, left, kept=30.0, patience=1.0) for left in (400.0, 70.0, 49.0)] for one in parts]
    assert found == [[90.0, 70.0, None], [370.0, 40.0, 19.0]]
    assert gpu.limit_of(parts[0], 400.0, kept=30.0, patience=3.0) == 270.0


def test_minute_has_caches_that_all_its_parts_share(minute: Any, tmp_path: Path) -> None:
    program = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).with_suffix('.seen').open('a').write({} + '\\n')"
    names = "os.environ['TORCHINDUCTOR_CACHE_DIR'] + os.environ['TRITON_CACHE_DIR']"
    minute({name: part(program.format(names)) for name in ("one", "other")})
    first, second = (tmp_path / "out" / "minute.seen").read_text(encoding="utf-8").splitlines()
    assert first == second
    assert first.startswith(str(tmp_path / "work"))


def test_minute_second_knows_what_the_first_call_has_decided(minute: Any, tmp_path: Path) -> None:
    """On the same machine: $OUT is empty there, but the folder of the work is not."""
    minute({"one": part(append(RECORD))})
    (tmp_path / "out").rename(tmp_path / "taken away")
    _, ended, printed = minute({"two": part("pass")}, "--second")
    assert list(ended) == ["one", "two"]
    assert decisions.winners((FAST,), measured.read(tmp_path / "out" / "minute.jsonl")) == ["kernels=triton"]
    assert "fast:" not in printed  # it has been said


def test_stages_of_a_minute_fit_their_calls() -> None:
    for name, whole in (("minute", 550.0), ("minute --second", 150.0)):
        stage = gpu.STAGES[name]
        assert stage.seconds == whole
        assert sum(one.seconds for one in stage.parts.values()) <= whole
        assert [one for one in stage.parts.values() if one.most is None or not one.seconds < one.most <= 140] == []


@pytest.mark.slow
def test_minute_runs_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part of both calls, tiny and on a CPU; what is no such number stays undecided."""
    folders = ["--dry-run", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    for second in ([], ["--second"]):
        assert gpu.main(["minute", *second, *folders]) == 0, capsys.readouterr().out
    found = measured.read(tmp_path / "out" / "minute.jsonl")
    names = [one.name for one in (*decisions.MINUTE, *decisions.SECOND)]
    assert {f"decision/{name}" for name in names} <= found.keys()
    assert found["decision/loss"]["verdict"] == "undecided"
    assert found["variants/tiny/nn.Transformer/ratio"]["least"] > 0


# ---- decisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        *((4.9, "yes"), (5, "yes"), (5.1, "no"), (-1.0, "undecided"), (float("nan"), "undecided")),
        *((float("inf"), "undecided"), (True, "undecided"), ("4.9", "undecided"), (None, "undecided")),
    ],
)
def test_decide_compares_a_number_with_its_threshold(number: object, verdict: str) -> None:
    found = {"speed": {"name": "speed", "milliseconds": number}}
    record = decisions.decide(FAST, found, card="a card", capability="9.0")
    assert record["verdict"] == verdict
    assert (record["card"], record["capability"]) == ("a card", "9.0")
    assert record["line"].endswith("on compute capability 9.0 alone") is (verdict != "undecided")


def test_decide_needs_every_measurement_and_takes_their_mean() -> None:
    condition = decisions.Condition("a step", ("one", "other"), "ms", "ms", least=2.0, most=4.0)
    both = decisions.Decision("both", (condition,), "yes", "no")
    one, other = {"ms": 1.0}, {"ms": 6.0}
    cases = [
        ({"one": one}, "both: undecided: other was not measured"),
        ({"one": one, "other": {"error": "no memory"}}, "both: undecided: other failed: no memory"),
        ({"one": one, "other": other}, "both: a step 3.5 ms (2 to 4): yes: yes, on compute capability 9.0 alone"),
        ({"one": other, "other": other}, "both: a step 6 ms (2 to 4): no: no, on compute capability 9.0 alone"),
    ]
    for found, line in cases:
        assert decisions.decide(both, found, card="a card", capability="9.0")["line"] == line


def test_decide_is_no_where_one_of_two_conditions_fails() -> None:
    fast, large = FAST.conditions[0], decisions.Condition("tokens", ("speed",), "tokens", "", least=10)
    two = FAST._replace(conditions=(fast, large))
    for tokens, verdict in ((10, "yes"), (9, "no")):
        found = {"speed": {"milliseconds": 4.0, "tokens": tokens}}
        assert decisions.decide(two, found, card=None, capability=None)["verdict"] == verdict


def test_decide_compares_with_the_fastest_of_what_it_would_replace() -> None:
    """What of that failed or was not measured is left out."""
    condition = decisions.Condition("a step", ("new", "newer"), "ms", "of it", most=0.9, over=(("old",), ("a", "b")))
    table = FAST._replace(conditions=(condition,))
    known = {"new": {"ms": 1.0}, "newer": {"ms": 3.0}, "old": {"ms": 4.0}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "a step 0.5 of it (at most 0.9): yes"),
        ({"a": {"ms": 1.0}}, "a step 0.5 of it (at most 0.9): yes"),
        ({"a": {"ms": 1.0}, "b": {"ms": 3.0}}, "a step 1 of it (at most 0.9): no"),
        ({"old": {"error": "it hung"}}, "undecided: old failed: it hung"),
        ({"old": {"ms": 0.0}}, "undecided: new is compared with what took no time"),
    ]
    for more, said in cases:
        assert said in decisions.decide(table, known | more, card=None, capability=None)["line"]


def decided_by(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The verdicts of a minute that measured this."""
    records = decisions.decided(decisions.MINUTE, found, card="a card", capability="9.0")
    return {record["name"].partition("/")[2]: record["verdict"] for _, record in records}


def test_minute_decides_by_what_is_faster_and_not_by_what_was_hoped_for() -> None:
    """Kernels a little slower than was promised win all the same where torch's are five times as slow."""
    times = {"sentences": 0.16, "triton": 0.36, "varlen": 0.82}
    found = {
        f"short_attention/900/{role}/{kernel}/0.0": {"both_ms": ms}
        for kernel, ms in times.items()
        for role in ("encoder", "causal", "cross")
    }
    found |= {"add_norm/25088x512/kernel": {"both_ms": 0.11}, "add_norm/25088x512/inductor": {"both_ms": 0.19}}
    loss = "loss/25088/512"
    found |= {f"{loss}/{form}": {"ms": ms} for form, ms in {"fused": 5.6, "ours": 9.0, "products": 3.8}.items()}
    found |= {f"{loss}/errors": {"largest_error": 0.001}}
    names = ("sentences", "attention", "norm", "loss")
    assert {name: decided_by(found)[name] for name in names} == dict.fromkeys(names, "yes")

    found["add_norm/25088x512/inductor_no_mix_order"] = {"both_ms": 0.115}
    found[f"{loss}/fused"] = {"ms": 6.6}  # as much as torch's, compiled
    assert (decided_by(found)["norm"], decided_by(found)["loss"]) == ("no", "no")


def test_minute_knows_the_card_by_what_no_change_of_the_code_makes_faster() -> None:
    for product, copy, verdict in ((783.0, 4.27, "yes"), (640.0, 3.0, "no")):
        assert decided_by({"facts/anchors": {"product_tflops": product, "copy_tb_s": copy}})["card"] == verdict


def test_minute_replays_a_search_by_default_where_the_first_pass_is_no_slower_either() -> None:
    launched = {"seconds": 3.0, "first_pass_seconds": 3.0}
    replayed = {"seconds": 0.6, "first_pass_seconds": 2.0, "target_tokens_per_second": 135_000.0}
    key = "decode/base/beam4-131072"
    verdicts = decided_by({key: launched, f"{key}/replayed": replayed})
    assert (verdicts["search"], verdicts["search_speed"]) == ("yes", "no")
    assert decided_by({key: launched, f"{key}/replayed": replayed | {"first_pass_seconds": 3.5}})["search"] == "no"


def test_decide_says_what_else_was_measured() -> None:
    """What is not known, or no number, is left out."""
    one = FAST._replace(beside=(("a/other", "ms"), ("a/third", "ms"), ("a/fourth", "ms")))
    found = {"speed": {"milliseconds": 4.0}, "a/other": {"ms": 7.5}, "a/third": {"ms": None}}
    record = decisions.decide(one, found, card=None, capability="9.0")
    assert record["beside"] == {"other ms": 7.5}
    assert record["line"].startswith("fast: a step 4 ms (at most 5), beside other ms 7.5: yes: ")


@pytest.mark.parametrize(
    ("errors", "is_near"), [([0.0, 0.019], True), ([0.0, 0.02], False), ([float("nan"), 0.0], False)]
)
def test_judged_keeps_the_times_of_what_computes_something_else_as_a_failure(
    errors: list[float], is_near: bool
) -> None:
    record = measured.judged({"milliseconds": 1.0}, errors)
    assert (record["milliseconds"], record["errors"]) == (1.0, errors)
    verdict = decisions.decide(FAST, {"speed": record}, card=None, capability="9.0")["verdict"]
    assert verdict == ("yes" if is_near else "undecided")


def test_winners_are_the_first_setting_of_each_key_that_is_decided() -> None:
    others = {"again": "kernels=torch", "slow": "compile=false"}
    table = (FAST, *(FAST._replace(name=name, settings=(setting,)) for name, setting in others.items()))
    verdicts = {"fast": "yes", "again": "yes", "slow": "no"}
    found = {f"decision/{name}": {"verdict": verdict} for name, verdict in verdicts.items()}
    assert decisions.winners(table, found) == ["kernels=triton"]
    assert decisions.winners(table, {}) == []


def test_settings_that_may_win_are_keys_of_train() -> None:
    for one in (*decisions.MINUTE, *decisions.SECOND):
        assert steps.changed(TrainConfig(), list(one.settings)) is not None


# ---- what the parts measure -----------------------------------------------------------------------------------------


def test_changed_sets_keys_of_train_and_refuses_others() -> None:
    train = steps.changed(TrainConfig(), ["kernels=triton", "clip_norm=null", "warmup_steps=7"])
    assert (train.kernels, train.clip_norm, train.warmup_steps) == (Kernels.triton, None, 7)
    for wrong in ("kernel=triton", "kernels=cuda", "warmup_steps=many", "kernels"):
        with pytest.raises(ValueError, match=wrong.partition("=")[0]):
            steps.changed(TrainConfig(), [wrong])


def test_profiled_steps_are_timed_ones_evenly_spread() -> None:
    model, vocab_size = steps.SIZES["tiny"]
    train = TrainConfig(
        tokens_per_step=300,
        layout=LayoutKind.packed,
        compile=False,
        device=Device.cpu,
        precision=Precision.fp32,
        threads=1,
    )
    store = steps.make_corpus(300 * 40, vocab_size)
    training = steps.Training(TrainJob(model=model, train=train), store, vocab_size)
    taken = [training.take()[0] for _ in range(14)]
    again = training.again(2, 14, 4)
    training.close()
    assert [step.index for step in again] == [2, 5, 8, 11]
    for step in again:
        assert (step.sentences, step.target_tokens) == (taken[step.index].sentences, taken[step.index].target_tokens)


def test_at_most_ends_what_takes_longer_and_nothing_after_it() -> None:
    with pytest.raises(TimeoutError, match="it took longer than 0 s"), variants.at_most(0.05):
        time.sleep(60)
    with variants.at_most(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_start_of_a_variant_that_takes_too_long_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "VARIANTS", {"slow": variants.Variant(lambda task: time.sleep(60))})
    contenders: dict[str, Any] = {}
    with pytest.raises(TimeoutError):
        variants.start(contenders, "slow", None, range(1), seconds=0.05)
    assert contenders == {}


# ---- a search -------------------------------------------------------------------------------------------------------


def a_search(output: Path) -> dict[str, Any]:
    """What `decode.py` measures of a replayed search of few sentences, tiny and on a CPU."""
    arguments = ["--size=tiny", "--device=cpu", "--sentences=6", "--settings=beam4-131072", "--ways=replayed"]
    decode.main([*arguments, f"--output={output}"])
    found: dict[str, Any] = measured.read(output)["decode/tiny/beam4-131072/replayed"]
    return found


def test_search_is_timed_three_times_after_the_pass_that_records(tmp_path: Path) -> None:
    found = a_search(tmp_path / "found.jsonl")
    assert "error" not in found
    first, *others = found["pass_seconds"]
    assert found["first_pass_seconds"] == first
    assert found["seconds"] == sorted(others)[1]
    assert found["target_tokens_per_second"] == found["target_tokens"] / found["seconds"]
    assert 0.0 < found["deviation"] < 0.02
    assert (found["profile"]["sentences"], found["profile"]["runs"]) == (6, 1)


def test_search_that_computes_something_else_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is not kept: hypotheses see keys of others, and what they score is not what forced decoding finds."""
    monkeypatch.setattr(buffers, "fill", fill_without_mask)
    found = a_search(tmp_path / "found.jsonl")
    assert found["error"].startswith("a piece's log-probability differs by ")
    assert found["target_tokens_per_second"] > 0.0


def test_search_that_its_proof_refuses_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "prove_replay", lambda batches: batches)
    assert a_search(tmp_path / "found.jsonl")["error"] == "the proof before the first translation refuses it"


plain_fill = buffers.fill


def fill_without_mask(own: Any, state: Any) -> None:
    plain_fill(own, state)
    own.past_mask.zero_()
