"""How much code a small run executes, phase by phase: files, functions, and their Python tokens.

    python scripts/phases.py

A tiny model (one layer each, fp32, packed, on a CPU) is trained for six steps on lines of the demo, validated,
committed, averaged, scored, loaded, and translates a sentence. A function counts once in each phase that calls it, with
all of its tokens but docstring and comments; a method counts for itself, a nested function with the one around it.
"""

import ast
import logging
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from sizes import tokens_by_line

import transformer

PACKAGE = Path(transformer.__file__).parent
DEMO = PACKAGE.parent / "data" / "demo"

# The phases, each by the functions whose calls it consists of.
PHASES = {
    "train_step": {"train_step"},
    "between two steps": {"_record_step", "_read_device", "Monitor.stepped", "Monitor.log"},
    "open_run": {"open_run"},
    "_validate": {"_validate"},
    "save": {"save"},
    "finish": {"finish"},
    "load": {"load"},
    "translate": {"Translator.translate"},
}
WHOLE = "all of it, each function once"

Place = tuple[str, int]  # file, and the first line of a function


class Recorder:
    """Notes the functions of the package that are called in each phase: a profiler for `sys.setprofile`."""

    def __init__(self) -> None:
        self.called: dict[str, set[Place]] = defaultdict(set)
        self._depth = Counter[str]()  # of the calls in progress that make a phase

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """One event of the interpreter."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return

        for phase, names in PHASES.items():
            if code.co_qualname in names:
                self._depth[phase] += 1 if event == "call" else -1
        if event == "call":
            place = (code.co_filename, code.co_firstlineno)
            for phase, depth in self._depth.items():
                if depth > 0:
                    self.called[phase].add(place)
            self.called[WHOLE].add(place)


@cache
def functions(path: str) -> dict[int, tuple[int, int]]:
    """Of each line of a file, the first line of the function or method that it belongs to, and that one's tokens."""
    text = Path(path).read_text(encoding="utf-8")
    tokens_of_line = tokens_by_line(text)
    found = {}
    for node in _outermost(ast.parse(text)):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = range(first, (node.end_lineno or 0) + 1)
        tokens = sum(tokens_of_line[line] for line in lines)
        found.update(dict.fromkeys(lines, (first, tokens)))
    return found


def _outermost(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions of a module and the methods of its classes, without what is nested in them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef | ast.If):
            yield from _outermost(child)


def measure(called: set[Place]) -> tuple[int, int, int]:
    """The files, functions and tokens of what was called; code of a module or a class body is not of a function."""
    found = {(path, *functions(path)[line]) for path, line in called if line in functions(path)}
    return len({path for path, _, _ in found}), len(found), sum(tokens for _, _, tokens in found)


def record(action: Callable[[], None]) -> Recorder:
    """What an action calls in this thread."""
    recorder = Recorder()
    sys.setprofile(recorder)
    try:
        action()
    finally:
        sys.setprofile(None)
    return recorder


def run_small(folder: Path) -> None:
    """A run from text to a translation."""
    data = []
    for name, lines in (("train", 500), ("dev", 20), ("test", 20)):
        for side, language in (("src", "en"), ("tgt", "de")):
            text = (DEMO / f"{name}.{language}").read_text(encoding="utf-8").split("\n")[:lines]
            path = folder / f"{name}.{language}"
            path.write_text("\n".join(text) + "\n", encoding="utf-8")
            data.append(f"data.{'test.test' if name == 'test' else name}.{side}={path}")

    model = ["model.n_layers=1", "model.d_model=32", "model.d_ff=64", "model.n_heads=2", "tokenizer.vocab_size=300"]
    steps = [
        "train.max_steps=6",
        "train.validate_every=3",
        "train.save_every=3",
        "train.log_every=2",
        "train.average=2",
    ]
    way = ["train.tokens_per_step=600", "train.precision=fp32", "train.device=cpu", "train.prefetch=0"]
    overrides = ["experiment=small", f"run_dir={folder / 'run'}", *data, *model, *steps, *way]
    transformer.train(transformer.compose("train", overrides))
    transformer.load(folder / "run").translate(["The actress travelled to Berlin."])


def main() -> None:
    """Print a table."""
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        recorder = record(lambda: run_small(Path(folder)))

    print(f"{'phase':32}{'files':>6}{'functions':>11}{'tokens':>8}")
    for phase in (*PHASES, WHOLE):
        files, count, tokens = measure(recorder.called[phase])
        print(f"{phase:32}{files:6}{count:11}{tokens:8,}")


if __name__ == "__main__":
    main()
