"""Table 1 of the paper: layers counted by `complexity`, and timed by `layer_times`; nothing is trained."""

import csv
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from transformer.compute import avoid_cudnn_attention, resolve_device
from transformer.config.primitives import to_json
from transformer.files import write_file, write_json
from transformer.machine import resolve_threads
from transformer.tools.outputs import make_output
from transformer.tools.paper.complexity import Complexity, complexity_rows, format_complexity
from transformer.tools.paper.layer_times import LayerTime, format_times, time_layers
from transformer.tools.paper.published import WIDTH
from transformer.tools.plots import plot_times
from transformer.tools.tables.job import TableJob
from transformer.tools.tables.rows import output_of

HEADS = 8

# Sizes of Table 1 where layers are counted, under the paper's names.
SENTENCE = 64  # n: a long sentence
KERNEL = 3  # k
NEIGHBOURHOOD = 16  # r


@dataclass(frozen=True)
class LayerTable:
    """Table 1: layers of `d` over `n` positions, with kernels of `k` and neighbourhoods of `r`, counted and timed."""

    n: int
    d: int
    k: int
    r: int
    counted: list[Complexity]
    timed: list[LayerTime]
    notes: list[str]


def make_layer_table(job: TableJob) -> LayerTable:
    """Table 1 on this machine; nothing is trained. Raises StorageError where the output cannot be made."""
    make_output(output_of(job))  # before any time is spent
    device = resolve_device(job.train.device)
    avoid_cudnn_attention(device)
    threads = resolve_threads(job.train.threads)
    torch.set_num_threads(threads)

    width = job.width or WIDTH
    return LayerTable(
        n=SENTENCE,
        d=width,
        k=KERNEL,
        r=NEIGHBOURHOOD,
        counted=complexity_rows(n=SENTENCE, d=width, k=KERNEL, r=NEIGHBOURHOOD),
        timed=time_layers(d_model=width, n_heads=HEADS, k=KERNEL, r=NEIGHBOURHOOD, device=device),
        notes=[f"{device.type}, {threads} threads, torch {torch.__version__}, fp32; medians of interleaved runs."],
    )


def write_layer_table(output: Path, table: LayerTable) -> None:
    """Write table.json, .md, .csv (of what was timed) and, with matplotlib, .svg. Raises StorageError."""
    write_json(output / "table.json", to_json(table))
    write_file(output / "table.md", format_layers(table).encode())

    # table.csv
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(LayerTime)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table.timed)
    write_file(output / "table.csv", text.getvalue().encode())

    # table.svg
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in table.timed:
        lines.setdefault(row.layer, []).append((row.n, row.forward_backward))
    plot = plot_times(lines, title=f"One layer of width {table.d} over {table.timed[0].tokens:,} tokens")
    if plot is not None:
        write_file(output / "table.svg", plot)


def format_layers(table: LayerTable) -> str:
    """Table 1 for people: what is counted, then what is timed."""
    notes = "".join(f"- {note}\n" for note in table.notes)
    counted = format_complexity(table.counted, n=table.n, d=table.d, k=table.k, r=table.r)
    return f"# Table 1 of the paper\n\n{notes}\n{counted}\n{format_times(table.timed)}"
