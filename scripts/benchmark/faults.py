"""The fault matrix in totals: kills, damages, disk errors, stops, and planted defects.

    python scripts/benchmark/faults.py > scripts/benchmark/results/faults-MACHINE.md

Runs the long tiers of the tests (`pytest -m faults`) and scripts/mutants.py. Each test says itself how much it did, and
fails at the first loss: what is counted here is of the tests that passed, and those that did not are named. Where the
machine is wanted for other things in between, `pytest -m faults --junitxml=FILE PATHS` can do a part at a time, and
`--reports FILES` counts the parts.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Row:
    """One test function, with all of its cases."""

    cases: int = 0
    seconds: float = 0.0
    amounts: Counter[str] = field(default_factory=Counter)


@dataclass
class Outcome:
    """What a run of the tests came to."""

    rows: dict[str, Row]
    failed: list[str]
    skipped: Counter[str]  # tests and reasons
    seconds: float

    @property
    def totals(self) -> Counter[str]:
        """The amounts of all tests that passed."""
        return sum((row.amounts for row in self.rows.values()), Counter[str]())


def read_reports(paths: Sequence[Path]) -> Outcome:
    """The outcome, from pytest's reports in JUnit's format."""
    outcome = Outcome({}, [], Counter(), 0.0)
    for tree in map(ElementTree.parse, paths):
        outcome.seconds += sum(float(suite.get("time", 0)) for suite in tree.iter("testsuite"))
        _count(tree, outcome)
    return outcome


def _count(tree: "ElementTree.ElementTree[ElementTree.Element]", outcome: Outcome) -> None:
    for case in tree.iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        name = f"{file}.py::{case.get('name', '')}"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            outcome.skipped[f"{name.partition('[')[0]}: {skip.get('message', '')}"] += 1
        else:
            row = outcome.rows.setdefault(name.partition("[")[0], Row())
            row.cases += 1
            row.seconds += float(case.get("time", 0))
            row.amounts.update({what: int(amount) for what, amount in _amounts(case)})


def _amounts(case: ElementTree.Element) -> Iterator[tuple[str, str]]:
    for entry in case.iter("property"):
        yield entry.get("name", ""), entry.get("value", "0")


def write_page(outcome: Outcome) -> Iterator[str]:
    """The page in Markdown, line by line."""
    machine = f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, torch {torch.__version__}"
    yield f"`python scripts/benchmark/faults.py`: {machine}; the tests took {outcome.seconds:.0f} s."
    yield ""
    yield "| what | amount |"
    yield "| --- | ---: |"
    for what, amount in sorted(outcome.totals.items()):
        yield f"| {what} | {amount:,} |"
    lost = "0" if not outcome.failed else "see the failed tests"
    for what in ("committed checkpoints lost", "runs that ended otherwise", "leftovers", "damages not noticed"):
        yield f"| {what} | {lost} |"
    yield f"| tests passed | {sum(row.cases for row in outcome.rows.values())} |"
    yield f"| tests failed | {len(outcome.failed)} |"
    yield f"| tests skipped | {outcome.skipped.total()} |"
    yield ""
    yield "| test | cases | amounts | seconds |"
    yield "| --- | ---: | --- | ---: |"
    for name, row in sorted(outcome.rows.items()):
        amounts = ", ".join(f"{amount:,} {what}" for what, amount in sorted(row.amounts.items()))
        yield f"| `{name}` | {row.cases} | {amounts} | {row.seconds:.0f} |"
    skipped = [f"{name} ({count})" for name, count in outcome.skipped.items()]
    for title, names in (("Failed", outcome.failed), ("Skipped", skipped)):
        if names:
            yield ""
            yield f"{title}: {'; '.join(names)}."


def run_tests(report: Path) -> None:
    """The long tiers, on all cores."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "faults", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)


def main() -> int:
    """Run the tests, or read their reports; print the page, and try the mutants; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, nargs="+", default=[], help="of parts of the tests that have been run")
    reports: list[Path] = parser.parse_args().reports

    with tempfile.TemporaryDirectory() as folder:
        if not reports:
            reports = [Path(folder) / "report.xml"]
            run_tests(reports[0])
        outcome = read_reports(reports)
    for line in write_page(outcome):
        print(line, flush=True)

    print("\n## Planted defects: `python scripts/mutants.py`\n", flush=True)
    mutants = subprocess.run([sys.executable, str(ROOT / "scripts" / "mutants.py")], cwd=ROOT, check=False)
    return 1 if outcome.failed else mutants.returncode


if __name__ == "__main__":
    sys.exit(main())
