"""The program's side of its channel: it tells its status and reads its orders.

Never waits and never raises; a status that is lost is replaced by the next. Standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from workers.keeper.task import CHANNEL

_MESSAGE_BYTES = 2**16


class Channel:
    """The socket that a keeper has given this process; without one nothing is told or read."""

    def __init__(self) -> None:
        """Take it from the environment, so that no process that this one starts has it."""
        number = os.environ.pop(CHANNEL, None)
        self._socket = None if number is None else socket.socket(fileno=int(number))
        if self._socket is not None:
            self._socket.setblocking(False)
            self._socket.set_inheritable(False)  # nor what this process executes
            os.register_at_fork(after_in_child=self._close)

    def tell(self, status: Mapping[str, Any]) -> bool:
        """Send a status; say whether there was memory and room for it."""
        if self._socket is None:
            return False
        try:
            self._socket.send(json.dumps(status).encode("ascii"))
        except (OSError, MemoryError):
            return False
        return True

    def orders(self) -> list[Mapping[str, Any]]:
        """Return what has come since the last call."""
        found: list[Mapping[str, Any]] = []
        while self._socket is not None:
            try:
                text = self._socket.recv(_MESSAGE_BYTES)
            except (OSError, MemoryError):
                break
            if not text:
                break
            found.append(json.loads(text))
        return found

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
