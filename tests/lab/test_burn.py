"""`burn`: where a pass ends, what each phase runs, and what is told of the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.core.slot import HeadState
from orchestrator.lab.burn import (
    HEAT_S,
    PHASES,
    BurnRun,
    JudgedWorker,
    Samples,
    judge,
    judged_workers,
    planned_runs,
    result_dict,
    result_lines,
    verdict_of,
)
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.record.summary import summary_dict, write_summary
from tests.factories import FACTS, add_event, event, make_row, make_snapshot, record

CAPS, HEAT, FULL = PHASES
SECONDS = 600

#: A worker of a card that did all it should.
ROW: dict[str, Any] = {
    **make_row(slot="pc1/0", node="pc1", device="cuda").to_dict(),
    "temperature_of": "card",
    "state": "RUNNING",
    "cap_bytes": 1000,
    "steps_ok": 100,
    "steps_error": 0,
    "restarts": 0,
    "verify_checks": 10,
    "verify_errors": 0,
}
COURSE: dict[str, Any] = {
    "reserved_bytes": 950,
    "temperature_c": 70.0,
    "throttle_pct": 0.0,
    "tflops": 20.0,
}


def judged(row: dict[str, Any] | None = None, **changes: Any) -> JudgedWorker:
    """Judge a worker that was seen each second, with other values or functions of the second."""
    facts = {
        key: changes.pop(key) for key in ("alarms", "was_starved", "unchecked") & changes.keys()
    }
    course = {
        key: [value(second) if callable(value) else value for second in range(SECONDS)]
        for key, value in {**COURSE, **changes}.items()
    }
    return judge({**ROW, **(row or {})}, Samples(every_s=1.0, **course, **facts))


def test_a_cool_card_that_did_its_work_passes_every_check() -> None:
    worker = judged()
    assert {is_good for is_good, _ in worker.findings.values()} == {True}
    assert all(verdict_of(phase, [worker]) is True for phase in PHASES)


@pytest.mark.parametrize(
    ("check", "changes", "expected", "said"),
    [
        # More than nine tenths of the cap are held once it has climbed, and never more than all.
        *(("memory", {"reserved_bytes": held}, expected, said) for held, expected, said in (
            (901, True, "90.1 % of its cap"), (900, False, "more than 90"),
            (lambda at: 1001 if at == 7 else 950, False, "more than its cap"),
            (lambda at: 950 if at > 100 else 200, True, ""), (None, None, "never told"),
        )),
        # Sustained is half a minute on end, or a tenth of the time.
        *(("temperature", {"temperature_c": heat}, expected, said) for heat, expected, said in (
            (None, None, "no sensor"), (79.9, True, "80 C at most"), (80.0, False, "80 C or more"),
            (lambda at: 90.0 if at < 29 else 60.0, True, "29 s on end, 5 % of the time"),
            (lambda at: 90.0 if at < 30 else 60.0, False, "30 s on end"),
            (lambda at: 80.0 if at % 10 == 0 else 60.0, True, "10 % of the time"),
            (lambda at: 80.0 if at % 9 == 0 else 60.0, False, "11 % of the time"),
        )),
        ("temperature", {"row": {"temperature_of": "processor"}}, None, "no sensor"),
        *(("slowdown", seen, expected, said) for seen, expected, said in (
            ({"alarms": ("power brake",)}, False, "alarm: power brake"),
            ({"throttle_pct": 5.0}, True, "none"), ({"throttle_pct": None}, None, "no sensor"),
            ({"throttle_pct": 5.1}, False, "slowed itself down"),
        )),
        # An out-of-memory error that was survived is no error.
        *(("errors", {"row": row}, expected, said) for row, expected, said in (
            ({"steps_oom": 3, "oom_count": 5, "emergency_count": 5}, True, "none"),
            ({"steps_error": 1}, False, "errors of the workload: 1"),
            ({"restarts": 1}, False, "restarts: 1"), ({"steps_ok": 0}, False, "did no step"),
            ({"state": "QUARANTINED", "reason": "why"}, False, "ended QUARANTINED: why"),
            ({"state": "EMERGENCY"}, False, "ended EMERGENCY"),
        )),
        ("errors", {"was_starved": True}, False, "no memory for any step"),
        ("results", {"row": {"verify_errors": 1}}, False, "1 of 10"),
        ("results", {"row": {"verify_checks": 0}}, None, "no result was checked"),
        ("results", {"unchecked": "no memory"}, None, "checked, then no more: no memory"),
    ],
)  # fmt: skip
def test_where_a_pass_ends(
    check: str, changes: dict[str, Any], expected: bool | None, said: str
) -> None:
    is_good, text = judged(**changes).findings[check]
    assert is_good is expected
    assert said in text


def test_a_phase_cut_short_or_without_workers_has_no_pass() -> None:
    good, bad = judged(), judged(temperature_c=95.0)
    unknown = judged(temperature_c=None, throttle_pct=None)
    for phase in PHASES:
        assert verdict_of(phase, [good], is_whole=False) is verdict_of(phase, []) is None
        assert verdict_of(phase, [good, bad], is_whole=False) is False
    assert verdict_of(HEAT, [good, unknown]) is None, "its purpose has no sensor"
    assert verdict_of(CAPS, [unknown]) is verdict_of(FULL, [unknown]) is True


VALUES = st.lists(st.none() | st.floats(0.0, 2000.0), max_size=30)


@given(VALUES, VALUES, st.none() | st.integers(0, 2000), st.floats(0.0, 50.0))
def test_anything_is_judged_and_a_warmer_card_not_better(
    held: list[float | None], warmth: list[float | None], cap_bytes: int | None, more_c: float
) -> None:
    warmer = [None if each is None else each + more_c for each in warmth]
    row = {**ROW, "cap_bytes": cap_bytes}
    before, after = (
        judge(row, Samples(every_s=1.0, reserved_bytes=held, temperature_c=each)).findings
        for each in (warmth, warmer)
    )
    assert all(text for _, text in before.values())
    assert before["temperature"][0] is not False or after["temperature"][0] is False


def config(**changes: object) -> Config:
    nodes = {
        "pc1": {"gpu": "rtx-3090", "workers": 7, "vram_per_worker_gib": 3.0, "dtype": "bf16"},
        "pc2": {"gpu": "rtx-3070", "workers": 3, "vram_per_worker_gib": 1.5},
    }
    return config_from_data({"nodes": nodes, "cluster": {"head": "pc2"}, **changes})


@pytest.mark.parametrize(
    ("heat_s", "lengths_s"), [(HEAT_S, [30.0, 30.0, 30.0, 30.0, 3600.0, 300.0]), (12.5, [12.5] * 6)]
)
def test_three_phases_in_order_and_none_longer_than_heat(
    heat_s: float, lengths_s: list[float]
) -> None:
    planned = planned_runs(config(), "cuda", heat_s, {1, 2, 3})
    assert [(run.phase.number, run.dtype) for run in planned] == [
        *((1, dtype) for dtype in ("fp32", "tf32", "fp16", "bf16")),
        (2, None),
        (3, None),
    ]
    assert [run.config.run.duration_s for run in planned] == lengths_s
    assert [run.dtype for run in planned_runs(config(), "cpu", heat_s, {1})] == ["fp32", "fp16"]


def test_caps_and_heat_are_matmul_and_full_load_is_the_configuration_as_it_is() -> None:
    loaded = config(
        workload={"name": "mine:Step"},
        thermal={"hot_c": 76.0},
        verify={"share": 0.1},
        run={"duration": "2m"},
    )
    caps, *_ = planned_runs(loaded, "cuda", HEAT_S, {1})
    assert (caps.config.workload.name, caps.config.workload.dtype) == ("matmul", "fp32")
    assert {node.dtype for node in caps.config.nodes.values()} == {None}, "a node's own would win"
    assert caps.config.verify.share == 0.25

    (heat,) = planned_runs(loaded, "cuda", 600.0, {2})
    assert heat.config.compute_share_mode == "none"
    assert heat.config.workload.name == "matmul"
    assert heat.config.thermal == loaded.thermal, "the governor protects the card"
    assert {node.size for node in heat.config.nodes.values()} == {8192}

    (full,) = planned_runs(loaded, "cuda", HEAT_S, {3})
    changed = full.config.model_dump()
    changed["run"]["duration"] = loaded.run.duration
    assert changed == loaded.model_dump()


def test_a_run_folder_is_judged_by_what_it_has(tmp_path: Path) -> None:
    store = RunStore(tmp_path / STORE_NAME)
    store.begin(FACTS)
    card = {
        "temperature_of": "card",
        "temperature_c": 81.0,
        "cap_bytes": 1000,
        "reserved_bytes": 950,
    }
    row = make_row(slot="pc1/0", node="pc1", device="cuda", **card)
    add_event(store, {**event(name="counting", duration_s=40.0), "at": _at(0)})
    for second in range(40):
        store.slots([record(row=row)])
        store.update(make_snapshot(row, elapsed_s=float(second)))
    add_event(
        store, {**event(name="alarm_raised", alarm="power brake"), "slot": "pc1/0", "at": _at(9)}
    )
    add_event(store, {**event(name="checks_ended", text="no\nroom"), "slot": "pc1/0", "at": _at(9)})
    store.end("good", 0, None, ())
    write_summary(tmp_path / "summary.json", summary_dict(make_snapshot(row), "good", 0, ""))
    (worker,) = judged_workers(tmp_path, 40.0)
    assert worker.figures["temperature_max_c"] == 81.0
    assert worker.figures["vram_held_pct"] == pytest.approx(95.0)
    assert worker.findings["temperature"][0] is False
    assert worker.findings["slowdown"] == (False, "alarm: power brake")


def _at(second: int) -> str:
    from datetime import UTC, datetime

    moment = datetime.fromtimestamp(FACTS.started_at_unix_s + second, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def run_of(phase: int, *workers: JudgedWorker, **changes: Any) -> BurnRun:
    (first, *_) = planned_runs(config(), "cpu", 60.0, {phase})
    return replace(first, workers=workers, elapsed_s=60.0, **changes)


@pytest.mark.parametrize(
    ("runs", "outcome", "exit_code"),
    [
        ([run_of(1, judged()), run_of(2, judged())], "pass", 0),
        ([run_of(1, judged()), run_of(2, judged(temperature_c=90.0))], "fail", 1),
        ([run_of(2, judged(temperature_c=None, throttle_pct=None))], "not_judged", 1),
        ([run_of(3, judged(), error="the cluster has ended")], "fail", 1),
        ([run_of(3, judged(), interrupted=True)], "not_judged", 1),
    ],
)
def test_only_passes_pass(runs: list[BurnRun], outcome: str, exit_code: int) -> None:
    result = result_dict(runs, "2026-01-01T00:00:00.000+00:00", "local")
    assert (result["outcome"], result["exit_code"]) == (outcome, exit_code)


def test_json_and_text_say_who_failed_and_what_is_unknown() -> None:
    other = judged({"slot": "pc2/0", "node": "pc2", "state": HeadState.LOST.value})
    blind = judged({"slot": "pc2/1", "node": "pc2"}, temperature_c=None, throttle_pct=None)
    result = result_dict([run_of(2, judged(), other, blind)], "2026-01-01", "rehearse")
    (phase,) = result["phases"]
    assert phase["nodes"] == [
        {"node": "pc1", "verdict": "pass"},
        {"node": "pc2", "verdict": "fail"},
    ]
    good, bad, unknown = phase["workers"]
    assert [worker["verdict"] for worker in phase["workers"]] == ["pass", "fail", "not_judged"]
    assert good["vram_held_pct"] == pytest.approx(95.0)
    assert unknown["temperature_verdict"] == "not_judged"
    assert bad["reasons"][0].startswith("errors: ended LOST")
    assert phase["runs"][0]["run_id"] is None

    lines = list(result_lines(result))
    text = "\n".join(lines)
    assert "Phase 2, heat, 1m: FAIL" in text
    assert "  PASS  pc1/0, 20 TFLOP/s" in text
    assert "  FAIL  pc2/0" in text
    assert "temperature: no sensor tells it" in text
    assert lines[-1] == "\nFAIL"
