"""Tables of variants of the model, which must try every choice that there is."""

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum

from transformer.config.settings import ModelConfig


def untried(configs: Iterable[ModelConfig]) -> set[Enum]:
    """The choices of the model's switches, such as `Activation.relu`, that none of the configs makes."""
    switches = [(field.name, type(field.default)) for field in fields(ModelConfig) if isinstance(field.default, Enum)]
    tried = {getattr(config, name) for config in configs for name, _ in switches}
    return {choice for _, kind in switches for choice in kind} - tried
