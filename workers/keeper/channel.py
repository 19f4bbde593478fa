"""How a program, its keeper and its worker talk: whole messages over a SEQPACKET socket.

Nothing here waits: an engine computes on while the other is busy. Does not know what the messages
mean. Standard library alone. The two ends belong to one user, so messages are pickled.
"""

from __future__ import annotations

import errno
import pickle
import socket
from typing import Any, Final

#: A message must be smaller: the kernel's buffer holds 208 KiB.
MOST_BYTES: Final = 200_000

_READ_BYTES: Final = 2**18
_FULL: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})


class ClosedError(Exception):
    """The other end is closed, and all that it has sent was received."""


def send(end: socket.socket, message: object) -> bool:
    """Send it; `False` if there is no room for it now, or no memory.

    Also `False` where the other end is closed: `receive_all` says so.

    Raises:
        ValueError: It is too large for any time.
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
    """Return the messages that are there, the oldest first.

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
            # Told once, where the other end was closed before it had read all.
            continue
        if not data:
            if messages:
                return messages
            raise ClosedError
        messages.append(pickle.loads(data))  # noqa: S301 - of a process of this user
