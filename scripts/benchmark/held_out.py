"""Hold pairs out of a training text, and drop those that a test set has, always the same ones.

    python scripts/benchmark/held_out.py CORPORA/americasnlp_es_gn es gn --held 1000
    python scripts/benchmark/held_out.py CORPORA/mafand_en_swa en swa --without dev test

reads train.* in the folder and writes own/train.*, and with --held own/held.*, beside it. Sources are held out in the
order of their SHA-256, each with all of its pairs, until there are as many pairs. So the choice depends on no seed and
on no order of lines, and no held source is trained on. A pair is dropped if one of its sides is a line of the same side
of a set that --without names.
"""

import argparse
from collections import Counter
from hashlib import sha256
from pathlib import Path

Pair = tuple[str, str]


def read(folder: Path, name: str, languages: list[str]) -> list[Pair]:
    sides = [(folder / f"{name}.{language}").read_text(encoding="utf-8").split("\n")[:-1] for language in languages]
    return list(zip(*sides, strict=True))


def write(folder: Path, name: str, languages: list[str], pairs: list[Pair]) -> None:
    for side, language in enumerate(languages):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    print(f"{name}: {len(pairs):,} pairs")


def held_sources(pairs: list[Pair], number: int) -> set[str]:
    """The sources, in the order of their digests, that have at least so many pairs together."""
    counts = Counter(source for source, _ in pairs)
    held: set[str] = set()
    for source in sorted(counts, key=lambda text: sha256(text.encode()).digest()):
        if number <= 0:
            break
        held.add(source)
        number -= counts[source]
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("languages", nargs=2)
    parser.add_argument("--held", type=int, default=0, help="this many pairs, or a few more")
    parser.add_argument("--without", nargs="*", default=[], help="sets whose sides are not to be trained on")
    options = parser.parse_args()
    pairs = read(options.folder, "train", options.languages)
    for name in options.without:
        tested = read(options.folder, name, options.languages)
        sources, targets = {pair[0] for pair in tested}, {pair[1] for pair in tested}
        kept = [pair for pair in pairs if pair[0] not in sources and pair[1] not in targets]
        print(f"{name}: {len(pairs) - len(kept)} pairs of train dropped")
        pairs = kept
    own = options.folder / "own"
    own.mkdir(exist_ok=True)
    held = held_sources(pairs, options.held)
    if options.held:
        write(own, "held", options.languages, [pair for pair in pairs if pair[0] in held])
    write(own, "train", options.languages, [pair for pair in pairs if pair[0] not in held])


if __name__ == "__main__":
    main()
