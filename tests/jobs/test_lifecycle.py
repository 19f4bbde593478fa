"""What may happen to a job in which state: the rest raises, and orders of users never do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.jobs import lifecycle
from orchestrator.jobs.lifecycle import LEGAL, Goal, IllegalMoveError, Transition
from orchestrator.jobs.model import ON_CARD, AttemptStatus, JobOrder, JobState, Standing, UserOrder
from orchestrator.jobs.places import Place
from tests.factories import make_standing
from workers.messages import Cause

PLACE = Place(job="lr-0", card="pc1", budget_bytes=1)
SEEN = AttemptStatus(attempt=1, value=1.0)

HAPPENS: dict[str, Callable[[Standing], Transition]] = {
    "job_settings_chosen": lambda job: lifecycle.with_settings(job, {}, None),
    "job_attempt_begun": lambda job: lifecycle.begun(job, PLACE, 0.0),
    "job_attempt_ended": lambda job: lifecycle.ended(job, SEEN, 0.0),
    "job_milestone_reached": lambda job: lifecycle.reached(job, 9, 1.0, 0.0),
    "job_speed_measured": lambda job: lifecycle.measured(job, "3090", 1.0, SEEN, 0.0),
}


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", HAPPENS)
def test_what_no_rule_allows_raises(event: str, state: JobState) -> None:
    standing = make_standing(state=state)
    if state in LEGAL[event]:
        assert HAPPENS[event](standing).event == event
    else:
        with pytest.raises(IllegalMoveError, match=f"lr-0: {event} cannot be from {state}"):
            HAPPENS[event](standing)


@pytest.mark.parametrize(("state", "to"), [*itertools.product(JobState, JobState)])
def test_a_job_is_sent_only_where_a_rule_says(state: JobState, to: JobState) -> None:
    standing, goal = make_standing(state=state), Goal(to=to, reason="so it is")
    if state in ON_CARD:
        assert lifecycle.sent(standing, goal, 0.0).standing.recalled_to is to
    elif to in LEGAL["job_state_changed"].get(state, ()):
        assert lifecycle.sent(standing, goal, 0.0).standing.state is to
    else:
        with pytest.raises(IllegalMoveError):
            lifecycle.sent(standing, goal, 0.0)


@pytest.mark.parametrize(("order", "state"), [*itertools.product(JobOrder, JobState)])
def test_an_order_says_where_a_job_goes_or_changes_nothing(
    order: JobOrder, state: JobState
) -> None:
    standing = make_standing(state=state)
    said = UserOrder(at_s=0.0, id="m", order=order, job="lr-0", by="ann")
    after = lifecycle.ordered(standing, said, 1.0).standing
    assert after is standing or after.reason.endswith(" ann")
    assert lifecycle.ordered(after, said, 2.0).standing.state is after.state, "twice is once"


@pytest.mark.parametrize("cause", [None, *Cause])
@pytest.mark.parametrize("to", [None, JobState.PARKED, JobState.HELD, JobState.CANCELLED])
def test_each_end_leads_somewhere(cause: Cause | None, to: JobState | None) -> None:
    standing = make_standing(state="RUNNING", attempt=1, recalled_to=to)
    after = lifecycle.ended(standing, replace(SEEN, cause=cause), 1.0).standing
    assert (after.recalled_to, after.ran_s) == (None, 1.0 - standing.since_s)
    if cause is Cause.DONE:
        assert after.state is JobState.SAVING
    elif to is JobState.CANCELLED:
        assert after.state is JobState.CANCELLED
