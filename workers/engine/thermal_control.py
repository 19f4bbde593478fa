"""Connects the thermal governor to a worker: reads the sensors of its device, and keeps the resulting duty.

Reads the sensors when that is due, asks the governor, keeps its answer, and reports alarms and changed bands. Does not
sleep (the engine does) and sets nothing on the card.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from workers.engine.slice_stats import SliceStats
from workers.nvml.sampler import Sampler, open_sampler
from workers.policy.thermal.alarms import BandwidthMeasured
from workers.policy.thermal.governor import SensorsRead, ThermalDecision, ThermalGovernor
from workers.readings import SensorReading
from workers.settings import THERMAL_OFF, WorkerSpec

#: Time between two measurements of a card's memory bandwidth: a faulty card gets slower over minutes.
_BANDWIDTH_EVERY_S: Final = 30.0

#: The governor reduces the duty slightly long before a card is hot; from this duty on it is not reported.
_UNLIMITED_DUTY: Final = 0.95


class ThermalControl:
    """The last sensor reading, and what the governor decided on it."""

    def __init__(self, sampler: Sampler, governor: ThermalGovernor) -> None:
        self._sampler = sampler
        self._governor = governor
        self._state = governor.initial()
        self._bandwidth_at_s = time.monotonic()
        self.reading: SensorReading | None = None
        self.decision: ThermalDecision | None = None

    @property
    def duty(self) -> float:
        """Share of its allowed time for which the worker may keep the device busy, 0..1; 0 is a pause."""
        return 1.0 if self.decision is None else self.decision.duty

    @property
    def slows(self) -> bool:
        """Whether the heat of the card limits the worker."""
        return self.duty < _UNLIMITED_DUTY

    @property
    def reason(self) -> str:
        """Why, in words."""
        return "" if self.decision is None else self.decision.reason

    @property
    def alarmed(self) -> bool:
        """Whether an alarm is raised, such as a card that is gone."""
        return bool(self._state.alarms.names)

    def sample(self, stats: SliceStats) -> None:
        """Read the sensors if that is due, and ask the governor."""
        now_s = time.monotonic()
        reading = self._sampler.sample_if_due(now_s)
        if reading is None:
            return
        self.reading = reading
        self._follow(SensorsRead(at_s=now_s, reading=reading), stats)

    def measure_bandwidth(self, measure: Callable[[], float | None], stats: SliceStats) -> None:
        """Measure the bandwidth of the card's memory if that is due.

        Args:
            measure: Returns bytes per second, or `None` if it cannot be measured.
            stats: Where alarms are reported.
        """
        now_s = time.monotonic()
        clock_mhz = None if self.reading is None else self.reading.memory_clock_mhz
        if clock_mhz is None or now_s - self._bandwidth_at_s < _BANDWIDTH_EVERY_S:
            return
        self._bandwidth_at_s = now_s
        bytes_per_s = measure()
        if bytes_per_s is not None:
            self._follow(BandwidthMeasured(at_s=now_s, bytes_per_s=bytes_per_s, memory_clock_mhz=clock_mhz), stats)

    def _follow(self, event: SensorsRead | BandwidthMeasured, stats: SliceStats) -> None:
        before = self.decision
        self._state, decision = self._governor.decide(self._state, event)
        self.decision = decision
        for alarm in decision.alarms:
            stats.event("alarm_raised" if alarm.raised else "alarm_cleared", alarm=alarm.name, text=alarm.text)
        if decision.band is not None and before is not None and before.band not in {None, decision.band}:
            temperature_c = None if self.reading is None else self.reading.temperature_c
            stats.event("thermal_band", band=decision.band.value, temperature_c=temperature_c, duty=decision.duty)


def open_thermal_control(spec: WorkerSpec, card: str | None) -> ThermalControl:
    """Return the sensors that belong to a worker.

    Args:
        spec: Thresholds, and whether the sensors are fake ones; those are loaded.
        card: UUID of its card; `None` on a processor.
    """
    if spec.fake_sensors is not None:
        return ThermalControl(open_sampler("cuda", str(spec.fake_card)), ThermalGovernor(spec.thermal))
    # A processor at 90 C is normal and protects itself, so its temperature is only shown.
    settings = spec.thermal if spec.device == "cuda" else THERMAL_OFF
    return ThermalControl(open_sampler(spec.device, card), ThermalGovernor(settings))
