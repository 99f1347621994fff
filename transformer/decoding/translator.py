"""Text in, text out: tokenizers around `BatchedDecoder`, which know ids alone.

    texts -> _encode -> ids -> search, sampling or forced decoding in `BatchedDecoder` -> ids -> _decode -> texts

Results come back in the order of the texts. A text without a visible character never reaches the model, which would
make something up for it.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch

from transformer.arguments import check_callable, check_flag, list_of_texts, shown, whole
from transformer.config.settings import MOST_BEAM, TORCH, Precision, SearchConfig
from transformer.data.corpus import is_blank
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.decoding.arguments import check_ids, check_search, length_penalties_of, lines_of, sampling_of
from transformer.decoding.batched import BatchedDecoder
from transformer.decoding.forced import IdPair
from transformer.decoding.output import BLANK, UNSCORED, Alignment, Scored, Translation
from transformer.decoding.search import Hypothesis, length_penalty
from transformer.errors import InputError
from transformer.model.transformer import Transformer
from transformer.vocabulary import EOS

log = logging.getLogger(__name__)

MOST_SHOWN = 20  # tags that an error lists


@dataclass(frozen=True)
class _Prefix:
    """What a translation has to begin with, as text and as ids of pieces; both are empty if it is free."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Translator:
    """A model with its tokenizers, its search settings, and where and in which arithmetic it computes.

    `load` makes one of a run directory; `translate` is its main method. Two threads must not use one translator at the
    same time: it divides torch's threads among its own.
    """

    tokenizers: Tokenizers
    decoder: BatchedDecoder
    tags: Sequence[str] = ()  # that the model has learnt
    is_tagged: bool = False  # whether all text that it was trained on began with one of them
    weights: Sequence[str] = ()  # the SHA-256 of the weights of each model, where they are those of a checkpoint

    @property
    def model(self) -> Transformer:
        """The model, of an ensemble the first, as it was before it was made ready to translate."""
        return self.decoder.models[0]

    @property
    def search(self) -> SearchConfig:
        """The search settings."""
        return self.decoder.search

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self.decoder.device

    @property
    def precision(self) -> Precision:
        """The arithmetic in which it computes."""
        return self.decoder.precision

    @property
    def engine(self) -> str | None:
        """What searches in place of torch, with its version and type; None where torch does."""
        return self.decoder.engine

    def with_search(self, search: SearchConfig) -> "Translator":
        """The same model under other search settings. Raises InputError for what are none."""
        check_search(search)
        is_other = (search.engine, search.engine_type) != (self.search.engine, self.search.engine_type)
        if is_other and search.engine != TORCH:
            raise InputError(f"search.engine={search.engine} is chosen by load: give it engine, and engine_type")
        return replace(self, decoder=self.decoder.with_search(search))

    def translate(
        self,
        texts: Iterable[str],
        *,
        check: Callable[[], None] = lambda: None,
        first_line: int = 1,
        lines: Sequence[int] | None = None,
        strict: bool = False,
    ) -> list[str]:
        """The translation of each text, in the order given: as many as there are texts, one line each.

        A text is one sentence as people write it: the tokenizer is part of the translator. All texts may be given at
        once, because they are sorted by length and cut into batches of `search.batch_tokens`. A blank text becomes "".

        A text of more pieces than `model.max_positions` has room for is truncated, and logged with its line, counted
        from `first_line`, or the one of `lines` where several texts are of a line; `strict` raises InputError instead.
        `check` is called before each batch, and may raise.

        Raises InputError for an item that is not a text, and for a single text that is not in a list.
        """
        check_callable("check", check)
        texts = self._checked(texts, first_line=first_line, strict=strict)
        numbers = range(first_line, first_line + len(texts)) if lines is None else lines_of(lines, n_texts=len(texts))

        sources = self._encode(texts, lines=numbers, strict=strict)
        hypotheses = self.decoder.hypotheses(list(sources.values()), n_best=1, check=check)
        return self._decode([best for [best] in hypotheses], list(sources), n_texts=len(texts))

    def translate_n_best(
        self,
        texts: Iterable[str],
        n_best: int,
        *,
        prefixes: Iterable[str] | None = None,
        align: bool = False,
        first_line: int = 1,
        strict: bool = False,
    ) -> list[list[Translation]]:
        """The `n_best` best translations of each text, the best first, with their scores.

        Each translation begins with the prefix of its text, where `prefixes` has one that is not blank. The tokenizer
        cuts a prefix into pieces by itself, and the search goes on from these. A prefix should end with a whole word,
        because half a word has other pieces than the beginning of the whole word. The model decides whether the last
        word goes on.

        `align` adds which source piece each piece belongs to. The other arguments are those of `translate`. There are
        fewer than `n_best` only where no more are possible; and a blank text has one, which is blank.

        Raises InputError as `translate` does, unless n_best is from 1 to search.beam_size, and for prefixes that are
        not as many as texts, or longer than a translation may be.
        """
        texts, sources, given = self._encode_all(texts, prefixes, align=align, first_line=first_line, strict=strict)
        hypotheses = self.decoder.hypotheses(
            list(sources.values()), n_best=self._checked_n_best(n_best), prefixes=[prefix.ids for prefix in given]
        )
        return self._translations(sources, given, hypotheses, n_texts=len(texts), align=align)

    def sample(
        self,
        texts: Iterable[str],
        n_samples: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 1,
        prefixes: Iterable[str] | None = None,
        align: bool = False,
        first_line: int = 1,
        strict: bool = False,
    ) -> list[list[Translation]]:
        """`n_samples` translations of each text, drawn piece by piece, in the order in which they were drawn.

        Each piece is drawn from the probabilities of the model: sharpened by a `temperature` below 1, flattened by one
        above; restricted to the `top_k` most probable pieces; then to the fewest of these that together have at least
        the share `top_p`. The draw depends only on `seed`, the line (counted from `first_line`), the sample and the
        step: the same line gives the same samples in every batch, but for rounding.

        `log_prob` and `score` are the model's own, without temperature and limits. The other arguments, and what is
        raised, are as for `translate_n_best`.
        """
        sampling = sampling_of(temperature, top_k=top_k, top_p=top_p, seed=seed)
        n_samples = whole("n_samples", n_samples)
        if not 1 <= n_samples <= MOST_BEAM:
            raise InputError(f"n_samples={n_samples} must be from 1 to {MOST_BEAM}")
        texts, sources, given = self._encode_all(texts, prefixes, align=align, first_line=first_line, strict=strict)
        hypotheses = self.decoder.sample(
            list(sources.values()),
            sampling,
            n_samples=n_samples,
            lines=[first_line + index for index in sources],
            prefixes=[prefix.ids for prefix in given],
        )
        return self._translations(sources, given, hypotheses, n_texts=len(texts), align=align)

    def translate_sweep(self, texts: Iterable[str], length_penalties: Iterable[float]) -> dict[float, list[str]]:
        """For each of these alphas, what `translate` would give with it as `search.length_penalty`: from one search.

        It takes little longer than to translate once. The result can differ from that of `translate` by rounding alone:
        a sentence leaves its batch when it is done under every alpha, so batches have other shapes.

        Raises InputError as `translate` does, for no alpha, and for one that cannot be.
        """
        alphas = length_penalties_of(length_penalties)
        texts = self._checked(texts, first_line=1, strict=False)
        penalties = [length_penalty(alpha) for alpha in alphas]

        sources = self._encode(texts, lines=range(1, 1 + len(texts)), strict=False)
        by_source = self.decoder.sweep(list(sources.values()), penalties)

        translations = {}
        for n, alpha in enumerate(alphas):
            hypotheses = [by_penalty[n] for by_penalty in by_source]
            translations[alpha] = self._decode(hypotheses, list(sources), n_texts=len(texts))
        return translations

    def hypotheses(
        self,
        sources: Iterable[Sequence[int]],
        *,
        n_best: int,
        check: Callable[[], None] = lambda: None,
        penalty: Callable[[int], float] | None = None,
    ) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of each source, with their log-probabilities, in the order of the sources.

        Sources and hypotheses are ids of pieces, without BOS and EOS: `tokenizers.source` encodes texts as sources, and
        `tokenizers.target` decodes hypotheses. The best hypothesis comes first; see `beam_search` for what a list
        holds. `check` is called before each batch, and may raise. `penalty` is another function of |Y| than that of
        `search.length_penalty`, such as another toolkit's; it must not fall.

        Raises InputError unless 1 <= n_best <= search.beam_size, for ids that no piece has, for a source that the model
        has no positions for, and where memory runs out.
        """
        check_search(self.search)
        check_callable("check", check)
        if penalty is not None:
            check_callable("penalty", penalty)
        ids = check_ids("sources", sources, vocab_size=self.tokenizers.source.vocab_size)
        for index, source in enumerate(ids):
            self._check_length(source, f"sources[{index}]")
        return self.decoder.hypotheses(ids, n_best=self._checked_n_best(n_best), penalty=penalty, check=check)

    def score(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        *,
        first_line: int = 1,
        origins: tuple[str, str] = ("sources", "targets"),
    ) -> list[Scored]:
        """How probable each target is as a translation of its source: natural log-probabilities, by piece and in all.

        A pair of which a side is blank has no score. EOS counts, so `log_prob` is that of the whole translation.
        `origins` and `first_line` are what errors name.

        Raises InputError unless there are as many targets as sources, in lists, and where a text is longer than the
        model has positions for: cut, it would be another sentence.
        """
        self._check_torch("score")
        check_search(self.search)
        whole("first_line", first_line, least=0)
        sources = list_of_texts("sources", sources)
        pairs = self._encode_pairs(
            sources, list_of_texts("targets", targets), first_line=first_line, origins=_two_names(origins)
        )  # by index
        log_probs = self.decoder.log_probs(list(pairs.values()))

        penalty = length_penalty(self.search.length_penalty)
        scored = {}
        for (index, (_, target)), by_piece in zip(pairs.items(), log_probs, strict=True):
            total = math.fsum(by_piece)
            score = total / penalty(len(by_piece))
            scored[index] = Scored(total, score, _pieces([*target, EOS], self.tokenizers.target), by_piece)
        return [scored.get(index, UNSCORED) for index in range(len(sources))]

    # ---- what a user gave

    def check_tag(self, tag: str | None, *, key: str) -> None:
        """Raise InputError for a tag that the model has not learnt; `key` is what was set. None passes."""
        if tag is not None and tag not in self.tags:
            has_learnt = f"{self._learnt()}: choose among these" if self.tags else "no tag at all: leave it out"
            raise InputError(f"{key}={tag} is no direction of this model, which has learnt {has_learnt}")

    def check_direction(self, text: str, place: str) -> None:
        """Raise InputError for a text without a tag that the model has learnt, where it needs one; a blank one passes.

        `place` is what the error calls the text.
        """
        if self.is_tagged and not is_blank(text) and not text.lstrip().startswith(tuple(self.tags)):
            raise InputError(
                f"{place} begins with {shown(text.split()[0])}, which is no direction of this model: it has learnt "
                f"{self._learnt()}: put one in front of each text (the commands do, with tag=... or "
                "a set's key tag)"
            )

    def _learnt(self) -> str:
        """The tags, in words; of a great many, the first."""
        shown = ", ".join(self.tags[:MOST_SHOWN])
        more = len(self.tags) - MOST_SHOWN
        return shown if more <= 0 else f"{shown} and {more} more"

    def _checked(self, texts: Iterable[str], *, first_line: int, strict: bool) -> list[str]:
        """The texts as a list, once all that goes with them is checked. Raises InputError."""
        check_search(self.search)
        whole("first_line", first_line, least=0)
        check_flag("strict", strict)
        return list_of_texts("texts", texts)

    def _check_torch(self, what: str) -> None:
        """Raise InputError for what CTranslate2 cannot do: the figures of another arithmetic would be no answer."""
        if self.search.engine != TORCH:
            raise InputError(f"{what} needs torch: set search.engine=torch")

    def _checked_n_best(self, n_best: int) -> int:
        beam_size = self.search.beam_size
        if not 1 <= whole("n_best", n_best) <= beam_size:
            raise InputError(f"n_best={n_best} must be from 1 to search.beam_size={beam_size}: raise that, or lower it")
        return int(n_best)

    # ---- from texts to translations

    def _translations(
        self,
        sources: dict[int, list[int]],
        prefixes: list[_Prefix],
        hypotheses: list[list[Hypothesis]],
        *,
        n_texts: int,
        align: bool,
    ) -> list[list[Translation]]:
        """The hypotheses of these sources, as text with scores, each at its index in a list of `n_texts`.

        A translation begins with the text of its prefix as it was given, even if the pieces of the prefix do not spell
        it: an unknown character has no piece of its own.
        """
        # Of all hypotheses, end to end.
        pairs = [
            (source, hypothesis.tokens)
            for source, n_best in zip(sources.values(), hypotheses, strict=True)
            for hypothesis in n_best
        ]
        texts = iter(self.tokenizers.target.decode([target for _, target in pairs]))
        alignments = iter(self._align(pairs)) if align else repeat(None)

        penalty = length_penalty(self.search.length_penalty)
        spelt_prefixes = self.tokenizers.target.decode([prefix.ids for prefix in prefixes])
        by_index = {}
        for index, n_best, prefix, spelt in zip(sources, hypotheses, prefixes, spelt_prefixes, strict=True):
            by_index[index] = [
                Translation(
                    text=prefix.text + next(texts).removeprefix(spelt),
                    log_prob=hypothesis.log_prob,
                    score=hypothesis.score(penalty),
                    finished=hypothesis.finished,
                    alignment=next(alignments),
                    length=hypothesis.length,
                )
                for hypothesis in n_best
            ]
        return [by_index.get(index, [BLANK]) for index in range(n_texts)]

    def _align(self, pairs: Sequence[IdPair]) -> list[Alignment]:
        """The alignment of each target with its source."""
        source, target = self.tokenizers.sides
        return [
            Alignment(_pieces(source_ids, source), _pieces(target_ids, target), source_of)
            for (source_ids, target_ids), source_of in zip(pairs, self.decoder.align(pairs), strict=True)
        ]

    # ---- text to ids and back

    def _encode_all(
        self, texts: Iterable[str], prefixes: Iterable[str] | None, *, align: bool, first_line: int, strict: bool
    ) -> tuple[list[str], dict[int, list[int]], list[_Prefix]]:
        """The texts, once all that goes with them is checked, what `_encode` gives, and the prefix of each source."""
        check_flag("align", align)
        if align:
            self._check_torch("align")
        texts = self._checked(texts, first_line=first_line, strict=strict)
        sources = self._encode(texts, lines=range(first_line, first_line + len(texts)), strict=strict)
        return texts, sources, self._encode_prefixes(prefixes, sources, n_texts=len(texts), first_line=first_line)

    def _encode(self, texts: list[str], *, lines: Sequence[int], strict: bool) -> dict[int, list[int]]:
        """The ids of each text that is not blank, by its index among the texts; `lines` are what errors name."""
        for text, line in zip(texts, lines, strict=True):
            self.check_direction(text, f"line {line}")
        not_blank = [n for n, text in enumerate(texts) if not is_blank(text)]
        encoded = self.tokenizers.source.encode([texts[n] for n in not_blank])

        sources = {}
        for index, ids in zip(not_blank, encoded, strict=True):
            if ids:
                sources[index] = self._truncate(ids, lines[index], strict=strict)
        return sources

    def _encode_pairs(
        self, sources: list[str], targets: list[str], *, first_line: int, origins: tuple[str, str]
    ) -> dict[int, IdPair]:
        """The ids of each pair that has no blank side, by its index among the pairs."""
        if len(sources) != len(targets):
            raise InputError(f"{len(sources)} sources, but {len(targets)} targets: each target belongs to one source")
        for line, text in enumerate(sources, first_line):
            self.check_direction(text, f"{origins[0]}:{line}: the source")

        not_blank = [n for n in range(len(sources)) if not (is_blank(sources[n]) or is_blank(targets[n]))]
        source_ids = self.tokenizers.source.encode([sources[n] for n in not_blank])
        target_ids = self.tokenizers.target.encode([targets[n] for n in not_blank])

        pairs = {}
        for index, source, target in zip(not_blank, source_ids, target_ids, strict=True):
            self._check_length(source, f"{origins[0]}:{first_line + index}: the source")
            self._check_length(target, f"{origins[1]}:{first_line + index}: the target")
            if source and target:
                pairs[index] = (source, target)
        return pairs

    def _decode(self, hypotheses: list[Hypothesis], indices: list[int], *, n_texts: int) -> list[str]:
        """The texts of these hypotheses, each at its index in a list of `n_texts`; the others are empty."""
        translations = self.tokenizers.target.decode([hypothesis.tokens for hypothesis in hypotheses])
        by_index = dict(zip(indices, translations, strict=True))
        return [by_index.get(index, "") for index in range(n_texts)]

    def _encode_prefixes(
        self, prefixes: Iterable[str] | None, sources: dict[int, list[int]], *, n_texts: int, first_line: int
    ) -> list[_Prefix]:
        """The prefix of the translation of each source."""
        if prefixes is None:
            return [_Prefix("", []) for _ in sources]

        prefixes = list_of_texts("prefixes", prefixes)
        if len(prefixes) != n_texts:
            raise InputError(f"{len(prefixes)} prefixes for {n_texts} texts: give one for each, a blank one for none")

        texts = ["" if is_blank(prefixes[index]) else " ".join(prefixes[index].split()) for index in sources]
        encoded = self.tokenizers.target.encode(texts)

        for (index, source), ids in zip(sources.items(), encoded, strict=True):
            most = self.decoder.max_length(source) - 1  # beside EOS
            if len(ids) > most:
                is_bound_by_search = len(source) + self.search.max_extra < self.decoder.max_positions
                raise InputError(
                    f"line {first_line + index}: its prefix has {len(ids)} pieces, but a translation of this source "
                    f"has room for {most}: shorten the prefix{', or raise search.max_extra' * is_bound_by_search}"
                )
        return [_Prefix(text, ids) for text, ids in zip(texts, encoded, strict=True)]

    def _truncate(self, ids: list[int], line: int, *, strict: bool) -> list[int]:
        """The pieces of a source that the model has positions for, beside EOS; `strict` refuses a longer one."""
        max_pieces = self.decoder.max_positions - 1
        if len(ids) <= max_pieces:
            return ids

        problem = f"line {line}: {len(ids)} pieces, but model.max_positions has room for {max_pieces}"
        if strict:
            raise InputError(f"{problem}: split the line, or leave out strict=true to have it truncated")
        log.warning("%s: only the first %d are translated", problem, max_pieces)
        return ids[:max_pieces]

    def _check_length(self, ids: list[int], what: str) -> None:
        """Raise InputError for a text that the model has no positions for, beside EOS."""
        most = self.decoder.max_positions - 1
        if len(ids) > most:
            raise InputError(
                f"{what} has {len(ids)} pieces, but model.max_positions has room for {most}: shorten it, or leave the "
                "pair out"
            )


def _pieces(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """The pieces as text."""
    return [tokenizer.piece(index) for index in ids]


def _two_names(origins: tuple[str, str]) -> tuple[str, str]:
    """What errors call sources and targets. Raises InputError unless these are two texts."""
    if isinstance(origins, tuple) and len(origins) == 2 and all(isinstance(name, str) for name in origins):
        return origins
    raise InputError(f"origins={shown(origins)} must be the names of the sources and of the targets")
