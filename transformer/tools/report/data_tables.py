"""The section of a report on data: what was read, filtered and tokenised, as preparing has counted it."""

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from transformer.config.keys import as_typed, leaves
from transformer.config.primitives import to_json
from transformer.data.report import DataReport
from transformer.data.tokenizer import Tokenizers
from transformer.errors import TransformerError
from transformer.evaluation.sets import read_set
from transformer.tools.metrics import Curve
from transformer.tools.page import Component
from transformer.tools.report.blocks import UNKNOWN, Block, Cell, Table, section
from transformer.tools.report.reading import RunReading
from transformer.vocabulary import UNK, describe_vocab_size

DIGITS = 12  # of a digest
MOST_DIGESTS = 4  # that are shown of a set


def data_section(runs: Sequence[RunReading]) -> Component:
    """What was read, filtered and tokenised; once for all runs that have read the same."""
    runs_by_data: dict[tuple[object, ...], list[RunReading]] = {}
    for run in runs:
        if run.data is not None:
            runs_by_data.setdefault(_identity(run.data), []).append(run)

    # The first run of each group stands for all of it.
    blocks: list[Block] = []
    for group in runs_by_data.values():
        first = group[0]
        assert first.data is not None
        whose = "" if len(group) == len(runs) else f" of {', '.join(run.name for run in group)}"
        blocks += [_pairs(first.data, whose), _filters(first.data, whose), _tokenizer(first, first.data, whose)]
        if any(counts.origin for counts in first.data.sets.values()):
            blocks.append(_origins(first.data, whose))
        if first.data.samples:
            blocks.append(_samples(first.data, whose))
        blocks += _pieces(first, whose)
    blocks.append(_padding(runs))
    return section("Data", blocks)


def _identity(report: DataReport) -> tuple[object, ...]:
    """What two runs have in common if they have read the same; the digest covers the training text alone."""
    sets = [
        (name, counts.weight, tuple(counts.columns or ()), *(file.sha256 for file in counts.files.values()))
        for name, counts in report.sets.items()
    ]
    return (report.digest, *sorted(sets))


def _pairs(report: DataReport, whose: str) -> Table:
    """A row for each set; `whose` are the runs that share the report, as a part of the caption."""
    rows: list[list[Cell]] = []
    for name, counts in report.sets.items():
        kept = "all" if counts.pairs_kept is None else f"{counts.pairs_kept:,}"
        trip = counts.references
        changed = "" if trip is None else f"{trip.changed:,} of {trip.checked:,}"
        copies = "" if counts.weight is None else f"{counts.weight:g}"
        megabytes = sum(file.bytes for file in counts.files.values()) / 1e6
        digests = " ".join(file.sha256[:DIGITS] for file in islice(counts.files.values(), MOST_DIGESTS))
        if len(counts.files) > MOST_DIGESTS:
            digests += f" and {len(counts.files) - MOST_DIGESTS} more"
        rows.append([name, f"{counts.pairs_read:,}", kept, copies, f"{megabytes:,.2f} MB", changed, digests])
    head = [
        *("set", "pairs read", "kept", "copies in an epoch", "size"),
        *("references that no translation can equal", "SHA-256 of the files"),
    ]
    return Table(f"Sentence pairs{whose}", head, rows, is_numeric=True)


def _origins(report: DataReport, whose: str) -> Table:
    """A row for each set that was copied, with what is known of its licence and of what to cite."""
    rows: list[list[Cell]] = []
    for name, counts in report.sets.items():
        if counts.origin is None:
            continue
        corpus = counts.origin.corpus
        if corpus is None:
            rows.append([name, str(counts.origin), counts.origin.revision or "", "", "", ""])
            continue
        digests = " ".join(download.sha256[:DIGITS] for download in corpus.downloads)
        licence, citations = corpus.licence or UNKNOWN, ", ".join(corpus.citations) or UNKNOWN
        revision = counts.origin.revision or f"mtdata {corpus.mtdata}"
        rows.append([name, str(counts.origin), revision, licence, citations, digests])
    head = ["set", "data set", "revision", "licence", "to cite (BibTeX in data.json)", "SHA-256 of the downloads"]
    return Table(f"Data sets by name{whose}", head, rows, is_numeric=False)


def _filters(report: DataReport, whose: str) -> Table:
    """A row for each reason for which pairs were dropped."""
    filters = report.filters
    rules = {
        "too_long": f"above {filters.max_length} pieces",
        "ratio": f"one side above {filters.max_ratio:g} times the other",
        "identical": "dropped" if filters.drop_identical else "kept",
        "duplicate": "dropped" if filters.drop_duplicates else "kept",
    }
    rows: list[list[Cell]] = [
        [reason.replace("_", " "), f"{count:,}", rules.get(reason, "")] for reason, count in report.dropped.items()
    ]
    return Table(f"Pairs that filters dropped{whose}", ["reason", "pairs", "rule"], rows, is_numeric=False)


def _samples(report: DataReport, whose: str) -> Table:
    """The first pairs that each of the doctor's detectors has dropped."""
    trained_on = [name for name, counts in report.sets.items() if counts.weight is not None]
    trained_on.sort(key=lambda name: (name != "train", name))  # the order of the store
    rows: list[list[Cell]] = [
        [detector, f"{trained_on[pair.set]}, line {pair.line:,}", pair.source, pair.target]
        for detector, pairs in report.samples.items()
        for pair in pairs
        if pair.set < len(trained_on)
    ]
    return Table(
        f"Pairs that detectors dropped{whose}", ["detector", "where", "source", "target"], rows, is_numeric=False
    )


def _tokenizer(run: RunReading, report: DataReport, whose: str) -> Table:
    """The tokenizer, and what it makes of the training pairs."""
    pairs = max(1, report.pairs_kept)
    tokens = report.tokens
    trip = report.targets
    rows: list[list[Cell]] = [
        ["vocabulary", describe_vocab_size(report.vocab_sizes)],
        ["source tokens", f"{tokens.src:,}, {tokens.src / pairs:.1f} a sentence with its EOS"],
        ["target tokens", f"{tokens.tgt:,}, {tokens.tgt / pairs:.1f} a sentence with its EOS"],
        ["targets that do not come back", f"{trip.changed:,} of {trip.checked:,} that were tried"],
    ]
    if run.record is not None:
        settings = leaves(to_json(run.record.config.tokenizer))
        chosen = [f"{key}={as_typed(value)}" for key, value in settings.items() if value is not None]
        rows.append(["settings", ", ".join(chosen)])
    return Table(f"Tokenizer{whose}", [], rows, is_numeric=False)


def _pieces(run: RunReading, whose: str) -> list[Block]:
    """How long the sets that the run keeps are in pieces, and how many sentences have unknown pieces or are cut."""
    if run.record is None:
        return []
    max_pieces = run.record.config.model.max_positions - 1  # the last position is for EOS

    # Read; what fails is noted in the run.
    try:
        tokenizers = Tokenizers.load(run.directory.path)
        sets = {name: read_set(run.directory, name) for name in run.directory.set_names()}
    except TransformerError as error:
        run.missing.append(str(error))
        return []

    # Encode and count.
    rows: list[list[Cell]] = []
    for name, pairs in sets.items():
        sources = tokenizers.source.encode([source for source, _ in pairs])
        targets = tokenizers.target.encode([target for _, target in pairs])
        unknown = sum(UNK in ids for ids in [*sources, *targets])
        cut = sum(len(ids) > max_pieces for ids in sources)
        rows.append([name, f"{len(pairs):,}", _lengths(sources), _lengths(targets), f"{unknown:,}", f"{cut:,}"])
    head = ["set", "sentences", "source pieces: mean, most", "target pieces", "with an unknown piece", "cut to fit"]
    return [Table(f"Sets in pieces{whose}", head, rows, is_numeric=True)]


def _lengths(pieces: Sequence[Sequence[int]]) -> str:
    """The mean and the largest length."""
    lengths = [len(ids) for ids in pieces]
    return f"{fmean(lengths):.1f}, {max(lengths)}" if lengths else ""


def _padding(runs: Sequence[RunReading]) -> Table:
    """Padding and waiting, by the runs' log lines."""
    rows: list[list[Cell]] = []
    for run in runs:
        padding = _mean_share(run.curves.get("speed/padding_share"))
        waiting = _mean_share(run.curves.get("speed/data_wait_share"))
        rows.append([run.name, padding, waiting])
    head = ["", "slots that are padding", "time that waits for data"]
    return Table("While training, on average", head, rows, is_numeric=True)


def _mean_share(curve: Curve | None) -> str:
    if not curve:
        return UNKNOWN
    return f"{100 * fmean(value for _, value in curve):.1f} %"
