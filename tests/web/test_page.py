"""The page in a real browser: what a person sees, types and is kept from."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from orchestrator.jobs import inbox
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, Journal
from orchestrator.jobs.model import Submitted
from orchestrator.view import html_report
from tests.factories import make_job, make_row
from tests.scene import ROOT
from tests.web.browser import Browser, browser, needs_chromium, until
from tests.web.scene import Server, make_run, put_turn, rows_at, serving

pytestmark = needs_chromium

RUN_ID = "20261123-101500-aaaa"
NAMES = "[...document.querySelectorAll('#table tbody th a')].map((link) => link.textContent)"
SHOWN_IN_ROWS = """(() => {
  const seen = (node) => node.getClientRects().length > 0;
  const shown = [...document.querySelectorAll("#titles th")].filter(seen);
  const titles = shown.map((each) => each.querySelector("span")?.textContent);
  const at = [...document.querySelectorAll("#titles th")].findIndex((each) => each.textContent === "state");
  const states = [...document.querySelectorAll("#table tbody tr:first-child")].map((row) => row.children[at]);
  return {
    titles, text: document.getElementById("table").innerText,
    states_without_tone: states.filter((each) => !each.dataset.tone).length,
  };
})()"""
HOSTILE = "<img src=x onerror=document.title='hit'>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN_ID


async def opened(page: Browser, server: Server, fragment: str = "") -> None:
    """Log in as a person does, and wait for the table."""
    await page.do("Page.navigate", url=f"{server.url}/#code={server.code()}")
    await page.until(f"{NAMES}.length > 0")
    if fragment:
        await page.js(f"location.hash = {json.dumps(fragment)}")


def test_one_login_shows_the_table_and_asks_nothing_elsewhere(folder: Path, tmp_path: Path) -> None:
    store = make_run(folder, slots=24)

    async def scene() -> None:
        async with serving(folder) as server, browser(tmp_path) as page:
            await page.do("Page.navigate", url=f"{server.url}/")
            await page.until("!document.getElementById('login').hidden")
            code = server.code()
            await page.js(f"document.getElementById('code').value = '{server.url}/#code={code}'")
            await page.js("document.querySelector('#login button').click()")
            await page.until(f"{NAMES}.length === 24")
            assert await page.js("document.cookie") == ""
            assert "code" not in await page.js("location.href")
            assert not server.site.codes[0].redeem(code, server.site.unix_s())
            # As in the terminal: the worst first, each with its reason.
            assert await page.js(f"{NAMES}[0]") == "pc1/0"
            assert "QUARANTINED" in await page.js(
                "document.querySelector('#table tbody').innerText"
            )
            # Also what fires; what was opened stays open while frames come.
            await page.js("document.querySelector('#alerts summary').click()")
            before = server.site.hub.looks
            await until(lambda: asyncio.sleep(0, server.site.hub.looks > before + 1), "looks")
            alert = await page.js("document.querySelector('#alerts details[open]').innerText")
            assert alert.startswith("slot pc1/0 was given up: 5 processes died within 300 s")
            assert "was given up" in alert
            await page.do("Page.reload")
            await page.until(f"{NAMES}.length === 24")
            for view in ("slot&slot=pc1%2F0", "cards", "events"):
                await page.js(f"location.hash = 'view={view}'")
                await page.until(
                    "[...document.querySelectorAll('main tr, figure')].some((line) => line.offsetParent)"
                )
            await page.js("location.hash = 'view=slot&slot=pc1%2F0'")
            await page.until("document.querySelectorAll('canvas').length > 1")
            hosts = {urlsplit(url).netloc for url in page.requests()}
            assert hosts == {urlsplit(server.url).netloc}
            assert page.complaints() == []

    asyncio.run(scene())
    store.end("good", 0, None, [])


def test_the_keyboard_sorts_filters_and_opens_a_slot(folder: Path, tmp_path: Path) -> None:
    store = make_run(folder, slots=24)

    async def scene() -> None:
        async with serving(folder) as server, browser(tmp_path) as page:
            await opened(page, server)
            for key in ("/", *"state:running"):
                await page.key(key)
            await page.until(f"{NAMES}.length === 16")
            await page.key("Escape")
            for _ in range(2):  # past the slot to its card
                await page.key(">")
            await page.until(
                "document.querySelector('[aria-sort]')?.textContent.startsWith('card')"
            )
            assert (await page.js(NAMES))[0].startswith("pc2")  # an RTX 3070 before an RTX 3090
            await page.key("r")
            await page.until("document.querySelector('[aria-sort=ascending]') !== null")
            await page.until(f"{NAMES}[0].startsWith('pc1')")
            assert "filter=state%3Arunning" in await page.js("location.hash")
            await page.key("0")
            await page.until("!document.querySelector('[aria-sort]')")
            await page.key("j")
            await page.key("j")
            second = (await page.js(NAMES))[1]
            assert await page.js("document.activeElement.textContent") == second
            # The mark stays with its slot, whatever the next frames bring.
            put_turn(store, 700, rows_at(900, 24))
            before = server.site.hub.looks
            await until(lambda: asyncio.sleep(0, server.site.hub.looks > before + 1), "looks")
            assert await page.js("document.activeElement.textContent") == second
            await page.key("Enter", "\r")
            await page.until(
                f"document.getElementById('slot').textContent === {json.dumps(second)}"
            )
            await page.until("document.querySelectorAll('#facts > div').length > 10")
            await page.key("Escape")
            await page.until(f"{NAMES}.length === 16")

    asyncio.run(scene())
    store.end("good", 0, None, [])


def test_another_run_is_chosen_on_the_page(folder: Path, tmp_path: Path) -> None:
    make_run(folder, slots=6, seconds=60)
    older = folder.parent / "20261122-101500-bbbb"
    make_run(older, slots=3, seconds=60, varied=False).end("good", 0, None, [])
    printed = older / "output" / "pc1"
    printed.mkdir(parents=True)
    (printed / "1.log").write_text(f"{HOSTILE}\nepoch 1\n", encoding="utf-8")
    assert html_report.frozen(older)["slots"]["pc1/1"]["printed"] == f"{HOSTILE}\nepoch 1"

    async def scene() -> None:
        async with serving(folder) as server, browser(tmp_path) as page:
            await opened(page, server)
            await page.until("document.querySelectorAll('#chooser option').length === 2")
            await page.js(
                f"(() => {{ const all = document.getElementById('chooser'); all.value = '{older.name}'; "
                "all.dispatchEvent(new Event('change')); })()"
            )
            await page.until(
                f"{NAMES}.length === 3 && document.title === 'ended: good · {older.name}'"
            )
            await page.js("location.hash = location.hash + '&view=slot&slot=pc1%2F1'")
            printed = await page.until("document.getElementById('printed').textContent")
            assert printed.splitlines() == [HOSTILE, "epoch 1"]
            assert await page.js("document.querySelectorAll('#printed *').length") == 0
            assert page.complaints() == []

    asyncio.run(scene())


def test_hostile_names_reasons_and_errors_stay_text(folder: Path, tmp_path: Path) -> None:
    store = make_run(folder, slots=3)
    slot = f"pc1/{HOSTILE}"
    store.event(
        {
            "at": "2023-11-14T22:20:00Z",
            "event": "workload_error",
            "slot": slot,
            "traceback": f"E: {HOSTILE}",
        }
    )
    store.event({"at": "2023-11-14T22:20:00Z", "event": HOSTILE, "slot": slot, HOSTILE: HOSTILE})
    row = make_row(
        slot=slot, reason=HOSTILE, gpu_name=HOSTILE, dtype=HOSTILE, policy=HOSTILE, gpu_uuid=HOSTILE
    )
    put_turn(store, 601, [row], notices=(HOSTILE,), nodes_seen=(HOSTILE,))

    async def scene() -> None:
        async with serving(folder) as server, browser(tmp_path) as page:
            await opened(page, server)
            for fragment in (
                "view=events",
                "view=cards",
                f"view=slot&slot={slot.replace('&', '%26')}",
                "",
            ):
                await page.js(f"location.hash = {json.dumps(fragment)}")
                await page.until("document.body.innerText.includes('<img src=x')")
            await page.js(
                f"location.hash = 'view=slot&slot=' + encodeURIComponent({json.dumps(slot)})"
            )
            await page.until("document.getElementById('traceback').textContent.includes('<img')")
            assert await page.js("document.querySelectorAll('img').length") == 0
            assert await page.js("document.title") != "hit"
            assert page.complaints() == []

    asyncio.run(scene())
    store.end("good", 0, None, [])


def test_the_page_goes_on_after_the_server_and_after_the_head(folder: Path, tmp_path: Path) -> None:
    store = make_run(folder, slots=4)
    mark = "document.getElementById('mark').textContent"

    async def scene() -> None:
        async with browser(tmp_path) as page:
            async with serving(folder) as server:
                port = server.site.access.port
                await opened(page, server)
                put_turn(store, 611, rows_at(611, 4))
                await page.until(f"{mark} === 'live'")
            await page.until("!document.getElementById('offline').hidden")
            assert await page.js(f"{NAMES}.length") == 4  # the last picture stays
            async with serving(folder, port=port):
                await page.until("document.getElementById('offline').hidden")
                store.end("degraded", 1, None, [])
                await page.until(f"{mark} === 'ended: degraded'")

    asyncio.run(scene())


def test_jobs_are_shown_marked_and_held(folder: Path, tmp_path: Path) -> None:
    make_run(folder, slots=4)
    (folder / QUEUE_NAME).mkdir()
    journal = Journal(folder / QUEUE_NAME / JOURNAL_NAME)
    journal.append([Submitted(at_s=0.0, job=make_job(name)) for name in ("lr-0", HOSTILE)])
    journal.close()

    async def scene() -> None:
        async with serving(folder, control=True) as server, browser(tmp_path) as page:
            await opened(page, server)
            await page.until("!document.getElementById('jobs-link').hidden")
            await page.js("document.getElementById('jobs-link').click()")
            await page.until("document.querySelectorAll('#jobs tbody tr').length === 2")
            assert "lr-0" in await page.js("document.getElementById('jobs').innerText")
            assert await page.js("document.title") != "hit"
            await page.js("document.querySelector('#jobs [aria-label=lr-0]').click()")
            await page.until("document.getElementById('job-words').getClientRects().length > 0")
            assert await page.js("document.getElementById('slot-words').hidden")
            await page.js("document.querySelector('[data-do=hold]').click()")
            await page.js("document.getElementById('ask-yes').click()")
            await page.until("!document.getElementById('said').hidden")
            assert await page.js("document.getElementById('said').textContent") == "hold: lr-0"

    asyncio.run(scene())
    assert len([*inbox.waiting(folder / QUEUE_NAME)]) == 1


def test_a_hidden_page_is_sent_nothing(folder: Path, tmp_path: Path) -> None:
    store = make_run(folder, slots=4)

    async def scene() -> None:
        async with serving(folder) as server, browser(tmp_path) as page:
            await opened(page, server)
            await page.js(
                "Object.defineProperty(document, 'hidden', { get: () => window.gone, configurable: true })"
            )
            for is_gone in (True, False):
                await page.js(
                    f"window.gone = {json.dumps(is_gone)}; document.dispatchEvent(new Event('visibilitychange'))"
                )
                await until(
                    lambda is_gone=is_gone: asyncio.sleep(
                        0, bool(server.site.hub._views) != is_gone
                    ),
                    "change",
                )

    asyncio.run(scene())
    store.end("good", 0, None, [])


def test_the_same_page_runs_from_one_file(folder: Path, tmp_path: Path) -> None:
    make_run(folder, slots=24).end("good", 0, None, [])
    page_text = html_report.html(html_report.frozen(folder), "one file")
    (tmp_path / "run.html").write_text(page_text)

    async def scene() -> None:
        async with browser(tmp_path) as page:
            await page.do("Page.navigate", url=(tmp_path / "run.html").as_uri())
            await page.until(f"{NAMES}.length === 24")
            assert await page.js("document.getElementById('mark').textContent") == "ended: good"
            await page.until("document.querySelectorAll('#overview canvas').length > 0")
            sorted_names = []
            for sort in ("tflops", "-tflops"):
                await page.js(f"location.hash = 'sort={sort}&filter=slot:pc1'")
                await page.until("document.querySelector('[aria-sort]') !== null")
                sorted_names.append(await page.js(NAMES))
            first, turned = sorted_names
            assert len(first) == 12
            known = sum(row.tflops is not None for row in rows_at(0, 24) if row.node == "pc1")
            assert first[:known] == turned[:known][::-1]
            assert first[known:] == turned[known:] != []  # the unknown ones stay last
            await page.js("location.hash = 'filter=state:backoff'")
            await page.until(f"{NAMES}.length === 1")
            await page.js("location.hash = 'view=slot&slot=pc1%2F6'")
            await page.until("document.querySelectorAll('canvas').length > 1")
            await page.js("location.hash = 'view=cards'")
            await page.until("document.querySelectorAll('#cards tbody tr').length > 1")
            assert {urlsplit(url).scheme for url in page.requests()} == {"file"}
            assert page.complaints() == []

    asyncio.run(scene())


def test_the_page_fits_and_its_words_can_be_read(folder: Path, tmp_path: Path) -> None:
    """Nothing is wider than the window, and each text has the contrast of AA."""
    store = make_run(folder, slots=24)
    tests = (Path(__file__).parent / "contrast.js").read_text()

    async def fits(page: Browser, name: str, width: int, *, dark: bool) -> None:
        picture = ROOT / "docs" / "pictures" / f"web-{name}-{width}.png"
        is_shown = (name, width, dark) in {
            ("table", 390, False), ("table", 1280, False), ("table", 1920, True), ("slot", 1280, False),
        }  # fmt: skip
        if KEEP:
            put_turn(store, 601 + len(name), rows_at(601 + len(name), 24))
            await page.until("document.getElementById('mark').textContent === 'live'")
        height = 844 if width == 390 else 900
        await page.resize(width, height, dark=dark, to=picture if KEEP and is_shown else None)
        assert await page.js("document.documentElement.scrollWidth - innerWidth") <= 0
        assert await page.js(tests) == []
        if name == "table":
            shown = await page.js(SHOWN_IN_ROWS)
            assert {"slot", "state", "OOM"} <= set(shown["titles"]), shown
            assert "out of memory at size 12288" in shown["text"]
            assert shown["states_without_tone"] == 0

    async def scene() -> None:
        async with serving(folder) as server, browser(tmp_path) as page:
            await opened(page, server)
            for name, fragment in (
                ("table", ""),
                ("slot", "view=slot&slot=pc1%2F6"),
                ("events", "view=events"),
            ):
                await page.js(f"location.hash = {json.dumps(fragment)}")
                await page.until(f"!document.getElementById('view-{name}').hidden")
                if name == "slot":
                    await page.until("document.querySelectorAll('canvas').length > 1")
                if name == "table":
                    await page.until("document.querySelectorAll('#overview canvas').length > 0")
                for width, dark in itertools.product((390, 1280, 1920), (False, True)):
                    await fits(page, name, width, dark=dark)

    asyncio.run(scene())
    store.end("good", 0, None, [])


KEEP = False
"""Set by hand to take new pictures for the documents."""
