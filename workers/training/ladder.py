"""A training's ladder of memory: micro-batch, recomputed blocks and states on the host.

Each rung is the fastest point for its memory. What a point takes is planned. How fast it is a rule
says at first, then the steps that were measured there, and the ladder is made anew. Each move that
lasts is told with what it bought and what it cost. Does not decide where to stand: the policy does.

The seconds of a sample are a sum: what it takes at best, a part's overhead divided by its samples,
a share for the blocks that are computed again, and a share for the states that come from the host.
Measured points correct these four numbers, so that they also tell of points that were never
visited. None of them is ever negative: where another program made a step slow, what takes more
memory is not taken to be the slower step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Final

import torch

from workers.policy.base import Rung
from workers.training.memory_plan import MemoryPlan, MemoryPlanner
from workers.training.planner_process import PlannerProcess
from workers.training.schedule import offered_micro_batches
from workers.training.settings import TrainSettings

#: How many levels between none and all a policy may choose from.
_MOST_LEVELS: Final = 6

#: Shares of the optimiser's states on the host, where memory decides.
_SHARES_PCT: Final = (0, 25, 50, 75, 100)

#: All trainings of a machine may put so much of its free memory aside for states.
_HOST_SHARE: Final = 0.5

#: Units are KiB: a finer difference is nothing to a policy, and whole numbers stay small.
_UNIT_BYTES: Final = 1024

#: Whole levels of a `Rung.level` for one per cent of states on the host.
_SHARE_STEP: Final = 1000

#: Whole batches at a point until its speed counts, and the last so many of which the median is
#: taken.
_SETTLED: Final = 3
_REMEMBERED: Final = 9

#: What a part of a batch costs beside its samples, in samples: 4 at once were 4 % slower than 16
#: (two CPU cores, three layers of width 64; on a card it is more).
_PART_SAMPLES: Final = 0.16

#: Computing all blocks again takes a third of the time of a step: a forward pass beside a forward
#: and a backward one, which takes twice as long.
_AGAIN: Final = 1 / 3

#: Copying all states to a card and back takes as long as so many samples: 16 bytes for each weight
#: at 12 GB/s, against 6 operations for each weight and token at 30 TFLOP/s, with 1,024 tokens.
_HOST_SAMPLES: Final = 6.5

#: Relative error of a measured speed; the four numbers of the rule are taken to be wrong by their
#: own size.
_NOISE: Final = 0.02

#: No cost becomes less than this share of the rule's.
_LEAST: Final = 0.01


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One of the steps that a training can take."""

    micro: int
    """Samples computed at once."""
    level: int = 0
    """Blocks that are recomputed."""
    share_pct: int = 0
    """Of the optimiser's states, on the host."""

    @property
    def rung_level(self) -> int:
        """Level and share as one number, for a `Rung`."""
        return self.level + _SHARE_STEP * self.share_pct

    @staticmethod
    def of(micro: int, rung_level: int) -> Point:
        """Return the point of a rung."""
        share_pct, level = divmod(rung_level, _SHARE_STEP)
        return Point(micro, level, share_pct)


class MemoryLadder:
    """The rungs of one training, and what its steps say of them."""

    def __init__(
        self,
        points: Iterable[Point],
        most_level: int,
        batch: int,
        planned_bytes: Callable[[Point], float],
        plan: Callable[[Point], MemoryPlan] | None = None,
    ) -> None:
        """Make the first rungs, by the rule for speeds.

        Args:
            points: All that the training may use.
            most_level: Blocks that can be recomputed.
            batch: Samples of an effective batch.
            planned_bytes: What a point takes of memory, up to a constant.
            plan: All that it takes; `None`: that is not known.
        """
        self._points = tuple(points)
        self._most_level = most_level
        self._batch = batch
        self._planned_bytes = planned_bytes
        self._plan = plan
        self._seconds: dict[Point, list[float]] = {}
        """Of a sample, for each whole batch."""
        self._peaks: dict[Point, int] = {}
        self.rungs = self._ordered()
        """In ascending order of memory."""
        self._stale = False
        self._now: Point | None = None
        self._settled: Point | None = None
        """Where a whole batch was measured last."""
        self._whole = False
        """Whether the batch under way began at the point of now, after a first step there."""
        self._batch_s = 0.0
        self._batch_peak_bytes = 0

    def note(
        self, point: Point, seconds: float, peak_bytes: int, *, updated: bool
    ) -> list[tuple[str, dict[str, int | float]]]:
        """Take note of a good step; return the events that it completes.

        After the first whole batch that is what the plan says and what steps really take, and then
        each move of memory. Moves that did not last for a batch are told with the one after them.
        """
        if point != self._now:
            self._now, self._whole, self._batch_s, self._batch_peak_bytes = point, False, 0.0, 0
        self._batch_s += seconds
        self._batch_peak_bytes = max(self._batch_peak_bytes, peak_bytes)
        if not updated:
            return []
        whole, self._whole = self._whole, True
        of_sample_s, self._batch_s = self._batch_s / self._batch, 0.0
        peak_bytes, self._batch_peak_bytes = self._batch_peak_bytes, 0
        return list(self._measured(point, of_sample_s, peak_bytes)) if whole else []

    def least_bytes(self) -> int | None:
        """Return what the smallest step is planned to take; `None`: it is not planned."""
        least = Point.of(self.rungs[0].batch, self.rungs[0].level)
        return None if self._plan is None else self._plan(least).total_bytes

    def reordered(self) -> Sequence[Rung] | None:
        """Return the rungs if measured speeds have changed them; `None`: they are as before."""
        if not self._stale:
            return None
        self._stale = False
        before, self.rungs = self.rungs, self._ordered()
        return None if self.rungs == before else self.rungs

    def _measured(
        self, point: Point, seconds: float, peak_bytes: int
    ) -> Iterable[tuple[str, dict[str, int | float]]]:
        speeds = self._seconds.setdefault(point, [])
        speeds.append(seconds)
        self._stale = self._stale or len(speeds) == _SETTLED
        del speeds[:-_REMEMBERED]
        self._peaks[point] = max(peak_bytes, self._peaks.get(point, 0))
        before, self._settled = self._settled, point
        if before is None and self._plan is not None:
            plan = self._plan(point)
            yield (
                "memory_predicted",
                {
                    "micro_batch": point.micro,
                    "memory_level": plan.level,
                    "predicted_bytes": plan.total_bytes,
                    "measured_bytes": peak_bytes,
                },
            )
        if before is not None and before != point:
            cost = seconds / median(self._seconds[before]) - 1
            yield (
                "memory_moved",
                {
                    "micro_batch": point.micro,
                    "memory_level": point.level,
                    "states_on_host_pct": point.share_pct,
                    "from_micro_batch": before.micro,
                    "from_memory_level": before.level,
                    "from_states_on_host_pct": before.share_pct,
                    "bought_bytes": self._peaks[before] - self._peaks[point],
                    "time_cost_pct": round(100 * cost, 2),
                },
            )

    def _ordered(self) -> tuple[Rung, ...]:
        """Return the rungs. One that is slower than a smaller one is left out."""
        measured = {
            point: median(seconds)
            for point, seconds in self._seconds.items()
            if len(seconds) >= _SETTLED
        }
        speeds = Speeds(self._batch, self._most_level, measured)
        rungs: list[Rung] = []
        fastest_s = float("inf")
        for units, seconds, point in sorted(
            (max(1, round(self._planned_bytes(point) / _UNIT_BYTES)), speeds.seconds(point), point)
            for point in self._points
        ):
            if seconds < fastest_s and not (rungs and rungs[-1].units == units):
                rungs.append(Rung(units, point.micro, point.rung_level))
                fastest_s = seconds
        return tuple(rungs)


def planned_ladder(
    planner: MemoryPlanner | PlannerProcess, settings: TrainSettings, host_free_bytes: int
) -> MemoryLadder:
    """Return the ladder of a training whose memory is planned, on a host with so much free."""
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
        if len(states) > 1:
            part_bytes = max(part_bytes, update_bytes)
        return on_device_bytes - least_bytes + part_bytes

    return MemoryLadder(
        points_of(settings, micros, most_level, shares_pct),
        most_level,
        settings.batch,
        moved_bytes,
        lambda point: planner.plan(point.micro, planner.level_of(point.level), point.share_pct),
    )


def unplanned_ladder(settings: TrainSettings) -> MemoryLadder:
    """Return the ladder of a training of which only the micro-batch is known to take memory."""
    points = [
        Point(micro, 0, settings.first_share_pct) for micro in offered_micro_batches(settings)
    ]
    return MemoryLadder(points, 0, settings.batch, lambda point: _UNIT_BYTES * point.micro)


def offered_shares(settings: TrainSettings, states_bytes: int, free_bytes: int) -> list[int]:
    """Return the shares of states on the host, in per cent, that so much free memory allows."""
    if settings.states_on_host != "auto":
        return [settings.states_on_host]
    return [pct for pct in _SHARES_PCT if states_bytes * pct <= 100 * _HOST_SHARE * free_bytes]


def points_of(
    settings: TrainSettings, micros: Sequence[int], most_level: int, shares_pct: Sequence[int]
) -> list[Point]:
    """Return all points that a training may use, up to so many recomputed blocks."""
    # A model that is compiled as a whole is compiled for each level.
    stride = -(-most_level // (1 if settings.compile == "model" else _MOST_LEVELS)) or 1
    levels = sorted({*range(0, most_level, stride), most_level})
    return [Point(*numbers) for numbers in product(micros, levels, shares_pct)]


def bilinear(
    at: Callable[[int, int], float], most: int, most_level: int
) -> Callable[[int, int], float]:
    """Return what `at` would say of any micro-batch up to `most` and any level, from what it says
    of both ends.

    Between them it is on the safe side: a part takes the larger of what its gradients and what its
    samples take. With all blocks of gpt2-medium recomputed, a line through 1 and 2 samples told
    69 % too little of 16.
    """
    none = at(1, 0), at(most, 0)
    full = (at(1, most_level), at(most, most_level)) if most_level else none

    def between(micro: int, level: int) -> float:
        share = level / most_level if most_level else 0.0
        one, last = ((1 - share) * low + share * high for low, high in zip(none, full, strict=True))
        return one + (last - one) * (micro - 1) / max(1, most - 1)

    return between


class Speeds:
    """Says how long a sample takes."""

    def __init__(
        self, batch: int, most_level: int, measured: Mapping[Point, float] | None = None
    ) -> None:
        """Begin with a rule, corrected by the seconds of a sample that were measured."""
        self._most_level = max(1, most_level)
        self._host = _HOST_SAMPLES / batch
        self._factors = [1.0] * 4
        if measured:
            self._factors = self._fitted(measured)

    def seconds(self, point: Point) -> float:
        """Return the seconds of a sample; before anything was measured, a multiple of the best."""
        return sum(
            factor * term for factor, term in zip(self._factors, self._terms(point), strict=True)
        )

    def _terms(self, point: Point) -> tuple[float, ...]:
        """Return what each number of the rule adds, as the rule has it."""
        part = _PART_SAMPLES / point.micro
        again = _AGAIN * (point.level / self._most_level) * (1 + part)
        return 1.0, part, again, self._host * point.share_pct / 100

    def _fitted(self, measured: Mapping[Point, float]) -> list[float]:
        """Return a factor for each of the four: least squares, with the rule as a measurement."""
        rows = [self._terms(point) for point in measured]
        scale = median(
            seconds / sum(row) for row, seconds in zip(rows, measured.values(), strict=True)
        )
        terms = torch.tensor(rows, dtype=torch.float64) / _NOISE
        speeds = torch.tensor(list(measured.values()), dtype=torch.float64) / (scale * _NOISE)
        normal = terms.T @ terms + torch.eye(len(self._factors), dtype=torch.float64)
        factors = torch.linalg.solve(normal, terms.T @ speeds + 1)
        return [scale * max(_LEAST, factor) for factor in factors.tolist()]
