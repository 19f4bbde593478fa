"""How far a row of a product may be from the true one by rounding alone.

**The test.** For a product C of A and B, both n x n, let e_ij be the error of c_ij. Freivalds' test
draws x of random signs and looks at r_i = (Cx - A(Bx))_i = sum_j x_j e_ij. The signs are
independent of the errors, so whatever the errors are, biased or correlated, r_i has mean 0 and is
sub-Gaussian with variance proxy S_i^2 = sum_j e_ij^2 (Hoeffding). Only S_i has to be bounded, not
the sum of |e_ij|, which is what made earlier thresholds 160 to 4200 times too large (V-ABFT, arXiv
2602.08043).

**Several signs at once.** With m independent vectors the mean square M_i of the m residuals obeys
the Chernoff bound of a chi-square: P(M_i > t S_i^2) <= (t e^(1-t))^(m/2). `LIMIT` is the t at which
that is 1e-14, so that 10^6 checks of 8192 rows raise a false alarm with a chance below 1e-4. With m
= 8 it is 11.5: an error of 3.4 S_i in one element is seen, where a single vector would need 8.

**S_i^2, from variances.** v_i = sum_k a_ik^2 |B_k|^2 (B_k: row k) is what |C_i|^2 would be for
random signs; h_i = max(v_i, |C_i|^2) is the scale of the partial sums, also where C cancels and
where it does not. Per row:

- Storing in a type of unit roundoff u: a rounding error is uniform within half a unit in the last
place, whose square
  is u^2 4^e / 3 for c in [2^e, 2^(e+1)). With c^2 = 7/3 4^e in the mean, that is 1/7 u^2 |C_i|^2,
  up to 1/6 as c spreads over several binades.
- Summing k products in fp32, one after the other (the worst order in use): partial sums grow as
sqrt(t) for random
  signs, so the k errors add up to u32^2 / 6 k / 2 h_i; where all terms have one sign it is less, k
  / 18.
- Tensor cores truncate where a CPU rounds (Fasi et al., PeerJ CS 7:e330), after every four products
at the least. In
  the mean that is half a unit in the last place, 0.7 u32 |s_t|, always towards zero: it does not
  average out, and k / 4 of them along partial sums that grow come to about 0.1 k u32 |c|. So (u32 k
  / 8)^2 h_i.
- TF32 keeps 10 bits of the operands' fractions. If the others are cut off, each loses a third of
2^-10 in the mean,
  always downwards: both together (2^-10)^2 / 2 h_i.
- Subnormals: at most half the smallest one each.

These are means; the sum of n squares scatters around n times its mean, at n = 64 by a fifth. With 1
+ 4 / sqrt(n) times as much the mean of the rows was never above the model, and no row above 1.5 of
it (CPU, all types, operands of several distributions); at 1.5 a false alarm still has a chance of
1e-8 in such a row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import torch

#: Vectors of signs for one check: more make it sharper, each costs as much as the first.
VECTORS: Final = 8

#: Chance of a false alarm in one row of one check.
_FALSE_ALARM: Final = 1e-14


#: How many times S_i^2 the mean square of a row's residuals may be: the t at which (t
#: e^(1-t))^(VECTORS/2) is that chance, by iteration of t = 1 - 2/VECTORS ln(chance) + ln(t), a
#: contraction by 1/t.
LIMIT: Final = functools.reduce(
    lambda t, _: 1.0 - 2.0 / VECTORS * math.log(_FALSE_ALARM) + math.log(t), range(50), 1.0
)

_U32: Final = 2.0**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The tolerated mean square of a row's residuals is `stored |C_i|^2 + summed max(v_i, |C_i|^2)
    + least`.
    """

    stored: float
    summed: float
    least: float


def tolerance(dtype: torch.dtype, n: int, device_type: str) -> Tolerance:
    """Return what is tolerated for products of n x n matrices in `dtype` (fp32, fp16 or bf16) by
    this process now.

    On `cuda`, torch's settings for TF32 and for reductions count.
    """
    info = torch.finfo(dtype)
    roundoff = info.eps / 2.0
    stored = roundoff**2 / 6.0
    summed = _U32**2 * n / 12.0
    if device_type == "cuda":
        matmul = torch.backends.cuda.matmul
        tf32 = dtype is torch.float32 and matmul.fp32_precision == "tf32"
        if tf32 or dtype is not torch.float32:
            summed += (_U32 * n / 8.0) ** 2
        if tf32:
            summed += 2.0**-20 / 2.0
        if (dtype is torch.float16 and matmul.allow_fp16_reduced_precision_reduction) or (
            dtype is torch.bfloat16 and matmul.allow_bf16_reduced_precision_reduction
        ):
            # cuBLAS may then sum the parts of a split product in the type itself. Of eight parts:
            # the parts' own roundings, those of their sums and the last are 1 + 7/2 times the one;
            # twice the tolerance is near enough.
            stored *= 4.0
    factor = LIMIT * (1.0 + 4.0 / math.sqrt(n))
    smallest = info.smallest_normal * info.eps
    return Tolerance(
        stored=factor * stored, summed=factor * summed, least=factor * n * (smallest / 2.0) ** 2
    )
