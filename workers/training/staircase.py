"""A training's ladder: micro-batch, recomputed blocks and states on the host, as one staircase of
memory and speed.

Each rung is the fastest point for its memory. What a point takes is planned; how fast it is a rule
says at first, then the steps that were measured there, and the staircase is made anew. Each move
that lasts is told with what it bought and what it cost. Does not decide where to stand: the policy
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Final

from workers.policy.base import Rung
from workers.training.memory_plan import MemoryPlanner
from workers.training.rungs import (
    bilinear,
    offered_micro_batches,
    offered_shares,
    points_of,
    rungs_of,
)
from workers.training.settings import TrainSettings
from workers.training.speeds import Point, Speeds

#: Whole batches at a point until its speed counts, and the last so many of which the median is
#: taken.
_SETTLED: Final = 3
_REMEMBERED: Final = 9


def planned(planner: MemoryPlanner, settings: TrainSettings, host_free_bytes: int) -> Staircase:
    """Return the staircase of a training whose memory is planned, on a host with so much free
    memory.
    """
    most_level = planner.most_level if settings.recompute == "auto" else 0
    micros = offered_micro_batches(settings)
    activations_bytes = bilinear(
        lambda micro, level: planner.plan(micro, planner.level_of(level)).activations_bytes,
        micros[-1],
        most_level,
    )
    shares_pct = offered_shares(settings, planner.states(0)[0], host_free_bytes)
    states = {share_pct: planner.states(share_pct) for share_pct in shares_pct}
    least_bytes = min(on_device_bytes for on_device_bytes, *_ in states.values())

    def moved_bytes(point: Point) -> float:
        """Return what differs between points: what all of them take is left out."""
        on_device_bytes, _, update_bytes = states[point.share_pct]
        part_bytes = activations_bytes(point.micro, point.level)
        return (
            on_device_bytes - least_bytes + max(part_bytes, update_bytes if len(states) > 1 else 0)
        )

    return Staircase(
        points_of(settings, micros, most_level, shares_pct), most_level, settings.batch, moved_bytes
    )


def unplanned(settings: TrainSettings) -> Staircase:
    """Return the staircase of a training of which only the micro-batch is known to take memory."""
    points = [
        Point(micro, 0, settings.first_share_pct) for micro in offered_micro_batches(settings)
    ]
    return Staircase(points, 0, settings.batch, lambda point: 1024.0 * point.micro)


class Staircase:
    """Follows the steps of one training."""

    def __init__(
        self,
        points: Iterable[Point],
        most_level: int,
        batch: int,
        planned_bytes: Callable[[Point], float],
    ) -> None:
        """Make the first staircase, by the rule for speeds."""
        self._points = tuple(points)
        self._most_level = most_level
        self._batch = batch
        self._planned_bytes = planned_bytes
        self._seconds: dict[Point, list[float]] = {}
        """Of a sample, for each whole batch."""
        self._peaks: dict[Point, int] = {}
        self.rungs = self._made()
        """In ascending order of memory."""
        self._stale = False
        self._now: Point | None = None
        self._settled: Point | None = None
        """Where a whole batch was measured last."""
        self._whole = False
        """Whether the batch under way began at the point of now, with all that is loaded in a first
        step.
        """
        self._batch_s = 0.0
        self._batch_peak_bytes = 0

    def note(
        self, point: Point, seconds: float, peak_bytes: int, *, updated: bool
    ) -> dict[str, int | float] | None:
        """Take note of a good step; return the move that it completes, if it does so.

        A move is complete after a whole batch. Those that did not last as long are told with the
        one after them.
        """
        if point != self._now:
            self._now, self._whole, self._batch_s, self._batch_peak_bytes = point, False, 0.0, 0
        self._batch_s += seconds
        self._batch_peak_bytes = max(self._batch_peak_bytes, peak_bytes)
        if not updated:
            return None
        whole, self._whole = self._whole, True
        of_sample_s, self._batch_s = self._batch_s / self._batch, 0.0
        peak_bytes, self._batch_peak_bytes = self._batch_peak_bytes, 0
        return self._measured(point, of_sample_s, peak_bytes) if whole else None

    def reordered(self) -> Sequence[Rung] | None:
        """Return the rungs if measured speeds have changed which ones there are.

        `None`: they are as before.
        """
        if not self._stale:
            return None
        self._stale = False
        before, self.rungs = self.rungs, self._made()
        return None if self.rungs == before else self.rungs

    def _measured(
        self, point: Point, seconds: float, peak_bytes: int
    ) -> dict[str, int | float] | None:
        speeds = self._seconds.setdefault(point, [])
        speeds.append(seconds)
        self._stale = self._stale or len(speeds) == _SETTLED
        del speeds[:-_REMEMBERED]
        self._peaks[point] = max(peak_bytes, self._peaks.get(point, 0))
        before, self._settled = self._settled, point
        if before is None or before == point:
            return None
        cost = seconds / median(self._seconds[before]) - 1
        return {
            "micro_batch": point.micro,
            "memory_level": point.level,
            "states_on_host_pct": point.share_pct,
            "from_micro_batch": before.micro,
            "from_memory_level": before.level,
            "from_states_on_host_pct": before.share_pct,
            "bought_bytes": self._peaks[before] - self._peaks[point],
            "time_cost_pct": round(100 * cost, 2),
        }

    def _made(self) -> tuple[Rung, ...]:
        known = {
            point: median(each) for point, each in self._seconds.items() if len(each) >= _SETTLED
        }
        speeds = Speeds(self._batch, self._most_level, known)
        return rungs_of(self._points, self._planned_bytes, speeds.seconds)
