"""The server over real stores: what each path answers, the stream, and what it costs while no page looks."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.control.listener import Listener
from orchestrator.control.wire import Answer, command_of
from orchestrator.core.user_commands import Command, Do
from orchestrator.errors import UsageError
from orchestrator.jobs import inbox
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, Journal
from orchestrator.jobs.model import Submitted
from orchestrator.record.model import FIELDS
from orchestrator.record.store import RunStore
from orchestrator.view.web.guard import ROUTES
from tests.factories import make_job
from tests.scene import COMMAND, PATIENCE_S, ROOT, orchestrator
from tests.web.browser import until
from tests.web.scene import Server, make_run, put_turn, rows_at, serving

RUN_ID = "20261123-101500-aaaa"
CONFIG = str(ROOT / "cluster.yaml")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    made = make_run(tmp_path / "runs" / RUN_ID, slots=10, seconds=600)
    yield made
    made.end("good", 0, None, [])


@pytest.fixture
def folder(store: RunStore, tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN_ID


def test_each_path_answers_and_refuses_what_it_does_not_know(folder: Path) -> None:
    queries = {"/api/v1/slot": "?name=pc1/0", "/api/v1/history": "?slot=pc1/0&field=tflops"}

    async def scene() -> None:
        async with serving(folder) as server:
            for path, route in ROUTES.items():
                if route.method != "GET" or path in {"/metrics", "/api/v1/stream"}:
                    continue
                answer = await server.ask(path + queries.get(path, ""))
                assert answer.status == 200, (path, answer.content)
                assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
                assert "Access-Control-Allow-Origin" not in answer.headers
                answer = await server.ask(f"{path}?colour=red")
                assert path == "/" or (answer.status, "colour" in answer.told["error"]) == (
                    400,
                    True,
                )
                answer = await server.ask(path, method="DELETE")
                assert (answer.status, answer.headers["Allow"]) == (405, "GET")
                assert answer.told["error"]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/api/v1/table?limit=501", 400, "limit"),
        ("/api/v1/table?limit=-1", 400, "limit"),
        ("/api/v1/table?offset=1e9", 400, "offset"),
        ("/api/v1/table?limit=1&limit=2", 400, "more than once"),
        ("/api/v1/table?filter=temp>hot", 400, "number"),
        ("/api/v1/table?filter=/(a*)*/", 400, "no regular expressions"),
        ("/api/v1/table?sort=nonsense", 400, "nonsense"),
        ("/api/v1/stream?filter=state:", 400, "lacks"),
        ("/api/v1/slot", 400, "name"),
        ("/api/v1/slot?name=pc9/9", 404, "pc9/9"),
        ("/api/v1/slot?name=%00%1b[2J", 404, "no slot"),
        ("/api/v1/history?slot=pc1/0&field=reason", 400, "sampled"),
        ("/api/v1/history?slot=pc1/0&field=tflops&from=nan", 400, "buckets"),
        ("/api/v1/history?slot=pc1/0&field=tflops&from=5&to=4", 400, "end after"),
        ("/api/v1/history?slot=pc1/0&field=tflops&from=-1e308", 400, "1970"),
        ("/api/v1/history?slot=pc1/0&field=tflops&buckets=1001", 400, "buckets"),
        ("/api/v1/events?after=x", 400, "after"),
        ("/api/v1/", 404, "path"),
        ("/../../etc/passwd", 404, "path"),
        ("/page/index.html", 404, "path"),
        ("/uplot-LICENSE", 404, "path"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(
    folder: Path, path: str, status: int, word: str
) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            answer = await server.ask(path)
            assert (answer.status, list(answer.told)) == (status, ["error"])
            assert word in answer.told["error"]
            assert answer.told["error"].isprintable()

    asyncio.run(scene())


def test_the_documented_request_is_answered(folder: Path) -> None:
    page = (ROOT / "docs" / "web.md").read_text(encoding="utf-8")
    (path,) = re.findall(r'^curl .*"http://127\.0\.0\.1:8470(/[^"]+)"$', page, re.MULTILINE)

    async def scene() -> None:
        async with serving(folder) as server:
            assert len((await server.ask(path)).told["rows"]) == 5

    asyncio.run(scene())


def test_programs_get_raw_rows_sorted_and_filtered(folder: Path) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            told = (await server.ask("/api/v1/table?sort=temp&limit=3&offset=1")).told
            assert (told["total"], told["matched"], len(told["rows"])) == (10, 10, 3)
            assert list(told["rows"][0]) == list(FIELDS)
            hot = [row["temperature_c"] for row in told["rows"]]
            assert hot == sorted(hot, reverse=True)
            told = (await server.ask("/api/v1/table?filter=!node:pc2+state:running")).told
            assert {(row["node"], row["state"]) for row in told["rows"]} == {("pc1", "RUNNING")}
            told = (await server.ask("/api/v1/run")).told
            assert (told["outcome"], told["nodes_seen"]) == ("running", ["pc1", "pc2"])
            assert told["freshness"] in {"live", "late"}
            told = (await server.ask("/api/v1/runs")).told
            assert [run["run_id"] for run in told["runs"]] == [RUN_ID]

    asyncio.run(scene())


def test_a_slot_has_its_history_states_and_events(folder: Path, store: RunStore) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            told = (await server.ask("/api/v1/slot?name=pc1/0")).told
            assert told["row"]["slot"] == "pc1/0"
            assert [span["state"][0] for span in told["spans"]] == ["RUNNING", told["state"][0]]
            assert ["GiB allocated /reserved/cap", "1.90/2.20/2.63"] in told["facts"] or told[
                "facts"
            ]
            begin, end = told["sampled"]
            query = f"?slot=pc1/0&field=allocated_bytes&from={begin}&to={end}&buckets=20"
            told = (await server.ask(f"/api/v1/history{query}")).told
            assert told["label"] == "allocated, MiB"
            assert [len(told[key]) for key in ("t", "min", "mean", "max")] == [20] * 4
            known = [
                (low, mean, high)
                for low, mean, high in zip(*map(told.get, ("min", "mean", "max")), strict=True)
            ]
            assert all(1400 <= low <= mean <= high <= 2500 for low, mean, high in known)
            events = (await server.ask("/api/v1/events?slot=pc1/0&limit=1")).told["events"]
            assert [event["event"] for event in events] == ["state"]
            assert (await server.ask(f"/api/v1/events?after={events[0]['number'] + 1000}")).told[
                "events"
            ] == []

    asyncio.run(scene())


async def events_of(
    server: Server, query: str = "", **headers: str
) -> AsyncIterator[tuple[str, Any]]:
    """Follow the stream: yields the kind and the data of each event."""
    given = {"Authorization": f"Bearer {server.site.access.read_token}", **headers}
    async with server.session.get(f"{server.url}/api/v1/stream{query}", headers=given) as answer:
        assert answer.status == 200, await answer.text()
        kind = ""
        async for line in answer.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)


@pytest.mark.parametrize("packing", ["identity", "gzip"])
def test_a_page_gets_the_table_and_then_what_has_changed(
    folder: Path, store: RunStore, packing: str
) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            stream = events_of(server, "?limit=4&filter=node:pc1", **{"Accept-Encoding": packing})
            kind, told = await anext(stream)
            assert (kind, told["all"]["matched"], len(told["all"]["rows"])) == ("table", 5, 4)
            names = [column["name"] for column in told["all"]["columns"]]
            rows = rows_at(600, 10)
            changed = next(row for row in rows if row.slot == told["all"]["rows"][0]["slot"])
            store.event(
                {"at": "2026-11-23T10:00:00Z", "event": "leased", "slot": "pc1/0", "lease_bytes": 5}
            )
            from dataclasses import replace

            put_turn(
                store, 601, [replace(row, power_w=111.0) if row is changed else row for row in rows]
            )
            deltas: dict[str, Any] = {}
            seen = []
            while "rows" not in deltas or "leased" not in [event["event"] for event in seen]:
                kind, told = await anext(stream)
                if kind == "event":
                    seen += told["events"]
                else:
                    deltas |= told
            assert deltas["rows"] == {changed.slot: {str(names.index("power")): "111/350"}}
            assert "all" not in deltas
            assert [seen[-1][key] for key in ("event", "words", "text")] == [
                "leased",
                "was allowed memory",
                "lease 5 bytes",
            ]
            await stream.aclose()

    asyncio.run(scene())


def test_runs_beside_the_served_one_are_served_and_no_more(folder: Path) -> None:
    other = folder.parent / "20261122-101500-bbbb"
    make_run(other, slots=3, seconds=60, varied=False).end("good", 0, None, [])

    async def scene() -> None:
        async with serving(folder) as server:
            assert (await server.ask("/api/v1/run")).told["run_id"] == folder.name
            assert (await server.ask(f"/api/v1/run?run={other.name}")).told["run_id"] == other.name
            charts = (await server.ask(f"/api/v1/overview?run={other.name}")).told["charts"]
            assert charts[0]["label"] == "TFLOP/s of all slots"
            for name in ("..", "../../etc", "20261122-101500-cccc", "%00"):
                assert (await server.ask(f"/api/v1/run?run={name}")).status == 404

    asyncio.run(scene())


def test_one_look_serves_all_pages_and_none_without_a_page(folder: Path) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            hub = server.site.hub
            assert hub.looks == 0
            streams = [events_of(server, f"?limit={limit}") for limit in (1, 1, 5, 5, 5, 10)]
            for stream in streams:
                await anext(stream)
            began = hub.looks
            looked = await until_looks(hub, began + 2)
            assert looked <= began + 3
            for stream in streams:
                await stream.aclose()
            await until(lambda: asyncio.sleep(0, not hub._views), "end of following")
            before = hub.looks
            await asyncio.sleep(2.5)
            assert hub.looks <= before + 1
            await asyncio.gather(*(server.ask("/api/v1/run") for _ in range(40)))
            assert hub.looks <= before + 20

    async def until_looks(hub: Any, count: int) -> int:
        await until(lambda: asyncio.sleep(0, hub.looks >= count), "looks")
        return int(hub.looks)

    asyncio.run(scene())


def test_a_page_that_does_not_read_hinders_no_other(folder: Path, store: RunStore) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            hub = server.site.hub
            from orchestrator.view.web.page_data import TableView

            async with hub.following(TableView()) as stuck:
                reading = events_of(server)
                await anext(reading)
                for second in range(601, 612):
                    put_turn(store, second, rows_at(second * 50, 10))
                    frame = hub._look()
                    await hub._show(frame)
                    assert stuck.waiting.qsize() <= 4
                assert stuck.needs_all or any("all" in json_of(stuck) for _ in range(1))
                kind, _ = await anext(reading)
                assert kind == "table"
                await reading.aclose()

    def json_of(page: Any) -> str:
        return "".join(
            page.waiting.get_nowait().plain.decode() for _ in range(page.waiting.qsize())
        )

    asyncio.run(scene())


def test_a_login_code_works_once_its_cookie_outlives_the_server(folder: Path) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            port = server.site.access.port
            login = {"method": "POST", "token": "", "headers": {"Origin": server.url}}
            assert (
                await server.ask("/api/v1/login", json={"code": "wrong"}, **login)
            ).status == 401
            code = server.code()
            answer = await server.ask("/api/v1/login", json={"code": code}, **login)
            assert answer.status == 200
            cookie = answer.headers["Set-Cookie"]
            assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/"))
            assert (await server.ask("/api/v1/login", json={"code": code}, **login)).status == 401
            assert (await server.ask("/api/v1/run", token="")).status == 200
            evil = {"Origin": "http://127.0.0.1:9"}
            assert (await server.ask("/api/v1/run", token="", headers=evil)).status == 403
        async with serving(folder, port=port) as server:
            value = cookie.partition(";")[0]
            assert (
                await server.ask("/api/v1/run", token="", headers={"Cookie": value})
            ).status == 200
            assert (await server.ask("/api/v1/run", token="")).status == 401

    asyncio.run(scene())


def test_bodies_that_are_no_json_or_too_large_are_refused(folder: Path) -> None:
    async def scene() -> None:
        async with serving(folder) as server:
            for content, status in (
                (b"", 400),
                (b"[]", 400),
                (b"[" * 50_000, 400),
                (b"{}", 401),
                (b"x" * 70_000, 413),
            ):
                headers = {"Origin": server.url}
                answer = await server.ask(
                    "/api/v1/login", "POST", "", data=content, headers=headers
                )
                assert (answer.status, list(answer.told)) == (status, ["error"])

    asyncio.run(scene())


def test_commands_need_control_and_name_their_slots(folder: Path) -> None:
    good = {"id": "1", "do": "pause", "slots": ["pc1/0"]}

    async def scene() -> None:
        async with serving(folder) as server:
            answer = await server.ask("/api/v1/commands", "POST", "control", json=good)
            assert (answer.status, "--control" in answer.told["error"]) == (403, True)
        async with serving(folder, control=True) as server:
            assert (await server.ask("/api/v1/commands", "POST", "read", json=good)).status == 403
            for wrong, word in (
                ({"id": None}, "id"),
                ({"id": "x" * 65}, "id"),
                ({"do": 5}, "what to do"),
                ({"slots": "pc1/0"}, "slots"),
                ({"slots": []}, "slots"),
                ({"slots": [1]}, "slots"),
                ({"amount": "2 apples"}, "GiB"),
            ):
                answer = await server.ask(
                    "/api/v1/commands", "POST", "control", json={**good, **wrong}
                )
                assert (answer.status, word in answer.told["error"]) == (400, True), wrong

    asyncio.run(scene())


def test_words_about_jobs_go_into_the_inbox_with_control_alone(folder: Path) -> None:
    queue = folder / QUEUE_NAME
    queue.mkdir()
    journal = Journal(queue / JOURNAL_NAME)
    journal.append([Submitted(at_s=0.0, job=make_job("lr-0"))])
    journal.close()
    word = {"id": "1", "do": "hold", "jobs": ["lr-0"]}

    async def scene() -> None:
        async with serving(folder) as server:
            told = (await server.ask("/api/v1/jobs")).told
            assert (told["line"], [name for name, _ in told["rows"]]) == ("1 queued", ["lr-0"])
            answer = await server.ask("/api/v1/words", "POST", "control", json=word)
            assert answer.status == 403
        async with serving(folder, control=True) as server:
            for wrong in ({"do": "submit"}, {"jobs": ["lr-9"]}, {"jobs": []}, {"id": ""}):
                answer = await server.ask("/api/v1/words", "POST", "control", json=word | wrong)
                assert answer.status == 400, wrong
            answer = await server.ask("/api/v1/words", "POST", "control", json=word)
            assert answer.status == 200

    asyncio.run(scene())
    ((_, message),) = inbox.waiting(queue)
    assert [(one.word.value, one.job, one.by) for one in message] == [("hold", "lr-0", "web")]


def test_a_command_reaches_the_head_under_its_own_id(folder: Path) -> None:
    taken: list[Command] = []

    def listen(ears: Listener) -> None:
        while len(taken) < 3:
            for connection, line in ears.received():
                taken.append(command := command_of(line))
                refused = Answer(ok=False, id=command.id, error="pc1/0 is RUNNING, and not held")
                is_refused = command.do is Do.UNPAUSE
                ears.answer(
                    connection,
                    refused if is_refused else Answer(ok=True, id=command.id, effect="held"),
                )
            time.sleep(0.01)

    async def scene() -> None:
        async with serving(folder, control=True) as server:

            async def ask(**told: object) -> tuple[int, object]:
                answer = await server.ask(
                    "/api/v1/commands", "POST", "control", json={"slots": ["pc1/0"], **told}
                )
                return answer.status, answer.told

            assert await ask(id="a", do="pause") == (200, {"id": "a", "ok": True, "effect": "held"})
            assert (await ask(id="b", do="cap", amount="2.5 GiB"))[0] == 200
            assert await ask(id="c", do="resume") == (
                409,
                {"error": "pc1/0 is RUNNING, and not held"},
            )
            assert [command.id for command in taken] == ["a", "b", "c"]
            assert (taken[1].amount_bytes, taken[1].by) == (5 * 2**29, "web")

    with closing(Listener(folder)) as ears:
        head = threading.Thread(target=listen, args=[ears], daemon=True)
        head.start()
        asyncio.run(scene())
        head.join()


def test_a_run_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / RUN_ID
    folder.mkdir()

    async def scene() -> None:
        async with serving(folder) as server:
            for path in ("/api/v1/run", "/api/v1/table", "/api/v1/stream", "/api/v1/events"):
                answer = await server.ask(path)
                assert (answer.status, "no record of a run" in answer.told["error"]) == (503, True)
            make_run(folder, slots=2, seconds=10).end("good", 0, None, [])
            told = (await server.ask("/api/v1/run")).told
            assert (told["outcome"], told["freshness"]) == ("good", "ended")

    asyncio.run(scene())


def test_a_connection_that_says_half_a_request_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.view.web.listener.SILENT_MOST_S", 0.2)

    async def scene() -> None:
        async with serving(folder) as server:
            for content in (
                b"",
                b"GET / HTTP/1.1\r\nHost: ",
                b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.site.access.port)
                writer.write(content)
                assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(
                    b"HTTP/1.1 200" * (b"/h" in content)
                )
                writer.close()

    asyncio.run(scene())


def test_idle_connections_and_garbage_hinder_no_page(
    folder: Path, nowhere: Path, tmp_path: Path
) -> None:
    command = [*COMMAND, "web", "--config", CONFIG, "--run-dir", str(folder.parent)]
    limited = ["bash", "-c", 'ulimit -n 500; exec "$@"', "web", *command, "--port", "0"]
    with (
        (tmp_path / "printed").open("wb") as printed,
        subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=printed, text=True) as process,
        ExitStack() as idle,
    ):
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().partition("/#")[0].rpartition(":")[2])
            for number in range(600):  # more than the server has descriptors for
                idle.enter_context(
                    socket.create_connection(("127.0.0.1", port), PATIENCE_S)
                ).sendall(b"GET /" * (number % 2))
            for content in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.x\r\n\r\n") * 5:
                with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as garbage:
                    garbage.sendall(content)
                    garbage.settimeout(5.0)
                    assert b"400" in garbage.recv(65_536)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5.0) as answer:
                assert answer.status == 200
        finally:
            process.send_signal(signal.SIGTERM)
    assert (tmp_path / "printed").read_bytes() == b""


@contextmanager
def verb(folder: Path, *arguments: str) -> Iterator[tuple[str, str]]:
    """Start the verb; yield its address and the code that logs in. It ends by SIGTERM."""
    own = ("--config", CONFIG, "--run-dir", str(folder.parent), "--port", "0")
    command = [*COMMAND, "web", *own, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        try:
            url, _, code = process.stdout.readline().strip().partition("/#code=")
            yield url, code
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_the_verb_serves_until_it_is_told_to_stop(
    folder: Path, nowhere: Path, state_dir: Path
) -> None:
    with verb(folder) as (url, code):
        port = url.rpartition(":")[2]

        async def scene() -> None:
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                async with session.post(
                    f"{url}/api/v1/login", json={"code": code}, headers={"Origin": url}
                ) as answer:
                    assert answer.status == 200
                async with session.get(f"{url}/api/v1/table") as answer:
                    assert (await answer.json())["total"] == 10
                token = (state_dir / "web" / "read.token").read_text().strip()
                bearer = {"Authorization": f"Bearer {token}"}
                async with session.get(f"{url}/api/v1/run", headers=bearer, cookies={}) as answer:
                    assert answer.status == 200

        asyncio.run(scene())
        assert {path.stat().st_mode & 0o777 for path in (state_dir / "web").glob("*.token")} == {
            0o600
        }
        taken = orchestrator(
            "web", "--config", CONFIG, "--run-dir", str(folder.parent), "--port", port
        )
        assert (taken.returncode, f"port {port} is in use" in taken.stderr) == (2, True)


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl, which makes the certificate"
)
def test_with_a_certificate_page_and_cookie_go_over_tls_alone(
    folder: Path, nowhere: Path, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "pc1.pem", tmp_path / "pc1.key"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=pc1",
    ]
    names = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run([*made, *names], check=True, capture_output=True)
    served = ("--bind", "0.0.0.0", "--certificate", str(certificate), "--key", str(key))  # noqa: S104 - with TLS
    with verb(folder, *served) as (url, code):
        assert url.startswith(f"https://{socket.gethostname().lower()}:")
        port = url.rpartition(":")[2]
        here, trusted = (
            f"https://127.0.0.1:{port}",
            ssl.create_default_context(cafile=str(certificate)),
        )

        async def scene() -> None:
            connector = aiohttp.TCPConnector(ssl=trusted)
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session:
                told = {"json": {"code": code}, "headers": {"Origin": here}}
                async with session.post(f"{here}/api/v1/login", **told) as answer:
                    cookie = answer.headers["Set-Cookie"]
                    assert (answer.status, "; Secure" in cookie) == (200, True)
                async with session.get(f"{here}/api/v1/table") as answer:
                    assert (await answer.json())["total"] == 10
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"http://127.0.0.1:{port}/")

        asyncio.run(scene())


def refusal(folder: Path, *arguments: str) -> str:
    """Return what the verb says that it refuses to serve with."""
    where = ["--config", CONFIG, "--run-dir", str(folder.parent), "--port", "0"]
    done = CliRunner().invoke(app, ["web", *where, *arguments])
    assert isinstance(done.exception, UsageError)
    return str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--bind", "0.0.0.0"], "--certificate"),  # noqa: S104 - refused
        (["--bind", "pc1"], "IP address"),
        (["--certificate", "nowhere.pem"], "cannot be used"),
    ],
)
def test_an_address_that_others_could_read_is_refused(
    folder: Path, nowhere: Path, arguments: list[str], word: str
) -> None:
    assert word in refusal(folder, *arguments)


def test_a_token_that_others_can_read_is_refused(
    folder: Path, nowhere: Path, state_dir: Path
) -> None:
    (state_dir / "web").mkdir()
    (state_dir / "web" / "read.token").write_text("x" * 43)
    (state_dir / "web" / "read.token").chmod(0o644)
    done = orchestrator("web", "--config", CONFIG, "--run-dir", str(folder.parent), "--port", "0")
    assert done.returncode == 2, done.stderr
    assert "others can read" in done.stderr


def test_what_is_vendored_is_what_was_published() -> None:
    import hashlib

    told = (ROOT / "orchestrator" / "view" / "web" / "page" / "VENDORED.md").read_text()
    for name in ("uplot.js", "uplot.css", "uplot-LICENSE"):
        content = (ROOT / "orchestrator" / "view" / "web" / "page" / name).read_bytes()
        assert f"{hashlib.sha256(content).hexdigest()}  {name}" in told
