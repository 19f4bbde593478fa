"""Freivalds' test of a product: C x is compared with A (B x), in double precision, for vectors of
random signs.

It finds every error that exceeds `tolerance`, repeated errors as well as transient ones, for the
price of reading A, B and C once. It cannot distinguish smaller errors from rounding: `repeat` finds
those, if they are transient.

It works in the scratch memory it is given and allocates nothing on the device, because the workload
that is checked holds all the memory there is. So sums are products with a vector of ones: torch's
reductions take memory on a card. Waits for the device once, at the end. In double precision
throughout: its own errors do not matter, and no TF32.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from workers.verification.check import Check
from workers.verification.tolerance import VECTORS, tolerance

_ITEM_BYTES: Final = 8

#: Rows are cast to double precision in chunks of so much: in a core's cache on a CPU; on a card
#: enough for all of it.
_CHUNK_BYTES: Final = {"cpu": 2**19, "cuda": 2**24}

#: Whether vectors are multiplied one at a time: a product so narrow would leave most of a card
#: idle, where each row of a vector's product gets a block of its own. On a CPU all at once takes
#: half the time.
_ONE_BY_ONE: Final = {"cpu": False, "cuda": True}

#: Added to the seed of the signs: drawn by the seed of the operands themselves they would not be
#: independent of these.
_OWN_SEEDS: Final = 0x4652_4549_5641_4C44

#: Columns besides the chunk, by what they are as long as: n (signs, their images, row norms of B,
#: ones, ratios) or a chunk's rows (residuals, two norms).
_BY_N: Final = 2 * VECTORS + 3
_BY_ROWS: Final = VECTORS + 2


def least_scratch(n: int) -> int:
    """Return how many doubles of scratch a check of n x n matrices needs at the least: it works row
    by row then.
    """
    return _BY_N * n + n + _BY_ROWS


def freivalds(
    left: torch.Tensor, right: torch.Tensor, result: torch.Tensor, scratch: torch.Tensor, seed: int
) -> Check:
    """Check that `result` is `left @ right` up to rounding.

    Args:
        left: n x n, of the type and on the device of the others; n is `VECTORS` at the least.
        right: The same.
        result: The same.
        scratch: A flat tensor of doubles on that device, `least_scratch` or more, that overlaps
        none of them.
        seed: Of the random signs.

    Raises:
        ValueError: The scratch is too small, or the matrices are.
    """
    n = result.shape[0]
    if n < VECTORS:
        raise ValueError(
            f"Freivalds' test with {VECTORS} vectors is for at least {VECTORS} rows, not {n}"
        )
    rows = chunk_rows(n, len(scratch) - _BY_N * n, _BY_ROWS, result.device.type)
    parts = [VECTORS * n, VECTORS * n, n, n, n, VECTORS * rows, rows, rows, rows * n]
    flat = scratch[: sum(parts)].split_with_sizes(parts)
    signs, images, norms, ones, ratios, residuals, spreads, sizes, chunks = flat
    allowed = tolerance(result.dtype, n, result.device.type)
    generator = torch.Generator(device=signs.device).manual_seed(_OWN_SEEDS + seed)
    signs.random_(0, 2, generator=generator).mul_(2.0).sub_(1.0)
    ones.fill_(1.0)
    signs, images = signs.view(VECTORS, n), images.view(VECTORS, n)
    for begin in range(0, n, rows):
        end = min(begin + rows, n)
        chunk = chunks[: (end - begin) * n].view(-1, n)
        chunk.copy_(right[begin:end])
        _images(chunk, signs, images[:, begin:end])
        product_into(norms[begin:end], chunk.square_(), ones)
    for begin in range(0, n, rows):
        count = min(rows, n - begin)
        chunk = chunks[: count * n].view(-1, n)
        residual = residuals[: VECTORS * count].view(VECTORS, count)
        spread, size, ratio = spreads[:count], sizes[:count], ratios[begin : begin + count]
        chunk.copy_(left[begin : begin + count])
        _images(chunk, images, residual)
        product_into(spread, chunk.square_(), norms)
        chunk.copy_(result[begin : begin + count])
        _images(chunk, signs, residual, less=True)
        product_into(size, chunk.square_(), ones)
        product_into(ratio, residual.square_().t(), ones[:VECTORS])
        torch.maximum(spread, size, out=spread)
        spread.mul_(allowed.summed).add_(size, alpha=allowed.stored).add_(allowed.least)
        ratio.div_(VECTORS).div_(spread)
    worst, row = ratios.cpu().max(dim=0)  # the one wait; NaN is the largest of all
    ratio_of_roots = math.sqrt(worst.item())
    return verdict(
        "freivalds",
        math.inf if math.isnan(ratio_of_roots) else ratio_of_roots,
        int(row.item()),
        result,
    )


def product_into(out: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor) -> None:
    """Put matrix x vector into `out`.

    By `addmv`, because some versions of `mv` make a vector beside `out`.
    """
    torch.addmv(out, matrix, vector, beta=0.0, out=out)


def verdict(kind: str, worst: float, row: int, result: torch.Tensor) -> Check:
    """Put into words what was found of `result`, whose worst row is `row`."""
    detail = f"{result.shape[0]} x {result.shape[1]} {str(result.dtype).removeprefix('torch.')}"
    ok = worst <= 1.0
    if not ok:
        found = (
            f"{worst:.3g} times the tolerance"
            if math.isfinite(worst)
            else "no number, or not the same bits"
        )
        detail += f", row {row}: {found}"
    return Check(kind=kind, ok=ok, worst=worst, detail=detail)


def chunk_rows(n: int, doubles: int, by_rows: int, device_type: str) -> int:
    """Return how many of n rows of n columns to look at together, if each takes `n + by_rows`
    doubles of scratch.

    Raises:
        ValueError: Not even one fits.
    """
    fitting = doubles // (n + by_rows)
    if fitting < 1:
        raise ValueError(
            f"{doubles} doubles of scratch do not hold a row of {n} and {by_rows} more"
        )
    return max(1, min(n, fitting, _CHUNK_BYTES[device_type] // (n * _ITEM_BYTES)))


def _images(
    chunk: torch.Tensor, vectors: torch.Tensor, out: torch.Tensor, *, less: bool = False
) -> None:
    """Put the products of the chunk's rows with each vector into `out`.

    With `less`, take them away from it.
    """
    alpha, beta = (-1.0, 1.0) if less else (1.0, 0.0)
    if not _ONE_BY_ONE[chunk.device.type]:
        torch.addmm(out, vectors, chunk.t(), alpha=alpha, beta=beta, out=out)
        return
    for vector, line in zip(vectors, out, strict=True):
        torch.addmv(line, chunk, vector, alpha=alpha, beta=beta, out=line)
