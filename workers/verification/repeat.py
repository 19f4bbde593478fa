"""Bitwise repeat: a product computed once more, and compared bit by bit.

It finds every transient error, down to one flipped bit, whatever the tolerance. It cannot see an
error that the device repeats; `freivalds` does. Like that it allocates nothing on the device.

The same product gives the same bits: cuBLAS promises it for a given version on cards of one
architecture and number of multiprocessors, as long as one stream is active (cuBLAS manual, "Results
reproducibility"); the workload has one. Intel MKL promises it for a fixed number of threads and
operands aligned alike (oneMKL, "Reproducibility Conditions"). So both results must lie at addresses
of the same alignment; places of one ring of whole tiles do.

MKL has an exception: a thread that gets no memory for its buffers sums in another order (seen with
2024.2 under a cap), and memory may have run out, or come back, between the two products. Then
nearly all elements of that thread's part differ, in their last bits.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from workers.verification.check import Check
from workers.verification.freivalds import chunk_rows, product_into, verdict

#: On a CPU, results that differ in more than this share of one thread's rows were summed in
#: different orders.
_OTHER_ORDER: Final = 0.5


def least_scratch(n: int) -> int:
    """Return how many doubles of scratch a comparison of n x n matrices needs at the least."""
    return 3 * n


def same_bits(result: torch.Tensor, again: torch.Tensor, scratch: torch.Tensor) -> Check | None:
    """Compare two results of one product; afterwards `again` holds what differs, and no product.

    Args:
        result: n x n.
        again: The repeat; same shape, type and device.
        scratch: A flat tensor of doubles on that device, `least_scratch` or more, that does not
        overlap `again`. It may
            overlap `result`, which is not read again once the bits are compared.

    Returns:
        What was found; `None` if the two cannot be compared, because a CPU summed them in different
        orders.
    """
    n = result.shape[0]
    rows = chunk_rows(n, len(scratch) - 2 * n, 0, result.device.type)
    flipped = bits_of(again)
    torch.bitwise_xor(bits_of(result), flipped, out=flipped)
    ones, sums, chunks = scratch[: (2 + rows) * n].split_with_sizes([n, n, rows * n])
    ones.fill_(1.0)
    for begin in range(0, n, rows):
        end = min(begin + rows, n)
        chunk = chunks[: (end - begin) * n].view(-1, n)
        chunk.copy_(flipped[begin:end])
        # A sum of squares is 0 where nothing differs, and there alone.
        product_into(sums[begin:end], chunk.square_(), ones)
    differs = sums.cpu() > 0.0  # the one wait
    differing_rows = int(differs.sum().item())
    if result.device.type == "cpu" and differing_rows > _OTHER_ORDER * n / torch.get_num_threads():
        return None
    return verdict(
        "repeat", math.inf if differing_rows else 0.0, int(differs.int().argmax().item()), result
    )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of a floating-point type of 16 or 32 bits as integers of the same width."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
