"""Who is answered: every pair of a bad host, origin, method and token, on every path."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.view.web import guard
from orchestrator.view.web.guard import (
    CODE_VALID_S,
    ROUTES,
    SESSION_S,
    Access,
    Code,
    Permission,
    RequestFacts,
    RequestRefusal,
    Route,
)

NOW_UNIX_S = 1_800_000_000.0
RULES = Access(
    hosts=frozenset({"127.0.0.1", "localhost", "[::1]"}),
    port=8470,
    read_token="r" * 43,
    control_token="c" * 43,
    with_control=True,
)
FILE = "/app.js"

EVIL_HOSTS = [
    None, "", "evil.example", "evil.example:8470", "127.0.0.1.evil.example", "localhost.", "127.0.0.1@evil.example",
    "localhost:8470/", "[::1", "192.168.1.10:8470", "localhost\n", "localhost:123456",
]  # fmt: skip
EVIL_ORIGINS = [
    "http://evil.example", "null", "", "http://127.0.0.1:9999", "http://127.0.0.1", "https://127.0.0.1:8470.evil.example",
    "ftp://127.0.0.1:8470", "http://localhost:8470", "127.0.0.1:8470",
]  # fmt: skip
GOOD_ORIGIN = "http://127.0.0.1:8470"
METHODS = [
    "HEAD",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "get",
    "post",
    "",
    "PROPFIND",
]
EVIL_TOKENS: list[dict[str, Any]] = [
    {},
    {"authorization": "Bearer "},
    {"authorization": "Bearer " + "x" * 43},
    {"authorization": "Basic " + "c" * 43},
    {"authorization": "c" * 43},
    {"authorization": "Bearer \udcff"},
    {"cookie": "2.1800000000."},
    {"cookie": f"2.1800000000.{'0' * 64}"},
    {"cookie": guard.cookie_value(Permission.READ, RULES, NOW_UNIX_S).replace("1.", "2.", 1)},
    {"cookie": guard.cookie_value(Permission.CONTROL, replace(RULES, port=8471), NOW_UNIX_S)},
    {
        "cookie": guard.cookie_value(
            Permission.CONTROL, replace(RULES, control_token="d" * 43), NOW_UNIX_S
        )
    },
    {"cookie": guard.cookie_value(Permission.CONTROL, RULES, NOW_UNIX_S - SESSION_S - 1)},
    # A wrong token is not made good by a cookie.
    {
        "authorization": "Bearer x",
        "cookie": guard.cookie_value(Permission.CONTROL, RULES, NOW_UNIX_S),
    },
]
GOOD_TOKENS: list[dict[str, Any]] = [
    {"authorization": f"Bearer {RULES.control_token}"},
    {"cookie": guard.cookie_value(Permission.CONTROL, RULES, NOW_UNIX_S - SESSION_S + 60)},
]
paths = pytest.mark.parametrize("path", [*ROUTES, FILE])


def route_of(path: str) -> Route | None:
    return Route("GET", Permission.NOTHING) if path == FILE else ROUTES.get(path)


def asked(path: str, **changed: Any) -> RequestFacts:
    """Make the request that the page itself sends, but without a login."""
    route = route_of(path)
    usual = RequestFacts(
        method="GET" if route is None else route.method,
        path=path,
        host="127.0.0.1:8470",
        origin=GOOD_ORIGIN,
        fetch_site="same-origin",
    )
    return replace(usual, **changed)


def judged(request: RequestFacts, access: Access = RULES) -> RequestRefusal | Permission:
    return guard.judge(request, route_of(request.path), access, NOW_UNIX_S)


@paths
@pytest.mark.parametrize("token", GOOD_TOKENS, ids=["token", "cookie"])
def test_what_the_page_itself_asks_is_answered(path: str, token: dict[str, Any]) -> None:
    for host in ("127.0.0.1:8470", "localhost:8470", "[::1]:8470", "LOCALHOST:9000", "localhost"):
        for scheme in ("http", "https"):
            answer = judged(asked(path, host=host, origin=f"{scheme}://{host}", **token))
            route = route_of(path)
            assert route is not None
            assert answer in (
                {Permission.NOTHING} if route.needs is Permission.NOTHING else {Permission.CONTROL}
            ), answer


@paths
def test_bad_hosts_origins_methods_and_tokens_are_refused(path: str) -> None:
    """Each of them alone, and each with each other, also where the rest of the request is good."""
    evil: list[tuple[str, list[dict[str, Any]]]] = [
        # A page of another host name that leads here (DNS rebinding) names that host in both.
        (
            "host",
            [
                {"host": host, "origin": origin}
                for host in EVIL_HOSTS
                for origin in (f"http://{host}", GOOD_ORIGIN)
            ],
        ),
        ("origin", [{"origin": origin} for origin in EVIL_ORIGINS]),
        ("site", [{"fetch_site": "cross-site"}, {"fetch_site": "same-site"}]),
        ("method", [{"method": method} for method in METHODS]),
        ("token", EVIL_TOKENS),
    ]
    route = route_of(path)
    assert route is not None
    open_to_all = route.needs is Permission.NOTHING
    count = 0
    for (one, first), (other, second) in itertools.combinations_with_replacement(evil, 2):
        for left, right in itertools.product(first, second):
            if one == other and left != right:
                continue  # two values of one header
            if open_to_all and {one, other} == {"token"}:
                continue
            if path == "/" and {one, other} <= {"site", "token"}:
                continue  # a link may lead to the page, which holds no data
            for good in [{}] if "token" in {one, other} else GOOD_TOKENS:
                answer = judged(asked(path, **{**good, **left, **right}))
                assert isinstance(answer, RequestRefusal), (left, right, good)
                assert answer.status in {401, 403, 405}
                assert answer.error
                count += 1
    assert count > 400


def test_what_is_refused_says_why() -> None:
    """With the status that fits: the first thing that is wrong."""
    good = GOOD_TOKENS[0]
    for request, status, word in (
        (asked("/api/v1/run", host="evil.example", method="PUT"), 403, "host"),
        (asked("/api/v1/run", method="POST", **good), 405, "GET"),
        (asked("/api/v1/commands", method="GET", **good), 405, "POST"),
        (asked("/nowhere", method="DELETE", **good), 405, "GET and POST"),
        (asked("/nowhere", **good), 404, "nothing"),
        (asked("/api/v1/run"), 401, "log in"),
        (
            asked("/api/v1/commands", authorization=f"Bearer {RULES.read_token}"),
            403,
            "control token",
        ),
        (
            asked(
                "/api/v1/commands", cookie=guard.cookie_value(Permission.READ, RULES, NOW_UNIX_S)
            ),
            403,
            "login",
        ),
        (asked("/api/v1/commands", cookie=GOOD_TOKENS[1]["cookie"], origin=None), 403, "Origin"),
        (asked("/api/v1/login", origin=None), 403, "Origin"),
    ):
        answer = judged(request)
        assert isinstance(answer, RequestRefusal)
        assert (answer.status, word in answer.error) == (status, True), answer


def test_a_program_needs_no_origin_and_a_typed_address_no_login() -> None:
    program = asked("/api/v1/commands", origin=None, fetch_site=None, **GOOD_TOKENS[0])
    assert judged(program) is Permission.CONTROL
    assert judged(asked("/", origin=None, fetch_site="none")) is Permission.NOTHING
    assert judged(asked("/api/v1/stream", origin=None, **GOOD_TOKENS[1])) is Permission.CONTROL


def test_without_control_no_token_commands() -> None:
    for good in GOOD_TOKENS:
        answer = judged(asked("/api/v1/commands", **good), replace(RULES, with_control=False))
        assert isinstance(answer, RequestRefusal)
        assert (answer.status, "--control" in answer.error) == (403, True)


def test_a_code_counts_once_and_for_two_minutes() -> None:
    code = Code("secret", 1000.0)
    assert [code.redeem(text, 1001.0) for text in ("", "secre", "secret ", "\ud800")] == [False] * 4
    assert [code.redeem("secret", 1001.0) for _ in range(2)] == [True, False]
    assert Code("secret", 1000.0).redeem("secret", 1000.0 + CODE_VALID_S - 0.1)
    assert not Code("secret", 1000.0).redeem("secret", 1000.0 + CODE_VALID_S)


def test_each_port_has_a_cookie_of_its_own() -> None:
    names = {guard.cookie_name(replace(RULES, port=port)) for port in range(1, 200)}
    assert len(names) == 199
    assert guard.cookie_name(RULES) != guard.cookie_name(replace(RULES, read_token="x" * 43))
