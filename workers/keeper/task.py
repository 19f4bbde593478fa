"""The messages between a worker and a keeper, over a channel (`channel.py`).

A worker sends a `Task` once, as JSON, then orders: `{"on": True}` renews the lease, and `{"end":
seconds}` ends the program, by SIGTERM and after these seconds by SIGKILL. The keeper answers
`{"started": pid, "keeper": pid}` or `{"refused": text}`. It answers each `on` with the output since
the last one, and once sends `{"ended": wait status, ...}`. It closes the socket when no process of
the program is left. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

#: Environment variable of the program: the folder that it is kept in. It identifies the program's
#: processes when the keeper is gone.
MARK: Final = "ORCHESTRATOR_KEPT_IN"

#: Environment variable of the program: the file descriptor of its channel to the worker.
CHANNEL: Final = "ORCHESTRATOR_CHANNEL"

_UCRED: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A program to start, and the limits of its keeper."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    place: str
    """Folder of the program, for one at a time; `output.log` there has its output."""
    log_bytes: int
    """At this size the log replaces `output.log.1`, and a new one begins."""
    grace_s: float
    """Longest time between SIGTERM and SIGKILL if no order ended the program, and for the processes
    that it leaves running.
    """
    lease_s: float | None = None
    """The keeper ends the program after this time without an order; `None`: never."""
    watch: Sequence[tuple[int, str]] = ()
    """Processes by id and start time. The keeper ends the program when one of them is gone."""
    module: str | None = None
    """Run the `__main__` of this package in a fork of the server, with `argv[1:]` as its
    `sys.argv`, and do not execute `argv`.
    """

    def to_bytes(self) -> bytes:
        """Serialise the task; `of` reads it."""
        return json.dumps(asdict(self)).encode("ascii")

    @classmethod
    def of(cls, data: bytes) -> Task:
        """Parse the result of `to_bytes`."""
        return cls(**json.loads(data))


def is_own(peer: socket.socket) -> bool:
    """Return whether the peer is a process of this user; an abstract socket has no owner."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(credentials)[1] == os.getuid())
