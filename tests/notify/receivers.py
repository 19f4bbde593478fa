"""Real receivers of notifications on loopback: an HTTP server, and one that accepts and never
answers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Receiver:
    """A server, and what it has received: title and text of each message."""

    port: int
    messages: list[tuple[str, str]] = field(default_factory=list)

    def json_url(self, secret: str = "hush-hush", path: str = "deep-path") -> str:  # noqa: S107 - no real one
        """Return the address for apprise, with secrets in all of its parts."""
        return f"json://bot:{secret}@127.0.0.1:{self.port}/{path}?+X-Token={secret}-header"

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
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def black_hole() -> Iterator[Receiver]:
    """Accept every connection, in the kernel alone, and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Receiver(port=listener.getsockname()[1])
