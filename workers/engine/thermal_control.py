"""Connects the thermal governor to a worker: reads the sensors when that is due, and keeps what the
governor decides.

Reports alarms and changed bands. Does not sleep (the engine does) and sets nothing on the card.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from workers.engine.slice_stats import SliceStats
from workers.nvml.sensors import open_sampler
from workers.policy.thermal.governor import ThermalDecision, ThermalGovernor, ThermalState
from workers.readings import SensorReading
from workers.settings import THERMAL_OFF, WorkerSpec

#: Time between two measurements of a card's memory bandwidth: a faulty card gets slower over
#: minutes.
_BANDWIDTH_EVERY_S: Final = 30.0

#: The governor reduces the duty slightly long before a card is hot; from this duty on it is not
#: reported.
_UNLIMITED_DUTY: Final = 0.95


class ThermalControl:
    """The last sensor reading, and what the governor decided on it."""

    def __init__(self, spec: WorkerSpec, card: str | None) -> None:
        """Open the sensors that belong to a worker.

        `card` is the UUID of its card, `None` on a processor.
        """
        kind, card = (
            (spec.device, card) if spec.fake_sensors is None else ("cuda", str(spec.fake_card))
        )
        self._sampler = open_sampler(kind, card)
        # A processor at 90 C is normal and protects itself, so its temperature is only shown.
        self._governor = ThermalGovernor(spec.thermal if kind == "cuda" else THERMAL_OFF)
        self._state = self._governor.initial()
        self._bandwidth_at_s = time.monotonic()
        self.reading: SensorReading | None = None
        self.decision = ThermalDecision(band=None, duty=1.0, reason="")

    @property
    def slows(self) -> bool:
        """Whether the heat of the card limits the worker."""
        return self.decision.duty < _UNLIMITED_DUTY

    @property
    def alarmed(self) -> bool:
        """Whether an alarm is raised, such as a card that is gone."""
        return bool(self._state.alarms.standing)

    def sample(self, stats: SliceStats) -> None:
        """Read the sensors if that is due, and ask the governor."""
        now_s = time.monotonic()
        reading = self._sampler.sample_if_due(now_s)
        if reading is None:
            return
        self.reading = reading
        self._follow(self._governor.after_reading(self._state, reading, now_s), stats)

    def measure_bandwidth(self, measure: Callable[[], float | None], stats: SliceStats) -> None:
        """Measure the bandwidth of the card's memory if that is due.

        `measure` returns bytes per second, if it can.
        """
        now_s = time.monotonic()
        clock_mhz = None if self.reading is None else self.reading.memory_clock_mhz
        if clock_mhz is None or now_s - self._bandwidth_at_s < _BANDWIDTH_EVERY_S:
            return
        self._bandwidth_at_s = now_s
        bytes_per_s = measure()
        if bytes_per_s is not None:
            self._follow(
                self._governor.after_bandwidth(self._state, bytes_per_s, clock_mhz, now_s), stats
            )

    def _follow(self, decided: tuple[ThermalState, ThermalDecision], stats: SliceStats) -> None:
        before = self.decision
        self._state, self.decision = decided
        decision = self.decision
        for alarm in decision.alarms:
            stats.event(
                "alarm_raised" if alarm.raised else "alarm_cleared",
                alarm=alarm.name,
                text=alarm.text,
            )
        if decision.band is not None and before.band not in {None, decision.band}:
            temperature_c = None if self.reading is None else self.reading.temperature_c
            stats.event(
                "thermal_band",
                band=decision.band.value,
                temperature_c=temperature_c,
                duty=decision.duty,
            )
