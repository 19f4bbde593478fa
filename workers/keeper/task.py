"""What a keeper is told, and what it tells: one JSON object each, over a SEQPACKET socket.

A worker sends a `Task` once, then orders: `{"on": true}` says that the head is still heard, and
`{"end": seconds}` ends the program, by SIGTERM and after so many seconds by SIGKILL. The keeper
answers `{"started": pid, "keeper": pid}` or `{"refused": text}`, to each `on` with what was printed
since, then once with `{"ended": wait status, ...}`. It closes the socket when nothing of the
program is there any more. Standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

#: Of the program's environment, the folder that it is kept in: by this name its processes are found
#: when its keeper is gone.
MARK: Final = "ORCHESTRATOR_KEPT_IN"

#: Of the program's environment, the number of the socket on which it tells and is told.
CHANNEL: Final = "ORCHESTRATOR_CHANNEL"

_MESSAGE_BYTES: Final = 2**18
_UCRED: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A program, and how it is kept."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    place: str
    """A folder. One program at a time is kept in it; `output.log` there is what it prints."""
    log_bytes: int
    """At this size the log is renamed to `output.log.1`, in place of the one before."""
    grace_s: float
    """Between SIGTERM and SIGKILL, at most, where no order asked it to end; and what a program leaves
    running has so long to end after it."""
    lease_s: float | None = None
    """The program ends when no order came for so long; `None`: never."""
    watch: Sequence[tuple[int, str]] = ()
    """Processes by id and start time. The program ends when one of them is gone."""
    module: str | None = None
    """Run the `__main__` of this package in a fork of the server, in place of executing `argv`,
    whose second word on it gets."""

    def to_bytes(self) -> bytes:
        """Return it for `of`."""
        return json.dumps(asdict(self)).encode("ascii")

    @classmethod
    def of(cls, data: bytes) -> Task:
        """Read what `to_bytes` has made."""
        return cls(**json.loads(data))


def tell(end: socket.socket, /, **what: object) -> None:
    """Send a message; it is lost where the other end is gone."""
    with contextlib.suppress(OSError):
        end.send(json.dumps(what).encode("ascii"))


def receive(end: socket.socket) -> dict[str, Any] | None:
    """Return the next message; `None` if there is none yet, on a socket that does not wait.

    Raises:
        EOFError: There are no more: the other end is closed.
    """
    try:
        text = end.recv(_MESSAGE_BYTES)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # told once, where the other has not read all that was sent to it
        text = end.recv(_MESSAGE_BYTES)
    if not text:
        raise EOFError
    message: dict[str, Any] = json.loads(text)
    return message


def is_own(peer: socket.socket) -> bool:
    """Say whether a process of this user is at the other end: an abstract socket has no owner."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(credentials)[1] == os.getuid())
