"""The work a job gets done while others take its memory and give it back: ours, accelerate's, toma's, and an ideal's.

The simulator's question with real failures. Each contestant trains the same job in a process of its own, one after
the other, under the same course of a cap that moves meanwhile; who begins changes from round to round, because a
machine is not as fast in one minute as in the next. Ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from benches.common import Result, progress
from benches.pressure_caps import COURSES, Cap, KernelCap, NeighbourCap
from benches.pressure_contest import CONTESTANTS, Books, Turn, contest
from benches.pressure_scout import Scouted, scout
from workers.units import MIB

OTHERS = ("accelerate", "toma")
_TARGET = 1.25
_BEYOND = 1.5
"""Where accelerate and toma begin, as a multiple of what fits when nobody else wants memory: their users begin with
too much. Halved once it is 75 %, the average luck of whoever halves."""

_PATIENCE_S = 300.0
"""For a process to come up, and to end when its course has."""


def run(
    device: str,
    memory_bytes: int | None,
    seconds: float,
    rounds: int,
    seed: int,
    contestants: Sequence[str] = tuple(CONTESTANTS),
) -> Result:
    """Let the contestants take turns.

    Args:
        device: "cpu" or "cuda".
        memory_bytes: What a step may take when nobody else wants memory; `None` for the default of the device.
        seconds: Length of each course.
        rounds: How often each contestant meets each course.
        seed: The courses' chance; a round has the same for all.
        contestants: Names of `CONTESTANTS`.

    Raises:
        SystemExit: With code 2, because a contestant is not installed or there is no card.

    """
    missing = [name for name in OTHERS if name in contestants and importlib.util.find_spec(name) is None]
    if missing:
        progress(f"not installed: {', '.join(missing)}; type: pip install '.[bench]'")
        raise SystemExit(2)
    if device == "cuda" and not torch.cuda.is_available():
        progress(f"torch {torch.__version__} sees no CUDA card here; type: --device cpu")
        raise SystemExit(2)
    try:
        with _child(scout, device, memory_bytes) as connection:
            scouted: Scouted = _hear(connection, "the scout", _PATIENCE_S)
    except (EOFError, TimeoutError) as error:
        return Result(bench="pressure", figures={"device": device}, broken=[str(error)])
    for point in scouted.points:
        progress(f"{point['items']:>8.0f} items: {point['items_per_s']:,.0f} a second, {point['peak_mib']:.1f} MiB")
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for number in range(rounds):
        for name, draw_course in COURSES.items():
            chance = random.Random(f"{seed}/{number}/{name}")  # noqa: S311 - repeatable is what is wanted
            course = draw_course(chance, seconds)
            first = number % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                turn = Turn(
                    contestant=contestant,
                    largest=int(_BEYOND * scouted.fits),
                    course=course,
                    seconds=seconds,
                    scouted=scouted,
                )
                try:
                    books = _take_turn(turn)
                except (EOFError, RuntimeError, TimeoutError) as error:
                    broken.append(f"round {number + 1}, {name}, {contestant}: {error}")
                    continue
                rows.append({"round": number + 1, "course": name, "contestant": contestant, **_row(books)})
                broken += [f"round {number + 1}, {name}: {words}" for words in _amiss(contestant, books)]
                progress(
                    f"{number + 1}/{rounds}  {name:>8}  {contestant:>10}  {books.items:>8} items, "
                    f"{len(books.failed_at_s)} failures{', ended: ' + books.ended if books.ended else ''}"
                )
    return Result(bench="pressure", figures={**_job_figures(scouted), **_figures(rows, seconds, rounds)}, broken=broken)


def _take_turn(turn: Turn) -> Books:
    """Run one contestant under its course.

    Raises:
        EOFError: Its process ended before it had sent its books.
        RuntimeError: The device has not enough memory.

    """
    memory_bytes = turn.scouted.spec.memory_bytes
    levels = [(at_s, int(share * memory_bytes)) for at_s, share in turn.course]
    with _child(contest, turn) as connection:
        pid, base_bytes = _hear(connection, turn.contestant, _PATIENCE_S)
        cap = (
            NeighbourCap(memory_bytes, levels[0][1])
            if turn.scouted.spec.device == "cuda"
            else KernelCap(pid, base_bytes)
        )
        try:
            cap.leave(levels[0][1])
            began_s = cap.clock_s()
            connection.send("go")
            for at_s, left_bytes in levels[1:]:
                if _told_before(connection, cap, began_s + at_s):
                    break  # it has given up, or crashed
                cap.leave(left_bytes)
            _told_before(connection, cap, began_s + turn.seconds)
            books: Books = _hear(connection, turn.contestant, _PATIENCE_S)
        finally:
            cap.close()
    return books


def _told_before(connection: Connection, cap: Cap, until_s: float) -> bool:
    """Wait for a moment of the course, and tell whether the contestant has something to say before.

    Raises:
        TimeoutError: The course stands still.

    """
    moved_s, seen_s = time.monotonic(), cap.clock_s()
    while (left_s := until_s - cap.clock_s()) > 0:
        if connection.poll(left_s):
            return True
        if cap.clock_s() > seen_s:
            moved_s, seen_s = time.monotonic(), cap.clock_s()
        elif time.monotonic() - moved_s > _PATIENCE_S:
            raise TimeoutError(f"nothing has run for {_PATIENCE_S:.0f} s")
    return False


@contextlib.contextmanager
def _child(body: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `body` in a process that ends with this block, and yield the pipe to it."""
    context = get_context("spawn")  # nothing of this process is to be in it
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def _hear(connection: Connection, who: str, patience_s: float) -> Any:  # noqa: ANN401 - whatever was sent
    """Return what a child sends next.

    Raises:
        EOFError: It ended.
        TimeoutError: It sent nothing.

    """
    if not connection.poll(patience_s):
        raise TimeoutError(f"{who} said nothing for {patience_s:.0f} s")
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        raise EOFError(f"the process of {who} ended by itself; what it said last stands above") from None


def _row(books: Books) -> dict[str, Any]:
    return {
        "items": books.items,
        "failures": len(books.failed_at_s),
        "steps": books.steps,
        "largest_step": books.largest_step,
        "idle_s": books.idle_s,
        "sweep_ms": books.sweep_s * 1e3,
        "failed_at_s": [round(at_s, 2) for at_s in books.failed_at_s],
        "ended": books.ended,
    }


def _amiss(contestant: str, books: Books) -> list[str]:
    """Return what makes a turn worthless; that others give up is a finding and not a flaw of the benchmark."""
    found = []
    if books.ended and contestant not in OTHERS:
        found.append(f"{contestant} gave up: {books.ended}")
    if books.steps and not math.isfinite(books.last_loss):
        found.append(f"{contestant} computed nonsense: a loss of {books.last_loss}")
    return found


def _job_figures(scouted: Scouted) -> dict[str, Any]:
    speeds = [point["items_per_s"] for point in scouted.points]
    half_items = scouted.fixed_s / scouted.unit_s
    return {
        "device": scouted.spec.device,
        "name": scouted.device_name,
        "memory_mib": scouted.spec.memory_bytes / MIB,
        "tables_rows": scouted.spec.rows,
        "sizes": [dict(point) for point in scouted.points],
        "larger_is_faster": all(slower < faster for slower, faster in itertools.pairwise(speeds)),
        "largest_that_fits": scouted.fits,
        "others_begin_at": int(_BEYOND * scouted.fits),
        "half_speed_at": half_items / scouted.fits,
    }


def _figures(rows: Sequence[dict[str, Any]], seconds: float, rounds: int) -> dict[str, Any]:
    totals = [
        total
        for course in COURSES
        for contestant in CONTESTANTS
        if (total := _total(rows, course, contestant)) is not None
    ]
    ours = [total for total in totals if total["contestant"] == "ours"]
    work = [total[f"to_{other}"] for total in ours for other in OTHERS]
    fewer = [
        total["failures"] < other["failures"]
        for total in ours
        for other in totals
        if other["course"] == total["course"] and other["contestant"] in OTHERS
    ]
    judged = len(work) == len(fewer) == len(OTHERS) * len(COURSES) and None not in work
    return {
        "seconds": seconds,
        "rounds": rounds,
        "turns": list(rows),
        "totals": totals,
        "target": _TARGET,
        "least_to_others": min(work) if judged else None,
        "fewer_failures": all(fewer) if judged else None,
        "target_met": min(work) >= _TARGET and all(fewer) if judged else None,
    }


def _total(rows: Sequence[dict[str, Any]], course: str, contestant: str) -> dict[str, Any] | None:
    """Return one contestant's rounds on one course as one row, `None` if there is none."""
    mine = [row for row in rows if row["course"] == course and row["contestant"] == contestant]
    if not mine:
        return None
    ratios = {
        other: [
            row["items"] / its["items"]
            for row in mine
            for its in rows
            if (its["course"], its["contestant"], its["round"]) == (course, other, row["round"]) and its["items"]
        ]
        for other in (*OTHERS, "ideal")
    }
    return {
        "course": course,
        "contestant": contestant,
        "items_median": statistics.median(row["items"] for row in mine),
        "failures": sum(row["failures"] for row in mine),
        "most_failures": max(row["failures"] for row in mine),
        **{f"to_{other}": statistics.median(found) if found else None for other, found in ratios.items()},
        "sweep_ms": statistics.median(row["sweep_ms"] for row in mine),
    }
