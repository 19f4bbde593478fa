"""Measures the work of a training job while its memory cap falls and rises: with our policy, with
accelerate, with toma, and with an ideal.

The contestants train the same job, one after the other, each in its own process, under the same
course of the cap. Each round starts with another contestant, and ratios are taken within a round.
accelerate and toma run as their users run them: they decorate the whole training loop. Two rules
favour them: model and optimiser survive a restart, and work before a failure counts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benches import pressure_caps
from benches.common import PATIENCE_S, Child, ChildDiedError, Result, progress, told_by
from benches.pressure_caps import COURSES, Course, KernelCap
from benches.pressure_job import MEMORY_BYTES, Scouted, scout
from workers import oom
from workers.resilience.adaptive_size import AdaptiveSize
from workers.settings import FailureKind
from workers.units import MIB

OTHERS = ("accelerate", "toma")
_TARGET = 1.25
#: First size of accelerate and toma, as a multiple of the largest that fits without other programs:
#: their users begin too large. Halved once it is 75 %, the average result of halving.
_BEYOND = 1.5
#: Wait of a contestant whose policy runs nothing.
_IDLE_S = 0.02
#: Margin against failures of the ideal due to errors of the scout's interpolation.
_IDEAL_MARGIN = 0.02


class _Run:
    """One turn of one contestant; only the ideal may read the course and the scout's results."""

    def __init__(
        self, connection: Connection, course: Course, seconds: float, scouted: Scouted
    ) -> None:
        self.connection, self.course = connection, course
        self.seconds, self.scouted = seconds, scouted
        #: First size of accelerate and toma, and limit of ours.
        self.largest = int(_BEYOND * scouted.fits)
        self.host, self.job = scouted.open()
        self.items = self.steps = self.failures = 0
        self.began_s = 0.0

    @property
    def at_s(self) -> float:
        return self.host.clock_s() - self.began_s

    def over(self) -> bool:
        return self.at_s >= self.seconds or self.connection.poll()

    def step(self, items: int) -> int:
        """Train once and count the step or its failure; return the peak, or raise the failure."""
        try:
            peak_bytes = self.job.step(items)
        except Exception:
            self.failures += 1
            raise
        if self.at_s <= self.seconds:  # a step that ends after the turn does not count
            self.items += items
            self.steps += 1
        return peak_bytes

    def attempt(self, items: int) -> tuple[bool, int | None]:
        """Train once; return success and peak. As in the engine, recover outside the handler."""
        try:
            return True, self.step(items)
        except Exception as error:
            if oom.classify(error).kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
                raise
        gc.collect()  # not in the handler, whose exception keeps the tensors alive
        return False, None


def _ours(run: _Run) -> None:
    """Run steps with the engine's policy, which gets the free memory before each, then its peak."""
    sizes = AdaptiveSize(run.largest, exact_samples=True, clock=run.host.clock_s)
    while not run.over():
        size = sizes.next(run.host.free_bytes())
        if size is None:
            run.host.wait(_IDLE_S)
            continue
        good, peak_bytes = run.attempt(size)
        if good:
            sizes.succeeded(size, peak_bytes)
        else:
            sizes.failed(size)


def _others(run: _Run, decorated: Callable[[Callable[[int], None]], Callable[[], None]]) -> None:
    def train(size: int) -> None:
        while not run.over():
            run.step(size)

    decorated(train)()


def _accelerate(run: _Run) -> None:
    from accelerate.utils import find_executable_batch_size  # type: ignore[import-untyped]  # of the extra `bench`

    _others(run, lambda train: find_executable_batch_size(train, run.largest))


def _toma(run: _Run) -> None:
    from toma import toma  # type: ignore[import-not-found]  # of the extra `bench`

    _others(run, toma.batch(initial_batchsize=run.largest))


def _ideal(run: _Run) -> None:
    """Run the largest size that fits until the end of the step: the ideal knows the course."""
    known = run.scouted
    longest_s = known.fixed_s + known.unit_s * known.fits
    while not run.over():
        now, ahead = (
            MEMORY_BYTES * pressure_caps.least_between(run.course, run.at_s, run.at_s + span_s)
            for span_s in (0.0, longest_s)
        )
        # Memory that the process holds beside the job is unavailable, whatever the course says.
        left_bytes = run.host.free_bytes() - (now - ahead)
        run.attempt(known.largest_within(left_bytes / (1 + _IDEAL_MARGIN)))


CONTESTANTS: Mapping[str, Callable[[_Run], None]] = {
    "ours": _ours, "accelerate": _accelerate, "toma": _toma, "ideal": _ideal,
}  # fmt: skip
#: Imported before the cap is set: memory of a module does not count as the job's.
_MODULES = {"accelerate": "accelerate.utils", "toma": "toma"}


def contest(
    connection: Connection, contestant: str, course: Course, seconds: float, scouted: Scouted
) -> None:
    """Run one contestant in a child: send the memory held, wait for the start, run, send a row."""
    run = _Run(connection, course, seconds, scouted)
    run.job.step(scouted.fits)  # so that libraries already hold their buffers for a large step
    if contestant in _MODULES:
        importlib.import_module(_MODULES[contestant])
    # As in the engine: modules are never freed, so collections must not traverse them.
    gc.collect()
    gc.freeze()
    run.host.settle(lambda: run.job.step(scouted.fits))
    run.job.sweeps_s.clear()
    connection.send((os.getpid(), run.host.base_bytes()))
    connection.recv()  # the cap is set
    run.began_s = run.host.clock_s()
    ended: str | None = None
    try:
        CONTESTANTS[contestant](run)
    except Exception as error:  # noqa: BLE001 - that a contestant gives up is a result
        ended = f"{type(error).__name__} at {run.at_s:.1f} s: {' '.join(str(error).split())[:300]}"
    run.host.lift()
    row = {
        "items": run.items, "failures": run.failures, "steps": run.steps,
        # The same work in every step, which shows the speed of the machine.
        "sweep_ms": 1e3 * statistics.median(run.job.sweeps_s or [math.nan]),
        "ended": ended,
    }  # fmt: skip
    connection.send((row, run.job.last_loss))


def run(seconds: float, rounds: int, seed: int, contestants: Sequence[str]) -> Result:
    """Run the contestants in turn; exit with code 2 if one is not installed."""
    missing = [
        name for name in OTHERS if name in contestants and importlib.util.find_spec(name) is None
    ]
    if missing:
        progress(f"not installed: {', '.join(missing)}; type: pip install '.[bench]'")
        raise SystemExit(2)
    try:
        scouted: Scouted = told_by("the scout", scout, within_s=PATIENCE_S)
    except ChildDiedError as error:
        return Result(bench="pressure", figures={}, broken=[str(error)])
    for point in scouted.points:
        progress(
            "{items:>8.0f} items: {items_per_s:,.0f} a second, {peak_mib:.1f} MiB".format(**point)
        )
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    turns = pressure_caps.turns(rounds, contestants, seed, seconds)
    for number, name, contestant, course in turns:
        where = f"round {number}, {name}"
        try:
            row, last_loss = _take_turn(contestant, course, seconds, scouted)
        except (RuntimeError, TimeoutError) as error:
            broken.append(f"{where}, {contestant}: {error}")
            continue
        rows.append({"round": number, "course": name, "contestant": contestant, **row})
        ended = f", ended: {row['ended']}" if row["ended"] else ""
        # That another contestant gives up is a result and not a flaw of the benchmark.
        if ended and contestant not in OTHERS:
            broken.append(f"{where}: {contestant}{ended}")
        if row["steps"] and not math.isfinite(last_loss):
            broken.append(f"{where}: {contestant} computed nonsense: a loss of {last_loss}")
        result = f"{row['items']:>8} items, {row['failures']} failures{ended}"
        progress(f"{number}/{rounds}  {name:>8}  {contestant:>10}  {result}")
    figures = {**_job_figures(scouted), **_figures(rows, seconds, rounds)}
    return Result(bench="pressure", figures=figures, broken=broken)


def _take_turn(
    contestant: str, course: Course, seconds: float, scouted: Scouted
) -> tuple[dict[str, Any], float]:
    """Run one contestant under its course; return its row and its last loss."""
    child = Child(contestant, contest, contestant, course, seconds, scouted)
    with contextlib.closing(child) as one:
        pid, base_bytes = one.receive(PATIENCE_S)
        with contextlib.closing(KernelCap(pid, base_bytes)) as cap:
            answer: tuple[dict[str, Any], float] = pressure_caps.follow(
                one, cap, course, seconds, MEMORY_BYTES
            )
    return answer


def _job_figures(scouted: Scouted) -> dict[str, Any]:
    speeds = [point["items_per_s"] for point in scouted.points]
    return {
        "name": scouted.device_name, "memory_mib": MEMORY_BYTES / MIB, "tables_rows": scouted.rows,
        "sizes": [dict(point) for point in scouted.points],
        "larger_is_faster": all(slower < faster for slower, faster in itertools.pairwise(speeds)),
        "largest_that_fits": scouted.fits, "others_begin_at": int(_BEYOND * scouted.fits),
        "half_speed_at": scouted.fixed_s / scouted.unit_s / scouted.fits,
    }  # fmt: skip


def _figures(rows: Sequence[dict[str, Any]], seconds: float, rounds: int) -> dict[str, Any]:
    totals = [
        _total(rows, mine)
        for course, contestant in itertools.product(COURSES, CONTESTANTS)
        if (mine := pressure_caps.rows_of(rows, course, contestant))
    ]
    pairs = [
        (ours[f"to_{other['contestant']}"], ours["failures"] < other["failures"])
        for ours, other in itertools.product(totals, totals)
        if ours["contestant"] == "ours"
        and other["contestant"] in OTHERS
        and other["course"] == ours["course"]
    ]
    ratios = [ratio for ratio, _ in pairs if ratio is not None]
    is_judged = len(ratios) == len(OTHERS) * len(COURSES)
    least = min(ratios) if is_judged else None
    fewer = all(fewer for _, fewer in pairs) if is_judged else None
    return {
        "seconds": seconds, "rounds": rounds, "turns": list(rows), "totals": totals,
        "target": _TARGET, "least_to_others": least, "fewer_failures": fewer,
        "target_met": None if least is None else least >= _TARGET and fewer,
    }  # fmt: skip


def _total(rows: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    course = mine[0]["course"]
    median = {
        "items_median": statistics.median(row["items"] for row in mine),
        "failures": sum(row["failures"] for row in mine),
        "most_failures": max(row["failures"] for row in mine),
        "sweep_ms": statistics.median(row["sweep_ms"] for row in mine),
    }
    ratios = {}
    for other in (*OTHERS, "ideal"):
        theirs = pressure_caps.rows_of(rows, course, other)
        ratios[f"to_{other}"] = pressure_caps.ratio_within_rounds(mine, theirs)
    return {"course": course, "contestant": mine[0]["contestant"], **median, **ratios}
