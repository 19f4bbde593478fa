"""Useful samples a second of a training while a cap moves: ours, Composer's, accelerate's, Lightning's, and two bounds.

Each contestant trains the same model on the same samples in a process of its own, one after the other, on one thread.
Another one begins in each round, and ratios are taken within a round. `fixed` runs the part that always fits, `ideal`
knows the course. Steps that a restart lost are not useful; those of a wrong effective batch are, and are told.

The cap is `RLIMIT_DATA`, set by this process with prlimit(2) at any moment of a step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benches.common import Child, ChildDiedError, Result, judged, progress
from benches.pressure_caps import PATIENCE_S, TRAIN_COURSES, Course, KernelCap
from benches.train_pressure_contestants import contest
from benches.train_pressure_job import BATCH, Sizes, measure
from workers.units import MIB

#: More than the whole effective batch takes at once: a desktop's own use of memory is no pressure here.
_ROOM: Final = 1.3
_FULL: Final = 0.98
#: What a course gives back at once, as a share of all memory, to be called a release.
_RELEASE: Final = 0.4
_ALONE_S: Final = 1.2
_SHIMS: Final = (
    "composer on a CPU: torchvision's ops nms and qnms are stubs, and two functions are replaced: "
    "_is_auto_microbatching, which refuses a CPU, and _is_cuda_oom, which knows a card's words only"
)


def run(
    course: Sequence[str],
    contestants: Sequence[str],
    seconds: float,
    rounds: int,
    seed: int,
    composer_venv: str,
) -> Result:
    """Let the contestants take turns; one that is not installed is a row with the reason."""
    device = "cpu"
    try:
        with contextlib.closing(Child("the measurement", measure, device, _ALONE_S * seconds)) as one:
            sizes, expected, alone_per_s = one.receive(PATIENCE_S + 2 * seconds)
    except ChildDiedError as error:
        return Result(bench="train-pressure", figures={"device": device}, broken=[str(error)])
    memory_bytes = _ROOM * sizes.most_bytes
    for rows, peak_bytes, step_s in sizes.points:
        progress(f"{rows:>3} samples at once: {rows / step_s:,.0f} a second, {peak_bytes / MIB:.1f} MiB")
    turns: list[dict[str, Any]] = []
    broken: list[str] = []
    path = next(map(str, Path(composer_venv).glob("lib/python3*/site-packages")), composer_venv)
    for number, name in itertools.product(range(rounds), course):
        drawn = TRAIN_COURSES[name](random.Random(f"{seed}/{number}/{name}"), seconds)  # noqa: S311 - repeatable
        first = number % len(contestants)
        for who in (*contestants[first:], *contestants[:first]):
            told = _take_turn(who, device, drawn, seconds, memory_bytes, sizes, path)
            row = {"round": number + 1, "course": name, "contestant": who}
            turns.append(row | _judged_turn(told, drawn, seconds, expected))
            if turns[-1]["ended"] and who in {"ours", "fixed", "ideal"}:
                broken.append(f"round {number + 1}, {name}, {who}: {turns[-1]['ended']}")
            progress(f"{number + 1}/{rounds} {name} {who}: {turns[-1]['useful_per_s']} samples/s")
    totals = _totals(turns)
    figures = {
        "device": device,
        "seconds": seconds,
        "rounds": rounds,
        "batch": BATCH,
        "memory_mib": memory_bytes / MIB,
        "shims": _SHIMS,
        "alone_per_s": alone_per_s,
        "sizes": [
            {"rows": rows, "peak_mib": peak_bytes / MIB, "samples_per_s": rows / step_s}
            for rows, peak_bytes, step_s in sizes.points
        ],
        "turns": turns,
        "totals": totals,
        "targets": _targets(totals),
    }
    return Result(bench="train-pressure", figures=figures, broken=broken)


def _take_turn(
    who: str, device: str, course: Course, seconds: float, memory_bytes: float, sizes: Sizes, composer: str
) -> Mapping[str, Any] | str:
    """Run one contestant under its course; return what it tells, or why there is nothing."""
    arguments = (who, device, course, seconds, memory_bytes, sizes, composer)
    try:
        with contextlib.closing(Child(who, contest, *arguments)) as one:
            ready = one.receive(PATIENCE_S)
            if isinstance(ready, str):
                return ready
            pid, base_bytes = ready
            with contextlib.closing(KernelCap(pid, base_bytes)) as cap:
                began_s = time.monotonic()
                for at_s, share in course:
                    if one.pipe.poll(max(0.0, began_s + at_s - time.monotonic())) and at_s:
                        break  # it has given up
                    cap.leave(int(share * memory_bytes))
                    if at_s == 0.0:
                        one.send("go")
                one.pipe.poll(max(0.0, began_s + seconds - time.monotonic()))
                told: Mapping[str, Any] = one.receive(PATIENCE_S)
                return told
    except (ChildDiedError, TimeoutError) as error:
        return str(error)


def _judged_turn(
    told: Mapping[str, Any] | str, course: Course, seconds: float, expected: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of one turn."""
    keys = ("useful_per_s", "rows_to_needed", "starts", "wrong_batches", "loss_gap", "failures_per_minute", "back_s")
    if isinstance(told, str):
        return dict.fromkeys(keys) | {"ended": told, "sizes": []}
    steps = len(told["losses"]) - told["skipped"]
    both = zip(told["losses"], expected, strict=False)
    releases = [
        (at_s, next((later for later, after in course[number + 1 :] if after < share - _RELEASE), seconds))
        for number, (at_s, share) in enumerate(course)
        if number and share - course[number - 1][1] >= _RELEASE
    ]
    full = [at_s for at_s, rows in told["parts"] if rows >= _FULL * BATCH]
    backs = [next((at_s - from_s for at_s in full if from_s <= at_s < to_s), math.inf) for from_s, to_s in releases]
    return {
        "useful_per_s": steps * BATCH / seconds,
        "rows_to_needed": sum(rows for _, rows in told["parts"]) / max(1, steps * BATCH),
        "starts": told["starts"],
        "wrong_batches": told["wrong_batches"],
        "loss_gap": max((abs(own - other) / other for own, other in both), default=None),
        "failures_per_minute": len(told["failed_at_s"]) * 60 / seconds,
        # None: there was no release, or it never came back.
        "back_s": max(backs) if backs and max(backs) < math.inf else None,
        "ended": told["ended"],
        "sizes": _by_second(told["parts"], seconds),
    }


def _by_second(parts: Sequence[tuple[float, int]], seconds: float) -> list[int]:
    """Return the largest part that began in each second; 0 where none did."""
    most = [0] * math.ceil(seconds)
    for at_s, rows in parts:
        if 0 <= at_s < seconds:
            most[int(at_s)] = max(most[int(at_s)], rows)
    return most


def _totals(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    totals = []
    for course, who in dict.fromkeys((turn["course"], turn["contestant"]) for turn in turns):
        mine = [turn for turn in turns if (turn["course"], turn["contestant"]) == (course, who)]
        speeds = [turn["useful_per_s"] for turn in mine if turn["useful_per_s"] is not None]
        total = {"course": course, "contestant": who, "useful_per_s": statistics.median(speeds) if speeds else None}
        for key in ("rows_to_needed", "starts", "wrong_batches", "loss_gap", "failures_per_minute", "back_s"):
            found = [turn[key] for turn in mine]
            total[key] = None if None in found else max(found)
        for other in ("composer", "ideal"):
            theirs = {
                turn["round"]: turn["useful_per_s"]
                for turn in turns
                if (turn["course"], turn["contestant"]) == (course, other)
            }
            mine_per_s = {turn["round"]: turn["useful_per_s"] for turn in mine}
            ratios = [own / theirs[number] for number, own in mine_per_s.items() if own and theirs.get(number)]
            total[f"to_{other}"] = statistics.median(ratios) if ratios else None
        totals.append(total | {"ended": next((turn["ended"] for turn in mine if turn["ended"]), None)})
    return totals


def _targets(totals: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    ours = next((row for row in totals if (row["course"], row["contestant"]) == ("game", "ours")), None)
    if ours is None:
        return []
    return [
        judged("useful samples/s to composer's", ours["to_composer"], at_least=1.25),
        judged("useful samples/s to the ideal's", ours["to_ideal"], at_least=0.95),
        judged("seconds until back at 98 % of full size", ours["back_s"], at_most=10.0),
        judged("failures a minute", ours["failures_per_minute"], at_most=2.0),
        judged("rows computed to needed", ours["rows_to_needed"], at_most=1.02),
    ]
