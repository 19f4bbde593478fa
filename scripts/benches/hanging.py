"""Steps that compute for a drawn time, and steps that hang in a drawn way; each says so in a file
before it begins.

The workload of `hangs.py`, which also reads what is written here.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

from workers.workloads.base import StepResult, Workload, WorkloadContext

#: As in `outside.py`.
_FOLDER = "ORCH_WITNESS_DIR"
KINDS = ("sleep", "deadlock", "stopped", "endless")
#: The first step of a process: drawn ones are at most ten times as long.
FIRST_S = 2.0


class _Drawn(Workload):
    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self._random = random.Random(f"{context.seed}:{time.time_ns()}")  # noqa: S311 - draws what to do
        self._steps = 0

    def release(self) -> None:
        """Hold nothing."""

    def note(self, **what: object) -> None:
        """Append a line to this process's file."""
        path = Path(os.environ[_FOLDER]) / f"{os.getpid()}.drawn"
        with path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"at_unix_s": time.time(), "slot": self.context.slot, **what}) + "\n"
            )

    def compute(self, cpu_s: float) -> None:
        """Use so much CPU time."""
        until_s = time.thread_time() + cpu_s
        while time.thread_time() < until_s:
            sum(range(10_000))


class Computing(_Drawn):
    """Every step computes for a drawn time."""

    def step(self, size: int, batch: int) -> StepResult:  # noqa: ARG002 - the contract of workloads
        """Compute; between 0.1 and 16 s of CPU time, equally often in each octave."""
        cpu_s = FIRST_S if self._steps == 0 else 0.1 * 160 ** self._random.random()
        self._steps += 1
        began_s = time.monotonic()
        self.compute(cpu_s)
        self.note(cpu_s=cpu_s, wall_s=time.monotonic() - began_s)
        return StepResult(flop=1.0)


class Hanging(_Drawn):
    """After a few short steps, one that never ends."""

    def step(self, size: int, batch: int) -> StepResult:  # noqa: ARG002 - the contract of workloads
        """Compute for 0.1 s, or hang."""
        self._steps += 1
        if self._steps > 8 and self._random.random() < 0.3:
            self._hang(self._random.choice(KINDS))
        self.compute(0.1)
        return StepResult(flop=1.0)

    def _hang(self, kind: str) -> None:
        self.note(kind=kind)
        if kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        lock = threading.Lock()
        lock.acquire()
        while True:
            if kind == "sleep":
                time.sleep(1000)
            elif kind == "deadlock":
                lock.acquire()
            else:
                self.compute(1.0)
