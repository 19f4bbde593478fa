"""The default policy: the largest step that fits, before anything fails.

Makes a policy of the sizer: a ladder turns its one number into size and batch, or into the bytes
that a workload which fills its claim should hold. `workload.size` and `workload.batch` are the
largest step it ever runs. Below that it runs what fits, shrinks when other programs take memory,
and grows again. It starts at the learned limit of an earlier run, else where progressive allocation
ended. Whenever a step shrinks, memory is given back first: otherwise the allocator would keep what
the step no longer uses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from workers.policy import base
from workers.policy.base import (
    Decision,
    Emergency,
    Event,
    Growth,
    Release,
    Run,
    Rung,
    StepOk,
    StepOom,
)
from workers.policy.memory_needed import Footprint
from workers.policy.sizer import SETTLED_STEPS, Sizer
from workers.policy.sizes_tried import WORTH_TRYING, Bounds
from workers.settings import Learned, MemorySettings, Scalar, WorkloadSpec
from workers.units import MIB

#: How far what was obtained in one block may be from what a step then takes, on average.
_PROVEN_SPREAD: Final = 0.002

#: Sizes are a multiple of this: whole tiles of every tensor core so far.
TILE: Final = 64

#: No rung is nearer to the one below than this share of it: a finer one would not be worth a
#: change.
_FINEST: Final = 1 / 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveState:
    """What the adaptive policy remembers."""

    sizer: Sizer
    units: int = 0
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
        self.floor = floor = self._ladder.run(units[0])
        held = "" if floor.hold_bytes is None else f", holding {floor.hold_bytes / MIB:.1f} MiB"
        self._bounds = Bounds(
            largest=units[-1],
            smallest=units[0],
            rungs=units,
            first=self._ladder.first,
            # A workload that fills its claim writes all of its memory again when it grows.
            worth_growing=0.01 if growth.fills_claim else 0.0,
            failures_per_minute=memory.failures_per_minute,
            # The engine measures the allowed bytes itself, for the step that comes.
            exact_samples=True,
            smallest_step=f"the smallest step (size {floor.size} batch {floor.batch}{held})",
        )

    def initial(self, claim_bytes: int, learned: Learned | None) -> AdaptiveState:
        """Return the state of a worker that starts at what was learned, at its claim, or small."""
        if not self._growth.fills_claim or claim_bytes < self._bounds.smallest:
            return AdaptiveState(sizer=Sizer.cold(self._bounds, learned))
        # The climb of progressive allocation was a calibration: a byte held takes a byte, and that
        # many were there.
        start = Learned(size=claim_bytes) if learned is None else learned
        sizer = Sizer.cold(self._bounds, start)._replace(line=_filled(start.size, start.size))
        return AdaptiveState(sizer=sizer, calibrated=False)

    def decide(self, state: AdaptiveState, event: Event) -> tuple[AdaptiveState, Decision]:
        """Return the state after `event` and what to do next."""
        sizer, units, bounds = state.sizer, state.units, self._bounds
        calibrated = state.calibrated
        if isinstance(event, StepOom):
            sizer = sizer.failed(bounds, event.at_s, units, event.at_least_bytes)
        elif isinstance(event, StepOk) and not event.partial:
            sizer = sizer.succeeded(bounds, event.at_s, units, event.peak_bytes)
            if not calibrated:
                sizer, calibrated = sizer._replace(line=_filled(units, event.peak_bytes)), True
        sizer, now = sizer.next_size(bounds, event.at_s, event.allowed_bytes)
        reason = sizer.reason
        if now is not None and event.allowed_bytes is not None:
            # The workload may say what it needs; the sizer would have to learn it by failing.
            now = self._ladder.within(event.allowed_bytes, now)
            needed_mib = (self._ladder.needs(self._ladder.units[0]) or 0) / MIB
            reason = (
                f"{bounds.smallest_step} needs {needed_mib:.1f} MiB, "
                f"{event.allowed_bytes / MIB:.1f} MiB are there"
            )

        decision: Decision
        if now is None:
            decision = Emergency(reason=reason)
        else:
            run = self._ladder.run(now)
            shrinks = isinstance(event, StepOk) and now < units * (1.0 - WORTH_TRYING)
            decision = replace(run, is_probe=sizer.is_probe(now))
            if shrinks and run.hold_bytes is None:
                decision, now = Release(), 0
        return AdaptiveState(sizer=sizer, units=now or 0, calibrated=calibrated), decision

    def learned(self, state: AdaptiveState) -> Learned | None:
        """Return the last good rung and the footprint."""
        return state.sizer.learned

    def dump(self, state: AdaptiveState) -> dict[str, Scalar]:
        """Return what a new process in the same slot needs, without times: its clock is another."""
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
                size=base.whole(data, "units", 1, 1 << 63),
                fixed_bytes=_bytes(data, "fixed_bytes"),
                unit_bytes=_bytes(data, "unit_bytes"),
            )
        return AdaptiveState(sizer=Sizer.cold(self._bounds, learned))


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
        steps=SETTLED_STEPS,  # obtained in one block, so it is found
    )


def _bytes(data: Mapping[str, Scalar], key: str) -> float | None:
    value = data[key]
    if value is None:
        return None
    if isinstance(value, str | bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{key} must be a number of bytes, not {value!r}")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The sizes and batches a policy may ask for, as one row of rungs with growing memory.

    A workload moves two numbers, the sizer one. Each rung is a number of work units
    (size^size_power x batch^batch_power, with which memory grows in a straight line) and the step
    that it stands for. At least one, in ascending order.
    """

    units: tuple[int, ...]
    """Of each rung; strictly ascending."""
    run: Callable[[int], Run]
    """From units, which must be those of a rung, to the step."""
    needed_bytes: Callable[[int, int], int | None]
    """What the workload says that a size and batch need."""
    first: int | None = None
    """Rung of a gentle start; `None` where the ladder knows none."""

    def needs(self, units: int) -> int | None:
        """Return what a rung holds, or is said to need; `None` if the workload does not say."""
        run = self.run(units)
        return self.needed_bytes(run.size, run.batch) if run.hold_bytes is None else run.hold_bytes

    def within(self, limit_bytes: int, units: int) -> int | None:
        """Return the units of the highest rung up to these that needs no more than `limit_bytes`,
        as far as is said; `None`: not even one.
        """

        def too_much(units: int) -> bool:
            return (self.needs(units) or 0) > limit_bytes

        if not too_much(units):
            return units
        place = bisect_left(self.units, True, key=too_much)
        return self.units[place - 1] if place else None


def ladder_of(memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> Ladder:
    """Return the ladder of a workload: its own rungs, bytes held where it fills its claim, else
    sizes and batches.

    Raises:
        ValueError: It fills its claim and does not say what a size needs, or its rungs are none or
            not in order.
    """
    if growth.rungs is not None:
        return _offered(workload, growth.rungs, growth)
    return (
        _filling(memory, workload, growth)
        if growth.fills_claim
        else _stepping(memory, workload, growth)
    )


def _offered(workload: WorkloadSpec, rungs: Sequence[Rung], growth: Growth) -> Ladder:
    """Rungs as the workload offers them."""
    units = tuple(rung.units for rung in rungs)
    if not units or units[0] < 1 or any(lower >= upper for lower, upper in pairwise(units)):
        raise ValueError(
            f"the rungs of workload {workload.name!r} must have ascending units from 1 up, not "
            f"{units}"
        )
    steps = {
        rung.units: Run(size=workload.size, batch=rung.batch, level=rung.level, units=rung.units)
        for rung in rungs
    }
    return Ladder(units=units, run=steps.__getitem__, needed_bytes=growth.needed_bytes)


def _filling(memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> Ladder:
    """Rungs of bytes. The size is the largest that fits into them, up to the one asked for."""
    sizes = [*_spread(min(memory.size_floor, workload.size), workload.size, TILE)]
    said = (growth.needed_bytes(size, workload.batch) for size in sizes)
    needs = [needed_bytes for needed_bytes in said if needed_bytes is not None]
    if len(needs) < len(sizes):
        raise ValueError(
            f"workload {workload.name!r} fills its claim, so its needed_bytes must say what a size "
            "needs"
        )
    lowest, highest = min(needs[0], growth.most_bytes), growth.most_bytes

    def run(units: int) -> Run:
        size = sizes[max(0, bisect_right(needs, units) - 1)]
        return Run(size=size, batch=workload.batch, hold_bytes=units)

    units = tuple(_spread(lowest, highest, 1))
    return Ladder(units=units, run=run, needed_bytes=growth.needed_bytes)


def _stepping(memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> Ladder:
    """Rungs of steps: what does not move memory stays as asked.

    Of two that do, the batch shrinks first.
    """
    sizes = [workload.size]
    if growth.size_power > 0:
        sizes = [*_spread(min(memory.size_floor, workload.size), workload.size, TILE)]
    batches = [workload.batch]
    if growth.batch_power > 0:
        batches = [*_spread(min(memory.batch_floor, workload.batch), workload.batch, 1)]
    path = [(size, batches[0]) for size in sizes] + [(sizes[-1], batch) for batch in batches[1:]]
    # Of two that take the same the larger.
    steps = {_units(size, batch, growth): Run(size=size, batch=batch) for size, batch in path}
    # The smallest batch at the full size: a change of size makes most workloads rebuild their
    # model.
    first = _units(sizes[-1], batches[0], growth) if len(batches) > 1 else None
    return Ladder(
        units=tuple(steps), run=steps.__getitem__, needed_bytes=growth.needed_bytes, first=first
    )


def _units(size: int, batch: int, growth: Growth) -> int:
    units: float = float(size) ** growth.size_power * float(batch) ** growth.batch_power
    return max(1, round(units))


def _spread(lowest: int, highest: int, quantum: int) -> Iterator[int]:
    """Yield `lowest`, then multiples of `quantum` as fine as is worth while, then `highest`."""
    value = lowest
    while value < highest:
        yield value
        value = max(value + 1, int(value * (1 + _FINEST))) + quantum - 1
        value -= value % quantum
    yield highest
