"""A worker process with the engine of a command in it, and what it starts, all of it real."""

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

from tests.scene import ROOT, Patience, computed, spec_of, wait_for
from workers.command.engine import CommandEngine
from workers.messages import Directive, Report
from workers.settings import CommandSpec, WorkerSpec
from workers.units import GIB


def command_spec(
    *argv: str, slot: str = "job", budget_bytes: int = 2 * GIB, **how: Any
) -> WorkerSpec:
    """Return the spec of a slot that runs these words of Python's, without a cap unless it is named."""
    command = CommandSpec(argv=(sys.executable, *argv), **{"cap": False, "grace_s": 5.0, **how})
    return replace(spec_of(budget_bytes=budget_bytes), slot=slot, run_id="run", command=command)


class Slot:
    """Sends slices to an engine in this process, as the head does to a worker."""

    def __init__(self, spec: WorkerSpec, incarnation: int = 0, problem: str | None = None) -> None:
        self.engine = CommandEngine(spec, problem)
        self.incarnation, self.sent = incarnation, 0
        self.events: dict[str, Mapping[str, Any]] = {}
        self.printed = ""

    def slice(self, duration_s: float = 0.2, *, save: bool = False) -> Report:
        duration_s = duration_s if self.sent else 0.0
        self.sent += 1
        directive = Directive(
            incarnation=self.incarnation,
            sequence=self.sent,
            duration_s=duration_s,
            resume=None,
            save=save,
        )
        report = self.engine.run_slice(directive)
        self.events |= {event.name: event.detail for event in report.events}
        self.printed += "" if report.output is None else report.output.text
        return report

    def until(self, holds: Callable[[Report], bool]) -> Report:
        """Send slices until a report is as wanted."""
        patience = Patience(lambda: computed(os.getpid()))
        while not holds(report := self.slice()):
            assert not patience.is_over(), f"it never came: {report}"
        return report

    def rest(self) -> Report:
        """Have the program save and end, as the head does with a slot that is to rest."""
        report = self.slice(save=True)
        while report.save_due:
            report = self.slice()
        return report

    def end(self) -> Report:
        """Send slices until the program has ended."""
        return self.until(lambda report: report.ended is not None)


#: What a worker process runs: slices until it is killed. The argument is a pickle of the spec.
WORKER = """
import pickle, sys
from pathlib import Path
from tests.command.scenes import Slot
slot = Slot(pickle.loads(Path(sys.argv[1]).read_bytes()))
while True:
    slot.slice(0.2)
"""


def start_worker(spec: WorkerSpec, folder: Path) -> subprocess.Popen[bytes]:
    """Start a worker process that sends itself slices."""
    import pickle

    given = folder / "spec"
    given.write_bytes(pickle.dumps(spec))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", WORKER, str(given)], cwd=folder, env=environment)


def told(path: Path) -> Any:
    """Return what a program has written into a file as JSON, once it has."""

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
