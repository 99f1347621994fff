"""The doctor on Multi30k: it finds each of the faults that are planted, says where, and is silent on what is sound.

Short slices by default; the whole corpora, through the public command, behind `-m faults`.
"""

import gzip
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceProcessor

from support.corpora import finish, run, run_command, start, tiny_job, write_corpus, write_pair
from support.interventions import before_each_pass, before_each_update
from support.paths import CORPORA, ROOT, needs_corpora
from transformer.config.settings import (
    Algorithm,
    DataConfig,
    Device,
    ExtraConfig,
    Format,
    LayoutKind,
    ModelConfig,
    OptimizerKind,
    PairConfig,
    Precision,
    TargetTokenizerConfig,
    TokenizerConfig,
)
from transformer.data.batch import collate
from transformer.data.loader import Step
from transformer.data.plan import Batching
from transformer.data.prepare import prepare
from transformer.data.source import Source
from transformer.data.store import Store
from transformer.data.tokenizer import Tokenizer, train_tokenizer
from transformer.errors import FindingsError, InputError
from transformer.model.layers import DecoderLayer
from transformer.model.transformer import Transformer
from transformer.records import MemoryCheck, Resolved
from transformer.tools.detectors.lexicon import Bags, Lexicon
from transformer.tools.detectors.text import is_double_encoded
from transformer.tools.doctor import vocabulary
from transformer.tools.doctor.command import Diagnosis, SetRead, doctor, format_diagnosis, require_health
from transformer.tools.doctor.findings import Check, Level, Place, measured
from transformer.tools.doctor.job import DoctorJob
from transformer.tools.doctor.survey import survey
from transformer.tools.doctor.training import check_cost, check_device, check_overfit
from transformer.tools.doctor.vocabulary import check_sizes, rare_shares
from transformer.training.deviation import largest_leak
from transformer.training.memory import Trial
from transformer.training.resolve import resolve_settings
from transformer.training.step import Computation, StepResult, train_step

SLICE = 1_200  # pairs of Multi30k that are trained on, and at most 300 of its other sets
LANGUAGES = {"src": "en", "tgt": "de"}
FILES = {"train": "train", "dev": "val", "test": "test_2016_flickr"}


@dataclass
class Corpus:
    """The lines of both sides of each set, as a fault may change them."""

    sets: dict[str, list[list[str]]]

    @classmethod
    def of(cls, pairs: int | None) -> "Corpus":
        """Multi30k, all of it or its first pairs."""
        folder = CORPORA / "multi30k"
        return cls(
            {
                name: [
                    read_lines(folder / f"{file}.{lang}", pairs if name == "train" or not pairs else 300)
                    for lang in ("en", "de")
                ]
                for name, file in FILES.items()
            }
        )

    def write(self, folder: Path) -> DataConfig:
        folder.mkdir()
        pairs = {}
        for name, sides in self.sets.items():
            paths = [folder / f"{name}.{lang}" for lang in ("en", "de")]
            for path, lines in zip(paths, sides, strict=True):
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
            pairs[name] = PairConfig(*map(str, paths))
        return DataConfig(
            train=pairs["train"], dev=pairs["dev"], test={"flickr": pairs["test"]}, store_dir=str(folder / "store")
        )


def read_lines(path: Path, count: int | None) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1][:count]


# ---- the faults -----------------------------------------------------------------------------------------------------


def swap_half(corpus: Corpus, draw: random.Random, share: float = 0.5) -> None:
    source, target = corpus.sets["train"]
    for i in draw.sample(range(len(source)), int(share * len(source))):
        source[i], target[i] = target[i], source[i]


def shift_from_the_middle(corpus: Corpus, draw: random.Random, start: float = 0.5, by: int = 1) -> None:
    target = corpus.sets["train"][1]
    first = int(start * len(target))
    corpus.sets["train"][1] = target[:first] + target[first + by :] + target[first : first + by]


def train_on(name: str) -> Callable[[Corpus, random.Random], None]:
    def change(corpus: Corpus, draw: random.Random, share: float = 1.0) -> None:
        lines = corpus.sets[name]
        for i in draw.sample(range(len(lines[0])), int(share * len(lines[0]))):
            place = draw.randrange(len(corpus.sets["train"][0]))
            for side in (0, 1):
                corpus.sets["train"][side].insert(place, lines[side][i])

    return change


def copy_a_tenth(corpus: Corpus, draw: random.Random, share: float = 0.1) -> None:
    source, target = corpus.sets["train"]
    for i in draw.sample(range(len(source)), int(share * len(source))):
        target[i] = source[i]


def write_french(corpus: Corpus, draw: random.Random, share: float = 1.0) -> None:
    target = corpus.sets["train"][1]
    french = read_lines(CORPORA / "multi30k" / "train.fr", None)
    for i in draw.sample(range(len(target)), int(share * len(target))):
        target[i] = french[i]


def encode_twice(corpus: Corpus, draw: random.Random, share: float = 1.0) -> None:
    target = corpus.sets["train"][1]
    for i in draw.sample(range(len(target)), int(share * len(target))):
        target[i] = target[i].encode("utf-8").decode("cp1252", errors="replace")


def repeat_a_third(corpus: Corpus, draw: random.Random, share: float = 1 / 3) -> None:
    source, target = corpus.sets["train"]
    for i in draw.sample(range(len(source)), int(share * len(source))):
        source.append(source[i])
        target.append(target[i])


def leave_markup(corpus: Corpus, draw: random.Random, share: float = 0.1) -> None:
    target = corpus.sets["train"][1]
    for i in draw.sample(range(len(target)), int(share * len(target))):
        target[i] = draw.choice(("<b>{}</b>", '<seg id="1">{}</seg>', "&quot;{}&quot;", "{}<br/>")).format(target[i])


def lower_the_references(corpus: Corpus, draw: random.Random, share: float = 1.0) -> None:
    target = corpus.sets["test"][1]
    for i in draw.sample(range(len(target)), int(share * len(target))):
        target[i] = target[i].lower()


def join_lines(corpus: Corpus, draw: random.Random, share: float = 1.0) -> None:
    for side in (0, 1):
        lines = corpus.sets["train"][side]
        lines[1000] = " ".join(lines[:1000])


def no_change(corpus: Corpus, draw: random.Random, share: float = 1.0) -> None:
    pass


def shuffle_references(corpus: Corpus, draw: random.Random) -> None:
    draw.shuffle(corpus.sets["test"][1])


def shuffle_training(corpus: Corpus, draw: random.Random) -> None:
    draw.shuffle(corpus.sets["train"][1])


def exchange_sides(corpus: Corpus, draw: random.Random) -> None:
    for sides in corpus.sets.values():
        sides.reverse()


def exchange_sides_of(name: str) -> Callable[[Corpus, random.Random], None]:
    def change(corpus: Corpus, draw: random.Random) -> None:
        corpus.sets[name].reverse()

    return change


def copy_all(corpus: Corpus, draw: random.Random) -> None:
    copy_a_tenth(corpus, draw, share=1.0)


def write_french_sources(corpus: Corpus, draw: random.Random) -> None:
    for name, file in FILES.items():
        source = corpus.sets[name][0]
        source[:] = read_lines(CORPORA / "multi30k" / f"{file}.fr", len(source))


def put_a_header(corpus: Corpus, draw: random.Random) -> None:
    for side, name in enumerate(("English", "German")):
        corpus.sets["train"][side].insert(0, name)


def tokenise_references(corpus: Corpus, draw: random.Random) -> None:
    corpus.sets["test"][1] = [line.replace(".", " .") for line in corpus.sets["test"][1]]


@dataclass(frozen=True)
class Fault:
    """What is planted, and the check that must find it: it alone, but for what the fault is, too."""

    plant: Callable[..., None]
    check: str
    where: str
    vocab_size: int = 4000
    text_only: bool = True
    too: tuple[str, ...] = ()  # other findings


FAULTS = {
    "sides swapped for half of the pairs": Fault(swap_half, "swapped sides", "train"),
    "shift by one from the middle on": Fault(shift_from_the_middle, "shifted lines", "train"),
    "test sentences in training": Fault(train_on("test"), "overlap", "train with test.flickr"),
    "dev in training": Fault(train_on("dev"), "overlap", "train with dev"),
    "source copied for a tenth": Fault(copy_a_tenth, "copied sources", "train"),
    "wrong language on one side": Fault(write_french, "function words", "train target"),
    "double-encoded UTF-8": Fault(encode_twice, "encoding", "train target"),
    "a third of the pairs repeated": Fault(repeat_a_third, "duplicates", "train"),
    "markup left in": Fault(leave_markup, "markup", "train target"),
    "references lower-cased": Fault(lower_the_references, "case", "test.flickr target"),
    "a vocabulary too small for the script": Fault(no_change, "characters", "vocabulary", vocab_size=80),
    "a sentence longer than the step": Fault(join_lines, "longest sentence", "train", vocab_size=1000, text_only=False),
}

OTHER_FAULTS = {
    "references shuffled": Fault(shuffle_references, "alignment", "test.flickr"),
    "training shuffled": Fault(shuffle_training, "alignment", "train"),
    "sides exchanged in all sets": Fault(exchange_sides, "swapped sides", "every set"),
    "sides exchanged in train": Fault(exchange_sides_of("train"), "swapped sides", "train", text_only=False),
    "sides exchanged in dev": Fault(exchange_sides_of("dev"), "swapped sides", "dev", text_only=False),
    "targets of train are its sources": Fault(copy_all, "copied sources", "train"),
    "another language in all sources": Fault(write_french_sources, "function words", "every source", text_only=False),
    "a header": Fault(put_a_header, "header", "train"),
    "references tokenised": Fault(tokenise_references, "tokenisation", "test.flickr target"),
}


def job_of(data: DataConfig, run_dir: Path, *, vocab_size: int, text_only: bool) -> DoctorJob:
    """A training of a few short steps on the corpus."""
    base = tiny_job(run_dir, data, tokens_per_step=800, max_tokens=800)
    return DoctorJob(
        run_dir=base.run_dir,
        model=base.model,
        data=data,
        tokenizer=TokenizerConfig(vocab_size=vocab_size),
        train=base.train,
        text_only=text_only,
    )


def findings_of(diagnosis: Diagnosis) -> dict[str, str]:
    return {f"{check.name} in {check.where}": check.found for check in diagnosis.findings}


@needs_corpora
def test_doctor_is_silent_on_a_slice_of_multi30k(tmp_path: Path) -> None:
    """Everything of it, the model and the machine included."""
    data = Corpus.of(SLICE).write(tmp_path / "corpus")
    diagnosis = doctor(job_of(data, tmp_path / "runs" / "a", vocab_size=1000, text_only=False))
    assert findings_of(diagnosis) == {}
    names = {check.name for check in diagnosis.checks}
    assert {fault.check for fault in FAULTS.values()} <= names
    assert {"round trip", "unknown pieces", "padding", "causal mask", "one batch", "memory", "disk", "time"} <= names
    assert diagnosis.sets["train"].pairs == diagnosis.sets["train"].sampled == SLICE
    require_health(diagnosis)
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.ci
@needs_corpora
def test_doctor_examines_each_set_in_its_own_language(tmp_path: Path) -> None:
    """More training pairs and a test set in French are sound if that is said of them, and as findings if not."""
    data = Corpus.of(SLICE).write(tmp_path / "corpus")
    folder = CORPORA / "multi30k"
    for name, file, count in (("extra", "train", 600), ("test", "test_2016_flickr", 300)):
        for lang in ("en", "fr"):
            lines = read_lines(folder / f"{file}.{lang}", 1200 if name == "extra" else count)[-count:]
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def found(tgt_lang: str | None) -> set[str]:
        data.extra["fr"] = ExtraConfig(f"{tmp_path}/extra.en", f"{tmp_path}/extra.fr", tgt_lang=tgt_lang)
        data.test["fr"] = PairConfig(f"{tmp_path}/test.en", f"{tmp_path}/test.fr", tgt_lang=tgt_lang)
        return set(findings_of(doctor(job_of(data, tmp_path / "a", vocab_size=4000, text_only=True))))

    in_french = {f"function words in {name} target" for name in ("extra.fr", "test.fr")}
    assert in_french <= found(None)
    assert not {key for key in found("fr") if key.startswith(("function words", "language", "untranslated", "script"))}


@needs_corpora
def test_doctor_compares_a_set_with_those_in_its_languages(tmp_path: Path) -> None:
    """Japanese has no capitals and its words none of German's translations: both were errors of a sound corpus."""
    data = Corpus.of(SLICE).write(tmp_path / "corpus")
    for name, file, count in (("extra", "train", 1000), ("test", "tune", 300)):
        for lang in ("en", "ja"):
            with gzip.open(CORPORA / "kftt" / f"{file}.{lang}.gz", "rt", encoding="utf-8", newline="\n") as lines:
                (tmp_path / f"{name}.{lang}").write_text("".join(islice(lines, count)), encoding="utf-8")
    data.extra["ja"] = ExtraConfig(f"{tmp_path}/extra.en", f"{tmp_path}/extra.ja", tgt_lang="ja", tag="<2ja>")
    data.test["ja"] = PairConfig(f"{tmp_path}/test.en", f"{tmp_path}/test.ja", tgt_lang="ja", tag="<2ja>")
    diagnosis = doctor(job_of(data, tmp_path / "a", vocab_size=4000, text_only=True))
    assert not [key for key in findings_of(diagnosis) if key.endswith((".ja", "ja target"))]
    checked = {(check.name, check.where) for check in diagnosis.checks}
    assert {("unrelated lines", "extra.ja"), ("unrelated lines", "test.ja"), ("case", "test.ja source")} <= checked
    assert ("case", "test.ja target") not in checked


@needs_corpora
def test_doctor_finds_known_sources_beside_more_targets_that_are_short(tmp_path: Path) -> None:
    """Short sentences recur by chance, so that they do not count, however many they are."""
    corpus = Corpus.of(SLICE)
    sources, targets = corpus.sets["dev"]
    sources[:60] = corpus.sets["train"][0][:60]
    targets[100:200] = [f"Bild {number}." for number in range(100)]
    corpus.sets["train"][1][200:300] = targets[100:200]
    found = findings_of(doctor(job_of(corpus.write(tmp_path / "c"), tmp_path / "a", vocab_size=4000, text_only=True)))
    assert found["overlap of a side in train with dev"] == "20.0 % of the other sources of dev are in it, 60 in all"


@pytest.mark.ci
@needs_corpora
def test_doctor_takes_a_vocabulary_of_characters_as_it_is(tmp_path: Path) -> None:
    job = job_of(Corpus.of(SLICE).write(tmp_path / "corpus"), tmp_path / "a", vocab_size=120, text_only=False)
    found = findings_of(doctor(replace(job, tokenizer=replace(job.tokenizer, algorithm=Algorithm.char))))
    assert not {"characters in vocabulary", "single characters in vocabulary"} & set(found)


@needs_corpora
@pytest.mark.parametrize(("dev", "test"), [(17, 117), (1, 34), (51, 99)])
def test_doctor_is_silent_on_small_sets(dev: int, test: int, tmp_path: Path) -> None:
    """Sizes for which the last block has one pair, or as many as lie between a pair and a far one."""
    corpus = Corpus.of(SLICE)
    for name, size in (("dev", dev), ("test", test)):
        corpus.sets[name] = [lines[:size] for lines in corpus.sets[name]]
    diagnosis = doctor(job_of(corpus.write(tmp_path / "c"), tmp_path / "a", vocab_size=4000, text_only=True))
    assert findings_of(diagnosis) == {}
    told = {check.where for check in diagnosis.checks if check.name == "alignment" and "too few pairs" in check.found}
    assert told == {"dev", "test.flickr"} - ({"test.flickr"} if test >= 100 else set())
    poor = [check for check in diagnosis.checks if (check.name, check.where) == ("poor pairs", "test.flickr")]
    assert all(check.value is not None and check.value < 0.1 for check in poor)
    assert bool(poor) == (test >= 100)


@needs_corpora
@pytest.mark.parametrize("name", [*FAULTS, *OTHER_FAULTS])
def test_doctor_finds_a_planted_fault(name: str, tmp_path: Path) -> None:
    fault = (FAULTS | OTHER_FAULTS)[name]
    corpus = Corpus.of(SLICE)
    fault.plant(corpus, random.Random(1))
    data = corpus.write(tmp_path / "corpus")
    diagnosis = doctor(job_of(data, tmp_path / "runs" / "a", vocab_size=fault.vocab_size, text_only=fault.text_only))

    found = [check for check in diagnosis.findings if (check.name, check.where) == (fault.check, fault.where)]
    assert found, findings_of(diagnosis)
    assert found[0].remedy
    assert findings_of(diagnosis).keys() == {f"{fault.check} in {fault.where}", *fault.too}
    with pytest.raises(FindingsError):
        require_health(diagnosis)


# ---- where they are -------------------------------------------------------------------------------------------------


@needs_corpora
def test_doctor_says_where_a_shift_begins(tmp_path: Path) -> None:
    corpus = Corpus.of(SLICE)
    shift_from_the_middle(corpus, random.Random(1))
    diagnosis = doctor(job_of(corpus.write(tmp_path / "c"), tmp_path / "a", vocab_size=4000, text_only=True))
    (shift,) = [check for check in diagnosis.findings if check.name == "shifted lines"]
    assert "go with the target 1 above" in shift.found
    assert [place.path for place in shift.places] == [f"{tmp_path}/c/train.{lang}" for lang in ("en", "de")]
    (first,) = {line for place in shift.places for line in place.lines}
    assert abs(first - SLICE // 2) <= 10


def test_survey_names_the_line_in_its_shard(tmp_path: Path) -> None:
    for name, numbers in (("a", range(3)), ("b", []), ("c", range(3, 10))):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text("".join(f"{n}\n" for n in numbers), encoding="utf-8")
    shards = [(tmp_path / f"{name}.en", tmp_path / f"{name}.de") for name in "abc"]
    read = survey("train", Source(shards), None)
    assert read.pairs_read == 10
    a, c = str(tmp_path / "a"), str(tmp_path / "c")
    assert read.places([2, 3, 4, 10]) == [
        *(Place(f"{a}.en", [2, 3]), Place(f"{a}.de", [2, 3])),
        *(Place(f"{c}.en", [1, 7]), Place(f"{c}.de", [1, 7])),
    ]
    assert read.places(range(1, 11), side=1) == [Place(f"{a}.de", [1, 2, 3]), Place(f"{c}.de", [1, 2])]


@needs_corpora
def test_doctor_names_the_lines_of_a_fault(tmp_path: Path) -> None:
    corpus = Corpus.of(SLICE)
    for line in range(100, 200):
        corpus.sets["train"][1][line - 1] = corpus.sets["train"][0][line - 1]
    corpus.sets["train"][0][499], corpus.sets["train"][1][499] = (corpus.sets["test"][side][6] for side in (0, 1))
    diagnosis = doctor(job_of(corpus.write(tmp_path / "c"), tmp_path / "a", vocab_size=4000, text_only=True))
    (copies,) = [check for check in diagnosis.findings if check.name == "copied sources"]
    assert copies.places[0].lines == [100, 101, 102, 103, 104]

    overlaps = [check for check in diagnosis.checks if check.where == "train with test.flickr"]
    assert [check.found for check in overlaps] == [
        "0.33 % of the pairs of test.flickr are in it, 1 in all",
        "0.0 % of the other sources of test.flickr are in it, 0 in all",
    ]
    assert {check.level for check in overlaps} == {Level.ok}


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path) -> DoctorJob:
    """A little of the demo corpus, which comes with the package."""
    names = ("train", "dev", "test")
    sets = {}
    for name in names:
        lines = [read_lines(ROOT / "data" / "demo" / f"{name}.{lang}", 500) for lang in ("en", "de")]
        sets[name] = write_pair(tmp_path / "demo", name, list(zip(*lines, strict=True)))
    data = DataConfig(train=sets["train"], dev=sets["dev"], test={"test": sets["test"]})
    return job_of(data, tmp_path / "runs" / "a", vocab_size=1000, text_only=True)


def test_doctor_prints_a_line_a_check(demo: DoctorJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("doctor", demo)
    printed = capsys.readouterr().out.split("\n")
    assert printed[:3] == ["train: 500 pairs", "dev: 500 pairs", "test.test: 500 pairs"]
    assert all(line.startswith("ok       ") for line in printed[3:-1])
    assert not (tmp_path / "runs").exists()


def test_doctor_ends_with_a_status_for_scripts(demo: DoctorJob, capsys: pytest.CaptureFixture[str]) -> None:
    demo.data.dev = demo.data.train
    demo.format = Format.json
    with pytest.raises(FindingsError, match=r"^errors: 1, warnings: 0, first overlap in train with dev: ") as ended:
        run_command("doctor", demo)
    assert ended.value.exit_status == 8
    checks = json.loads(capsys.readouterr().out)["checks"]
    (overlap,) = [check for check in checks if (check["name"], check["where"]) == ("overlap", "train with dev")]
    assert (overlap["level"], overlap["limit"]) == ("error", 0.005)
    assert overlap["places"][0] == {"path": demo.data.train.src, "lines": [1, 2, 3, 4, 5]}


def test_doctor_prints_remedy_and_lines_below_a_finding() -> None:
    diagnosis = Diagnosis(
        sets={"train": SetRead(pairs=1_000, sampled=500)},
        checks=[
            measured(
                "markup", "train source", found="none", value=0.0, limit=0.1, level=Level.error, remedy="-", places=[]
            ),
            measured(
                "markup",
                "train target",
                found="20.0 % of the lines",
                value=0.2,
                limit=0.1,
                level=Level.warning,
                remedy="strip it",
                places=[Place("a.de", [3, 7])],
            ),
        ],
    )
    assert format_diagnosis(diagnosis) == (
        "train: 1,000 pairs, 500 of them sampled\n"
        "warning  markup             train target: 20.0 % of the lines\n"
        "           remedy: strip it\n"
        "           a.de:3,7\n"
    )


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_lexicon_learns_ibm_model_1() -> None:
    """Brown et al. (1993), section 4.1, written with dictionaries; the probabilities are read off from `gains`."""
    pairs = [("das Haus", "the house"), ("das Buch", "the book"), ("ein Buch", "a book"), ("das", "the that")]
    t: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
    for _ in range(4):
        counts: dict[tuple[str, str], float] = defaultdict(float)
        totals: dict[str, float] = defaultdict(float)
        for source, target in pairs:
            for f in target.split():
                normal = sum(t[e, f] for e in source.lower().split())
                for e in source.lower().split():
                    counts[e, f] += t[e, f] / normal
                    totals[e] += t[e, f] / normal
        t = {(e, f): count / totals[e] for (e, f), count in counts.items()}

    numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    sides = [Bags.of(side, numbers[n], has_null=False) for n, side in enumerate(zip(*pairs, strict=True))]
    every = np.arange(len(pairs))
    lexicon = Lexicon.learn(*sides, left=every, right=every, vocabulary=10)
    words = [word for _, target in pairs for word in target.split()]
    for (e, f), probability in t.items():
        alone = [Bags.of([word], numbers[n], has_null=False) for n, word in enumerate((e, f))]
        (gain,) = lexicon.gains(*alone, left=every[:1], right=every[:1])
        explained = (math.exp(gain) - 0.1) / 0.9 * words.count(f) / len(words)
        assert explained == pytest.approx(probability if probability >= 0.01 else 0.0, abs=1e-9), (e, f)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize("text", ["Straße", "Übung", "mögen „sie“ es?", "ça va", "日本語", "Москва"])
def test_is_double_encoded_tells_text_from_text_that_was_encoded_twice(text: str, encoding: str) -> None:
    assert not is_double_encoded(text)
    try:
        twice = text.encode("utf-8").decode(encoding)
    except UnicodeDecodeError:  # Windows-1252 leaves five bytes undefined
        return
    assert is_double_encoded(twice)


@pytest.mark.parametrize("text", ["plain", "die SPÖ“ sagt „nein“", "Ã and Â", "“Café”", "à’", ""])
def test_is_double_encoded_leaves_strange_text_alone(text: str) -> None:
    assert not is_double_encoded(text)


def test_check_device_says_what_the_proof_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a training would compare: here because it is asked for."""

    def check(proof: bool | None) -> list[Check]:
        job = tiny_job(tmp_path / "a", data, proof=proof)
        return check_device(job, prepare(job).store, vocab_size=60, resolved=resolve_settings(job, world_size=1))

    data = write_corpus(tmp_path / "corpus")
    assert check(None) == []
    (sound,) = check(True)
    assert (sound.level, "packed, not compiled, fp32 agrees with the plain computation" in sound.found) == (
        Level.ok,
        True,
    )

    monkeypatch.setattr("transformer.model.attention._attend_in_groups", lambda q, k, v, spec: 0.0 * q)
    (faulty,) = check(True)
    assert faulty.level is Level.warning
    assert "padded, not compiled, fp32 agrees with" in faulty.found
    assert "; packed, not compiled, fp32: " in faulty.found


@pytest.mark.parametrize("capacities", [None, (64, 64)], ids=["padded", "packed"])
def test_largest_leak_sees_a_mask_that_is_missing(capacities: tuple[int, int] | None) -> None:
    torch.manual_seed(1)
    model = Transformer(ModelConfig(n_layers=2, d_model=32, d_ff=64, n_heads=2), 50).eval()
    sentences = [[10, 11, 12, 13, 14, 15], [20, 21, 22], [30, 31, 32, 33]]
    batch = collate(Store.from_pieces(sentences, sentences), torch.arange(3).numpy(), capacities)
    assert largest_leak(model, batch) < 1e-5

    for layer in model.decoder:
        assert isinstance(layer, DecoderLayer)
        take_the_mask_away(layer.self_attention)
    assert largest_leak(model, batch) > 1e-2


@pytest.mark.parametrize("layout", LayoutKind)
def test_check_overfit_counts_the_pairs_that_there_are(
    layout: LayoutKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pairs: 7 source tokens and 5 target tokens, each side with its EOS."""
    store = Store.from_pieces([[10, 11, 12, 13], [20]], [[14, 15], [21]])
    job = tiny_job(tmp_path / "a", DataConfig())
    is_packed = layout is LayoutKind.packed
    batching = Batching((), 1, 600, 600, 1, capacities=(128, 128) if is_packed else None)
    resolved = Resolved(Device.cpu, Precision.fp32, 1, 600, layout, compile=False, micro_batch_multiple=1)
    steps: list[Step] = []

    def spied(computation: Computation, step: Step, **settings: Any) -> StepResult:
        steps.append(step)
        return train_step(computation, step, **settings)

    monkeypatch.setattr("transformer.tools.doctor.training.train_step", spied)
    check = check_overfit(job, store, vocab_size=50, batching=batching, resolved=resolved)
    assert check.found.startswith("2 pairs, 5 tokens: loss ")
    assert (steps[0].sentences, steps[0].source_tokens, steps[0].target_tokens) == (2, 7, 5)


def test_doctor_takes_the_model_of_init_from_and_finds_that_there_is_none(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus")
    general = run(tiny_job(tmp_path / "general", data, max_steps=1))
    job = job_of(data, tmp_path / "a", vocab_size=60, text_only=False)
    job = replace(job, init_from=str(general), model=replace(job.model, d_ff=2 * job.model.d_ff))
    assert "preparing in plan" not in findings_of(doctor(job))
    found = findings_of(doctor(replace(job, init_from="nothing")))
    assert "nothing: no such run directory" in found["preparing in plan"]


# ---- the size of a vocabulary ---------------------------------------------------------------------------------------


MANY = "abdeghiklmnoprst"


@pytest.mark.parametrize(
    ("sizes", "letters", "count", "where", "remedy"),
    [
        ((14, None), ("abcd", "abcd"), 4_000, "vocabulary", r"raise tokenizer\.vocab_size, several times: 100 .*Gowda"),
        ((60, None), ("abcd", "abcd"), 400, None, ""),
        ((2000, None), (MANY, MANY), 400, "vocabulary", r"lower tokenizer\.vocab_size: .*; of \d+ pieces half .*Gowda"),
        ((60, 2000), ("abcd", MANY), 400, "target vocabulary", r"lower tokenizer\.target\.vocab_size: "),
    ],
    ids=["far too small", "sound", "far too large", "the target's is far too large"],
)
def test_check_sizes_finds_a_vocabulary_far_from_what_the_text_fills(
    sizes: tuple[int, int | None], letters: tuple[str, str], count: int, where: str | None, remedy: str, tmp_path: Path
) -> None:
    """On pairs of 40 letters each, drawn at random; the figure is counted by SentencePiece itself."""
    draw = random.Random(1)
    source, target = (["".join(draw.choices(of_side, k=40)) for _ in range(count)] for of_side in letters)
    pairs = list(zip(source, target, strict=True))
    data = DataConfig(train=write_pair(tmp_path, "train", pairs), dev=write_pair(tmp_path, "dev", pairs[:9]))
    tokenizer = TokenizerConfig(vocab_size=sizes[0], target=TargetTokenizerConfig(vocab_size=sizes[1]))
    job = replace(tiny_job(tmp_path / "a", data), tokenizer=tokenizer)
    prepared = prepare(job)
    checks = check_sizes(prepared, job)

    assert len(checks) == len(prepared.tokenizers.models)
    assert [check.where for check in checks if check.level is Level.warning] == ([where] if where else [])
    check = checks[-1]
    assert re.match(remedy, check.remedy or "")

    of_files = TargetTokenizerConfig(model="b.model") if sizes[1] else TargetTokenizerConfig()
    for given in (replace(job, init_from="b"), replace(job, tokenizer=TokenizerConfig(model="a", target=of_files))):
        assert {check.found for check in check_sizes(prepared, given)} == {"a tokenizer that is given"}

    name = [*prepared.tokenizers.models][-1]
    processor = SentencePieceProcessor(model_file=str(prepared.path / name))
    lines = [line for pair in pairs for line in (pair[1:] if len(checks) == 2 else pair)]
    times = Counter(piece for line in lines for piece in processor.encode(line, out_type=str))
    several = {piece for piece in map(processor.id_to_piece, range(4, len(processor))) if len(piece) > 1}
    in_order = sorted(times[piece] for piece in several)
    rare = sum(count < 100 for count in in_order) / len(several)
    assert check.value == (in_order[len(in_order) // 20] if rare <= 0.05 else rare)


@pytest.mark.parametrize("algorithm", [Algorithm.bpe, Algorithm.unigram])
def test_rare_shares_are_near_those_of_tokenizers_that_are_trained(algorithm: Algorithm) -> None:
    """The demo's, of 800 pieces and of 400; a unigram model's order is not quite that in which pieces are pruned."""
    lines = [line for lang in ("en", "de") for line in read_lines(ROOT / "data" / "demo" / f"train.{lang}", 2_000)]

    def shares_of(vocab_size: int) -> Any:
        tokenizer = Tokenizer(train_tokenizer(lines, TokenizerConfig(algorithm, vocab_size)))
        ids = [piece for pieces in tokenizer.encode(lines) for piece in pieces]
        return rare_shares(tokenizer.vocabulary(), np.bincount(ids, minlength=vocab_size))

    large, small = shares_of(800), shares_of(400)
    assert len(large) - len(small) == 400
    assert large[len(small) - 1] == pytest.approx(small[-1], abs=0.01 if algorithm is Algorithm.bpe else 0.1)


def test_check_sizes_counts_a_large_corpus_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 equal sentences ten are read, four at a time."""
    monkeypatch.setattr(vocabulary, "COUNTED", 10)
    monkeypatch.setattr(vocabulary, "BLOCK", 4)
    store = Store.from_pieces([[5, 6, 5]] * 40, [[7]] * 40)
    assert vocabulary.piece_counts(store, 0, vocab_size=8).tolist() == [0, 0, 0, 0, 0, 80, 40, 0]


@dataclass
class Clock:
    """The time of a process in which nothing takes time but what a test says."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def add(self, seconds: float) -> None:
        self.now += seconds


def test_check_cost_times_the_micro_batches_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which 200 tokens fit; by the clock, each micro-batch takes 10 seconds."""

    def fit(trial: Trial, resolved: Resolved, objective: object) -> Resolved:
        return replace(resolved, max_tokens=200)

    def check(trial: Trial, resolved: Resolved, objective: object) -> MemoryCheck:
        return MemoryCheck(resolved.max_tokens, is_estimate=False, needed=1, available=2)

    monkeypatch.setattr("transformer.tools.doctor.training.can_try", lambda device: True)
    monkeypatch.setattr(Trial, "fit", fit)
    monkeypatch.setattr(Trial, "check", check)
    clock = Clock()
    monkeypatch.setattr("transformer.tools.doctor.training.time", clock)
    slots: list[int] = []

    def spied(computation: Computation, step: Step, **settings: Any) -> StepResult:
        slots.extend(batch.source.numel() for _, batch in step.micro_batches)
        clock.add(10)
        return train_step(computation, step, **settings)

    monkeypatch.setattr("transformer.tools.doctor.training.train_step", spied)
    job = tiny_job(
        tmp_path / "a", write_corpus(tmp_path / "corpus"), layout=LayoutKind.padded, max_tokens=None, fit_memory=True
    )
    prepared = prepare(job)
    memory, _, hours = check_cost(job, prepared, resolved=resolve_settings(job, world_size=1), vocab_size=60)

    assert "in a trial for a step of train.max_tokens=200;" in memory.found
    assert max(slots) <= 200, "a step has 600 tokens a side"
    seconds = float(hours.found.partition(" s a step")[0])
    assert seconds > 20, "three micro-batches in most steps"


@pytest.mark.parametrize("kind", OptimizerKind)
def test_check_cost_counts_the_update_once_a_step(
    kind: OptimizerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, a micro-batch takes 10 seconds and an update 100."""
    clock = Clock()
    monkeypatch.setattr("transformer.tools.doctor.training.time", clock)
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"), optimizer=kind)
    prepared = prepare(job)
    with before_each_pass(lambda _: clock.add(10)), before_each_update(lambda: clock.add(100)):
        *_, hours = check_cost(job, prepared, resolved=resolve_settings(job, world_size=1), vocab_size=60)

    micro_batches = (float(hours.found.partition(" s a step")[0]) - 100) / 10
    assert 1.5 < micro_batches <= 2, "two of 300 tokens in a step of 600, but for the last of an epoch"


def test_check_cost_says_what_helps_where_no_step_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise InputError("out of GPU memory in the trial before the first step")

    monkeypatch.setattr("transformer.tools.doctor.training.can_try", lambda device: True)
    monkeypatch.setattr(Trial, "fit", fail)
    job = tiny_job(tmp_path / "a", write_corpus(tmp_path / "corpus"))
    resolved = resolve_settings(job, world_size=1)
    (check,) = check_cost(job, prepare(job), resolved=resolved, vocab_size=60)
    assert check.remedy == "lower train.max_tokens, set train.fit_memory=true, or choose a smaller model"


def take_the_mask_away(attention: torch.nn.Module) -> None:
    forward = attention.forward

    def unmasked(x: Any, kv: Any, *, queries: Any, keys: Any, causal: bool) -> Any:
        return forward(x, kv, queries=queries, keys=keys, causal=False)

    attention.forward = unmasked


# ---- whole corpora --------------------------------------------------------------------------------------------------


@needs_corpora
@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_doctor_finds_a_planted_fault_in_the_whole_of_multi30k(name: str, tmp_path: Path) -> None:
    """Through the public command, with the settings of the corpus' own experiment."""
    fault = FAULTS[name]
    corpus = Corpus.of(None)
    fault.plant(corpus, random.Random(2))
    corpus.write(tmp_path / "corpus")
    arguments = [
        *("experiment=multi30k_en_de", f"run_dir={tmp_path}/runs/a", "train.threads=1", "format=json"),
        *(f"data.train.{side}={tmp_path}/corpus/train.{lang}" for side, lang in LANGUAGES.items()),
        *(f"data.dev.{side}={tmp_path}/corpus/dev.{lang}" for side, lang in LANGUAGES.items()),
        *(f"data.test.test_2016_flickr.{side}={tmp_path}/corpus/test.{lang}" for side, lang in LANGUAGES.items()),
        f"tokenizer.vocab_size={min(6000, fault.vocab_size)}",
        f"text_only={str(fault.text_only).lower()}",
    ]
    out, _ = finish(start("doctor", *arguments, cwd=tmp_path), 8)
    findings = [check for check in json.loads(out)["checks"] if check["level"] != "ok"]
    where = fault.where.replace("flickr", "test_2016_flickr")
    assert [check for check in findings if (check["name"], check["where"]) == (fault.check, where)], findings


@needs_corpora
@pytest.mark.faults
@pytest.mark.parametrize("experiment", ["multi30k_en_de", "multi30k_en_fr", "tatoeba_en_de", "kftt_ja_en"])
def test_doctor_is_silent_on_a_real_corpus(experiment: str, tmp_path: Path) -> None:
    """Everything of it, as a user begins with it; KFTT takes minutes to prepare."""
    arguments = [f"experiment={experiment}", f"data.root={CORPORA.resolve()}", f"run_dir={tmp_path}/runs/a"]
    out, _ = finish(start("doctor", *arguments, cwd=tmp_path), 0, timeout=550)
    checks = [line for line in out.split("\n") if line and re.match(r"\S+: [\d,]+ pairs", line) is None]
    assert {line.partition(" ")[0] for line in checks} == {"ok"}


@needs_corpora
@pytest.mark.faults
def test_doctor_is_silent_on_newstest2013(tmp_path: Path) -> None:
    """Two thirds of it to train on, a sixth for development and a sixth as a test set."""
    sides = [read_lines(CORPORA / "newstest2013" / f"newstest2013.{lang}", None) for lang in ("en", "de")]
    parts = {"train": slice(0, 2000), "dev": slice(2000, 2500), "test": slice(2500, 3000)}
    data = Corpus({name: [lines[part] for lines in sides] for name, part in parts.items()}).write(tmp_path / "c")
    diagnosis = doctor(job_of(data, tmp_path / "a", vocab_size=2000, text_only=False))
    assert findings_of(diagnosis) == {}
