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


#: Every number type that has a peak; the first four are those of cluster.yaml. `fp16_accumulate`
#: adds up in FP16, the other tensor types in FP32, as torch does by default.
PEAK_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp16_accumulate")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One generation of multiprocessors."""

    multiply_adds: Mapping[str, int]
    """Fused multiply-adds of one multiprocessor in one clock, by number type; those that it has
    units for.
    """
    geforce: bool
    """The tensor rates are those of GeForce RTX cards, where sums in FP32 are halved. Workstation
    cards of the same capability are halved or not, one by one, so theirs do not follow from it."""


def _architecture(*rates: int | None, geforce: bool) -> Architecture:
    """Return a row of the table; the rates are in the order of `PEAK_DTYPES`."""
    known = {
        dtype: rate for dtype, rate in zip(PEAK_DTYPES, rates, strict=True) if rate is not None
    }
    return Architecture(MappingProxyType(known), geforce)


#: By compute capability, from NVIDIA's architecture whitepapers: V100, TU102, A100, GA102 v2 (App.
#: A), Ada (App. A), H100, RTX Blackwell. A rating divided by multiprocessors, boost clock and 2
#: gives these numbers.
ARCHITECTURES: Mapping[tuple[int, int], Architecture] = MappingProxyType(
    {
        (7, 0): _architecture(64, None, 512, None, 512, geforce=False),
        (7, 5): _architecture(64, None, 256, None, 512, geforce=True),
        (8, 0): _architecture(64, 512, 1024, 1024, 1024, geforce=False),
        (8, 6): _architecture(128, 128, 256, 256, 512, geforce=True),
        (8, 9): _architecture(128, 128, 256, 256, 512, geforce=True),
        (9, 0): _architecture(128, 1024, 2048, 2048, 2048, geforce=False),
        (12, 0): _architecture(128, 128, 256, 256, 512, geforce=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """As rated; while a card is cool it runs above it."""
    tflops: tuple[float | None, ...]
    """Rated dense peaks, in the order of `PEAK_DTYPES`.

    The last one, FP16 added up in FP16, is the "142" of an RTX 3090; torch does so only with
    `allow_fp16_accumulation`.
    """
    bandwidth_gb_s: float | None
    """10^9 bytes a second."""
    alone: Advice | None = None
    """With nothing else on the card."""
    desktop: Advice | None = None
    """With a display and other programs on it; `None` where no display can be."""
    source: str


_GA102 = "NVIDIA Ampere GA102 whitepaper v2, App. A"

#: Every known card.
#:
#: Advice. From the guides: the 3090 alone and the 3070 with a desktop. Derived: a 4090 is a 3090 in
#: memory; the 3060's workers hold the 4 to 5 GB that its guide measured for one training process;
#: the rest divides what memory_fraction leaves (0.90 alone, three quarters with a desktop as on the
#: 3070, 0.85 where that is still over 3 GiB, 0.95 on cards for servers) among as many workers as on
#: the guides' card of that kind.
_TABLE = (
    GpuProfile(
        key="rtx-3060", product="NVIDIA GeForce RTX 3060", shown_gib=11.63,
        compute_capability=(8, 6),
        multiprocessors=28, boost_mhz=1777, tflops=(12.7, 12.7, 25.5, 25.5, 51.0),
        bandwidth_gb_s=360,
        alone=Advice(workers=2, vram_per_worker_gib=5.20, memory_fraction=0.90, size=4096),
        desktop=Advice(workers=2, vram_per_worker_gib=4.35, memory_fraction=0.75, size=4096),
        source="NVIDIA's launch specifications; peaks by the formula of the GA102 whitepaper",
    ),
    GpuProfile(
        key="rtx-3070", product="NVIDIA GeForce RTX 3070", shown_gib=7.67, compute_capability=(8,
        6),
        multiprocessors=46, boost_mhz=1725, tflops=(20.3, 20.3, 40.6, 40.6, 81.3),
        bandwidth_gb_s=448,
        alone=Advice(workers=3, vram_per_worker_gib=2.28, memory_fraction=0.90, size=4096,
            gpu_share=0.7),
        desktop=Advice(workers=3, vram_per_worker_gib=1.50, memory_fraction=0.75, size=4096,
            gpu_share=0.7),
        source=_GA102,
    ),
    GpuProfile(
        key="rtx-3090", product="NVIDIA GeForce RTX 3090", shown_gib=23.56,
        compute_capability=(8, 6),
        multiprocessors=82, boost_mhz=1695, tflops=(35.6, 35.6, 71.0, 71.0, 142.0),
        bandwidth_gb_s=936,
        alone=Advice(workers=7, vram_per_worker_gib=3.30, memory_fraction=0.99, size=8192,
            gpu_share=0.6),
        desktop=Advice(workers=6, vram_per_worker_gib=3.30, memory_fraction=0.85, size=8192,
            gpu_share=0.6),
        source=_GA102,
    ),
    GpuProfile(
        key="rtx-4090", product="NVIDIA GeForce RTX 4090", shown_gib=23.52,
        compute_capability=(8, 9),
        multiprocessors=128, boost_mhz=2520, tflops=(82.6, 82.6, 165.2, 165.2, 330.3),
        bandwidth_gb_s=1008,
        alone=Advice(workers=7, vram_per_worker_gib=3.30, memory_fraction=0.99, size=8192,
            dtype="bf16"),
        desktop=Advice(workers=6, vram_per_worker_gib=3.30, memory_fraction=0.85, size=8192,
            dtype="bf16"),
        source="NVIDIA Ada whitepaper, App. A",
    ),
    # FP32 of both is rated at 1980 MHz, unlike the tensor types: at 1830 MHz it is 61.8.
    GpuProfile(
        key="h100", product="NVIDIA H100 80GB HBM3", shown_gib=79.2, compute_capability=(9, 0),
        multiprocessors=132, boost_mhz=1830, tflops=(67.0, 494.5, 989.0, 989.0, 989.0),
        bandwidth_gb_s=3350,
        alone=Advice(workers=7, vram_per_worker_gib=10.70, memory_fraction=0.95, size=8192,
            dtype="bf16"),
        source="NVIDIA H100 SXM data sheet, dense",
    ),
    GpuProfile(
        key="h200", product="NVIDIA H200", shown_gib=139.8, compute_capability=(9, 0),
        multiprocessors=132, boost_mhz=1830, tflops=(67.0, 494.5, 989.0, 989.0, 989.0),
        bandwidth_gb_s=4800,
        alone=Advice(workers=7, vram_per_worker_gib=18.90, memory_fraction=0.95, size=8192,
            dtype="bf16"),
        source="NVIDIA H200 SXM data sheet, dense",
    ),
)  # fmt: skip

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
    # NVML counts FP32 units.
    multiprocessors = (
        card.cores // generation.multiply_adds["fp32"] if card.cores and generation else None
    )
    clock_mhz, bits, memory_mhz = (
        card.max_sm_clock_mhz,
        card.bus_width_bits,
        card.max_memory_clock_mhz,
    )
    return GpuProfile(
        key=key_of(card.name),
        product=card.name,
        shown_gib=card.total_bytes / GIB,
        compute_capability=card.compute_capability,
        multiprocessors=multiprocessors,
        boost_mhz=clock_mhz,
        tflops=tuple(
            _tflops(
                multiprocessors,
                clock_mhz,
                _multiply_adds(card.name, card.compute_capability, dtype),
            )
            for dtype in PEAK_DTYPES
        ),
        bandwidth_gb_s=bits / 8 * memory_mhz * 1e6 * 2 / 1e9 if bits and memory_mhz else None,
        source="by formula, from what the card says of itself",
    )


def peak_tflops(profile: GpuProfile, dtype: str, sm_clock_mhz: float | None = None) -> float | None:
    """Return the dense peak of a card, or `None` where it is not known.

    At `sm_clock_mhz`, sampled while the card worked, it is what it could have done; `None` means
    the rated clock.

    Raises:
        ValueError: The `dtype` is none of `PEAK_DTYPES`.
    """
    rate = _multiply_adds(profile.product, profile.compute_capability, dtype)
    if sm_clock_mhz is None:
        return profile.tflops[PEAK_DTYPES.index(dtype)]
    return _tflops(profile.multiprocessors, sm_clock_mhz, rate)


def _multiply_adds(
    product: str, compute_capability: tuple[int, int] | None, dtype: str
) -> int | None:
    """Return what one multiprocessor does in one clock.

    The name distinguishes GeForce cards from others.
    """
    if dtype not in PEAK_DTYPES:
        raise ValueError(f"no number type {dtype!r}; valid: {', '.join(PEAK_DTYPES)}")
    known = None if compute_capability is None else ARCHITECTURES.get(compute_capability)
    if known is None or (dtype != "fp32" and known.geforce and "GeForce RTX" not in product):
        return None
    return known.multiply_adds.get(dtype)


def _tflops(multiprocessors: int | None, clock_mhz: float | None, rate: int | None) -> float | None:
    """Return multiprocessors × clock × multiply-adds × 2, in TFLOP/s: a multiply-add counts as two
    operations.
    """
    if not multiprocessors or not clock_mhz or rate is None:
        return None
    return multiprocessors * clock_mhz * 1e6 * rate * 2 / 1e12


def key_of(name: str) -> str:
    """Return a card's name as a word for cluster.yaml: `rtx-3070-laptop-gpu`."""
    words = re.sub(r"[^a-z0-9]+", "-", _bare(name)).strip("-").removeprefix("geforce-")
    return words[:64].strip("-") or "card"


def _bare(name: str) -> str:
    return " ".join(name.lower().split()).removeprefix("nvidia ")
