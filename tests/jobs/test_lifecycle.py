"""The table of a job's lifecycle: each record in each state is handled, ignored, or illegal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.jobs.lifecycle import IllegalRecordError, changes_of
from orchestrator.jobs.model import (
    ENDED,
    ON_CARD,
    AttemptBegun,
    AttemptEnded,
    AttemptRecalled,
    Cause,
    JobOrder,
    JobState,
    MilestoneReached,
    Record,
    SpeedMeasured,
    Standing,
    StateChanged,
    UserOrder,
)
from tests.jobs.scene import training

RECORDS: tuple[Record, ...] = (
    AttemptBegun(at_s=20.0, job="a", attempt=4, card="pc1", budget_bytes=1, alone=True),
    AttemptRecalled(at_s=20.0, job="a", attempt=3, to=JobState.HELD, reason="held"),
    AttemptEnded(at_s=20.0, job="a", attempt=3),
    AttemptEnded(at_s=20.0, job="a", attempt=3, cause=Cause.DONE, text=""),
    MilestoneReached(at_s=20.0, job="a", milestone=100, value=1.0),
    SpeedMeasured(at_s=20.0, job="a", card_title="RTX 3090", steps_per_s=1.0),
    *(UserOrder(at_s=20.0, id="m", order=order, job="a", by="ann") for order in JobOrder),
    *(StateChanged(at_s=20.0, job="a", to=state, reason="why") for state in JobState),
)

#: The records that may come in each state; `UserOrder` may in all of them.
LEGAL = {
    **{
        s: {
            "AttemptRecalled",
            "AttemptEnded",
            "MilestoneReached",
            "SpeedMeasured",
        }
        for s in ON_CARD
    },
    JobState.QUEUED: {"AttemptBegun", "StateChanged INFEASIBLE"},
    JobState.WAITING: {
        "StateChanged QUEUED",
        "StateChanged SKIPPED",
        "StateChanged INFEASIBLE",
        "StateChanged FAILED",
    },
    JobState.PARKED: {"StateChanged QUEUED", "StateChanged INFEASIBLE"},
    JobState.PREEMPTED: {"AttemptBegun", "StateChanged INFEASIBLE"},
    JobState.PAUSED: {"StateChanged QUEUED", "StateChanged STOPPED"},
    JobState.SAVING: {"StateChanged DONE", "StateChanged FAILED", "StateChanged SAVING"},
    JobState.SKIPPED: {"StateChanged WAITING"},
}


def standing_in(state: JobState) -> Standing:
    return Standing(
        job=training("a"), state=state, reason="before", since_s=10.0, attempt=3, last_card="pc1"
    )


def advance(standing: Standing, record: Record) -> Standing:
    return replace(standing, **changes_of(standing, record))


def name_of(record: Record) -> str:
    told = f" {record.to.value}" if isinstance(record, StateChanged) else ""
    return type(record).__name__ + told


@pytest.mark.parametrize("state", JobState, ids=lambda state: state.value)
def test_a_record_is_legal_where_a_rule_allows_it(state: JobState) -> None:
    standing, legal = standing_in(state), set()
    for record in RECORDS:
        try:
            advance(standing, record)
        except IllegalRecordError:
            continue
        legal.add(name_of(record))

    assert legal - {"UserOrder"} == LEGAL.get(state, set())
    assert "UserOrder" in legal


@pytest.mark.parametrize("state", JobState, ids=lambda state: state.value)
def test_only_retry_begins_what_has_ended(state: JobState) -> None:
    for order in JobOrder:
        after = advance(
            standing_in(state), UserOrder(at_s=20.0, id="m", order=order, job="a", by="ann")
        ).state
        if state in ENDED and order is not JobOrder.RETRY:
            assert after is state


@pytest.mark.parametrize("attempt", [2, 4])
def test_a_record_of_another_attempt_is_illegal(attempt: int) -> None:
    late: tuple[Record, ...] = (
        AttemptRecalled(at_s=20.0, job="a", attempt=attempt, to=JobState.HELD, reason="held"),
        AttemptEnded(at_s=20.0, job="a", attempt=attempt, cause=Cause.DONE, text=""),
    )
    for record in late:
        with pytest.raises(IllegalRecordError, match=f"attempt {attempt}"):
            advance(standing_in(JobState.RUNNING), record)


def test_time_on_a_card_and_parked_is_added_up() -> None:
    standing = advance(standing_in(JobState.QUEUED), RECORDS[0])
    recalled = AttemptRecalled(at_s=25.0, job="a", attempt=4, to=JobState.PARKED, reason="hours")
    standing = advance(standing, recalled)
    standing = advance(standing, AttemptEnded(at_s=30.0, job="a", attempt=4))
    standing = advance(standing, StateChanged(at_s=37.0, job="a", to=JobState.QUEUED, reason=""))

    assert (standing.ran_s, standing.parked_s) == (10.0, 7.0)
    assert (standing.card, standing.recalled_to) == (None, None)


@pytest.mark.parametrize(("cause", "error"), [(Cause.PARKED, None), (Cause.KILLED, "by SIGKILL")])
def test_a_program_that_parks_itself_made_no_error(cause: Cause, error: str | None) -> None:
    ended = AttemptEnded(at_s=20.0, job="a", attempt=3, cause=cause, text="by SIGKILL")
    assert advance(standing_in(JobState.RUNNING), ended).last_error == error
