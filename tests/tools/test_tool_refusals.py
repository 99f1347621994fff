"""What the tools refuse in one line: the command as it is typed, and words of what is said."""

from pathlib import Path

import pytest

from support.refusals import assert_refused_as_typed, make_world

ATTENTION = "attention run_dir=a output=out "
KEEP = "translate keep=0.9 input=two output=out "
FILES = "compare data.tgt_lang=de hypotheses="
INPUT = [
    # attention
    (f"{ATTENTION}text=a file=b", "text and file are set: choose one"),
    (f"{ATTENTION}target=a", "target is the translation of text: set text, too"),
    (f"{ATTENTION}text=a forced=true", "forced=true reads the references of a set: leave text and file out"),
    (f"{ATTENTION}text=a sentences=3", "sentences are taken from file or set: leave text out"),
    (f"{ATTENTION}alignments=x", "alignments are for many sentences: set sentences, too"),
    (f"{ATTENTION}alignments=x sentences=2", "alignments are of references: set forced=true, or references="),
    (f"{ATTENTION}references=x", "references belong to file: set file, too"),
    (f"{ATTENTION}layers=[0]", "layers=[0]: layers are counted from 1"),
    (f"{ATTENTION}line=0", "line=0 must be at least 1"),
    # translate
    (f"{KEEP}keep=0", "keep=0.0 must be above 0, and at most 1: the share of lines to keep"),
    (f"{KEEP}keep=1.5", "keep=1.5 must be above 0, and at most 1"),
    (f"{KEEP}keep=90", "keep=90.0 must be above 0, and at most 1"),
    (f"{KEEP}keep=nan", "keep=nan must be above 0, and at most 1"),
    (f"{KEEP}output=null", "keep=0.9 chooses only after everything is translated: set input=FILE output=FILE"),
    ("translate keep=0.9", "keep=0.9 chooses only after everything is translated: set input=FILE output=FILE"),
    (f"{KEEP}format=tsv", "keep=0.9 writes pairs of a line and its translation: leave format out"),
    (f"{KEEP}n_best=2", "leave n_best out"),
    (f"{KEEP}align=true", "leave align out"),
    (f"{KEEP}split=true", "leave split out"),
    ("translate split=true format=jsonl", "split=true needs format=text: format=jsonl has the score of a whole line"),
    ("translate split=true format=tsv n_best=2", "split=true needs format=text"),
    (
        "translate split=true prefix=a.txt",
        "split=true translates by search, sentence by sentence: leave prefix, rerank",
    ),
    ("translate split=true sample.top_k=3", "leave prefix, rerank and sample out"),
    ("translate split=true rerank=chrf", "leave prefix, rerank and sample out"),
    ("translate candidates=8", "candidates is for rerank"),
    ("translate candidates=1 rerank=chrf", "candidates=1 must be at least 2"),
    ("translate candidates=4 n_best=5 rerank=chrf format=jsonl", "n_best=5 must be at most candidates=4"),
    ("translate run_dir=a rerank=bleu candidates=9", "candidates=9 must be at most search.beam_size=4"),
    # compare
    ("compare", "there must be two systems or more to compare: transformer compare runs/a runs/b"),
    ("compare a a", "a is named twice"),
    ("compare a nowhere", "nowhere: no such run directory"),
    ("compare a bare hypotheses=[a,b] references=c", "runs and hypotheses: choose one"),
    ("compare hypotheses=[a,b]", "hypotheses and references belong together"),
    (f"{FILES}[one,two] references=one", "one has 1 lines, two has 2"),
    ("compare a bare changed=-1", "changed=-1 must be"),
    ("compare published.test=two", "there must be two systems or more"),
    ("compare a published.news=two", "published.news: the runs have no such test set: they have test, other"),
    ("compare a published.test=two", "two: 2 lines, but test has 12 sentences: published.test needs"),
    (f"{FILES}[one,two] references=one published.a=b", "published goes with runs"),
    ("compare a bare sources=one", "sources belong to hypotheses"),
    # report
    ("report", "name the run directories: transformer report runs/a"),
    ("report a a", "a is named twice"),
    ("report a a/", "a is named twice"),
    ("report a published published.test=x", "published is named twice"),
    ("report nowhere", "nowhere: no such run directory"),
    ("report a a/hypotheses", "a/hypotheses: not a run directory: it has none of run.json"),
    # table
    ("table table=1 rows=base", "table=1 trains nothing: leave rows and seeds out"),
    ("table table=1 seeds=2", "table=1 trains nothing: leave rows and seeds out"),
    ("table model.n_layers=2", "model.n_layers=2: table=3 has the paper's models"),
    ("table recipe=tensor2tensor", "recipe=tensor2tensor: table=3 has the paper's models"),
    ("table width=100", "width=100 must be a multiple of 32"),
    ("table table=mine.yaml width=64", "width=64 is for the tables of the paper"),
    ("table width=4611686018427387904", "width=4611686018427387904 must be at most 1048576"),
    ("table init_from=a", "table=3 trains models of its own from their first step on: leave init_from"),
    ("table table=mine.yaml init_from=a model.n_heads=1", "model.n_heads=1: init_from=a brings its own model"),
    ("table train.seed=9223372036854775806 seeds=3", "the last of seeds=3 would be too large"),
    ("table rows=base,F output=out", "no row begins with 'F'; there are base, A_h1"),
    ("table rows=base,,A output=out", "no row begins with ''"),
    ("table table=nowhere.yaml", "nowhere.yaml: No such file or directory: name 1, 2, 3, scores or a YAML file"),
    ("table table=bare", "there is no run directory in it, nor in a folder of it"),
    ("table table=. rows=a", "leave rows and seeds out"),
    ("table table=. seeds=2", "leave rows and seeds out"),
    ("table table=scores model.d_model=44 model.n_heads=4", "model.d_model=44 must be a multiple of 8"),
    ("table table=scores init_from=a", "leave init_from out"),
    ("table table=scores width=128", "set model.d_model"),
    # the rest
    *((f"summary tokens_per_second={speed}", "tokens_per_second") for speed in ("0", "-1", "nan", "inf")),
    ("summary run=nowhere", "no such run directory"),
    ("verify steps=0", "steps=0 is neither a number of steps nor `all`"),
    ("verify steps=-3", "steps=-3 is neither"),
    ("verify steps=some", "steps=some is neither"),
    ("verify run_dir=nowhere", "nowhere: no such run directory"),
    ("replay run_dir=nowhere", "no such run directory"),
    ("replay run_dir=a step=0", "step=0 must be"),
    ("replay run_dir=a step=80", "step=80: ... is a training of 2 steps"),
    ("doctor experiment=small data.train.src=two data.train.tgt=two data.dev.src=nix data.dev.tgt=nix", "nix: cannot"),
    ("train experiment=small data.train.augment=upper", "data.train.augment=upper is for development and test se"),
    ("train experiment=small data.dev.augment=lower", "data.dev.augment=lower is not one of ...typos... choose one"),
]
CHECKPOINT = [("summary run=bare", "run.json"), ("verify run_dir=bare", "run.json")]
STORAGE = [
    (f"{ATTENTION}text=one output=one", "one: cannot be made: Not a directory: choose another directory"),
]
ROWS = [(line, words, status) for status, rows in ((2, INPUT), (4, CHECKPOINT), (5, STORAGE)) for line, words in rows]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("line", "words", "status"), ROWS, ids=[line[:60] for line, _, _ in ROWS])
def test_tool_is_refused(line: str, words: str, status: int, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    assert_refused_as_typed(line, words, status=status, world=world)
