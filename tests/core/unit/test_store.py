"""Ids on disk and in a batch: what was written comes back, and damage is found."""

import errno
import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.observers import watch_disk
from transformer.data.batch import Batch, collate
from transformer.data.store import Sentences, Store, StoreWriter, join_stores
from transformer.errors import InputError
from transformer.files import build_once
from transformer.layout import Layout, Packed, Padded

SOURCE = [[5, 6, 7], [8], [9, 10], [], [11, 12, 13, 14]]
FILES = ["source.ids", "source.offsets", "target.ids", "target.offsets", "tokenizer.model", "MANIFEST.json"]
TARGET = [[20, 21], [22, 23, 24, 25], [26], [27], [28, 29, 30]]


def write_store(path: Path) -> None:
    written(path)


def written(path: Path, vocab_size: int = 100, block: int = 2) -> Path:
    path.mkdir(exist_ok=True)
    writer = StoreWriter(path, vocab_size)
    for start in range(0, len(SOURCE), block):
        writer.add(*(Sentences.of(side[start : start + block]) for side in (SOURCE, TARGET)))
    writer.finish({"tokenizer.model": b"model"})
    return path


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_store_gives_back_what_was_written(kind: str, tmp_path: Path) -> None:
    store = Store.from_pieces(SOURCE, TARGET) if kind == "memory" else Store.open(written(tmp_path / "s"))
    assert len(store) == 5
    assert store.lengths[:].dtype == np.int32
    assert store.lengths[:].tolist() == [[4, 3], [2, 5], [3, 2], [1, 2], [5, 4]]  # the end mark counts
    assert store.longest == (5, 5)
    flat, counts = store.gather(np.array([4, 0, 3, 0]), 0)
    assert flat.dtype == np.int64
    assert flat.tolist() == [11, 12, 13, 14, 5, 6, 7, 5, 6, 7]
    assert counts.tolist() == [4, 3, 0, 3]
    flat, counts = store.gather(np.array([1]), 1)
    assert (flat.tolist(), counts.tolist()) == ([22, 23, 24, 25], [4])
    flat, counts = store.gather(np.zeros(0, dtype=np.int64), 1)
    assert (flat.tolist(), counts.tolist()) == ([], [])


@pytest.mark.parametrize("cuts", [[0, 5], [0, 0, 1, 1, 4, 5, 5], range(6)])
def test_store_that_was_joined_is_like_one_that_was_written_at_once(cuts: Sequence[int], tmp_path: Path) -> None:
    parts = []
    for number, (start, end) in enumerate(pairwise(cuts)):  # some without a pair
        parts.append(tmp_path / str(number))
        parts[-1].mkdir()
        writer = StoreWriter(parts[-1], 100)
        writer.add(*(Sentences.of(side[start:end]) for side in (SOURCE, TARGET)))
        writer.finish({})
    path = tmp_path / "joined"
    path.mkdir()
    join_stores(path, parts, {"tokenizer.model": b"model"})

    plain, joined = Store.open(written(tmp_path / "plain")), Store.open(path)
    assert joined.lengths[:].tolist() == plain.lengths[:].tolist()
    assert (joined.longest, joined.dtype) == (plain.longest, plain.dtype)
    for ids in ([4, 0, 3, 0], [1], [], range(5)):
        for side in (0, 1):
            found, expected = (store.gather(np.array(ids, np.int64), side) for store in (joined, plain))
            assert found.pieces.dtype == np.int64
            assert (found.pieces.tolist(), found.counts.tolist()) == (
                expected.pieces.tolist(),
                expected.counts.tolist(),
            )
    assert (path / "tokenizer.model").read_bytes() == b"model"
    assert os.path.samefile(path / "source.0.ids", parts[0] / "source.ids")  # nothing is copied

    (path / "target.0.ids").unlink()
    with pytest.raises(InputError, match=r"target\.0\.ids: No such file"):
        Store.open(path)


def test_store_is_joined_by_copies_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "joined").mkdir()
    join_stores(tmp_path / "joined", [written(tmp_path / "s")] * 2, {})
    assert Store.open(tmp_path / "joined").lengths[:].tolist() == [[4, 3], [2, 5], [3, 2], [1, 2], [5, 4]] * 2


def test_store_reads_lengths_from_its_offsets_and_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer.data.store.BLOCK", 2)
    store = Store.from_pieces(SOURCE, TARGET)
    assert (store.longest, store.lengths.totals.tolist()) == ((5, 5), [15, 16])
    assert store.lengths[np.array([4, 0, 4])].tolist() == [[5, 4], [4, 3], [5, 4]]
    assert store.lengths[1::2].tolist() == [[2, 5], [1, 2]]
    assert store.lengths[np.zeros(0, np.int64)].shape == (0, 2)
    monkeypatch.setattr("transformer.data.store.BLOCK", 1_000)
    offsets = np.arange(0, 4_000_001, 4)  # a million sentences of four pieces
    tracemalloc.start()
    try:
        store = Store((offsets, offsets), (offsets, offsets))
        assert (len(store), store.longest) == (1_000_000, (5, 5))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(("vocab_size", "width"), [(65_536, 2), (65_537, 4)])
def test_store_ids_are_as_narrow_as_the_vocabulary_allows(vocab_size: int, width: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir()
    writer = StoreWriter(path, vocab_size)
    writer.add(Sentences.of([[vocab_size - 1]]), Sentences.of([[4, 5]]))
    writer.finish({})
    assert (path / "target.ids").stat().st_size == 2 * width
    assert Store.open(path).gather(np.array([0]), 0)[0].tolist() == [vocab_size - 1]


def test_store_writer_writes_the_same_bytes_whatever_the_blocks(tmp_path: Path) -> None:
    digests = [
        json.loads((written(tmp_path / str(block), block=block) / "MANIFEST.json").read_bytes()) for block in (1, 2, 5)
    ]
    assert digests[0] == digests[1] == digests[2]


def test_store_opens_without_a_pair(tmp_path: Path) -> None:
    StoreWriter(tmp_path, 100).finish({})
    assert len(Store.open(tmp_path)) == 0


def test_store_has_its_name_when_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and the manifest behind what it vouches for; a power cut may come at any moment."""
    with monkeypatch.context() as patch:
        events = watch_disk(patch)
        build_once(tmp_path / "s", write_store, is_usable=lambda _: False, marks=[])
    *inside, folder, renamed, outside = events
    sizes = {name: (tmp_path / "s" / name).stat().st_size for name in FILES}
    assert {path.name: size for _, path, size in inside} == sizes
    assert (len(inside), inside[-1][1].name) == (6, "MANIFEST.json")
    assert folder == ("sync", inside[0][1].parent, 0)
    assert renamed == ("rename", folder[1], 0)
    assert outside == ("sync", tmp_path, 0)


def lengths_or_message(path: Path) -> object:
    try:
        return Store.open(path).lengths[:].tolist()
    except InputError as error:
        return str(error)


def test_store_open_finds_every_flipped_bit_cut_and_missing_file(tmp_path: Path) -> None:
    path, state, found = written(tmp_path / "s"), random.Random(3), 0
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for _ in range(40):
            bad = bytearray(good)
            bad[state.randrange(len(bad))] ^= 1 << state.randrange(8)
            file.write_bytes(bad)
            outcome = lengths_or_message(path)
            if isinstance(outcome, str):
                assert str(path) in outcome
                found += 1
            else:  # a bit in the manifest's white space may be harmless: then nothing may change
                assert file.name == "MANIFEST.json"
                assert outcome == [[4, 3], [2, 5], [3, 2], [1, 2], [5, 4]]
        file.write_bytes(good[:-1])
        with pytest.raises(InputError, match=f"{file}: "):
            Store.open(path)
        file.unlink()
        with pytest.raises(InputError, match=f"{file}: No such file"):
            Store.open(path)
        file.write_bytes(good)
    assert found >= 200
    assert len(Store.open(path)) == 5


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b"", "Expecting value"),
        (b"[]", ".*Manifest"),
        (b"{}", "a prepared corpus of format None, not 1 or 2"),
        (b'{"format": 3}', "a prepared corpus of format 3, not 1 or 2"),
        (b'{"format": 1, "files": 3}', ".*Manifest"),
        (b"\xff", "'utf-8' codec"),
    ],
)
def test_store_open_refuses_a_foreign_manifest(manifest: bytes, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "s")
    (path / "MANIFEST.json").write_bytes(manifest)
    with pytest.raises(InputError, match=f"{path}/MANIFEST.json: {message}"):
        Store.open(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "s/MANIFEST.json: a prepared corpus of format 3, not 1 or 2"),
        ({"format": 2}, r"MANIFEST\.json: damaged"),  # of a store that was joined, whose ids are in several files
        ({"dtype": "<f4"}, r"MANIFEST\.json: damaged"),
        ({"files": {}}, r"MANIFEST\.json: damaged"),
    ],
)
def test_store_open_refuses_a_manifest_that_says_something_else(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "s") / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change, indent=2) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        Store.open(path.parent)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/file", "..", "a\0b"])
def test_store_open_opens_nothing_outside_it(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "s") / "MANIFEST.json"
    (tmp_path / "outside").touch()
    manifest = json.loads(path.read_bytes())
    empty = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    manifest["files"] = {**manifest["files"], name: empty}
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"which is no file beside it|null byte|regular file"):
        Store.open(path.parent)


def test_store_open_refuses_a_manifest_in_another_writing(tmp_path: Path) -> None:
    path = written(tmp_path / "s") / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_bytes())), encoding="utf-8")
    with pytest.raises(InputError, match=r"MANIFEST\.json: not as it was written"):
        Store.open(path.parent)


def lengths_of(layout: Layout) -> Tensor:
    """The real positions of each row of a padded batch."""
    assert isinstance(layout, Padded)
    return layout.lengths


def test_collate_pads_a_batch_by_hand() -> None:
    batch = collate(Store.from_pieces(SOURCE, TARGET), np.array([2, 1, 0]))
    assert batch.source.tolist() == [[9, 10, 3, 0], [8, 3, 0, 0], [5, 6, 7, 3]]
    assert lengths_of(batch.source_layout).tolist() == [3, 2, 4]
    assert isinstance(batch.source_layout, Padded)
    assert (batch.source_layout.width, batch.source_layout.full) == (4, False)
    assert batch.target_in.tolist() == [[2, 26, 0, 0, 0], [2, 22, 23, 24, 25], [2, 20, 21, 0, 0]]
    assert lengths_of(batch.target_layout).tolist() == [2, 5, 3]
    assert batch.target_rows is not None
    assert batch.target_rows.tolist() == [0, 1, 5, 6, 7, 8, 9, 10, 11, 12]
    assert batch.target_out.tolist() == [26, 3, 22, 23, 24, 25, 3, 20, 21, 3]
    tensors = (batch.source, batch.target_in, batch.target_rows, batch.target_out, lengths_of(batch.source_layout))
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_collate_of_equal_lengths_is_full_and_of_no_pieces_has_its_end_mark() -> None:
    store = Store.from_pieces([[5], [6], []], [[7, 8], [9, 4], []])
    layout = collate(store, np.array([0, 1])).source_layout
    assert isinstance(layout, Padded)
    assert layout.full
    batch = collate(store, np.array([2]))
    assert (batch.source.tolist(), batch.target_in.tolist(), batch.target_out.tolist()) == ([[3]], [[2]], [3])


def test_collate_of_nobody_is_one_empty_slot() -> None:
    batch = collate(Store.from_pieces(SOURCE, TARGET), np.zeros(0, dtype=np.int64))
    assert (batch.source.tolist(), batch.target_in.tolist()) == ([[0]], [[0]])
    assert lengths_of(batch.source_layout).tolist() == lengths_of(batch.target_layout).tolist() == [0]
    assert batch.target_rows is not None
    assert (batch.target_rows.tolist(), batch.target_out.tolist()) == ([], [])


def test_batch_moves_as_a_whole() -> None:
    batch = collate(Store.from_pieces(SOURCE, TARGET), np.array([0])).to(torch.device("meta"))
    assert isinstance(batch, Batch)
    assert batch.target_rows is not None
    tensors = (batch.source, batch.target_in, batch.target_rows, batch.target_out)
    layouts = (lengths_of(batch.source_layout), lengths_of(batch.target_layout))
    assert {tensor.device.type for tensor in (*tensors, *layouts)} == {"meta"}


# Packed


def test_collate_packs_a_batch_by_hand() -> None:
    batch = collate(Store.from_pieces(SOURCE, TARGET), np.array([2, 3, 0]), (10, 8))
    assert batch.source.tolist() == [9, 10, 3, 3, 5, 6, 7, 3, 0, 0]
    assert batch.target_in.tolist() == [2, 26, 2, 27, 2, 20, 21, 0]
    assert batch.target_out.tolist() == [26, 3, 27, 3, 20, 21, 3, 0]
    assert batch.target_rows is None
    assert isinstance(batch.source_layout, Packed)
    assert isinstance(batch.target_layout, Packed)
    assert batch.source_layout.positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 0]
    assert batch.target_layout.positions().tolist() == [0, 1, 0, 1, 0, 1, 2, 0]
    assert batch.source_layout.offsets[:4].tolist() == [0, 3, 4, 8]
    assert (batch.source_layout.longest, batch.target_layout.longest) == (128, 128)
    tensors = (batch.source, batch.target_in, batch.target_out)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_collate_packs_sentences_end_to_end() -> None:
    state = np.random.default_rng(5)
    for _ in range(100):
        sides = [[state.integers(4, 99, size=state.integers(0, 9)).tolist() for _ in range(12)] for _ in range(2)]
        store, ids = Store.from_pieces(*sides), state.permutation(12)[: int(state.integers(1, 13))]
        source, target_in, target_out = [], [], []
        for i in ids:
            source += [*sides[0][i], 3]
            target_in += [2, *sides[1][i]]
            target_out += [*sides[1][i], 3]
        empty = int(state.integers(3)), int(state.integers(3))
        batch = collate(store, ids, (len(source) + empty[0], len(target_in) + empty[1]))
        assert batch.source.tolist() == source + [0] * empty[0]
        assert batch.target_in.tolist() == target_in + [0] * empty[1]
        assert batch.target_out.tolist() == target_out + [0] * empty[1]


def test_collate_of_nobody_packed_is_empty() -> None:
    batch = collate(Store.from_pieces(SOURCE, TARGET), np.zeros(0, dtype=np.int64), (6, 5))
    assert batch.source.tolist() == [0] * 6
    assert batch.target_in.tolist() == batch.target_out.tolist() == [0] * 5
    assert batch.target_rows is None


def test_collate_refuses_sentences_that_do_not_fit_their_slots() -> None:
    store, ids = Store.from_pieces(SOURCE, TARGET), np.array([2, 3, 0])  # 8 and 7 tokens
    for capacities in ((7, 7), (8, 6)):
        with pytest.raises(ValueError, match=r"\[8, 7\] tokens"):
            collate(store, ids, capacities)


def test_batch_moves_packed_as_a_whole() -> None:
    batch = collate(Store.from_pieces(SOURCE, TARGET), np.array([0]), (6, 6)).to(torch.device("meta"))
    tensors = (batch.source, batch.target_in, batch.target_out)
    positions = (batch.source_layout.positions(), batch.target_layout.positions())
    assert {tensor.device.type for tensor in (*tensors, *positions)} == {"meta"}
