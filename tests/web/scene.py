"""Runs for the tests of the page: stores with some history, as the head writes them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.record.model import STATES_WORST_FIRST, Row
from orchestrator.record.store import RunFacts, RunStore
from orchestrator.view.web.guard import COOKIE, Access
from orchestrator.view.web.server import SERVED, Site
from tests.factories import (
    FACTS,
    GIB,
    add_event,
    begun_run,
    event,
    make_row,
    make_snapshot,
    make_standing,
    record,
    store_queue,
)
from tests.scene import wait_for
from workers.keeper.processes import start_time
from workers.messages import WorkerState

SECONDS = 600
STARTED_UNIX_S = float(int(time.time()) - SECONDS)
"""The start of runs of this module, which still continue."""
REASONS = {
    "QUARANTINED": "5 processes died within 300 s: killed by signal 9",
    "BACKOFF": "out of memory at size 12288: 2.6 GiB wanted, 0.4 GiB allowed",
}


def facts_here(run_id: str, **changed: object) -> RunFacts:
    """Return the facts of a run whose head is this process."""
    pid = os.getpid()
    here = replace(
        FACTS, run_id=run_id, head_pid=pid, head_started=start_time(pid), host=socket.gethostname()
    )
    return replace(here, **changed)  # type: ignore[arg-type]  # of any field


def rows_at(second: float, slots: int) -> list[Row]:
    """Return rows that change each second; the first ones are in bad states."""
    states = [*STATES_WORST_FIRST[:10], *([WorkerState.RUNNING] * slots)]
    per_node = max(1, (slots + 1) // 2)
    made = []
    for index in range(slots):
        wave, node = math.sin(second / 40 + index), 1 + index // per_node
        state = states[(index * 7) % len(states)]
        gib = 1.9 + 0.5 * wave
        row = make_row(
            slot=f"pc{node}/{index % per_node}",
            node=f"pc{node}",
            gpu_name="NVIDIA GeForce RTX 3090" if node == 1 else "NVIDIA GeForce RTX 3070",
            gpu_uuid=f"GPU-{node}-{index % per_node // 7}",
            state=state,
            reason=REASONS.get(state.value, "steady"),
            tflops=round(9.6 + 2 * wave, 2) if state is WorkerState.RUNNING else None,
            allocated_bytes=int(gib * GIB),
            reserved_bytes=int((gib + 0.3) * GIB),
            temperature_c=round(68 + 8 * wave),
            power_w=round(270 + 40 * wave, 1),
            steps_ok=400 + int(second * 8),
            steps_oom=3 if state is WorkerState.BACKOFF else 0,
            oom_count=int(second / 100) if state is WorkerState.BACKOFF else 0,
        )
        made.append(row)
    return made


def put_turn(store: RunStore, second: float, rows: list[Row], **changed: object) -> None:
    """Write to the store as in one turn of the head."""
    store.slots(record(row=row) for row in rows)
    usual = {"started_at": STARTED_UNIX_S, "duration_s": 3600.0}
    snapshot = make_snapshot(*rows, elapsed_s=second, **{**usual, **changed})
    store.update(snapshot, at_once=True)
    store.commit()


def make_run(folder: Path, slots: int = 10, seconds: int = SECONDS) -> RunStore:
    """Make a run that continues: its store is open.

    It has samples of every tenth second, and some events.
    """
    store = begun_run(
        folder, facts_here(folder.name, duration_s=3600.0, started_at_unix_s=STARTED_UNIX_S)
    )
    for second in range(0, seconds + 1, 10):
        rows = rows_at(second, slots)
        if second == 0:
            for row in rows[:20]:
                add_state(store, 5, row.slot, "STARTING", "RUNNING", "opened its device")
                add_state(store, seconds - 120, row.slot, "RUNNING", row.state.value, row.reason)
        put_turn(store, second, rows)
    store.commit()
    return store


def with_queue(folder: Path, *names: str) -> Path:
    """Add a queue of jobs to the folder of a run."""
    store_queue(folder / QUEUE_NAME, *map(make_standing, names))
    return folder


def add_state(
    store: RunStore, second: float, slot: str, before: str, after: str, cause: str
) -> None:
    """Add a change of state to the events."""
    at = datetime.fromtimestamp(STARTED_UNIX_S + second, tz=UTC)
    told = event(name="state", from_state=before, to_state=after, cause=cause)
    add_event(store, {**told, "at": at.isoformat().replace("+00:00", "Z"), "slot": slot})


@contextmanager
def serving(
    folder: Path,
    *,
    port: int = 0,
    control: bool = False,
    run_id: str = "latest",
    runner: asyncio.Runner | None = None,
) -> Iterator[Server]:
    """Serve the page of the runs beside a folder while the test sends requests or waits."""
    access = Access(token="page" * 10, metrics_token="metrics" * 6, with_control=control)
    site = Site(folder.parent, access, run_id)
    with asyncio.Runner() if runner is None else nullcontext(runner) as loop:
        served = web.AppRunner(site.application(), **SERVED)

        async def begin() -> aiohttp.ClientSession:
            await served.setup()
            await web.TCPSite(served, "127.0.0.1", port, reuse_address=True).start()
            return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

        session = loop.run(begin())
        try:
            yield Server(site=site, port=served.addresses[0][1], session=session, runner=loop)
        finally:
            loop.run(session.close())
            loop.run(served.cleanup())


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server, and a client."""

    site: Site
    port: int
    session: aiohttp.ClientSession
    runner: asyncio.Runner

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """Return the address that `web` prints."""
        return f"{self.url}/?token={self.site.access.token}"

    def ask(self, path: str, token: str | None = None, **more: Any) -> Answer:
        """Send a request as a program does, with the page's token or another one; "" sends none."""
        token = self.site.access.token if token is None else token
        headers = {"Origin": self.url, "Cookie": f"{COOKIE}={token}"}
        headers["Authorization"] = f"Bearer {token}"

        async def asked() -> Answer:
            async with self.session.request(
                "POST" if more else "GET",
                f"{self.url}{path}",
                headers=headers,
                allow_redirects=False,
                **more,
            ) as answer:
                return Answer(answer.status, answer.headers, await answer.read())

        return self.runner.run(asked())

    def events(self) -> Iterator[tuple[str, Any]]:
        """Follow the stream; yield the kind and the data of each event."""
        headers = {"Cookie": f"{COOKIE}={self.site.access.token}"}

        async def lines(count: int) -> list[str]:
            return [(await answer.content.readline()).decode().strip() for _ in range(count)]

        async def open_stream() -> aiohttp.ClientResponse:
            return await self.session.get(f"{self.url}/api/v1/stream", headers=headers)

        answer = self.runner.run(open_stream())
        try:
            while True:
                kind, value, _ = self.runner.run(lines(3))
                yield kind.removeprefix("event: "), json.loads(value.removeprefix("data: "))
        finally:
            answer.close()

    def until(self, ask: Callable[[], Any], what: str) -> Any:
        """Serve until the answer of `ask` is true; return it."""
        return wait_for(ask, what, rest=self.rest)

    def rest(self, seconds: float) -> None:
        """Serve for some time."""
        self.runner.run(asyncio.sleep(seconds))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def told(self) -> Any:
        """Return the content, parsed as JSON."""
        return json.loads(self.content)
