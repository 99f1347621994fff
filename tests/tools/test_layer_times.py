"""The layers of Table 1 in real use: what is timed, and what restricted attention sees."""

import pytest
import torch
from torch import Tensor

from transformer.config.settings import Score
from transformer.tools.paper.layer_times import SelfAttention, format_times, time_layers


def test_time_layers_times_each_layer_at_each_length() -> None:
    device = torch.device("cpu")
    rows = time_layers((4, 8, 64), d_model=8, n_heads=2, k=3, r=4, tokens=32, repeats=2, device=device)
    names = ["self-attention", "self-attention (restricted)", "recurrent (LSTM)", "convolutional"]
    assert [(row.n, row.layer) for row in rows] == [(n, name) for n in (4, 8, 64) for name in names]
    assert [row.tokens for row in rows[::4]] == [32, 32, 64]  # one sentence at least
    assert all(row.forward > 0 and row.forward_backward > 0 and row.repeats == 2 for row in rows)

    text = format_times(rows)
    assert text.count("\n| ") == 5
    assert f"| 8 | 32 | {rows[4].forward_backward:.1f} ({rows[4].forward:.1f}) |" in text


def test_time_layers_refuses_a_length_that_is_no_multiple_of_the_block() -> None:
    with pytest.raises(ValueError, match="r=4"):
        time_layers((4, 10), d_model=8, n_heads=2, k=3, r=4, device=torch.device("cpu"))


def attended(layer: SelfAttention, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = layer(x)
    return out


def test_restricted_attention_stays_inside_its_block() -> None:
    torch.manual_seed(0)
    whole = SelfAttention(8, 2, score=Score.scaled, block=None)
    blocks = SelfAttention(8, 2, score=Score.scaled, block=4)
    blocks.load_state_dict(whole.state_dict())
    x = torch.randn(3, 12, 8)
    expected = torch.cat([attended(whole, part) for part in x.split(4, dim=1)], dim=1)
    torch.testing.assert_close(attended(blocks, x), expected)
    torch.testing.assert_close(attended(blocks, x[:, :3]), attended(whole, x[:, :3]))
