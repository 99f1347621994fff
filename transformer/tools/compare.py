"""`transformer compare`: the translations of two systems or more, each beside those of the first, the baseline.

    read        the text that finished runs keep, or files; nothing is decoded
    scores      BLEU, chrF and TER with their intervals and two tests of significance, by `significance`
    lengths     BLEU and chrF of short and of long sentences
    rarity      how many of the frequent and of the rare words are found
    changed     the sentences whose chrF differs most

Words are what BLEU counts: the tokens of its tokenizer, which for Chinese and Japanese are no words between spaces.
"""

import logging
import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from transformer.config.jobs import CompareJob
from transformer.data.corpus import Pair
from transformer.data.report import FileReport, SetReport, read_report
from transformer.data.source import Source
from transformer.errors import CheckpointError, InputError
from transformer.evaluation.files import read_parallel
from transformer.evaluation.score import check_plain_text
from transformer.evaluation.sets import check_kept, read_set
from transformer.files import digest_file
from transformer.records import Results
from transformer.run_dir import HYPOTHESIS, RunDir
from transformer.tools import significance
from transformer.tools.significance import MetricComparison, Metrics, compare_systems, resampling_seed

log = logging.getLogger(__name__)

LENGTHS = (0, 6, 11, 16, 21, 31, 51)  # words, the least of each range of sentences
FREQUENCIES = (0, 1, 2, 5, 10, 100, 1000)  # occurrences, the least of each range of words
MOST_LINES = 1_000_000  # training sentences whose words are counted

Tokenise = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class LengthRow:
    """Scores of the sentences whose reference has `least` to `most` words; one of each system."""

    least: int
    most: int | None
    sentences: int
    bleu: list[float]
    chrf: list[float]


@dataclass(frozen=True)
class RarityRow:
    """Of the words that occur `least` to `most` times, the F1 in percent with which each system translates them."""

    least: int
    most: int | None
    words: int  # of the references
    f1: list[float]


@dataclass(frozen=True)
class Change:
    """A sentence that two systems translate differently; chrF is that of the sentence by itself."""

    line: int  # counted from 1
    source: str | None  # None where files are compared
    references: list[str]
    baseline: str
    baseline_chrf: float
    translation: str
    chrf: float


@dataclass(frozen=True)
class SetComparison:
    """One test set: all systems side by side, and what changed in each from the baseline on."""

    sentences: int
    scores: list[MetricComparison]
    by_length: list[LengthRow]
    counted_in: str  # where the frequencies of words are from
    by_rarity: list[RarityRow]
    changed: dict[str, list[Change]]  # by system


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns."""

    systems: list[str]  # the first is the baseline
    test_sets: dict[str, SetComparison]
    resamples: int
    trials: int
    seed: str  # of both tests; digits, or none
    notes: list[str]


@dataclass(frozen=True)
class Texts:
    """A test set with the translations of each system."""

    sources: list[str] | None
    references: list[list[str]]  # of each kind one list
    translations: dict[str, list[str]]
    recorded: dict[str, float]  # the BLEU that results.json has of a run's translations


@dataclass(frozen=True)
class Material:
    """All that is compared, and in which language it is."""

    sets: dict[str, Texts]
    tgt_lang: str
    baseline: RunDir | None  # None where files are compared
    notes: list[str]


def compare(job: CompareJob) -> Comparison:
    """Compare the translations of the job's runs, or files.

    Raises InputError where there are not two systems with a test set in common, or they cannot be compared fairly;
    CheckpointError where a run directory is damaged.
    """
    seed = resampling_seed()
    if job.hypotheses:
        material = _read_files(job)
    else:
        _check_names(job.runs, "transformer compare runs/a runs/b")
        material = read_runs(job.runs, tgt_lang=job.data.tgt_lang)
    metrics = Metrics.of(tgt_lang=material.tgt_lang, lowercase=job.lowercase)
    tokenise = word_splitter(metrics, lowercase=job.lowercase)
    trained_on = None if material.baseline is None else _count_training_words(material.baseline, tokenise)
    test_sets = {}
    notes = list(material.notes)
    for name, texts in material.sets.items():
        log.info("%s: %d systems on %d sentences", name, len(texts.translations), len(texts.references[0]))
        test_sets[name] = _compare_set(texts, metrics, tokenise, trained_on=trained_on, most_changes=job.changed)
        if not job.lowercase:
            notes += other_translations(name, texts, test_sets[name].scores)
    return Comparison(
        systems=job.runs or job.hypotheses,
        test_sets=test_sets,
        resamples=significance.RESAMPLES,
        trials=significance.TRIALS,
        seed=seed,
        notes=notes,
    )


def word_splitter(metrics: Metrics, *, lowercase: bool) -> Tokenise:
    """A function that splits a text into the words that BLEU counts."""

    def split(text: str) -> Sequence[str]:
        words: str = metrics.bleu.tokenizer(text.lower() if lowercase else text)
        return words.split()

    return split


def other_translations(test_set: str, texts: Texts, compared: Sequence[MetricComparison]) -> list[str]:
    """A note for each run whose translations are not those of its results: `evaluate` writes over them."""
    bleu, *_ = compared
    scores = {name: of.score for name, of in zip(texts.translations, bleu.systems, strict=True)}
    return [
        f"{name}: the translations of {test_set} are not those of its results.json, whose BLEU is {recorded:.2f}: "
        "`evaluate` has written others since."
        for name, recorded in texts.recorded.items()
        if not math.isclose(recorded, scores[name], abs_tol=1e-9)
    ]


# ---- what is compared -----------------------------------------------------------------------------------------------


def _read_files(job: CompareJob) -> Material:
    _check_names(job.hypotheses, "hypotheses=[A,B] references=C data.tgt_lang=..")
    texts = read_parallel([*job.hypotheses, *job.references])
    if not texts[0]:
        raise InputError(f"{job.hypotheses[0]}: there are no sentences to compare")

    count = len(job.hypotheses)
    translations = dict(zip(job.hypotheses, texts[:count], strict=True))
    references = texts[count:]
    for name, lines in translations.items():
        try:
            check_plain_text(lines, *references)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    sets = {", ".join(job.references): Texts(None, references, translations, recorded={})}
    return Material(sets, str(job.data.tgt_lang), baseline=None, notes=[])


def read_runs(names: Sequence[str], *, tgt_lang: str | None) -> Material:
    """The test sets that all of these run directories were scored on, with their translations.

    `tgt_lang` is the language of the text; None: that of the first run. Raises InputError where a run is not finished,
    or the runs cannot be compared fairly; CheckpointError where one is damaged.
    """
    runs = {name: RunDir(Path(name)) for name in names}
    results = {name: _read_results(run) for name, run in runs.items()}
    baseline = names[0]

    # The test sets that all of them were scored on, under the same signatures.
    shared = [name for name in results[baseline].test_sets if all(name in of.test_sets for of in results.values())]
    if not shared:
        those = "; ".join(f"{name} has {', '.join(of.test_sets) or 'none'}" for name, of in results.items())
        raise InputError(
            f"the runs have no test set in common: {those}: compare runs that were scored on the same text"
        )
    for name in names[1:]:
        _check_signatures(baseline, name, results, shared)

    # Their text. It must be the same, and that of the results.
    kept = {name: _read_kept(run, results[name]) for name, run in runs.items()}
    sets = {}
    for test_set in shared:
        pairs = kept[baseline][test_set]
        for name in names[1:]:
            _check_same_text(test_set, pairs, kept[name][test_set], runs=(baseline, name))
        sets[test_set] = Texts(
            sources=[source for source, _ in pairs],
            references=[[reference for _, reference in pairs]],
            translations={
                name: [text for _, text in read_set(run, test_set, HYPOTHESIS)] for name, run in runs.items()
            },
            recorded={name: of.test_sets[test_set].bleu for name, of in results.items()},
        )

    left_out = sorted({name for of in results.values() for name in of.test_sets} - set(shared))
    notes = [f"Not every run was scored on {', '.join(left_out)}: left out."] if left_out else []
    tgt_lang = tgt_lang or runs[baseline].read_record().config.data.tgt_lang
    return Material(sets, tgt_lang, runs[baseline], notes)


def _check_names(names: Sequence[str], usage: str) -> None:
    if len(names) < 2:
        raise InputError(f"there must be two systems or more to compare: {usage}")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{twice[0]} is named twice: name each system once")


def _read_results(run: RunDir) -> Results:
    if not run.path.is_dir():
        raise InputError(f"{run.path}: no such run directory")
    if not run.results.exists():
        raise InputError(
            f"{run.path}: no {run.results.name}, so there is nothing to compare yet: the command that trains it "
            "finishes it; or name files of translations by hypotheses=[A,B] references=C"
        )
    return run.read_results()


def _read_kept(run: RunDir, results: Results) -> dict[str, list[Pair]]:
    """The test sets of the results, with their references."""
    kept = {name: read_set(run, name) for name in results.test_sets}
    check_kept(run, kept)
    return kept


def _check_signatures(baseline: str, name: str, results: Mapping[str, Results], test_sets: Sequence[str]) -> None:
    """Scores under two signatures are no scores of one kind: another language, or another version of sacreBLEU."""
    for test_set in test_sets:
        ours = results[baseline].test_sets[test_set]
        theirs = results[name].test_sets[test_set]
        for one, other in (
            (ours.bleu_signature, theirs.bleu_signature),
            (ours.chrf_signature, theirs.chrf_signature),
        ):
            if one != other:
                raise InputError(
                    f"{baseline} and {name} were not scored alike on {test_set}: {one} and {other}; "
                    f"to score both now, name their files by hypotheses=[A,B] references=C, such as "
                    f"{RunDir(Path(name)).text(test_set, HYPOTHESIS)}"
                )


def _check_same_text(test_set: str, ours: Sequence[Pair], theirs: Sequence[Pair], *, runs: tuple[str, str]) -> None:
    if len(ours) != len(theirs):
        raise InputError(
            f"{test_set} is not the same test set in {runs[0]} and {runs[1]}: {len(ours)} and {len(theirs)} sentences"
        )
    for line, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        if one != other:
            raise InputError(
                f"{test_set} is not the same test set in {runs[0]} and {runs[1]}: line {line} is another sentence"
            )


# ---- the comparison of a test set -----------------------------------------------------------------------------------


def _compare_set(
    texts: Texts,
    metrics: Metrics,
    tokenise: Tokenise,
    *,
    trained_on: "_WordCounts | None",
    most_changes: int,
) -> SetComparison:
    references = [tokenise(text) for text in texts.references[0]]
    counts = trained_on or _WordCounts("the references", Counter(word for words in references for word in words))
    baseline, *others = texts.translations
    return SetComparison(
        sentences=len(references),
        scores=compare_systems(texts.translations, texts.references, metrics=metrics),
        by_length=_score_by_length(texts, metrics, [len(words) for words in references]),
        counted_in=counts.place,
        by_rarity=_score_by_rarity(
            [[tokenise(text) for text in lines] for lines in texts.translations.values()], references, counts.words
        ),
        changed={name: _changes(texts, metrics, baseline, name)[:most_changes] for name in others},
    )


def _ranges(least: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """The least and the most of each range."""
    for one, following in pairwise(least):
        yield one, following - 1
    yield least[-1], None


def sentences_by_length(lengths: Sequence[int]) -> Iterator[tuple[int, int | None, list[int]]]:
    """The least and the most of each range of lengths that there are sentences of, and the places of those."""
    for number, (least, most) in enumerate(_ranges(LENGTHS), 1):
        chosen = [index for index, length in enumerate(lengths) if bisect(LENGTHS, length) == number]
        if chosen:
            yield least, most, chosen


def _score_by_length(texts: Texts, metrics: Metrics, lengths: Sequence[int]) -> list[LengthRow]:
    """The scores of each range of lengths that there are sentences of; `lengths` are those of the first reference."""
    rows = []
    for least, most, chosen in sentences_by_length(lengths):
        references = [[lines[index] for index in chosen] for lines in texts.references]
        systems = [[lines[index] for index in chosen] for lines in texts.translations.values()]
        rows.append(
            LengthRow(
                least,
                most,
                sentences=len(chosen),
                bleu=[metrics.bleu.corpus_score(lines, references).score for lines in systems],
                chrf=[metrics.chrf.corpus_score(lines, references).score for lines in systems],
            )
        )
    return rows


def _score_by_rarity(
    systems: Sequence[Sequence[Sequence[str]]], references: Sequence[Sequence[str]], frequencies: Mapping[str, int]
) -> list[RarityRow]:
    """How well each system translates the words of each range of frequencies that there are in the references.

    A word of a sentence is found as often as both the translation and the reference have it.
    """

    def count(words: Iterable[str]) -> Counter[int]:
        return Counter(bisect(FREQUENCIES, frequencies.get(word, 0)) for word in words)

    wanted = count(word for words in references for word in words)
    of_systems = []
    for translations in systems:
        given = count(word for words in translations for word in words)
        found: Counter[int] = Counter()
        for words, reference in zip(translations, references, strict=True):
            found += count((Counter(words) & Counter(reference)).elements())
        of_systems.append((given, found))

    return [
        RarityRow(
            least,
            most,
            words=wanted[number],
            f1=[100 * 2 * found[number] / (given[number] + wanted[number]) for given, found in of_systems],
        )
        for number, (least, most) in enumerate(_ranges(FREQUENCIES), 1)
        if wanted[number]
    ]


def _changes(texts: Texts, metrics: Metrics, baseline: str, system: str) -> list[Change]:
    """The sentences that the two translate differently, those whose chrF differs most first."""
    changes = []
    pairs = zip(texts.translations[baseline], texts.translations[system], strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        if ours == theirs:
            continue
        references = [lines[index] for lines in texts.references]
        changes.append(
            Change(
                line=index + 1,
                source=None if texts.sources is None else texts.sources[index],
                references=references,
                baseline=ours,
                baseline_chrf=metrics.chrf.sentence_score(ours, references).score,
                translation=theirs,
                chrf=metrics.chrf.sentence_score(theirs, references).score,
            )
        )
    return sorted(changes, key=lambda change: -abs(change.chrf - change.baseline_chrf))


# ---- how often a word occurs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WordCounts:
    """How often each word occurs, and where that was counted."""

    place: str
    words: Mapping[str, int]


def _count_training_words(run: RunDir, tokenise: Tokenise) -> _WordCounts | None:
    """The words of the text that a run was trained on, if it still is where it was; None otherwise."""
    try:
        sets = [of for of in read_report(run).sets.values() if of.weight is not None]
    except CheckpointError as error:
        log.warning("%s", error)
        return None
    files = [file for of in sets for file in of.files.values()]
    if not all(map(_is_unchanged, files)):
        log.info("%s: its training text is not where it was: word frequencies are those of the references", run.path)
        return None

    words: Counter[str] = Counter()
    targets = (target for of in sets for _, target in _pairs_of(of))
    for target in islice(targets, MOST_LINES):
        words.update(tokenise(target))
    read = sum(of.pairs_read for of in sets)
    part = f"the first {MOST_LINES:,} sentences of " if read > MOST_LINES else ""
    return _WordCounts(f"{part}the training text of {run.path}", words)


def _is_unchanged(file: FileReport) -> bool:
    try:
        digest = digest_file(Path(file.path))
    except OSError:
        return False
    return digest.size == file.bytes and digest.sha256 == file.sha256


def _pairs_of(of: SetReport) -> Iterator[Pair]:
    columns = None if of.columns is None else (of.columns[0], of.columns[1])
    return Source({name: Path(file.path) for name, file in of.files.items()}, columns).pairs()
