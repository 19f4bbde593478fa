"""Wrong results on purpose: bits flipped in a tensor, and a matmul whose results are all wrong."""

from __future__ import annotations

import math
import random

import torch

from workers.verification.check import Check
from workers.verification.products import bits_of
from workers.workloads.matmul import Matmul


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous tensor in place; bit 0 is the least, the highest
    is the sign.
    """
    width = 8 * tensor.element_size()
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


def flip_latest(workload: Matmul, seed: int) -> str | None:
    """Flip one bit of the latest product, drawn by `seed`, and say in words which; `None` if there
    is none.
    """
    latest = None if workload._tensors is None else workload._tensors.latest
    if latest is None:
        return None
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    index, bit = chance.randrange(latest.numel()), chance.randrange(8 * latest.element_size())
    flip_bit(latest, index, bit)
    row, column = divmod(index, latest.shape[-1])
    return f"flipped {bit_class(latest.dtype, bit)} bit {bit} of row {row}, column {column}"


class Flipping(Matmul):
    """Flips a bit of each product before it is checked; the workload `tests.flips:Flipping`."""

    def check(self, seed: int) -> Check | None:
        """Check a wrong result."""
        flip_latest(self, seed)
        return super().check(seed)
