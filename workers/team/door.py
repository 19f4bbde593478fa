"""Where the other members of a team come in: one address, at which each proves that it knows the
secret before anything else is read from it.

Does not say who may come in (`wire.greeting`), nor what is said then.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from workers.team import wire
from workers.team.wire import Connection, LostError

#: Connections that have not proved themselves yet, at most.
_MOST_STRANGERS: Final = 16


class Admission(NamedTuple):
    """How this member lets others in at the moment."""

    secret: bytes
    serve: Callable[[Connection], None]
    """Called in a thread of its own with who has proved the secret; releases the connection."""


class Door:
    """The address of a member, open as long as its process lives."""

    def __init__(
        self, address: str, admits: Callable[[], Admission | None], tell: Callable[..., None]
    ) -> None:
        """Listen. `admits` returns `None` while no member is let in; `tell` gets an event for each
        that was refused.

        Raises:
            OSError: The address cannot be listened at.
        """
        self._listener, self._admits, self._tell = wire.listen(address), admits, tell
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, name="team-door", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                end, whence = self._listener.accept()
            except OSError:
                time.sleep(wire.PING_EVERY_S)  # such as no descriptors left
                continue
            admission = self._admits()
            if admission is None or not self._strangers.acquire(blocking=False):
                end.close()
                continue
            given = admission, end, whence[0]
            threading.Thread(target=self._let_in, args=given, name="team-door", daemon=True).start()

    def _let_in(self, admission: Admission, end: socket.socket, whence: object) -> None:
        try:
            try:
                connection = wire.accepted(end, admission.secret)
            finally:
                self._strangers.release()
            admission.serve(connection)
        except (LostError, LookupError, TypeError, ValueError) as error:
            self._tell("team_refused", count=1, address=whence, reason=str(error))
