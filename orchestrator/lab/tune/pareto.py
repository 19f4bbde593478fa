"""Which settings nothing else beats. Pure: which of them is chosen is in `passes.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A set of settings as measured. All of them have passed their parity."""

    name: str
    speed_ratio: float
    peak_bytes: int
    host_bytes: int


def pareto_set(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in speed, device bytes and host bytes together."""
    return [point for point in points if not any(_beats(other, point) for other in points)]


def _beats(one: Point, other: Point) -> bool:
    ones = (-one.speed_ratio, one.peak_bytes, one.host_bytes)
    others = (-other.speed_ratio, other.peak_bytes, other.host_bytes)
    return ones != others and all(a <= b for a, b in zip(ones, others, strict=True))
