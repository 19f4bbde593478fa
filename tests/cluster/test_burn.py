"""`burn` in a rehearsal with scripted sensors: a hot card pauses its workers and fails its phase."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.record.folders import list_runs
from tests.cards import script_cards, scripted_card
from tests.cluster.conftest import SMALL, Starter
from tests.scene import ended, enough, events_in
from workers.readings import Throttle

pytestmark = pytest.mark.ray

THROTTLED = 0x4 | Throttle.HARDWARE_THERMAL


def test_a_hot_card_pauses_its_workers_and_fails_its_phase(start: Starter, short_tmp: Path) -> None:
    """Ctrl-C ends the next phase."""
    hot = scripted_card(1, temperature_c=87, throttle=THROTTLED)
    cool = scripted_card(2, temperature_c=61)
    cards = script_cards(short_tmp / "cards.json", cool, nodes={"pc1": [hot]})
    burn = start(
        *("--rehearse", *SMALL, "--phase", "2", "--phase", "3", "--duration", enough(6), "--json"),
        verb=("burn",),
        environment=cards,
    )
    runs = burn.runs
    burn.wait(lambda: len(list(runs.glob("*/head.json"))) == 2, "second phase")
    burn.process.send_signal(signal.SIGINT)
    out, err = ended(burn.process)
    told: dict[str, Any] = json.loads(out)
    assert burn.process.returncode == told["exit_code"] == 130, err
    assert told["outcome"] == "interrupted"
    heat = {row["slot"]: row for row in told["workers"] if row["phase"] == 2}
    assert {slot: row["temperature"] for slot, row in heat.items()} == {
        "pc1/0": "fail",
        "pc1/1": "fail",
        "pc2/0": "pass",
    }
    assert any("87 C at most" in reason for reason in heat["pc1/0"]["reasons"])
    assert heat["pc2/0"]["verdict"] == "pass"
    # The measurements before Ctrl-C may be enough for a verdict.
    full = {row["verdict"] for row in told["workers"] if row["phase"] == 3}
    assert full <= {"fail", "not_judged"}

    run_id = heat["pc1/0"]["run_id"]
    assert run_id in {run.run_id for run in list_runs(runs)}, "a run like any other"
    summary = json.loads((runs / run_id / "summary.json").read_text(encoding="utf-8"))
    rows = {row["slot"]: row for row in summary["workers"]}
    for slot in ("pc1/0", "pc1/1"):
        assert (rows[slot]["state"], rows[slot]["steps_ok"]) == ("PAUSED", 0)
        assert "paused at 87 C, resumes below 75 C" in rows[slot]["reason"]
        sensors = ("temperature_c", "margin_c", "power_w", "throttle_pct")
        assert [rows[slot][name] for name in sensors] == [87, 8, 341, 100]
    assert (rows["pc2/0"]["temperature_c"], rows["pc2/0"]["throttle_pct"]) == (61, 0)
    assert {event["slot"] for event in events_in(runs / run_id, "alarm_raised")} == {
        "pc1/0",
        "pc1/1",
    }
