"""The default policy: the largest step that fits, before anything fails.

Makes a policy of the sizer: a ladder turns its one number into size and batch. A workload with
stages has a ladder and a sizer for each level. A level is left for the next one where not even its
smallest step fits, and entered again when memory for that step is there. `workload.size` and
`workload.batch` are the largest step it ever runs. Below that it runs what fits, shrinks when other
programs take memory, and grows again. It starts at the learned limit of an earlier run, else small.
Whenever a step shrinks, memory is given back first: otherwise the allocator would keep what the
step no longer uses.

A failure that held far less than was allowed is no lack of memory for that step. It is tried again
at once, a few times, and only then believed.
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

#: Sizes are a multiple of this: whole tiles of every tensor core so far.
TILE: Final = 64

#: No rung is nearer to the one below than this share of it: a finer one would not be worth a
#: change.
_FINEST: Final = 1 / 256

#: A failed part that would have held less than this share of what was allowed contradicts itself.
_CONTRADICTS: Final = 0.5

#: So many failures that contradict themselves are not believed until a part ends well.
CONTRADICTIONS: Final = 3


Ladder = Mapping[int, Run]
"""The sizes and batches a policy may ask for, as one row of rungs with growing memory.

A workload moves two numbers, the sizer one. Each rung is a number of work units (size^size_power x
batch^batch_power, with which memory grows in a straight line), and the step that it stands for. At
least one, in ascending order.
"""


@dataclass(slots=True, kw_only=True)
class _Level:
    """What a workload can do at one level, and what is known of it."""

    ladder: Ladder
    keeps: float
    """See `Stages.keeps`."""
    sizer: Sizer

    def kept_bytes(self, held_bytes: float) -> float:
        """Return what stays at this level of so much held at level 0, while that was never
        measured.
        """
        return held_bytes * self.keeps if self.sizer.line is None else 0.0


class AdaptivePolicy:
    """The largest step that fits; refuses settings that leave no step at all with a ValueError."""

    name: Final = "adaptive"

    def __init__(
        self,
        memory: MemorySettings,
        asked: WorkloadSpec,
        needs: Needs,
        *,
        clock: Callable[[], float],
        held_bytes: Callable[[], int],
        learned: Learned | None = None,
    ) -> None:
        """Start knowing nothing, or what an earlier run has learned."""
        stages = needs.stages()
        keeps = (1.0,) if stages is None else stages.keeps
        ladders = ladders_of(memory, asked, needs)
        first = _first_of(ladders[0], asked, needs) if stages is None else None
        bounds = [_bounds_of(ladder, first, memory) for ladder in ladders]
        known = [learned, *[None] * len(ladders)]
        self._levels = [
            _Level(ladder=ladder, keeps=share, sizer=Sizer(each, before, clock=clock))
            for ladder, share, each, before in zip(ladders, keeps, bounds, known, strict=False)
        ]
        self._clock, self._needs = clock, needs
        self._keeps_state, self._measure_held = stages is not None, held_bytes
        self._level = self._units = 0
        """Of the last part asked for; no units before the first and after an emergency."""
        self._held_bytes = 0.0
        """What is held between two parts at level 0; 0 before it was measured."""
        self._beside_bytes = held_bytes() if needs.needs_are_exact else 0
        """What is held beside what a workload with exact needs says, such as a library's workspace.
        """
        self._allowed_bytes: int | None = None
        """As it was told last."""
        self._has_failed = False
        """Whether the last part ran out of memory: then all was given back."""
        self._contradictions = 0
        """Failures that were not believed since a part ended well."""
        self.reason = ""

    def next(self, allowed_bytes: int | None) -> Run | None:
        """Return the next part, of the first level at which one fits."""
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
        """Return what fits at a level; `None`, with a reason, where nothing does."""
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
        # The workload may say what it needs; the sizer would have to learn it by failing.
        limit_bytes = allowed_bytes - self._beside_bytes
        if self._said_bytes(level.ladder[units]) <= limit_bytes:
            return units
        place = bisect_right(
            bounds.rungs, limit_bytes, key=lambda units: self._said_bytes(level.ladder[units])
        )
        if place:
            return bounds.rungs[place - 1]
        needed_mib = self._said_bytes(level.ladder[bounds.smallest]) / MIB
        self.reason = (
            f"{bounds.smallest_step} needs {needed_mib:.1f} MiB, {allowed_mib:.1f} MiB are there"
        )
        return None

    def _said_bytes(self, run: Run) -> int:
        """Return what the workload says that a part needs; 0 if it does not say."""
        return self._needs.needed_bytes(run.size, run.batch) or 0

    def succeeded(self, run: Run, peak_bytes: int | None, is_partial: bool) -> None:
        """Take note that a part ended well."""
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
        """Return what a part needs whose workload says so, whatever it holds to fill its share."""
        needed_bytes = self._said_bytes(run)
        held_bytes = max(needed_bytes, self._needs.claim_bytes or 0)
        self._beside_bytes = max(0, self._measure_held() - held_bytes)
        return needed_bytes + self._beside_bytes

    def failed(self, _run: Run, at_least_bytes: int | None) -> None:
        """Take note that a part ran out of memory, unless its figures contradict that."""
        self._has_failed = True
        shown_bytes, allowed_bytes = at_least_bytes or 0, self._allowed_bytes or 0
        is_contradicted = 0 < shown_bytes < _CONTRADICTS * allowed_bytes
        if is_contradicted and self._contradictions < CONTRADICTIONS:
            self._contradictions += 1
            return
        self._levels[self._level].sizer.failed(self._units, at_least_bytes)

    def _may_return(self, level: _Level, allowed_bytes: int | None) -> bool:
        """Whether a level that was left may have memory again, and another failure is allowed."""
        lately = sum(each.sizer.failures_lately() for each in self._levels)
        return (
            allowed_bytes is not None
            and lately < level.sizer.bounds.failures_per_minute
            and level.sizer.may_fit_again(allowed_bytes)
        )

    @property
    def learned(self) -> Learned | None:
        """The last good step and its footprint; nothing of a level that saves memory."""
        return None if self._level else self._levels[0].sizer.learned

    @property
    def state(self) -> PolicyState:
        """The level, and what is known of each, also after failures."""
        learned = tuple(level.sizer.known for level in self._levels)
        return PolicyState(level=self._level, learned=learned)

    def resume(self, state: PolicyState) -> None:
        """Go on with the state of an earlier process, see `Policy.resume`."""
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
        # The engine measures the allowed bytes itself, for the step that comes.
        exact_samples=True,
        smallest_step=f"the smallest step (size {floor.size} batch {floor.batch}{saves})",
    )


def ladders_of(memory: MemorySettings, asked: WorkloadSpec, needs: Needs) -> list[Ladder]:
    """Return the ladder of a workload, or one for each level of its stages.

    Raises:
        ValueError: The batches of its stages are none or not in order.
    """
    stages = needs.stages()
    if stages is None:
        return [_stepping(memory, asked, needs)]
    batches = stages.batches
    if not batches or batches[0] < 1 or any(low >= high for low, high in pairwise(batches)):
        raise ValueError(
            f"the batches of workload {asked.name!r} must ascend from 1 or more, not {batches}"
        )
    return [
        {
            batch: Run(
                size=asked.size,
                batch=batch,
                level=level,
                is_largest=not level and batch == batches[-1],
            )
            for batch in batches
        }
        for level in range(len(stages.keeps))
    ]


def _stepping(memory: MemorySettings, asked: WorkloadSpec, needs: Needs) -> Ladder:
    """Rungs of steps: what does not move memory stays as asked.

    Of two that do, the batch shrinks first.
    """
    sizes = [asked.size]
    if needs.size_power > 0:
        sizes = [*_spread(min(memory.size_floor, asked.size), asked.size, TILE)]
    batches = [asked.batch]
    if needs.batch_power > 0:
        batches = [*_spread(min(memory.batch_floor, asked.batch), asked.batch, 1)]
    path = [(size, batches[0]) for size in sizes] + [(sizes[-1], batch) for batch in batches[1:]]
    # Of two that take the same the larger.
    return {_units(size, batch, needs): Run(size=size, batch=batch) for size, batch in path}


def _first_of(ladder: Ladder, asked: WorkloadSpec, needs: Needs) -> int | None:
    """Return the rung of a gentle start; `None` where none is known."""
    rungs = list(ladder)
    if needs.needs_are_exact:
        return rungs[-1]  # what is said to fit fits
    # The smallest batch at the full size: a change of size makes most workloads rebuild their
    # model.
    at = next(at for at, run in enumerate(ladder.values()) if run.size == asked.size)
    return rungs[at] if rungs[at] < rungs[-1] else None


def _units(size: int, batch: int, needs: Needs) -> int:
    units: float = float(size) ** needs.size_power * float(batch) ** needs.batch_power
    return max(1, round(units))


def _spread(lowest: int, highest: int, quantum: int) -> Iterator[int]:
    """Yield `lowest`, then multiples of `quantum` as fine as is worth while, then `highest`."""
    value = lowest
    while value < highest:
        yield value
        value = max(value + 1, int(value * (1 + _FINEST))) + quantum - 1
        value -= value % quantum
    yield highest
