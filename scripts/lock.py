"""Writes `.ci/requirements-VERSION.txt`: the packages that the checks run with, each with the SHA-256 of its file.

It is for the Python and the machine that it is made on, since a hash is of one file: Linux on x86-64, a CPU build of
torch. `.ci/run` installs what it names, and nothing that differs from it by a byte. To renew it, run

    python scripts/lock.py

with a pip of 23.0 or later, let the gate pass with it, and commit the two together. What pip chooses is what
pyproject.toml allows: the newest there is. What is built from source, this package and those that come as source alone,
is built with whatever build tools are current; all else is fixed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WANTED = (f"{ROOT}[dev,docs,export,gpu-tests,slurm,sweep,trackio,wandb]", "hatchling")  # hatchling builds this package


def main() -> None:
    """Ask pip what it would install into an empty environment, and write that down."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = ROOT / ".ci" / f"requirements-{version}.txt"
    packages = [package for package in resolve() if "archive_info" in package["download_info"]]  # not this one
    lines = sorted(line(package) for package in packages)
    path.write_text("".join(f"{text}\n" for text in [f"# made by scripts/lock.py for Python {version}", *lines]))
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


def resolve() -> list[dict[str, Any]]:
    """The packages of pip's report (https://pip.pypa.io/en/stable/reference/installation-report)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report), *WANTED]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        return list(json.loads(report.read_text())["install"])


def line(package: dict[str, Any]) -> str:
    """A line of a requirements file. A local label such as `+cpu` stays: it is another file."""
    metadata = package["metadata"]
    sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{metadata['name']}=={metadata['version']} --hash=sha256:{sha256}".lower()


if __name__ == "__main__":
    main()
