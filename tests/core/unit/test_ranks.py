"""Texts translated by several ranks: who does what, and that it is what one rank does."""

import json
import random
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.ranks import ranks
from support.translations import sentences, write_run
from transformer import distributed
from transformer.config.settings import Device, Precision, SearchOverride
from transformer.decoding.batched import _cut
from transformer.decoding.loading import load_translator
from transformer.decoding.ranks import deal, translate_sets
from transformer.decoding.translator import Translator
from transformer.distributed import World, join_world
from transformer.errors import InputError, PeerError
from transformer.layout import Padded
from transformer.model.transformer import Transformer

ALONE = World(0, 1, {})
SETS = {
    "news": [*sentences(61), "", "\u200b", "a dog", "the tree " * 40],  # two blank lines, and one that is too long
    "talks": sentences(9),
    "none": [],
    "blank": [" "],
}


@pytest.fixture(scope="module")
def run_dir(spm: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", spm, seed=1)


def translator_of(run_dir: Path, **search: Any) -> Translator:
    torch.set_num_threads(1)
    override = SearchOverride(beam_size=2, batch_tokens=300, **search)
    return load_translator(run_dir, checkpoint="auto", search=override, device=Device.cpu, precision=Precision.fp32)


@pytest.mark.parametrize(
    ("works", "n_ranks", "expected"),
    [
        ([5, 4, 3, 3, 3], 2, [0, 1, 1, 0, 1]),
        ([1, 1, 9, 1, 1, 1, 1, 1, 1], 2, [1, 1, 0, 1, 1, 1, 1, 1, 1]),  # by length, not by count
        ([0, 2, 2], 3, [2, 0, 1]),
        ([7], 4, [0]),
        ([], 2, []),
    ],
)
def test_deal_gives_the_largest_to_who_has_the_least(works: list[int], n_ranks: int, expected: list[int]) -> None:
    assert deal(works, n_ranks) == expected


def test_cut_of_some_of_the_batches_is_these_batches() -> None:
    """Which the ranks rely on: of a thousand random sets, whichever of their batches a rank has."""
    draw = random.Random(1)
    for _ in range(1000):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 60))]
        limits: Any = {"width": draw.randint(1, 4), "batch_tokens": draw.choice([40, 100, 500])}
        limits["sizes"] = draw.choice([(), (2, 5, 9)])  # of places, where a GPU replays steps
        batches = [batch for batch in _cut(lengths, **limits) if draw.random() < 0.5]
        own = sorted(n for batch in batches for n in batch)
        again = _cut([lengths[n] for n in own], **limits)
        assert [[own[n] for n in batch] for batch in again] == batches


@pytest.mark.ci
def test_translate_sets_on_three_ranks_searches_the_batches_of_one(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch on one of them, all of it, so that in fp32, too, the translations are the same letter by letter."""
    encoded: list[str] = []
    encode = Transformer.encode

    def noted(model: Transformer, x: Tensor, layout: Padded) -> Tensor:
        encoded.append(str(x.tolist()))
        return encode(model, x, layout)

    monkeypatch.setattr(Transformer, "encode", noted)
    translator = translator_of(run_dir)
    expected = {name: translator.translate(texts) for name, texts in SETS.items()}
    by_one = sorted(encoded)
    assert len(by_one) > 6
    assert translate_sets(translator, SETS, ALONE) == expected

    def share() -> None:
        encoded.clear()
        with join_world(torch.device("cpu")) as world:
            assert translate_sets(translator, SETS, world) == expected
        sys.stdout.write(json.dumps(encoded))

    assert ranks(3, share, tmp_path) == [0] * 3, [(tmp_path / f"rank-{n}").read_text() for n in range(3)]
    shares = [json.loads((tmp_path / f"rank-{n}").read_text()) for n in range(3)]
    assert sorted(chain.from_iterable(shares)) == by_one
    works = [sum(batch.count(",") + 1 for batch in share) for share in shares]
    assert max(works) - min(works) < 200


def test_translate_sets_ends_every_rank_where_one_fails(run_dir: Path, tmp_path: Path) -> None:
    translator = translator_of(run_dir)

    def share() -> None:
        with join_world(torch.device("cpu")) as world:
            if world.rank == 1:
                pytest.MonkeyPatch().setattr(Translator, "translate", _fail)
            translate_sets(translator, SETS, world)

    assert ranks(3, share, tmp_path) == [PeerError.exit_status, InputError.exit_status, PeerError.exit_status]
    said = [(tmp_path / f"rank-{n}").read_text() for n in range(3)]
    assert said[1] == "InputError: no memory is left\n"
    assert said[0] == said[2] == "PeerError: rank 1 failed: no memory is left\n"


def _fail(*_: object, **__: object) -> None:
    raise InputError("no memory is left")


@pytest.mark.parametrize(
    ("rank", "busy", "own", "expected"),
    [
        (4, {4}, 2, 8),  # of the second machine: ranks 4 to 7, and eight cores
        (4, {0, 4, 5}, 2, 4),
        (5, {4, 5, 6}, 2, 2),
        (4, {4, 5, 6, 7}, 2, 2),
        (4, {0, 1}, 2, 2),  # it waits
        (4, {4}, 3, 8),  # no more than there are cores
        (4, {4}, 9, 9),
    ],
)
def test_threads_of_gives_a_rank_those_of_its_idle_neighbours(
    rank: int, busy: set[int], own: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank - 4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(distributed, "cores", lambda: 8)
    monkeypatch.setattr(distributed, "resolve_threads", lambda threads: threads)
    before = torch.get_num_threads()
    torch.set_num_threads(own)
    try:
        with World(rank, 8, {}).threads_of(busy):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == own
    finally:
        torch.set_num_threads(before)
