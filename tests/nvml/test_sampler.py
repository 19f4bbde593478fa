"""The pace of a sampler, its minute of throttling, and computers without a card."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import example, given
from hypothesis import strategies as st

from workers.nvml.sensors import Sampler, processor_reading
from workers.readings import THROTTLE_ALARMS, SensorReading


class Thermometer:
    """Something to look at; counts the looks."""

    def __init__(self, *readings: SensorReading) -> None:
        self.readings = list(readings)
        self.looked_at: list[float] = []

    def read(self, now_s: float) -> SensorReading:
        self.looked_at.append(now_s)
        return self.readings.pop(0) if self.readings else SensorReading(temperature_c=50.0)


def test_sensors_are_read_once_a_second_however_often_asked() -> None:
    thermometer = Thermometer()
    sampler = Sampler(thermometer)
    told = [sampler.sample_if_due(tenth / 10) for tenth in range(35)]
    assert thermometer.looked_at == [0.0, 1.0, 2.0, 3.0]
    assert [tenth for tenth, reading in enumerate(told) if reading is not None] == [0, 10, 20, 30]
    slow = Sampler(Thermometer(), every_s=5.0)
    told = [slow.sample_if_due(1e6 + late_s) for late_s in (0, 60, 61, 65)]
    assert [reading is not None for reading in told] == [True, True, False, True]


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
        assert told.throttle_pct == (100.0 * alarms / len(recent) if recent else None)


def test_a_processor_is_as_warm_as_its_hottest_part() -> None:
    part = lambda celsius: SimpleNamespace(current=celsius)  # noqa: E731
    chips = {"nvme": [part(91.0)], "coretemp": [part(61.0), part(72.0)], "k10temp": []}
    assert processor_reading(chips) == SensorReading(temperature_c=72.0, of_processor=True)
    assert processor_reading({"acpitz": [part(27.8)]}) == SensorReading(of_processor=True)
