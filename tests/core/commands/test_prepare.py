"""Raw text to a prepared corpus: checked before anything is written, built once, rebuilt when damaged."""

import gzip
import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from support.compressed import compressed
from support.corpora import overrides, texts
from support.corpora import start as start_command
from support.golden import assert_golden
from support.paths import CORPORA, needs_corpora
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import (
    Algorithm,
    DataConfig,
    ExtraConfig,
    FilterConfig,
    ModelConfig,
    Normalization,
    PairConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer.data.corpus import Pair, digest_pairs
from transformer.data.prepare import prepare
from transformer.data.report import DataReport, LineCounts
from transformer.data.round_trip import Change, RoundTrip
from transformer.data.source import Source
from transformer.data.store import StoreWriter
from transformer.data.tokenizer import Tokenizer, train_tokenizer
from transformer.errors import InputError, StorageError

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ZAHLEN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]


def spell(number: int, words: list[str]) -> str:
    return " ".join(words[int(digit)] for digit in str(number))


def write(path: Path, lines: list[str]) -> str:
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(compressed(content, path.suffix))
    return str(path)


def pair(folder: Path, name: str, numbers: range) -> PairConfig:
    return PairConfig(
        write(folder / f"{name}.en", [spell(n, WORDS) for n in numbers]),
        write(folder / f"{name}.de", [spell(n, ZAHLEN) for n in numbers]),
    )


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    folder = tmp_path / "corpus"
    folder.mkdir()
    data = DataConfig(
        train=pair(folder, "train", range(500)),
        dev=pair(folder, "dev", range(500, 520)),
        test={"first": pair(folder, "first", range(600, 610)), "second": pair(folder, "second", range(700, 703))},
        filter=FilterConfig(max_length=40),
    )
    return TrainJob(
        run_dir=str(tmp_path / "runs" / "a"),
        data=data,
        tokenizer=TokenizerConfig(vocab_size=80),
        train=TrainConfig(threads=1),
    )


def store_of(job: TrainJob) -> Path:
    (path,) = [p for p in (Path(job.run_dir).parent / ".store").iterdir() if p.is_dir()]
    return path


def test_prepare_gives_back_the_pairs_of_the_text(job: TrainJob) -> None:
    prepared = prepare(job)
    assert texts(prepared) == [(spell(n, WORDS), spell(n, ZAHLEN)) for n in range(500)]
    assert prepared.dev == {"dev": [(spell(n, WORDS), spell(n, ZAHLEN)) for n in range(500, 520)]}
    assert [len(prepared.test[name]) for name in ("first", "second")] == [10, 3]
    assert not Path(job.run_dir).exists()  # only the store was written
    assert [path.name for path in Path(job.run_dir).parent.iterdir()] == [".store"]


def test_prepare_writes_the_same_files_as_ever(job: TrainJob) -> None:
    """report.json, as version 3 of PREPARE_VERSION has it: other bytes would need another version, or a new key."""
    prepare(job)
    assert (store_of(job) / "report.json").read_text(encoding="utf-8") == (
        '{\n "pairs_read": 500,\n "pairs_kept": 500,\n "sources": [\n  {\n   "pairs_read": 500,\n   "pairs_kept": 500\n'
        '  }\n ],\n "dropped": {\n  "empty": 0,\n  "identical": 0,\n  "duplicate": 0,\n  "no_pieces": 0,\n'
        '  "too_long": 0,\n  "ratio": 0\n },\n "filters": {\n  "max_length": 40,\n  "max_ratio": 9.0,\n'
        '  "drop_identical": false,\n  "drop_duplicates": false\n },\n "tokens": {\n'
        '  "src": 2460,\n  "tgt": 2360\n },\n'
        ' "vocab_size": 80,\n "targets": {\n'
        '  "checked": 500,\n  "changed": 0,\n  "unknown": 0,\n  "example": null\n },\n'
        ' "lines": {\n  "several_sentences": 0,\n  "usual_pieces": 9\n }\n}'
    )


def test_prepare_opens_a_store_that_was_built_when_lines_were_not_counted(job: TrainJob) -> None:
    counted = prepare(job)
    store = store_of(job)
    report = json.loads((store / "report.json").read_bytes())
    del report["lines"]
    content = json.dumps(report, indent=1).encode()
    (store / "report.json").write_bytes(content)
    manifest = json.loads((store / "MANIFEST.json").read_bytes())
    manifest["files"]["report.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (store / "MANIFEST.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    opened = prepare(job)
    assert (store / "report.json").read_bytes() == content, "it was not built again"
    assert opened.report == replace(counted.report, lines=None)


def test_prepare_makes_the_same_with_any_threads_and_blocks(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifests = []
    for threads, block in ((1, 10_000), (3, 7)):  # 7: many more blocks than threads, and a last one of three
        monkeypatch.setattr("transformer.data.building.BLOCK", block)
        job.train.threads, job.data.store_dir = threads, str(tmp_path / str(threads))
        prepare(job)
        (manifest,) = Path(job.data.store_dir).glob("*/MANIFEST.json")
        manifests.append(manifest.read_bytes())
    assert manifests[0] == manifests[1]


def test_prepare_reports_counts_and_settings(job: TrainJob) -> None:
    prepared = prepare(job)
    report = json.loads(json.dumps(to_json(prepared.report), allow_nan=False))
    assert from_json(DataReport, report) == prepared.report
    entry = report["sets"]["test.second"]["files"]["tgt"]
    digest = subprocess.run(["sha256sum", entry["path"]], capture_output=True, check=True).stdout.split()[0].decode()
    assert (entry["sha256"], entry["bytes"]) == (digest, os.stat(entry["path"]).st_size)
    assert len(report["digest"]) == 64
    assert store_of(job).name == report["digest"][:16]
    hidden = {str(Path(job.run_dir).parents[1]): "FOLDER", report["digest"]: "DIGEST"}
    assert_golden("prepare-report", json.dumps(report, indent=1) + "\n", hidden)


def test_prepare_counts_sources_of_several_sentences_and_their_usual_length(job: TrainJob) -> None:
    """Those that are kept, of 500 and these: a tag is a piece of a source, and no sentence."""
    more = ["one. two.", "one! two", "three.", "ones. " + "two " * 200]
    job.data.train.tag = "<a>"
    for path, lines in ((job.data.train.src, more), (job.data.train.tgt, ["eins zwei"] * 4)):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    prepared = prepare(job)
    assert prepared.report.pairs_kept == 503
    assert prepared.report.lines == LineCounts(
        several_sentences=2, usual_pieces=int(prepared.store.lengths[:][:, 0].max()) - 1
    )


def test_prepare_drops_whole_training_pairs_and_counts_them(job: TrainJob, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "empty": [("", "null"), ("one", "  ")],
        "identical": [("one two", "one two")],
        "duplicate": [(spell(7, WORDS), spell(7, ZAHLEN))],
        "no_pieces": [("\u200b", "eins " * 200)],
        "too_long": [("one " * 200, "eins " * 200)],
        "ratio": [("one", "eins " * 15)],
    }
    lines = [(spell(n, WORDS), spell(n, ZAHLEN)) for n in range(500)]
    for number, strange in enumerate(pairs for pairs in extra.values()):
        lines[50 * number + 10 : 50 * number + 10] = strange  # in the middle, in the order of the filters
    for side, path in enumerate((job.data.train.src, job.data.train.tgt)):
        write(Path(path), [line[side] for line in lines])
        write(Path((job.data.dev.src, job.data.dev.tgt)[side]), ["", "one", "\u200b"])
    job.data.filter.drop_identical = job.data.filter.drop_duplicates = True
    job.tokenizer.normalization = Normalization.nmt_nfkc  # without it, U+200B is a character like any other
    with caplog.at_level(logging.INFO):
        prepared = prepare(job)
    assert prepared.report.dropped == {reason: len(pairs) for reason, pairs in extra.items()}
    assert (prepared.report.pairs_read, prepared.report.pairs_kept) == (507, 500)
    assert texts(prepared) == [(spell(n, WORDS), spell(n, ZAHLEN)) for n in range(500)]
    assert prepared.dev == {"dev": [("", ""), ("one", "one"), ("\u200b", "\u200b")]}  # never filtered
    assert (
        "500 of 507 pairs (1.38% dropped: empty 2, identical 1, duplicate 1, no_pieces 1, too_long 1, ratio 1)"
        in caplog.text
    )


def with_references(job: TrainJob, references: list[str]) -> None:
    """Let these be the dev set's targets."""
    write(Path(job.data.dev.src), ["one"] * len(references))
    write(Path(job.data.dev.tgt), references)


@pytest.mark.parametrize(
    ("settings", "unknown", "remedy"),
    [
        ({"normalization": Normalization.nmt_nfkc}, 1, "byte_fallback=true and tokenizer.normalization=identity"),
        ({"normalization": Normalization.nmt_nfkc, "byte_fallback": True}, 0, "set tokenizer.normalization=identity"),
        ({"character_coverage": 0.999}, 2, "byte_fallback=true or tokenizer.character_coverage=1.0"),
        ({}, 2, "set tokenizer.byte_fallback=true"),
    ],
)
def test_prepare_counts_references_that_do_not_come_back_and_warns_of_them(
    job: TrainJob,
    caplog: pytest.LogCaptureFixture,
    *,
    settings: dict[str, Any],
    unknown: int,
    remedy: str,
) -> None:
    """A full-width digit becomes a plain one under NFKC, and has no piece else; runs of spaces come to the same."""
    with_references(job, ["eins", "eins  zwei", "eins zwei drei vier ２ fünf sechs", "eins ☃", ""])
    job.tokenizer = TokenizerConfig(vocab_size=400, **settings)
    job.data.train.tgt = write(Path(job.data.train.tgt), [*(spell(n, ZAHLEN) for n in range(499)), "eins 2"])
    report = prepare(job).report

    found = report.sets["dev"].references
    changed = 1 if settings.get("byte_fallback") else 2
    assert found is not None
    assert (found.checked, found.changed, found.unknown) == (5, changed, unknown)
    assert found.example is not None
    assert found.example.text == "drei vier ２ fünf sec"
    assert found.example.decoded.startswith("drei vier 2 " if "normalization" in settings else "drei vier ")

    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f": {changed} of 5 in data.dev" in line
    assert ", such as 'drei vier ２ fünf sec' -> 'drei vier " in line
    assert line.endswith(remedy)


def test_prepare_does_not_warn_of_references_that_come_back(job: TrainJob, caplog: pytest.LogCaptureFixture) -> None:
    with_references(job, ["eins", " eins  zwei\u3000", "２☃（）：？－，…½²™№ﬁ\0"])
    job.tokenizer = TokenizerConfig(vocab_size=400, byte_fallback=True)
    assert prepare(job).report.sets["dev"].references == RoundTrip(checked=3, changed=0, unknown=0, example=None)
    assert [record for record in caplog.records if record.levelno == logging.WARNING] == []


def test_prepare_checks_a_sample_of_training_targets(
    job: TrainJob, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer.data.building.SAMPLED_TARGETS", 100)
    job.data.train.tgt = write(Path(job.data.train.tgt), [f"{spell(n, ZAHLEN)}！" for n in range(500)])
    job.tokenizer.normalization = Normalization.nmt_nfkc
    report = prepare(job).report
    assert report.targets == RoundTrip(checked=100, changed=100, unknown=0, example=Change("null！", "null!"))
    assert "100 of 100 in a sample of the training targets" in caplog.text


def test_prepare_names_a_given_tokenizer_as_the_cause(
    job: TrainJob, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "given.model").write_bytes(prepare(job).tokenizers.source.model)
    job.tokenizer = TokenizerConfig(model=str(tmp_path / "given.model"))
    with_references(job, ["☃"])
    prepare(job)
    assert "the given tokenizer is the cause: train one" in caplog.text


def test_prepare_keeps_a_pair_at_the_limit(job: TrainJob) -> None:
    counts = prepare(job).store.lengths[:] - 1
    longest, ratios = counts.max(axis=1), counts.max(axis=1) / counts.min(axis=1)
    assert ratios.max() == 2.0
    job.data.filter.max_length, job.data.filter.max_ratio = int(longest.max()), 2.0
    assert len(prepare(job).store) == 500
    job.data.filter.max_length -= 1
    assert len(prepare(job).store) == (longest < longest.max()).sum() < 500
    job.data.filter.max_length, job.data.filter.max_ratio = 40, 1.99
    assert len(prepare(job).store) == (ratios < 2.0).sum() < 500


def test_prepare_trains_the_tokenizer_on_as_many_lines_as_it_may(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all the text of both sides, its end included."""
    seen: list[str] = []

    def train(lines: Iterable[str], config: TokenizerConfig, *, tags: Sequence[str], key: str) -> bytes:
        assert (tags, key) == ([], "tokenizer")
        seen.extend(lines)
        return train_tokenizer(seen, config)

    monkeypatch.setattr("transformer.data.building.train_tokenizer", train)
    job.tokenizer.sample_lines = 200
    prepare(job)
    lines = {spell(n, words): n for words in (WORDS, ZAHLEN) for n in range(500)}
    numbers = [lines[line] for line in seen]
    assert len(numbers) == 200
    assert numbers == sorted(numbers)
    assert sum(number >= 250 for number in numbers) == pytest.approx(100, abs=30)
    assert sum(line.split()[0] in ZAHLEN for line in seen) == pytest.approx(100, abs=30)


def test_prepare_uses_what_an_earlier_call_built(job: TrainJob) -> None:
    first = prepare(job)
    stamp = (store_of(job) / "source.ids").stat()
    second = prepare(job)
    again = (store_of(job) / "source.ids").stat()
    assert (stamp.st_ino, stamp.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert (first.report, first.tokenizers.source.model) == (second.report, second.tokenizers.source.model)
    assert texts(first) == texts(second)


def test_prepare_takes_the_same_text_elsewhere_for_the_same_data(job: TrainJob, tmp_path: Path) -> None:
    digest = prepare(job).report.digest
    shutil.copytree(tmp_path / "corpus", tmp_path / "copy")
    job.data.train = PairConfig(str(tmp_path / "copy" / "train.en"), str(tmp_path / "copy" / "train.de"))
    moved = prepare(job)
    assert moved.report.digest == digest
    assert moved.report.sets["train"].files["src"].path == job.data.train.src
    store_of(job)  # one only


def change_text(job: TrainJob) -> None:
    Path(job.data.train.src).write_bytes(Path(job.data.train.src).read_bytes().replace(b"one", b"won", 1))


def swap_sides(job: TrainJob) -> None:
    job.data.train = PairConfig(job.data.train.tgt, job.data.train.src)


def set_field(section: str, name: str, value: object) -> object:
    def change(job: TrainJob) -> None:
        setattr({"filter": job.data.filter, "tokenizer": job.tokenizer}[section], name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        change_text,
        swap_sides,
        set_field("filter", "max_length", 39),
        set_field("filter", "max_ratio", 8.0),
        set_field("filter", "drop_identical", True),
        set_field("filter", "drop_duplicates", True),
        pytest.param(set_field("filter", "doctor", ["markup"]), marks=pytest.mark.plugins),
        set_field("tokenizer", "vocab_size", 81),
        set_field("tokenizer", "algorithm", Algorithm.unigram),
        set_field("tokenizer", "normalization", Normalization.nfkc),
        set_field("tokenizer", "character_coverage", 0.999),
        set_field("tokenizer", "sample_lines", 999),
    ],
)
def test_prepare_has_another_digest_for_whatever_changes_the_data(job: TrainJob, change: object) -> None:
    before = prepare(job)
    assert callable(change)
    change(job)
    after = prepare(job)
    assert after.report.digest != before.report.digest
    assert len(after.store) == 500


@pytest.mark.parametrize("name", ["PREPARE_VERSION", "STORE_VERSION"])
def test_prepare_has_another_digest_for_another_version_of_a_format(
    name: str, job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepare(job).report.digest
    monkeypatch.setattr(f"transformer.data.training_text.{name}", 99)
    assert prepare(job).report.digest != before


def test_prepare_has_the_same_digest_for_other_names_seeds_and_test_sets(job: TrainJob) -> None:
    before = prepare(job).report.digest
    job.data.src_lang, job.train.seed, job.data.test, job.train.threads = "xx", 7, {}, 2
    after = prepare(job)
    assert (after.report.digest, after.test) == (before, {})


def test_prepare_uses_a_given_tokenizer_and_no_other_setting_of_it(
    job: TrainJob, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    built = prepare(job)
    model = built.tokenizers.source.model
    assert "tokenizer: " not in caplog.text
    (tmp_path / "given.model").write_bytes(model)
    job.tokenizer = TokenizerConfig(model=str(tmp_path / "given.model"))
    first = prepare(job)
    job.tokenizer.vocab_size = 99
    caplog.clear()
    second = prepare(job)
    said = f"given.model, {built.report.vocab_size:,} pieces; the other keys of tokenizer are not used"
    assert said in caplog.text
    assert first.tokenizers.source.model == second.tokenizers.source.model == model
    assert first.report.digest == second.report.digest


def extra(job: TrainJob, name: str, numbers: range, weight: float = 1.0) -> ExtraConfig:
    """More pairs, in two text files."""
    found = pair(Path(job.data.train.src).parent, name, numbers)
    return ExtraConfig(found.src, found.tgt, weight=weight)


def extra_table(job: TrainJob, name: str, numbers: range, weight: float = 1.0) -> ExtraConfig:
    """More pairs, in a table whose second column is the source."""
    path = write(
        Path(job.data.train.src).parent / name, [f"{spell(n, ZAHLEN)}\t{spell(n, WORDS)}\t{n}" for n in numbers]
    )
    return ExtraConfig("2", "1", dataset=path, weight=weight)


def test_prepare_puts_extra_corpora_behind_by_name(job: TrainJob) -> None:
    job.data.extra = {
        "web": extra(job, "web", range(800, 810), 0.5),
        "back": extra_table(job, "back.tsv.gz", range(900, 930), 3.0),
    }
    write(Path(job.data.extra["web"].src), ["", *(spell(n, WORDS) for n in range(801, 809)), "one " * 200])
    prepared = prepare(job)
    numbers = [*range(500), *range(900, 930), *range(801, 809)]
    assert texts(prepared) == [(spell(n, WORDS), spell(n, ZAHLEN)) for n in numbers]
    assert prepared.mixture == ((500, 1.0), (30, 3.0), (8, 0.5))
    sets = prepared.report.sets
    found = {
        key: (sets[key].pairs_read, sets[key].pairs_kept, sets[key].weight) for key in sets if key.startswith("extra.")
    }
    assert found == {"extra.back": (30, 30, 3.0), "extra.web": (10, 8, 0.5)}
    assert (sets["train"].pairs_kept, sets["extra.back"].columns) == (500, ["2", "1"])
    assert list(sets["extra.back"].files) == ["dataset"]
    assert (prepared.report.pairs_read, prepared.report.pairs_kept) == (540, 538)
    dropped = prepared.report.dropped
    assert {reason: count for reason, count in dropped.items() if count} == {"empty": 1, "too_long": 1}
    again = prepare(job)
    assert (again.report, again.mixture) == (prepared.report, prepared.mixture)


def test_prepare_weighs_training_sets_at_a_temperature(job: TrainJob, caplog: pytest.LogCaptureFixture) -> None:
    """500, 50 and 4 pairs at temperature 2: an epoch has pairs of them as 1 : (1/10)^0.5 : (1/125)^0.5."""
    job.data.extra = {"a": extra(job, "a", range(900, 950)), "b": extra(job, "b", range(801, 805))}
    job.data.extra["b"].weight = 0.5
    plain = prepare(job)
    job.data.temperature = 2.0
    caplog.set_level(logging.INFO)
    prepared = prepare(job)
    assert prepared.path == plain.path
    assert [pairs for pairs, _ in prepared.mixture] == [500, 50, 4]
    weights = [weight for _, weight in prepared.mixture]
    assert weights == pytest.approx([1.0, 3.1622776601683795, 0.5 * 11.180339887498949])
    assert [prepared.report.sets[name].weight for name in ("train", "extra.a", "extra.b")] == weights
    assert "data.temperature=2: weights of the training sets: train 1, extra.a 3.162, extra.b 5.59" in caplog.text

    job.data.temperature = 1.0
    assert prepare(job).mixture == plain.mixture


def test_prepare_spells_with_characters(job: TrainJob) -> None:
    job.tokenizer = TokenizerConfig(algorithm=Algorithm.char)
    job.data.train.tag = "<bt>"
    prepared = prepare(job)
    tokenizer = prepared.tokenizers.source
    assert {len(piece.text) for piece in tokenizer.vocabulary() if piece.is_text} == {1, len("\u2581<bt>")}
    [ids] = tokenizer.encode(["<bt> one two"])
    assert [tokenizer.piece(index) for index in ids] == ["\u2581<bt>", *"\u2581one\u2581two"]
    assert texts(prepared)[0] == ("<bt> zero", "null")


def test_prepare_drops_duplicates_of_another_corpus_where_they_come_later(job: TrainJob) -> None:
    job.data.filter.drop_duplicates = True
    job.data.extra = {"z": extra(job, "z", range(490, 530)), "a": extra_table(job, "a.tsv", range(510, 520))}
    prepared = prepare(job)
    assert texts(prepared) == [
        (spell(n, WORDS), spell(n, ZAHLEN)) for n in [*range(500), *range(510, 520), *range(500, 510), *range(520, 530)]
    ]
    assert prepared.mixture == ((500, 1.0), (10, 1.0), (20, 1.0))
    dropped = prepared.report.dropped
    assert dropped["duplicate"] == 20


def test_prepare_digests_an_extra_corpus_but_not_its_weight(job: TrainJob) -> None:
    plain = prepare(job).report.digest
    job.data.extra = {"a": extra(job, "a", range(800, 810), 2.0)}
    first = prepare(job)
    job.data.extra["a"].weight = 7.0
    second = prepare(job)
    assert first.report.digest == second.report.digest != plain
    assert (first.mixture, second.mixture) == (((500, 1.0), (10, 2.0)), ((500, 1.0), (10, 7.0)))


def test_prepare_finds_the_same_corpus_in_each_form(job: TrainJob) -> None:
    """Text, TSV, JSON lines and Parquet have one digest, and so one store, whatever their bytes and their line ends."""
    plain, folder = prepare(job), Path(job.data.train.src).parent
    rows = [{"en": spell(n, WORDS), "de": spell(n, ZAHLEN)} for n in range(500)]
    write(folder / "a.tsv", [f"{row['en']}\t{row['de']}" for row in rows])
    write(folder / "a.jsonl.gz", [json.dumps({"translation": row}) for row in rows])
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", row_group_size=99)
    for side in (job.data.train.src, job.data.train.tgt):
        Path(f"{side}.gz").write_bytes(gzip.compress(Path(side).read_bytes()))
        lines = Path(side).read_bytes()
        Path(f"{side}.crlf").write_bytes(lines.replace(b"\n", b"\r\n"))
        Path(f"{side}.one").write_bytes(lines.replace(b"\n", b"\r\n", 1))
        Path(f"{side}.bom").write_bytes(b"\xef\xbb\xbf" + lines)
        Path(f"{side}.end").write_bytes(lines.removesuffix(b"\n"))
        Path(f"{side}.utf16").write_bytes(f"\ufeff{lines.decode()}".encode("utf-16-be"))
    Path(folder / "c.tsv").write_bytes((folder / "a.tsv").read_bytes().replace(b"\n", b"\r\n"))
    tables = [PairConfig(dataset=str(folder / name)) for name in ("a.tsv", "c.tsv", "a.jsonl.gz", "a.parquet")]
    sides = (job.data.train.src, job.data.train.tgt)
    pairs = [PairConfig(f"{sides[0]}.{end}", f"{sides[1]}.{end}") for end in ("crlf", "one", "bom", "end", "utf16")]
    for train in (*tables, *pairs, PairConfig(f"{sides[0]}.gz", sides[1])):
        job.data.train = train
        job.data.test = {"first": job.data.train}
        prepared = prepare(job)
        assert texts(prepared) == texts(plain) == prepared.test["first"]
        assert prepared.report.digest == plain.report.digest == prepare(job).report.digest
        assert prepared.path == plain.path == store_of(job)


def test_prepare_reads_a_table_for_its_digest_once(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again where another has its name, or what was remembered is damaged."""
    table = Path(job.data.train.src).parent / "a.tsv"
    write(table, [f"{spell(n, WORDS)}\t{spell(n, ZAHLEN)}" for n in range(500)])
    job.data.train = PairConfig(dataset=str(table))
    digested = []

    def count(pairs: Iterable[Pair]) -> list[str]:
        digested.append(1)
        return digest_pairs(pairs)

    monkeypatch.setattr("transformer.data.training_text.digest_pairs", count)
    first = prepare(job)
    assert prepare(job).report == first.report
    assert digested == [1]

    (remembered,) = store_of(job).parent.glob("*.json")
    known = json.loads(remembered.read_text(encoding="utf-8"))
    for damage in ("", "{}", json.dumps(known | {"of_text": "../" * 21 + "a"}), json.dumps(known | {"of_files": "0"})):
        remembered.write_text(damage, encoding="utf-8")
        assert prepare(job).report == first.report
        assert json.loads(remembered.read_text(encoding="utf-8")) == known
    assert digested == [1] * 5

    write(table, [f"{spell(n, WORDS)}\t{spell(n, ZAHLEN)}" for n in range(499)])
    assert prepare(job).report.digest != first.report.digest
    assert digested == [1] * 6


def test_prepare_takes_other_columns_of_a_table_for_other_data(job: TrainJob) -> None:
    path = write(
        Path(job.data.train.src).parent / "a.tsv", [f"{spell(n, WORDS)}\t{spell(n, ZAHLEN)}" for n in range(500)]
    )
    job.data.train = PairConfig("1", "2", dataset=path)
    digest = prepare(job).report.digest
    job.data.train = PairConfig("2", "1", dataset=path)
    swapped = prepare(job)
    assert swapped.report.digest != digest
    assert texts(swapped)[12] == ("eins zwei", "one two")


def nothing_written(job: TrainJob) -> bool:
    return not Path(job.run_dir).parent.exists()


def spoil(path: Path, kind: str) -> str:
    """Do one bad thing to a file and return what the message must hold."""
    content = path.read_bytes()
    match kind:
        case "missing":
            path.unlink()
            return f"{path}: cannot be read"
        case "folder":
            path.unlink()
            path.mkdir()
            return f"{path}: there is no file in this folder"
        case "latin-1":
            lines = content.split(b"\n")
            lines[2] = b"caf\xe9"
            path.write_bytes(b"\n".join(lines))
            return f"{path}:3: not UTF-8: byte 4"
        case "one line more":
            path.write_bytes(content + b"one\n")
        case "one line less":
            path.write_bytes(content.split(b"\n", 1)[1])
        case "nothing":
            path.write_bytes(b"")
    return f"{path} has "


@pytest.mark.parametrize("kind", ["missing", "folder", "latin-1", "one line more", "one line less", "nothing"])
@pytest.mark.parametrize("name", ["train.en", "train.de", "dev.de", "second.en"])
def test_prepare_refuses_a_bad_file_before_it_writes_anything(
    job: TrainJob, tmp_path: Path, name: str, kind: str
) -> None:
    expected = spoil(tmp_path / "corpus" / name, kind)
    with pytest.raises(InputError) as caught:
        prepare(job)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert nothing_written(job)


@pytest.mark.parametrize("name", ["train.en", "dev.de"])
def test_prepare_refuses_a_pipe(job: TrainJob, tmp_path: Path, name: str) -> None:
    """Such as a shell's `<(zcat ...)`."""
    path, (reader, writer) = tmp_path / "corpus" / name, os.pipe()
    os.close(writer)
    path.unlink()
    path.symlink_to(f"/dev/fd/{reader}")
    try:
        with pytest.raises(InputError, match=r"a pipe, but text is read several times: write it to a file for data\."):
            prepare(job)
    finally:
        os.close(reader)


def test_prepare_refuses_a_name_that_no_record_could_hold(job: TrainJob, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    name = os.fsdecode(b"caf\xe9.en")
    (folder / "train.en").rename(folder / name)
    train = replace(job.data.train, src=str(folder / name))
    with pytest.raises(InputError, match=r"caf\\udce9\.en': its name is not in UTF-8, so no record could hold it: "):
        prepare(replace(job, data=replace(job.data, train=train)))
    assert nothing_written(job)


def test_prepare_blames_no_filter_for_text_without_pieces(job: TrainJob) -> None:
    write(Path(job.data.train.tgt), ["\u200b"] * 499 + [""])
    job.tokenizer.normalization = Normalization.nmt_nfkc  # which drops U+200B
    with pytest.raises(InputError, match=r"left to train on \(empty 1, no_pieces 499\): check data\.train$"):
        prepare(job)


def test_prepare_makes_the_same_of_compressed_files_in_small_blocks(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prepare(job)
    monkeypatch.setattr("transformer.data.building.BLOCK", 7)
    for side, suffix in (("src", ".gz"), ("tgt", ".zst")):
        path = getattr(job.data.train, side)
        Path(f"{path}{suffix}").write_bytes(compressed(Path(path).read_bytes(), suffix))
        setattr(job.data.train, side, f"{path}{suffix}")
    packed = prepare(job)
    assert packed.tokenizers.source.model == plain.tokenizers.source.model
    assert texts(packed) == texts(plain)


def test_prepare_makes_one_corpus_of_shards_and_of_a_single_file(job: TrainJob, tmp_path: Path) -> None:
    single = prepare(job)
    for language, words in (("en", WORDS), ("de", ZAHLEN)):
        for shard, numbers in enumerate((range(120), range(120, 120), range(120, 500))):
            write(
                tmp_path / "corpus" / f"shard{shard}.{language}{'.gz' if shard else ''}",
                [spell(n, words) for n in numbers],
            )

    patterns = [str(tmp_path / "corpus" / f"shard*.{language}*") for language in ("en", "de")]
    job.data.train = PairConfig(*patterns)
    sharded = prepare(job)
    assert (sharded.path, sharded.report.digest) == (single.path, single.report.digest)
    files = sharded.report.sets["train"].files
    assert [(key, Path(file.path).name) for key, file in files.items()] == [
        *(("src[0]", "shard0.en"), ("tgt[0]", "shard0.de")),
        *(("src[1]", "shard1.en.gz"), ("tgt[1]", "shard1.de.gz")),
        *(("src[2]", "shard2.en.gz"), ("tgt[2]", "shard2.de.gz")),
    ]
    assert from_json(DataReport, to_json(sharded.report)) == sharded.report

    (tmp_path / "corpus" / "shard2.de.gz").write_bytes((tmp_path / "corpus" / "shard2.de.gz").read_bytes()[:-9])
    with pytest.raises(InputError, match=r"shard2\.de\.gz:\d+: damaged \.gz file \("):
        prepare(job)


@pytest.mark.plugins
def test_prepare_counts_what_a_translation_memory_has_beside_its_pairs(
    job: TrainJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write_memory(name: str, numbers: range) -> str:
        units = (
            f"<tu><tuv xml:lang='en'><seg>{spell(n, WORDS)}<ph/></seg></tuv>"
            f"<tuv xml:lang='de-AT'><seg>{spell(n, ZAHLEN)}</seg></tuv></tu>\n"
            for n in numbers
        )
        (tmp_path / name).write_text(f"<tmx><body>{''.join(units)}<tu/></body></tmx>", encoding="utf-8")
        return str(tmp_path / name)

    of_text = prepare(job)
    job.data.train = PairConfig(dataset=[write_memory("a.tmx", range(300)), write_memory("b.tmx", range(300, 500))])
    job.data.dev = PairConfig(dataset=write_memory("dev.tmx", range(500, 520)))
    caplog.set_level(logging.INFO)
    for _ in range(2):  # the second time without reading the text for its digest
        of_memories = prepare(job)
        assert (of_memories.report.digest, of_memories.dev) == (of_text.report.digest, of_text.dev)
        counts = {name: report.left_out for name, report in of_memories.report.sets.items() if report.left_out}
        assert counts == {
            "train": {"inline markup": 500, "units without both languages": 2},
            "dev": {"inline markup": 20, "units without both languages": 1},
        }
        assert "data.train: left out of what is read: inline markup 500, units without both languages 2" in caplog.text
        caplog.clear()
    assert from_json(DataReport, to_json(of_memories.report)) == of_memories.report


def test_prepare_finds_damage_and_builds_again(job: TrainJob, caplog: pytest.LogCaptureFixture) -> None:
    whole, state = prepare(job), random.Random(1)
    for file in sorted(store_of(job).iterdir()):
        bad = bytearray(file.read_bytes())
        bad[state.randrange(len(bad) // 2)] ^= 4
        file.write_bytes(bad)
        caplog.clear()
        again = prepare(job)
        assert texts(again) == texts(whole)
        assert (again.report, again.tokenizers.source.model) == (whole.report, whole.tokenizers.source.model)
        assert "built again" in caplog.text


def test_prepare_takes_a_store_that_is_elsewhere_and_read_only(job: TrainJob, tmp_path: Path) -> None:
    job.data.store_dir = str(tmp_path / "elsewhere")
    first = prepare(job)
    assert nothing_written(job)
    for lock in (tmp_path / "elsewhere").glob("*.lock"):
        lock.unlink()
        lock.mkdir()  # even where no lock can be taken, a complete store can be used
    assert texts(prepare(job)) == texts(first)


def test_prepare_on_a_full_disk_leaves_nothing_half_done(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformer.data.store.StoreWriter.add", full)
        with pytest.raises(StorageError, match="No space left on device"):
            prepare(job)
    assert [path.suffix for path in (Path(job.run_dir).parent / ".store").iterdir()] == [".lock"]
    assert len(prepare(job).store) == 500


@pytest.mark.parametrize(
    "place", ["transformer.data.tokenizer.Tokenizer.encode", "transformer.data.store.StoreWriter.add"]
)
def test_prepare_raises_an_error_of_encoding_as_it_is_and_ends_every_thread(
    place: str, job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of the threads, on its fifth block or later, and in what takes their blocks."""
    error, calls, before = RuntimeError("as it is"), list[object](), threading.enumerate()

    def fail(*arguments: Any) -> object:
        calls.append(arguments)
        if len(calls) > 8:
            raise error
        return real(*arguments)

    owner, name = (Tokenizer, "encode") if place.endswith("encode") else (StoreWriter, "add")
    real, job.train.threads = getattr(owner, name), 3
    with monkeypatch.context() as patch:
        patch.setattr("transformer.data.building.BLOCK", 7)
        patch.setattr(place, fail)
        with pytest.raises(RuntimeError) as caught:
            prepare(job)
    assert caught.value is error
    assert set(threading.enumerate()) <= set(before)
    assert [path.suffix for path in (Path(job.run_dir).parent / ".store").iterdir()] == [".lock"]
    assert len(prepare(job).store) == 500


def test_prepare_does_not_read_blocks_far_ahead_of_what_is_written(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or memory would hold the whole corpus where writing is slower than reading."""
    read, ahead = 0, []
    pairs, add = Source.pairs, StoreWriter.add

    def counted(source: Source, *counts: Any, **options: Any) -> Iterator[Pair]:
        nonlocal read
        read = 0  # each of the three readings
        for found in pairs(source, *counts, **options):
            read += 1
            yield found

    def watched(writer: StoreWriter, *sides: Any) -> None:
        ahead.append(read - len(writer))
        add(writer, *sides)

    monkeypatch.setattr(Source, "pairs", counted)
    monkeypatch.setattr(StoreWriter, "add", watched)
    monkeypatch.setattr("transformer.data.building.BLOCK", 10)
    job.train.threads = 2
    prepare(job)
    assert len(ahead) == 50
    assert max(ahead) <= 30  # a block for each thread, and one more


SLOWLY = """
import time, transformer.data.building as module
from transformer.data.tokenizer import Tokenizer
encode, module.BLOCK = Tokenizer.encode, 1
def slowly(*arguments):
    time.sleep(0.1)
    return encode(*arguments)
Tokenizer.encode = slowly
"""


def test_prepare_interrupted_while_encoding_leaves_nothing_half_done(job: TrainJob, tmp_path: Path) -> None:
    process = start_command("prepare", *overrides(job), cwd=tmp_path, driver=SLOWLY)  # it would take a minute
    assert process.stderr is not None
    assert any("encoding 500 pairs" in line for line in process.stderr)
    store = Path(job.run_dir).parent / ".store"
    while not any(store.glob(".tmp-*/source.ids")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (75, "")
    assert err.startswith("transformer: stopped"), err
    assert err.count("\n") == 1, err
    assert [path.suffix for path in store.iterdir()] == [".lock"]


MARKING = """
import sys, transformer.data.building as module
sample = module.sample_lines
def marked(*arguments, **options):
    yield from sample(*arguments, **options)
    print("all lines are read", file=sys.stderr, flush=True)
module.sample_lines = marked
"""


@pytest.mark.parametrize(
    ("number", "driver", "mark", "algorithm"),
    [
        # SentencePiece reads lines, for half a second; or it computes, for seconds, and Python cannot interrupt it.
        pytest.param(signal.SIGTERM, None, "training the tokenizer", Algorithm.bpe, marks=pytest.mark.ci),
        (signal.SIGINT, MARKING, "all lines are read", Algorithm.unigram),
    ],
    ids=["reading", "computing"],
)
def test_prepare_is_stopped_by_a_signal_while_the_tokenizer_is_trained(
    number: signal.Signals, driver: str | None, mark: str, algorithm: Algorithm, job: TrainJob, tmp_path: Path
) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(20_000)]
    lines = [" ".join(draw.choices(words, k=4)) for _ in range(10_000 if driver else 200_000)]
    for path in (job.data.train.src, job.data.train.tgt):
        write(Path(path), lines)
    job.tokenizer = TokenizerConfig(vocab_size=2_000, algorithm=algorithm)
    process = start_command("prepare", *overrides(job), cwd=tmp_path, driver=driver)
    assert process.stderr is not None
    assert any(mark in line for line in process.stderr)
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, ""), err
    assert err == "transformer: stopped; to go on, give the same command again\n"
    assert [path.suffix for path in (Path(job.run_dir).parent / ".store").iterdir()] == [".lock"]


COUNTING = """
import os, sys, time, pathlib
import transformer.data.prepare as module
from transformer.config.jobs import *
from transformer.config.primitives import *
from transformer.config.settings import *
real = module.build
def counted(*arguments):
    with open(sys.argv[2], "a", encoding="utf-8") as file:
        file.write("build\\n")
    time.sleep(float(sys.argv[3]))
    real(*arguments)
module.build = counted
folder = pathlib.Path(sys.argv[1])
pair = lambda name: PairConfig(str(folder / f"corpus/{name}.en"), str(folder / f"corpus/{name}.de"))
job = TrainJob(
    run_dir=str(folder / "runs/a"),
    data=DataConfig(train=pair("train"), dev=pair("dev"), filter=FilterConfig(max_length=40)),
    tokenizer=TokenizerConfig(vocab_size=80),
)
children = []
for _ in range(int(sys.argv[4])):
    child = os.fork()
    if child == 0:
        prepared = module.prepare(job)
        os.write(1, f"{len(prepared.store)} {prepared.report.digest}\\n".encode())
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children) if children else module.prepare(job) is None)
"""


def start(tmp_path: Path, *, sleep: float, children: int) -> subprocess.Popen[bytes]:
    """Prepare in another process, or in so many children of it at once; building takes `sleep` more."""
    arguments = [sys.executable, "-c", COUNTING, str(tmp_path), str(tmp_path / "builds"), str(sleep), str(children)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_prepare_builds_once_in_processes_that_start_together(job: TrainJob, tmp_path: Path) -> None:
    process = start(tmp_path, sleep=0.3, children=4)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "builds").read_text(encoding="utf-8") == "build\n"
    assert output == f"500 {prepare(job).report.digest}\n".encode() * 4


def test_prepare_that_is_killed_leaves_no_lock_and_nothing_that_is_used(job: TrainJob, tmp_path: Path) -> None:
    process = start(tmp_path, sleep=60, children=0)
    while not (tmp_path / "builds").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    leftover = tmp_path / "runs" / ".store" / f".tmp-{next((tmp_path / 'runs' / '.store').glob('*.lock')).stem}"
    assert leftover.is_dir()
    (leftover / "source.ids").write_bytes(b"half")
    assert len(prepare(job).store) == 500
    assert not leftover.exists()


def peak(folder: str, repeat: int, queue: "multiprocessing.Queue[int]") -> None:
    import resource

    root = Path(folder)
    sides = ([spell(n, words) for n in range(10_000)] for words in (WORDS, ZAHLEN))
    src, tgt = (write(root / f"big{repeat}.{i}", lines * repeat) for i, lines in enumerate(sides))
    dev = pair(root, f"dev{repeat}", range(5))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prepare(
        TrainJob(
            run_dir=str(root / "runs" / str(repeat)),
            model=ModelConfig(),
            data=DataConfig(train=PairConfig(src, tgt), dev=dev),
            tokenizer=TokenizerConfig(vocab_size=100, sample_lines=1_000),
        )
    )
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.slow
def test_prepare_needs_no_more_memory_for_a_larger_corpus(tmp_path: Path) -> None:
    """30 times the pairs, 300,000, may cost their lengths and offsets in memory, not their text."""
    context = multiprocessing.get_context("spawn")
    growth = []
    for repeat in (1, 30):
        queue: multiprocessing.Queue[int] = context.Queue()
        process = context.Process(target=peak, args=(str(tmp_path), repeat, queue))
        process.start()
        growth.append(queue.get(timeout=300))
        process.join()
    assert growth[1] - growth[0] < 60_000  # kilobytes


@pytest.mark.slow
@needs_corpora
def test_prepare_reads_the_whole_of_kftt(tmp_path: Path) -> None:
    sets = [
        PairConfig(f"{CORPORA}/kftt/{name}.ja.gz", f"{CORPORA}/kftt/{name}.en.gz") for name in ("train", "dev", "tune")
    ]
    job = TrainJob(
        run_dir=str(tmp_path / "runs" / "a"),
        data=DataConfig(src_lang="ja", train=sets[0], dev=sets[1], test={"tune": sets[2]}),
        tokenizer=TokenizerConfig(vocab_size=8_000, character_coverage=0.9995, sample_lines=200_000),
    )
    prepared = prepare(job)
    assert prepared.report.pairs_read == 440_286
    assert 435_000 < len(prepared.store) < 440_286
    assert (len(prepared.dev["dev"]), len(prepared.test["tune"])) == (1_166, 1_235)
