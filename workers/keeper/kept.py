"""The worker's side of one kept program: starts it, hears how it goes, gives it orders.

Judges nothing and keeps no files. Standard library alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.keeper import processes
from workers.keeper.task import MARK, Task

#: A server starts in some hundredths of a second, on a busy PC in some seconds; one that imports
#: torch takes longer.
_START_S: Final = 60.0

_MESSAGE_BYTES: Final = 2**18
_UCRED: Final = struct.Struct("3i")

#: Without the worker's own folders: what the server imports is named. It heeds Python's variables,
#: as its forks must: what they start inherits its flags, and with -I would find no module.
_SERVER: Final = """
import json, sys
path, name, modules, watched = json.loads(sys.argv[1])
sys.path[:] = path
from workers.keeper.server import serve
serve(name, modules, tuple(watched))
"""


class NoKeeperError(OSError):
    """No server of keepers could be started on this PC."""


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
            NoKeeperError: There is no server, and none can be started.
        """
        self.pid: int | None = None
        self.keeper_pid: int | None = None
        self.refused: str | None = None
        """Why it was not started."""
        self.ended: Ended | None = None
        self._group: dict[int, str] = {}
        self._place = task.place
        self._news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        if not self.is_over and select.select([self._news], [], [], wait_s)[0]:
            self._hear()

    def on(self) -> None:
        """Say that the head is heard."""
        self._order({"on": True})

    def end(self, grace_s: float) -> None:
        """Have the program end: SIGTERM now, SIGKILL after `grace_s`."""
        self._order({"end": grace_s})

    def processes(self) -> list[int]:
        """Return the processes of the program; they are remembered for when its keeper is killed."""
        if self.keeper_pid is None or self.is_over:
            return []
        pids = processes.below(self.keeper_pid)
        began = {pid: processes.start_time(pid) for pid in pids}
        if processes.start_time(self.keeper_pid) is not None:  # else they are below another one
            self._group = {pid: start for pid, start in began.items() if start is not None}
        return list(self._group)

    def close(self) -> None:
        """Let go of it. A program that still runs ends."""
        self._news.close()

    def _order(self, order: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its keeper is gone, which is heard
            self._news.send(json.dumps(order).encode("ascii"), socket.MSG_DONTWAIT)

    def _hear(self) -> None:
        text = _receive(self._news)
        if text is None:
            return
        if not text:
            self._keeper_lost()
            return
        news = json.loads(text)
        if "started" in news:
            self.pid, self.keeper_pid = news["started"], news["keeper"]
        elif "refused" in news:
            self.refused = news["refused"]
        elif "ended" in news:
            self.ended = Ended(
                status=os.waitstatus_to_exitcode(news["ended"]),
                tail=news["tail"],
                left=news["left"],
            )

    def _keeper_lost(self) -> None:
        """End what it has left, for the server may have been killed as well."""
        known = self._group

        def left() -> list[int]:
            mine = [pid for pid, began in known.items() if processes.start_time(pid) == began]
            return [*mine, *processes.marked(MARK, self._place)]

        count = processes.end_all(left, 0.0)
        self.ended = Ended(status=-signal.SIGKILL, left=count)


def _receive(channel: socket.socket) -> bytes | None:
    """Return a message; `None` if there is none yet, and nothing where the other end is gone."""
    try:
        return channel.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
    except (BlockingIOError, ConnectionResetError):
        # Reset: told once, as the other has not read all; what it has sent is still there.
        return None


def _ask(task: Task, ends: Sequence[int], server: tuple[int, str], modules: Sequence[str]) -> None:
    """Hand a task to the server of this PC, and start that where there is none."""
    name = _server_name(server, modules)
    text = os.memfd_create("task")
    try:
        os.write(text, task.to_bytes())
        os.lseek(text, 0, os.SEEK_SET)
        deadline_s = time.monotonic() + _START_S
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                try:
                    asking.connect(f"\0{name}")
                    credentials = asking.getsockopt(
                        socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size
                    )
                    if _UCRED.unpack(credentials)[1] != os.getuid():
                        raise NoKeeperError(f"another user's process listens as {name}")
                    socket.send_fds(asking, [b"t"], [text, *ends])
                except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
                    if time.monotonic() >= deadline_s:
                        raise NoKeeperError(f"no keeper starts: {error}") from error
                else:
                    return
            _start_server(name, server, modules)
    finally:
        os.close(text)


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
