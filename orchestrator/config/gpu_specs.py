"""Facts about cards before their nodes have reported: a table, and a formula for other cards.

Names, memory, rated speed of dense products, and how many workers suit a card, until the node
reports its real values. Does not cover how the memory is divided (`core.placement`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from workers.units import GIB

#: Number types with a rated speed, in the order of `GpuProfile.rated_tflops`.
Dtype: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16"]

#: A card whose memory differs more than this from its profile is another product of the same name:
#: there is an RTX 3060 with 8 GB and two thirds of the bandwidth.
_SAME_MEMORY = 0.10

#: Cards without advice: at most as many workers, as large, as on the guides' largest card.
_MOST_WORKERS, _WORKER_GIB = 7, 3.0
#: NVML and CUDA do not always agree to the last MiB on the memory of a card.
_UNSURE_SHARE = 0.01
_LARGE_CARD_GIB = 16.0


@dataclass(frozen=True, slots=True)
class Advice:
    """How several workers use a card well, in the keys and units of a node in cluster.yaml."""

    workers: int
    vram_per_worker_gib: float
    memory_fraction: float
    size: int
    dtype: Dtype | None = None
    gpu_share: float = 1.0


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """One card as cluster.yaml may name it under `nodes.<node>.gpu`."""

    key: str
    product: str
    """As NVML reports it."""
    shown_gib: float
    """What CUDA reports as total memory, always less than the nominal value (firmware, ECC,
    display): for the RTX 3070 as in its guide, for the others typical readings.
    """
    boost_mhz: int
    """Rated clock for tensor types; a cool card runs above it."""
    rated_tflops: tuple[float, ...]
    """Rated speed of dense products at that clock, with sums in FP32, without sparsity."""
    alone: Advice
    """With nothing else on the card."""
    desktop: Advice | None = None
    """With a display and other programs on it; `None`: the card has no display."""

    def peak_tflops(self, dtype: str, sm_clock_mhz: float | None = None) -> float:
        """Return the dense peak in TFLOP/s: at `sm_clock_mhz`, sampled while the card worked, or as
        rated. `ValueError` for what is no `Dtype`.
        """
        rated = self.rated_tflops[get_args(Dtype).index(dtype)]
        return rated if sm_clock_mhz is None else rated * sm_clock_mhz / self.boost_mhz


#: Speeds: NVIDIA's specifications and whitepapers (GA102 v2, Ada, H100 and H200 SXM). Advice: for
#: the 3090 alone and the 3070 with a desktop from the guides. The rest is derived: a 4090 has the
#: memory of a 3090; the 3060's workers hold the 4 to 5 GB that its guide measured for one training
#: process; other cards divide what memory_fraction leaves (0.90 alone, 0.75 with a desktop as on
#: the 3070, 0.85 if that is still over 3 GiB, 0.95 on cards for servers) among as many workers as
#: on the guides' card of that kind.
PROFILES: Final[Mapping[str, GpuProfile]] = {profile.key: profile for profile in (
    GpuProfile("rtx-3060", "NVIDIA GeForce RTX 3060", 11.63, 1777, (12.74, 12.74, 25.48, 25.48),
        Advice(2, 5.20, 0.90, 4096), Advice(2, 4.35, 0.75, 4096)),
    GpuProfile("rtx-3070", "NVIDIA GeForce RTX 3070", 7.67, 1725, (20.31, 20.31, 40.63, 40.63),
        Advice(3, 2.28, 0.90, 4096, gpu_share=0.7), Advice(3, 1.50, 0.75, 4096, gpu_share=0.7)),
    GpuProfile("rtx-3090", "NVIDIA GeForce RTX 3090", 23.56, 1695, (35.58, 35.58, 71.16, 71.16),
        Advice(7, 3.30, 0.99, 8192, gpu_share=0.6), Advice(6, 3.30, 0.85, 8192, gpu_share=0.6)),
    GpuProfile("rtx-4090", "NVIDIA GeForce RTX 4090", 23.52, 2520, (82.58, 82.58, 165.15, 165.15),
        Advice(7, 3.30, 0.99, 8192, "bf16"), Advice(6, 3.30, 0.85, 8192, "bf16")),
    # FP32 of these two is rated 67 at 1980 MHz.
    GpuProfile("h100", "NVIDIA H100 80GB HBM3", 79.2, 1830, (61.84, 494.7, 989.4, 989.4),
        Advice(7, 10.70, 0.95, 8192, "bf16")),
    GpuProfile("h200", "NVIDIA H200", 139.8, 1830, (61.84, 494.7, 989.4, 989.4),
        Advice(7, 18.90, 0.95, 8192, "bf16")),
)}  # fmt: skip


def match_profile(name: str, total_bytes: int | None = None) -> GpuProfile | None:
    """Return the profile of a live card, or `None` for a card that is not in the table.

    The whole name counts, as NVML or torch reports it: an RTX 3070 Ti or an H100 PCIe is another
    card. Older drivers leave "NVIDIA" out. A name may stand for two products, which differ in
    `total_bytes`.
    """
    for profile in PROFILES.values():
        shown_bytes = profile.shown_gib * GIB
        off_bytes = 0 if total_bytes is None else abs(total_bytes - shown_bytes)
        if _bare(profile.product) == _bare(name) and off_bytes <= _SAME_MEMORY * shown_bytes:
            return profile
    return None


def by_formula(total_gib: float, *, is_desktop: bool = False, is_old: bool = False) -> Advice:
    """Return the advice for a card that is not in the table.

    `is_old`: without tensor units FP16 is slower than FP32 (a GTX 1080 does 1/64 of it).
    """
    fraction = 0.75 if is_desktop else 0.90  # as in the guide of the 3070
    workers = max(1, min(_MOST_WORKERS, int(total_gib * fraction / _WORKER_GIB)))
    each_gib = rounded_down(total_gib) * (fraction - _UNSURE_SHARE) / workers
    return Advice(
        workers=workers,
        vram_per_worker_gib=rounded_down(each_gib),
        memory_fraction=fraction,
        size=8192 if total_gib >= _LARGE_CARD_GIB else 4096,
        dtype="fp32" if is_old else None,
    )


def rounded_down(gib: float) -> float:
    """Return GiB with two digits after the point, rounded down."""
    return int(gib * 100) / 100


def key_of(name: str, total_bytes: int | None = None) -> str:
    """Return how cluster.yaml names a live card: as the table does, or by the words of its name,
    such as `rtx-3070-laptop-gpu`.
    """
    known = match_profile(name, total_bytes)
    if known is not None:
        return known.key
    words = re.sub(r"[^a-z0-9]+", "-", _bare(name)).strip("-").removeprefix("geforce-")
    return words[:64].strip("-") or "card"


def _bare(name: str) -> str:
    return " ".join(name.lower().split()).removeprefix("nvidia ")
