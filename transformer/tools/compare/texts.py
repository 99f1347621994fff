"""What is compared: test sets with the translations of two systems or more, from finished runs or from files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from transformer.config.settings import TAG, BleuTokenizer
from transformer.data.corpus import Pair, is_blank
from transformer.errors import InputError
from transformer.evaluation.files import read_parallel
from transformer.evaluation.judgements import read_judgements
from transformer.evaluation.metrics import ALWAYS, named
from transformer.evaluation.score import check_plain_text
from transformer.evaluation.sets import check_kept, read_set, read_translations
from transformer.plugins import JudgedText
from transformer.records import NamedScore, Results
from transformer.run_dir import HYPOTHESIS, RunDir
from transformer.run_names import run_path
from transformer.tools.compare.job import CompareJob

PUBLISHED = "published"  # the system whose translations are somebody else's


@dataclass(frozen=True)
class Judged:
    """What an external judge said of every system: the scores of the segments, in the order of the systems."""

    judge: str
    command: str  # with its version, to show
    segments: list[list[float]]


@dataclass(frozen=True)
class Texts:
    """A test set with the translations of each system."""

    sources: list[str] | None
    references: list[list[str]]  # one list, or several where each sentence has several references
    translations: dict[str, list[str]]
    tgt_lang: str
    tokenize: BleuTokenizer | None  # how BLEU cuts it into words; None: by the language
    judged: list[Judged] = field(default_factory=list)
    stored: dict[str, list[NamedScore]] = field(default_factory=dict)  # by plug-ins, as the runs keep them


@dataclass(frozen=True)
class Material:
    """All that is compared."""

    systems: list[str]  # the first is the baseline
    sets: dict[str, Texts]
    baseline: RunDir | None  # None where files are compared
    notes: list[str]


def read_files(job: CompareJob) -> Material:
    """The files that the job names, as one test set. Raises InputError where they cannot be compared."""
    check_systems(job.hypotheses, "hypotheses=[A,B] references=C data.tgt_lang=..")
    files = read_parallel([*job.hypotheses, *job.references, *([] if job.sources is None else [job.sources])])
    if not files[0]:
        raise InputError(f"{job.hypotheses[0]}: there are no sentences to compare")

    # The first files are the systems', then come the references, and the sources.
    sources = None if job.sources is None else files.pop()
    n_systems = len(job.hypotheses)
    translations = dict(zip(job.hypotheses, files[:n_systems], strict=True))
    references = files[n_systems:]
    for name, lines in translations.items():
        _check_plain(name, lines, *references)

    texts = Texts(
        sources=sources,
        references=references,
        translations=translations,
        tgt_lang=str(job.data.tgt_lang),
        tokenize=job.bleu_tokenize,
    )
    return Material(
        systems=job.hypotheses,
        sets={", ".join(job.references): texts},
        baseline=None,
        notes=[],
    )


def _check_plain(name: str, lines: Sequence[str], *references: Sequence[str]) -> None:
    """Raise InputError, with the file's name, for what `check_plain_text` refuses."""
    try:
        check_plain_text(lines, *references)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def read_runs(
    names: Sequence[str],
    *,
    tgt_lang: str | None,
    tokenize: BleuTokenizer | None,
    published: Mapping[str, str] | None = None,
) -> Material:
    """The test sets that all of these run directories were scored on, with their translations.

    `tgt_lang` is the language of the text, and `tokenize` how BLEU cuts it into words; None: as for the first run.
    `published` names files with somebody else's translations of test sets: they are one more system, and no other set
    is compared. Raises InputError where a run is not finished, the runs cannot be compared fairly, or a file has not a
    line for each sentence; CheckpointError where a run is damaged.
    """
    published = published or {}
    runs = {name: RunDir(run_path(name, "runs")) for name in names}
    results = {name: _read_results(run) for name, run in runs.items()}
    baseline = names[0]

    # The test sets that all of them were scored on, under the same signatures.
    shared = _shared_test_sets(baseline, results)
    for name in names[1:]:
        _check_signatures(baseline, name, results=results, test_sets=shared)
    for test_set in published:
        if test_set not in shared:
            raise InputError(f"published.{test_set}: the runs have no such test set: they have {', '.join(shared)}")

    # Their text. It must be the same in all runs, and the one that the results are about.
    kept = {name: _read_kept(run, results[name]) for name, run in runs.items()}
    notes: list[str] = []
    data = runs[baseline].read_record().config.data
    sets = {}
    for test_set in [test_set for test_set in shared if not published or test_set in published]:
        pairs = kept[baseline][test_set]
        for name in names[1:]:
            _check_same_text(test_set, pairs, kept[name][test_set], runs=(baseline, name))
        translations = {name: read_translations(run, test_set) for name, run in runs.items()}
        judged, reasons = _judged(test_set, runs, kept, translations)
        stored, more_reasons = _stored(test_set, results)
        notes += reasons + more_reasons
        if published:
            judged, stored = [], {}  # what is known of the runs alone
            translations[PUBLISHED], about = _read_published(published[test_set], test_set, pairs)
            notes.append(about)
        sets[test_set] = Texts(
            sources=[source for source, _ in pairs],
            references=[[reference for _, reference in pairs]],
            translations=translations,
            judged=judged,
            stored=stored,
            tgt_lang=tgt_lang or data.tgt_lang_of(test_set),
            tokenize=tokenize or data.bleu_tokenize,
        )

    # The test sets that are left out.
    every_set = {test_set for of_run in results.values() for test_set in of_run.test_sets}
    left_out = sorted(every_set - set(shared))
    if left_out and not published:
        notes.append(f"Not every run was scored on {', '.join(left_out)}: left out.")

    systems = [*names, PUBLISHED] if published else list(names)
    return Material(systems, sets, baseline=runs[baseline], notes=notes)


def _read_published(file: str, test_set: str, pairs: Sequence[Pair]) -> tuple[list[str], str]:
    """Somebody else's translations of a test set, and a line that tells which. Raises InputError."""
    (lines,) = read_parallel([file])
    if len(lines) != len(pairs):
        raise InputError(
            f"{file}: {len(lines)} lines, but {test_set} has {len(pairs)} sentences: published.{test_set} needs a "
            "translation of each"
        )
    _check_plain(file, lines, [target for _, target in pairs])
    digest = sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    return lines, f"{PUBLISHED}, {test_set}: {Path(file).name}, {len(lines):,} lines, SHA-256 {digest}."


def _shared_test_sets(baseline: str, results: Mapping[str, Results]) -> list[str]:
    """The test sets that all runs were scored on, in the order of the baseline. Raises InputError if there is none."""
    shared = [
        test_set
        for test_set in results[baseline].test_sets
        if all(test_set in of_run.test_sets for of_run in results.values())
    ]
    if not shared:
        listed = "; ".join(f"{name} has {', '.join(of_run.test_sets) or 'none'}" for name, of_run in results.items())
        raise InputError(
            f"the runs have no test set in common: {listed}: compare runs that were scored on the same text"
        )
    return shared


def _judged(
    test_set: str,
    runs: Mapping[str, RunDir],
    kept: Mapping[str, Mapping[str, Sequence[Pair]]],
    translations: Mapping[str, list[str]],
) -> tuple[list[Judged], list[str]]:
    """What the same judges said of the translations of all runs, and why others do not count."""
    of_runs = {}
    for name, run in runs.items():
        of_runs[name] = read_judgements(run, test_set, JudgedText.of(kept[name][test_set], translations[name]))

    judged = []
    notes = []
    for judge in dict.fromkeys(judge for of_run in of_runs.values() for judge in of_run):
        missing = [name for name, of_run in of_runs.items() if judge not in of_run]
        if missing:
            notes.append(f"{judge} has not judged {test_set} of {', '.join(missing)}: left out.")
            continue
        described = [of_run[judge].describe() for of_run in of_runs.values()]
        if len(set(described)) > 1:
            notes.append(f"{judge} did not judge {test_set} alike ({'; '.join(dict.fromkeys(described))}): left out.")
            continue
        judged.append(Judged(judge, described[0], [of_run[judge].segments for of_run in of_runs.values()]))
    return judged, notes


def _stored(test_set: str, results: Mapping[str, Results]) -> tuple[dict[str, list[NamedScore]], list[str]]:
    """The scores of plug-ins that all runs have, and why others do not count. Nothing is measured."""
    of_runs = {name: named(of_run.test_sets[test_set]) for name, of_run in results.items()}
    stored = {}
    notes = []
    for score in dict.fromkeys(score for of_run in of_runs.values() for score in of_run if score not in ALWAYS):
        missing = [name for name, of_run in of_runs.items() if score not in of_run]
        if missing:
            notes.append(f"{score} is not among the scores of {', '.join(missing)} on {test_set}: left out.")
            continue
        scores = [of_run[score] for of_run in of_runs.values()]
        if len({replace(one, value=0.0) for one in scores}) > 1:
            notes.append(f"{score} of {test_set} was not measured alike: left out.")
            continue
        stored[score] = scores
    return stored, notes


def check_systems(names: Sequence[str], usage: str) -> None:
    """Raise InputError for fewer than two systems, and for one that is named twice."""
    if len(names) < 2:
        raise InputError(f"there must be two systems or more to compare: {usage}")
    check_named_once(names, kind="system")


def check_named_once(names: Sequence[str], *, kind: str) -> None:
    """Raise InputError for a run or a file that is named twice; `kind` is the word for it in the error."""
    counts = Counter(map(Path, names))  # a slash at the end makes no other name
    repeated = [name for name in names if counts[Path(name)] > 1]
    if repeated:
        raise InputError(f"{repeated[0]} is named twice: name each {kind} once")


def _read_results(run: RunDir) -> Results:
    """The results of a run. Raises InputError where it is not finished, CheckpointError where they are damaged."""
    if not run.path.is_dir():
        raise InputError(f"{run.path}: no such run directory")
    if not run.results.exists():
        raise InputError(
            f"{run.path}: no {run.results.name}, so there is nothing to compare yet: finish it with the command "
            "that trains it, or name files of translations by hypotheses=[A,B] references=C"
        )
    return run.read_results()


def _read_kept(run: RunDir, results: Results) -> dict[str, list[Pair]]:
    """The test sets of the results, with their references."""
    kept = {name: read_set(run, name) for name in results.test_sets}
    check_kept(run, kept)
    return kept


def _check_signatures(baseline: str, name: str, *, results: Mapping[str, Results], test_sets: Sequence[str]) -> None:
    """Raise InputError where two runs were scored under different signatures.

    They differ where the language does, or the version of sacreBLEU; then the scores cannot be compared.
    """
    for test_set in test_sets:
        ours = named(results[baseline].test_sets[test_set])
        theirs = named(results[name].test_sets[test_set])
        for name_of_score in ALWAYS:
            if name_of_score not in ours or name_of_score not in theirs:  # an earlier version stored fewer
                continue
            one, other = ours[name_of_score].signature, theirs[name_of_score].signature
            if one != other:
                raise InputError(
                    f"{baseline} and {name} were not scored alike on {test_set}: {one} and {other}; "
                    f"to score both now, name their files by hypotheses=[A,B] references=C, such as "
                    f"{RunDir(run_path(name, 'runs')).text(test_set, HYPOTHESIS)}"
                )


def _check_same_text(test_set: str, ours: Sequence[Pair], theirs: Sequence[Pair], *, runs: tuple[str, str]) -> None:
    """Raise InputError where two runs keep different texts under the name of one test set.

    Tags may differ: a model of several languages can be compared with a model of one.
    """
    if len(ours) != len(theirs):
        raise InputError(
            f"{test_set} is not the same test set in {runs[0]} and {runs[1]}: {len(ours)} and {len(theirs)} sentences"
        )
    for line, (one, other) in enumerate(zip(_untagged(ours), _untagged(theirs), strict=True), 1):
        if one != other:
            raise InputError(
                f"{test_set} is not the same test set in {runs[0]} and {runs[1]}: they differ in line {line}"
            )


def _untagged(pairs: Sequence[Pair]) -> list[Pair]:
    return list(zip(without_tag([source for source, _ in pairs]), [target for _, target in pairs], strict=True))


def without_tag(sources: Sequence[str]) -> Sequence[str]:
    """The sources without the tag in front of them, if all that are not blank have the same."""
    first_words = {source.partition(" ")[0] for source in sources if not is_blank(source)}
    tag = first_words.pop() if len(first_words) == 1 else ""
    return [source.removeprefix(f"{tag} ") for source in sources] if TAG.fullmatch(tag) else sources
