"""Corrupts a result on purpose, as a sick card would: for tests, benchmarks and `run --chaos`."""

from __future__ import annotations

import math
import random

import torch


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of a floating-point type of 16 or 32 bits as integers of the same width."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous tensor in place; bit 0 is the least, the highest
    is the sign.

    Raises:
        ValueError: There is no such bit.
    """
    width = 8 * tensor.element_size()
    if not 0 <= bit < width:
        raise ValueError(f"{tensor.dtype} has bits 0 to {width - 1}, not {bit}")
    mask = 1 << bit
    if bit == width - 1:
        mask -= 1 << width  # the sign of the integer, too
    bits_of(tensor).view(-1)[index : index + 1].bitwise_xor_(mask)


def bit_class(dtype: torch.dtype, bit: int) -> str:
    """Return whether a bit of a type is of its `sign`, `exponent` or `fraction`."""
    info = torch.finfo(dtype)
    if bit == info.bits - 1:
        return "sign"
    fraction_bits = round(-math.log2(info.eps))
    return "exponent" if bit >= fraction_bits else "fraction"


def flip_any_bit(tensor: torch.Tensor, seed: int) -> str:
    """Flip one bit drawn by `seed`, and say in words which."""
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    index, bit = chance.randrange(tensor.numel()), chance.randrange(8 * tensor.element_size())
    flip_bit(tensor, index, bit)
    row, column = divmod(index, tensor.shape[-1])
    return f"flipped {bit_class(tensor.dtype, bit)} bit {bit} of row {row}, column {column}"
