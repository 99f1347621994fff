"""The model card of a run: what it translates, how well, on what it was trained, at what cost, and where it ends.

    Subject -> format_card -> README.md: a head in YAML for the hub, then Markdown for people

Every statement is taken from the documents of the run, and a section is left out where they do not tell. Those may be
somebody else's: what they say in words goes through `plain`, `code` or `fenced`, and stays text.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformer.checkpoint import Checkpoint
from transformer.config.jobs import ON_HUB
from transformer.config.keys import own_text
from transformer.config.languages import language_of
from transformer.config.settings import is_training_set
from transformer.cost import count_parameters, step_flops
from transformer.data.report import DataReport, SetReport
from transformer.evaluation.metrics import ALWAYS, named, named_mean
from transformer.evaluation.sets import Sets, describe_origin
from transformer.integrations.hub import CardScore, CardSet, card_head, name_on_hub
from transformer.integrations.push.job import PushJob
from transformer.records import Imported, NamedScore, Results, RunRecord, Scores
from transformer.run_dir import RunDir, is_dev, tensor_file
from transformer.tools.markdown import code, fenced, markdown_table, plain
from transformer.tools.report.overview import format_duration
from transformer.tools.report.provenance import train_overrides
from transformer.vocabulary import describe_vocab_size

NAMES_ON_HUB = {"chrf_plus_plus": "chrf"}  # of metrics, where the hub has another than a field

MOST_DIGESTS = 2  # of the files of a set
DIGITS = 12  # of a digest


@dataclass(frozen=True)
class Subject:
    """A run, as its card describes it: what its documents say, without what is of this machine."""

    run: RunDir
    record: RunRecord
    checkpoint: Checkpoint
    report: DataReport | None  # None: of an imported model
    results: Results | None  # None: these weights were not scored
    models: Mapping[str, bytes]  # the files of its tokenizers, by name
    metrics: bytes | None  # metrics.jsonl
    sets: Sets  # the text that it keeps, of the development set, too
    translations: Mapping[str, list[str]]  # of its sets, which the results are of
    scores: Mapping[str, Scores]  # of the results, with what judges have said

    @property
    def directions(self) -> str:
        """What it translates from and to, as the settings have it."""
        directions = self.record.config.data.directions()
        return ", ".join(f"from {code(source)} to {code(target)}" for source, target in directions)

    @property
    def origin(self) -> Imported | None:
        """The published model that it is, or that its weights began from."""
        began = self.record.init_from
        return self.record.imported or (None if began is None else began.imported)


def format_card(subject: Subject, job: PushJob) -> str:
    """The text of README.md."""
    sections = [
        _introduction(subject, job),
        _usage(subject, job),
        _scores(subject),
        _data(subject),
        _training(subject),
        _limits(subject),
        _licence(subject, job),
    ]
    return _head(subject, job) + "\n" + "\n".join("".join(f"{line}\n" for line in lines) for lines in sections if lines)


# ---- for the hub ----------------------------------------------------------------------------------------------------


def _head(subject: Subject, job: PushJob) -> str:
    origin = subject.origin
    data = subject.record.config.data
    codes = {**data.src_langs(), **data.tgt_langs()}
    languages = [language_of(code, f"data.{key}") for key, code in codes.items()]
    of_hub = [
        of_set.origin.dataset
        for name, of_set in _sets(subject).items()
        if is_training_set(name) and of_set.origin is not None and of_set.origin.revision is not None
    ]
    return card_head(
        job.repo,
        languages=[languages[0], *dict.fromkeys(languages[1:])],
        licence=job.license,
        base_model=name_on_hub(origin.source, "from")[0] if origin is not None and origin.revision else None,
        datasets=list(dict.fromkeys(of_hub)),
        test_sets=[_card_set(subject, name, scores) for name, scores in subject.scores.items()],
    )


def _card_set(subject: Subject, name: str, scores: Scores) -> CardSet:
    of_set = _sets(subject).get(name if is_dev(name) else f"test.{name}")
    origin = None if of_set is None else of_set.origin
    is_of_hub = origin is not None and origin.revision is not None
    found = [
        CardScore(NAMES_ON_HUB.get(field, field), score.name, round(score.value, score.digits), score.signature)
        for field, score in named(scores).items()
    ]
    found += [
        CardScore(judge, judge, round(judgement.system, 4), judgement.version)
        for judge, judgement in scores.judges.items()
    ]
    return CardSet(
        name=name,
        dataset=origin.dataset if origin is not None and is_of_hub else name,
        subset=origin.subset if origin is not None and is_of_hub else None,
        split=origin.split if origin is not None and is_of_hub else None,
        revision=origin.revision if origin is not None else None,
        scores=found,
    )


# ---- for people -----------------------------------------------------------------------------------------------------


def _introduction(subject: Subject, job: PushJob) -> list[str]:
    made = "A published model" if subject.record.imported is not None else "A model"
    lines = [
        f"# {job.repo.rpartition('/')[2]}",
        "",
        f"{made} that translates {subject.directions}: a Transformer with encoder and decoder",
        "(Vaswani et al., 2017, [Attention Is All You Need](https://arxiv.org/abs/1706.03762)), in the format of "
        f"transformer-mt {plain(subject.record.versions.get('transformer-mt', ''))}.",
    ]
    if subject.origin is not None:
        verb = "It is" if subject.record.imported is not None else "Its weights began as those of"
        lines.append(f"{verb} {plain(subject.origin.describe())}.")
    return lines


def _usage(subject: Subject, job: PushJob) -> list[str]:
    name = f"{ON_HUB}{job.repo}"
    tags = subject.record.config.data.required_tags()
    tag = f" {shlex.quote(f'tag={tags[0]}')}" if tags else ""
    text = f"{tags[0]} A sentence to translate." if tags else "A sentence to translate."
    data = subject.record.config.data
    to_train = shlex.join([f"init_from={name}", f"data.src_lang={data.src_lang}", f"data.tgt_lang={data.tgt_lang}"])
    lines = [
        "## Use",
        "",
        "With transformer-mt installed, from the command line and from Python:",
        "",
        "```sh",
        f"echo 'A sentence to translate.' | transformer translate run_dir={name}{tag}",
        f"transformer train experiment=base run_dir=runs/mine {to_train} {own_text(data.src_lang, data.tgt_lang)}",
        "```",
        "",
        "```python",
        "import transformer",
        "",
        f'translator = transformer.load("{name}")',
        f"translator.translate([{json.dumps(text)}])",
        "```",
        "",
        "The files are fetched once, and compared with the sizes and SHA-256 in `MANIFEST.json` before they are used;",
        "nothing in them is executed.",
    ]
    if tags:
        lines += ["", f"Each source begins with a word that says what to do: {_listed(tags)}."]
    return lines


def _scores(subject: Subject) -> list[str]:
    lines = ["## Scores", ""]
    results = subject.results
    if results is None:
        return [*lines, "These weights were not scored on a test set."]

    # A row for each set, a column for each score that one of them has.
    shown = {name: _cells(scores) for name, scores in subject.scores.items()}
    columns = list(dict.fromkeys(column for cells in shown.values() for column in cells))
    rows = []
    for name, cells in shown.items():
        count = f"{len(subject.sets[name]):,}" if name in subject.sets else ""
        rows.append([plain(name), count, *(cells.get(column, "") for column in columns)])
    if results.mean:
        cells = _shown(named_mean(results.mean, subject.scores))
        rows.append(["mean", "", *(cells.get(column, "") for column in columns)])
    lines += markdown_table(["test set", "sentences", *map(plain, columns)], rows, left={0})

    # What they depend on.
    origin = describe_origin(results.averaged, steps=results.steps, seed=results.seed, data_digest=results.data_digest)
    search = results.search
    settings = f"beam {search.beam_size}, length penalty {search.length_penalty}"
    if results.engine is not None:
        settings += f", by {plain(results.engine)}"
    own = [metric.name for field, metric in ALWAYS.items() if any(field in named(of) for of in subject.scores.values())]
    lines += [
        "",
        f"Model: {plain(origin)}. Search: {settings}.",
        f"{', '.join(own[:-1])} and {own[-1]} are those of sacreBLEU, and compare only under the same signature:",
        "",
        *(f"- {line}" for line in _signatures(subject.scores)),
    ]
    if all(map(is_dev, subject.scores)):
        lines += [
            "",
            f"{_listed(list(subject.scores))}: what the training was watched by, its development text; there was no "
            "test set.",
        ]
    return [*lines, "", "One training, with one seed: what other seeds would differ by is not measured."]


def _cells(scores: Scores) -> dict[str, str]:
    """The scores of a set and of judges, by what their column is called."""
    return _shown(named(scores)) | {judge: f"{judgement.system:.4f}" for judge, judgement in scores.judges.items()}


def _shown(scores: Mapping[str, NamedScore]) -> dict[str, str]:
    return {score.name: f"{score.value:.{score.digits}f}" for score in scores.values()}


def _signatures(scores: Mapping[str, Scores]) -> list[str]:
    """How the scores were made, each once."""
    lines = []
    for of_set in scores.values():
        lines += [f"{plain(score.name)} {code(score.signature)}" for score in named(of_set).values()]
        lines += [
            f"{plain(judge)} {code(judgement.version or 'unknown version')}"
            for judge, judgement in of_set.judges.items()
        ]
    return list(dict.fromkeys(lines))


def _data(subject: Subject) -> list[str]:
    report = subject.report
    if report is None:
        return []
    rows = []
    for name, of_set in sorted(report.sets.items(), key=lambda item: not is_training_set(item[0])):
        origin = of_set.origin
        files = list(of_set.files.values())
        source = str(origin) if origin is not None else ", ".join(file.path for file in files)
        digests = " ".join(code(file.sha256[:DIGITS].replace("|", "")) for file in files[:MOST_DIGESTS])
        more = "" if len(files) <= MOST_DIGESTS else f" and {len(files) - MOST_DIGESTS} more"
        licence = "" if origin is None or origin.corpus is None else origin.corpus.licence or "unknown"
        revision = "" if origin is None else origin.revision or ""
        kept = "" if of_set.pairs_kept is None else f"{of_set.pairs_kept:,}"
        rows.append(
            [
                plain(name),
                plain(source),
                plain(revision),
                plain(licence),
                f"{of_set.pairs_read:,}",
                kept,
                f"{digests}{more}",
            ]
        )
    head = ["set", "what it is", "revision", "its licence", "pairs", "trained on", "SHA-256 of the files"]
    told = [number for number in range(len(head)) if any(row[number] for row in rows)]
    dropped = [f"{count:,} {plain(reason.replace('_', ' '))}" for reason, count in report.dropped.items() if count]
    models = "One model of" if subject.record.target_tokenizer_sha256 is None else "Two models of"
    lines = [
        "## Data",
        "",
        *markdown_table(
            [head[number] for number in told],
            [[row[number] for number in told] for row in rows],
            left={place for place, number in enumerate(told) if number not in (4, 5)},
        ),
        "",
        f"Dropped: {', '.join(dropped) or 'none'}. {models} SentencePiece: {describe_vocab_size(report.vocab_sizes)}.",
    ]
    to_cite = [
        entry
        for of_set in report.sets.values()
        if of_set.origin is not None and of_set.origin.corpus is not None
        for entry in of_set.origin.corpus.citations.values()
    ]
    if to_cite:
        lines += ["", "To cite:", "", *fenced("bibtex", dict.fromkeys(to_cite))]
    return lines


def _training(subject: Subject) -> list[str]:
    record = subject.record
    model = record.config.model
    sizes = subject.checkpoint.run_state().vocab_sizes
    weights = subject.checkpoint.manifest.files[tensor_file(subject.checkpoint.weights_name)]
    lines = [
        "## Model and training" if record.imported is None else "## Model",
        "",
        f"- {count_parameters(model, sizes).total:,} parameters: {model.n_layers} + {model.decoder_layers} layers, "
        f"d_model {model.d_model}, d_ff {model.d_ff}, {model.n_heads} heads; {describe_vocab_size(sizes)}; "
        f"{weights.size / 1e6:,.1f} MB",
    ]
    if record.imported is not None:
        return lines

    results = subject.results
    if results is not None:
        lines.append(
            f"- {results.steps:,} steps, {results.sentences:,} sentences and {results.target_tokens:,} target tokens, "
            f"up to epoch {results.epochs + 1}, in {record.resolved.precision.value}"
        )
        machine = "" if record.machine is None else f" on {plain(record.machine)}"
        lines.append(f"- {format_duration(round(results.training_seconds))} of training{machine}{_flops(subject)}")
    else:
        lines.append(
            f"- step {subject.checkpoint.step:,} of {record.config.train.max_steps:,}: the training had not ended"
        )
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines += [
        f"- started {plain(record.started)}, with {plain(versions)}",
        "",
        "The same training again, in a folder that has the files of the data, and the scores:",
        "",
        *fenced(
            "sh",
            [
                _line("train", train_overrides(record.config)),
                _line("evaluate", [f"run_dir={record.config.run_dir}"]),
            ],
        ),
    ]
    return lines


def _flops(subject: Subject) -> str:
    """What the training computed, as a part of a sentence."""
    report, results = subject.report, subject.results
    if report is None or results is None or not report.pairs_kept or not report.tokens.tgt:
        return ""
    flops = step_flops(
        subject.record.config.model,
        report.vocab_sizes,
        source=round(results.target_tokens * report.tokens.src / report.tokens.tgt),
        target=results.target_tokens,
        mean_length=report.tokens.tgt / report.pairs_kept,
    )
    return f", about {flops:.1e} floating-point operations"


def _limits(subject: Subject) -> list[str]:
    record = subject.record
    longest = record.config.model.max_positions - 1
    lines = ["## Limits", ""]
    report = subject.report
    if report is not None:
        lines.append(
            f"- It has learned from {report.pairs_kept:,} pairs {subject.directions}, and nothing "
            "else. How it translates text of another kind than that of the table above was not measured."
        )
        if report.lines is not None:
            lines.append(
                f"- {report.lines.several_sentences:,} of these sources have more than one sentence. Where that is "
                "few, translate longer text sentence by sentence (`split=true`)."
            )
    lines.append(f"- A source of more than {longest:,} pieces is cut there.")
    if not record.config.tokenizer.byte_fallback and record.imported is None:
        lines.append("- A character that the training text did not have is unknown, and cannot be written.")
    lines += [
        "- A translation may read well and be wrong: numbers, names and negations may be lost, and sentences made",
        "  up. The scores are means over a test set, and say nothing of a single sentence. Let a person check what",
        "  matters.",
        "- What is unfair or offensive in the data may be so in translations; nothing filters it.",
    ]
    return lines


def _licence(subject: Subject, job: PushJob) -> list[str]:
    lines = ["## Licence", "", f"`{job.license}`, as chosen by who published it."]
    if subject.origin is not None:
        lines.append(f"It comes from {plain(subject.origin.describe())}.")
    if any(of_set.origin is not None and of_set.origin.corpus is not None for of_set in _sets(subject).values()):
        lines.append("Those of the data are in the table above.")
    return lines


def _sets(subject: Subject) -> Mapping[str, SetReport]:
    return {} if subject.report is None else subject.report.sets


def _line(command: str, arguments: Sequence[str]) -> str:
    """A command line, broken where it is long."""
    words = ["transformer", command, *map(shlex.quote, arguments)]
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 110:
            lines[-1] += " \\"
            lines.append("  ")
        lines[-1] += word if lines[-1].strip() == "" else f" {word}"
    return "\n".join(lines)


def _listed(tags: Sequence[str]) -> str:
    return ", ".join(map(code, tags))
