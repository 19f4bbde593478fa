"""Courses of free memory for a job, and the cap that follows a course.

The two courses are shares of the memory that is free without other programs. The cap is the soft
`RLIMIT_DATA` of the job's process. The benchmark moves it from outside with prlimit(2), at any
moment of a step.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import psutil

from benches.common import PATIENCE_S, Child

#: (second, share of all memory), the first at second 0; a share holds until the next.
Course = list[tuple[float, float]]

#: Limit of the desktop's use, which is drawn at random each second.
_DESKTOP_SHARE = 0.04
#: Begin and end of each game as shares of the course, and the share of memory that it leaves.
_GAMES = ((0.25, 0.42, 0.22), (0.62, 0.80, 0.30))
#: The share of the course in which a game loads its memory in parts. It frees all at once.
_LOADING = 0.04
_LOADING_PARTS = 10


def game(draw: Random, seconds: float) -> Course:
    """Return the course of a desktop: it varies each second, and twice a game uses most memory."""
    marks = {float(second) for second in range(int(seconds) + 1)}
    for begin, end, _ in _GAMES:
        marks |= {
            seconds * (begin + _LOADING * part / _LOADING_PARTS) for part in range(_LOADING_PARTS)
        }
        marks.add(seconds * end)
    jitter = [_DESKTOP_SHARE * draw.random() for _ in range(int(seconds) + 1)]
    return [
        (at_s, _left_by_games(at_s / seconds) * (1 - jitter[int(at_s)]))
        for at_s in sorted(marks)
        if at_s < seconds
    ]


def _left_by_games(moment: float) -> float:
    for begin, end, left in _GAMES:
        if begin <= moment < end:
            loaded = min(
                1.0,
                (1 + round((moment - begin) / _LOADING * _LOADING_PARTS, 6) // 1) / _LOADING_PARTS,
            )
            return 1 - (1 - left) * loaded
    return 1.0


COURSES: Mapping[str, Callable[[Random, float], Course]] = {
    "game": game,
    # Low at first; after 35 % of the time all memory is released.
    "release": lambda _draw, seconds: [(0.0, 0.28), (seconds * 0.35, 1.0)],
}


def turns(
    rounds: int, contestants: Sequence[str], seed: int, seconds: float
) -> Iterator[tuple[int, str, str, Course]]:
    """Yield the round, the name of the course, the contestant, and the course of each turn.

    Each round starts with another contestant; all contestants of a round get the same course.
    """
    for number, (name, draw) in itertools.product(range(rounds), COURSES.items()):
        course = draw(Random(f"{seed}/{number}/{name}"), seconds)  # noqa: S311 - repeatable
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            yield number + 1, name, contestant, course


def rows_of(
    rows: Sequence[Mapping[str, Any]], course: str, contestant: str
) -> list[Mapping[str, Any]]:
    return [row for row in rows if (row["course"], row["contestant"]) == (course, contestant)]


def ratio_within_rounds(
    mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the median of mine / theirs in items over the rounds; `None`: no round has both."""
    known = {row["round"]: row["items"] for row in theirs}
    found = [row["items"] / known[row["round"]] for row in mine if known.get(row["round"])]
    return statistics.median(found) if found else None


def least_between(course: Course, from_s: float, to_s: float) -> float:
    now = max((at_s, share) for at_s, share in course if at_s <= max(0.0, from_s))[1]
    return min([now, *(share for at_s, share in course if from_s < at_s <= to_s)])


class KernelCap:
    """`RLIMIT_DATA` of a process, relative to the data size that it had when it was ready."""

    def __init__(self, pid: int, base_bytes: int) -> None:
        self._job, self._base_bytes = psutil.Process(pid), base_bytes
        self._hard = self._job.rlimit(psutil.RLIMIT_DATA)[1]
        self._last_s = 0.0

    def clock_s(self) -> float:
        """Return the job's processor time, to 10 ms; it stands still after the job has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = self._job.cpu_times()
            self._last_s = times.user + times.system
        return self._last_s

    def leave(self, size_bytes: int) -> None:
        """Allow the job `size_bytes` beyond the memory that it held when it was ready."""
        self._set(self._base_bytes + size_bytes)

    def close(self) -> None:
        self._set(self._hard)

    def _set(self, soft: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # the bench notices when it receives
            self._job.rlimit(psutil.RLIMIT_DATA, (soft, self._hard))


def follow(one: Child, cap: KernelCap, course: Course, seconds: float, whole_bytes: int) -> Any:  # noqa: ANN401 - whatever it sends
    """Start a contestant, move its cap along the course, and return its answer at the end."""
    cap.leave(int(course[0][1] * whole_bytes))
    began_s = cap.clock_s()
    one.send("go")
    for at_s, share in course[1:]:
        if _has_message_before(one.pipe, cap, began_s + at_s):
            break  # it has given up, or crashed
        cap.leave(int(share * whole_bytes))
    _has_message_before(one.pipe, cap, began_s + seconds)
    return one.receive(PATIENCE_S)


def _has_message_before(connection: Connection, cap: KernelCap, until_s: float) -> bool:
    """Wait for a moment of the course; return whether the contestant sends a message before it."""
    moved_s, seen_s = time.monotonic(), cap.clock_s()
    while (left_s := until_s - cap.clock_s()) > 0:
        if connection.poll(left_s):
            return True
        if cap.clock_s() > seen_s:
            moved_s, seen_s = time.monotonic(), cap.clock_s()
        elif time.monotonic() - moved_s > PATIENCE_S:
            raise TimeoutError(f"nothing has run for {PATIENCE_S:.0f} s")
    return False
