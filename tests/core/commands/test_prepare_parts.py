"""`transformer prepare part=K/N`: parts that are prepared one by one, in any order, come to what one command makes."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from support.compressed import compressed
from support.corpora import begin_in_a_child, ended, run_command, tiny_job, wait_for, write_corpus, write_pair
from support.paths import ROOT
from transformer.cli.commands import compose
from transformer.config.jobs import PrepareJob, TrainJob
from transformer.config.settings import ExtraConfig, PairConfig
from transformer.data import parts
from transformer.data.corpus import Pair
from transformer.data.prepare import Prepared, prepare
from transformer.data.source import Source
from transformer.data.store import StoreWriter
from transformer.errors import InputError, StorageError, TooEarly


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """200 pairs, in blocks of 7, of which there are 29; two targets of each are sampled."""
    monkeypatch.setattr("transformer.data.building.BLOCK", 7)
    monkeypatch.setattr("transformer.data.building.SAMPLED_TARGETS", 33)
    return tiny_job(tmp_path / "run", write_corpus(tmp_path))


def store_dir(job: TrainJob) -> Path:
    assert job.data.store_dir is not None
    return Path(job.data.store_dir)


def part(job: TrainJob, number: int, parts: int) -> None:
    """`transformer prepare part=NUMBER/PARTS`, in this process."""
    run_command("prepare", PrepareJob(**vars(job), part=f"{number}/{parts}"))


def parts_folder(job: TrainJob) -> Path:
    (folder,) = store_dir(job).glob("*.parts")
    return folder


def contents(prepared: Prepared) -> list[list[list[int]]]:
    """The pieces of every sentence."""
    found = []
    for side in (0, 1):
        pieces, counts = prepared.store.gather(np.arange(len(prepared.store)), side)
        found.append([ids.tolist() for ids in np.split(pieces, counts.cumsum()[:-1])])
    return found


def assert_same(first: Prepared, second: Prepared) -> None:
    """All but the place."""
    assert contents(first) == contents(second)
    assert first.store.lengths[:].tolist() == second.store.lengths[:].tolist()
    assert (first.report, first.mixture) == (second.report, second.mixture)
    assert first.tokenizers.models == second.tokenizers.models
    assert (first.dev, first.test) == (second.dev, second.test)
    assert first.path.name == second.path.name


# ---- the same as without parts --------------------------------------------------------------------------------------


def as_it_is(_: TrainJob) -> None:
    pass


def lines_of(job: TrainJob) -> list[Pair]:
    """The pairs of the training set."""
    sides = (
        Path(str(path)).read_text(encoding="utf-8").splitlines() for path in (job.data.train.src, job.data.train.tgt)
    )
    return list(zip(*sides, strict=True))


def shards(job: TrainJob) -> None:
    """Shards of 80, 0, 50 and 70 pairs, compressed or not."""
    pairs, folder = lines_of(job), store_dir(job).parent / "shards"
    folder.mkdir()
    start = 0
    for number, (count, suffix) in enumerate(((80, ".zst"), (0, ".gz"), (50, ""), (70, ".gz"))):
        for side, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs[start : start + count])
            (folder / f"{number}.{language}{suffix}").write_bytes(compressed(lines.encode(), suffix))
        start += count
    job.data.train = PairConfig(str(folder / "*.en*"), str(folder / "*.de*"))


def table(job: TrainJob, suffix: str, row: Callable[[Pair], str]) -> None:
    path = store_dir(job).parent / f"train{suffix}"
    path.write_bytes(compressed("".join(f"{row(pair)}\n" for pair in lines_of(job)).encode(), path.suffix))
    job.data.train = PairConfig(dataset=str(path))


def tsv(job: TrainJob) -> None:
    table(job, ".tsv.zst", "\t".join)


def jsonl(job: TrainJob) -> None:
    table(job, ".jsonl", lambda pair: json.dumps({"en": pair[0], "de": pair[1]}))


def several_sets(job: TrainJob) -> None:
    """With tags, duplicates of one another, and pairs for every filter."""
    pairs, folder = lines_of(job), store_dir(job).parent
    strange = [("", "eins"), ("one", "one"), ("one", "eins " * 15), ("one " * 100, "eins " * 100), ("one. two", "eins")]
    for name, tag, extra in (("web", "<w>", pairs[:30]), ("back", "<bt>", strange * 3), ("few", None, pairs[:1])):
        found = write_pair(folder, name, extra)
        job.data.extra[name] = ExtraConfig(found.src, found.tgt, tag=tag, weight=2.0)
    job.data.filter.drop_duplicates = job.data.filter.drop_identical = True
    job.data.filter.doctor = ["markup", "copies"]


def two_vocabularies(job: TrainJob) -> None:
    """With targets that do not come back, of which the sample is."""
    job.tokenizer.target.vocab_size = 50
    job.tokenizer.target.character_coverage = 0.98


def sampled_lines(job: TrainJob) -> None:
    job.tokenizer.sample_lines = 90


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (as_it_is, 1),
        (as_it_is, 7),
        (as_it_is, 50),
        (shards, 3),
        (tsv, 3),
        (jsonl, 4),
        pytest.param(several_sets, 5, marks=pytest.mark.plugins),  # detectors, too
        (two_vocabularies, 3),
        (sampled_lines, 2),
    ],
)
def test_prepare_in_parts_comes_to_the_same(change: Callable[[TrainJob], None], parts: int, job: TrainJob) -> None:
    change(job)
    for number in (0, *range(parts - 1, 0, -1)):
        part(job, number, parts)
    joined = prepare(job)
    assert len(list(joined.path.glob("source.*.ids"))) == parts

    job.data.store_dir = f"{job.data.store_dir}-alone"
    alone = prepare(job)
    assert_same(joined, alone)
    assert (alone.path / "source.ids").is_file()
    assert (joined.path / "report.json").read_bytes() == (alone.path / "report.json").read_bytes()


def test_train_reads_a_corpus_of_parts_as_any_other(job: TrainJob) -> None:
    """Joined by the training itself, which draws other pieces in every epoch."""
    job.train.subword_sampling = 0.1
    job.train.max_steps = job.train.save_every = job.train.validate_every = 4
    weights = []
    for name in ("joined", "alone"):
        job.run_dir, job.data.store_dir = f"{job.run_dir}-{name}", f"{job.data.store_dir}-{name}"
        if name == "joined":
            for number in range(3):
                part(job, number, 3)
        run_command("train", job)
        weights.append((Path(job.run_dir) / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_prepare_reads_only_the_shards_of_its_part(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(job)
    part(job, 0, 8)
    read: list[str] = []
    real = Source.pairs

    def noting(source: Source, *counts: Any, **options: Any) -> Iterator[Pair]:
        read.extend(path.name for shard in source.shards for path in shard)
        return real(source, *counts, **options)

    monkeypatch.setattr(Source, "pairs", noting)
    part(job, 7, 8)
    assert read == ["3.en.gz", "3.de.gz"]


def test_prepare_takes_nothing_twice(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the parts become those of the corpus; of the parts remains where they are."""
    for number in (0, 1):
        part(job, number, 2)
    folder = parts_folder(job)
    files = [(folder / str(number) / "target.ids").stat().st_ino for number in (0, 1)]
    path = prepare(job).path
    assert [(path / f"target.{number}.ids").stat().st_ino for number in (0, 1)] == files
    assert [path.name for path in folder.iterdir()] == ["joined.json"]

    # Whoever comes late has nothing to do.
    monkeypatch.setattr(Source, "pairs", None)
    part(job, 1, 2)
    monkeypatch.undo()
    part(job, 0, 2)
    assert [path.name for path in folder.iterdir()] == ["joined.json"]


@pytest.mark.parametrize("step", ["transformer.data.prepare.retire_parts", "transformer.data.parts.clear"])
def test_prepare_clears_the_parts_that_a_kill_left(job: TrainJob, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of who joined them, before or while it cleared. Those of other text stay."""
    for number in (0, 1):
        part(job, number, 2)
    folder = parts_folder(job)
    monkeypatch.setattr(step, lambda *_: None)
    prepare(job)
    monkeypatch.undo()
    assert (folder / "0").is_dir()
    prepare(job)
    assert [path.name for path in folder.iterdir()] == ["joined.json"]

    source = Path(str(job.data.train.src))
    text = source.read_bytes()
    source.write_bytes(text[::-1].lstrip(b"\n") + b"\n")  # of the same size, hence in the same folder
    for number in (0, 1):
        part(job, number, 2)
    source.write_bytes(text)
    prepare(job)
    assert {"0", "1", "plan"} <= {path.name for path in folder.iterdir()}


# ---- what is missing, and what has changed --------------------------------------------------------------------------


def test_prepare_of_a_part_ends_well_where_all_are_joined_while_it_waits(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a scheduler has started a part twice: the second looks at what the first has made, and it goes."""
    for number in (0, 1):
        part(job, number, 2)

    def join(*_: object) -> None:
        monkeypatch.undo()
        prepare(job)

    monkeypatch.setattr(parts, "_open_part", join)
    part(job, 1, 2)
    assert "part 1 of 2 is already in the prepared corpus" in caplog.text


def test_prepare_of_a_part_without_the_plan_is_too_early(job: TrainJob) -> None:
    with pytest.raises(TooEarly, match=r"^part 0 of 4 is not ready, or was given other settings or files: give this"):
        part(job, 1, 4)
    assert TooEarly.exit_status == 75
    part(job, 0, 4)
    job.tokenizer.vocab_size = 61
    with pytest.raises(TooEarly):
        part(job, 1, 4)


def test_prepare_names_the_parts_that_are_missing(job: TrainJob) -> None:
    for number in (0, 1, 3):
        part(job, number, 12)
    folder = parts_folder(job)
    rest = f"give part=2/12 with the same settings, or remove {folder} to prepare without parts"
    with pytest.raises(InputError) as caught:
        prepare(job)
    assert str(caught.value) == f"parts 2, 4, 5, 6, 7, 8, 9, 10 and 1 more of 12 are missing: {rest}"
    for number in range(4, 12):
        part(job, number, 12)
    with pytest.raises(InputError) as caught:
        prepare(job)
    assert str(caught.value) == f"part 2 of 12 is missing: {rest}"
    assert not [path for path in store_dir(job).iterdir() if path.is_dir() and path != folder]

    part(job, 2, 12)
    assert len(prepare(job).store) == 200


def test_prepare_refuses_other_parts_than_were_begun(job: TrainJob) -> None:
    part(job, 0, 3)
    for number in (0, 2):
        with pytest.raises(
            InputError, match=rf"^part=K/4: {parts_folder(job)} was begun as 3 parts: give part=K/3, or"
        ):
            part(job, number, 4)


def test_prepare_without_the_plan_names_part_0(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part 0 has begun and was killed, or could not write."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformer.data.parts.write_new", full)
        with pytest.raises(StorageError, match="No space left on device"):
            part(job, 0, 2)
    with pytest.raises(InputError, match=r"^part 0 is missing: give part=0/N with the same settings, or remove "):
        prepare(job)
    for path in parts_folder(job).iterdir():
        path.unlink()
    parts_folder(job).rmdir()
    assert len(prepare(job).store) == 200


def change_a_word(job: TrainJob) -> None:
    """The file keeps its size."""
    path = Path(str(job.data.train.src))
    path.write_bytes(path.read_bytes().replace(b"one", b"won", 1))


def test_prepare_refuses_a_part_of_other_text_than_part_0_has_read(job: TrainJob) -> None:
    part(job, 0, 3)
    part(job, 1, 3)
    change_a_word(job)
    with pytest.raises(
        InputError, match=r"train\.en: the text has changed since part 0 read it: restore it, or give part=0/3"
    ):
        part(job, 2, 3)
    with pytest.raises(InputError, match=r"^the text has changed since part 0 read it: give part=0/3 again, or "):
        prepare(job)

    part(job, 0, 3)
    part(job, 2, 3)
    with pytest.raises(InputError, match=r"^part 1 of 3 is missing: "):  # it is of the other text
        prepare(job)
    part(job, 1, 3)
    assert len(prepare(job).store) == 200

    change_a_word(job)
    part(job, 0, 3)  # whose text is not in the corpus that was joined
    with pytest.raises(InputError, match=r"^parts 1, 2 of 3 are missing: "):
        prepare(job)


def test_prepare_makes_a_damaged_part_again(job: TrainJob) -> None:
    for number in (0, 1):
        part(job, number, 2)
    file = parts_folder(job) / "1" / "source.ids"
    good = file.read_bytes()
    file.write_bytes(good[:-2] + b"\xff\xff")
    with pytest.raises(InputError, match=r"^part 1 of 2 is missing: "):
        prepare(job)
    part(job, 1, 2)
    assert file.read_bytes() == good

    (parts_folder(job) / "plan" / "kept").write_bytes(b"\0" * 200)
    with pytest.raises(TooEarly):
        part(job, 1, 2)
    part(job, 0, 2)
    assert len(prepare(job).store) == 200


def test_prepare_joins_no_part_in_the_place_of_another(job: TrainJob) -> None:
    """A wrong copy between machines."""
    for number in range(3):
        part(job, number, 3)
    folder = parts_folder(job)
    shutil.rmtree(folder / "1")
    shutil.copytree(folder / "2", folder / "1")
    with pytest.raises(InputError, match=r"^part 1 of 3 is missing: give part=1/3 "):
        prepare(job)
    part(job, 1, 3)
    joined = prepare(job)
    job.data.store_dir = f"{job.data.store_dir}-alone"
    assert_same(joined, prepare(job))


def test_prepare_builds_a_corpus_anew_when_that_of_its_parts_is_gone(job: TrainJob) -> None:
    for number in (0, 1):
        part(job, number, 2)
    path = prepare(job).path
    (path / "MANIFEST.json").unlink()
    assert (prepare(job).path / "source.ids").is_file()


@pytest.mark.parametrize("value", ["3", "3/3", "-1/3", "a/b", "1/257", "0/0", "1/2/3", ""])
def test_prepare_refuses_what_is_no_part(value: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^part={value}: write K/N, such as 3/64: part K of N, counted from 0, of 256"
    ):
        PrepareJob(part=value)


# ---- processes ------------------------------------------------------------------------------------------------------


def test_prepare_in_two_processes_survives_a_kill_of_one(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(name: str, value: str | None) -> int:
        (tmp_path / name).mkdir(exist_ok=True)
        return begin_in_a_child("prepare", PrepareJob(**vars(job), part=value), tmp_path / name)

    early = ended(begin("early", "1/2"), tmp_path / "early")
    assert (early.status, early.said.count("\n")) == (75, 1)
    assert early.said.startswith("transformer: error: part 0 of 2 is not ready")

    # One process encodes slowly, beside another that is part 0, and is killed.
    first = begin("first", "0/2")
    wait_for(lambda: any(store_dir(job).glob("*.parts/plan")))
    folder = parts_folder(job)
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "add", lambda *sides: time.sleep(60))
        second = begin("second", "1/2")
    wait_for(lambda: (folder / ".tmp-1" / "source.ids").exists())
    os.kill(second, signal.SIGKILL)
    assert ended(first, tmp_path / "first").status == 0
    assert ended(second, tmp_path / "second").status == -signal.SIGKILL
    missing = ended(begin("all", None), tmp_path / "all")
    assert (missing.status, "error: part 1 of 2 is missing" in missing.said) == (2, True)

    # Once more.
    assert ended(begin("second", "1/2"), tmp_path / "second").status == 0
    assert not (folder / ".tmp-1").exists()
    assert ended(begin("all", None), tmp_path / "all").status == 0
    joined = prepare(job)
    job.data.store_dir = f"{job.data.store_dir}-alone"
    assert_same(joined, prepare(job))


# ---- engines --------------------------------------------------------------------------------------------------------

# Too early twice, then as the test says.
PYTHON = """#!/bin/sh
echo "$@" >> calls
[ $(wc -l < calls) -le 2 ] && exit 75
exit "$ENDS"
"""


def run_script(folder: Path, *command: str, **environment: str) -> int:
    """A shell's script, with programs of ours in the place of `python` and `sleep`."""
    for name, text in (("python", PYTHON), ("sleep", "#!/bin/sh\necho slept >> naps\n")):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    paths = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=os.environ | paths | environment, check=False).returncode


@pytest.mark.parametrize("ends", [0, 2])
def test_sbatch_waits_for_part_0_and_ends_as_its_part(tmp_path: Path, ends: int) -> None:
    script = str(ROOT / "scripts" / "slurm" / "prepare.sbatch")
    status = run_script(tmp_path, "bash", script, "run_dir=a b", SLURM_ARRAY_TASK_ID="3", PARTS="16", ENDS=str(ends))
    assert status == ends
    assert (tmp_path / "calls").read_text() == "-m transformer prepare part=3/16 run_dir=a b\n" * 3
    assert (tmp_path / "naps").read_text() == "slept\n" * 2


def test_job_of_kubernetes_has_as_many_parts_as_pods(tmp_path: Path) -> None:
    """Which start again after 75, and not after 2; its arguments are those of the command."""
    job = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "prepare.yaml").read_text(encoding="utf-8"))["spec"]
    (container,) = job["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    statuses = [run_script(tmp_path, *command, JOB_COMPLETION_INDEX="3", ENDS=ends) for ends in ("0", "0", "0", "2")]
    assert statuses == [75, 75, 0, 2]
    arguments = " ".join(container["args"])
    assert (tmp_path / "calls").read_text() == f"-m transformer prepare part=3/{job['completions']} {arguments}\n" * 4
    assert (tmp_path / "naps").read_text() == "slept\n" * 2

    actions = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in job["podFailurePolicy"]["rules"]]
    assert actions == [("Ignore", [75]), ("Ignore", None), ("FailJob", [2])]
    job_of_pod = compose("prepare", [f"part=3/{job['completions']}", *container["args"]])
    assert isinstance(job_of_pod, PrepareJob)
    assert job_of_pod.share() == (3, 64)
