"""Rows, snapshots and the summary: sums, the order of rows, the verdict, and a file that is
complete or absent.
"""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.record.model import STATES_WORST_FIRST, Row, worst_first
from orchestrator.record.summary import failure_dict, summary_dict, summary_text, write_file
from tests.factories import make_row, make_snapshot
from tests.watch.strategies import ANY_ROW


def test_the_keys_of_a_row_are_those_of_the_design() -> None:
    assert " ".join(make_row().to_dict()) == (
        "slot node gpu_name gpu_uuid device state reason policy size batch dtype tflops baseline_pct peak_pct "
        "allocated_bytes reserved_bytes claim_bytes cap_bytes budget_bytes device_used_bytes device_total_bytes "
        "steps_ok steps_oom steps_oom_probe steps_error parts_further success_rate oom_count alloc_retries "
        "emergency_count restarts "
        "duty_requested duty_measured temperature_c temperature_of margin_c memory_temperature_c power_w "
        "power_limit_w sm_clock_mhz utilisation_pct fan_pct throttle_pct verify_checks verify_errors heartbeat_age_s "
        "train_step train_steps epoch loss first_loss samples_per_s tokens_per_s micro_batch accumulation memory_level "
        "saved_step redone_steps data_wait_pct copies_pct optimizer_pct mfu_pct eta_s weights_sha256 "
        "team_state team_share_pct team_wire_s"
    )


def test_worst_first_by_state_then_trouble_then_natural_slot() -> None:
    rows = [
        make_row(slot="pc1/10"),
        make_row(slot="pc1/2"),
        make_row(slot="pc1/3", steps_oom=400),
        make_row(slot="pc1/4", verify_errors=1),
        *(make_row(slot=f"x/{state}", state=state) for state in reversed(STATES_WORST_FIRST)),
    ]

    ordered = [row.slot for row in worst_first(rows)]

    others = [
        f"x/{state}" for state in STATES_WORST_FIRST if state not in {"RUNNING", "DONE", "STOPPED"}
    ]
    assert ordered == [
        *others,
        "pc1/4",
        "pc1/3",
        "pc1/2",
        "pc1/10",
        "x/RUNNING",
        "x/DONE",
        "x/STOPPED",
    ]


AT = "2026-01-01T00:00:00Z"

KEYS = (
    "schema run_id outcome exit_code started_at duration_s nodes_planned nodes_seen workers_planned steps_ok steps_oom "
    "steps_oom_probe steps_error parts_further success_rate oom_count emergency_count restart_count "
    "tflops_total verify_checks verify_errors workers notices faults"
)


@settings(max_examples=30)
@given(st.lists(ANY_ROW, max_size=4), st.floats(), st.text(max_size=20))
def test_any_rows_make_valid_json(rows: list[Row], elapsed_s: float, notice: str) -> None:
    snapshot = make_snapshot(*rows, elapsed_s=elapsed_s, notices=(notice,), now_unix_s=0.0)

    read = json.loads(summary_text(summary_dict(snapshot, "good", 0, AT)))

    assert " ".join(read) == KEYS
    assert len(read["workers"]) == read["workers_planned"] == len(rows)


def test_a_failure_before_the_run_has_the_same_keys() -> None:
    failure = failure_dict("no cluster", 3)

    assert " ".join(failure) == f"{KEYS} error"
    assert failure["outcome"] == "failed"
    assert failure["exit_code"] == 3
    assert failure["error"] == "no cluster"
    assert failure["workers"] == []
    assert failure["success_rate"] is None
    assert failure["run_id"] is None


def test_the_file_is_utf8_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary = summary_dict(make_snapshot(make_row(reason="größer \udc80")), "good", 0, AT)

    write_file(path, summary_text(summary) + "\n")

    content = path.read_bytes()
    assert content.endswith(b"}\n")
    assert "größer" in content.decode("utf-8")
    assert json.loads(content) == summary
    assert list(tmp_path.iterdir()) == [path]
