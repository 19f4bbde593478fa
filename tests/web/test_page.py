"""The page in a real browser: what a person sees, types and is kept from."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from orchestrator.jobs import inbox
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, Journal
from orchestrator.jobs.model import Submitted
from orchestrator.view.web.looks import LOOK_EVERY_S
from tests.factories import GIB, make_job, make_row
from tests.scene import ROOT
from tests.web.browser import Browser, browser, needs_chromium, until
from tests.web.scene import Server, make_run, put_turn, rows_at, serving
from workers.messages import WorkerState

pytestmark = needs_chromium

RUN_ID = "20261123-101500-aaaa"
OLDER = "20261122-101500-bbbb"
NEWER = "20261124-101500-cccc"
NAMES = "[...document.querySelectorAll('#table tbody th')].map((cell) => cell.textContent)"
TITLES = """[...document.querySelectorAll("#table thead th")].filter((each) => each.offsetParent)
    .map((each) => each.querySelector("span")?.textContent)"""
HOSTILE = "<img src=x onerror=document.title='hit'>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN_ID


def shown(
    folder: Path,
    scene: Callable[[Server, Browser], Coroutine[Any, Any, None]],
    fragment: str = "",
    **options: Any,
) -> None:
    """Serve a run, open the printed address in a browser, and wait for the table."""

    async def served() -> None:
        async with serving(folder, **options) as server, browser(folder.parent.parent) as page:
            await page.do("Page.navigate", url=server.address)
            await page.until(f"{NAMES}.length > 0")
            await page.js(f"location.hash = {json.dumps(fragment)}")
            await scene(server, page)
            assert page.complaints() == []

    asyncio.run(served())


def test_the_address_shows_the_run_and_asks_nothing_elsewhere(folder: Path) -> None:
    store = make_run(folder, slots=24)

    async def scene(server: Server, page: Browser) -> None:
        await page.until(f"{NAMES}.length === 24")
        assert await page.js("document.cookie") == ""
        assert await page.js("location.search") == ""
        # As in the terminal: the worst first, each with its reason.
        assert await page.js(f"{NAMES}[0]") == "pc1/0"
        assert "QUARANTINED" in await page.js("document.querySelector('#table tbody').innerText")
        # What was opened stays open while documents come.
        await page.js("document.querySelector('#alerts summary').click()")
        before = server.site.looks.count
        await until(lambda: asyncio.sleep(0, server.site.looks.count > before + 1), "looks")
        alert = await page.js("document.querySelector('#alerts details[open]').innerText")
        assert alert.startswith("slot pc1/0 was given up: 5 processes died within 300 s")
        for view in ("cards", "runs", "events"):
            await page.js(f"location.hash = 'view={view}'")
            await page.until(
                "[...document.querySelectorAll('main tbody, #events tr')].some((line) => line.offsetParent)"
            )
        await page.js("location.hash = 'view=slot&slot=pc1%2F0'")
        await page.until("document.querySelectorAll('#charts canvas').length > 3")
        assert {urlsplit(url).netloc for url in page.requests()} == {urlsplit(server.url).netloc}

    shown(folder, scene)
    store.end("good", 0, None, [])


def test_the_keyboard_sorts_filters_and_opens_a_slot(folder: Path) -> None:
    store = make_run(folder, slots=24)

    async def scene(server: Server, page: Browser) -> None:
        for key in ("/", *"state:running"):
            await page.key(key)
        await page.until(f"{NAMES}.length === 16")
        await page.key("Escape")
        for _ in range(2):  # past the slot to its card
            await page.key(">")
        await page.until("document.querySelector('[aria-sort]')?.textContent.startsWith('card')")
        assert (await page.js(NAMES))[0].startswith("pc2")  # an RTX 3070 before an RTX 3090
        await page.key("r")
        await page.until(f"{NAMES}[0].startsWith('pc1')")
        assert "filter=state%3Arunning" in await page.js("location.hash")
        await page.key("0")
        await page.until("!document.querySelector('[aria-sort]')")
        await page.key("j")
        await page.key("j")
        second = (await page.js(NAMES))[1]
        assert await page.js("document.activeElement.textContent") == second
        # The mark stays with its slot, whatever the next documents bring.
        put_turn(store, 700, rows_at(900, 24))
        before = server.site.looks.count
        await until(lambda: asyncio.sleep(0, server.site.looks.count > before + 1), "looks")
        assert await page.js("document.activeElement.textContent") == second
        await page.key("Enter", "\r")
        await page.until(f"document.getElementById('slot').textContent === {json.dumps(second)}")
        await page.until("document.querySelectorAll('#facts > div').length > 10")
        await page.key("Escape")
        await page.until("!document.getElementById('view-table').hidden")

    shown(folder, scene)
    store.end("good", 0, None, [])


def test_a_filter_compares_what_is_shown(folder: Path) -> None:
    store = make_run(folder, slots=1, seconds=10)
    backoff, reason = WorkerState.BACKOFF, "has two words"
    rows = [
        make_row(slot="pc1/0", temperature_c=60.0, allocated_bytes=GIB),
        make_row(slot="pc1/1", temperature_c=75.0, allocated_bytes=2 * GIB, state=backoff),
        make_row(slot="pc1/2", temperature_c=76.0, allocated_bytes=3 * GIB),
        make_row(slot="pc2/0", temperature_c=90.0, allocated_bytes=None, reason=reason),
    ]
    put_turn(store, 20, rows)

    async def scene(_server: Server, page: Browser) -> None:
        for terms, names in (
            ("state:backoff", "pc1/1"),
            ("pc1 !state:backoff", "pc1/0,pc1/2"),
            ("temp>75", "pc1/2,pc2/0"),
            ("allocated<=2GiB", "pc1/0,pc1/1"),
            ('reason:"two words"', "pc2/0"),
        ):
            await page.js(f"location.hash = 'filter=' + encodeURIComponent({json.dumps(terms)})")
            await page.until(f"{NAMES}.sort().join() === {json.dumps(names)}")
        await page.js("location.hash = 'filter=colour>5'")
        await page.until("document.getElementById('problem').textContent.includes('colour')")

    shown(folder, scene)
    store.end("good", 0, None, [])


def test_the_page_follows_the_newest_run_unless_told(folder: Path) -> None:
    make_run(folder, slots=6, seconds=60)
    make_run(folder.parent / OLDER, slots=3, seconds=60).end("good", 0, None, [])

    async def scene(_server: Server, page: Browser) -> None:
        await page.js("location.hash = 'view=runs'")
        await page.until(f"{NAMES}.length === 2")
        await page.js("document.querySelector('#table tbody:last-child a').click()")
        await page.until(f"{NAMES}.length === 3 && document.title === 'ended: good · {OLDER}'")
        await page.js("document.getElementById('newest').click()")
        await page.until(f"{NAMES}.length === 6")
        make_run(folder.parent / NEWER, slots=2, seconds=10)
        await page.until(f"document.getElementById('run').textContent === '{NEWER}'")

    shown(folder, scene)


def test_hostile_names_reasons_and_errors_stay_text(folder: Path) -> None:
    store = make_run(folder, slots=3)
    slot = f"pc1/{HOSTILE}"
    told = {"at": "2023-11-14T22:20:00Z", "slot": slot}
    store.event({**told, "event": "workload_error", "traceback": f"E: {HOSTILE}"})
    store.event({**told, "event": HOSTILE, HOSTILE: HOSTILE})
    texts = dict.fromkeys(("reason", "gpu_name", "dtype", "policy", "gpu_uuid"), HOSTILE)
    row = make_row(slot=slot, tflops=float("inf"), **texts)
    put_turn(store, 601, [row], notices=(HOSTILE,), nodes_seen=(HOSTILE,))
    printed = folder / "output" / "pc1"
    printed.mkdir(parents=True)
    (printed / "0.log").write_text(f"{HOSTILE}\nepoch 1\n", encoding="utf-8")

    async def scene(_server: Server, page: Browser) -> None:
        for fragment in ("view=events", "view=cards", ""):
            await page.js(f"location.hash = {json.dumps(fragment)}")
            await page.until("document.querySelector('main').innerText.includes('<img src=x')")
        await page.js(f"location.hash = 'view=slot&slot=' + encodeURIComponent({json.dumps(slot)})")
        await page.until("document.getElementById('traceback').textContent.includes('<img')")
        await page.js("location.hash = 'view=slot&slot=pc1%2F0'")
        await page.until("document.getElementById('printed').textContent.includes('<img')")
        assert await page.js("document.querySelectorAll('img').length") == 0
        assert await page.js("document.title") != "hit"

    shown(folder, scene)
    store.end("good", 0, None, [])


def test_the_page_outlives_its_server_and_the_head(folder: Path) -> None:
    store = make_run(folder, slots=4)
    mark = "document.getElementById('mark').textContent"
    seconds = itertools.count(611)

    async def is_live(page: Browser) -> bool:
        put_turn(store, next(seconds), rows_at(611, 4))
        return bool(await page.js(mark) == "live")

    async def scene() -> None:
        async with browser(folder.parent.parent) as page:
            async with serving(folder) as server:
                port = server.port
                await page.do("Page.navigate", url=server.address)
                await page.until(f"{NAMES}.length === 4")
                await until(lambda: is_live(page), "live mark")
            await page.until("!document.getElementById('offline').hidden")
            assert await page.js(f"{NAMES}.length") == 4  # the last picture stays
            async with serving(folder, port=port):
                await page.until("document.getElementById('offline').hidden")
                store.end("degraded", 1, None, [])
                await page.until(f"{mark} === 'ended: degraded'")
            await page.do("Network.clearBrowserCookies")
            async with serving(folder, port=port):
                await page.until("document.getElementById('problem').textContent.includes('open')")

    asyncio.run(scene())


def test_jobs_are_shown_marked_and_held(folder: Path) -> None:
    make_run(folder, slots=4)
    (folder / QUEUE_NAME).mkdir()
    journal = Journal(folder / QUEUE_NAME / JOURNAL_NAME)
    journal.append([Submitted(at_s=0.0, job=make_job(name)) for name in ("lr-0", HOSTILE)])
    journal.close()

    async def scene(_server: Server, page: Browser) -> None:
        await page.until("!document.getElementById('jobs-link').hidden")
        await page.js("document.getElementById('jobs-link').click()")
        await page.until(f"{NAMES}.includes('lr-0') && {NAMES}.length === 2")
        await page.js("document.querySelector('[aria-label=lr-0]').click()")
        await page.until("document.getElementById('job-words').offsetParent !== null")
        assert await page.js("document.getElementById('slot-words').hidden")
        await page.js("document.querySelector('[data-do=hold]').click()")
        await page.js("document.getElementById('ask-yes').click()")
        await page.until("document.getElementById('said').textContent === 'hold: lr-0'")
        assert await page.js("document.title") != "hit"

    shown(folder, scene, control=True)
    assert len([*inbox.waiting(folder / QUEUE_NAME)]) == 1


def test_a_hidden_page_is_sent_nothing(folder: Path) -> None:
    store = make_run(folder, slots=4)

    async def scene(server: Server, page: Browser) -> None:
        await page.js(
            "Object.defineProperty(document, 'hidden', { get: () => window.gone, configurable: true })"
        )
        counts = [0]

        async def stands_still(is_gone: bool) -> bool:
            await asyncio.sleep(LOOK_EVERY_S * 2)
            counts.append(server.site.looks.count)
            return (counts[-1] == counts[-2]) == is_gone

        for is_gone in (True, False):
            await page.js(
                f"window.gone = {json.dumps(is_gone)};"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            await until(lambda is_gone=is_gone: stands_still(is_gone), "change")

    shown(folder, scene)
    store.end("good", 0, None, [])


def test_the_page_fits_and_its_words_can_be_read(folder: Path) -> None:
    """Nothing is wider than the window, and each text has the contrast of AA."""
    store = make_run(folder, slots=24)
    contrast = (Path(__file__).parent / "contrast.js").read_text()

    async def fits(page: Browser, name: str, width: int, *, dark: bool) -> None:
        picture = ROOT / "docs" / "pictures" / f"web-{name}-{width}.png"
        is_shown = (name, width, dark) in {
            ("slots", 390, False), ("slots", 1280, False), ("slots", 1920, True), ("slot", 1280, False),
        }  # fmt: skip
        if KEEP:
            put_turn(store, 601 + len(name), rows_at(601 + len(name), 24))
            await page.until("document.getElementById('mark').textContent === 'live'")
        height = 844 if width == 390 else 900
        await page.resize(width, height, dark=dark, to=picture if KEEP and is_shown else None)
        assert await page.js("document.documentElement.scrollWidth - innerWidth") <= 0
        assert await page.js(contrast) == []
        if name == "slots":
            assert {"slot", "state", "TFLOP/s"} <= set(await page.js(TITLES))
            assert await page.js("document.getElementById('table').offsetWidth") <= width
            assert "out of memory at size 12288" in await page.js(
                "document.getElementById('table').innerText"
            )

    async def scene(_server: Server, page: Browser) -> None:
        for name, fragment in (
            ("slots", ""),
            ("slot", "view=slot&slot=pc1%2F6"),
            ("events", "view=events"),
        ):
            await page.js(f"location.hash = {json.dumps(fragment)}")
            drawn = {"slots": "#overview canvas", "slot": "#charts canvas", "events": "#events tr"}
            await page.until(f"document.querySelectorAll('{drawn[name]}').length > 1")
            for width, dark in itertools.product((390, 1280, 1920), (False, True)):
                await fits(page, name, width, dark=dark)

    shown(folder, scene)
    store.end("good", 0, None, [])


KEEP = False
"""Set by hand to take new pictures for the documents."""
