"""Serves the page: its files, the document once a second, courses, commands, and `/metrics`.

The page is served on loopback only. Another address of this PC serves only `/metrics`, to clients
with its token. `guard.py` checks every request first. Threads read the run folder; the head is not
involved. Does not decide what a run shows (`document.py`, `charts.py`, `metrics.py`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.control import queue, slots
from orchestrator.control.slots import Do
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.jobs.model import JobOrder
from orchestrator.record.folders import find_run
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.view import charts
from orchestrator.view.alerts import Frame
from orchestrator.view.document import document
from orchestrator.view.look import Watch
from orchestrator.view.web import guard, metrics
from orchestrator.view.web.guard import LOOPBACK, Access
from workers.files import read_small, replace_whole
from workers.learned_limits import default_path

READ_EVERY_S: Final = 1.0
# aiohttp would print a traceback for each malformed request. `_explained` prints faults of our own.
_SILENT: Final = logging.Logger("orchestrator.web")
_SILENT.addHandler(logging.NullHandler())

#: Options of aiohttp's server. `keepalive_timeout` limits, in seconds, the time for the headers of
#: a request, and the idle time between two requests.
SERVED: Final[dict[str, Any]] = {
    "access_log": None,
    "logger": _SILENT,
    "handler_cancellation": True,
    "shutdown_timeout": 0.5,
    "keepalive_timeout": 10.0,
    "lingering_time": 1.0,
}
_BACKLOG: Final = 1_024
_TOKEN_MOST_BYTES: Final = 200
_TOKEN_LEAST_CHARS: Final = 20
PAGE: Final = Path(__file__).parent / "page"

_BODY_MOST_BYTES: Final = 64 * 2**10
_BODY_MOST_S: Final = 10.0
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Command(BaseModel):
    """The body of a POST: what to do (for slots a `Do`, for jobs a `JobOrder`), and their names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Annotated[str, Field(min_length=1, max_length=64)]
    """The head carries out only the first of several commands with the same id."""
    do: Do | JobOrder
    names: Annotated[list[str], Field(min_length=1)]
    amount: str | None = None
    """Such as "2.5 GiB"."""


class Site:
    """Answers the requests of the page for the runs in one folder."""

    def __init__(self, runs_dir: Path, access: Access, run_id: str = "latest") -> None:
        """Read nothing yet. With `latest`, the page always shows the newest run."""
        self.access = access
        self.reads = 0
        """How often a run was read."""
        self._runs_dir, self._run_id = runs_dir, run_id
        self._lock = asyncio.Lock()
        self._watch: tuple[Path, Watch] | None = None
        self._last: tuple[float, Frame, str] | None = None
        """Monotonic time of the last read, its frame, and its document as JSON."""

    def application(self) -> web.Application:
        """Return the application with all routes; `guard.py` says which address serves which."""
        app = web.Application(middlewares=[self._guarded], client_max_size=_BODY_MOST_BYTES)
        app.on_response_prepare.append(_harden)
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/api/v1/document", self._get_document),
                web.get("/api/v1/stream", self._get_stream),
                web.get("/api/v1/history", self._get_history),
                web.post("/api/v1/commands", self._post_command),
                web.get("/", self._get_index),
                web.get("/{name}", self._get_file),
            ]
        )
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Handle a request that `guard.py` allows; an error becomes an object with a sentence."""
        try:
            guard.check(request, self.access)
            return await handler(request)
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:  # noqa: BLE001 - the client receives a sentence
            status, text = _explained(error)
            return web.json_response({"error": text}, status=status)

    def folder(self) -> Path:
        """Return the folder of the run; `UsageError` if there is none."""
        return find_run(self._runs_dir, self._run_id)

    async def read(self) -> tuple[Frame, str]:
        """Return the present frame of the run, and its document as JSON.

        Requests within half a second share one read. `UsageError`: there is no run; `ArchiveError`:
        its folder cannot be read.
        """
        async with self._lock:
            return await asyncio.to_thread(self._read)

    def _read(self) -> tuple[Frame, str]:
        folder, now_s = self.folder(), time.monotonic()
        if self._watch is None or self._watch[0] != folder:
            self._watch, self._last = (folder, Watch(folder)), None
        if self._last is None or now_s - self._last[0] > READ_EVERY_S / 2:
            self.reads += 1
            frame = self._watch[1].read()
            can_control = self.access.with_control and frame.run.outcome == "running"
            shown = {**document(frame), "control": can_control}
            text = json.dumps(shown, separators=(",", ":"), allow_nan=False)
            self._last = now_s, frame, text
        return self._last[1:]

    async def _get_metrics(self, _request: web.Request) -> web.StreamResponse:
        frame, _ = await self.read()
        content = await asyncio.to_thread(metrics.exposition, frame)
        return web.Response(body=content, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _get_index(self, request: web.Request) -> web.StreamResponse:
        """Answer with the page; first move a token from the address into a cookie."""
        token = request.query.get("token")
        if token is None:
            return web.FileResponse(PAGE / "index.html")
        if not guard.matches(token, self.access.token):
            why = "this address is of a `web` that has ended; open the one that it printed last"
            raise web.HTTPUnauthorized(reason=why)
        response = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/"})
        response.set_cookie(guard.COOKIE, token, path="/", httponly=True, samesite="Strict")
        return response

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        path = PAGE / request.match_info["name"]
        if path.parent != PAGE or not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    async def _get_document(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(text=(await self.read())[1])

    async def _get_stream(self, request: web.Request) -> web.StreamResponse:
        """Send the document whenever it has changed, until the page is gone."""
        kind = {"Content-Type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(headers=kind)
        await response.prepare(request)
        sent = ""
        while True:
            event = await self._event()
            if event != sent:
                await response.write(event.encode())
                sent = event
            await asyncio.sleep(READ_EVERY_S)

    async def _event(self) -> str:
        """Return the document as an event, or the reason why there is none at the moment."""
        try:
            return f"event: document\ndata: {(await self.read())[1]}\n\n"
        except Exception as error:  # noqa: BLE001 - else the page would freeze and say "live"
            _, text = _explained(error)
            return f"event: problem\ndata: {json.dumps({'error': text})}\n\n"

    async def _get_history(self, request: web.Request) -> web.StreamResponse:
        """Answer with the course of a slot or job (`slot`), or of all slots together."""
        folder = await asyncio.to_thread(self.folder)
        last_s = float(request.query.get("last_s", "inf"))
        if slot := request.query.get("slot"):
            named = await asyncio.to_thread(charts.courses_of, folder, [slot], last_s=last_s)
            course = named[slot]
        else:
            course = await asyncio.to_thread(charts.course_of_all, folder, last_s)
        return web.json_response(course)

    async def _post_command(self, request: web.Request) -> web.StreamResponse:
        """Send a command for slots to the head, or an order for jobs to the queue."""
        async with asyncio.timeout(_BODY_MOST_S):
            command = _Command.model_validate_json(await request.read())
        frame, _ = await self.read()
        effect = await asyncio.to_thread(_submit, command, frame)
        return web.json_response({"id": command.id, "ok": True, "effect": effect})


def _submit(command: _Command, frame: Frame) -> str:
    """Submit a command and return its effect. The head answers commands for slots; orders for jobs
    wait in the queue until the head reads them.
    """
    do, names, folder = command.do, command.names, frame.run.folder
    if isinstance(do, Do):
        amount_bytes = None if command.amount is None else slots.parse_bytes(command.amount)
        answer = slots.send(
            folder, do, names, by="web", amount_bytes=amount_bytes, identity=command.id
        )
        if not answer.ok:
            raise web.HTTPConflict(reason=one_line(answer.error or "the head has refused it"))
        return answer.effect
    known = {one.job.name for one in frame.queue.standings} if frame.queue else set()
    if unknown := set(names) - known:
        raise ValueError(f"the queue has no job {min(unknown)[:80]!r}")
    queue.say(folder / QUEUE_NAME, do, names, by="web", identity=command.id)
    return f"{do}: {', '.join(names)}"


async def _harden(_request: web.Request, response: web.StreamResponse) -> None:
    """Add headers that keep a browser from doing more with an answer than show it."""
    response.headers.update(_HEADERS)


def _explained(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and a sentence for an error; print a traceback if it is our fault."""
    match error:
        case web.HTTPException():
            return error.status, error.reason
        case ArchiveError():
            return HTTPStatus.SERVICE_UNAVAILABLE, one_line(str(error))
        case UsageError():
            return HTTPStatus.NOT_FOUND, one_line(str(error))
        case ValidationError():
            problems = error.errors(include_url=False)
            where = ".".join(map(str, problems[0]["loc"])) or "the body"
            text = " ".join(problem["msg"] for problem in problems)
            return HTTPStatus.BAD_REQUEST, one_line(f"{where}: {text}")
        case ValueError() | web.RequestPayloadError() | TimeoutError():
            return HTTPStatus.BAD_REQUEST, one_line(str(error) or "the request is not complete")
    with suppress(OSError, ValueError):  # a closed terminal does not end the page
        traceback.print_exception(error, file=sys.stderr)
    return HTTPStatus.INTERNAL_SERVER_ERROR, one_line(f"a fault of the page: {error!r}")


def serve(
    runs_dir: Path,
    run_id: str,
    say: Callable[[str], None],
    *,
    port: int,
    bind: str | None,
    control: bool,
) -> None:
    """Serve the page of a run until Ctrl-C or SIGTERM; `latest` always means the newest run.

    `say` prints a line. All addresses use `port`; 0 means any free one. `bind` is an address of
    this PC that serves `/metrics` to other PCs. `UsageError`: there is no such run, or an address
    cannot be served.
    """
    find_run(runs_dir, run_id)
    token_file = default_path().parent / "web" / "metrics.token"
    page_token, metrics_token = secrets.token_urlsafe(32), _metrics_token(token_file)
    access = Access(token=page_token, metrics_token=metrics_token, with_control=control)
    with ExitStack() as opened:
        listening = [opened.enter_context(_listening(LOOPBACK, port))]
        port = listening[0].getsockname()[1]
        if bind is not None:
            listening.append(opened.enter_context(_listening(bind, port)))
        say(f"http://{LOOPBACK}:{port}/?token={page_token}")
        say(
            f"From another PC: `ssh -L {port}:{LOOPBACK}:{port}` to this one, then the same "
            "address. Ctrl-C ends the page only."
        )
        where = f"http://{bind or LOOPBACK}:{port}/metrics"
        say(f"Prometheus: {where} with the token in {token_file}")
        app = Site(runs_dir, access, run_id).application()
        web.run_app(app, sock=listening, backlog=_BACKLOG, print=None, **SERVED)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections; `UsageError` if the address cannot be served."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as failure:
        reason, *_ = str(failure.strerror).split(" (")
        why = f"{host[:80]}, port {port}, cannot be served: {reason}"
        if failure.errno == errno.EADDRINUSE:
            why += ", perhaps by another page; `--port 0` takes any free one"
        raise UsageError(one_line(why)) from failure


def _metrics_token(path: Path) -> str:
    """Return the user's token for `/metrics` from its file, which is created if it is missing.

    `UsageError`: other users can read the file, it is too short, or it cannot be read or created.
    """
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_whole(path, secrets.token_urlsafe(32) + "\n")
        text = read_small(path, _TOKEN_MOST_BYTES).strip()
        is_open = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as failure:
        why = f"the token {path} cannot be read or made: {failure}"
        raise UsageError(one_line(why)) from failure
    if is_open or len(text) < _TOKEN_LEAST_CHARS:
        raise UsageError(
            f"others can read the token {path}, or it is too short: delete it; `web` makes another"
        )
    return text
