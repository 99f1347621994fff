"""Whether the curves of a run that has begun are between the bounds that are known for its settings."""

from pathlib import Path

from transformer.errors import CheckpointError
from transformer.run_dir import RunDir
from transformer.tools.bounds import NAME, choose
from transformer.tools.doctor.findings import Check, Level, failed, passed
from transformer.tools.metrics import read_curves
from transformer.tracking import hyper_parameters

CHECK = "curves"


def check_curves(run_dir: Path) -> list[Check]:
    """Whether the curves of a run that has begun, and is watched, are within their bounds; no check of another one."""
    run = RunDir(run_dir)
    if not (run.record.is_file() and run.metrics.is_file()):
        return []
    try:
        job = run.read_record().config
        curves, _ = read_curves(run.metrics)
    except (CheckpointError, OSError) as error:
        return [passed(CHECK, str(run_dir), found=f"not compared: {error}")]
    if NAME not in (job.train.trackers or ()):
        return []
    bounds, why = choose(hyper_parameters(job))
    if bounds is None:
        return [passed(CHECK, str(run_dir), found=f"not compared: {why}")]

    findings: dict[tuple[str, int], Check] = {}
    for name in bounds.rows:
        for step, value in curves.get(name, []):
            found = bounds.left(name, step, value)
            if found is not None:
                findings.setdefault((name, found[0]), _finding(run_dir, f"step {step:,}: {found[1]}"))
    if findings:
        return list(findings.values())
    last = max((curves[name][-1][0] for name in bounds.rows if name in curves), default=0)
    return [passed(CHECK, str(run_dir), found=f"within the bounds of {bounds.of} up to step {last:,}")]


def _finding(run_dir: Path, found: str) -> Check:
    remedy = "docs/wmt.md says what to look at, and in which order: the rate and the text first"
    return failed(CHECK, str(run_dir), found=found, level=Level.warning, remedy=remedy, places=[])
