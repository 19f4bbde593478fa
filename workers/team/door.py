"""Accepts the connections of other members at one address. Each member must prove that it knows the
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
from workers.team.place import TeamMember
from workers.team.wire import Connection, Kind, LostError

#: Most connections at once that have not proved the secret yet.
_MOST_STRANGERS: Final = 16

Serve: TypeAlias = Callable[[Connection, Mapping[str, Any]], None]
"""Called in a new thread for each admitted member, with its connection and its HELLO message."""


class Door:
    """The listening address of a member, open for the life of its process."""

    def __init__(
        self, member: TeamMember, admits: Callable[[], tuple[TeamOrders, Serve] | None]
    ) -> None:
        """Listen. `admits` returns the present orders and the function that serves a new member;
        `None`: no member is admitted at the moment.

        Raises:
            OSError: The address cannot be listened at.
        """
        self._member, self._admits = member, admits
        self._listener = wire.listen(member.spec.listen)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, name="team-door", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                end, peer = self._listener.accept()
            except OSError:
                time.sleep(wire.PING_EVERY_S)  # such as no file descriptors left
                continue
            admission = self._admits()
            if admission is None or not self._strangers.acquire(blocking=False):
                end.close()
                continue
            args = *admission, end, peer[0]
            threading.Thread(target=self._let_in, args=args, name="team-door", daemon=True).start()

    def _let_in(self, orders: TeamOrders, serve: Serve, end: socket.socket, peer: object) -> None:
        try:
            try:
                connection = wire.authenticate(end, orders.secret, leads=True)
            finally:
                self._strangers.release()
            try:
                hello = self._read_hello(connection, orders)
            except (LostError, TypeError):
                connection.release()
                raise
            serve(connection, hello)
        except (LostError, LookupError, TypeError, ValueError) as error:
            self._member.event("team_refused", count=1, address=peer, reason=str(error))

    def _read_hello(self, connection: Connection, orders: TeamOrders) -> Mapping[str, Any]:
        """Read and return the HELLO message of a member: it obeys the same orders, is another
        member of the team, and trains the same.

        Raises:
            LostError: One of these does not hold; the member was sent the reason.
        """
        frame, member, reason = connection.next_frame(), self._member, None
        hello = frame.message if frame.kind is Kind.HELLO else {}
        if hello.get("generation") != orders.generation:
            reason = f"it obeys generation {hello.get('generation')}, which is not the leader's"
        elif hello.get("slot") not in set(member.spec.members) - {member.slot}:
            reason = f"{hello.get('slot')} is not another member of this team"
        elif hello.get("identity") != member.identity:
            reason = (
                "it trains something else: its settings, data or model differ from the leader's"
            )
        if reason is not None:
            connection.send_json(Kind.REFUSED, reason=reason)
            raise LostError(reason)
        return hello
