"""Texts about a queue: the table of jobs, one job, results, the line; events as sentences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.jobs.model import Milestones
from orchestrator.record.events import StoredEvent
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.view import jobs as view
from orchestrator.view.phrases import event_words
from orchestrator.view.tables import Table
from orchestrator.view.terminal import table_lines
from tests.factories import STARTED_UNIX_S, make_job, make_row, make_standing
from workers.messages import Progress, WorkerState

NOW_S = STARTED_UNIX_S + 3600.0
HOSTILE = "a\x1b[2Jb\nc<script>"
TRAINED = make_standing(
    "lr-0",
    "RUNNING",
    last_card="pc1",
    step=40,
    value=3.5,
    best=3.4,
    best_step=30,
    speeds={"3090": 0.5},
)


def queue_of(*standings: object, **changed: object) -> QueueSnapshot:
    known = {"standings": standings, "now_s": NOW_S, "files": "runs/x/jobs/files"}
    return QueueSnapshot(**(known | changed))


def jobs_table(queue: QueueSnapshot) -> Table:
    return view.jobs_table(queue, view.current(queue))


def queue_object(queue: QueueSnapshot) -> dict[str, Any]:
    return view.queue_object(queue, view.current(queue))


def test_jobs_on_a_card_come_first_and_done_ones_last() -> None:
    states = ("DONE", "QUEUED", "FAILED", "RUNNING", "WAITING")
    queue = queue_of(*(make_standing(state.lower(), state) for state in states))
    names = [row.key for row in jobs_table(queue).rows]
    assert names == ["running", "queued", "waiting", "failed", "done"]


def test_a_table_of_jobs_says_why_those_wait_that_do_not_work() -> None:
    waits = make_standing("lr-1", reason="pc1 runs lr-0")
    slow = replace(TRAINED, job=make_job("lr-2"))
    rows = {"lr-2": make_row(slot="lr-2", state=WorkerState.BACKOFF, reason="memory ran out")}
    lines = table_lines(jobs_table(queue_of(TRAINED, waits, slow, rows=rows)), 80)
    assert [line.plain for line in lines[-2:]] == ["lr-2: memory ran out", "lr-1: pc1 runs lr-0"]


def test_hostile_text_is_one_harmless_line() -> None:
    broken = {"value": math.nan, "best": math.inf}
    hostile = make_standing(HOSTILE, "FAILED", reason=HOSTILE, last_error=HOSTILE, **broken)
    queue = queue_of(hostile, held=HOSTILE)
    said = [line.plain for line in table_lines(jobs_table(queue), 100)]
    said += [view.summary_line(queue), *view.job_lines(hostile, (), queue)]
    assert all(line.isprintable() for line in said)
    (job,) = queue_object(queue)["jobs"]
    assert (job["job_metric"], job["job_best"]) == (None, None)


def test_a_team_is_one_row_with_the_share_of_each_card() -> None:
    job = replace(make_job("fine"), overrides={"train.team": "all"})
    fine = replace(TRAINED, job=job, last_card="pc1:1+pc2", step=30)
    shares = (("fine/pc1/1", 40, 62.4), ("fine/pc2/0", 41, None))
    rows = {
        slot: make_row(slot=slot, team_share_pct=share, progress=Progress(train_step=step))
        for slot, step, share in shares
    }
    queue = queue_of(fine, rows=rows)
    (row,) = jobs_table(queue).rows
    assert [row.cells[index].text for index in (0, 2, 3)] == ["fine", "pc1:1 62% + pc2", "41/100"]
    (told,) = queue_object(queue)["jobs"]
    assert (told["job_card"], told["job_node"], told["job_slot"]) == ("pc1:1+pc2", "pc1+pc2", None)
    assert {slot: each["team_share_pct"] for slot, each in told["job_team"].items()} == {
        "fine/pc1/1": 62.4,
        "fine/pc2/0": None,
    }


def test_what_a_process_told_last_counts() -> None:
    row = make_row(slot="lr-0", reason="steady", progress=Progress(train_step=60, loss=2.5))
    (standing,) = view.current(queue_of(TRAINED, rows={"lr-0": row}))
    assert (standing.step, standing.value, standing.reason) == (60, 2.5, "steady")
    assert (standing.best, standing.best_step) == (2.5, 60)


def test_a_command_tells_its_steps_while_it_runs() -> None:
    row = make_row(slot="lr-0", progress=Progress(train_step=60, train_steps=90))
    command = replace(TRAINED, job=make_job(steps=None))
    queue = queue_of(command, rows={"lr-0": row})
    assert jobs_table(queue).rows[0].cells[3].text == "60/90"


def test_a_job_that_never_began_has_no_files() -> None:
    queue = queue_of(TRAINED, make_standing("begun", attempt=1))
    folders = [job["job_dir"] for job in queue_object(queue)["jobs"]]
    assert folders == [None, "runs/x/jobs/files/begun"]


def test_what_was_done_again_counts_in_seconds() -> None:
    """20 of 100 steps in 500 s were repeated after a kill."""
    done = make_standing("lr-0", "DONE", step=80, ran_s=500.0, since_s=NOW_S)
    row = make_row(slot="lr-0", progress=Progress(train_step=80, redone_steps=20))
    queue = queue_of(done, rows={"lr-0": row})
    assert view.job_object(done, queue)["job_redone_s"] == 100.0
    assert view.job_object(done, queue_of(done))["job_redone_s"] is None
    assert any(line.split() == ["redone", "1m", "40s"] for line in view.job_lines(done, (), queue))


def test_the_line_counts_states_and_says_when_the_last_job_ends() -> None:
    later = make_standing("b", speeds={"3090": 1.0})
    line = view.summary_line(queue_of(TRAINED, later))
    assert line.startswith("1 running, 1 queued; ends about ")


def test_work_that_is_left_is_shared_among_the_cards_that_work() -> None:
    """60 steps at 0.5/s take 120 s on pc1; two similar jobs follow on two cards."""
    beside = replace(TRAINED, job=make_job("b"), last_card="pc2")
    waits = [make_standing(name) for name in "cd"]
    told = queue_object(queue_of(TRAINED, beside, *waits))
    assert told["queue_eta_s"] == pytest.approx(240.0)


def test_a_job_of_unknown_length_takes_as_long_as_those_that_tell_theirs() -> None:
    """The finished job was short. Two jobs share a card, so neither has a known speed."""
    short = make_standing("first", "DONE", ran_s=20.0)
    there = [make_standing(name, "RUNNING", last_card="pc1", step=200) for name in ("a", "b")]
    rows = {name: make_row(slot=name, progress=Progress(eta_s=400.0)) for name in ("a", "b")}
    queue = queue_of(short, *there, make_standing("c"), rows=rows)
    assert queue_object(queue)["queue_eta_s"] == pytest.approx((400 + 400 + 400) / 2)


def test_the_line_of_a_queue_of_unknown_length_names_no_end() -> None:
    fresh = make_standing("a", "RUNNING", last_card="pc1")
    line = view.summary_line(queue_of(fresh, make_standing("b")))
    assert line == "1 running, 1 queued"


def test_a_job_in_full_tells_its_attempts() -> None:
    begun = {"attempt": 1, "card": "pc1", "budget_bytes": 9 * 2**30, "alone": True}
    ended = {"attempt": 1, "cause": "out of memory", "text": "no room", "step": 12}
    told = {"job_attempt_begun": begun, "job_attempt_ended": ended}
    events = [
        StoredEvent(number=number, at="", event=name, slot="lr-0", details=details)
        for number, (name, details) in enumerate(told.items())
    ]
    lines = view.job_lines(TRAINED, events, queue_of(TRAINED))
    happened = lines[lines.index("what happened") + 1 :]
    assert [line.strip().split("  ")[1] for line in happened] == [
        "attempt begun: attempt 1, card pc1, budget 9216 MiB, alone yes",
        "attempt ended: attempt 1, cause out of memory, text no room, step 12",
    ]


def results_of(*, is_min: bool) -> list[str]:
    rule = Milestones(metric="score", is_min=is_min, first=1, factor=3, last=9)
    job = make_job(milestones=rule)
    standings = [
        make_standing(
            name, "DONE", job=replace(job, name=name, settings={"train.lr": lr}), best=best
        )
        for name, lr, best in (("a", 1e-4, 3.0), ("b", 3e-4, 2.0), ("c", 1e-3, None))
    ]
    queue = queue_of(*standings)
    rows = view.jobs_table(queue, view.best_first(queue)).rows
    return [f"{row.key} {row.cells[-1].text}" for row in rows]


def test_results_have_the_best_first_with_their_settings() -> None:
    assert results_of(is_min=True) == ["b train.lr=0.0003", "a train.lr=0.0001", "c train.lr=0.001"]
    assert results_of(is_min=False) == [
        "a train.lr=0.0001",
        "b train.lr=0.0003",
        "c train.lr=0.001",
    ]


def stored(name: str, **details: object) -> StoredEvent:
    return StoredEvent(
        number=1, at="2026-11-22T12:07:34.677Z", event=name, slot=None, details=details
    )


@pytest.mark.parametrize(
    ("event", "details", "words"),
    [
        ("oom", {"size": 512, "needed_bytes": 6 * 2**20, "recovery_s": 0.014, "text": "no"},
         ("oom", "size 512, needed 6 MiB, recovery 0.014 s, text no")),
        ("grew", {"from_size": 512, "size": 640, "from_batch": 8, "batch": 8}, ("grew", "size 512 to 640, batch 8")),
        ("state", {"from_state": "RUNNING", "to_state": "LOST", "cause": "gone", "incarnation": 2},
         ("state", "RUNNING to LOST: gone")),
        ("speed", {"steps_per_s": 10.418}, ("speed", "steps 10.418 per s")),
        ("leased", {"lease_bytes": 5}, ("leased", "lease 5 bytes")),
        ("run_ended", {"missed": ["one", "two"], "exit_code": 1}, ("run ended", "missed one; two, exit code 1")),
    ],
)  # fmt: skip
def test_events_are_told_in_words_with_units(
    event: str, details: dict[str, object], words: tuple[str, str]
) -> None:
    assert event_words(stored(event, worker_at_unix_s=1795349254.58, **details)) == words
