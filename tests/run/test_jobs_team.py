"""A team as a job on the real supervisor and stores: one place on each card, one end, one row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime

import pytest

from orchestrator.control.queue import put
from orchestrator.jobs.model import Job, JobOrder, JobState, Submitted
from tests.run.jobs_scene import JobsMaker, JobsRun, check_ends, divided, short, team
from workers.messages import WorkerState
from workers.units import GIB


def nodes_of(run: JobsRun, name: str) -> list[str]:
    return [node for slot, node in run.fleet.homes if slot.partition("/")[0] == name]


def test_a_team_takes_both_cards_once_both_are_free(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", 200, nodes=("pc1",)), team("both"), short("next", 50))
    run.until(8.0)
    assert run.standing("both").state is JobState.QUEUED
    run.finish()
    check_ends(run)
    assert nodes_of(run, "both") == ["pc1", "pc2"]
    members = run.fleet.specs["both/pc1/0"].team
    assert members is not None
    assert members.members == ("both/pc1/0", "both/pc2/0")
    assert run.fleet.specs["both/pc2/0"].budget_bytes == 2 * 3 * 2**30


def test_a_member_that_cannot_follow_rests_when_another_is_done(new_jobs: JobsMaker) -> None:
    run = new_jobs(team("both"), short("next", 50, nodes=("pc1",)))
    run.fleet.start_s["both/pc1/0"] = 30.0
    run.until_state("both", JobState.SAVING, JobState.DONE)
    assert run.fleet.live_on("pc1") == []
    assert run.standing("both").last_card == "pc2+pc1"
    run.finish()
    check_ends(run)
    text = (run.queue_folder / "files" / "both" / "checkpoint.pt").read_text()
    assert text.split()[0] == "100"
    assert not list((run.folder / "states").rglob("*.pt"))


def test_a_member_that_fails_comes_back_while_the_other_goes_on(new_jobs: JobsMaker) -> None:
    run = new_jobs(team("both", 4000))
    run.fleet.dies_at_once.add("both/pc1/0")
    run.until(60.0)
    assert run.supervisor._slots["both/pc1/0"].state == "QUARANTINED"
    assert run.standing("both").state is JobState.RUNNING
    run.fleet.dies_at_once.clear()
    run.until(150.0)
    assert run.supervisor._slots["both/pc1/0"].state is WorkerState.RUNNING
    run.finish()
    check_ends(run)
    assert run.begun() == ["both"]


def test_a_member_that_keeps_failing_is_begun_ever_more_seldom(new_jobs: JobsMaker) -> None:
    run = new_jobs(team("both", 20_000))
    run.fleet.dies_at_once.add("both/pc1/0")
    run.finish()
    ends = [event for event in run.events("state") if event.get("to_state") == "QUARANTINED"]
    at_s = [datetime.fromisoformat(event["at"]).timestamp() for event in ends]
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(at_s)]
    assert len(pauses_s) >= 3
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(pauses_s))


def test_where_all_members_fail_the_job_does(new_jobs: JobsMaker) -> None:
    run = new_jobs(team("both", retries=0))
    run.fleet.says = {
        slot: {"errors_in_a_row": 99, "reason": "ValueError: no data"}
        for slot in ("both/pc1/0", "both/pc2/0")
    }
    assert run.finish()["both"].state is JobState.FAILED


@pytest.mark.parametrize(("make", "back_at_s"), [(team, 90.0), (divided, 30.0)])
def test_a_lost_pc_costs_no_attempt_and_its_card_stays_the_teams(
    new_jobs: JobsMaker, make: Callable[..., Job], back_at_s: float
) -> None:
    run = new_jobs(make("both", 3000, priority=1), short("next", 50, nodes=("pc2",)))
    run.fleet.at(10.0, lambda: run.fleet.lose("pc2"))
    run.fleet.at(back_at_s, lambda: run.fleet.join("pc2"))
    run.finish()
    check_ends(run)
    assert run.begun() == ["both", "next"]
    assert nodes_of(run, "both") == ["pc1", "pc2"]


def test_a_team_is_preempted_held_and_cancelled_as_one(new_jobs: JobsMaker) -> None:
    run = new_jobs(team("both", 2000))
    run.until(10.0)
    urgent = short("urgent", 100, nodes=("pc2",), priority=1, preempt=True)
    put(run.queue_folder, [Submitted(job=urgent)])
    run.until_state("both", JobState.PREEMPTED)
    assert run.fleet.live_on("pc1") == []
    run.until_state("both", JobState.RUNNING)
    assert run.standing("urgent").card is None
    run.until(run.clock.now_s - run.fleet.began_s + 10.0)
    run.say(JobOrder.HOLD, "both")
    run.until_state("both", JobState.HELD)
    assert run.fleet.live_on("pc1") == run.fleet.live_on("pc2") == []
    assert {slot for slot in run.dispatcher.rests() if "/" in slot} == {"both/pc1/0", "both/pc2/0"}
    run.say(JobOrder.RELEASE, "both")
    run.until_state("both", JobState.RUNNING)
    run.until(run.clock.now_s - run.fleet.began_s + 5.0)
    run.say(JobOrder.CANCEL, "both")
    assert run.finish()["both"].state is JobState.CANCELLED
    generations = [event["generation"] for event in run.events("team_leader")]
    assert generations == [1, 2, 3]


def test_members_that_divide_a_model_have_their_cards_together(new_jobs: JobsMaker) -> None:
    run = new_jobs(divided("both", memory_bytes=25 * GIB), device="cuda")
    run.until(5.0)
    leader, lender = (run.fleet.specs[slot] for slot in ("both/pc1/0", "both/pc2/0"))
    assert leader.team is not None
    assert lender.team is not None
    assert (leader.team.split, leader.team.members) == ("layers", ("both/pc1/0", "both/pc2/0"))
    assert leader.team.budgets_bytes == (leader.budget_bytes, lender.budget_bytes)
    assert run.standing("both").budget_bytes == leader.budget_bytes + lender.budget_bytes
    run.finish()
    check_ends(run)
    assert run.standing("both").last_card == "pc1+pc2"


@pytest.mark.parametrize("lost", ["pc1", "pc2"])
def test_half_a_model_keeps_no_card_while_the_other_pc_is_away(
    new_jobs: JobsMaker, lost: str
) -> None:
    other = {"pc1": "pc2", "pc2": "pc1"}[lost]
    run = new_jobs(divided("both", 3000, priority=1), short("next", 50, nodes=(other,)))
    run.fleet.at(10.0, lambda: run.fleet.lose(lost))
    run.fleet.at(300.0, lambda: run.fleet.join(lost))
    run.until_state("next", JobState.DONE)
    both = run.standing("both")
    assert (both.state, both.attempt, both.failures) == (JobState.QUEUED, 1, 0)
    assert both.reason == "in line again: its place on pc1+pc2 is gone"
    run.finish()
    check_ends(run)
    assert run.begun() == ["both", "next", "both"]


@pytest.mark.parametrize("slot", ["both/pc1/0", "both/pc2/0"])
def test_half_a_model_that_is_given_up_ends_the_attempt(new_jobs: JobsMaker, slot: str) -> None:
    run = new_jobs(divided("both", 4000, retries=1), short("next", 50, priority=-1))
    run.fleet.says = {slot: {"errors_in_a_row": 99, "reason": "ValueError: no data"}}
    run.until_state("both", JobState.FAILED)
    assert run.standing("both").last_error == "99 times in a row: ValueError: no data"
    assert run.standing("both").failures == 2
    run.until_state("next", JobState.DONE)
    assert run.fleet.live_on("pc1") == run.fleet.live_on("pc2") == []
