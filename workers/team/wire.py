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
import time
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

#: Without a byte for so long the other end is lost. A member that lives sends something more often.
SILENT_S: Final = 2.0
PING_EVERY_S: Final = 0.5

#: For the whole proof, so that no stranger holds a connection open byte by byte.
_PROOF_S: Final = 5.0

#: Of a tensor in one frame.
CHUNK_BYTES: Final = 1 << 20
#: Of JSON: the description of a state has some 100 bytes for each tensor.
_MOST_JSON_BYTES: Final = 32 << 20
_SMALL_BYTES: Final = 4096
_BUFFER_BYTES: Final = 4 << 20

_MARK: Final = b"OOMteam1"
_NONCE_BYTES: Final = 32
_DIGEST_BYTES: Final = 32
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


class Head(NamedTuple):
    """The header of a frame."""

    kind: Kind
    round: int
    """Of sums, so that what belongs to one that was called off is passed over."""
    length: int
    """Bytes that follow."""


class Connection:
    """One end of a connection. One thread reads it; any may send."""

    def __init__(self, end: socket.socket, send_patience_s: float = SILENT_S) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        end.settimeout(SILENT_S)
        # Of its own, because a timeout belongs to the object.
        self._end, self._out = end, end.dup()
        self._out.settimeout(send_patience_s)
        self._sending = threading.Lock()
        self.is_closed = False

    def send(self, kind: Kind, round_: int = 0, data: Any = b"") -> None:  # noqa: ANN401 - bytes
        """Send a frame.

        Raises:
            LostError: The other end takes nothing.
        """
        view = memoryview(data).cast("B")
        head = _HEAD.pack(_MARK, kind, round_, len(view))
        with self._sending:
            if len(view) <= _SMALL_BYTES:  # one packet
                self._send(memoryview(head + view))
            else:
                self._send(memoryview(head))
                self._send(view)

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

    def head(self) -> Head:
        """Wait for the next frame that is no ping.

        Raises:
            LostError: Nothing comes, or something else.
        """
        while True:
            mark, kind, round_, length = _HEAD.unpack(self._exactly(_HEAD.size))
            most_bytes = CHUNK_BYTES if kind == Kind.CHUNK else _MOST_JSON_BYTES
            if mark != _MARK or kind not in set(Kind) or length > most_bytes:
                raise LostError("it speaks another protocol")
            if kind != Kind.PING:
                return Head(Kind(kind), round_, length)

    def said(self, head: Head) -> Mapping[str, Any]:
        """Return the JSON that follows a header.

        Raises:
            LostError: It is none, or is cut off.
        """
        try:
            said = json.loads(self._exactly(head.length))
        except ValueError as error:
            raise LostError(f"it sent no JSON: {error}") from error
        if not isinstance(said, dict):
            raise LostError("it sent no JSON object")
        return said

    def into(self, view: memoryview, head: Head) -> None:
        """Receive the chunk that follows a header into memory of just that size.

        Raises:
            LostError: It has another size, or is cut off.
        """
        if head.kind is not Kind.CHUNK or head.length != len(view):
            raise LostError(f"{len(view)} bytes were expected, and {head.length} are announced")
        self._fill(view)

    def skip(self, head: Head) -> None:
        """Receive what follows a header, and forget it."""
        self._exactly(head.length)

    def end_sending(self) -> None:
        """Let the other end read what was sent, and then its end."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wake up the threads that wait at it; the one that reads it calls `release`."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give up the descriptors, which no thread uses any more."""
        self.close()
        with self._sending:
            self._out.close()
        self._end.close()

    def _send(self, view: memoryview) -> None:
        try:
            while view:
                view = view[self._out.send(view[:CHUNK_BYTES]) :]
        except OSError as error:
            raise LostError(f"it takes nothing: {error}") from error

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        try:
            while view:
                received = self._end.recv_into(view)
                if not received:
                    raise LostError("it has closed the connection")
                view = view[received:]
        except TimeoutError as error:
            raise LostError(f"it was silent for {SILENT_S:g} s") from error
        except OSError as error:
            raise LostError(f"nothing comes: {error}") from error


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
    with _proving(end):
        until_s = time.monotonic() + _PROOF_S
        greeting = _proof_bytes(end, len(_MARK) + _NONCE_BYTES, until_s)
        theirs, mine = greeting[len(_MARK) :], secrets.token_bytes(_NONCE_BYTES)
        _demand(greeting[: len(_MARK)] == _MARK, "who listens there speaks another protocol")
        end.sendall(mine + _proof(secret, b"member", theirs + mine))
        answer = _proof_bytes(end, _DIGEST_BYTES, until_s)
        is_proven = hmac.compare_digest(answer, _proof(secret, b"leader", theirs + mine))
        _demand(is_proven, "who listens there does not know the secret of the team")
        return Connection(end, send_patience_s=3 * SILENT_S)


def accepted(end: socket.socket, secret: bytes) -> Connection:
    """Have who has connected prove the secret, and prove it in return; closes what cannot.

    Raises:
        LostError: The other end does not know it. Nothing else was read from it.
    """
    with _proving(end):
        end.settimeout(SILENT_S)
        mine = secrets.token_bytes(_NONCE_BYTES)
        end.sendall(_MARK + mine)
        answer = _proof_bytes(end, _NONCE_BYTES + _DIGEST_BYTES, time.monotonic() + _PROOF_S)
        nonces = mine + answer[:_NONCE_BYTES]
        proof = _proof(secret, b"member", nonces)
        is_proven = hmac.compare_digest(answer[_NONCE_BYTES:], proof)
        _demand(is_proven, "it does not know the secret of the team")
        end.sendall(_proof(secret, b"leader", nonces))
        return Connection(end)


@contextlib.contextmanager
def _proving(end: socket.socket) -> Iterator[None]:
    """Close a connection whose other end does not prove itself."""
    try:
        yield
    except (LostError, OSError) as error:
        end.close()
        raise LostError(str(error) or "it does not answer") from error


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    """Return what only who knows the secret can say; the role keeps one end from repeating what the
    other has said.
    """
    return hmac.digest(secret, _MARK + role + nonces, hashlib.sha256)


def _proof_bytes(end: socket.socket, length: int, until_s: float) -> bytes:
    data = b""
    while len(data) < length:
        end.settimeout(max(0.001, min(SILENT_S, until_s - time.monotonic())))
        received = end.recv(length - len(data))
        _demand(received, "it has closed the connection before its proof")
        data += received
    return data


def _demand(is_so: object, why: str) -> None:
    if not is_so:
        raise LostError(why)
