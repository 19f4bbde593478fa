"""Whether nodes answer, by our own clock: Ray's health check needs 10 s and more to report a lost
PC.

At each look a thread for each node opens a connection to its raylet's port and closes it again; it
sends nothing. A raylet that has ended refuses at once, a PC that is gone does not answer. An attempt
that is not finished is found at a later look. Knows no Ray and decides nothing about slots.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Thread

#: Refusals without an answer between them after which a node is silent: its raylet has ended.
_REFUSALS = 2

#: So long without an answer, and a node is silent. Two lost SYN packets are repeated after 1 and 3
#: s (RFC 6298).
SILENT_AFTER_S = 5.0

#: An attempt ends after so long, and another one begins.
_ATTEMPT_S = 2.5

#: A look waits so long for the attempt at each node: in a network of one's own, it has ended by
#: then.
_THROUGH_S = 0.02


@dataclass(slots=True)
class _Port:
    answered_at_s: float | None = None
    refusals: int = 0
    attempt: Thread | None = None
    """The last one, which may have ended."""


class Pulse:
    """What is known of the raylets, with at most one attempt at each under way."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}
        self._looked_at_s: float | None = None

    def look(self, addresses: Mapping[str, tuple[str, int]], now_s: float) -> None:
        """Try to reach each node once more.

        `addresses` are those of the raylets by node id; nodes that are no longer named are
        forgotten. Monotonic time.
        """
        # Then this process was suspended, so missing answers say nothing about the nodes.
        is_late = self._looked_at_s is not None and now_s - self._looked_at_s > _ATTEMPT_S
        self._looked_at_s = now_s
        self._ports = {node: self._ports.get(node) or _Port() for node in addresses}
        for node, port in self._ports.items():
            if is_late and port.answered_at_s is not None:
                port.answered_at_s = now_s
            if port.attempt is None or not port.attempt.is_alive():
                given = (port, addresses[node], now_s)
                # As a daemon: this process may end while it goes on.
                port.attempt = Thread(target=_knock, args=given, name="liveness", daemon=True)
                port.attempt.start()
        for port in self._ports.values():
            if port.attempt is not None:
                port.attempt.join(_THROUGH_S)

    def unanswered_s(self, node: str, now_s: float) -> float:
        """Return how long ago the node has answered, if it has not at the last looks; else 0.

        A node that never answered counts as one that does: a firewall may be in the way, and then
        only Ray knows.
        """
        port = self._ports.get(node)
        if port is None or port.answered_at_s is None:
            return 0.0
        passed_s = now_s - port.answered_at_s
        return passed_s if port.refusals or passed_s > _ATTEMPT_S else 0.0

    def is_silent(self, node: str, now_s: float) -> bool:
        """Say whether the node used to answer and no longer does."""
        return self.refuses(node) or self.unanswered_s(node, now_s) > SILENT_AFTER_S

    def refuses(self, node: str) -> bool:
        """Say whether the node's machine refuses the connection: its raylet has ended."""
        port = self._ports.get(node)
        return port is not None and port.answered_at_s is not None and port.refusals >= _REFUSALS


def _knock(port: _Port, address: tuple[str, int], now_s: float) -> None:
    """Try to reach a node, and note the outcome as that of the moment when the attempt began."""
    try:
        socket.create_connection(address, timeout=_ATTEMPT_S).close()
    except ConnectionRefusedError:
        port.refusals += 1
    except OSError:  # no answer, no descriptor left, or no such name: says nothing about the node
        return
    else:
        port.answered_at_s, port.refusals = now_s, 0
