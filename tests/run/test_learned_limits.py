"""What a run knows of earlier ones and keeps for later ones, in a real store; a broken one costs a sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load_config
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.run import learned_limits as lessons_module
from orchestrator.run.learned_limits import LearnedLimits, terms
from orchestrator.watch.events import EventLog
from workers.learned_limits.store import EXPIRY_S, LimitStore
from workers.messages import Report, Verdict, WorkerState
from workers.settings import Learned, LimitKey, StoredLimit

GIB = 2**30

PLANS = plan_slots(load_config(str(Path(__file__).parents[2] / "cluster.yaml")), Target())

SPEC = PLANS[0].spec

KEY = LimitKey(
    card="NVIDIA GeForce RTX 3090",
    total_bytes=24 * GIB,
    driver="570.1",
    torch="2.9.0",
    dtype="fp16",
    workload="matmul@0.1.0 batch=128 size=8192",
    cap_bytes=3 * GIB,
)


def limit(size: int = 2 * GIB, age_s: float = 0.0, **key: Any) -> StoredLimit:  # noqa: ANN401 - of LimitKey
    return StoredLimit(
        key=replace(KEY, **key),
        learned=Learned(size=size, fixed_bytes=0.0, unit_bytes=1.0),
        peak_bytes=size,
        learned_at_unix_s=time.time() - age_s,
        best_under=terms(SPEC),
    )


def report(slot: str = "pc1/0", learned: StoredLimit | None = None) -> Report:
    return Report(
        slot=slot,
        incarnation=0,
        sequence=0,
        verdict=Verdict.OK,
        state=WorkerState.RUNNING,
        reason="",
        device=None,
        memory=None,
        size=8192,
        batch=128,
        claim_bytes=None,
        learned=learned,
    )


class Run:
    """One run's learned_limits, with its diary."""

    def __init__(self, folder: Path, store: LimitStore | None) -> None:
        self._path = folder / "events.jsonl"
        self.log = EventLog(self._path)
        self.learned_limits = LearnedLimits(store, self.log)

    def told(self) -> list[str]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        return [event["reason"] for event in map(json.loads, lines) if event["event"] == "limits_unavailable"]


@pytest.fixture
def store(tmp_path: Path) -> LimitStore:
    return LimitStore(tmp_path / "state" / "limits.json", patience_s=0.1)


@pytest.fixture
def run(tmp_path: Path, store: LimitStore) -> Iterator[Run]:
    begun = Run(tmp_path, store)
    yield begun
    begun.log.close()


def known(store: LimitStore) -> list[StoredLimit]:
    found = list(store.all(time.time()))
    assert store.problem is None
    return found


def plans_of(workload: str) -> tuple[SlotPlan, ...]:
    return tuple(
        replace(plan, spec=replace(plan.spec, workload=replace(plan.spec.workload, name=workload))) for plan in PLANS
    )


class TestSentAlong:
    def test_nothing_is_known_before_the_first_run_and_nothing_is_made(self, run: Run, store: LimitStore) -> None:
        assert run.learned_limits.sent_along(PLANS) == PLANS
        assert not store.path.parent.exists()
        assert run.told() == []

    def test_every_worker_gets_all_that_is_known_of_its_workload(self, run: Run, store: LimitStore) -> None:
        matmul = [limit(), limit(cap_bytes=GIB, size=GIB // 2), limit(dtype="bf16"), limit(card="another card")]
        mine = limit(workload="mine.steps:Mlp@3f9a0c51d2e8 batch=128 size=512")
        store.remember(*matmul, mine)
        for plan in run.learned_limits.sent_along(PLANS):
            assert set(plan.spec.learned) == set(matmul), "which of them is its own, the worker alone can tell"
        for plan in run.learned_limits.sent_along(plans_of("mine.steps:Mlp")):
            assert plan.spec.learned == (mine,)
        for plan in run.learned_limits.sent_along(plans_of("mine.steps")):
            assert plan.spec.learned == (), "part of a name is another name"

    def test_nothing_else_of_a_plan_changes(self, run: Run, store: LimitStore) -> None:
        store.remember(limit())
        sent = run.learned_limits.sent_along(PLANS)
        assert tuple(replace(plan, spec=replace(plan.spec, learned=())) for plan in sent) == PLANS

    def test_a_full_store_does_not_travel_with_every_directive(self, run: Run, store: LimitStore) -> None:
        store.remember(*(limit(card=f"card {age}", age_s=float(age)) for age in range(100)))
        (sent,) = {plan.spec.learned for plan in run.learned_limits.sent_along(PLANS)}
        assert [one.key.card for one in sent] == [f"card {age}" for age in range(64)], "the newest"

    def test_what_has_expired_is_not_sent(self, run: Run, store: LimitStore) -> None:
        store.remember(limit(age_s=EXPIRY_S + 60.0, card="old"))
        assert all(plan.spec.learned == () for plan in run.learned_limits.sent_along(PLANS))


class TestKept:
    def test_what_a_worker_has_learned_is_kept_at_the_end(self, run: Run, store: LimitStore) -> None:
        learned = limit()
        run.learned_limits.take(SPEC, report(learned=learned))
        assert known(store) == [], "not with every report"
        run.learned_limits.save()
        assert known(store) == [learned]

    def test_the_next_run_begins_with_it(self, run: Run, store: LimitStore, tmp_path: Path) -> None:
        learned = limit()
        run.learned_limits.take(SPEC, report(learned=learned))
        run.learned_limits.save()
        (tmp_path / "next").mkdir()
        following = Run(tmp_path / "next", LimitStore(store.path))
        assert all(plan.spec.learned == (learned,) for plan in following.learned_limits.sent_along(PLANS))
        following.log.close()

    def test_the_last_report_of_a_worker_counts(self, run: Run, store: LimitStore) -> None:
        for size in (GIB, 3 * GIB, 2 * GIB):
            run.learned_limits.take(SPEC, report(learned=limit(size)))
        run.learned_limits.take(SPEC, report())
        run.learned_limits.save()
        assert [one.learned.size for one in known(store)] == [2 * GIB]

    @pytest.mark.parametrize("sizes", [(GIB, 2 * GIB, 3 * GIB), (3 * GIB, 2 * GIB, GIB), (2 * GIB, GIB, 3 * GIB)])
    def test_of_workers_in_the_same_circumstances_the_most_careful_counts(
        self, run: Run, store: LimitStore, sizes: tuple[int, ...]
    ) -> None:
        for index, size in enumerate(sizes):
            # The measured context, and with it the cap, is not quite the same for each.
            run.learned_limits.take(SPEC, report(f"pc1/{index}", limit(size, cap_bytes=3 * GIB + index * 2**20)))
        run.learned_limits.save()
        assert [one.learned.size for one in known(store)] == [GIB]

    def test_circumstances_that_differ_are_kept_apart(self, run: Run, store: LimitStore) -> None:
        learned = [limit(), limit(card="NVIDIA GeForce RTX 3070"), limit(cap_bytes=GIB, size=GIB)]
        for index, one in enumerate(learned):
            run.learned_limits.take(SPEC, report(f"pc1/{index}", one))
        run.learned_limits.save()
        assert set(known(store)) == set(learned)

    def test_what_others_have_learned_meanwhile_stays(self, run: Run, store: LimitStore) -> None:
        other = limit(card="another card")
        run.learned_limits.sent_along(PLANS)
        LimitStore(store.path).remember(other)
        run.learned_limits.take(SPEC, report(learned=limit()))
        run.learned_limits.save()
        assert other in known(store)
        assert len(known(store)) == 2

    def test_a_run_that_learned_nothing_makes_nothing(self, run: Run, store: LimitStore) -> None:
        run.learned_limits.take(SPEC, report())
        run.learned_limits.save()
        assert not store.path.parent.exists()

    def test_it_is_written_now_and_then_so_that_a_killed_head_has_kept_most(
        self, run: Run, store: LimitStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lessons_module, "_SAVE_EVERY_S", 0.0)
        first, second = limit(GIB), limit(2 * GIB)
        run.learned_limits.take(SPEC, report(learned=first))
        assert known(store) == [first]
        run.learned_limits.take(SPEC, report(learned=second))
        assert known(store) == [second]
        written = store.path.stat().st_mtime_ns
        run.learned_limits.take(SPEC, report())
        run.learned_limits.save()
        assert store.path.stat().st_mtime_ns == written, "nothing is new"


class TestBest:
    def test_the_best_of_an_earlier_run_is_known_to_the_next(self, run: Run, store: LimitStore, tmp_path: Path) -> None:
        for index, best in enumerate((3.0, 7.5, None)):
            run.learned_limits.take(SPEC, report(f"pc1/{index}", limit(cap_bytes=3 * GIB + index * 2**20)), best)
        run.learned_limits.save()
        (tmp_path / "next").mkdir()
        following = Run(tmp_path / "next", LimitStore(store.path))
        following.learned_limits.sent_along(PLANS)
        assert following.learned_limits.best_tflops(SPEC, report(learned=limit())) == 7.5
        assert following.learned_limits.best_tflops(SPEC, report(learned=limit(card="another card"))) is None
        assert following.learned_limits.best_tflops(SPEC, report()) is None
        alone = replace(SPEC, card_budget_bytes=SPEC.budget_bytes)
        assert following.learned_limits.best_tflops(alone, report(learned=limit())) is None, "it had a seventh then"
        assert following.learned_limits.best_tflops(replace(SPEC, duty=None), report(learned=limit())) is None
        following.log.close()


class TestNoStore:
    def test_nothing_is_read_and_nothing_kept(self, tmp_path: Path, state_dir: Path) -> None:
        LimitStore().remember(limit())
        before = (state_dir / "limits.json").read_bytes()
        run = Run(tmp_path, None)
        assert run.learned_limits.sent_along(PLANS) == PLANS
        run.learned_limits.take(SPEC, report(learned=limit(GIB)))
        run.learned_limits.save()
        run.log.close()
        assert (state_dir / "limits.json").read_bytes() == before
        assert run.told() == []


def damage(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("{")


def occupy(path: Path) -> None:
    path.mkdir(parents=True)


def obstruct(path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("a file where the folder should be")


def outlive(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": 2, "limits": []}))


class TestBrokenStore:
    @pytest.mark.parametrize("breaking", [damage, occupy, obstruct, outlive])
    def test_costs_a_sentence_and_nothing_else(self, run: Run, store: LimitStore, breaking: Any) -> None:  # noqa: ANN401
        breaking(store.path)
        before = store.path.read_bytes() if store.path.is_file() else None
        assert run.learned_limits.sent_along(PLANS) == PLANS
        run.learned_limits.take(SPEC, report(learned=limit()))
        run.learned_limits.save()
        told = run.told()
        assert len(told) == 2
        assert all(str(store.path) in reason for reason in told)
        assert all("learned limits" in reason for reason in told)
        if before is not None:
            assert store.path.read_bytes() == before, "whatever it is, it is not ours to overwrite"

    def test_one_that_breaks_in_the_middle_of_a_run_is_told_once_for_each_try(
        self, run: Run, store: LimitStore
    ) -> None:
        run.learned_limits.sent_along(PLANS)
        run.learned_limits.take(SPEC, report(learned=limit()))
        run.learned_limits.save()
        assert run.told() == []
        store.path.write_text("{")
        run.learned_limits.save()
        assert run.told() == [], "there is nothing new to write"
        run.learned_limits.take(SPEC, report(learned=limit(GIB)))
        run.learned_limits.save()
        assert len(run.told()) == 1

    def test_what_could_not_be_written_is_written_when_it_can_be(self, run: Run, store: LimitStore) -> None:
        damage(store.path)
        learned = limit()
        run.learned_limits.take(SPEC, report(learned=learned))
        run.learned_limits.save()
        assert len(run.told()) == 1
        store.path.unlink()
        run.learned_limits.save()
        assert known(store) == [learned]

    def test_one_that_is_locked_for_long_is_not_waited_for_for_ever(
        self, run: Run, store: LimitStore, tmp_path: Path
    ) -> None:
        run.learned_limits.take(SPEC, report(learned=limit()))
        run.learned_limits.save()
        with LimitStore(store.path)._locked():
            run.learned_limits.take(SPEC, report(learned=limit(GIB)))
            run.learned_limits.save()
        assert len(run.told()) == 1
        assert "locked" in run.told()[0]
        assert [one.learned.size for one in known(store)] == [2 * GIB]
