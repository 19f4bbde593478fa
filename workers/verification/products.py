"""Two checks of a product C of A and B. Neither decides when it runs (`check` does).

Freivalds' test compares C x with A (B x) for vectors of random signs, in double precision. It finds
every error that exceeds the tolerance, repeated errors as well as transient ones, for the price of
reading A, B and C once. It cannot distinguish smaller errors from rounding.

The repeat compares C bit by bit with the same product computed once more. It finds every transient
error, down to one flipped bit, and no error that the device repeats. The same product gives the
same bits: cuBLAS promises it for a given version on cards of one architecture and number of
multiprocessors, as long as one stream is active (cuBLAS manual, "Results reproducibility"); the
workload has one. Intel MKL promises it for a fixed number of threads and operands aligned alike
(oneMKL, "Reproducibility Conditions"); places of one ring of whole tiles are. MKL has an exception:
a thread that gets no memory for its buffers sums in another order (found in 2024.2 under a cap).
Then nearly all elements of that thread's part differ, in their last bits.

Both work in the scratch memory they are given and allocate nothing on the device, because the
workload that is checked holds all the memory there is. So sums are products with a vector of ones:
torch's reductions take memory on a card. Each waits for the device once, at the end.

**How far a row may be from the true one by rounding alone.** For a product C of A and B, both n x
n, let e_ij be the error of c_ij. Freivalds' test draws x of random signs and examines r_i = (Cx -
A(Bx))_i = sum_j x_j e_ij. The signs are independent of the errors, so whatever the errors are,
biased or correlated, r_i has mean 0 and is sub-Gaussian with variance proxy S_i^2 = sum_j e_ij^2
(Hoeffding). Only S_i has to be bounded, not the sum of |e_ij|, which is what made earlier
thresholds 160 to 4200 times too large (V-ABFT, arXiv 2602.08043).

**Several signs at once.** With m independent vectors the mean square M_i of the m residuals obeys
the Chernoff bound of a chi-square: P(M_i > t S_i^2) <= (t e^(1-t))^(m/2). `LIMIT` is the t at which
that is 1e-14, so that 10^6 checks of 8192 rows raise a false alarm with a chance below 1e-4. With m
= 8 it is 11.5: an error of 3.4 S_i in one element is found; a single vector would need 8.

**S_i^2, from variances.** v_i = sum_k a_ik^2 |B_k|^2 (B_k: row k) is what |C_i|^2 would be for
random signs; h_i = max(v_i, |C_i|^2) is the scale of the partial sums, also where C cancels and
where it does not. Per row:

- Storing in a type of unit roundoff u: a rounding error is uniform within half a unit in the last
  place, whose square is u^2 4^e / 3 for c in [2^e, 2^(e+1)). With c^2 = 7/3 4^e in the mean, that
  is 1/7 u^2 |C_i|^2, up to 1/6 as c spreads over several binades.
- Summing k products in fp32, one after the other (the worst order in use): partial sums grow as
  sqrt(t) for random signs, so the k errors add up to u32^2 / 6 k / 2 h_i; where all terms have one
  sign it is less, k / 18.
- Tensor cores truncate where a CPU rounds (Fasi et al., PeerJ CS 7:e330), after every four products
  at the least. In the mean that is half a unit in the last place, 0.7 u32 |s_t|, always towards
  zero: it does not average out, and k / 4 of them along partial sums that grow come to about 0.1 k
  u32 |c|. So (u32 k / 8)^2 h_i.
- TF32 keeps 10 bits of the operands' fractions. If the others are cut off, each loses a third of
  2^-10 in the mean, always downwards: both together (2^-10)^2 / 2 h_i.
- Subnormals: at most half the smallest one each.

These are means; the sum of n squares scatters around n times its mean, at n = 64 by a fifth. With 1
+ 4 / sqrt(n) times as much the mean of the rows was never above the model, and no row above 1.5 of
it (CPU, all types, operands of several distributions); at 1.5 a false alarm still has a chance of
1e-8 in such a row.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from workers.verification.check import Check

#: Vectors of signs for one check: more make it sharper, each costs as much as the first.
VECTORS: Final = 8

#: The largest accepted ratio of the mean square of a row's residuals to S_i^2: the t at which (t
#: e^(1-t))^(VECTORS/2) is 1e-14, the chance of a false alarm in one row of one check.
LIMIT: Final = 11.5

#: On a CPU, two results that differ in more than this share of one thread's rows were summed in
#: different orders.
_OTHER_ORDER: Final = 0.5

_U32: Final = 2.0**-24


def tolerance(dtype: torch.dtype, n: int, device_type: str) -> tuple[float, float, float]:
    """Return the tolerances for products of n x n matrices in `dtype` (fp32, fp16 or bf16) by this
    process now: on `cuda`, torch's setting for TF32 counts. Reductions in a narrow type are off, as
    the device sets them.

    The three numbers are `stored`, `summed` and `least`: the mean square of a row's residuals may
    be `stored |C_i|^2 + summed max(v_i, |C_i|^2) + least`.
    """
    info = torch.finfo(dtype)
    roundoff = info.eps / 2.0
    stored = roundoff**2 / 6.0
    summed = _U32**2 * n / 12.0
    if device_type == "cuda":
        precision = torch.backends.cuda.matmul.fp32_precision
        tf32 = dtype is torch.float32 and precision == "tf32"
        if tf32 or dtype is not torch.float32:
            summed += (_U32 * n / 8.0) ** 2
        if tf32:
            summed += 2.0**-20 / 2.0
    factor = LIMIT * (1.0 + 4.0 / math.sqrt(n))
    smallest = info.smallest_normal * info.eps
    return factor * stored, factor * summed, factor * n * (smallest / 2.0) ** 2


_ITEM_BYTES: Final = 8

#: Rows are cast to double precision in chunks of this many bytes: on a CPU they fit into a core's
#: cache; on a card they keep all of it busy.
_CHUNK_BYTES: Final = {"cpu": 2**19, "cuda": 2**24}

#: Added to the seed of the signs: signs drawn by the seed of the operands would not be independent
#: of these.
_OWN_SEEDS: Final = 0x4652_4549_5641_4C44

#: Columns apart from the chunk, by their length: n (signs, their images, row norms of B, ones,
#: ratios) or the rows of a chunk (residuals, two norms).
_BY_N: Final = 2 * VECTORS + 3
_BY_ROWS: Final = VECTORS + 2


def least_scratch(n: int) -> int:
    """Return how many doubles of scratch either check of n x n matrices needs at least; with these
    it works row by row.
    """
    return _BY_N * n + n + _BY_ROWS


def freivalds(
    left: torch.Tensor, right: torch.Tensor, result: torch.Tensor, scratch: torch.Tensor, seed: int
) -> Check:
    """Check that `result` is `left @ right` up to rounding.

    Args:
        left: n x n, of the same type and on the same device as the others; n is at least `VECTORS`.
        right: The same.
        result: The same.
        scratch: A flat tensor of `least_scratch` doubles or more on that device, which overlaps
            none of them.
        seed: Seed of the random signs.
    """
    n = result.shape[0]
    rows = _chunk_rows(n, len(scratch) - _BY_N * n, _BY_ROWS, result.device.type)
    parts = [VECTORS * n, VECTORS * n, n, n, n, VECTORS * rows, rows, rows, rows * n]
    flat = scratch[: sum(parts)].split_with_sizes(parts)
    signs, images, norms, ones, ratios, residuals, spreads, sizes, chunks = flat
    stored, summed, least = tolerance(result.dtype, n, result.device.type)
    generator = torch.Generator(device=signs.device).manual_seed(_OWN_SEEDS + seed)
    signs.random_(0, 2, generator=generator).mul_(2.0).sub_(1.0)
    ones.fill_(1.0)
    signs, images = signs.view(VECTORS, n), images.view(VECTORS, n)
    for begin in range(0, n, rows):
        end = min(begin + rows, n)
        chunk = chunks[: (end - begin) * n].view(-1, n)
        chunk.copy_(right[begin:end])
        for vector, image in zip(signs, images[:, begin:end], strict=True):
            _product_into(image, chunk, vector)
        _product_into(norms[begin:end], chunk.square_(), ones)
    for begin in range(0, n, rows):
        count = min(rows, n - begin)
        chunk = chunks[: count * n].view(-1, n)
        residual = residuals[: VECTORS * count].view(VECTORS, count)
        spread, size, ratio = spreads[:count], sizes[:count], ratios[begin : begin + count]
        chunk.copy_(left[begin : begin + count])
        for image, line in zip(images, residual, strict=True):
            _product_into(line, chunk, image)
        _product_into(spread, chunk.square_(), norms)
        chunk.copy_(result[begin : begin + count])
        for vector, line in zip(signs, residual, strict=True):
            _product_into(line, chunk, vector, less=True)
        _product_into(size, chunk.square_(), ones)
        _product_into(ratio, residual.square_().t(), ones[:VECTORS])
        torch.maximum(spread, size, out=spread)
        spread.mul_(summed).add_(size, alpha=stored).add_(least)
        ratio.div_(VECTORS).div_(spread)
    worst, row = ratios.cpu().max(dim=0)  # the only wait; NaN is the largest of all
    ratio_of_roots = math.sqrt(worst.item())
    return _verdict(
        "freivalds",
        math.inf if math.isnan(ratio_of_roots) else ratio_of_roots,
        int(row.item()),
        result,
    )


def same_bits(result: torch.Tensor, again: torch.Tensor, scratch: torch.Tensor) -> Check | None:
    """Compare two results of one product bit by bit; then `again` holds their differing bits.

    Args:
        result: n x n.
        again: The repeat; same shape, type and device.
        scratch: As for `freivalds`, but it may overlap `result`, which is not read again once the
            bits are compared.

    Returns:
        The finding; `None` if the two cannot be compared, because a CPU summed them in different
            orders.
    """
    n = result.shape[0]
    rows = _chunk_rows(n, len(scratch) - 2 * n, 0, result.device.type)
    flipped = bits_of(again)
    torch.bitwise_xor(bits_of(result), flipped, out=flipped)
    ones, sums, chunks = scratch[: (2 + rows) * n].split_with_sizes([n, n, rows * n])
    ones.fill_(1.0)
    for begin in range(0, n, rows):
        end = min(begin + rows, n)
        chunk = chunks[: (end - begin) * n].view(-1, n)
        chunk.copy_(flipped[begin:end])
        # A sum of squares is 0 if and only if nothing differs.
        _product_into(sums[begin:end], chunk.square_(), ones)
    differs = sums.cpu() > 0.0  # the one wait
    differing_rows = int(differs.sum().item())
    if result.device.type == "cpu" and differing_rows > _OTHER_ORDER * n / torch.get_num_threads():
        return None
    return _verdict(
        "repeat", math.inf if differing_rows else 0.0, int(differs.int().argmax().item()), result
    )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a floating-point tensor of 16 or 32 bits as integers of the same width."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _product_into(
    out: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *, less: bool = False
) -> None:
    """Write matrix x vector into `out`; with `less`, subtract it from `out`.

    Uses `addmv`, because some versions of `mv` allocate another vector; and one vector at a time,
    because a product with eight leaves most of a card idle.
    """
    alpha, beta = (-1.0, 1.0) if less else (1.0, 0.0)
    torch.addmv(out, matrix, vector, alpha=alpha, beta=beta, out=out)


def _verdict(kind: str, worst: float, row: int, result: torch.Tensor) -> Check:
    """Describe the finding about `result`, whose worst row is `row`."""
    detail = f"{result.shape[0]} x {result.shape[1]} {str(result.dtype).removeprefix('torch.')}"
    ok = worst <= 1.0
    if not ok:
        is_number = math.isfinite(worst)
        found = (
            f"{worst:.3g} times the tolerance"
            if is_number
            else "not a number, or not the same bits"
        )
        detail += f", row {row}: {found}"
    return Check(kind=kind, ok=ok, worst=worst, detail=detail)


def _chunk_rows(n: int, doubles: int, by_rows: int, device_type: str) -> int:
    """Return how many of n rows of n columns fit at once, if each takes `n + by_rows` doubles of
    scratch; the scratch holds one row at least.
    """
    fitting = doubles // (n + by_rows)
    return max(1, min(n, fitting, _CHUNK_BYTES[device_type] // (n * _ITEM_BYTES)))
