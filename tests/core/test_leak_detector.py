"""The leak detector distinguishes memory that is freed again from memory that stays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.leak_detector import NO_WATCH, LeakWatch, observe
from tests.factories import CPU, MEMORY, status_of
from tests.scene import MIB
from workers.messages import Progress, Status, WorkerState

CARD = replace(CPU, kind="cuda")

#: Statuses of one size before growth is known: the first one, three to settle, five for the base,
#: five recent.
UNTIL_KNOWN = 14


def told(rss_bytes: int | None, **changes: object) -> Status:
    usual: dict[str, Any] = {
        "slot": "pc1/0",
        "incarnation": 0,
        "device": CPU,
        "memory": MEMORY,
    }
    return status_of(**{**usual, "rss_bytes": rss_bytes, **changes})


def after(statuses: Iterable[Status], watch: LeakWatch = NO_WATCH) -> LeakWatch:
    for one in statuses:
        watch = observe(watch, one)
    return watch


@given(
    low=st.integers(0, 1000),
    teeth=st.lists(st.integers(0, 500), min_size=2, max_size=5),
    first=st.integers(0, 4),
    statuses=st.integers(UNTIL_KNOWN, 200),
)
def test_a_steady_sawtooth_is_no_leak(
    low: int, teeth: list[int], first: int, statuses: int
) -> None:
    """This holds if the base and the recent statuses each cover a whole tooth, of any form."""
    watch = after(
        told((low + teeth[(first + index) % len(teeth)]) * MIB) for index in range(statuses)
    )
    assert watch.growth_bytes is not None
    assert watch.growth_bytes <= 0


@pytest.mark.parametrize(
    "change",
    [
        *({"size": 4096}, {"batch": 64}, {"claim_bytes": 2}, {"claim_bytes": None}),
        *({"incarnation": 1}, {"memory_level": 2}, {"saved_step": 20}),
    ],
    ids=str,
)
def test_other_work_is_judged_from_the_beginning(change: dict[str, Any]) -> None:
    trains = bool(change.keys() & {"memory_level", "saved_step"})
    watch = after(training(100, step) if trains else told(100 * MIB) for step in range(30))
    assert watch.growth_bytes == 0
    other = training(900, 30, **change) if trains else told(900 * MIB, **change)
    watch = after([other] * (UNTIL_KNOWN - 1), watch)
    assert watch.growth_bytes is None
    assert observe(watch, other).growth_bytes == 0


def test_on_a_card_tensors_are_added_to_what_is_resident() -> None:
    tensors = [replace(MEMORY, allocated_bytes=index * MIB) for index in range(UNTIL_KNOWN)]
    assert (
        after(told(100 * MIB, device=CARD, memory=memory) for memory in tensors).growth_bytes == MIB
    )
    both = after(
        told((100 + index) * MIB, device=CARD, memory=memory)
        for index, memory in enumerate(tensors)
    )
    assert both.growth_bytes == 2 * MIB


def training(
    rss_mib: int, step: int, *, state: WorkerState = WorkerState.RUNNING, **progress: int
) -> Status:
    return told(rss_mib * MIB, state=state, progress=Progress(train_step=step, **progress))


def test_a_training_is_watched_from_its_third_step_on() -> None:
    slow_start = [training(100 + 40 * index, 700 + index // 10) for index in range(20)]
    assert after(slow_start).growth_bytes is None
    steady = [*slow_start, *[training(900, 702)] * UNTIL_KNOWN]
    assert after(steady).growth_bytes == 0
    assert after([*steady, *[training(990, 710)] * 5]).growth_bytes == 90 * MIB, (
        "a leak is found all the same"
    )


def test_a_state_that_waits_in_host_memory_is_no_leak() -> None:
    steady = [training(100, step) for step in range(30)]
    parked = [*steady, *[training(1500, 29, state=WorkerState.PARKED)] * 30]
    assert after(parked).growth_bytes is None
    assert after([*parked, *[training(1500, 30)] * UNTIL_KNOWN]).growth_bytes == 0, (
        "the copy may stay"
    )
