"""The table of cards agrees with itself, and a live name finds its row and no other."""

from __future__ import annotations

import pytest

from orchestrator.config.gpu_specs import (
    PROFILES,
    GpuProfile,
    match_profile,
)
from orchestrator.config.schema import NodeConfig
from workers.units import GIB


@pytest.mark.parametrize(
    ("name", "total_gib", "key"),
    [
        ("NVIDIA GeForce RTX 3070", None, "rtx-3070"),
        ("GeForce RTX 3070", None, "rtx-3070"),
        ("nvidia geforce rtx 3090", 24, "rtx-3090"),
        ("NVIDIA H100 80GB HBM3", None, "h100"),
        ("NVIDIA GeForce RTX 3060", 12, "rtx-3060"),
        ("NVIDIA GeForce RTX 3060", 8, None),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 3070 Ti", None, None),
        ("NVIDIA H100 PCIe", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("My RTX 3070", None, None),
        ("", None, None),
    ],
)
def test_a_live_name_finds_its_profile_and_no_other(
    name: str, total_gib: int | None, key: str | None
) -> None:
    found = match_profile(name, None if total_gib is None else total_gib * GIB)
    assert (found.key if found else None) == key


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.key)
def test_the_advice_fits_the_card_and_uses_it(profile: GpuProfile) -> None:
    for advice in filter(None, (profile.alone, profile.desktop)):
        node = NodeConfig(
            gpu=profile.key,
            workers=advice.workers,
            vram_per_worker_gib=advice.vram_per_worker_gib,
            memory_fraction=advice.memory_fraction,
        )
        assert node.overbooked is None
        # The guide for the 3070 with a desktop leaves more free than a worker needs.
        if profile.key != "rtx-3070" or advice is profile.alone:
            assert node.model_copy(update={"workers": advice.workers + 1}).overbooked is not None
    if profile.desktop is not None:
        alone, desktop = profile.alone, profile.desktop
        assert desktop.memory_fraction < alone.memory_fraction
        held_gib = [each.workers * each.vram_per_worker_gib for each in (desktop, alone)]
        assert held_gib[0] < held_gib[1], "a desktop takes some, too"
