"""The check of a model in another library: does it compute what ours does, on real sentences?

    given targets -> log-probabilities of our model in float64, and of the peer   are the weights in their places?
    sources       -> greedy and beam search of both, under the peer's penalty     are decoder and special tokens right?

Two searches may diverge where two candidates are nearly equal. So each difference is listed with how much better our
translation is, by our model in float64. Differences that only a hardly trained model shows are counted apart, as
degenerate: our beam search ranks what has not ended at the maximum length behind everything that has, other libraries
rank it by its score; and our search never writes a PAD or a BOS.
"""

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from transformer.decoding.search import Hypothesis
from transformer.decoding.translator import Translator
from transformer.evaluation.score import measure_bleu
from transformer.integrations.engine.peer import Forced, Peer, forced_by, pad
from transformer.layout import Padded
from transformer.model.transformer import Transformer
from transformer.numerics import FINITE, differences, excess
from transformer.vocabulary import BOS, EOS, PAD

TIE = 1e-4  # candidates whose scores differ by less may come out either way
MOST_OTHERS = 0.01  # share of sentences that may differ otherwise: a tie early in a search can cost more at its end
BATCH = 8  # sentences whose logits are in memory

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
    gap: float  # how much better our model scores our translation; greedy: at the first token that differs
    degenerate: bool  # one of the two does not end, or has a PAD or a BOS


@dataclass(frozen=True)
class SearchParity:
    """The same search by both models; beam 1 is greedy."""

    beam_size: int
    length_penalty: float  # the number that the other library is given
    identical: int  # sentences with the same translation
    ties: int  # translations that differ by less than TIE
    degenerate: int  # translations that differ, where one of the two does not end, or has a PAD or a BOS
    others: int  # translations that differ for no such reason
    bleu: float | None  # of ours; None where it is not measured
    their_bleu: float | None
    differences: list[Difference]

    @property
    def name(self) -> str:
        """The search in words."""
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
    mean_log_probs: float  # the mean of them all
    logits: float | None  # the same, where the library gives them
    bound: float | None  # the largest difference allowed; None: the type of the weights loses more
    searches: list[SearchParity]

    @property
    def problems(self) -> list[str]:
        """Why the export must not be used: differences above the bound, or that are no number."""
        limit = FINITE if self.bound is None else self.bound
        problems = excess("a log-probability", self.log_probs, limit) + excess("a logit", self.logits or 0.0, limit)
        for search in self.searches:
            if self.bound is not None and search.others > MOST_OTHERS * self.sentences:
                problems.append(f"{search.others} of {self.sentences} translations differ ({search.name})")
        return problems


def choose_sentences(pairs: Iterable[tuple[str, str | None]], *, translator: Translator, count: int) -> list[Sentence]:
    """The first `count` pairs with something to translate for which the model has positions."""
    return list(islice(_usable_sentences(pairs, translator), count))


def _usable_sentences(pairs: Iterable[tuple[str, str | None]], translator: Translator) -> Iterator[Sentence]:
    max_pieces = translator.model.config.max_positions - 1  # the last position is for EOS
    for line, (text, reference) in enumerate(pairs, 1):
        [pieces] = translator.tokenizers.source.encode([text])
        [target] = translator.tokenizers.target.encode([reference or ""])
        if pieces and max(len(pieces), len(target)) <= max_pieces:
            yield Sentence(line, text, pieces, reference)


def mean_length(sentences: Sequence[Sentence], translator: Translator) -> float:
    """The mean of a reference's tokens with its EOS; of a source's, where there are no references."""
    references = _references(sentences)
    if references is None:
        targets = [sentence.pieces for sentence in sentences]
    else:
        targets = translator.tokenizers.target.encode(references)
    return 1.0 + sum(map(len, targets)) / len(targets)


class OurSearch(Protocol):
    """How our side searches: by the rule of the peer, where that cannot search by ours."""

    def __call__(
        self, translator: Translator, peer: Peer, sources: Sequence[list[int]], *, beam_size: int
    ) -> list[Hypothesis]:
        """The best translation of each source by our model, under the peer's penalty."""
        ...


def search_as_ours(
    translator: Translator, peer: Peer, sources: Sequence[list[int]], *, beam_size: int
) -> list[Hypothesis]:
    """The best translation of each source by our search, under the peer's penalty."""
    search = replace(translator.search, beam_size=beam_size)
    searcher = translator.with_search(search)
    n_best = searcher.hypotheses(sources, n_best=1, penalty=peer.penalty)
    return [best for [best] in n_best]


def compare(
    translator: Translator,
    peer: Peer,
    sentences: Sequence[Sentence],
    *,
    bound: float | None,
    tgt_lang: str | None = None,
    ours: OurSearch = search_as_ours,
) -> Parity:
    """Compare a model in another library with ours, which it was made from.

    In this language, BLEU is measured where every sentence has a reference. Our model is on the CPU.
    """
    exact = copy.deepcopy(translator.model).double()

    # Search with both.
    beam_sizes = sorted({1, translator.search.beam_size})
    searches = [
        _compare_searches(translator, peer, sentences, ours, exact=exact, beam_size=size, tgt_lang=tgt_lang)
        for size in beam_sizes
    ]

    # Give both the same targets.
    sources = [sentence.pieces for sentence in sentences]
    references = _references(sentences)
    if references is None:
        most = translator.decoder.max_positions - 1  # as forced decoding reads BOS in front of them
        targets = [best.tokens[:most] for best in search_as_ours(translator, peer, sources, beam_size=1)]
    else:
        targets = translator.tokenizers.target.encode(references)
    log_probs, mean_log_probs, logits = _compare_forced(exact, peer, sources, targets)

    # Cut the same texts into pieces.
    pieces = peer.encode([sentence.text for sentence in sentences])
    cut_alike = sum(theirs == ours for theirs, ours in zip(pieces, sources, strict=True))

    return Parity(
        sentences=len(sentences),
        cut_alike=cut_alike,
        tokens=sum(len(target) + 1 for target in targets),
        arithmetic=peer.arithmetic,
        versions=peer.versions,
        log_probs=log_probs,
        mean_log_probs=mean_log_probs,
        logits=logits,
        bound=bound,
        searches=searches,
    )


def _references(sentences: Sequence[Sentence]) -> list[str] | None:
    """The references; None unless every sentence has one."""
    references = [sentence.reference for sentence in sentences if sentence.reference is not None]
    return references if len(references) == len(sentences) else None


# ---- given targets --------------------------------------------------------------------------------------------------


def _compare_forced(
    exact: Transformer, peer: Peer, sources: Sequence[list[int]], targets: Sequence[list[int]]
) -> tuple[float, float, float | None]:
    """The largest and the mean difference of a log-probability, and the largest of a logit where there are any."""
    log_probs = []
    logits = []
    for start in range(0, len(sources), BATCH):  # of all lengths, so that padding is checked, too
        batch_sources = sources[start : start + BATCH]
        batch_targets = targets[start : start + BATCH]
        of_exact = _force(exact, batch_sources, batch_targets)
        of_peer = peer.forced(batch_sources, batch_targets)
        for ours, theirs in zip(of_exact, of_peer, strict=True):
            log_probs.append(differences(ours.log_probs, theirs.log_probs))
            if ours.logits is not None and theirs.logits is not None:
                logits.append(differences(ours.logits, theirs.logits).max())

    of_tokens = torch.cat(log_probs)
    largest_logit = float(torch.stack(logits).max()) if logits else None
    return float(of_tokens.max()), float(of_tokens.mean()), largest_logit


def _force(model: Transformer, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Forced]:
    """What our model predicts at the positions of each target, given its source."""
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
    translator: Translator,
    peer: Peer,
    sentences: Sequence[Sentence],
    our_search: OurSearch,
    *,
    exact: Transformer,
    beam_size: int,
    tgt_lang: str | None,
) -> SearchParity:
    """Translate with both models."""
    log.info("checking %d sentences with beam %d", len(sentences), beam_size)
    sources = [sentence.pieces for sentence in sentences]
    ours = our_search(translator, peer, sources, beam_size=beam_size)
    theirs = _theirs(translator, peer, sources, beam_size=beam_size)
    our_texts = translator.tokenizers.target.decode([best.tokens for best in ours])
    their_texts = translator.tokenizers.target.decode([best.tokens for best in theirs])

    # Where they differ, and by how much.
    differences = []
    for place, sentence in enumerate(sentences):
        left = ours[place]
        right = theirs[place]
        if left.tokens == right.tokens:
            continue

        left_log_probs = _log_probs(exact, sentence.pieces, left)
        right_log_probs = _log_probs(exact, sentence.pieces, right)
        if beam_size == 1:
            first = _first_difference(left.tokens, right.tokens)
            gap = float(left_log_probs[first]) - float(right_log_probs[first])
        else:
            gap = _score(left_log_probs, peer) - _score(right_log_probs, peer)
        differences.append(
            Difference(
                line=sentence.line,
                source=sentence.text,
                ours=our_texts[place],
                theirs=their_texts[place],
                gap=gap,
                degenerate=_is_degenerate(left, beam_size) or _is_degenerate(right, beam_size),
            )
        )

    # Which of the differences matter, and whether they change BLEU.
    degenerate = sum(difference.degenerate for difference in differences)
    ties = sum(abs(difference.gap) < TIE and not difference.degenerate for difference in differences)
    references = _references(sentences)
    our_bleu = None
    their_bleu = None
    if references is not None and tgt_lang is not None:
        our_bleu, their_bleu = (
            measure_bleu(texts, references, tgt_lang=tgt_lang).score for texts in (our_texts, their_texts)
        )

    return SearchParity(
        beam_size=beam_size,
        length_penalty=peer.alpha,
        identical=len(sentences) - len(differences),
        ties=ties,
        degenerate=degenerate,
        others=len(differences) - ties - degenerate,
        bleu=our_bleu,
        their_bleu=their_bleu,
        differences=differences,
    )


def _score(log_probs: Tensor, peer: Peer) -> float:
    """What a beam search ranks by: the log-probability of a translation over the peer's length penalty."""
    return float(log_probs.sum()) / peer.penalty(len(log_probs))


def _theirs(translator: Translator, peer: Peer, sources: list[list[int]], *, beam_size: int) -> list[Hypothesis]:
    """The best translation of each source by the peer's search.

    The sources of one length share a call: the maximum length of a translation depends on the source's, and a call has
    one maximum.
    """
    places_by_length: dict[int, list[int]] = {}
    for place, source in enumerate(sources):
        places_by_length.setdefault(len(source), []).append(place)

    hypotheses: dict[int, Hypothesis] = {}
    for length, places in sorted(places_by_length.items()):
        longest = min(length + translator.search.max_extra, translator.model.config.max_positions)
        translations = peer.translate([sources[place] for place in places], beam_size=beam_size, max_length=longest)
        for place, tokens in zip(places, translations, strict=True):
            hypotheses[place] = Hypothesis(tokens, math.nan, finished=len(tokens) < longest)
    return [hypotheses[place] for place in range(len(sources))]


def _log_probs(exact: Transformer, source: list[int], hypothesis: Hypothesis) -> Tensor:
    """The log-probabilities of a hypothesis, `(|Y|,)`: of its EOS only where it is finished."""
    predicted = torch.tensor([*hypothesis.tokens, EOS][: hypothesis.length])  # (|Y|,)
    [forced] = _force(exact, [source], [predicted[:-1].tolist()])  # there may be no position to read the last one at
    assert forced.logits is not None
    return torch.log_softmax(forced.logits, 1).gather(1, predicted.unsqueeze(1)).squeeze(1)


def _is_degenerate(hypothesis: Hypothesis, beam_size: int) -> bool:
    """Whether two searches may treat it differently; greedy searches treat alike what does not end."""
    is_cut = beam_size > 1 and not hypothesis.finished
    has_special = PAD in hypothesis.tokens or BOS in hypothesis.tokens
    return is_cut or has_special


def _first_difference(left: list[int], right: list[int]) -> int:
    """The first place where two lists differ; the shorter one may be the beginning of the other."""
    shorter = min(len(left), len(right))
    return next((n for n in range(shorter) if left[n] != right[n]), shorter)
