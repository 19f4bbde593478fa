"""The sensors of one card, as drivers answer: whole, in part, not at all, and again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.cards import scripted_card
from tests.nvml.conftest import Script
from workers.nvml import queries
from workers.nvml.sensors import REOPEN_S, CardSensors, open_sampler
from workers.readings import SensorReading, Throttle

UUID = "GPU-0000a100-0000-4000-8000-000000000001"

#: What a reading shows as the script has it.
SHOWN: dict[str, Any] = {
    "temperature_c": 62, "memory_temperature_c": 71, "power_w": 512.125, "power_limit_w": 700,
    "sm_clock_mhz": 1755, "memory_clock_mhz": 2619, "utilisation_pct": 97, "fan_pct": 40,
}  # fmt: skip

#: A data-centre card that tells everything.
FULL = scripted_card(
    name="NVIDIA H100 80GB HBM3", uuid=UUID, slowdown_c=90, margin_c=23, slowdown_tlimit_c=-2,
    power_average_w=498, throttle=0x4 | Throttle.HARDWARE_THERMAL, **SHOWN,
)  # fmt: skip
EXPECTED = SensorReading(**SHOWN, margin_c=25.0, throttle_bits=0x4 | Throttle.HARDWARE_THERMAL)
LOST = SensorReading(lost=True)

#: What is different in the reading if the card does not answer a question.
WITHOUT: dict[str, dict[str, Any]] = {
    **{key: {key: None} for key in SHOWN},
    "margin_c": {"margin_c": 28.0},  # the threshold less the temperature, as before Ada
    "slowdown_tlimit_c": {"margin_c": 23.0},
    "power_w": {"power_w": 498.0},  # the average
    "throttle": {"throttle_bits": None},
}


def read(card: str = UUID) -> SensorReading:
    sensors = CardSensors(card)
    reading = sensors.read(0.0)
    sensors.close()
    return reading


def test_a_card_that_tells_everything_is_read_whole(script: Script) -> None:
    script(FULL)
    assert read() == EXPECTED


def test_an_older_driver_is_asked_by_the_older_functions(script: Script) -> None:
    """Drivers of the Ampere years know none of these."""
    newer = (
        "TemperatureV", "MarginTemperature", "CurrentClocksEventReasons",
        "ComputeRunningProcesses_v3", "MPSComputeRunningProcesses_v3",
    )  # fmt: skip
    script(FULL, missing_functions=[f"nvmlDeviceGet{name}" for name in newer])
    assert read() == replace(EXPECTED, margin_c=28.0)
    assert queries.process_used_bytes(UUID) == 2**30
    script(FULL, missing_functions=["nvmlDeviceGetFieldValues"])
    bare = replace(EXPECTED, margin_c=23.0, memory_temperature_c=None, power_w=498.0)
    assert read() == bare


def test_what_is_not_supported_is_missing_and_nothing_else(script: Script) -> None:
    for key, changes in WITHOUT.items():
        script({name: value for name, value in FULL.items() if name != key})
        assert read() == replace(EXPECTED, **changes), key
        script({**FULL, "fails": {key: "unknown"}})
        assert read() == replace(EXPECTED, **changes), key


def test_a_geforce_card_says_0_degrees_for_memory_that_it_does_not_measure(script: Script) -> None:
    script({**FULL, "memory_temperature_c": 0})
    assert read() == replace(EXPECTED, memory_temperature_c=None)


@pytest.mark.parametrize(
    ("processes", "used_bytes"),
    [
        ([{"pid": os.getpid() + 1, "used_bytes": 7}], None),
        ([{"pid": 1, "used_bytes": 7}, {"pid": None, "used_bytes": 9, "kind": "mps"}], 9),
        ([{"pid": None, "used_bytes": None}], None),  # as under WDDM
        ([], None),
    ],
)
def test_memory_of_this_process_among_others(
    script: Script, processes: list[Any], used_bytes: int | None
) -> None:
    script({**FULL, "processes": processes})
    assert queries.process_used_bytes(UUID) == used_bytes


@pytest.mark.parametrize("gone", [{"lost": True}, {"fails": {"fan_pct": "reset_required"}}])
def test_a_lost_card_is_an_event_and_it_may_come_back(script: Script, gone: dict[str, Any]) -> None:
    sensors = CardSensors(UUID)
    script(FULL)
    assert sensors.read(0.0) == EXPECTED
    script({**FULL, **gone})
    assert sensors.read(1.0) == LOST
    script()  # not listed any more
    assert sensors.read(1.0 + REOPEN_S) == LOST
    script(FULL)
    assert sensors.read(2 * REOPEN_S) == LOST, "it is not looked for all the time"
    assert sensors.read(2.0 + 2 * REOPEN_S) == EXPECTED
    sensors.close()
    with pytest.raises(queries.pynvml.NVMLError, match="Uninitialized"):
        queries.pynvml.nvmlDeviceGetCount()  # it is closed as often as it was opened


def test_two_cards_by_uuid_and_by_index_and_none_by_other_names(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(FULL, {**FULL, "uuid": "GPU-2", "temperature_c": 41})
    assert [read(name).temperature_c for name in (UUID, "GPU-2", "0", "1")] == [62, 41, 62, 41]
    assert [read(name) for name in ("GPU-3", "2", "-1", "none")] == [SensorReading()] * 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,GPU-3")
    reading = open_sampler("cuda").sample_if_due(0.0)
    assert reading.temperature_c == 41


@pytest.mark.parametrize(
    ("visible", "of_card"), [("0", True), ("", False), (None, False), ("1", False)]
)
def test_a_worker_on_the_processor_watches_the_card_it_was_given(
    script: Script, monkeypatch: pytest.MonkeyPatch, visible: str | None, *, of_card: bool
) -> None:
    script(FULL)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert open_sampler("cpu").of_card is of_card


def test_without_a_driver_nothing_is_answered_or_raised(stub: None) -> None:
    sensors = CardSensors("0")
    assert [sensors.read(now_s) for now_s in (0.0, 1.0, 60.0)] == [SensorReading()] * 3
    asked: list[Callable[[str], int | None]] = [
        queries.card_used_bytes, queries.card_free_bytes, queries.card_total_bytes,
        queries.process_used_bytes,
    ]  # fmt: skip
    assert [ask("0") for ask in asked] == [None] * 4
    assert queries.driver_version() is None
