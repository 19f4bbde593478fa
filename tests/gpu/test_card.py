"""The real card: its sensors, the governor that reads them, and the check of its products.

    python -m pytest tests/gpu/test_card.py      # with the project and its test packages installed

From a bare checkout, with only torch, psutil, nvidia-ml-py and pytest:

    python -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode=importlib
    tests/gpu/test_card.py

A value that a card does not report may be missing; reported values must be plausible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch

from tests.flips import flip_bit, flip_latest
from tests.gpu.scene import ON_A_CARD
from tests.scene import MIB
from workers.devices.cuda import _set_product_precision
from workers.host.machine import look_at_cards
from workers.nvml import queries
from workers.nvml.sensors import SAMPLE_EVERY_S, open_sampler
from workers.readings import SensorReading
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

pytestmark = ON_A_CARD

Found: TypeAlias = dict[str, Any]

#: The smallest and the largest plausible value of each sensor, from a GT 1030 to a data-centre
#: module.
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "temperature_c": (5, 110),
    "margin_c": (-30, 110),
    "memory_temperature_c": (5, 120),
    "power_w": (1, 1500),
    "power_limit_w": (15, 1500),
    "sm_clock_mhz": (100, 4000),
    "memory_clock_mhz": (100, 20000),
    "utilisation_pct": (0, 100),
    "throttle_bits": (0, 2**32),
    "throttle_pct": (0, 100),
    "fan_pct": (0, 120),
}

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

#: The number of right products for each type, and the number with the same operands.
PRODUCTS, OF_A_KIND = 200, 10


# --- sensors


def idle_and_busy() -> Found:
    """Sample the sensors with an idle context, and then with products queued all the time."""
    properties = torch.cuda.get_device_properties(0)
    matrices = torch.empty((3, 4096, 4096), device="cuda")
    matrices[:2].normal_()
    torch.cuda.synchronize()
    sampler = open_sampler("cuda")
    readings: dict[str, list[SensorReading]] = {"idle": [], "busy": []}
    moment_s = 0.0
    for when, seconds in (("idle", 1.0), ("busy", 3.0)):
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if when == "busy":
                for _ in range(20):
                    torch.mm(matrices[0], matrices[1], out=matrices[2])
            moment_s += SAMPLE_EVERY_S
            reading = sampler.sample_if_due(moment_s)
            assert reading is not None, "one is due at each of these moments"
            readings[when].append(reading)
            time.sleep(0.05)
            torch.cuda.synchronize()
    reserved_bytes = torch.cuda.memory_reserved()
    return {
        **readings,
        "reserved_bytes": reserved_bytes,
        "uuid": f"GPU-{properties.uuid}",
        "name": properties.name,
        "capability": (properties.major, properties.minor),
        "total_bytes": properties.total_memory,
        "cards": look_at_cards().cards,
        "used_bytes": queries.process_used_bytes(queries.visible_card()),
        "card": queries.visible_card(),
    }


@pytest.fixture(scope="module")
def seen(in_child: Callable[..., Any]) -> Found:
    return in_child(idle_and_busy)


def test_every_value_is_missing_or_plausible(seen: Found) -> None:
    assert {*PLAUSIBLE, "lost", "of_processor"} == set(SensorReading.__dataclass_fields__)
    for reading in (*seen["idle"], *seen["busy"]):
        for key, (least, most) in PLAUSIBLE.items():
            value = getattr(reading, key)
            assert value is None or least <= value <= most, f"{key} is {value}"
        assert reading.temperature_c is not None
        assert not reading.lost


def test_it_notices_work(seen: Found) -> None:
    told = [reading.utilisation_pct for reading in seen["busy"]]
    if told == [None] * len(told):
        pytest.skip("this card does not tell its utilisation")
    assert max(pct or 0 for pct in told) > 0


def test_what_this_process_holds_covers_its_tensors(seen: Found) -> None:
    told = seen["used_bytes"]
    if told is None:
        pytest.skip("this driver does not tell what a process holds")
    assert seen["reserved_bytes"] <= told <= seen["total_bytes"]


def test_nvml_and_torch_mean_the_same_card(seen: Found) -> None:
    if seen["card"].startswith("MIG-"):
        pytest.skip("a part of a card has a UUID of its own")
    (card,) = [card for card in seen["cards"] if card.uuid == seen["uuid"]]
    assert (card.name, card.compute_capability) == (seen["name"], seen["capability"])
    # Neither counts all memory that the driver reserves, and their rules differ.
    assert 0.99 * seen["total_bytes"] <= card.total_bytes <= 1.1 * seen["total_bytes"]
    if seen["card"].isdecimal():
        assert card.index == int(seen["card"])


# --- the check of results


def checks(name: str) -> Found | None:
    """Check right products, then products with a flipped bit, and observe the allocator."""
    if name == "bf16" and torch.cuda.get_device_capability()[0] < 8:
        return None
    _set_product_precision(name)
    dtype = DTYPES[name]
    alarms: list[str] = []
    kinds: set[str] = set()
    grown: list[tuple[int, int]] = []
    worst = 0.0
    missed: list[str] = []
    for seed in range(PRODUCTS // OF_A_KIND):
        workload = Matmul(WorkloadContext(device=torch.device("cuda", 0), dtype=dtype, seed=seed))
        workload.hold(48 * MIB)
        for number in range(OF_A_KIND):
            workload.step(1024, 1)
            before_bytes = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            check = workload.check(number)
            grown.append(
                (
                    torch.cuda.memory_allocated() - before_bytes,
                    torch.cuda.max_memory_allocated() - before_bytes,
                )
            )
            kinds.add(check.kind)
            worst = max(worst, check.worst)
            if not check.ok:
                alarms.append(check.detail)
        for number in (0, 1):  # by Freivalds' test and by repeating
            workload.step(1024, 1)
            latest = workload._tensors.latest
            largest = int(latest.abs().argmax().item())
            flip_bit(latest, largest, 8 * dtype.itemsize - 2)  # the highest bit of the exponent
            check = workload.check(number)
            if check is None or check.ok:
                missed.append(f"seed {seed}, check {number}: {check}")
        workload.step(1024, 1)
        flipped = flip_latest(workload, seed)
        check = workload.check(1)
        if check is None or check.ok:
            missed.append(f"seed {seed}, any bit: {flipped}: {check}")
    return {
        "alarms": alarms,
        "kinds": kinds,
        "grown": grown,
        "worst": worst,
        "missed": missed,
    }


@pytest.mark.parametrize("name", list(DTYPES))
def test_right_products_pass_and_flipped_bits_are_found_without_memory(
    in_child: Callable[..., Any], name: str
) -> None:
    found = in_child(checks, name)
    if found is None:
        pytest.skip("bf16 begins with Ampere")
    assert found["alarms"] == []
    assert 0.0 < found["worst"] < 1.0
    assert found["kinds"] == {"freivalds", "repeat"}
    assert found["missed"] == []
    assert len(found["grown"]) == PRODUCTS
    assert set(found["grown"]) == {(0, 0)}
