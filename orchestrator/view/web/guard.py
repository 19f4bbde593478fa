"""Decides whether a request is answered, by its host, origin and token. Pure.

A browser sends this user's cookies to every page that can name this server, and all ports of a host
share their cookies. So a request must name this PC as localhost, must not come from another page,
and must bring the token. Does not read the body of a request, and knows no paths of the data.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

_HOST: Final = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::(?P<port>[0-9]{1,5}))?")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What counts of a request; `None` for a header that is not there."""

    method: str
    path: str
    host: str | None
    origin: str | None = None
    authorization: str | None = None
    cookie: str | None = None
    """The value of our own cookie."""


@dataclass(frozen=True, slots=True)
class RequestRefusal:
    """Why a request is not answered."""

    status: HTTPStatus
    error: str


def refusal(request: RequestFacts, access: Access) -> RequestRefusal | None:
    """Say why a request to the page is refused; `None`: it is answered.

    The page's own files tell nothing of the run, so they need no token.
    """
    misdirected = _misdirected(request)
    if misdirected is not None:
        return misdirected
    if request.path in {"/metrics", "/healthz"}:
        return metrics_refusal(request, access)
    if not request.path.startswith("/api/"):
        return None
    if not _has_token(request, access):
        return RequestRefusal(
            HTTPStatus.UNAUTHORIZED, "open the address that `python -m orchestrator web` prints"
        )
    return _not_commanded(request, access) if request.method == "POST" else None


def metrics_refusal(request: RequestFacts, access: Access) -> RequestRefusal | None:
    """Say why a request is refused where others may ask for `/metrics`; `None`: it is answered.

    `/healthz` tells nothing of the run, so it needs no token.
    """
    if request.path == "/healthz":
        return None
    kind, _, token = (request.authorization or "").partition(" ")
    if kind.lower() == "bearer" and is_same(token, access.metrics_token):
        return None
    return RequestRefusal(
        HTTPStatus.UNAUTHORIZED,
        "the request lacks Authorization: Bearer with the token of the file that `web` prints",
    )


def cookie_name(host: str | None) -> str:
    """Return the name of the page's cookie under a host: a browser shares cookies among all ports
    of a host, and may show the pages of two PCs through two tunnels.
    """
    match = _HOST.fullmatch((host or "").lower())
    return f"orchestrator-{(match and match['port']) or 80}"


def is_same(text: str, secret: str) -> bool:
    """Compare with a secret, in a time that does not tell how much of it is right."""
    return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), secret.encode())


def _misdirected(request: RequestFacts) -> RequestRefusal | None:
    """Refuse what is meant for another host, or sent by a page of another host."""
    host = (request.host or "").lower()
    if _HOST.fullmatch(host) is None:
        return RequestRefusal(
            HTTPStatus.FORBIDDEN,
            "this server answers to localhost and 127.0.0.1 only; use the address that `web` "
            "prints, from another PC through `ssh -L`",
        )
    if request.origin is not None and request.origin.lower() != f"http://{host}":
        return RequestRefusal(HTTPStatus.FORBIDDEN, "the request comes from a page elsewhere")
    return None


def _not_commanded(request: RequestFacts, access: Access) -> RequestRefusal | None:
    """Refuse a POST that no page of ours has sent, and any where commands are not taken."""
    if request.origin is None and request.authorization is None:
        return RequestRefusal(HTTPStatus.FORBIDDEN, "the request lacks its Origin")
    if not access.with_control:
        return RequestRefusal(
            HTTPStatus.FORBIDDEN, "the page takes commands only if `web --control` serves it"
        )
    return None


def _has_token(request: RequestFacts, access: Access) -> bool:
    if request.authorization is not None:
        kind, _, token = request.authorization.partition(" ")
        return kind.lower() == "bearer" and is_same(token, access.token)
    return is_same(request.cookie or "", access.token)
