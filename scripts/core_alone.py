"""The core without anything that plugs into it: the boundary is a deletion.

    python scripts/core_alone.py [PYTEST ARGUMENTS]

Copies the tree without `transformer/tools`, `transformer/integrations` and their tests, hides the optional packages,
runs `tests/core`, and trains the demo for 100 steps by the command line. Exit status 0 if all of that works.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("transformer/tools", "transformer/integrations", "tests/tools", "tests/integrations", "tests/scripts")

# The plain suite, but for tests in which the core is asked for a plug-in.
WANTED = "not plugins and not slow and not faults and not gpu and not fake_gpu and not null_gpu and not ci"

# What `sitecustomize` does in every process: modules of these names are as good as not installed.
HIDING = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            return None
        return self._finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def main(arguments: list[str]) -> int:
    """Test and train in a copy of the tree; the exit status."""
    with TemporaryDirectory(prefix="core-") as temporary:
        tree = Path(temporary, "tree")
        copy_core(tree)
        hooks = Path(temporary, "hooks")
        hooks.mkdir()
        (hooks / "sitecustomize.py").write_text(HIDING.format(names=optional_packages()), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(hooks), str(tree)])}

        def run(*command: str, folder: Path = tree) -> None:
            subprocess.run([sys.executable, "-P", *command], cwd=folder, env=environment, check=True)

        check = "import transformer; assert transformer.__file__.startswith({!r}), transformer.__file__"
        try:
            run("-c", check.format(str(tree)))
            tests = [] if any(argument.startswith("tests/") for argument in arguments) else ["tests/core"]
            run("-m", "pytest", "-q", "-m", WANTED, *tests, *arguments)
            demo = ("train.max_steps=100", "train.save_every=50", "train.validate_every=50", "train.average=2")
            run("-m", "transformer", "train", f"run_dir={temporary}/run", *demo)
        except subprocess.CalledProcessError as error:
            return error.returncode
        return 0


def copy_core(tree: Path) -> None:
    """The tracked files of the tree, but for what plugs into the core."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(tuple(f"{folder}/" for folder in LEFT_OUT)) and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def optional_packages() -> set[str]:
    """What the extras install that the tests need for the core's plug-ins alone, by the names of their modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {"dev", "gpu-tests", "ja", "ko"}  # the tests' own tools, the core's kernels, sacreBLEU's tokenizers
    named = [line for extra, lines in project["optional-dependencies"].items() if extra not in own for line in lines]
    modules = {re.split("[=>[;]", line)[0].strip().replace("-", "_") for line in named}
    return modules - {"sacrebleu", "transformer_mt"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
