"""Which requests are answered, by address, host, origin, token, and purpose."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from orchestrator.view.web.guard import COOKIE, Access, check

TOKENS = {"token": "page-token", "metrics_token": "metrics-token"}
HOST = "127.0.0.1:8470"
DOCUMENT, COMMANDS = "/api/v1/document", "/api/v1/commands"


def status(
    path: str = DOCUMENT,
    *,
    host: str | None = HOST,
    origin: str | None = None,
    bearer: str | None = None,
    cookie: str | None = "page-token",
    address: str = "127.0.0.1",
    control: bool = True,
) -> int:
    """Return the status code: 200 for a request that passes."""
    given: dict[str, Any] = {"Host": host, "Origin": origin, "Authorization": bearer}
    if cookie is not None:
        given["Cookie"] = f"{COOKIE}={cookie}"
    headers = {name: value for name, value in given.items() if value is not None}
    transport = Mock()
    transport.get_extra_info.return_value = (address, 8470)
    method = "POST" if path == COMMANDS else "GET"
    request = make_mocked_request(method, path, headers=headers, transport=transport)
    try:
        check(request, Access(**TOKENS, with_control=control))
    except web.HTTPException as refused:
        return refused.status
    return 200


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST:8470", "[::1]:8470"])
def test_the_page_answers_under_each_name_of_loopback(host: str) -> None:
    assert status(host=host) == 200
    assert status(COMMANDS, host=host, origin=f"http://{host.lower()}") == 200


@pytest.mark.parametrize(
    "host",
    [
        None, "", "evil.example", "127.0.0.1.evil.example", "localhost.", "127.0.0.1:8470@evil",
        "127.0.0.1:999999", "192.168.1.10:8470", "localhost:8470 ",
    ],
)  # fmt: skip
def test_another_host_is_refused_also_for_files(host: str | None) -> None:
    for path in (DOCUMENT, COMMANDS, "/", "/metrics"):
        assert status(path, host=host, bearer="Bearer metrics-token") == 403


@pytest.mark.parametrize(
    "origin", ["null", "", "http://evil.example", "http://127.0.0.1:9", f"https://{HOST}"]
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    assert status(origin=origin) == 403
    assert status(COMMANDS, origin=origin) == 403


@pytest.mark.parametrize("path", [DOCUMENT, COMMANDS])
@pytest.mark.parametrize(
    "given",
    [
        {"cookie": None}, {"cookie": ""}, {"cookie": "page-tokem"}, {"cookie": "metrics-token"},
        {"cookie": "é"}, {"cookie": None, "bearer": "Bearer page-token"},
    ],
)  # fmt: skip
def test_without_the_token_nobody_gets_in(path: str, given: dict[str, Any]) -> None:
    assert status(path, origin=f"http://{HOST}", **given) == 401


def test_files_need_no_token_and_commands_their_origin() -> None:
    assert status("/", cookie=None) == status("/app.js", cookie=None) == 200
    assert status(COMMANDS) == 403
    assert status(COMMANDS, origin=f"http://{HOST}") == 200


def test_without_control_no_token_commands() -> None:
    assert status(control=False) == 200
    assert status(COMMANDS, origin=f"http://{HOST}", control=False) == 403


@pytest.mark.parametrize("there", [{}, {"address": "192.168.1.10", "host": "192.168.1.10:8470"}])
def test_metrics_need_their_own_token_and_are_all_that_others_get(there: dict[str, Any]) -> None:
    good = "Bearer metrics-token"
    assert status("/metrics", bearer=good, **there) == 200
    for given in (None, "", "Bearer page-token", "metrics-token"):
        assert status("/metrics", bearer=given, **there) == 401
    for path in (DOCUMENT, "/") if there else ():
        assert status(path, bearer="Bearer page-token", address="192.168.1.10") == 401
        assert status(path, bearer=good, address="192.168.1.10") == 404
