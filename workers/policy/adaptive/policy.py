"""The default policy: the largest step that fits, before anything fails.

Makes a policy of the sizer: a ladder turns its one number into size and batch, or into the bytes
that a workload which fills its claim should hold. `workload.size` and `workload.batch` are the
largest step it ever runs. Below that it runs what fits, shrinks when other programs take memory,
and grows again. It starts at the learned limit of an earlier run, else where progressive allocation
ended. The one decision of this module is when to give memory back: whenever a step shrinks, because
otherwise the allocator would keep what the step no longer uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, assert_never

from workers.policy import base
from workers.policy.adaptive import sizer
from workers.policy.adaptive.footprint import Footprint
from workers.policy.adaptive.ladder import ladder_of
from workers.policy.adaptive.size_bounds import Bounds
from workers.policy.adaptive.sizer import Sizer
from workers.policy.base import (
    Decision,
    Emergency,
    Event,
    Growth,
    Pressure,
    Release,
    Run,
    StepOk,
    StepOom,
)
from workers.settings import Learned, MemorySettings, Scalar, WorkloadSpec
from workers.units import MIB

#: A workload that fills its claim grows only by so much: it writes all of its memory again.
_WORTH_REFILLING: Final = 0.01

#: How far what was obtained in one block may be from what a step then takes, on average.
_PROVEN_SPREAD: Final = 0.002

#: A step that shrinks by less leaves the device nothing worth having.
_WORTH_RELEASING: Final = 0.03

_MOST_BYTES: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveState:
    """What the adaptive policy remembers."""

    sizer: Sizer
    units: int
    """Of the last step asked for; 0 before the first and after an emergency."""
    calibrated: bool = True
    """Whether a step has shown what a workload that fills its claim takes beside it."""


class AdaptivePolicy:
    """The largest step that fits; refuses settings that leave no step at all with a ValueError."""

    name: Final = "adaptive"

    def __init__(self, memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> None:
        self._ladder = ladder_of(memory, workload, growth)
        self._growth = growth
        units = self._ladder.units
        self._bounds = Bounds(
            largest=units[-1],
            smallest=units[0],
            rungs=units,
            first=self._ladder.first,
            worth_growing=_WORTH_REFILLING if growth.fills_claim else 0.0,
            failures_per_minute=memory.failures_per_minute,
            exact_samples=True,  # the engine measures the allowed bytes itself, for the step that comes
            smallest_step=_in_words(self._ladder.run(units[0])),
        )

    @property
    def floor(self) -> Run:
        """The lowest rung; this one failing is an emergency."""
        return self._ladder.run(self._bounds.smallest)

    def initial(self, claim_bytes: int, learned: Learned | None) -> AdaptiveState:
        """Return the state of a worker that starts at what was learned, or at its claim, or small."""
        if not self._growth.fills_claim or claim_bytes < self._bounds.smallest:
            return AdaptiveState(sizer=sizer.cold(self._bounds, learned), units=0)
        # The climb of progressive allocation was a calibration: a byte held takes a byte, and that
        # many were there.
        start = Learned(size=claim_bytes) if learned is None else learned
        sized = sizer.cold(self._bounds, start)._replace(line=_filled(start.size, start.size))
        return AdaptiveState(sizer=sized, units=0, calibrated=False)

    def decide(self, state: AdaptiveState, event: Event) -> tuple[AdaptiveState, Decision]:
        """Return the state after `event` and what to do next."""
        bounds = self._bounds
        match event:
            case Pressure():
                return self._next(replace(state, units=0), event.at_s, event.allowed_bytes)
            case StepOk(partial=True):
                return self._next(state, event.at_s, event.allowed_bytes)
            case StepOk():
                sized = sizer.succeeded(
                    state.sizer, bounds, event.at_s, state.units, event.peak_bytes
                )
                if not state.calibrated:
                    sized = sized._replace(line=_filled(state.units, event.peak_bytes))
                return self._next(
                    AdaptiveState(sizer=sized, units=state.units), event.at_s, event.allowed_bytes
                )
            case StepOom():
                sized = sizer.failed(
                    state.sizer, bounds, event.at_s, state.units, event.at_least_bytes
                )
                return self._next(
                    replace(state, sizer=sized, units=0), event.at_s, event.allowed_bytes
                )
            case _:
                assert_never(event)

    def learned(self, state: AdaptiveState) -> Learned | None:
        """Return the last good rung and the footprint."""
        return sizer.learned_of(state.sizer)

    def dump(self, state: AdaptiveState) -> dict[str, Scalar]:
        """Return what a new process in the same slot needs, without times: its clock starts again."""
        size, line = state.sizer.bracket.good, state.sizer.line
        return {
            "policy": self.name,
            "units": size,
            "fixed_bytes": None if line is None else line.fixed_bytes,
            "unit_bytes": None if line is None else line.unit_bytes,
        }

    def load(self, data: Mapping[str, Scalar]) -> AdaptiveState:
        """Return the state that `dump` wrote, see `Policy.load`."""
        base.check_keys(data, self.name, ("units", "fixed_bytes", "unit_bytes"))
        learned = None
        if data["units"] is not None:
            learned = Learned(
                size=base.whole(data, "units", 1, _MOST_BYTES),
                fixed_bytes=_bytes(data, "fixed_bytes"),
                unit_bytes=_bytes(data, "unit_bytes"),
            )
        return AdaptiveState(sizer=sizer.cold(self._bounds, learned), units=0)

    def _needed_bytes(self, run: Run) -> int | None:
        return (
            self._growth.needed_bytes(run.size, run.batch)
            if run.hold_bytes is None
            else run.hold_bytes
        )

    def _within(self, allowed_bytes: int) -> int | None:
        if self._growth.fills_claim:
            return (
                self._bounds.down(allowed_bytes) if allowed_bytes >= self._bounds.smallest else None
            )
        return self._ladder.within(allowed_bytes, self._growth.needed_bytes)

    def _too_little(self, allowed_bytes: int) -> str:
        needed_bytes = self._needed_bytes(self.floor) or 0
        return (
            f"{self._bounds.smallest_step} needs {needed_bytes / MIB:.1f} MiB, "
            f"{allowed_bytes / MIB:.1f} MiB are there"
        )

    def _next(
        self, state: AdaptiveState, at_s: float, allowed_bytes: int | None
    ) -> tuple[AdaptiveState, Decision]:
        sized, units = sizer.asked(state.sizer, self._bounds, at_s, allowed_bytes)
        if units is None:
            return replace(state, sizer=sized, units=0), Emergency(reason=sized.reason)
        run = self._ladder.run(units)
        needed_bytes = self._needed_bytes(run)
        if allowed_bytes is not None and needed_bytes is not None and needed_bytes > allowed_bytes:
            # The workload says what it needs; the sizer would have to learn it by failing.
            within = self._within(allowed_bytes)
            if within is None:
                return replace(state, sizer=sized, units=0), Emergency(
                    reason=self._too_little(allowed_bytes)
                )
            units, run = within, self._ladder.run(within)
        if run.hold_bytes is None and units < state.units * (1.0 - _WORTH_RELEASING):
            return replace(state, sizer=sized, units=0), Release()
        if sizer.is_probe(sized, units):
            run = replace(run, is_probe=True)
        return replace(state, sizer=sized, units=units), run


def _in_words(smallest: Run) -> str:
    held = "" if smallest.hold_bytes is None else f", holding {smallest.hold_bytes / MIB:.1f} MiB"
    return f"the smallest step (size {smallest.size} batch {smallest.batch}{held})"


def _filled(hold_bytes: int, peak_bytes: int) -> Footprint:
    """Return the footprint of a workload that fills its claim: each byte of that, and what it takes
    beside.
    """
    far_bytes = min(hold_bytes, peak_bytes) // 2
    return Footprint(
        here_x=hold_bytes,
        here_bytes=peak_bytes,
        far_x=hold_bytes - far_bytes,
        far_bytes=peak_bytes - far_bytes,
        unit_bytes=1.0,
        spread=_PROVEN_SPREAD,
        steps=sizer.SETTLED_STEPS,  # obtained in one block, so it is found
    )


def _bytes(data: Mapping[str, Scalar], key: str) -> float | None:
    value = data[key]
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value < _MOST_BYTES
    ):
        raise ValueError(f"{key} must be a number of bytes, not {value!r}")
    return float(value)
