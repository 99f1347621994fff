"""The weights that all contenders of a comparison begin with: those of a model of ours, in a file that peers read."""

from pathlib import Path
from typing import Any

import numpy as np

from transformer.model.layers import sinusoids
from transformer.model.transformer import Transformer, parameters_by_name


def save_weights(model: Transformer, path: Path) -> None:
    """Every weight under its name in a checkpoint, and `positions` `(max_positions, d_model)`: see weights.py."""
    positions = sinusoids(model.config.max_positions, model.config.d_model)
    tensors = parameters_by_name(model) | {"positions": positions}
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(path, **arrays)
