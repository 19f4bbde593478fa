"""What is known of each card before its node has been seen: data, one table; and of unknown cards,
by formula.

Covers names, memory, rated peaks, how many workers suit a card, and what each NVIDIA generation
multiplies in one clock (dense products: no sparsity, no FP8 and FP4). Does not cover how the memory
is divided (`core.placement`) nor what a live node reports: a profile is used only until the node
reports its real values. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.config.schema import Dtype
from workers.host.facts import CardFacts
from workers.units import GIB

#: A card whose memory differs more than this from its profile is another product of the same name:
#: there is an RTX 3060 with 8 GB and two thirds of the bandwidth.
_SAME_MEMORY = 0.10

#: For cards without advice: as many workers as the guides put on their largest card, of their size;
#: nine tenths of the card, or with a desktop on it the three quarters of the 3070 guide.
_MOST_WORKERS = 7
_WORKER_GIB = 3.0
_FRACTION_ALONE, _FRACTION_DESKTOP = 0.90, 0.75
#: NVML and CUDA do not always agree to the last MiB on what a card has.
_UNSURE_SHARE = 0.01
_LARGE_CARD_GIB = 16.0
#: Before this compute capability FP16 is slower than FP32 (a GTX 1080 does 1/64 of it).
_FIRST_TENSOR_UNITS = (7, 0)

#: Every number type that has a peak; the first four are those of cluster.yaml. `fp16_accumulate`
#: adds up in FP16, the other tensor types in FP32, as torch does by default.
PEAK_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp16_accumulate")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One generation of multiprocessors."""

    rates: tuple[int | None, ...]
    """Fused multiply-adds of one multiprocessor in one clock, in the order of `PEAK_DTYPES`."""
    geforce: bool
    """The tensor rates are those of GeForce RTX cards, where sums in FP32 are halved. Workstation
    cards of the same capability are halved or not, one by one, so theirs do not follow from it."""

    @property
    def multiply_adds(self) -> dict[str, int]:
        """The same by number type; those that it has units for."""
        named = zip(PEAK_DTYPES, self.rates, strict=True)
        return {dtype: rate for dtype, rate in named if rate is not None}


#: By compute capability, from NVIDIA's architecture whitepapers: V100, TU102, A100, GA102 v2 (App.
#: A), Ada (App. A), H100, RTX Blackwell.
ARCHITECTURES: Mapping[tuple[int, int], Architecture] = MappingProxyType(
    {
        (7, 0): Architecture((64, None, 512, None, 512), geforce=False),
        (7, 5): Architecture((64, None, 256, None, 512), geforce=True),
        (8, 0): Architecture((64, 512, 1024, 1024, 1024), geforce=False),
        (8, 6): Architecture((128, 128, 256, 256, 512), geforce=True),
        (8, 9): Architecture((128, 128, 256, 256, 512), geforce=True),
        (9, 0): Architecture((128, 1024, 2048, 2048, 2048), geforce=False),
        (12, 0): Architecture((128, 128, 256, 256, 512), geforce=True),
    }
)


@dataclass(frozen=True, slots=True)
class Advice:
    """How several workers use a card well.

    The words and units are those of a node in cluster.yaml.
    """

    workers: int
    vram_per_worker_gib: float
    memory_fraction: float
    size: int
    dtype: Dtype | None = None
    gpu_share: float = 1.0


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """One card as cluster.yaml may name it under `nodes.<node>.gpu`.

    Or an unknown one, see `profile_of`.
    """

    key: str
    product: str
    shown_gib: float
    """What CUDA reports as total memory, always less than the vendor's nominal value (firmware,
    ECC, display).

    7.67 for the RTX 3070 is from its guide; the others are typical readings. All are replaced by
    the node's own value once the node has been seen.
    """
    compute_capability: tuple[int, int] | None
    multiprocessors: int | None
    boost_mhz: int | None
    """As rated for tensor types; while a card is cool it runs above it."""
    bandwidth_gb_s: float | None
    """10^9 bytes a second."""


#: Every known card: NVIDIA's specifications and whitepapers (GA102 v2, Ada, H100 and H200 SXM).
_TABLE = (
    GpuProfile("rtx-3060", "NVIDIA GeForce RTX 3060", 11.63, (8, 6), 28, 1777, 360.0),
    GpuProfile("rtx-3070", "NVIDIA GeForce RTX 3070", 7.67, (8, 6), 46, 1725, 448.0),
    GpuProfile("rtx-3090", "NVIDIA GeForce RTX 3090", 23.56, (8, 6), 82, 1695, 936.0),
    GpuProfile("rtx-4090", "NVIDIA GeForce RTX 4090", 23.52, (8, 9), 128, 2520, 1008.0),
    GpuProfile("h100", "NVIDIA H100 80GB HBM3", 79.2, (9, 0), 132, 1830, 3350.0),
    GpuProfile("h200", "NVIDIA H200", 139.8, (9, 0), 132, 1830, 4800.0),
)

#: With nothing else on the card. From the guides: the 3090 here and the 3070 with a desktop.
#: Derived: a 4090 is a 3090 in memory; the 3060's workers hold the 4 to 5 GB that its guide
#: measured for one training process; the rest divides what memory_fraction leaves (0.90 alone,
#: three quarters with a desktop as on the 3070, 0.85 where that is still over 3 GiB, 0.95 on cards
#: for servers) among as many workers as on the guides' card of that kind.
_ALONE = {
    "rtx-3060": Advice(2, 5.20, 0.90, 4096),
    "rtx-3070": Advice(3, 2.28, 0.90, 4096, gpu_share=0.7),
    "rtx-3090": Advice(7, 3.30, 0.99, 8192, gpu_share=0.6),
    "rtx-4090": Advice(7, 3.30, 0.99, 8192, "bf16"),
    "h100": Advice(7, 10.70, 0.95, 8192, "bf16"),
    "h200": Advice(7, 18.90, 0.95, 8192, "bf16"),
}
#: With a display and other programs on it; none where no display can be.
_DESKTOP = {
    "rtx-3060": Advice(2, 4.35, 0.75, 4096),
    "rtx-3070": Advice(3, 1.50, 0.75, 4096, gpu_share=0.7),
    "rtx-3090": Advice(6, 3.30, 0.85, 8192, gpu_share=0.6),
    "rtx-4090": Advice(6, 3.30, 0.85, 8192, "bf16"),
}

#: By the key in cluster.yaml.
PROFILES: Mapping[str, GpuProfile] = MappingProxyType({profile.key: profile for profile in _TABLE})


def match_profile(name: str, total_bytes: int | None = None) -> GpuProfile | None:
    """Return the profile of a live card, or `None` for a card that is not in the table.

    The whole name counts, as NVML or torch reports it: an RTX 3070 Ti or an H100 PCIe is another
    card. Older drivers leave "NVIDIA" out. A name may stand for two products, which differ in
    `total_bytes`.
    """
    wanted = _bare(name)
    for profile in PROFILES.values():
        if _bare(profile.product) == wanted:
            shown_bytes = profile.shown_gib * GIB
            differs = (
                total_bytes is not None
                and abs(total_bytes - shown_bytes) > _SAME_MEMORY * shown_bytes
            )
            return None if differs else profile
    return None


def profile_of(card: CardFacts) -> GpuProfile:
    """Return what is known of a live card: its row of the table, or what follows from what it says
    of itself.

    Peaks of an unknown card are multiprocessors × highest clock × multiply-adds of its generation ×
    2. The highest clock that a driver tells is above the rated boost, so a share of such a peak is
    on the low side; with a sampled clock it is exact. The bandwidth is bytes of the bus × memory
    clock × 2 (both edges): 384 bits at the 9751 MHz that NVML reports are the 936 GB/s of an RTX
    3090. What the card does not report, and what is unknown of its generation, is `None`.
    """
    known = match_profile(card.name, card.total_bytes)
    if known is not None:
        return known
    generation = ARCHITECTURES.get(card.compute_capability or (0, 0))
    units = generation and card.cores and card.cores // generation.multiply_adds["fp32"]
    bits, memory_mhz = card.bus_width_bits, card.max_memory_clock_mhz
    return GpuProfile(
        key=key_of(card.name),
        product=card.name,
        shown_gib=card.total_bytes / GIB,
        compute_capability=card.compute_capability,
        multiprocessors=units or None,  # NVML counts FP32 units
        boost_mhz=card.max_sm_clock_mhz,
        bandwidth_gb_s=bits / 8 * memory_mhz * 1e6 * 2 / 1e9 if bits and memory_mhz else None,
    )


def peak_tflops(profile: GpuProfile, dtype: str, sm_clock_mhz: float | None = None) -> float | None:
    """Return the dense peak of a card, or `None` where it is not known: multiprocessors × clock ×
    multiply-adds × 2, because a multiply-add counts as two operations.

    At `sm_clock_mhz`, sampled while the card worked, it is what it could have done; `None` means
    the rated clock. Rated peaks are within 1 % of this, but for the FP32 of the H100 and H200,
    which is rated at 1980 MHz.

    Raises:
        ValueError: The `dtype` is none of `PEAK_DTYPES`.
    """
    if dtype not in PEAK_DTYPES:
        raise ValueError(f"no number type {dtype!r}; valid: {', '.join(PEAK_DTYPES)}")
    generation = ARCHITECTURES.get(profile.compute_capability or (0, 0))
    clock_mhz = profile.boost_mhz if sm_clock_mhz is None else sm_clock_mhz
    if generation is None or not profile.multiprocessors or not clock_mhz:
        return None
    # The name distinguishes GeForce cards from others.
    if dtype != "fp32" and generation.geforce and "GeForce RTX" not in profile.product:
        return None
    rate = generation.multiply_adds.get(dtype)
    return None if rate is None else profile.multiprocessors * clock_mhz * 1e6 * rate * 2 / 1e12


def advice_for(key: str, *, is_desktop: bool) -> Advice | None:
    """Return how to divide a card of the table; `None` for any other."""
    return (_DESKTOP.get(key) if is_desktop else None) or _ALONE.get(key)


def by_formula(
    total_gib: float, *, is_desktop: bool = False, capability: tuple[int, int] | None = None
) -> Advice:
    """Return how to divide a card of which nothing more is known.

    Without a `capability` it counts as a recent one.
    """
    fraction = _FRACTION_DESKTOP if is_desktop else _FRACTION_ALONE
    workers = max(1, min(_MOST_WORKERS, int(total_gib * fraction / _WORKER_GIB)))
    each_gib = int(total_gib * 100) / 100 * (fraction - _UNSURE_SHARE) / workers
    return Advice(
        workers=workers,
        vram_per_worker_gib=int(each_gib * 100) / 100,
        memory_fraction=fraction,
        size=8192 if total_gib >= _LARGE_CARD_GIB else 4096,
        dtype="fp32" if capability is not None and capability < _FIRST_TENSOR_UNITS else None,
    )


def key_of(name: str) -> str:
    """Return a card's name as a word for cluster.yaml: `rtx-3070-laptop-gpu`."""
    words = re.sub(r"[^a-z0-9]+", "-", _bare(name)).strip("-").removeprefix("geforce-")
    return words[:64].strip("-") or "card"


def _bare(name: str) -> str:
    return " ".join(name.lower().split()).removeprefix("nvidia ")
