"""The training text of a job, and everything that decides how it is prepared: files, filters, tokenizers.

A prepared corpus is named by a digest of all of these: the text (whatever files hold it), the settings, and the
versions of the formats. So it is built once, and shared by every run that agrees on them.
"""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import chain, compress
from pathlib import Path

from transformer import registry
from transformer.config.jobs import TrainJob
from transformer.config.languages import language_of
from transformer.config.primitives import from_json, to_json
from transformer.config.settings import DataConfig, FilterConfig, PairConfig, TokenizerConfig, is_training_set
from transformer.data.corpus import Pair, digest_lines, digest_pairs
from transformer.data.report import FileReport
from transformer.data.source import Source, is_copied, resolve_source, store_beside
from transformer.data.store import STORE_VERSION
from transformer.data.tokenizer import Tokenizer, read_model, read_models
from transformer.errors import InputError, StorageError
from transformer.files import read_json, write_json
from transformer.machine import resolve_threads
from transformer.plugins import Screen
from transformer.run_dir import TARGET_TOKENIZER, TOKENIZER, RunDir, list_steps

PREPARE_VERSION = 3
MODEL_FILES = {"tokenizer": TOKENIZER, "tokenizer.target": TARGET_TOKENIZER}  # by the group of the settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextSet:
    """A configured set of pairs, whose files have been found."""

    source: Source
    files: dict[str, FileReport] = field(default_factory=dict)  # empty: they have not been digested
    is_plain_text: bool = False  # whether the digests of its files are those of its text: see `digest_lines`
    pairs: list[Pair] | None = None  # None: of a training set, which is read block by block
    left_out: dict[str, int] = field(default_factory=dict)  # beside pairs, by kind; of a training set: see `Digests`

    @property
    def codes(self) -> tuple[str, str]:
        """The languages as the detectors know them."""
        source, target = self.source.languages
        return language_of(source, "data.src_lang"), language_of(target, "data.tgt_lang")


@dataclass(frozen=True)
class Model:
    """A SentencePiece model that encodes the corpus."""

    key: str  # the group of its settings
    config: TokenizerConfig
    given: bytes | None  # None: to be trained

    @property
    def file(self) -> str:
        """Its name in a prepared corpus and in a run directory."""
        return MODEL_FILES[self.key]


@dataclass(frozen=True)
class TrainingText:
    """The training text and everything that decides what becomes of it."""

    sets: list[TextSet]  # one after the other in the store
    filters: FilterConfig
    models: list[Model]  # one for both languages, or that of the source and that of the target
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


# ---- the sets of a job ----------------------------------------------------------------------------------------------


def check_languages(data: DataConfig) -> None:
    """Raise InputError for a language that is no code, where one is needed: before anything is read."""
    for key, language in {**data.tgt_langs(), **(data.src_langs() if data.filter.doctor else {})}.items():
        language_of(language, f"data.{key}")


def check_texts(data: DataConfig) -> None:
    """Raise InputError for files of text that are not named, all at once."""
    missing = [
        f"data.{name}.{side}"
        for name, pair in sorted(data.sets().items(), key=lambda item: not is_training_set(item[0]))
        for side, value in (("src", pair.src), ("tgt", pair.tgt))
        if not pair.dataset and not value
    ]
    if missing:
        dataset = f"{missing[0].rpartition('.')[0]}.dataset"
        *others, last = missing
        what, files = (f"{', '.join(others)} and {last} are", "text files") if others else (f"{last} is", "a text file")
        raise InputError(f"{what} not set: name {files}, or a data set by {dataset}")


def store_dir_of(job: TrainJob) -> Path:
    """Where the prepared corpora of a job are."""
    return Path(job.data.store_dir) if job.data.store_dir is not None else store_beside(job.run_dir)


def training_text(job: TrainJob, sets: Mapping[str, TextSet], models: list[Model]) -> TrainingText:
    """The training text of a job; `sets` are its sets by name, those that are trained on among them."""
    return TrainingText(
        sets=[sets[name] for name in training_weights(job.data)],
        filters=job.data.filter,
        models=models,
        threads=resolve_threads(job.train.threads),
    )


def training_weights(data: DataConfig) -> dict[str, float]:
    """The training sets in the order of the store, each with the copies of a pair that an epoch has."""
    weights = {"train": 1.0}
    for name, extra in sorted(data.extra.items()):
        weights[f"extra.{name}"] = extra.weight
    return weights


def configured_sets(data: DataConfig) -> dict[str, PairConfig]:
    """Every set of pairs by its key, first those whose faults show soonest: small sets, and files on this machine."""
    return dict(sorted(data.sets().items(), key=lambda item: is_copied(item[1])))


def find_set(pair: PairConfig, name: str, data: DataConfig, *, store_dir: Path) -> TextSet:
    """Find the files of a set. Raises InputError."""
    return TextSet(resolve_source(pair, f"data.{name}", languages=data.languages_of(name), store_dir=store_dir))


def open_sets(data: DataConfig, store_dir: Path) -> dict[str, TextSet]:
    """Find and digest the files of every set. Raises InputError.

    Development and test sets are read whole: their faults must show before hours of work.
    """
    trained_on = training_weights(data)
    sets = {}
    for name, pair in configured_sets(data).items():
        found = find_set(pair, name, data, store_dir=store_dir)
        described = {part: describe_file(path, f"data.{name}") for part, path in found.source.files.items()}
        files = {part: file for part, (file, _) in described.items()}
        is_plain_text = found.source.is_plain_text and all(is_plain for _, is_plain in described.values())
        left_out = Counter[str]()
        pairs = None if name in trained_on else found.source.load(f"data.{name}", left_out)
        sets[name] = replace(found, files=files, is_plain_text=is_plain_text, pairs=pairs, left_out=left_out)
    return sets


def describe_file(path: Path, key: str) -> tuple[FileReport, bool]:
    """Path, size and digest of a file, and whether that is the digest of its lines, too."""
    try:
        if path.is_fifo():
            raise InputError(f"{path}: a pipe, but text is read several times: write it to a file for {key}")
        str(path).encode()
        digest, is_of_lines = digest_lines(path)
    except UnicodeEncodeError:
        raise InputError(f"{str(path)!a}: its name is not in UTF-8, so no record could hold it: rename it") from None
    except OSError as error:
        remedy = f"check {key} and data.root"
        if key.startswith("data.test."):
            remedy += f"; where the experiment has brought this set, '~{key}' leaves it out"
        raise InputError(f"{path}: cannot be read ({error.strerror or error}): {remedy}") from error
    return FileReport(str(path), digest.size, digest.sha256), is_of_lines


# ---- a tokenizer that is given, not trained -------------------------------------------------------------------------


def models_of(job: TrainJob) -> list[Model]:
    """The model for both languages, or those of the source and of the target.

    Those that are not to be trained are given: that of `tokenizer.model`, or of the run where the weights come from.
    """
    models = []
    for key, config in job.tokenizer.models().items():
        given = None if config.model is None else read_model(Path(config.model).resolve())  # it may be a link
        models.append(Model(key, config, given))
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
    models: list[Model], of_weights: Mapping[str, bytes], *, folder: Path, init_from: str
) -> list[Model]:
    """The models of the run `folder`, from which the weights come. Raises InputError where others are asked for."""
    if len(of_weights) < len(models):
        raise InputError(
            f"init_from={init_from}: that run has one vocabulary for both languages: leave tokenizer.target out"
        )
    for model in models:
        if model.given not in (None, of_weights[model.file]):
            raise InputError(
                f"{model.key}.model={model.config.model} is not {folder / model.file}, which the weights of init_from "
                "need: leave it out"
            )
    files = {file: key for key, file in MODEL_FILES.items()}
    return [Model(files[file], models[0].config, content) for file, content in of_weights.items()]


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
class Digests:
    """The SHA-256 of everything that a prepared corpus depends on, with its text, and with the files that have it.

    The second is known at once. The first takes another reading where the files are no plain text, or have other ends
    of lines than we write, so it is kept, and with it what that reading has counted.
    """

    of_text: str
    of_files: str
    left_out: list[dict[str, int]] = field(default_factory=list)  # of each set, beside its pairs; empty: nothing

    @classmethod
    def recall(cls, of_files: str, store_dir: Path) -> "Digests | None":
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


def digest_text(corpus: TrainingText, store_dir: Path) -> Digests:
    """Both digests of the corpus. Raises InputError if its text must be read and cannot be."""
    texts: list[list[object]] = [
        [text_set.source.columns, *(file.sha256 for file in text_set.files.values())] for text_set in corpus.sets
    ]
    of_files = _digest(corpus, texts)
    if all(text_set.is_plain_text for text_set in corpus.sets):
        return Digests(of_files, of_files)

    known = Digests.recall(of_files, store_dir)
    if known is not None and len(known.left_out) in (0, len(corpus.sets)):
        return known

    log.info("reading the training text for its digest")
    left_out = [Counter[str]() for _ in corpus.sets]
    for number, text_set in enumerate(corpus.sets):
        if not text_set.is_plain_text:
            texts[number] = [None, *digest_pairs(text_set.source.pairs(left_out[number]))]
    return Digests(_digest(corpus, texts), of_files, [dict(counts) for counts in left_out] if any(left_out) else [])


def digest_outline(corpus: TrainingText) -> str:
    """A digest of the settings, and of the names and sizes of the files: known at once, but not of what they hold.

    Raises InputError where there is no such file.
    """
    texts: list[list[object]] = []
    for text_set in corpus.sets:
        sizes = [[path.name, _size(path)] for path in text_set.source.files.values()]
        texts.append([text_set.source.columns, *sizes])
    return _digest(corpus, texts)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}): check data.root") from error


def screens_of(names: Sequence[str]) -> list[tuple[Screen, list[str]]]:
    """The screens that have these names, each with them, in the order in which a pair is looked at.

    Raises InputError where one cannot be had.
    """
    own = list(registry.OWN["screen"])
    in_order = [name for name in own if name in names] + [name for name in names if name not in own]
    screens: dict[int, tuple[Screen, list[str]]] = {}
    for name in dict.fromkeys(in_order):
        screen: Screen = registry.find("screen", name)
        screens.setdefault(id(screen), (screen, []))[1].append(name)
    return list(screens.values())


def _digest(corpus: TrainingText, texts: Sequence[Sequence[object]]) -> str:
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
        filters["doctor"] = [
            [one.VERSION, names, *([to_json(one)] if is_dataclass(one) else [])]
            for one, names in screens_of(corpus.filters.doctor)
        ] + languages
    parts = [PREPARE_VERSION, STORE_VERSION, tagged, filters, tokenizer]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
