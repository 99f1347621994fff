"""What a command refuses in one line, whatever module finds it: the line, and words of what is said."""

from pathlib import Path

import pytest

from support.refusals import assert_refused_as_typed, make_world

FILES = "evaluate data.tgt_lang=de hypotheses="
INPUT = [
    # the corpus
    ("prepare data.train.src=", "data.train.src is not set"),
    ("prepare data.dev.tgt=", "data.dev.tgt is not set"),
    ("prepare data.test.other.src=", "data.test.other.src is not set"),
    (
        "prepare data.train.src= data.train.tgt= data.dev.src= data.dev.tgt=",
        "data.train.src, data.train.tgt, data.dev.src and data.dev.tgt are not set: name text files, "
        "or a data set by data.train.dataset",
    ),
    ("prepare data.test.other.tgt=nix", "nix: cannot be read...'~data.test.other' leaves it out"),
    ("prepare data.test.other.tgt=one", "lines, one has 1"),
    ("prepare data.tgt_lang=chinese data.dev.src=nix", "data.tgt_lang=chinese: not a code of ISO 639"),
    ("train data.test.other.tgt_lang=chinese", "data.test.other.tgt_lang=chinese: not a code of ISO 639"),
    ("prepare data.extra.b.weight=2", "data.extra.b.src and data.extra.b.tgt are not set"),
    ("prepare data.extra.b.src=one data.extra.b.tgt=nix", "nix: cannot be read...check data.extra.b"),
    ("prepare data.extra.b.dataset=nix.tsv", "nix.tsv: cannot be read"),
    ("prepare data.extra.b.dataset=words.tsv", "words.tsv:1: 1 columns, not 2"),
    ("prepare data.extra.b.dataset=bytes.tsv", "bytes.tsv:2: not UTF-8"),
    ("prepare data.dev.src=empty data.dev.tgt=empty", "no sentence"),
    ("prepare data.train.src=empty data.train.tgt=empty", "train on (the files are empty): check data.train"),
    ("prepare data.train.src=blank data.train.tgt=blank", "train on (empty 2): check data.train"),
    ("prepare data.filter.max_length=1", "left to train on (too_long 200): check data.filter"),
    ("prepare tokenizer.model=one", "one: not a SentencePiece model"),
    *(
        (f"{of}={tag}", f"{of.split()[1]}={tag}")
        for of, tag in (
            ("train data.extra.bt.tag", "de"),
            ("translate tag", "</s>"),
            ("score tag", "<a>b"),
            ("evaluate test.news.tag", "de"),
        )
    ),
    # the training
    ("train train.subword_sampling=1.5", "train.subword_sampling=1.5: for BPE it is a probability"),
    ("train train.subword_sampling=0.1 tokenizer.algorithm=char", "=0.1 cuts pieces, and tokenizer.algorithm=char"),
    ("train train.subword_sampling=0", "train.subword_sampling=0"),
    ("train train.subword_sampling=nan", "train.subword_sampling=nan"),
    ("train experiment=small train.learning_rate_scale=2", "_scale=2: no effect while train.learning_rate=0.001"),
    ("train train.fit_memory=true", "fit_memory finds what train.max_tokens=300 sets: leave one of them out"),
    ("train experiment=small init_from=a model.d_ff=32", "init_from=a brings its own model: leave model.d_ff out"),
    ("train experiment=small init_from=a +model.norm=pre", "init_from=a brings its own model: leave model.norm out"),
    # the checkpoint
    ("translate run_dir=none/x", "none/x: no such run directory; `transformer train run_dir=none/x` makes one"),
    ("translate 'run_dir=none/no run'", "`transformer train 'run_dir=none/no run'`"),
    ("translate run_dir=c", "c: no such run directory; there are ...run_dir=a"),
    ("translate run_dir=a/averaged", "a/averaged: a checkpoint, not a run directory: run_dir=a checkpoint=averaged"),
    ("translate run_dir=a/checkpoints/step-00000002", "not a run directory: run_dir=a checkpoint=step-2"),
    ("translate run_dir=bare", "no checkpoint yet"),
    ("translate run_dir=bare checkpoint=last", "no checkpoint yet"),
    ("translate run_dir=bare checkpoint=averaged", "not there yet"),
    ("translate run_dir=bare checkpoint=best", "no validation has chosen"),
    ("translate run_dir=a checkpoint=step-40", "step-00000040 is not there; there are: step-2"),
    ("translate run_dir=a checkpoint=newest", "not one of averaged, best, last"),
    ("translate run_dir=a checkpoint=../../etc", "not one of averaged, best, last"),
    ("translate run_dir=a checkpoint=step-+1", "not one of averaged, best, last"),
    ("translate run_dir=a ensemble=[none/x]", "none/x: no such run directory"),
    # what is asked for
    ("translate threads=0", "threads=0 "),
    ("evaluate threads=-1", "threads=-1 "),
    ("average last=0", "last=0 "),
    ("average best=0", "best=0 "),
    ("translate n_best=0", "n_best=0 must be at least 1"),
    ("translate n_best=2000 format=tsv", "n_best=2000 must be at most 1024"),
    ("translate run_dir=a n_best=5 format=tsv", "n_best=5 must be from 1 to search.beam_size=4"),
    ("score search.cuda_graphs=true", "search.cuda_graphs=True is for a search, and given translations need none"),
    ("translate align=true format=tsv", "align=true needs format=jsonl"),
    ("translate run_dir=a strict=true < latin1", "line 2: not UTF-8 at byte 4: mend the line"),
    ("evaluate sweep.length_penalty=0.6,nan", "sweep.length_penalty=[0.6, nan]: each must be a number from 0 to 10.0"),
    # scores
    ("evaluate run_dir=a test.mine.src=two test.mine.tgt=one", "two has 2 lines, one has 1"),
    ("evaluate run_dir=a test.mine.src=two", "test.mine.tgt is not set"),
    ("evaluate run_dir=a test.mine.dataset=nix.tsv", "nix.tsv: cannot be read"),
    ("evaluate run_dir=a data.tgt_lang=chinese", "data.tgt_lang=chinese: not a code"),
    (f"{FILES}nix references=two", "nix: cannot be read (No such file"),
    (f"{FILES}two references=[two,one]", "two has 2 lines, one has 1: each line must translate"),
    (f"{FILES}latin1 references=two", "latin1:2: not UTF-8"),
    (f"{FILES}pieces references=two", "pieces: the hypotheses are in subwords"),
    (f"{FILES}empty references=empty", "empty: there are no sentences to score"),
    (f"{FILES}two", "hypotheses and references belong together: set both"),
    ("evaluate hypotheses=two references=two", "data.tgt_lang is not set"),
    (f"{FILES}two references=two test.a.src=x test.a.tgt=y", "leave test out"),
]
CHECKPOINT = [
    ("train run_dir=a train.seed=2 model.dropout=0.3 train.samples=0", "model.dropout: 0.1 -> 0.3; train.seed: 1 -> 2"),
]
STORAGE = [
    ("prepare data.store_dir=one/store", "cannot be written (Not a directory): free space or set data.store_dir"),
    ("train run_dir=one/a", "one"),
]
ROWS = [(line, words, status) for status, rows in ((2, INPUT), (4, CHECKPOINT), (5, STORAGE)) for line, words in rows]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("line", "words", "status"), ROWS, ids=[line for line, _, _ in ROWS])
def test_command_is_refused(line: str, words: str, status: int, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    assert_refused_as_typed(line, words, status=status, world=world)
