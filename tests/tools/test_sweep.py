"""`evaluate` comparing search settings on the dev set: against evaluations of their own, of the same text."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from torch import Tensor

from support.command_line import enter
from support.corpora import as_a_command, run, run_command, tiny_job, write_corpus
from transformer.config.jobs import EvaluateJob, TrainJob
from transformer.config.settings import Format, Precision, SearchOverride, SweepConfig
from transformer.decoding.loading import load
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.sets import evaluate
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.tools import search_settings
from transformer.tools.search_settings import Sweep, Trial, choose, format_sweep, sweep

ALPHAS = [0.0, 0.6, 2.0, 8.0]
SETTINGS = SweepConfig(beam_size=[4, 1], length_penalty=[2.0, 0.0, 0.6, 8.0])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """Half trained: the settings still matter."""
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    recipe: dict[str, Any] = {
        "tokens_per_step": 1500,
        "max_tokens": 1500,
        "learning_rate": 1e-2,
        "max_steps": 100,
        "save_every": 10,
    }
    return tiny_job(tmp_path_factory.mktemp("runs") / "a", data, validate_every=100, keep_last=3, **recipe)


@pytest.fixture(scope="module")
def run_dir(job: TrainJob) -> Path:
    return run(job)


def evaluation(run_dir: Path, **changes: Any) -> EvaluateJob:
    """In float64, where the company of a sentence in its batch cannot show."""
    return EvaluateJob(run_dir=str(run_dir), precision=Precision.fp64, threads=1, **changes)


def swept(run_dir: Path, **changes: Any) -> Sweep:
    with as_a_command():
        return sweep(evaluation(run_dir, **changes))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- the trials -----------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_sweep_finds_what_each_evaluation_of_its_own_finds(job: TrainJob, run_dir: Path) -> None:
    result = swept(run_dir, sweep=SETTINGS)
    assert [(trial.beam_size, trial.length_penalty) for trial in result.trials] == [
        (beam_size, alpha) for beam_size in (1, 4) for alpha in ALPHAS
    ]
    sources, wanted = (
        Path(path).read_text(encoding="utf-8").splitlines() for path in (job.data.dev.src, job.data.dev.tgt)
    )
    for trial in result.trials:
        search = SearchOverride(trial.beam_size, trial.length_penalty)
        with as_a_command():
            alone = evaluate(evaluation(run_dir, test={"again": job.data.dev}, search=search))
        assert trial.bleu == alone.test_sets["again"].bleu
        assert result.bleu_signature == alone.test_sets["again"].bleu_signature
        translator = load(run_dir, precision="fp64", beam_size=trial.beam_size, length_penalty=trial.length_penalty)
        found = translator.translate(sources)
        counted = sacrebleu.corpus_bleu(found, [wanted], force=True)
        assert trial.length_ratio == counted.sys_len / counted.ref_len
    assert len({trial.bleu for trial in result.trials}) > 3, "the settings matter"
    assert len({trial.bleu for trial in result.trials[:4]}) == 1, "but no penalty does to greedy search"


def test_sweep_decodes_the_dev_set_once_for_each_beam_size(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the run as it was, its test sets above all."""
    rows: list[int] = []
    encode = Transformer.encode

    def noted(model: Transformer, x: Tensor, layout: Padded) -> Tensor:
        rows.append(len(x))
        return encode(model, x, layout)

    monkeypatch.setattr(Transformer, "encode", noted)
    before = files_of(run_dir)
    assert swept(run_dir, sweep=SETTINGS).sentences == 16
    assert sum(rows) == 2 * 16
    assert files_of(run_dir) == before


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"sweep": SweepConfig(beam_size=[2, 3])}, [(2, 0.6), (3, 0.6)]),
        ({"sweep": SweepConfig(length_penalty=[1.0, 1.0])}, [(4, 1.0)]),
        ({"sweep": SweepConfig(length_penalty=[0.5]), "search": SearchOverride(beam_size=2)}, [(2, 0.5)]),
    ],
    ids=["beams", "alphas", "another beam"],
)
def test_sweep_of_one_setting_has_the_run_s_other(
    run_dir: Path, changes: dict[str, Any], settings: list[tuple[int, float]]
) -> None:
    found = swept(run_dir, **changes).trials
    assert [(trial.beam_size, trial.length_penalty) for trial in found] == settings


# ---- the choice, and how it is said ---------------------------------------------------------------------------------


def trial(beam_size: int, length_penalty: float, bleu: float) -> Trial:
    return Trial(beam_size, length_penalty, bleu, length_ratio=1.0)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([trial(4, 0.6, 30.0), trial(8, 0.6, 30.2), trial(1, 0.6, 29.0)], (8, 0.6)),
        ([trial(8, 0.6, 30.0), trial(4, 1.4, 30.0), trial(4, 0.0, 29.0)], (4, 1.4)),
        ([trial(4, 1.4, 30.0), trial(4, 1.0, 30.0), trial(4, 0.0, 30.0)], (4, 1.0)),
        ([trial(4, 0.0, 30.0), trial(4, 1.4, 30.0)], (4, 0.0)),
        ([trial(8, 0.6, 30.004), trial(4, 1.4, 30.001), trial(1, 1.4, 29.99)], (4, 1.4)),  # 30.00, 30.00, 29.99
    ],
    ids=["the best", "the smaller beam", "the alpha nearer to 0.6", "0 is nearer than 1.4", "as shown"],
)
def test_choose(trials: list[Trial], expected: tuple[int, float]) -> None:
    best = choose(trials)
    assert (best.beam_size, best.length_penalty) == expected


@pytest.mark.parametrize(
    "given",
    [
        ["run_dir=runs/it's mine", "checkpoint=last", "threads=3", "search.max_extra=9", "precision=fp32"],
        ["run_dir=runs/demo"],
    ],
    ids=["much", "little"],
)
def test_sweep_ends_with_the_command_that_evaluates_with_the_best(
    run_dir: Path, given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run_dir, tmp_path / given[0].removeprefix("run_dir="))
    (job,) = enter("evaluate", *given, "sweep.beam_size=2,3", "sweep.length_penalty=0.6,1", "format=json").jobs
    with as_a_command():
        result = sweep(replace(job, threads=1))
    program, command, *words = shlex.split(result.command)
    assert (program, command) == ("transformer", "evaluate")
    search = replace(job.search, beam_size=result.best.beam_size, length_penalty=result.best.length_penalty)
    (found,) = enter(command, *words).jobs
    assert found == replace(job, threads=1, sweep=SweepConfig(), search=search, format=Format.text)


def test_sweep_hands_the_settings_of_plugins_to_that_command() -> None:
    job = EvaluateJob(sweep=SweepConfig(beam_size=[1, 2]), plugins={"length": {"unit": "a b"}})
    command = search_settings._command(job, Trial(2, 0.6, bleu=30.0, length_ratio=1.0))
    expected = ["search.beam_size=2", "search.length_penalty=0.6", "plugins.length.unit=a b"]
    assert shlex.split(command) == ["transformer", "evaluate", "run_dir=runs/demo", *expected]


def test_format_sweep() -> None:
    trials = [
        Trial(1, 0.0, 30.123, 0.9876),
        Trial(1, 0.6, 30.123, 0.9876),
        Trial(10, 0.0, 9.5, 1.0),
        Trial(10, 0.6, 31.0, 1.01),
    ]
    result = Sweep(
        trials=trials,
        best=trials[3],
        command="transformer evaluate run_dir=runs/a search.beam_size=10 search.length_penalty=0.6",
        sentences=1_014,
        bleu_signature="nrefs:1|...",
        checkpoint="averaged",
        averaged=[20, 30],
        steps=30,
        max_extra=50,
        seed=1,
        data_digest="0123456789abcdef",
    )
    assert format_sweep(Path("runs/a"), result).split("\n") == [
        "runs/a: BLEU (and length ratio) on its 1014 dev sentences; mean of steps 20, 30, seed 1, data 0123456789ab; "
        "source + 50 at most; nrefs:1|...",
        "               alpha 0        alpha 0.6",
        "beam 1         30.12 (0.988)  30.12 (0.988)",
        "beam 10        9.50 (1.000)   31.00 (1.010)",
        "best: beam 10, alpha 0.6, BLEU 31.00; to use it:",
        "  transformer evaluate run_dir=runs/a search.beam_size=10 search.length_penalty=0.6",
        "",
    ]


def test_evaluate_prints_a_sweep(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = evaluation(run_dir, sweep=SweepConfig(beam_size=[1, 2]))
    run_command("evaluate", asked)
    text = capsys.readouterr().out
    run_command("evaluate", replace(asked, format=Format.json))
    data = json.loads(capsys.readouterr().out)
    assert [(trial["beam_size"], trial["length_penalty"]) for trial in data["trials"]] == [(1, 0.6), (2, 0.6)]
    assert data["best"] in data["trials"]
    assert data["averaged"] == [80, 90, 100]
    assert f"\nbeam 2        {data['trials'][1]['bleu']:.2f} (" in text
    assert text.endswith(f"; to use it:\n  {data['command']}\n")


# ---- the development set --------------------------------------------------------------------------------------------


def test_sweep_of_another_text_than_the_run_was_validated_on_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    reference = copy / "hypotheses" / "dev.ref"
    reference.write_bytes(reference.read_bytes().replace(b"n", b"m", 1))
    with pytest.raises(CheckpointError, match=r"dev\.src: this is not the text that the run was validated on"):
        swept(copy, sweep=SETTINGS)
    (copy / "run.json").unlink()  # nothing is left that could tell
    assert swept(copy, sweep=SETTINGS).averaged == [80, 90, 100]


def test_sweep_without_a_dev_set_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    (copy / "hypotheses" / "dev.src").unlink()
    with pytest.raises(InputError, match=r"dev\.src: the run keeps no development set"):
        swept(copy, sweep=SETTINGS)


def test_sweep_of_a_model_that_has_learnt_nothing_shows_that(job: TrainJob, tmp_path: Path) -> None:
    young = run(replace(job, run_dir=str(tmp_path / "young"), train=replace(job.train, max_steps=1)))
    (found,) = swept(young, sweep=SweepConfig(beam_size=[1])).trials
    assert 0.0 <= found.bleu < 1.0
