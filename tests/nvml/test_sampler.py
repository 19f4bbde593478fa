"""The pace of a sampler, its minute of throttling, and computers without a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.nvml.sensors import Sampler, open_sampler, package_reading
from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle


class Thermometer:
    """Something to look at; counts the looks."""

    def __init__(self, *readings: SensorReading) -> None:
        self.readings = list(readings)
        self.looked_at: list[float] = []
        self.closed = False

    def read(self, now_s: float) -> SensorReading:
        self.looked_at.append(now_s)
        return self.readings.pop(0) if self.readings else SensorReading(temperature_c=50.0)

    def close(self) -> None:
        self.closed = True


def test_sensors_are_read_once_a_second_however_often_asked() -> None:
    thermometer = Thermometer()
    sampler = Sampler(thermometer)
    told = [sampler.sample_if_due(tenth / 10) for tenth in range(35)]
    assert thermometer.looked_at == [0.0, 1.0, 2.0, 3.0]
    assert [tenth for tenth, reading in enumerate(told) if reading is not None] == [0, 10, 20, 30]
    sampler.close()
    assert thermometer.closed
    slow = Sampler(Thermometer(), every_s=5.0)
    told = [slow.sample_if_due(1e6 + late_s) for late_s in (0, 60, 61, 65)]
    assert [reading is not None for reading in told] == [True, True, False, True]


def test_a_lost_card_says_nothing_but_that() -> None:
    sampler = Sampler(
        Thermometer(
            SensorReading(throttle_bits=Throttle.HARDWARE_THERMAL), SensorReading(lost=True)
        )
    )
    first, second = sampler.sample_if_due(0.0), sampler.sample_if_due(1.0)
    assert first is not None
    assert first.throttle_pct == 100.0
    assert second == SensorReading(lost=True)


@given(st.lists(st.tuples(st.floats(1, 40), st.none() | st.integers(0, 2**11 - 1)), max_size=60))
@example([(1.0, None), (1.0, 0x80), (1.0, None), (58.0, None), (1.0, None)])
@example([(1.0, 0x80), (60.0, None)])
def test_the_share_is_that_of_the_samples_of_the_last_minute(
    samples: list[tuple[float, int | None]],
) -> None:
    sampler = Sampler(Thermometer(*(SensorReading(throttle_bits=bits) for _, bits in samples)))
    seen, now_s = list[tuple[float, int | None]](), 0.0
    for pause_s, bits in samples:
        now_s += pause_s
        seen.append((now_s, bits))
        recent = [bits for at_s, bits in seen if now_s - at_s < 60 and bits is not None]
        alarms = sum(bits & THROTTLE_ALARMS != 0 for bits in recent)
        told = sampler.sample_if_due(now_s)
        assert told is not None
        assert told.throttle_pct == (100.0 * alarms / len(recent) if recent else None)


class Sensor(NamedTuple):
    """What psutil tells of one sensor, as far as it is read."""

    label: str
    current: float
    critical: float | None = None


@pytest.mark.parametrize(
    ("chips", "temperature_c", "margin_c"),
    [
        ({}, None, None),
        ({"nvme": [Sensor("Composite", 41.0, 85.0)], "acpitz": [Sensor("", 27.8)]}, None, None),
        (
            {
                "coretemp": [Sensor("Core 0", 99.0, 100.0), Sensor("Package id 0", 61.0, 100.0)],
                "k10temp": [],
            },
            61.0,
            39.0,
        ),
        ({"coretemp": [Sensor("Package id 0", 61.0, 100.0), Sensor("Package id 1", 72.0, 105.0)]},
         72.0, 33.0),
        ({"k10temp": [Sensor("Tctl", 80.0), Sensor("Tdie", 70.0), Sensor("Tccd1", 66.0)]}, 70.0,
         None),
        ({"k10temp": [Sensor("Tctl", 80.0), Sensor("Tccd1", 66.0)]}, 80.0, None),
        ({"cpu_thermal": [Sensor("", 55.5)]}, 55.5, None),
    ],
)  # fmt: skip
def test_the_processor_is_as_warm_as_its_package(
    chips: Mapping[str, list[Sensor]], temperature_c: float | None, margin_c: float | None
) -> None:
    assert package_reading(chips) == SensorReading(
        temperature_c=temperature_c, margin_c=margin_c, of_processor=True
    )


def test_a_computer_without_a_card_tells_what_its_system_tells() -> None:
    sampler = open_sampler("cpu")
    reading = sampler.sample_if_due(0.0)
    sampler.close()
    assert reading is not None
    now = package_reading(psutil.sensors_temperatures())
    assert (reading.temperature_c is None) == (now.temperature_c is None)
    assert (reading.power_w, reading.throttle_pct, reading.lost) == (None, None, False)
