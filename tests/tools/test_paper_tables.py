"""`transformer table`: the rows of Table 3 against the paper's figures, the grid, and what is shown."""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from support.command_line import enter
from support.corpora import read, run_command, tiny_job, write_corpus
from transformer import registry
from transformer.cli.commands import compose
from transformer.config.jobs import TrainJob
from transformer.config.primitives import to_json
from transformer.config.settings import Activation, Norm, TrainConfig
from transformer.cost import count_parameters, step_flops
from transformer.data.tokenizer import Tokenizer
from transformer.errors import InputError, LockedError, StorageError
from transformer.run_dir import lock_run
from transformer.tools.paper.command import rows_of
from transformer.tools.paper.conclusions import format_conclusions
from transformer.tools.paper.layer_table import make_layer_table
from transformer.tools.paper.published import TABLE_3
from transformer.tools.plots import Point, plot_points
from transformer.tools.significance import Interval, bootstrap_bleu
from transformer.tools.tables import grid
from transformer.tools.tables.format import format_markdown, write_table
from transformer.tools.tables.grid import describe_changes, differences, run_grid, with_changes
from transformer.tools.tables.job import TableJob
from transformer.tools.tables.make import make_table
from transformer.tools.tables.measured import Measured, Table, TableRow
from transformer.tools.tables.rows import read_rows, rows_of_file

pytestmark = pytest.mark.ci

# Table 3 of the paper, copied by hand: N, d_model, d_ff, h, d_k, d_v, P_drop, label smoothing, millions of parameters.
ROWS: dict[str, tuple[int, int, int, int, int, int, float, float, int | None]] = {
    "base": (6, 512, 2048, 8, 64, 64, 0.1, 0.1, 65),
    "A_h1": (6, 512, 2048, 1, 512, 512, 0.1, 0.1, None),
    "A_h4": (6, 512, 2048, 4, 128, 128, 0.1, 0.1, None),
    "A_h16": (6, 512, 2048, 16, 32, 32, 0.1, 0.1, None),
    "A_h32": (6, 512, 2048, 32, 16, 16, 0.1, 0.1, None),
    "B_dk16": (6, 512, 2048, 8, 16, 64, 0.1, 0.1, 58),
    "B_dk32": (6, 512, 2048, 8, 32, 64, 0.1, 0.1, 60),
    "C_n2": (2, 512, 2048, 8, 64, 64, 0.1, 0.1, 36),
    "C_n4": (4, 512, 2048, 8, 64, 64, 0.1, 0.1, 50),
    "C_n8": (8, 512, 2048, 8, 64, 64, 0.1, 0.1, 80),
    "C_d256": (6, 256, 2048, 8, 32, 32, 0.1, 0.1, 28),
    "C_d1024": (6, 1024, 2048, 8, 128, 128, 0.1, 0.1, 168),
    "C_ff1024": (6, 512, 1024, 8, 64, 64, 0.1, 0.1, 53),
    "C_ff4096": (6, 512, 4096, 8, 64, 64, 0.1, 0.1, 90),
    "D_p0": (6, 512, 2048, 8, 64, 64, 0.0, 0.1, None),
    "D_p2": (6, 512, 2048, 8, 64, 64, 0.2, 0.1, None),
    "D_ls0": (6, 512, 2048, 8, 64, 64, 0.1, 0.0, None),
    "D_ls2": (6, 512, 2048, 8, 64, 64, 0.1, 0.2, None),
    "E_learned": (6, 512, 2048, 8, 64, 64, 0.1, 0.1, None),
    "big": (6, 1024, 4096, 16, 64, 64, 0.3, 0.1, 213),
}


# ---- Table 3 as experiments -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> dict[str, TrainJob]:
    return {name: compose("train", [f"experiment=table3/{name}"]) for name in ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_table_3_row_has_the_values_of_the_paper(rows: dict[str, TrainJob], name: str) -> None:
    job = rows[name]
    model = job.model
    widths = (model.n_layers, model.d_model, model.d_ff, model.n_heads, model.key_width, model.value_width)
    assert (*widths, model.dropout, job.train.label_smoothing) == ROWS[name][:-1]
    assert model.positions.name == ("learned" if name == "E_learned" else "sinusoidal")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row[-1] is not None])
def test_table_3_row_has_the_parameters_that_the_paper_prints(rows: dict[str, TrainJob], name: str) -> None:
    """With 41,000 pieces; the paper does not say how many it had, and 37,000 would be too few for every row alike."""
    millions = ROWS[name][-1]
    assert millions is not None
    assert count_parameters(rows[name].model, 41_000).total / 1e6 == pytest.approx(
        millions, rel=0.025 if name == "big" else 0.01
    )


def test_table_3_rows_differ_from_the_base_in_one_thing(rows: dict[str, TrainJob]) -> None:
    base = to_json(rows["base"])
    changed = {name: describe_changes(differences(base, to_json(job))) for name, job in rows.items() if name != "big"}
    assert changed == {
        "base": "",
        "A_h1": "run_dir=runs/table3/A_h1 model.n_heads=1",
        "A_h4": "run_dir=runs/table3/A_h4 model.n_heads=4",
        "A_h16": "run_dir=runs/table3/A_h16 model.n_heads=16",
        "A_h32": "run_dir=runs/table3/A_h32 model.n_heads=32",
        "B_dk16": "run_dir=runs/table3/B_dk16 model.d_k=16 model.d_v=64",
        "B_dk32": "run_dir=runs/table3/B_dk32 model.d_k=32 model.d_v=64",
        "C_n2": "run_dir=runs/table3/C_n2 model.n_layers=2",
        "C_n4": "run_dir=runs/table3/C_n4 model.n_layers=4",
        "C_n8": "run_dir=runs/table3/C_n8 model.n_layers=8",
        "C_d256": "run_dir=runs/table3/C_d256 model.d_model=256",
        "C_d1024": "run_dir=runs/table3/C_d1024 model.d_model=1024",
        "C_ff1024": "run_dir=runs/table3/C_ff1024 model.d_ff=1024",
        "C_ff4096": "run_dir=runs/table3/C_ff4096 model.d_ff=4096",
        "D_p0": "run_dir=runs/table3/D_p0 model.dropout=0.0",
        "D_p2": "run_dir=runs/table3/D_p2 model.dropout=0.2",
        "D_ls0": "run_dir=runs/table3/D_ls0 train.label_smoothing=0.0",
        "D_ls2": "run_dir=runs/table3/D_ls2 train.label_smoothing=0.2",
        "E_learned": "run_dir=runs/table3/E_learned model.positions=learned",
    }
    assert (rows["base"].run_dir, rows["big"].run_dir) == ("runs/table3/base", "runs/table3/big")


def test_table_3_is_trained_as_the_paper_says(rows: dict[str, TrainJob]) -> None:
    """Section 6.2: newstest2013, no averaging; big has 300,000 steps (section 5.2)."""
    assert {job.train.average for job in rows.values()} == {1}
    assert {job.data.dev.split for job in rows.values()} == {"validation"}
    steps = {name: job.train.max_steps for name, job in rows.items()}
    assert steps == dict.fromkeys(ROWS, 100_000) | {"big": 300_000}


def test_table_3_has_published_figures_for_the_same_rows() -> None:
    assert list(TABLE_3) == list(ROWS)
    assert {name: figures.millions for name, figures in TABLE_3.items()} == {
        name: row[-1] for name, row in ROWS.items()
    }


# ---- rows at another width, rows of a file --------------------------------------------------------------------------


def table_job(folder: Path, **settings: Any) -> TableJob:
    """A table on the corpus of digits, three steps a row."""
    job = tiny_job(folder / "run", write_corpus(folder / "corpus"), max_steps=3, save_every=2, validate_every=3)
    return TableJob(**{field.name: getattr(job, field.name) for field in fields(TrainJob)} | settings)


def make(job: TableJob) -> tuple[Table, list[Exception]]:
    return make_table(job, rows_of(job))


def refuse(job: TableJob) -> str:
    with pytest.raises(InputError) as caught:
        make(job)
    return str(caught.value)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TrainJob]:
    """The jobs that a table would train; none is trained."""
    jobs: list[TrainJob] = []

    def refuse_to_train(job: TrainJob) -> None:
        jobs.append(job)
        raise InputError("not trained")

    monkeypatch.setattr(grid, "train", refuse_to_train)
    return jobs


def test_table_scales_every_width_and_nothing_else(tmp_path: Path, asked: list[TrainJob]) -> None:
    make(table_job(tmp_path, table="3", width=128, rows="base,B_dk16,C_d1024,big,D_ls2"))
    jobs = {Path(job.run_dir).parent.name: job for job in asked}

    models = {name: job.model for name, job in jobs.items()}
    assert {name: (m.d_model, m.d_ff, m.n_heads, m.key_width, m.value_width) for name, m in models.items()} == {
        "base": (128, 512, 8, 16, 16),
        "B_dk16": (128, 512, 8, 4, 16),
        "C_d1024": (256, 512, 8, 32, 32),
        "D_ls2": (128, 512, 8, 16, 16),
        "big": (256, 1024, 16, 16, 16),
    }
    assert {m.n_layers for m in models.values()} == {6}
    assert [jobs[name].train.label_smoothing for name in ("base", "D_ls2")] == [0.1, 0.2]
    assert {job.train.max_steps for job in jobs.values()} == {3}, "the budget is the corpus'"
    assert {job.train.average for job in jobs.values()} == {1}
    assert {tuple(job.data.test) for job in jobs.values()} == {("development",)}


def test_make_table_sets_for_every_row_what_no_row_is_about(tmp_path: Path, asked: list[TrainJob]) -> None:
    job = table_job(tmp_path, table="3", width=128, rows="base,A_h1,D_p0")
    plain, _ = make(job)
    model = replace(job.model, norm=Norm.pre, activation=Activation.gelu, relu_dropout=0.1)
    table, _ = make(replace(job, model=model))

    set_for_all = [(job.model.norm, job.model.activation, job.model.relu_dropout) for job in asked]
    assert set_for_all == [(Norm.post, Activation.relu, 0.0)] * 3 + [(Norm.pre, Activation.gelu, 0.1)] * 3
    assert [row.changes for row in table.rows] == ["", "model.n_heads=1", "model.dropout=0.0"]
    said = "Unlike the paper's, every row has model.norm=pre model.activation=gelu model.relu_dropout=0.1."
    assert said in table.notes
    assert not any(note.startswith("Unlike") for note in plain.notes)


def test_table_refuses_what_would_be_lost() -> None:
    result = enter("table", "model.n_layers=2")
    assert (result.status, "model.n_layers=2: table=3 has the paper's models" in result.err) == (2, True)
    result = enter("table", "recipe=tensor2tensor")
    assert (result.status, "recipe=tensor2tensor: table=3 has the paper's models" in result.err) == (2, True)
    assert enter("table", "model.norm=pre", "model.attention_dropout=0.1").status == 0, "no row is about these"
    assert enter("table", "table=mine.yaml", "model.n_layers=2", "recipe=tensor2tensor").status == 0


def test_table_job_refuses_an_output_on_the_hub() -> None:
    """Its runs are trained there."""
    with pytest.raises(ValueError, match=r"^output=hf:ours/table: the table and its runs are written there: name a"):
        TableJob(output="hf:ours/table")


def test_table_job_refuses_seeds_that_would_be_too_large() -> None:
    train = TrainConfig(seed=2**63 - 2)
    assert TableJob(train=train, seeds=2).seeds == 2
    with pytest.raises(ValueError, match=r"train\.seed=9223372036854775806: the last of seeds=3 would be too large"):
        TableJob(train=train, seeds=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows; a row is a name with the settings that it changes"),
        ("- a\n- b\n", "no rows"),
        ("base: {}\nh1: 3\n", "row h1: not settings"),
        ("a/b: {}\n", "row 'a/b': a name has letters"),
        ("1: {}\n", "row 1: a name"),
        ("table.md: {}\n", "row table.md: the table itself is written under this name"),
        ("base: {a: [}\n", "not YAML"),
    ],
)
def test_read_rows_refuses_a_bad_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_rows(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"heads": 2}}, "here: model has unknown keys: ['heads']"),
        ({"model": {"n_heads": 5}}, "here: model.d_model=32 is not a multiple of model.n_heads=5"),
        ({"train": {"precision": "fp8"}}, "here: train.precision='fp8' is not"),
        ({"model": 3}, "here: model=3 is not"),
        ({"train": {"trackers": ["wandbb"]}}, "here: train.trackers=wandbb is not one of"),
    ],
)
def test_with_changes_refuses_what_is_no_setting(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        with_changes(tiny_job(tmp_path, write_corpus(tmp_path)), changes, place="here")


def test_rows_of_a_file_train_at_the_peak_of_their_own_width_and_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("given: {}\nnarrow: {model: {d_model: 128}}\nlonger: {train: {warmup_steps: 2000}}\n")
    job = compose("table", [f"table={path}", "experiment=base", "recipe=low_resource"])
    assert isinstance(job, TableJob)
    peaks = {row.name: row.job.train.peak(row.job.model.d_model) for row in rows_of_file(job).rows}
    expected = {"given": (512, 500), "narrow": (128, 500), "longer": (512, 2000)}
    assert peaks == pytest.approx({name: 1.5 / math.sqrt(width * steps) for name, (width, steps) in expected.items()})

    path.write_text("twice: {train: {learning_rate_scale: 2.0}}\n")
    job = compose("table", [f"table={path}", "experiment=small"])
    assert isinstance(job, TableJob)
    with pytest.raises(
        InputError, match=r"row twice: train\.learning_rate_scale=2\.0: no effect while train\.learning_rate=0"
    ):
        rows_of_file(job)


@pytest.mark.parametrize("row", ["{run_dir: elsewhere}", "{train: {seed: 7}}"])
def test_table_refuses_a_row_that_sets_what_the_table_decides_on(tmp_path: Path, row: str) -> None:
    """It would stand in the table as a change, and have had no effect."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"a: {row}\n")
    assert "row a: " in (message := refuse(table_job(tmp_path, table=str(path))))
    assert "the table itself sets it" in message


def test_table_refuses_a_row_with_another_model_beside_init_from(tmp_path: Path) -> None:
    """Each run would have that of `init_from`, whatever its row says."""
    path = tmp_path / "mine.yaml"
    path.write_text("a: {model: {dropout: 0.2}}\nb: {model: {n_heads: 1}}\n")
    job = replace(table_job(tmp_path, table=str(path)), init_from="runs/a")
    assert refuse(job).startswith(f"{path}: row b: model.n_heads=1: init_from=runs/a brings its own model")
    path.write_text("a: {init_from: runs/a, model: {n_heads: 1}}\n")
    assert "row a: model.n_heads=1: init_from=runs/a" in refuse(replace(job, init_from=None))


@pytest.mark.parametrize(("table", "making"), [("1", make_layer_table), ("3", make)])
def test_table_refuses_an_output_that_is_a_file_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[TrainJob],
    table: str,
    making: Callable[[TableJob], Any],
) -> None:
    monkeypatch.setattr(
        "transformer.tools.paper.layer_table.time_layers", lambda **sizes: pytest.fail("it times layers")
    )
    output = tmp_path / "output"
    output.write_text("")
    with pytest.raises(StorageError, match="output: cannot be made"):
        making(table_job(tmp_path, table=table, output=str(output)))
    assert asked == []


def test_table_refuses_a_folder_that_another_table_trains_in_and_that_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = table_job(tmp_path, table="3", rows="base", width=64, output=str(tmp_path / "table"))
    trained: list[str] = []

    def train_beside_another(job_of_row: TrainJob) -> None:
        trained.append(job_of_row.run_dir)
        with pytest.raises(
            LockedError, match=r"table: in use by process \d+ on .*; stop it, or choose another output$"
        ):
            make_table(job, rows_of(job))
        raise InputError("not trained")

    monkeypatch.setattr(grid, "train", train_beside_another)
    _, errors = make_table(job, rows_of(job))
    assert [Path(path).parent.name for path in trained] == ["base"]
    assert [str(error) for error in errors] == ["not trained"]


def test_table_has_one_store_for_all_its_rows(tmp_path: Path, asked: list[TrainJob]) -> None:
    job = table_job(tmp_path, table="3", rows="base,A_h1", seeds=2)
    make(replace(job, data=replace(job.data, store_dir=None)))
    assert {job.data.store_dir for job in asked} == {str(tmp_path / ".store")}
    assert len(asked) == 4


# ---- the grid -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TableJob]:
    """Three rows of a file, two seeds each, of which one row cannot be trained; the corpus's tests are scored."""
    folder = tmp_path_factory.mktemp("grid")
    path = folder / "mine.yaml"
    path.write_text("base: {}\nbroken: {data: {train: {src: nowhere.en}}}\nh1: {model: {n_heads: 1}}\n")
    job = table_job(folder, table=str(path), seeds=2)
    with pytest.raises(InputError, match=r"nowhere\.en"):
        run_command("table", job)
    return folder / "run-mine", job


def test_grid_goes_on_after_a_row_that_fails(grown: tuple[Path, TableJob]) -> None:
    output, _ = grown
    table = read(output / "table.json")
    assert [(row["name"], len(row["runs"]), len(row["errors"])) for row in table["rows"]] == [
        ("base", 2, 0),
        ("broken", 0, 2),
        ("h1", 2, 0),
    ]
    text = (output / "table.md").read_text()
    assert "- broken failed: " in text
    assert "nowhere.en" in text


def test_grid_trains_each_row_with_its_seed_and_settings(grown: tuple[Path, TableJob]) -> None:
    output, _ = grown
    configs = {
        (name, seed): read(output / name / f"seed-{seed}" / "run.json")["config"]
        for name in ("base", "h1")
        for seed in (1, 2)
    }
    assert {key: config["train"]["seed"] for key, config in configs.items()} == {key: key[1] for key in configs}
    assert {key: config["model"]["n_heads"] for key, config in configs.items()} == {
        key: 2 if key[0] == "base" else 1 for key in configs
    }


def test_grid_trains_each_row_with_its_plugins_as_it_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the user's file names them as the command line does."""
    seen = []

    def train(job: TrainJob) -> None:
        seen.append((registry.is_allowed("tracker", "mine"), registry._settings.get("length", {})))

    monkeypatch.setattr(grid, "train", train)
    monkeypatch.setattr(registry, "_allowed", set())
    monkeypatch.setattr(registry, "_settings", {})
    of_rows = {unit: TrainJob(plugins={"length": {"unit": unit}}) for unit in ("words", "characters")}
    tracked = TrainJob(train=TrainConfig(trackers=["mine"]))
    run_grid({**of_rows, "tracked": tracked})
    assert seen == [(False, {"unit": "words"}), (False, {"unit": "characters"}), (True, {"unit": "characters"})]


def test_grid_skips_what_is_finished_and_goes_on_with_the_rest(
    grown: tuple[Path, TableJob], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, job = grown
    Path(job.table).write_text("base: {}\nh1: {model: {n_heads: 1}}\n")
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/*/checkpoints/*/model.safetensors")}
    (output / "h1" / "seed-2" / "results.json").unlink()
    run_command("table", job)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is trained again"
    assert (output / "h1" / "seed-2" / "results.json").exists()
    assert "| h1 | `model.n_heads=1` |" in capsys.readouterr().out


def test_grid_leaves_a_row_that_another_process_trains(grown: tuple[Path, TableJob]) -> None:
    output, job = grown
    Path(job.table).write_text("base: {}\nh1: {model: {n_heads: 1}}\n")
    with lock_run(output / "base" / "seed-1"):
        table, errors = make(job)
    assert [len(row.runs) for row in table.rows] == [1, 2]
    assert "in use by process" in str(errors[0])


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_table_measures_what_the_run_says(grown: tuple[Path, TableJob]) -> None:
    """Against the run directory, read without the package; words and pieces are counted here once more."""
    output, job = grown
    run = output / "base" / "seed-1"
    results = read(run / "results.json")
    row = read(output / "table.json")["rows"][0]["runs"][0]
    nll = results["validations"][-1]["nll"]
    references = (run / "hypotheses" / "dev.ref").read_text(encoding="utf-8").splitlines()
    words = sum(len(line.split(" ")) + 1 for line in references)
    pieces = sum(len(ids) + 1 for ids in Tokenizer.load(run / "tokenizer.model").encode(references))

    assert row["perplexity"] == pytest.approx(math.exp(nll), rel=1e-12)
    assert row["word_perplexity"] == pytest.approx(math.exp(nll * pieces / words), rel=1e-12)
    assert {name: score["bleu"] for name, score in row["scores"].items()} == {
        name: scores["bleu"] for name, scores in results["test_sets"].items()
    }
    assert (row["parameters"], row["steps"], row["seed"]) == (results["parameters"], 3, 1)
    assert row["seconds"] == results["training_seconds"]

    tokens = read(run / "data.json")["tokens"]
    assert tokens["src"] != tokens["tgt"], "the two sides could be exchanged"
    target = results["target_tokens"]
    assert row["flops"] == step_flops(
        job.model,
        Tokenizer.load(run / "tokenizer.model").vocab_size,
        source=round(target * tokens["src"] / tokens["tgt"]),
        target=target,
        mean_length=target / results["sentences"],
    )


def test_table_csv_has_a_line_for_each_run_and_set(grown: tuple[Path, TableJob]) -> None:
    output, _ = grown
    lines = list(csv.DictReader(io.StringIO((output / "table.csv").read_text())))
    assert {(line["row"], line["seed"], line["set"]) for line in lines} == {
        (row, seed, name) for row in ("base", "h1") for seed in ("1", "2") for name in ("test", "other")
    }
    assert all(line["bleu_signature"].startswith("nrefs:1|bs:1000") for line in lines)


def test_bootstrap_bleu_is_sacrebleus() -> None:
    """The figures are of `sacrebleu --confidence` over the same lines."""
    hypotheses = ["das ist ein haus und ein baum", "ein mann geht nach hause mit dem hund", "sie lesen ein buch"] * 20
    references = [
        "das ist das haus und ein baum",
        "ein mann geht weg nach hause mit dem hund",
        "sie liest ein buch",
    ] * 20
    interval = bootstrap_bleu(hypotheses, references, tgt_lang="de")
    assert (round(interval.bleu, 2), round(interval.half_width, 2)) == (51.25, 3.05)
    assert "bs:1000|seed:12345" in interval.signature


def test_table_reports_a_damaged_run_and_keeps_the_others(grown: tuple[Path, TableJob]) -> None:
    output, job = grown
    Path(job.table).write_text("base: {}\nh1: {model: {n_heads: 1}}\n")
    run = output / "base" / "seed-1" / "hypotheses"
    kept = (run / "test.hyp").read_bytes()
    report = run.parent / "data.json"
    report_kept = report.read_text()
    try:
        (run / "test.hyp").unlink()
        table, errors = make(job)
        (run / "test.hyp").write_bytes(kept)
        report.write_text("{")
        _, errors_of_report = make(job)
    finally:
        (run / "test.hyp").write_bytes(kept)
        report.write_text(report_kept)

    assert [(len(row.runs), len(row.errors)) for row in table.rows] == [(1, 1), (2, 0)]
    assert "test.hyp: cannot be read" in str(errors[0])
    assert "data.json: " in str(errors_of_report[0])
    assert "copy it again" in str(errors_of_report[0])


def test_table_shows_a_perplexity_that_no_number_can_hold(grown: tuple[Path, TableJob]) -> None:
    """Per word, where hardly any spaces are, e to the power of pieces times loss over words passes 1e308."""
    output, job = grown
    Path(job.table).write_text("base: {}\nh1: {model: {n_heads: 1}}\n")
    path = output / "base" / "seed-1" / "results.json"
    kept = path.read_text()
    results = read(path)
    results["validations"][-1]["nll"] = 800.0
    try:
        path.write_text(json.dumps(results))
        table, _ = make(replace(job, seeds=1))
    finally:
        path.write_text(kept)
    assert table.rows[0].runs[0].perplexity == math.inf
    assert "| base |  | inf | inf |" in format_markdown(table)


def test_table_says_how_many_steps_were_done(grown: tuple[Path, TableJob]) -> None:
    """A finished run stays as it is where train.max_steps is lowered, which a run may be."""
    _, job = grown
    Path(job.table).write_text("base: {}\nh1: {model: {n_heads: 1}}\n")
    table, _ = make(replace(job, train=replace(job.train, max_steps=2)))
    assert "3 steps of 600 target tokens for every row" in table.notes[0]


# ---- what is shown --------------------------------------------------------------------------------------------------


def measured(bleu: float, perplexity: float, seed: int = 1) -> Measured:
    score = Interval(bleu, half_width=0.6, signature="nrefs:1")
    return Measured(seed, "runs/x", perplexity, 2 * perplexity, {"development": score}, 65_000_000, 10, 1e15, 120.0)


def shown(*rows: tuple[str, float | list[float]]) -> str:
    """The Markdown of rows of Table 3 with these BLEU scores, one for each seed."""
    table_rows = []
    for name, scores in rows:
        scores = scores if isinstance(scores, list) else [scores]
        runs = [measured(score, 5.0, seed) for seed, score in enumerate(scores, 1)]
        table_rows.append(TableRow(name, "", TABLE_3[name], runs, []))
    table = Table("Table 3", ["Corpus: none."], table_rows)
    return format_markdown(table) + format_conclusions(table)


def verdicts(text: str) -> list[str]:
    lines = text.partition("do these runs say so?")[2].split("\n")[2:]
    return [line.split(" | ")[-1].removesuffix(" |") for line in lines if line.startswith("|")]


@pytest.mark.parametrize(
    ("other", "verdict"),
    [(20.0, "yes"), (24.5, "undecided: the difference is too small"), (30.0, "no: the other way round")],
)
def test_conclusion_compares_the_difference_with_its_error(other: float, verdict: str) -> None:
    """Two intervals of 0.6 make 0.85 of their difference."""
    assert verdicts(shown(("base", 25.0), ("A_h1", other))) == [verdict]


@pytest.mark.parametrize(("other", "verdict"), [(24.5, "yes: no difference that counts"), (20.0, "no: they differ")])
def test_conclusion_of_rows_alike(other: float, verdict: str) -> None:
    assert verdicts(shown(("base", 25.0), ("E_learned", other))) == [verdict]


def test_conclusion_takes_the_seeds_into_account() -> None:
    """Means 25 and 22, sd 2.83 each: the standard error of the difference is 2.83, twice that is more than 3."""
    text = shown(("base", [23.0, 27.0]), ("A_h1", [20.0, 24.0]))
    assert verdicts(text) == ["undecided: the difference is too small"]
    assert "25.00 ± 0.60, sd 2.83 of 2 seeds" in text
    assert "| 5.00, sd 0.00 |" in text
    assert "sd is the standard deviation over seeds" in text


def test_table_says_that_one_seed_is_test_sampling_only() -> None:
    text = shown(("base", 25.0))
    assert "test sampling only" in text
    assert "| base |  | 4.92 | 5.00 | 10.00 | 25.8 | 25.00 ± 0.60 | 65 | 65.00 | 1.00e+15 | 2.0 |" in text


def test_table_has_notes_of_the_columns_that_it_has_alone() -> None:
    """Of dev BLEU where there is no test set; of seeds where there are several; of BLEU where some run has it."""
    scored = [replace(measured(20.0 + seed, 5.0 + seed, seed), scores={}) for seed in (1, 2)]
    unscored = format_markdown(Table("mine", [], [TableRow("a", "", None, scored, [])]))
    assert "| 6.50, sd 0.71 | 13.00, sd 1.41 |" in unscored
    assert [line for line in unscored.split("\n") if line.startswith("- ")] == [
        "- sd is the standard deviation over seeds."
    ]

    dev = replace(measured(20.0, 5.0), scores={"dev": Interval(20.0, 0.5, "s")})
    text = format_markdown(Table("mine", [], [TableRow("a", "", None, [dev], [])]))
    assert "| BLEU, dev |" in text
    assert "resamples of the dev sentences: dev sampling only" in text
    diverged = [replace(dev, perplexity=math.inf), dev]
    assert "| inf | " in format_markdown(Table("mine", [], [TableRow("a", "", None, diverged, [])]))


def test_table_without_a_test_set_scores_the_dev_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The average on it, with an interval; and no note speaks of test sets."""
    data = replace(write_corpus(tmp_path / "corpus"), test={})
    (tmp_path / "rows.yaml").write_text("base: {}\n", encoding="utf-8")
    job = tiny_job(tmp_path / "a", data, max_steps=2, save_every=2, average=1)
    given = {field.name: getattr(job, field.name) for field in fields(TrainJob)}
    run_command("table", TableJob(**given, table=str(tmp_path / "rows.yaml"), seeds=2))
    out = capsys.readouterr().out
    assert "| BLEU, dev |" in out
    assert re.search(r"± \d+\.\d\d, sd \d+\.\d\d of 2 seeds \|", out), out
    assert "on the development set, for there is no test set" in out
    assert "test sets" not in out
    row = read(tmp_path / "a-rows" / "table.json")["rows"][0]["runs"][0]
    assert row["scores"]["dev"]["bleu"] == read(tmp_path / "a-rows/base/seed-1/results.json")["dev"]["bleu"]


def test_table_has_no_column_of_the_papers_without_its_figures() -> None:
    text = format_markdown(Table("mine", [], [TableRow("a", "", None, [measured(1.0, 2.0)], [])]))
    assert "paper" not in text


@pytest.mark.parametrize(
    "scores",
    [[], [{}], [{"a": Interval(1.0, 0.5, "s")}, {"b": Interval(2.0, 0.5, "s")}]],
    ids=["failed", "none", "own"],
)
def test_write_table_writes_what_there_is(tmp_path: Path, scores: list[dict[str, Interval]]) -> None:
    """All rows may have failed, there may be no test set, and each row may have test sets of its own."""
    runs = [replace(measured(1.0, 2.0), scores=of_run) for of_run in scores]
    rows = [TableRow(f"row-{number}", "", None, [run], []) for number, run in enumerate(runs)]
    write_table(tmp_path, Table("mine", [], rows or [TableRow("broken", "", None, [], ["no such file"])]), "text\n")

    assert (tmp_path / "table.md").read_text() == "text\n"
    lines = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [line["row"] for line in lines] == [row.name for row in rows]
    assert all(line["perplexity"] == "2.0" for line in lines)


def test_write_table_without_a_score_has_no_plot(tmp_path: Path) -> None:
    """One row failed, the other has no test set."""
    unscored = Measured(1, "runs/x", 5.0, 10.0, {}, 65_000_000, 10, 1e15, 120.0)
    rows = [TableRow("a", "", None, [], ["out of space"]), TableRow("b", "", None, [unscored], [])]
    write_table(tmp_path, Table("mine", [], rows), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.json", "table.md"]


def test_write_table_compares_with_the_first_row_that_has_a_score(tmp_path: Path) -> None:
    rows = [TableRow("a", "", None, [], ["out of space"]), TableRow("b", "", None, [measured(20.0, 5.0)], [])]
    write_table(tmp_path, Table("mine", [], rows), "")
    assert "BLEU less that of b" in (tmp_path / "table.svg").read_text(encoding="utf-8")


def test_plot_is_the_same_file_for_the_same_table() -> None:
    points = [Point("base", 25.8, [Interval(20.0, 0.5, "")]), Point("x", None, [Interval(19.0, 0.5, "")])]
    plot = plot_points(points, title="Table 3")
    assert plot is not None
    assert plot.startswith(b"<?xml")
    assert plot == plot_points(points, title="Table 3")
