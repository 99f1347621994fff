"""`transformer report`: what its page shows in a real browser, against what the run directory holds."""

import io
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser, running_browser
from support.corpora import metrics_of, read, run, run_command, tiny_job, write_corpus
from transformer.cli.commands import compose
from transformer.config.settings import Device, Format
from transformer.decoding import batched
from transformer.decoding.parallel import in_parallel
from transformer.errors import StorageError
from transformer.run_dir import RunDir
from transformer.tools import significance
from transformer.tools.compare.job import CompareJob
from transformer.tools.report.curves import MOST_POINTS, thin
from transformer.tools.report.job import ReportJob
from transformer.tools.report.overview import format_duration
from transformer.tools.report.provenance import train_overrides
from transformer.tools.report.reading import read_run
from transformer.tools.report.samples import Part, mark_differences, split_text, spread
from transformer.tools.report.scores import score_checkpoints

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>"
READY = ".contents a"
EXPLORED = ".explorer[data-ready]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs on the same corpus that differ in their sizes and their seed."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    run(tiny_job(folder / "a", data))
    run(tiny_job(folder / "b", data, model={"d_ff": 96, "n_decoder_layers": 2}, seed=2))
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, in the working directory; few resamples, to save time."""
    monkeypatch.setattr(significance, "RESAMPLES", 30)
    monkeypatch.setattr(significance, "TRIALS", 40)
    folder = Path(shutil.copytree(trained, tmp_path / "runs"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def show(browser: Browser, job: ReportJob, *, drawn: str = READY) -> Path:
    """Make the page, and open it in a window of a desk's size."""
    run_command("report", replace(job, threads=1, device=Device.cpu))
    browser.resize(1200, 900)
    browser.choose_scheme("light")
    browser.errors.clear()
    browser.requests.clear()
    path = Path(job.output).absolute()
    browser.open(path, drawn=drawn)
    assert browser.errors == []
    return path


def table(browser: Browser, caption: str) -> list[list[str]]:
    """The texts of a table's cells, row by row, the head among them."""
    found: list[list[str]] = browser.evaluate(
        f"(() => {{ const one = [...document.querySelectorAll('table')].find("
        f"(table) => table.caption.textContent === {json.dumps(caption)});"
        "return [...one.rows].map((row) => [...row.cells].map((cell) => cell.textContent)); })()"
    )
    return found


def column(browser: Browser, caption: str, number: int = 1) -> dict[str, str]:
    """A column of a table, by the names of its rows."""
    return {row[0]: row[number] for row in table(browser, caption)}


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
    )
    return found


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


# ---- one run --------------------------------------------------------------------------------------------------------


def test_report_shows_the_values_of_the_run(browser: Browser, runs: Path) -> None:
    page = show(browser, ReportJob(runs=["a"], samples=5, attention=1), drawn=EXPLORED)
    results, record = read(runs / "a" / "results.json"), read(runs / "a" / "run.json")
    assert browser.evaluate("document.title") == "Report on a"
    assert {address.partition("#")[0] for address in browser.requests} <= {"about:blank", page.as_uri()}

    # Facts and scores.
    overview = column(browser, "Runs")
    assert overview["state"] == "finished at step 12"
    assert overview["parameters"] == f"{results['parameters']:,}"
    assert overview["BLEU, test"].startswith(f"{results['test_sets']['test']['bleu']:.2f} ± ")
    (_, row) = table(browser, "test: 12 sentences")
    assert row[1].startswith(f"{results['test_sets']['test']['bleu']:.2f} ± ")
    assert row[2].startswith(f"{results['test_sets']['test']['chrf']:.2f} ± ")
    assert sum(int(row[1]) for row in table(browser, "test, by words of the reference")[1:]) == 12

    # The settings that differ from the paper's, and no other.
    settings = table(browser, "Different from the paper's base")
    assert settings[0] == ["key", "paper", "a"]
    assert ["model.d_model", "512", "32"] in settings
    assert "train.seed" not in [row[0] for row in settings]
    assert column(browser, "The corpus")["data.dev.src"] == record["config"]["data"]["dev"]["src"]

    # Origin.
    origin = column(browser, "Origin of the runs")
    assert origin["data digest"] == record["data_digest"]
    assert origin["tokenizer SHA-256"] == record["tokenizer_sha256"]
    assert origin["test sets SHA-256"] == results["test_digest"]
    assert origin["seed"] == "1"
    assert origin["machine"] == record["machine"]
    assert f"torch {record['versions']['torch']}" in origin["versions"]

    # Data.
    data = read(runs / "a" / "data.json")
    pairs = {row[0]: row[1:] for row in table(browser, "Sentence pairs")}
    assert pairs["train"][:2] == ["200", f"{data['sets']['train']['pairs_kept']:,}"]
    assert column(browser, "Tokenizer")["vocabulary"] == "60 pieces"
    assert sum(int(count) for count in list(column(browser, "Pairs that filters dropped").values())[1:]) == (
        200 - data["pairs_kept"]
    )


def test_report_translates_the_dev_set_with_kept_checkpoints(browser: Browser, runs: Path) -> None:
    """What validation measured at step 12 is measured again, to the digit, beside its interval."""
    show(browser, ReportJob(runs=["a"], samples=0, attention=0))
    found = {row[0]: row[1:] for row in table(browser, "a, dev set")}
    last = read(runs / "a" / "results.json")["validations"][-1]
    assert list(found) == ["checkpoint", "step 4", "step 6", "step 8", "step 12", "averaged"]
    assert found["step 12"][:4] == [
        f"{last['loss']:.3f}",
        f"{2.718281828459045 ** last['nll']:.2f}",
        f"{last['bleu']:.2f}",
        f"{last['chrf']:.2f}",
    ]
    assert found["step 12"][4].startswith(f"{last['bleu']:.2f} ± ")
    assert found["step 4"][:4] == [""] * 4, "it was not validated"
    assert len(found["averaged"]) == 5


def test_report_draws_the_curves_of_the_metrics(browser: Browser, runs: Path) -> None:
    """Keys move a chart's cursor to a step, and it says what was logged there."""
    show(browser, ReportJob(runs=["a"], samples=0, attention=0, checkpoints=0))
    logged = {line["step"]: line for line in metrics_of(runs / "a") if "train/loss" in line}
    assert texts(browser, "figure figcaption strong") == [
        *("Loss", "Perplexity", "Dev scores", "Learning rate"),
        *("Gradient norm", "Speed", "Model TFLOP/s", "Padding and waiting"),
    ]

    browser.evaluate("document.querySelector('figure[data-chart=\"Learning rate\"]').focus()")
    for key, step in (("End", 12), ("ArrowLeft", 11), ("Home", 1)):
        browser.press(key, key)
        (said,) = texts(browser, 'figure[data-chart="Learning rate"] output')
        number, _, value = said.removeprefix("step ").partition(": ")
        assert int(number) == step
        assert float(value) == pytest.approx(logged[step]["train/rate"], rel=1e-3)

    browser.evaluate("document.querySelector('figure[data-chart=\"Loss\"]').focus()")
    browser.press("End", "End")
    (said,) = texts(browser, 'figure[data-chart="Loss"] output')
    validation = read(runs / "a" / "results.json")["validations"][-1]
    training, dev = (float(part.split()[1]) for part in said.partition(": ")[2].split(" · "))
    assert training == pytest.approx(logged[12]["train/loss"], rel=1e-3)
    assert dev == pytest.approx(validation["loss"], rel=1e-3)


def test_report_lists_samples_from_best_to_worst(browser: Browser, runs: Path) -> None:
    show(browser, ReportJob(runs=["a"], samples=6, attention=0, checkpoints=0))
    scores = [float(text) for text in texts(browser, ".samples .score")]
    assert len(scores) == 6
    assert scores == sorted(scores, reverse=True)

    assert texts(browser, ".samples button") == ["test", "other", "best first", "worst first"]
    browser.evaluate("document.querySelectorAll('.samples button')[1].click()")
    kept = {kind: lines_of(runs / "a" / "hypotheses" / f"other.{kind}") for kind in ("src", "ref", "hyp")}
    lines = [int(text.removeprefix("line ")) for text in texts(browser, ".samples .line")]
    shown = texts(browser, ".samples dd")
    assert shown[0::3] == [kept["src"][line - 1] for line in lines]
    assert shown[1::3] == [kept["ref"][line - 1] for line in lines]
    assert shown[2::3] == [kept["hyp"][line - 1] or "(empty)" for line in lines]

    browser.evaluate("document.querySelectorAll('.samples button')[3].click()")
    assert texts(browser, ".samples .line")[0] == f"line {lines[-1]}"


# ---- several runs ---------------------------------------------------------------------------------------------------


def test_report_compares_runs_as_compare_does(browser: Browser, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("compare", CompareJob(runs=["a", "b"], format=Format.json))
    compared = json.loads(capsys.readouterr().out)["test_sets"]["test"]["scores"]
    show(browser, ReportJob(runs=["a", "b"], samples=3, attention=0, checkpoints=0))

    head, of_a, of_b = table(browser, "test: 12 sentences")
    names = ["BLEU", "chrF2", "chrF2++", "TER"]
    assert head == ["", *names, *(f"p, {name}" for name in names)]
    for column_number, metric in enumerate(compared, 1):
        one, other = metric["systems"]
        assert of_a[column_number] == f"{one['score']:.2f} ± {one['half_width']:.2f}"
        assert of_b[column_number] == f"{other['score']:.2f} ± {other['half_width']:.2f}"
        assert of_b[column_number + 4] == f"{other['p_randomisation']:.4f}, {other['p_bootstrap']:.4f}"
    assert of_a[5:] == ["baseline"] * 4

    assert ["model.d_ff", "2048", "64", "96"] in table(browser, "Different from the paper's base")
    overview = table(browser, "Runs")
    assert overview[0] == ["", "a", "b"]
    assert ["model", "1 + 1 layers, d_model 32, 2 heads", "1 + 2 layers, d_model 32, 2 heads"] in overview
    assert texts(browser, ".curves .runs button") == ["a", "b"]
    names = texts(browser, ".samples li:first-child dt")
    assert [name.rstrip("0123456789.") for name in names] == ["source", "reference", "a", "b"]


def test_report_has_somebody_elses_translations_beside_the_runs(browser: Browser, runs: Path) -> None:
    published = {"test": "b/hypotheses/test.hyp"}
    show(browser, ReportJob(runs=["a"], published=published, samples=0, attention=0, checkpoints=0))
    captions = texts(browser, "table caption")
    assert [captions.count(f"{name} sentences") for name in ("test: 12", "other: 8")] == [2, 1]
    rows = [row for row in texts(browser, "tbody tr") if row.startswith("published")]
    assert len(rows) == 1  # with its scores, and its p beside the run
    assert "±" in rows[0]
    assert any(note.startswith("published, test: test.hyp, 12 lines, SHA-256") for note in texts(browser, ".warning"))


def test_report_says_why_runs_are_not_compared(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """Another test set, or another signature: each run is scored by itself."""
    other = write_corpus(tmp_path / "elsewhere", seed=5)
    run(tiny_job(runs / "c", other, max_steps=2, save_every=2, average=1))
    show(browser, ReportJob(runs=["a", "c"], samples=0, attention=0, checkpoints=0))
    (warning,) = texts(browser, ".warning")
    assert warning.startswith("The runs are not compared: ")
    assert "is not the same test set in a and c: they differ in line 1" in warning
    assert texts(browser, "table caption").count("test: 12 sentences") == 2


def test_report_leaves_a_key_empty_that_a_run_does_not_have(browser: Browser, runs: Path, tmp_path: Path) -> None:
    """And marks it in no run: it is no other value."""
    record = read(runs / "b" / "run.json")
    other = record["config"]["data"]["test"].pop("other")
    (runs / "b" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    show(browser, ReportJob(runs=["a", "b"], samples=0, attention=0, checkpoints=0))
    rows = {row[0]: row[1:] for row in table(browser, "The corpus")}
    assert rows["data.test.other.src"] == [other["src"], ""]
    assert "" not in texts(browser, "td.marked")


def test_report_says_what_is_not_set_in_words(browser: Browser, runs: Path) -> None:
    """And marks it among settings alone: of the corpus, one run's files have keys that another's do not need."""
    record = read(runs / "b" / "run.json")
    record["config"]["data"]["train"]["dataset"] = "train.tsv"
    record["config"]["train"] |= {"clip_norm": 1.0, "max_tokens": None}
    (runs / "b" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    show(browser, ReportJob(runs=["a", "b"], samples=1, attention=0, checkpoints=0))
    recipe = {row[0]: row[1:] for row in table(browser, "Different from the paper's base")}
    assert recipe["train.clip_norm"] == ["not set", "not set", "1.0"]
    assert recipe["train.max_tokens"][0::2] == ["not set", "not set"]
    assert {row[0]: row[1:] for row in table(browser, "The corpus")}["data.train.dataset"] == ["", "train.tsv"]
    assert "not set" in texts(browser, "td.marked")
    assert [text for text in texts(browser, "th, td") if re.search(r"\bnull\b", text)] == []


def test_report_breaks_keys_at_their_dots_alone(browser: Browser, runs: Path) -> None:
    show(browser, ReportJob(runs=["a", "b"], samples=0, attention=0, checkpoints=0))
    browser.resize(400, 800)
    broken = "[...document.querySelectorAll('tbody th')].flatMap((one) => [...one.childNodes].filter((part) => {"
    broken += "const range = document.createRange(); range.selectNodeContents(part);"
    broken += "return new Set([...range.getClientRects()].map((rect) => rect.top)).size > 1 && !/\\s/.test(part.data);"
    broken += "})).map((part) => part.data)"
    assert browser.evaluate(broken) == []
    assert "train.tokens_per_step" in texts(browser, "tbody th"), "still the whole key, to be copied"


def test_report_keeps_the_names_of_rows_where_a_table_scrolls(browser: Browser, runs: Path) -> None:
    show(browser, ReportJob(runs=["a", "b"], samples=0, attention=0, checkpoints=0))
    browser.resize(400, 800)
    place = "(() => { const one = [...document.querySelectorAll('.scroll')].find((one) => one.scrollWidth > 500);"
    place += "one.scrollLeft = 100; const name = one.querySelector('tbody th').getBoundingClientRect();"
    place += "return [one.scrollLeft, name.left - one.getBoundingClientRect().left]; })()"
    assert browser.evaluate(place) == [100, 0]


@pytest.mark.ci
def test_report_has_no_shadow_beside_a_table_that_fits(browser: Browser, runs: Path) -> None:
    """Nor on a screen with finer pixels, within one of which a table may end."""
    image = pytest.importorskip("PIL.Image")
    show(browser, ReportJob(runs=["a"], samples=0, attention=0, checkpoints=0))
    browser.resize(900, 800, scale=1.5)
    corners = browser.evaluate(
        "[...document.querySelectorAll('.blocks .scroll')].filter((one) => one.scrollWidth <= one.clientWidth)"
        ".map((one) => one.getBoundingClientRect()).map((box) => [1.5 * box.right, 1.5 * (box.top + scrollY + 6)])"
    )
    assert len(corners) > 3
    with image.open(io.BytesIO(browser.screenshot())) as picture:
        paper = picture.convert("RGB")
    for x, y in corners:  # beside the caption
        assert {paper.getpixel((round(x) + shift, round(y))) for shift in (-3, -2, -1, 0)} == {(255, 255, 255)}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (11, "11 s"),
        (185, "3 min 05 s"),
        (3600, "1 h 00 min"),
        (7520, "2 h 05 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_format_duration_writes_a_time_as_people_do(seconds: int, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_report_describes_the_data_of_runs_apart_where_a_set_differs(browser: Browser, runs: Path) -> None:
    """The digest of a run's data covers the training text alone."""
    for name in ("c", "d"):
        shutil.copytree(runs / "a", runs / name)
    other_dev = read(runs / "c" / "data.json")
    other_dev["sets"]["dev"]["pairs_read"] = 7
    other_dev["sets"]["dev"]["files"]["src"]["sha256"] = "0" * 64
    (runs / "c" / "data.json").write_text(json.dumps(other_dev), encoding="utf-8")
    other_weight = read(runs / "d" / "data.json")
    other_weight["sets"]["train"]["weight"] = 2.5
    (runs / "d" / "data.json").write_text(json.dumps(other_weight), encoding="utf-8")
    show(browser, ReportJob(runs=["a", "c", "b", "d"], samples=0, attention=0, checkpoints=0))

    captions = [text for text in texts(browser, "table caption") if text.startswith("Sentence pairs")]
    assert captions == ["Sentence pairs of a, b", "Sentence pairs of c", "Sentence pairs of d"]
    assert column(browser, "Sentence pairs of a, b")["dev"] == "16"
    assert column(browser, "Sentence pairs of c")["dev"] == "7"
    weights = [column(browser, caption, 3)["train"] for caption in captions]
    assert weights == ["1", "1", "2.5"]


# ---- what is missing, damaged or hostile ----------------------------------------------------------------------------


def test_report_of_a_run_that_trains_on_is_not_of_a_finished_one(runs: Path) -> None:
    with (runs / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 15, "train/loss": 2.5}\n')
    reading = read_run("a")
    assert (reading.is_finished, reading.last_step) == (False, 15)
    assert [validation.step for validation in reading.validations] == [6, 12]
    assert reading.missing[-1].startswith("a/results.json: of step 12, and training has gone on to step 15: ")
    assert read_run("b").is_finished


def test_report_keeps_what_it_has_translated_when_the_machine_has_no_more(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = read_run("a")
    searches = itertools.count()

    def in_turn(*arguments: Any, **options: Any) -> Iterator[Any]:
        if next(searches) == 1:
            raise RuntimeError("can't start new thread")
        return in_parallel(*arguments, **options)

    monkeypatch.setattr(batched, "in_parallel", in_turn)
    scores = score_checkpoints(reading, ReportJob(runs=["a"], checkpoints=2, device=Device.cpu))
    assert [score.checkpoint for score in scores] == ["step-4", "averaged"]
    assert len(reading.missing) == 1
    assert reading.missing[0].startswith("Interval of step-12: translating: no thread can be started: end other ")


def test_report_of_an_unfinished_run_says_what_is_missing(browser: Browser, runs: Path) -> None:
    (runs / "a" / "results.json").unlink()
    shutil.rmtree(runs / "a" / "averaged")
    show(browser, ReportJob(runs=["a"], samples=3, attention=0))
    assert column(browser, "Runs")["state"] == "not finished: at step 12 of 12"
    warnings = texts(browser, ".warning")
    assert warnings[0].startswith("a/results.json: not there: the run is not finished.")
    assert any("There are no scores of a test set" in text for text in warnings)
    found = {row[0]: row[1:] for row in table(browser, "a, dev set")}
    last = [line for line in metrics_of(runs / "a") if "dev/bleu" in line][-1]
    figures = [f"{last['dev/loss']:.3f}", f"{last['dev/perplexity']:.2f}", f"{last['dev/bleu']:.2f}"]
    assert found["step 12"][:3] == figures


def test_report_marks_settings_that_differ_from_the_first_run_that_can_be_read(browser: Browser, runs: Path) -> None:
    """And the command line at its end makes this page again."""
    (runs / "a" / "run.json").write_text("{", encoding="utf-8")
    job = ReportJob(runs=["a", "b"], samples=0, attention=0, checkpoints=0, output="x.html")
    show(browser, job)
    assert ["model.d_ff", "2048", "unknown", "96"] in table(browser, "Different from the paper's base")
    assert texts(browser, "td.marked") == []
    (again,) = [text for text in texts(browser, "pre, code") if "transformer report" in text]
    assert (
        again.strip() == "transformer report a b output=x.html samples=0 checkpoints=0 attention=0 device=cpu threads=1"
    )


def test_report_of_a_run_that_has_only_its_metrics(browser: Browser, runs: Path) -> None:
    for path in (runs / "a").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "metrics.jsonl":
            path.unlink()
    with (runs / "a" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 13, "train/l\n[]\n' + b"[" * 50_000 + b'\n{"step": true, "x": 1}\n')
        file.write(b'{"step": 14, "x": "y"}\n\xff')  # the first of them is sound
    show(browser, ReportJob(runs=["a"]))
    warnings = " ".join(texts(browser, ".warning"))
    for words in ("a/run.json", "a/data.json", "a/results.json", "5 of its lines are damaged", "no checkpoint yet"):
        assert words in warnings
    assert len(texts(browser, "figure")) == 8


def test_report_shows_hostile_text_as_text(browser: Browser, runs: Path) -> None:
    record = read(runs / "a" / "run.json")
    record["config"]["data"]["root"] = HOSTILE
    record["versions"][HOSTILE] = HOSTILE
    record["machine"] = f"{HOSTILE}\u202e\x1b[2J"
    (runs / "a" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    data = read(runs / "a" / "data.json")
    data["sets"][HOSTILE] = data["sets"].pop("train")
    data["dropped"] = {HOSTILE: 1}
    (runs / "a" / "data.json").write_text(json.dumps(data), encoding="utf-8")
    hypotheses = runs / "a" / "hypotheses" / "test.hyp"
    hypotheses.write_text(f"{HOSTILE}\n" * len(lines_of(hypotheses)), encoding="utf-8")
    with (runs / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 13, "__proto__": 1.0, HOSTILE: 2.0}) + "\n")
    name = "<img src=x>"
    (runs / "a").rename(runs / name)

    page = show(browser, ReportJob(runs=[name], attention=1), drawn=EXPLORED)
    assert browser.evaluate("document.title") == f"Report on {name}"
    assert column(browser, "Origin of the runs")["machine"] == f"{HOSTILE}\\u202e\\x1b[2J"
    assert HOSTILE in texts(browser, ".samples dd")
    assert HOSTILE in column(browser, "Sentence pairs")
    assert browser.evaluate("document.querySelectorAll('img, iframe, object, form').length") == 0
    assert browser.evaluate("document.querySelectorAll('script:not([type])').length") == 1
    assert {address.partition("#")[0] for address in browser.requests} <= {"about:blank", page.as_uri()}


@pytest.mark.ci
def test_report_page_has_a_bounded_size(runs: Path) -> None:
    """However large the documents are that somebody forged: 16 MiB a document, and 100,000 log lines."""
    record = read(runs / "a" / "run.json")
    record["config"]["data"]["root"] = "x" * 10_000_000
    record["versions"] = {f"v{n}": "1" for n in range(50_000)}
    (runs / "a" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    hypotheses = runs / "a" / "hypotheses" / "test.hyp"
    hypotheses.write_text(f"{'ä' * 3_000}\n" * len(lines_of(hypotheses)), encoding="utf-8")
    with (runs / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(f'{{"step": {step}, "train/loss": {step % 7}.5}}\n' for step in range(13, 100_000))
    run_command("report", ReportJob(runs=["a"], checkpoints=0, attention=0, threads=1))
    assert (runs / "report.html").stat().st_size < 300_000


def test_report_refuses_an_output_that_cannot_be_written(runs: Path) -> None:
    with pytest.raises(StorageError, match=r"^output=a: a directory: name the file to write"):
        run_command("report", ReportJob(runs=["a"], output="a"))
    with pytest.raises(StorageError, match=r"^output=a/run.json: cannot be made: "):
        run_command("report", ReportJob(runs=["a"], output="a/run.json/x.html"))


def test_report_leaves_runs_as_they_are_and_says_the_same_again(runs: Path) -> None:
    before = {path: path.read_bytes() for path in sorted((runs / "a").rglob("*")) if path.is_file()}
    (runs / "report.html").symlink_to("page.html")
    pages = []
    for _ in range(2):
        run_command("report", ReportJob(runs=["a"], samples=2, checkpoints=1, attention=1, threads=1))
        pages.append((runs / "page.html").read_bytes())
    assert pages[0] == pages[1]
    assert {path: path.read_bytes() for path in sorted((runs / "a").rglob("*")) if path.is_file()} == before


@pytest.mark.ci
def test_report_fits_every_window_in_both_schemes(browser: Browser, runs: Path) -> None:
    show(browser, ReportJob(runs=["a", "b"], samples=3, attention=1, checkpoints=1), drawn=EXPLORED)
    pictures = set()
    for width in (360, 1200):
        for scheme in ("light", "dark"):
            browser.resize(width, 800)
            browser.choose_scheme(scheme)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            pictures.add(browser.screenshot())
    assert len(pictures) == 4
    assert browser.errors == []


# ---- its parts ------------------------------------------------------------------------------------------------------


def test_train_overrides_are_those_of_the_run(runs: Path) -> None:
    record = RunDir(runs / "a").read_record()
    assert compose("train", train_overrides(record.config)) == record.config

    # A model that `init_from` brings may not be asked for beside it.
    warm = replace(record.config, init_from=str(runs / "a"), model=replace(record.config.model, dropout=0.3))
    again = compose("train", train_overrides(warm))
    assert again.model.dropout == 0.3
    assert replace(again, model=warm.model) == warm


@pytest.mark.parametrize(
    ("text", "by_character", "units"),
    [
        ("Ein Mann, der geht.", False, ["Ein", " ", "Mann", ",", " ", "der", " ", "geht", "."]),
        ("हिन्दी भाषा।", False, ["हिन्दी", " ", "भाषा", "।"]),
        ("今天很好。", True, ["今", "天", "很", "好", "。"]),
        ("が e\u0301", True, ["が", " ", "e\u0301"]),
        ("", False, []),
    ],
    ids=["German", "Hindi", "Chinese", "combined", "empty"],
)
def test_split_text(text: str, by_character: bool, units: list[str]) -> None:
    assert split_text(text, by_character=by_character) == units


def test_mark_differences_by_word() -> None:
    reference, (one, other) = mark_differences(
        "Ein Mann schläft auf dem Sofa.",
        ["Ein Mann schläft auf einem alten Sofa.", "Ein Mann auf dem Sofa."],
        by_character=False,
    )
    assert reference == [
        Part("Ein Mann ", []),
        Part("schläft", [1]),
        Part(" auf ", []),
        Part("dem", [0]),
        Part(" Sofa.", []),
    ]
    assert one == [Part("Ein Mann schläft auf ", []), Part("einem alten", [0]), Part(" Sofa.", [])]
    assert other == [Part("Ein Mann auf dem Sofa.", [])]


def test_mark_differences_by_character() -> None:
    reference, (found,) = mark_differences("今天天气很好", ["今天很好吗"], by_character=True)
    assert "".join(part.text for part in reference if part.differs_by) == "天气"
    assert found == [Part("今天很好", []), Part("吗", [0])]


@pytest.mark.parametrize("count", [1, 2, 5, 10, 20])
def test_spread_keeps_both_ends(count: int) -> None:
    found = spread(list(range(10)), count)
    assert len(found) == min(count, 10)
    assert found[0] == 0
    assert count == 1 or found[-1] == 9
    assert found == sorted(set(found))


def test_thin_keeps_spikes() -> None:
    curve = [(step, 1.0) for step in range(100_000)]
    curve[54_321] = (54_321, 99.0)
    curve[77_777] = (77_777, -5.0)
    found = thin(curve)
    assert len(found) <= MOST_POINTS
    assert {curve[0], curve[54_321], curve[77_777], curve[-1]} <= set(found)
    assert found == sorted(found)


def test_read_run_takes_the_last_of_two_values(runs: Path) -> None:
    with (runs / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1, "train/loss": 42}\n{"step": 3, "train/loss": 1e999}\n{"step": 2, "train/loss": true}\n')
    found: dict[int, Any] = dict(read_run("a").curves["train/loss"])
    logged = {line["step"]: line["train/loss"] for line in metrics_of(runs / "a")[:-3] if "train/loss" in line}
    assert found == logged | {1: 42.0}
