"""The explorer of attention weights, as a component of a page: the data that explorer.js shows.

    Inspected -> explorer -> Component -> `page`

Weights are rounded to thousandths. Those of a layer are compressed together, and the browser unpacks a layer when it
shows it, so that a page grows by less than a byte for each weight.
"""

import base64
import zlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from transformer.tools.attention.sentence import Inspected
from transformer.tools.inspection import AttentionMaps, Role
from transformer.tools.page import Component
from transformer.tools.plots import distinct_colors


def explorer(inspected: Inspected, *, heading: str) -> Component:
    """An explorer of the weights of one sentence pair, with a colour for each head."""
    maps = inspected.maps
    data = {
        "heads": inspected.n_heads,
        "source": inspected.source,
        "reads": inspected.reads,
        "predicts": inspected.predicts,
        "colors": distinct_colors(inspected.n_heads),
        "pinned": _clearest(maps, inspected.predicts),
        "weights": {role.value: [_pack(layer) for layer in maps.of(role)] for role in Role},
    }
    return Component("attention/explorer", heading, data)


def _clearest(maps: AttentionMaps, predicts: Sequence[str]) -> int:
    """Which predicted piece the page pins as it opens, counted from 0.

    It is the one that looks most at a single piece of the source, by the mean of the last layer's heads. EOS, which
    heads look at where they look for nothing, and punctuation are left out where there is anything else.
    """
    words = [position for position, piece in enumerate(predicts[:-1]) if any(map(str.isalpha, piece))]
    if not words or maps.cross.shape[-1] < 2:
        return 0
    most = maps.cross[-1].mean(0)[words, :-1].amax(1)  # (words,)
    return words[int(most.argmax())]


def _pack(weights: Tensor) -> str:
    """The weights of a layer `(H, queries, keys)` in thousandths: 16 bits each, low byte first, zlib, base64."""
    thousandths = np.rint(1000 * weights.numpy()).astype("<u2")
    return base64.b64encode(zlib.compress(thousandths.tobytes())).decode()
