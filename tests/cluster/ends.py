"""Ends, hangs, slow steps and storms of out-of-memory below a real keeper: what the actor tells of
them, and when.

An actor is asked as Ray would ask it, without Ray. Whether a silent process is to be ended is
decided as the head does (`core/silence.py`), with a limit of 5 s. The hangs are those of
`test_ends_and_hangs.py`, which also ends a process in twenty ways.

    python -m tests.cluster.ends OUT.json [ends=50] [hangs=40] [pairs=200] [errors=100000]

Each part is written down in OUT.json, and a second call does what is missing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from orchestrator.core.silence import why_hung
from tests.cluster.test_ends_and_hangs import Slot
from tests.scene import spec_of
from workers.messages import Begin, Quiet, Status
from workers.units import MIB
from workers.workloads.base import StepResult, Workload

_START_S = 120.0
_LIMIT_S, _CAP_BYTES, _ERRORS_OF_A_STEP = 5.0, 96 * MIB, 50
_HANGS = {
    "do:sleeps": "in sleeps", "do:deadlocked_with_the_gil": "in deadlocked_with_the_gil",
    "do:stopped": "in stopped", "do:loops": "in loops",
}  # fmt: skip


class Computes(Workload):
    """Each step takes so many seconds of a core, however long the machine takes for that."""

    def step(self, size: int, batch: int) -> StepResult:
        began_s = time.thread_time()
        while time.thread_time() - began_s < float(os.environ["STEP_S"]):
            torch.ones(128, 128) @ torch.ones(128, 128)
        return StepResult(flop=1.0)

    def release(self) -> None:
        pass


class Storms(Computes):
    """A step asks for more than its cap again and again; every second one fails by that."""

    steps = 0

    def step(self, size: int, batch: int) -> StepResult:
        self.steps += 1
        for number in range(_ERRORS_OF_A_STEP):
            try:
                torch.empty((1 + number % 5) * 3 * _CAP_BYTES // 8 + number)
            except RuntimeError:
                if number == _ERRORS_OF_A_STEP - 1 and self.steps % 2:
                    raise
            else:
                raise AssertionError("there was memory")
        return StepResult(flop=1.0)


def main(out: str, *words: str) -> None:
    """Do the parts that are named, or all, and print what is known of them."""
    book, kept = Path(out), dict[str, Any]()
    if book.is_file():
        kept = json.loads(book.read_text(encoding="utf-8"))
    os.environ["ORCHESTRATOR_STATE_DIR"] = tempfile.mkdtemp(prefix="ends-")
    sys.path.insert(0, str(Path(__file__).parent))
    parts: dict[str, Callable[[int], dict[str, Any]]]
    parts = {"ends": _ends, "hangs": _hangs, "pairs": _pairs, "errors": _storm}
    for word in words or ("ends=50", "hangs=40", "pairs=200", "errors=100000"):
        name, _, count = word.partition("=")
        if word not in kept:
            kept[word] = parts[name](int(count))
            book.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        sys.stdout.write(f"{word}: {json.dumps(kept[word])}\n")
    shutil.rmtree(os.environ["ORCHESTRATOR_STATE_DIR"])


def _slot(number: int, name: str, **environment: str) -> Slot:
    os.environ.update(environment)
    spec = replace(spec_of(name=name, size=64, budget_bytes=_CAP_BYTES), slot=f"pc1/{number}")
    slot = Slot(spec)
    slot.poll(0.0)  # its actor starts in this call
    slot.poll(0.0)  # and its process in this one, with the environment of now
    return slot


def _ends(count: int) -> dict[str, Any]:
    """Kill a process that computes, again and again: after how long its end is told."""
    slot, took_s = _slot(0, "test_ends_and_hangs:Acts", ACT="work"), list[float]()
    for number in range(count):
        status = slot.wait(lambda told: told.counts.steps_ok > 3)
        killed_s = time.monotonic()
        os.kill(status.device.pid if status.device else 0, signal.SIGKILL)
        ended = slot.wait(lambda told: told.died is not None)
        took_s.append(time.monotonic() - killed_s)
        orders = replace(slot.orders, incarnation=number + 1, begin=Begin(resume=ended.resume))
        slot.orders = orders
    slot.end()
    late = [each for each in took_s if each > 0.5]
    return {
        "median_s": statistics.median(took_s), "worst_s": max(took_s),
        "broken": [f"{len(late)} ends were known after more than 0.5 s"] if late else [],
    }  # fmt: skip


def _hangs(count: int) -> dict[str, Any]:
    """Have processes hang, four at once: how long each was silent when it was to be ended."""
    silent_s, computed_s = {kind: list[float]() for kind in _HANGS}, list[float]()
    broken: list[str] = []
    for _ in range(0, count, len(_HANGS)):
        slots = {}
        for number, kind in enumerate(_HANGS):
            slots[kind] = _slot(number, "test_ends_and_hangs:Acts", ACT=kind)
        while slots:
            for kind, slot in list(slots.items()):
                status = slot.poll(0.05)
                if (why := _why(status)) is None:
                    continue
                del slots[kind]
                quiet = status.quiet or Quiet(seconds=0.0, idle_s=0.0)
                silent_s[kind].append(quiet.seconds)
                computed_s.append(quiet.computed_s)
                slot.end()
                ended = slot.wait(lambda told: told.quiet is not None)
                stands = ended.quiet.stands_at if ended.quiet else None
                did = "computed" if kind == "do:loops" else "used no CPU"
                if did not in why or _HANGS[kind] not in str(stands):
                    broken.append(f"{kind}: {why} at {stands}")
    worst = {f"{kind[3:]}, worst silence s": max(each) for kind, each in silent_s.items()}
    worst["loops, most computed s"] = max(computed_s)
    return {"hangs": len(computed_s), **worst, "broken": broken}


def _why(status: Status) -> str | None:
    """Return why the head would end the slot's process, or `None`."""
    if status.quiet is None:
        return None
    return why_hung(
        status.quiet,
        is_up=status.is_up,
        patience_s=_LIMIT_S if status.is_up else _START_S,
        longest_step_s=status.longest_step_s or None,
    )


def _pairs(count: int, seed: int = 1) -> dict[str, Any]:
    """Have processes compute steps of drawn lengths, a drawn number of them at once, for 40 s."""
    chance, broken = random.Random(seed), list[str]()  # noqa: S311 - repeatable is what is wanted
    done, longest_s, loads = 0, 0.0, list[int]()
    while done < count:
        beside = min(chance.randint(1, 20), count - done)
        steps_s = [round(10 ** chance.uniform(-2, 0.9), 2) for _ in range(beside)]
        slots = [
            _slot(place, "tests.cluster.ends:Computes", STEP_S=str(step_s))
            for place, step_s in enumerate(steps_s)
        ]
        until_s = time.monotonic() + 40.0
        while time.monotonic() < until_s:
            for slot, step_s in zip(slots, steps_s, strict=True):
                status = slot.poll(0.0)
                longest_s = max(longest_s, status.quiet.seconds if status.quiet else 0.0)
                if (why := _why(status)) is not None or status.died is not None:
                    broken.append(f"{step_s} s beside {beside - 1}: {why or status.died}")
            time.sleep(0.1)
        for slot in slots:
            slot.end()
        done += beside
        loads += [beside - 1] * beside
    return {
        "pairs": done, "longest silence s": longest_s, "most beside": max(loads),
        "broken": broken[:20],
    }  # fmt: skip


def _storm(count: int) -> dict[str, Any]:
    """Have two capped processes run out of memory so often: the longest time without a status."""
    slots = [_slot(place, "tests.cluster.ends:Storms", STEP_S="0") for place in range(2)]
    told_s, seen = dict[Slot, float](), dict[Slot, object]()
    longest_s, errors, raised, broken = 0.0, 0, 0, list[str]()
    pids: set[int] = set()
    while errors < count and not broken:
        statuses = []
        for slot in slots:
            statuses.append(status := slot.poll(0.05))
            if status.died is not None:
                broken.append(str(status.died))
            if status.device is None:
                continue
            pids.add(status.device.pid)
            if seen.get(slot) != (news := (status.wall_s, status.counts)):
                longest_s = max(longest_s, time.monotonic() - told_s.get(slot, time.monotonic()))
                seen[slot], told_s[slot] = news, time.monotonic()
        raised = sum(status.counts.oom_count for status in statuses)
        errors = _ERRORS_OF_A_STEP * sum(status.counts.steps for status in statuses)
    for slot in slots:
        slot.end()
    broken += [f"{len(pids)} processes for {len(slots)} slots"] if len(pids) != len(slots) else []
    broken += [f"no status for {longest_s:.1f} s"] if longest_s > 3.0 else []
    return {"errors": errors, "raised": raised, "longest_gap_s": longest_s, "broken": broken}


if __name__ == "__main__":
    main(*sys.argv[1:])
