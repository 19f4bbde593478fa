"""Serves the page of a run: its files, the document once a second, the course of values, commands,
and `/metrics`.

Every request passes `guard.py` first. The run folder is read in threads, at most once a second for
all who look, and not at all while nobody does; the head knows nothing of it. Does not say what a
run shows (`document.py`, `charts.py`, `metrics.py`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import logging
import secrets
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from orchestrator.config.byte_size import parse_bytes
from orchestrator.control.client import send
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.jobs.inbox import put
from orchestrator.jobs.journal import QUEUE_NAME
from orchestrator.jobs.model import Said, Word
from orchestrator.record.archive import Follower, Frame, StoredEvent, count_commands
from orchestrator.record.folders import find_run, list_runs, read_deliveries
from orchestrator.view import charts
from orchestrator.view.alerts import ALERTS, AlertWatch, Firing, badges, judge
from orchestrator.view.document import EVENTS_MOST, Json, document
from orchestrator.view.pending import runs_table
from orchestrator.view.tables import Table
from orchestrator.view.web import guard, metrics
from orchestrator.view.web.guard import Access, RequestFacts, RequestRefusal
from workers.files import locked, read_small, replace_whole
from workers.learned_limits import default_path

LOOK_EVERY_S: Final = 1.0
COMMENT_EVERY_S: Final = 15.0
"""So often a page hears at least something: else what is between may close the connection."""
PAGES_MOST: Final = 64
SILENT_MOST_S: Final = 10.0
"""So long a connection may take for the headers or the body of a request, and be idle between
two.
"""
PORT: Final = 8470
PAGE: Final = Path(__file__).parent / "page"

_RUNS_EVERY_S: Final = 10.0
_RUNS_KEPT: Final = 8
_WRITING_MOST_S: Final = 30.0
_BODY_MOST_BYTES: Final = 64 * 2**10
_BACKLOG: Final = 1_024
_TOKEN_MOST_BYTES: Final = 200
_PATIENCE_S: Final = 5.0
_KINDS: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _RefusedError(Exception):
    """A request that is not answered."""

    def __init__(self, status: HTTPStatus, error: str) -> None:
        super().__init__(error)
        self.status = status


@dataclass(slots=True, kw_only=True)
class Look:
    """A run as it was at the last look."""

    frame: Frame
    """With its last events, also those of earlier frames."""
    firing: tuple[Firing, ...]
    text: str
    """The document, as JSON."""


class Runs:
    """Looks at the runs of a folder that somebody asks for, each at most once a second."""

    def __init__(
        self, runs_dir: Path, run_id: str, unix_s: Callable[[], float], *, with_control: bool
    ) -> None:
        self.runs_dir = runs_dir
        self.run_id = run_id
        """The run that is shown where none is named; `latest` follows the newest."""
        self.count = 0
        """How often a run was looked at."""
        self._unix_s = unix_s
        self._with_control = with_control
        self._lock = asyncio.Lock()
        self._looks: dict[str, tuple[float, Look]] = {}
        self._watched: dict[str, _Watched] = {}
        self._table: tuple[float, Table | None] = (float("-inf"), None)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run by its name; `UsageError` where there is none."""
        return find_run(self.runs_dir, run_id or self.run_id)

    async def look(self, run_id: str) -> Look:
        """Return a run as it is now: one look serves all who ask within half a second.

        Raises:
            UsageError: There is no such run.
            ArchiveError: Its folder cannot be read.
        """
        async with self._lock:
            now_s = time.monotonic()
            looked_at_s, look = self._looks.get(run_id, (float("-inf"), None))
            if look is None or now_s - looked_at_s > LOOK_EVERY_S / 2:
                look = await asyncio.to_thread(self._looked, run_id)
                self._looks = {**self._looks, run_id: (now_s, look)}
                self._looks = dict([*self._looks.items()][-_RUNS_KEPT:])
            return look

    def _looked(self, run_id: str) -> Look:
        self.count += 1
        folder = self.folder(run_id)
        watched = self._watched.pop(folder.name, None) or _Watched(folder)
        self._watched = dict([*self._watched.items(), (folder.name, watched)][-_RUNS_KEPT:])
        frame = watched.look()
        failed = read_deliveries(folder).failed
        watched.alerts, firing = judge(
            watched.alerts, frame, self._unix_s(), failed_notifications=failed
        )
        told = document(frame, badges(firing), self._runs())
        told["control"] = self._with_control and frame.run.outcome == "running"
        return Look(frame=frame, firing=firing, text=_json_text(told))

    def _runs(self) -> Table | None:
        now_s = time.monotonic()
        if now_s - self._table[0] > _RUNS_EVERY_S:
            self._table = (now_s, runs_table(list_runs(self.runs_dir)))
        return self._table[1]


@dataclass(eq=False)
class _Watched:
    """A run, with what is kept from look to look."""

    folder: Path
    alerts: AlertWatch = field(default_factory=lambda: AlertWatch(alerts=ALERTS))

    def __post_init__(self) -> None:
        self._follower = Follower(self.folder)
        self._events: deque[StoredEvent] = deque(maxlen=EVENTS_MOST)

    def look(self) -> Frame:
        frame = self._follower.look()
        self._events.extend(frame.events)
        return replace(frame, events=tuple(self._events))


class Site:
    """The page of the runs of one folder."""

    def __init__(
        self,
        runs_dir: Path,
        access: Access,
        run_id: str = "latest",
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.access = access
        self.runs = Runs(runs_dir, run_id, unix_s, with_control=access.with_control)
        self.pages = 0
        """How many pages follow now."""
        self._unix_s = unix_s
        self._files = {
            path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in _KINDS
        }

    def application(self) -> web.Application:
        """Return the page, which only this PC may reach."""

        def refused(request: web.Request) -> RequestRefusal | None:
            return guard.refusal(_facts(request), self.access)

        app = _application(refused)
        app.router.add_get("/", self._get_index)
        for name in self._files:
            app.router.add_get(f"/{name}", self._get_file)
        app.router.add_get("/api/v1/document", self._get_document)
        app.router.add_get("/api/v1/stream", self._get_stream)
        app.router.add_get("/api/v1/history", self._get_history)
        app.router.add_post("/api/v1/commands", self._post_commands)
        app.router.add_post("/api/v1/words", self._post_words)
        self._add_metrics(app)
        return app

    def metrics_application(self) -> web.Application:
        """Return `/metrics` alone, for other PCs."""

        def refused(request: web.Request) -> RequestRefusal | None:
            is_open = request.path == "/healthz"
            return None if is_open else guard.metrics_refusal(_facts(request), self.access)

        app = _application(refused)
        self._add_metrics(app)
        return app

    def _add_metrics(self, app: web.Application) -> None:
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)

    async def _get_health(self, _request: web.Request) -> web.StreamResponse:
        return _json({"ok": True})

    async def _get_metrics(self, _request: web.Request) -> web.StreamResponse:
        look = await self.runs.look("")
        folder = look.frame.run.folder
        deliveries = await asyncio.to_thread(read_deliveries, folder)
        commands = await asyncio.to_thread(count_commands, folder)
        content = await asyncio.to_thread(
            metrics.exposition, look.frame, look.firing, deliveries, commands
        )
        return _response(content, metrics.CONTENT_TYPE)

    async def _get_index(self, request: web.Request) -> web.StreamResponse:
        """Answer with the page; the token in the address becomes a cookie, and leaves it."""
        token = request.query.get("token")
        if token is None:
            return self._file("index.html")
        if not guard.is_same(token, self.access.token):
            raise _RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "this address is of a `web` that has ended; open the one that it printed last",
            )
        response = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/", **_HEADERS})
        name = guard.cookie_name(request.headers.get("Host"))
        response.set_cookie(name, token, path="/", httponly=True, samesite="Strict")
        return response

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        return self._file(request.path.removeprefix("/"))

    def _file(self, name: str) -> web.StreamResponse:
        kind = _KINDS[Path(name).suffix]
        return _response(self._files[name], f"{kind}; charset=utf-8")

    async def _get_document(self, request: web.Request) -> web.StreamResponse:
        look = await self.runs.look(request.query.get("run", ""))
        return _response(look.text.encode(), "application/json")

    async def _get_stream(self, request: web.Request) -> web.StreamResponse:
        """Send the document whenever it has changed, until the page is gone."""
        if self.pages >= PAGES_MOST:
            raise _RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "too many pages follow; close some of them"
            )
        run_id, sent, sent_at_s = request.query.get("run", ""), "", 0.0
        response = web.StreamResponse(
            headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        )
        self.pages += 1
        try:
            await response.prepare(request)
            while True:
                event = await self._event(run_id)
                if event != sent or time.monotonic() - sent_at_s > COMMENT_EVERY_S:
                    content = event if event != sent else ": still here\n\n"
                    await asyncio.wait_for(response.write(content.encode()), _WRITING_MOST_S)
                    sent, sent_at_s = event, time.monotonic()
                await asyncio.sleep(LOOK_EVERY_S)
        except (ConnectionError, TimeoutError):
            return response  # the page is gone, or has not read anything for long
        finally:
            self.pages -= 1

    async def _event(self, run_id: str) -> str:
        """Return the document as an event, or the problem that there is none: the next look may
        succeed.
        """
        try:
            return f"event: document\ndata: {(await self.runs.look(run_id)).text}\n\n"
        except (ArchiveError, UsageError) as error:
            problem = str(error)
        except Exception as fault:  # noqa: BLE001 - a page that says "live" must not stand still
            _tell(fault)
            problem = f"this page has a fault: {fault!r}; its server's terminal shows where"
        return f"event: problem\ndata: {_json_text({'error': one_line(problem)})}\n\n"

    async def _get_history(self, request: web.Request) -> web.StreamResponse:
        """Answer with the course of a `slot` or job, of the `jobs` together, or of all slots."""
        query = request.query
        folder = await asyncio.to_thread(self.runs.folder, query.get("run", ""))
        last_s = _seconds(query.get("last_s"))
        if slot := query.get("slot"):
            told = await asyncio.to_thread(charts.course_of, folder, slot, last_s)
        elif "jobs" in query:
            told = await asyncio.to_thread(charts.course_of_jobs, folder)
        else:
            told = await asyncio.to_thread(charts.course_of_all, folder, last_s)
        return _json(told)

    async def _post_commands(self, request: web.Request) -> web.StreamResponse:
        """Send a command about slots to the head, which obeys an id that comes again only once."""
        body = await _body(request)
        identity, do, slots = _text(body, "id"), _text(body, "do"), _names(body, "slots")
        amount = body.get("amount")
        amount_bytes = None if amount is None else parse_bytes(str(amount))
        folder = await asyncio.to_thread(self.runs.folder, request.query.get("run", ""))
        sent = asyncio.to_thread(
            send, folder, do, slots, by="web", amount_bytes=amount_bytes, identity=identity
        )
        answer = await sent
        if not answer.ok:
            raise _RefusedError(HTTPStatus.CONFLICT, answer.error or "the head has refused it")
        return _json({"id": identity, "ok": True, "effect": answer.effect})

    async def _post_words(self, request: web.Request) -> web.StreamResponse:
        """Put words about jobs into the inbox of the queue; the page submits no job."""
        body = await _body(request)
        identity, do, jobs = _text(body, "id"), _text(body, "do"), _names(body, "jobs")
        frame = (await self.runs.look(request.query.get("run", ""))).frame
        known = {one.job.name for one in frame.queue.standings} if frame.queue else set()
        if do not in {*Word}:
            raise ValueError(f"do must be one of {', '.join(Word)}")
        if unknown := set(jobs) - known:
            raise ValueError(f"the queue has no job {min(unknown)[:80]!r}")
        now_s = self._unix_s()
        words = [
            Said(at_s=now_s, id=f"{identity}-{name}", word=Word(do), job=name, by="web")
            for name in jobs
        ]
        try:
            await asyncio.to_thread(put, frame.run.folder / QUEUE_NAME, words)
        except OSError as failure:
            raise ArchiveError(f"the inbox of the queue: {failure.strerror}") from failure
        return _json({"id": identity, "ok": True, "effect": f"{do}: {', '.join(jobs)}"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how the page is served."""

    port: int = PORT
    bind: str | None = None
    """An address of this PC at which others may ask for `/metrics`."""
    control: bool = False


def serve(
    runs_dir: Path, run_id: str, options: ServeOptions, say: Callable[[str], None]
) -> None:
    """Serve the page until Ctrl-C or SIGTERM. `say` gets the lines for the terminal.

    Raises:
        UsageError: There is no such run, or an address cannot be served.
    """
    find_run(runs_dir, run_id)
    access = Access(
        token=secrets.token_urlsafe(32),
        metrics_token=_metrics_token(),
        with_control=options.control,
    )
    asyncio.run(_serve(Site(runs_dir, access, run_id), options, say))


def metrics_token_path() -> Path:
    """Return the file with the token for `/metrics`, which outlives the page."""
    return default_path().parent / "web" / "metrics.token"


async def _serve(site: Site, options: ServeOptions, say: Callable[[str], None]) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(_quiet)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    page = await started(site.application(), "127.0.0.1", options.port)
    port = port_of(page)
    runners = [page]
    try:
        if options.bind is not None:
            runners.append(await started(site.metrics_application(), _own(options.bind), port))
        say(f"http://127.0.0.1:{port}/?token={site.access.token}")
        say("This address opens the page in a browser on this PC. Ctrl-C ends the page only.")
        say(f"From another PC: ssh -L {port}:127.0.0.1:{port} THIS_PC, then the same address.")
        host = options.bind or "127.0.0.1"
        say(f"Prometheus: http://{host}:{port}/metrics with the token in {metrics_token_path()}")
        await ended.wait()
    finally:
        for runner in runners:
            await runner.cleanup()


async def started(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Serve an application at an address of this PC; `cleanup` of what is returned ends it.

    Raises:
        UsageError: The address cannot be served.
    """
    logger = logging.Logger("orchestrator.web")
    # aiohttp would print a traceback for each malformed request; handlers tell their faults.
    logger.addHandler(logging.NullHandler())
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=logger,
        handler_cancellation=True,
        shutdown_timeout=0.5,
        keepalive_timeout=SILENT_MOST_S,
        lingering_time=1.0,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=_BACKLOG, reuse_address=True).start()
    except OSError as failure:
        await runner.cleanup()
        if failure.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} is in use, perhaps by another page; `--port 0` takes any free one"
            ) from failure
        raise UsageError(f"{host}:{port} cannot be served: {failure.strerror}") from failure
    return runner


def port_of(runner: web.AppRunner) -> int:
    """Return the port that is served."""
    return int(runner.addresses[0][1])


def _own(bind: str) -> str:
    """Return the address that other PCs reach; `UsageError` if they cannot."""
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_loopback:
        raise UsageError(
            one_line(
                f"--bind {bind[:80]}: name the one IP address of this PC at which Prometheus may "
                "ask for /metrics, such as 192.168.1.10"
            )
        )
    return str(address)


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say nothing of a lack of file descriptors: asyncio accepts again after a second."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


def _metrics_token() -> str:
    """Return the user's token for `/metrics`, which is made where there is none.

    `UsageError` if others can read it.
    """
    path = metrics_token_path()
    try:
        with locked(path.with_suffix(".lock"), _PATIENCE_S):
            if not path.exists():
                replace_whole(path, secrets.token_urlsafe(32) + "\n")
            text = read_small(path, _TOKEN_MOST_BYTES).strip()
            is_open = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as failure:
        raise UsageError(
            one_line(f"the token {path} cannot be read or made: {failure}")
        ) from failure
    if is_open or len(text) < 20:
        raise UsageError(
            f"others can read the token {path}, or it is too short: delete it; `web` makes another"
        )
    return text


def _application(refused: Callable[[web.Request], RequestRefusal | None]) -> web.Application:
    """Return an application whose requests are guarded, and whose errors are sentences."""

    @web.middleware
    async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            if (refusal := refused(request)) is not None:
                return _json({"error": refusal.error}, refusal.status)
            return await handler(request)
        except _RefusedError as error:
            return _json({"error": str(error)}, error.status)
        except ArchiveError as error:
            return _json({"error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)
        except UsageError as error:
            return _json({"error": str(error)}, HTTPStatus.NOT_FOUND)
        except ValueError as error:
            return _json({"error": one_line(str(error))}, HTTPStatus.BAD_REQUEST)
        except web.HTTPException as error:
            return _json({"error": error.reason}, error.status)
        except Exception as fault:
            _tell(fault)
            return _json({"error": f"a fault: {fault!r}"}, HTTPStatus.INTERNAL_SERVER_ERROR)

    return web.Application(middlewares=[guarded], client_max_size=_BODY_MOST_BYTES)


def _facts(request: web.Request) -> RequestFacts:
    headers = request.headers
    host = headers.get("Host")
    return RequestFacts(
        method=request.method,
        path=request.path,
        host=host,
        origin=headers.get("Origin"),
        authorization=headers.get("Authorization"),
        cookie=request.cookies.get(guard.cookie_name(host)),
    )


def _tell(fault: BaseException) -> None:
    with suppress(OSError, ValueError):  # a closed terminal ends no page
        traceback.print_exception(fault, file=sys.stderr)


async def _body(request: web.Request) -> Json:
    try:
        async with asyncio.timeout(SILENT_MOST_S):
            body = json.loads(await request.read())
    except TimeoutError:
        raise _RefusedError(
            HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {SILENT_MOST_S:.0f} s"
        ) from None
    except (ValueError, RecursionError, web.RequestPayloadError):
        body = None
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def _text(body: Json, key: str) -> str:
    value = body.get(key)
    if not (isinstance(value, str) and 0 < len(value) <= 64):
        raise ValueError(f"{key} must be a text of 1 to 64 characters")
    return value


def _names(body: Json, key: str) -> list[str]:
    value = body.get(key)
    if not (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
        raise ValueError(f"{key} must name them one by one, in a list")
    return value


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:12]) == int(text)):
        raise ValueError("last_s must be a number of seconds, 1 or more")
    return float(text)


def _json_text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate, as in a file name, becomes an escape of JSON.
    return text.encode("utf-8", "backslashreplace").decode()


def _json(value: object, status: int = HTTPStatus.OK) -> web.Response:
    return _response(_json_text(value).encode(), "application/json", status)


def _response(content: bytes, kind: str, status: int = HTTPStatus.OK) -> web.Response:
    response = web.Response(
        body=content, status=status, headers={**_HEADERS, "Content-Type": kind}
    )
    response.enable_compression()
    return response
