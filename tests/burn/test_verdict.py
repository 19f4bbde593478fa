"""Where a pass ends: the guides' metrics at their limits, and what nobody can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.slot import HeadState
from orchestrator.lab.burn.verdict import (
    PURPOSE,
    BurnCheck,
    BurnPhase,
    BurnVerdict,
    JudgedWorker,
    Look,
    Measured,
    judge,
    overall,
    verdict_of,
)
from tests.burn.scene import GOOD, ROW, measured
from tests.factories import with_changes
from workers.messages import WorkerState

PASS, FAIL, NOT_JUDGED = BurnVerdict.PASS, BurnVerdict.FAIL, BurnVerdict.NOT_JUDGED


def verdict(judged: JudgedWorker, check: BurnCheck) -> BurnVerdict:
    return judged.findings[check].verdict


def text(judged: JudgedWorker, check: BurnCheck) -> str:
    return judged.findings[check].text


def test_a_cool_card_that_did_its_work_passes_every_check() -> None:
    judged = judge(measured())
    assert [(check, finding.verdict) for check, finding in judged.findings.items()] == [
        (check, PASS) for check in BurnCheck
    ]
    assert verdict_of(BurnPhase.HEAT, [judged]) is PASS


Seen: TypeAlias = dict[str, Any]
"""What the samples hold: values, or functions of the second."""

RUNNING, EMERGENCY, PAUSED = WorkerState.RUNNING, WorkerState.EMERGENCY, WorkerState.PAUSED


@pytest.mark.parametrize(
    ("check", "seen", "expected", "said"),
    [
        # More than nine tenths of the cap are held, and never more than all.
        *((BurnCheck.MEMORY, {"reserved_bytes": held_bytes}, expected, said) for held_bytes, expected, said in (
            (901, PASS, "90.1 % of its cap"), (900, FAIL, "more than 90 %"), (1000, PASS, ""), (1001, FAIL, "over its"),
            (0, FAIL, ""), (lambda at_s: 1001 if at_s == 7 else 950, FAIL, "over its cap"),
            (lambda at_s: 950 if at_s > 100 else 200, PASS, "held 95 %"),  # climbs to the cap
            (lambda at_s: 950 if at_s < 200 else 500, FAIL, ""),  # gave way for most of the time
        )),
        (BurnCheck.ERRORS, {"state": lambda at_s: EMERGENCY if at_s % 100 == 7 else RUNNING}, FAIL,
         "without memory for any step for 1 % of the time"),
        # Sustained is half a minute on end, or a tenth of the time.
        *((BurnCheck.TEMPERATURE, {"temperature_c": heat}, expected, said) for heat, expected, said in (
            (None, NOT_JUDGED, "no sensor"), (79.9, PASS, "80 C at most"), (80.0, FAIL, "at or above 80 C"),
            (lambda at_s: 90.0 if at_s < 30 else 60.0, PASS, "for 28 s on end and 4.8 % of the time"),
            (lambda at_s: 90.0 if at_s < 32 else 60.0, FAIL, "for 30 s on end"),
            (lambda at_s: 80.0 if at_s % 10 == 0 else 60.0, PASS, "9.8 % of the time"),
            (lambda at_s: 80.0 if at_s % 9 == 0 else 60.0, FAIL, "11 % of the time"),
            (lambda at_s: None if at_s % 2 else 81.0, FAIL, "100 %"),  # gaps do not make it shorter
        )),
        *((BurnCheck.SLOWDOWN, seen, expected, said) for seen, expected, said in (
            ({"alarms": ("power brake",)}, FAIL, "alarm: power brake"),
            ({"throttle_pct": 5.1}, FAIL, "slowed itself down"), ({"throttle_pct": 5.0}, PASS, "none"),
            ({"state": WorkerState.THROTTLED}, FAIL, "100 % of the time"),
            ({"state": lambda at_s: PAUSED if at_s % 5 == 0 else RUNNING}, FAIL, "of the time"),
        )),
        # Throughput must neither scatter nor fall; on a card, after a minute.
        *((BurnCheck.THROUGHPUT, {"tflops": tflops}, expected, said) for tflops, expected, said in (
            (20.0, PASS, "scatters by 0 %"), (lambda at_s: 21.0 if at_s // 10 % 2 else 19.5, PASS, ""),
            (lambda at_s: 25.0 if at_s // 10 % 2 else 15.0, FAIL, "scatters"),
            (lambda at_s: 20.0 if at_s <= 360 else 18.98, FAIL, "in the second half"),  # 360 is in neither half
            (lambda at_s: 20.0 if at_s < 360 else 19.5, PASS, ""),
            (lambda at_s: 5.0 if at_s < 100 else 20.0, PASS, ""),  # warms up
            (lambda at_s: 20.0 if at_s < 500 else None, FAIL, ""),  # stops
            (None, NOT_JUDGED, "counts no operations"),
        )),
        (BurnCheck.THROUGHPUT, {"length_s": 30.0}, NOT_JUDGED, "too short"),
        (BurnCheck.THROUGHPUT, {"length_s": 70.0}, PASS, ""),
    ],
)  # fmt: skip
def test_where_a_pass_ends(check: BurnCheck, seen: Seen, expected: BurnVerdict, said: str) -> None:
    finding = judge(measured(**seen)).findings[check]
    assert finding.verdict is expected
    assert said in finding.text


@pytest.mark.parametrize(
    ("check", "changes", "expected", "said"),
    [
        (BurnCheck.ERRORS, {"steps_error": 1}, FAIL, "1 error of the workload"),
        (BurnCheck.ERRORS, {"restarts": 1}, FAIL, "1 restart"),
        (BurnCheck.ERRORS, {"steps_ok": 0}, FAIL, "did no step"),
        (BurnCheck.ERRORS, {"state": HeadState.QUARANTINED, "reason": "5 deaths"}, FAIL,
         "ended QUARANTINED: 5 deaths"),
        (BurnCheck.ERRORS, {"state": HeadState.LOST}, FAIL, "ended LOST"),
        (BurnCheck.ERRORS, {"state": HeadState.RESTARTING}, FAIL, "ended RESTARTING"),
        (BurnCheck.ERRORS, {"state": EMERGENCY}, FAIL, "ended EMERGENCY"),
        # An out-of-memory error that was survived is no error.
        (BurnCheck.ERRORS, {"steps_oom": 3, "oom_count": 5, "emergency_count": 5}, PASS, "none"),
        (BurnCheck.RESULTS, {"verify_checks": 10}, PASS, "10 results checked"),
        (BurnCheck.RESULTS, {"verify_checks": 10, "verify_errors": 1}, FAIL, "1 of 10"),
        (BurnCheck.RESULTS, {"verify_checks": 0}, NOT_JUDGED, "no result was checked"),
        (BurnCheck.RESULTS, {"verify_checks": 0, "verify_errors": 1}, FAIL, "1 of 0"),
        (BurnCheck.THROUGHPUT, {"device": "cpu"}, NOT_JUDGED, "a processor"),
    ],
)  # fmt: skip
def test_what_a_row_says_of_its_worker(
    check: BurnCheck, changes: dict[str, Any], expected: BurnVerdict, said: str
) -> None:
    finding = judge(measured(with_changes(ROW, **changes))).findings[check]
    assert finding.verdict is expected
    assert said in finding.text


def test_results_that_were_checked_for_a_while_are_not_judged() -> None:
    judged = judge(measured(with_changes(ROW, verify_checks=10), unchecked="no memory for it"))
    assert text(judged, BurnCheck.RESULTS) == "10 results checked, then no more: no memory for it"
    assert verdict_of(BurnPhase.CAPS, [judged]) is NOT_JUDGED
    assert (
        verdict(
            judge(measured(with_changes(ROW, verify_errors=1), unchecked="no memory")),
            BurnCheck.RESULTS,
        )
        is FAIL
    )


def test_without_sensors_heat_has_no_verdict_and_the_rest_has() -> None:
    judged = judge(measured(temperature_c=None, throttle_pct=None))
    assert verdict(judged, BurnCheck.SLOWDOWN) is NOT_JUDGED
    assert judged.figures.slowed_pct is None
    assert (
        verdict_of(BurnPhase.HEAT, [judged])
        is verdict_of(BurnPhase.HEAT, [judge(measured()), judged])
        is NOT_JUDGED
    )
    assert verdict_of(BurnPhase.CAPS, [judged]) is verdict_of(BurnPhase.FULL_LOAD, [judged]) is PASS


def test_after_a_gap_in_the_samples_no_window_overlaps_another() -> None:
    seen = measured(tflops=lambda at_s: 5.0 if 400 <= at_s < 410 else 20.0)
    figures = judge(
        replace(seen, looks=[each for each in seen.looks if not 200 < each[0] < 400])
    ).figures
    assert figures.tflops_mean == pytest.approx(20.0, rel=0.05)


def test_a_worker_that_never_came_fails() -> None:
    row = with_changes(
        ROW, state=HeadState.STARTING, cap_bytes=None, steps_ok=0, verify_checks=0, device=None
    )
    judged = judge(Measured(row=row, length_s=60.0, looks=()))
    assert [check for check in BurnCheck if verdict(judged, check) is FAIL] == [BurnCheck.ERRORS]
    assert [check for check in BurnCheck if verdict(judged, check) is PASS] == []


def test_a_processor_is_not_judged_by_what_is_hot_for_a_card() -> None:
    judged = judge(measured(temperature_c=95.0, temperature_of="processor"))
    assert verdict(judged, BurnCheck.TEMPERATURE) is NOT_JUDGED


@pytest.mark.parametrize("phase", BurnPhase)
def test_a_phase_cut_short_or_without_workers_has_no_pass(phase: BurnPhase) -> None:
    good, bad = judge(measured()), judge(measured(temperature_c=95.0))
    assert verdict_of(phase, [good]) is PASS
    assert verdict_of(phase, [good], whole=False) is NOT_JUDGED
    assert verdict_of(phase, [bad], whole=False) is FAIL
    assert verdict_of(phase, []) is NOT_JUDGED
    assert BurnCheck.ERRORS in PURPOSE[phase]


@given(st.lists(st.sampled_from(BurnVerdict), max_size=6))
def test_only_passes_pass(verdicts: list[BurnVerdict]) -> None:
    assert (overall(verdicts) is PASS) == (bool(verdicts) and all(one is PASS for one in verdicts))
    assert (overall(verdicts) is FAIL) == (FAIL in verdicts)


known = st.none() | st.floats(-20.0, 120.0)
rows = st.builds(
    replace,
    st.just(GOOD),
    state=st.sampled_from(WorkerState),
    tflops=st.none() | st.floats(0.0, 1000.0),
    reserved_bytes=st.none() | st.integers(0, 2000),
    temperature_c=known,
    throttle_pct=st.none() | st.floats(0.0, 100.0),
)
looks = st.lists(st.tuples(st.floats(0.0, 100.0), rows), max_size=30).map(
    lambda found: sorted(found, key=lambda look: look[0])
)


@given(looks, st.integers(0, 2000) | st.none(), st.sampled_from(WorkerState))
def test_anything_that_may_be_seen_is_judged(
    seen: list[Look], cap_bytes: int | None, state: WorkerState
) -> None:
    judged = judge(
        Measured(
            row=with_changes(ROW, cap_bytes=cap_bytes, state=state), length_s=100.0, looks=seen
        )
    )
    assert list(judged.findings) == list(BurnCheck)
    assert all(finding.text for finding in judged.findings.values())
    if all(row.temperature_c is None for _, row in seen):
        assert verdict(judged, BurnCheck.TEMPERATURE) is NOT_JUDGED


@given(looks, st.floats(0.0, 50.0))
def test_a_warmer_card_is_never_better_off(seen: list[Look], more_c: float) -> None:
    warmer = [
        (at_s, replace(row, temperature_c=None if (c := row.temperature_c) is None else c + more_c))
        for at_s, row in seen
    ]
    before, after = (
        judge(Measured(row=ROW, length_s=100.0, looks=given_)) for given_ in (seen, warmer)
    )
    if verdict(before, BurnCheck.TEMPERATURE) is FAIL:
        assert verdict(after, BurnCheck.TEMPERATURE) is FAIL
