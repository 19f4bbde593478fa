"""A sweep: one setting of the cards in small steps, from the safest on, until a result is wrong.
Pure.

Covers what may be asked for, which value comes next, what was seen at each, and the efficient one.
Does not set anything: the node agent does, for the length of each run (`sweep_verb.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from orchestrator.lab.burn.results import Taken
from orchestrator.lab.burn.verdict import Check, Judged, Verdict
from workers.policy.thermal import SLOW_MEMORY

#: Of each value: every half minute the bandwidth of the memory is measured, and a change needs two
#: measurements.
STEP_S: Final = 90.0

_ASKED = re.compile(r"(power|memory-offset)=(-?\d{1,5})\.\.(-?\d{1,5}):(\d{1,4})")
_VALUES_MOST: Final = 60


class Lever(StrEnum):
    """What is set."""

    POWER = "power"
    MEMORY_OFFSET = "memory-offset"

    @property
    def unit(self) -> str:
        """Of its values."""
        return "W" if self is Lever.POWER else "MHz"

    @property
    def step_most(self) -> int:
        """The largest step: the card must not jump over the place where results begin to be wrong."""
        return 50 if self is Lever.POWER else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was asked for."""

    lever: Lever
    values: tuple[int, ...]
    """In the order in which they are tried: power downwards, an offset upwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One card at one value. `None` is unknown."""

    node: str
    gpu_name: str | None
    gpu_uuid: str | None
    value: int
    watts: float | None
    rate: float | None
    """Work of all its workers."""
    rate_unit: str
    """`samples/s` of a training, else `TFLOP/s`."""
    checks: int
    temperature_max_c: float | None
    stop: str | None
    """Why no further value may be tried; `None`: all was right."""

    @property
    def per_watt(self) -> float | None:
        """Work for each joule, in units of the rate for each watt.

        `None` where either is unknown, or it went wrong.
        """
        if self.stop is not None or self.rate is None or not self.watts:
            return None
        return self.rate / self.watts


def parse_sweep(text: str) -> Sweep:
    """Read `power=200..350:25` or `memory-offset=0..500:50`.

    Raises:
        ValueError: It is something else, or its steps are too large; says what would be right.
    """
    found = _ASKED.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r:.60} is no sweep; valid: power=200..350:25 (watts) or "
            "memory-offset=0..500:50 (MHz)"
        )
    lever, first, last, step = Lever(found[1]), int(found[2]), int(found[3]), int(found[4])
    if not 0 < step <= lever.step_most:
        raise ValueError(f"the step must be 1 to {lever.step_most} {lever.unit}, not {step}")
    if first > last or (lever is Lever.POWER and first <= 0):
        raise ValueError(
            f"the lower end comes first, and is a value that a card can have: not {first}..{last}"
        )
    values = range(first, last + 1, step)
    if len(values) > _VALUES_MOST:
        raise ValueError(f"{len(values)} values are too many; at most {_VALUES_MOST}")
    return Sweep(
        lever=lever, values=tuple(reversed(values)) if lever is Lever.POWER else tuple(values)
    )


def next_value(sweep: Sweep, points: Iterable[Point]) -> int | None:
    """Return the value to try next.

    `None` when all are tried, or anything was wrong with any card.
    """
    known = tuple(points)
    if any(point.stop is not None for point in known):
        return None
    tried = {point.value for point in known}
    return next((value for value in sweep.values if value not in tried), None)


def points_of(value: int, taken: Sequence[Taken]) -> tuple[Point, ...]:
    """Return what each card did at a value: checked in the first of its runs, measured in the last."""
    cards: dict[tuple[str, str | None], list[list[Judged]]] = {}
    for index, one in enumerate(taken):
        for worker in one.workers:
            runs = cards.setdefault((worker.row.node, worker.row.gpu_uuid), [[] for _ in taken])
            runs[index].append(worker)
    errors = [one.error for one in taken if one.error is not None]
    return tuple(_point(value, runs, errors[0] if errors else None) for runs in cards.values())


def _point(value: int, runs: Sequence[Sequence[Judged]], error: str | None) -> Point:
    everyone = [worker for workers in runs for worker in workers]
    measured = runs[-1]
    samples = [worker.figures.samples_per_s_mean for worker in measured]
    tflops = [worker.figures.tflops_settled_mean for worker in measured]
    is_training = any(each is not None for each in samples)
    known = [each for each in (samples if is_training else tflops) if each is not None]
    watts = [
        worker.figures.power_w_mean
        for worker in measured
        if worker.figures.power_w_mean is not None
    ]
    heat = [
        worker.figures.temperature_max_c
        for worker in everyone
        if worker.figures.temperature_max_c is not None
    ]
    wrong = [
        reason for worker in runs[0] if (reason := _wrong(worker, is_checked=True)) is not None
    ]
    wrong += [
        reason for worker in everyone if (reason := _wrong(worker, is_checked=False)) is not None
    ]
    first = everyone[0].row
    return Point(
        node=first.node,
        gpu_name=first.gpu_name,
        gpu_uuid=first.gpu_uuid,
        value=value,
        watts=max(watts, default=None),  # each worker reads the same card
        rate=sum(known) if known else None,
        rate_unit="samples/s" if is_training else "TFLOP/s",
        checks=sum(worker.row.counts.verify_checks for worker in runs[0]),
        temperature_max_c=max(heat, default=None),
        stop=next(iter(wrong), error),
    )


def _wrong(worker: Judged, *, is_checked: bool) -> str | None:
    """Return what a worker found.

    A run whose results nothing checked says nothing about the value.
    """
    results, errors = worker.findings[Check.RESULTS], worker.findings[Check.ERRORS]
    if results.verdict is Verdict.FAIL or (is_checked and results.verdict is not Verdict.PASS):
        return f"{worker.row.slot}: {results.text}"
    if SLOW_MEMORY in worker.alarms:
        return (
            f"{worker.row.slot}: the bandwidth of its memory fell, as it does when transfers "
            "are repeated"
        )
    return f"{worker.row.slot}: {errors.text}" if errors.verdict is Verdict.FAIL else None


def efficient(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the point of each card that does most work for each watt.

    No point of a card without a sensor.
    """
    best: dict[tuple[str, str | None], Point] = {}
    for point in points:
        key = point.node, point.gpu_uuid
        if point.per_watt is not None and (
            key not in best or point.per_watt > (best[key].per_watt or 0.0)
        ):
            best[key] = point
    return tuple(best.values())
