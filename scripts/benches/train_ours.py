"""Ours under pressure: the workload `train` in the real engine, under a cap that the benchmark
moves.

The device is the CPU's. What the course leaves comes on top of what the training holds at all
times. It holds in the middle of a step, too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, cast

from benches.common import run_slice, trainer_spec
from benches.pressure_caps import Course
from benches.train_job import BATCH, KEYS, Tally, count_every_tensor, settings, warmed_up
from workers.devices import cpu
from workers.engine import engine as engines
from workers.engine import session
from workers.settings import WorkerSpec
from workers.units import MIB
from workers.workloads.base import StepResult
from workers.workloads.train import Train

_SLACK_BYTES = MIB


class _MovedCap(cpu.CpuDevice):
    """Leaves so much beside the state of the training.

    Until that is known, the cap is the usual one.
    """

    def __init__(self, spec: WorkerSpec, left_bytes: int) -> None:
        self._left_bytes, self._state_bytes = left_bytes, 0
        self._enforced_from_bytes: int | None = None
        super().__init__(spec)

    def begin(self) -> None:
        """Take what is held now for the state."""
        self._state_bytes = max(1, self.held_bytes())

    def leave(self, left_bytes: int) -> None:
        self._left_bytes = left_bytes
        from_bytes = self._enforced_from_bytes
        if from_bytes is not None:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (from_bytes + self._now_bytes(), hard))

    def free_bytes(self) -> int:
        return max(0, min(super().free_bytes(), self._now_bytes() - self.held_bytes()))

    def allowed_bytes(self, leave_bytes: int) -> int:
        return max(0, min(super().allowed_bytes(leave_bytes), self._now_bytes() - _SLACK_BYTES))

    @contextmanager
    def enforced(self) -> Iterator[None]:
        with super().enforced():
            self._enforced_from_bytes = self._base.data_bytes
            self.leave(self._left_bytes)
            try:
                yield
            finally:
                self._enforced_from_bytes = None

    def _now_bytes(self) -> int:
        return self._state_bytes + self._left_bytes if self._state_bytes else self._cap_bytes


class _Counted(Train):
    """Notes every part of a batch."""

    tally: Tally | None = None

    def step(self, size: int, batch: int) -> StepResult:
        tally = type(self).tally
        try:
            result = super().step(size, batch)
        except Exception:
            if tally is not None:
                tally.failed(min(batch, BATCH))
            raise
        done = None if self._trainer is None else self._trainer._last
        if tally is not None and self._trainer is not None and done is not None:
            tally.part(done.rows)
            if done.updated:
                tally.stepped(self._trainer.step, self._trainer.progress().loss or 0.0)
        return result


def train(connection: Connection, course: Course, seconds: float, whole_bytes: int) -> None:
    """Say that it is ready, wait for the start, train until the time is up, and tell what was done."""
    devices: list[_MovedCap] = []

    def open_device(spec: WorkerSpec) -> _MovedCap:
        devices.append(_MovedCap(spec, int(course[0][1] * whole_bytes)))
        count_every_tensor()
        return devices[-1]

    cast("Any", session).open_device = open_device
    spec = trainer_spec(
        4 * whole_bytes + 128 * MIB,
        {**settings().model_dump(), **KEYS},
        f"{__name__}:{_Counted.__name__}",
    )
    warmed_up()
    engine = engines.Engine(spec)
    run_slice(engine, 0, 0.0)  # the first step makes model and states
    device = devices[0]
    device.begin()
    connection.send((os.getpid(), 0))
    device.leave(connection.recv())
    connection.recv()
    _Counted.tally = tally = Tally(seconds, course)
    tally.starts = 1

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                device.leave(connection.recv())

    threading.Thread(target=listen, daemon=True).start()
    sequence, ended = 1, None
    while not tally.over:
        slice_s = max(0.0, min(1.0, tally.began_s + seconds - time.monotonic()))
        report = run_slice(engine, sequence, slice_s)
        sequence += 1
        ended = report.error or ended
    connection.send(tally.told(ended))
