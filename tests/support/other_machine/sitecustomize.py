"""Python begins with this on the other machine: the extras are hidden, torch answers for another processor,
and there is one core.

It is on PYTHONPATH, so that it holds in every process that a test starts. Nothing is imported here that the process
would not have imported: each question is answered when its module is.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HIDDEN = frozenset(os.environ.get("TRANSFORMER_TEST_HIDDEN", "").split())
INSTALLED = ("site-packages", "dist-packages")

# By which torch says what the processor multiplies in hardware: on AVX2 alone, neither bf16 nor 8-bit integers.
NO = ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_vnni_supported", "_is_avx512_vnni_supported")

_find_spec = PathFinder.find_spec


class OtherFinder:
    """What `PathFinder` finds, but for what is hidden. Others keep the bound method, as they kept its own."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in HIDDEN:  # what a test writes under such a name is found
            path = [folder for folder in sys.path if os.path.basename(folder) not in INSTALLED]
        spec = _find_spec(fullname, path, target)
        if fullname == "torch.cpu" and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_answer(module: ModuleType) -> None:
                execute(module)
                for question in filter(module.__dict__.__contains__, NO):
                    setattr(module, question, lambda: False)

            spec.loader.exec_module = execute_and_answer  # type: ignore[method-assign]
        return spec


PathFinder.find_spec = OtherFinder.find_spec  # type: ignore[method-assign]
if hasattr(os, "sched_getaffinity"):
    os.sched_getaffinity = lambda _: {0}
