"""Marian itself, where `pymarian` is installed: what it makes of an export, beside what the run does.

    sentences -> three commands of Marian's on the folder, each a process -> lines -> MarianEngine, a Peer
    MarianEngine and the run -> `parity.compare`, with Marian's rule for beams on our side -> Asked

Marian is C++, and may crash, hang or write anything: see `tools/program`, which ends it with all that it has started.
"""

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from transformer.decoding.search import Hypothesis
from transformer.decoding.translator import Translator
from transformer.integrations.engine.parity import Sentence, compare, search_as_ours
from transformer.integrations.engine.peer import Forced, Peer
from transformer.integrations.export.formats import Asked, Original
from transformer.integrations.export.marian import BOUND, DECODER, MODEL, Ids, spm_names
from transformer.layout import Padded
from transformer.registry import install_command
from transformer.tools.program import ProgramError, run_program, temporary_folder
from transformer.vocabulary import BOS, EOS, NEVER

PACKAGE = "pymarian"
SENTENCES = 100  # at most: of so many, one may be translated otherwise
SECONDS = 600.0  # for one of its commands
LARGEST = 1 << 28  # bytes that it may write

_VERSION = "import _pymarian, pymarian; print(pymarian.__version__)"
_COMMAND = "import sys, _pymarian; _pymarian.main(sys.argv[1:])"

log = logging.getLogger(__name__)


def ask(original: Original, reader: Peer, folder: Path, threads: int) -> Asked:
    """Have Marian translate and score sentences of the check; `reader` is the export, read back by our formulas.

    Raises ProgramError where it runs here, and fails on these.
    """
    if find_spec(PACKAGE) is None:
        return Asked(None, f"Marian itself was not asked: {install_command('marian')}, in Python 3.11, has it asked")
    with temporary_folder("transformer-marian-") as work:
        try:
            said = _run(["-c", _VERSION], work)
        except ProgramError as error:
            return Asked(None, f"warning: Marian itself was not asked: {PACKAGE} does not run here: {error}")

        sentences = _sentences(original, folder)
        if not sentences:
            return Asked(
                None, "Marian itself was not asked: it would cut each sentence otherwise, or have none to score"
            )
        log.info("asking Marian itself about %d sentences", len(sentences))
        engine = _Commands(original, folder, work, threads).answer(
            sentences, reader, version=(said.split() or ["?"])[-1][:40]
        )
    return Asked(compare(original.translator, engine, sentences, bound=BOUND, ours=narrowing_searches), None)


def _sentences(original: Original, folder: Path) -> list[Sentence]:
    """Sentences of the check with something to score, which is the reference, or else our own translation.

    Marian reads text, and cuts it as its SentencePiece model by itself does. Where the run cuts it otherwise, as at
    some rare spaces, there is nothing to compare; the check by our formulas counts such sentences.
    """
    translator = original.translator
    sentences = list(original.sentences[:SENTENCES])
    if any(sentence.reference is None for sentence in sentences):
        translations = translator.translate([sentence.text for sentence in sentences])
        sentences = [replace(one, reference=text) for one, text in zip(sentences, translations, strict=True)]
    texts = [sentence.text for sentence in sentences], [sentence.reference or "" for sentence in sentences]
    source, target = (
        zip(tokenizer.encode(lines), Ids.of(tokenizer).cut(lines, folder / spm), strict=True)
        for tokenizer, lines, spm in zip(translator.tokenizers.sides, texts, spm_names(original), strict=True)
    )
    most = translator.model.config.max_positions - 1
    return [
        sentence
        for sentence, (read, cut), (reference, cut_reference) in zip(sentences, source, target, strict=True)
        if read == cut and reference == cut_reference and 0 < len(reference) <= most
    ]


# ---- what Marian says -----------------------------------------------------------------------------------------------


@dataclass
class MarianEngine:
    """What Marian said of some sentences, as a Peer. It can be asked for those alone, by their pieces."""

    reader: Peer  # whose penalty is that of the settings which Marian was given
    versions: dict[str, str]
    translations: dict[int, dict[tuple[int, ...], list[int]]]  # by the width of the beam, and by the source
    log_probs: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]]  # by source and target
    arithmetic: str = "float32"

    def __post_init__(self) -> None:
        self.alpha = self.reader.alpha

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """As its SentencePiece model cuts them."""
        return self.reader.encode(texts)

    def penalty(self, length: int) -> float:
        """A power of the length."""
        return self.reader.penalty(length)

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """Log-probabilities by its scorer, which says no others."""
        pairs = zip(map(tuple, sources), map(tuple, targets), strict=True)
        return [Forced(torch.tensor(self.log_probs[pair], dtype=torch.float64), None) for pair in pairs]

    def translate(self, sources: Sequence[list[int]], *, beam_size: int, max_length: int) -> list[list[int]]:
        """What its decoder wrote, whose own limit lies beyond `max_length`."""
        return [self.translations[beam_size][tuple(source)][:max_length] for source in sources]


@dataclass(frozen=True)
class _Commands:
    """Marian's commands on an export in `folder`; what they read and write is in `work`."""

    original: Original
    folder: Path
    work: Path
    threads: int

    def answer(self, sentences: Sequence[Sentence], reader: Peer, *, version: str) -> MarianEngine:
        """Greedy search, the beam of the run, and scores of the references. Raises ProgramError."""
        translator = self.original.translator
        sources = [tuple(sentence.pieces) for sentence in sentences]
        references = [sentence.reference or "" for sentence in sentences]
        self._write("source", [sentence.text for sentence in sentences])
        self._write("reference", references)

        # Where Marian ends a translation depends on the others of its batch: let it be beyond where ours does.
        factor = 1 + math.ceil(max(translator.decoder.max_length(list(ids)) / (len(ids) + 1) for ids in sources))
        translations = {}
        for beam_size in sorted({1, translator.search.beam_size}):
            found = self._decode(beam_size, factor)
            translations[beam_size] = dict(zip(sources, found, strict=True))

        targets = map(tuple, translator.tokenizers.target.encode(references))
        pairs = list(zip(sources, targets, strict=True))
        scores = dict(zip(pairs, self._score(pairs), strict=True))
        return MarianEngine(reader, {PACKAGE: version}, translations, scores)

    def _decode(self, beam_size: int, factor: int) -> list[list[int]]:
        """Its translations, in our ids."""
        ids = {piece: index for index, piece in enumerate(self.original.translator.tokenizers.target.pieces())}
        words = ["decode", "-c", str(self.folder / DECODER), "-i", str(self.work / "source"), "--no-spm-decode"]
        words += ["--beam-size", str(beam_size), "--max-length-factor", str(factor)]
        found = []
        for number, line in enumerate(self._lines(words), 1):
            unknown = [piece for piece in line.split() if piece not in ids]
            if unknown:
                raise ProgramError(
                    f"line {number} of its translations: {unknown[0]!a:.40} is no piece of the vocabulary"
                )
            found.append([ids[piece] for piece in line.split()])
        return found

    def _score(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[float]]:
        """The log-probability of each piece of the references, and of their ends."""
        vocabularies = [str(self.folder / name) for name in spm_names(self.original)]
        words = ["score", "-m", str(self.folder / MODEL), "-v", *vocabularies, "--word-scores"]
        words += ["-t", str(self.work / "source"), str(self.work / "reference")]
        words += ["--max-length", str(self.original.translator.model.config.max_positions)]
        found = []
        for number, (line, (_, target)) in enumerate(zip(self._lines(words), pairs, strict=True), 1):
            try:
                scores = [float(word) for word in line.rpartition("WordScores=")[2].split()]
            except ValueError:
                raise ProgramError(f"line {number} of its scores is none: {line!a:.60}") from None
            if len(scores) != len(target) + 1:
                raise ProgramError(
                    f"line {number} of its scores has {len(scores)} for a reference of {len(target)} pieces and its end"
                )
            found.append(scores)
        return found

    def _lines(self, words: list[str]) -> list[str]:
        """The lines that a command writes: one for each sentence. Raises ProgramError."""
        output, said = self.work / f"{words[0]}.out", self.work / f"{words[0]}.log"
        always = ["--cpu-threads", str(self.threads), "--quiet", "-o", str(output), "--log", str(said)]
        try:
            _run(["-c", _COMMAND, *words, *always], self.work)
        except ProgramError as error:
            raise ProgramError(f"{words[0]}: {_reason(said) or error}") from None
        expected = (self.work / "source").read_bytes().count(b"\n")
        try:
            lines = output.read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, UnicodeDecodeError) as error:
            raise ProgramError(f"{words[0]}: what it wrote cannot be read: {error}") from None
        output.unlink()
        if len(lines) != expected:
            raise ProgramError(f"{words[0]}: it wrote {len(lines)} lines for {expected} sentences")
        return lines

    def _write(self, name: str, lines: Sequence[str]) -> None:
        (self.work / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def _run(words: list[str], work: Path) -> str:
    """What Python says of a program that imports Marian, and nothing from where the user happens to be."""
    return run_program([sys.executable, "-P", *words], work, seconds=SECONDS, limit=LARGEST, key="the limit")


def _reason(said: Path) -> str | None:
    """Why it ended, as its log says; behind that is a list of addresses."""
    if not said.is_file():
        return None
    lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.partition("Error: ")[2][:300] for line in lines if "Error: " in line), None)


# ---- how Marian searches --------------------------------------------------------------------------------------------


def narrowing_searches(
    translator: Translator, peer: Peer, sources: Sequence[list[int]], *, beam_size: int
) -> list[Hypothesis]:
    """The best translation of each source by our model and Marian's rule for a beam."""
    if beam_size == 1:  # then the rules are one
        return search_as_ours(translator, peer, sources, beam_size=1)
    return [_narrowing_search(translator, peer, source, beam_size) for source in sources]


@torch.no_grad()
def _narrowing_search(translator: Translator, peer: Peer, source: list[int], beam_size: int) -> Hypothesis:
    """A beam that is narrower by each translation that has ended; ours stays as wide, until none can win any more.

    Rows of `beam_size` hypotheses are computed all along; the first `width` of them live.
    """
    model = translator.model
    layout = Padded.of([len(source) + 1], len(source) + 1)
    state = model.start(model.encode(torch.tensor([[*source, EOS]]), layout), layout, beam_size=beam_size)
    tokens = torch.full((beam_size,), BOS)
    written = torch.zeros(beam_size, 0, dtype=torch.long)  # (K, t)
    log_probs = torch.tensor([0.0] + [-math.inf] * (beam_size - 1), dtype=torch.float64)  # (K,)
    width = beam_size
    found: list[Hypothesis] = []

    for _ in range(translator.decoder.max_length(source)):
        logits, state = model.decode_step(tokens, state)  # (K, V)
        logits[:, list(NEVER)] = -math.inf
        totals = log_probs.unsqueeze(1) + torch.log_softmax(logits.double(), 1)
        best, places = totals.flatten().topk(width)
        rows, pieces = places // logits.shape[1], places % logits.shape[1]

        ends = pieces == EOS
        for row, log_prob in zip(rows[ends].tolist(), best[ends].tolist(), strict=True):
            found.append(Hypothesis(written[row].tolist(), log_prob, finished=True))
        width = int((~ends).sum())
        if not width:
            break

        log_probs[:width], log_probs[width:] = best[~ends], -math.inf
        parents = torch.zeros_like(tokens)
        parents[:width], tokens[:width] = rows[~ends], pieces[~ends]
        written = torch.cat((written[parents], tokens.unsqueeze(1)), 1)
        state = state.reorder(parents)
    else:
        found += [Hypothesis(written[row].tolist(), float(log_probs[row]), finished=False) for row in range(width)]
    return max(found, key=lambda one: one.score(peer.penalty))
