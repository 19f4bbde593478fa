"""The link is measured over a team's wire, between processes that know the team's secret."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing, suppress

import pytest

from workers.team import link, wire
from workers.team.wire import LostError

SECRET = b"s" * 32


def test_it_is_measured_with_who_knows_the_secret_after_any_strangers() -> None:
    with closing(wire.listen("127.0.0.1:0")) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    there = threading.Thread(target=link.answer_measurement, args=(address, SECRET, 60.0))
    there.start()
    for said in (b"GET / HTTP/1.0\r\n\r\n" + bytes(200), os.urandom(64), b""):
        while True:
            with suppress(ConnectionRefusedError):
                end = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
                break
        with closing(end), suppress(OSError):
            end.sendall(said)
    with pytest.raises(LostError):
        link.measure_rate(address, b"t" * 32, 0.0)
    # In bytes: a link slower than half a chunk a second counts as silent and lost.
    assert link.measure_rate(address, SECRET, 60.0) > wire.CHUNK_BYTES / 2
    there.join()


def test_nobody_is_there() -> None:
    with pytest.raises(TimeoutError):
        link.answer_measurement("127.0.0.1:0", SECRET, 0.01)
    with pytest.raises(LostError, match=r"127\.0\.0\.1:1 cannot be reached"):
        link.measure_rate("127.0.0.1:1", SECRET, 0.2)
