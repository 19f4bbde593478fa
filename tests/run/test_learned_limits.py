"""What a run knows of earlier ones and keeps for later ones, in a real store.

A broken one costs a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.record.events import EventLog
from orchestrator.run.learned_limits import LearnedLimits
from tests import factories
from tests.factories import REFERENCE, status_of
from tests.run.conftest import RunMaker
from tests.scene import events_in
from workers.learned_limits import LimitStore
from workers.settings import StoredLimit
from workers.units import GIB

PLANS = plan_slots(REFERENCE, Target())


def limit(size: int = 2 * GIB, **key: Any) -> StoredLimit:
    """Return one that was learned just now."""
    usual = {"workload": "matmul@0.1.0 batch=128 size=8192"}
    return factories.limit(size, learned_at_unix_s=time.time(), **usual, **key)


class Run:
    """What one run learns, with its event log."""

    def __init__(self, folder: Path, store: LimitStore) -> None:
        folder.mkdir()
        self._folder = folder
        self.log = EventLog(folder / "events.jsonl")
        self.limits = LearnedLimits(store, self.log)

    def sent(self, plans: tuple[SlotPlan, ...] = PLANS) -> tuple[SlotPlan, ...]:
        return self.limits.add_learned(plans, time.time())

    def learn(self, *learned: StoredLimit | None, save: bool = True) -> None:
        """Let each of some workers tell what it has learned."""
        for index, one in enumerate(learned):
            self.limits.take(status_of(f"pc1/{index}", learned=one))
        if save:
            self.limits.save()

    def told(self) -> list[str]:
        return [event["reason"] for event in events_in(self._folder, "limits_unavailable")]


@pytest.fixture
def store(tmp_path: Path) -> LimitStore:
    return LimitStore(tmp_path / "state" / "limits.json")


@pytest.fixture
def run(tmp_path: Path, store: LimitStore) -> Iterator[Run]:
    made = Run(tmp_path / "run", store)
    yield made
    made.log.close()


def known(store: LimitStore) -> list[StoredLimit]:
    found = list(store.all(time.time()))
    assert store.problem is None
    return found


def test_what_was_learned_is_kept_for_the_next_run(
    run: Run, store: LimitStore, tmp_path: Path
) -> None:
    learned = limit()
    run.learn(limit(GIB), save=False)
    run.learn(learned, save=False)
    assert known(store) == [], "not with every status"
    run.limits.save()
    assert known(store) == [learned], "the last status of a worker counts"
    written = store.path.stat().st_mtime_ns
    run.learn(None)
    assert store.path.stat().st_mtime_ns == written, "nothing is new"
    following = Run(tmp_path / "next", LimitStore(store.path))
    assert all(plan.spec.learned == (learned,) for plan in following.sent())
    following.log.close()


@pytest.mark.parametrize("sizes", [(GIB, 3 * GIB), (3 * GIB, GIB)])
def test_of_workers_alike_the_most_careful_counts(
    run: Run, store: LimitStore, sizes: tuple[int, ...]
) -> None:
    # The measured context, and with it the cap, is not quite the same for each.
    caps = (3 * GIB + index * 2**20 for index in range(2))
    run.learn(*(limit(size, cap_bytes=cap) for size, cap in zip(sizes, caps, strict=True)))
    assert [one.learned.size for one in known(store)] == [GIB]


def test_limits_are_written_every_minute(new_run: RunMaker, store: LimitStore) -> None:
    run = new_run(duration="150s")
    run.supervisor.learned_limits = LearnedLimits(store, run.log)
    run.fleet.says["pc1/0"] = {"learned": limit()}
    seen: list[int] = []
    for at_s in (50, 70):
        run.fleet.at(at_s, lambda: seen.append(len(known(store))))
    run.finish()
    assert seen == [0, 1]


def test_a_store_that_cannot_be_had_costs_a_sentence_each_try(run: Run, store: LimitStore) -> None:
    store.path.mkdir(parents=True)
    assert run.sent() == PLANS
    learned = limit()
    run.learn(learned)
    told = run.told()
    assert len(told) == 2
    assert all(str(store.path) in reason and "learned limits" in reason for reason in told)
    store.path.rmdir()
    run.limits.save()
    assert known(store) == [learned], "what could not be written is written when it can be"
