"""Random numbers that are a function of their purpose."""

from __future__ import annotations

import pytest
import torch

from workers.training import keyed_random as keyed
from workers.training.errors import TaskError
from workers.training.order import mixed

_WORD = 2**32 - 1


def plain_bits(seed: int, stream: int, number: int, position: int) -> int:
    """Compute the same bits with Python's integers, which do not overflow."""
    key = number * 0x9E3779B97F4A7C15 + mixed(seed, stream) & 2**64 - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        key = (key ^ key >> shift) * factor & 2**64 - 1
    key ^= key >> 31
    word = position * (key & _WORD | 1) + (key >> 32) & _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ word >> shift) * factor & _WORD
    return word ^ word >> 16


def test_tensors_and_plain_numbers_agree_to_the_bit() -> None:
    """So every device with standard integer overflow gives these bits."""
    numbers = torch.tensor([0, 1, 2**40 + 7])
    drawn = keyed.bits(keyed.row_keys(2**63 + 5, [3, 4], numbers).flatten(), 50)
    wanted = [
        [plain_bits(2**63 + 5, s, n, p) for p in range(50)]
        for s in (3, 4)
        for n in numbers.tolist()
    ]
    assert [[each & _WORD for each in row] for row in drawn.tolist()] == wanted


def test_the_numbers_are_even_and_independent() -> None:
    """Over 256 samples, 2 layers and 1,024 positions: 16 classes, each bit, and neighbours in all three directions."""
    drawn = keyed.uniform(keyed.row_keys(1, [0, 1], torch.arange(256)).flatten(), 1024).view(
        2, 256, 1024
    )
    counts = torch.histc(drawn, 16, 0, 1)
    expected = drawn.numel() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 45, (
        "chi-squared with 15 degrees of freedom; 1 in 10,000"
    )
    centred = drawn - 0.5
    for one, other in (
        (centred[0], centred[1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[..., 1:], centred[..., :-1]),
        (centred[..., 256:], centred[..., :-256]),
    ):
        assert abs((one * other).mean() * 12) * one.numel() ** 0.5 < 4, "four standard deviations"
    assert (drawn.mean(dim=2) - 0.5).abs().max() * (12 * 1024) ** 0.5 < 5, "each row by itself"


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    layer = keyed.KeyedDropout(0.25)
    layer.keys = keyed.row_keys(0, [0], torch.arange(64))[0]
    ones = torch.ones(64, 16, 32)
    out = layer(ones)
    assert abs((out == 0).float().mean() - 0.25) < 0.01
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert layer.eval()(ones) is ones


def test_a_tensor_whose_rows_are_no_samples_is_refused() -> None:
    layer = keyed.KeyedDropout(0.5)
    layer.name = "block.drop"
    layer.keys = keyed.row_keys(0, [0], torch.arange(4))[0]
    with pytest.raises(
        TaskError, match=r"dropout block.drop got a tensor of shape \(5, 4\) in a part of 4 samples"
    ):
        layer(torch.ones(5, 4))
