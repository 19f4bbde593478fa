"""Pulls the cable between two PCs while a run, or a queue, works on both, and plugs it in again.

The PCs are network and process namespaces on a virtual switch, each with its own home and Ray node;
`up pc2 --exec --stay` keeps the node behind the cut. A run must soon show the slots of that PC as
LOST, and as RUNNING soon after the cable returns. A program of a queue logs the time: two attempts
must never run at the same time. Needs root and the command `ip`. Does not check what a cut does to
files in transfer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.common import ROOT, Result, progress
from orchestrator.errors import ArchiveError
from orchestrator.record.archive import read_run

_WORKERS, _LOST_S, _BACK_S, _PATIENCE_S = 2, 15.0, 60.0, 240.0
#: Nothing outside the namespaces has a route to them.
_ADDRESSES = {"pc1": "10.77.0.1", "pc2": "10.77.0.2"}
_SETS = [
    *(f"--set=nodes.{pc}.host={address}" for pc, address in _ADDRESSES.items()),
    *(f"--set=nodes.{pc}.workers={_WORKERS}" for pc in _ADDRESSES),
]
_SWITCH = "switch"
_HOLDER = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
#: Orphans of a namespace become children of its first process. Because it ignores SIGCHLD, the
#: kernel reaps them.
_FIRST_PROCESS = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()
"""
#: The program of the queue, for a shell without a memory cap.
_PROGRAM = "while :; do echo $ORCHESTRATOR_ATTEMPT $(date +%s.%N) >> {}; sleep 0.25; done"


def run(seconds: Sequence[float], program: bool) -> Result:
    """Cut the cable for each of these times under a run, or with `program` under a queue."""
    rows: list[dict[str, Any]] = []
    for cut_s in seconds:
        folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))  # short: sockets allow 107 bytes
        try:
            with contextlib.ExitStack() as stack:
                pair = _Pair(folder, stack)
                rows.append((pair.queue if program else pair.run)(cut_s))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        progress(str(rows[-1]))
    broken = [f"a cut of {row['cut_s']:g} s: {why}" for row in rows for why in row.pop("broken")]
    return Result(bench="cable", figures={"cuts": rows}, broken=broken)


class Switch:
    """PCs, each in its own namespaces, and the switch that connects them."""

    def __init__(self, stack: contextlib.ExitStack, addresses: Mapping[str, str]) -> None:
        """Make PCs of these names and addresses; closing the stack removes them."""
        self.inside = {name: _hold(stack) for name in (_SWITCH, *addresses)}
        """The first process of each namespace, keyed by the name of the PC or switch."""
        self._ip(_SWITCH, "link add bridge type bridge")
        self._ip(_SWITCH, "link set bridge up")
        for pc, address in addresses.items():
            self._ip(pc, f"link add eth0 type veth peer name {pc} netns {self.inside[_SWITCH]}")
            self._ip(_SWITCH, f"link set {pc} master bridge up")
            self._ip(pc, f"address add {address}/24 dev eth0")
            self._ip(pc, "link set eth0 up")
            self._ip(pc, "link set lo up")

    def enter(self, name: str, *namespaces: str) -> list[str]:
        """Return the words before a command that run it inside the namespaces."""
        return ["nsenter", f"--target={self.inside[name]}", f"--wd={ROOT}", *namespaces]

    def cut(self, pc: str) -> None:
        """Pull the cable of a PC: its link loses the carrier, and others get no answer from it."""
        self._ip(_SWITCH, f"link set {pc} down")

    def plug(self, pc: str) -> None:
        """Plug the cable in again."""
        self._ip(_SWITCH, f"link set {pc} up")

    def _ip(self, where: str, words: str) -> None:
        subprocess.run([*self.enter(where, "--net"), "ip", *words.split()], check=True)


class _Pair:
    """Two PCs with their Ray nodes, and the run or the queue on them."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._runs, self._stack = folder, folder / "runs", stack
        self._switch = Switch(stack, _ADDRESSES)
        for pc in _ADDRESSES:
            (folder / pc / ".ray").mkdir(parents=True, mode=0o700)
        self._start("pc1", "up", "pc1", "--exec").wait()
        shutil.copy(folder / "pc1/.ray/auth_token", folder / "pc2/.ray/auth_token")  # as scp does
        self._start("pc2", "up", "pc2", "--exec", "--stay")
        _await(lambda: "Ray runtime started" in (folder / "pc2.log").read_text(), "node of pc2")

    def run(self, cut_s: float) -> dict[str, Any]:
        """Cut the cable under a run; return how the states of pc2's slots changed."""
        self._start("pc1", "run", "--duration", "10h", "--json", "--run-dir", str(self._runs))
        _await(lambda: self._works({}), "run on both PCs")
        time.sleep(5.0)
        self._switch.cut("pc2")
        cut_at_s = time.monotonic()
        lost = lambda: {state for state, _ in self._slots().values()} == {"LOST"}  # noqa: E731
        lost_s = _await(lost, "loss of pc2", cut_s)
        time.sleep(max(0.0, cut_at_s + cut_s - time.monotonic()))
        before = {slot: steps for slot, (_, steps) in self._slots().items()}
        self._switch.plug("pc2")
        back_s = _await(lambda: self._works(before), "work on pc2")
        late = cut_s >= _LOST_S and (lost_s is None or lost_s > _LOST_S)
        broken = [f"LOST after {lost_s} s"] if late else []
        broken += [] if back_s is not None and back_s <= _BACK_S else [f"RUNNING after {back_s} s"]
        return {"cut_s": cut_s, "lost_after_s": lost_s, "back_after_s": back_s, "broken": broken}

    def queue(self, cut_s: float) -> dict[str, Any]:
        """Cut the cable under a program of a queue; return when its attempts were at work."""
        notes, night = self._folder / "notes", self._folder / "night.json"
        # While pc1 has work for longer than pc2 would need, the program goes to pc2.
        first = {"command": ["sleep", "20"], "nodes": ["pc1"], "priority": 1}
        jobs = [{"name": f"first{number}", **first} for number in range(3)]
        jobs += [{"name": "behind", "command": ["sh", "-c", _PROGRAM.format(notes)]}]
        defaults = {"cwd": str(self._folder / "pc1"), "retries": 3}
        night.write_text(json.dumps({"defaults": defaults, "jobs": jobs}))
        self._start("pc1", "jobs", "run", str(night), "--plain", "--run-dir", str(self._runs))
        _await(notes.exists, "program")
        time.sleep(10.0)
        self._switch.cut("pc2")
        cut_unix_s = time.time()
        time.sleep(cut_s)
        self._switch.plug("pc2")

        def lines() -> list[list[str]]:
            return [line.split() for line in notes.read_text().splitlines()]

        _await(lambda: len({attempt for attempt, _ in lines()}) > 1, "second attempt")
        time.sleep(10.0)  # in which both would note the time
        times_s: dict[str, list[float]] = {}
        for attempt, at_unix_s in lines():
            times_s.setdefault(attempt, []).append(round(float(at_unix_s) - cut_unix_s, 1))
        spans = sorted((min(each), max(each)) for each in times_s.values())
        both = [two for one, two in itertools.pairwise(spans) if two[0] < one[1]]
        broken = [f"two attempts at a time: {spans}"] if both else []
        broken += ["no second attempt"] if len(spans) == 1 else []
        return {"cut_s": cut_s, "attempts_at_s": str(spans), "broken": broken}

    def _start(self, pc: str, *words: str) -> subprocess.Popen[bytes]:
        home, scripts = str(self._folder / pc), Path(sys.executable).parent
        own = {"HOME": home, "RAY_TMPDIR": home, "PATH": f"{scripts}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "orchestrator", *words, *_SETS]
        with (self._folder / f"{pc}.log").open("ab") as stream:
            started = subprocess.Popen(
                [*self._switch.enter(pc, "--net", "--pid", "--mount"), *command],
                env=os.environ | own, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            )  # fmt: skip
        self._stack.callback(started.wait)
        self._stack.callback(started.kill)
        return started

    def _works(self, before: dict[str, float]) -> bool:
        """Return whether each slot of pc2 is RUNNING and has done more steps than in `before`."""
        slots = self._slots()
        works = [
            state == "RUNNING" and steps > before.get(slot, 0.0)
            for slot, (state, steps) in slots.items()
        ]
        return len(works) == _WORKERS and all(works)

    def _slots(self) -> dict[str, tuple[str, float]]:
        """Return the state and the good steps of each slot of pc2."""
        with contextlib.suppress(ArchiveError, StopIteration):  # nothing is stored yet
            stored = read_run(next(self._runs.glob("*/head.json")).parent)
            rows = (slot.row for slot in stored.slots if slot.row.node == "pc2")
            return {row.slot: (str(row.state), row.counts.steps_ok) for row in rows}
        return {}


def _hold(stack: contextlib.ExitStack) -> int:
    """Make namespaces; return their first process. Its end ends all others in them."""
    command = [*_HOLDER, sys.executable, "-c", _FIRST_PROCESS]
    holder = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(holder.kill)
    if holder.stdout is None or holder.stdout.readline() != "ready\n":
        raise PermissionError("this kernel, or this user, may not make namespaces")
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    return int(children.read_text(encoding="ascii").split()[0])


def _await(ask: Callable[[], bool], what: str, patience_s: float = _PATIENCE_S) -> float | None:
    """Return the seconds until `ask` was true; after `patience_s` print a line, return `None`."""
    began_s = time.monotonic()
    while not ask():
        if time.monotonic() - began_s > patience_s:
            progress(f"no {what} in {patience_s:g} s")
            return None
        time.sleep(0.2)
    return round(time.monotonic() - began_s, 1)
