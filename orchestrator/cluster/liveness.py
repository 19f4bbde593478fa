"""Checks whether nodes answer, by our own clock: Ray's health check needs 10 s or more to report a
lost PC.

In each probe, a thread for each node opens and closes a connection to its raylet's port; it sends
nothing. A raylet that has ended refuses at once, a PC that is gone does not answer. A later probe
finds the result of an attempt that takes longer. Knows no Ray and decides nothing about slots.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Thread

#: Refusals in a row after which a node is silent: its raylet has ended.
_REFUSALS = 2

#: A node is silent after this time without an answer. Two lost SYN packets are repeated after 1 and
#: 3 s (RFC 6298).
SILENT_AFTER_S = 5.0

#: Time limit of an attempt; the next probe begins another one.
_ATTEMPT_S = 2.5

#: A probe waits this long for the attempt at each node, which has ended by then in a local network.
_WAIT_S = 0.02


@dataclass(slots=True)
class _Port:
    answered_at_s: float | None = None
    refusals: int = 0
    attempt: Thread | None = None
    """The last attempt, which may have ended."""


class Pulse:
    """The answers of the raylets, with at most one attempt at each under way."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}
        self._probed_at_s: float | None = None

    def probe(self, addresses: Mapping[str, tuple[str, int]], now_s: float) -> None:
        """Begin an attempt at each node that has none under way.

        `addresses` are those of the raylets, by node id; other nodes are forgotten. `now_s` is
        monotonic.
        """
        # If so, this process was suspended, and missing answers say nothing about the nodes.
        is_late = self._probed_at_s is not None and now_s - self._probed_at_s > _ATTEMPT_S
        self._probed_at_s = now_s
        self._ports = {node: self._ports.get(node) or _Port() for node in addresses}
        for node, port in self._ports.items():
            if is_late and port.answered_at_s is not None:
                port.answered_at_s = now_s
            if port.attempt is None or not port.attempt.is_alive():
                given = (port, addresses[node], now_s)
                # A daemon, since this process may end during the attempt.
                port.attempt = Thread(target=_try_port, args=given, name="liveness", daemon=True)
                port.attempt.start()
        for port in self._ports.values():
            if port.attempt is not None:
                port.attempt.join(_WAIT_S)

    def unanswered_s(self, node: str, now_s: float) -> float:
        """Return the seconds since the node's last answer if the last probes had none; else 0.

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


def _try_port(port: _Port, address: tuple[str, int], now_s: float) -> None:
    """Try to reach a node, and note the outcome for the moment when the attempt began."""
    try:
        socket.create_connection(address, timeout=_ATTEMPT_S).close()
    except ConnectionRefusedError:
        port.refusals += 1
    except OSError:  # no answer, no descriptor left, or no such name: says nothing about the node
        return
    else:
        port.answered_at_s, port.refusals = now_s, 0
