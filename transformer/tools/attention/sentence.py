"""One sentence pair as a model reads it, with all of its attention weights; and where its text comes from.

    a text, a line of a file, or of a set that the run keeps      named_sentence, sentences_of
      -> pieces, and the translation: given, or the model's own   read_pieces
      -> the weights of every head                                inspect, by `tools/inspection`

It is below `command` and the attention section of `report`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformer.data.corpus import is_blank, read_lines, read_pairs
from transformer.decoding.translator import Translator
from transformer.errors import InputError
from transformer.evaluation.sets import read_set
from transformer.run_dir import RunDir
from transformer.tools.attention.figures import Words
from transformer.tools.attention.job import AttentionJob
from transformer.tools.inspection import AttentionMaps, Role, attention_maps
from transformer.vocabulary import BOS, EOS

Sentence = tuple[str, str | None]  # a source and, where the model is to read it, its translation


@dataclass(frozen=True)
class Inspected:
    """A sentence pair as the model reads it, as pieces, and its weights."""

    text: str
    source: list[str]  # with EOS
    reads: list[str]  # what the decoder reads: BOS and the pieces
    predicts: list[str]  # what it predicts at the same positions: the pieces and EOS
    translation: str
    is_forced: bool  # the translation was given; it is not the model's own
    maps: AttentionMaps

    @property
    def n_layers(self) -> int:
        """The layers of the encoder or of the decoder, whichever has more."""
        return max(len(self.maps.of(role)) for role in Role)

    @property
    def n_heads(self) -> int:
        """The heads of a layer."""
        return self.maps.cross.shape[1]

    def words(self, role: Role) -> Words:
        """The pieces beside the weights of a role; cross-attention is listed by the word that is predicted."""
        match role:
            case Role.encoder_self:
                return Words(self.source, self.source)
            case Role.decoder_self:
                return Words(self.reads, self.reads)
            case Role.cross:
                return Words(self.predicts, self.source)


# ---- the text -------------------------------------------------------------------------------------------------------


def named_sentence(job: AttentionJob, run: RunDir) -> Sentence:
    """The sentence that the job names. Raises InputError where there is none."""
    if job.text is not None:
        return job.text, job.target

    sentences = sentences_of(job, run, first=job.line - 1, count=1)
    if not sentences:
        raise InputError(f"line={job.line}: {origin_of(job, run)} has fewer lines")
    return sentences[0]


def sentences_of(job: AttentionJob, run: RunDir, *, first: int, count: int) -> list[Sentence]:
    """At most `count` sentences of the job's file or set, from place `first` on, counted from 0.

    Raises InputError where the text cannot be read.
    """
    stop = first + count
    if job.file is not None:
        if job.references is not None:
            return list(islice(read_pairs(Path(job.file), Path(job.references)), first, stop))
        return [(line, None) for line in islice(read_lines(Path(job.file)), first, stop)]

    name = _set_name(job, run)
    names = run.set_names()
    if name not in names:
        kept = ", ".join(names) or "none"
        raise InputError(
            f"set={name}: {run.path} keeps no set of this name, only {kept}: name one of these, "
            "or use text=... or file=..."
        )
    pairs = read_set(run, name)[first:stop]
    return [(source, reference if job.forced else None) for source, reference in pairs]


def origin_of(job: AttentionJob, run: RunDir) -> str:
    """Where the job's sentences come from, for an error message."""
    return job.file if job.file is not None else f"set {_set_name(job, run)} of {run.path}"


def _set_name(job: AttentionJob, run: RunDir) -> str:
    return job.set or run.dev_names()[0]


# ---- pieces and weights ---------------------------------------------------------------------------------------------


def inspect(translator: Translator, sentence: Sentence, *, most_weights: int) -> Inspected:
    """Translate the sentence, unless it comes with its translation, and compute every weight.

    Raises InputError where it has no visible text, or is too long for the model or for a page.
    """
    tokenizers = translator.tokenizers
    text, given = sentence

    # The pieces of both sides.
    check_pieces(translator, text, "the sentence", side=0)
    if given is not None:
        check_pieces(translator, given, "the translation", side=1)
    [(source, target)] = read_pieces(translator, [sentence])
    _check_weights(translator, n_source=len(source), n_target=len(target), most_weights=most_weights)

    # What the model makes of them.
    maps = attention_maps(
        translator.model,
        source,
        target,
        device=translator.device,
        precision=translator.precision,
    )
    return Inspected(
        text=text,
        source=[tokenizers.source.piece(id) for id in [*source, EOS]],
        reads=[tokenizers.target.piece(id) for id in [BOS, *target]],
        predicts=[tokenizers.target.piece(id) for id in [*target, EOS]],
        translation=tokenizers.target.decode([target])[0] if given is None else given,
        is_forced=given is not None,
        maps=maps,
    )


def check_pieces(translator: Translator, text: str, which: str, *, side: int) -> None:
    """Raise InputError where a text has no pieces, or more than the model has positions for.

    `which` names the text in the error. `side` is 0 for a source, 1 for a target.
    """
    [pieces] = translator.tokenizers.sides[side].encode([text])
    max_pieces = translator.model.config.max_positions - 1  # one position is for EOS or BOS
    if not pieces or is_blank(text):
        raise InputError(f"{which} has no visible text: choose another")
    if len(pieces) > max_pieces:
        raise InputError(
            f"{which} has {len(pieces)} pieces, and model.max_positions has room for {max_pieces}: shorten it"
        )


def _check_weights(translator: Translator, *, n_source: int, n_target: int, most_weights: int) -> None:
    """Raise InputError where a sentence pair of so many pieces has more weights than a page holds."""
    config = translator.model.config
    source_positions = n_source + 1  # with EOS
    target_positions = n_target + 1  # with BOS
    in_encoder = config.n_layers * source_positions**2
    in_decoder = config.decoder_layers * target_positions * (target_positions + source_positions)
    n_weights = config.n_heads * (in_encoder + in_decoder)
    if n_weights > most_weights:
        raise InputError(
            f"{n_source} source and {n_target} target pieces: {n_weights:,} weights, and a page holds "
            f"{most_weights:,}: choose a shorter sentence"
        )


def read_pieces(translator: Translator, sentences: Sequence[Sentence]) -> list[tuple[list[int], list[int]]]:
    """The piece ids of each source, and of its translation: the given one, or the model's own."""
    sources = translator.tokenizers.source.encode([source for source, _ in sentences])
    targets: dict[int, list[int]] = {}  # by the number of the sentence

    # The translations that are given.
    given = {number: target for number, (_, target) in enumerate(sentences) if target is not None}
    encoded = translator.tokenizers.target.encode(list(given.values()))
    targets.update(zip(given, encoded, strict=True))

    # The model's own for the other sentences.
    others = [number for number in range(len(sentences)) if number not in given]
    if others:
        hypotheses = translator.hypotheses([sources[number] for number in others], n_best=1)
        for number, [best] in zip(others, hypotheses, strict=True):
            targets[number] = best.tokens

    return [(source, targets[number]) for number, source in enumerate(sources)]
