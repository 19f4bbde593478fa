"""The HTTP server of one run: what each path answers and streams, and the headers that keep a
browser from doing more.

Every request passes `guard.py` first. The run folder is read in threads; the head knows nothing of
it. Does not say what the page shows (`page_data.py`), nor how addresses, tokens and certificates
are chosen (`listener.py`).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from aiohttp import web

from orchestrator.config.byte_size import parse_bytes
from orchestrator.control.client import send
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.jobs.inbox import put
from orchestrator.jobs.journal import QUEUE_NAME
from orchestrator.jobs.model import Said, Word
from orchestrator.record import history
from orchestrator.record.archive import Follower, Frame, StoredEvent, count_commands, read_events
from orchestrator.record.folders import find_run, list_runs, run_object
from orchestrator.record.output import last_lines
from orchestrator.record.query import Order, order_of, parse, select
from orchestrator.record.summary import SCHEMA
from orchestrator.view.alerts import Alert, Since, alerts
from orchestrator.view.jobs import with_jobs
from orchestrator.view.web import guard, metrics, page_data
from orchestrator.view.web.guard import (
    ROUTES,
    Access,
    Code,
    Permission,
    RequestFacts,
    RequestRefusal,
    Route,
)
from orchestrator.view.web.page_data import Table, TableView, event_of, table_of

LOOK_EVERY_S: Final = 1.0
SHARE_MOST: Final = 0.08
"""Of a core, for looking. A run of thousands of slots is looked at less often."""
COMMENT_EVERY_S: Final = 15.0
PAGES_MOST: Final = 64
GZIP_BEGIN: Final = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""Begins a gzip stream. Each event is compressed without those before it, so once for all pages."""

_PAUSE_MOST_S = 5.0
_WAITING_MOST = 4
_EVENTS_MOST = 100

_KINDS: Final = {
    "index.html": "text/html", "app.js": "text/javascript", "charts.js": "text/javascript",
    "source.js": "text/javascript",
    "uplot.js": "text/javascript", "app.css": "text/css", "uplot.css": "text/css",
    "icon.svg": "image/svg+xml",
}  # fmt: skip
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SILENT_MOST_S: Final = 10.0
"""So long a connection without a login may take for the headers of a request, and be idle between
two.
"""
_BODY_MOST_BYTES: Final = 64 * 2**10
_LIMIT_MOST: Final = 500
_SLOT_EVENTS: Final = 200
_TEXT_MOST: Final = 64
_WRITING_MOST_S: Final = 30.0
_OTHERS_MOST: Final = 8
"""Runs beside the one that was named of which something is kept."""
_OVERVIEW_S: Final = 600.0
_OVERVIEW_PARTS: Final = 200
_OVERVIEW_EVERY_S: Final = 5.0
_COMPRESSED_FROM_BYTES: Final = 1_000
Query: TypeAlias = Mapping[str, str]
_Handler: TypeAlias = Callable[[web.Request, Query], Awaitable[web.StreamResponse]]


PAGE: Final = Path(__file__).parent / "page"


class StreamEvent:
    """What is sent to pages, plain or compressed."""

    def __init__(self, kind: str, content: object, number: int | None = None) -> None:
        data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        named = "" if number is None else f"id: {number}\n"
        self.plain = f"{named}event: {kind}\ndata: {data}\n\n".encode("utf-8", "backslashreplace")

    @cached_property
    def packed(self) -> bytes:
        """The event as a part of a gzip stream."""
        return packed(self.plain)


class StreamReader:
    """One page that follows: what it is still to be sent."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[StreamEvent] = asyncio.Queue(_WAITING_MOST)
        self.needs_all = True

    def put(self, event: StreamEvent) -> None:
        """Hand an event on.

        Where the page is too slow, forget what waits: it needs all of the table again.
        """
        try:
            self.waiting.put_nowait(event)
        except asyncio.QueueFull:
            while not self.waiting.empty():
                self.waiting.get_nowait()
            self.needs_all = True


@dataclass(slots=True, eq=False)
class _Followed:
    """A view that at least one page looks at."""

    pages: set[StreamReader] = field(default_factory=set)
    table: Table | None = None


class Hub:
    """Looks at the run for all pages that follow it, once a second, or less often if a look takes
    long.
    """

    def __init__(self, folder: Path, unix_s: Callable[[], float], *, with_control: bool) -> None:
        self._folder = folder
        self._look = Follower(folder).look
        self._unix_s = unix_s
        self._alerts_since: Since = {}
        self._with_control = with_control
        self._views: dict[TableView, _Followed] = {}
        self._frame: Frame | None = None
        self._looked_at_s = float("-inf")
        self._news: deque[StoredEvent] = deque(maxlen=_EVENTS_MOST)
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.alerts: tuple[Alert, ...] = ()
        """What was wrong in the last frame."""
        self.looks = 0
        """How often the run was looked at."""

    async def frame(self) -> Frame:
        """Return the run as it is now: one look serves all who ask within half a second.

        Raises:
            ArchiveError: The run folder cannot be read.
        """
        async with self._looking:
            now_s = asyncio.get_running_loop().time()
            if self._frame is None or now_s - self._looked_at_s > LOOK_EVERY_S / 2:
                self.looks += 1
                self._frame = await asyncio.to_thread(self._look_and_judge)
                self._looked_at_s = now_s
                self._news.extend(self._frame.events)
            return self._frame

    def _look_and_judge(self) -> Frame:
        frame = self._look()
        frame = replace(frame, snapshot=with_jobs(frame.snapshot, frame.queue))
        self.alerts, self._alerts_since = alerts(frame, self._unix_s(), self._alerts_since)
        return frame

    async def table(self, view: TableView) -> Table:
        """Return the table of a view as it is now; `ArchiveError` as for `frame`."""
        frame = await self.frame()
        return await asyncio.to_thread(
            table_of, frame, view, self.alerts, with_control=self._with_control
        )

    @property
    def is_full(self) -> bool:
        """Whether no more pages can follow."""
        return sum(len(followed.pages) for followed in self._views.values()) >= PAGES_MOST

    @asynccontextmanager
    async def following(self, view: TableView) -> AsyncIterator[StreamReader]:
        """Let a page follow a view; it gets the whole table first."""
        page, table = StreamReader(), await self.table(view)
        followed = self._views.setdefault(view, _Followed())
        followed.table = followed.table or table
        followed.pages.add(page)
        self._send(page, followed.table, None)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._go_on())
        try:
            yield page
        finally:
            followed.pages.discard(page)
            if not followed.pages:
                self._views.pop(view, None)

    async def close(self) -> None:
        """End looking."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _go_on(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = LOOK_EVERY_S
        while self._views:
            await asyncio.sleep(pause_s)
            began_s = loop.time()
            try:
                frame = await self.frame()
            except ArchiveError as error:
                self._tell_all(StreamEvent("gone", {"error": str(error)}))
            else:
                await self._show(frame)
            took_s = loop.time() - began_s
            pause_s = max(0.1, min(_PAUSE_MOST_S, max(LOOK_EVERY_S, took_s / SHARE_MOST)) - took_s)

    async def _show(self, frame: Frame) -> None:
        for view, followed in list(self._views.items()):
            table = await asyncio.to_thread(
                table_of, frame, view, self.alerts, with_control=self._with_control
            )
            before, followed.table = followed.table, table
            changes = None if before is None else table.changes(before)
            event = None if not changes else StreamEvent("table", changes, frame.number)
            for page in followed.pages:
                page.needs_all |= changes is None
                self._send(page, table, event)
        if self._news:
            self._tell_all(
                StreamEvent("event", {"events": [event_of(event) for event in self._news]})
            )
            self._news.clear()

    def _send(self, page: StreamReader, table: Table, changes: StreamEvent | None) -> None:
        """Send a page the changes, or the whole table where it has missed some."""
        if changes is not None and not page.needs_all:
            page.put(changes)
        if page.needs_all:
            page.needs_all = False
            page.put(StreamEvent("table", {"all": table.to_dict()}))

    def _tell_all(self, event: StreamEvent) -> None:
        for followed in self._views.values():
            for page in followed.pages:
                page.put(event)


def packed(content: bytes) -> bytes:
    """Return an event as a part of a gzip stream that any page can read from there on."""
    press = zlib.compressobj(wbits=-15)
    return press.compress(content) + press.flush(zlib.Z_FULL_FLUSH)


@runtime_checkable
class Trusting(Protocol):
    """A connection that is kept once one of its requests has brought a login."""

    def trust(self) -> None:
        """Keep it."""


class _RefusedError(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


@dataclass(kw_only=True)
class Site:
    """One run and its page."""

    folder: Path
    access: Access
    is_secure: bool = False
    unix_s: Callable[[], float] = time.time
    codes: list[Code] = field(default_factory=list)
    """Those of the addresses that were printed."""

    def __post_init__(self) -> None:
        self.hub = Hub(self.folder, self.unix_s, with_control=self.access.with_control)
        self._others: dict[str, Site] = {}
        self._overview: tuple[float, dict[str, Any]] = (float("-inf"), {})
        self._files = {
            f"/{name}".removesuffix("index.html"): (PAGE / name).read_bytes() for name in _KINDS
        }

    def application(self) -> web.Application:
        """Return the server's application."""
        app = web.Application(client_max_size=_BODY_MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, _app: web.Application) -> None:
        for site in (self, *self._others.values()):
            await site.hub.close()

    def _of(self, run: str | None) -> Site:
        """Return the site of another run in the folder of runs."""
        if run is None or run == self.folder.name:
            return self
        if run not in self._others:
            try:
                folder = find_run(self.folder.parent, run)
            except UsageError as error:
                raise _RefusedError(404, str(error)) from None
            for name in list(self._others)[: 1 - _OTHERS_MOST]:
                del self._others[name]  # its pages go on to the end
            self._others[run] = Site(folder=folder, access=self.access, unix_s=self.unix_s)
        return self._others[run]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        route = ROUTES.get(path) or (
            Route("GET", Permission.NOTHING) if path in self._files else None
        )
        try:
            self._check(request, route)
            assert route is not None  # noqa: S101 - a path without a route was refused
            if path in self._files:
                kind = _KINDS[path[1:] or "index.html"]
                return _response(request, self._files[path], f"{kind}; charset=utf-8")
            query = _query_of(request, route)
            site = self._of(query.get("run"))
            answer: _Handler = getattr(site, f"_get_{path.rpartition('/')[2]}")
            return await answer(request, query)
        except _RefusedError as refused:
            headers = (
                {"Allow": route.method if route else "GET, POST"} if refused.status == 405 else {}
            )
            return _json(request, {"error": str(refused)}, refused.status, headers)
        except ArchiveError as error:
            return _json(request, {"error": str(error)}, 503)
        except ValueError as error:  # QueryError as well
            return _json(request, {"error": one_line(str(error))}, 400)
        except web.HTTPException as error:
            return _json(request, {"error": error.reason}, error.status)

    def _check(self, request: web.Request, route: Route | None) -> None:
        headers = request.headers
        asked = RequestFacts(
            method=request.method,
            path=request.path,
            host=headers.get("Host"),
            origin=headers.get("Origin"),
            fetch_site=headers.get("Sec-Fetch-Site"),
            authorization=headers.get("Authorization"),
            cookie=request.cookies.get(guard.cookie_name(self.access)),
        )
        judged = guard.judge(asked, route, self.access, self.unix_s())
        if isinstance(judged, RequestRefusal):
            raise _RefusedError(judged.status, judged.error)
        if judged is not Permission.NOTHING and isinstance(request.protocol, Trusting):
            request.protocol.trust()

    async def _get_healthz(self, request: web.Request, _query: Query) -> web.StreamResponse:
        return _json(request, {"ok": True})

    async def _get_metrics(self, request: web.Request, _query: Query) -> web.StreamResponse:
        frame = await self.hub.frame()
        commands = await asyncio.to_thread(count_commands, self.folder)
        content = await asyncio.to_thread(metrics.exposition, frame, self.hub.alerts, commands)
        return _response(request, content, metrics.CONTENT_TYPE)

    async def _get_run(self, request: web.Request, _query: Query) -> web.StreamResponse:
        frame = await self.hub.frame()
        return _json(request, await asyncio.to_thread(page_data.run_of, frame))

    async def _get_runs(self, request: web.Request, _query: Query) -> web.StreamResponse:
        listed = await asyncio.to_thread(list_runs, self.folder.parent)
        return _json(request, {"schema": SCHEMA, "runs": [run_object(one) for one in listed]})

    async def _get_jobs(self, request: web.Request, _query: Query) -> web.StreamResponse:
        queue = (await self.hub.frame()).queue
        control = self.access.with_control
        told = await asyncio.to_thread(page_data.jobs_of, queue, with_control=control)
        return _json(request, {"schema": SCHEMA, **told})

    async def _get_table(self, request: web.Request, query: Query) -> web.StreamResponse:
        """Answer with rows as in summary.json; the page follows the stream, which has cells."""
        view, frame = _view_of(query), await self.hub.frame()
        matching = await asyncio.to_thread(
            select, frame.snapshot.rows, parse(view.filter), view.order
        )
        rows = [row.to_dict() for row in matching[view.offset : view.offset + view.limit]]
        counts = {
            "total": len(frame.snapshot.rows),
            "matched": len(matching),
            "offset": view.offset,
        }
        return _json(request, {"schema": SCHEMA, "frame": frame.number, **counts, "rows": rows})

    async def _get_slot(self, request: web.Request, query: Query) -> web.StreamResponse:
        name, frame = _wanted(query, "name"), await self.hub.frame()
        spans = await asyncio.to_thread(history.state_spans, self.folder, name)
        events = await asyncio.to_thread(read_events, self.folder, slot=name, limit=_SLOT_EVENTS)
        sampled = await asyncio.to_thread(history.sampled_between, self.folder)
        printed = await asyncio.to_thread(last_lines, self.folder, name)
        values = page_data.slot_of(frame, name, spans, events, printed)
        if values is None:
            raise _RefusedError(404, f"there is no slot {name[:80]!r} in this run")
        return _json(request, {"schema": SCHEMA, **values, "sampled": sampled})

    async def _get_overview(self, request: web.Request, _query: Query) -> web.StreamResponse:
        """Answer with the last ten minutes of all slots together.

        One look serves all pages for some seconds.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s - self._overview[0] > _OVERVIEW_EVERY_S:
            sampled = await asyncio.to_thread(history.sampled_between, self.folder)
            last = 0.0 if sampled is None else sampled[1]
            between = (last - _OVERVIEW_S, last + 0.001)
            courses = await asyncio.to_thread(
                history.totals, self.folder, *between, _OVERVIEW_PARTS
            )
            overview = {
                "charts": page_data.totals_of(courses),
                "from": between[0],
                "to": between[1],
            }
            self._overview = (
                now_s,
                {**overview, "spans": [], "events": [], "utc_offset_s": page_data.offset_s(last)},
            )
        return _json(request, {"schema": SCHEMA, **self._overview[1]})

    async def _get_history(self, request: web.Request, query: Query) -> web.StreamResponse:
        slot, key = _wanted(query, "slot"), _wanted(query, "field")
        between = await asyncio.to_thread(history.sampled_between, self.folder) or (0.0, 1.0)
        begin, end = (
            _number(query, name, usual) for name, usual in zip(("from", "to"), between, strict=True)
        )
        count = _whole(query, "buckets", 300, 1, history.BUCKETS_MOST)
        courses = await asyncio.to_thread(
            history.buckets, self.folder, slot, [key], begin, end, count
        )
        return _json(
            request, {"schema": SCHEMA, "slot": slot, **page_data.history_of(key, courses[key])}
        )

    async def _get_events(self, request: web.Request, query: Query) -> web.StreamResponse:
        after = _whole(query, "after", 0, 0, 2**62)
        limit = _whole(query, "limit", 100, 1, _LIMIT_MOST)
        events = await asyncio.to_thread(
            read_events, self.folder, after=after, slot=query.get("slot"), limit=limit
        )
        return _json(
            request, {"schema": SCHEMA, "events": [page_data.event_of(event) for event in events]}
        )

    async def _get_stream(self, request: web.Request, query: Query) -> web.StreamResponse:
        if self.hub.is_full:
            raise _RefusedError(503, "too many pages follow this run; close some")
        is_packed = _takes_gzip(request)
        headers = {**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(
            headers=headers | ({"Content-Encoding": "gzip"} if is_packed else {})
        )
        comment = b": still here\n\n"
        async with self.hub.following(_view_of(query)) as page:
            await response.prepare(request)
            content = GZIP_BEGIN if is_packed else comment
            try:
                while True:
                    await asyncio.wait_for(response.write(content), _WRITING_MOST_S)
                    try:
                        event: StreamEvent = await asyncio.wait_for(
                            page.waiting.get(), COMMENT_EVERY_S
                        )
                        content = event.packed if is_packed else event.plain
                    except TimeoutError:
                        content = packed(comment) if is_packed else comment
            except (ConnectionError, TimeoutError):
                return response  # the page is gone, or has not read anything for long

    async def _get_login(self, request: web.Request, _query: Query) -> web.StreamResponse:
        body = await _body(request)
        code, now_s = body.get("code"), self.unix_s()
        if not isinstance(code, str) or not any(
            printed_code.redeem(code, now_s) for printed_code in self.codes
        ):
            raise _RefusedError(
                401,
                "this code was used, or is older than two minutes; ask `web` for another address",
            )
        level = Permission.CONTROL if self.access.with_control else Permission.READ
        response = _json(request, {"ok": True})
        response.set_cookie(
            guard.cookie_name(self.access),
            guard.cookie_value(level, self.access, now_s),
            max_age=int(guard.SESSION_S),
            path="/",
            httponly=True,
            samesite="Strict",
            secure=self.is_secure,
        )
        return response

    async def _get_commands(self, request: web.Request, _query: Query) -> web.StreamResponse:
        """Send a command to the head, which obeys an id that comes again only once."""
        body = await _body(request)
        identity, do, slots = body.get("id"), body.get("do"), body.get("slots")
        if not (
            isinstance(identity, str) and 0 < len(identity) <= _TEXT_MOST and isinstance(do, str)
        ):
            raise _RefusedError(400, "a command needs an id and what to do, as texts")
        if not (isinstance(slots, list) and slots and all(isinstance(slot, str) for slot in slots)):
            raise _RefusedError(400, "a command names its slots one by one, in a list")
        amount_bytes = _amount_bytes(body.get("amount"))
        sent = asyncio.to_thread(
            send, self.folder, do, slots, by="web", amount_bytes=amount_bytes, identity=identity
        )
        answer = await sent
        if not answer.ok:
            raise _RefusedError(409, answer.error or "the head has refused it")
        return _json(request, {"id": identity, "ok": True, "effect": answer.effect})

    async def _get_words(self, request: web.Request, _query: Query) -> web.StreamResponse:
        """Put words about jobs into the inbox of the queue; the page submits no job."""
        body = await _body(request)
        identity, do, jobs = body.get("id"), str(body.get("do")), body.get("jobs")
        queue = (await self.hub.frame()).queue
        known = set() if queue is None else {one.job.name for one in queue.standings}
        if not (isinstance(identity, str) and 0 < len(identity) <= _TEXT_MOST and do in {*Word}):
            raise _RefusedError(400, f"a word needs an id, and is one of {', '.join(Word)}")
        if not (isinstance(jobs, list) and jobs and all(map(known.__contains__, map(str, jobs)))):
            raise _RefusedError(400, "a word names jobs of the queue one by one, in a list")
        now_s = self.unix_s()
        words = [
            Said(at_s=now_s, id=f"{identity}-{name}", word=Word(do), job=name, by="web")
            for name in jobs
        ]
        try:
            await asyncio.to_thread(put, self.folder / QUEUE_NAME, words)
        except OSError as failure:
            raise _RefusedError(503, one_line(f"the inbox: {failure.strerror}")) from failure
        return _json(request, {"id": identity, "ok": True, "effect": f"{do}: {', '.join(jobs)}"})


def _amount_bytes(amount: object) -> int | None:
    """Return how many bytes a text such as "2.5 GiB" means."""
    try:
        return None if amount is None else parse_bytes(str(amount))
    except ValueError as failure:
        raise _RefusedError(400, str(failure)) from None


def _query_of(request: web.Request, route: Route) -> Query:
    """Return the query; a key that the path does not know, or that comes twice, is refused."""
    for key in request.query:
        if key not in route.keys:
            valid = ", ".join(route.keys) or "none"
            raise _RefusedError(
                400, one_line(f"the query has an unknown key {key[:40]!r}; valid: {valid}")
            )
        if len(request.query.getall(key)) > 1:
            raise _RefusedError(400, f"the query has {key} more than once")
    return request.query


def _view_of(query: Query) -> TableView:
    word = query.get("sort", "")
    name, is_reverse = word.removeprefix("-"), word.startswith("-")
    return TableView(
        filter=parse(query.get("filter", "")).text,
        order=order_of(name, reverse=is_reverse) if name else Order(None, is_reverse),
        offset=_whole(query, "offset", 0, 0, 10**6),
        limit=_whole(query, "limit", 200, 0, _LIMIT_MOST),
    )


def _wanted(query: Query, key: str) -> str:
    if not query.get(key):
        raise _RefusedError(400, f"the query lacks {key}")
    return query[key]


def _whole(query: Query, key: str, usual: int, least: int, most: int) -> int:
    text = query.get(key, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise _RefusedError(400, f"{key} must be a whole number from {least} to {most}")
    return int(text)


def _number(query: Query, key: str, usual: float) -> float:
    try:
        return float(query.get(key, usual))
    except ValueError:
        raise _RefusedError(400, f"{key} must be a Unix time in seconds") from None


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(SILENT_MOST_S):
            body = json.loads(await request.read())
    except TimeoutError:
        raise _RefusedError(408, f"the body did not come within {SILENT_MOST_S:.0f} s") from None
    except (ValueError, RecursionError, web.RequestPayloadError):
        body = None
    if not isinstance(body, dict):
        raise _RefusedError(400, "the body must be a JSON object")
    return body


def _takes_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "")


def _json(
    request: web.Request, value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    content = text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes an escape of JSON
    return _response(request, content, "application/json", status, headers)


def _response(
    request: web.Request,
    content: bytes,
    kind: str,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    more = {"Content-Type": kind, **(headers or {})}
    if len(content) >= _COMPRESSED_FROM_BYTES and _takes_gzip(request):
        content, more["Content-Encoding"] = gzip.compress(content, 6), "gzip"
    return web.Response(body=content, status=status, headers={**_HEADERS, **more})
