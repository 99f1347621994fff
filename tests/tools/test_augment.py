"""Changed pairs: each change by hand; in training by (seed, epoch, pair), whoever asks; all pairs of a test set."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from support.corpora import assert_same_end, metrics_of, read, run, step_dir, tiny_job, write_corpus
from support.ranks import ranks
from support.resumed_runs import learned, stop_at
from transformer import registry
from transformer.cli.main import main
from transformer.config.jobs import TrainJob
from transformer.config.settings import AugmentConfig, DataConfig, PairConfig, Precision, SearchConfig, TokenizerConfig
from transformer.data.augmentation import Sides
from transformer.data.corpus import Pair
from transformer.data.epochs import EpochStores
from transformer.data.source import resolve_source
from transformer.data.store import Sentences, Store
from transformer.data.tokenizer import Tokenizer, Tokenizers, train_tokenizer
from transformer.tools import augment
from transformer.tools.augmentation import Augmentation

ENGLISH_GERMAN = ("en", "de")


def changed(name: str, pair: Pair, languages: tuple[str, str] = ENGLISH_GERMAN, *, seed: int = 1) -> Pair:
    return registry.find("augment", name)(pair, languages, random.Random(seed).random)


# ---- each change ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "languages", "pair", "expected"),
    [
        ("upper", ("en", "de"), ("Hi, you!", "Süße Straße 3"), ("HI, YOU!", "SÜSSE STRASSE 3")),
        ("upper", ("tr", "en"), ("bir ışık", "in it"), ("BİR IŞIK", "IN IT")),
        ("upper", ("en", "ja"), ("one", "いち"), ("ONE", "いち")),
        ("title", ("en", "de"), ('don\'t "say" it', "sag (das) nicht 3x"), ('Don\'t "Say" It', "Sag (Das) Nicht 3x")),
        ("title", ("tur", "en"), ("iyi gün", "id"), ("İyi Gün", "Id")),
        ("unmarked", ("en", "de"), ("Hi there!", "Hallo ..."), ("Hi there", "Hallo")),
        ("unmarked", ("ja", "en"), ("はい。", "Yes."), ("はい", "Yes")),
        ("unmarked", ("en", "de"), ("Hi there.", "Hallo"), ("Hi there.", "Hallo")),
        ("unmarked", ("en", "de"), ("3.5", "3,5."), ("3.5", "3,5.")),
        ("typos", ("en", "de"), ("a 12 bc1234 to", "x"), ("a 12 bc1234 to", "x")),
    ],
)
def test_augment_by_hand(name: str, languages: tuple[str, str], pair: Pair, expected: Pair) -> None:
    assert changed(name, pair, languages) == expected


def test_typos_are_those_of_fingers_on_a_source() -> None:
    """One word at least, a tenth of many; the first letter stays, and so does the translation."""
    forms = {changed("typos", ("house", "Haus"), seed=seed) for seed in range(2_000)}
    assert {target for _, target in forms} == {"Haus"}
    sources = {source for source, _ in forms}
    assert sources > {"huose", "huse", "hoouse", "hiuse", "hpuse", "houes"}
    assert all(source[0] == "h" and 4 <= len(source) <= 6 for source in sources)
    text = "house " * 1_000
    words = changed("typos", (text, ""))[0].split(" ")
    assert 60 < sum(word not in ("house", "") for word in words) < 140


@pytest.mark.parametrize(
    ("language", "letter", "beside"),
    [
        ("en", "y", "tugh"),
        ("deu", "z", "tugh"),
        ("de", "ö", "üplä"),
        ("fr", "a", "zq"),
        ("ru", "ф", "йцыя"),
        ("en", "ж", ""),
    ],
)
def test_neighbours_are_those_of_the_keyboard_of_a_language(language: str, letter: str, beside: str) -> None:
    layout = augment._LAYOUTS.get(augment._code(language), augment._QWERTY)
    assert set(augment._neighbours(letter, layout)) <= set(beside)
    assert bool(augment._neighbours(letter, layout)) == bool(beside)


def test_noise_is_its_own_translation() -> None:
    lines = {changed("noise", ("Hello", "Hallo"), seed=seed) for seed in range(200)}
    assert len(lines) > 190
    assert all(source == target and source.strip() and "\n" not in source for source, target in lines)


def test_mixed_is_one_of_four() -> None:
    forms = Counter(changed("mixed", ("one house.", "ein Haus."), seed=seed) for seed in range(400))
    known = {("ONE HOUSE.", "EIN HAUS."), ("One House.", "Ein Haus."), ("one house", "ein Haus")}
    assert known < set(forms)
    assert 60 < sum(count for pair, count in forms.items() if pair not in known) < 140


# ---- some pairs of each epoch ---------------------------------------------------------------------------------------

WORDS = ["house", "tree", "river", "water", "stone", "light", "green", "quiet", "little", "summer"]
PAIRS = [
    (f"{' '.join(line)}.", f"{' '.join(reversed(line))}!")
    for line in zip(WORDS, WORDS[3:] + WORDS[:3], WORDS[4:] + WORDS[:4], strict=True)
] * 60
CAPITALS = [text.upper() for pair in PAIRS[:10] for text in pair]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    lines = [text for pair in PAIRS for text in pair] + [
        *CAPITALS,
        "qwertyuiop asdfghjkl zxcvbnm QWERTYUIOP ASDFGHJKL ZXCVBNM",
    ]
    config = TokenizerConfig(vocab_size=120)
    tokenizer = Tokenizer(train_tokenizer(lines, config, tags=["<2de>"]))
    return Tokenizers(tokenizer, tokenizer)


def store_of(tokenizers: Tokenizers, pairs: Sequence[Pair]) -> Store:
    source, target = (tokenizers.source.encode([pair[side] for pair in pairs]) for side in (0, 1))
    return Store.from_pieces(source, target)


def of_epoch(
    tokenizers: Tokenizers,
    rates: dict[str, float],
    *,
    pairs: Sequence[Pair] = PAIRS,
    epoch: int = 0,
    seed: int = 1,
    directions: dict[str | None, tuple[str, str]] | None = None,
) -> list[Pair]:
    """The pairs of an epoch as text. A long pair of capitals makes room for the others."""
    longest = [(" ".join(CAPITALS), " ".join(CAPITALS))]
    store = store_of(tokenizers, [*pairs, *longest])
    languages = {None: ENGLISH_GERMAN, "<2de>": ENGLISH_GERMAN} | dict(directions or {})
    augmentation = Augmentation(rates, tokenizers, languages=languages, seed=seed)
    stores = EpochStores(store, None, mixture=[(len(store), 1.0)], seed=seed, augmentation=augmentation)
    made = stores.make(epoch)
    stores.close()
    sides = []
    for side in (0, 1):
        pieces, counts = made.gather(np.arange(len(pairs)), side)
        ids = [part.tolist() for part in np.split(pieces, counts.cumsum()[:-1])]
        sides.append(tokenizers.source.decode(ids))
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize(("name", "rate"), [("upper", 0.07), ("title", 0.05), ("unmarked", 0.2), ("typos", 0.5)])
def test_epochs_change_as_many_pairs_as_the_rate_says(name: str, rate: float, tokenizers: Tokenizers) -> None:
    counts = []
    for epoch in range(4):
        found = of_epoch(tokenizers, {name: rate}, epoch=epoch)
        counts.append(sum(a != b for a, b in zip(found, PAIRS, strict=True)))
        for pair, plain in zip(found, PAIRS, strict=True):
            if name != "typos":
                assert pair in (plain, changed(name, plain))
            else:
                assert pair[1] == plain[1]
    expected = 4 * rate * len(PAIRS)
    assert abs(sum(counts) - expected) < 4 * expected**0.5
    assert len(set(counts)) > 1, "each epoch has its own"


def test_epochs_change_pairs_by_seed_epoch_and_pair_alone(tokenizers: Tokenizers) -> None:
    rates = AugmentConfig(upper=0.3, title=0.3, typos=0.3, unmarked=0.3).rates
    assert list(rates) == ["unmarked", "typos", "title", "upper"]
    found = of_epoch(tokenizers, rates)
    assert of_epoch(tokenizers, rates) == found
    assert of_epoch(tokenizers, rates, pairs=PAIRS[:250]) == found[:250], "whatever else is in the corpus"
    assert of_epoch(tokenizers, rates, epoch=1) != found != of_epoch(tokenizers, rates, seed=2)
    only = of_epoch(tokenizers, {"upper": 0.3})
    capitals = [source.isupper() for source, _ in only]
    assert [source.isupper() for source, _ in found] == capitals, "other changes do not alter which are in capitals"
    assert all(source.isupper() == target.isupper() for source, target in found)


def test_augmentation_keeps_tags_and_what_has_an_unknown_piece(tokenizers: Tokenizers) -> None:
    pairs = [("<2de> house tree.", "water."), ("house ☃.", "stone."), ("é", "é"), ("Žž house.", "light.")]
    found = of_epoch(tokenizers, {"upper": 1.0}, pairs=pairs)
    assert found[0] == ("<2de> HOUSE TREE.", "WATER.")
    plain = tokenizers.source.decode(tokenizers.source.encode([text for pair in pairs for text in pair]))
    assert found[1:] == list(zip(plain[2::2], plain[3::2], strict=True))
    assert of_epoch(tokenizers, {"unmarked": 1.0}, pairs=[("...", "!")]) == [("...", "!")], "no side is left empty"


def test_augmentation_goes_by_the_languages_of_a_tag(tokenizers: Tokenizers) -> None:
    """Turkish has a capital of its own for i, which is no piece here: so the pair stays as it is."""
    pairs = [("light.", "light!"), ("<2de> light.", "light!")]
    found = of_epoch(tokenizers, {"upper": 1.0}, pairs=pairs, directions={"<2de>": ("en", "tr")})
    assert found == [("LIGHT.", "LIGHT!"), ("<2de> light.", "light!")]


def test_augmentation_keeps_both_sides_of_a_pair_that_would_be_too_long(
    tokenizers: Tokenizers, caplog: pytest.LogCaptureFixture
) -> None:
    """A target that would be too long, while its source would not be."""
    caplog.set_level("INFO")
    pairs = [("tree", "house tree river water stone light green quiet"), ("house tree river water stone light", "tree")]
    plain = store_of(tokenizers, pairs)
    augmentation = Augmentation({"upper": 1.0}, tokenizers, languages={None: ENGLISH_GERMAN}, seed=1)
    sides: Sides = (plain.gather(np.arange(2), 0), plain.gather(np.arange(2), 1))
    longer = augmentation.change(sides, np.arange(2), epoch=0)
    grown = [longer[side].counts + 1 > plain.longest[side] for side in (0, 1)]
    assert (grown[0] | grown[1]).any()
    stores = EpochStores(plain, None, mixture=[(2, 1.0)], seed=1, augmentation=augmentation)
    made = stores.make(0)
    count = int((grown[0] | grown[1]).sum())
    assert (
        f"augmentation: {count} changed pairs would be longer than the longest of the corpus, and stay" in caplog.text
    )
    for row in range(2):
        kept = grown[0][row] or grown[1][row]
        for side in (0, 1):
            expected: Sentences = sides[side] if kept else longer[side]
            ends = expected.counts.cumsum()
            pieces = expected.pieces[ends[row] - expected.counts[row] : ends[row]]
            assert made.gather(np.array([row]), side).pieces.tolist() == pieces.tolist()


# ---- trainings ------------------------------------------------------------------------------------------------------

LAST = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def augmented_job(run_dir: Path, corpus: DataConfig, **recipe: Any) -> TrainJob:
    settings: dict[str, Any] = {
        "max_steps": LAST,
        "validate_every": LAST,
        "save_every": 4,
        "keep_last": 9,
        "average": 1,
    }
    rates = AugmentConfig(unmarked=0.2, typos=0.2, title=0.2, upper=0.2, noise=0.05)
    job = tiny_job(run_dir, corpus, **{**settings, "augment": rates, **recipe})
    tokenizer = TokenizerConfig(vocab_size=300, byte_fallback=True)
    return replace(job, tokenizer=tokenizer, search=SearchConfig(beam_size=1, max_extra=1))


@pytest.fixture(scope="module")
def straight(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(augmented_job(tmp_path_factory.mktemp("straight") / "a", corpus))


def test_train_resumes_on_the_same_changed_pairs(straight: Path, corpus: DataConfig, tmp_path: Path) -> None:
    epochs: dict[float, list[int]] = {}
    for row in metrics_of(straight):
        if "train/epoch" in row:
            epochs.setdefault(row["train/epoch"], []).append(row["step"])
    first, second = list(epochs.values())[:2]
    job = augmented_job(tmp_path / "a", corpus)
    stop_at(job, first[-1])
    stop_at(job, second[0])
    run(job)
    assert_same_end(tmp_path / "a", straight)
    assert learned(tmp_path / "a") == learned(straight)
    assert (straight / "train.log").read_text(encoding="utf-8").count("augmentation: an epoch has ") == 1


def test_train_learns_something_else_than_without_augmentation(
    straight: Path, corpus: DataConfig, tmp_path: Path
) -> None:
    plain = run(augmented_job(tmp_path / "a", corpus, augment=AugmentConfig(), max_steps=2, validate_every=2))
    losses = [[row["train/loss"] for row in metrics_of(path) if "train/loss" in row][:2] for path in (plain, straight)]
    assert losses[0] != losses[1]


@pytest.mark.ci
def test_two_ranks_train_on_the_changed_pairs_of_one(corpus: DataConfig, tmp_path: Path) -> None:
    """Begun on two ranks, ended in the second epoch on one, against two all the way: in float64, to 1e-9."""
    recipe: dict[str, Any] = {"precision": Precision.fp64, "max_tokens": 200}
    straight = augmented_job(tmp_path / "two", corpus, **recipe)
    assert ranks(2, lambda: run(straight), tmp_path) == [0, 0]
    begun = augmented_job(tmp_path / "moved", corpus, **recipe | {"max_steps": 2, "validate_every": 2})
    assert ranks(2, lambda: run(begun), tmp_path) == [0, 0]
    run(augmented_job(tmp_path / "moved", corpus, **recipe))
    folders = (step_dir(tmp_path / name, LAST) for name in ("two", "moved"))
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-9


def test_replay_runs_a_step_on_the_changed_pairs_of_its_epoch(straight: Path) -> None:
    from transformer.tools.replay.command import replay
    from transformer.tools.replay.job import ReplayJob

    found = replay(ReplayJob(run_dir=str(straight), step=LAST - 1))
    (logged,) = [row for row in metrics_of(straight) if row["step"] == LAST - 1 and "train/loss" in row]
    assert (found.loss, found.gradient_norm) == (logged["train/loss"], logged["train/gradient_norm"])


# ---- sets that are changed as a whole -------------------------------------------------------------------------------


def test_set_is_changed_by_the_numbers_of_its_pairs(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"the quiet house {n}.\tdas Haus {n}.\n" for n in range(50)), encoding="utf-8")

    def load(**given: Any) -> list[Pair]:
        pair = PairConfig(dataset=str(path), **given)
        return resolve_source(pair, "data.test.a", languages=ENGLISH_GERMAN, store_dir=tmp_path).load("data.test.a")

    assert load(augment="upper", tag="<x>")[7] == ("<x> THE QUIET HOUSE 7.", "DAS HAUS 7.")
    typos = load(augment="typos")
    assert typos == load(augment="typos")
    assert len({re.sub(r"\d", "", source) for source, _ in typos}) > 10
    assert [target for _, target in typos] == [target for _, target in load()]


def test_commands_train_and_score_on_changed_text(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one types it: rates for training, a changed copy of a set beside it, and another one when it is done."""
    monkeypatch.chdir(tmp_path)

    def typed(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["transformer", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    dev = (f"src={corpus.dev.src}", f"tgt={corpus.dev.tgt}")
    tiny = ("model.d_model=16", "model.d_ff=32", "model.n_heads=2", "model.n_layers=1", "tokenizer.vocab_size=60")
    short = ("train.max_steps=2", "train.save_every=2", "train.validate_every=2", "train.average=1", "train.threads=1")
    text = [f"data.train.src={corpus.train.src}", f"data.train.tgt={corpus.train.tgt}"]
    text += [f"data.{name}.{key}" for name in ("dev", "test.plain", "test.upper") for key in dev]
    words = ("experiment=small", *tiny, *short, *text, "run_dir=runs/a", "data.test.upper.augment=upper")
    assert typed("train", *words, "train.augment.upper=0.5", "train.augment.typos=0.5") == 0
    sources = {
        name: (tmp_path / f"runs/a/hypotheses/{name}.src").read_text(encoding="utf-8") for name in ("plain", "upper")
    }
    assert sources["upper"] == sources["plain"].upper() != sources["plain"]
    assert set(read(tmp_path / "runs/a/results.json")["test_sets"]) == {"plain", "upper"}
    asked = [f"test.typos.{key}" for key in dev]
    assert typed("evaluate", "run_dir=runs/a", *asked, "test.typos.augment=typos") == 0
    assert "typos  BLEU" in capsys.readouterr().out
    assert typed("train", *words, "train.augment.upper=2") == 2
    assert "train.augment.upper=2" in capsys.readouterr().err
