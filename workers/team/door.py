"""Where the other members of a team come in: one address, at which each proves that it knows the
secret before anything else is read from it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from workers.messages import TeamOrders
from workers.team import wire
from workers.team.place import Place
from workers.team.wire import Connection, Kind, LostError

#: Connections that have not proved themselves yet, at most.
_MOST_STRANGERS: Final = 16

Serve: TypeAlias = Callable[[Connection, Mapping[str, Any]], None]
"""Called in a thread of its own with who has come in, and what it has said."""


class Door:
    """The address of a member, open as long as its process lives."""

    def __init__(self, place: Place, admits: Callable[[], tuple[TeamOrders, Serve] | None]) -> None:
        """Listen. `admits` returns how members are let in; `None`: they are not, for the moment.

        Raises:
            OSError: The address cannot be listened at.
        """
        self._place, self._admits = place, admits
        self._listener = wire.listen(place.spec.listen)
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
            given = *admission, end, whence[0]
            threading.Thread(target=self._let_in, args=given, name="team-door", daemon=True).start()

    def _let_in(self, orders: TeamOrders, serve: Serve, end: socket.socket, whence: object) -> None:
        try:
            try:
                connection = wire.proven(end, orders.secret, leads=True)
            finally:
                self._strangers.release()
            try:
                said = self._greeting(connection, orders)
            except (LostError, TypeError):
                connection.release()
                raise
            serve(connection, said)
        except (LostError, LookupError, TypeError, ValueError) as error:
            self._place.event("team_refused", count=1, address=whence, reason=str(error))

    def _greeting(self, connection: Connection, orders: TeamOrders) -> Mapping[str, Any]:
        """Return what a member says that has proved itself: it obeys the same orders, is another
        member, and trains the same.

        Raises:
            LostError: It does not; it was told why.
        """
        frame, place, reason = connection.frame(), self._place, None
        said = frame.said if frame.kind is Kind.HELLO else {}
        if said.get("generation") != orders.generation:
            reason = f"it obeys generation {said.get('generation')}, and this is another"
        elif said.get("slot") not in set(place.spec.members) - {place.slot}:
            reason = f"{said.get('slot')} is no other member of this team"
        elif said.get("identity") != place.identity:
            reason = (
                "it trains something else: its settings, data or model differ from the leader's"
            )
        if reason is not None:
            connection.tell(Kind.REFUSED, reason=reason)
            raise LostError(reason)
        return said
