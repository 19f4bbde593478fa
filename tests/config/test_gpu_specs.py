"""The table of cards agrees with itself and with the formula, and a live name finds its row and no other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.capacity import overbooked
from orchestrator.config.gpu_specs import (
    ARCHITECTURES,
    PEAK_DTYPES,
    PROFILES,
    GpuProfile,
    advice_for,
    match_profile,
    peak_tflops,
    profile_of,
)
from orchestrator.config.schema import NodeConfig
from workers.host.facts import CardFacts
from workers.units import GIB

PROFILE = pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.key)


def live(name: str, total_gib: float = 10.0, **facts: Any) -> GpuProfile:
    """Return what is known of a card from what its driver tells."""
    return profile_of(
        CardFacts(index=0, name=name, uuid="GPU-0", total_bytes=round(total_gib * GIB), **facts)
    )


@pytest.mark.parametrize(
    ("key", "rated"),
    [
        ("rtx-3060", (12.7, 12.7, 25.5, 25.5, 51.0)),
        ("rtx-3070", (20.3, 20.3, 40.6, 40.6, 81.3)),
        ("rtx-3090", (35.6, 35.6, 71.0, 71.0, 142.0)),
        ("rtx-4090", (82.6, 82.6, 165.2, 165.2, 330.3)),
        ("h100", (61.8, 494.5, 989.0, 989.0, 989.0)),  # FP32 is rated 67 at another clock
        ("h200", (61.8, 494.5, 989.0, 989.0, 989.0)),
    ],
)
def test_a_peak_at_the_boost_clock_is_the_rated_one(key: str, rated: tuple[float, ...]) -> None:
    peaks = [peak_tflops(PROFILES[key], dtype) for dtype in PEAK_DTYPES]
    assert peaks == pytest.approx(rated, rel=0.01)


def test_a_peak_follows_the_sampled_clock() -> None:
    full = peak_tflops(PROFILES["rtx-3090"], "fp16", 1695)
    assert full == pytest.approx(71.2, abs=0.1)
    for clock_mhz in (847.5, 1900):
        assert peak_tflops(PROFILES["rtx-3090"], "fp16", clock_mhz) == pytest.approx(
            full * clock_mhz / 1695
        )


def test_a_type_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no number type 'fp64'; valid: fp32, tf32"):
        peak_tflops(PROFILES["rtx-3090"], "fp64")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA GeForce RTX 3070", "rtx-3070"),
        ("GeForce RTX 3070", "rtx-3070"),
        ("nvidia geforce rtx 3090", "rtx-3090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3070 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("My RTX 3070", None),
        ("", None),
    ],
)
def test_a_live_name_finds_its_profile_and_no_other(name: str, key: str | None) -> None:
    found = match_profile(name)
    assert (found.key if found else None) == key


def test_the_same_name_with_other_memory_is_another_card() -> None:
    assert match_profile("NVIDIA GeForce RTX 3060", 12 * GIB) is PROFILES["rtx-3060"]
    assert match_profile("NVIDIA GeForce RTX 3060", 8 * GIB) is None


@PROFILE
def test_the_advice_fits_the_card_and_uses_it(profile: GpuProfile) -> None:
    alone, desktop = (
        advice_for(profile.key, is_desktop=is_desktop) for is_desktop in (False, True)
    )
    assert alone is not None
    assert desktop is not None
    for advice in (alone, desktop):
        node = NodeConfig(
            gpu=profile.key,
            workers=advice.workers,
            vram_per_worker_gib=advice.vram_per_worker_gib,
            memory_fraction=advice.memory_fraction,
        )
        assert overbooked(node) is None
        # The guide for the 3070 with a desktop leaves more free than a worker needs.
        if profile.key != "rtx-3070" or advice is alone:
            assert overbooked(node.model_copy(update={"workers": advice.workers + 1})) is not None
    if desktop is not alone:
        fractions_gib = [
            (advice.memory_fraction, advice.workers * advice.vram_per_worker_gib)
            for advice in (desktop, alone)
        ]
        assert all(less < more for less, more in zip(*fractions_gib, strict=True)), (
            "a desktop takes some, too"
        )


@pytest.mark.parametrize(
    ("key", "memory_clock_mhz", "bits"),
    [
        ("rtx-3060", 7501, 192),
        ("rtx-3070", 7001, 256),
        ("rtx-3090", 9751, 384),
        ("rtx-4090", 10501, 384),
    ],
)
def test_the_formula_gives_the_table_for_the_cards_in_it(
    key: str, memory_clock_mhz: int, bits: int
) -> None:
    """Given what a driver tells of a known card, under another name, it must come to the same peaks."""
    known = PROFILES[key]
    assert known.compute_capability is not None
    assert known.multiprocessors is not None
    found = live(
        f"{known.product} X",
        known.shown_gib,
        compute_capability=known.compute_capability,
        cores=known.multiprocessors * ARCHITECTURES[known.compute_capability].multiply_adds["fp32"],
        max_sm_clock_mhz=known.boost_mhz,
        max_memory_clock_mhz=memory_clock_mhz,
        bus_width_bits=bits,
    )
    for dtype in PEAK_DTYPES:
        assert peak_tflops(found, dtype) == pytest.approx(peak_tflops(known, dtype), rel=0.01)
    assert found.bandwidth_gb_s == pytest.approx(known.bandwidth_gb_s, rel=0.01)
    assert (found.key, found.shown_gib) == (f"{known.key}-x", pytest.approx(known.shown_gib))
    assert found.multiprocessors == known.multiprocessors


@pytest.mark.parametrize(
    ("facts", "clock_mhz"),
    [
        ({"compute_capability": (8, 6)}, 1700),
        ({"compute_capability": (8, 6), "cores": 68 * 128}, None),
        ({"compute_capability": (8, 6), "max_sm_clock_mhz": 1710}, 1700),
        ({"compute_capability": (19, 0), "cores": 65536, "max_sm_clock_mhz": 4000}, 4000),
        ({"cores": 10496, "max_sm_clock_mhz": 4000}, 4000),
    ],
)
def test_what_a_card_does_not_tell_stays_unknown(
    facts: dict[str, Any], clock_mhz: int | None
) -> None:
    card = live("NVIDIA GeForce RTX 9090", **facts)
    assert [peak_tflops(card, dtype) for dtype in PEAK_DTYPES] == [None] * 5
    assert peak_tflops(card, "fp32", clock_mhz) is None
    assert card.bandwidth_gb_s is None


@pytest.mark.parametrize(
    ("name", "capability"),
    [("NVIDIA RTX A4000", (8, 6)), ("NVIDIA L40S", (8, 9)), ("NVIDIA GeForce GTX 1660", (7, 5))],
)
def test_tensor_rates_of_other_cards_are_not_guessed(
    name: str, capability: tuple[int, int]
) -> None:
    card = live(name, 16, compute_capability=capability, cores=48 * 128, max_sm_clock_mhz=1560)
    assert peak_tflops(card, "fp32") is not None
    assert peak_tflops(card, "fp16") is None


@given(st.text(max_size=200))
def test_any_name_becomes_a_word_that_cluster_yaml_takes(name: str) -> None:
    key = live(name).key
    assert NodeConfig(gpu=key, workers=1, vram_per_worker_gib=1.0).gpu == key
