"""What is known of each card before its node has been seen: data, one table.

Covers names and memory. Does not cover how the memory is divided (`budget`) nor what a live node reports: a
profile only stands in until the node says what it really has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One card as cluster.yaml may name it under `nodes.<node>.gpu`."""

    key: str
    """The word in cluster.yaml."""
    product: str
    """The vendor's name, for people."""
    nominal_gib: float
    """What is printed on the box."""
    shown_gib: float
    """What CUDA reports as total memory, always less than nominal (firmware, ECC, display).

    7.67 for the RTX 3070 is from its guide; the others are typical readings. All are replaced by the node's own
    value once the node has been seen.
    """


#: Every known card by its key in cluster.yaml.
PROFILES: Mapping[str, GpuProfile] = MappingProxyType(
    {
        profile.key: profile
        for profile in (
            GpuProfile(key="rtx-3060", product="NVIDIA GeForce RTX 3060", nominal_gib=12, shown_gib=11.76),
            GpuProfile(key="rtx-3070", product="NVIDIA GeForce RTX 3070", nominal_gib=8, shown_gib=7.67),
            GpuProfile(key="rtx-3090", product="NVIDIA GeForce RTX 3090", nominal_gib=24, shown_gib=23.69),
            GpuProfile(key="rtx-4090", product="NVIDIA GeForce RTX 4090", nominal_gib=24, shown_gib=23.64),
            GpuProfile(key="h100", product="NVIDIA H100 80GB HBM3", nominal_gib=80, shown_gib=79.2),
            GpuProfile(key="h200", product="NVIDIA H200", nominal_gib=141, shown_gib=139.8),
        )
    }
)
