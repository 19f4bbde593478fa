"""Decides whether a request is answered, from its local address, host, origin and token.

A browser sends this user's cookies with requests of any page that knows this server, and all ports
of a host share cookies. So a request to the page's address must name the host localhost, must not
have the origin of another page, and must contain the token. Other addresses serve only `/metrics`.
Does not read the body of a request.
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
"""With any port: through `ssh -L`, the browser uses another port than the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The tokens and permissions of one server."""

    token: str
    """Token of the page: it is in the printed address, and becomes a cookie."""
    metrics_token: str
    """Token of `/metrics` only."""
    with_control: bool = False
    """Whether the server accepts commands."""


def check(request: web.Request, access: Access) -> None:
    """Let an allowed request pass. Files of the page need no token: they have no data of a run.

    `web.HTTPException`: the request is refused; its reason is a sentence for the user.
    """
    # If the client has disconnected, the local address of the request is unknown.
    address = None if request.transport is None else request.transport.get_extra_info("sockname")
    path, is_page = request.path, address is not None and address[0] == LOOPBACK
    if is_page:
        _check_sender(request)
    if path == "/metrics" or not is_page:
        given = request.headers.get("Authorization", "")
        if not matches(given, f"Bearer {access.metrics_token}"):
            raise web.HTTPUnauthorized(
                reason="the request lacks Authorization: Bearer with the token of the file that "
                "`web` prints"
            )
        if path != "/metrics":
            raise web.HTTPNotFound
    elif path.startswith("/api/"):
        if not matches(request.cookies.get(COOKIE, ""), access.token):
            why = "open the address that `python -m orchestrator web` prints"
            raise web.HTTPUnauthorized(reason=why)
        if request.method == "POST" and "Origin" not in request.headers:
            raise web.HTTPForbidden(reason="the request lacks its Origin")
        if request.method == "POST" and not access.with_control:
            why = "the page accepts commands only if `web --control` serves it"
            raise web.HTTPForbidden(reason=why)


def matches(text: str, secret: str) -> bool:
    """Compare a text with a secret, in a time that does not depend on the number of equal bytes."""
    return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), secret.encode())


def _check_sender(request: web.Request) -> None:
    """Refuse a request to another host name, or from a page of another origin."""
    host, origin = request.headers.get("Host", "").lower(), request.headers.get("Origin")
    if _HOST.fullmatch(host) is None:
        raise web.HTTPForbidden(
            reason="this server answers to localhost and 127.0.0.1 only; use the address that "
            "`web` prints, from another PC through `ssh -L`"
        )
    if origin is not None and origin.lower() != f"http://{host}":
        raise web.HTTPForbidden(reason="the request comes from another page")
