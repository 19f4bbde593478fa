"""The page in a real browser: what a person sees, types, and may not do."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from orchestrator.control.queue import waiting
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.view.web.server import READ_EVERY_S
from tests.factories import add_event, make_row
from tests.web.browser import Browser, browser, needs_chromium
from tests.web.scene import Server, make_run, put_turn, rows_at, serving, with_queue
from workers.messages import WorkerState

pytestmark = needs_chromium

RUN_ID = "20261123-101500-aaaa"
NAMES = "[...document.querySelectorAll('#table tbody th')].map((cell) => cell.textContent)"
TITLES = """[...document.querySelectorAll("#table thead th")].filter((each) => each.offsetParent)
    .map((each) => each.querySelector("span")?.textContent)"""
HOSTILE = "<img src=x onerror=document.title='hit'>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN_ID


@contextmanager
def shown(folder: Path, **options: Any) -> Iterator[tuple[Server, Browser]]:
    """Serve a run, open the printed address in a browser, and wait for the table."""
    with serving(folder, **options) as server, browser(folder.parents[1], server.runner) as page:
        page.do("Page.navigate", url=server.address)
        page.until(f"{NAMES}.length > 0")
        yield server, page
        assert page.complaints() == []


def test_the_address_shows_the_run_and_asks_nothing_elsewhere(folder: Path) -> None:
    store = make_run(folder, slots=24)

    with shown(folder) as (server, page):
        page.until(f"{NAMES}.length === 24")
        assert page.js("document.cookie") == ""
        assert page.js("location.search") == ""
        # As in the terminal, the worst states are first, each with its reason.
        assert page.js(f"{NAMES}[0]") == "pc1/0"
        assert "QUARANTINED" in page.js("document.querySelector('#table tbody').innerText")
        # Opened details stay open while new documents arrive.
        page.js("document.querySelector('#alerts summary').click()")
        before = server.site.reads
        server.until(lambda: server.site.reads > before + 1, "looks")
        alert = page.js("document.querySelector('#alerts details[open]').innerText")
        assert alert.startswith("slot pc1/0 was given up: 5 processes died within 300 s")
        for view in ("cards", "events"):
            page.js(f"location.hash = 'view={view}'")
            page.until(
                "[...document.querySelectorAll('main tbody, #events tr')].some((line) => line.offsetParent)"
            )
        page.js("location.hash = 'view=slot&slot=pc1%2F0'")
        page.until("document.querySelectorAll('#charts canvas').length > 3")
        assert {urlsplit(url).netloc for url in page.requests()} == {urlsplit(server.url).netloc}

    store.end("good", 0, None, [])


def test_the_keyboard_sorts_filters_and_opens_a_slot(folder: Path) -> None:
    store = make_run(folder, slots=24)

    with shown(folder) as (server, page):
        for key in ("/", *"running"):
            page.key(key)
        page.until(f"{NAMES}.length === 16")
        page.key("Escape")
        for _ in range(2):  # moves from the column of slots to that of cards
            page.key(">")
        page.until("document.querySelector('[aria-sort]')?.textContent.startsWith('card')")
        assert (page.js(NAMES))[0].startswith("pc2")  # an RTX 3070 before an RTX 3090
        page.key("r")
        page.until(f"{NAMES}[0].startsWith('pc1')")
        assert "filter=running" in page.js("location.hash")
        page.key("0")
        page.until("!document.querySelector('[aria-sort]')")
        page.key("j")
        page.key("j")
        second = (page.js(NAMES))[1]
        assert page.js("document.activeElement.textContent") == second
        # The mark stays with its slot in later documents.
        put_turn(store, 700, rows_at(900, 24))
        before = server.site.reads
        server.until(lambda: server.site.reads > before + 1, "looks")
        assert page.js("document.activeElement.textContent") == second
        page.key("Enter", "\r")
        page.until(f"document.getElementById('slot').textContent === {json.dumps(second)}")
        page.until("document.querySelectorAll('#facts > div').length > 10")
        page.key("Escape")
        page.until("!document.getElementById('view-table').hidden")

    store.end("good", 0, None, [])


def test_columns_sort_by_what_is_shown_and_words_filter(folder: Path) -> None:
    store = make_run(folder, slots=1, seconds=10)
    backoff, reason = WorkerState.BACKOFF, "has two words"
    rows = [
        make_row(slot="pc1/0", temperature_c=60.0, tflops=None),
        make_row(slot="pc1/1", temperature_c=100.0, tflops=9.0, state=backoff),
        make_row(slot="pc2/0", node="pc2", temperature_c=90.0, tflops=10.0, reason=reason),
    ]
    put_turn(store, 20, rows)

    with shown(folder) as (_, page):
        for fragment, names in (
            ("sort=temperature", "pc1/1,pc2/0,pc1/0"),
            ("sort=-temperature", "pc1/0,pc2/0,pc1/1"),
            ("sort=tflops", "pc2/0,pc1/1,pc1/0"),
            ("filter=backoff", "pc1/1"),
            ("filter=pc1+!backoff", "pc1/0"),
            ("filter=two+words", "pc2/0"),
        ):
            page.js(f"location.hash = {json.dumps(fragment)}")
            page.until(f"{NAMES}.join() === {json.dumps(names)}")

    store.end("good", 0, None, [])


def test_hostile_names_reasons_and_errors_stay_text(folder: Path) -> None:
    store = make_run(folder, slots=3)
    slot = f"pc1/{HOSTILE}"
    told = {"at": "2023-11-14T22:20:00Z", "slot": slot}
    add_event(store, {**told, "event": "workload_error", "traceback": f"E: {HOSTILE}"})
    add_event(store, {**told, "event": HOSTILE, HOSTILE: HOSTILE})
    texts = dict.fromkeys(("reason", "gpu_name", "dtype", "policy", "gpu_uuid"), HOSTILE)
    row = make_row(slot=slot, tflops=float("inf"), **texts)
    put_turn(store, 601, [row], notices=(HOSTILE,), nodes_seen=(HOSTILE,))
    printed = folder / "output" / "pc1"
    printed.mkdir(parents=True)
    (printed / "0.log").write_text(f"{HOSTILE}\nepoch 1\n", encoding="utf-8")
    with_queue(folder, HOSTILE)

    with shown(folder) as (_, page):
        page.until("!document.getElementById('jobs-link').hidden")
        for fragment in ("view=events", "view=cards", "view=jobs", ""):
            page.js(f"location.hash = {json.dumps(fragment)}")
            page.until("document.querySelector('main').innerText.includes('<img src=x')")
        page.js(f"location.hash = 'view=slot&slot=' + encodeURIComponent({json.dumps(slot)})")
        page.until("document.getElementById('traceback').textContent.includes('<img')")
        page.js("location.hash = 'view=slot&slot=pc1%2F0'")
        page.until("document.getElementById('printed').textContent.includes('<img')")
        assert page.js("document.querySelectorAll('img').length") == 0
        assert page.js("document.title") != "hit"

    store.end("good", 0, None, [])


def test_the_page_outlives_its_server_and_the_head(folder: Path) -> None:
    store = make_run(folder, slots=4)
    mark = "document.getElementById('mark').textContent"
    seconds = itertools.count(611)

    def is_live() -> bool:
        put_turn(store, next(seconds), rows_at(611, 4))
        return bool(page.js(mark) == "live")

    with asyncio.Runner() as runner, browser(folder.parents[1], runner) as page:
        with serving(folder, runner=runner) as server:
            port = server.port
            page.do("Page.navigate", url=server.address)
            page.until(f"{NAMES}.length === 4")
            server.until(is_live, "live mark")
        page.until("!document.getElementById('offline').hidden")
        assert page.js(f"{NAMES}.length") == 4  # the last document stays
        with serving(folder, port=port, runner=runner):
            page.until("document.getElementById('offline').hidden")
            store.end("degraded", 1, None, [])
            page.until(f"{mark} === 'ended: degraded'")
        page.do("Network.clearBrowserCookies")
        with serving(folder, port=port, runner=runner):
            page.until("document.getElementById('problem').textContent.includes('open')")


def test_jobs_are_shown_marked_and_held(folder: Path) -> None:
    make_run(folder, slots=4)
    with_queue(folder, "lr-0", HOSTILE)
    with shown(folder, control=True) as (_, page):
        page.until("!document.getElementById('jobs-link').hidden")
        page.js("document.getElementById('jobs-link').click()")
        page.until(f"{NAMES}.includes('lr-0') && {NAMES}.length === 2")
        page.js("document.querySelector('[aria-label=lr-0]').click()")
        page.until("document.getElementById('job-words').offsetParent !== null")
        assert page.js("document.getElementById('slot-words').hidden")
        page.js("document.querySelector('[data-do=hold]').click()")
        page.js("document.getElementById('ask-yes').click()")
        page.until("document.getElementById('said').textContent === 'hold: lr-0'")
        assert page.js("document.title") != "hit"

    assert len(waiting(folder / QUEUE_NAME)) == 1


def test_a_hidden_page_is_sent_nothing(folder: Path) -> None:
    store = make_run(folder, slots=4)
    with shown(folder) as (server, page):
        page.js(
            "Object.defineProperty(document, 'hidden', { get: () => window.gone, configurable: true })"
        )

        def stands_still() -> bool:
            before = server.site.reads
            server.rest(READ_EVERY_S * 2)
            return server.site.reads == before

        for is_gone in (True, False):
            page.js(
                f"window.gone = {json.dumps(is_gone)};"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            server.until(lambda is_gone=is_gone: stands_still() == is_gone, "change")

    store.end("good", 0, None, [])


def test_the_page_fits_and_its_words_can_be_read(folder: Path) -> None:
    """Nothing is wider than the window, and each text has at least the AA contrast."""
    store = make_run(folder, slots=24)
    contrast = (Path(__file__).parent / "contrast.js").read_text()

    def fits(page: Browser, name: str, width: int, *, dark: bool) -> None:
        page.resize(width, 844 if width == 390 else 900, dark=dark)
        assert page.js("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.js(contrast) == []
        if name == "slots":
            assert {"slot", "state", "TFLOP/s"} <= set(page.js(TITLES))
            assert page.js("document.getElementById('table').offsetWidth") <= width
            assert "out of memory at size 12288" in page.js(
                "document.getElementById('table').innerText"
            )

    with shown(folder) as (_, page):
        for name, fragment in (
            ("slots", ""),
            ("slot", "view=slot&slot=pc1%2F6"),
            ("events", "view=events"),
        ):
            page.js(f"location.hash = {json.dumps(fragment)}")
            drawn = {"slots": "#overview canvas", "slot": "#charts canvas", "events": "#events tr"}
            page.until(f"document.querySelectorAll('{drawn[name]}').length > 1")
            for width, dark in itertools.product((390, 1280, 1920), (False, True)):
                fits(page, name, width, dark=dark)

    store.end("good", 0, None, [])
