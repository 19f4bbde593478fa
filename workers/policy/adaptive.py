"""The default policy: the largest step that fits, before anything fails.

Makes a policy of the sizer: a ladder turns its one number into size and batch, or into the bytes
that a workload which fills its claim should hold. A workload with stages has a ladder and a sizer
for each level. A level is left for the next one where not even its smallest step fits, and entered
again when memory for that step is there. `workload.size` and `workload.batch` are the
largest step it ever runs. Below that it runs what fits, shrinks when other programs take memory,
and grows again. It starts at the learned limit of an earlier run, else where progressive allocation
ended. Whenever a step shrinks, memory is given back first: otherwise the allocator would keep what
the step no longer uses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
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
    Stages,
    StepOk,
    StepOom,
)
from workers.policy.memory_needed import Footprint
from workers.policy.memory_seen import MINUTE_S
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

    sizers: tuple[Sizer, ...]
    """Of each level."""
    level: int = 0
    units: int = 0
    """Of the last step asked for; 0 before the first and after an emergency."""
    held_bytes: float = 0.0
    """What is held between two steps at level 0; 0 before it was measured."""
    calibrated: bool = True
    """Whether a step has shown what a workload that fills its claim takes beside it."""

    @property
    def sizer(self) -> Sizer:
        """That of the level of now."""
        return self.sizers[self.level]

    def with_sizer(self, level: int, sizer: Sizer) -> AdaptiveState:
        """Return the state with another sizer of a level."""
        return replace(self, sizers=(*self.sizers[:level], sizer, *self.sizers[level + 1 :]))


class AdaptivePolicy:
    """The largest step that fits; refuses settings that leave no step at all with a ValueError."""

    name: Final = "adaptive"

    def __init__(self, memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> None:
        self._ladders = ladders_of(memory, workload, growth)
        self._growth = growth
        self._keeps = None if growth.stages is None else growth.stages.keeps
        self._bounds = [_bounds_of(ladder, memory, growth) for ladder in self._ladders]
        self.floor = self._ladders[-1].run(self._ladders[-1].units[0])

    def initial(self, claim_bytes: int, learned: Learned | None) -> AdaptiveState:
        """Return the state of a worker that starts at what was learned, at its claim, or small."""
        first, *others = self._bounds
        cold = [Sizer.cold(bounds) for bounds in others]
        if not self._growth.fills_claim or claim_bytes < first.smallest:
            return AdaptiveState(sizers=(Sizer.cold(first, learned), *cold))
        # The climb of progressive allocation was a calibration: a byte held takes a byte, and that
        # many were there.
        start = Learned(size=claim_bytes) if learned is None else learned
        sizer = Sizer.cold(first, start)._replace(line=_filled(start.size, start.size))
        return AdaptiveState(sizers=(sizer,), calibrated=False)

    def decide(self, state: AdaptiveState, event: Event) -> tuple[AdaptiveState, Decision]:
        """Return the state after `event` and what to do next."""
        before_units, before_level = state.units, state.level
        state = self._noted(state, event)
        allowed_bytes, at_s, reason = event.allowed_bytes, event.at_s, ""
        for level, (bounds, ladder) in enumerate(zip(self._bounds, self._ladders, strict=True)):
            if level < before_level and not self._may_return(state, level, event):
                continue
            if allowed_bytes is not None and allowed_bytes < self._kept_bytes(state, level):
                kept_mib, allowed_mib = self._kept_bytes(state, level) / MIB, allowed_bytes / MIB
                reason = f"{bounds.smallest_step} needs more than is free"
                reason += f" ({kept_mib:.1f} MiB, allowed {allowed_mib:.1f})"
                continue
            sizer, now = state.sizers[level].next_size(bounds, at_s, allowed_bytes)
            state, reason = state.with_sizer(level, sizer), sizer.reason
            needs_mib = sizer.needs_bytes(bounds, bounds.smallest) / MIB
            if now is None and needs_mib and allowed_bytes is not None:
                reason += f" ({needs_mib:.1f} MiB, allowed {allowed_bytes / MIB:.1f})"
            if now is not None and allowed_bytes is not None:
                # The workload may say what it needs; the sizer would have to learn it by failing.
                now = ladder.within(allowed_bytes, now)
                needed_mib = (ladder.needs(ladder.units[0]) or 0) / MIB
                reason = (
                    f"{bounds.smallest_step} needs {needed_mib:.1f} MiB, "
                    f"{allowed_bytes / MIB:.1f} MiB are there"
                )
            if now is not None:
                run = replace(ladder.run(now), is_probe=sizer.is_probe(now))
                is_less = level > before_level or now < before_units * (1.0 - WORTH_TRYING)
                if isinstance(event, StepOk) and is_less and run.hold_bytes is None:
                    return replace(state, level=level, units=0), Release()
                return replace(state, level=level, units=now), run
        return replace(state, units=0), Emergency(reason=reason)

    def _noted(self, state: AdaptiveState, event: Event) -> AdaptiveState:
        """Return the state that knows how the last step went."""
        level, units, bounds = state.level, state.units, self._bounds[state.level]
        if isinstance(event, StepOom):
            sizer = state.sizer.failed(bounds, event.at_s, units, event.at_least_bytes)
            return state.with_sizer(level, sizer)
        if not isinstance(event, StepOk) or event.partial:
            return state
        sizer = state.sizer.succeeded(bounds, event.at_s, units, event.peak_bytes)
        if not state.calibrated:
            sizer = sizer._replace(line=_filled(units, event.peak_bytes))
        held_bytes = 0.0 if self._keeps is None else event.held_bytes / self._keeps[level]
        return replace(state.with_sizer(level, sizer), held_bytes=held_bytes, calibrated=True)

    def _kept_bytes(self, state: AdaptiveState, level: int) -> float:
        """Return what stays at a level that was never measured."""
        if self._keeps is None or state.sizers[level].line is not None:
            return 0.0
        return state.held_bytes * self._keeps[level]

    def _may_return(self, state: AdaptiveState, level: int, event: Event) -> bool:
        """Whether a level that was left may have memory again, and another failure is allowed."""
        bounds, allowed_bytes = self._bounds[level], event.allowed_bytes
        lately = [
            at_s
            for sizer in state.sizers
            for at_s, _ in sizer.failures
            if event.at_s < at_s + MINUTE_S
        ]
        return (
            allowed_bytes is not None
            and len(lately) < bounds.failures_per_minute
            and state.sizers[level].may_fit_again(bounds, event.at_s, allowed_bytes)
        )

    def learned(self, state: AdaptiveState) -> Learned | None:
        """Return the last good step and the footprint; nothing of a level that saves memory."""
        return None if state.level else state.sizer.learned

    def dump(self, state: AdaptiveState) -> dict[str, Scalar]:
        """Return what a new process in the same slot needs, without times: its clock is another."""
        dumped: dict[str, Scalar] = {"policy": self.name, "level": state.level}
        for sizer, (units, fixed_bytes, unit_bytes) in zip(state.sizers, self._keys(), strict=True):
            line = sizer.line
            dumped[units] = sizer.bracket.good
            dumped[fixed_bytes] = None if line is None else line.fixed_bytes
            dumped[unit_bytes] = None if line is None else line.unit_bytes
        return dumped

    def load(self, data: Mapping[str, Scalar]) -> AdaptiveState:
        """Return the state that `dump` wrote, see `Policy.load`."""
        base.check_keys(data, self.name, ["level", *(key for keys in self._keys() for key in keys)])
        sizers = []
        for bounds, (units, fixed_bytes, unit_bytes) in zip(
            self._bounds, self._keys(), strict=True
        ):
            learned = None
            if data[units] is not None:
                learned = Learned(
                    size=base.whole(data, units, 1, 1 << 63),
                    fixed_bytes=_bytes(data, fixed_bytes),
                    unit_bytes=_bytes(data, unit_bytes),
                )
            sizers.append(Sizer.cold(bounds, learned))
        level = base.whole(data, "level", 0, len(sizers) - 1)
        return AdaptiveState(sizers=tuple(sizers), level=level)

    def _keys(self) -> list[tuple[str, str, str]]:
        """Return the keys in which a level is written down."""
        ends = ["", *(f"_{level}" for level in range(1, len(self._bounds)))]
        return [(f"units{end}", f"fixed_bytes{end}", f"unit_bytes{end}") for end in ends]


def _bounds_of(ladder: Ladder, memory: MemorySettings, growth: Growth) -> Bounds:
    floor = ladder.run(ladder.units[0])
    held = "" if floor.hold_bytes is None else f", holding {floor.hold_bytes / MIB:.1f} MiB"
    saves = f", level {floor.level}" if floor.level else ""
    return Bounds(
        largest=ladder.units[-1],
        smallest=ladder.units[0],
        rungs=ladder.units,
        first=ladder.first,
        # A workload that fills its claim writes all of its memory again when it grows.
        worth_growing=0.01 if growth.fills_claim else 0.0,
        failures_per_minute=memory.failures_per_minute,
        # The engine measures the allowed bytes itself, for the step that comes.
        exact_samples=True,
        smallest_step=f"the smallest step (size {floor.size} batch {floor.batch}{saves}{held})",
    )


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


def ladders_of(memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> list[Ladder]:
    """Return the ladder of a workload, or one for each level of its stages: bytes held where it
    fills its claim, else sizes and batches.

    Raises:
        ValueError: It fills its claim and does not say what a size needs, or its batches are none
            or not in order.
    """
    if growth.stages is not None:
        batches = growth.stages.batches
        if not batches or batches[0] < 1 or any(low >= high for low, high in pairwise(batches)):
            raise ValueError(
                f"the batches of workload {workload.name!r} must ascend from 1 or more, not "
                f"{batches}"
            )
        return [
            _staged(workload, growth, growth.stages, level)
            for level in range(len(growth.stages.keeps))
        ]
    return [
        _filling(memory, workload, growth)
        if growth.fills_claim
        else _stepping(memory, workload, growth)
    ]


def _staged(workload: WorkloadSpec, growth: Growth, stages: Stages, level: int) -> Ladder:
    """Rungs of batches, at one level."""

    def run(batch: int) -> Run:
        is_largest = not level and batch == stages.batches[-1]
        return Run(size=workload.size, batch=batch, level=level, is_largest=is_largest)

    return Ladder(units=stages.batches, run=run, needed_bytes=growth.needed_bytes)


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
