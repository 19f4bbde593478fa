"""`burn`: where a pass ends, what each phase runs, and what is told of the result."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.core.slot import HeadState
from orchestrator.lab.burn import (
    HEAT_S,
    PlannedRun,
    WorkerCourse,
    judge,
    planned_runs,
    result_dict,
    row_line,
    row_of,
    verdict_of,
)
from tests.factories import make_row

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
    "tflops": 20.0,
}


def course(
    row: dict[str, Any] | None = None, told: dict[str, list[str]] | None = None, **changes: Any
) -> WorkerCourse:
    """A worker that was seen each second, with other values or functions of the second."""
    samples = {
        key: [value(second) if callable(value) else value for second in range(SECONDS)]
        for key, value in {**COURSE, **changes}.items()
    }
    told = {"alarm": [], "to_state": [], "text": [], **(told or {})}
    return WorkerCourse(row={**ROW, **(row or {})}, every_s=1.0, samples=samples, events=told)


def verdict(run: PlannedRun, worker: WorkerCourse, *, is_whole: bool = True) -> bool | None:
    return verdict_of(run, judge(worker), is_whole=is_whole)


def config(**changes: object) -> Config:
    nodes = {
        "pc1": {"gpu": "rtx-3090", "workers": 7, "vram_per_worker_gib": 3.0, "dtype": "bf16"},
        "pc2": {"gpu": "rtx-3070", "workers": 3, "vram_per_worker_gib": 1.5},
    }
    return config_from_data({"nodes": nodes, "cluster": {"head": "pc2"}, **changes})


RUNS = CAPS, _, HEAT, FULL = planned_runs(config(), {"cpu"}, 60.0, {1, 2, 3})


def test_a_cool_card_that_did_its_work_passes_every_check() -> None:
    assert {is_good for is_good, _ in judge(course()).values()} == {True}
    assert all(verdict(run, course()) is True for run in RUNS)


@pytest.mark.parametrize(
    ("check", "changes", "expected", "said"),
    [
        # More than nine tenths of the cap are held once it has climbed, and never more than all.
        *(("memory", {"reserved_bytes": held}, expected, said) for held, expected, said in (
            (901, True, "90.1 % of its cap"), (900, False, "more than 90"),
            (lambda at: 1001 if at == 7 else 950, False, "more than its cap"),
            (lambda at: 950 if at > 100 else 200, True, ""), (None, None, "never reported"),
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
        # An out-of-memory error that was survived is no error.
        *(("errors", {"row": row}, expected, said) for row, expected, said in (
            ({"steps_oom": 3, "oom_count": 5, "emergency_count": 5}, True, "none"),
            ({"steps_error": 1}, False, "errors of the workload: 1"),
            ({"restarts": 1}, False, "restarts: 1"), ({"steps_ok": 0}, False, "did no step"),
            ({"state": "QUARANTINED", "reason": "why"}, False, "ended QUARANTINED: why"),
            ({"state": "EMERGENCY"}, False, "ended EMERGENCY"),
        )),
        ("errors", {"told": {"alarm": ["power brake"]}}, False, "alarm of its card: power brake"),
        ("errors", {"told": {"to_state": ["EMERGENCY"]}}, False, "no memory for any step"),
        ("results", {"row": {"verify_errors": 1}}, False, "1 of 10"),
        ("results", {"row": {"verify_checks": 0}}, None, "no result was checked"),
        ("results", {"told": {"text": ["no memory"]}}, None, "checked, then no more: no memory"),
    ],
)  # fmt: skip
def test_where_a_pass_ends(
    check: str, changes: dict[str, Any], expected: bool | None, said: str
) -> None:
    is_good, text = judge(course(**changes))[check]
    assert is_good is expected
    assert said in text


def test_a_run_cut_short_or_without_a_sensor_is_no_pass() -> None:
    unknown = course(temperature_c=None)
    for run in RUNS:
        assert verdict(run, course(), is_whole=False) is None
        assert verdict(run, course(temperature_c=95.0), is_whole=False) is False
    assert verdict(HEAT, unknown) is None, "its purpose has no sensor"
    assert verdict(CAPS, unknown) is verdict(FULL, unknown) is True


@pytest.mark.parametrize(
    ("heat_s", "lengths_s"), [(HEAT_S, [30.0, 30.0, 30.0, 30.0, 3600.0, 300.0]), (12.5, [12.5] * 6)]
)
def test_three_phases_in_order_and_none_longer_than_heat(
    heat_s: float, lengths_s: list[float]
) -> None:
    planned = planned_runs(config(), {"cuda"}, heat_s, {1, 2, 3})
    assert [(run.phase, run.title) for run in planned] == [
        *((1, f"caps and precision, {dtype}") for dtype in ("fp32", "tf32", "fp16", "bf16")),
        (2, "heat"),
        (3, "full load"),
    ]
    assert [run.config.run.duration_s for run in planned] == lengths_s
    on_cpu = planned_runs(config(), {"cpu"}, heat_s, {1})
    assert [run.title[-4:] for run in on_cpu] == ["fp32", "fp16"]


def test_caps_and_heat_are_matmul_and_full_load_is_the_configuration_as_it_is() -> None:
    loaded = config(
        workload={"name": "mine:Step"},
        thermal={"hot_c": 76.0},
        verify={"share": 0.1},
        run={"duration": "2m"},
    )
    caps, *_ = planned_runs(loaded, {"cuda"}, HEAT_S, {1})
    assert (caps.config.workload.name, caps.config.workload.dtype) == ("matmul", "fp32")
    assert {node.dtype for node in caps.config.nodes.values()} == {None}, "a node's own would win"
    assert caps.config.verify.share == 0.25

    (heat,) = planned_runs(loaded, {"cuda"}, 600.0, {2})
    assert heat.config.compute_share_mode == "none"
    assert heat.config.workload.name == "matmul"
    assert heat.config.thermal == loaded.thermal, "the governor protects the card"
    assert {node.size for node in heat.config.nodes.values()} == {8192}

    (full,) = planned_runs(loaded, {"cuda"}, HEAT_S, {3})
    changed = full.config.model_dump()
    changed["run"]["duration"] = loaded.run.duration
    assert changed == loaded.model_dump()


def rows_of(phase: int, *workers: WorkerCourse, is_whole: bool = True) -> list[dict[str, Any]]:
    run = next(run for run in RUNS if run.phase == phase)
    return [row_of(run, "20260101-120000-abcd", each, is_whole=is_whole) for each in workers]


@pytest.mark.parametrize(
    ("rows", "is_whole", "outcome", "exit_code"),
    [
        ([*rows_of(1, course()), *rows_of(2, course())], True, "pass", 0),
        ([*rows_of(1, course()), *rows_of(2, course(temperature_c=90.0))], True, "fail", 1),
        (rows_of(2, course(temperature_c=None)), True, "not_judged", 1),
        (rows_of(3, course(), is_whole=False), False, "interrupted", 130),
        ([], True, "not_judged", 1),
    ],
)
def test_only_passes_pass(
    rows: list[dict[str, Any]], is_whole: bool, outcome: str, exit_code: int
) -> None:
    result = result_dict(rows, is_whole=is_whole)
    assert (result["outcome"], result["exit_code"]) == (outcome, exit_code)


def test_json_and_text_say_who_failed_and_what_is_unknown() -> None:
    other = course({"slot": "pc2/0", "node": "pc2", "state": HeadState.LOST.value})
    blind = course({"slot": "pc2/1", "node": "pc2"}, temperature_c=None)
    result = result_dict(rows_of(2, course(), other, blind), is_whole=True)
    good, bad, unknown = result["workers"]
    assert [row["verdict"] for row in (good, bad, unknown)] == ["pass", "fail", "not_judged"]
    assert unknown["temperature"] == "not_judged"
    assert bad["reasons"][0].startswith("errors: ended LOST")
    assert [row_line(row) for row in (good, bad, unknown)] == [
        "PASS pc1/0: 20 TFLOP/s",
        f"FAIL pc2/0: 20 TFLOP/s; {bad['reasons'][0]}",
        "NOT JUDGED pc2/1: 20 TFLOP/s; temperature: no sensor reports it",
    ]
