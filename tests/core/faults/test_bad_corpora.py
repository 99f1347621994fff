"""A hundred bad corpora: each is refused in one line that says where, or prepared without one shifted pair.

Each pair carries its number in both texts, and faults that have shifted corpora before are put in at random. Which of
them must be refused is written beside each of them; all others must be read through.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from support.compressed import compressed
from support.corpora import Shell, write_pair
from transformer.config.jobs import TrainJob
from transformer.config.settings import DataConfig, FilterConfig, PairConfig, TokenizerConfig, TrainConfig
from transformer.data.prepare import Prepared, prepare
from transformer.errors import InputError

TRIALS = 100
KINDS = [f"{kind}{suffix}" for kind in ("txt", "tsv", "jsonl") for suffix in ("", ".gz", ".bz2", ".xz", ".zst")]
NUMBERS = [str(number) for number in range(100, 140)]
STRANGE = {
    "carriage return": "\r",
    "line separator": "\u2028",
    "paragraph separator": "\u2029",
    "next line": "\x85",
    "vertical tab": "\v",
    "form feed": "\f",
    "file separator": "\x1c",
    "group separator": "\x1d",
    "record separator": "\x1e",
    "NUL": "\0",
    "BOM in the middle": "\ufeff",
}
NOT_UTF8 = (b"\xff", b"\xe9 ", b"\xc0\x80", b"\xed\xa0\x80", b"\xe2\x82", b"\xf5\x80\x80\x80", b"\x80")

BAD_BYTE = r":\d+: not UTF-8: byte \d+ of the line is 0x[89a-f][0-9a-f]: "
UNEQUAL = r" has \d+ lines, \S+ has \d+: each line must translate the same line of the other file"
NOTHING = r": no sentence pair is left to train on \((the files are empty|empty 1)\)"
# until damage is found, what comes out of a compressed file may be anything
DAMAGED = (
    r":\d+: (damaged \.[gbxz2st]+ file \(|not UTF-8: |not valid JSON|expected one JSON object|\d+ columns, not 2)|"
    + UNEQUAL
)


@dataclass
class Corpus:
    """What is to be written, and what must come of it."""

    kind: str
    sides: list[list[bytes]] = field(
        default_factory=lambda: [[f"{word} {n} {word}".encode() for n in NUMBERS] for word in ("one", "eins")]
    )
    end: bytes = b"\n"
    last_end: bool = True
    boms: tuple[bool, bool] = (False, False)
    spoil: Callable[[bytes], bytes] | None = None  # what happens to one of the compressed files
    spoilt: int = 0
    dropped: set[int] = field(default_factory=set)  # the pairs of which a side is blank
    refusals: list[str] = field(default_factory=list)  # one of these must be said; without any, it is read

    def write(self, folder: Path) -> PairConfig:
        """The files; a table has both languages in one."""
        folder.mkdir()
        if self.kind.startswith("txt"):
            paths = [self._write(folder / f"{side}.{self.kind}", self.sides[side], side) for side in (0, 1)]
            return PairConfig(*paths)
        rows = [self._row(source, target) for source, target in zip(*self.sides, strict=True)]
        return PairConfig(dataset=self._write(folder / f"both.{self.kind}", rows, self.spoilt))

    def _row(self, source: bytes, target: bytes) -> bytes:
        if self.kind.startswith("tsv"):
            return source + b"\t" + target
        texts = {"en": source.decode(errors="surrogateescape"), "de": target.decode(errors="surrogateescape")}
        return json.dumps(texts, ensure_ascii=False).encode(errors="surrogateescape")

    def _write(self, path: Path, lines: list[bytes], side: int) -> str:
        content = self.end.join([*lines, b""] if self.last_end and lines else lines)
        content = (b"\xef\xbb\xbf" if self.boms[side] else b"") + content
        content = compressed(content, path.suffix)
        path.write_bytes(self.spoil(content) if self.spoil is not None and side == self.spoilt else content)
        return str(path)


# ---- the faults, in the order in which they are put in --------------------------------------------------------------

Fault = Callable[[Corpus, random.Random], None]


def blank_lines(corpus: Corpus, draw: random.Random) -> None:
    """Not the last: without a newline behind it, a blank line is none."""
    for line in draw.sample(range(len(NUMBERS) - 1), 3):
        corpus.sides[draw.randrange(2)][line] = draw.choice([b"", b" ", "\u3000".encode()])
        corpus.dropped.add(line)


def put_in(corpus: Corpus, draw: random.Random, strange: bytes) -> None:
    """Before or between the words of a line, with spaces or without."""
    line = draw.choice([line for line in range(len(NUMBERS)) if line not in corpus.dropped])
    side = draw.choice(corpus.sides)
    words = side[line].split(b" ")
    words.insert(draw.randrange(len(words)), strange)
    side[line] = draw.choice([b" ", b""]).join(words)


def not_utf8(corpus: Corpus, draw: random.Random) -> None:
    put_in(corpus, draw, draw.choice(NOT_UTF8))
    corpus.refusals.append(BAD_BYTE)


def one_line_more(corpus: Corpus, draw: random.Random) -> None:
    draw.choice(corpus.sides).insert(draw.randrange(len(NUMBERS) + 1), b"999")
    corpus.refusals.append(UNEQUAL)


def one_line_less(corpus: Corpus, draw: random.Random) -> None:
    del draw.choice(corpus.sides)[draw.randrange(len(NUMBERS))]
    corpus.refusals.append(UNEQUAL)


def one_side_empty(corpus: Corpus, draw: random.Random) -> None:
    draw.choice(corpus.sides).clear()
    corpus.refusals.append(UNEQUAL)


def both_empty(corpus: Corpus, draw: random.Random) -> None:
    corpus.sides = [[], []]
    corpus.refusals += [NOTHING, UNEQUAL] if any(corpus.boms) else [NOTHING]


def no_last_newline(corpus: Corpus, draw: random.Random) -> None:
    corpus.last_end = False


def bom_at_the_start(corpus: Corpus, draw: random.Random) -> None:
    corpus.boms = draw.choice([(True, False), (False, True), (True, True)])


def crlf(corpus: Corpus, draw: random.Random) -> None:
    corpus.end = b"\r\n"


def cut_stream(corpus: Corpus, draw: random.Random) -> None:
    spoil(corpus, draw, lambda content: content[: draw.randrange(1, len(content))])


def damaged_stream(corpus: Corpus, draw: random.Random) -> None:
    def change(content: bytes) -> bytes:
        """A bit of the magic number, the text, its checksum or its length: not those that mean nothing."""
        bad = bytearray(content)
        places = [0, 1, 2, *range(10, len(bad) - 9), *range(len(bad) - 8, len(bad))]
        if corpus.kind.endswith(".zst"):  # the magic number, and the checksum
            places = [*range(4), *range(len(bad) - 4, len(bad))]
        if corpus.kind.endswith(
            ".bz2"
        ):  # the magic numbers of stream and block, and its checksum; not the block's size
            places = [*range(3), *range(4, 14)]
        bad[draw.choice(places)] ^= 1 << draw.randrange(8)
        return bytes(bad)

    spoil(corpus, draw, change)


def rubbish_behind_stream(corpus: Corpus, draw: random.Random) -> None:
    spoil(corpus, draw, lambda content: content + draw.randbytes(50).translate(None, b"\0\x1f"))


def spoil(corpus: Corpus, draw: random.Random, how: Callable[[bytes], bytes]) -> None:
    corpus.spoil, corpus.spoilt = how, draw.randrange(2)
    corpus.refusals.append(DAMAGED)


def strange(text: str) -> Fault:
    return lambda corpus, draw: put_in(corpus, draw, text.encode())


READ: dict[str, Fault] = {
    "blank lines": blank_lines,
    **{name: strange(text) for name, text in STRANGE.items()},
    "no last newline": no_last_newline,
    "BOM at the start": bom_at_the_start,
    "CRLF": crlf,
}
REFUSED: dict[str, Fault] = {
    "not UTF-8": not_utf8,
    "one line more": one_line_more,
    "one line less": one_line_less,
    "one side empty": one_side_empty,
    "both empty": both_empty,
    "cut stream": cut_stream,
    "damaged stream": damaged_stream,
    "rubbish behind stream": rubbish_behind_stream,
}
FAULTS = READ | REFUSED
EXCLUSIVE = (  # two of these could undo each other
    {"one line more", "one line less", "one side empty", "both empty"},
    {"cut stream", "damaged stream", "rubbish behind stream"},
)
ONLY = {"one line more": "txt", "one line less": "txt", "one side empty": "txt"} | dict.fromkeys(EXCLUSIVE[1], ".")


def choose(trial: int) -> tuple[str, list[str]]:
    """A kind of file and its faults: first each fault alone, then two to five of them."""
    draw = random.Random(trial)
    alone = list(FAULTS)[trial : trial + 1]
    kind = draw.choice([kind for kind in KINDS if not alone or ONLY.get(alone[0], "") in kind])
    names = alone or draw.sample(list(READ), draw.randrange(1, 4)) + draw.sample(list(REFUSED), draw.randrange(3))
    possible = [name for name in FAULTS if name in names and ONLY.get(name, "") in kind]
    for group in EXCLUSIVE:
        for name in [name for name in possible if name in group][1:]:
            possible.remove(name)
    return kind, possible


def make(trial: int) -> Corpus:
    kind, names = choose(trial)
    corpus, draw = Corpus(kind), random.Random(trial)
    for name in names:
        FAULTS[name](corpus, draw)
    return corpus


# ---- what comes of them ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A corpus without a fault, for development."""
    return DataConfig(
        dev=write_pair(tmp_path_factory.mktemp("clean"), "dev", [("one 1", "eins 1"), ("one 2", "eins 2")])
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, clean: DataConfig) -> str:
    """A tokenizer's model that knows the words and the digits."""
    folder = tmp_path_factory.mktemp("model")
    prepared = prepare(
        job_of(Corpus("txt").write(folder / "corpus"), clean, folder / "run", TokenizerConfig(vocab_size=40))
    )
    (folder / "given.model").write_bytes(prepared.tokenizers.source.model)
    return str(folder / "given.model")


def job_of(pair: PairConfig, clean: DataConfig, run_dir: Path, tokenizer: TokenizerConfig) -> TrainJob:
    data = DataConfig(train=pair, dev=clean.dev, filter=FilterConfig(max_length=100))
    return TrainJob(run_dir=str(run_dir), data=data, tokenizer=tokenizer, train=TrainConfig(threads=1))


def numbers_of(prepared: Prepared) -> list[tuple[list[str], list[str]]]:
    """The numbers in both texts of each pair of the store."""
    tokenizer = prepared.tokenizers.source
    sides = []
    for side in (0, 1):
        ids = [prepared.store.gather(np.array([i]), side)[0].tolist() for i in range(len(prepared.store))]
        sides.append([re.findall(r"\d+", text) for text in tokenizer.decode(ids)])
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize("trial", range(TRIALS))
def test_prepare_refuses_a_bad_corpus_or_shifts_no_pair(
    trial: int, clean: DataConfig, model: str, tmp_path: Path
) -> None:
    judge(trial, clean, model, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
def test_prepare_shifts_no_pair_in_many_more_bad_corpora(
    part: int, clean: DataConfig, model: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for trial in range(TRIALS * (1 + part), TRIALS * (2 + part)):
        judge(trial, clean, model, tmp_path / str(trial))
    record_property("bad corpora", TRIALS)


def judge(trial: int, clean: DataConfig, model: str, folder: Path) -> None:
    """Write and prepare the corpus of this number."""
    corpus = make(trial)
    folder.mkdir(exist_ok=True)
    job = job_of(corpus.write(folder / "bad"), clean, folder / "runs" / "a", TokenizerConfig(model=model))
    if corpus.refusals:
        with pytest.raises(InputError) as caught:
            prepare(job)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(str(folder / "bad"))
        assert any(re.search(pattern, message) for pattern in corpus.refusals), message
        assert not (folder / "runs").exists()
        return
    prepared = prepare(job)
    kept = [number for line, number in enumerate(NUMBERS) if line not in corpus.dropped]
    assert numbers_of(prepared) == [([number], [number]) for number in kept]
    reasons = {"identical": 0, "duplicate": 0, "no_pieces": 0, "too_long": 0, "ratio": 0}
    assert prepared.report.dropped == {"empty": len(corpus.dropped), **reasons}
    assert (prepared.report.pairs_read, prepared.report.pairs_kept) == (40, len(kept))


def test_choose_takes_each_fault_alone_and_with_others() -> None:
    chosen = [choose(trial) for trial in range(TRIALS)]
    assert [names for _, names in chosen[: len(FAULTS)]] == [[name] for name in FAULTS]
    among = Counter(name for _, names in chosen[len(FAULTS) :] for name in names)
    assert set(among) == set(FAULTS)
    assert {kind for kind, _ in chosen} == set(KINDS)
    refused = sum(any(name in REFUSED for name in names) for _, names in chosen)
    assert 30 <= refused <= 70
    assert refused == sum(bool(make(trial).refusals) for trial in range(TRIALS))


@pytest.mark.faults
def test_prepare_says_the_same_on_the_command_line(clean: DataConfig, model: str, tmp_path: Path) -> None:
    dev = [f"data.dev.src={clean.dev.src}", f"data.dev.tgt={clean.dev.tgt}", f"tokenizer.model={model}"]
    with Shell(tmp_path, "transformer.data.prepare") as shell:
        for trial in range(5, TRIALS, 10):
            corpus = make(trial)
            pair = corpus.write(tmp_path / f"bad{trial}")
            train = [f"data.train.dataset={pair.dataset}"] if pair.dataset else []
            train += [f"data.train.src={pair.src}", f"data.train.tgt={pair.tgt}"] if pair.src else []
            status, log = shell.run("prepare", "experiment=small", f"run_dir=runs/{trial}", *train, *dev)
            assert status == (2 if corpus.refusals else 0), (trial, log)
            assert "Traceback" not in log
            last = log.rstrip("\n").rpartition("\n")[2]
            assert last.startswith(f"transformer: error: {tmp_path}/bad{trial}/" if corpus.refusals else "data ready: ")
