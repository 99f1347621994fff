"""The check that every export ends with: does the exported model compute what ours does, on real sentences?

The log-probabilities of given targets are compared with those of our model in float64: they tell whether the weights
are in their places. Greedy and beam search, under the length penalty of the other library, tell whether its decoder and
its special tokens are set up. Two searches may part where two candidates are as good as equal: so each difference is
listed with how much better our translation is, by our model in float64.

Two kinds of differences are counted apart, which a model has that is hardly trained. At the maximum length of a beam
search, ours ranks what has not ended behind all that has, others by its score. And ours never writes a PAD or a BOS.
"""

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

import torch
from torch import Tensor

from transformer.decoding.search import Hypothesis
from transformer.decoding.translator import Translator
from transformer.evaluation.score import measure_bleu
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.tools.export.peer import Forced, Original, Peer, forced_by, pad
from transformer.vocabulary import BOS, EOS, PAD

TIE = 1e-4  # candidates whose scores differ by less may come out either way
MOST_OTHERS = 0.01  # share of sentences that may differ otherwise: a tie early in a search can cost more at its end
AT_ONCE = 8  # sentences of a batch whose logits are in memory
SHOWN = 10  # differences that are printed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sentence:
    """A sentence to check with."""

    line: int  # in its file, counted from 1
    text: str
    pieces: list[int]
    reference: str | None


@dataclass(frozen=True)
class Difference:
    """A sentence that the two models translate differently."""

    line: int
    source: str
    ours: str
    theirs: str
    gap: float  # how much higher ours scores, by our model; greedy: at the first token that differs
    degenerate: bool  # one of the two does not end, or has a PAD or a BOS


@dataclass(frozen=True)
class SearchParity:
    """The same search by both models; beam 1 is greedy."""

    beam_size: int
    length_penalty: float  # the number that the other library is given
    identical: int  # sentences
    ties: int  # that differ, by less than TIE
    degenerate: int  # that differ, where one does not end, or has a PAD or a BOS
    others: int  # that differ for no such reason
    bleu: float | None  # of ours; None without references
    their_bleu: float | None
    differences: list[Difference]

    @property
    def name(self) -> str:
        """For people."""
        return "greedy" if self.beam_size == 1 else f"beam {self.beam_size}, length penalty {self.length_penalty:g}"


@dataclass(frozen=True)
class Parity:
    """How exactly an exported model computes what ours does."""

    sentences: int
    cut_alike: int  # into the same pieces, by the tokenizer of the exported model
    tokens: int  # of the targets whose log-probabilities were compared: the references, else our translations
    arithmetic: str  # of the exported model
    versions: dict[str, str]
    log_probs: float  # the largest difference
    logits: float | None  # the same, where the library gives them
    bound: float | None  # of both; None: the type of the weights loses more
    searches: list[SearchParity]

    @property
    def problems(self) -> list[str]:
        """What no export may show, and, where there is a bound, none in an exact type."""
        found = []
        for name, difference in (("log-probabilities", self.log_probs), ("logits", self.logits)):
            if difference is None:
                continue
            if not math.isfinite(difference) or (self.bound is not None and difference > self.bound):
                found.append(f"{name} differ by up to {difference:.1e}")

        for search in self.searches:
            if self.bound is not None and search.others > MOST_OTHERS * self.sentences:
                found.append(f"{search.others} of {self.sentences} translations differ ({search.name})")
        return found


def choose_sentences(pairs: Iterable[tuple[str, str | None]], *, translator: Translator, count: int) -> list[Sentence]:
    """The first `count` pairs with something to translate that the model has positions for."""
    max_pieces = translator.model.config.max_positions - 1

    def usable() -> Iterator[Sentence]:
        for line, (text, reference) in enumerate(pairs, 1):
            pieces, target = translator.tokenizer.encode([text, reference or ""])
            if pieces and max(len(pieces), len(target)) <= max_pieces:
                yield Sentence(line, text, pieces, reference)

    return list(islice(usable(), count))


def mean_length(sentences: Sequence[Sentence], translator: Translator) -> float:
    """Tokens of a reference with its end mark; of a source, where there are no references."""
    references = _references(sentences)
    targets = [one.pieces for one in sentences] if references is None else translator.tokenizer.encode(references)
    return 1.0 + sum(map(len, targets)) / len(targets)


def compare(original: Original, peer: Peer, sentences: Sequence[Sentence], *, bound: float | None) -> Parity:
    """Compare an exported model with the one that it was made of."""
    translator = original.translator
    exact = copy.deepcopy(translator.model).double()

    # The searches.
    beam_sizes = sorted({1, translator.search.beam_size})
    searches = [_compare_searches(original, peer, sentences, exact=exact, beam_size=size) for size in beam_sizes]

    # What both are forced to say.
    sources = [sentence.pieces for sentence in sentences]
    references = _references(sentences)
    if references is None:
        targets = [best.tokens for best in _ours(translator, peer, sources, beam_size=1)]
    else:
        targets = translator.tokenizer.encode(references)
    log_probs, logits = _compare_forced(exact, peer, sources, targets)

    return Parity(
        sentences=len(sentences),
        cut_alike=sum(map(list.__eq__, peer.encode([sentence.text for sentence in sentences]), sources)),
        tokens=sum(len(target) + 1 for target in targets),
        arithmetic=peer.arithmetic,
        versions=peer.versions,
        log_probs=log_probs,
        logits=logits,
        bound=bound,
        searches=searches,
    )


def _references(sentences: Sequence[Sentence]) -> list[str] | None:
    found = [sentence.reference for sentence in sentences if sentence.reference is not None]
    return found if len(found) == len(sentences) else None


# ---- given targets --------------------------------------------------------------------------------------------------


def _compare_forced(
    exact: Transformer, peer: Peer, sources: Sequence[list[int]], targets: Sequence[list[int]]
) -> tuple[float, float | None]:
    """The largest difference of a log-probability, and of a logit where there are any."""
    log_probs = []
    logits = []
    for places in _batches(len(sources)):
        batch = sources[places], targets[places]
        for ours, theirs in zip(_force(exact, *batch), peer.forced(*batch), strict=True):
            log_probs.append(_largest_difference(ours.log_probs, theirs.log_probs))
            if ours.logits is not None and theirs.logits is not None:
                logits.append(_largest_difference(ours.logits, theirs.logits))

    return float(torch.stack(log_probs).max()), float(torch.stack(logits).max()) if logits else None


def _batches(count: int) -> Iterator[slice]:
    """A few sentences at a time, of whichever lengths: padding is to be checked, too."""
    return (slice(start, start + AT_ONCE) for start in range(0, count, AT_ONCE))


def _largest_difference(ours: Tensor, theirs: Tensor) -> Tensor:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)  # broadcasting would hide a row too few
    return (ours - theirs).abs().max()


def _force(model: Transformer, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
    """What our model makes of each target, given its source."""
    source, _ = pad([[*ids, EOS] for ids in sources])
    target, _ = pad([[BOS, *ids] for ids in targets])
    with torch.no_grad():
        logits = model(
            source,
            target,
            source_layout=Padded.of([len(ids) + 1 for ids in sources], source.shape[1]),
            target_layout=Padded.of([len(ids) + 1 for ids in targets], target.shape[1]),
        )  # (B, T, V)
    return forced_by(logits, targets)


# ---- searches -------------------------------------------------------------------------------------------------------


def _compare_searches(
    original: Original, peer: Peer, sentences: Sequence[Sentence], *, exact: Transformer, beam_size: int
) -> SearchParity:
    """Translate with both models."""
    log.info("checking %d sentences with beam %d", len(sentences), beam_size)
    translator = original.translator
    sources = [sentence.pieces for sentence in sentences]
    ours = _ours(translator, peer, sources, beam_size=beam_size)
    theirs = _theirs(translator, peer, sources, beam_size=beam_size)
    texts = [translator.tokenizer.decode([best.tokens for best in found]) for found in (ours, theirs)]

    # Where they differ, and by how much.
    differences = []
    for n, sentence in enumerate(sentences):
        left, right = ours[n], theirs[n]
        if left.tokens == right.tokens:
            continue

        log_probs = [_log_probs(exact, sentence.pieces, hypothesis) for hypothesis in (left, right)]
        if beam_size == 1:
            first = _first_difference(left.tokens, right.tokens)
            scores = [float(one[first]) for one in log_probs]
        else:
            scores = [float(one.sum()) / peer.penalty(len(one)) for one in log_probs]
        differences.append(
            Difference(
                line=sentence.line,
                source=sentence.text,
                ours=texts[0][n],
                theirs=texts[1][n],
                gap=scores[0] - scores[1],
                degenerate=_is_degenerate(left, beam_size) or _is_degenerate(right, beam_size),
            )
        )

    degenerate = sum(one.degenerate for one in differences)
    ties = sum(abs(one.gap) < TIE and not one.degenerate for one in differences)
    references = _references(sentences)
    bleus = [None if references is None else _bleu(found, references, original.tgt_lang) for found in texts]
    return SearchParity(
        beam_size=beam_size,
        length_penalty=peer.alpha,
        identical=len(sentences) - len(differences),
        ties=ties,
        degenerate=degenerate,
        others=len(differences) - ties - degenerate,
        bleu=bleus[0],
        their_bleu=bleus[1],
        differences=differences,
    )


def _ours(translator: Translator, peer: Peer, sources: list[list[int]], *, beam_size: int) -> list[Hypothesis]:
    """What our search finds, under the peer's penalty."""
    search = replace(translator.search, beam_size=beam_size)
    found = replace(translator, search=search).hypotheses(sources, n_best=1, check=lambda: None, penalty=peer.penalty)
    return [best for [best] in found]


def _theirs(translator: Translator, peer: Peer, sources: list[list[int]], *, beam_size: int) -> list[Hypothesis]:
    """What the peer finds. Sentences of one length share a call: our maximum depends on it, and is the call's."""
    found: dict[int, Hypothesis] = {}
    by_length = sorted(range(len(sources)), key=lambda n: len(sources[n]))
    for length, group in groupby(by_length, key=lambda n: len(sources[n])):
        places = list(group)
        longest = min(length + translator.search.max_extra, translator.model.config.max_positions)
        translations = peer.translate(
            [sources[n] for n in places],
            beam_size=beam_size,
            max_length=longest,
        )
        for n, tokens in zip(places, translations, strict=True):
            found[n] = Hypothesis(tokens, math.nan, len(tokens) < longest)
    return [found[n] for n in range(len(sources))]


def _log_probs(exact: Transformer, source: list[int], hypothesis: Hypothesis) -> Tensor:
    """Those of a hypothesis, `(|Y|,)`: of EOS only where it is finished."""
    [forced] = _force(exact, [source], [hypothesis.tokens])
    return forced.log_probs[: hypothesis.length]


def _is_degenerate(hypothesis: Hypothesis, beam_size: int) -> bool:
    """Whether searches may treat it differently; greedy ones cut alike what does not end."""
    is_cut = beam_size > 1 and not hypothesis.finished
    return is_cut or not {PAD, BOS}.isdisjoint(hypothesis.tokens)


def _first_difference(left: list[int], right: list[int]) -> int:
    """Where two lists part; the shorter one may be the beginning of the other."""
    shorter = min(len(left), len(right))
    return next((n for n in range(shorter) if left[n] != right[n]), shorter)


def _bleu(hypotheses: list[str], references: list[str], tgt_lang: str) -> float:
    return measure_bleu(hypotheses, references, tgt_lang=tgt_lang).score


# ---- for people -----------------------------------------------------------------------------------------------------


def format_parity(parity: Parity) -> str:
    """What was found, a line each."""
    versions = ", ".join(f"{name} {version}" for name, version in parity.versions.items())
    allowed = "" if parity.bound is None else f" ({parity.bound:.0e} allowed)"
    pieces = f"{parity.cut_alike} of them cut into the same pieces"
    lines = [
        f"{parity.sentences} sentences, {pieces}; {versions} in {parity.arithmetic}",
        f"log-probabilities of {parity.tokens} tokens: at most {parity.log_probs:.1e} apart{allowed}",
    ]
    if parity.logits is not None:
        lines.append(f"logits of all pieces there: at most {parity.logits:.1e} apart{allowed}")
    for search in parity.searches:
        lines += _format_search(search, parity.sentences)
    return "".join(f"{line}\n" for line in lines)


def _format_search(search: SearchParity, sentences: int) -> list[str]:
    line = f"{search.name}: {search.identical} of {sentences} translations are identical"
    if search.differences:
        line += f", {search.ties} within {TIE:.0e} in score, {search.degenerate} degenerate, {search.others} others"
    if search.bleu is not None and search.their_bleu is not None:
        line += f"; BLEU {search.their_bleu:.2f}, {search.their_bleu - search.bleu:+.2f} of ours"

    shown = [
        f"  line {one.line}, ours better by {one.gap:.1e}: {one.theirs} | {one.ours}"
        for one in search.differences[:SHOWN]
    ]
    more = len(search.differences) - len(shown)
    return [line, *shown, *([f"  and {more} more"] if more else [])]
