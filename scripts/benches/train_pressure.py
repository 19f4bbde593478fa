"""A training whose memory others take and give back: ours in the real engine, accelerate,
and two bounds.

Contestants train the same model on the same batches, one after the other, under a cap that is moved
from outside by prlimit(2), at any moment of a step. `fixed` uses the part that always fits, `ideal`
knows the course. Another contestant begins in each round, and ratios are taken within a round. CPU
only: on a card nothing of it has run.

A useful sample is one of an optimiser step that is part of the training when the time is up. Losses
are compared with those of a training that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import resource
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benches import pressure_caps, train_job
from benches.common import (
    PATIENCE_S,
    Child,
    Result,
    judged,
    lone_worker,
    median_of_known,
    progress,
    status_bytes,
    told_by,
)
from benches.pressure_caps import COURSES, Course, KernelCap, NeighbourCap
from benches.train_job import BATCH, trainer
from workers.training.schedule import micro_batches
from workers.units import MIB

#: Memory for a whole batch and this much more.
_ROOM = 1.15
#: Kept out of what a part may take: pages and small things.
_SLACK_BYTES = MIB
#: After a release this share of the full part counts as back.
_BACK = 0.98
#: Of a row, what a total has the median of.
_MEDIANS = (
    "useful_per_s", "rows_to_needed", "starts", "wrong_batches", "failures_per_min",
    "back_after_s", "loss_gap",
)  # fmt: skip


def run(
    seconds: float, rounds: int, seed: int, course: Sequence[str], contestants: Sequence[str]
) -> Result:
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # what is freed is really given back
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    need = _part_bytes()
    whole_bytes = int(_ROOM * need[BATCH]) + _SLACK_BYTES
    progress(
        f"a batch takes {need[BATCH] / MIB:.1f} MiB, a sample {need[1] / MIB:.2f}; the cap "
        f"{whole_bytes / MIB:.1f}"
    )
    courses = {name: COURSES[name] for name in course}
    for number, name, contestant, steps in pressure_caps.turns(
        rounds, courses, contestants, seed, seconds
    ):
        try:
            told = _turn(contestant, steps, seconds, whole_bytes)
        except Exception as error:  # noqa: BLE001 - the others go on
            told = {"ended": f"{type(error).__name__}: {error}"}
            if contestant in {"ours", "fixed", "ideal"}:
                broken.append(f"{name}, {contestant}: {told['ended']}")
        names = {"round": number, "course": name, "contestant": contestant}
        rows.append({**names, **_row(told, steps, seconds)})
        said = rows[-1]["ended"] or f"{rows[-1]['useful_per_s']} samples/s"
        progress(f"{number}/{rounds}  {name:>8}  {contestant:>10}  {said}")
    reference = _undisturbed(max(len(row["losses"]) for row in rows))
    for row in rows:
        losses = row.pop("losses")
        gaps = [
            abs(loss - reference[int(step)]) / reference[int(step)]
            for step, loss in losses.items()
            if int(step) in reference
        ]
        row["loss_gap"] = max(gaps, default=None)
    return Result(bench="train-pressure", figures=_figures(rows, contestants), broken=broken)


def _row(told: Mapping[str, Any], course: Course, seconds: float) -> dict[str, Any]:
    done = told.get("done_in_time", 0)
    steps = len(told.get("losses", {}))
    failed = told.get("failed_at_s", [])
    return {
        "useful_per_s": round(done * BATCH / seconds, 1),
        "rows_to_needed": told["rows"] / (steps * BATCH) if steps else None,
        "starts": told.get("starts"), "wrong_batches": told.get("wrong_batches"),
        "failures_per_min": 60 * len(failed) / seconds,
        "back_after_s": _back_after_s(told.get("parts", []), course),
        "ended": told.get("ended"), "losses": told.get("losses", {}),
    }  # fmt: skip


def _back_after_s(parts: Sequence[Sequence[float]], course: Course) -> float | None:
    """Return the longest time from a release of at least a third of all memory to a part of
    (nearly) full size.
    """
    full = [(ended_s, rows) for ended_s, rows in parts if rows >= _BACK * BATCH]
    releases = [at for (_, before), (at, now) in itertools.pairwise(course) if now - before > 1 / 3]
    took = [
        min((ended_s - at_s for ended_s, rows in full if ended_s > at_s), default=None)
        for at_s in releases
    ]
    known = [each for each in took if each is not None]
    return max(known) if known and len(known) == len(took) else None


def _figures(rows: Sequence[dict[str, Any]], contestants: Sequence[str]) -> dict[str, Any]:
    totals = []
    for course, contestant in itertools.product(
        dict.fromkeys(row["course"] for row in rows), contestants
    ):
        mine = pressure_caps.rows_of(rows, course, contestant)
        total: dict[str, Any] = {"course": course, "contestant": contestant}
        total |= {key: median_of_known([row[key] for row in mine]) for key in _MEDIANS}
        for other in contestants:
            theirs = pressure_caps.rows_of(rows, course, other)
            ratio = pressure_caps.ratio_within_rounds(mine, theirs, "useful_per_s")
            total[f"to_{other}"] = None if other == contestant else ratio
        totals.append(total)
    targets = [
        target
        for total in totals
        if (total["course"], total["contestant"]) == ("game", "ours")
        for target in _targets(total)
    ]
    return {"totals": totals, "targets": targets, "turns": list(rows)}


def _targets(ours: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        judged("useful samples/s, to the ideal's", ours.get("to_ideal"), at_least=0.95),
        judged("s from a release to full size", ours["back_after_s"], at_most=10.0),
        judged("failures a minute", ours["failures_per_min"], at_most=2.0),
        judged("rows computed, to needed", ours["rows_to_needed"], at_most=1.02),
    ]


def _turn(contestant: str, course: Course, seconds: float, whole_bytes: int) -> dict[str, Any]:
    child = Child(contestant, _contest, contestant, course, seconds, whole_bytes)
    with contextlib.closing(child) as one:
        ready = one.receive(PATIENCE_S)
        if isinstance(ready, str):
            return {"ended": f"not installed: {ready}"}
        is_ours = contestant == "ours"
        cap = NeighbourCap(one.pipe) if is_ours else KernelCap(*ready, by_wall=True)
        told: dict[str, Any] = pressure_caps.follow(one, cap, course, seconds, whole_bytes)
        return told


def _contest(
    connection: Connection, contestant: str, course: Course, seconds: float, whole_bytes: int
) -> None:
    """Be one contestant: say what is held, wait for the start, train, and tell what was done."""
    import torch

    if contestant == "ours":
        from benches import train_ours

        train_ours.train(connection, course, seconds, whole_bytes)
        return
    from workers.devices import open_device

    open_device(lone_worker(budget_bytes=256 * MIB))  # sets malloc up; its own cap is not used
    train_job.count_every_tensor()
    torch.set_num_threads(1)
    train_job.warmed_up()
    took = train_job.least_bytes() if contestant in {"fixed", "ideal"} else {}
    try:
        for module in train_job.MODULES.get(contestant, ()):
            importlib.import_module(module)  # what it takes is not the training's
    except ImportError as error:
        connection.send(f"{error}; type: pip install '.[bench]'")
        return
    spare = trainer()  # what a training holds at all times is not the cap's affair
    base_bytes = status_bytes("VmData")
    del spare
    connection.send((os.getpid(), base_bytes))
    connection.recv()
    tally = train_job.Tally(seconds, course)

    def fits(share: float) -> int:
        left_bytes = share * whole_bytes - _SLACK_BYTES
        return max([1, *(micro for micro, size in took.items() if size <= left_bytes)])

    ended = None
    try:
        if contestant in train_job.OTHERS:
            train_job.OTHERS[contestant](tally)
        else:
            train_job.known_size(tally, fits, knows=contestant == "ideal")
    except Exception as error:  # noqa: BLE001 - a contestant that gives up is a finding
        words = " ".join(str(error).split())[:200]
        ended = f"{type(error).__name__} at {tally.at_s:.1f} s: {words}"
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    connection.send(tally.told(ended))


def _part_bytes() -> dict[int, int]:
    """Return what a part of so many samples takes beside what is there at all times."""
    from workers.training.memory_plan import MemoryPlanner

    planner = MemoryPlanner(train_job.task(), train_job.settings(), on_card=False)
    plans = (planner.plan(micro, 0) for micro in micro_batches(BATCH, BATCH))
    return {plan.micro: max(plan.activations_bytes, plan.update_bytes) for plan in plans}


def _undisturbed(steps: int) -> dict[int, float]:
    found: dict[int, float] = told_by(
        "the undisturbed training", _train_alone, steps, within_s=PATIENCE_S
    )
    return found


def _train_alone(connection: Connection, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    own = trainer()
    found = {}
    while own.step < steps:
        own.micro_batch(BATCH)
        found[own.step] = own.progress().loss or 0.0
    connection.send(found)
