"""Measures the link between two PCs by the wire of a team: both ends send at the same time, as a
step's sums go to the leader and come back. Needs no training.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import closing, suppress
from statistics import median
from typing import Final

from workers.team import wire
from workers.team.wire import CHUNK_BYTES, Connection, Kind, LostError

#: A short disturbance is to change nothing.
_SPANS: Final = 6
_SPAN_S: Final = 0.25
_AGAIN_S: Final = 0.1


def listened(address: str, secret: bytes, patience_s: float) -> None:
    """Listen until a peer proves the secret, and take part until it has measured.

    Raises:
        OSError: The address cannot be listened at, or no peer comes in time (`TimeoutError`).
    """
    until_s = time.monotonic() + patience_s
    with closing(wire.listen(address)) as listener:
        while True:
            listener.settimeout(max(0.001, until_s - time.monotonic()))
            end, _ = listener.accept()
            with suppress(LostError):  # a stranger
                connection = wire.proven(end, secret, leads=True)
                break
    with suppress(LostError):
        _exchanged(connection, math.inf)


def connected(address: str, secret: bytes, patience_s: float) -> float:
    """Return the bytes a second that come from who listens there, while as many are sent.

    Raises:
        LostError: No peer that knows the secret listens in time, or it sends nothing.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return _exchanged(wire.connect(address, secret), _SPANS)
        except LostError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(_AGAIN_S)  # its process may be starting


def _exchanged(connection: Connection, spans: float) -> float:
    """Send and receive for so many spans; return the bytes a second that came in most of them."""

    def send() -> None:
        with suppress(LostError):
            while True:
                connection.send(Kind.CHUNK, 0, bytes(CHUNK_BYTES))

    threading.Thread(target=send, daemon=True).start()
    chunk, count, rates = memoryview(bytearray(CHUNK_BYTES)), 0, list[float]()
    from_s = time.monotonic()
    try:
        while len(rates) < spans:
            connection.into(chunk, connection.frame())
            count += 1
            took_s = time.monotonic() - from_s
            if took_s >= _SPAN_S:
                rates.append(count * CHUNK_BYTES / took_s)
                count, from_s = 0, from_s + took_s
        return median(rates[1:])  # TCP finds its speed in the first
    finally:
        connection.release()
