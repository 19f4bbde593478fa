"""The server over real stores: the answer of each path, the stream, and refused requests."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.control.slots import Answer
from orchestrator.errors import UsageError
from orchestrator.record.store import RunStore
from orchestrator.view.web.guard import COOKIE
from orchestrator.view.web.server import PAGE, SERVED
from tests.factories import add_event, begun_run
from tests.scene import COMMAND, PATIENCE_S, ROOT
from tests.web.scene import Server, facts_here, make_run, put_turn, rows_at, serving

RUN_ID = "20261123-101500-aaaa"
NEWER = "20261124-101500-cccc"
CONFIG = str(ROOT / "cluster.yaml")
GOOD = {"id": "1", "do": "pause", "names": ["pc1/0"]}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    made = make_run(tmp_path / "runs" / RUN_ID)
    yield made
    made.end("good", 0, None, [])


@pytest.fixture
def folder(store: RunStore, tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN_ID


def test_the_address_opens_the_page_and_leaves_its_token(folder: Path) -> None:
    with serving(folder) as server:
        assert server.ask("/api/v1/document", token="").status == 401
        assert server.ask("/?token=wrong", token="").status == 401
        answer = server.ask(server.address.removeprefix(server.url), token="")
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
        assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/"))
        told = server.ask("/api/v1/document", token="").told
        assert told["head"]["run"] == RUN_ID
        assert len(told["tables"]["slots"]["rows"]) == 10


def test_every_answer_keeps_a_browser_from_more(folder: Path) -> None:
    with serving(folder) as server:
        for path in ("/", "/app.js", "/api/v1/document", "/nothing"):
            answer = server.ask(path)
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'self'; base-uri 'none'")
            assert "Access-Control-Allow-Origin" not in answer.headers
        assert b"<script>" not in server.ask("/").content


def test_what_makes_no_sense_is_refused_with_a_sentence(folder: Path) -> None:
    with serving(folder) as server:
        for path, status, word in (
            ("/api/v1/history?last_s=soon", 400, "soon"),
            ("/api/v1/history?last_s=nan", 400, "seconds"),
            ("/api/v1/", 404, "Not Found"),
            ("/api/v1/commands", 405, "Not Allowed"),
            ("/nothing.js", 404, "Not Found"),
            ("/..%2Fserver.py", 404, "Not Found"),
        ):
            answer = server.ask(path)
            assert (answer.status, list(answer.told)) == (status, ["error"]), path
            assert word in answer.told["error"]


def test_before_the_first_sample_there_are_no_charts_and_before_the_store_a_sentence(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / RUN_ID
    folder.mkdir(parents=True)
    with serving(folder) as server:
        for path in ("document", "history"):
            answer = server.ask(f"/api/v1/{path}")
            assert (answer.status, "no record of a run" in answer.told["error"]) == (503, True)
        stream = server.events()
        assert next(stream)[0] == "problem"
        store = begun_run(folder, facts_here(RUN_ID))
        store.commit()
        while next(stream)[0] != "document":
            pass
        stream.close()
        for query in ("", "?slot=pc1/0", "?last_s=600"):
            answer = server.ask(f"/api/v1/history{query}")
            assert (answer.status, answer.told["charts"]) == (200, [])
    store.end("good", 0, None, ())


def test_a_page_is_sent_the_document_when_it_changes(folder: Path, store: RunStore) -> None:
    with serving(folder) as server:
        stream = server.events()
        kind, told = next(stream)
        assert (kind, told["head"]["run"], told["control"]) == ("document", RUN_ID, False)
        leased = {"at": "2026-11-23T10:00:00Z", "event": "leased", "slot": "pc1/0"}
        add_event(store, {**leased, "lease_bytes": 5})
        put_turn(store, 601, rows_at(601, 10))
        while told["events"][-1]["event"] != "leased":
            _, told = next(stream)
        assert told["events"][-1]["words"] == "leased"
        assert len(told["events"]) > 1, "with those before it"
        stream.close()


def test_the_page_and_metrics_follow_the_newest_run(folder: Path) -> None:
    def shown(server: Server) -> tuple[str, bool]:
        token = server.site.access.metrics_token
        metrics = server.ask("/metrics", token=token).content.decode()
        run = server.ask("/api/v1/document").told["head"]["run"]
        return run, f'run_id="{run}"' in metrics

    with serving(folder) as server:
        stream = server.events()
        assert next(stream)[1]["head"]["run"] == RUN_ID
        assert shown(server) == (RUN_ID, True)
        newer = make_run(folder.parent / NEWER, slots=2, seconds=10)
        while next(stream)[1]["head"]["run"] != NEWER:
            pass
        server.until(lambda: shown(server) == (NEWER, True), "newest run")
        newer.end("good", 0, None, [])
        stream.close()
    with serving(folder, run_id=RUN_ID) as server:
        assert server.ask("/api/v1/document").told["head"]["run"] == RUN_ID


def test_one_look_serves_all_pages(folder: Path) -> None:
    with serving(folder) as server:
        site = server.site
        assert site.reads == 0
        streams = [server.events() for _ in range(6)]
        for stream in streams:
            next(stream)
        assert site.reads <= 2
        for stream in streams:
            stream.close()


def test_a_fault_of_a_look_is_told_and_the_next_succeeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with serving(folder) as server:

        def fails() -> None:
            raise RuntimeError("no such luck")

        stream = server.events()
        assert next(stream)[0] == "document"
        with monkeypatch.context() as patched:
            patched.setattr(server.site, "folder", fails)
            kind, told = next(stream)
            assert (kind, "no such luck" in told["error"]) == ("problem", True)
            assert server.ask("/api/v1/history").status == 500
        assert next(stream)[0] == "document"
        stream.close()

    assert "no such luck" in capfd.readouterr().err


def test_a_command_that_makes_no_sense_is_refused(folder: Path) -> None:
    of_jobs = {"id": "1", "do": "hold", "names": ["lr-9"]}

    with serving(folder, control=True) as server:
        for command, word in (
            (GOOD | {"id": "x" * 65}, "id"),
            (GOOD | {"names": []}, "names"),
            (GOOD | {"names": [1]}, "names"),
            (GOOD | {"do": "jump"}, "'pause'"),
            (GOOD | {"amount": "2 apples"}, "GiB"),
            (GOOD | {"command": "rm"}, "command"),
            (of_jobs, "no job"),
            (of_jobs | {"do": "submit"}, "hold"),
        ):
            answer = server.ask("/api/v1/commands", json=command)
            assert (answer.status, word in answer.told["error"]) == (400, True), answer.told
        for content, status in ((b"[" * 50_000, 400), (b"x" * 70_000, 413)):
            answer = server.ask("/api/v1/commands", data=content)
            assert (answer.status, list(answer.told)) == (status, ["error"])


def test_a_command_reaches_the_head_under_its_own_id(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, ...]] = []

    def head(*order: object, by: str, amount_bytes: int | None, identity: str) -> Answer:
        given.append((*order, by, amount_bytes, identity))
        if order[1] == "unpause":
            return Answer(ok=False, id=identity, error="pc1/0 is not held")
        return Answer(ok=True, id=identity, effect="held")

    monkeypatch.setattr("orchestrator.view.web.server.slots.send", head)
    with serving(folder, control=True) as server:
        cap = GOOD | {"id": "b", "do": "cap", "amount": "2.5 GiB"}
        told = server.ask("/api/v1/commands", json=cap).told
        assert told == {"id": "b", "ok": True, "effect": "held"}
        refused = server.ask("/api/v1/commands", json=GOOD | {"do": "unpause"})
        assert (refused.status, refused.told) == (409, {"error": "pc1/0 is not held"})
    assert given == [
        (folder, "cap", ["pc1/0"], "web", 5 * 2**29, "b"),
        (folder, "unpause", ["pc1/0"], "web", None, "1"),
    ]


@contextmanager
def verb(folder: Path, *arguments: str, printed: Any = None) -> Iterator[tuple[str, str]]:
    """Start the verb; yield the page's address without token, and its token. SIGTERM ends it."""
    own = ("--config", CONFIG, "--run-dir", str(folder.parent), "--port", "0")
    command = [*COMMAND, "web", *own, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=printed, text=True) as process:
        assert process.stdout is not None
        try:
            url, _, token = process.stdout.readline().strip().partition("/?token=")
            yield url, token
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def asked(url: str, path: str, token: str) -> tuple[int, bytes]:
    """Send a request as Prometheus and the page do."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    with closing(connection):
        headers = {"Authorization": f"Bearer {token}", "Cookie": f"{COOKIE}={token}"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_idle_sockets_and_garbage_hinder_no_page(
    folder: Path, nowhere: Path, tmp_path: Path
) -> None:
    garbage = (
        b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.x\r\n\r\n", b"\0" * 64, b"GET /\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"G" * 9_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\n",
        b"GET /api/v1/document HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )  # fmt: skip
    with (
        (tmp_path / "printed").open("wb") as printed,
        verb(folder, printed=printed) as (url, token),
        ExitStack() as idle,
    ):
        here = ("127.0.0.1", int(url.rpartition(":")[2]))
        for number in range(500):
            idle.enter_context(socket.create_connection(here, PATIENCE_S)).sendall(
                b"GET /" * (number % 2)
            )
        for number in range(2_000):
            with socket.create_connection(here, PATIENCE_S) as one:
                one.sendall(garbage[number % len(garbage)])
                one.settimeout(PATIENCE_S)
                assert re.match(rb"HTTP/\S+ 40[013] ", one.recv(4096))
        assert asked(url, "/api/v1/document", token)[0] == 200
    assert (tmp_path / "printed").read_bytes() == b""


def test_a_connection_that_says_half_a_request_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SERVED, "keepalive_timeout", 0.2)

    async def answer(port: int, content: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(content)
        told = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return told

    with serving(folder) as server:
        whole = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for content in (b"", b"GET / HTTP/1.1\r\nHost: ", whole):
            told = server.runner.run(answer(server.port, content))
            assert told.startswith(b"HTTP/1.1 200" if content is whole else b"")


def refused(folder: Path, *arguments: str) -> str:
    """Return the error with which the verb refuses to serve."""
    where = ["--config", CONFIG, "--run-dir", str(folder.parent), "--port", "0"]
    done = CliRunner().invoke(app, ["web", *where, *arguments])
    assert isinstance(done.exception, UsageError)
    return str(done.exception)


def test_the_verb_says_how_to_get_in(folder: Path, nowhere: Path, state_dir: Path) -> None:
    with verb(folder) as (url, token):
        assert RUN_ID.encode() in asked(url, "/api/v1/document", token)[1]
        for path in ("/../server.py", "/..%2fserver.py", "/..", "/%2e%2e"):
            assert asked(url, path, token)[0] in {403, 404}
        why = refused(folder, "--port", url.rpartition(":")[2])
        assert "Address already in use, perhaps by another page" in why
    path = state_dir / "web" / "metrics.token"
    assert path.stat().st_mode & 0o777 == 0o600
    page = (ROOT / "docs" / "web.md").read_text(encoding="utf-8")
    assert f"~/.local/state/oom-orchestrator/web/{path.name}" in page
    path.chmod(0o644)
    assert "others can read the token" in refused(folder)


def own_address() -> str | None:
    """Return an address of this PC that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


@pytest.mark.skipif(own_address() is None, reason="needs a network card")
def test_other_pcs_get_metrics_alone(folder: Path, nowhere: Path, state_dir: Path) -> None:
    address = str(own_address())
    with verb(folder, "--bind", address) as (url, token):
        there = f"http://{address}:{url.rpartition(':')[2]}"
        metrics_token = (state_dir / "web" / "metrics.token").read_text().strip()
        assert asked(there, "/metrics", metrics_token)[0] == 200
        assert asked(there, "/metrics", token)[0] == 401
        for path in ("/", "/app.js", "/api/v1/document"):
            assert asked(there, path, metrics_token)[0] == 404
            assert asked(there, path, token)[0] == 401


def test_an_address_that_is_none_of_this_pc_is_refused(folder: Path, nowhere: Path) -> None:
    for address in ("0.0.0.0", "127.0.0.1", "no host", "192.0.2.77"):  # noqa: S104
        assert f"{address}, port" in refused(folder, "--bind", address)


def test_what_is_vendored_is_what_was_published() -> None:
    told = (PAGE / "VENDORED.md").read_text()
    for name in ("uplot.js", "uplot.css", "uplot-LICENSE"):
        assert f"{hashlib.sha256((PAGE / name).read_bytes()).hexdigest()}  {name}" in told
