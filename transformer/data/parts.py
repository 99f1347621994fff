"""A corpus that many commands prepare, each a part of it: `transformer prepare part=K/N`, for K from 0 to N - 1.

    STORE_DIR/DIGEST.parts/     DIGEST: of the settings, and of the names and sizes of the training files
        plan/                   which pairs are kept by their text, where each part begins, the tokenizers
        0/, 1/, ...             the parts: each a store, with what was counted of it
        claims                  who works on what: see `shared_work`
        joined.json             instead of all these, once there is a store of them: its name

Part 0 makes the plan before it encodes its own share: it reads all of the text, judges every pair and trains the
tokenizer, exactly as preparing without parts does. The others need the plan, and nothing of each other; `prepare`
without a part joins them. Each folder is complete or not there, and a command that finds its part ends at once.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, compress, islice, pairwise
from pathlib import Path

import numpy as np

from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.data import building
from transformer.data.building import (
    REPORT,
    PieceCounts,
    encode_pairs,
    report_of,
    store_writer,
    sum_counts,
    train_models,
)
from transformer.data.corpus import Pair
from transformer.data.report import FileReport, TokenCounts
from transformer.data.screening import TextCounts, screen
from transformer.data.source import Source
from transformer.data.store import STORE_MARKS, Ids, Store, join_stores
from transformer.data.tokenizer import Tokenizers
from transformer.data.training_text import (
    Digests,
    TrainingText,
    check_languages,
    check_texts,
    describe_file,
    digest_outline,
    digest_text,
    find_set,
    models_of,
    open_sets,
    store_dir_of,
    training_text,
    training_weights,
)
from transformer.errors import InputError, StorageError, TooEarly
from transformer.files import (
    MANIFEST,
    build,
    encode_json,
    list_names,
    parse_json,
    read_json,
    remove,
    write_json,
    write_new,
)
from transformer.sealed_folder import Sealed, open_sealed, seal
from transformer.shared_work import clear, opened, seal_of

PLAN = "plan"  # the folder, and plan.json in it
KEPT = "kept"  # beside plan.json: a byte for each pair of all the sets, 1 for one that is kept by its text
JOINED = "joined.json"
CHUNK = 1 << 20  # pairs
MOST_NAMED = 8  # parts that an error names

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartsPlan:
    """What part 0 finds out, and the others go by."""

    parts: int
    digests: Digests
    files: list[dict[str, FileReport]]  # of each training set
    shards: list[list[int]]  # of each training set: the pairs of each of its shards
    starts: list[int]  # the first pair of each part, of the pairs of all the sets, and where the last part ends
    text: TextCounts

    def counts(self, number: int) -> str:
        """The file of a part that has what was counted of it: its name says of which plan it is, and which part."""
        return f"counts-{seal_of([to_json(self), number])}.json"


# ---- a part ---------------------------------------------------------------------------------------------------------


def prepare_part(job: TrainJob, number: int, parts: int) -> None:
    """Encode part `number`, counted from 0, of so many; part 0 makes the plan first. Nothing to do where it is there.

    Raises TooEarly where there is no plan yet, InputError for bad files and settings, and StorageError.
    """
    began = time.monotonic()
    check_languages(job.data)
    check_texts(job.data)
    store_dir = store_dir_of(job)
    models = models_of(job)
    if number == 0:
        sets = open_sets(job.data, store_dir)  # all of them, digested: their faults must show before hours of work
    else:
        names = training_weights(job.data)
        sets = {name: find_set(job.data.sets()[name], name, job.data, store_dir=store_dir) for name in names}
    corpus = training_text(job, sets, models)
    folder = folder_of(corpus, store_dir)

    joined = _joined_store(folder)
    if joined is not None and (number > 0 or digest_text(corpus, store_dir).of_text.startswith(joined)):
        log.info("part %d of %d is already in the prepared corpus %s", number, parts, store_dir / joined)
        return
    if number > 0:
        _find_plan(folder, parts)
    try:
        with opened(folder, lambda: None if number else _make_plan(folder, corpus, parts)) as work:
            plan = _find_plan(folder, parts)
            path = folder / str(number)
            work.do(
                number + 1,
                f"part {number} of {parts}",
                is_done=lambda: _open_part(path, plan, number),
                make=lambda: build(path, partial(_encode_part, folder, plan, corpus, number), marks=STORE_MARKS),
            )
            part = from_json(PieceCounts, read_json(path / plan.counts(number))) if work.is_there() else None
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{folder}: cannot be written ({reason}): free space or set data.store_dir") from error
    if part is None:  # while this command waited for another one, all parts were joined
        return prepare_part(job, number, parts)
    pairs = f"{sum(part.kept):,} of {plan.starts[number + 1] - plan.starts[number]:,} pairs"
    log.info("part %d of %d is ready: %s; %.1f s", number, parts, pairs, time.monotonic() - began)


def folder_of(corpus: TrainingText, store_dir: Path) -> Path:
    """Where the parts of a corpus are, and its plan. Raises InputError where a file is missing."""
    return store_dir / f"{digest_outline(corpus)[:16]}.parts"


def _joined_store(folder: Path) -> str | None:
    """The name of the prepared corpus that the parts are in; None where there is none."""
    try:
        name = read_json(folder / JOINED)["store"]
        return name if (folder.parent / name / MANIFEST).is_file() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _find_plan(folder: Path, parts: int) -> PartsPlan:
    """The plan that part 0 has made. Raises TooEarly where there is none, InputError for one of other parts."""
    try:
        plan = _read_plan(folder)
    except InputError as error:
        raise TooEarly(
            f"part 0 of {parts} is not ready, or was given other settings or files: give this command again later "
            f"({folder / PLAN} is not there)"
        ) from error
    if plan.parts != parts:
        raise InputError(
            f"part=K/{parts}: {folder} was begun as {plan.parts} parts: give part=K/{plan.parts}, or remove the folder"
        )
    return plan


def _encode_part(folder: Path, plan: PartsPlan, corpus: TrainingText, number: int, path: Path) -> None:
    """Write the store of a part into `path`. Raises InputError where the text is not what part 0 has read."""
    start, end = plan.starts[number : number + 2]
    streams = _open_range(plan, corpus, start, end)
    with (folder / PLAN / KEPT).open("rb") as file:
        file.seek(start)
        kept = file.read(end - start)
    borders = pairwise(accumulate(plan.text.read, initial=-start))  # of the sets, in `kept`
    tokenizers = Tokenizers.load(folder / PLAN)

    log.info("encoding %s pairs", f"{kept.count(1):,}")
    with closing(store_writer(path, tokenizers)) as writer:
        pieces = encode_pairs(
            compress(chain.from_iterable(streams), kept),
            writer,
            tokenizers,
            corpus=corpus,
            kept_by_text=[kept.count(1, max(first, 0), max(last, 0)) for first, last in borders],
            total=sum(plan.text.kept),
        )
        writer.finish({plan.counts(number): encode_json(to_json(pieces))})


def _open_range(plan: PartsPlan, corpus: TrainingText, start: int, end: int) -> list[Iterator[Pair]]:
    """The pairs from `start` to `end` of those of all the sets, with their tags, from each shard that has some.

    Raises InputError where the files of such a shard do not hold what part 0 has read.
    """
    streams: list[Iterator[Pair]] = []
    before = 0  # pairs of the shards that came before
    for text_set, files, counts in zip(corpus.sets, plan.files, plan.shards, strict=True):
        known = iter(files.values())
        for shard, pairs in zip(text_set.source.by_shard(), counts, strict=True):
            of_shard = list(islice(known, len(shard.files)))
            first, last = max(start - before, 0), min(end - before, pairs)
            if first < last:
                _check_unchanged(shard, of_shard, plan.parts)
                # What is before them is read, too: a stream has no other way in.
                streams.append(islice(shard.tagged_pairs(skip=first), last - first))
            before += pairs
    return streams


def _check_unchanged(shard: Source, files: Sequence[FileReport], parts: int) -> None:
    for path, known in zip(shard.files.values(), files, strict=True):
        found, _ = describe_file(path, "data.train")
        if found.sha256 != known.sha256:
            raise InputError(
                f"{path}: the text has changed since part 0 read it: restore it, or give part=0/{parts} again"
            )


def _open_part(path: Path, plan: PartsPlan, number: int) -> tuple[PieceCounts, Ids] | None:
    """What was counted of a part, and its tokens on either side `(2,)`.

    None unless it is whole, of this plan, and the part of this number: a copy between machines may be of another.
    """
    try:
        tokens = Store.open(path).lengths.totals
        return from_json(PieceCounts, read_json(path / plan.counts(number))), tokens
    except (OSError, ValueError, InputError):
        return None


# ---- the plan -------------------------------------------------------------------------------------------------------


def _make_plan(folder: Path, corpus: TrainingText, parts: int) -> None:
    """Read all of the text, and write what the parts need, unless that is there and of the same text."""
    remove(folder / JOINED)  # of a prepared corpus that has been deleted, or of other text
    files = [text_set.files for text_set in corpus.sets]
    with suppress(InputError):
        if _digests_of(_read_plan(folder).files) == _digests_of(files):
            return

    def fill(path: Path) -> None:
        digests = digest_text(corpus, folder.parent)
        digests.remember(folder.parent)
        screened = screen(corpus)
        kept = screened.kept_by_text
        plan = PartsPlan(parts, digests, files, screened.shards, _starts(kept, parts), screened.counts)
        contents = {
            f"{PLAN}.json": encode_json(to_json(plan)),
            KEPT: kept,
            **train_models(corpus, kept),
        }
        seal(path, {name: write_new(path / name, content) for name, content in contents.items()}, Sealed)

    build(folder / PLAN, fill, marks=[MANIFEST, f"{PLAN}.json"])


def _read_plan(folder: Path) -> PartsPlan:
    """The plan that part 0 has made. Raises InputError where there is none, or a damaged one."""
    with open_sealed(folder / PLAN, partial(from_json, Sealed), InputError) as plan:
        plan.verify()
        with plan.file(f"{PLAN}.json") as file:
            return from_json(PartsPlan, parse_json(file))


def _digests_of(files: Sequence[Mapping[str, FileReport]]) -> list[list[str]]:
    return [[file.sha256 for file in of_set.values()] for of_set in files]


def _starts(kept: bytes, parts: int) -> list[int]:
    """The first pair of each part, and the end of the last: each has as many blocks of kept pairs as the others.

    Blocks are those of preparing without parts, on which the sample of targets depends. `kept` has a byte for each
    pair, 1 for one that is kept.
    """
    blocks = math.ceil(kept.count(1) / building.BLOCK)
    firsts = [building.BLOCK * (blocks * part // parts) for part in range(parts)]  # of the pairs that are kept

    starts: list[int] = []
    before = 0  # kept pairs that came before the chunk
    for start in range(0, len(kept), CHUNK):
        indices = np.flatnonzero(np.frombuffer(kept[start : start + CHUNK], np.uint8))
        while len(starts) < parts and firsts[len(starts)] < before + len(indices):
            starts.append(start + int(indices[firsts[len(starts)] - before]))
        before += len(indices)
    return [*starts, len(kept)]


# ---- joining --------------------------------------------------------------------------------------------------------


def is_begun(folder: Path) -> bool:
    """Whether a corpus is being prepared in parts, which wait to be joined."""
    return folder.is_dir() and not (folder / JOINED).exists()


def join_parts(path: Path, corpus: TrainingText, folder: Path, *, name: str) -> None:
    """Write the prepared corpus of all the parts into the directory `path`; `name` is to be its name.

    Raises InputError where a part is missing, or is of other text. OSError passes through.
    """
    instead = f"or remove {folder} to prepare without parts"
    try:
        plan = _read_plan(folder)
    except InputError as error:
        raise InputError(f"part 0 is missing: give part=0/N with the same settings, {instead}") from error
    if not plan.digests.of_text.startswith(name):
        raise InputError(f"the text has changed since part 0 read it: give part=0/{plan.parts} again, {instead}")

    # Every byte of the parts is verified.
    parts = [folder / str(number) for number in range(plan.parts)]
    opened = [_open_part(part, plan, number) for number, part in enumerate(parts)]
    missing = [str(number) for number, part in enumerate(opened) if part is None]
    if missing:
        shown = ", ".join(missing[:MOST_NAMED]) + (
            f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        )
        are = "part {} of {} is missing" if len(missing) == 1 else "parts {} of {} are missing"
        raise InputError(
            f"{are.format(shown, plan.parts)}: give part={missing[0]}/{plan.parts} with the same settings, {instead}"
        )

    log.info("joining %d parts", plan.parts)
    found = [part for part in opened if part is not None]
    source, target = np.sum([tokens for _, tokens in found], axis=0).tolist()
    tokenizers = Tokenizers.load(folder / PLAN)
    report = report_of(
        corpus,
        plan.text,
        sum_counts([pieces for pieces, _ in found]),
        tokens=TokenCounts(source, target),
        tokenizers=tokenizers,
    )
    join_stores(path, parts, {**tokenizers.models, REPORT: report})


def retire_parts(folder: Path, name: str) -> None:
    """Leave of the parts only that they are in the prepared corpus of this name; no harm if that fails."""
    with suppress(StorageError):
        write_json(folder / JOINED, {"store": name})
        clear(folder, lambda path: path.name != JOINED)


def retire_rest(folder: Path, name: str) -> None:
    """Retire the parts of the prepared corpus of this name: who joined them may have been killed before it had."""
    with suppress(InputError, StorageError):
        if list_names(folder) in ([], [JOINED]):
            return
        if _joined_store(folder) == name or _are_complete(folder, name):
            retire_parts(folder, name)


def _are_complete(folder: Path, name: str) -> bool:
    """Whether all parts of this prepared corpus are there, so that nobody works on them. Raises InputError."""
    plan = _read_plan(folder)
    is_of_name = plan.digests.of_text.startswith(name)
    return is_of_name and all((folder / str(number)).is_dir() for number in range(plan.parts))
