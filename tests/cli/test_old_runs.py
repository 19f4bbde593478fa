"""Run folders of the version before the layers: `runs` and `report` tell of them what that version told.

The folders in `tests/fixtures/runs` were written by it: a run that ended, with injected faults, and one whose head was
killed. `tests/fixtures/told` is what its `runs --json` and `report --json` printed. That such a run can be resumed on a
real cluster is in `tests/cluster/nodes/test_head_faults.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.runs import report_json, report_text, runs_json, runs_text
from orchestrator.run.resume import environment_of, past_of
from orchestrator.watch.archive import read_run
from orchestrator.watch.cells import ASCII

FIXTURES = Path(__file__).parents[1] / "fixtures"
ENDED, KILLED = "20261122-120644-0b69", "20261122-120716-07c8"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy, because SQLite leaves files of its own beside a store that it reads."""
    return Path(shutil.copytree(FIXTURES / "runs", tmp_path / "runs"))


def told(name: str) -> Any:  # noqa: ANN401 - one JSON object
    return json.loads((FIXTURES / "told" / f"{name}.json").read_text(encoding="utf-8"))


def test_runs_lists_them_as_before(runs: Path) -> None:
    assert json.loads(runs_json(runs)) == told("runs")
    assert all(run_id in runs_text(runs, ASCII) for run_id in (ENDED, KILLED))


@pytest.mark.parametrize("run_id", [ENDED, KILLED])
def test_report_tells_of_them_as_before(runs: Path, run_id: str) -> None:
    assert json.loads(report_json(runs / run_id)) == told(run_id)
    text = report_text(runs / run_id, 100, ASCII)
    assert all(f"{row['slot']} " in text for row in told(run_id)["workers"])


def test_the_killed_one_can_be_resumed_with_its_counters_and_sizes(runs: Path) -> None:
    stored = read_run(runs / KILLED)
    environment, past = environment_of(stored), past_of(stored)
    before = {worker["slot"]: worker for worker in told(KILLED)["workers"]}
    assert [plan.reservation.slot for plan in environment.plans] == list(before)
    assert past.elapsed_s == stored.elapsed_s > 8.0
    for name, slot in past.slots.items():
        assert slot.incarnation == 1
        assert slot.resume is not None
        assert slot.counts.steps_ok == before[name]["steps_ok"] > 0
