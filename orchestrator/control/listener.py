"""The socket of a head: takes in lines, at most one of each connection, and gives each its answer.

It is in the run folder, or, where its file system has no sockets, in the user's own folder under
$XDG_RUNTIME_DIR. Nothing in it blocks or raises; the head calls it once a turn. Does not know what
a line means (`wire.py`).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.control.wire import LINE_MOST_BYTES, Answer, answer_line

CONNECTIONS_MOST = 8
"""At a time; others wait until one of these has its answer or has been dropped."""
_PATIENCE_S = 1.0
"""For so long a connection may take to send its line."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end."""


def places(folder: Path) -> tuple[Path, ...]:
    """Return where the socket of a run folder may be, the better place first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        return (folder / "control.sock",)
    status = folder.stat()
    name = f"orchestrator-{status.st_dev:x}-{status.st_ino:x}.sock"

    return folder / "control.sock", Path(runtime) / name


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield another name of a path: the address of a socket has at most 107 bytes, and run folders
    may lie deep.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@dataclass(eq=False)
class Connection:
    """One that was accepted."""

    socket: socket.socket
    since_s: float
    content: bytearray = field(default_factory=bytearray)


class Listener:
    """Listens for the programs of this user."""

    def __init__(self, folder: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Make the socket of a run folder, which this process must own (`run_dir.hold_folder`)."""
        self._monotonic_s = monotonic_s
        self._reading: list[Connection] = []
        self._path: Path | None = None
        self._listener: socket.socket | None = None
        self.problem: str | None = None
        """Why there is no socket; `None` if there is one."""
        for path in places(folder):
            try:
                self._listener = _listening(path)
            except OSError as failure:
                self.problem = (
                    f"this run takes no commands: {path} cannot be made: "
                    f"{failure.strerror or failure}"
                )
            else:
                self._path, self.problem = path, None
                break

    def received(self) -> list[tuple[Connection, bytes]]:
        """Return the lines that have arrived; each connection must be given to `answer`."""
        now_s = self._monotonic_s()
        self._accept(now_s)
        connections, self._reading = self._reading, []
        lines = [(connection, self._line(connection, now_s)) for connection in connections]

        return [(connection, line) for connection, line in lines if line is not None]

    def answer(self, connection: Connection, answer: Answer) -> None:
        """Send the answer and close.

        An answer that cannot be sent at once is lost, and will be asked for again.
        """
        with suppress(OSError):
            connection.socket.send(answer_line(answer))
        connection.socket.close()

    def close(self) -> None:
        """Take no more; a connection that waits gets no answer."""
        for connection in self._reading:
            connection.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._reading, self._listener = [], None
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def _accept(self, now_s: float) -> None:
        while self._listener is not None and len(self._reading) < CONNECTIONS_MOST:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # there is none, or no file number is left for it
                return
            accepted.setblocking(False)
            connection = Connection(accepted, now_s)
            size = _CREDENTIALS.size
            _, user, _ = _CREDENTIALS.unpack(
                accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )
            if user == os.geteuid():
                self._reading.append(connection)
            else:
                self._refuse(connection, "this run belongs to another user")

    def _line(self, connection: Connection, now_s: float) -> bytes | None:
        """Read on; return the line once it is whole.

        Until then the connection is kept, or closed.
        """
        content = connection.content
        is_open = True
        try:
            while is_open and b"\n" not in content and len(content) <= LINE_MOST_BYTES:
                more = connection.socket.recv(LINE_MOST_BYTES)
                content += more
                is_open = bool(more)
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        line, end, _ = content.partition(b"\n")
        if end and len(line) < LINE_MOST_BYTES:
            return bytes(line)
        if len(content) > LINE_MOST_BYTES:
            self._refuse(connection, f"a line has at most {LINE_MOST_BYTES} bytes")
        elif is_open and now_s - connection.since_s < _PATIENCE_S:
            self._reading.append(connection)
        else:
            connection.socket.close()
        return None

    def _refuse(self, connection: Connection, why: str) -> None:
        self.answer(connection, Answer(ok=False, id="", error=why))


def _listening(path: Path) -> socket.socket:
    """Make the socket in the place of one that a killed head has left."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        # Before the name exists: Linux gives the name the socket's own mode.
        os.fchmod(listener.fileno(), 0o600)
        with short_name(path) as name:
            listener.bind(name)
        listener.listen(CONNECTIONS_MOST)
    except BaseException:
        listener.close()
        raise
    return listener
