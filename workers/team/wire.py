"""Frames between two members of a team over TCP, after both have proved that they know its secret.

torch.distributed is not used: the sockets of gloo and its TCPStore take in strangers without a
proof, a member that is no neighbour of a dead one waits for the whole timeout, and a group that is
used again after a failure aborts the process (torch 2.13).

A frame is a fixed header and so many bytes: a tensor's own, or JSON for what is small. Nothing is
unpickled. Deadlines are for progress: a transfer may take as long as it moves. Knows neither rows
nor tensors, and encrypts nothing.
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

#: Without a byte for so long the other end is lost. A member that lives sends something more often.
SILENT_S: Final = 2.0
PING_EVERY_S: Final = 0.5

#: Of a tensor in one frame.
CHUNK_BYTES: Final = 1 << 20
#: Of JSON: the description of a state has some 100 bytes for each tensor.
_MOST_JSON_BYTES: Final = 32 << 20

_MARK: Final = b"OOMteam1"
_DRAWN_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HEAD: Final = struct.Struct("<8sBIQ")


class Kind(IntEnum):
    """What a frame says."""

    PING = 0
    #: Who joins, and with which state.
    HELLO = 1
    #: From which step it goes on; a state follows in chunks unless it has that one.
    WELCOME = 2
    REFUSED = 3
    #: Asks for rows, after those before are computed.
    CLAIM = 4
    ROWS = 5
    #: Asks for the sums of gradients; the answer has the same kind.
    SUMS = 6
    CHUNK = 7
    #: The round of sums is called off.
    VOID = 8
    #: All update with the total.
    COMMIT = 9
    #: What one process asks of the other, or answers; its tensors follow in chunks.
    CALL = 10


class LostError(Exception):
    """The other end is gone, silent, or speaks something else; the text says which."""


class Frame(NamedTuple):
    """What came at once; of a chunk what announces it: `into` takes the bytes."""

    kind: Kind
    round: int
    """Of sums, so that what belongs to one that was called off is passed over."""
    said: Mapping[str, Any]
    """The JSON; of a chunk nothing."""
    length: int
    """Bytes of a chunk that are still to be read."""


class Connection:
    """One end of a connection. One thread reads it; any may send."""

    def __init__(self, end: socket.socket, send_patience_s: float = SILENT_S) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's deadlines, which differ by direction; Python has one for both.
        end.settimeout(None)
        for option, seconds in (
            (socket.SO_RCVTIMEO, SILENT_S),
            (socket.SO_SNDTIMEO, send_patience_s),
        ):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), 0))
        self._end, self._sending = end, threading.Lock()
        self._why: str | None = None
        """Why it was closed here."""

    def send(self, kind: Kind, round_: int = 0, data: Any = b"") -> None:  # noqa: ANN401 - bytes
        """Send a frame.

        Raises:
            LostError: The other end takes nothing.
        """
        view = memoryview(data).cast("B")
        with self._sending:
            self._send(memoryview(_HEAD.pack(_MARK, kind, round_, len(view))), view)

    def tell(self, kind: Kind, round_: int = 0, **said: Any) -> None:  # noqa: ANN401 - JSON
        """Send a frame of JSON."""
        self.send(kind, round_, json.dumps(said).encode())

    def ping(self) -> None:
        """Say that this end lives, unless something is being sent anyway."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(memoryview(_HEAD.pack(_MARK, Kind.PING, 0, 0)))
            finally:
                self._sending.release()

    def frame(self) -> Frame:
        """Wait for the next frame that is no ping.

        Raises:
            LostError: Nothing comes, it is cut off, or it is something else.
        """
        while True:
            mark, number, round_, length = _HEAD.unpack(self._exactly(_HEAD.size))
            most_bytes = CHUNK_BYTES if number == Kind.CHUNK else _MOST_JSON_BYTES
            if mark != _MARK or number > Kind.CALL or length > most_bytes:
                raise LostError("it speaks another protocol")
            if number == Kind.CHUNK:
                return Frame(Kind.CHUNK, round_, {}, length)
            data = self._exactly(length)
            if number == Kind.PING:
                continue
            try:
                said = json.loads(data or b"{}")
            except ValueError as error:
                raise LostError(f"it sent no JSON: {error}") from error
            if not isinstance(said, dict):
                raise LostError("it sent no JSON object")
            return Frame(Kind(number), round_, said, 0)

    def into(self, view: memoryview, frame: Frame) -> None:
        """Receive the chunk that a frame announces into memory of just that size.

        Raises:
            LostError: It has another size, or is cut off.
        """
        if frame.kind is not Kind.CHUNK or frame.length != len(view):
            raise LostError(f"{len(view)} bytes were expected, and {frame.length} are announced")
        self._fill(view)

    def end_sending(self) -> None:
        """Let the other end read what was sent, and then its end."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed here."""
        return self._why is not None

    def close(self, why: str = "") -> None:
        """Wake up the threads that wait at it; the one that reads it calls `release`."""
        self._why = why if self._why is None else self._why
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give up the descriptor. For the thread that reads."""
        self.close()
        with self._sending:
            self._end.close()

    def _send(self, *parts: memoryview) -> None:
        left = [part for part in parts if part]
        try:
            while left:
                # Without a signal: the process may have been started with SIGPIPE as it is.
                sent = self._end.sendmsg(left, [], socket.MSG_NOSIGNAL)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]
        except OSError as error:
            raise LostError(self._why or f"it takes nothing: {error}") from error

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        try:
            while view:
                received = self._end.recv_into(view)
                if not received:
                    raise LostError(self._why or "it has closed the connection")
                view = view[received:]
        except BlockingIOError as error:
            raise LostError(f"it was silent for {SILENT_S:g} s") from error
        except OSError as error:
            raise LostError(self._why or f"nothing comes: {error}") from error


def listen(address: str) -> socket.socket:
    """Listen at `host:port`, on this address alone; port 0 takes any free one.

    Raises:
        OSError: That cannot be.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=16)


def connect(address: str, secret: bytes) -> Connection:
    """Connect to a leader, and prove the secret both ways.

    Raises:
        LostError: No leader is there that knows it.
    """
    host, _, port = address.rpartition(":")
    try:
        end = socket.create_connection((host.strip("[]"), int(port)), timeout=SILENT_S)
    except OSError as error:
        raise LostError(f"{address} cannot be reached: {error}") from error
    return proven(end, secret, leads=False)


def proven(end: socket.socket, secret: bytes, *, leads: bool) -> Connection:
    """Have both ends prove that they know the secret: of what both have drawn each tells what only
    who knows it can say. The role keeps one end from repeating what the other has said.

    Raises:
        LostError: The other end does not know it; it is closed. Nothing else was read from it.
    """
    role, other = (b"leader", b"member") if leads else (b"member", b"leader")
    # A leader that waits for another member reads nothing meanwhile.
    send_patience_s = SILENT_S if leads else 3 * SILENT_S
    connection, why = Connection(end, send_patience_s), "it does not know the secret of the team"
    own = _MARK + secrets.token_bytes(_DRAWN_BYTES)
    try:
        end.sendall(own, socket.MSG_NOSIGNAL)
        drawn = b"".join(sorted([own, end.recv(len(own), socket.MSG_WAITALL)]))
        end.sendall(hmac.digest(secret, role + drawn, hashlib.sha256), socket.MSG_NOSIGNAL)
        # The deadline is for all bytes, so that no stranger holds it byte by byte.
        theirs = end.recv(_PROOF_BYTES, socket.MSG_WAITALL)
        is_proven = hmac.compare_digest(theirs, hmac.digest(secret, other + drawn, hashlib.sha256))
    except OSError as error:
        is_proven, why = False, f"{why}, or is cut off: {error}"
    if not is_proven:
        connection.release()
        raise LostError(why)
    return connection
