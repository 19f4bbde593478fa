"""The Ray actor of a slot, around one program: an engine of ours, or a program of the user.

Its constructor only keeps the worker's specification, so that Ray can start it again anywhere at
any time, with the same arguments. It imports no torch: its program is a process of its own, which
ends and is started again without Ray. Does not import Ray, which reads its settings when it is
imported, and decides nothing.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace

from orchestrator.cluster.kept_command import KeptCommand
from orchestrator.cluster.kept_engine import KeptEngine
from orchestrator.cluster.kept_program import KeptProgram
from workers.command.folder import CommandFolder
from workers.messages import Orders, PrintedOutput, Status, WorkerEvent
from workers.settings import WorkerSpec


class WorkerActor:
    """One slot's worker, which answers what the head asks."""

    def __init__(self, spec: WorkerSpec, folder: CommandFolder | None = None) -> None:
        """Start nothing. `folder` is where a program of the user finds its own."""
        self._spec = spec
        self._name = uuid.uuid4().hex
        self._problem: str | None = None
        if folder is not None and spec.command is not None:
            self._problem = folder.problem
            self._spec = replace(spec, command=replace(spec.command, cwd=folder.path))
        self._program: KeptProgram | None = None
        self._news = _News()

    def poll(self, orders: Orders, wait_s: float) -> Status:
        """See to what the head wants, and return how the slot's process is: at once when there is
        news of it, else after `wait_s`.

        Orders for another process of this actor change nothing: they may be those of a process that
        was killed, and its program with it.
        """
        if orders.actor != self._name:
            return Status(slot=self._spec.slot, actor=self._name)
        if self._program is None:
            self._program = load_program(self._spec, self._problem)
        self._news.acknowledge(orders.heard)
        status = self._program.poll(orders, wait_s)
        return self._news.added(replace(status, actor=self._name))


class _News:
    """What has happened and was printed, until the head has acknowledged it."""

    def __init__(self) -> None:
        self._number = 0
        self._events: list[tuple[int, WorkerEvent]] = []
        self._output: tuple[int, PrintedOutput] | None = None

    def acknowledge(self, heard: int) -> None:
        """Forget what the head has."""
        self._events = [each for each in self._events if each[0] > heard]
        if self._output is not None and self._output[0] <= heard:
            self._output = None

    def added(self, status: Status) -> Status:
        """Return a status with all that the head lacks."""
        if status.events or status.output is not None:
            self._number += 1
        self._events += [(self._number, event) for event in status.events]
        if status.output is not None:
            kept = None if self._output is None else self._output[1]
            output = status.output if kept is None else kept.followed_by(status.output)
            self._output = self._number, output
        return replace(
            status,
            news=self._number,
            events=tuple(event for _, event in self._events),
            output=None if self._output is None else self._output[1],
        )


def load_program(spec: WorkerSpec, problem: str | None = None) -> KeptProgram:
    """Return what runs the program of a slot; `problem` says why its folder is not here."""
    if spec.command is None:
        return KeptEngine(spec)
    # What its PC says of torch is for it to read; only cards are numbered as NVML does.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return KeptCommand(spec, problem)
