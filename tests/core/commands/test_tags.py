"""Tags in front of sources: for text that was translated back, and for several target languages in one model.

The corpus is digits in English words; its targets are German under the tag <2de>, and French under <2fr>.
"""

import io
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import transformer
from support.command_line import enter
from support.corpora import ENGLISH, GERMAN, read, results_of, run, run_command, texts, tiny_job, write_pair
from support.resumed_runs import stop_at
from transformer.cli.commands import compose
from transformer.config.jobs import EvaluateJob, ScoreJob, TrainJob, TranslateJob
from transformer.config.settings import (
    DataConfig,
    ExtraConfig,
    FilterConfig,
    LineFormat,
    Normalization,
    PairConfig,
    TokenizerConfig,
)
from transformer.data.prepare import Prepared, prepare
from transformer.data.source import Source
from transformer.decoding import score_stream, translate_stream
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.sets import evaluate

FRENCH = ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf")
SIZES = {"train": 300, "dev": 6, "test": 8}

Pairs = list[tuple[str, str]]


def spelt(digits: Sequence[int], words: Sequence[str]) -> str:
    return " ".join(words[digit] for digit in digits)


def draw(seed: int) -> dict[str, list[list[int]]]:
    """The digits of each set."""
    rng = random.Random(seed)
    return {name: [[rng.randrange(10) for _ in range(3)] for _ in range(size)] for name, size in SIZES.items()}


def write(folder: Path, name: str, pairs: Pairs, tag: str | None = None) -> PairConfig:
    return replace(write_pair(folder, name, pairs), tag=tag)


def write_languages(folder: Path) -> DataConfig:
    """Both languages for training and for tests; the development set is German."""
    sets = {}
    for language, words in (("de", GERMAN), ("fr", FRENCH)):
        for name, sentences in draw(seed=1).items():
            pairs = [(spelt(digits, ENGLISH), spelt(digits, words)) for digits in sentences]
            sets[name, language] = write(folder / language, name, pairs, f"<2{language}>")
    french = sets["train", "fr"]
    return DataConfig(
        train=sets["train", "de"],
        extra={"french": ExtraConfig(french.src, french.tgt, tag=french.tag)},
        dev=sets["dev", "de"],
        test={"german": sets["test", "de"], "french": sets["test", "fr"]},
        filter=FilterConfig(max_length=40),
        store_dir=str(folder / "store"),
    )


def without_tags(data: DataConfig) -> DataConfig:
    return replace(
        data,
        train=replace(data.train, tag=None),
        dev=replace(data.dev, tag=None),
        test={name: replace(pair, tag=None) for name, pair in data.test.items()},
        extra={name: replace(pair, tag=None) for name, pair in data.extra.items()},
    )


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_languages(tmp_path_factory.mktemp("languages"))


@pytest.fixture(scope="module")
def finished(languages: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A run of both languages; a few steps, which teach it nothing."""
    job = tiny_job(tmp_path_factory.mktemp("runs") / "both", languages, max_steps=4)
    run(job)
    return job


def few(folder: Path, train: Pairs, *, tag: str | None = "<bt>", extra: Pairs | None = None) -> TrainJob:
    """To be prepared only: `train` without a tag, and `extra` with one; without `extra`, `train` has it."""
    data = DataConfig(
        train=write(folder, "train", train, tag if extra is None else None),
        dev=write(folder, "dev", [("one two", "eins zwei")]),
    )
    if extra is not None:
        pair = write(folder, "extra", extra)
        data.extra["bt"] = ExtraConfig(pair.src, pair.tgt, tag=tag)
    return TrainJob(run_dir=str(folder / "runs" / "a"), data=data, tokenizer=TokenizerConfig(vocab_size=40))


def sources_of(prepared: Prepared) -> list[list[int]]:
    """The ids of the sources in the store."""
    return [prepared.store.gather(np.array([n]), 0).pieces.tolist() for n in range(len(prepared.store))]


# ---- keys -----------------------------------------------------------------------------------------------------------


TAGS = ("<bt>", ">>de<<", "[de]", "__de__", "{de}", '<a"b>', "<a,b>", "<a=b>", "\\a\\", "#a#", "@a@", "<zh-Hant>")


def test_compose_takes_a_tag_as_it_is_typed() -> None:
    """Behind the shell's quotes, without any of Hydra's own."""
    of_sets = {f"n{number}": tag for number, tag in enumerate(TAGS)}
    own = [f"data.{name}.tag=<bt>" for name in ("train", "dev", "extra.bt")]
    job = compose("train", ["experiment=base", *own, *(f"data.test.{name}.tag={tag}" for name, tag in of_sets.items())])
    assert isinstance(job, TrainJob)
    assert [pair.tag for pair in (job.data.train, job.data.dev, job.data.extra["bt"])] == ["<bt>"] * 3
    evaluated = compose("evaluate", [f"test.{name}.tag={tag}" for name, tag in of_sets.items()])
    assert isinstance(evaluated, EvaluateJob)
    for sets in (job.data.test, evaluated.test):
        assert {name: pair.tag for name, pair in sets.items()} == of_sets
    for tag in TAGS:
        translating, scoring = (compose(command, [f"tag={tag}"]) for command in ("translate", "score"))
        assert isinstance(translating, TranslateJob)
        assert isinstance(scoring, ScoreJob)
        assert translating.tag == scoring.tag == tag


@pytest.mark.parametrize("command", ["translate", "score", "train", "evaluate"])
def test_help_shows_the_tag(command: str) -> None:
    assert re.search(
        r"tag=null\n +.*a word in front of each (line|source), such as", enter(command, "--help", "all").out
    )


# ---- preparing ------------------------------------------------------------------------------------------------------


def test_prepare_puts_one_piece_in_front_of_each_source(languages: DataConfig, tmp_path: Path) -> None:
    """Behind it the source has the pieces that it has by itself; targets have no tag."""
    prepared = prepare(tiny_job(tmp_path / "a", languages))
    digits = draw(seed=1)["train"]
    german = [(f"<2de> {spelt(three, ENGLISH)}", spelt(three, GERMAN)) for three in digits]
    french = [(f"<2fr> {spelt(three, ENGLISH)}", spelt(three, FRENCH)) for three in digits]
    assert texts(prepared) == german + french

    tokenizer = prepared.tokenizers.source
    tags = [tokenizer.piece(ids[0]) for ids in sources_of(prepared)]
    assert tags == ["\u2581<2de>"] * 300 + ["\u2581<2fr>"] * 300
    plain = tokenizer.encode([spelt(three, ENGLISH) for three in digits])
    assert [ids[1:] for ids in sources_of(prepared)] == plain + plain

    assert prepared.dev["dev"][0] == (f"<2de> {spelt(draw(1)['dev'][0], ENGLISH)}", spelt(draw(1)["dev"][0], GERMAN))
    assert prepared.test["french"][0][0] == f"<2fr> {spelt(draw(1)['test'][0], ENGLISH)}"


def test_prepare_filters_the_text_without_its_tag(tmp_path: Path) -> None:
    """A source of nothing stays nothing; copies are copies, under whichever tag they come."""
    extra = [("", "null"), ("\u00a0", "eins"), ("\u200b", "zwei"), ("vier", "vier"), ("one", "eins"), ("two", "zwei")]
    job = few(tmp_path, [("one", "eins"), ("three", "drei")], extra=extra)
    job.data.filter = FilterConfig(drop_identical=True, drop_duplicates=True)
    job.tokenizer.normalization = Normalization.nmt_nfkc  # which drops a zero-width space
    prepared = prepare(job)
    assert texts(prepared) == [("one", "eins"), ("three", "drei"), ("<bt> two", "zwei")]
    found = {reason: count for reason, count in prepared.report.dropped.items() if count}
    assert found == {"empty": 2, "no_pieces": 1, "identical": 1, "duplicate": 1}


def test_prepare_counts_the_tag_as_a_piece(tmp_path: Path) -> None:
    pairs = [("one two three", "eins zwei drei"), ("one", "eins")]
    plain = prepare(few(tmp_path / "plain", pairs, tag=None))
    tagged = prepare(few(tmp_path / "tagged", pairs))
    counts = [len(ids) for ids in sources_of(plain)]
    assert [len(ids) for ids in sources_of(tagged)] == [count + 1 for count in counts]

    job = few(tmp_path / "limit", [("one two three", "eins"), ("one", "eins")])
    job.data.filter = FilterConfig(max_length=counts[0], max_ratio=99.0)
    prepared = prepare(job)
    assert (texts(prepared), prepared.report.dropped["too_long"]) == ([("<bt> one", "eins")], 1)


def test_prepare_leaves_blank_sources_of_evaluation_sets_blank(tmp_path: Path) -> None:
    job = few(tmp_path, [("one", "eins")])
    blank = [("", "null"), (" ", "null"), ("one", "eins")]
    job.data.dev = write(tmp_path, "blank", blank, "<bt>")
    job.data.test["x"] = job.data.dev
    prepared = prepare(job)
    assert prepared.dev["dev"] == prepared.test["x"] == [("", "null"), (" ", "null"), ("<bt> one", "eins")]


def test_prepare_names_a_corpus_by_its_tags(tmp_path: Path) -> None:
    """One without tags by the digest that it had before there were any."""
    job = few(tmp_path, [("one", "eins"), ("two", "zwei")], tag=None, extra=[("four", "vier")])
    plain = prepare(job).report.digest
    assert plain == "74b4f1bcf4725eac8ba733515daff2e071e5ee754b3c43ea74016fe05b7529b8"
    digests = {plain}
    for train, extra in ((None, "<bt>"), ("<bt>", None), ("<bt>", "<bt>"), (None, "<x>")):
        job.data.train.tag, job.data.extra["bt"].tag = train, extra
        digests.add(prepare(job).report.digest)
    assert len(digests) == 5

    # What only measures does not count.
    job.data.dev.tag = "<x>"
    assert prepare(job).report.digest in digests


def test_prepare_warns_of_a_tag_that_is_no_piece(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = few(tmp_path, [("one", "eins"), ("bet", "bett")])
    given = tmp_path / "given.model"
    given.write_bytes(prepare(job).tokenizers.source.model)
    assert "piece of the tokenizer" not in caplog.text

    # Of an evaluation set: no text that is trained on has it.
    job.data.dev.tag = "<it>"
    prepare(job)
    [message] = [message for message in caplog.messages if "piece of the tokenizer" in message]
    assert re.search(r"data\.dev\.tag=<it> into [2-9].*; no training set has it", message)
    job.data.dev.tag = None
    caplog.clear()

    # Of a given tokenizer.
    job.tokenizer.model = str(given)
    prepare(job)
    assert "piece of the tokenizer" not in caplog.text
    job.data.train.tag = "<be>"
    prepare(job)
    [message] = [message for message in caplog.messages if "piece of the tokenizer" in message]
    assert re.search(r"data\.train\.tag=<be> into [2-9].* a model can learn a tag of several pieces", message)
    assert "\n" not in message


# ---- training -------------------------------------------------------------------------------------------------------


def test_resume_refuses_another_tag_of_training_text(finished: TrainJob) -> None:
    extra = {"french": replace(finished.data.extra["french"], tag="<x>")}
    data = replace(finished.data, train=replace(finished.data.train, tag=None), extra=extra)
    with pytest.raises(CheckpointError) as refused:
        run(replace(finished, data=data))
    assert "data.train.tag: <2de> -> null; data.extra.french.tag: <2fr> -> <x>; the training data" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_resume_takes_another_tag_of_a_test_or_dev_set_for_another_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_languages(tmp_path / "text")
    job = tiny_job(tmp_path / "a", data, max_steps=6)
    stop_at(job, 3)
    data.dev.tag = "<2fr>"
    run(job)
    assert caplog.text.count("the text of data.dev has changed") == 1

    before = results_of(tmp_path / "a")
    data.test["german"].tag = "<2fr>"
    run(job)
    after = results_of(tmp_path / "a")
    assert before["test_digest"] != after["test_digest"]
    source = (tmp_path / "a" / "hypotheses" / "german.src").read_text(encoding="utf-8")
    assert source.startswith("<2fr> ")


def test_evaluate_scores_what_the_run_keeps_again(finished: TrainJob, tmp_path: Path) -> None:
    """What is kept is what the model reads: with the tag, as the same files are when they are named with it."""
    run_dir = Path(finished.run_dir)
    kept = (run_dir / "hypotheses" / "french.src").read_text(encoding="utf-8").splitlines()
    assert kept == [f"<2fr> {spelt(three, ENGLISH)}" for three in draw(seed=1)["test"]]

    recorded = read(run_dir / "results.json")["test_sets"]
    again = evaluate(EvaluateJob(run_dir=str(run_dir)))
    assert {name: scores.bleu for name, scores in again.test_sets.items()} == {
        name: scores["bleu"] for name, scores in recorded.items()
    }
    named = evaluate(EvaluateJob(run_dir=str(run_dir), test={"french": finished.data.test["french"]}))
    assert named.test_sets["french"].bleu == recorded["french"]["bleu"]


@pytest.mark.plugins
def test_compare_takes_the_same_text_under_other_tags(finished: TrainJob, tmp_path: Path) -> None:
    """A model of several languages beside a model of one."""
    from transformer.tools.compare.command import compare
    from transformer.tools.compare.job import CompareJob

    untagged = replace(finished.data.test["german"], tag=None)
    data = replace(finished.data, extra={}, train=replace(finished.data.train, tag=None), test={"german": untagged})
    alone = tiny_job(tmp_path / "german", data, max_steps=4)
    run(alone)
    comparison = compare(CompareJob(runs=[finished.run_dir, alone.run_dir]))
    assert list(comparison.test_sets) == ["german"]


@pytest.mark.plugins
def test_doctor_judges_text_without_tags(languages: DataConfig, tmp_path: Path) -> None:
    from transformer.tools.doctor.command import doctor
    from transformer.tools.doctor.job import DoctorJob

    job = DoctorJob(run_dir=str(tmp_path / "a"), data=languages, text_only=True)
    assert doctor(job) == doctor(replace(job, data=without_tags(languages)))


@pytest.mark.plugins
def test_check_longest_counts_the_tag(tmp_path: Path) -> None:
    from transformer.tools.doctor.pieces import check_longest
    from transformer.tools.doctor.survey import survey

    job = few(tmp_path, [("one two three", "eins"), ("two", "zwei")])
    tokenizers = prepare(job).tokenizers
    [pieces] = tokenizers.source.encode(["one two three"])
    read = survey("train", Source([(Path(job.data.train.title), Path(str(job.data.train.tgt)))]), None)
    [check] = check_longest([read], job, tokenizers)
    assert check.found.startswith(f"the longest sentence has {1 + len(pieces) + 1} tokens")  # tag, text, EOS


# ---- translating ----------------------------------------------------------------------------------------------------


def translated(job: TranslateJob, text: str) -> str:
    out = io.BytesIO()
    translate_stream.run(job, io.BytesIO(text.encode()), out)
    return out.getvalue().decode()


def test_translate_puts_a_tag_in_front_of_each_line(finished: TrainJob) -> None:
    """The same pieces, and so the same numbers, as where the user writes the tag."""
    job = TranslateJob(run_dir=finished.run_dir, format=LineFormat.jsonl)
    tagged = translated(replace(job, tag="<2fr>"), "one two\n\n \u200b\n  three\n")
    assert tagged == translated(job, "<2fr> one two\n\n\n<2fr> three\n")
    first, *blank, _ = (json.loads(line)["translations"][0] for line in tagged.splitlines())
    assert [(translation["text"], translation["log_prob"]) for translation in blank] == [("", None)] * 2

    translator = transformer.load(finished.run_dir)
    assert first["text"] == translator.translate(["<2fr> one two"])[0]
    [ids] = translator.tokenizers.source.encode(["<2fr> one two"])
    assert translator.tokenizers.source.piece(ids[0]) == "\u2581<2fr>"


def test_score_puts_a_tag_in_front_of_each_source(finished: TrainJob) -> None:
    def scores(tag: str | None, rows: str) -> str:
        out = io.BytesIO()
        score_stream.run(ScoreJob(run_dir=finished.run_dir, tag=tag), io.BytesIO(rows.encode()), out)
        return out.getvalue().decode()

    tagged = scores("<2fr>", "one two\tun deux\n\tun\n")
    assert tagged == scores(None, "<2fr> one two\tun deux\n\tun\n")
    assert tagged != scores("<2de>", "one two\tun deux\n\tun\n")
    assert tagged.endswith("\n\n")  # a blank source has no number


LEARNT = "of this model, which has learnt <2de>, <2fr>: choose among these"
NO_DIRECTION = (
    "begins with {}, which is no direction of this model: it has learnt <2de>, <2fr>: put one in front of each text "
    "(the commands do, with tag=... or a set's key tag)"
)


def test_a_tag_that_was_not_learnt_is_refused(finished: TrainJob) -> None:
    """By each command that takes one, before anything is translated, in a line that names those that were learnt."""
    run_dir = finished.run_dir
    commands: list[tuple[str, Callable[[], object]]] = [
        ("tag", lambda: translated(TranslateJob(run_dir=run_dir, tag="<2it>"), "")),
        ("tag", lambda: score_stream.run(ScoreJob(run_dir=run_dir, tag="<2it>"), io.BytesIO(), io.BytesIO())),
        (
            "test.mine.tag",
            lambda: evaluate(
                EvaluateJob(run_dir=run_dir, test={"mine": replace(finished.data.test["german"], tag="<2it>")})
            ),
        ),
    ]
    for key, command in commands:
        with pytest.raises(InputError) as refused:
            command()
        assert str(refused.value) == f"{key}=<2it> is no direction {LEARNT}"


def test_text_without_a_tag_that_was_learnt_is_refused(finished: TrainJob) -> None:
    """From Python, too; a blank text needs none, and the lines before the first such line are translated."""
    translator = transformer.load(finished.run_dir)
    assert len(translator.translate(["<2fr> one", "", " \u200b", " <2de> two"])) == 4
    for text, first in (("<2it> one", "'<2it>'"), ("one <2de>", "'one'")):
        two = ["<2de> one", text]
        asked: list[Callable[[], object]] = [
            partial(translator.translate, two),
            partial(translator.translate_n_best, two, 1),
            partial(translator.sample, two, 1),
            partial(translator.translate_sweep, two, [0.6]),
            partial(translated, TranslateJob(run_dir=finished.run_dir), "\n".join(two)),
        ]
        for ask in asked:
            with pytest.raises(InputError) as refused:
                ask()
            assert str(refused.value) == f"line 2 {NO_DIRECTION.format(first)}"

    with pytest.raises(InputError) as refused:
        score_stream.run(ScoreJob(run_dir=finished.run_dir), io.BytesIO(b"one\tun\n"), io.BytesIO())
    assert str(refused.value) == f"standard input:1: the source {NO_DIRECTION.format(repr('one'))}"
    untagged = replace(finished.data.test["german"], tag=None)
    with pytest.raises(InputError) as refused:
        evaluate(EvaluateJob(run_dir=finished.run_dir, threads=1, test={"mine": untagged}))
    assert str(refused.value).startswith("mine, line 1 begins with ")


def test_translate_refuses_a_tag_where_the_run_has_learnt_none(languages: DataConfig, tmp_path: Path) -> None:
    data = replace(without_tags(languages), extra={})
    run(tiny_job(tmp_path / "plain", data, max_steps=2))
    with pytest.raises(InputError, match=r"^tag=<2de> is no direction of this model, .* no tag at all: leave it out$"):
        translated(TranslateJob(run_dir=str(tmp_path / "plain"), tag="<2de>"), "one\n")
    assert translated(TranslateJob(run_dir=str(tmp_path / "plain")), "<2de> one\n").count("\n") == 1  # it is a word


def test_a_run_knows_the_tags_of_the_run_that_it_began_from(finished: TrainJob, tmp_path: Path) -> None:
    """It is trained on one of them, and had learnt the other one before."""
    data = replace(finished.data, extra={}, test={})
    job = replace(tiny_job(tmp_path / "more", data, max_steps=2), init_from=finished.run_dir)
    run(job)
    translator = transformer.load(job.run_dir)
    assert list(translator.tags) == ["<2de>", "<2fr>"]
    assert len(translator.translate(["<2fr> one", "<2de> one"])) == 2


def test_a_test_set_of_no_direction_costs_a_run_no_results(languages: DataConfig, tmp_path: Path) -> None:
    test = {"german": replace(languages.test["german"], tag=None)}
    job = tiny_job(tmp_path / "a", replace(languages, test=test), max_steps=2)
    assert results_of(run(job))["test_sets"].keys() == {"german"}


def test_train_says_what_next_with_a_tag_where_the_run_needs_one(
    finished: TrainJob, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="transformer")
    run_command("train", finished)
    assert f"transformer translate run_dir={finished.run_dir} 'tag=<2de>' < in.txt" in caplog.text


def test_required_tags_are_none_where_a_training_set_has_none(languages: DataConfig) -> None:
    """As beside text that was translated back, which a user's text is not."""
    assert languages.required_tags() == ["<2de>", "<2fr>"]
    assert replace(languages, train=replace(languages.train, tag=None)).required_tags() == []
    assert replace(languages, extra={}).required_tags() == ["<2de>"]
    assert without_tags(languages).required_tags() == []


@pytest.mark.slow
def test_tags_decide_the_language(languages: DataConfig, tmp_path: Path) -> None:
    """One model, two languages: each test set is translated into its own."""
    job = tiny_job(
        tmp_path / "a",
        languages,
        {"d_model": 64, "d_ff": 128, "dropout": 0.0},
        max_steps=200,
        learning_rate=5e-3,
        warmup_steps=20,
        tokens_per_step=1500,
        max_tokens=1500,
        save_every=200,
        validate_every=200,
        average=1,
        keep_last=2,
    )
    run(job)
    translator = transformer.load(tmp_path / "a", max_extra=12)
    for tag, own in (("<2de>", GERMAN), ("<2fr>", FRENCH)):
        found = translator.translate([f"{tag} {spelt(three, ENGLISH)}" for three in draw(seed=1)["test"]])
        assert all(found)
        assert {word for text in found for word in text.split()} <= set(own)
