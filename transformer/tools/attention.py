"""`transformer attention`: who attends to whom in a trained model (the paper's Figures 3 to 5).

Of one sentence: a page to explore, figures, and the weights as a file. Of many: what each head does, see `heads`.
"""

import errno
import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from transformer.config.jobs import AttentionJob
from transformer.config.primitives import to_json
from transformer.config.settings import WeightsFormat
from transformer.data.corpus import Pair, read_lines, read_pairs
from transformer.decoding.loading import load_translator
from transformer.decoding.translator import Translator, is_blank
from transformer.errors import InputError, StorageError
from transformer.evaluation.sets import read_set
from transformer.files import make_directories, write_file, write_json
from transformer.machine import resolve_threads
from transformer.model.inspection import AttentionMaps, Role, attention_maps
from transformer.run_dir import DEV, RunDir
from transformer.tools.attention_figures import Panel, Picture, Words, draw_heads, draw_lines, draw_maps
from transformer.tools.explorer import explorer
from transformer.tools.heads import (
    SPACE,
    AlignmentMeter,
    Gold,
    HeadMeter,
    HeadReport,
    format_heads_csv,
    format_heads_markdown,
    read_alignments,
    word_of_each,
)
from transformer.tools.page import format_page
from transformer.tools.plots import head_colors
from transformer.vocabulary import BOS, EOS

log = logging.getLogger(__name__)

MOST_WEIGHTS = 1 << 24  # of one sentence pair: a page of at most 16 MB or so
MOST_DRAWN = 128  # pieces of a side: figures of longer sentences could not be read, and take minutes
DECIMALS = 6  # of a weight in JSON
TITLES = {
    Role.encoder_self: "Encoder self-attention",
    Role.decoder_self: "Decoder self-attention",
    Role.cross: "Cross-attention",
}

Sentence = tuple[str, str | None]  # a source and, where the model is to read it, its translation


@dataclass(frozen=True)
class Inspected:
    """A sentence pair as the model reads it, as pieces, and its weights."""

    text: str
    source: list[str]  # with EOS
    reads: list[str]  # what the decoder reads: BOS and the pieces
    predicts: list[str]  # what it predicts at the same positions: the pieces and EOS
    translation: str
    is_forced: bool
    maps: AttentionMaps

    @property
    def n_layers(self) -> int:
        """L."""
        return self.maps.cross.shape[0]

    @property
    def n_heads(self) -> int:
        """H."""
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


def attention(job: AttentionJob) -> str:
    """Write the page, the weights and the figures of a sentence, and say so; or what heads do, and return that table.

    Raises InputError where there is no such run, sentence, layer or head; CheckpointError where the run is damaged;
    StorageError where `output` cannot be written.
    """
    run = RunDir(Path(job.run_dir))
    torch.set_num_threads(resolve_threads(job.threads))
    translator = load_translator(
        run.path,
        checkpoint=job.checkpoint,
        search=job.search,
        device=job.device,
        precision=job.precision,
    )
    output = Path(job.output)
    _make_output(output)  # before much time is spent

    if job.sentences is not None:
        report = describe_heads(job, run, translator)
        _write_report(output, report)
        return format_heads_markdown(report)

    inspected = inspect(translator, _sentence(job, run), most_weights=MOST_WEIGHTS)
    _check_figures(job, inspected)

    written = [
        _write_page(output, run, inspected),
        _write_weights(output, inspected, job.format),
    ]
    figures = _write_figures(output / "figures", inspected, job)
    how = "given" if inspected.is_forced else "the model's own"
    lines = [
        f"source: {inspected.text}",
        f"translation ({how}): {inspected.translation}",
        *(f"written: {path}" for path in written),
        *([f"written: {figures[0].parent}, {len(figures)} figures"] if figures else []),
    ]
    return "".join(f"{line}\n" for line in lines)


def _make_output(output: Path) -> None:
    """Make the output directory. Raises StorageError."""
    try:
        make_directories(output)
        if not output.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise StorageError(f"output={output}: cannot be made: {error.strerror}: choose another directory") from error


# ---- sentences ------------------------------------------------------------------------------------------------------


def _sentence(job: AttentionJob, run: RunDir) -> Sentence:
    """The sentence that the job names. Raises InputError where there is none."""
    if job.text is not None:
        return job.text, job.target

    found = sentences_of(job, run, first=job.line - 1, count=1)
    if not found:
        raise InputError(f"line={job.line}: {_origin(job, run)} has fewer lines")
    return found[0]


def sentences_of(job: AttentionJob, run: RunDir, *, first: int, count: int) -> list[Sentence]:
    """At most `count` sentences of the job's file or set, from place `first` on, counted from 0.

    Raises InputError where the text cannot be read.
    """
    part = slice(first, first + count)
    if job.file is not None and job.references is not None:
        return list(islice(read_pairs(Path(job.file), Path(job.references)), part.start, part.stop))
    if job.file is not None:
        return [(line, None) for line in islice(read_lines(Path(job.file)), part.start, part.stop)]

    pairs = _read_set(run, job.set or DEV)[part]
    return [(source, reference if job.forced else None) for source, reference in pairs]


def _read_set(run: RunDir, name: str) -> list[Pair]:
    names = run.set_names()
    if name not in names:
        kept = ", ".join(names) or "none"
        raise InputError(f"set={name}: {run.path} keeps no set of this name, but {kept}: or use text=... or file=...")
    return read_set(run, name)


def _origin(job: AttentionJob, run: RunDir) -> str:
    return job.file if job.file is not None else f"set {job.set or DEV} of {run.path}"


def inspect(translator: Translator, sentence: Sentence, *, most_weights: int) -> Inspected:
    """Translate the sentence, unless it comes with its translation, and compute every weight.

    Raises InputError where it has no visible text, or is too long for the model or for a page.
    """
    text, given = sentence
    tokenizer, config = translator.tokenizer, translator.model.config
    _check_pieces(translator, text, "the sentence")
    if given is not None:
        _check_pieces(translator, given, "the translation")
    [(source, target)] = _read(translator, [sentence])

    positions = (len(source) + 1) ** 2 + (len(target) + 1) ** 2 + (len(source) + 1) * (len(target) + 1)
    count = config.n_layers * config.n_heads * positions
    if count > most_weights:
        raise InputError(
            f"{len(source)} source and {len(target)} target pieces: {count:,} weights, and a page holds "
            f"{most_weights:,}: choose a shorter sentence"
        )

    return Inspected(
        text=text,
        source=[tokenizer.piece(id) for id in [*source, EOS]],
        reads=[tokenizer.piece(id) for id in [BOS, *target]],
        predicts=[tokenizer.piece(id) for id in [*target, EOS]],
        translation=tokenizer.decode([target])[0] if given is None else given,
        is_forced=given is not None,
        maps=attention_maps(
            translator.model,
            source,
            target,
            device=translator.device,
            precision=translator.precision,
        ),
    )


def _check_pieces(translator: Translator, text: str, which: str) -> None:
    """Raise InputError where a text has no pieces, or more than the model has positions for."""
    [pieces] = translator.tokenizer.encode([text])
    max_pieces = translator.model.config.max_positions - 1
    if not pieces or is_blank(text):
        raise InputError(f"{which} has no visible text: choose another")
    if len(pieces) > max_pieces:
        raise InputError(f"{which} has {len(pieces)} pieces, and model.max_positions has room for {max_pieces}: cut it")


def _read(translator: Translator, sentences: Sequence[Sentence]) -> list[tuple[list[int], list[int]]]:
    """The pieces of each source, and those of its translation: the given ones, or the model's own."""
    sources = translator.tokenizer.encode([source for source, _ in sentences])
    given = {n: target for n, (_, target) in enumerate(sentences) if target is not None}
    targets = dict(zip(given, translator.tokenizer.encode(list(given.values())), strict=True))

    own = [n for n in range(len(sentences)) if n not in given]
    hypotheses = translator.hypotheses([sources[n] for n in own], n_best=1, check=lambda: None) if own else []
    targets |= {n: best.tokens for n, [best] in zip(own, hypotheses, strict=True)}
    return [(source, targets[n]) for n, source in enumerate(sources)]


# ---- what heads do --------------------------------------------------------------------------------------------------


def describe_heads(job: AttentionJob, run: RunDir, translator: Translator) -> HeadReport:
    """What each head does in the first `job.sentences` sentences, and how well layers align words.

    Raises InputError where there are no such sentences, one is empty or too long, or alignments do not fit.
    """
    sentences = sentences_of(job, run, first=0, count=job.sentences or 1)
    if not sentences:
        raise InputError(f"{_origin(job, run)} has no sentence")
    for number, (source, target) in enumerate(sentences, 1):
        _check_pieces(translator, source, f"sentence {number}")
        if target is not None:
            _check_pieces(translator, target, f"the reference of sentence {number}")
    gold = None if job.alignments is None else read_alignments(Path(job.alignments), len(sentences))

    config = translator.model.config
    heads, alignments = HeadMeter(), AlignmentMeter(config.n_layers, config.n_heads)
    for n, (source_ids, target_ids) in enumerate(_read(translator, sentences)):
        maps = attention_maps(
            translator.model,
            source_ids,
            target_ids,
            device=translator.device,
            precision=translator.precision,
        )
        heads.add(maps)
        if gold is not None:
            source_words, target_words = (
                word_of_each([translator.tokenizer.piece(id) for id in ids]) for ids in (source_ids, target_ids)
            )
            _check_links(gold[n], source_words, target_words, place=f"{job.alignments}:{n + 1}")
            alignments.add(maps, gold[n], source=source_words, target=target_words)

    return HeadReport(
        run_dir=str(run.path),
        sentences=len(sentences),
        is_forced=sentences[0][1] is not None,
        heads=heads.heads(),
        alignments=None if gold is None else alignments.layers(),
    )


def _check_links(gold: Gold, source: Sequence[int], target: Sequence[int], *, place: str) -> None:
    """Raise InputError for a link to a word that the sentence does not have."""
    counts = source[-1] + 1, target[-1] + 1
    for link in gold.possible:
        if link[0] >= counts[0] or link[1] >= counts[1]:
            raise InputError(
                f"{place}: the link {link[0]}-{link[1]} is beyond the {counts[0]} and {counts[1]} words of the "
                "sentence: are these the alignments of this set, counted from 0?"
            )


def _write_report(output: Path, report: HeadReport) -> None:
    """heads.json, .md and .csv, and a picture where there is matplotlib. Raises StorageError."""
    write_json(output / "heads.json", to_json(report))
    write_file(output / "heads.md", format_heads_markdown(report).encode())
    write_file(output / "heads.csv", format_heads_csv(report).encode())
    picture = draw_heads(report.heads, title=f"What the heads of {report.run_dir} do")
    if picture is not None:
        write_file(output / "heads.png", picture.png)
        write_file(output / "heads.svg", picture.svg)


# ---- files ----------------------------------------------------------------------------------------------------------


def _write_page(output: Path, run: RunDir, inspected: Inspected) -> Path:
    """The page to explore the weights. Raises StorageError."""
    component = explorer(
        inspected.maps,
        heading=f"{inspected.text} \u2192 {inspected.translation}",
        source=inspected.source,
        reads=inspected.reads,
        predicts=inspected.predicts,
        colors=head_colors(inspected.n_heads),
    )
    path = output / "attention.html"
    write_file(path, format_page(f"Attention in {run.path.name}", [component]).encode())
    return path


def _write_figures(folder: Path, inspected: Inspected, job: AttentionJob) -> list[Path]:
    """Two figures for each layer of each role, in two formats; none without matplotlib. Raises StorageError.

    Under `job.word`, only what that word looks at is drawn, with all heads in one panel.
    """
    longest = max(len(inspected.source), len(inspected.reads))
    if longest > MOST_DRAWN:
        log.warning("no figures: %d pieces, and they have room for %d; the page shows them all", longest, MOST_DRAWN)
        return []

    _remove_figures(folder)
    written = []
    for name, picture in _figures(inspected, job):
        if picture is None:
            break  # no matplotlib
        _make_output(folder)
        for suffix, content in (("png", picture.png), ("svg", picture.svg)):
            written.append(folder / f"{name}.{suffix}")
            write_file(written[-1], content)
    return written


def _remove_figures(folder: Path) -> None:
    """Remove the figures of an earlier sentence, which nothing would tell from this one's. Raises StorageError."""
    old = [path for role in Role for kind in ("words", "map") for path in folder.glob(f"{role.value}-*-{kind}.*")]
    for path in old:
        if path.suffix in (".png", ".svg"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"{path}: cannot be removed: {error.strerror}; choose another output") from error


def _figures(inspected: Inspected, job: AttentionJob) -> Iterator[tuple[str, Picture | None]]:
    """The figures with their names, one after the other; None without matplotlib."""
    for role in Role:
        words = inspected.words(role)
        for layer in _numbers(job.layers, inspected.n_layers):
            panels = _panels(inspected, job, role, layer)
            if not panels:
                continue  # the word is not among those of this role
            title = f"{TITLES[role]}, layer {layer}"
            yield f"{role.value}-{layer}-words", draw_lines(panels, words, title=title)
            if job.word is None:
                yield f"{role.value}-{layer}-map", draw_maps(panels, words, title=title)


def _check_figures(job: AttentionJob, inspected: Inspected) -> None:
    """Raise InputError for a layer, a head or a word that there is not."""
    for name, numbers, count in (("layers", job.layers, inspected.n_layers), ("heads", job.heads, inspected.n_heads)):
        beyond = [number for number in numbers or [] if number > count]
        if beyond:
            raise InputError(f"{name}={','.join(map(str, beyond))}: the model has {count}")
    if job.word is not None and not any(_rows_of_word(inspected.words(role).queries, job.word) for role in Role):
        raise InputError(f"word={job.word}: not a word of the sentence or of its translation: {inspected.translation}")


def _numbers(chosen: list[int] | None, count: int) -> list[int]:
    """The chosen numbers, or all of them, counted from 1."""
    return list(range(1, count + 1)) if chosen is None else sorted({*chosen})


def _rows_of_word(pieces: Sequence[str], word: str) -> list[int]:
    """The places of the pieces that spell `word`, wherever it occurs."""
    plain = [piece.replace(SPACE, "") for piece in pieces]
    rows: list[int] = []
    for start in range(len(plain)):
        for end in range(start + 1, len(plain) + 1):
            spelt = "".join(plain[start:end])
            if spelt == word:
                rows += range(start, end)
            if len(spelt) >= len(word):
                break
    return rows


def _panels(inspected: Inspected, job: AttentionJob, role: Role, layer: int) -> list[Panel]:
    """A panel for each head; or one of all heads, with the rows of the word alone."""
    weights = inspected.maps.of(role)[layer - 1].double().numpy()  # (H, queries, keys)
    heads = _numbers(job.heads, inspected.n_heads)
    colors = head_colors(inspected.n_heads)
    if job.word is None:
        return [Panel(f"head {head}", [(colors[head - 1], weights[head - 1])]) for head in heads]

    rows = _rows_of_word(inspected.words(role).queries, job.word)
    if not rows:
        return []
    only = np.zeros_like(weights)
    only[:, rows] = weights[:, rows]
    title = f"\u201c{job.word}\u201d, heads {', '.join(map(str, heads))}"
    return [Panel(title, [(colors[head - 1], only[head - 1]) for head in heads])]


def _write_weights(output: Path, inspected: Inspected, kind: WeightsFormat) -> Path:
    """The weights and the pieces: see `format_npz` and `format_json`. Raises StorageError."""
    path = output / f"weights.{kind.value}"
    match kind:
        case WeightsFormat.npz:
            write_file(path, format_npz(inspected))
        case WeightsFormat.json:
            write_file(path, format_json(inspected))
    return path


def format_npz(inspected: Inspected) -> bytes:
    """NumPy's format: float32 arrays named by role, (layers, heads, queries, keys), and the pieces as texts.

    `encoder_self` (L, H, S, S), `decoder_self` (L, H, T, T), `cross` (L, H, T, S); `source` (S,), `reads` and
    `predicts` (T,). `numpy.load` reads it.
    """
    arrays = {role.value: inspected.maps.of(role).float().numpy() for role in Role}
    pieces = {name: np.array(getattr(inspected, name)) for name in ("source", "reads", "predicts")}
    content = io.BytesIO()
    np.savez_compressed(content, **arrays, **pieces)  # type: ignore[arg-type]  # taken for a keyword of numpy's own
    return content.getvalue()


def format_json(inspected: Inspected) -> bytes:
    """The same as one object of nested lists, weights rounded to six decimals."""
    weights = {role.value: inspected.maps.of(role).double().numpy().round(DECIMALS).tolist() for role in Role}
    pieces = {"source": inspected.source, "reads": inspected.reads, "predicts": inspected.predicts}
    return (json.dumps({**pieces, **weights}, allow_nan=False) + "\n").encode()
