"""Records the terminal of a command, from its start to its end, as an SVG that moves.

    pip install pyte
    python scripts/recording.py film.svg -- transformer train

The command runs in a terminal of its own. What it shows is scaled in time to fit the film, which runs once and stays at
the end; the last picture is shown before it, too. Nothing in the film is made up, and nothing but time is changed.
Where a viewer does not move an SVG, or its user asks for less motion, the last picture is what it shows.
"""

import argparse
import fcntl
import os
import pty
import shlex
import struct
import sys
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

LINE, CHARACTER, MARGIN = 19, 8.43, 14  # pixels
STYLE = "font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
RESULT = 4  # seconds that the last picture, with the result, is shown before the film begins
GROUND, INK = "#0d1117", "#e6edf3"
COLORS = {"$ ": "#7ee787", "error ": "#ff9b93"}  # of rows that begin so

Picture = tuple[str, ...]  # the rows of a terminal


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("command", nargs="+")
    parser.add_argument("--columns", type=int, default=110)
    parser.add_argument("--rows", type=int, default=26)
    parser.add_argument("--seconds", type=float, default=16, help="length of the film (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=48, help="at most so many (default: %(default)s)")
    args = parser.parse_args(arguments)

    moments = list(record(args.command, args.columns, args.rows))
    took = moments[-1][0]
    film = sample(moments, args.pictures)
    shown = [(at / took * args.seconds, picture) for at, picture in film]
    args.output.write_text("\n".join(draw(shown, args.columns, args.rows, args.seconds)) + "\n", encoding="utf-8")
    print(f"{took:.0f} s in {len(film)} pictures and {args.output.stat().st_size:,} bytes", file=sys.stderr)


def record(command: list[str], columns: int, rows: int) -> Iterator[tuple[float, Picture]]:
    """What the terminal shows, whenever it changes, with the seconds since the start."""
    import pyte  # which only a recording needs

    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {shlex.join(command)}\r\n".encode())
    yield 0.0, tuple(screen.display)

    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"COLUMNS": str(columns), "LINES": str(rows), "TERM": "xterm"}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    began = time.monotonic()
    while True:
        try:
            stream.feed(os.read(terminal, 1 << 16))
        except OSError:  # Linux's word for the end of a terminal
            break
        yield time.monotonic() - began, tuple(screen.display)
    _, status = os.waitpid(process, 0)
    if status:
        sys.exit(f"error: {shlex.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    yield time.monotonic() - began, tuple(screen.display)


def sample(moments: list[tuple[float, Picture]], pictures: int) -> list[tuple[float, Picture]]:
    """The last of the moments in each of so many stretches of equal length, without what shows nothing new."""
    took = moments[-1][0]
    last_of = {min(int(at / took * pictures), pictures - 1): (at, picture) for at, picture in moments}
    film: list[tuple[float, Picture]] = []
    for at, picture in (moments[0], *last_of.values()):
        if not film or picture != film[-1][1]:
            film.append((at, picture))
    return film


def draw(film: list[tuple[float, Picture]], columns: int, rows: int, seconds: float) -> Iterator[str]:
    """The SVG: all pictures one below the other, of which a window shows one at a time."""
    height = rows * LINE
    width, total = columns * CHARACTER + 2 * MARGIN, height + 2 * MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {total}" width="{width:.0f}">'
    yield "<style>"
    yield f"text {{ {STYLE}; fill: {INK}; white-space: pre }}"
    yield f"#film {{ transform: translateY({-(len(film) - 1) * height}px) }}"
    moves = f"#film {{ animation: film {seconds:g}s step-end {RESULT:g}s }}"
    yield f"@media (prefers-reduced-motion: no-preference) {{ {moves} }}"
    yield "@keyframes film {"
    for number, (at, _) in enumerate(film):
        yield f"{100 * at / seconds:.2f}% {{ transform: translateY({-number * height}px) }}"
    yield "}"
    yield "</style>"
    yield f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>'
    yield f'<svg x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN:.0f}" height="{height}">'

    # Each text once, as most of a picture is in the one before, too.
    texts = dict.fromkeys(row.rstrip() for _, picture in film for row in picture)
    names = {text: f"r{number}" for number, text in enumerate(texts)}
    yield "<defs>"
    for row, name in names.items():
        color = "".join(f' style="fill: {color}"' for begin, color in COLORS.items() if row.startswith(begin))
        yield f'<text id="{name}"{color} xml:space="preserve">{escape(row, quote=False)}</text>'
    yield "</defs>"

    yield '<g id="film">'
    for number, (_, picture) in enumerate(film):
        uses = (
            f'<use href="#{names[row.rstrip()]}" y="{number * height + (line + 1) * LINE - 5}"/>'
            for line, row in enumerate(picture)
            if row.strip()
        )
        yield "".join(uses)
    yield "</g>"
    yield "</svg>"
    yield "</svg>"


if __name__ == "__main__":
    main(sys.argv[1:])
