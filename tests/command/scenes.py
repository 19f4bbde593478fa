"""Actors that keep an engine or a program of the user, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster.actor import WorkerActor
from orchestrator.cluster.command_actor import CommandActor
from tests.scene import ROOT, Patience, computed, spec_of, wait_for
from workers.command.folder import CommandFolder
from workers.messages import Begin, Orders, Status, WorkerEvent
from workers.settings import CommandSpec, WorkerSpec
from workers.units import GIB


def command_spec(
    *argv: str, slot: str = "job", budget_bytes: int = 2 * GIB, **how: Any
) -> WorkerSpec:
    """Return the spec of a slot that runs Python with these arguments, or another `argv`; without a
    cap, unless `cap` is given.
    """
    usual: dict[str, Any] = {"argv": (sys.executable, *argv), "cap": False, "grace_s": 5.0}
    command = CommandSpec(**(usual | how))
    return replace(spec_of(budget_bytes=budget_bytes), slot=slot, run_id="run", command=command)


class Slot:
    """A slot whose actor is in this process; the test polls it as the head polls an actor."""

    def __init__(self, spec: WorkerSpec, incarnation: int = 0, problem: str | None = None) -> None:
        folder = None if problem is None else CommandFolder(path="", problem=problem)
        is_engine = spec.command is None
        self.actor = WorkerActor(spec) if is_engine else CommandActor(spec, folder)
        self.orders = Orders(incarnation=incarnation, begin=Begin())
        self.events: list[WorkerEvent] = []
        self.printed = ""

    def poll(self, wait_s: float = 0.2, **orders: Any) -> Status:
        """Poll once with changed orders, which later polls keep."""
        if self.orders.actor is None:  # the first answer has the name of the actor
            self.orders = replace(self.orders, actor=self.actor.poll(self.orders, 0.0).actor)
        self.orders = replace(self.orders, **orders)
        status = self.actor.poll(self.orders, wait_s)
        begin = None if status.incarnation == self.orders.incarnation else self.orders.begin
        self.orders = replace(self.orders, heard=status.news, begin=begin)
        self.events += status.events
        self.printed += "" if status.output is None else status.output.text
        return status

    def details(self, name: str) -> Mapping[str, Any]:
        """Return the details of the last event with this name."""
        return [event.detail for event in self.events if event.name == name][-1]

    def until(self, holds: Callable[[Status], bool]) -> Status:
        """Poll until `holds` accepts a status; return it."""
        patience = Patience(lambda: computed(os.getpid()))
        while not holds(status := self.poll()):
            assert not patience.is_over(), f"it never came: {status}"
        return status

    def begin(self) -> Status:
        """Poll until the program runs."""
        return self.until(lambda status: status.is_up)

    def rest(self) -> Status:
        """Order the program to save and end, as the head does to hold a slot."""
        self.poll(holds=True, saves=self.orders.saves + 1)
        return self.until(lambda status: status.is_held)

    def end(self) -> Status:
        """Poll until the program has ended."""
        return self.until(lambda status: status.ended is not None)


#: A worker process, which polls its program until it is killed. The argument is a pickled spec.
WORKER = """
import pickle, sys
from pathlib import Path
from tests.command.scenes import Slot
slot = Slot(pickle.loads(Path(sys.argv[1]).read_bytes()))
while True:
    slot.poll(0.2)
"""


def start_worker(spec: WorkerSpec, folder: Path) -> subprocess.Popen[bytes]:
    """Start a worker process that polls itself."""
    import pickle

    given = folder / "spec"
    given.write_bytes(pickle.dumps(spec))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", WORKER, str(given)], cwd=folder, env=environment)


def told(path: Path) -> Any:
    """Wait until a program has written JSON into a file; return it."""

    def read() -> Any:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text())
        return None

    return wait_for(read, str(path))


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
