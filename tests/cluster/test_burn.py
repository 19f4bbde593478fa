"""`burn` in a rehearsal with scripted sensors: a hot card fails its phase, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.record.folders import list_runs
from tests.cards import script_cards, scripted_card
from tests.cluster.conftest import SMALL
from tests.scene import COMMAND, PATIENCE_S, ROOT, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("nothing_left")]

#: Warmer than a card should stay, and cooler than workers pause at.
HOT_C = 81


def script(folder: Path, hot_c: float, cool_c: float) -> dict[str, str]:
    """Return the variables under which pc1 has a card with one temperature, other nodes the other."""
    hot, cool = scripted_card(1, temperature_c=hot_c), scripted_card(2, temperature_c=cool_c)
    return script_cards(folder / "cards.json", cool, nodes={"pc1": [hot]})


@contextmanager
def burning(folder: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, "burn", "--config", str(ROOT / "cluster.yaml"), "--rehearse"]
    with subprocess.Popen(
        [*command, *SMALL, "--run-dir", str(folder / "runs"), *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "80", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(PATIENCE_S)
    assert [path.name for path in folder.iterdir() if path.name.startswith("orch-")] == []


def test_a_hot_card_fails_its_phase_and_ctrl_c_ends_the_next(short_tmp: Path) -> None:
    sensors = script(short_tmp, HOT_C, 61)
    arguments = (
        "--phase",
        "2",
        "--phase",
        "3",
        "--duration",
        "6s",
        "--json",
    )
    with burning(short_tmp, *arguments, **sensors) as process:
        wait_for(lambda: runs_that_counted(short_tmp / "runs") == 2, "second phase that counts")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    told: dict[str, Any] = json.loads(out)
    assert (process.returncode, told["exit_code"], told["outcome"]) == (130, 130, "interrupted"), (
        err
    )
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
    # What was seen until then may be enough for a verdict.
    assert (interrupted["phase"], interrupted["verdict"] in {"fail", "not_judged"}) == (3, True)
    (written,) = (short_tmp / "runs").glob("burn-*.json")
    assert json.loads(written.read_text(encoding="utf-8")) == told
    assert phase["runs"][0]["run_id"] in {run.run_id for run in list_runs(short_tmp / "runs")}, (
        "a run like any other"
    )


def runs_that_counted(runs: Path) -> int:
    return sum(
        "counting" in path.read_text(encoding="utf-8") for path in runs.glob("*/events.jsonl")
    )
