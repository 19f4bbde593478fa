"""Reads the sensors of what this process computes on: at most once a second, with the last minute
of throttling.

One sampler per process. It has no clock of its own and starts no thread: the engine asks between
two steps whether a sample is due. Does not judge what it reads (`policy.thermal` does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol

import psutil

from workers.nvml.card_sensors import CardSensors
from workers.nvml.queries import visible_card
from workers.readings import THROTTLE_ALARMS, SensorReading

SAMPLE_EVERY_S: Final = 1.0
THROTTLE_WINDOW_S: Final = 60.0

#: Where Linux reports the temperature of a processor: driver, label of the package's sensor (None:
#: any of them).
_PACKAGE_SENSORS: Final = (
    ("coretemp", "Package id"),
    ("k10temp", "Tdie"),
    ("k10temp", "Tctl"),
    ("zenpower", "Tdie"),
    ("cpu_thermal", None),
)


class Sensors(Protocol):
    """A source of readings."""

    def read(self, now_s: float) -> SensorReading:
        """Look once; without `throttle_pct`."""

    def close(self) -> None:
        """Release what is held for reading."""


class ThrottleWindow:
    """The samples of the last minute, as far as throttling goes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, bool]] = deque()

    def add(self, now_s: float, bits: int | None) -> float | None:
        """Take in a sample; return the share of alarms in percent, or `None` if no sample of the
        minute told.

        `now_s` is by any monotonic clock; `bits` is the sum of `Throttle` bits, `None` if they were
        not reported.
        """
        if bits is not None:
            self._samples.append((now_s, bool(bits & THROTTLE_ALARMS)))
        while self._samples and now_s - self._samples[0][0] >= THROTTLE_WINDOW_S:
            self._samples.popleft()
        if not self._samples:
            return None
        return 100.0 * sum(alarm for _, alarm in self._samples) / len(self._samples)


class Sampler:
    """Reads some sensors, with at least `every_s` between two samples, and closes them."""

    def __init__(self, sensors: Sensors, *, every_s: float = SAMPLE_EVERY_S) -> None:
        self._sensors = sensors
        self._every_s = every_s
        self._last_s: float | None = None
        self._window = ThrottleWindow()

    def sample_if_due(self, now_s: float) -> SensorReading | None:
        """Read the sensors; `None` if that was done a moment ago.

        The time is by any clock that does not go back.
        """
        if self._last_s is not None and now_s - self._last_s < self._every_s:
            return None
        self._last_s = now_s
        reading = self._sensors.read(now_s)
        throttle_pct = self._window.add(now_s, reading.throttle_bits)
        return reading if reading.lost else replace(reading, throttle_pct=throttle_pct)

    def close(self) -> None:
        """Release NVML."""
        self._sensors.close()


class ProcessorSensors:
    """A computer without a card: the temperature of its processor, where the system reports it."""

    def read(self, now_s: float) -> SensorReading:  # noqa: ARG002 - nothing here is asked more rarely
        """Look once."""
        ask = getattr(
            psutil, "sensors_temperatures", dict
        )  # only Linux and FreeBSD have it in psutil
        with suppress(OSError):
            return package_reading(ask())
        return package_reading({})

    def close(self) -> None:
        """Nothing is held."""


def package_reading(chips: Mapping[str, Sequence[Any]]) -> SensorReading:
    """Choose the hottest processor package of all that `psutil.sensors_temperatures` returns:
    sensors by driver.
    """
    for driver, label in _PACKAGE_SENSORS:
        sensors = [
            sensor
            for sensor in chips.get(driver, ())
            if label is None or sensor.label.startswith(label)
        ]
        if sensors:
            hottest = max(sensors, key=lambda sensor: sensor.current)
            margin_c = hottest.critical - hottest.current if hottest.critical else None
            return SensorReading(
                temperature_c=hottest.current, margin_c=margin_c, of_processor=True
            )
    return SensorReading(of_processor=True)


def open_sampler(kind: str, card: str | None = None) -> Sampler:
    """Return the sampler of a device, whose kind is as in `DeviceInfo.kind`; raise `ValueError` for
    another kind.

    The card is a UUID, or an index in the order of the PCI bus; by default the first that this
    process sees.
    """
    if kind == "cuda":
        return Sampler(CardSensors(card or visible_card()))
    if kind == "cpu":
        return Sampler(ProcessorSensors())
    raise ValueError(f"no sensors are known for devices of kind {kind!r}; valid: cuda, cpu")
