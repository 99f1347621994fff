"""What a test does to a training while it runs: through torch's hooks, so that the training itself is the package's.

Each handle ends with its `with`, or with the process. Several of them do not know of each other.
"""

import math
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from transformer.training.step import Objective


def before_each_pass(action: Callable[[Objective], None]) -> RemovableHandle:
    """Call `action` before the forward pass of every micro-batch that is trained on in this process."""

    def act(module: nn.Module, _arguments: object) -> None:
        if isinstance(module, Objective) and module.training:
            action(module)

    return register_module_forward_pre_hook(act)


def before_each_update(action: Callable[[], None]) -> RemovableHandle:
    """Call `action` in every step of this process: its gradient is there, and Adam has not moved the weights yet."""
    return register_optimizer_step_pre_hook(lambda _optimizer, _arguments, _keywords: action())


def after_each_update(action: Callable[[], None]) -> RemovableHandle:
    """Call `action` in every step of this process: Adam has moved the weights, or skipped the update."""
    return register_optimizer_step_post_hook(lambda _optimizer, _arguments, _keywords: action())


@contextmanager
def spoilt_gradients(steps: Container[int], *, factor: float = math.nan) -> Iterator[None]:
    """Multiply the gradient of the loss by `factor` in these steps of this process, counted from 1.

    The loss itself stays as it is.
    """
    step = 1

    def spoil(module: nn.Module, _arguments: object, out: Any) -> None:
        if isinstance(module, Objective) and module.training and step in steps:
            loss: Tensor = out[0]
            loss.register_hook(lambda gradient: gradient * factor)

    def count() -> None:
        nonlocal step
        step += 1

    with register_module_forward_hook(spoil), after_each_update(count):
        yield
