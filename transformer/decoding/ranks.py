"""Sets of texts, translated by all ranks: each searches whole batches, the same ones that a single rank would make.

    sets of texts -> batches of `BatchedDecoder` -> deal -> each rank translates its own -> every rank has all

So with the same number of threads a batch, a translation does not depend on the number of ranks. CTranslate2 is an
exception: the sentences that it leaves to torch are batched differently. The batches of all sets are dealt at once,
because a small set has only one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from transformer.data.corpus import is_blank
from transformer.decoding.translator import Translator
from transformer.distributed import Wait, World
from transformer.machine import trim_heap

Found = TypeVar("Found")


def build_by_turns(build: Callable[[], Translator], world: World) -> Translator:
    """The translator that each rank builds, rank 0 first: it makes the engine that others find, with all threads."""
    return world.share(build, pack=lambda _: None, unpack=lambda _: build(), wait=Wait.work)


def translate_sets(translator: Translator, sets: Mapping[str, Sequence[str]], world: World) -> dict[str, list[str]]:
    """The translation of each text of each set, on every rank, as `Translator.translate` gives it.

    Every rank must call it, with equal translators. Raises what `translate` does; the other ranks raise PeerError.
    """
    return in_shares(translator, sets, world, lambda texts, lines: translator.translate(texts, lines=lines))


def in_shares(
    translator: Translator,
    sets: Mapping[str, Sequence[str]],
    world: World,
    find: Callable[[list[str], list[int]], list[Found]],
) -> dict[str, list[Found]]:
    """What `find` gives (JSON) for each text of each set, on every rank; it is given a rank's texts and their lines.

    `find` searches as `Translator.translate` does, in batches of the beam's width. A rank that has nothing to do leaves
    its threads to the others.
    """
    # Whose batch is whose.
    batches = [(name, batch) for name, texts in sets.items() for batch in _batches(translator, texts)]
    ranks = deal([work for _, (work, _) in batches], world.size)
    shares: list[dict[str, list[int]]] = [{name: [] for name in sets} for _ in range(world.size)]
    for (name, (_, indices)), rank in zip(batches, ranks, strict=True):
        shares[rank][name] += indices

    # This rank's own, in the order of the texts, so that they are cut into the same batches again.
    found = {}
    with world.threads_of(set(ranks)):
        for name, texts in sets.items():
            trim_heap()  # of what a training, or the set before, has left
            own = sorted(shares[world.rank][name])
            found[name] = find([texts[n] for n in own], [n + 1 for n in own])

    # Everybody's.
    by_index: dict[str, dict[int, Found]] = {name: {} for name in sets}
    for share, of_rank in zip(shares, world.gather(found, wait=Wait.work), strict=True):
        for name, indices in share.items():
            by_index[name] |= zip(sorted(indices), of_rank[name], strict=True)
    return {name: [by_index[name][n] for n in range(len(texts))] for name, texts in sets.items()}


def _batches(translator: Translator, texts: Sequence[str]) -> list[tuple[int, list[int]]]:
    """The indices of the texts that are searched together, behind the work that they are; the blank ones are none."""
    most = translator.decoder.max_positions - 1
    encoded = translator.tokenizers.source.encode(["" if is_blank(text) else text for text in texts])
    lengths = [min(len(ids), most) + 1 for ids in encoded]  # EOS counted
    shown = [n for n, ids in enumerate(encoded) if ids]
    blank = [n for n, ids in enumerate(encoded) if not ids]

    batches = [(0, blank)] if blank else []
    for batch in translator.decoder.cut([lengths[n] for n in shown]):
        indices = [shown[n] for n in batch]
        batches.append((len(indices) * lengths[indices[0]], indices))  # padded positions
    return batches


def deal(works: Sequence[int], n_ranks: int) -> list[int]:
    """The rank of each item, by the work that the items are: the largest first, to whoever has the least to do."""
    loads = [0] * n_ranks
    ranks = [0] * len(works)
    for item in sorted(range(len(works)), key=lambda item: -works[item]):
        rank = loads.index(min(loads))
        loads[rank] += works[item]
        ranks[item] = rank
    return ranks
