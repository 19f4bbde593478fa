"""The default policy: runs the largest step that fits in memory, before anything fails.

Builds on the sizer: a ladder maps its one number to size and batch. A workload with stages has a
ladder and a sizer for each level. The policy goes to the next level if not even the smallest step
of a level fits, and returns once memory for that step is available. `workload.size` and
`workload.batch` are the largest step that it runs. Below that it runs what fits, shrinks when other
programs take memory, and grows again. It starts at the learned limit of an earlier run, otherwise
small. Before a smaller step the engine releases memory: otherwise the allocator would keep what the
step no longer uses.

A failed step that held far less than it was allowed did not lack memory. It is retried unchanged up
to `CONTRADICTIONS` times before the failure counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from workers.policy.base import Needs, Run
from workers.policy.sizer import Sizer
from workers.policy.sizes_tried import WORTH_TRYING, Bounds
from workers.settings import Learned, MemorySettings, PolicyState, WorkloadSpec
from workers.units import MIB

#: Sizes are multiples of this: whole tiles on every tensor core so far.
TILE: Final = 64

#: Smallest distance of two rungs, as a share of the lower one: a finer change is not worth it.
_FINEST: Final = 1 / 256

#: The failure of a part that would have held less than this share of the allowed memory is
#: contradictory.
_CONTRADICTS: Final = 0.5

#: Number of contradictory failures that are ignored until a part succeeds.
CONTRADICTIONS: Final = 3


Ladder = Mapping[int, Run]
"""The sizes and batches that a policy may request, as rungs with growing memory.

A key is a number of work units (size^size_power x batch^batch_power, in which memory grows
linearly), which the sizer moves; its value is the step. Not empty, and ascending.
"""


@dataclass(slots=True, kw_only=True)
class _Level:
    """The steps of a workload at one level, and what the sizer knows about them."""

    ladder: Ladder
    keeps: float
    """See `Stages.keeps`."""
    sizer: Sizer

    def kept_bytes(self, held_bytes: float) -> float:
        """Return the memory kept between parts at this level, from that at level 0; 0 once the
        level was measured.
        """
        return held_bytes * self.keeps if self.sizer.line is None else 0.0


class AdaptivePolicy:
    """Chooses the largest step that fits; raises ValueError if the settings allow no step."""

    name: Final = "adaptive"

    def __init__(
        self,
        memory: MemorySettings,
        spec: WorkloadSpec,
        needs: Needs,
        *,
        clock: Callable[[], float],
        held_bytes: Callable[[], int],
        learned: Learned | None = None,
    ) -> None:
        """Start without knowledge, or with what an earlier run has learned."""
        stages = needs.stages()
        keeps = (1.0,) if stages is None else stages.keeps
        ladders = ladders_of(memory, spec, needs)
        first = _first_of(ladders[0], spec, needs) if stages is None else None
        bounds = [_bounds_of(ladder, first, memory) for ladder in ladders]
        known = [learned, *[None] * len(ladders)]
        self._levels = [
            _Level(ladder=ladder, keeps=share, sizer=Sizer(each, before, clock=clock))
            for ladder, share, each, before in zip(ladders, keeps, bounds, known, strict=False)
        ]
        self._clock, self._needs = clock, needs
        self._keeps_state, self._measure_held = stages is not None, held_bytes
        self._level = self._units = 0
        """Level and units of the last requested part; 0 units before the first and after an
        emergency.
        """
        self._held_bytes = 0.0
        """Memory held between two parts at level 0; 0 before it was measured."""
        self._beside_bytes = held_bytes() if needs.needs_are_exact else 0
        """Memory beyond the stated need of a workload with exact needs, such as a library's
        workspace.
        """
        self._allowed_bytes: int | None = None
        """The last measured value."""
        self._has_failed = False
        """Whether the last part ran out of memory: then all unused memory was released."""
        self._contradictions = 0
        """Contradictory failures that were ignored since the last success."""
        self.reason = ""

    def next(self, allowed_bytes: int | None) -> Run | None:
        """Return the next part, at the first level at which one fits."""
        if allowed_bytes is not None:
            self._allowed_bytes = allowed_bytes
        for number, level in enumerate(self._levels):
            if number < self._level and not self._may_return(level, allowed_bytes):
                continue
            kept_bytes = level.kept_bytes(self._held_bytes)
            if allowed_bytes is not None and allowed_bytes < kept_bytes:
                self.reason = (
                    f"{level.sizer.bounds.smallest_step} needs more than is free"
                    f" ({kept_bytes / MIB:.1f} MiB, allowed {allowed_bytes / MIB:.1f})"
                )
                continue
            units = self._units_at(level, allowed_bytes)
            if units is not None:
                is_less = number > self._level or units < self._units * (1.0 - WORTH_TRYING)
                self._level, self._units, self.reason = number, units, ""
                return replace(
                    level.ladder[units],
                    is_probe=level.sizer.is_probe(units),
                    releases_first=is_less and not self._has_failed,
                )
        self._units = 0
        return None

    def _units_at(self, level: _Level, allowed_bytes: int | None) -> int | None:
        """Return the units that fit at a level; `None` and set `reason` if nothing fits."""
        bounds = level.sizer.bounds
        units = level.sizer.next(allowed_bytes)
        if allowed_bytes is None:
            self.reason = level.sizer.reason
            return units
        allowed_mib = allowed_bytes / MIB
        if units is None:
            needs_mib = level.sizer.needs_bytes(bounds.smallest) / MIB
            known = f" ({needs_mib:.1f} MiB, allowed {allowed_mib:.1f})" if needs_mib else ""
            self.reason = level.sizer.reason + known
            return None
        # A need that the workload states need not be learned by failing.
        limit_bytes = allowed_bytes - self._beside_bytes
        if self._stated_bytes(level.ladder[units]) <= limit_bytes:
            return units
        place = bisect_right(
            bounds.rungs, limit_bytes, key=lambda units: self._stated_bytes(level.ladder[units])
        )
        if place:
            return bounds.rungs[place - 1]
        needed_mib = self._stated_bytes(level.ladder[bounds.smallest]) / MIB
        self.reason = (
            f"{bounds.smallest_step} needs {needed_mib:.1f} MiB, {allowed_mib:.1f} MiB are there"
        )
        return None

    def _stated_bytes(self, run: Run) -> int:
        """Return the memory that the workload states for a part; 0 if it states none."""
        return self._needs.needed_bytes(run.size, run.batch) or 0

    def succeeded(self, run: Run, peak_bytes: int | None, is_partial: bool) -> None:
        """Record that a part succeeded."""
        self._has_failed, self._contradictions = False, 0
        if is_partial:
            return
        level = self._levels[self._level]
        if self._needs.needs_are_exact:
            peak_bytes = self._needed_bytes(run)
        level.sizer.succeeded(self._units, peak_bytes)
        if self._keeps_state:
            self._held_bytes = self._measure_held() / level.keeps

    def _needed_bytes(self, run: Run) -> int:
        """Return the need of a part as stated by the workload, without the claim that fills its
        share.
        """
        needed_bytes = self._stated_bytes(run)
        held_bytes = max(needed_bytes, self._needs.claim_bytes or 0)
        self._beside_bytes = max(0, self._measure_held() - held_bytes)
        return needed_bytes + self._beside_bytes

    def failed(self, _run: Run, at_least_bytes: int | None) -> None:
        """Record that a part ran out of memory, unless the figures contradict it."""
        self._has_failed = True
        shown_bytes, allowed_bytes = at_least_bytes or 0, self._allowed_bytes or 0
        is_contradicted = 0 < shown_bytes < _CONTRADICTS * allowed_bytes
        if is_contradicted and self._contradictions < CONTRADICTIONS:
            self._contradictions += 1
            return
        self._levels[self._level].sizer.failed(self._units, at_least_bytes)

    def _may_return(self, level: _Level, allowed_bytes: int | None) -> bool:
        """Return whether an earlier level may fit again and another failure is allowed."""
        lately = sum(each.sizer.failures_lately() for each in self._levels)
        return (
            allowed_bytes is not None
            and lately < level.sizer.bounds.failures_per_minute
            and level.sizer.may_fit_again(allowed_bytes)
        )

    @property
    def learned(self) -> Learned | None:
        """The last good step and its footprint; `None` at a level that saves memory."""
        return None if self._level else self._levels[0].sizer.learned

    @property
    def state(self) -> PolicyState:
        """The level, and what is known about each level, also after failures."""
        learned = tuple(level.sizer.known for level in self._levels)
        return PolicyState(level=self._level, learned=learned)

    def resume(self, state: PolicyState) -> None:
        """Continue with the state of an earlier process; see `Policy.resume`."""
        if len(state.learned) != len(self._levels):
            raise ValueError(f"this state has {len(state.learned)} levels, not {len(self._levels)}")
        self._level = min(state.level, len(self._levels) - 1)
        for level, known in zip(self._levels, state.learned, strict=True):
            level.sizer = Sizer(level.sizer.bounds, known, clock=self._clock)


def _bounds_of(ladder: Ladder, first: int | None, memory: MemorySettings) -> Bounds:
    rungs = tuple(ladder)
    floor = ladder[rungs[0]]
    saves = f", level {floor.level}" if floor.level else ""
    return Bounds(
        largest=rungs[-1],
        smallest=rungs[0],
        rungs=rungs,
        first=first,
        worth_growing=0.0,
        failures_per_minute=memory.failures_per_minute,
        # The engine measures the allowed bytes for each step.
        exact_samples=True,
        smallest_step=f"the smallest step (size {floor.size} batch {floor.batch}{saves})",
    )


def ladders_of(memory: MemorySettings, spec: WorkloadSpec, needs: Needs) -> list[Ladder]:
    """Return the ladder of a workload, or one for each level of its stages.

    Raises:
        ValueError: The batches of its stages are empty or not ascending.
    """
    stages = needs.stages()
    if stages is None:
        return [_stepping(memory, spec, needs)]
    batches = stages.batches
    if not batches or batches[0] < 1 or any(low >= high for low, high in pairwise(batches)):
        raise ValueError(
            f"the batches of workload {spec.name!r} must ascend from 1 or more, not {batches}"
        )
    return [
        {
            batch: Run(
                size=spec.size,
                batch=batch,
                level=level,
                is_largest=not level and batch == batches[-1],
            )
            for batch in batches
        }
        for level in range(len(stages.keeps))
    ]


def _stepping(memory: MemorySettings, spec: WorkloadSpec, needs: Needs) -> Ladder:
    """Return the rungs from the floors to the requested size and batch.

    A number on which memory does not depend keeps its value. If both matter, the batch shrinks
    first.
    """
    sizes = [spec.size]
    if needs.size_power > 0:
        sizes = [*_spread(min(memory.size_floor, spec.size), spec.size, TILE)]
    batches = [spec.batch]
    if needs.batch_power > 0:
        batches = [*_spread(min(memory.batch_floor, spec.batch), spec.batch, 1)]
    path = [(size, batches[0]) for size in sizes] + [(sizes[-1], batch) for batch in batches[1:]]
    # Of two steps with the same units the larger one stays.
    return {_units(size, batch, needs): Run(size=size, batch=batch) for size, batch in path}


def _first_of(ladder: Ladder, spec: WorkloadSpec, needs: Needs) -> int | None:
    """Return the rung to start at; `None` if there is no better one than a small share."""
    rungs = list(ladder)
    if needs.needs_are_exact:
        return rungs[-1]  # a stated need is exact
    # The smallest batch at the full size: a change of size makes most workloads rebuild a model.
    at = next(at for at, run in enumerate(ladder.values()) if run.size == spec.size)
    return rungs[at] if rungs[at] < rungs[-1] else None


def _units(size: int, batch: int, needs: Needs) -> int:
    units: float = float(size) ** needs.size_power * float(batch) ** needs.batch_power
    return max(1, round(units))


def _spread(lowest: int, highest: int, quantum: int) -> Iterator[int]:
    """Yield `lowest`, then multiples of `quantum` at least `_FINEST` apart, then `highest`."""
    value = lowest
    while value < highest:
        yield value
        value = max(value + 1, int(value * (1 + _FINEST))) + quantum - 1
        value -= value % quantum
    yield highest
