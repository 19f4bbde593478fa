"""Times when all slots of pc2 are back after cuts of the network under a run, and after a raylet
was killed.

The PCs are namespaces on a virtual switch (`two_pcs.py`); pc2's node is kept by `up pc2 --exec
--stay`. Ray notices a cut after half a minute or so and declares the node dead, so that short cuts
and long ones take different ways back.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.common import Result, progress
from benches.two_pcs import ADDRESSES, HOSTS, TwoPCs, missing, two_pcs
from orchestrator.errors import ArchiveError
from orchestrator.record.archive import read_run
from orchestrator.record.store import SlotRecord

_TARGET_S = 30.0
#: More than `up --stay` gives two starts of Ray that hang (60 s and 120 s), and a third one that
#: does not.
_PATIENCE_S = 300.0
_SETTLING_S = 5.0


def run(seconds: Sequence[float], rate: str | None, workers: int) -> Result:
    if (why := missing()) is not None:
        return Result(bench="cuts", figures={"skipped": why})
    folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    try:
        with two_pcs(folder) as pair:
            scene = _Scene(pair, folder, rate, workers)
            rows = [
                scene.row(f"cut of {cut_s:g} s", functools.partial(scene.cut, cut_s))
                for cut_s in seconds
            ]
            rows.append(scene.row("raylet killed", scene.kill))
            said = scene.said()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    back_s = [row["back_after_s"] for row in rows]
    broken = [
        f"{row['event']}: pc2's slots were not back in {_PATIENCE_S:.0f} s; in the end {said}"
        for row in rows
        if not row["is_back"]
    ]
    figures = {"rounds": rows, "back_after_most_s": max(back_s), "target_s": _TARGET_S}
    return Result(
        bench="cuts", figures={**figures, "target_met": max(back_s) <= _TARGET_S}, broken=broken
    )


class _Scene:
    """A run on both PCs, and what is seen of it from outside."""

    def __init__(self, pair: TwoPCs, folder: Path, rate: str | None, workers: int) -> None:
        self._pair, self._workers, self._runs, self._said = (
            pair,
            workers,
            folder / "runs",
            folder / "stay.log",
        )
        common = (*HOSTS, *(f"--set=nodes.{pc}.workers={workers}" for pc in ADDRESSES))
        pair.do("pc1", "up", "pc1", "--exec", *common)
        pair.copy_token()
        pair.start("pc2", "up", "pc2", "--exec", "--stay", *common, output=self._said)
        _await(lambda: "pc2: up" in self._said.read_text(), "node of pc2")
        if rate is not None:
            pair.slow_down(rate)
        arguments = ("--duration", "10h", "--json", "--run-dir", str(self._runs))
        self._printed = folder / "run.log"
        self._run = pair.start("pc1", "run", *arguments, *common, output=self._printed)
        _await(lambda: self._works({}), "run on both PCs")

    def row(self, event: str, strike: Callable[[], None]) -> dict[str, Any]:
        """Let something happen, and wait until all slots of pc2 work again."""
        time.sleep(_SETTLING_S)
        was = self._pair.raylets("pc2")
        strike()
        before, began_s = self._steps(), time.monotonic()
        with contextlib.suppress(TimeoutError):  # the row says it
            _await(lambda: self._works(before), event)
        row = {
            "event": event,
            "is_back": self._works(before),
            "back_after_s": time.monotonic() - began_s,
            "is_new_node": self._pair.raylets("pc2") != was,
        }
        progress(json.dumps(row))
        return row

    def said(self) -> str:
        """Return the states of pc2's slots, and what the run and the program that keeps its node
        said last.
        """
        states = ", ".join(f"{slot.slot} {slot.state} ({slot.reason})" for slot in self._slots())
        code = self._run.poll()
        run = "runs" if code is None else f"ended with {code}"
        nodes = [
            line
            for path in self._runs.glob("*/events.jsonl")
            for line in _lines(path)
            if '"node_' in line
        ]
        lines = [
            *_lines(self._said)[-4:],
            f"the run {run}",
            *_lines(self._printed)[-3:],
            *nodes[-4:],
        ]
        return f"{states}; {'; '.join(lines)}"

    def cut(self, cut_s: float) -> None:
        self._pair.cable(plugged=False)
        time.sleep(cut_s)
        self._pair.cable(plugged=True)

    def kill(self) -> None:
        (raylet,) = self._pair.raylets("pc2")
        self._pair.kill("pc2", raylet)
        _await(lambda: any(slot.state == "LOST" for slot in self._slots()), "loss of pc2")

    def _works(self, before: Mapping[str, float]) -> bool:
        """Say whether each slot of pc2 is RUNNING and has done more steps than `before`."""
        slots = self._slots()
        return len(slots) == self._workers and all(
            slot.state == "RUNNING" and slot.counters["steps_ok"] > before.get(slot.slot, 0.0)
            for slot in slots
        )

    def _steps(self) -> dict[str, float]:
        return {slot.slot: slot.counters["steps_ok"] for slot in self._slots()}

    def _slots(self) -> list[SlotRecord]:
        with contextlib.suppress(ArchiveError, StopIteration):  # nothing is stored yet
            stored = read_run(next(self._runs.glob("*/head.json")).parent)
            return [slot for slot in stored.slots if slot.node == "pc2"]
        return []


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _await(ask: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not ask():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {what} within {_PATIENCE_S:.0f} s")
        time.sleep(0.2)
