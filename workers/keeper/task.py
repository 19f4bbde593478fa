"""What a keeper is told, and what it tells, over a channel (`channel.py`).

A worker sends a `Task` once, as JSON, then orders: `{"on": True}` says that the head is heard,
and `{"end": seconds}` ends the program, by SIGTERM and after so many seconds by SIGKILL. The keeper
answers `{"started": pid, "keeper": pid}` or `{"refused": text}`, to each `on` with what was printed
since, then once with `{"ended": wait status, ...}`. It closes the socket when nothing of the
program is there any more. Standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

#: Of the program's environment, the folder that it is kept in: by this name its processes are found
#: when its keeper is gone.
MARK: Final = "ORCHESTRATOR_KEPT_IN"

#: Of the program's environment, the number of the socket on which it tells and is told.
CHANNEL: Final = "ORCHESTRATOR_CHANNEL"

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


def is_own(peer: socket.socket) -> bool:
    """Say whether a process of this user is at the other end: an abstract socket has no owner."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(credentials)[1] == os.getuid())
