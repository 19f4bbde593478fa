"""The worker's side of one kept program: starts it, sends orders, and receives reports.

Judges nothing and keeps no files. Standard library only.
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

#: Time limit for the start of a server. It usually takes some hundredths of a second, some seconds
#: on a busy PC, and longer if the server imports torch.
_START_S: Final = 60.0

#: The server's program. It sets `sys.path` explicitly, without the worker's own folders. It runs
#: without `-I`, because the programs that its forks start inherit its flags, and with `-I` would
#: not find modules of PYTHONPATH.
_SERVER: Final = """
import json, sys
path, name, modules, watched = json.loads(sys.argv[1])
sys.path[:] = path
from workers.keeper.keeper import serve
serve(name, modules, tuple(watched))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a kept program ended."""

    status: int
    """Exit code, or the negative signal number, as of `os.waitstatus_to_exitcode`."""
    tail: str = ""
    """The end of its output; empty if its keeper was killed."""
    left: int = 0
    """Number of its processes that were still running after its end; its keeper ends them."""


class Kept:
    """Handle of one program from its start to its end."""

    def __init__(
        self,
        task: Task,
        server: tuple[int, str],
        *,
        modules: Sequence[str] = (),
        channel: socket.socket | None = None,
    ) -> None:
        """Start the program; call `listen` until it has started, was refused, or has ended.

        If there is no server on this PC, start one that imports `modules` and ends with the process
        `server` (id and start time). The program inherits `channel`, and finds its number in its
        environment.

        Raises:
            OSError: No server can be started on this PC.
        """
        self.pid: int | None = None
        self.keeper_pid: int | None = None
        self.refused: str | None = None
        """Why the program was not started."""
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
        """Whether the program has ended, or was refused."""
        return self.ended is not None or self.refused is not None

    def fileno(self) -> int:
        """Return the file descriptor that is readable when the keeper has sent something."""
        return self._news.fileno()

    def listen(self, wait_s: float) -> None:
        """Process the messages of the keeper; wait at most `wait_s` for the first."""
        if self.is_over or not select.select([self._news], [], [], wait_s)[0]:
            return
        try:
            for news in channels.receive_all(self._news):
                self._handle(news)
        except channels.ClosedError:
            if not self.is_over:
                self._keeper_lost()

    def on(self) -> None:
        """Renew the lease. The keeper answers with the output since the last call."""
        channels.send(self._news, {"on": True})

    def end(self, grace_s: float) -> None:
        """End the program: SIGTERM now, SIGKILL after `grace_s`."""
        channels.send(self._news, {"end": grace_s})

    def take_output(self) -> PrintedOutput | None:
        """Return the output received since the last call."""
        output, self._output = self._output, None
        return output

    def processes(self) -> list[int]:
        """Return the ids of the program's processes, and keep them for a killed keeper."""
        pids = [] if self.keeper_pid is None else processes.below(self.keeper_pid)
        if pids:
            self._known = {pid: processes.start_time(pid) for pid in pids}
        return pids

    def close(self) -> None:
        """Close the socket to the keeper, which ends a program that still runs."""
        self._news.close()

    def _handle(self, news: Mapping[str, Any]) -> None:
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
        """End the processes of a killed keeper, since the server may have been killed as well."""

        def left() -> list[int]:
            known = [
                pid for pid, began in self._known.items() if processes.start_time(pid) == began
            ]
            return [*known, *processes.marked(MARK, self._place)]

        count = processes.end_all(left, 0.0)
        self.ended = Ended(status=-signal.SIGKILL, left=count)


def _ask(task: Task, ends: Sequence[int], server: tuple[int, str], modules: Sequence[str]) -> None:
    """Send a task to the server of this PC; start a server if there is none."""
    name, deadline_s = _server_name(server, modules), time.monotonic() + _START_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(f"\0{name}")
                if not is_own(connection):
                    raise OSError(f"another user's process listens as {name}")
                socket.send_fds(connection, [b"t"], ends)
                connection.sendall(task.to_bytes())
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
                if time.monotonic() >= deadline_s:
                    raise OSError(f"no keeper starts: {error}") from error
            else:
                return
        _start_server(name, server, modules)


def _start_server(name: str, server: tuple[int, str], modules: Sequence[str]) -> None:
    path = [str(Path(__file__).parents[2]), *sys.path]
    words = json.dumps([path, name, list(modules), list(server)])
    subprocess.run(  # noqa: S603 - fixed arguments
        [sys.executable, "-P", "-c", _SERVER, words],
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=_START_S,
    )


def _server_name(server: tuple[int, str], modules: Sequence[str]) -> str:
    """Return the socket name of the server, the same for all workers that can share it.

    A fork gets its own environment, but libraries have read some variables when the server loaded
    them. A program for which these variables differ uses another server.
    """
    read = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON"))
    }
    words = json.dumps([os.getuid(), server, list(modules), sys.path, sys.executable, read])
    return f"orchestrator-keeper-{hashlib.sha256(words.encode()).hexdigest()[:24]}"
