"""One card read through the real nvidia-ml-py, out of a library that answers as cards and drivers do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from workers.nvml.fake.script import ANSWERS, read_script
from workers.nvml.sensors import RARELY_S, REOPEN_S
from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle
from workers.settings import FakeSensors

UUID = "GPU-0000a100-0000-4000-8000-000000000001"

#: What a reading shows as the script has it.
SHOWN: dict[str, Any] = {
    "temperature_c": 62, "memory_temperature_c": 71, "power_w": 512.125, "power_limit_w": 700, "sm_clock_mhz": 1755,
    "sm_clock_max_mhz": 1980, "memory_clock_mhz": 2619, "utilisation_pct": 97, "fan_pct": 40, "pcie_generation": 5,
    "pcie_lanes": 16, "ecc_errors": 2, "remapped_rows": 3,
}  # fmt: skip

#: A data-centre card that tells everything.
FULL: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3", "uuid": UUID, "total_bytes": 85_520_809_984, "used_bytes": 3_000_000_000,
    "reserved_bytes": 0, "compute_capability": "9.0", "slowdown_c": 90, "margin_c": 23, "slowdown_tlimit_c": -2,
    "power_average_w": 498, "power_limit_default_w": 700, "power_limit_min_w": 200, "power_limit_max_w": 700,
    "memory_offset_mhz": 0, "memory_offset_min_mhz": -2000, "memory_offset_max_mhz": 6000,
    "throttle": [[0, ["POWER_CAP", "HARDWARE_THERMAL"]]], "ecc_enabled": True, "persistence_mode": True,
    "compute_mode": 0, "processes": [{"pid": 1, "used_bytes": 5}, {"used_bytes": 2_500_000_000}], "xids": [[0, 79]],
    **SHOWN,
}  # fmt: skip
EXPECTED = SensorReading(
    **SHOWN,
    margin_c=25.0,
    throttle_bits=Throttle.POWER_CAP | Throttle.HARDWARE_THERMAL,
    throttle_pct=100.0,
    xid=79,
    process_used_bytes=2_500_000_000,
)
NOTHING = asdict(SensorReading())
LOST = asdict(SensorReading(lost=True))

#: What is missing from the reading if the card does not answer a question; the rest is as it was.
WITHOUT: dict[str, dict[str, Any]] = {
    **{key: {key: None} for key in SHOWN},
    "slowdown_c": {},
    "margin_c": {"margin_c": 28.0},  # the threshold less the temperature, as before Ada
    "slowdown_tlimit_c": {"margin_c": 23.0},
    "power_w": {"power_w": 498.0},  # the average
    "power_average_w": {},
    "throttle": {"throttle_bits": None, "throttle_pct": None},
    "ecc_enabled": {"ecc_errors": None},
    "processes": {"process_used_bytes": None},
    "xids": {"xid": None},
}

Scene = Callable[..., tuple[str, Any]]
Look = Callable[..., list[Any]]


def without(*keys: str, **changes: object) -> dict[str, Any]:
    return {key: value for key, value in FULL.items() if key not in keys} | changes


def test_a_card_that_tells_everything_is_read_whole(scene: Scene, look: Look) -> None:
    assert set(ANSWERS) <= set(FULL)
    assert look(scene(FULL), ("open", UUID), ("read", 0.0)) == [asdict(EXPECTED)]


def test_an_older_driver_is_asked_by_the_older_functions(scene: Scene, look: Look) -> None:
    """Drivers of the Ampere years know none of these.

    The answers are the same but for the margin.
    """
    missing = [
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    ]
    old = scene(FULL, missing_functions=missing)
    assert look(old, ("open", UUID), ("read", 0.0), ("once", UUID)) == [
        asdict(replace(EXPECTED, margin_c=28.0)),
        [3_000_000_000, 2_500_000_000, None],
    ]
    bare = scene(
        without("margin_c", "slowdown_c", "processes"),
        missing_functions=["nvmlDeviceGetFieldValues"],
    )
    expected = {
        "margin_c": None,
        "memory_temperature_c": None,
        "power_w": 498.0,
        "process_used_bytes": None,
    }
    assert look(bare, ("open", UUID), ("read", 0.0)) == [asdict(EXPECTED) | expected]


def test_what_is_not_supported_is_missing_and_nothing_else(scene: Scene, look: Look) -> None:
    """Each question in turn is one that the card, the driver or its rights refuse."""
    steps, expected = [], []
    for key, changes in WITHOUT.items():
        for refused in (
            without(key),
            {**FULL, "fails": {key: "no_permission"}},
            {**FULL, "fails": {key: "unknown"}},
        ):
            steps += [scene(refused), ("open", UUID), ("read", 0.0)]
            expected.append(asdict(EXPECTED) | changes)
    steps += [scene(without("margin_c", "temperature_c")), ("open", UUID), ("read", 0.0)]
    expected.append(asdict(EXPECTED) | {"margin_c": None, "temperature_c": None})
    # A 4090 answers, with rows that it does not remap, and with 0 degrees; ECC may be switched off.
    geforce = {
        **FULL,
        "name": "NVIDIA GeForce RTX 4090",
        "memory_temperature_c": 0,
        "ecc_enabled": False,
    }
    steps += [scene(geforce), ("open", UUID), ("read", 0.0)]
    expected.append(
        asdict(EXPECTED) | {"memory_temperature_c": None, "remapped_rows": None, "ecc_errors": None}
    )
    assert look(*steps) == expected


@pytest.mark.parametrize(
    ("error", "later"),
    [
        ("not_supported", None),
        ("function_not_found", None),
        ("no_permission", 40.0),
        ("unknown", 40.0),
    ],
)
def test_only_what_is_not_supported_is_not_asked_again(
    scene: Scene, look: Look, error: str, later: float | None
) -> None:
    refused = scene({**FULL, "fails": {"fan_pct": error, "memory_temperature_c": error}})
    first, second = look(refused, ("open", UUID), ("read", 0.0), scene(FULL), ("read", 1.0))
    assert (first["fan_pct"], first["memory_temperature_c"]) == (None, None)
    assert second["fan_pct"] == later
    assert (second["memory_temperature_c"] is None) == (later is None)
    assert second["temperature_c"] == 62.0


def test_limits_link_and_errors_are_asked_rarely(scene: Scene, look: Look) -> None:
    before, after = {"power_limit_w": 700, "fan_pct": 40}, {"power_limit_w": 350, "fan_pct": 80}
    steps = [scene({**FULL, **before}), ("open", UUID), ("read", 0.0), scene({**FULL, **after})]
    back = [
        scene({**FULL, "lost_after_calls": 0}),
        ("read", 31.0),
        scene({**FULL, **before}),
        ("read", 45.0),
    ]
    told = look(*steps, ("read", 1.0), ("read", RARELY_S - 1), ("read", RARELY_S), *back)
    asked = [(row["power_limit_w"], row["fan_pct"]) for row in told]
    assert asked == [(700, 40), (700, 80), (700, 80), (350, 80), (None, None), (700, 40)]


def test_xids_of_applications_say_nothing_of_the_card(scene: Scene, look: Look) -> None:
    both = scene(
        without("xids", xids=[[0, 13], [0, 48], [0, 31]]),
        without("xids", uuid="GPU-2", xids=[[0, 43]]),
    )
    told = look(both, ("open", "0"), ("read", 0.0), ("read", 1.0), ("open", "1"), ("read", 0.0))
    assert [reading["xid"] for reading in told] == [48, 48, None]


def test_memory_of_this_process_among_others_and_under_mps(scene: Scene, look: Look) -> None:
    of_others = {**FULL, "processes": [{"pid": os.getpid(), "used_bytes": 7}]}
    under_mps = {
        **FULL,
        "processes": [{"pid": 1, "used_bytes": 7}, {"used_bytes": 9, "under_mps": True}],
    }
    under_wddm = {**FULL, "processes": [{"used_bytes": None}]}
    steps: list[tuple[str, Any]] = []
    for card in (of_others, under_mps, under_wddm, {**FULL, "processes": []}):
        steps += [scene(card), ("open", UUID), ("read", 0.0), ("once", UUID)]
    told = look(*steps)
    assert [reading["process_used_bytes"] for reading in told[::2]] == [None, 9, None, None]
    assert [once[1] for once in told[1::2]] == [None, 9, None, None]


def test_a_lost_card_is_an_event_and_it_may_come_back(scene: Scene, look: Look) -> None:
    reads = [("read", float(second)) for second in range(20)]
    told = look(scene({**FULL, "lost_after_calls": 60, "lost_for_s": 0.0}), ("open", UUID), *reads)
    first = told.index(LOST)
    assert first > 0
    back = first + round(REOPEN_S)
    assert told[first:back] == [LOST] * (back - first)
    assert all(
        not reading["lost"] and reading["temperature_c"] == 62.0
        for reading in told[:first] + told[back:]
    )


def test_nvml_is_closed_and_opened_again_in_balance(scene: Scene, look: Look) -> None:
    """Also after a card was lost and came back.

    That a card is not there later does not make it lost again.
    """
    lost = scene({**FULL, "lost_after_calls": 5, "lost_for_s": 0.0}, driver="1.0")
    there = [
        ("read", 0.0),
        ("read", 9.0),
        ("once", UUID),
        ("read", 10.0),
        ("once", "7"),
        ("close", None),
    ]
    told = look(lost, ("open", UUID), *there, scene(), ("read", 99.0))
    full = asdict(EXPECTED)
    once = [[3_000_000_000, 2_500_000_000, "1.0"], [None, None, "1.0"]]
    assert told == [LOST, full, once[0], full, once[1], "Uninitialized", NOTHING]


def test_a_card_that_stays_lost_is_only_looked_for(scene: Scene, look: Look) -> None:
    """Lost from the beginning, then not listed any more; lost in the middle.

    And because the driver wants a reset.
    """
    later = [("read", 10.0 * step) for step in range(1, 5)]
    told = look(
        *(scene({**FULL, "lost_after_calls": 0}), ("open", UUID), *later[:2], scene(), *later[2:]),
        *(scene({**FULL, "lost_after_calls": 20}), ("open", "0"), *later),
        *(scene({**FULL, "fails": {"power_w": "reset_required"}}), ("open", "0"), *later),
    )
    assert told == [LOST] * 12


def test_two_cards_by_uuid_and_by_index_and_none_by_other_names(scene: Scene, look: Look) -> None:
    both = scene(
        {**FULL, "lost_after_calls": 10_000}, {**FULL, "uuid": "GPU-2", "temperature_c": 41}
    )
    steps = [step for name in (UUID, "GPU-2", "0", "1") for step in (("open", name), ("read", 0.0))]
    told = look(both, *steps)
    assert [reading["temperature_c"] for reading in told] == [62, 41, 62, 41]
    strangers = [
        step for name in ("GPU-3", "2", "-1", "none") for step in (("open", name), ("read", 0.0))
    ]
    assert look(both, *strangers) == [NOTHING] * 4
    told = look(both, ("open", None), ("read", 0.0), CUDA_VISIBLE_DEVICES="GPU-2,GPU-3")
    assert [reading["temperature_c"] for reading in told] == [41]


def test_without_nvml_nothing_is_answered_or_raised(look: Look, tmp_path: Path) -> None:
    """Where there is a driver, a file in front of its library that is none keeps it from being found."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"this is no library, however long it is")
    reads = [
        ("open", "0"),
        ("read", 0.0),
        ("read", 1.0),
        ("read", 60.0),
        ("cards", None),
        ("once", "0"),
    ]
    told = look(*reads, LD_LIBRARY_PATH=str(tmp_path))
    assert told == [NOTHING, NOTHING, NOTHING, [], [None, None, None]]


def test_curves_are_straight_held_at_the_ends_and_repeated(scene: Scene, look: Look) -> None:
    """Over days, so that no pause of the machine matters."""
    day_s = 86_400.0
    curve = [[day_s, 20], [11 * day_s, 120]]
    bits = [[0, ["IDLE"]], [5 * day_s, ["POWER_CAP"]]]
    steps: list[tuple[str, Any]] = []
    for days, repeat in ((0, {}), (4, {}), (6, {}), (90, {}), (24, {"repeat_s": 20 * day_s})):
        card = {**FULL, "temperature_c": curve, "fan_pct": curve, "throttle": bits, **repeat}
        steps += [scene(card, elapsed_s=days * day_s), ("open", UUID), ("read", 0.0)]
    told = look(*steps)
    assert [(reading["temperature_c"], reading["throttle_bits"]) for reading in told] == [
        (20.0, Throttle.IDLE),
        (50.0, Throttle.IDLE),
        (70.0, Throttle.POWER_CAP),
        (120.0, Throttle.POWER_CAP),
        (50.0, Throttle.IDLE),
    ]


def test_the_heat_of_the_example(heat: FakeSensors, look: Look) -> None:
    """Warm, hot and cooler within two minutes, thermal bits where it is hot.

    The second card stays cool.
    """
    hot, cool = read_script(Path(__file__).parents[2] / "scripts" / "heat.json").cards
    temperature_c = dict(hot.temperature_c or ())
    assert (temperature_c[0], max(temperature_c.values()), temperature_c[110]) == (60, 86, 65)
    alarms = {at_s: bool(bits & THROTTLE_ALARMS) for at_s, bits in hot.throttle or ()}
    assert alarms == {0: False, 55: True, 90: False}
    step = ("load", json.loads(json.dumps(asdict(heat))))
    first, second = look(step, ("open", hot.uuid), ("read", 0.0), ("open", "1"), ("read", 0.0))
    assert 60 <= first["temperature_c"] <= 86
    assert first["margin_c"] == 95 - first["temperature_c"]
    assert (second["temperature_c"], second["throttle_bits"], second["power_w"]) == (61, 0, 205)
    assert first["process_used_bytes"] == 2_000_000_000
    assert first["memory_temperature_c"] is None
    assert cool.uuid != hot.uuid
