"""The sensors of the device that this process computes on: one card, through an NVML that stays
open, or the processor.

They are read at most once a second, with the share of throttling over the last minute. A value that
is not reported is `None`. A lost card is reported as lost, and NVML is opened again later. Starts
no thread and has no clock: the engine asks between two steps whether a sample is due. Does not
judge the values (`policy.thermal` does), and sets nothing.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import psutil
import pynvml

from workers.nvml.queries import GONE, Card, card_total_bytes, find_card, visible_card
from workers.readings import THROTTLE_ALARMS, SensorReading

#: Seconds before NVML is opened again after it failed, or after the card was lost.
REOPEN_S: Final = 5.0
SAMPLE_EVERY_S: Final = 1.0
THROTTLE_WINDOW_S: Final = 60.0

#: Linux drivers that report the temperature of a processor.
_PROCESSOR_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


class CardSensors:
    """The sensors of one card, named by UUID or by index in the order of the PCI bus."""

    def __init__(self, card: str) -> None:
        self._name = card
        self._card: Card | None = None
        self._is_open = False
        self._closed_until_s = -math.inf
        self._lost = False

    def read(self, now_s: float) -> SensorReading:
        """Read all sensors once; never raises an error of NVML.

        `now_s`, by any monotonic clock, decides whether NVML is opened again.
        """
        if now_s < self._closed_until_s:
            return SensorReading(lost=self._lost)
        try:
            if self._card is None:
                pynvml.nvmlInit()
                self._is_open = True
                self._card = find_card(self._name)
            reading = _reading(self._card)
        except pynvml.NVMLError as error:  # not one query failed, but NVML as a whole
            self.close()
            self._closed_until_s = now_s + REOPEN_S
            self._lost = self._lost or error.value in GONE
            return SensorReading(lost=self._lost)
        self._lost = False
        return reading

    def close(self) -> None:
        """Close NVML if it is open; a later `read` opens it again."""
        with suppress(pynvml.NVMLError):
            if self._is_open:
                pynvml.nvmlShutdown()
        self._is_open = False
        self._card = None


def _reading(card: Card) -> SensorReading:
    """Query all sensors of a card; raises if the card is lost."""
    ask = card.ask
    temperature_c = ask(
        "nvmlDeviceGetTemperatureV nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU
    )
    power_mw = card.field(pynvml.NVML_FI_DEV_POWER_INSTANT)
    if power_mw is None:  # on consumer cards since Ampere an average over a second
        power_mw = ask("nvmlDeviceGetPowerUsage")
    rates = ask("nvmlDeviceGetUtilizationRates")
    return SensorReading(
        temperature_c=temperature_c,
        margin_c=_margin_c(card, temperature_c),
        # GeForce says 0 for "not reported".
        memory_temperature_c=card.field(pynvml.NVML_FI_DEV_MEMORY_TEMP) or None,
        power_w=_watts(power_mw),
        power_limit_w=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        utilisation_pct=None if rates is None else rates.gpu,
        throttle_bits=ask(
            "nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons"
        ),
        fan_pct=ask("nvmlDeviceGetFanSpeed"),
    )


def _margin_c(card: Card, temperature_c: float | None) -> float | None:
    """Return how much warmer the die may get before the hardware slows down.

    Since Ada, NVML's margin counts to the highest intended working temperature, and the slowdown is
    given as a (negative) margin; both are on one scale (nvidia-smi(1), "T.Limit"). Older cards give
    absolute thresholds instead, which NVML's manual declares unreliable from Ada on.
    """
    margin_c = card.ask("nvmlDeviceGetMarginTemperature")
    if margin_c is not None:
        tlimit_c = card.field(pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT)
        return float(margin_c - (tlimit_c or 0.0))
    slowdown_c = card.ask(
        "nvmlDeviceGetTemperatureThreshold", pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    )
    return None if temperature_c is None or slowdown_c is None else slowdown_c - temperature_c


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


class ProcessorSensors:
    """A computer without a card: its processor's temperature, if the system reports it."""

    def read(self, now_s: float) -> SensorReading:  # noqa: ARG002 - the processor is read each time
        """Read the temperature once."""
        with suppress(OSError):
            return processor_reading(psutil.sensors_temperatures())
        return processor_reading({})


def processor_reading(chips: Mapping[str, Sequence[Any]]) -> SensorReading:
    """Return the hottest part of a processor in a result of `psutil.sensors_temperatures`."""
    reported_c = [each.current for driver in _PROCESSOR_SENSORS for each in chips.get(driver, ())]
    return SensorReading(temperature_c=max(reported_c, default=None), of_processor=True)


class Sampler:
    """Reads sensors, at most once in `every_s`, and adds the share of throttling over the last
    minute.
    """

    def __init__(
        self, sensors: CardSensors | ProcessorSensors, *, every_s: float = SAMPLE_EVERY_S
    ) -> None:
        self._sensors = sensors
        self._every_s = every_s
        self._last_s: float | None = None
        self._alarms: deque[tuple[float, bool]] = deque()
        """Samples of the last minute with throttling bits: when, and whether they were alarms."""

    @property
    def of_card(self) -> bool:
        """Whether the sensors are those of a card."""
        return isinstance(self._sensors, CardSensors)

    def sample_if_due(self, now_s: float) -> SensorReading | None:
        """Read the sensors; `None` if the last sample is younger than `every_s`.

        `now_s` is by any monotonic clock.
        """
        if self._last_s is not None and now_s - self._last_s < self._every_s:
            return None
        self._last_s = now_s
        reading = self._sensors.read(now_s)
        if reading.throttle_bits is not None:
            self._alarms.append((now_s, bool(reading.throttle_bits & THROTTLE_ALARMS)))
        while self._alarms and now_s - self._alarms[0][0] >= THROTTLE_WINDOW_S:
            self._alarms.popleft()
        if reading.lost or not self._alarms:
            return reading
        count = sum(alarm for _, alarm in self._alarms)
        return replace(reading, throttle_pct=100.0 * count / len(self._alarms))


def open_sampler(kind: str, card: str | None = None) -> Sampler:
    """Return the sampler of a device whose kind is as in `DeviceInfo.kind`.

    `card` is a UUID, or an index in the order of the PCI bus; by default the first card that this
    process sees. A worker on the processor samples a card too if CUDA_VISIBLE_DEVICES names one
    that NVML knows: a rehearsal that finds no room on the card of this machine.
    """
    if kind == "cuda":
        return Sampler(CardSensors(card or visible_card()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and card_total_bytes(visible_card()) is not None:
        return Sampler(CardSensors(visible_card()))
    return Sampler(ProcessorSensors())
