"""What one multiprocessor of each NVIDIA generation multiplies in one clock: data, and the peaks that follow.

Covers dense matrix products. Does not cover sparsity, FP8 and FP4, nor what a program really reaches. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Fused multiply-adds of one multiprocessor in one clock, by number type; `None`: it has no such units.

    Tensor types add up in FP32, as torch does by default; `fp16_accumulate` adds up in FP16.
    """

    name: str
    fp32: int
    tf32: int | None
    fp16: int | None
    bf16: int | None
    fp16_accumulate: int | None
    geforce: bool
    """The tensor rates are those of GeForce RTX cards, where sums in FP32 are halved. Workstation cards of the same
    capability are halved or not, one by one, so theirs do not follow from it."""


#: By compute capability, from NVIDIA's architecture whitepapers: V100, TU102, A100, GA102 v2 (App. A), Ada (App. A),
#: H100, RTX Blackwell. A rating divided by multiprocessors, boost clock and 2 gives these numbers.
ARCHITECTURES: Mapping[tuple[int, int], Architecture] = MappingProxyType(
    {
        (7, 0): Architecture(name="Volta", fp32=64, tf32=None, fp16=512, bf16=None, fp16_accumulate=512, geforce=False),
        (7, 5): Architecture(name="Turing", fp32=64, tf32=None, fp16=256, bf16=None, fp16_accumulate=512, geforce=True),
        (8, 0): Architecture(
            name="Ampere", fp32=64, tf32=512, fp16=1024, bf16=1024, fp16_accumulate=1024, geforce=False
        ),
        (8, 6): Architecture(name="Ampere", fp32=128, tf32=128, fp16=256, bf16=256, fp16_accumulate=512, geforce=True),
        (8, 9): Architecture(name="Ada", fp32=128, tf32=128, fp16=256, bf16=256, fp16_accumulate=512, geforce=True),
        (9, 0): Architecture(
            name="Hopper", fp32=128, tf32=1024, fp16=2048, bf16=2048, fp16_accumulate=2048, geforce=False
        ),
        (12, 0): Architecture(
            name="Blackwell", fp32=128, tf32=128, fp16=256, bf16=256, fp16_accumulate=512, geforce=True
        ),
    }
)

#: Every number type that has a peak; the first four are those of cluster.yaml.
PEAK_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp16_accumulate")


def multiply_adds(product: str, compute_capability: tuple[int, int] | None, dtype: str) -> int | None:
    """Return the multiply-adds of one multiprocessor in one clock, or `None` where they are not known.

    Args:
        product: The card's name, which distinguishes GeForce cards from others.
        compute_capability: Such as (8, 6); `None` if the card does not report it.
        dtype: One of `PEAK_DTYPES`.

    Raises:
        ValueError: There is no such number type.
    """
    if dtype not in PEAK_DTYPES:
        raise ValueError(f"no number type {dtype!r}; valid: {', '.join(PEAK_DTYPES)}")
    known = None if compute_capability is None else ARCHITECTURES.get(compute_capability)
    if known is None or (dtype != "fp32" and known.geforce and "GeForce RTX" not in product):
        return None
    rate: int | None = getattr(known, dtype)
    return rate


def tflops(multiprocessors: int, clock_mhz: float, multiply_adds_per_clock: int) -> float:
    """Return multiprocessors × clock × multiply-adds × 2, in TFLOP/s: a multiply-add counts as two operations."""
    return multiprocessors * clock_mhz * 1e6 * multiply_adds_per_clock * 2 / 1e12


def bandwidth_gb_s(bus_width_bits: int, memory_clock_mhz: float) -> float:
    """Return bytes of the bus × memory clock × 2 (both edges of the clock), in 10^9 bytes a second.

    The clock is the one NVML reports: 384 bits at 9751 MHz are the 936 GB/s of an RTX 3090.
    """
    return bus_width_bits / 8 * memory_clock_mhz * 1e6 * 2 / 1e9


def multiprocessors_of(cores: int, compute_capability: tuple[int, int]) -> int | None:
    """Return the multiprocessors of a card with so many FP32 units, as NVML counts them; `None` for unknown ones."""
    known = ARCHITECTURES.get(compute_capability)
    return None if known is None else cores // known.fp32
