"""A run in one file: what is frozen, and the file in a real browser, where it asks for nothing."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.html_report import facts, page
from orchestrator.watch.records import STORE_NAME
from orchestrator.watch.store import RunStore
from tests.watch.scene import FACTS, event, make_row, make_snapshot, record
from tests.web.browser import browser, needs_chromium

HOSTILE = "</script><script>window.evil=1</script><img src=x onerror='window.evil=2'>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run of two slots and 60 s, with texts that want to be code."""
    place = tmp_path / "runs" / FACTS.run_id
    place.mkdir(parents=True)
    store = RunStore(place / STORE_NAME)
    store.begin(FACTS)
    for second in range(60):
        rows = [
            make_row(slot=f"pc1/{index}", tflops=9 + second / 60, temperature_c=50.0 + second, reason=HOSTILE)
            for index in range(2)
        ]
        store.slots(record(row.slot, reason=row.reason, row=row.to_dict()) for row in rows)
        store.update(make_snapshot(*rows, elapsed_s=float(second), notices=(HOSTILE,)))
    store.event({**event(name="state", from_state="RUNNING", to_state="BACKOFF", cause=HOSTILE), "slot": "pc1/0"})
    store.event({**event(name="workload_error", traceback=f"Traceback\n{HOSTILE}"), "slot": "pc1/0"})
    store.end("good", 0, None, ())
    return place


def test_what_is_frozen_is_the_last_picture_and_the_course_of_what_was_sampled(folder: Path) -> None:
    told = facts.frozen(folder)
    assert [row["slot"] for row in told["table"]["rows"]] == ["pc1/0", "pc1/1"]
    heat = told["history"]["pc1/1"]["temperature_c"]
    assert len(told["times"]) == len(heat["mean"]) == facts.parts_for(1)
    assert [value for value in heat["mean"] if value is not None] == [50.0 + second for second in range(60)]
    assert "loss" not in told["history"]["pc1/1"], "nothing was trained"
    assert [key for key in told["slots"]["pc1/0"]["charts"] if key not in told["history"]["pc1/0"]] == []
    assert {row["event"] for row in told["events"]} == {"state", "workload error"}


def test_courses_are_thinned_out_until_all_of_them_fit() -> None:
    assert [facts.parts_for(courses) for courses in (0, 10, 1_000, 6_000, 60_000)] == [300, 300, 133, 22, 16]


def test_the_file_is_written_whole_or_refused_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    where = ["--run-dir", str(folder.parent)]
    done = CliRunner().invoke(app, ["report", "--html", str(path), *where])
    assert (done.exit_code, done.output.strip()) == (0, str(path))
    text = path.read_text(encoding="utf-8")
    assert text.count("</script>") == 2, "the data and the code: no text ends either"
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    data = re.search(r'id="frozen">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["slots"]["pc1/0"]["reason"] == HOSTILE
    refused = CliRunner().invoke(app, ["report", "--html", str(tmp_path / "nowhere" / "r.html"), *where])
    assert "cannot be written: No such file" in str(refused.exception)
    both = CliRunner().invoke(app, ["report", "--html", str(path), "--json", *where])
    assert "exclude each other" in str(both.exception)


@needs_chromium
def test_a_browser_shows_it_without_a_request_and_hostile_texts_stay_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    page.write(path, page.html(facts.frozen(folder), HOSTILE))

    async def look() -> None:
        async with browser(tmp_path) as shown:
            await shown.do("Page.navigate", url=path.as_uri())
            await shown.until("document.querySelectorAll('#table td').length > 10")
            assert HOSTILE in await shown.js("document.getElementById('table').textContent")
            await shown.js("location.hash = '#view=slot&slot=pc1%2F0'")
            await shown.until("document.querySelectorAll('canvas').length > 1")
            drawn = """[...document.querySelectorAll('canvas')].every((one) => one.getContext('2d')
                .getImageData(0, 0, one.width, one.height).data.some((value) => value))"""
            await shown.until(drawn)
            assert HOSTILE in await shown.js("document.getElementById('traceback').textContent")
            assert await shown.js("window.evil === undefined")
            assert [url for url in shown.requests() if not url.startswith(("file:", "data:", "about:"))] == []
            assert shown.complaints() == []

    asyncio.run(look())
