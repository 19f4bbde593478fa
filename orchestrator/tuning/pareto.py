"""Which settings nothing else beats, and which of them is chosen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Objective: TypeAlias = Literal["speed", "memory", "balanced"]


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


def choose(points: Sequence[Point], objective: Objective) -> Point:
    """Return the point of a Pareto set that the objective asks for.

    `speed`: the fastest; `memory`: the smallest on the device; `balanced`: the most speed for the byte.

    Raises:
        ValueError: There is no point.
    """
    if not points:
        raise ValueError("nothing was measured, so nothing can be chosen")
    if objective == "memory":
        return min(points, key=lambda point: (point.peak_bytes, -point.speed_ratio))
    if objective == "balanced":
        return max(points, key=lambda point: point.speed_ratio / max(1, point.peak_bytes))
    return max(points, key=lambda point: (point.speed_ratio, -point.peak_bytes))


def _beats(one: Point, other: Point) -> bool:
    ones = (-one.speed_ratio, one.peak_bytes, one.host_bytes)
    others = (-other.speed_ratio, other.peak_bytes, other.host_bytes)
    return ones != others and all(a <= b for a, b in zip(ones, others, strict=True))
