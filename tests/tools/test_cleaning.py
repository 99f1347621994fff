"""`data.filter.doctor`: the detectors find planted faults, each by its name, and nothing else."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.corpora import spell, texts, tiny_job, write_corpus, write_pair
from transformer import registry
from transformer.data.corpus import Pair
from transformer.data.prepare import prepare
from transformer.data.report import DroppedPair
from transformer.tools.detectors import cleaning
from transformer.tools.detectors.cleaning import find_faults

EVERY = list(registry.OWN["screen"])


def words(letters: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=5)) for _ in range(60)]


TO_TARGET = str.maketrans("abcdefghik", "lmnoprstuv")
SOURCE, TARGET = words("abcdefghik", 1), words("lmnoprstuv", 2)


def spelled(numbers: list[int]) -> Pair:
    """A sentence in two made-up languages, whose words translate each other."""
    return " ".join(SOURCE[number] for number in numbers), " ".join(TARGET[number] for number in numbers)


def corpus(count: int) -> list[Pair]:
    draw = random.Random(3)
    return [spelled([draw.randrange(60) for _ in range(draw.randrange(6, 10))]) for _ in range(count)]


# What is done to a pair, and which detector finds it.
FAULTS: dict[str, tuple[Callable[[Pair], Pair], str]] = {
    "copied": (lambda pair: (pair[0], f"{pair[0]} "), "copies"),
    "encoded twice": (lambda pair: (pair[0], f"{pair[1]} fünf".encode().decode("latin-1")), "encoding"),
    "lost": (lambda pair: (f"{pair[0]} \ufffd", pair[1]), "encoding"),
    "tagged": (lambda pair: (pair[0], f"<b>{pair[1]}</b>"), "markup"),
    "swapped": (lambda pair: (pair[1], pair[0]), "languages"),
    "untranslated": (lambda pair: (pair[0], pair[0][4:]), "languages"),
    "French": (lambda pair: (pair[0], "les enfants qui sont dans une des rues avec elle"), "languages"),
    "Cyrillic": (lambda pair: (pair[0], "один два три"), "languages"),
    "cut off": (lambda pair: (f"{pair[0]} {pair[0]}", pair[1][:5]), "lengths"),
    "another pair": (
        lambda pair: (spelled([1, 2, 3, 4, 5, 6])[0], spelled([17, 18, 19, 20, 21, 22])[1]),
        "alignment",
    ),
}


def test_find_faults_names_the_detector_of_each_fault() -> None:
    pairs = corpus(1_000)
    expected: list[str | None] = [None] * 1_000
    for line, (spoil, detector) in enumerate(FAULTS.values()):
        pairs[70 * line] = spoil(pairs[70 * line])
        expected[70 * line] = detector
    assert list(find_faults(lambda: pairs, EVERY, ("en", "de"))) == expected


@pytest.mark.parametrize("name", FAULTS)
def test_find_faults_leaves_what_no_detector_was_asked_for(name: str) -> None:
    spoil, detector = FAULTS[name]
    others = [one for one in EVERY if one not in (detector, "alignment", "languages")]
    pairs = corpus(100)
    pairs[32] = spoil(pairs[32])
    assert list(find_faults(lambda: pairs, others, ("en", "de"))) == [None] * 100


@pytest.mark.parametrize(
    ("text", "code"),
    [("1ª", "es"), ("2º", "pt"), ("5 µm", "de"), ("ＡＢＣ", "ja"), ("ｱｲｳｴｵ", "ja"), ("々々", "ja"), ("〆切", "zh")],
)
def test_find_faults_knows_letters_of_any_script(text: str, code: str) -> None:
    """Ordinals and the sign of a millionth are of no script, Latin letters as wide as Chinese signs East Asian."""
    pairs = [(text, target) for _, target in corpus(100)]
    assert list(find_faults(lambda: pairs, ["languages"], (code, "en"))) == [None] * 100


def test_find_faults_finds_shifted_blocks() -> None:
    pairs = corpus(2_000)
    targets = [target for _, target in pairs]
    pairs[500:700] = [(pairs[line][0], targets[line - 1]) for line in range(500, 700)]
    found = list(find_faults(lambda: pairs, ["alignment"], ("en", "de")))
    assert found[500:700] == ["alignment"] * 200
    assert found[:500] == [None] * 500
    assert found[700:] == [None] * 1_300


def test_find_faults_does_not_depend_on_how_many_pairs_are_judged_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = corpus(1_210)
    pairs[700:1_000] = [
        (source, target) for (source, _), (_, target) in zip(pairs[700:1_000], pairs[:300], strict=True)
    ]
    at_once = list(find_faults(lambda: pairs, EVERY, ("en", "de")))
    monkeypatch.setattr(cleaning, "CHUNK", 100)
    assert list(find_faults(lambda: pairs, EVERY, ("en", "de"))) == at_once
    assert Counter(at_once)["alignment"] > 250


def test_find_faults_without_enough_to_learn_alignment_from_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pairs = corpus(100)
    assert list(find_faults(lambda: pairs, ["alignment"], ("en", "de"))) == [None] * 100
    assert "alignment drops nothing" in caplog.text


def test_find_faults_asks_no_pair_about_itself() -> None:
    """A wrong pair with rare words would have taught the lexicon that these translate each other."""
    draw = random.Random(5)
    rare = ["".join(draw.choices("abcdefghik", k=5)) for _ in range(1_500)]
    pairs = [
        (" ".join(rare[n] for n in numbers), " ".join(rare[n].translate(TO_TARGET) for n in numbers))
        for numbers in ([draw.randrange(1_500) for _ in range(8)] for _ in range(3_000))
    ]
    wrong = range(0, 3_000, 10)
    targets = [target for _, target in pairs]
    for line in wrong:
        pairs[line] = (pairs[line][0], targets[(line + 1_505) % 3_000])
    found = list(find_faults(lambda: pairs, ["alignment"], ("en", "de")))
    assert sum(found[line] is not None for line in wrong) > 0.7 * len(wrong)
    assert sum(fault is not None for fault in found) < 1.1 * len(wrong)


def test_prepare_counts_a_pair_under_the_first_reason_to_drop_it(tmp_path: Path) -> None:
    """A copy that comes twice: the second one is a duplicate, whatever a detector thinks of it."""
    data = write_corpus(tmp_path)
    draw = random.Random(4)
    pairs = [spell(draw.randrange(10) for _ in range(8)) for _ in range(600)]
    pairs[7] = pairs[20] = (pairs[20][0], pairs[20][0])
    data.train = write_pair(tmp_path, "noisy", pairs)
    job = tiny_job(tmp_path / "run", data)
    job.data.filter.drop_duplicates = True
    job.data.filter.doctor = ["copies"]
    assert {reason: count for reason, count in prepare(job).report.dropped.items() if count} == {
        "duplicate": 1,
        "copies": 1,
    }


def test_prepare_drops_what_the_detectors_find(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    draw = random.Random(4)
    pairs = [spell(draw.randrange(10) for _ in range(8)) for _ in range(600)]
    pairs[7] = (pairs[7][0], f"<i>{pairs[7][1]}\0</i>")
    pairs[9] = (pairs[9][0], "")
    pairs[20] = (pairs[20][0], pairs[20][0])
    data.train = write_pair(tmp_path, "noisy", pairs)
    job = tiny_job(tmp_path / "run", data)
    job.data.filter.doctor = ["markup", "copies"]

    prepared = prepare(job)
    assert texts(prepared) == [pair for line, pair in enumerate(pairs) if line not in (7, 9, 20)]
    reasons = {reason: count for reason, count in prepared.report.dropped.items() if count}
    assert reasons == {"empty": 1, "copies": 1, "markup": 1}
    assert prepared.report.samples == {
        "markup": [DroppedPair(0, 8, pairs[7][0], pairs[7][1].replace("\0", "\ufffd"))],  # no record keeps a NUL
        "copies": [DroppedPair(0, 21, *pairs[20])],
    }
    job.data.filter.doctor = ["copies", "markup"]
    assert prepare(job).path == prepared.path
