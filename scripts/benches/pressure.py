"""The work a job gets done while others take its memory and give it back: ours, accelerate's, toma's, and an ideal's.

The simulator's question with real failures. Each contestant trains the same job in a process of its own, one after
the other, under the same course of a cap that moves meanwhile; who begins changes from round to round, because a
machine is not as fast in one minute as in the next. Ratios are taken within a round.

accelerate and toma run as their users run them: what they decorate is the whole training loop. They are spared what
their users are not: model and optimiser outlive a restart, and what was done before a failure counts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benches.common import Result, progress
from benches.pressure_caps import (
    COURSES,
    PATIENCE_S,
    Course,
    KernelCap,
    NeighbourCap,
    child,
    least_between,
    leave_to_the_bench,
)
from benches.pressure_job import Ground, Job, Scouted, scout
from workers import oom
from workers.settings import FailureKind
from workers.units import MIB

OTHERS = ("accelerate", "toma")
_TARGET = 1.25
_BEYOND = 1.5
"""Where accelerate and toma begin, as a multiple of what fits when nobody else wants memory: their users begin with
too much. Halved once it is 75 %, the average luck of whoever halves."""
_IDLE_S = 0.02
"""How long a contestant waits that was told to run nothing."""
_IDEAL_MARGIN = 0.02
"""Keeps the ideal from failing over what the scout's line does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Who runs, and against what."""

    contestant: str
    course: Course
    seconds: float
    scouted: Scouted
    """The job is everybody's; the rest is what only the ideal is told."""

    @property
    def largest(self) -> int:
        """Where accelerate and toma begin, and what ours never exceeds."""
        return int(_BEYOND * self.scouted.fits)


class Run:
    """One turn of one contestant, and its books."""

    def __init__(self, turn: Turn, ground: Ground, job: Job, connection: Connection) -> None:
        """The course begins now."""
        self.turn = turn
        self.ground = ground
        self.items = self.steps = self.largest_step = 0
        self.idle_s = 0.0
        self.failed_at_s: list[float] = []
        self._job = job
        self._connection = connection
        self._began_s = ground.clock_s()

    @property
    def at_s(self) -> float:
        """Seconds into the course."""
        return self.ground.clock_s() - self._began_s

    def over(self) -> bool:
        """Tell whether the course has ended, or whoever started this."""
        return self.at_s >= self.turn.seconds or self._connection.poll()

    def step(self, items: int) -> int:
        """Train once, write it down, and return the most memory it took.

        Raises:
            RuntimeError: Out of memory; written down, too.

        """
        try:
            peak_bytes = self._job.step(items)
        except Exception:
            self.failed_at_s.append(self.at_s)
            raise
        if self.at_s <= self.turn.seconds:  # what ends after the end is nobody's work
            self.items += items
            self.steps += 1
            self.largest_step = max(self.largest_step, items)
        return peak_bytes

    def attempt(self, items: int) -> tuple[bool, int | None]:
        """Train once as the engine does: judge inside the handler, recover outside; whether it went well, and the peak.

        Raises:
            Exception: It was not the memory.

        """
        try:
            return True, self.step(items)
        except Exception as error:
            if oom.classify(error).kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
                raise
        self.ground.give_back()  # not in the handler, whose exception holds the tensors
        return False, None


def _ours(run: Run, *, sees: bool) -> None:
    from workers.resilience.adaptive_size import AdaptiveSize

    sizes = AdaptiveSize(run.turn.largest, exact_samples=True, clock=run.ground.clock_s)
    while not run.over():
        size = sizes.next(run.ground.free_bytes() if sees else None)
        if size is None:
            run.idle_s += _IDLE_S
            run.ground.wait(_IDLE_S)
            continue
        good, peak_bytes = run.attempt(size)
        if good:
            sizes.succeeded(size, peak_bytes if sees else None)
        else:
            sizes.failed(size)


def _others(run: Run, decorated: Callable[[Callable[[int], None]], Callable[[], None]]) -> None:
    def train(size: int) -> None:
        while not run.over():
            run.step(size)

    decorated(train)()


def _accelerate(run: Run) -> None:
    from accelerate.utils import find_executable_batch_size  # type: ignore[import-not-found]  # of the extra `bench`

    _others(run, lambda train: find_executable_batch_size(train, run.turn.largest))


def _toma(run: Run) -> None:
    from toma import toma  # type: ignore[import-not-found]  # of the extra `bench`

    _others(run, toma.batch(initial_batchsize=run.turn.largest))


def _ideal(run: Run) -> None:
    """Run the largest size that fits until the step is done: it knows what is to come."""
    known = run.turn.scouted
    longest_s = known.fixed_s + known.unit_s * known.fits
    while not run.over():
        now, ahead = (
            known.memory_bytes * least_between(run.turn.course, run.at_s, run.at_s + span_s)
            for span_s in (0.0, longest_s)
        )
        # What the process has come to hold beside the job is gone, whatever the course says.
        left_bytes = run.ground.free_bytes() - (now - ahead)
        run.attempt(known.largest_within(left_bytes / (1 + _IDEAL_MARGIN)))


CONTESTANTS: Mapping[str, Callable[[Run], None]] = {
    "ours": lambda run: _ours(run, sees=True),
    "blind": lambda run: _ours(run, sees=False),
    "accelerate": _accelerate,
    "toma": _toma,
    "ideal": _ideal,
}
"""By name. "ours" is told the free memory before each step and the peak after it, "blind" is ours and told neither."""

_MODULES = {"ours": "workers.resilience.adaptive_size", "accelerate": "accelerate.utils", "toma": "toma"}
"""Loaded before the cap is set: what a module takes is not the job's."""


def contest(connection: Connection, turn: Turn) -> None:
    """Be one contestant: say what is held, wait for the moment of the start, run, and send a row of the table."""
    leave_to_the_bench()
    scouted = turn.scouted
    ground, job = scouted.open()
    job.step(scouted.fits)  # what libraries keep for a large step, they have now
    if turn.contestant in _MODULES:
        importlib.import_module(_MODULES[turn.contestant])
    # As the engine does: modules live for ever, and no collection must walk them.
    gc.collect()
    gc.freeze()
    ground.settle(lambda: job.step(scouted.fits))
    job.sweeps_s.clear()
    connection.send((os.getpid(), ground.base_bytes()))
    connection.recv()  # the cap stands
    run = Run(turn, ground, job, connection)
    ended: str | None = None
    try:
        CONTESTANTS[turn.contestant](run)
    except Exception as error:  # noqa: BLE001 - a contestant that gives up is a finding
        ended = f"{type(error).__name__} at {run.at_s:.1f} s: {' '.join(str(error).split())[:300]}"
    ground.lift()
    row = {
        "items": run.items,
        "failures": len(run.failed_at_s),
        "steps": run.steps,
        "largest_step": run.largest_step,
        "idle_s": run.idle_s,
        # The same work in every step: how fast the machine was meanwhile.
        "sweep_ms": 1e3 * statistics.median(job.sweeps_s or [math.nan]),
        "failed_at_s": [round(at_s, 2) for at_s in run.failed_at_s],
        "ended": ended,
    }
    with contextlib.suppress(BrokenPipeError):  # the bench was killed
        connection.send((row, job.last_loss))


def run(
    device: str, seconds: float, rounds: int, seed: int, contestants: Sequence[str], memory_mib: float | None = None
) -> Result:
    """Let the contestants take turns.

    Args:
        device: "cpu" or "cuda".
        seconds: Length of each course.
        rounds: How often each contestant meets each course.
        seed: The courses' chance; a round has the same for all.
        contestants: Names of `CONTESTANTS`.
        memory_mib: What a step may take when nobody else wants memory; `None` for the default of the device.

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
        with child(scout, device, memory_mib and int(memory_mib * MIB)) as connection:
            scouted: Scouted = _hear(connection, "the scout")
    except (EOFError, TimeoutError) as error:
        return Result(bench="pressure", figures={"device": device}, broken=[str(error)])
    for point in scouted.points:
        progress(f"{point['items']:>8.0f} items: {point['items_per_s']:,.0f} a second, {point['peak_mib']:.1f} MiB")
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for number, (name, draw_course) in itertools.product(range(rounds), COURSES.items()):
        chance = random.Random(f"{seed}/{number}/{name}")  # noqa: S311 - repeatable is what is wanted
        course = draw_course(chance, seconds)
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            turn = Turn(contestant=contestant, course=course, seconds=seconds, scouted=scouted)
            try:
                row, last_loss = _take_turn(turn)
            except (EOFError, RuntimeError, TimeoutError) as error:
                broken.append(f"round {number + 1}, {name}, {contestant}: {error}")
                continue
            rows.append({"round": number + 1, "course": name, "contestant": contestant, **row})
            ended = f", ended: {row['ended']}" if row["ended"] else ""
            # That others give up is a finding and not a flaw of the benchmark.
            if ended and contestant not in OTHERS:
                broken.append(f"round {number + 1}, {name}: {contestant}{ended}")
            if row["steps"] and not math.isfinite(last_loss):
                broken.append(f"round {number + 1}, {name}: {contestant} computed nonsense: a loss of {last_loss}")
            told = f"{row['items']:>8} items, {row['failures']} failures{ended}"
            progress(f"{number + 1}/{rounds}  {name:>8}  {contestant:>10}  {told}")
    return Result(bench="pressure", figures={**_job_figures(scouted), **_figures(rows, seconds, rounds)}, broken=broken)


def _take_turn(turn: Turn) -> tuple[dict[str, Any], float]:
    """Run one contestant under its course; return its row and its last loss.

    Raises:
        EOFError: Its process ended before it had sent its books.
        RuntimeError: The device has not enough memory.
        TimeoutError: It stands still.

    """
    memory_bytes = turn.scouted.memory_bytes
    levels = [(at_s, int(share * memory_bytes)) for at_s, share in turn.course]
    with child(contest, turn) as connection:
        pid, base_bytes = _hear(connection, turn.contestant)
        on_card = turn.scouted.device == "cuda"
        cap = NeighbourCap(memory_bytes, levels[0][1]) if on_card else KernelCap(pid, base_bytes)
        with contextlib.closing(cap):
            cap.leave(levels[0][1])
            began_s = cap.clock_s()
            connection.send("go")
            for at_s, left_bytes in levels[1:]:
                if _told_before(connection, cap, began_s + at_s):
                    break  # it has given up, or crashed
                cap.leave(left_bytes)
            _told_before(connection, cap, began_s + turn.seconds)
            told: tuple[dict[str, Any], float] = _hear(connection, turn.contestant)
    return told


def _told_before(connection: Connection, cap: KernelCap | NeighbourCap, until_s: float) -> bool:
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
        elif time.monotonic() - moved_s > PATIENCE_S:
            raise TimeoutError(f"nothing has run for {PATIENCE_S:.0f} s")
    return False


def _hear(connection: Connection, who: str) -> Any:  # noqa: ANN401 - whatever was sent
    """Return what a child sends next.

    Raises:
        EOFError: It ended.
        TimeoutError: It sent nothing.

    """
    if not connection.poll(PATIENCE_S):
        raise TimeoutError(f"{who} said nothing for {PATIENCE_S:.0f} s")
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        raise EOFError(f"the process of {who} ended by itself; what it said last stands above") from None


def _job_figures(scouted: Scouted) -> dict[str, Any]:
    speeds = [point["items_per_s"] for point in scouted.points]
    return {
        "device": scouted.device,
        "name": scouted.device_name,
        "memory_mib": scouted.memory_bytes / MIB,
        "tables_rows": scouted.rows,
        "sizes": [dict(point) for point in scouted.points],
        "larger_is_faster": all(slower < faster for slower, faster in itertools.pairwise(speeds)),
        "largest_that_fits": scouted.fits,
        "others_begin_at": int(_BEYOND * scouted.fits),
        "half_speed_at": scouted.fixed_s / scouted.unit_s / scouted.fits,
    }


def _figures(rows: Sequence[dict[str, Any]], seconds: float, rounds: int) -> dict[str, Any]:
    asked = itertools.product(COURSES, CONTESTANTS)
    totals = [total for course, contestant in asked if (total := _total(rows, course, contestant)) is not None]
    pairs = [
        (ours[f"to_{other['contestant']}"], ours["failures"] < other["failures"])
        for ours, other in itertools.product(totals, totals)
        if ours["contestant"] == "ours" and other["contestant"] in OTHERS and other["course"] == ours["course"]
    ]
    judged = len(pairs) == len(OTHERS) * len(COURSES) and all(ratio is not None for ratio, _ in pairs)
    least = min(ratio for ratio, _ in pairs) if judged else None
    fewer = all(fewer for _, fewer in pairs) if judged else None
    return {
        "seconds": seconds,
        "rounds": rounds,
        "turns": list(rows),
        "totals": totals,
        "target": _TARGET,
        "least_to_others": least,
        "fewer_failures": fewer,
        "target_met": None if least is None else least >= _TARGET and fewer,
    }


def _total(rows: Sequence[dict[str, Any]], course: str, contestant: str) -> dict[str, Any] | None:
    """Return one contestant's rounds on one course as one row, `None` if there is none."""
    mine = [row for row in rows if row["course"] == course and row["contestant"] == contestant]
    if not mine:
        return None
    total = {
        "course": course,
        "contestant": contestant,
        "items_median": statistics.median(row["items"] for row in mine),
        "failures": sum(row["failures"] for row in mine),
        "most_failures": max(row["failures"] for row in mine),
        "sweep_ms": statistics.median(row["sweep_ms"] for row in mine),
    }
    for other in (*OTHERS, "ideal"):
        theirs = {row["round"]: row["items"] for row in rows if (row["course"], row["contestant"]) == (course, other)}
        found = [row["items"] / theirs[row["round"]] for row in mine if theirs.get(row["round"])]
        total[f"to_{other}"] = statistics.median(found) if found else None
    return total
