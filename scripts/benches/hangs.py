"""Workers that compute for long, and workers that hang: which of them are ended, when, and with
which words.

Two rehearsals of ten workers with `hang_timeout_s` 8. In the first every step computes for a drawn
time beside a drawn number of busy loops, and no worker may be ended. In the second every process
hangs after some steps, by one of four ways, and must be ended for the reason that is true: it used
no CPU, or it computed without ending a step.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from typing import Any

from benches.common import Result, progress, spread
from benches.outside import PATIENCE_S, Scene, settings, unix_s
from orchestrator.errors import ArchiveError
from orchestrator.record.archive import StoredEvent, read_events

_COMPUTING = "scripts.benches.hanging:Computing"
_HANGING = "scripts.benches.hanging:Hanging"
_HANG_S = 8.0
#: Beyond its limit: the slice in which a process hangs, one look at it, and its end.
_LATE_S = 8.0
_WORDS = {
    "endless": "has computed for",
    **dict.fromkeys(("sleep", "deadlock", "stopped"), "used no CPU and no card"),
}
_SETTINGS = settings(
    f"run.hang_timeout_s={_HANG_S:g}",
    "run.stale_after_s=4",
    "run.slice_s=1",
    "run.death_window_s=1",
    "run.max_deaths=1000000",
    "run.restart_backoff_max_s=1",
    "run.min_success_rate=0",
    "compute_share_mode=none",
)


def run(pairs: int, hangs: int, minutes: float, seed: int) -> Result:
    broken: list[str] = []
    draw = random.Random(seed)  # noqa: S311 - of loads
    computing = _computing(pairs, minutes * 60, draw, broken)
    return Result(
        bench="hangs", figures={**computing, **_hanging(hangs, minutes * 60, broken)}, broken=broken
    )


def _computing(pairs: int, most_s: float, draw: random.Random, broken: list[str]) -> dict[str, Any]:
    scene, loops = Scene(), _Loops()
    try:
        head = scene.run(
            "--rehearse", "--duration", f"{most_s:.0f}s", "--workload", _COMPUTING, *_SETTINGS
        )
        until_s = time.monotonic() + most_s + PATIENCE_S
        loads: set[int] = set()
        while (
            head.poll() is None
            and time.monotonic() < until_s
            and len(_noted(scene, "cpu_s")) < pairs
        ):
            loads.add(loops.become(draw.randint(0, 4)))
            progress(f"{len(_noted(scene, 'cpu_s'))} of {pairs} steps; {loops.count} busy loops")
            time.sleep(draw.uniform(5.0, 20.0))
        loops.become(0)
        ended = _ended_for_silence(scene)
        head.send_signal(signal.SIGINT)
        scene.ended(head, PATIENCE_S)
        steps = _noted(scene, "cpu_s")
        broken.extend(
            f"{event.slot} was ended while it computed: {_reason(event)}" for event in ended
        )
        if len(steps) < pairs:
            broken.append(f"only {len(steps)} of {pairs} steps ended")
        return {
            "steps": len(steps),
            "busy_loops_most": max(loads),
            "steps_longer_than_the_hang_timeout": sum(step["wall_s"] > _HANG_S for step in steps),
            **spread("step_cpu_s", [step["cpu_s"] for step in steps]),
            **spread("step_wall_s", [step["wall_s"] for step in steps]),
            "ended_while_computing": len(ended),
        }
    finally:
        loops.become(0)
        scene.close(keep=False)


def _hanging(hangs: int, most_s: float, broken: list[str]) -> dict[str, Any]:
    scene = Scene()
    try:
        head = scene.run(
            "--rehearse", "--duration", f"{most_s:.0f}s", "--workload", _HANGING, *_SETTINGS
        )
        until_s = time.monotonic() + most_s + PATIENCE_S
        while (
            head.poll() is None
            and time.monotonic() < until_s
            and len(_ended_for_silence(scene)) < hangs
        ):
            progress(f"{len(_ended_for_silence(scene))} of {hangs} hangs ended")
            time.sleep(5.0)
        ended, begun = _ended_for_silence(scene), _noted(scene, "kind")
        head.send_signal(signal.SIGINT)
        scene.ended(head, PATIENCE_S)
        rows = _matched(begun, ended, broken)
        if len(ended) < hangs:
            broken.append(f"only {len(ended)} of {hangs} hangs were ended")
        return {"hangs": len(rows), "kinds": _by_kind(rows)}
    finally:
        scene.close(keep=False)


def _matched(
    begun: list[dict[str, Any]], ended: list[StoredEvent], broken: list[str]
) -> list[dict[str, Any]]:
    """Return for each hang that was ended its kind and how long that took.

    By process, which the events name.
    """
    rows = []
    for event in ended:
        # The last one to begin hanging in this slot before the event.
        mine = [
            hang
            for hang in begun
            if hang["slot"] == event.slot and hang["at_unix_s"] < unix_s(event)
        ]
        if not mine:
            broken.append(f"{event.slot} was ended and had not hung: {_reason(event)}")
            continue
        hang = max(mine, key=lambda one: one["at_unix_s"])
        after_s = unix_s(event) - hang["at_unix_s"]
        rows.append({"kind": hang["kind"], "ended_after_s": after_s})
        if _WORDS[hang["kind"]] not in _reason(event):
            broken.append(f"{event.slot}, {hang['kind']}: told as {_reason(event)!r}")
        if hang["kind"] != "endless" and after_s > 2 * _HANG_S + _LATE_S:
            broken.append(f"{event.slot}, {hang['kind']}: ended after {after_s:.1f} s")
    return rows


def _by_kind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = sorted({row["kind"] for row in rows})
    by_kind = {
        kind: [row["ended_after_s"] for row in rows if row["kind"] == kind] for kind in kinds
    }
    return [
        {"kind": kind, "count": len(after), **spread("ended_after_s", after)}
        for kind, after in by_kind.items()
    ]


def _noted(scene: Scene, key: str) -> list[dict[str, Any]]:
    lines = (
        line
        for path in scene.steps.glob("*.drawn")
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    return [noted for line in lines if line.endswith("}") and key in (noted := json.loads(line))]


def _ended_for_silence(scene: Scene) -> list[StoredEvent]:
    folder = scene.newest_run()
    try:
        events = [] if folder is None else read_events(folder, ("state",))
    except ArchiveError:
        return []
    return [
        event
        for event in events
        if event.details.get("to_state") == "RESTARTING" and "was ended" in _reason(event)
    ]


def _reason(event: StoredEvent) -> str:
    return str(event.details.get("cause"))


class _Loops:
    """Busy loops as nice as Ray's workers: they take their share and no more."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def count(self) -> int:
        return len(self._running)

    def become(self, count: int) -> int:
        """Start or end loops until there are so many."""
        while len(self._running) < count:
            code = "import os; os.nice(15)\nwhile True: pass"
            self._running.append(subprocess.Popen([sys.executable, "-c", code]))
        while len(self._running) > count:
            process = self._running.pop()
            process.kill()
            process.wait()
        return count
