"""What alerts need of the frames before: how much a counter has grown within a time. Pure.

Keeps few points of each counter. A growth counts from the first look on, as `increase` of
Prometheus does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

from orchestrator.record.follow import Frame

#: Counter of a slot -> the longest time over which it is asked for.
_WINDOWS_S: Final[Mapping[str, float]] = MappingProxyType(
    {
        "restarts": 900.0,
        "oom_count": 600.0,
        "steps": 900.0,
        "steps_ok": 900.0,
        "verify_errors": 3600.0,
    }
)
_FAILED: Final = "failed"
_FAILED_WINDOW_S: Final = 900.0
_POINTS: Final = 60

_Course: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The last course of the counters of one run, and their values now."""

    now: Mapping[tuple[str, str], float] = field(default_factory=dict)
    courses: Mapping[tuple[str, str], _Course] = field(default_factory=dict)

    def growth(self, counter: str, slot: str = "") -> float:
        """Return how much a counter has grown within its time."""
        key = counter, slot
        return max(0.0, self.now[key] - self.courses[key][0][1]) if key in self.now else 0.0

    def after(self, frame: Frame, failed: int, now_s: float) -> History:
        """Return the history with one frame more.

        `failed` are the notifications that failed so far.
        """
        now, courses = {}, {}
        for key, value, window_s in _counted(frame, failed):
            now[key] = value
            courses[key] = _longer(self.courses.get(key, ()), value, now_s, window_s)
        return History(now=now, courses=courses)


def _counted(frame: Frame, failed: int) -> Iterator[tuple[tuple[str, str], float, float]]:
    yield (_FAILED, ""), failed, _FAILED_WINDOW_S
    for row in frame.snapshot.rows:
        for counter, window_s in _WINDOWS_S.items():
            value = row.restarts if counter == "restarts" else getattr(row.counts, counter)
            yield (counter, row.slot), value, window_s


def _longer(course: _Course, value: float, now_s: float, window_s: float) -> _Course:
    """Return a course with the value of now, if it is new, and without points that count no more."""
    if not course or value != course[-1][1]:
        # What grows at nearly the same time is one point. The first is what growth is counted from,
        # and stays.
        is_same = len(course) > 1 and now_s - course[-1][0] < window_s / _POINTS
        course = (*course[:-1], (course[-1][0], value)) if is_same else (*course, (now_s, value))
    first = 0
    while first + 1 < len(course) and course[first + 1][0] <= now_s - window_s:
        first += 1
    return course[first:]
