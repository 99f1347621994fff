"""What other packages add: the package of docs/plugins.md, installed as pip would, and packages that fail."""

import gzip
import json
import re
import sys
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

import transformer
from support.corpora import Ended, typed_in_a_child
from support.paths import ROOT
from transformer import registry
from transformer.cli.commands import compose
from transformer.config import jobs
from transformer.config.jobs import TrainJob, TranslateJob
from transformer.config.keys import names_of_plugins
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import TrainConfig
from transformer.errors import InputError
from transformer.evaluation.metrics import choose
from transformer.plugins import ScoreMetric

DEMO = ROOT / "data/demo"
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
TINY = (
    *("experiment=small", "tokenizer.vocab_size=150", "model.d_model=16", "model.d_ff=32", "model.n_heads=2"),
    *("model.n_layers=1", "train.max_steps=2", "train.save_every=2", "train.validate_every=2", "train.average=1"),
    *("train.threads=1", "train.tokens_per_step=600", "data.src_lang=en", "data.tgt_lang=de"),
)


def install(folder: Path, module: str, code: str, entry_points: list[str]) -> Path:
    """Lay a package out as pip does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    about = folder / f"{module}-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("\n".join(["[transformer.plugins]", *entry_points, ""]))
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the one of the page, and one that cannot be imported."""
    [code] = re.findall(r"^```python shown: the file\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r'^"([a-z]+\.[a-z]+)" = "(my_plugins:\w+)"$', PAGE, re.MULTILINE)
    assert {name for name, _ in named} == {"format.po", "score.length", "command.vocabulary"}
    folder = install(
        tmp_path_factory.mktemp("site"), "my_plugins", code, [f"{name} = {target}" for name, target in named]
    )
    return install(folder, "broken", "import a_module_that_is_not_there\n", ["tracker.broken = broken:open_it"])


def typed(*arguments: str, site: Path | None, folder: Path) -> Ended:
    """A command in a process of its own, where packages of `site` are installed."""

    def install_them() -> None:
        if site is not None:
            sys.path.insert(0, str(site))
        registry._installed.cache_clear()

    return typed_in_a_child(*arguments, cwd=folder, before=install_them)


@pytest.fixture(scope="module")
def trained(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gettext's files, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("trained")
    for name, size in (("train", 60), ("dev", 4)):
        sides = [(DEMO / f"{name}.{code}").read_text(encoding="utf-8").split("\n")[:size] for code in ("en", "de")]
        messages = [("", "Content-Type: text/plain; charset=UTF-8\n"), *zip(*sides, strict=True)]
        texts = [f'# one\nmsgid {json.dumps(source)}\nmsgstr ""\n{json.dumps(target)}\n' for source, target in messages]
        (folder / f"{name}.po").write_text("\n".join(texts), encoding="utf-8")
    (folder / "again.po.gz").write_bytes(gzip.compress((folder / "dev.po").read_bytes()))
    done = typed(
        *("train", *TINY, "run_dir=run", "data.train.dataset=train.po", "data.dev.dataset=dev.po"),
        *("data.test.again.dataset=again.po.gz", "data.scores=[length]"),
        site=site,
        folder=folder,
    )
    assert done.status == 0, done.said
    return folder


def test_plugins_page_adds_a_format_a_score_and_a_command(trained: Path, site: Path) -> None:
    scores = json.loads((trained / "run/results.json").read_text(encoding="utf-8"))["test_sets"]["again"]
    assert scores["others"]["length"]["signature"] == "unit:words|version:1"
    listed = typed("vocabulary", "run_dir=run", "count=5", site=site, folder=trained)
    assert listed.printed.split("\n")[:4] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert len(listed.printed.split()) == 5
    helped = typed("vocabulary", "--help", site=site, folder=trained)
    assert "count=10" in helped.printed
    assert "vocabulary" not in typed("--help", site=site, folder=trained).printed, "entry points are not read for it"


def test_plugins_page_promises_names_that_are_there_and_its_examples_need_no_others() -> None:
    promised = {
        f"{module}.{name}": attrgetter(name)(import_module(module))
        for module, names in re.findall(r"^\| `(transformer\.[\w.]+)` \| (`.*?`) \|", PAGE, re.MULTILINE)
        for name in re.findall(r"`([\w.]+)`", names)
    }
    assert "transformer.run_dir.RunDir.read_record" in promised
    examples = PAGE + (ROOT / "docs/translating.md").read_text(encoding="utf-8")
    imported = re.findall(r"^from (transformer[\w.]*) import (.+)$", examples, re.MULTILINE)
    assert {f"{module}.{name}" for module, names in imported for name in names.split(", ")} <= promised.keys()


def test_misspelt_plugin_is_told_of_those_that_are_installed(trained: Path, site: Path) -> None:
    done = typed("vocabluary", site=site, folder=trained)
    assert (done.status, done.said.count("\n")) == (2, 1)
    assert "unknown command 'vocabluary'; did you mean 'vocabulary'?; " in done.said
    assert re.search(r"but for those of plug-ins: .*\bvocabulary\b", done.said)
    done = typed("evaluate", "run_dir=run", "scores=[lenght]", site=site, folder=trained)
    assert (done.status, done.said.count("\n")) == (2, 1)
    assert re.search(r"scores=lenght is not one of paper_bleu, .*\blength\b.*: choose one, or install", done.said)


def test_plugins_that_are_not_installed_are_refused_in_one_line(trained: Path) -> None:
    done = typed("vocabulary", "run_dir=run", site=None, folder=trained)
    assert (done.status, done.said.count("\n")) == (2, 1)
    assert "unknown command 'vocabulary'" in done.said
    sets = ("data.train.dataset=train.po", "data.dev.dataset=dev.po")
    done = typed("train", *TINY, "run_dir=again", *sets, site=None, folder=trained)
    assert (done.status, done.said.count("\n")) == (2, 1)
    assert "dev.po: no such directory, nor a .tsv" in done.said


def test_settings_of_a_plugin_are_kept_with_its_version_and_bind_the_run(trained: Path, site: Path) -> None:
    words = [*("train", *TINY, "run_dir=set", "data.train.dataset=train.po", "data.dev.dataset=dev.po")]
    words += ["data.test.again.dataset=dev.po", "data.scores=[length]"]
    assert typed(*words, "plugins.length.unit=characters", site=site, folder=trained).status == 0
    record = json.loads((trained / "set/run.json").read_text(encoding="utf-8"))
    assert record["config"]["plugins"] == {"length": {"unit": "characters"}}
    assert record["versions"]["my_plugins"] == "0.1"
    scores = json.loads((trained / "set/results.json").read_text(encoding="utf-8"))["test_sets"]["again"]
    assert scores["others"]["length"]["signature"] == "unit:characters|version:1"

    resumed = typed(*words, "train.max_steps=4", site=site, folder=trained)
    assert (resumed.status, "Traceback" in resumed.said) == (4, False)
    assert "plugins.length.unit: characters -> null" in resumed.said

    scored = typed(
        *("evaluate", "run_dir=set", "format=json", "scores=[length]", "plugins.length.unit=words"),
        site=site,
        folder=trained,
    )
    assert "unit:words|version:1" in scored.printed, "a command has its own"


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("plugins.length.unit=pages", "plugins.length: unit=pages is not words or characters"),
        ("plugins.length.units=words", "plugins.length: Length has unknown keys: ['units']"),
        ("plugins.po.unit=words", "plugins.po.unit: the plug-in po has no settings: leave it out"),
        ("plugins.width.unit=words", "plugins.width.unit: no installed package has a plug-in 'width': install it"),
        ("plugins.length=3", "unknown key 'plugins.length'"),
    ],
)
def test_settings_that_a_plugin_does_not_have_are_refused_in_one_line(
    word: str, answer: str, trained: Path, site: Path
) -> None:
    done = typed(
        *("train", *TINY, "run_dir=not", "data.train.dataset=train.po", "data.dev.dataset=dev.po"),
        *("data.test.again.dataset=dev.po", "data.scores=[length]", word),
        site=site,
        folder=trained,
    )
    assert (done.status, done.said.count("error: ")) == (2, 1), done.said
    assert answer in done.said


def test_a_setting_of_a_plugin_may_be_null(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in itself reads what it is given, as in JSON."""
    monkeypatch.setattr(jobs, "has_settings", lambda name: True)
    job = compose("translate", ["plugins.limits.name=null"])
    assert isinstance(job, TranslateJob)
    assert job.plugins == {"limits": {"name": "null"}}


def test_settings_are_typed_by_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Limits:
        low: float = 0.5
        words: list[str] = field(default_factory=list)
        name: str | None = "5"
        is_strict: bool = False

    given = {"low": "1", "words": '["a", "b"]', "name": "7", "is_strict": "true"}
    monkeypatch.setitem(registry._settings, "limits", given)
    assert registry._with_settings("limits", Limits) == Limits(low=1.0, words=["a", "b"], name="7", is_strict=True)
    monkeypatch.setitem(registry._settings, "limits", {"name": "null"})
    assert registry._with_settings("limits", Limits).name is None
    for key, text in (("low", "much"), ("words", "a"), ("is_strict", "1")):
        monkeypatch.setitem(registry._settings, "limits", {key: text})
        with pytest.raises(InputError, match=rf"plugins\.limits: Limits\.{key}="):
            registry._with_settings("limits", Limits)


@pytest.mark.parametrize(
    "failure", [ValueError("odd\nwidth"), TypeError("odd width"), KeyError(), ZeroDivisionError("odd")]
)
def test_settings_that_a_plugin_fails_at_cost_one_line(failure: Exception) -> None:
    @dataclass
    class Odd:
        def __post_init__(self) -> None:
            raise failure

    with pytest.raises(InputError, match=r"^plugins\.odd: \w+") as refused:
        registry._with_settings("odd", Odd)
    assert "\n" not in str(refused.value)


def test_score_that_fails_to_be_made_costs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Odd:
        def __call__(self) -> ScoreMetric:
            raise KeyError("pages")

    monkeypatch.setattr(registry, "find", lambda kind, name: Odd())
    monkeypatch.setattr(registry, "is_allowed", lambda kind, name: True)
    with pytest.raises(InputError, match="odd"):
        choose(["odd"])


def test_runs_from_before_plugins_had_settings_are_read() -> None:
    job = to_json(TrainJob())
    assert job.pop("plugins") == {}
    assert from_json(TrainJob, job, complete=True).plugins == {}


SCREEN = """
from dataclasses import dataclass
from typing import ClassVar


@dataclass
class Asks:
    mark: str = "?"
    VERSION: ClassVar[int] = 1

    def find_faults(self, read, names, languages):
        for source, _ in read():
            yield "questions" if source.endswith(self.mark) else None
"""


def test_screen_of_another_package_drops_pairs(trained: Path, tmp_path: Path) -> None:
    sides = [(DEMO / f"train.{code}").read_text(encoding="utf-8").split("\n")[:60] for code in ("en", "de")]
    asked = sum(line.endswith("?") for line in sides[0])
    for code, lines in zip(("en", "de"), sides, strict=True):
        (tmp_path / f"train.{code}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    here = install(tmp_path / "site", "asks", SCREEN, ["screen.questions = asks:Asks"])
    words = (
        *("prepare", *TINY, "run_dir=run", "data.train.src=train.en", "data.train.tgt=train.de"),
        *("data.dev.src=train.en", "data.dev.tgt=train.de"),
    )
    done = typed(*words, "data.filter.doctor=[questions]", site=here, folder=tmp_path)
    assert done.status == 0, done.said
    assert asked > 0
    assert f"dropped: questions {asked})" in done.said
    stops = sum(line.endswith(".") for line in sides[0])
    done = typed(*words, "data.filter.doctor=[questions]", "plugins.questions.mark=.", site=here, folder=tmp_path)
    assert f"dropped: questions {stops})" in done.said, "prepared anew: " + done.said
    done = typed(*words, "data.filter.doctor=[answers]", site=here, folder=tmp_path)
    assert (done.status, done.said.count("\n")) == (2, 1)
    assert "data.filter.doctor=answers is not one of copies, encoding, markup" in done.said


def test_plugins_of_the_current_directory_are_not_read(trained: Path, tmp_path: Path) -> None:
    here = install(tmp_path / "here", "evil", "print('executed')\n", ["command.evil = evil:EVIL"])
    done = typed("evil", site=here, folder=here)
    assert (done.status, done.printed) == (2, "")
    assert "unknown command 'evil'" in done.said


def test_plugins_that_cannot_be_imported_cost_one_line(trained: Path, site: Path) -> None:
    done = typed(
        *("train", *TINY, "run_dir=broken", "train.trackers=[broken]"),
        *("data.train.dataset=train.po", "data.dev.dataset=dev.po"),
        site=site,
        folder=trained,
    )
    assert done.status == 2
    [line] = [line for line in done.said.split("\n") if "error" in line]
    assert "the tracker broken cannot be imported (ModuleNotFoundError: No module named 'a_module_that_" in line
    assert line.endswith("pip install --upgrade broken")


LOPSIDED = """
from dataclasses import dataclass

from transformer.config.jobs import Job
from transformer.config.settings import Format, option
from transformer.plugins import Command


def read(path, columns, left_out):
    yield path.read_text(encoding="ascii"), "1"


@dataclass
class ListJob(Job):
    format: Format = option(Format.text, "text or json")


LIST = Command(ListJob, lambda job: ["a", {"b": 1.5}], "list", (), show=lambda found: "in\\twords\\n")
"""


def test_plugin_that_raises_what_nobody_expects_costs_one_line_with_its_package(tmp_path: Path) -> None:
    here = install(tmp_path / "site", "first", LOPSIDED, ["format.odd = first:read"])
    (tmp_path / "a.odd").write_text("Straße", encoding="utf-8")
    done = typed(
        *("prepare", *TINY, "run_dir=run", "data.train.dataset=a.odd", "data.dev.dataset=a.odd"),
        site=here,
        folder=tmp_path,
    )
    assert done.status == 1
    assert re.search(
        r"^transformer: error: a plug-in of the package first fails: UnicodeDecodeError: ", done.said, re.M
    )
    assert "report it there, with the output of TRANSFORMER_DEBUG=1" in done.said
    assert "this is a bug" not in done.said


def test_command_of_a_plugin_prints_a_list_as_json(tmp_path: Path) -> None:
    here = install(tmp_path / "site", "first", LOPSIDED, ["command.listed = first:LIST"])
    assert typed("listed", site=here, folder=tmp_path).printed == "in\\twords\n"
    assert json.loads(typed("listed", "format=json", site=here, folder=tmp_path).printed) == ["a", {"b": 1.5}]


def test_plugin_that_two_packages_have_is_refused_in_one_line(tmp_path: Path) -> None:
    here = install(tmp_path / "site", "first", LOPSIDED, ["command.listed = first:LIST"])
    install(here, "second", LOPSIDED, ["command.listed = second:LIST", "command.other = second:LIST"])
    done = typed("listed", site=here, folder=tmp_path)
    assert (done.status, done.printed, done.said.count("\n")) == (2, "", 1)
    assert re.search(
        "the command listed comes with the packages (first and second|second and first): uninst", done.said
    )
    assert typed("other", site=here, folder=tmp_path).status == 0


def test_package_that_lies_in_two_places_has_its_plugins_once(tmp_path: Path) -> None:
    here = install(tmp_path / "site", "first", LOPSIDED, ["command.listed = first:LIST"])
    other = install(tmp_path / "other", "first", LOPSIDED, ["command.listed = first:LIST"])
    sys_path = [str(here), str(other)]

    def install_both() -> None:
        sys.path[:0] = sys_path
        registry._installed.cache_clear()

    assert typed_in_a_child("listed", cwd=tmp_path, before=install_both).status == 0


def test_find_executes_nothing_that_only_a_run_names(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    registry._installed.cache_clear()
    monkeypatch.setattr(registry, "_allowed", set())
    try:
        assert registry.is_known("format", "po")
        with pytest.raises(
            InputError, match=r"^the format po comes with the package my_plugins, but is not enabled here"
        ):
            registry.find("format", "po")
        assert "my_plugins" not in sys.modules
        registry.allow("po")
        assert registry.find("format", "po").__name__ == "read_po"
    finally:
        registry._installed.cache_clear()
        sys.modules.pop("my_plugins", None)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("data.train.dataset=corpus/train.csv.gz",), {"csv"}),
        (("data.train.dataset=far:news", "train.trackers=[shown]"), {"far", "shown"}),
        (("data.scores=[length]", "search.engine=ctranslate2"), {"length", "ctranslate2"}),
        (("run_dir=csv", "data.train.tag='<csv>'", "data.store_dir=wandb/csv"), set()),
    ],
)
def test_command_line_names_plugins_by_the_keys_that_choose_them(
    overrides: tuple[str, ...], named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "is_known", lambda kind, name: True)
    of_others = set(names_of_plugins(compose("train", ["experiment=small", *overrides]))) - {"torch", "en", "de", "gz"}
    assert of_others == named


@pytest.mark.plugins
def test_own_plugins_are_where_the_table_says() -> None:
    """Each is imported; those that need an optional package need it when they are used."""
    for kind, names in registry.OWN.items():
        for name, target in names.items():
            assert registry.load(target) is not None, f"{kind}.{name}"


def test_job_with_a_plugin_that_is_not_here_is_read_and_not_done(tmp_path: Path) -> None:
    """A run that was trained with another package's tracker can be read where that is missing."""
    stored = to_json(TrainJob(run_dir=str(tmp_path / "run"), train=TrainConfig(trackers=["theirs"])))
    job = from_json(TrainJob, stored)
    assert job.train.trackers == ["theirs"]
    with pytest.raises(
        InputError, match=r"^train\.trackers=theirs is not one of bounds, trackio, wandb(, \w+)*: choose one, or"
    ):
        transformer.train(job)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"^search\.engine=theirs is not one of torch, ctranslate2(, \w+)*: "):
        transformer.compose("train", ["experiment=demo", "search.engine=theirs"])
