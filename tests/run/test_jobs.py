"""A queue of jobs on the real supervisor and stores: places, failures, commands, killed heads."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.control.queue import put
from orchestrator.control.slots import CommandRefusedError, Do
from orchestrator.jobs import places
from orchestrator.jobs.lifecycle import IllegalMoveError
from orchestrator.jobs.model import JobOrder, JobState, Milestones, Submitted, UserOrder
from orchestrator.jobs.places import Place, Plan
from orchestrator.jobs.queue import COMMAND_LEASE_S
from orchestrator.jobs.spec import parse
from orchestrator.record import command_file
from orchestrator.record.archive import read_run
from orchestrator.record.command_file import any_waits
from tests.factories import CPU, MEMORY, REFERENCE
from tests.jobs.scene import command
from tests.run.jobs_scene import (
    HeadDiesError,
    JobsMaker,
    check_ends,
    ended_with,
    hash_after,
    short,
    team,
)
from workers.messages import Cause, Verdict, WorkerState
from workers.units import GIB, MIB


def test_jobs_are_worked_off_one_a_card(new_jobs: JobsMaker) -> None:
    run = new_jobs(*(short(f"lr-{rate}") for rate in (0.1, 0.2, 0.3, 0.4)), command("after.all"))
    run.finish()
    check_ends(run)
    assert Counter(node for _, node in run.fleet.homes).keys() == {"pc1", "pc2"}
    assert sorted(run.fleet.abandoned) == sorted(run.standings()), "each process ends once"
    assert list(run.supervisor.shortfalls()) == []


def test_one_alone_has_all_shares_of_the_card(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", 2000, nodes=("pc1",)))
    run.until(20.0)
    assert run.fleet.live_on("pc1") == ["one"]
    assert run.fleet.live_on("pc2") == []
    assert run.fleet.specs["one"].budget_bytes == 7 * 3 * GIB
    assert run.fleet.specs["one"].card_budget_bytes == 7 * 3 * GIB
    assert run.fleet.specs["one"].duty in {None, 1.0}


def test_what_it_took_is_told_with_its_context(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", 100))
    device = replace(CPU, context_bytes=300 * MIB)
    told = {"device": device, "memory": replace(MEMORY, peak_bytes=2000 * MIB)}
    of_training = run.fleet._of_training
    run.fleet._of_training = lambda *given: of_training(*given) | told  # type: ignore[method-assign]
    assert run.finish()["one"].peak_bytes == 2300 * MIB


def test_a_follower_comes_after_and_a_failed_one_skips_it(new_jobs: JobsMaker) -> None:
    jobs = (short("lr-0.1"), command("bad", retries=0), command("eval", after=("lr-0.1",)))
    run = new_jobs(*jobs, command("never", after=("bad",)))
    run.fleet.endings["bad"] = [ended_with(2, "ValueError: no")]
    standings = run.finish()
    assert standings["eval"].state is JobState.DONE
    ends = [ended["job"] for ended in run.events("job_attempt_ended")]
    assert ends.index("lr-0.1") < ends.index("eval")
    assert standings["bad"].state is JobState.FAILED
    assert standings["never"].state is JobState.SKIPPED
    assert [line.split(":")[0] for line in run.supervisor.shortfalls()] == ["job bad", "job never"]


def test_of_a_lost_node_a_job_goes_on_elsewhere(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", 2000))
    run.until(10.0)
    assert run.fleet.homes == [("one", "pc1")]
    run.fleet.at(10.0, lambda: run.fleet.lose("pc1"))
    run.fleet.at(27.0, lambda: run.fleet.join("pc1"))
    run.fleet.at(35.0, lambda: run.fleet.lose("pc1"))
    run.until(55.0)
    assert run.fleet.homes == [("one", "pc1")], "30 s are not over"
    run.until(85.0)
    assert run.fleet.homes[-1] == ("one", "pc2")
    assert len(run.fleet.began_at["one"]) == 3, "it began again on pc1, which was back in time"
    assert run.fleet.began_at["one"][-1] >= 100, "it goes on from the head's copy"
    run.fleet.join("pc1")
    run.until(87.0)
    assert run.fleet.live_on("pc1") == [], "nothing of the attempt before comes back"
    run.finish()
    check_ends(run)


def test_a_lost_program_waits_for_the_end_of_its_lease(new_jobs: JobsMaker) -> None:
    run = new_jobs(command("one"))
    run.fleet.program_steps["one"] = 9000
    run.until(10.0)
    run.fleet.lose("pc1")
    run.until(10.0 + COMMAND_LEASE_S)
    assert run.fleet.homes == [("one", "pc1")], "it may still run there"
    run.until(120.0)
    assert run.fleet.homes[-1] == ("one", "pc2")


def test_only_programs_on_other_pcs_have_a_lease(new_jobs: JobsMaker) -> None:
    jobs = command("near", nodes=("pc1",)), command("far", nodes=("pc2",))
    run = new_jobs(*jobs, one_machine=False)
    run.fleet.program_steps |= {"near": 900, "far": 900}
    run.until(5.0)
    leases = {name: spec.command.lease_s for name, spec in run.fleet.specs.items() if spec.command}
    assert leases == {"near": None, "far": COMMAND_LEASE_S}


@pytest.mark.parametrize("seed", range(3))
def test_heads_may_die_at_any_moment(new_jobs: JobsMaker, seed: int) -> None:
    jobs = [short(f"t.{number}", 120) for number in range(4)]
    jobs += [team("both", 120), team("urgent", 60, priority=1, preempt=True, after=("t.2",))]
    follower = command("eval", after=("t.1",))
    run, heads = new_jobs(*jobs, follower), 0
    while True:
        heads += 1
        run.may_die(0.02 if heads < 30 else 0.0, seed=100 * seed + heads)
        try:
            while not run.supervisor._over():
                run.supervisor._turn()
            run.supervisor._drain()
        except HeadDiesError:
            run.die()
            run = new_jobs.next_head(run, *jobs, follower)
            continue
        break
    run.close("good", 0)
    assert heads > 1
    check_ends(run)


@pytest.mark.parametrize("dies", [True, False], ids=["no head", "a suspended PC"])
def test_eight_hours_without_a_head_are_not_worked_nor_waited(
    new_jobs: JobsMaker, dies: bool
) -> None:
    jobs = [short(name, 400, nodes=("pc1",)) for name in ("first", "old")]
    run = new_jobs(*jobs)
    run.until(8.0)
    if dies:
        run.die()
    run.clock.sleep(8 * 3600.0)
    urgent = short("urgent", nodes=("pc1",), priority=2)
    if dies:
        run = new_jobs.next_head(run, *jobs, urgent)
    else:
        put(run.queue_folder, [Submitted(job=urgent)])
    run.finish()
    check_ends(run)
    assert run.begun() == ["first", "urgent", "old"]
    assert run.standings()["first"].ran_s < 60.0


def test_a_word_while_the_head_is_dead_is_obeyed(new_jobs: JobsMaker) -> None:
    jobs = (short("held", 400), short("gone", 400))
    run = new_jobs(*jobs)
    run.until(8.0)
    run.die()
    run.say(JobOrder.HOLD, "held")
    run.say(JobOrder.CANCEL, "gone")
    run = new_jobs.next_head(run, *jobs, stays=True)
    run.until_state("held", JobState.HELD)
    run.until_state("gone", JobState.CANCELLED)
    assert run.fleet.live_on("pc1") + run.fleet.live_on("pc2") == []
    run.say(JobOrder.RETRY, "gone")
    run.say(JobOrder.RELEASE, "held")
    run.until_state("gone", JobState.DONE)
    run.dispatcher.stays = False
    run.finish()
    check_ends(run)


def test_a_drained_slot_keeps_its_place_until_unpause(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", 400), short("two", 400), short("three", 400))
    run.until(6.0)
    run.command(Do.DRAIN, "one")
    run.until(20.0)
    assert run.standing("one").state is JobState.RUNNING
    assert "one" not in run.fleet.live_on("pc1") + run.fleet.live_on("pc2")
    run.command(Do.UNPAUSE, "one")
    run.finish()
    check_ends(run)


def test_no_command_starts_what_has_no_place(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", 400), stays=True)
    run.until(6.0)
    run.say(JobOrder.HOLD, "one")
    run.until_state("one", JobState.HELD)
    for do in (Do.UNPAUSE, Do.REINSTATE):
        with pytest.raises(CommandRefusedError, match="jobs release"):
            run.command(do, "one")


def test_without_room_a_training_goes_to_the_larger_card(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("big", 300), short("first", 500, priority=1, nodes=("pc1",)))
    starved = {"verdict": Verdict.OK, "state": WorkerState.PARKED, "steps_ok": 0}
    run.fleet.kinds_of_report["big"] = lambda node: starved if node == "pc2" else {}
    run.until(14.0)
    assert dict(run.fleet.homes)["big"] == "pc2"
    run.finish()
    check_ends(run)
    recall = run.events("job_attempt_recalled", job="big")[0]
    assert recall["to"] == "QUEUED"
    assert "not even its smallest step fits" in recall["reason"]
    assert recall["at_s"] - run.events("job_attempt_begun", job="big")[0]["at_s"] > 15.0
    assert run.fleet.homes[-1] == ("big", "pc1")


def test_what_is_preempted_goes_on_where_it_was(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("low", 900, nodes=("pc1",)), command("tool", nodes=("pc2",), parks=True))
    run.fleet.program_steps["tool"] = 900
    run.until(10.0)
    for node in ("pc1", "pc2"):
        urgent = short(f"urgent.{node}", 200, nodes=(node,), priority=1, preempt=True)
        put(run.queue_folder, [Submitted(job=urgent)])
    run.until_state("low", JobState.PREEMPTED)
    run.until_state("tool", JobState.PREEMPTED)
    run.until_state("urgent.pc1", JobState.RUNNING)
    run.finish()
    check_ends(run)
    assert run.fleet.began_at["low"][0] == 0 < run.fleet.began_at["low"][1]
    assert run.fleet.starts["tool"] == 2


def of_card(node: str, used_gib: float, held_gib: float = 0.0) -> dict[str, Any]:
    """Return the card's memory in a report of a node: 24 GiB on pc1, 8 GiB on pc2."""
    total = 24 if node == "pc1" else 8
    memory = replace(
        MEMORY,
        device_total_bytes=total * GIB,
        device_used_bytes=int(used_gib * GIB),
        reserved_bytes=int(held_gib * GIB),
    )
    return {"memory": memory, "device": replace(CPU, kind="cuda", uuid=node)}


@pytest.mark.parametrize("opens", [True, False], ids=["too little", "not even a context"])
def test_a_game_on_a_card_ends_no_job(new_jobs: JobsMaker, opens: bool) -> None:
    here = {"nodes": ("pc1",)}
    jobs = (short("a", **here), short("b", **here), short("other", nodes=("pc2",)))
    run = new_jobs(*jobs, command("tool", retries=0, priority=1, **here), device="cuda")
    starved = {"verdict": Verdict.OK, "state": WorkerState.PARKED, "steps_ok": 0}
    unopened = {"verdict": Verdict.CONTEXT_CORRUPTED, "steps_ok": 0, "oom_count": 1}
    plays = True

    def trains(_: str) -> dict[str, Any]:
        return starved | of_card("pc1", 20.0) if opens else {**unopened, "device": None}

    def tool(_: str) -> dict[str, Any]:
        ended = ended_with(1, "", Cause.OUT_OF_MEMORY) if plays else ended_with(0)
        states = {"verdict": Verdict.DONE, "state": WorkerState.STOPPED, "ended": ended}
        return states | of_card("pc1", 20.0 if plays else 1.0)

    run.fleet.kinds_of_report["a"] = run.fleet.kinds_of_report["b"] = trains
    run.fleet.kinds_of_report["tool"] = tool
    run.until_state("tool", JobState.PARKED)
    assert run.standing("tool").reason.endswith("other programs hold 20.0 GiB of pc1")
    run.until_state("a", JobState.PARKED, JobState.DONE, within_s=400.0)
    assert run.standing("a").state is JobState.PARKED
    run.until(run.clock.now_s - run.fleet.began_s + 6.0)
    assert "other programs" in run.shown("b").reason
    assert run.standing("other").state is JobState.DONE
    assert len(run.begun()) <= 4, "the card is left alone for a while"
    plays = False
    del run.fleet.kinds_of_report["a"], run.fleet.kinds_of_report["b"]
    assert {each.state for each in run.finish().values()} == {JobState.DONE}


def test_memory_that_jobs_hold_is_not_other_programs(new_jobs: JobsMaker) -> None:
    run = new_jobs(command("tool", retries=0, nodes=("pc1",)), device="cuda")
    ended = ended_with(1, "", Cause.OUT_OF_MEMORY)
    said = {"verdict": Verdict.DONE, "state": WorkerState.STOPPED, "ended": ended}
    run.fleet.kinds_of_report["tool"] = lambda _: said | of_card("pc1", 2.0)
    assert run.finish()["tool"].state is JobState.INFEASIBLE


@pytest.mark.parametrize("how", ["incompatible", "unbuildable", "unplannable"])
def test_one_that_can_never_work_ends_no_queue(new_jobs: JobsMaker, how: str) -> None:
    more = {"overrides": {"train.lr": "fast"}} if how == "unplannable" else {}
    run = new_jobs(short("bad", **more), short("good"))
    if how == "incompatible":
        report = {"verdict": Verdict.INCOMPATIBLE, "reason": "bad: no such card", "steps_ok": 0}
        run.fleet.kinds_of_report["bad"] = lambda _: report
    elif how == "unbuildable":
        run.fleet.unbuildable.add("bad")
    standings = run.finish()
    assert standings["bad"].state is JobState.FAILED, standings["bad"]
    assert standings["good"].state is JobState.DONE


@pytest.mark.parametrize("how", ["program", "step", "constructor"])
def test_what_raises_in_words_of_the_head_is_tried_again(new_jobs: JobsMaker, how: str) -> None:
    words = "cannot start: the connection cannot be started"
    jobs = {"program": command("one", retries=1)}
    run = new_jobs(jobs.get(how) or short("one", retries=1), short("other"))
    error = f"Traceback (most recent call last):\nConnectionError: {words}\n"
    ways: dict[str, dict[str, Any]] = {
        "step": {"errors_in_a_row": 99, "reason": f"the workload failed: {words}"},
        "constructor": {
            "verdict": Verdict.INCOMPATIBLE,
            "verdict_cause": Cause.EXCEPTION,
            "reason": f"one: cannot start: ConnectionError: {words}",
        },
    }
    if how == "program":
        run.fleet.endings["one"] = [ended_with(1, error), ended_with(0)]
    else:
        run.fleet.kinds_of_report["one"] = lambda _: (
            {} if run.events("job_attempt_ended") else {"error": error, "steps_ok": 0, **ways[how]}
        )
    assert run.finish()["one"].state is JobState.DONE
    ends = [event["cause"] for event in run.events("job_attempt_ended", job="one")]
    assert ends == ["exception", "done"]


OPTUNA = """\
jobs:
  - name: hp
    train: {preset: gpt-nano, steps: 40, batch: 4}
    sweep: {method: optuna, count: 2, over: {lr: {log: [1e-5, 1e-3]}}}
"""


@pytest.mark.torch
def test_of_a_member_that_is_asked_for_memory_is_predicted(new_jobs: JobsMaker) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed (extra sweep)")
    run = new_jobs(stays=True)
    jobs = parse(OPTUNA, "hp.yaml", REFERENCE).jobs
    put(run.queue_folder, [Submitted(job=job) for job in jobs])
    run.until(2.0)
    found = [event["least_bytes"] for event in run.events("job_settings_chosen")]
    assert len(found) == 2
    assert all(least_bytes > 10 * MIB for least_bytes in found)


def test_a_sweep_that_cannot_be_asked_keeps_no_run_going(
    new_jobs: JobsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    run = new_jobs(*parse(OPTUNA, "hp.yaml", REFERENCE).jobs, short("other"))
    standings = run.finish()
    assert standings["other"].state is JobState.DONE
    assert {standings[name].state for name in ("hp-0", "hp-1")} == {JobState.FAILED}
    assert "type: pip install '.[sweep]'" in standings["hp-0"].reason


def test_what_cannot_be_is_refused_before_it_is_written(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("a"), stays=True)
    said = [UserOrder(id=order, order=order, job="a", by="ann") for order in (JobOrder.HOLD,) * 2]
    put(run.queue_folder, [UserOrder(id="1", order=JobOrder.HOLD, job="none", by="ann")])
    put(run.queue_folder, [Submitted(job=replace(short("a"), id="another"))])
    command_file.put(run.queue_folder, b'[{"at_s": 1.0, "job": {"name": "b"}}]', identity="junk")
    put(run.queue_folder, [*said, Submitted(job=short("b"))])
    put(run.queue_folder, [UserOrder(id="2", order=JobOrder.HOLD, job="b", by="ann")])
    run.until(1.0)
    reasons = [event["reason"] for event in run.events("job_message_refused")]
    assert len(reasons) == 4, reasons
    run.die()
    again = new_jobs.next_head(run, stays=True)
    again.until(5.0)
    assert {one.state for one in again.standings().values()} == {JobState.HELD}
    assert len(again.events("job_user_order")) == 2


def test_a_message_seen_twice_is_obeyed_once(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("a"), stays=True)
    run.dispatcher._incoming.remove = lambda _: None  # type: ignore[method-assign]
    held = UserOrder(id="once", order=JobOrder.HOLD, job=None, by="ann")
    put(run.queue_folder, [held])
    run.until(1.0)
    assert run.dispatcher.queue.facts.held == "ann holds it"
    put(run.queue_folder, [replace(held, order=JobOrder.RELEASE, id="then")])
    run.until(2.0)
    assert run.dispatcher.queue.facts.held is None
    run.die()
    again = new_jobs.next_head(run, stays=True)
    again.until(5.0)
    assert again.dispatcher.queue.facts.held is None
    assert not any_waits(run.queue_folder)


def test_dying_programs_give_up_no_card(new_jobs: JobsMaker) -> None:
    jobs = [command(f"crash{number}", retries=0) for number in range(3)]
    run = new_jobs(*jobs, command("good", priority=-1))
    run.fleet.dies_at_once.update(job.name for job in jobs)
    standings = run.finish()
    assert standings["good"].state is JobState.DONE
    assert {standings[job.name].state for job in jobs} == {JobState.FAILED}
    assert run.events("card_quarantined") == []


def test_a_card_that_fails_all_jobs_is_left_alone(new_jobs: JobsMaker) -> None:
    jobs = [short(f"t.{number}", 600) for number in range(4)]
    run = new_jobs(*jobs)
    gone = {
        "verdict": Verdict.CONTEXT_CORRUPTED,
        "state": WorkerState.STOPPED,
        "steps_ok": 0,
        "reason": "the device no longer answers this process: uncorrectable ECC error encountered",
    }
    for job in jobs:
        run.fleet.kinds_of_report[job.name] = lambda node: gone if node == "pc1" else {}
    run.until(40.0)
    assert any("pc1 gets no job: 2 attempts" in line for line in run.supervisor.snapshot().notices)
    run.finish()
    check_ends(run)
    assert len(run.events("job_attempt_begun", card="pc1")) == 2


def test_after_ctrl_c_everything_is_saved_and_goes_on(new_jobs: JobsMaker) -> None:
    asked = False
    jobs = (short("one", 400), command("two", retries=0))
    run = new_jobs(*jobs, interrupted=lambda: asked)
    run.fleet.program_steps["two"] = 300
    run.until(9.3)
    asked = True
    run.finish()
    assert int((run.folder / "states" / "one.pt").read_text().split()[0]) > 100
    run = new_jobs.next_head(run, *jobs)
    run.fleet.program_steps["two"] = 300
    run.finish()
    check_ends(run)
    begin = run.fleet.begun["one"][0].begin
    assert begin is not None
    assert begin.copy is not None


def test_while_the_queue_cannot_be_stored_all_stands(
    new_jobs: JobsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_jobs(short("one", 900, nodes=("pc1",)), short("two", 900), short("three", 100))
    run.until_state("two", JobState.RUNNING)
    done = run.supervisor._slots["one"].counts.steps_ok

    monkeypatch.setattr(run.store, "commit", lambda: False)
    run.say(JobOrder.CANCEL, "two")
    run.until(30.0)
    assert any("queue of jobs" in notice for notice in run.supervisor.snapshot().notices)
    assert run.supervisor._slots["one"].counts.steps_ok > done, "what runs goes on"
    assert run.standings()["two"].state is JobState.RUNNING
    assert run.fleet.live_on("pc2") == ["two"], "what is not stored is not done"
    monkeypatch.undo()
    run.until_state("two", JobState.CANCELLED)
    assert run.dispatcher.problem is None
    standings = run.finish()
    assert standings["three"].state is JobState.DONE


def test_a_decision_that_cannot_be_stops_no_later_head(
    new_jobs: JobsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test plants a defect: a job begins twice."""
    run = new_jobs(short("one"), short("two"))
    twice = (Place(job="two", card="pc1", budget_bytes=1),) * 2
    wrong = Plan(starts=twice, recalls={}, reasons={}, expected_start_s={})
    monkeypatch.setattr(places, "plan", lambda *_: wrong)
    with pytest.raises(IllegalMoveError, match="two: job_attempt_begun cannot be from RUNNING"):
        run.until(5.0)
    run.die()
    monkeypatch.undo()
    assert run.standings()["two"].state is JobState.QUEUED, "what was not checked is not stored"
    run = new_jobs.next_head(run)
    run.finish()
    check_ends(run)


def test_at_a_milestone_others_get_the_card(new_jobs: JobsMaker) -> None:
    rule = Milestones(metric="loss", is_min=True, first=40, factor=3, last=360)
    jobs = [short(f"lr-{n}", 360, sweep="lr", milestones=rule) for n in range(9)]
    run = new_jobs(*jobs)
    run.fleet.curve = lambda slot, step: (1 + int(slot[-1])) / (1 + step)
    seen_paused = False
    while not run.supervisor._over():
        run.supervisor._turn()
        live = {*run.fleet.live_on("pc1"), *run.fleet.live_on("pc2")}
        for name, standing in run.dispatcher.queue.standings.items():
            if standing.state is JobState.PAUSED:
                seen_paused = True
                assert name not in live
    run.finish()
    standings = run.standings()
    assert seen_paused
    assert standings["lr-0"].sha256 == hash_after("lr-0", 360)
    ends = Counter(each.state for each in standings.values())
    assert set(ends) == {JobState.DONE, JobState.STOPPED}
    assert ends[JobState.STOPPED] >= 5
    assert len(run.events("job_milestone_reached")) >= 9
    assert not list((run.folder / "states").glob("*.pt")), "they are needed no more"


def test_three_that_fail_alike_hold_the_queue(new_jobs: JobsMaker) -> None:
    run = new_jobs(*(command(f"job{n}", retries=0) for n in range(6)), stays=True)
    for n in range(6):
        run.fleet.endings[f"job{n}"] = [ended_with(1, "FileNotFoundError: data")]
    run.until(60.0)
    assert len(run.events("job_queue_held")) == 1
    assert any("queue is held" in notice for notice in run.supervisor.snapshot().notices)
    assert sum(run.fleet.starts.values()) <= 4


def test_programs_run_where_no_worker_would_train(new_jobs: JobsMaker) -> None:
    only = {"workload": {"name": "train"}, "train": {"slots": 1}}
    run = new_jobs(command("one", nodes=("pc2",)), **only)
    assert run.finish()["one"].state is JobState.DONE


def test_a_queue_that_is_over_takes_what_waits(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", 400))
    run.until(6.0)
    run.say(JobOrder.CANCEL, "one")
    assert run.finish()["one"].state is JobState.CANCELLED
    assert read_run(run.folder).is_done
    run.say(JobOrder.RETRY, "one")
    assert not read_run(run.folder).is_done
    run = new_jobs.next_head(run)
    assert run.finish()["one"].state is JobState.DONE


def test_a_clock_that_is_set_back_stops_no_pause(
    new_jobs: JobsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_jobs(command("one"))
    run.fleet.endings["one"] = [ended_with(75), ended_with(0)]
    run.until_state("one", JobState.PARKED)
    monkeypatch.setattr(run.clock, "unix_s", lambda: 1.7e9 + run.clock.now_s)
    before_s = run.clock.now_s
    run.finish()
    assert run.standings()["one"].state is JobState.DONE
    assert run.clock.now_s - before_s < 60.0
