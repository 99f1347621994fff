"""The files that `transformer attention` writes.

    of a sentence   attention.html, weights.npz or weights.json, and figures/ROLE-LAYER-words.png, -map.png, as SVG too
    of many         heads.json, heads.md, heads.csv, heads.png and heads.svg

What they hold is made elsewhere: the page by `explorer` and `tools.page`, the figures by `figures`.
"""

import io
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from transformer.config.primitives import to_json
from transformer.errors import InputError, StorageError
from transformer.files import write_file, write_json
from transformer.run_dir import RunDir
from transformer.tools.attention.explorer import explorer
from transformer.tools.attention.figures import Panel, Picture, draw_heads, draw_lines, draw_maps
from transformer.tools.attention.heads import HeadReport, format_heads_csv, format_heads_markdown
from transformer.tools.attention.job import AttentionJob, WeightsFormat
from transformer.tools.attention.sentence import Inspected
from transformer.tools.inspection import Role
from transformer.tools.outputs import make_output
from transformer.tools.page import format_page
from transformer.tools.paper.alignment_error import SPACE
from transformer.tools.plots import distinct_colors

log = logging.getLogger(__name__)

MOST_DRAWN = 128  # pieces of a side: figures of longer sentences could not be read, and take minutes
DECIMALS = 6  # of a weight in JSON
TITLES = {
    Role.encoder_self: "Encoder self-attention",
    Role.decoder_self: "Decoder self-attention",
    Role.cross: "Cross-attention",
}


def write_report(output: Path, report: HeadReport) -> None:
    """Write what each head does: heads.json, .md and .csv, and with matplotlib .png and .svg. Raises StorageError."""
    write_json(output / "heads.json", to_json(report))
    write_file(output / "heads.md", format_heads_markdown(report).encode())
    write_file(output / "heads.csv", format_heads_csv(report).encode())

    picture = draw_heads(report.heads, title=f"What the heads of {report.run_dir} do")
    if picture is not None:
        write_file(output / "heads.png", picture.png)
        write_file(output / "heads.svg", picture.svg)


def write_page(output: Path, run: RunDir, inspected: Inspected) -> Path:
    """Write the page to explore the weights, and return its path. Raises StorageError."""
    component = explorer(inspected, heading=f"{inspected.text} \u2192 {inspected.translation}")
    path = output / "attention.html"
    write_file(path, format_page(f"Attention in {run.path.name}", [component]).encode())
    return path


# ---- weights --------------------------------------------------------------------------------------------------------


def write_weights(output: Path, inspected: Inspected, kind: WeightsFormat) -> Path:
    """Write the weights and the pieces, as `format_npz` or `format_json` does. Raises StorageError."""
    path = output / f"weights.{kind.value}"
    match kind:
        case WeightsFormat.npz:
            write_file(path, format_npz(inspected))
        case WeightsFormat.json:
            write_file(path, format_json(inspected))
    return path


def format_npz(inspected: Inspected) -> bytes:
    """NumPy's format: float32 arrays named by role, (layers, heads, queries, keys), and the pieces as texts.

    `encoder_self` (L, H, S, S), `decoder_self` (L, H, T, T), `cross` (L, H, T, S), with L of the encoder or of the
    decoder; `source` (S,), `reads` and `predicts` (T,). `numpy.load` reads it.
    """
    content = io.BytesIO()
    np.savez_compressed(
        content,
        encoder_self=inspected.maps.encoder_self.float().numpy(),
        decoder_self=inspected.maps.decoder_self.float().numpy(),
        cross=inspected.maps.cross.float().numpy(),
        source=np.array(inspected.source),
        reads=np.array(inspected.reads),
        predicts=np.array(inspected.predicts),
    )
    return content.getvalue()


def format_json(inspected: Inspected) -> bytes:
    """What `format_npz` holds, as one object of nested lists, with weights rounded to six decimals."""
    document: dict[str, object] = {
        "source": inspected.source,
        "reads": inspected.reads,
        "predicts": inspected.predicts,
    }
    for role in Role:
        weights = inspected.maps.of(role).double().numpy()
        document[role.value] = weights.round(DECIMALS).tolist()
    return (json.dumps(document, allow_nan=False) + "\n").encode()


# ---- figures --------------------------------------------------------------------------------------------------------


def check_figures(job: AttentionJob, inspected: Inspected) -> None:
    """Raise InputError for a layer, a head or a word that does not exist."""
    _check_numbers("layers", job.layers, inspected.n_layers)
    _check_numbers("heads", job.heads, inspected.n_heads)
    if job.word is None:
        return

    is_known = any(_rows_of_word(inspected.words(role).queries, job.word) for role in Role)
    if not is_known:
        raise InputError(f"word={job.word}: not a word of the sentence or of its translation: {inspected.translation}")


def _check_numbers(key: str, numbers: Sequence[int] | None, count: int) -> None:
    beyond = [str(number) for number in numbers or [] if number > count]
    if beyond:
        raise InputError(f"{key}={','.join(beyond)}: the model has {count} {key}")


def write_figures(folder: Path, inspected: Inspected, job: AttentionJob) -> list[Path]:
    """Write two figures for each layer of each role, in two formats; none without matplotlib. Raises StorageError.

    Under `job.word` there is one figure for each layer: what that word attends to, with all heads in one panel.
    """
    n_pieces = max(len(inspected.source), len(inspected.reads))
    if n_pieces > MOST_DRAWN:
        log.warning(
            "no figures: the sentence has %d pieces, and a figure has room for %d; the page shows all of them",
            n_pieces,
            MOST_DRAWN,
        )
        return []

    _remove_figures(folder)
    written = []
    for name, picture in _figures(inspected, job):
        if picture is None:
            break  # no matplotlib
        make_output(folder)
        for suffix, content in (("png", picture.png), ("svg", picture.svg)):
            path = folder / f"{name}.{suffix}"
            write_file(path, content)
            written.append(path)
    return written


def _remove_figures(folder: Path) -> None:
    """Remove the figures of an earlier sentence: their names do not tell them from this one's. Raises StorageError."""
    for role in Role:
        for kind in ("words", "map"):
            for suffix in ("png", "svg"):
                for path in folder.glob(f"{role.value}-*-{kind}.{suffix}"):
                    _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be removed: {error.strerror}; choose another output") from error


def _figures(inspected: Inspected, job: AttentionJob) -> Iterator[tuple[str, Picture | None]]:
    """The figures with their names, one after the other; None without matplotlib."""
    for role in Role:
        words = inspected.words(role)
        for layer in _numbers(job.layers, len(inspected.maps.of(role))):
            panels = _panels(inspected, job, role, layer)
            if not panels:
                continue  # the word is not among those of this role

            title = f"{TITLES[role]}, layer {layer}"
            yield f"{role.value}-{layer}-words", draw_lines(panels, words, title=title)
            if job.word is None:
                yield f"{role.value}-{layer}-map", draw_maps(panels, words, title=title)


def _panels(inspected: Inspected, job: AttentionJob, role: Role, layer: int) -> list[Panel]:
    """A panel for each head; or, under `job.word`, one of all heads with the rows of that word alone."""
    weights = inspected.maps.of(role)[layer - 1].double().numpy()  # (H, queries, keys)
    heads = _numbers(job.heads, inspected.n_heads)
    colors = distinct_colors(inspected.n_heads)
    if job.word is None:
        return [Panel(f"head {head}", [(colors[head - 1], weights[head - 1])]) for head in heads]

    rows = _rows_of_word(inspected.words(role).queries, job.word)
    if not rows:
        return []
    weights_of_word = np.zeros_like(weights)
    weights_of_word[:, rows] = weights[:, rows]
    title = f"\u201c{job.word}\u201d, heads {', '.join(map(str, heads))}"
    return [Panel(title, [(colors[head - 1], weights_of_word[head - 1]) for head in heads])]


def _numbers(chosen: list[int] | None, count: int) -> list[int]:
    """The chosen layers or heads, counted from 1, as far as there are so many; all of them where none is chosen."""
    numbers = range(1, count + 1)
    return [number for number in numbers if chosen is None or number in chosen]


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
