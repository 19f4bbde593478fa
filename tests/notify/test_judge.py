"""Which troubles a frame has, and which of them cannot be known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.record.archive import Frame, Freshness
from orchestrator.record.model import Row
from orchestrator.view.notify.notifier import Judge
from tests.factories import make_row, make_snapshot
from tests.notify.test_message import run
from workers.messages import WorkerState


def frame(*rows: Row, freshness: Freshness = Freshness.LIVE, **changed: Any) -> Frame:
    stored = replace(run(), updated_at_unix_s=100.0)
    snapshot = make_snapshot(*rows, **changed)
    return Frame(
        number=1, run=stored, snapshot=snapshot, events=(), freshness=freshness, late_s=0.0
    )


def judged(judge: Judge, told: Frame | None, unix_s: float = 100.0) -> list[tuple[str, str, str]]:
    return [
        (one.alert.name, one.subject.name, one.alert.severity) for one in judge.firing(told, unix_s)
    ]


def test_a_run_that_works_or_starts_has_no_alert() -> None:
    assert judged(Judge("info"), frame(make_row())) == []
    starting = frame(nodes_seen=())
    starting = replace(starting, run=replace(starting.run, updated_at_unix_s=None))
    assert judged(Judge("info"), starting) == []


def test_a_lost_node_fires_at_once_and_others_when_they_last() -> None:
    told = frame(make_row(state=WorkerState.BACKOFF), nodes_seen=("pc1",))
    judge = Judge("info")
    assert judged(judge, told, 0.0) == [("NodeMissing", "pc2", "critical")]
    assert ("SlotNotWorking", "pc1/0", "warning") not in judged(judge, told, 299.0)
    assert ("SlotNotWorking", "pc1/0", "warning") in judged(judge, told, 300.0)


def test_what_is_less_severe_than_asked_for_is_left_out() -> None:
    told = frame(make_row(state=WorkerState.PAUSED), nodes_seen=("pc1",))
    assert [one.alert.name for one in Judge("critical").firing(told, 0.0)] == ["NodeMissing"]


def test_what_the_last_message_says_is_no_trouble_of_its_own() -> None:
    for freshness, outcome in ((Freshness.HEAD_GONE, "interrupted"), (Freshness.ENDED, "degraded")):
        told = frame(make_row(), freshness=freshness)
        told = replace(told, run=replace(told.run, outcome=outcome))
        judge = Judge("info")
        assert judged(judge, told, 0.0) + judged(judge, told, 100.0) == []


def test_what_cannot_be_known_of_missing_nodes_and_heads() -> None:
    judge = Judge("info")
    rows = (
        make_row(slot="pc2/0", node="pc2", state=WorkerState.PAUSED),
        make_row(state=WorkerState.PAUSED),
    )
    troubles = judge.firing(frame(*rows, nodes_seen=("pc1",)), 0.0)
    assert {one.subject.name: judge.is_unknown(one) for one in troubles} == {
        "pc2": False,
        "pc2/0": True,
        "pc1/0": False,
    }
    for told in (
        *(frame(*rows, freshness=gone) for gone in (Freshness.HEAD_GONE, Freshness.ENDED)),
        None,
    ):
        judge.firing(told, 1.0)
        assert all(map(judge.is_unknown, troubles))


def test_a_run_unreadable_for_two_minutes_is_an_alert() -> None:
    judge = Judge("warning")
    judge.firing(frame(make_row()), 0.0)
    assert judge.firing(None, 10.0) == ()
    (trouble,) = judge.firing(None, 130.0)
    assert trouble.alert.name == "WatcherDown"
    assert not judge.is_unknown(trouble)
