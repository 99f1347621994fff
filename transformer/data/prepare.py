"""From raw text to what training reads.

    training_text    the files of every set; a digest names the prepared corpus, which may be there already
    screening        first reading: a verdict on the text of every training pair
    building         second reading: the tokenizer; third: encode, filter by the number of pieces, write the store

Whoever builds holds a file lock; others wait, then use what is there. Nothing but copies of data sets is written before
every text has been read to its end. Text is read once for its digest, and three times more to build: memory must not
grow with it.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from transformer import registry
from transformer.config.jobs import TrainJob
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import DataConfig
from transformer.data.building import build, open_built
from transformer.data.corpus import Pair
from transformer.data.parts import folder_of, is_begun, join_parts, retire_parts, retire_rest
from transformer.data.report import BuildReport, DataReport, PairCounts, SetReport
from transformer.data.round_trip import RoundTrip, warn_of_changes
from transformer.data.screening import screen
from transformer.data.store import STORE_MARKS, Mixture, Store
from transformer.data.tokenizer import Tokenizer, Tokenizers
from transformer.data.training_text import (
    TextSet,
    TrainingText,
    check_languages,
    check_texts,
    digest_text,
    models_of,
    open_sets,
    store_dir_of,
    training_text,
    training_weights,
)
from transformer.errors import InputError, StorageError
from transformer.files import build_once, is_sound
from transformer.vocabulary import UNK, describe_vocab_size, own_source_size

CHECKED = 10_000  # pairs of a training set, from its beginning, that are looked at for plain faults

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
    dev: dict[str, list[Pair]]  # by their keys below `data`: one, `dev`, or several
    test: dict[str, list[Pair]]
    digest_of_files: str  # what the digest once was: another one, unless all of the training text is in plain files

    def is_of(self, digest: str) -> bool:
        """Whether a run whose record has this digest was trained on the same data."""
        return digest in (self.report.digest, self.digest_of_files)

    def to_share(self) -> dict[str, Any]:
        """What another process needs to open the same, as JSON: that process scores no test sets."""
        return {
            "path": str(self.path),
            "mixture": self.mixture,
            "report": to_json(self.report),
            "dev": self.dev,
            "digest_of_files": self.digest_of_files,
        }

    @classmethod
    def of_shared(cls, shared: Mapping[str, Any]) -> "Prepared":
        """The same corpus in another process: mapped, without reading it or the raw text again.

        Raises InputError where the corpus is not to be found, such as on another machine without a shared disk.
        """
        path = Path(shared["path"])
        try:
            tokenizers = Tokenizers.load(path)
        except InputError as error:
            raise InputError(f"{path}: cannot be read by every process: set data.store_dir to a shared disk") from error
        return cls(
            path=path,
            store=Store.open(path, is_verified=True),
            mixture=tuple((pairs, weight) for pairs, weight in shared["mixture"]),
            tokenizers=tokenizers,
            report=from_json(DataReport, shared["report"]),
            dev={name: [(source, reference) for source, reference in pairs] for name, pairs in shared["dev"].items()},
            test={},
            digest_of_files=shared["digest_of_files"],
        )


# ---- the command ----------------------------------------------------------------------------------------------------


def prepare(job: TrainJob) -> Prepared:
    """Read and check every file, then build the prepared corpus, or open the one that is there.

    Raises InputError for bad files and settings, StorageError where the store cannot be written.
    """
    # Refuse what is cheap to refuse.
    began = time.monotonic()
    check_languages(job.data)
    check_texts(job.data)
    store_dir = store_dir_of(job)
    mixture_weights = training_weights(job.data)
    models = models_of(job)

    # Build the prepared corpus from the training sets, or open the one that is there.
    sets = open_sets(job.data, store_dir)
    corpus = training_text(job, sets, models)
    digests = digest_text(corpus, store_dir)
    if job.data.check:
        _warn_of_faults(sets)
    path = store_dir / digests.of_text[:16]
    store, tokenizers, built = _open_or_build(path, corpus)
    digests.remember(store_dir)
    counts = dict(zip(mixture_weights, built.sources, strict=True))
    if job.data.temperature is not None:
        mixture_weights = _at_temperature(mixture_weights, counts, job.data.temperature)

    # Report, and warn of references that no translation can match.
    left_out = dict(zip(mixture_weights, digests.left_out or [{} for _ in corpus.sets], strict=True))
    report = _data_report(
        job.data,
        digests.of_text,
        sets,
        counts=counts,
        left_out=left_out,
        mixture_weights=mixture_weights,
        built=built,
        tokenizers=tokenizers,
    )
    _log_left_out(report)
    round_trips = {f"data.{name}": set_report.references for name, set_report in report.sets.items()}
    round_trips["a sample of the training targets"] = report.targets
    of_target = models[-1]
    warn_of_changes(round_trips, of_target.config, key=of_target.key, is_given=of_target.given is not None)
    _warn_of_cut_tags(job.data, tokenizers.source, is_given=models[0].given is not None)
    if len(mixture_weights) > 1:
        _log_mixture(mixture_weights, counts)
    log.info("data ready: %s; %.1f s", _summary(report), time.monotonic() - began)

    return Prepared(
        path=path,
        store=store,
        mixture=tuple((counts[name].pairs_kept, weight) for name, weight in mixture_weights.items()),
        tokenizers=tokenizers,
        report=report,
        dev={name: sets[name].pairs or [] for name in job.data.dev_sets()},
        test={name: sets[f"test.{name}"].pairs or [] for name in job.data.test},
        digest_of_files=digests.of_files,
    )


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


def _open_or_build(path: Path, corpus: TrainingText) -> tuple[Store, Tokenizers, BuildReport]:
    """Open the prepared corpus; if it is not there, join its parts, or screen the text and build it, under a lock.

    Another process may have built it by the time that this one has the lock; then that one is opened.
    """
    parts = folder_of(corpus, path.parent)
    try:
        if os.path.exists(path):
            built = open_built(path)
            retire_rest(parts, path.name)
            return built
    except InputError as error:
        log.warning("%s; it is built again", error)

    is_in_parts = is_begun(parts)
    screened = None if is_in_parts else screen(corpus)
    try:
        build_once(
            path,
            lambda folder: (
                join_parts(folder, corpus, parts, name=path.name)
                if screened is None
                else build(folder, corpus, screened)
            ),
            is_usable=partial(is_sound, open_built),
            marks=STORE_MARKS,
        )
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{path}: cannot be written ({reason}): free space or set data.store_dir") from error
    built = open_built(path)
    if is_in_parts:
        retire_parts(parts, path.name)
    return built


# ---- what is said of it ---------------------------------------------------------------------------------------------


def _data_report(
    data: DataConfig,
    digest: str,
    sets: Mapping[str, TextSet],
    *,
    counts: Mapping[str, PairCounts],
    left_out: Mapping[str, dict[str, int]],
    mixture_weights: Mapping[str, float],
    built: BuildReport,
    tokenizers: Tokenizers,
) -> DataReport:
    # A set is either trained on, and has counts, or kept whole, and has pairs.
    set_reports = {}
    for name, text_set in sets.items():
        trained_on = counts.get(name)
        pairs = text_set.pairs
        set_reports[name] = SetReport(
            files=text_set.files,
            columns=None if text_set.source.columns is None else list(text_set.source.columns),
            origin=text_set.source.origin,
            weight=mixture_weights.get(name),
            pairs_read=len(pairs or ()) if trained_on is None else trained_on.pairs_read,
            pairs_kept=None if trained_on is None else trained_on.pairs_kept,
            references=None
            if pairs is None
            else RoundTrip.of([reference for _, reference in pairs], tokenizers.target),
            left_out=left_out.get(name, text_set.left_out),
        )

    return DataReport(
        digest=digest,
        src_lang=data.src_lang,
        tgt_lang=data.tgt_lang,
        sets=set_reports,
        source_vocab_size=own_source_size(tokenizers.vocab_sizes),
        **{name: value for name, value in vars(built).items() if name != "sources"},  # which `sets` have
    )


def _warn_of_faults(sets: Mapping[str, TextSet]) -> None:
    """Log what is plainly wrong with the text, before anything is made of it."""
    if registry.has("lines", "faults"):
        first = {
            name: list(islice(text_set.source.pairs(), CHECKED)) if text_set.pairs is None else text_set.pairs
            for name, text_set in sets.items()
        }
        languages = {name: text_set.source.languages for name, text_set in sets.items()}
        for warning in registry.find("lines", "faults")(first, languages):
            log.warning("%s (`transformer doctor` tells more)", warning)


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
    log.warning("tags that are not one piece of the tokenizer are split: %s; %s", "; ".join(counts), remedy)


def _summary(report: DataReport) -> str:
    """One line: `500 of 507 pairs (1.38% dropped: empty 7), 2,000 + 2,100 tokens, 400 pieces`."""
    pairs = f"{report.pairs_kept:,} of {report.pairs_read:,} pairs"

    dropped = f"{1 - report.pairs_kept / report.pairs_read:.2%} dropped"
    reasons = [f"{reason} {count:,}" for reason, count in report.dropped.items() if count]
    if reasons:
        dropped += f": {', '.join(reasons)}"

    tokens = f"{report.tokens.src:,} + {report.tokens.tgt:,} tokens"
    return f"{pairs} ({dropped}), {tokens}, {describe_vocab_size(report.vocab_sizes)}"
