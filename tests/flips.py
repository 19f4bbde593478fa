"""Deliberately wrong results: flipped bits in a tensor, and a matmul with only wrong results."""

from __future__ import annotations

import math
import random

import torch

from workers.verification.check import Check
from workers.verification.products import bits_of
from workers.workloads.matmul import Matmul


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous tensor in place. Bit 0 is the least significant;
    the highest bit is the sign.
    """
    width = 8 * tensor.element_size()
    mask = 1 << bit
    if bit == width - 1:
        mask -= 1 << width  # the bit is also the sign of the integer
    bits_of(tensor).view(-1)[index : index + 1].bitwise_xor_(mask)


def bit_class(dtype: torch.dtype, bit: int) -> str:
    """Return the part of a type to which a bit belongs: `sign`, `exponent` or `fraction`."""
    info = torch.finfo(dtype)
    if bit == info.bits - 1:
        return "sign"
    fraction_bits = round(-math.log2(info.eps))
    return "exponent" if bit >= fraction_bits else "fraction"


def flip_latest(workload: Matmul, seed: int) -> str | None:
    """Flip one bit of the latest product, drawn by `seed`, and describe it; `None` if there is no
    product.
    """
    latest = None if workload._tensors is None else workload._tensors.latest
    if latest is None:
        return None
    chance = random.Random(seed)  # noqa: S311 - must be repeatable
    index, bit = chance.randrange(latest.numel()), chance.randrange(8 * latest.element_size())
    flip_bit(latest, index, bit)
    row, column = divmod(index, latest.shape[-1])
    return f"flipped {bit_class(latest.dtype, bit)} bit {bit} of row {row}, column {column}"


class Flipping(Matmul):
    """The workload `tests.flips:Flipping`, which flips a bit of each product before its check."""

    def check(self, seed: int) -> Check | None:
        """Flip a bit, and check the wrong result."""
        flip_latest(self, seed)
        return super().check(seed)
