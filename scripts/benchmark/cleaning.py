"""Plants noise into a real corpus, and counts what the detectors of `data.filter.doctor` find of it.

    python scripts/benchmark/cleaning.py SOURCE TARGET OTHER --languages en de [--pairs 29000] [--share 0.3]

OTHER is text in a third language, for pairs whose target is in another language than it should be. Two tables in
Markdown: how much of each kind of noise is dropped, and by which detectors; and for each detector, asked alone, its
precision and its recall on the kinds that are its own, and how much it drops of the text without planted noise.
`--write NOISY` writes the pairs with their noise to NOISY.src and NOISY.tgt, to train on.
"""

import argparse
import gzip
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from transformer import registry
from transformer.tools.detectors.cleaning import find_faults

Pair = tuple[str, str]
SHIFTED = 200  # lines of a stretch whose targets come one line too late


def read(path: Path) -> list[str]:
    """The lines of a text file, plain or gzip."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return text.removesuffix("\n").split("\n")


def _untranslated(pair: Pair, _: str, draw: random.Random) -> Pair:
    """The source once more, without one of its words: no exact copy."""
    words = pair[0].split()
    if len(words) > 1:
        del words[draw.randrange(len(words))]
    return pair[0], " ".join(words)


def _twice_encoded(pair: Pair, _: str, __: random.Random) -> Pair:
    return pair[0], pair[1].encode().decode("latin-1")


def _lost(pair: Pair, _: str, draw: random.Random) -> Pair:
    place = draw.randrange(len(pair[1]) + 1)
    return pair[0], f"{pair[1][:place]}\ufffd{pair[1][place + 1 :]}"


# What becomes of a pair, a line of the third language and a source of random numbers.
KINDS: dict[str, Callable[[Pair, str, random.Random], Pair]] = {
    "copied": lambda pair, _, __: (pair[0], pair[0]),
    "untranslated": _untranslated,
    "swapped": lambda pair, _, __: (pair[1], pair[0]),
    "third language": lambda pair, other, __: (pair[0], other),
    "encoded twice": _twice_encoded,
    "lost character": _lost,
    "markup": lambda pair, _, __: (pair[0], f"<p>{pair[1]}</p>"),
    "cut off": lambda pair, _, __: (pair[0], " ".join(pair[1].split()[:1])[:8]),
}
# Beside these, what takes more than one pair: targets of other lines, here and there, and of the line before.
ALL_KINDS = [*KINDS, "other line", "shifted"]


def plant(pairs: Sequence[Pair], others: Sequence[str], *, share: float, seed: int) -> tuple[list[Pair], list[str]]:
    """The pairs with this share of noise, of all kinds alike, and the kind of each line: "" is clean."""
    draw = random.Random(seed)
    noisy = list(pairs)
    kinds = [""] * len(pairs)
    each = int(share * len(pairs) / len(ALL_KINDS))

    # Stretches of shifted lines.
    starts = draw.sample(range(len(pairs) // SHIFTED - 1), max(1, round(each / SHIFTED)))
    for start in (SHIFTED * number for number in starts):
        for line in range(start + 1, min(start + SHIFTED, len(pairs))):
            noisy[line] = (pairs[line][0], pairs[line - 1][1])
            kinds[line] = "shifted"

    # Single lines.
    free = [line for line, kind in enumerate(kinds) if not kind]
    draw.shuffle(free)
    for number, kind in enumerate([*KINDS, "other line"]):
        lines = free[number * each : (number + 1) * each]
        for place, line in enumerate(lines):
            if kind == "other line":
                noisy[line] = (pairs[line][0], pairs[lines[place - 1]][1])
            else:
                noisy[line] = KINDS[kind](pairs[line], draw.choice(others), draw)
            kinds[line] = kind if noisy[line] != pairs[line] else ""
    return noisy, kinds


# The kinds of noise that each detector is for.
OWN = {
    "copies": ["copied"],
    "encoding": ["encoded twice", "lost character"],
    "markup": ["markup"],
    "languages": ["copied", "untranslated", "swapped", "third language"],
    "lengths": ["cut off"],
    "alignment": ["other line", "shifted"],
}


def report(pairs: Sequence[Pair], noisy: Sequence[Pair], kinds: Sequence[str], languages: tuple[str, str]) -> None:
    """Print both tables."""
    began = time.process_time()
    together = list(find_faults(lambda: noisy, list(registry.OWN["screen"]), languages))
    seconds = time.process_time() - began
    print(f"All detectors: {seconds:.1f} CPU seconds, {len(noisy) / seconds:,.0f} pairs a second.\n")
    print("| noise | pairs | dropped | by |\n| --- | ---: | ---: | --- |")
    for kind in ["", *ALL_KINDS]:
        found = [fault for fault, own in zip(together, kinds, strict=True) if own == kind]
        counts = Counter(fault for fault in found if fault is not None)
        by = ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
        share = counts.total() / max(1, len(found))
        print(f"| {kind or 'none'} | {len(found):,} | {100 * share:.2f} % | {by} |")

    print("\n| detector alone | precision | recall on its kinds | dropped of the text as it was |")
    print("| --- | ---: | ---: | ---: |")
    for detector, own_kinds in OWN.items():
        is_found = [fault is not None for fault in find_faults(lambda: noisy, [detector], languages)]
        noise = sum(one and kind != "" for one, kind in zip(is_found, kinds, strict=True))
        own = [one for one, kind in zip(is_found, kinds, strict=True) if kind in own_kinds]
        precision = 100 * noise / max(1, sum(is_found))
        recall = 100 * sum(own) / max(1, len(own))
        as_it_was = sum(fault is not None for fault in find_faults(lambda: pairs, [detector], languages))
        dropped = f"{100 * as_it_was / len(pairs):.3f} % ({as_it_was:,})"
        print(f"| `{detector}` | {precision:.1f} % | {recall:.1f} % | {dropped} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--languages", nargs=2, required=True)
    parser.add_argument("--pairs", type=int, default=29_000)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--write", help="where the noisy pairs go: the files WRITE.src and WRITE.tgt")
    options = parser.parse_args()

    pairs = list(zip(read(options.source), read(options.target), strict=True))[: options.pairs]
    noisy, kinds = plant(pairs, read(options.other), share=options.share, seed=1)
    if options.write:
        for side, suffix in enumerate((".src", ".tgt")):
            text = "".join(f"{pair[side]}\n" for pair in noisy)
            Path(options.write + suffix).write_text(text, encoding="utf-8")
    source, target = options.languages
    report(pairs, noisy, kinds, (source, target))


if __name__ == "__main__":
    main()
