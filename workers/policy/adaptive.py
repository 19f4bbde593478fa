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

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from workers.policy import base
from workers.policy.base import Needs, Run
from workers.policy.memory_seen import MINUTE_S
from workers.policy.sizer import Sizer
from workers.policy.sizes_tried import WORTH_TRYING, Bounds
from workers.settings import Learned, MemorySettings, Scalar, WorkloadSpec
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


@dataclass(slots=True, kw_only=True)
class _Level:
    """What a workload can do at one level, and what is known of it."""

    ladder: Ladder
    bounds: Bounds
    keeps: float
    """See `Stages.keeps`."""
    sizer: Sizer
    suffix: str
    """Of its keys in a dumped state."""

    def kept_bytes(self, held_bytes: float) -> float:
        """Return what stays at this level of so much held at level 0, while that was never
        measured.
        """
        return held_bytes * self.keeps if self.sizer.line is None else 0.0

    def learned_in(self, data: Mapping[str, Scalar]) -> Learned | None:
        """Return what a dumped state says of this level."""
        units, *line = (f"{name}{self.suffix}" for name in _KEYS)
        if data[units] is None:
            return None
        fixed_bytes, unit_bytes = (_bytes(data, key) for key in line)
        size = base.whole(data, units, 1, 1 << 63)
        return Learned(size=size, fixed_bytes=fixed_bytes, unit_bytes=unit_bytes)


#: Of each level in a dumped state.
_KEYS: Final = ("units", "fixed_bytes", "unit_bytes")


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
        """Start knowing nothing, or what an earlier run has learned. See `make_policy`."""
        stages = needs.stages()
        keeps = (1.0,) if stages is None else stages.keeps
        self._levels = [
            _Level(
                ladder=ladder,
                bounds=(bounds := _bounds_of(ladder, memory)),
                keeps=share,
                sizer=Sizer.cold(bounds, None if number else learned),
                suffix=f"_{number}" if number else "",
            )
            for number, (ladder, share) in enumerate(
                zip(ladders_of(memory, asked, needs), keeps, strict=True)
            )
        ]
        self._clock, self._needs, self._memory = clock, needs, memory
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
        now_s = self._clock()
        if allowed_bytes is not None:
            self._allowed_bytes = allowed_bytes
        for number, level in enumerate(self._levels):
            if number < self._level and not self._may_return(level, now_s, allowed_bytes):
                continue
            kept_bytes = level.kept_bytes(self._held_bytes)
            if allowed_bytes is not None and allowed_bytes < kept_bytes:
                self.reason = (
                    f"{level.bounds.smallest_step} needs more than is free"
                    f" ({kept_bytes / MIB:.1f} MiB, allowed {allowed_bytes / MIB:.1f})"
                )
                continue
            units = self._units_at(level, now_s, allowed_bytes)
            if units is not None:
                is_less = number > self._level or units < self._units * (1.0 - WORTH_TRYING)
                self._level, self._units, self.reason = number, units, ""
                return replace(
                    level.ladder.run(units),
                    is_probe=level.sizer.is_probe(units),
                    releases_first=is_less and not self._has_failed,
                )
        self._units = 0
        return None

    def _units_at(self, level: _Level, now_s: float, allowed_bytes: int | None) -> int | None:
        """Return what fits at a level; `None`, with a reason, where nothing does."""
        bounds, ladder = level.bounds, level.ladder
        level.sizer, units = level.sizer.next_size(bounds, now_s, allowed_bytes)
        if allowed_bytes is None:
            self.reason = level.sizer.reason
            return units
        allowed_mib = allowed_bytes / MIB
        if units is None:
            needs_mib = level.sizer.needs_bytes(bounds, bounds.smallest) / MIB
            known = f" ({needs_mib:.1f} MiB, allowed {allowed_mib:.1f})" if needs_mib else ""
            self.reason = level.sizer.reason + known
            return None
        # The workload may say what it needs; the sizer would have to learn it by failing.
        units = ladder.within(allowed_bytes - self._beside_bytes, units)
        if units is None:
            needed_mib = (ladder.needs(ladder.units[0]) or 0) / MIB
            self.reason = (
                f"{bounds.smallest_step} needs {needed_mib:.1f} MiB, {allowed_mib:.1f} MiB are "
                "there"
            )
        return units

    def succeeded(self, run: Run, peak_bytes: int | None, is_partial: bool) -> None:
        """Take note that a part ended well."""
        self._has_failed, self._contradictions = False, 0
        if is_partial:
            return
        level = self._levels[self._level]
        if self._needs.needs_are_exact:
            peak_bytes = self._needed_bytes(run)
        level.sizer = level.sizer.succeeded(level.bounds, self._clock(), self._units, peak_bytes)
        if self._keeps_state:
            self._held_bytes = self._measure_held() / level.keeps

    def _needed_bytes(self, run: Run) -> int:
        """Return what a part needs whose workload says so, whatever it holds to fill its share."""
        needed_bytes = self._needs.needed_bytes(run.size, run.batch) or 0
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
        level, now_s = self._levels[self._level], self._clock()
        level.sizer = level.sizer.failed(level.bounds, now_s, self._units, at_least_bytes)

    def _may_return(self, level: _Level, now_s: float, allowed_bytes: int | None) -> bool:
        """Whether a level that was left may have memory again, and another failure is allowed."""
        lately = [
            at_s
            for each in self._levels
            for at_s, _ in each.sizer.failures
            if now_s < at_s + MINUTE_S
        ]
        return (
            allowed_bytes is not None
            and len(lately) < level.bounds.failures_per_minute
            and level.sizer.may_fit_again(level.bounds, now_s, allowed_bytes)
        )

    @property
    def learned(self) -> Learned | None:
        """The last good step and its footprint; nothing of a level that saves memory."""
        return None if self._level else self._levels[0].sizer.learned

    def dump(self) -> dict[str, Scalar]:
        """Return what a new process in the same slot needs, without times: its clock is another."""
        dumped: dict[str, Scalar] = {"policy": self.name, "level": self._level}
        for level in self._levels:
            line = level.sizer.line
            known = (None, None) if line is None else (line.fixed_bytes, line.unit_bytes)
            names = (f"{name}{level.suffix}" for name in _KEYS)
            dumped |= zip(names, (level.sizer.bracket.good, *known), strict=True)
        return dumped

    def load(self, data: Mapping[str, Scalar]) -> None:
        """Go on with what `dump` returned, see `Policy.load`."""
        names = [f"{name}{level.suffix}" for level in self._levels for name in _KEYS]
        base.check_keys(data, self.name, ["level", *names])
        learned = [level.learned_in(data) for level in self._levels]
        self._level = base.whole(data, "level", 0, len(learned) - 1)
        for level, known in zip(self._levels, learned, strict=True):
            level.sizer = Sizer.cold(level.bounds, known)


def _bounds_of(ladder: Ladder, memory: MemorySettings) -> Bounds:
    floor = ladder.run(ladder.units[0])
    saves = f", level {floor.level}" if floor.level else ""
    return Bounds(
        largest=ladder.units[-1],
        smallest=ladder.units[0],
        rungs=ladder.units,
        first=ladder.first,
        worth_growing=0.0,
        failures_per_minute=memory.failures_per_minute,
        # The engine measures the allowed bytes itself, for the step that comes.
        exact_samples=True,
        smallest_step=f"the smallest step (size {floor.size} batch {floor.batch}{saves})",
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
        """Return what a rung is said to need; `None` if the workload does not say."""
        run = self.run(units)
        return self.needed_bytes(run.size, run.batch)

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

    def staged(level: int) -> Ladder:
        def run(batch: int) -> Run:
            is_largest = not level and batch == batches[-1]
            return Run(size=asked.size, batch=batch, level=level, is_largest=is_largest)

        return Ladder(units=batches, run=run, needed_bytes=needs.needed_bytes)

    return [staged(level) for level in range(len(stages.keeps))]


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
    steps = {_units(size, batch, needs): Run(size=size, batch=batch) for size, batch in path}
    # The smallest batch at the full size: a change of size makes most workloads rebuild their
    # model.
    first = _units(sizes[-1], batches[0], needs) if len(batches) > 1 else None
    if needs.needs_are_exact:
        first = _units(asked.size, asked.batch, needs)  # what is said to fit fits
    return Ladder(
        units=tuple(steps), run=steps.__getitem__, needed_bytes=needs.needed_bytes, first=first
    )


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
