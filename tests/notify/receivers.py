"""Real receivers of notifications on loopback: HTTP and SMTP servers, and one that accepts and never answers."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email import message_from_string
from email.header import decode_header, make_header
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Receiver:
    """A server, and what it has received: title and text of each message."""

    port: int
    messages: list[tuple[str, str]] = field(default_factory=list)

    def json_url(self, secret: str = "hush-hush", path: str = "deep-path") -> str:  # noqa: S107 - no real one
        """Return the address for apprise, with secrets in all of its parts."""
        return f"json://bot:{secret}@127.0.0.1:{self.port}/{path}?+X-Token={secret}-header"

    def mail_url(self, secret: str = "hush-hush") -> str:  # noqa: S107 - no real one
        """Return the address of a mailbox for apprise."""
        return f"mailto://bot:{secret}@mail.example:{self.port}?smtp=127.0.0.1&to=me@mail.example&mode=insecure"

    def text(self) -> str:
        """Return all that was received."""
        return "\n\n".join(f"{title}\n{body}" for title, body in self.messages)


@contextlib.contextmanager
def http_receiver(status: int = 200) -> Iterator[Receiver]:
    """Serve HTTP, and answer every message with this status."""
    receiver = Receiver(port=0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.messages.append((told["title"], told["message"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base calls it
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_address[1]
        with _serving(server):
            yield receiver


@contextlib.contextmanager
def smtp_receiver() -> Iterator[Receiver]:
    """Serve SMTP without encryption, and take any password."""
    receiver = Receiver(port=0)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline():
                word = line.strip().upper()
                if word.startswith(b"EHLO"):
                    self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
                elif word.startswith(b"AUTH"):
                    self.wfile.write(b"235 yes\r\n")
                elif word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = iter(self.rfile.readline, b".\r\n")
                    mail = message_from_string(b"".join(lines).decode())
                    parts = [
                        part.get_payload(decode=True)
                        for part in mail.walk()
                        if not part.is_multipart()
                    ]
                    body = "\n".join(part.decode() for part in parts if isinstance(part, bytes))
                    receiver.messages.append(
                        (str(make_header(decode_header(mail["Subject"]))), body)
                    )
                    self.wfile.write(b"250 taken\r\n")
                elif word == b"QUIT":
                    self.wfile.write(b"221 bye\r\n")
                    return
                else:
                    self.wfile.write(b"250 yes\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_address[1]
        with _serving(server):
            yield receiver


@contextlib.contextmanager
def black_hole() -> Iterator[Receiver]:
    """Accept every connection, in the kernel alone, and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Receiver(port=listener.getsockname()[1])


@contextlib.contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
