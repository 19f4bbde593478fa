"""The table of cards agrees with itself and with the formula, and a live name finds its row and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import gpu_architectures
from orchestrator.config.capacity import overbooked
from orchestrator.config.gpu_specs import (
    PROFILES,
    Advice,
    GpuProfile,
    match_profile,
    peak_tflops,
    profile_by_formula,
    profile_of,
)
from orchestrator.config.schema import NodeConfig
from workers.host.facts import CardFacts
from workers.units import GIB

GEFORCE = ("rtx-3060", "rtx-3070", "rtx-3090", "rtx-4090")
ALL = tuple(PROFILES.values())


@pytest.mark.parametrize("dtype", gpu_architectures.PEAK_DTYPES)
@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.key)
def test_every_rated_peak_is_the_formula_at_the_rated_clock(profile: GpuProfile, dtype: str) -> None:
    # Hopper's FP32 is rated at another clock than its tensor types.
    clock_mhz = 1980 if profile.compute_capability == (9, 0) and dtype == "fp32" else profile.boost_mhz
    assert clock_mhz is not None
    assert peak_tflops(profile, dtype) == pytest.approx(peak_tflops(profile, dtype, clock_mhz), rel=0.01)


@pytest.mark.parametrize(
    ("key", "dtype", "tflops"),
    [
        ("rtx-3090", "fp32", 35.6),
        ("rtx-3090", "tf32", 35.6),
        ("rtx-3090", "fp16", 71.0),
        ("rtx-3090", "bf16", 71.0),
        ("rtx-3090", "fp16_accumulate", 142.0),
        ("rtx-3070", "fp16", 40.6),
        ("rtx-3060", "fp16", 25.5),
        ("rtx-4090", "fp16", 165.2),
        ("h100", "tf32", 494.5),
        ("h200", "bf16", 989.0),
    ],
)
def test_rated_peaks_are_those_of_the_whitepapers(key: str, dtype: str, tflops: float) -> None:
    assert peak_tflops(PROFILES[key], dtype) == tflops


def test_a_peak_follows_the_sampled_clock() -> None:
    profile = PROFILES["rtx-3090"]
    half, full = peak_tflops(profile, "fp16", 847.5), peak_tflops(profile, "fp16", 1695)
    assert half is not None
    assert full is not None
    assert half == pytest.approx(full / 2)
    assert full == pytest.approx(71.2, abs=0.1)
    assert peak_tflops(profile, "fp16", 1900) == pytest.approx(full * 1900 / 1695)


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
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 3070 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3070 Ti", None),
        ("NVIDIA GeForce RTX 3080", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 NVL", None),
        ("RTX 3070 of somebody", None),
        ("", None),
    ],
)
def test_a_live_name_finds_its_profile_and_no_other(name: str, key: str | None) -> None:
    found = match_profile(name)
    assert (found.key if found else None) == key


def test_the_same_name_with_other_memory_is_another_card() -> None:
    assert match_profile("NVIDIA GeForce RTX 3060", 12 * GIB) is PROFILES["rtx-3060"]
    assert match_profile("NVIDIA GeForce RTX 3060", 8 * GIB) is None


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.key)
def test_the_advice_fits_the_card(profile: GpuProfile) -> None:
    for advice in (profile.alone, profile.desktop):
        if advice is not None:
            assert overbooked(as_node(profile.key, advice)) is None
            # It also uses the card: with one more worker it would not fit.
            one_more = as_node(profile.key, advice).model_copy(update={"workers": advice.workers + 1})
            if profile.key != "rtx-3070" or advice is profile.alone:
                assert overbooked(one_more) is not None


def test_the_guides_numbers_are_kept() -> None:
    pc1, pc2 = PROFILES["rtx-3090"].alone, PROFILES["rtx-3070"].desktop
    assert pc1 is not None
    assert pc2 is not None
    assert (pc1.workers, pc1.vram_per_worker_gib, pc1.memory_fraction, pc1.size) == (7, 3.33, 0.99, 8192)
    assert (pc2.workers, pc2.vram_per_worker_gib, pc2.memory_fraction, pc2.size) == (3, 1.50, 0.75, 4096)


def test_a_desktop_leaves_more_free_than_an_empty_card() -> None:
    for key in GEFORCE:
        alone, desktop = PROFILES[key].alone, PROFILES[key].desktop
        assert alone is not None
        assert desktop is not None
        assert desktop.memory_fraction < alone.memory_fraction
        assert desktop.workers * desktop.vram_per_worker_gib < alone.workers * alone.vram_per_worker_gib


@pytest.mark.parametrize("key", GEFORCE)
def test_the_formula_gives_the_table_for_the_cards_in_it(key: str) -> None:
    """The formula never sees the table: given what a driver tells of a known card, it must come to the same peaks."""
    known = PROFILES[key]
    clock_mhz, bits = {
        "rtx-3060": (7501, 192),
        "rtx-3070": (7001, 256),
        "rtx-3090": (9751, 384),
        "rtx-4090": (10501, 384),
    }[key]
    found = profile_by_formula(
        name=known.product,
        total_bytes=round(known.shown_gib * GIB),
        compute_capability=known.compute_capability,
        multiprocessors=known.multiprocessors,
        boost_mhz=known.boost_mhz,
        memory_clock_mhz=clock_mhz,
        bus_width_bits=bits,
        tdp_w=known.tdp_w,
    )
    for dtype in gpu_architectures.PEAK_DTYPES:
        assert peak_tflops(found, dtype) == pytest.approx(peak_tflops(known, dtype), rel=0.01)
    assert found.bandwidth_gb_s == pytest.approx(known.bandwidth_gb_s, rel=0.01)
    assert (found.key, found.nominal_gib) == (known.key, known.nominal_gib)


def test_an_unknown_card_by_formula() -> None:
    """The RTX 5090 of NVIDIA's RTX Blackwell whitepaper: 104.8 and 209.5 TFLOP/s, 1792 GB/s."""
    found = profile_by_formula(
        name="NVIDIA GeForce RTX 5090",
        total_bytes=round(31.4 * GIB),
        compute_capability=(12, 0),
        multiprocessors=170,
        boost_mhz=2407,
        memory_clock_mhz=14001,
        bus_width_bits=512,
    )
    assert found.key == "rtx-5090"
    assert found.fp32_tflops == pytest.approx(104.8, abs=0.1)
    assert found.fp16_tflops == pytest.approx(209.5, abs=0.1)
    assert found.bandwidth_gb_s == pytest.approx(1792, abs=1)
    assert found.tdp_w is None


def test_what_a_card_does_not_tell_stays_unknown() -> None:
    bare = profile_by_formula(name="NVIDIA GeForce RTX 3080", total_bytes=10 * GIB, compute_capability=(8, 6))
    assert [peak_tflops(bare, dtype) for dtype in gpu_architectures.PEAK_DTYPES] == [None] * 5
    assert peak_tflops(bare, "fp16", 1700) is None
    for known in ({"multiprocessors": 68}, {"boost_mhz": 1710}):
        half = profile_by_formula(
            name="NVIDIA GeForce RTX 3080", total_bytes=10 * GIB, compute_capability=(8, 6), **known
        )
        assert half.fp32_tflops is None
    future = profile_by_formula(
        name="NVIDIA GeForce RTX 9090",
        total_bytes=96 * GIB,
        compute_capability=(19, 0),
        multiprocessors=512,
        boost_mhz=4000,
    )
    assert peak_tflops(future, "fp32") is None
    assert peak_tflops(future, "fp32", 4000) is None


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA L40S", "NVIDIA GeForce GTX 1660"])
def test_tensor_rates_of_cards_that_are_not_geforce_rtx_are_not_guessed(name: str) -> None:
    capability = {"NVIDIA RTX A4000": (8, 6), "NVIDIA L40S": (8, 9), "NVIDIA GeForce GTX 1660": (7, 5)}[name]
    card = profile_by_formula(
        name=name, total_bytes=16 * GIB, compute_capability=capability, multiprocessors=48, boost_mhz=1560
    )
    assert card.fp32_tflops is not None
    assert card.fp16_tflops is None


@pytest.mark.parametrize(
    ("cores", "capability", "multiprocessors"),
    [(10496, (8, 6), 82), (16384, (8, 9), 128), (None, (8, 6), None), (10496, None, None), (512, (19, 0), None)],
)
def test_a_live_card_is_counted_in_multiprocessors(
    cores: int | None, capability: tuple[int, int] | None, multiprocessors: int | None
) -> None:
    live = CardFacts(
        index=0,
        name="NVIDIA GeForce RTX 0000",
        uuid="GPU-0",
        total_bytes=GIB,
        cores=cores,
        compute_capability=capability,
    )
    assert profile_of(live).multiprocessors == multiprocessors


def test_a_live_card_of_the_table_is_its_row() -> None:
    live = CardFacts(index=0, name="NVIDIA GeForce RTX 3070", uuid="GPU-0", total_bytes=round(7.67 * GIB))
    assert profile_of(live) is PROFILES["rtx-3070"]


@given(st.text(max_size=200))
def test_any_name_becomes_a_word_that_cluster_yaml_takes(name: str) -> None:
    card = profile_by_formula(name=name, total_bytes=8 * GIB, compute_capability=(8, 6))
    node = NodeConfig(gpu=card.key, workers=1, vram_per_worker_gib=1.0)
    assert node.gpu == card.key


def as_node(key: str, advice: Advice) -> NodeConfig:
    return NodeConfig(
        gpu=key,
        workers=advice.workers,
        vram_per_worker_gib=advice.vram_per_worker_gib,
        memory_fraction=advice.memory_fraction,
        size=advice.size,
    )
