"""The worker's side of one kept program: starts it, hears how it goes, gives it orders.

Judges nothing and keeps no files. Standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.keeper import channel as channels
from workers.keeper import processes
from workers.keeper.task import MARK, Task, is_own
from workers.messages import PrintedOutput

#: A server starts in some hundredths of a second, on a busy PC in some seconds; one that imports
#: torch takes longer.
_START_S: Final = 60.0

#: Without the worker's own folders: what the server imports is named. It heeds Python's variables,
#: as its forks must: what they start inherits its flags, and with -I would find no module.
_SERVER: Final = """
import json, sys
path, name, modules, watched = json.loads(sys.argv[1])
sys.path[:] = path
from workers.keeper.keeper import serve
serve(name, modules, tuple(watched))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended."""

    status: int
    """As of `os.waitstatus_to_exitcode`: an exit code, or a signal below 0."""
    tail: str = ""
    """The newest of what it printed; nothing where its keeper was killed."""
    left: int = 0
    """So many of its processes were there after its end; its keeper ends them."""


class Kept:
    """One program from its start to its end."""

    def __init__(
        self,
        task: Task,
        server: tuple[int, str],
        *,
        modules: Sequence[str] = (),
        channel: socket.socket | None = None,
    ) -> None:
        """Start it; `listen` until it has started, is refused, or has ended.

        A server that this starts ends with the process `server`, and has loaded `modules`.
        `channel` is handed to the program, which finds its number in its environment.

        Raises:
            OSError: There is no server on this PC, and none can be started.
        """
        self.pid: int | None = None
        self.keeper_pid: int | None = None
        self.refused: str | None = None
        """Why it was not started."""
        self.ended: Ended | None = None
        self._output: PrintedOutput | None = None
        self._known: dict[int, str | None] = {}
        self._place = task.place
        self._news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._news.setblocking(False)
        ends = [theirs.fileno(), *([] if channel is None else [channel.fileno()])]
        try:
            _ask(task, ends, server, modules)
        finally:
            theirs.close()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was never started."""
        return self.ended is not None or self.refused is not None

    def fileno(self) -> int:
        """Return what can be read when there is news."""
        return self._news.fileno()

    def listen(self, wait_s: float) -> None:
        """Take in what its keeper has told; wait at most so long for it."""
        if self.is_over or not select.select([self._news], [], [], wait_s)[0]:
            return
        try:
            for news in channels.receive_all(self._news):
                self._hear(news)
        except channels.ClosedError:
            if not self.is_over:
                self._keeper_lost()

    def on(self) -> None:
        """Say that the head is heard. The answer is what was printed since the last time."""
        channels.send(self._news, {"on": True})

    def end(self, grace_s: float) -> None:
        """Have the program end: SIGTERM now, SIGKILL after `grace_s`."""
        channels.send(self._news, {"end": grace_s})

    def take_output(self) -> PrintedOutput | None:
        """Return what its keeper has told of what it printed, once."""
        output, self._output = self._output, None
        return output

    def processes(self) -> list[int]:
        """Return the program's processes, and remember them for when its keeper is killed."""
        pids = [] if self.keeper_pid is None else processes.below(self.keeper_pid)
        if pids:
            self._known = {pid: processes.start_time(pid) for pid in pids}
        return pids

    def close(self) -> None:
        """Let go of it. A program that still runs ends."""
        self._news.close()

    def _hear(self, news: Mapping[str, Any]) -> None:
        if "started" in news:
            self.pid, self.keeper_pid = news["started"], news["keeper"]
        elif "refused" in news:
            self.refused = news["refused"]
        elif "ended" in news:
            status = os.waitstatus_to_exitcode(news["ended"])
            self.ended = Ended(status=status, tail=news["tail"], left=news["left"])
        elif news["printed"]:
            more = PrintedOutput(text=news["printed"], dropped_bytes=news["dropped_bytes"])
            self._output = more if self._output is None else self._output.followed_by(more)

    def _keeper_lost(self) -> None:
        """End what it has left, for the server may have been killed as well."""

        def left() -> list[int]:
            known = [
                pid for pid, began in self._known.items() if processes.start_time(pid) == began
            ]
            return [*known, *processes.marked(MARK, self._place)]

        count = processes.end_all(left, 0.0)
        self.ended = Ended(status=-signal.SIGKILL, left=count)


def _ask(task: Task, ends: Sequence[int], server: tuple[int, str], modules: Sequence[str]) -> None:
    """Hand a task to the server of this PC, and start that where there is none."""
    name, deadline_s = _server_name(server, modules), time.monotonic() + _START_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.connect(f"\0{name}")
                if not is_own(asking):
                    raise OSError(f"another user's process listens as {name}")
                socket.send_fds(asking, [b"t"], ends)
                asking.sendall(task.to_bytes())
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
                if time.monotonic() >= deadline_s:
                    raise OSError(f"no keeper starts: {error}") from error
            else:
                return
        _start_server(name, server, modules)


def _start_server(name: str, server: tuple[int, str], modules: Sequence[str]) -> None:
    path = [str(Path(__file__).parents[2]), *sys.path]
    words = json.dumps([path, name, list(modules), list(server)])
    subprocess.run(  # noqa: S603 - our own words
        [sys.executable, "-P", "-c", _SERVER, words],
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=_START_S,
    )


def _server_name(server: tuple[int, str], modules: Sequence[str]) -> str:
    """Return a name that is the same for all who share a server.

    The environment of a fork is set, but what libraries have read of it when they were loaded
    stays: a program whose variables of these kinds differ asks another server.
    """
    read = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON"))
    }
    words = json.dumps([os.getuid(), server, list(modules), sys.path, sys.executable, read])
    return f"orchestrator-keeper-{hashlib.sha256(words.encode()).hexdigest()[:24]}"
