"""The summary: valid JSON whatever the rows hold, the verdict, and a file that is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.slot import HeadState
from orchestrator.watch.model import Row, Snapshot
from orchestrator.watch.summary import (
    exit_code_for,
    failure_dict,
    snapshot_from_summary,
    summary_dict,
    summary_text,
    write_summary,
)
from workers.messages import WorkerState

from .conftest import RowMaker, SnapshotMaker

AT = "2026-01-01T00:00:00Z"

KEYS = (
    "schema run_id outcome exit_code started_at duration_s nodes_planned nodes_seen workers_planned steps_ok steps_oom "
    "steps_error success_rate oom_count emergency_count restart_count steps_lost_upper_bound "
    "tflops_total verify_checks verify_errors workers notices faults "
    "fault_counts"
)


@given(st.data(), st.floats(), st.text(max_size=20))
def test_any_rows_make_valid_json(
    any_row: st.SearchStrategy[Row], data: st.DataObject, elapsed_s: float, notice: str
) -> None:
    rows = data.draw(st.lists(any_row, max_size=4))
    snapshot = Snapshot(
        run_id="r",
        started_at=0.0,
        now_unix_s=0.0,
        elapsed_s=elapsed_s,
        duration_s=30.0,
        nodes_planned=("pc1",),
        nodes_seen=(),
        rows=tuple(rows),
        notices=(notice,),
    )

    read = json.loads(summary_text(summary_dict(snapshot, "good", 0, AT)))

    assert " ".join(read) == KEYS
    assert len(read["workers"]) == read["workers_planned"] == len(rows)
    assert len(snapshot_from_summary(read).rows) == len(rows)


def test_an_error_is_there_only_when_there_was_one(make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    assert list(summary_dict(make_snapshot(make_row()), "failed", 1, AT, "no cluster"))[-1] == "error"
    assert "error" not in summary_dict(make_snapshot(make_row()), "good", 0, AT)


def test_a_failure_before_the_run_has_the_same_keys() -> None:
    failure = failure_dict("no cluster", 3)

    assert " ".join(failure) == f"{KEYS} error"
    assert (failure["outcome"], failure["exit_code"], failure["error"]) == ("failed", 3, "no cluster")
    assert failure["workers"] == []
    assert failure["success_rate"] is None
    assert failure["run_id"] is None


GOOD = {"steps_ok": 100}


@pytest.mark.parametrize(
    ("changed", "interrupted", "expected"),
    [
        (GOOD, False, ("good", 0)),
        (GOOD, True, ("interrupted", 130)),
        ({"steps_ok": 95, "steps_oom": 5}, False, ("good", 0)),
        ({"steps_ok": 94, "steps_oom": 6}, False, ("degraded", 1)),
        ({"steps_ok": 94, "steps_error": 6}, False, ("degraded", 1)),
        ({"steps_ok": 0}, False, ("degraded", 1)),
        ({**GOOD, "verify_errors": 1}, False, ("degraded", 1)),
        ({**GOOD, "state": HeadState.LOST}, False, ("degraded", 1)),
        ({**GOOD, "state": HeadState.QUARANTINED}, False, ("degraded", 1)),
        ({**GOOD, "state": HeadState.QUARANTINED}, True, ("interrupted", 130)),
        ({**GOOD, "state": HeadState.RESTARTING}, False, ("degraded", 1)),
        ({**GOOD, "state": HeadState.STARTING}, False, ("degraded", 1)),
        ({**GOOD, "state": WorkerState.EMERGENCY}, False, ("good", 0)),
        ({**GOOD, "state": WorkerState.STOPPED}, False, ("good", 0)),
    ],
)
def test_exit_code(
    make_row: RowMaker, make_snapshot: SnapshotMaker, changed: dict[str, Any], interrupted: bool, expected: object
) -> None:
    snapshot = make_snapshot(make_row(**changed))
    assert exit_code_for(snapshot, 0.95, interrupted=interrupted, incomplete=False) == expected


def test_a_run_with_incomplete_records_is_degraded(make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    snapshot = make_snapshot(make_row(**GOOD))
    assert exit_code_for(snapshot, 0.95, interrupted=False, incomplete=True) == ("degraded", 1)
    assert exit_code_for(snapshot, 0.95, interrupted=True, incomplete=True) == ("interrupted", 130)


def test_the_file_is_utf8_ends_in_a_newline_and_leaves_nothing_beside_it(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker
) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary = summary_dict(make_snapshot(make_row(reason="größer \udc80")), "good", 0, AT)

    write_summary(path, summary)

    content = path.read_bytes()
    assert content.endswith(b"}\n")
    assert "größer" in content.decode("utf-8")
    assert json.loads(content) == summary
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        write_summary(tmp_path / "file" / "summary.json", {})


def test_a_snapshot_comes_back_from_its_summary(make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    snapshot = make_snapshot(make_row(), elapsed_s=30.0, notices=("x",), restart_count=2, started_at=1767225600.0)

    assert snapshot_from_summary(summary_dict(snapshot, "good", 0, AT)) == snapshot


@pytest.mark.parametrize("wrong", [[], {}, {"schema": 2}, {"schema": 1}, {**failure_dict("x", 3), "workers": 7}])
def test_what_is_no_summary_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="summary"):
        snapshot_from_summary(wrong)
