"""The programs of scripts/ as modules."""

import importlib.util
import sys
from types import ModuleType

from support.paths import ROOT

SCRIPTS = ROOT / "scripts"


def load_script(path: str) -> ModuleType:
    """Import a module of scripts/, which is no package, under the last part of its path, as a neighbour would."""
    name = path.rpartition("/")[2]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str((SCRIPTS / path).parent)
    sys.path.insert(0, folder)  # where it finds those that it imports
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module
