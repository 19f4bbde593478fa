"""The sizes and batches a policy may ask for, as one row of rungs with growing memory.

A workload moves two numbers, the sizer one. Each rung is a number of work units (size^size_power x
batch^batch_power, with which memory grows in a straight line) and the step that it stands for.
Decides nothing, and measures nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workers.policy.base import Growth, Run, Rung
from workers.settings import MemorySettings, WorkloadSpec

#: Sizes are a multiple of this: whole tiles of every tensor core so far.
TILE = 64

#: No rung is nearer to the one below than this share of it: a finer one would not be worth a
#: change.
_FINEST = 1 / 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Rungs in ascending order of memory; at least one."""

    units: tuple[int, ...]
    """Of each rung; strictly ascending."""
    run: Callable[[int], Run]
    """From units, which must be those of a rung, to the step."""
    first: int | None = None
    """Rung of a gentle start; `None` where the ladder knows none."""

    def within(
        self, limit_bytes: int, needed_bytes: Callable[[int, int], int | None]
    ) -> int | None:
        """Return the units of the highest rung that is said to need no more than `limit_bytes`;
        `None`: not even one.

        A workload that does not say what it needs is taken to need nothing.
        """

        def too_much(units: int) -> bool:
            run = self.run(units)
            needed = needed_bytes(run.size, run.batch)
            return needed is not None and needed > limit_bytes

        found = bisect_left(self.units, True, key=too_much)
        return self.units[found - 1] if found else None


def ladder_of(memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> Ladder:
    """Return the ladder of a workload: its own rungs, bytes held where it fills its claim, else
    sizes and batches.

    Raises:
        ValueError: It fills its claim and does not say what a size needs, or its rungs are none or
            not in order.
    """
    if growth.rungs is not None:
        return _offered(workload, growth.rungs)
    return (
        _filling(memory, workload, growth)
        if growth.fills_claim
        else _stepping(memory, workload, growth)
    )


def _offered(workload: WorkloadSpec, rungs: Sequence[Rung]) -> Ladder:
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
    return Ladder(units=units, run=steps.__getitem__)


def _filling(memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> Ladder:
    """Rungs of bytes. The size is the largest that fits into them, up to the one asked for."""
    sizes = [*_spread(min(memory.size_floor, workload.size), workload.size, TILE)]
    needs = [_known(growth.needed_bytes(size, workload.batch), workload.name) for size in sizes]
    lowest, highest = min(needs[0], growth.most_bytes), growth.most_bytes

    def run(units: int) -> Run:
        size = sizes[max(0, bisect_right(needs, units) - 1)]
        return Run(size=size, batch=workload.batch, hold_bytes=units)

    return Ladder(units=tuple(_spread(lowest, highest, 1)), run=run)


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
    return Ladder(units=tuple(steps), run=steps.__getitem__, first=first)


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


def _known(needed_bytes: int | None, name: str) -> int:
    if needed_bytes is None:
        raise ValueError(
            f"workload {name!r} fills its claim, so its needed_bytes must say what a size needs"
        )
    return needed_bytes
