"""Answers the requests of the page: its files, the document once a second, courses, commands, and
`/metrics`.

Every request passes `guard.py` first. The run folder is read in threads; the head knows nothing of
it. Does not say what a run shows (`document.py`, `charts.py`, `metrics.py`), nor which addresses
are served (`serving.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.config.byte_size import parse_bytes
from orchestrator.control.client import send
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.jobs.inbox import put
from orchestrator.jobs.journal import QUEUE_NAME
from orchestrator.jobs.model import Said, Word
from orchestrator.record.archive import count_commands
from orchestrator.view import charts
from orchestrator.view.web import guard, metrics
from orchestrator.view.web.guard import Access, RequestFacts, RequestRefusal
from orchestrator.view.web.looks import LOOK_EVERY_S, Looks

BODY_MOST_S: Final = 10.0
PAGE: Final = Path(__file__).parent / "page"

_BODY_MOST_BYTES: Final = 64 * 2**10
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

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Guard: TypeAlias = Callable[[RequestFacts, Access], RequestRefusal | None]
_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]


class _Command(BaseModel):
    """What a POST says: what to do with which slots or jobs, each named."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: _Name
    """Of a command that comes again with the same id, the head obeys the first one only."""
    do: _Name
    slots: Annotated[list[str], Field(min_length=1)] | None = None
    jobs: Annotated[list[str], Field(min_length=1)] | None = None
    amount: str | None = None
    """Such as "2.5 GiB"."""


class Site:
    """The page of the runs of one folder."""

    def __init__(self, runs_dir: Path, access: Access, run_id: str = "latest") -> None:
        """Read the page's files. `run_id` is shown where none is named."""
        self.access = access
        self.looks = Looks(runs_dir, run_id, with_control=access.with_control)
        self._files = {
            path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in _KINDS
        }

    def page_application(self) -> web.Application:
        """Return the page, for an address that only this PC reaches."""
        app = self.metrics_application(guard.refusal)
        app.router.add_get("/", self._get_index)
        for name in self._files:
            app.router.add_get(f"/{name}", self._get_file)
        app.router.add_get("/api/v1/document", self._get_document)
        app.router.add_get("/api/v1/stream", self._get_stream)
        app.router.add_get("/api/v1/history", self._get_history)
        app.router.add_post("/api/v1/commands", self._post_command)
        return app

    def metrics_application(self, refusal: _Guard = guard.metrics_refusal) -> web.Application:
        """Return `/metrics` and `/healthz` alone, for an address that other PCs reach."""

        @web.middleware
        async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
            refused = refusal(_facts(request), self.access)
            if refused is not None:
                return _error(refused.status, refused.error)
            try:
                return await handler(request)
            except ConnectionError:
                raise  # the client is gone
            except Exception as error:  # noqa: BLE001 - a sentence for the client
                return _error(*_explained(error))

        app = web.Application(middlewares=[guarded], client_max_size=_BODY_MOST_BYTES)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        return app

    async def _get_health(self, _request: web.Request) -> web.StreamResponse:
        return _json({"ok": True})

    async def _get_metrics(self, _request: web.Request) -> web.StreamResponse:
        look = await self.looks.look("")
        commands = await asyncio.to_thread(count_commands, look.frame.run.folder)
        content = await asyncio.to_thread(metrics.exposition, look.frame, look.alerts, commands)
        return _response(content, metrics.CONTENT_TYPE)

    async def _get_index(self, request: web.Request) -> web.StreamResponse:
        """Answer with the page; a token in the address becomes a cookie first, and leaves it."""
        token = request.query.get("token")
        if token is None:
            return self._file("index.html")
        if not guard.is_same(token, self.access.token):
            return _error(
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
        return _response(self._files[name], f"{_KINDS[Path(name).suffix]}; charset=utf-8")

    async def _get_document(self, request: web.Request) -> web.StreamResponse:
        look = await self.looks.look(_run_id(request))
        return _response(look.text.encode(), "application/json")

    async def _get_stream(self, request: web.Request) -> web.StreamResponse:
        """Send the document whenever it has changed, until the page is gone."""
        kind = {"Content-Type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(headers={**_HEADERS, **kind})
        await response.prepare(request)
        sent = ""
        while True:
            event = await self._event(_run_id(request))
            if event != sent:
                await response.write(event.encode())
                sent = event
            await asyncio.sleep(LOOK_EVERY_S)

    async def _event(self, run_id: str) -> str:
        """Return the document as an event, or why there is none: the next look may succeed."""
        try:
            return f"event: document\ndata: {(await self.looks.look(run_id)).text}\n\n"
        except Exception as error:  # noqa: BLE001 - else the page would say "live" and stand still
            _, text = _explained(error)
            return f"event: problem\ndata: {json.dumps({'error': text})}\n\n"

    async def _get_history(self, request: web.Request) -> web.StreamResponse:
        """Answer with the course of a `slot` or job, of all `jobs`, or of all slots together."""
        folder = await asyncio.to_thread(self.looks.folder, _run_id(request))
        last_s = float(request.query.get("last_s", "inf"))
        if slot := request.query.get("slot"):
            told = await asyncio.to_thread(charts.course_of, folder, slot, last_s)
        elif "jobs" in request.query:
            told = await asyncio.to_thread(charts.course_of_jobs, folder)
        else:
            told = await asyncio.to_thread(charts.course_of_all, folder, last_s)
        return _json(told)

    async def _post_command(self, request: web.Request) -> web.StreamResponse:
        """Tell the head what to do with slots, or its queue what to do with jobs."""
        async with asyncio.timeout(BODY_MOST_S):
            command = _Command.model_validate_json(await request.read())
        if (command.slots is None) == (command.jobs is None):
            raise ValueError("a command names either slots or jobs, one by one")
        if command.jobs is not None:
            effect = await self._tell_queue(_run_id(request), command, command.jobs)
        else:
            effect = await self._tell_head(_run_id(request), command, command.slots or [])
        return _json({"id": command.id, "ok": True, "effect": effect})

    async def _tell_head(self, run_id: str, command: _Command, slots: list[str]) -> str:
        folder = await asyncio.to_thread(self.looks.folder, run_id)
        size_bytes = None if command.amount is None else parse_bytes(command.amount)
        answer = await asyncio.to_thread(
            send, folder, command.do, slots, by="web", amount_bytes=size_bytes, identity=command.id
        )
        if not answer.ok:
            raise web.HTTPConflict(reason=one_line(answer.error or "the head has refused it"))
        return str(answer.effect)

    async def _tell_queue(self, run_id: str, command: _Command, jobs: list[str]) -> str:
        """Put words about jobs into the inbox; the page submits no job."""
        frame = (await self.looks.look(run_id)).frame
        known = {one.job.name for one in frame.queue.standings} if frame.queue else set()
        if command.do not in {*Word}:
            raise ValueError(f"of jobs, do is one of {', '.join(Word)}")
        if unknown := set(jobs) - known:
            raise ValueError(f"the queue has no job {min(unknown)[:80]!r}")
        word, now_s = Word(command.do), time.time()
        words = [
            Said(at_s=now_s, id=f"{command.id}-{name}", word=word, job=name, by="web")
            for name in jobs
        ]
        try:
            await asyncio.to_thread(put, frame.run.folder / QUEUE_NAME, words)
        except OSError as failure:
            raise ArchiveError(f"the inbox of the queue: {failure.strerror}") from failure
        return f"{word}: {', '.join(jobs)}"


def _explained(error: Exception) -> tuple[int, str]:
    """Return the status and the sentence of an error; a fault of this program is told here, too."""
    match error:
        case web.HTTPException():
            return error.status, error.reason
        case ArchiveError():
            return HTTPStatus.SERVICE_UNAVAILABLE, one_line(str(error))
        case UsageError():
            return HTTPStatus.NOT_FOUND, one_line(str(error))
        case ValidationError():
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            return HTTPStatus.BAD_REQUEST, one_line(f"{where}: {first['msg']}")
        case ValueError() | web.RequestPayloadError() | TimeoutError():
            return HTTPStatus.BAD_REQUEST, one_line(str(error) or "the request is not complete")
    with suppress(OSError, ValueError):  # a closed terminal ends no page
        traceback.print_exception(error, file=sys.stderr)
    return HTTPStatus.INTERNAL_SERVER_ERROR, one_line(f"a fault of the page: {error!r}")


def _facts(request: web.Request) -> RequestFacts:
    headers, host = request.headers, request.headers.get("Host")
    return RequestFacts(
        method=request.method,
        path=request.path,
        host=host,
        origin=headers.get("Origin"),
        authorization=headers.get("Authorization"),
        cookie=request.cookies.get(guard.cookie_name(host)),
    )


def _run_id(request: web.Request) -> str:
    """Return the run that is asked for; empty for the one that the page shows by itself."""
    return request.query.get("run", "")


def _error(status: int, text: str) -> web.Response:
    return _json({"error": text}, status)


def _json(value: object, status: int = HTTPStatus.OK) -> web.Response:
    content = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return _response(content, "application/json", status)


def _response(content: bytes, kind: str, status: int = HTTPStatus.OK) -> web.Response:
    headers = {**_HEADERS, "Content-Type": kind}
    response = web.Response(body=content, status=status, headers=headers)
    response.enable_compression()
    return response
