"""Measures the throughput between two PCs over a connection of a team. Both ends send at the same
time, as in a step, whose sums go to the leader and come back. Needs no training.
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

#: Several spans, so that a short disturbance does not change the median.
_SPANS: Final = 6
_SPAN_S: Final = 0.25
_RETRY_S: Final = 0.1


def answer_measurement(address: str, secret: bytes, patience_s: float) -> None:
    """Listen until a peer proves the secret, then send and receive until it disconnects.

    Raises:
        OSError: `address` cannot be listened at, or no peer connects in time (`TimeoutError`).
    """
    until_s = time.monotonic() + patience_s
    with closing(wire.listen(address)) as listener:
        while True:
            listener.settimeout(max(0.001, until_s - time.monotonic()))
            end, _ = listener.accept()
            with suppress(LostError):  # the peer did not prove the secret
                connection = wire.authenticate(end, secret, leads=True)
                break
    with suppress(LostError):
        _exchange(connection, math.inf)


def measure_rate(address: str, secret: bytes, patience_s: float) -> float:
    """Return the bytes per second received from the peer at `address`, which receives as many.

    Raises:
        LostError: No peer with the secret listens there in time, or the peer sends nothing.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return _exchange(wire.connect(address, secret), _SPANS)
        except LostError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(_RETRY_S)  # the peer may still be starting


def _exchange(connection: Connection, spans: float) -> float:
    """Send and receive for `spans` times 0.25 s; return the median of the bytes/s received."""

    def send() -> None:
        with suppress(LostError):
            while True:
                connection.send(Kind.CHUNK, 0, bytes(CHUNK_BYTES))

    threading.Thread(target=send, daemon=True).start()
    chunk, count, rates = memoryview(bytearray(CHUNK_BYTES)), 0, list[float]()
    began_s = time.monotonic()
    try:
        while len(rates) < spans:
            connection.receive_chunk(chunk, connection.next_frame())
            count += 1
            took_s = time.monotonic() - began_s
            if took_s >= _SPAN_S:
                rates.append(count * CHUNK_BYTES / took_s)
                count, began_s = 0, began_s + took_s
        return median(rates[1:])  # TCP finds its speed in the first span
    finally:
        connection.release()
