"""The check that every export ends with: does the exported model compute what ours does, on real sentences?

First the log-probabilities of given targets, against our model in float64, where nothing is rounded that matters: they
decide whether the weights are in their places. Then greedy and beam search, each in the arithmetic that people use,
under the length penalty of the exported model's library: they decide whether its decoder and its special tokens are
set up as they should be. Two searches may part where two candidates are as good as equal. So each difference is listed
with how much better our translation is, by our model in float64.

A beam search that comes to the maximum length ranks what has not ended behind all that has, if it is ours, and by its
score, if it is theirs. Such differences are counted apart: a model that is hardly trained has many.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from transformer.decoding.search import Hypothesis
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.evaluation.score import measure_bleu
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.tools.export.peer import Forced, Original, Peer, forced_by, pad
from transformer.vocabulary import BOS, EOS

TIE = 1e-4  # candidates whose scores differ by less may come out either way
MOST_OTHERS = 0.01  # share of sentences that may differ otherwise: a tie early in a search can cost more at its end
AT_ONCE = 8  # sentences of a batch, whose logits are in memory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Difference:
    """A sentence that the two models translate differently."""

    line: int  # in the file of the sentences, counted from 1
    source: str
    ours: str
    theirs: str
    gap: float  # how much higher ours scores, by our model; greedy: at the first token that differs
    ends: bool  # both translations do, before the maximum length; greedy search cuts both alike


@dataclass(frozen=True)
class SearchParity:
    """The same search by both models; beam 1 is greedy."""

    beam_size: int
    length_penalty: float
    identical: int  # sentences
    ties: int  # that differ, by less than TIE
    endless: int  # that differ, and one of the two does not end; always 0 in greedy search
    bleu: float | None  # of ours, under that penalty; None without references
    their_bleu: float | None
    differences: list[Difference]

    @property
    def others(self) -> int:
        """Sentences that differ for no such reason."""
        return len(self.differences) - self.ties - self.endless


@dataclass(frozen=True)
class Parity:
    """How exactly an exported model computes what ours does."""

    sentences: int
    origin: str  # of the sentences
    cut_alike: int  # sentences that both tokenizers cut into the same pieces
    tokens: int  # of the targets whose log-probabilities were compared
    targets: str  # which those are
    arithmetic: str  # of the exported model's search
    versions: dict[str, str]
    log_probs: float  # the largest difference
    logits: float | None  # the same, where the library gives them
    bound: float | None  # that both must keep; None: the type of the weights loses more
    greedy: SearchParity
    beam: SearchParity

    @property
    def problems(self) -> list[str]:
        """What an export in an exact type must not show."""
        if self.bound is None:
            return []

        found = []
        for name, difference in (("log-probabilities", self.log_probs), ("logits", self.logits)):
            if difference is not None and not difference <= self.bound:  # NaN is no less
                found.append(f"{name} differ by up to {difference:.1e}, not {self.bound:.0e}")
        for search in (self.greedy, self.beam):
            if search.others > MOST_OTHERS * self.sentences:
                found.append(f"{search.others} of {self.sentences} translations differ ({_name(search)})")
        return found


@dataclass(frozen=True)
class Sentences:
    """Sentences to check with, in pieces, and where each of them stands in its file."""

    origin: str
    lines: list[int]
    texts: list[str]
    sources: list[list[int]]
    references: list[str] | None
    targets: list[list[int]] | None  # the pieces of the references


def choose_sentences(
    pairs: Iterable[tuple[str, str | None]], origin: str, *, translator: Translator, count: int
) -> Sentences:
    """The first `count` pairs with something to translate that the model has positions for.

    Raises InputError where there is none.
    """
    max_pieces = translator.model.config.max_positions - 1
    encode = translator.tokenizer.encode
    lines, chosen, sources, targets = [], [], [], []
    for line, (source, reference) in enumerate(pairs, 1):
        [pieces] = encode([source])
        [reference_pieces] = encode([reference or ""])
        if not 0 < len(pieces) <= max_pieces or len(reference_pieces) > max_pieces:
            continue
        lines.append(line)
        chosen.append((source, reference))
        sources.append(pieces)
        targets.append(reference_pieces)
        if len(lines) == count:
            break

    if not lines:
        raise InputError(f"{origin}: no sentence to check the export with; name a file of them with src=FILE")
    references = [reference for _, reference in chosen if reference is not None]
    has_references = len(references) == len(chosen)
    return Sentences(
        origin=origin,
        lines=lines,
        texts=[source for source, _ in chosen],
        sources=sources,
        references=references if has_references else None,
        targets=targets if has_references else None,
    )


def compare(original: Original, peer: Peer, sentences: Sentences, *, bound: float | None) -> Parity:
    """Compare an exported model with the one that it was made of."""
    translator, tgt_lang = original.translator, original.tgt_lang
    exact = _Exact(copy.deepcopy(translator.model).double())

    # The searches. Without references, what ours finds is what both are forced to say.
    sizes = (1, translator.search.beam_size)
    searches = [
        _compare_searches(translator, peer, sentences, exact=exact, beam_size=size, tgt_lang=tgt_lang) for size in sizes
    ]
    targets = sentences.targets
    if targets is None:
        targets = [best.tokens for best in _ours(translator, peer, sentences.sources, beam_size=1)]

    # The log-probabilities.
    log_probs: list[float] = []
    logits: list[float] = []
    for sources, forced_to in _in_batches(sentences.sources, targets):
        pairs = zip(exact.forced(sources, forced_to), peer.forced(sources, forced_to), strict=True)
        for ours, theirs in pairs:
            log_probs.append(_largest_difference(ours.log_probs, theirs.log_probs))
            if ours.logits is not None and theirs.logits is not None:
                logits.append(_largest_difference(ours.logits, theirs.logits))

    greedy, beam = searches
    return Parity(
        sentences=len(sentences.sources),
        origin=sentences.origin,
        cut_alike=sum(map(list.__eq__, peer.encode(sentences.texts), sentences.sources)),
        tokens=sum(len(target) + 1 for target in targets),
        targets="references" if sentences.targets is not None else "our greedy translations",
        arithmetic=peer.arithmetic,
        versions=peer.versions,
        log_probs=max(log_probs),
        logits=max(logits, default=None),
        bound=bound,
        greedy=greedy,
        beam=beam,
    )


def _largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Between two tensors that must have one shape: broadcasting would hide a row too few."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours - theirs).abs().max())  # NaN, where there is one


# ---- our model in float64


@dataclass(frozen=True)
class _Exact:
    """Our model in float64."""

    model: Transformer

    def forced(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
        """What it makes of each target, given its source."""
        source, _ = pad([[*ids, EOS] for ids in sources])
        target, _ = pad([[BOS, *ids] for ids in targets])
        with torch.no_grad():
            logits = self.model(
                source,
                target,
                source_layout=Padded.of([len(ids) + 1 for ids in sources], source.shape[1]),
                target_layout=Padded.of([len(ids) + 1 for ids in targets], target.shape[1]),
            )  # (B, T, V)
        return forced_by(logits, targets)

    def sums(self, sources: Sequence[list[int]], hypotheses: Sequence[Hypothesis]) -> list[Tensor]:
        """The log-probabilities `(|Y|,)` of each hypothesis: of EOS only where it is finished."""
        targets = [hypothesis.tokens for hypothesis in hypotheses]
        found = [
            forced.log_probs for batch in _in_batches(sources, targets) for forced in self.forced(batch[0], batch[1])
        ]
        return [log_probs[: of_one.length] for log_probs, of_one in zip(found, hypotheses, strict=True)]


def _in_batches(
    sources: Sequence[list[int]], targets: Sequence[list[int]]
) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """A few sentences at a time, of whichever lengths: padding is to be checked, too."""
    for start in range(0, len(sources), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        yield list(sources[part]), list(targets[part])


# ---- searches


def _compare_searches(
    translator: Translator, peer: Peer, sentences: Sentences, *, exact: _Exact, beam_size: int, tgt_lang: str
) -> SearchParity:
    """Translate with both models."""
    log.info("checking %d sentences, %s", len(sentences.sources), "greedy" if beam_size == 1 else f"beam {beam_size}")
    ours = _ours(translator, peer, sentences.sources, beam_size=beam_size)
    theirs = _theirs(translator, peer, sentences.sources, beam_size=beam_size)
    our_texts, their_texts = (translator.tokenizer.decode([best.tokens for best in found]) for found in (ours, theirs))

    # Where they differ, and by how much.
    places = [n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0].tokens != pair[1].tokens]
    sources = [sentences.sources[n] for n in places]
    our_log_probs = exact.sums(sources, [ours[n] for n in places])
    their_log_probs = exact.sums(sources, [theirs[n] for n in places])
    penalty = peer.penalty(translator.search.length_penalty)

    differences = []
    for n, left, right in zip(places, our_log_probs, their_log_probs, strict=True):
        if beam_size == 1:
            first = _first_difference(ours[n].tokens, theirs[n].tokens)
            gap = float(left[first] - right[first])
        else:
            gap = float(left.sum()) / penalty(len(left)) - float(right.sum()) / penalty(len(right))
        differences.append(
            Difference(
                line=sentences.lines[n],
                source=sentences.texts[n],
                ours=our_texts[n],
                theirs=their_texts[n],
                gap=gap,
                ends=beam_size == 1 or (ours[n].finished and theirs[n].finished),
            )
        )

    return SearchParity(
        beam_size=beam_size,
        length_penalty=translator.search.length_penalty,
        identical=len(ours) - len(differences),
        ties=sum(one.ends and abs(one.gap) < TIE for one in differences),
        endless=sum(not one.ends for one in differences),
        bleu=_bleu(our_texts, sentences.references, tgt_lang),
        their_bleu=_bleu(their_texts, sentences.references, tgt_lang),
        differences=differences,
    )


def _ours(translator: Translator, peer: Peer, sources: list[list[int]], *, beam_size: int) -> list[Hypothesis]:
    """What our search finds, under the peer's penalty."""
    search = replace(translator.search, beam_size=beam_size)
    penalty = peer.penalty(search.length_penalty)
    found = replace(translator, search=search).hypotheses(sources, n_best=1, check=lambda: None, penalty=penalty)
    return [best for [best] in found]


def _theirs(translator: Translator, peer: Peer, sources: list[list[int]], *, beam_size: int) -> list[Hypothesis]:
    """What the peer finds. Sentences of one length share a call: our maximum depends on it, and is the call's."""
    found: dict[int, Hypothesis] = {}
    by_length = sorted(range(len(sources)), key=lambda n: len(sources[n]))
    for length, places in groupby(by_length, key=lambda n: len(sources[n])):
        longest = min(length + translator.search.max_extra, translator.model.config.max_positions)
        same_length = list(places)
        translations = peer.translate(
            [sources[n] for n in same_length],
            beam_size=beam_size,
            alpha=translator.search.length_penalty,
            max_length=longest,
        )
        for n, tokens in zip(same_length, translations, strict=True):
            found[n] = Hypothesis(tokens, 0.0, len(tokens) < longest)
    return [found[n] for n in range(len(sources))]


def _first_difference(left: list[int], right: list[int]) -> int:
    """Where two lists part; the shorter one may be the beginning of the other."""
    shorter = min(len(left), len(right))
    return next((n for n in range(shorter) if left[n] != right[n]), shorter)


def _bleu(hypotheses: list[str], references: list[str] | None, tgt_lang: str) -> float | None:
    return None if references is None else measure_bleu(hypotheses, references, tgt_lang=tgt_lang).score


# ---- for people


def format_parity(parity: Parity) -> str:
    """What was compared, and what was found, a line each."""
    versions = ", ".join(f"{name} {version}" for name, version in parity.versions.items())
    bound = "" if parity.bound is None else f", of {parity.bound:.0e} that there may be"
    largest = {"log-probability": parity.log_probs, "logit": parity.logits}
    lines = [
        f"checked on {parity.sentences} sentences of {parity.origin}, with {versions} ({parity.arithmetic})",
        f"cut into the same pieces: {parity.cut_alike} of {parity.sentences} sentences",
        *(
            f"largest difference of a {name} of {parity.targets}: {difference:.1e}{bound}"
            for name, difference in largest.items()
            if difference is not None
        ),
    ]
    for search in (parity.greedy, parity.beam):
        lines += _format_search(search, parity.sentences)
    return "".join(f"{line}\n" for line in lines)


def _format_search(search: SearchParity, sentences: int) -> list[str]:
    line = f"{_name(search)}: {search.identical} of {sentences} translations identical"
    if search.differences:
        line += f", {search.ties} within {TIE:.0e} in score, {search.endless} without an end, {search.others} others"
    if search.bleu is not None and search.their_bleu is not None:
        line += f"; BLEU {search.their_bleu:.2f}, ours {search.bleu:.2f}"
    return [
        line,
        *(
            f"  line {one.line}, ours is better by {one.gap:.1e}: {one.theirs} | {one.ours}"
            for one in search.differences
        ),
    ]


def _name(search: SearchParity) -> str:
    return "greedy" if search.beam_size == 1 else f"beam {search.beam_size}, alpha {search.length_penalty:g}"
