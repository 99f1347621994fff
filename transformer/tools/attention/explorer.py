"""The explorer of attention weights, as a component of a page: the data that explorer.js shows.

    AttentionMaps -> explorer -> Component -> `page`

Weights are rounded to thousandths. Those of a layer are compressed together, and the browser unpacks a layer when it
shows it, so that a page grows by less than a byte for each weight.
"""

import base64
import zlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from transformer.tools.inspection import AttentionMaps, Role
from transformer.tools.page import Component


def explorer(
    maps: AttentionMaps,
    *,
    heading: str,
    source: Sequence[str],
    reads: Sequence[str],
    predicts: Sequence[str],
    colors: Sequence[str],
) -> Component:
    """An explorer of the weights of one sentence pair, with a colour, `#1f77b4`, for each head.

    `source` are the pieces of the source and EOS, `reads` and `predicts` what the decoder reads and predicts at each of
    its positions.
    """
    data = {
        "heads": maps.cross.shape[1],
        "source": list(source),
        "reads": list(reads),
        "predicts": list(predicts),
        "colors": list(colors),
        "weights": {role.value: [_pack(layer) for layer in maps.of(role)] for role in Role},
    }
    return Component("attention/explorer", heading, data)


def _pack(weights: Tensor) -> str:
    """The weights of a layer `(H, queries, keys)` in thousandths: 16 bits each, low byte first, zlib, base64."""
    thousandths = np.rint(1000 * weights.numpy()).astype("<u2")
    return base64.b64encode(zlib.compress(thousandths.tobytes())).decode()
