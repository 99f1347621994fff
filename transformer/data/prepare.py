"""From raw text to what training reads.

    resolve and digest   the files of every set; the digest names the prepared corpus, which may be there already
    first reading        screen the text of every training pair          -> a verdict on each pair
    second reading       train the tokenizer on a sample of the lines    -> tokenizer.model, or one for each side
    third reading        encode, filter by the number of pieces, write   -> the store, and report.json

A prepared corpus is named by a digest of the training text, whatever files have it, the filters, the tokenizer's
settings and the versions of the formats, so it is built once and shared by every run that agrees on these. Whoever
builds holds a file lock; others wait, then use it. Nothing but copies of data sets is written before every text has
been read to its end. Text is read once for its digest, and three times more to build: memory must not grow with it.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer.config.jobs import TrainJob
from transformer.config.languages import language_of
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import DataConfig, Detector, FilterConfig, PairConfig, TokenizerConfig
from transformer.data.corpus import (
    DUPLICATE,
    EMPTY,
    IDENTICAL,
    KEPT,
    Pair,
    digest_pairs,
    has_several_sentences,
    screen_pairs,
)
from transformer.data.detectors import cleaning
from transformer.data.report import (
    BuildReport,
    DataReport,
    DroppedPair,
    FileReport,
    LineCounts,
    PairCounts,
    SetReport,
    TokenCounts,
)
from transformer.data.round_trip import RoundTrip, warn_of_changes
from transformer.data.source import Source, is_copied, resolve_source, store_beside
from transformer.data.store import STORE_VERSION, Ids, Mixture, Sentences, Store, StoreWriter
from transformer.data.tokenizer import Tokenizer, Tokenizers, read_model, read_models, sample_lines, train_tokenizer
from transformer.errors import InputError, StorageError
from transformer.files import build_once, digest_file, read_json, write_json
from transformer.machine import resolve_threads, trim_heap
from transformer.run_dir import TARGET_TOKENIZER, TOKENIZER, RunDir, list_steps
from transformer.vocabulary import UNK, describe_vocab_size, own_source_size

PREPARE_VERSION = 3
REPORT = "report.json"  # beside the files of the store, as TOKENIZER is
MODEL_FILES = {"tokenizer": TOKENIZER, "tokenizer.target": TARGET_TOKENIZER}  # by the group of the settings
BLOCK = 10_000  # pairs that are in memory at a time
MOST_NAMED = 4  # files that an error names
SAMPLED_TARGETS = 2_000  # training targets, at least, of which the round trip through the tokenizer is checked

# Why a pair is dropped, in the order of the checks.
REASONS = ("empty", "identical", "duplicate", "no_pieces", "too_long", "ratio")
DETECTED = {detector: DUPLICATE + number for number, detector in enumerate(Detector, 1)}  # verdicts
TEXT_REASONS = {EMPTY: "empty", IDENTICAL: "identical", DUPLICATE: "duplicate"} | {
    code: detector.name for detector, code in DETECTED.items()
}
SAMPLES = 5  # pairs that are shown of what each detector has dropped
SHOWN = 200  # characters of each of their sides

# For bytes.translate: the verdict on a pair becomes 1 if it is kept, else 0.
_KEPT_MASK = bytes(code == KEPT for code in range(256))

log = logging.getLogger(__name__)


# ---- what preparing gives -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """What training needs; development and test sentences are never filtered."""

    path: Path  # of the prepared corpus
    store: Store
    mixture: Mixture  # pairs and weight of each training set in the store
    tokenizers: Tokenizers
    report: DataReport
    dev: list[Pair]
    test: dict[str, list[Pair]]
    digest_of_files: str  # what the digest once was: another one, unless all of the training text is in plain files

    def is_of(self, digest: str) -> bool:
        """Whether a run whose record has this digest was trained on the same data."""
        return digest in (self.report.digest, self.digest_of_files)

    def to_share(self) -> "SharedPrepared":
        """What another process needs to open the same, as data that can be sent to it."""
        return SharedPrepared(
            path=str(self.path),
            pairs=[pairs for pairs, _ in self.mixture],
            weights=[weight for _, weight in self.mixture],
            report=self.report,
            dev_sources=[source for source, _ in self.dev],
            dev_references=[reference for _, reference in self.dev],
            digest_of_files=self.digest_of_files,
        )


@dataclass(frozen=True)
class SharedPrepared:
    """A Prepared without its arrays and its test sets, which only the process that prepared it scores."""

    path: str
    pairs: list[int]
    weights: list[float]
    report: DataReport
    dev_sources: list[str]
    dev_references: list[str]
    digest_of_files: str

    def open(self) -> Prepared:
        """The same corpus in this process: mapped, without reading it or the raw text again.

        Raises InputError where the corpus is not to be found, such as on another machine without a shared disk.
        """
        path = Path(self.path)
        try:
            tokenizers = Tokenizers.load(path)
        except InputError as error:
            raise InputError(f"{path}: cannot be read by every process: set data.store_dir to a shared disk") from error
        return Prepared(
            path=path,
            store=Store.open(path, is_verified=True),
            mixture=tuple(zip(self.pairs, self.weights, strict=True)),
            tokenizers=tokenizers,
            report=self.report,
            dev=list(zip(self.dev_sources, self.dev_references, strict=True)),
            test={},
            digest_of_files=self.digest_of_files,
        )


# ---- the training text, before and after it is screened -------------------------------------------------------------


@dataclass(frozen=True)
class _TextSet:
    """A configured set of pairs, whose files have been found and digested."""

    source: Source
    languages: tuple[str, str]  # of both sides, as they are set
    files: dict[str, FileReport]
    pairs: list[Pair] | None  # None: of a training set, which is read block by block
    left_out: dict[str, int]  # what its files have beside pairs, by kind; of a training set, the digests know it

    @property
    def codes(self) -> tuple[str, str]:
        """The languages as the detectors know them."""
        source, target = self.languages
        return language_of(source, "data.src_lang"), language_of(target, "data.tgt_lang")

    @property
    def columns(self) -> list[str] | None:
        return None if self.source.columns is None else list(self.source.columns)


@dataclass(frozen=True)
class _Model:
    """A SentencePiece model that encodes the corpus."""

    key: str  # the group of its settings
    config: TokenizerConfig
    given: bytes | None  # None: to be trained

    @property
    def is_given(self) -> bool:
        return self.given is not None

    @property
    def file(self) -> str:
        """Its name in a prepared corpus and in a run directory."""
        return MODEL_FILES[self.key]


@dataclass(frozen=True)
class _Corpus:
    """The training text and everything that decides what becomes of it."""

    sets: list[_TextSet]  # one after the other in the store
    filters: FilterConfig
    models: list[_Model]  # one for both languages, or that of the source and that of the target
    threads: int

    def pairs(self, kept_by_text: bytes) -> Iterator[Pair]:
        """The pairs with a 1 in `kept_by_text`, which has a byte for each pair of all the sets."""
        return compress(chain.from_iterable(text_set.source.pairs() for text_set in self.sets), kept_by_text)

    def tagged_pairs(self, kept_by_text: bytes) -> Iterator[Pair]:
        """The same pairs, with the tags of their sets."""
        return compress(chain.from_iterable(text_set.source.tagged_pairs() for text_set in self.sets), kept_by_text)

    @property
    def tags(self) -> list[str]:
        """The different tags of the sets."""
        return sorted({text_set.source.tag for text_set in self.sets if text_set.source.tag is not None})


@dataclass(frozen=True)
class _Screened:
    """The outcome of the first reading: a verdict on the text of every pair."""

    verdicts: list[bytes]  # of each set, as `screen_pairs` gives them, with those of DETECTED
    samples: dict[str, list[DroppedPair]] = field(default_factory=dict)  # by detector

    @property
    def kept_by_text(self) -> bytes:
        """A byte for each pair of all the sets: 1 for a pair that is kept, else 0."""
        return b"".join(self.verdicts).translate(_KEPT_MASK)

    @property
    def kept(self) -> int:
        """How many pairs are kept."""
        return sum(verdicts.count(KEPT) for verdicts in self.verdicts)

    @property
    def dropped(self) -> Counter[str]:
        """How many pairs are dropped, by reason."""
        counts = Counter[str]()
        for code, reason in TEXT_REASONS.items():
            counts[reason] = sum(verdicts.count(code) for verdicts in self.verdicts)
        return counts


@dataclass(frozen=True)
class _EncodedBlock:
    """Some pairs that are kept by their text, as pieces, and what only their text tells."""

    source: Sentences
    target: Sentences
    has_several_sentences: npt.NDArray[np.bool_]  # of the sources
    sampled_targets: list[str]


@dataclass(frozen=True)
class _Built:
    """A prepared corpus, opened."""

    path: Path
    store: Store
    tokenizers: Tokenizers
    report: BuildReport


# ---- the command ----------------------------------------------------------------------------------------------------


def prepare(job: TrainJob) -> Prepared:
    """Read and check every file, then build the prepared corpus, or open the one that is there.

    Raises InputError for bad files and settings, StorageError where the store cannot be written.
    """
    # Refuse what is cheap to refuse.
    began = time.monotonic()
    for key, language in job.data.tgt_langs().items():
        language_of(language, f"data.{key}")
    if job.data.filter.doctor:
        language_of(job.data.src_lang, "data.src_lang")
    store_dir = Path(job.data.store_dir) if job.data.store_dir is not None else store_beside(job.run_dir)
    mixture_weights = _configured_weights(job.data)
    models = _models_of(job)

    # Find every set. Development and test sets are read whole: their faults must show before hours of work.
    sets = {
        name: _open_set(pair, name, job.data, store_dir=store_dir, is_training=name in mixture_weights)
        for name, pair in configured_sets(job.data).items()
    }

    # Build the prepared corpus from the training sets, or open the one that is there.
    corpus = _Corpus(
        sets=[sets[name] for name in mixture_weights],
        filters=job.data.filter,
        models=models,
        threads=resolve_threads(job.train.threads),
    )
    digests = _digest_corpus(corpus, store_dir)
    built = _open_or_build(store_dir / digests.of_text[:16], corpus)
    digests.remember(store_dir)
    counts = dict(zip(mixture_weights, built.report.sources, strict=True))
    if job.data.temperature is not None:
        mixture_weights = _at_temperature(mixture_weights, counts, job.data.temperature)

    # Report, and warn of references that no translation can match.
    left_out = dict(zip(mixture_weights, digests.left_out or [{} for _ in corpus.sets], strict=True))
    report = _data_report(
        job.data, digests.of_text, sets, counts=counts, left_out=left_out, mixture_weights=mixture_weights, built=built
    )
    _log_left_out(report)
    round_trips = {f"data.{name}": set_report.references for name, set_report in report.sets.items()}
    round_trips["a sample of the training targets"] = report.targets
    of_target = models[-1]
    warn_of_changes(round_trips, of_target.config, key=of_target.key, is_given=of_target.is_given)
    _warn_of_cut_tags(job.data, built.tokenizers.source, is_given=models[0].is_given)
    if len(mixture_weights) > 1:
        _log_mixture(mixture_weights, counts)
    log.info("data ready: %s; %.1f s", _summary(report), time.monotonic() - began)

    return Prepared(
        path=built.path,
        store=built.store,
        mixture=tuple((counts[name].pairs_kept, weight) for name, weight in mixture_weights.items()),
        tokenizers=built.tokenizers,
        report=report,
        dev=sets["dev"].pairs or [],
        test={name: sets[f"test.{name}"].pairs or [] for name in job.data.test},
        digest_of_files=digests.of_files,
    )


def _configured_weights(data: DataConfig) -> dict[str, float]:
    """The training sets in the order of the store, each with the copies of a pair that an epoch has."""
    weights = {"train": 1.0}
    for name, extra in sorted(data.extra.items()):
        weights[f"extra.{name}"] = extra.weight
    return weights


def _at_temperature(
    weights: Mapping[str, float], counts: Mapping[str, PairCounts], temperature: float
) -> dict[str, float]:
    """The weights, times what gives an epoch n^(1 / temperature) pairs of a set of n, but for a common factor.

    The largest set keeps its weight (Arivazhagan et al., 2019, "Massively multilingual neural machine translation in
    the wild", section 4.2).
    """
    largest = max(count.pairs_kept for count in counts.values())
    scaled = {
        name: weight * (max(1, counts[name].pairs_kept) / largest) ** (1.0 / temperature - 1.0)
        for name, weight in weights.items()
    }
    shown = ", ".join(f"{name} {weight:.4g}" for name, weight in scaled.items())
    log.info("data.temperature=%g: weights of the training sets: %s", temperature, shown)
    return scaled


def configured_sets(data: DataConfig) -> dict[str, PairConfig]:
    """Every set of pairs by its key, first those whose faults show soonest: small sets, and files on this machine."""
    return dict(sorted(data.sets().items(), key=lambda item: is_copied(item[1])))


def _open_set(pair: PairConfig, name: str, data: DataConfig, *, store_dir: Path, is_training: bool) -> _TextSet:
    key = f"data.{name}"
    source = resolve_source(pair, key, languages=data.languages_of(name), store_dir=store_dir)
    files = {part: _describe(path, key) for part, path in source.files.items()}
    left_out = Counter[str]()
    pairs = None if is_training else source.load(key, left_out)
    return _TextSet(source, data.languages_of(name), files, pairs, left_out)


def _describe(path: Path, key: str) -> FileReport:
    """Path, size and digest of a file."""
    try:
        if path.is_fifo():
            raise InputError(f"{path}: a pipe, but text is read several times: write it to a file for {key}")
        digest = digest_file(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}): check {key} and data.root") from error
    return FileReport(str(path), digest.size, digest.sha256)


def _data_report(
    data: DataConfig,
    digest: str,
    sets: Mapping[str, _TextSet],
    *,
    counts: Mapping[str, PairCounts],
    left_out: Mapping[str, dict[str, int]],
    mixture_weights: Mapping[str, float],
    built: _Built,
) -> DataReport:
    # A set is either trained on, and has counts, or kept whole, and has pairs.
    set_reports = {}
    for name, text_set in sets.items():
        trained_on = counts.get(name)
        pairs = text_set.pairs
        set_reports[name] = SetReport(
            files=text_set.files,
            columns=text_set.columns,
            origin=text_set.source.origin,
            weight=mixture_weights.get(name),
            pairs_read=len(pairs or ()) if trained_on is None else trained_on.pairs_read,
            pairs_kept=None if trained_on is None else trained_on.pairs_kept,
            references=None
            if pairs is None
            else RoundTrip.of([reference for _, reference in pairs], built.tokenizers.target),
            left_out=left_out.get(name, text_set.left_out),
        )

    return DataReport(
        digest=digest,
        src_lang=data.src_lang,
        tgt_lang=data.tgt_lang,
        sets=set_reports,
        pairs_read=built.report.pairs_read,
        pairs_kept=built.report.pairs_kept,
        dropped=built.report.dropped,
        filters=built.report.filters,
        tokens=built.report.tokens,
        vocab_size=built.report.vocab_size,
        source_vocab_size=own_source_size(built.tokenizers.vocab_sizes),
        samples=built.report.samples,
        targets=built.report.targets,
        lines=built.report.lines,
    )


def _log_left_out(report: DataReport) -> None:
    for name, set_report in report.sets.items():
        if set_report.left_out:
            counts = ", ".join(f"{kind} {count:,}" for kind, count in set_report.left_out.items())
            log.info("data.%s: left out of what is read: %s", name, counts)


def _log_mixture(mixture_weights: Mapping[str, float], counts: Mapping[str, PairCounts]) -> None:
    for name, weight in mixture_weights.items():
        kept = counts[name].pairs_kept
        read = counts[name].pairs_read
        log.info("data.%s: %s of %s pairs, weight %g", name, f"{kept:,}", f"{read:,}", weight)


def _warn_of_cut_tags(data: DataConfig, tokenizer: Tokenizer, *, is_given: bool) -> None:
    """Log which tags are no piece of the tokenizer, into how many pieces it cuts them, and what to do about it."""
    tags = {pair.tag: f"data.{name}.tag" for name, pair in data.sets().items() if pair.tag is not None}
    cut = {tag: key for tag, key in tags.items() if not tokenizer.has_word(tag)}
    if not cut:
        return

    counts = []
    for (tag, key), ids in zip(cut.items(), tokenizer.encode(list(cut)), strict=True):
        unknown = f", {ids.count(UNK)} of them unknown" if UNK in ids else ""
        counts.append(f"{key}={tag} into {len(ids)}{unknown}")
    if is_given:
        remedy = "a model can learn a tag of several pieces, unless they are unknown; to make it one, train a tokenizer"
    else:
        remedy = "no training set has it, so the model will not know it: check how it is written"
    log.warning("tags that are no piece of the tokenizer are cut into pieces: %s; %s", "; ".join(counts), remedy)


def _summary(report: DataReport) -> str:
    """One line: `500 of 507 pairs (1.38% dropped: empty 7), 2,000 + 2,100 tokens, 400 pieces`."""
    pairs = f"{report.pairs_kept:,} of {report.pairs_read:,} pairs"

    dropped = f"{1 - report.pairs_kept / report.pairs_read:.2%} dropped"
    reasons = [f"{reason} {count:,}" for reason, count in report.dropped.items() if count]
    if reasons:
        dropped += f": {', '.join(reasons)}"

    tokens = f"{report.tokens.src:,} + {report.tokens.tgt:,} tokens"
    return f"{pairs} ({dropped}), {tokens}, {describe_vocab_size(report.vocab_sizes)}"


# ---- a tokenizer that is given, not trained -------------------------------------------------------------------------


def _models_of(job: TrainJob) -> list[_Model]:
    """The model for both languages, or those of the source and of the target.

    Those that are not to be trained are given: that of `tokenizer.model`, or of the run where the weights come from.
    """
    models = []
    for key, config in job.tokenizer.models().items():
        given = None if config.model is None else read_model(Path(config.model).resolve())  # it may be a link
        models.append(_Model(key, config, given))
    origins = [model.config.model for model in models]

    if job.init_from is not None:
        folder = _tokenizer_run_dir(job.run_dir, job.init_from).path
        of_weights = read_models(folder)
        models = _as_weights_need(models, of_weights, folder=folder, init_from=job.init_from)
        origins = [str(folder / name) for name in of_weights]

    for model, origin in zip(models, origins, strict=True):
        if model.given is not None:
            given_tokenizer = Tokenizer(model.given, str(origin))  # refuses a bad one
            pieces = f"{given_tokenizer.vocab_size:,} pieces"
            log.info("tokenizer: %s, %s; the other keys of %s are not used", origin, pieces, model.key)
    return models


def _as_weights_need(
    models: list[_Model], of_weights: Mapping[str, bytes], *, folder: Path, init_from: str
) -> list[_Model]:
    """The models of the run `folder`, from which the weights come. Raises InputError where others are asked for."""
    if len(of_weights) < len(models):
        raise InputError(
            f"init_from={init_from}: one vocabulary serves both languages there: leave tokenizer.target out"
        )
    for model in models:
        if model.given not in (None, of_weights[model.file]):
            raise InputError(
                f"{model.key}.model={model.config.model} is not {folder / model.file}, which the weights of init_from "
                "need: leave it out"
            )
    files = {file: key for key, file in MODEL_FILES.items()}
    return [_Model(files[file], models[0].config, content) for file, content in of_weights.items()]


def _tokenizer_run_dir(run_dir: str, init_from: str) -> RunDir:
    """The run whose tokenizer is taken: once this one has a checkpoint, itself, for the other may be gone by then."""
    own = RunDir(Path(run_dir))
    if list_steps(own.path):
        return own

    # `init_from` is a run directory, or a checkpoint in it: RUN/averaged or RUN/checkpoints/step-N.
    source = Path(init_from).absolute()
    if source.is_dir():
        for folder in (source, *source.parents[:2]):
            if RunDir(folder).tokenizer.is_file():
                return RunDir(folder)
    raise InputError(
        f"init_from={init_from}: no run directory with a {own.tokenizer.name}, nor a checkpoint inside one"
    )


# ---- the digest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Digests:
    """The SHA-256 of everything that a prepared corpus depends on, with its text, and with the files that have it.

    The second is known at once. The first takes another reading where the files are no plain text, so it is kept, and
    with it what that reading has counted.
    """

    of_text: str
    of_files: str
    left_out: list[dict[str, int]] = field(default_factory=list)  # of each set, beside its pairs; empty: nothing

    @classmethod
    def recall(cls, of_files: str, store_dir: Path) -> "_Digests | None":
        """What `remember` has written of these files, if it is there and whole."""
        try:
            found = from_json(cls, read_json(store_dir / f"{of_files[:16]}.json"))
        except (OSError, ValueError):
            return None
        is_whole = found.of_files == of_files and re.fullmatch("[0-9a-f]{64}", found.of_text) is not None
        return found if is_whole else None

    def remember(self, store_dir: Path) -> None:
        """Write them beside the prepared corpus, unless they are the same or there already; no harm if that fails."""
        if self.of_text != self.of_files and self.recall(self.of_files, store_dir) is None:
            with suppress(StorageError):
                write_json(store_dir / f"{self.of_files[:16]}.json", to_json(self))


def _digest_corpus(corpus: _Corpus, store_dir: Path) -> _Digests:
    """Both digests of the corpus. Raises InputError where its text has to be read, and cannot be."""
    texts: list[list[object]] = [
        [text_set.columns, *(file.sha256 for file in text_set.files.values())] for text_set in corpus.sets
    ]
    of_files = _digest(corpus, texts)
    if all(text_set.source.is_plain_text for text_set in corpus.sets):
        return _Digests(of_files, of_files)

    known = _Digests.recall(of_files, store_dir)
    if known is not None and len(known.left_out) in (0, len(corpus.sets)):
        return known

    log.info("reading the training text for its digest")
    left_out = [Counter[str]() for _ in corpus.sets]
    for number, text_set in enumerate(corpus.sets):
        if not text_set.source.is_plain_text:
            texts[number] = [None, *digest_pairs(text_set.source.pairs(left_out[number]))]
    return _Digests(_digest(corpus, texts), of_files, [dict(counts) for counts in left_out] if any(left_out) else [])


def _digest(corpus: _Corpus, texts: Sequence[Sequence[object]]) -> str:
    """The digest of all that the prepared corpus depends on; `texts` says which text each of its sets has."""
    models: list[object] = []
    for model in corpus.models:
        settings = {key: value for key, value in to_json(model.config).items() if key != "target"}
        models.append(settings if model.given is None else hashlib.sha256(model.given).hexdigest())
    tokenizer = models[0] if len(models) == 1 else models

    # A set without a tag has no entry for one.
    tags = [text_set.source.tag for text_set in corpus.sets]
    tagged = [[*text, *([] if tag is None else [{"tag": tag}])] for text, tag in zip(texts, tags, strict=True)]

    # Without the detectors a digest is what it was before there were any.
    filters = to_json(corpus.filters)
    del filters["doctor"]
    if corpus.filters.doctor:
        languages = [text_set.codes for text_set in corpus.sets]
        filters["doctor"] = [cleaning.VERSION, sorted({detector.name for detector in corpus.filters.doctor}), languages]
    parts = [PREPARE_VERSION, STORE_VERSION, tagged, filters, tokenizer]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ---- building -------------------------------------------------------------------------------------------------------


def _open_or_build(path: Path, corpus: _Corpus) -> _Built:
    """Open the prepared corpus; if it is not there, screen the training text and build it, under a lock.

    Another process may have built it by the time that this one has the lock; then that one is opened.
    """
    try:
        if os.path.exists(path):
            return _open(path)
    except InputError as error:
        log.warning("%s; it is built again", error)

    screened = _clean(
        corpus, _Screened(screen_pairs([text_set.source.pairs() for text_set in corpus.sets], corpus.filters))
    )
    _refuse_empty(screened.kept, corpus, screened.dropped)
    try:
        build_once(path, lambda folder: _build(folder, corpus, screened), is_usable=_is_usable)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{path}: cannot be written ({reason}): free space or set data.store_dir") from error
    return _open(path)


def _clean(corpus: _Corpus, screened: _Screened) -> _Screened:
    """The verdicts, with those of the detectors on the pairs that were kept, and samples of what these drop."""
    detectors = corpus.filters.doctor
    if not detectors:
        return screened

    log.info("looking for faults: %s", ", ".join(detector.name for detector in detectors))
    verdicts = []
    samples: dict[str, list[DroppedPair]] = {}
    for number, text_set in enumerate(corpus.sets):
        codes = bytearray(screened.verdicts[number])
        faults = cleaning.find_faults(text_set.source.pairs, detectors, text_set.codes)
        for index, (fault, pair) in enumerate(zip(faults, text_set.source.pairs(), strict=True)):
            if fault is None or codes[index] != KEPT:
                continue
            codes[index] = DETECTED[fault]
            shown = samples.setdefault(fault.name, [])
            if len(shown) < SAMPLES:
                shown.append(DroppedPair(number, index + 1, *(text[:SHOWN] for text in pair)))
        verdicts.append(bytes(codes))
    return _Screened(verdicts, samples)


def _open(path: Path) -> _Built:
    """The prepared corpus at `path`. Raises InputError where it is missing, damaged or incomplete."""
    store = Store.open(path)
    try:
        tokenizers = Tokenizers.load(path)
        report = from_json(BuildReport, read_json(path / REPORT))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a complete prepared corpus ({error})") from error
    return _Built(path, store, tokenizers, report)


def _is_usable(path: Path) -> bool:
    try:
        _open(path)
    except InputError:
        return False
    return True


def _refuse_empty(kept: int, corpus: _Corpus, dropped: Counter[str]) -> None:
    """Raise InputError where no pair is kept."""
    if kept > 0:
        return
    paths = [file.path for text_set in corpus.sets for file in text_set.files.values()]
    files = ", ".join(paths[:MOST_NAMED]) + (f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else "")
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count) or "the files are empty"
    have_no_text = dropped.total() == dropped["empty"] + dropped["no_pieces"]  # no setting of data.filter drops those
    remedy = "data.train" if have_no_text else "data.filter"
    raise InputError(f"{files}: no sentence pair is left to train on ({reasons}): check {remedy}")


def _build(path: Path, corpus: _Corpus, screened: _Screened) -> None:
    """Write the store into the directory `path`, with the tokenizer's model and the report beside it."""
    # The second reading, unless the tokenizer is given; with two models, one for each.
    models = {}
    for side, model in enumerate(corpus.models):
        models[model.file] = model.given or _train_tokenizer(corpus, screened, model, side=side)
    tokenizers = Tokenizers.of(models, path)

    # The third reading.
    log.info("encoding %s pairs", f"{screened.kept:,}")
    kept_by_text = screened.kept_by_text
    kept_by_pieces = bytearray()  # of the pairs that are kept by their text: 1 where the pieces pass the filters, too
    dropped = screened.dropped
    sampled_targets: list[str] = []
    several_sentences = 0  # sources of the store that have more than one
    lengths = np.zeros(corpus.filters.max_length + 1, np.int64)  # how many sources of the store have so many pieces

    with closing(StoreWriter(path, max(tokenizer.vocab_size for tokenizer in tokenizers.sides))) as writer:
        for block in _encode_blocks(corpus, kept_by_text, tokenizers):
            keep = _filter_by_pieces(block.source.counts, block.target.counts, corpus.filters, dropped=dropped)
            writer.add(block.source.select(keep), block.target.select(keep))
            kept_by_pieces += keep.tobytes()
            sampled_targets += block.sampled_targets
            several_sentences += int(block.has_several_sentences[keep].sum())
            lengths += np.bincount(block.source.counts[keep], minlength=len(lengths))
        _refuse_empty(len(writer), corpus, dropped)

        report = BuildReport(
            pairs_read=len(kept_by_text),
            pairs_kept=len(writer),
            sources=_count_pairs(screened, kept_by_pieces),
            dropped={reason: dropped[reason] for reason in _reasons(corpus.filters)},
            filters=corpus.filters,
            tokens=TokenCounts(writer.tokens(0), writer.tokens(1)),
            vocab_size=tokenizers.target.vocab_size,
            targets=RoundTrip.of(sampled_targets, tokenizers.target),
            lines=LineCounts(several_sentences, int(lengths.cumsum().searchsorted(0.9999 * lengths.sum()))),
            samples=screened.samples,
        )
        report_text = json.dumps(_report_json(report), indent=1)
        writer.finish({**tokenizers.models, REPORT: report_text.encode()})


def _report_json(report: BuildReport) -> dict[str, Any]:
    """The report as it was written before there were detectors, unless they were asked for."""
    primitives = to_json(report)
    if not report.filters.doctor:
        del primitives["samples"], primitives["filters"]["doctor"]
    return primitives


def _reasons(filters: FilterConfig) -> list[str]:
    """What a pair can be dropped for, in the order of the checks."""
    asked_for = [detector.name for detector in Detector if detector in (filters.doctor or ())]
    return [*REASONS[:3], *asked_for, *REASONS[3:]]


def _train_tokenizer(corpus: _Corpus, screened: _Screened, model: _Model, *, side: int) -> bytes:
    """Train a tokenizer on the pairs that are kept by their text: on both sides of them, or on its own.

    `side` is 0 for the source's, 1 for the target's.
    """
    pairs = corpus.pairs(screened.kept_by_text)
    is_shared = len(corpus.models) == 1
    lines = chain.from_iterable(pairs) if is_shared else (pair[side] for pair in pairs)  # source and target in turn
    total = 2 * screened.kept if is_shared else screened.kept
    limit = model.config.sample_lines
    whose = "" if is_shared else (" of the source", " of the target")[side]
    log.info("training the tokenizer%s on %s of %s lines", whose, f"{min(total, limit):,}", f"{total:,}")

    content = train_tokenizer(
        sample_lines(lines, total=total, limit=limit),
        model.config,
        tags=corpus.tags if side == 0 else [],  # which stand in front of sources
        key=model.key,
    )
    trim_heap()  # a gigabyte, beside which the store of tens of millions of pairs would need as much again
    return content


def _encode_blocks(corpus: _Corpus, kept_by_text: bytes, tokenizers: Tokenizers) -> Iterator[_EncodedBlock]:
    """The pairs that are kept by their text, block by block, in order.

    A thread takes a whole block: to share each block among the threads would have them wait for each other at its end.
    """
    pairs = corpus.tagged_pairs(kept_by_text)
    sampled_every = max(1, kept_by_text.count(1) // SAMPLED_TARGETS)
    ahead = deque[Future[_EncodedBlock]]()

    with ThreadPoolExecutor(corpus.threads) as pool:
        while block := list(islice(pairs, BLOCK)):
            ahead.append(pool.submit(_encode, block, tokenizers, sampled_every=sampled_every))
            if len(ahead) > corpus.threads:  # one more than are encoded: no thread waits for the next
                yield ahead.popleft().result()
        yield from (future.result() for future in ahead)


def _encode(block: list[Pair], tokenizers: Tokenizers, *, sampled_every: int) -> _EncodedBlock:
    sources = [source for source, _ in block]
    targets = [target for _, target in block]
    return _EncodedBlock(
        source=Sentences.of(tokenizers.source.encode(sources)),
        target=Sentences.of(tokenizers.target.encode(targets)),
        has_several_sentences=np.fromiter(map(has_several_sentences, sources), np.bool_, len(sources)),
        sampled_targets=targets[::sampled_every],
    )


def _filter_by_pieces(
    source_counts: Ids, target_counts: Ids, filters: FilterConfig, *, dropped: Counter[str]
) -> npt.NDArray[np.bool_]:
    """Which pairs `(b,)` to keep, by their numbers of pieces; those that are not kept are counted in `dropped`."""
    shorter = np.minimum(source_counts, target_counts)
    longer = np.maximum(source_counts, target_counts)

    empty = shorter == 0  # such as lone zero-width spaces
    too_long = ~empty & (longer > filters.max_length)
    ratio = ~empty & ~too_long & (longer > filters.max_ratio * shorter)
    for reason, is_dropped in (("no_pieces", empty), ("too_long", too_long), ("ratio", ratio)):
        dropped[reason] += int(is_dropped.sum())
    return ~(empty | too_long | ratio)


def _count_pairs(screened: _Screened, kept_by_pieces: bytearray) -> list[PairCounts]:
    """The pairs of each set, and how many of them are in the store."""
    counts = []
    start = 0  # of the set, among the pairs that are kept by their text
    for verdicts in screened.verdicts:
        end = start + verdicts.count(KEPT)
        counts.append(PairCounts(len(verdicts), kept_by_pieces.count(1, start, end)))
        start = end
    return counts
