"""Channels between a program, its keeper and its worker: whole messages over a SEQPACKET socket.

No call blocks, so that an engine keeps computing while the other end is busy. Does not know what
messages mean. Standard library only. Both ends belong to one user, so messages are pickled.
"""

from __future__ import annotations

import errno
import pickle
import socket
from typing import Any, Final

#: Largest message: the kernel's buffer holds 208 KiB.
MOST_BYTES: Final = 200_000

_READ_BYTES: Final = 2**18
_FULL: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})


class ClosedError(Exception):
    """The other end is closed, and everything that it sent was received."""


def send(end: socket.socket, message: object) -> bool:
    """Send a message; return `False` if there is no room for it now, or no memory.

    Also returns `False` if the other end is closed; `receive_all` reports that.

    Raises:
        ValueError: The message is larger than `MOST_BYTES`.
    """
    try:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes; at most {MOST_BYTES} can be sent")
        end.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except (MemoryError, ConnectionError):
        return False
    except OSError as error:
        if error.errno in _FULL:
            return False
        raise
    return True


def receive_all(end: socket.socket) -> list[Any]:
    """Return all waiting messages, the oldest first.

    Raises:
        ClosedError: There are none, and the other end is closed.
    """
    messages: list[Any] = []
    while True:
        try:
            data = end.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return messages
        except ConnectionResetError:
            # Raised once if the other end was closed before it had read everything.
            continue
        if not data:
            if messages:
                return messages
            raise ClosedError
        messages.append(pickle.loads(data))  # noqa: S301 - from a process of this user
