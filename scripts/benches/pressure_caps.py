"""The memory that a job is left over a minute, and what moves its cap.

Two courses of free memory, as shares of what there is when no other program wants any. The cap is
the soft `RLIMIT_DATA` of the job's process, moved from outside by prlimit(2), at any moment of the
job's step.
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

#: A desktop's own use comes and goes by up to this much, drawn anew each second.
_DESKTOP_SHARE = 0.04
#: Begin and end of each game as shares of the course, and the share of memory it leaves.
_GAMES = ((0.25, 0.42, 0.22), (0.62, 0.80, 0.30))
#: A game takes its memory over this share of the course, in parts: it loads, and ends at once.
_LOADING = 0.04
_LOADING_PARTS = 10


def game(draw: Random, seconds: float) -> Course:
    """Return a desktop's course: it jitters each second, and twice a game takes most memory."""
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
    # Low at first; after a third of it all the rest is released.
    "release": lambda _draw, seconds: [(0.0, 0.28), (seconds * 0.35, 1.0)],
}


def turns(
    rounds: int, contestants: Sequence[str], seed: int, seconds: float
) -> Iterator[tuple[int, str, str, Course]]:
    """Yield each turn as its round, the course's name, the contestant, and the course.

    Another contestant begins in each round, and all of a round meet the same course.
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
    """Return the median over the rounds of one's items to the other's; `None` where no round has both."""
    known = {row["round"]: row["items"] for row in theirs}
    found = [row["items"] / known[row["round"]] for row in mine if known.get(row["round"])]
    return statistics.median(found) if found else None


def least_between(course: Course, from_s: float, to_s: float) -> float:
    now = max((at_s, share) for at_s, share in course if at_s <= max(0.0, from_s))[1]
    return min([now, *(share for at_s, share in course if from_s < at_s <= to_s)])


class KernelCap:
    """`RLIMIT_DATA` of a process of this user, given what the kernel counts when it is ready."""

    def __init__(self, pid: int, base_bytes: int) -> None:
        self._job, self._base_bytes = psutil.Process(pid), base_bytes
        self._hard = self._job.rlimit(psutil.RLIMIT_DATA)[1]
        self._last_s = 0.0

    def clock_s(self) -> float:
        """Return the job's processor time, to 10 ms; none passes once it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = self._job.cpu_times()
            self._last_s = times.user + times.system
        return self._last_s

    def leave(self, size_bytes: int) -> None:
        """Leave the job so much, beside what it held when it was ready."""
        self._set(self._base_bytes + size_bytes)

    def close(self) -> None:
        self._set(self._hard)

    def _set(self, soft: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # the bench finds out when it listens
            self._job.rlimit(psutil.RLIMIT_DATA, (soft, self._hard))


def follow(one: Child, cap: KernelCap, course: Course, seconds: float, whole_bytes: int) -> Any:  # noqa: ANN401 - whatever it tells
    """Start a contestant, move its cap along the course, and return what it tells at the end."""
    cap.leave(int(course[0][1] * whole_bytes))
    began_s = cap.clock_s()
    one.send("go")
    for at_s, share in course[1:]:
        if _told_before(one.pipe, cap, began_s + at_s):
            break  # it has given up, or crashed
        cap.leave(int(share * whole_bytes))
    _told_before(one.pipe, cap, began_s + seconds)
    return one.receive(PATIENCE_S)


def _told_before(connection: Connection, cap: KernelCap, until_s: float) -> bool:
    """Wait for a moment of the course; tell whether the contestant has something to say before."""
    moved_s, seen_s = time.monotonic(), cap.clock_s()
    while (left_s := until_s - cap.clock_s()) > 0:
        if connection.poll(left_s):
            return True
        if cap.clock_s() > seen_s:
            moved_s, seen_s = time.monotonic(), cap.clock_s()
        elif time.monotonic() - moved_s > PATIENCE_S:
            raise TimeoutError(f"nothing has run for {PATIENCE_S:.0f} s")
    return False
