"""Decides whether a request is answered: its host, method and origin, and what it may do. Pure.

A browser sends this user's cookies to every page that can name this server, and cookies are shared
by all ports of a host. So a request must name a host of ours, must not come from another page, and
must bring a token or our own cookie. Does not read the body of a request, nor the clock.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final

CODE_VALID_S: Final = 120.0
SESSION_S: Final = 7 * 86_400.0
"""A browser must log in again after so long."""

_NAME = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
_OWN_SITE = frozenset({None, "same-origin", "none"})
"""What a browser says in Sec-Fetch-Site of a request from this page, or from a typed address."""


class Permission(IntEnum):
    """What a request may do; each level includes those below it."""

    NOTHING = 0
    READ = 1
    CONTROL = 2


@dataclass(frozen=True, slots=True)
class Route:
    """One path of the server: the only method it answers, what that needs, and which keys its query
    may have.
    """

    method: str
    needs: Permission
    keys: tuple[str, ...] = ()


_VIEW: Final = ("sort", "filter", "offset", "limit", "run")

#: Everything the server answers, besides the page's files.
ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {
        "/": Route("GET", Permission.NOTHING),
        "/healthz": Route("GET", Permission.NOTHING),
        "/metrics": Route("GET", Permission.READ),
        "/api/v1/run": Route("GET", Permission.READ, ("run",)),
        "/api/v1/runs": Route("GET", Permission.READ),
        "/api/v1/jobs": Route("GET", Permission.READ, ("run",)),
        "/api/v1/overview": Route("GET", Permission.READ, ("run",)),
        "/api/v1/table": Route("GET", Permission.READ, _VIEW),
        "/api/v1/slot": Route("GET", Permission.READ, ("name", "run")),
        "/api/v1/history": Route(
            "GET", Permission.READ, ("slot", "field", "from", "to", "buckets", "run")
        ),
        "/api/v1/events": Route("GET", Permission.READ, ("after", "slot", "limit", "run")),
        "/api/v1/stream": Route("GET", Permission.READ, _VIEW),
        "/api/v1/login": Route("POST", Permission.NOTHING),
        "/api/v1/commands": Route("POST", Permission.CONTROL, ("run",)),
        "/api/v1/words": Route("POST", Permission.CONTROL, ("run",)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Of one server."""

    hosts: frozenset[str]
    """Names under which it may be request, in lower case, without a port: behind a tunnel the port
    is another one.
    """
    port: int
    read_token: str
    control_token: str
    with_control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What counts of a request; `None` for a header that is not there."""

    method: str
    path: str
    host: str | None
    origin: str | None = None
    fetch_site: str | None = None
    authorization: str | None = None
    cookie: str | None = None
    """The value of our own cookie."""


@dataclass(frozen=True, slots=True)
class RequestRefusal:
    """Why a request is not answered."""

    status: int
    error: str


class Code:
    """The one-time code of a printed address. Time comes in as an argument."""

    def __init__(self, text: str, made_at_s: float) -> None:
        self._text = text
        self._until_s = made_at_s + CODE_VALID_S

    def redeem(self, text: str, now_s: float) -> bool:
        """Say whether this is the code and it still counts. It counts once."""
        is_good = now_s < self._until_s and _same(text, self._text)
        if is_good:
            self._until_s = float("-inf")
        return is_good


def judge(
    request: RequestFacts, route: Route | None, access: Access, now_unix_s: float
) -> RequestRefusal | Permission:
    """Return what the request may do, or why it is refused.

    `route` is `None` for a path that leads nowhere.
    """
    refusal = _misdirected(request, access) or _misused(request, route)
    if refusal is not None or route is None or route.needs is Permission.NOTHING:
        return refusal or Permission.NOTHING
    if route.needs is Permission.CONTROL and not access.with_control:
        return RequestRefusal(
            403, "this server only shows the run; start it with `web --control` to send commands"
        )
    level = _level_of(request, access, now_unix_s)
    if level is Permission.NOTHING:
        return RequestRefusal(
            401,
            "log in with the address that `web` prints, or send a token as Authorization: Bearer",
        )
    if level < route.needs:
        return RequestRefusal(
            403,
            "this token or login may only look; commands need the control token, or a new login",
        )
    return level


def cookie_name(access: Access) -> str:
    """Return the name of the cookie: no other server on this host has the same."""
    return f"orchestrator-{_signature(access.read_token, f'name {access.port}')[:12]}"


def cookie_value(level: Permission, access: Access, now_unix_s: float) -> str:
    """Return a login. It stays good when the server is started again at the same port."""
    claim = f"{int(level)}.{int(now_unix_s)}"
    return f"{claim}.{_signed(claim, level, access)}"


def _misdirected(request: RequestFacts, access: Access) -> RequestRefusal | None:
    """Refuse what is meant for another host, or sent by a page of another host."""
    host = (request.host or "").lower()
    match = _NAME.fullmatch(host)
    if match is None or match["name"] not in access.hosts:
        return RequestRefusal(
            403,
            "this server does not answer under that host name; use the address that `web` prints",
        )
    if request.origin is not None and request.origin.lower() not in {
        f"http://{host}",
        f"https://{host}",
    }:
        return RequestRefusal(403, "the request comes from a page of another origin")
    if request.path != "/" and request.fetch_site not in _OWN_SITE:
        return RequestRefusal(403, "the request comes from a page of another site")
    return None


def _misused(request: RequestFacts, route: Route | None) -> RequestRefusal | None:
    """Refuse a path or a method that does not exist, and a POST of which nothing says that this
    page has sent it.
    """
    if request.method not in {"GET", "POST"} or (
        route is not None and request.method != route.method
    ):
        allowed = "GET and POST" if route is None else route.method
        return RequestRefusal(405, f"the method must be {allowed}")
    if route is None:
        return RequestRefusal(404, "there is nothing at this path")
    if route.method == "POST" and request.origin is None and request.authorization is None:
        return RequestRefusal(403, "the request lacks its Origin")
    return None


def _level_of(request: RequestFacts, access: Access, now_unix_s: float) -> Permission:
    if request.authorization is not None:
        kind, _, token = request.authorization.partition(" ")
        if kind.lower() != "bearer":
            return Permission.NOTHING
        if _same(token, access.control_token):
            return Permission.CONTROL
        return Permission.READ if _same(token, access.read_token) else Permission.NOTHING
    claim, _, signature = (request.cookie or "").rpartition(".")
    match = re.fullmatch(r"([12])\.([0-9]{1,12})", claim, re.ASCII)
    if match is None:
        return Permission.NOTHING
    level, age_s = Permission(int(match[1])), now_unix_s - int(match[2])
    is_good = -SESSION_S < age_s < SESSION_S and _same(signature, _signed(claim, level, access))
    return level if is_good else Permission.NOTHING


def _signed(claim: str, level: Permission, access: Access) -> str:
    """Sign a login with the token of its level: who has only the other token cannot make one."""
    key = access.control_token if level is Permission.CONTROL else access.read_token
    return _signature(key, f"login {access.port} {claim}")


def _signature(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode())
