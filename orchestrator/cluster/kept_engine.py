"""The engine of a slot as a program that is kept, seen from the process that answers the head.

The program ends and starts without this process: each incarnation of the slot is a program of its
own. Imports no torch, and judges nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from workers.command.files import Log
from workers.host.processes import oom_kills, worker_and_raylet
from workers.keeper.kept import Ended, Kept
from workers.keeper.task import Task
from workers.learned_limits import default_path
from workers.messages import Directive, Report, Verdict
from workers.settings import WorkerSpec
from workers.units import MIB

_PACKAGE: Final = "workers.engine"

_OF_ALL: Final = ("workers.engine.engine",)
#: What every training imports as well: 2.3 s of a core.
_OF_TRAININGS: Final = ("workers.workloads.train", "torch._dynamo")

#: In what a slot has printed, between two of its processes.
_ANOTHER: Final = "[the process ended here; another one begins]\n"

#: Between two looks at a program that starts.
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnded:
    """A slice that gives no report: its program has ended."""

    text: str
    host_memory: bool = False
    """Whether the kernel killed a process of this PC for want of RAM while it was killed."""


class UnbuildableError(Exception):
    """No program of this slot can work on this PC: torch, or code of ours, is not there."""


class KeptEngine:
    """The program of one slot, and those after it."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Start nothing: the first directive of an incarnation does."""
        self._spec = spec
        self._folder = default_path().parent / "state" / (spec.run_id or "no-run") / ".engines"
        self._folder /= spec.slot
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = Log(self._folder / "output.log")
        self._incarnation = -1
        self._is_ready = False
        """Whether the program has made its engine."""
        self._kept: Kept | None = None
        self._channel: Connection | None = None
        self._oom_kills = 0

    def process_id(self, incarnation: int) -> int | None:
        """Return the id of the program of an incarnation, once it is started."""
        self._start(incarnation)
        return None if self._kept is None else self._kept.pid

    def run_slice(self, directive: Directive) -> Report | ProgramEnded:
        """Have the program run a slice; start it first where it is a new incarnation's.

        Raises:
            UnbuildableError: The program cannot even make an engine.
        """
        self._start(directive.incarnation)
        kept, channel = self._kept, self._channel
        assert kept is not None and channel is not None  # noqa: S101, PT018 - started
        report: Report | None = None
        try:
            if not self._is_ready:
                self._is_ready = _told(kept, channel) is not None
            channel.send(directive)
            report = _told(kept, channel)
        except (EOFError, OSError):
            report = None
        if report is None:
            return self._ending(kept)
        if report.verdict is Verdict.CONTEXT_CORRUPTED:
            kept.end(0.0)
        return replace(report, output=self._log.take())

    def _start(self, incarnation: int) -> None:
        if incarnation <= self._incarnation:
            return
        if self._kept is not None:
            self._kept.close()  # its keeper ends what may be left of it
        if self._channel is not None:
            self._channel.close()
        self._incarnation, self._is_ready = incarnation, False
        if self._log.path.exists() and incarnation > 0:
            with contextlib.suppress(OSError), self._log.path.open("a", encoding="utf-8") as file:
                file.write(_ANOTHER)
        self._oom_kills = oom_kills()
        ours, theirs = socket.socketpair()
        watched = worker_and_raylet()
        # On a card no fork was ever seen to see its devices and its allocator as a fresh process.
        is_forked = self._spec.device == "cpu"
        with theirs:
            self._kept = Kept(
                Task(
                    argv=[sys.executable, "-m", _PACKAGE],
                    env=dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _path()},
                    cwd=os.getcwd(),  # noqa: PTH109 - a word of a task
                    place=str(self._folder),
                    log_bytes=MIB,
                    grace_s=0.0,
                    watch=watched,
                    module=_PACKAGE if is_forked else None,
                ),
                server=watched[-1],
                modules=_loaded_for(self._spec) if is_forked else (),
                channel=theirs,
            )
        self._channel = Connection(ours.detach())
        while self._kept.pid is None and not self._kept.is_over:
            self._kept.listen(_LOOK_S)
        if not self._kept.is_over:
            self._channel.send(self._spec)

    def _ending(self, kept: Kept) -> ProgramEnded:
        while not kept.is_over:  # it has closed its channel, and its end is about to be told
            kept.listen(_LOOK_S)
        if kept.refused is not None:
            raise UnbuildableError(kept.refused)
        assert kept.ended is not None  # noqa: S101 - it is over
        if kept.ended.status > 0 and not self._is_ready:
            raise UnbuildableError(_in_words(kept.ended))
        killed = kept.ended.status == -signal.SIGKILL
        return ProgramEnded(
            text=_in_words(kept.ended), host_memory=killed and oom_kills() > self._oom_kills
        )


def _loaded_for(spec: WorkerSpec) -> tuple[str, ...]:
    is_training = spec.workload.name.endswith("train")
    return (*_OF_ALL, *_OF_TRAININGS) if is_training else _OF_ALL


def _told(kept: Kept, channel: Connection) -> Any:  # noqa: ANN401 - whatever it sends
    """Wait for what the program tells next; `None`: it has ended before."""
    while not kept.is_over:
        if channel.fileno() in select.select([channel.fileno(), kept.fileno()], [], [])[0]:
            break
        kept.listen(0.0)
    return channel.recv() if channel.poll() else None


def _path() -> str:
    """Return where the program finds modules: where this process does."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, sys.path)])


def _in_words(ended: Ended) -> str:
    if ended.status < 0:
        return f"its process was ended by {signal.Signals(-ended.status).name}"
    last = next((line for line in reversed(ended.tail.splitlines()) if line.strip()), "")
    return f"its process ended with exit code {ended.status}: {last.strip()[:300]}".rstrip(": ")
