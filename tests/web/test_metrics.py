"""The metrics of a run: the check of `promtool`, omitted values, and their size."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.record.model import FIELDS, Row
from orchestrator.view.alerts import Frame, Freshness
from orchestrator.view.web.metrics import exposition
from tests.alerts.traces import frame_at
from tests.web.scene import make_run, serving
from workers.messages import MemoryInfo
from workers.readings import SensorReading


def samples(content: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values, keyed by metric, and by label values in the order of label names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[
                tuple(sample.labels[name] for name in sorted(sample.labels))
            ] = sample.value
    return found


def of_frame(frame: Frame) -> dict[str, dict[tuple[str, ...], float]]:
    return samples(exposition(frame))


def test_values_are_in_base_units() -> None:
    told = of_frame(frame_at(60, throttle_pct=35.0, heartbeat_age_s=0.5))
    assert told["orchestrator_slot_state"]["pc1", "pc1/0", "running"] == 1
    assert told["orchestrator_slot_baseline_ratio"]["pc1", "pc1/0"] == 0.972
    assert told["orchestrator_slot_steps_total"]["pc1", "ok", "pc1/0"] == 480
    assert told["orchestrator_slot_work_flop_total"]["pc1", "pc1/0"] == 6e14
    assert told["orchestrator_slot_busy_seconds_total"]["pc1", "pc1/0"] == 36
    assert told["orchestrator_card_slowed_ratio"]["GPU-pc1", "pc1"] == 0.35
    assert told["orchestrator_card_sm_clock_hertz"]["GPU-pc1", "pc1"] == 1.695e9
    heard = told["orchestrator_slot_last_report_timestamp_seconds"]["pc1", "pc1/0"]
    assert heard == frame_at(60).snapshot.now_unix_s - 0.5


def test_a_card_has_its_metrics_once_from_its_newest_slot() -> None:
    told = of_frame(frame_at(60, temperature_c=80.0, heartbeat_age_s=0.1))
    heat = {("GPU-pc1", "pc1"): 80.0, ("GPU-pc2", "pc2"): 71.0}
    assert told["orchestrator_card_temperature_celsius"] == heat
    own = of_frame(frame_at(60, temperature_of="processor", heartbeat_age_s=0.1))
    assert own["orchestrator_card_temperature_celsius"].keys() == {("GPU-pc2", "pc2")}


def test_what_is_unknown_has_no_series() -> None:
    known = {key for key, field in FIELDS.items() if field.metric and not field.counter}
    parts = (Row, SensorReading, MemoryInfo)
    own = dict.fromkeys(key for part in parts for key in part.__slots__ if key in known)
    told = of_frame(frame_at(60, heartbeat_age_s=None, **own))
    present = {name for name, series in told.items() if ("pc1", "pc1/0") in series}
    assert {name for name in present if not name.endswith("_total")} == set()
    infinite = of_frame(
        frame_at(60, baseline_pct=float("nan"), margin_c=float("inf"), heartbeat_age_s=0.1)
    )
    assert ("pc1", "pc1/0") not in infinite["orchestrator_slot_baseline_ratio"]
    assert ("GPU-pc1", "pc1") not in infinite["orchestrator_card_temperature_margin_celsius"]


@pytest.mark.parametrize("freshness", [Freshness.HEAD_GONE, Freshness.ENDED])
def test_without_a_head_only_counts_and_the_outcome_remain(freshness: Freshness) -> None:
    told = of_frame(frame_at(60, freshness=freshness, outcome="degraded", exit_code=1))
    assert not {name for name in told if "_card_" in name or "_node_" in name}
    of_slots = {name for name in told if "_slot_" in name}
    assert {name for name in of_slots if not name.endswith(("_total", "slot_info"))} == set()
    assert "orchestrator_slot_steps_total" in of_slots
    outcome = "degraded" if freshness is Freshness.ENDED else "running"
    assert told["orchestrator_run_outcome"] == {(outcome,): 1}
    assert told["orchestrator_head_up"][()] == 0


def test_the_server_tells_them_to_who_has_the_token(tmp_path: Path) -> None:
    folder = tmp_path / "20261123-101500-aaaa"
    store = make_run(folder, seconds=20)
    with serving(folder) as server:
        answer = server.ask("/metrics", token=server.site.access.metrics_token)
        told = samples(answer.content)
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert told["orchestrator_head_up"] == {(): 1.0}
        assert len(told["orchestrator_slot_state"]) == 10
        assert server.ask("/metrics", token="").status == 401
    store.end("good", 0, None, ())
