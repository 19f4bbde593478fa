"""The table of cards agrees with itself, and a live name finds its row and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.gpu_specs import (
    PROFILES,
    GpuProfile,
    key_of,
    match_profile,
)
from orchestrator.config.schema import NodeConfig
from workers.units import GIB

#: FP32 units of each card; a tensor product takes a multiple of their multiply-adds.
UNITS = {
    "rtx-3060": 3584, "rtx-3070": 5888, "rtx-3090": 10496, "rtx-4090": 16384, "h100": 16896,
    "h200": 16896,
}  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.key)
def test_a_rated_peak_is_units_times_clock(profile: GpuProfile) -> None:
    fp32 = UNITS[profile.key] * profile.boost_mhz * 1e6 * 2 / 1e12
    times = (1, 8, 16, 16) if profile.desktop is None else (1, 1, 2, 2)
    for dtype, factor in zip(("fp32", "tf32", "fp16", "bf16"), times, strict=True):
        peak = profile.peak_tflops(dtype)
        assert peak == pytest.approx(factor * fp32, rel=0.001)
        assert profile.peak_tflops(dtype, profile.boost_mhz / 2) == pytest.approx(peak / 2)


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


@given(st.text(max_size=200))
def test_any_name_becomes_a_word_that_cluster_yaml_takes(name: str) -> None:
    key = key_of(name)
    assert NodeConfig(gpu=key, workers=1, vram_per_worker_gib=1.0).gpu == key
