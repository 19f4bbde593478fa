"""One document for all viewers: for one moment, run, `top`, page and report show the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.view import html_report
from orchestrator.view.alerts import Freshness
from orchestrator.view.cells import MISSING
from orchestrator.view.document import document
from orchestrator.view.live import health_lines
from orchestrator.view.look import Watch
from orchestrator.view.terminal import plain_text
from tests.alerts.traces import frame_at
from tests.web.scene import make_run, serving

RUN_ID = "20261123-101500-aaaa"
WIDTH = 400


def test_a_run_top_page_and_report_say_the_same_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / RUN_ID
    make_run(folder, slots=10, seconds=60).end("degraded", 1, None, ())

    with serving(folder) as server:
        page = server.ask("/api/v1/document").told
    assert isinstance(page, dict)
    reported = json.loads(json.dumps(html_report.report_data(folder)["document"]))
    for part in ("head", "events"):
        assert page[part] == reported[part]
    for name in ("slots", "cards"):
        assert page["tables"][name] == reported["tables"][name]

    snapshot = Watch(folder).read().snapshot
    of_run = plain_text(health_lines(snapshot, WIDTH))
    top = CliRunner().invoke(
        app, ["top", "--once", "--run-dir", str(folder.parent)], env={"COLUMNS": str(WIDTH)}
    )
    assert top.exit_code == 0, top.output
    for row in page["tables"]["slots"]["rows"]:
        texts = [text for text, _ in row["cells"]]
        for shown in (of_run, top.output):
            (line,) = (line for line in shown.splitlines() if line.split()[:1] == [row["key"]])
            known = [text for text in texts if text in line]
            assert [text for text in texts if text not in {*known, MISSING}] == [], line
    for text in [text for text, *_ in page["head"]["headline"]] + page["head"]["sums"]:
        assert text in of_run


@pytest.mark.parametrize(
    ("freshness", "late_s", "mark"),
    [
        (Freshness.LIVE, 0.3, ("live", "good")),
        (Freshness.LATE, 12.0, ("late 12 s", "warn")),
        (Freshness.LATE, 75.0, ("late 01:15", "warn")),
        (Freshness.HEAD_GONE, 75.0, ("head gone", "bad")),
        (Freshness.ENDED, 75.0, ("ended: degraded", "warn")),
    ],
)
def test_the_mark_says_how_far_it_can_be_believed(
    freshness: Freshness, late_s: float, mark: tuple[str, str]
) -> None:
    frame = frame_at(60, freshness=freshness, late_s=late_s, outcome="degraded", exit_code=1)
    assert document(frame)["head"]["mark"] == mark
