"""The classic policy against the numbers of the guide, one situation a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.scene import GUIDES
from workers.policy.base import Decision, Emergency, Event, Pressure, Release, Run, StepOk, StepOom
from workers.policy.classic import (
    GOOD_STEPS_PER_RETRY,
    PRESSURES_PER_BLIND_TRY,
    ClassicPolicy,
    ClassicState,
)
from workers.settings import WorkloadSpec

PC2 = WorkloadSpec(name="matmul", dtype="fp16", size=4096, batch=128, seed=0)
GUIDE_SIZES = [4096, 2867, 2007, 1404, 983, 688, 481, 337, 256]
GUIDE_BATCHES = [128, 112, 96, 80, 64, 48, 32, 32, 32]

OK = StepOk(at_s=0.0, peak_bytes=1, allowed_bytes=None)
NEED_BYTES = 1 << 20
GONE = StepOom(at_s=0.0, needed_bytes=NEED_BYTES, at_least_bytes=0, free_bytes=0, allowed_bytes=0)
BACK = replace(GONE, free_bytes=NEED_BYTES)
NEED_UNKNOWN = replace(BACK, needed_bytes=None)
PRESSURE_ENOUGH = Pressure(
    at_s=0.0, allowed_bytes=NEED_BYTES, free_bytes=NEED_BYTES, needed_at_floor_bytes=NEED_BYTES
)
PRESSURE_LOW = replace(PRESSURE_ENOUGH, free_bytes=NEED_BYTES - 1)
PRESSURE_NEED_UNKNOWN = replace(PRESSURE_ENOUGH, needed_at_floor_bytes=None)
EARNED = [OK] * GOOD_STEPS_PER_RETRY

NO_CLEANUP = {"cleanup_every": 0}
ROUNDED = {"size": 3, "size_floor": 1, "size_decay": 0.9, "batch_step": 0}


def classic(*, size: int = PC2.size, batch: int = PC2.batch, **settings: float) -> ClassicPolicy:
    memory: dict[str, Any] = settings
    return ClassicPolicy(replace(GUIDES, **memory), replace(PC2, size=size, batch=batch))


def play(
    policy: ClassicPolicy, *events: Event, state: ClassicState | None = None
) -> tuple[ClassicState, Decision]:
    """Feed the events, return the last state and decision."""
    state = policy.initial(0, None) if state is None else state
    decision: Decision | None = None
    for event in events:
        state, decision = policy.decide(state, event)
    assert decision is not None
    return state, decision


def in_emergency(policy: ClassicPolicy) -> ClassicState:
    state = policy.initial(0, None)
    for _ in range(20):
        if state.emergency:
            return state
        state, _ = policy.decide(state, GONE)
    raise AssertionError("20 failures led to no emergency")


@pytest.mark.parametrize(
    ("events", "is_probe"), [([GONE], True), ([GONE, OK], False), ([OK, GONE], False)]
)
def test_the_search_ends_with_the_first_good_step(events: list[Event], is_probe: bool) -> None:
    state, decision = play(classic(), *events)
    assert isinstance(decision, Run)
    assert decision.is_probe == is_probe
    assert classic().load(classic().dump(state)) == state


@pytest.mark.parametrize(
    ("settings", "events", "failures", "size", "batch"),
    [
        *(
            pytest.param(
                {},
                [PRESSURE_LOW, *[GONE] * failures],
                failures,
                size,
                batch,
                id=f"guide after {failures}",
            )
            for failures, (size, batch) in enumerate(zip(GUIDE_SIZES, GUIDE_BATCHES, strict=True))
        ),
        pytest.param({}, [*[GONE] * 8, BACK], 8, 256, 32,
         id="the floor is retried before the emergency"),
        *(
            pytest.param(
                {}, [GONE, event], 1, 2867, 112, id="nothing but a failure changes the step"
            )
            for event in (OK, PRESSURE_LOW, PRESSURE_ENOUGH, PRESSURE_NEED_UNKNOWN)
        ),
        pytest.param({"size": 200, "batch": 8}, [PRESSURE_LOW], 0, 200, 8,
         id="a base below a floor is the floor"),
        pytest.param({"size": 256}, [GONE], 1, 256, 112,
         id="at the size floor the batch still shrinks"),
        # 3 * 0.9 ** failures is 2.7, 2.43, 2.19, and only at the fourth failure below 2
        pytest.param(ROUNDED, [GONE], 1, 2, 128, id="rounding"),
        pytest.param(ROUNDED, [GONE] * 2, 4, 1, 128,
         id="failures that rounding hides are counted on"),
        pytest.param({}, [BACK], 0, 4096, 128, id="a first failure is retried if memory came back"),
        pytest.param({}, [NEED_UNKNOWN], 1, 2867, 112, id="a need that is unknown is not retried"),
        *(
            pytest.param({}, [BACK] * times, *expected, id=f"each size is retried once: {times}")
            for times, expected in ((2, (1, 2867, 112)), (3, (1, 2867, 112)), (4, (2, 2007, 96)))
        ),
        pytest.param(NO_CLEANUP, [BACK, *EARNED[1:], BACK], 1, 2867, 112,
         id="a retry not yet earned"),
        pytest.param(NO_CLEANUP, [BACK, *EARNED, BACK], 0, 4096, 128,
         id="a retry that good steps earned"),
    ],
)  # fmt: skip
def test_the_step_after_what_happened(
    settings: dict[str, Any], events: list[Event], failures: int, size: int, batch: int
) -> None:
    state, decision = play(classic(**settings), *events)
    assert decision == Run(size=size, batch=batch)
    assert state.failures == failures


@pytest.mark.parametrize(
    ("settings", "failures", "size", "batch"),
    [
        ({}, 8, 256, 32),
        ({"size": 256}, 6, 256, 32),
        ({"size": 200, "batch": 8}, 0, 200, 8),
        ({"size_decay": 1.0, "batch_step": 0}, 0, 4096, 128),
    ],
)
def test_the_floor_is_where_nothing_shrinks_any_further(
    settings: dict[str, Any], failures: int, size: int, batch: int
) -> None:
    policy = classic(**settings)
    state = in_emergency(policy)
    assert isinstance(play(policy, PRESSURE_LOW, state=state)[1], Emergency)
    assert (
        play(policy, PRESSURE_ENOUGH, state=state)[1] == policy.floor == Run(size=size, batch=batch)
    )
    assert state.failures == play(policy, *[GONE] * 1000, state=state)[0].failures == failures


class TestCleanUp:
    @pytest.mark.parametrize(
        ("every", "released_after"), [(15, [15, 30, 45]), (0, []), (1, list(range(1, 46)))]
    )
    def test_memory_is_released_after_every_so_many_good_steps(
        self, every: int, released_after: list[int]
    ) -> None:
        policy, state, released = classic(cleanup_every=every), ClassicState(), []
        for step in range(1, 46):
            state, decision = policy.decide(state, OK)
            if decision == Release():
                released.append(step)
                state, decision = policy.decide(state, PRESSURE_LOW)
            assert decision == Run(size=4096, batch=128)
        assert released == released_after


class TestEmergency:
    def test_a_failing_floor_is_an_emergency_with_its_need(self) -> None:
        state, decision = play(classic(), *[GONE] * 9)
        assert state.emergency
        assert decision == Emergency(
            reason="out of memory at the smallest step (size 256 batch 32, it needs 1.0 MiB), 0.0 MiB free"
        )

    def test_with_an_unknown_need_it_is_tried_every_tenth_time(self) -> None:
        policy = classic()
        state, tried_at = in_emergency(policy), []
        for pressure in range(1, 31):
            state, decision = policy.decide(state, PRESSURE_NEED_UNKNOWN)
            if isinstance(decision, Run):
                tried_at.append(pressure)
                state, decision = policy.decide(state, NEED_UNKNOWN)
            assert isinstance(decision, Emergency)
        assert tried_at == [10, 20, 30]

    def test_a_wrong_known_need_is_tried_every_tenth_time(self) -> None:
        policy = classic()
        state, decision = play(policy, PRESSURE_ENOUGH, BACK, state=in_emergency(policy))
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


@pytest.mark.parametrize(
    ("key", "values", "complaint"),
    [
        ("failures", (-1, 9, 1.0, True, None), "failures must be"),
        ("good_steps_to_retry", (20,), "good_steps_to_retry must be"),
        ("steps_since_cleanup", (15,), "steps_since_cleanup must be"),
        ("pressures_since_try", (10,), "pressures_since_try must be"),
        ("emergency", (1,), "emergency must be"),
        ("emergency", (True,), "could still shrink"),
    ],
)
def test_a_damaged_mapping_is_refused(key: str, values: tuple[Any, ...], complaint: str) -> None:
    policy = classic()
    for value in values:
        with pytest.raises(ValueError, match=complaint):
            policy.load({**policy.dump(ClassicState()), key: value})
