"""A run in one file: what is frozen, and the file in a real browser, where it asks for nothing."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.view import html_report
from tests.factories import (
    FACTS,
    STARTED_UNIX_S,
    add_event,
    begun_run,
    event,
    make_row,
    make_standing,
    store_queue,
)
from tests.web.browser import browser, needs_chromium
from tests.web.scene import put_turn

HOSTILE = "</script><script>window.evil=1</script><img src=x onerror='window.evil=2'>"

#: Each chart in sight has something on it.
DRAWN = """[...document.querySelectorAll('canvas')].filter((one) => one.offsetParent).every((one) =>
    one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((value) => value))"""


def make_run(place: Path, slots: int = 2) -> Path:
    """Make a run of some slots and 60 s, with texts that want to be code."""
    store = begun_run(place, replace(FACTS, run_id=place.name))
    for second in range(60):
        heat = {"temperature_c": 50.0 + second, "oom_count": second}
        rows = [
            make_row(slot=f"pc1/{index}", tflops=9.0, reason=HOSTILE, **heat)
            for index in range(slots)
        ]
        put_turn(store, float(second), rows, started_at=STARTED_UNIX_S, notices=(HOSTILE,))
    change = event(name="state", from_state="RUNNING", to_state="BACKOFF", cause=HOSTILE)
    error = event(name="workload_error", traceback=f"Traceback\n{HOSTILE}")
    for told in (change, error):
        add_event(store, {**told, "slot": "pc1/0"})
    add_event(store, event(name="run_ended", missed=[f"pc1/0: {HOSTILE}"]))
    store.end("good", 0, None, ())
    return place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / FACTS.run_id)


def test_the_file_has_the_document_and_the_courses(folder: Path) -> None:
    told = html_report.report_data(folder)
    document = told["document"]
    assert [row["key"] for row in document["tables"]["slots"]["rows"]] == ["pc1/0", "pc1/1"]
    assert document["head"]["missed"] == [f"pc1/0: {HOSTILE}"]
    charts = {chart["label"]: chart for chart in told["slots"]["pc1/1"]["charts"]}
    (_, heat), *_ = charts["temperature, C"]["lines"]
    assert [value for value in heat if value is not None] == [50.0 + at for at in range(60)]
    assert charts["temperature, C"]["average"] == "79.50"
    assert not [label for label in charts if "loss" in label], "nothing was trained"
    together = {chart["label"]: chart["average"] for chart in told["all"]["charts"]}
    assert together["TFLOP/s of all slots"] == "18.00", "the sum of two slots"


def test_a_queue_brings_its_jobs_and_their_courses(folder: Path) -> None:
    store_queue(folder / QUEUE_NAME, make_standing("<b>lr-1"))
    told = html_report.report_data(folder)
    (row,) = told["document"]["tables"]["jobs"]["rows"]
    assert row["key"] == "<b>lr-1"
    assert "<b>lr-1" in told["slots"]


def test_many_slots_have_fewer_parts_each(tmp_path: Path) -> None:
    many = make_run(tmp_path / FACTS.run_id, slots=60)
    course = html_report.report_data(many)["slots"]["pc1/59"]
    assert len(course["times"]) == 5_000 // 60


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
    document = json.loads(json.dumps(html_report.report_data(folder)["document"]))
    assert json.loads(data[1])["document"] == document
    refused = CliRunner().invoke(
        app, ["report", "--html", str(tmp_path / "nowhere" / "r.html"), *where]
    )
    assert "cannot be written: No such file" in str(refused.exception)
    both = CliRunner().invoke(app, ["report", "--html", str(path), "--json", *where])
    assert "exclude each other" in str(both.exception)


@needs_chromium
def test_a_browser_shows_it_without_a_request(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text(html_report.html(html_report.report_data(folder), HOSTILE))

    with asyncio.Runner() as runner, browser(tmp_path, runner) as shown:
        shown.do("Page.navigate", url=path.as_uri())
        shown.until("document.querySelectorAll('#table td').length > 10")
        assert shown.js("document.getElementById('mark').textContent") == "ended: good"
        assert HOSTILE in shown.js("document.getElementById('table').textContent")
        assert HOSTILE in shown.js("document.getElementById('missed').textContent")
        shown.until(f"document.querySelectorAll('#overview canvas').length && {DRAWN}")
        shown.js("location.hash = '#sort=tflops&filter=pc1%2F1'")
        shown.until("document.querySelectorAll('#table tbody').length === 1")
        shown.js("location.hash = '#view=slot&slot=pc1%2F0&last_s=600'")
        shown.until(f"document.querySelectorAll('#charts canvas').length > 1 && {DRAWN}")
        assert HOSTILE in shown.js("document.getElementById('traceback').textContent")
        assert shown.js("window.evil === undefined")
        assert [
            url for url in shown.requests() if not url.startswith(("file:", "data:", "about:"))
        ] == []
        assert shown.complaints() == []
