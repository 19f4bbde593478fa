"""The classic policy against the numbers of the guide, one situation in each test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.policy.test_adaptive import Said
from tests.scene import GUIDES
from workers.policy.base import Run
from workers.policy.classic import CHECKS_PER_BLIND_TRY, ClassicPolicy
from workers.settings import WorkloadSpec

PC2 = WorkloadSpec(name="matmul", dtype="fp16", size=4096, batch=128, seed=0)
GUIDE_SIZES = [4096, 2867, 2007, 1404, 983, 688, 481, 337, 256]
GUIDE_BATCHES = [128, 112, 96, 80, 64, 48, 32, 32, 32]

NEED_BYTES = 1 << 20

#: The result of the current part, or a mere look at memory, and the memory allowed then.
Event = tuple[str, int]
OK: Event = ("ok", NEED_BYTES)
GONE: Event = ("oom", 0)
BACK: Event = ("oom", NEED_BYTES)
LOW: Event = ("look", NEED_BYTES - 1)
ENOUGH: Event = ("look", NEED_BYTES)

ROUNDED = {"size": 3, "size_floor": 1, "size_decay": 0.9, "batch_step": 0}


class Knows(Said):
    """A workload whose steps each need 1 MiB."""

    def needed_bytes(self, size: int, batch: int) -> int | None:
        return NEED_BYTES


def classic(
    *, size: int = PC2.size, batch: int = PC2.batch, said: Said | None = None, **settings: float
) -> ClassicPolicy:
    memory: dict[str, Any] = settings
    asked = replace(PC2, size=size, batch=batch)
    return ClassicPolicy(replace(GUIDES, **memory), asked, said or Knows())


def play(policy: ClassicPolicy, *events: Event) -> Run | None:
    """Let the events happen; return the next run."""
    run: Run | None = None
    for name, allowed_bytes in events:
        if name != "look":
            if run is None:
                run = policy._step_after(policy.failures)
            if name == "ok":
                policy.succeeded(run, 1, False)
            else:
                policy.failed(run, 0)
        run = policy.next(allowed_bytes)
    return run


def in_emergency(policy: ClassicPolicy) -> ClassicPolicy:
    for _ in range(20):
        if policy.is_emergency:
            return policy
        play(policy, GONE)
    raise AssertionError("20 failures led to no emergency")


@pytest.mark.parametrize(
    ("events", "is_probe"), [([GONE], True), ([GONE, OK], False), ([OK, GONE], False)]
)
def test_the_search_ends_with_the_first_good_step(events: list[Event], is_probe: bool) -> None:
    run = play(classic(), *events)
    assert run.is_probe == is_probe


@pytest.mark.parametrize(
    ("settings", "events", "failures", "size", "batch"),
    [
        *(
            pytest.param(
                {},
                [LOW, *[GONE] * failures],
                failures,
                size,
                batch,
                id=f"guide after {failures}",
            )
            for failures, (size, batch) in enumerate(zip(GUIDE_SIZES, GUIDE_BATCHES, strict=True))
        ),
        pytest.param({}, [*[GONE] * 8, BACK], 8, 256, 32,
         id="the floor is tried again where its need is there"),
        pytest.param({}, [BACK], 1, 2867, 112, id="also where memory came back"),
        *(
            pytest.param(
                {}, [GONE, event], 1, 2867, 112, id="nothing but a failure changes the step"
            )
            for event in (OK, LOW, ENOUGH)
        ),
        pytest.param({"size": 200, "batch": 8}, [LOW], 0, 200, 8,
         id="a base below a floor is the floor"),
        pytest.param({"size": 256}, [GONE], 1, 256, 112,
         id="at the size floor the batch still shrinks"),
        # 3 * 0.9 ** failures is 2.7, 2.43, 2.19, and only at the fourth failure below 2
        pytest.param(ROUNDED, [GONE], 1, 2, 128, id="rounding"),
        pytest.param(ROUNDED, [GONE] * 2, 4, 1, 128,
         id="failures that rounding hides are counted on"),
    ],
)  # fmt: skip
def test_the_step_after_what_happened(
    settings: dict[str, Any], events: list[Event], failures: int, size: int, batch: int
) -> None:
    policy = classic(**settings)
    assert play(policy, *events) == Run(size=size, batch=batch)
    assert policy.failures == failures


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
    policy = in_emergency(classic(**settings))
    assert play(policy, LOW) is None
    assert play(policy, ENOUGH) == policy.floor == Run(size=size, batch=batch)
    assert policy.failures == failures
    play(policy, *[GONE] * 1000)
    assert policy.failures == failures


@pytest.mark.parametrize(
    ("every", "released_after"), [(15, [15, 30, 45]), (0, []), (1, list(range(1, 46)))]
)
def test_memory_is_released_after_every_so_many_good_steps(
    every: int, released_after: list[int]
) -> None:
    policy, released = classic(cleanup_every=every), []
    for step in range(1, 46):
        run = play(policy, OK)
        assert run == Run(size=4096, batch=128)
        if run.releases_first:
            released.append(step)
    assert released == released_after


class TestEmergency:
    def test_a_failing_floor_is_an_emergency_with_its_need(self) -> None:
        policy = classic()
        assert play(policy, *[GONE] * 9) is None
        assert policy.is_emergency
        assert policy.reason == (
            "out of memory at the smallest step (size 256 batch 32, it needs 1.0 MiB), 0.0 MiB free"
        )

    def test_a_wrong_known_need_is_tried_every_tenth_time(self) -> None:
        policy = in_emergency(classic())
        assert play(policy, ENOUGH, BACK) is None
        for _ in range(CHECKS_PER_BLIND_TRY - 2):
            assert play(policy, ENOUGH) is None
        assert play(policy, ENOUGH) == policy.floor
