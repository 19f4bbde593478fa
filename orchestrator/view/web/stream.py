"""One look at the run for all pages: each page follows a view, and gets what has changed in it
since the last look.

Looks only while a page follows. A page that does not read misses frames and then gets a whole one,
so that it costs no memory. Knows nothing of HTTP but the form of an event (`server.py`).
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from orchestrator.errors import ArchiveError
from orchestrator.record.archive import StoredEvent
from orchestrator.record.follow import Frame
from orchestrator.view.alerts.badges import Badge, badges
from orchestrator.view.alerts.judge import AlertWatch, judge
from orchestrator.view.web.page_data import Table, View, event_of, table_of

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


class Event:
    """What is sent to pages, plain or compressed."""

    def __init__(self, kind: str, told: object, number: int | None = None) -> None:
        data = json.dumps(told, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        named = "" if number is None else f"id: {number}\n"
        self.plain = f"{named}event: {kind}\ndata: {data}\n\n".encode("utf-8", "backslashreplace")

    @cached_property
    def packed(self) -> bytes:
        """The event as a part of a gzip stream."""
        return packed(self.plain)


class Page:
    """One page that follows: what it is still to be sent."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Event] = asyncio.Queue(_WAITING_MOST)
        self.needs_all = True

    def put(self, event: Event) -> None:
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

    pages: set[Page] = field(default_factory=set)
    table: Table | None = None


class Hub:
    """Looks at the run for all pages that follow it, once a second, or less often if a look takes
    long.
    """

    def __init__(
        self, look: Callable[[], Frame], unix_s: Callable[[], float], *, with_control: bool
    ) -> None:
        self._look = look
        self._unix_s = unix_s
        self._alerts = AlertWatch()
        self._badges: tuple[Badge, ...] = ()
        self._with_control = with_control
        self._views: dict[View, _Followed] = {}
        self._frame: Frame | None = None
        self._looked_at_s = float("-inf")
        self._news: deque[StoredEvent] = deque(maxlen=_EVENTS_MOST)
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
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
        self._alerts, firing = judge(self._alerts, frame, self._unix_s())
        self._badges = badges(firing)
        return frame

    async def table(self, view: View) -> Table:
        """Return the table of a view as it is now; `ArchiveError` as for `frame`."""
        frame = await self.frame()
        return await asyncio.to_thread(
            table_of, frame, view, self._badges, with_control=self._with_control
        )

    @property
    def is_full(self) -> bool:
        """Whether no more pages can follow."""
        return sum(len(followed.pages) for followed in self._views.values()) >= PAGES_MOST

    @asynccontextmanager
    async def following(self, view: View) -> AsyncIterator[Page]:
        """Let a page follow a view; it gets the whole table first."""
        page, table = Page(), await self.table(view)
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
                self._tell_all(Event("gone", {"error": str(error)}))
            else:
                await self._show(frame)
            took_s = loop.time() - began_s
            pause_s = max(0.1, min(_PAUSE_MOST_S, max(LOOK_EVERY_S, took_s / SHARE_MOST)) - took_s)

    async def _show(self, frame: Frame) -> None:
        for view, followed in list(self._views.items()):
            table = await asyncio.to_thread(
                table_of, frame, view, self._badges, with_control=self._with_control
            )
            before, followed.table = followed.table, table
            changes = None if before is None else table.changes(before)
            event = None if not changes else Event("table", changes, frame.number)
            for page in followed.pages:
                page.needs_all |= changes is None
                self._send(page, table, event)
        if self._news:
            self._tell_all(Event("event", {"events": [event_of(event) for event in self._news]}))
            self._news.clear()

    def _send(self, page: Page, table: Table, changes: Event | None) -> None:
        """Send a page the changes, or the whole table where it has missed some."""
        if changes is not None and not page.needs_all:
            page.put(changes)
        if page.needs_all:
            page.needs_all = False
            page.put(Event("table", {"all": table.to_dict()}))

    def _tell_all(self, event: Event) -> None:
        for followed in self._views.values():
            for page in followed.pages:
                page.put(event)


def packed(content: bytes) -> bytes:
    """Return an event as a part of a gzip stream that any page can read from there on."""
    press = zlib.compressobj(wbits=-15)
    return press.compress(content) + press.flush(zlib.Z_FULL_FLUSH)
