"""The snapshot: sums, the order of the rows, and rows as JSON."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest

from orchestrator.core.slot import HeadState, slot_state
from orchestrator.watch.model import STATES_WORST_FIRST, Row, natural_order, worst_first
from workers.messages import WorkerState

from .conftest import RowMaker, SnapshotMaker


def test_the_keys_of_a_row_are_those_of_the_design(make_row: RowMaker) -> None:
    assert " ".join(make_row().to_dict()) == (
        "slot node gpu_name gpu_uuid device state reason policy size batch dtype tflops baseline_pct peak_pct "
        "allocated_bytes reserved_bytes claim_bytes cap_bytes budget_bytes device_used_bytes device_total_bytes "
        "steps_ok steps_oom steps_error success_rate oom_count alloc_retries emergency_count restarts duty_requested "
        "duty_measured temperature_c temperature_of margin_c memory_temperature_c power_w power_limit_w sm_clock_mhz "
        "fan_pct throttle_pct verify_checks verify_errors heartbeat_age_s"
    )


def test_every_state_has_its_place() -> None:
    assert sorted(STATES_WORST_FIRST) == sorted([*WorkerState, *HeadState])
    assert not set(WorkerState) & set(HeadState), "a word says whose state it is"
    assert [type(slot_state(state.value)) for state in STATES_WORST_FIRST] == [type(s) for s in STATES_WORST_FIRST]


def test_worst_first_by_state_then_trouble_then_natural_slot(make_row: RowMaker) -> None:
    rows = [
        make_row(slot="pc1/10"),
        make_row(slot="pc1/2"),
        make_row(slot="pc1/3", steps_oom=400),
        make_row(slot="pc1/4", verify_errors=1),
        *(make_row(slot=f"x/{state}", state=state) for state in reversed(STATES_WORST_FIRST)),
    ]

    ordered = [row.slot for row in worst_first(rows)]

    others = [f"x/{state}" for state in STATES_WORST_FIRST if state not in {"RUNNING", "STOPPED"}]
    assert ordered == [*others, "pc1/4", "pc1/3", "pc1/2", "pc1/10", "x/RUNNING", "x/STOPPED"]


@pytest.mark.parametrize("name", ["", "7", "pc/٣", "a" * 50 + "9" * 5000, "1/2/3"])
def test_natural_order_takes_any_name(name: str) -> None:
    assert natural_order(name) < natural_order("z")


def test_sums_before_anything_is_known(make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    snapshot = make_snapshot(make_row(tflops=None, steps_ok=0), make_row(tflops=math.nan, steps_ok=0))

    assert snapshot.tflops_total is None
    assert snapshot.counts.success_rate is None


def test_oom_steps_count_against_the_success_rate(make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    snapshot = make_snapshot(make_row(steps_ok=90, steps_oom=6), make_row(steps_ok=0, steps_error=4, tflops=None))

    assert snapshot.counts.success_rate == 0.9
    assert snapshot.tflops_total == 9.61
    assert snapshot.state_counts == {WorkerState.RUNNING: 2}


def test_a_row_survives_json_and_pickle(make_row: RowMaker) -> None:
    row = make_row(reason="größer\n", gpu_name=None)

    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    assert pickle.loads(pickle.dumps(row)) == row  # noqa: S301 - our own bytes


def test_a_row_from_a_newer_version_is_read_without_its_news(make_row: RowMaker) -> None:
    assert Row.from_dict({**make_row().to_dict(), "fan_rpm": 1200}) == make_row()


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"size": "big"}, "size cannot be 'big'"), ({"steps_ok": True}, "steps_ok"), ({"state": "HAPPY"}, "HAPPY")],
)
def test_a_row_with_a_wrong_value_is_refused(make_row: RowMaker, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Row.from_dict({**make_row().to_dict(), **changed})


def test_a_row_without_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks node, reason, state"):
        Row.from_dict({"slot": "pc1/0"})


def test_numbers_that_are_not_finite_become_unknown(make_row: RowMaker) -> None:
    assert make_row(tflops=math.inf, power_w=math.nan).to_dict()["tflops"] is None
