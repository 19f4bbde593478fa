"""`burn` in a rehearsal with scripted sensors: a hot card fails its phase, nothing is left."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.record.folders import list_runs
from tests.cards import script_cards, scripted_card
from tests.cluster.conftest import SMALL, Starter
from tests.scene import ended

pytestmark = pytest.mark.ray

#: Warmer than a card should stay, and cooler than workers pause at.
HOT_C = 81


def test_a_hot_card_fails_its_phase_and_ctrl_c_ends_the_next(
    start: Starter, short_tmp: Path
) -> None:
    hot, cool = scripted_card(1, temperature_c=HOT_C), scripted_card(2, temperature_c=61)
    sensors = script_cards(short_tmp / "cards.json", cool, nodes={"pc1": [hot]})
    burn = start(
        *("--rehearse", *SMALL, "--phase", "2", "--phase", "3", "--duration", "6s", "--json"),
        verb=("burn",),
        environment={"COLUMNS": "80", **sensors},
    )
    runs = burn.runs
    burn.wait(lambda: len(list(runs.glob("*/head.json"))) == 2, "second phase")
    burn.process.send_signal(signal.SIGINT)
    out, err = ended(burn.process)
    told: dict[str, Any] = json.loads(out)
    assert burn.process.returncode == told["exit_code"] == 130, err
    assert told["outcome"] == "interrupted"
    phase, interrupted = told["phases"]
    assert (phase["phase"], phase["title"], phase["verdict"]) == (2, "heat", "fail")
    assert phase["nodes"] == [
        {"node": "pc1", "verdict": "fail"},
        {"node": "pc2", "verdict": "pass"},
    ]
    by_slot = {worker["slot"]: worker for worker in phase["workers"]}
    assert {slot: worker["temperature_verdict"] for slot, worker in by_slot.items()} == {
        "pc1/0": "fail",
        "pc1/1": "fail",
        "pc2/0": "pass",
    }
    assert by_slot["pc1/0"]["temperature_max_c"] == HOT_C
    assert all(
        worker["errors_verdict"] == "pass" and worker["steps_ok"] > 0 for worker in by_slot.values()
    )
    assert (interrupted["phase"], interrupted["verdict"]) == (3, "not_judged")
    (written,) = runs.glob("burn-*.json")
    assert json.loads(written.read_text(encoding="utf-8")) == told
    assert phase["runs"][0]["run_id"] in {run.run_id for run in list_runs(runs)}, (
        "a run like any other"
    )
