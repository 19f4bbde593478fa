"""The wire accepts no message before authentication, and only frames after it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest
import torch

from workers.team import wire
from workers.team.leader import Helper, Leader
from workers.team.tensors import bytes_of
from workers.team.wire import Connection, Kind, LostError

SECRET = b"s" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(wire.listen("127.0.0.1:0")) as listening:
        yield listening


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start some work in a thread; return a function that waits for its result or exception."""
    return ThreadPoolExecutor().submit(work).result


@pytest.fixture
def ends(listener: socket.socket) -> Iterator[tuple[Connection, Connection]]:
    """Return the leader's end and the helper's end of an authenticated connection."""
    theirs = in_thread(lambda: wire.connect(address_of(listener), SECRET))
    ours = wire.authenticate(listener.accept()[0], SECRET, leads=True)
    yield ours, theirs()
    ours.release()
    theirs().release()


def test_frames_arrive_as_they_were_sent(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    data = os.urandom(wire.CHUNK_BYTES)
    theirs.ping()
    theirs.send_json(Kind.CLAIM, 3, most=7, loss=float("inf"))
    sent = in_thread(lambda: theirs.send(Kind.CHUNK, 4, data))
    frame = ours.next_frame()
    assert (frame.kind, frame.round) == (Kind.CLAIM, 3)
    assert frame.message == {"most": 7, "loss": float("inf")}
    received = bytearray(len(data))
    ours.receive_chunk(memoryview(received), ours.next_frame())
    assert received == data
    sent()
    theirs.close()
    with pytest.raises(LostError, match="closed"):
        ours.next_frame()


def test_a_claim_that_was_under_way_when_sums_were_asked_for_is_passed_over(
    ends: tuple[Connection, Connection],
) -> None:
    """The computing thread of the helper has sent it among messages of another thread."""
    ours, theirs = ends
    sums = torch.arange(5.0)
    theirs.send_json(Kind.CLAIM, 3, most=7)
    theirs.send(Kind.CHUNK, 4, bytes_of(sums))
    place = torch.zeros(5)
    assert Leader._received(cast("Leader", None), Helper("pc1/0", ours), place) is place
    assert place.equal(sums)


@pytest.mark.parametrize("secret", [b"t" * 32, b""])
def test_a_wrong_secret_is_refused_at_both_ends(listener: socket.socket, secret: bytes) -> None:
    theirs = in_thread(lambda: wire.connect(address_of(listener), secret))
    with pytest.raises(LostError, match="does not know the secret"):
        wire.authenticate(listener.accept()[0], SECRET, leads=True)
    with pytest.raises(LostError):
        theirs()


def test_who_only_repeats_is_no_leader(listener: socket.socket) -> None:
    theirs = in_thread(lambda: wire.connect(address_of(listener), SECRET))
    with closing(listener.accept()[0]) as end:
        end.sendall(wire._MAGIC + bytes(32))
        end.recv(40, socket.MSG_WAITALL)
        end.sendall(end.recv(32, socket.MSG_WAITALL))
        with pytest.raises(LostError, match="does not know the secret"):
            theirs()


def recorded(listener: socket.socket) -> bytes:
    """Return the bytes that a member sends to authenticate, as an eavesdropper would see them."""
    said = b""
    with closing(wire.listen("127.0.0.1:0")) as door:
        theirs = in_thread(lambda: wire.connect(address_of(door), SECRET))
        ours = in_thread(lambda: wire.authenticate(listener.accept()[0], SECRET, leads=True))
        end, on = door.accept()[0], socket.create_connection(listener.getsockname())
        with closing(end), closing(on):
            for length in (40, 32):
                end.sendall(on.recv(length, socket.MSG_WAITALL))
                said += (each := end.recv(length, socket.MSG_WAITALL))
                on.sendall(each)
            for end_of in (ours, theirs):
                end_of().release()
    return said


def test_what_was_said_once_opens_nothing_and_cut_at_any_byte_neither(
    listener: socket.socket,
) -> None:
    said = recorded(listener)
    for length in (*range(0, len(said), 3), len(said)):
        with closing(socket.create_connection(listener.getsockname())) as end:
            end.sendall(said[:length])
            end.shutdown(socket.SHUT_WR)
            with pytest.raises(LostError):
                wire.authenticate(listener.accept()[0], SECRET, leads=True)


@pytest.mark.parametrize(
    "sent",
    [
        os.urandom(64),
        b"GET / HTTP/1.1\r\n\r\n",
        wire._HEADER.pack(wire._MAGIC, 99, 0, 0),
        wire._HEADER.pack(wire._MAGIC, Kind.CHUNK, 0, wire.CHUNK_BYTES + 1),
        wire._HEADER.pack(wire._MAGIC, Kind.HELLO, 0, 1 << 40),
    ],
    ids=["noise", "http", "no kind", "a long chunk", "a long text"],
)
def test_what_is_no_frame_ends_the_connection(
    ends: tuple[Connection, Connection], sent: bytes
) -> None:
    ours, theirs = ends
    theirs._end.sendall(sent)
    theirs.end_sending()
    with pytest.raises(LostError):
        ours.next_frame()
