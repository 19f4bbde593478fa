"""Where a pass ends: the guides' metrics at their limits, and what nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.burn.phases import Phase
from orchestrator.burn.verdict import PURPOSE, Check, Measured, Sample, Verdict, judge, overall, verdict_of
from orchestrator.core.slot import HeadState
from tests.burn.scene import ROW, measured, text, verdict
from tests.counting import with_changes
from workers.messages import WorkerState

PASS, FAIL, NOT_JUDGED = Verdict.PASS, Verdict.FAIL, Verdict.NOT_JUDGED


def test_a_cool_card_that_did_its_work_passes_every_check() -> None:
    judged = judge(measured())
    assert {finding.check: finding.verdict for finding in judged.findings} == dict.fromkeys(Check, PASS)
    assert [finding.check for finding in judged.findings] == list(Check)
    assert verdict_of(Phase.HEAT, [judged]) is PASS


@pytest.mark.parametrize(("held_bytes", "expected"), [(901, PASS), (900, FAIL), (1000, PASS), (1001, FAIL), (0, FAIL)])
def test_more_than_nine_tenths_of_the_cap_are_held_and_never_more_than_all(held_bytes: int, expected: Verdict) -> None:
    assert verdict(judge(measured(reserved_bytes=held_bytes)), Check.MEMORY) is expected


def test_one_moment_over_the_cap_fails() -> None:
    judged = judge(measured(reserved_bytes=lambda at_s: 1001 if at_s == 7 else 950))
    assert verdict(judged, Check.MEMORY) is FAIL
    assert "over its cap" in text(judged, Check.MEMORY)


def test_climbing_to_the_cap_is_no_failure() -> None:
    judged = judge(measured(reserved_bytes=lambda at_s: 950 if at_s > 100 else 200))
    assert verdict(judged, Check.MEMORY) is PASS
    assert judged.figures.vram_held_share == pytest.approx(0.95)


def test_a_worker_that_gave_way_for_most_of_the_time_fails() -> None:
    assert verdict(judge(measured(reserved_bytes=lambda at_s: 950 if at_s < 200 else 500)), Check.MEMORY) is FAIL


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps_error": 1}, "1 error of the workload"),
        ({"restarts": 1}, "1 restart"),
        ({"steps_ok": 0}, "did no step"),
        ({"state": HeadState.QUARANTINED, "reason": "5 deaths"}, "ended QUARANTINED: 5 deaths"),
        ({"state": HeadState.LOST}, "ended LOST"),
        ({"state": HeadState.RESTARTING}, "ended RESTARTING"),
        ({"state": WorkerState.EMERGENCY}, "ended EMERGENCY"),
    ],
)
def test_each_error_fails_and_is_named(changes: dict[str, Any], said: str) -> None:
    judged = judge(measured(with_changes(ROW, **changes)))
    assert verdict(judged, Check.ERRORS) is FAIL
    assert said in text(judged, Check.ERRORS)


def test_an_out_of_memory_that_was_survived_is_no_error() -> None:
    assert (
        verdict(judge(measured(with_changes(ROW, steps_oom=3, oom_count=5, emergency_count=5))), Check.ERRORS) is PASS
    )


def test_a_worker_without_memory_for_any_step_was_not_at_work() -> None:
    judged = judge(measured(state=lambda at_s: WorkerState.EMERGENCY if at_s % 100 == 7 else WorkerState.RUNNING))
    assert verdict(judged, Check.ERRORS) is FAIL
    assert text(judged, Check.ERRORS) == "without memory for any step for 1 % of the time"


@pytest.mark.parametrize(
    ("checks", "errors", "expected"), [(10, 0, PASS), (10, 1, FAIL), (0, 0, NOT_JUDGED), (0, 1, FAIL)]
)
def test_results_that_nobody_checked_are_not_right(checks: int, errors: int, expected: Verdict) -> None:
    judged = judge(measured(with_changes(ROW, verify_checks=checks, verify_errors=errors)))
    assert verdict(judged, Check.RESULTS) is expected


def test_results_that_were_checked_for_a_while_are_not_judged() -> None:
    judged = judge(measured(with_changes(ROW, verify_checks=10), unchecked="no memory for it"))
    assert text(judged, Check.RESULTS) == "10 results checked, then no more: no memory for it"
    assert verdict_of(Phase.CAPS, [judged]) is NOT_JUDGED
    assert verdict(judge(measured(with_changes(ROW, verify_errors=1), unchecked="no memory")), Check.RESULTS) is FAIL


@pytest.mark.parametrize(
    ("temperature_c", "expected"),
    [
        (None, NOT_JUDGED),
        (79.9, PASS),
        (80.0, FAIL),
        (lambda at_s: 90.0 if at_s < 30 else 60.0, PASS),  # 28 s on end, 5 % of the time
        (lambda at_s: 90.0 if at_s < 32 else 60.0, FAIL),  # 30 s on end
        (lambda at_s: 80.0 if at_s % 10 == 0 else 60.0, PASS),  # 10 % of the time
        (lambda at_s: 80.0 if at_s % 9 == 0 else 60.0, FAIL),
        (lambda at_s: None if at_s % 2 else 81.0, FAIL),  # gaps do not make it shorter
    ],
)
def test_sustained_is_half_a_minute_on_end_or_a_tenth_of_the_time(
    temperature_c: float | Callable[[int], float | None] | None, expected: Verdict
) -> None:
    assert verdict(judge(measured(temperature_c=temperature_c)), Check.TEMPERATURE) is expected


def test_without_sensors_heat_has_no_verdict_and_the_rest_has() -> None:
    judged = judge(measured(temperature_c=None, throttle_pct=None))
    assert verdict(judged, Check.SLOWDOWN) is NOT_JUDGED
    assert judged.figures.slowed_share is None
    assert verdict_of(Phase.HEAT, [judged]) is NOT_JUDGED
    assert verdict_of(Phase.CAPS, [judged]) is verdict_of(Phase.FULL_LOAD, [judged]) is PASS


def test_one_node_without_sensors_leaves_the_whole_heat_phase_without_a_pass() -> None:
    blind = judge(measured(temperature_c=None))
    assert verdict_of(Phase.HEAT, [judge(measured()), blind]) is NOT_JUDGED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alarms": ("power brake",)}, "alarm: power brake"),
        ({"throttle_pct": 5.1}, "slowed itself down"),
        ({"state": WorkerState.THROTTLED}, "100 % of the time"),
        ({"state": lambda at_s: WorkerState.PAUSED if at_s % 5 == 0 else WorkerState.RUNNING}, "of the time"),
    ],
)
def test_whatever_slows_a_card_down_fails_and_is_named(change: dict[str, Any], said: str) -> None:
    judged = judge(measured(**change))
    assert verdict(judged, Check.SLOWDOWN) is FAIL
    assert said in text(judged, Check.SLOWDOWN)


def test_a_moment_of_slowdown_is_no_failure() -> None:
    assert verdict(judge(measured(throttle_pct=5.0)), Check.SLOWDOWN) is PASS


@pytest.mark.parametrize(
    ("tflops", "expected"),
    [
        (20.0, PASS),
        (lambda at_s: 21.0 if at_s // 10 % 2 else 19.5, PASS),
        (lambda at_s: 25.0 if at_s // 10 % 2 else 15.0, FAIL),  # scatters
        (lambda at_s: 20.0 if at_s < 360 else 18.9, FAIL),  # the second half drops
        (lambda at_s: 20.0 if at_s < 360 else 19.5, PASS),
        (lambda at_s: 5.0 if at_s < 100 else 20.0, PASS),  # warms up
        (lambda at_s: 20.0 if at_s < 500 else None, FAIL),  # stops
        (None, NOT_JUDGED),  # a workload that counts no operations
    ],
)
def test_throughput_must_neither_scatter_nor_fall(
    tflops: float | Callable[[int], float | None] | None, expected: Verdict
) -> None:
    assert verdict(judge(measured(tflops=tflops)), Check.THROUGHPUT) is expected


def test_throughput_is_judged_on_cards_and_after_a_minute() -> None:
    assert verdict(judge(measured(with_changes(ROW, device="cpu"))), Check.THROUGHPUT) is NOT_JUDGED
    assert verdict(judge(measured(length_s=30.0)), Check.THROUGHPUT) is NOT_JUDGED
    assert verdict(judge(measured(length_s=70.0)), Check.THROUGHPUT) is PASS


def test_a_worker_that_never_came_fails() -> None:
    row = with_changes(ROW, state=HeadState.STARTING, cap_bytes=None, steps_ok=0, verify_checks=0, device=None)
    judged = judge(Measured(row=row, length_s=60.0, samples=()))
    assert {finding.check for finding in judged.findings if finding.verdict is FAIL} == {Check.ERRORS}
    assert Verdict.PASS not in {finding.verdict for finding in judged.findings}


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_that_was_cut_short_or_had_no_workers_has_no_pass(phase: Phase) -> None:
    good, bad = judge(measured()), judge(measured(temperature_c=95.0))
    assert verdict_of(phase, [good]) is PASS
    assert verdict_of(phase, [good], whole=False) is NOT_JUDGED
    assert verdict_of(phase, [bad], whole=False) is FAIL
    assert verdict_of(phase, []) is NOT_JUDGED
    assert Check.ERRORS in PURPOSE[phase]


@given(st.lists(st.sampled_from(Verdict), max_size=6))
def test_only_passes_pass(verdicts: list[Verdict]) -> None:
    assert (overall(verdicts) is PASS) == (bool(verdicts) and all(one is PASS for one in verdicts))
    assert (overall(verdicts) is FAIL) == (FAIL in verdicts)


known = st.none() | st.floats(-20.0, 120.0)
samples = st.lists(
    st.builds(
        Sample,
        at_s=st.floats(0.0, 100.0),
        state=st.sampled_from(WorkerState),
        tflops=st.none() | st.floats(0.0, 1000.0),
        reserved_bytes=st.none() | st.integers(0, 2000),
        temperature_c=known,
        throttle_pct=st.none() | st.floats(0.0, 100.0),
    ),
    max_size=30,
).map(lambda found: sorted(found, key=lambda sample: sample.at_s))


@given(samples, st.integers(0, 2000) | st.none(), st.sampled_from(WorkerState))
def test_anything_that_may_be_seen_is_judged(seen: list[Sample], cap_bytes: int | None, state: WorkerState) -> None:
    judged = judge(Measured(row=with_changes(ROW, cap_bytes=cap_bytes, state=state), length_s=100.0, samples=seen))
    assert [finding.check for finding in judged.findings] == list(Check)
    assert all(finding.text for finding in judged.findings)
    if all(sample.temperature_c is None for sample in seen):
        assert verdict(judged, Check.TEMPERATURE) is NOT_JUDGED


@given(samples, st.floats(0.0, 50.0))
def test_a_warmer_card_is_never_better_off(seen: list[Sample], more_c: float) -> None:
    warmer = [
        replace(sample, temperature_c=None if sample.temperature_c is None else sample.temperature_c + more_c)
        for sample in seen
    ]
    before, after = (judge(Measured(row=ROW, length_s=100.0, samples=given_)) for given_ in (seen, warmer))
    if verdict(before, Check.TEMPERATURE) is FAIL:
        assert verdict(after, Check.TEMPERATURE) is FAIL
