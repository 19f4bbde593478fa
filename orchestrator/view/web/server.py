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
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.config.byte_size import parse_bytes
from orchestrator.core.user_commands import Do
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.jobs.model import Word
from orchestrator.view import charts
from orchestrator.view.orders import give
from orchestrator.view.web import guard, metrics
from orchestrator.view.web.guard import Access
from orchestrator.view.web.looks import LOOK_EVERY_S, Looks

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
_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]
_Names: TypeAlias = Annotated[list[str], Field(min_length=1)] | None


class _Command(BaseModel):
    """What a POST says: what to do with which slots or jobs, each named."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: _Name
    """Of a command that comes again with the same id, the head obeys the first one only."""
    do: _Name
    slots: _Names = None
    jobs: _Names = None
    amount: str | None = None
    """Such as "2.5 GiB"."""


class Site:
    """The page of the runs of one folder."""

    def __init__(self, runs_dir: Path, access: Access, run_id: str = "latest") -> None:
        """Touch nothing yet. `run_id` is shown where none is named."""
        self.access = access
        self.looks = Looks(runs_dir, run_id, with_control=access.with_control)

    def application(self) -> web.Application:
        """Return what answers at each address; `guard.py` says at which what."""
        app = web.Application(middlewares=[self._guarded], client_max_size=_BODY_MOST_BYTES)
        app.on_response_prepare.append(_harden)
        app.add_routes(
            [
                web.get("/healthz", self._get_health),
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
        """Answer what `guard.py` lets pass; errors are objects with a sentence."""
        try:
            guard.check(request, self.access)
            return await handler(request)
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:  # noqa: BLE001 - a sentence for the client
            status, text = _explained(error)
            return web.json_response({"error": text}, status=status)

    async def _get_health(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"ok": True})

    async def _get_metrics(self, _request: web.Request) -> web.StreamResponse:
        look = await self.looks.look("")
        content = await asyncio.to_thread(metrics.exposition, look.frame, look.alerts)
        return web.Response(body=content, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _get_index(self, request: web.Request) -> web.StreamResponse:
        """Answer with the page; a token in the address becomes a cookie first, and leaves it."""
        token = request.query.get("token")
        if token is None:
            return web.FileResponse(PAGE / "index.html")
        if not guard.is_same(token, self.access.token):
            raise web.HTTPUnauthorized(
                reason="this address is of a `web` that has ended; open the one that it printed "
                "last"
            )
        response = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/"})
        name = guard.cookie_name(request)
        response.set_cookie(name, token, path="/", httponly=True, samesite="Strict")
        return response

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        path = PAGE / request.match_info["name"]
        if path.parent != PAGE or not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    async def _get_document(self, request: web.Request) -> web.StreamResponse:
        look = await self.looks.look(_run_id(request))
        return web.json_response(text=look.text)

    async def _get_stream(self, request: web.Request) -> web.StreamResponse:
        """Send the document whenever it has changed, until the page is gone."""
        kind = {"Content-Type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(headers=kind)
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
            course = await asyncio.to_thread(charts.course_of, folder, slot, last_s)
        elif "jobs" in request.query:
            course = await asyncio.to_thread(charts.course_of_jobs, folder)
        else:
            course = await asyncio.to_thread(charts.course_of_all, folder, last_s)
        return web.json_response(course)

    async def _post_command(self, request: web.Request) -> web.StreamResponse:
        """Tell the head what to do with slots, or its queue what to do with jobs."""
        async with asyncio.timeout(_BODY_MOST_S):
            command = _Command.model_validate_json(await request.read())
        if (command.slots is None) == (command.jobs is None):
            raise ValueError("a command names either slots or jobs, one by one")
        names, orders = command.slots or command.jobs or [], Do if command.jobs is None else Word
        if command.do not in {*orders}:
            raise ValueError(f"do is one of {', '.join(orders)}")
        frame = (await self.looks.look(_run_id(request))).frame
        known = {one.job.name for one in frame.queue.standings} if frame.queue else set()
        if unknown := set(command.jobs or ()) - known:
            raise ValueError(f"the queue has no job {min(unknown)[:80]!r}")
        amount_bytes = None if command.amount is None else parse_bytes(command.amount)
        order = (frame.run.folder, orders(command.do), names, amount_bytes)
        try:
            effect = await asyncio.to_thread(give, *order, by="web", identity=command.id)
        except UsageError as refused:
            raise web.HTTPConflict(reason=one_line(str(refused))) from refused
        return web.json_response({"id": command.id, "ok": True, "effect": effect})


async def _harden(_request: web.Request, response: web.StreamResponse) -> None:
    """Keep a browser from doing more with an answer than to show it."""
    response.headers.update(_HEADERS)


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


def _run_id(request: web.Request) -> str:
    """Return the run that is asked for; empty for the one that the page shows by itself."""
    return request.query.get("run", "")
