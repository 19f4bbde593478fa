"""Whether nodes answer, by our own clock: Ray's health check needs 10 s and more to report a lost
PC.

At each call it opens a connection to each raylet's port and closes it again; it sends nothing. A
raylet that has ended refuses at once, a PC that is gone does not answer. Never blocks: an attempt
that is not finished is checked at the next call. Knows no Ray and decides nothing about slots.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass

#: Refusals without an answer between them after which a node is silent: its raylet has ended.
_REFUSALS = 2

#: So long without an answer, and a node is silent. Two lost SYN packets are repeated after 1 and 3
#: s (RFC 6298).
_SILENT_AFTER_S = 5.0

#: An attempt that is older than this is given up for a fresh one.
_ATTEMPT_S = 2.5


@dataclass(slots=True)
class _Port:
    answered_at_s: float | None = None
    refusals: int = 0
    attempt: socket.socket | None = None
    began_at_s: float = 0.0


class Pulse:
    """Keeps one connection attempt per node under way."""

    def __init__(self) -> None:
        self._doors: dict[str, _Port] = {}
        self._looked_at_s: float | None = None

    def silent(self, addresses: Mapping[str, tuple[str, int]], now_s: float) -> frozenset[str]:
        """Return the nodes that used to answer and no longer do.

        A node that never answered is not among them: a firewall may be in the way, and then only
        Ray knows. `addresses` are those of the raylets by node id; nodes that are no longer named
        are forgotten. Monotonic time.
        """
        if self._looked_at_s is not None and now_s - self._looked_at_s > _ATTEMPT_S:
            # This process was suspended, so missing answers say nothing about the nodes.
            for door in self._doors.values():
                door.answered_at_s = now_s if door.answered_at_s is not None else None
        self._looked_at_s = now_s
        for gone in self._doors.keys() - addresses.keys():
            _close(self._doors.pop(gone))
        for node, address in addresses.items():
            door = self._doors.setdefault(node, _Port())
            _look(door, now_s)
            if door.attempt is None:
                _knock(door, address, now_s)
                _look(door, now_s)
        return frozenset(
            node
            for node, door in self._doors.items()
            if self.refuses(node)
            or (door.answered_at_s is not None and now_s - door.answered_at_s > _SILENT_AFTER_S)
        )

    def refuses(self, node: str) -> bool:
        """Say whether the node's machine refuses the connection: its raylet has ended."""
        door = self._doors.get(node)
        return door is not None and door.answered_at_s is not None and door.refusals >= _REFUSALS

    def answered(self, node: str, now_s: float) -> bool:
        """Say whether the node answered when it was last looked at.

        One that never did may be behind a firewall.
        """
        door = self._doors[node]
        return door.answered_at_s is None or (
            door.refusals == 0 and now_s - door.answered_at_s <= _ATTEMPT_S
        )

    def close(self) -> None:
        """Give up the attempts under way."""
        for door in self._doors.values():
            _close(door)


def _knock(door: _Port, address: tuple[str, int], now_s: float) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        socket.inet_pton(family, address[0])  # to look up a name may take seconds
        door.attempt = socket.socket(family, socket.SOCK_STREAM)
        door.attempt.setblocking(False)
        door.began_at_s = now_s
        code = door.attempt.connect_ex(address)
    except OSError:  # no descriptor left, or a name: says nothing about the node
        _close(door)
        return
    if code not in {0, errno.EINPROGRESS}:
        _take(door, code, now_s)


def _look(door: _Port, now_s: float) -> None:
    if door.attempt is None:
        return
    waiting = select.poll()
    waiting.register(door.attempt, select.POLLOUT)
    if waiting.poll(0):
        _take(door, door.attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), now_s)
    elif now_s - door.began_at_s > _ATTEMPT_S:
        _close(door)


def _take(door: _Port, code: int, now_s: float) -> None:
    """Note how an attempt ended: `code` is 0 or an errno."""
    _close(door)
    if code == 0:
        door.answered_at_s, door.refusals = now_s, 0
    elif code == errno.ECONNREFUSED:
        door.refusals += 1


def _close(door: _Port) -> None:
    attempt, door.attempt = door.attempt, None
    if attempt is not None:
        with contextlib.suppress(OSError):
            attempt.close()
