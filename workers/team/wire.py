"""Frames between two members of a team over TCP, after both have proved that they know its secret.

torch.distributed is not used: the sockets of gloo and its TCPStore accept strangers without a
proof, a member that is no neighbour of a dead one waits for the whole timeout, and a group that is
used again after a failure aborts the process (torch 2.13).

A frame is a fixed header and a body: bytes of a tensor, or JSON for everything small. Nothing is
unpickled. Deadlines are for progress: a transfer may take any time while bytes move. Knows neither
rows nor tensors, and encrypts nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

#: Without a byte for this time the other end counts as lost; a live member sends more often.
SILENT_S: Final = 2.0
PING_EVERY_S: Final = 0.5

#: Most bytes of a tensor in one frame.
CHUNK_BYTES: Final = 1 << 20
#: Most bytes of JSON in one frame: the description of a state has some 100 for each tensor.
_MOST_JSON_BYTES: Final = 32 << 20

_MAGIC: Final = b"OOMteam1"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HEADER: Final = struct.Struct("<8sBIQ")


class Kind(IntEnum):
    """The kinds of frames."""

    PING = 0
    #: A member joins: its name, and the version of its state.
    HELLO = 1
    #: Admits it: the step it continues from; chunks of the state follow unless it has that state.
    WELCOME = 2
    REFUSED = 3
    #: Asks for rows, and says whether the rows before are computed.
    CLAIM = 4
    ROWS = 5
    #: Asks for the sums of gradients; the answer is of the same kind.
    SUMS = 6
    CHUNK = 7
    #: Cancels the present round of sums, or begins the first one of a new member.
    VOID = 8
    #: All members update the weights by the total.
    COMMIT = 9
    #: A request of one process to the other, or its answer; its tensors follow in chunks.
    CALL = 10


class LostError(Exception):
    """The other end is gone or silent, or speaks another protocol; the text says which."""


class Frame(NamedTuple):
    """A received frame. Of a chunk only the header: `receive_chunk` takes its bytes."""

    kind: Kind
    round: int
    """Number of the round of sums; frames of a cancelled round are ignored."""
    message: Mapping[str, Any]
    """The JSON object; empty for a chunk."""
    length: int
    """Bytes of the chunk that follow; 0 for JSON."""


class Connection:
    """One end of a connection. One thread reads it; any thread may send."""

    def __init__(self, end: socket.socket, send_patience_s: float = SILENT_S) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Set as options of the kernel, one for each direction: Python has one timeout for both.
        end.settimeout(None)
        for option, seconds in (
            (socket.SO_RCVTIMEO, SILENT_S),
            (socket.SO_SNDTIMEO, send_patience_s),
        ):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), 0))
        self._end, self._sending = end, threading.Lock()
        self._close_reason: str | None = None
        """Why this end closed it; `None`: it did not."""

    def send(self, kind: Kind, round_: int = 0, data: Any = b"") -> None:  # noqa: ANN401 - bytes
        """Send a frame.

        Raises:
            LostError: The other end accepts no bytes.
        """
        view = memoryview(data).cast("B")
        with self._sending:
            self._send(memoryview(_HEADER.pack(_MAGIC, kind, round_, len(view))), view)

    def send_json(self, kind: Kind, round_: int = 0, **message: Any) -> None:  # noqa: ANN401 - JSON
        """Send a frame with this JSON object."""
        self.send(kind, round_, json.dumps(message).encode())

    def ping(self) -> None:
        """Tell the other end that this one lives, unless another frame is being sent."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(memoryview(_HEADER.pack(_MAGIC, Kind.PING, 0, 0)))
            finally:
                self._sending.release()

    def next_frame(self) -> Frame:
        """Wait for the next frame that is no ping.

        Raises:
            LostError: Nothing comes, the connection is cut, or the bytes are no frame.
        """
        while True:
            magic, kind, round_, length = _HEADER.unpack(self._receive(_HEADER.size))
            most_bytes = CHUNK_BYTES if kind == Kind.CHUNK else _MOST_JSON_BYTES
            if magic != _MAGIC or kind > Kind.CALL or length > most_bytes:
                raise LostError("it speaks another protocol")
            if kind == Kind.CHUNK:
                return Frame(Kind.CHUNK, round_, {}, length)
            data = self._receive(length)
            if kind == Kind.PING:
                continue
            try:
                message = json.loads(data or b"{}")
            except ValueError as error:
                raise LostError(f"it sent no JSON: {error}") from error
            if not isinstance(message, dict):
                raise LostError("it sent no JSON object")
            return Frame(Kind(kind), round_, message, 0)

    def receive_chunk(self, view: memoryview, frame: Frame) -> None:
        """Receive the chunk that `frame` announces into memory of exactly its size.

        Raises:
            LostError: The chunk has another size, or is cut off.
        """
        if frame.kind is not Kind.CHUNK or frame.length != len(view):
            raise LostError(f"{len(view)} bytes were expected, and {frame.length} are announced")
        self._receive_into(view)

    def end_sending(self) -> None:
        """Close the sending side: the other end reads what was sent, and then the end."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    @property
    def is_closed(self) -> bool:
        """Whether this end has closed the connection."""
        return self._close_reason is not None

    def close(self, why: str = "") -> None:
        """Shut it down and wake the threads that wait; the reading thread then calls `release`."""
        self._close_reason = why if self._close_reason is None else self._close_reason
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the file descriptor. Only for the thread that reads."""
        self.close()
        with self._sending:
            self._end.close()

    def _send(self, *parts: memoryview) -> None:
        left = [part for part in parts if part]
        try:
            while left:
                # No signal: the process may have been started with the default action of SIGPIPE.
                sent = self._end.sendmsg(left, [], socket.MSG_NOSIGNAL)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]
        except OSError as error:
            raise LostError(self._close_reason or f"it accepts no data: {error}") from error

    def _receive(self, length: int) -> bytearray:
        data = bytearray(length)
        self._receive_into(memoryview(data))
        return data

    def _receive_into(self, view: memoryview) -> None:
        try:
            while view:
                received = self._end.recv_into(view)
                if not received:
                    raise LostError(self._close_reason or "it has closed the connection")
                view = view[received:]
        except BlockingIOError as error:
            raise LostError(f"it was silent for {SILENT_S:g} s") from error
        except OSError as error:
            raise LostError(self._close_reason or f"nothing is received: {error}") from error


def listen(address: str) -> socket.socket:
    """Listen at `host:port`, on this address alone; port 0 takes any free one.

    Raises:
        OSError: The address cannot be listened at.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=16)


def connect(address: str, secret: bytes) -> Connection:
    """Connect to a leader, and prove the secret both ways.

    Raises:
        LostError: No leader that knows the secret listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        end = socket.create_connection((host.strip("[]"), int(port)), timeout=SILENT_S)
    except OSError as error:
        raise LostError(f"{address} cannot be reached: {error}") from error
    return authenticate(end, secret, leads=False)


def authenticate(end: socket.socket, secret: bytes, *, leads: bool) -> Connection:
    """Make both ends prove that they know the secret: each sends an HMAC of its role and of random
    bytes from both. The role keeps an end from sending back what the other has sent.

    Raises:
        LostError: The other end does not know it, and was closed. Nothing else was read from it.
    """
    role, other = (b"leader", b"member") if leads else (b"member", b"leader")
    # A leader that waits for another member reads nothing meanwhile.
    send_patience_s = SILENT_S if leads else 3 * SILENT_S
    connection, why = Connection(end, send_patience_s), "it does not know the secret of the team"
    own = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
    try:
        end.sendall(own, socket.MSG_NOSIGNAL)
        nonces = b"".join(sorted([own, end.recv(len(own), socket.MSG_WAITALL)]))
        end.sendall(hmac.digest(secret, role + nonces, hashlib.sha256), socket.MSG_NOSIGNAL)
        # One deadline for all bytes, so that a stranger cannot prolong it byte by byte.
        theirs = end.recv(_PROOF_BYTES, socket.MSG_WAITALL)
        is_proven = hmac.compare_digest(theirs, hmac.digest(secret, other + nonces, hashlib.sha256))
    except OSError as error:
        is_proven, why = False, f"{why}, or is cut off: {error}"
    if not is_proven:
        connection.release()
        raise LostError(why)
    return connection
