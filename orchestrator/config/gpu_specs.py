"""What is known of each card before its node has been seen: data, one table; and of unknown cards, by formula.

Covers names, memory, rated peaks, and how many workers suit a card. Does not cover how the memory is divided
(`core.budget`) nor what a live node reports: a profile is used only until the node reports its real values. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from orchestrator.config import gpu_architectures
from workers.host.facts import CardFacts
from workers.units import GIB

#: A card whose memory differs more than this from its profile is another product of the same name: there is an
#: RTX 3060 with 8 GB and two thirds of the bandwidth.
_SAME_MEMORY = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How several workers use a card well; the words and units are those of a node in cluster.yaml."""

    workers: int
    vram_per_worker_gib: float
    memory_fraction: float
    size: int
    dtype: str
    gpu_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One card as cluster.yaml may name it under `nodes.<node>.gpu`; or an unknown one, see `profile_by_formula`."""

    key: str
    """The word in cluster.yaml."""
    product: str
    """The vendor's name, for people."""
    nominal_gib: float
    """The vendor's nominal memory."""
    shown_gib: float
    """What CUDA reports as total memory, always less than nominal (firmware, ECC, display).

    7.67 for the RTX 3070 is from its guide; the others are typical readings. All are replaced by the node's own
    value once the node has been seen.
    """
    compute_capability: tuple[int, int] | None
    multiprocessors: int | None
    boost_mhz: int | None
    """As rated; while a card is cool it runs above it."""
    fp32_tflops: float | None
    tf32_tflops: float | None
    """Dense, like all here; on GeForce cards no more than FP32."""
    fp16_tflops: float | None
    """Added up in FP32, which is what torch does by default."""
    bf16_tflops: float | None
    fp16_accumulate_tflops: float | None
    """FP16 added up in FP16: the "142" of an RTX 3090. torch does so only with `allow_fp16_accumulation`."""
    bandwidth_gb_s: float | None
    """10^9 bytes a second."""
    tdp_w: float | None
    alone: Advice | None = None
    """With nothing else on the card."""
    desktop: Advice | None = None
    """With a display and other programs on it; `None` where no display can be."""
    source: str
    """Where the figures are from."""


def _known(key: str, product: str, *, tflops: tuple[float, ...], **facts: Any) -> GpuProfile:  # noqa: ANN401 - its fields
    """Return a row of the table; `tflops` of fp32, tf32, fp16, bf16, and of fp16 added up in fp16."""
    fp32, tf32, fp16, bf16, fp16_accumulate = tflops
    return GpuProfile(
        key=key,
        product=product,
        fp32_tflops=fp32,
        tf32_tflops=tf32,
        fp16_tflops=fp16,
        bf16_tflops=bf16,
        fp16_accumulate_tflops=fp16_accumulate,
        **facts,
    )


_GA102 = "NVIDIA Ampere GA102 whitepaper v2, App. A"

#: Every known card.
#:
#: Advice. From the guides: the 3090 alone and the 3070 with a desktop. Derived: a 4090 is a 3090 in memory; the 3060's
#: workers hold the 4 to 5 GB that its guide measured for one training process; the rest divides what memory_fraction
#: leaves (0.90 alone, three quarters with a desktop as on the 3070, 0.85 where that is still over 3 GiB, 0.95 on cards
#: for servers) among as many workers as on the guides' card of that kind.
_TABLE = (
    _known(
        "rtx-3060", "NVIDIA GeForce RTX 3060", nominal_gib=12, shown_gib=11.63, compute_capability=(8, 6),
        multiprocessors=28, boost_mhz=1777, tflops=(12.7, 12.7, 25.5, 25.5, 51.0), bandwidth_gb_s=360, tdp_w=170,
        alone=Advice(workers=2, vram_per_worker_gib=5.20, memory_fraction=0.90, size=4096, dtype="fp16"),
        desktop=Advice(workers=2, vram_per_worker_gib=4.35, memory_fraction=0.75, size=4096, dtype="fp16"),
        source="NVIDIA's launch specifications; peaks by the formula of the GA102 whitepaper",
    ),
    _known(
        "rtx-3070", "NVIDIA GeForce RTX 3070", nominal_gib=8, shown_gib=7.67, compute_capability=(8, 6),
        multiprocessors=46, boost_mhz=1725, tflops=(20.3, 20.3, 40.6, 40.6, 81.3), bandwidth_gb_s=448, tdp_w=220,
        alone=Advice(workers=3, vram_per_worker_gib=2.28, memory_fraction=0.90, size=4096, dtype="fp16", gpu_share=0.7),
        desktop=Advice(
            workers=3, vram_per_worker_gib=1.50, memory_fraction=0.75, size=4096, dtype="fp16", gpu_share=0.7
        ),
        source=_GA102,
    ),
    _known(
        "rtx-3090", "NVIDIA GeForce RTX 3090", nominal_gib=24, shown_gib=23.69, compute_capability=(8, 6),
        multiprocessors=82, boost_mhz=1695, tflops=(35.6, 35.6, 71.0, 71.0, 142.0), bandwidth_gb_s=936, tdp_w=350,
        alone=Advice(workers=7, vram_per_worker_gib=3.33, memory_fraction=0.99, size=8192, dtype="fp16", gpu_share=0.6),
        desktop=Advice(
            workers=6, vram_per_worker_gib=3.33, memory_fraction=0.85, size=8192, dtype="fp16", gpu_share=0.6
        ),
        source=_GA102,
    ),
    _known(
        "rtx-4090", "NVIDIA GeForce RTX 4090", nominal_gib=24, shown_gib=23.52, compute_capability=(8, 9),
        multiprocessors=128, boost_mhz=2520, tflops=(82.6, 82.6, 165.2, 165.2, 330.3), bandwidth_gb_s=1008, tdp_w=450,
        alone=Advice(workers=7, vram_per_worker_gib=3.30, memory_fraction=0.99, size=8192, dtype="bf16"),
        desktop=Advice(workers=6, vram_per_worker_gib=3.33, memory_fraction=0.85, size=8192, dtype="bf16"),
        source="NVIDIA Ada whitepaper, App. A",
    ),
    # FP32 of both is rated at 1980 MHz, unlike the tensor types: at 1830 MHz it is 61.8.
    _known(
        "h100", "NVIDIA H100 80GB HBM3", nominal_gib=80, shown_gib=79.2, compute_capability=(9, 0),
        multiprocessors=132, boost_mhz=1830, tflops=(67.0, 494.5, 989.0, 989.0, 989.0), bandwidth_gb_s=3350, tdp_w=700,
        alone=Advice(workers=7, vram_per_worker_gib=10.70, memory_fraction=0.95, size=8192, dtype="bf16"),
        source="NVIDIA H100 SXM data sheet, dense",
    ),
    _known(
        "h200", "NVIDIA H200", nominal_gib=141, shown_gib=139.8, compute_capability=(9, 0),
        multiprocessors=132, boost_mhz=1830, tflops=(67.0, 494.5, 989.0, 989.0, 989.0), bandwidth_gb_s=4800, tdp_w=700,
        alone=Advice(workers=7, vram_per_worker_gib=18.90, memory_fraction=0.95, size=8192, dtype="bf16"),
        source="NVIDIA H200 SXM data sheet, dense",
    ),
)  # fmt: skip

#: By the key in cluster.yaml.
PROFILES: Mapping[str, GpuProfile] = MappingProxyType({profile.key: profile for profile in _TABLE})


def match_profile(name: str, total_bytes: int | None = None) -> GpuProfile | None:
    """Return the profile of a live card, or `None` for a card that is not in the table.

    The whole name counts: an RTX 3070 Ti, an RTX 3070 Laptop GPU or an H100 PCIe is another card.

    Args:
        name: As NVML or torch reports it; older drivers leave "NVIDIA" out.
        total_bytes: Memory of the card, if it is known: a name may stand for two products.
    """
    wanted = _bare(name)
    for profile in PROFILES.values():
        if _bare(profile.product) == wanted:
            shown_bytes = profile.shown_gib * GIB
            differs = total_bytes is not None and abs(total_bytes - shown_bytes) > _SAME_MEMORY * shown_bytes
            return None if differs else profile
    return None


def profile_by_formula(
    *,
    name: str,
    total_bytes: int,
    compute_capability: tuple[int, int] | None,
    multiprocessors: int | None = None,
    boost_mhz: int | None = None,
    memory_clock_mhz: int | None = None,
    bus_width_bits: int | None = None,
    tdp_w: float | None = None,
) -> GpuProfile:
    """Return a profile of a card that is not in the table, from what the card says of itself.

    Peaks are multiprocessors × highest clock × multiply-adds of its generation × 2. The highest clock that a driver
    tells is above the rated boost, so a share of such a peak is on the low side; with a sampled clock it is exact.
    What the card does not report, and what is unknown of its generation, stays `None`.
    """

    def peak(dtype: str) -> float | None:
        rate = gpu_architectures.multiply_adds(name, compute_capability, dtype)
        if rate is None or not multiprocessors or not boost_mhz:
            return None
        return gpu_architectures.tflops(multiprocessors, boost_mhz, rate)

    both = memory_clock_mhz and bus_width_bits
    shown_gib = total_bytes / GIB
    return GpuProfile(
        key=key_of(name),
        product=name,
        nominal_gib=float(round(shown_gib)),
        shown_gib=shown_gib,
        compute_capability=compute_capability,
        multiprocessors=multiprocessors,
        boost_mhz=boost_mhz,
        fp32_tflops=peak("fp32"),
        tf32_tflops=peak("tf32"),
        fp16_tflops=peak("fp16"),
        bf16_tflops=peak("bf16"),
        fp16_accumulate_tflops=peak("fp16_accumulate"),
        bandwidth_gb_s=gpu_architectures.bandwidth_gb_s(bus_width_bits or 0, memory_clock_mhz or 0) if both else None,
        tdp_w=tdp_w,
        source="by formula, from what the card says of itself",
    )


def profile_of(card: CardFacts) -> GpuProfile:
    """Return what is known of a live card: its row of the table, or what follows from what it says of itself."""
    capability = card.compute_capability
    counted = card.cores is not None and capability is not None
    return match_profile(card.name, card.total_bytes) or profile_by_formula(
        name=card.name,
        total_bytes=card.total_bytes,
        compute_capability=capability,
        multiprocessors=gpu_architectures.multiprocessors_of(card.cores or 0, capability or (0, 0))
        if counted
        else None,
        boost_mhz=card.max_sm_clock_mhz,
        memory_clock_mhz=card.max_memory_clock_mhz,
        bus_width_bits=card.bus_width_bits,
        tdp_w=card.power_limit_w,
    )


def peak_tflops(profile: GpuProfile, dtype: str, sm_clock_mhz: float | None = None) -> float | None:
    """Return the dense peak of a card, or `None` where it is not known.

    Args:
        profile: Of the card.
        dtype: fp32, tf32, fp16, bf16, or fp16_accumulate (FP16 added up in FP16).
        sm_clock_mhz: The clock that was sampled while the card worked: what it could have done at that clock. `None`
            means the rated peak, at the rated clock.

    Raises:
        ValueError: There is no such number type.
    """
    rate = gpu_architectures.multiply_adds(profile.product, profile.compute_capability, dtype)
    if sm_clock_mhz is None:
        rated: float | None = getattr(profile, f"{dtype}_tflops")
        return rated
    if rate is None or profile.multiprocessors is None:
        return None
    return gpu_architectures.tflops(profile.multiprocessors, sm_clock_mhz, rate)


def key_of(name: str) -> str:
    """Return a card's name as a word for cluster.yaml: `rtx-3070-laptop-gpu`."""
    words = re.sub(r"[^a-z0-9]+", "-", _bare(name)).strip("-").removeprefix("geforce-")
    return words[:64].strip("-") or "card"


def _bare(name: str) -> str:
    return " ".join(name.lower().split()).removeprefix("nvidia ")
