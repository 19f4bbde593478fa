"""Calls between two processes that divide a model: JSON and tensors over a connection of a team.

Each end may call at any time. Does not say what a call means (`layers`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workers.team import tensors, wire
from workers.team.wire import Connection, Kind, LostError


class Call(NamedTuple):
    """What one process asks of the other, or its answer."""

    name: str
    content: Mapping[str, Any]


class Link:
    """A connection between both processes. A thread of its own reads it, so that neither end waits
    for the other to send.
    """

    def __init__(self, connection: Connection, is_attended: Callable[[], bool]) -> None:
        """`is_attended`: whether the computing thread is there; without it the link ends, so that
        the other member waits for no answer.
        """
        self._connection, self._is_attended = connection, is_attended
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.lost: str | None = None
        """Why it is no more."""
        for target in (self._read, self._ping):
            threading.Thread(target=target, name="team-link", daemon=True).start()

    def call(self, name: str, **content: Any) -> None:  # noqa: ANN401 - tensors and plain values
        """Send a call.

        Raises:
            LostError: The other end is gone.
            TaskError: The content cannot be sent.
        """
        self._connection.tell(Kind.CALL, 0, call=name, **tensors.described(content))
        tensors.send(self._connection, content)

    def take(self, seconds: float | None = None) -> Call | None:
        """Return the next call of the other end; `None`: none came in time.

        Raises:
            LostError: The other end is gone.
        """
        try:
            call = self._calls.get(timeout=seconds)
        except queue.Empty:
            return None
        if call is None:
            self._calls.put(None)
            raise LostError(self.lost or "the connection is closed")
        return call

    def close(self) -> None:
        """Wake up both threads, and have them end."""
        self._connection.close()

    def _read(self) -> None:
        connection = self._connection
        try:
            while True:
                said = connection.frame().said
                if (reason := said.get("reason")) is not None:
                    self.lost = f"the leader refuses: {reason}"
                    return
                self._calls.put(Call(said["call"], tensors.receive(connection, said)))
        except (LostError, LookupError, TypeError, ValueError) as error:
            self.lost = str(error)
        finally:
            self.lost = self.lost or "it could not be read"
            self._calls.put(None)
            connection.release()

    def _ping(self) -> None:
        while self.lost is None:
            try:
                if not self._is_attended():
                    self._connection.close("it computes nothing: it is held, or has no memory")
                self._connection.ping()
            except LostError:
                return  # which the other thread is told as well
            time.sleep(wire.PING_EVERY_S)
