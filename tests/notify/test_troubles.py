"""Which troubles a frame has, and which of them cannot be known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.slot import HeadState
from orchestrator.notify.troubles import Judge
from orchestrator.watch.follow import Frame, Freshness
from orchestrator.watch.model import Row
from tests.notify.test_letter import run
from tests.watch.scene import make_row, make_snapshot
from workers.messages import WorkerState


def frame(*rows: Row, freshness: Freshness = Freshness.LIVE, **changed: Any) -> Frame:  # noqa: ANN401 - of a snapshot
    stored = replace(run(), updated_at_unix_s=100.0)
    snapshot = make_snapshot(*rows, **changed)
    return Frame(number=1, run=stored, snapshot=snapshot, events=(), freshness=freshness, late_s=0.0)


def found(judge: Judge, told: Frame, unix_s: float = 100.0) -> list[tuple[str, str, str]]:
    return [(one.alert, one.subject, one.severity) for one in judge.troubles(told, unix_s, "info")]


def test_a_run_that_works_has_no_trouble_and_one_that_starts_has_none_yet() -> None:
    assert found(Judge(), frame(make_row())) == []
    starting = frame(nodes_seen=())
    starting = replace(starting, run=replace(starting.run, updated_at_unix_s=None))
    assert found(Judge(), starting) == []


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (HeadState.QUARANTINED, ("SlotQuarantined", "pc1/0", "critical")),
        (WorkerState.CORRUPT, ("WrongResults", "pc1/0", "critical")),
        (WorkerState.PAUSED, ("CardPaused", "pc1/0", "warning")),
    ],
)
def test_states_that_are_told_at_once(state: HeadState | WorkerState, expected: tuple[str, str, str]) -> None:
    reason = "the loss is not finite at step 12; last good snapshot: step 10"
    told = frame(make_row(state=state, reason=reason), make_row(slot="pc1/1"))
    assert found(Judge(), told) == [expected]
    (trouble,) = Judge().troubles(told, 100.0, "info")
    assert trouble.text == reason
    assert trouble.place == "pc1 GPU-0"
    assert found(Judge(), replace(told, freshness=Freshness.HEAD_GONE)) == [expected]


def test_what_is_less_severe_than_asked_for_is_left_out() -> None:
    told = frame(make_row(state=WorkerState.PAUSED), nodes_seen=("pc1",))
    assert [one.alert for one in Judge().troubles(told, 0.0, "critical")] == ["NodeMissing"]


def test_a_wrong_result_counts_for_an_hour_although_the_slot_works_again() -> None:
    judge = Judge()
    assert found(judge, frame(make_row(verify_errors=3)), 0.0) == [], "before this process looked"
    again = frame(make_row(verify_errors=4))
    assert found(judge, again, 10.0) == [("WrongResults", "pc1/0", "critical")]
    assert found(judge, again, 3600.0) != []
    assert found(judge, again, 3611.0) == []


def test_slots_of_a_missing_node_cannot_be_known_and_nothing_can_when_the_head_is_gone() -> None:
    judge = Judge()
    rows = (make_row(slot="pc2/0", node="pc2", state=WorkerState.PAUSED), make_row(state=WorkerState.PAUSED))
    node, other, own = judge.troubles(frame(*rows, nodes_seen=("pc1",)), 0.0, "info")
    assert [judge.is_unknown(one) for one in (node, other, own)] == [False, True, False]
    judge.troubles(frame(*rows, freshness=Freshness.HEAD_GONE), 0.0, "info")
    assert all(judge.is_unknown(one) for one in (node, other, own))


def test_a_trouble_keeps_the_moment_at_which_it_began() -> None:
    judge, hot, well = Judge(), frame(make_row(state=WorkerState.PAUSED)), frame(make_row())
    began = [
        judge.troubles(told, unix_s, "info") for told, unix_s in ((hot, 5.0), (hot, 9.0), (well, 10.0), (hot, 20.0))
    ]
    assert [[one.since_unix_s for one in troubles] for troubles in began] == [[5.0], [5.0], [], [20.0]]
