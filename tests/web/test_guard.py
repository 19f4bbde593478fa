"""Which requests are answered: by host, origin, token, and what they want to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.view.web.guard import (
    Access,
    RequestFacts,
    cookie_name,
    is_same,
    metrics_refusal,
    refusal,
)

TOKENS = ("page-token", "metrics-token")
ACCESS = Access(token=TOKENS[0], metrics_token=TOKENS[1], with_control=True)
BEARER = "Bearer page-token"
HOST = "127.0.0.1:8470"
ASKED = RequestFacts(method="GET", path="/api/v1/document", host=HOST, cookie="page-token")
TOLD = replace(ASKED, method="POST", path="/api/v1/commands", origin=f"http://{HOST}")


def status(request: RequestFacts, access: Access = ACCESS) -> int:
    refused = refusal(request, access)
    assert refused is None or refused.error
    return 200 if refused is None else int(refused.status)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8470", "LOCALHOST:8470"])
def test_the_page_answers_under_each_name_of_loopback(host: str) -> None:
    assert status(replace(ASKED, host=host)) == 200
    assert status(replace(TOLD, host=host, origin=f"http://{host}")) == 200


@pytest.mark.parametrize(
    "host",
    [
        None, "", "evil.example", "127.0.0.1.evil.example", "localhost.", "127.0.0.1:8470@evil",
        "127.0.0.1:999999", "192.168.1.10:8470", "localhost:8470 ", "127.0.0.1:8470\n",
    ],
)  # fmt: skip
def test_another_host_is_refused_also_for_files(host: str | None) -> None:
    for request in (ASKED, TOLD, replace(ASKED, path="/"), replace(ASKED, path="/metrics")):
        assert status(replace(request, host=host)) == 403


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://evil.example", "http://127.0.0.1:9", f"https://{HOST}", f"http://{HOST}/"],
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    assert status(replace(ASKED, origin=origin)) == 403
    assert status(replace(TOLD, origin=origin)) == 403


@pytest.mark.parametrize("request_", [ASKED, TOLD])
@pytest.mark.parametrize(
    "given",
    [
        {"cookie": None}, {"cookie": ""}, {"cookie": "page-tokem"}, {"cookie": "metrics-token"},
        {"authorization": "page-token"}, {"authorization": "Basic page-token"},
        {"authorization": "Bearer metrics-token"}, {"authorization": "Bearer \udcff"},
    ],
)  # fmt: skip
def test_without_the_token_nobody_gets_in(
    request_: RequestFacts, given: dict[str, str | None]
) -> None:
    assert status(replace(request_, **given)) == 401


def test_files_tell_nothing_and_need_no_token() -> None:
    for path in ("/", "/app.js", "/healthz"):
        assert status(replace(ASKED, path=path, cookie=None)) == 200


def test_a_command_needs_its_origin_or_a_programs_token() -> None:
    assert status(replace(TOLD, origin=None)) == 403
    assert status(replace(TOLD, origin=None, cookie=None, authorization=BEARER)) == 200


def test_without_control_no_token_commands() -> None:
    shown = replace(ACCESS, with_control=False)
    assert status(ASKED, shown) == 200
    assert status(TOLD, shown) == 403
    assert status(replace(TOLD, authorization=BEARER), shown) == 403


def test_metrics_need_their_own_token() -> None:
    scrape = RequestFacts(method="GET", path="/metrics", host="192.168.1.10:8470")
    assert metrics_refusal(replace(scrape, authorization="Bearer metrics-token"), ACCESS) is None
    for given in (None, "", BEARER, "metrics-token"):
        assert metrics_refusal(replace(scrape, authorization=given), ACCESS) is not None
    assert status(replace(scrape, host=HOST, cookie="page-token")) == 401


def test_two_tunnels_of_one_browser_share_no_cookie() -> None:
    assert cookie_name("127.0.0.1:8470") != cookie_name("127.0.0.1:8471")


def test_secrets_are_compared_whole() -> None:
    assert is_same("é", "é")
    assert not is_same("page", "page-token")
