"""Decides whether a request is answered: by the address it came to, its host, origin and token.

A browser sends this user's cookies to every page that can name this server, and all ports of a host
share their cookies. So at the page's address a request must name this PC as localhost, must not
come from another page, and must bring the token. Another address gives `/metrics` alone. Does not
read the body of a request.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from typing import Final

from aiohttp import web

LOOPBACK: Final = "127.0.0.1"
COOKIE: Final = "orchestrator"
"""The name of the cookie with the page's token."""
_HOST: Final = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?")
"""Any port: behind `ssh -L` the browser's port is another one than the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may do what at one server."""

    token: str
    """Of the page: it is in the printed address, and becomes a cookie."""
    metrics_token: str
    """Opens `/metrics` alone."""
    with_control: bool = False
    """Whether commands are taken."""


def check(request: web.Request, access: Access) -> None:
    """Let a request pass. The page's own files tell nothing of the run, so they need no token.

    `web.HTTPException`: it is refused; the reason is a sentence for the person who asks.
    """
    # Once its sender is gone, nothing tells which address of this PC a request came to.
    came_to = None if request.transport is None else request.transport.get_extra_info("sockname")
    path, is_page = request.path, came_to is not None and came_to[0] == LOOPBACK
    if is_page:
        _check_sender(request)
    if path == "/metrics" or not is_page:
        given = request.headers.get("Authorization", "")
        if not is_same(given, f"Bearer {access.metrics_token}"):
            raise web.HTTPUnauthorized(
                reason="the request lacks Authorization: Bearer with the token of the file that "
                "`web` prints"
            )
        if path != "/metrics":
            raise web.HTTPNotFound
    elif path.startswith("/api/"):
        if not is_same(request.cookies.get(COOKIE, ""), access.token):
            why = "open the address that `python -m orchestrator web` prints"
            raise web.HTTPUnauthorized(reason=why)
        if request.method == "POST" and "Origin" not in request.headers:
            raise web.HTTPForbidden(reason="the request lacks its Origin")
        if request.method == "POST" and not access.with_control:
            why = "the page takes commands only if `web --control` serves it"
            raise web.HTTPForbidden(reason=why)


def is_same(text: str, secret: str) -> bool:
    """Compare with a secret, in a time that does not tell how much of it is right."""
    return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), secret.encode())


def _check_sender(request: web.Request) -> None:
    """Refuse what is meant for another host, or sent by a page of another host."""
    host, origin = request.headers.get("Host", "").lower(), request.headers.get("Origin")
    if _HOST.fullmatch(host) is None:
        raise web.HTTPForbidden(
            reason="this server answers to localhost and 127.0.0.1 only; use the address that "
            "`web` prints, from another PC through `ssh -L`"
        )
    if origin is not None and origin.lower() != f"http://{host}":
        raise web.HTTPForbidden(reason="the request comes from a page elsewhere")
