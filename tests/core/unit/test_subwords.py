"""Subword sampling: SentencePiece's own pieces at one end, the exact distributions in between, the text unharmed."""

import gzip
import io
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from support.paths import CORPORA, ROOT, needs_corpora
from transformer.config.settings import Algorithm, TokenizerConfig
from transformer.data.piece_list import Piece
from transformer.data.store import Sentences
from transformer.data.subwords import SubwordSampler
from transformer.data.tokenizer import Tokenizer, train_tokenizer
from transformer.errors import InputError

Shares = dict[tuple[str, ...], float]  # the probability of each segmentation
ALGORITHMS = ["bpe", "unigram"]
PLAIN = {"bpe": 0.0, "unigram": 1e6}  # the rates at which only the tokenizer's own pieces are left
ODD = [  # what no corpus here has: unknown characters, single ones, symbols of translation systems, odd spaces
    *("漢字 a man 漢 字", "漢", "x", "a", "ÄÖÜ 😀 tree", "The ﬁsh ½ ²", "   a", "a  b   c", "e\u0301"),
    *("<2de> a man", "a<2de>b", "man <2de>", "<2de>", "<2de><2de>", "taxying king xy", "<unk> </s> <pad>"),
]


def read_text(path: Path, count: int) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in islice(file, count)]


@cache
def corpus(name: str) -> list[str]:
    """500 lines of either language."""
    folder = ROOT / "data" if name == "demo" else CORPORA
    files = {"demo": ("train.en", "train.de"), "multi30k": ("train.en", "train.de"), "kftt": ("dev.en.gz", "dev.ja.gz")}
    return [line for file in files[name] for line in read_text(folder / name / file, 500)]


@cache
def trained(algorithm: str, corpus_name: str, **settings: Any) -> Tokenizer:
    """A tokenizer of SentencePiece's own trainer, with settings that ours does not offer, too."""
    usual: dict[str, Any] = {
        "vocab_size": 2500 if corpus_name == "kftt" else 800,
        "normalization_rule_name": "identity",
    }
    usual |= {"character_coverage": 1.0, "byte_fallback": False, "split_by_whitespace": True}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus(corpus_name)),
        model_writer=model,
        model_type=algorithm,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        num_threads=1,
        minloglevel=2,
        **{**usual, **settings},
    )
    return Tokenizer(model.getvalue())


def draw(
    sampler: SubwordSampler,
    sentences: list[list[int]],
    ids: list[int] | None = None,
    *,
    seed: int = 1,
    epoch: int = 0,
    side: int = 0,
) -> list[list[int]]:
    """The pieces of each sentence, whose numbers are 0, 1, 2 and so on unless `ids` has others."""
    numbers = np.arange(len(sentences)) if ids is None else np.array(ids, np.int64)
    found = sampler.sample(Sentences.of(sentences), numbers, seed=seed, epoch=epoch, side=side)
    assert len(found.counts) == len(sentences)
    assert found.counts.sum() == len(found.pieces)
    ends = found.counts.cumsum()
    return [found.pieces[end - count : end].tolist() for end, count in zip(ends, found.counts, strict=True)]


# ---- SentencePiece's own pieces -------------------------------------------------------------------------------------

TEXTS = [
    "demo",
    pytest.param("multi30k", marks=needs_corpora),
    pytest.param("kftt", marks=needs_corpora),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bytes": {"byte_fallback": True, "vocab_size": 900},
    "normalized": {"normalization_rule_name": "nmt_nfkc"},
    "small": {"vocab_size": 100},
    "large": {"vocab_size": 3000},
    "rare characters unknown": {"character_coverage": 0.98},
    "pieces across spaces": {"split_by_whitespace": False},
    "space as a suffix": {"treat_whitespace_as_suffix": True},
    "all spaces": {"remove_extra_whitespaces": False},
    "no space before": {"add_dummy_prefix": False},
    "digits apart": {"split_digits": True},
    "one user-defined symbol": {"user_defined_symbols": "<2de>"},
    "a tag": {"user_defined_symbols": "\u2581<2de>"},
    "user-defined symbols that are parts of words": {"user_defined_symbols": "<2de>,xy,ing,a"},
}


def assert_plain(algorithm: str, tokenizer: Tokenizer, texts: list[str]) -> None:
    sentences = tokenizer.encode(texts)
    found = draw(SubwordSampler(tokenizer.vocabulary(), PLAIN[algorithm]), sentences)
    assert found == sentences


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", TEXTS)
def test_sampler_without_chance_gives_the_tokenizers_pieces_of_a_corpus(name: str, algorithm: str) -> None:
    assert_plain(algorithm, trained(algorithm, name), corpus(name))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_sampler_without_chance_gives_the_tokenizers_pieces_of_odd_texts(
    settings: dict[str, Any], algorithm: str
) -> None:
    tokenizer = trained(algorithm, "demo", **settings)
    assert_plain(algorithm, tokenizer, [*corpus("demo")[::10], *ODD])


# ---- whatever the rate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_sampler_keeps_the_text_and_what_has_no_characters(
    settings: dict[str, Any], algorithm: str, rate: float
) -> None:
    """Unknown text, bytes and user-defined symbols stay as they are, and every piece is one of the vocabulary."""
    tokenizer = trained(algorithm, "demo", **settings)
    texts = [*corpus("demo")[::20], *ODD]
    sentences = tokenizer.encode(texts)
    vocabulary = tokenizer.vocabulary()
    found = draw(SubwordSampler(vocabulary, rate), sentences)

    assert all(0 <= piece < len(vocabulary) for pieces in found for piece in pieces)
    assert tokenizer.decode(found) == tokenizer.decode(sentences)
    symbols = {*settings.get("user_defined_symbols", "").split(",")}
    whole = {index for index, piece in enumerate(vocabulary) if not piece.is_text or piece.text in symbols}
    for before, after in zip(sentences, found, strict=True):
        assert [piece for piece in after if piece in whole] == [piece for piece in before if piece in whole]


@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("algorithm", [Algorithm.bpe, Algorithm.unigram])
def test_sampler_never_splits_a_tag(algorithm: Algorithm, rate: float) -> None:
    """Nor does it become part of the word behind it."""
    texts = corpus("demo")[:200]
    config = TokenizerConfig(vocab_size=800, algorithm=algorithm)
    tokenizer = Tokenizer(train_tokenizer(texts, config, tags=["<bt>", "<2de>"]))
    tags = [4 + n % 2 for n in range(200)]  # the ids behind the four special ones
    sentences = [[tag, *ids] for tag, ids in zip(tags, tokenizer.encode(texts), strict=True)]
    found = draw(SubwordSampler(tokenizer.vocabulary(), rate), sentences)
    assert found != sentences
    assert [ids[0] for ids in found] == tags
    assert not any({4, 5} & {*ids[1:]} for ids in found)
    assert tokenizer.decode([ids[1:] for ids in found]) == texts


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampler_keeps_a_piece_whose_characters_have_no_pieces(algorithm: str) -> None:
    """A vocabulary that somebody has cut may have `aq` without `q`."""
    texts = ["b", "aq", "q▁", "a", "ab", "bz", "z"]
    scores = {"bpe": (-5.0, -1.0, -2.0, -3.0, -0.0, -4.0, -6.0), "unigram": (-1.5, -2.5, -3.5, -1.2, -2.2, -3.2, -1.1)}
    vocabulary = [*SPECIAL, *(Piece(text, score, True) for text, score in zip(texts, scores[algorithm], strict=True))]
    sentences = [[4], [5], [6], [7], [8], [9], [10], [5, 10, 6, 8, 5], [10, 10, 7, 5]]
    spelt = [[vocabulary[piece].text for piece in pieces] for pieces in sentences]
    for rate in (0.3, 1.0):
        found = draw(SubwordSampler(vocabulary, rate), sentences)
        assert [sorted({5, 6} & {*pieces}) for pieces in found] == [sorted({5, 6} & {*pieces}) for pieces in sentences]
        assert ["".join(vocabulary[piece].text for piece in pieces) for pieces in found] == ["".join(t) for t in spelt]


def test_sampler_of_bpe_keeps_a_piece_that_no_merges_lead_to() -> None:
    """A vocabulary that somebody has cut may have `abc` without `ab` and `bc`: cut, it would never come again."""
    texts = ["abc", "ca", "a", "b", "c"]
    vocabulary = [*SPECIAL, *(Piece(text, -float(rank), True) for rank, text in enumerate(texts, 1))]
    sentences = [[4], [4, 5], [8, 6, 4]]
    for rate in (0.0, 0.3, 1.0):
        found = draw(SubwordSampler(vocabulary, rate), sentences)
        assert [pieces.count(4) for pieces in found] == [1, 1, 1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampler_takes_selections_and_sentences_of_nothing(algorithm: str) -> None:
    tokenizer = trained(algorithm, "demo")
    sampler = SubwordSampler(tokenizer.vocabulary(), 0.5)
    assert draw(sampler, []) == []
    assert draw(sampler, [[]]) == [[]]
    text, unknown = tokenizer.encode(["a", "漢"])
    together = draw(sampler, [[], text, [], unknown, []], [9, 1, 8, 3, 7])
    assert together == [[], *draw(sampler, [text], [1]), [], *draw(sampler, [unknown], [3]), []]
    assert tokenizer.decode(together) == ["", "a", "", tokenizer.decode([unknown])[0], ""]


def test_sampler_of_unigram_takes_any_rate_that_the_key_takes() -> None:
    tokenizer = trained("unigram", "demo")
    sentences = tokenizer.encode(corpus("demo")[:20])
    assert draw(SubwordSampler(tokenizer.vocabulary(), 1000.0), sentences) == sentences
    tiny = draw(SubwordSampler(tokenizer.vocabulary(), 1e-308), sentences)
    assert tokenizer.decode(tiny) == corpus("demo")[:20]


# ---- distributions --------------------------------------------------------------------------------------------------

# Of each two letters that follow one another in WORD some piece has both: it is one segment.
WORD = "▁abcabab"
LETTERS = "▁abc"
LEARNT = ["ab", "▁a", "bc", "ca", "abc", "ba", "▁ab", "cab", "abab", "▁abc"]  # the merges, in their order
LOGS = {"▁": -2.0, "a": -2.5, "b": -3.5, "c": -1.5, "ab": -3.25, "▁a": -4.5, "bc": -5.0, "ca": -4.25}
LOGS |= {"abc": -6.5, "ba": -6.0, "▁ab": -5.75, "cab": -6.25, "abab": -8.5, "▁abc": -9.0}
SPECIAL = [Piece(name, 0.0, False) for name in ("<pad>", "<unk>", "<s>", "</s>")]
DRAWS = 20_000


def bpe_vocabulary() -> list[Piece]:
    merges = [Piece(text, -float(rank), True) for rank, text in enumerate(LEARNT)]
    letters = [Piece(text, -float(rank), True) for rank, text in enumerate(LETTERS, len(LEARNT))]
    return [*SPECIAL, *merges, *letters]


def unigram_vocabulary() -> list[Piece]:
    return [*SPECIAL, *(Piece(text, score, True) for text, score in LOGS.items())]


VOCABULARIES: dict[str, Callable[[], list[Piece]]] = {"bpe": bpe_vocabulary, "unigram": unigram_vocabulary}


@cache
def dropout(word: tuple[str, ...], rate: float) -> Shares:
    """The probability of every end of algorithm 1 of Provilkov et al. (2020), by all that can happen in a step."""
    possible = [(LEARNT.index(a + b), at) for at, (a, b) in enumerate(pairwise(word)) if a + b in LEARNT]
    ends: Shares = defaultdict(float)
    all_before_are_left_out = 1.0
    for _, at in sorted(possible):
        is_made = all_before_are_left_out * (1.0 - rate)
        merged = (*word[:at], word[at] + word[at + 1], *word[at + 2 :])
        if is_made > 0.0:
            for end, probability in dropout(merged, rate).items():
                ends[end] += is_made * probability
        all_before_are_left_out *= rate
    ends[word] += all_before_are_left_out
    return ends


def spellings(text: str) -> list[tuple[str, ...]]:
    """All ways to write a text in the unigram pieces."""
    if not text:
        return [()]
    return [
        (text[:end], *rest) for end in range(1, len(text) + 1) if text[:end] in LOGS for rest in spellings(text[end:])
    ]


def powers(rate: float) -> Shares:
    """The probability of every segmentation of WORD, in proportion to the product of its pieces' ones to a power."""
    weights = {pieces: math.prod(math.exp(LOGS[piece]) ** rate for piece in pieces) for pieces in spellings(WORD)}
    total = sum(weights.values())
    return {pieces: weight / total for pieces, weight in weights.items()}


def expected(algorithm: str, rate: float) -> Shares:
    return dropout(tuple(WORD), rate) if algorithm == "bpe" else powers(rate)


def drawn(algorithm: str, rate: float, sentences: list[list[int]], *, epoch: int = 0) -> list[list[tuple[str, ...]]]:
    """What becomes of each sentence of WORDs, as the texts of its pieces, word by word."""
    vocabulary = VOCABULARIES[algorithm]()
    words = []
    for pieces in draw(SubwordSampler(vocabulary, rate), sentences, epoch=epoch):
        texts = [vocabulary[piece].text for piece in pieces]
        starts = [at for at, text in enumerate(texts) if text.startswith("▁")]
        words.append([tuple(texts[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)])
    return words


def characters(algorithm: str, text: str) -> list[int]:
    id_of = {piece.text: index for index, piece in enumerate(VOCABULARIES[algorithm]())}
    return [id_of[character] for character in text]


def assert_distributed(found: Counter[Any], wanted: dict[Any, float]) -> None:
    """Pearson's chi-square, what is expected less than ten times taken together; Wilson and Hilferty's bound of 4."""
    total = sum(found.values())
    assert not {end for end in found if wanted.get(end, 0.0) <= 0.0}
    often = [end for end, probability in wanted.items() if probability * total >= 10.0]
    rest_found = total - sum(found[end] for end in often)
    rest_wanted = total - sum(wanted[end] * total for end in often)
    terms = [(found[end] - wanted[end] * total) ** 2 / (wanted[end] * total) for end in often]
    if rest_wanted >= 10.0:
        terms.append((rest_found - rest_wanted) ** 2 / rest_wanted)
    degrees = len(terms) - 1
    if degrees == 0:
        assert rest_found == 0
        return
    scale = 2 / (9 * degrees)
    deviations = ((sum(terms) / degrees) ** (1 / 3) - (1 - scale)) / math.sqrt(scale)
    assert abs(deviations) < 4.0


@pytest.mark.parametrize(
    ("algorithm", "rate"),
    [*(("bpe", rate) for rate in (0.0, 0.1, 0.5, 0.9, 1.0)), *(("unigram", rate) for rate in (0.0, 0.2, 1.0, 3.0))],
)
def test_sampler_draws_from_the_exact_distribution(algorithm: str, rate: float) -> None:
    """Two words to a sentence, of 10,000: both are distributed so, and independent of one another."""
    wanted = expected(algorithm, rate)
    assert sum(wanted.values()) == pytest.approx(1.0)
    pairs = drawn(algorithm, rate, [characters(algorithm, 2 * WORD)] * (DRAWS // 2))
    assert_distributed(Counter(word for pair in pairs for word in pair), wanted)

    # The four commonest ends, in pairs.
    common = sorted(wanted, key=wanted.__getitem__)[-4:]
    kinds = Counter(tuple(word if word in common else () for word in pair) for pair in pairs)
    shares = {end: wanted[end] for end in common}
    shares[()] = max(0.0, 1.0 - sum(shares.values()))
    assert_distributed(kinds, {(a, b): shares[a] * shares[b] for a in shares for b in shares})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampler_draws_anew_in_every_epoch(algorithm: str) -> None:
    """One epoch after the other, 20 ids in each: the exact distribution, and pairs of epochs are independent."""
    rate = 0.3
    wanted = expected(algorithm, rate)
    sentences = [characters(algorithm, WORD)] * 20
    epochs = [[words[0] for words in drawn(algorithm, rate, sentences, epoch=epoch)] for epoch in range(200)]
    assert_distributed(Counter(word for words in epochs for word in words), wanted)

    best = max(wanted, key=wanted.__getitem__)
    pairs = Counter(
        (a == best, b == best)
        for now, then in zip(epochs[::2], epochs[1::2], strict=True)
        for a, b in zip(now, then, strict=True)
    )
    shares = {True: wanted[best], False: 1.0 - wanted[best]}
    assert_distributed(pairs, {(a, b): shares[a] * shares[b] for a in shares for b in shares})


def test_sampler_of_bpe_draws_the_parts_of_a_word_that_no_piece_joins_apart() -> None:
    """Here no piece goes from b to c: a part is done when all of its merges are left out.

    In algorithm 1 the whole word is. At p = 0.4 it leaves a and b apart with 0.4 * 0.4 * 1.6, where this has 0.4.
    """
    vocabulary = [*SPECIAL, *(Piece(text, -float(rank), True) for rank, text in enumerate(["ab", "cd", *"abcd"]))]
    words = draw(SubwordSampler(vocabulary, 0.4), [[6, 7, 8, 9]] * DRAWS)
    wanted = {(4, 5): 0.36, (4, 8, 9): 0.24, (6, 7, 5): 0.24, (6, 7, 8, 9): 0.16}
    assert_distributed(Counter(map(tuple, words)), wanted)


def test_sampler_ends_where_nothing_is_left_out_or_everything() -> None:
    sentences = [characters("bpe", WORD)]
    assert drawn("bpe", 0.0, sentences) == [[("▁abc", "abab")]]
    assert drawn("bpe", 1.0, sentences) == [[tuple(WORD)]]


def test_sampler_of_bpe_counts_merges_that_spell_the_same() -> None:
    """What a sentence comes as does not matter, only what it spells."""
    vocabulary = bpe_vocabulary()
    id_of = {piece.text: index for index, piece in enumerate(vocabulary)}
    ways = [list(WORD), ["▁abc", "abab"], ["▁", "abc", "ab", "a", "b"], ["▁a", "bc", "a", "ba", "b"]]
    sampler = SubwordSampler(vocabulary, 0.4)
    found = draw(sampler, [[id_of[text] for text in way] for way in ways], [5] * len(ways))
    assert found == [found[0]] * len(ways)


# ---- what the pieces depend on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampler_draws_a_sentence_alike_whatever_is_beside_it(algorithm: str) -> None:
    tokenizer = trained(algorithm, "demo")
    sentences = tokenizer.encode([*corpus("demo")[:60], *ODD])
    sampler = SubwordSampler(tokenizer.vocabulary(), 0.3)
    together = draw(sampler, sentences)
    alone = [draw(sampler, [sentence], [number])[0] for number, sentence in enumerate(sentences)]
    assert alone == together

    order = random.Random(0).sample(range(len(sentences)), 40)
    assert draw(sampler, [sentences[number] for number in order], order) == [together[number] for number in order]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampler_draws_by_seed_epoch_side_and_number(algorithm: str) -> None:
    tokenizer = trained(algorithm, "demo")
    sentences = tokenizer.encode([corpus("demo")[0]] * 20)
    sampler = SubwordSampler(tokenizer.vocabulary(), 0.3)
    one = draw(sampler, sentences)
    assert len({tuple(pieces) for pieces in one}) > 10  # the same sentence, under other numbers
    assert draw(sampler, sentences) == one
    large = [1 << 40 | number for number in range(20)]
    others = [
        draw(sampler, sentences, seed=2),
        draw(sampler, sentences, epoch=1),
        draw(sampler, sentences, side=1),
        draw(sampler, sentences, seed=0, epoch=1),
        draw(sampler, sentences, epoch=1, side=1),
        draw(sampler, sentences, large),
    ]
    for index, other in enumerate(others):
        assert sum(a == b for a, b in zip(other, one, strict=True)) < 10
        assert other not in others[:index]


DIGESTS = ["fc8d5cae1c94e3ab", "92acd6a245098211"]  # BPE and unigram: what the first version draws
PROGRAM = """
import hashlib, json, sys
import numpy as np
from transformer.data.store import Sentences
from transformer.data.subwords import SubwordSampler
from transformer.data.piece_list import Piece

for vocabulary, sentences in json.load(sys.stdin):
    sampler = SubwordSampler([Piece(*piece) for piece in vocabulary], 0.3)
    digest = hashlib.sha256()
    for epoch in (0, 1):
        for side in (0, 1):
            ids = np.arange(len(sentences))
            found = sampler.sample(Sentences.of(sentences), ids, seed=7, epoch=epoch, side=side)
            digest.update(f"{found.pieces.tolist()} {found.counts.tolist()}".encode())
    print(digest.hexdigest()[:16])
"""


def test_sampler_draws_alike_in_every_process_and_version() -> None:
    """A run that a later version resumes shall train on the same pieces."""
    task = json.dumps(
        [
            (VOCABULARIES[algorithm](), [characters(algorithm, WORD * (1 + number % 5)) for number in range(200)])
            for algorithm in ALGORITHMS
        ]
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=task,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("0", "1", "2")
    ]
    assert found == [DIGESTS] * 3


# ---- the rate -------------------------------------------------------------------------------------------------------


def test_sampler_of_bpe_refuses_a_rate_above_one() -> None:
    with pytest.raises(InputError, match=r"train\.subword_sampling=1\.5: .*BPE.* 1 at most") as refused:
        SubwordSampler(trained("bpe", "demo").vocabulary(), 1.5)
    assert "\n" not in str(refused.value)
    SubwordSampler(trained("bpe", "demo").vocabulary(), 1.0)
    SubwordSampler(trained("unigram", "demo").vocabulary(), 1.5)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_sampler_refuses_a_score_that_is_no_number(algorithm: str, score: float) -> None:
    """Of a tokenizer.model that somebody gave: a sum with it would be no probability."""
    vocabulary = trained(algorithm, "demo").vocabulary()
    vocabulary[100] = vocabulary[100]._replace(score=score)
    with pytest.raises(InputError, match=r"sampling: the tokenizer's piece 100 has the score") as refused:
        SubwordSampler(vocabulary, 0.1)
    assert "\n" not in str(refused.value)
