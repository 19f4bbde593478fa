"""The classic policy against the numbers of the guide, one situation a test."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.scene import GUIDES
from workers.policy.base import Decision, Emergency, Event, Growth, Pressure, Release, Run, StepOk, StepOom
from workers.policy.classic import (
    GOOD_STEPS_PER_RETRY,
    PRESSURES_PER_BLIND_TRY,
    ClassicPolicy,
    ClassicState,
)
from workers.policy.registry import make_policy
from workers.settings import FailureKind, WorkloadSpec

PC2 = WorkloadSpec(name="matmul", dtype="fp16", size=4096, batch=128, seed=0)
GROWTH = Growth(
    size_power=2.0, batch_power=0.0, fills_claim=True, needed_bytes=lambda size, _: 6 * size**2, most_bytes=1 << 30
)

GUIDE_SIZES = [4096, 2867, 2007, 1404, 983, 688, 481, 337, 256]
GUIDE_BATCHES = [128, 112, 96, 80, 64, 48, 32, 32, 32]

OK = StepOk(at_s=0.0, size=1, batch=1, peak_bytes=1, seconds=0.1, allowed_bytes=None)
NEED_BYTES = 1 << 20
OOM_MEMORY_GONE = StepOom(
    at_s=0.0, size=1, batch=1, kind=FailureKind.DEFINITE, needed_bytes=NEED_BYTES, free_bytes=0, allowed_bytes=0
)
OOM_MEMORY_BACK = replace(OOM_MEMORY_GONE, free_bytes=NEED_BYTES)
OOM_NEED_UNKNOWN = replace(OOM_MEMORY_BACK, needed_bytes=None)
PRESSURE_LOW = Pressure(
    at_s=0.0, allowed_bytes=NEED_BYTES - 1, free_bytes=NEED_BYTES - 1, needed_at_floor_bytes=NEED_BYTES
)
PRESSURE_ENOUGH = Pressure(at_s=0.0, allowed_bytes=NEED_BYTES, free_bytes=NEED_BYTES, needed_at_floor_bytes=NEED_BYTES)
PRESSURE_NEED_UNKNOWN = Pressure(at_s=0.0, allowed_bytes=NEED_BYTES, free_bytes=NEED_BYTES, needed_at_floor_bytes=None)


def classic(*, size: int = PC2.size, batch: int = PC2.batch, **settings: float) -> ClassicPolicy:
    memory: dict[str, Any] = settings
    return ClassicPolicy(replace(GUIDES, **memory), replace(PC2, size=size, batch=batch))


def play(policy: ClassicPolicy, *events: Event, state: ClassicState | None = None) -> tuple[ClassicState, Decision]:
    """Feed the events, return the last state and decision."""
    state = policy.initial(0, None) if state is None else state
    decision: Decision | None = None
    for event in events:
        state, decision = policy.decide(state, event)
    assert decision is not None
    return state, decision


def in_emergency(policy: ClassicPolicy) -> ClassicState:
    state, _ = play(policy, *[OOM_MEMORY_GONE] * len(GUIDE_SIZES))
    assert state.emergency
    return state


class TestShrinking:
    @pytest.mark.parametrize(
        ("failures", "size", "batch"), list(zip(range(9), GUIDE_SIZES, GUIDE_BATCHES, strict=True))
    )
    def test_size_and_batch_after_n_failures_are_those_of_the_guide(self, failures: int, size: int, batch: int) -> None:
        state, decision = play(classic(), PRESSURE_LOW, *[OOM_MEMORY_GONE] * failures)
        assert decision == Run(size=size, batch=batch)
        assert state.failures == failures

    @pytest.mark.parametrize("event", [OK, PRESSURE_LOW, PRESSURE_ENOUGH, PRESSURE_NEED_UNKNOWN])
    def test_nothing_but_a_failure_changes_the_step(self, event: Event) -> None:
        assert play(classic(), OOM_MEMORY_GONE, event)[1] == Run(size=2867, batch=112)

    def test_the_floor_is_where_neither_formula_shrinks_any_further(self) -> None:
        assert classic().floor == Run(size=256, batch=32)

    def test_a_base_below_a_floor_is_the_floor(self) -> None:
        policy = classic(size=200, batch=8)
        assert policy.floor == Run(size=200, batch=8)
        assert play(policy, PRESSURE_LOW)[1] == Run(size=200, batch=8)
        assert isinstance(play(policy, OOM_MEMORY_GONE)[1], Emergency)

    def test_at_the_size_floor_the_batch_still_shrinks(self) -> None:
        policy = classic(size=256)
        assert play(policy, OOM_MEMORY_GONE)[1] == Run(size=256, batch=112)
        assert policy.floor == Run(size=256, batch=32)

    def test_failures_are_counted_on_when_rounding_would_leave_the_step_as_it_was(self) -> None:
        # 3 * 0.9 ** failures is 2.7, 2.43, 2.19, and only at the fourth failure below 2
        policy = classic(size=3, size_floor=1, size_decay=0.9, batch_step=0)
        assert play(policy, OOM_MEMORY_GONE) == (ClassicState(failures=1), Run(size=2, batch=128))
        assert play(policy, *[OOM_MEMORY_GONE] * 2) == (ClassicState(failures=4), Run(size=1, batch=128))

    def test_settings_that_never_shrink_go_straight_to_the_emergency(self) -> None:
        policy = classic(size_decay=1.0, batch_step=0)
        assert policy.floor == Run(size=4096, batch=128)
        assert isinstance(play(policy, OOM_MEMORY_GONE)[1], Emergency)

    def test_failures_stop_at_the_floor(self) -> None:
        state, _ = play(classic(), *[OOM_MEMORY_GONE] * 1000)
        assert state.failures == 8

    def test_a_probable_failure_counts_like_a_definite_one(self) -> None:
        probable = replace(OOM_MEMORY_GONE, kind=FailureKind.PROBABLE)
        assert play(classic(), probable) == play(classic(), OOM_MEMORY_GONE)


class TestRetry:
    def test_the_first_failure_is_retried_at_the_same_size_if_memory_came_back(self) -> None:
        state, decision = play(classic(), OOM_MEMORY_BACK)
        assert decision == Run(size=4096, batch=128)
        assert state.failures == 0

    @pytest.mark.parametrize("event", [OOM_MEMORY_GONE, OOM_NEED_UNKNOWN])
    def test_without_the_memory_it_shrinks_at_once(self, event: StepOom) -> None:
        assert play(classic(), event)[1] == Run(size=2867, batch=112)

    def test_a_second_failure_at_the_same_size_shrinks(self) -> None:
        assert play(classic(), *[OOM_MEMORY_BACK] * 2)[1] == Run(size=2867, batch=112)

    def test_each_size_has_its_own_retry(self) -> None:
        _, decision = play(classic(), *[OOM_MEMORY_BACK] * 3)
        assert decision == Run(size=2867, batch=112)
        _, decision = play(classic(), *[OOM_MEMORY_BACK] * 4)
        assert decision == Run(size=2007, batch=96)

    def test_a_retry_must_be_earned_by_good_steps(self) -> None:
        policy = classic(cleanup_every=0)
        earned = [OK] * GOOD_STEPS_PER_RETRY
        assert play(policy, OOM_MEMORY_BACK, *earned[1:], OOM_MEMORY_BACK)[1] == Run(size=2867, batch=112)
        assert play(policy, OOM_MEMORY_BACK, *earned, OOM_MEMORY_BACK)[1] == Run(size=4096, batch=128)


class TestCleanUp:
    def test_memory_is_released_after_every_fifteenth_good_step(self) -> None:
        policy, state, released_after = classic(), ClassicState(), []
        for step in range(1, 46):
            state, decision = policy.decide(state, OK)
            if decision == Release():
                released_after.append(step)
                state, decision = policy.decide(state, PRESSURE_LOW)
            assert decision == Run(size=4096, batch=128)
        assert released_after == [15, 30, 45]

    def test_zero_never_releases(self) -> None:
        policy, state = classic(cleanup_every=0), ClassicState()
        for _ in range(100):
            state, decision = policy.decide(state, OK)
            assert isinstance(decision, Run)
        assert state == ClassicState()

    def test_one_releases_after_every_good_step(self) -> None:
        assert play(classic(cleanup_every=1), OK)[1] == Release()

    def test_a_failure_starts_the_count_anew_because_its_recovery_released_everything(self) -> None:
        policy = classic()
        state, decision = play(policy, *[OK] * 14, OOM_MEMORY_GONE, *[OK] * 14)
        assert decision == Run(size=2867, batch=112)
        assert play(policy, OK, state=state)[1] == Release()


class TestEmergency:
    def test_the_floor_failing_is_an_emergency_that_says_what_it_needs(self) -> None:
        state, decision = play(classic(), *[OOM_MEMORY_GONE] * 9)
        assert state.emergency
        assert decision == Emergency(
            reason="out of memory at the smallest step (size 256 batch 32, it needs 1.0 MiB), 0.0 MiB free"
        )

    def test_the_floor_is_retried_once_before_the_emergency_if_memory_came_back(self) -> None:
        state, decision = play(classic(), *[OOM_MEMORY_GONE] * 8, OOM_MEMORY_BACK)
        assert (state.emergency, decision) == (False, Run(size=256, batch=32))
        state, decision = play(classic(), OOM_MEMORY_BACK, state=state)
        assert state.emergency
        assert isinstance(decision, Emergency)

    def test_it_lasts_while_the_floor_does_not_fit(self) -> None:
        policy = classic()
        state = in_emergency(policy)
        for _ in range(100):
            state, decision = policy.decide(state, PRESSURE_LOW)
            assert isinstance(decision, Emergency)
        assert policy.decide(state, PRESSURE_ENOUGH)[1] == policy.floor

    def test_the_floor_is_tried_as_soon_as_its_known_need_is_free(self) -> None:
        policy = classic()
        assert policy.decide(in_emergency(policy), PRESSURE_ENOUGH)[1] == policy.floor

    def test_with_an_unknown_need_it_is_tried_every_tenth_time(self) -> None:
        policy = classic()
        state, tried_at = in_emergency(policy), []
        for pressure in range(1, 31):
            state, decision = policy.decide(state, PRESSURE_NEED_UNKNOWN)
            if isinstance(decision, Run):
                tried_at.append(pressure)
                state, decision = policy.decide(state, OOM_NEED_UNKNOWN)
            assert isinstance(decision, Emergency)
        assert tried_at == [10, 20, 30]

    def test_once_the_known_need_was_not_enough_it_is_tried_every_tenth_time_too(self) -> None:
        policy = classic()
        state, decision = play(policy, PRESSURE_ENOUGH, OOM_MEMORY_BACK, state=in_emergency(policy))
        assert isinstance(decision, Emergency)
        for _ in range(PRESSURES_PER_BLIND_TRY - 1):
            state, decision = policy.decide(state, PRESSURE_ENOUGH)
            assert isinstance(decision, Emergency)
        assert policy.decide(state, PRESSURE_ENOUGH)[1] == policy.floor

    def test_one_good_step_leaves_it_and_the_failures_stay(self) -> None:
        policy = classic()
        state, decision = play(policy, PRESSURE_ENOUGH, OK, state=in_emergency(policy))
        assert not state.emergency
        assert state.failures == 8
        assert decision == policy.floor


class TestResume:
    @pytest.mark.parametrize(
        "state",
        [
            ClassicState(),
            ClassicState(failures=3, good_steps_to_retry=7, steps_since_cleanup=14),
            ClassicState(failures=8, emergency=True, floor_tried_in_vain=True, pressures_since_try=9),
        ],
    )
    def test_a_state_survives_json(self, state: ClassicState) -> None:
        policy = classic()
        assert policy.load(json.loads(json.dumps(policy.dump(state)))) == state

    @pytest.mark.parametrize(
        ("damage", "complaint"),
        [
            ({"policy": "adaptive"}, "written by policy 'adaptive'"),
            ({"failures": -1}, "failures must be"),
            ({"failures": 9}, "failures must be"),
            ({"failures": 1.0}, "failures must be"),
            ({"failures": True}, "failures must be"),
            ({"failures": None}, "failures must be"),
            ({"good_steps_to_retry": 20}, "good_steps_to_retry must be"),
            ({"steps_since_cleanup": 15}, "steps_since_cleanup must be"),
            ({"pressures_since_try": 10}, "pressures_since_try must be"),
            ({"emergency": 1}, "emergency must be"),
            ({"emergency": True}, "could still shrink"),
            ({"surprise": 1}, "surprise"),
        ],
    )
    def test_a_foreign_or_damaged_mapping_is_refused(self, damage: dict[str, Any], complaint: str) -> None:
        policy = classic()
        with pytest.raises(ValueError, match=complaint):
            policy.load({**policy.dump(ClassicState()), **damage})

    def test_a_missing_key_is_refused_by_name(self) -> None:
        policy = classic()
        data = policy.dump(ClassicState())
        del data["failures"]
        with pytest.raises(ValueError, match="failures"):
            policy.load(data)

    def test_an_empty_mapping_is_refused(self) -> None:
        with pytest.raises(ValueError, match="written by policy None"):
            classic().load({})


class TestConstruction:
    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({"size": 0}, "workload.size"),
            ({"batch": 0}, "workload.batch"),
            ({"size_floor": 0}, "memory.size_floor"),
            ({"batch_floor": 0}, "memory.batch_floor"),
            ({"batch_step": -1}, "memory.batch_step"),
            ({"cleanup_every": -1}, "memory.cleanup_every"),
            ({"size_decay": 0.0}, "memory.size_decay"),
            ({"size_decay": 1.1}, "memory.size_decay"),
            ({"size_decay": float("nan")}, "memory.size_decay"),
        ],
    )
    def test_settings_that_cannot_work_are_refused_by_name(self, settings: dict[str, Any], key: str) -> None:
        with pytest.raises(ValueError, match=key):
            classic(**settings)

    @pytest.mark.parametrize("kind", [FailureKind.CONTEXT_CORRUPTED, FailureKind.OTHER])
    def test_no_policy_is_ever_asked_about_a_failure_that_is_not_about_memory(self, kind: FailureKind) -> None:
        with pytest.raises(ValueError, match=kind):
            replace(OOM_MEMORY_GONE, kind=kind)

    def test_the_registry_builds_a_policy_by_its_name(self) -> None:
        policy = make_policy("classic", GUIDES, PC2, GROWTH)
        assert policy.name == "classic"
        assert policy.decide(policy.initial(0, None), PRESSURE_LOW)[1] == Run(size=4096, batch=128)

    def test_the_registry_names_the_policies_there_are(self) -> None:
        with pytest.raises(ValueError, match=r"'clasic'.*classic"):
            make_policy("clasic", GUIDES, PC2, GROWTH)
