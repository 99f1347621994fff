"""Of the wheels given, those whose package this Python does not have yet, one path a line."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def is_missing(wheel: Path) -> bool:
    """Whether the package of a wheel is not installed, in any version."""
    try:
        version(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        return True
    return False


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        if is_missing(path):
            print(path)
