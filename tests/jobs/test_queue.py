"""The rules of the queue one by one: the decisions that follow from records and observations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.jobs.model import ON_CARD, JobOrder, JobState
from tests.jobs.scene import BIG, Scene, command, starts, training
from workers.messages import Cause
from workers.units import GIB, MIB


def test_a_training_that_never_has_room_ends_with_the_sum() -> None:
    scene = Scene(training("a"))

    for _ in range(6):
        scene.turn(3600.0)
        scene.see("a", has_no_room=True)
        scene.see("a", is_at_rest=True)
    scene.turn(3600.0)

    assert scene.state("a") == "INFEASIBLE"
    assert "tried 6 times" in scene.standing("a").reason


def test_a_command_out_of_memory_gets_a_larger_card() -> None:
    scene = Scene(training("b"), command("a"))
    scene.turn()
    assert scene.standing("a").card == "pc2"

    scene.end("a", Cause.OUT_OF_MEMORY, "CUDA out of memory", peak_bytes=6 * GIB)

    assert (scene.state("a"), scene.standing("a").failures) == ("QUEUED", 0)
    assert scene.standing("a").least_room_bytes == int(7.5 * GIB)
    assert starts(scene.end("b"))["a"] == "pc1"


def test_a_command_is_never_tried_twice_on_the_same_terms() -> None:
    scene = Scene(command("a"))
    scene.turn()

    scene.end("a", Cause.OUT_OF_MEMORY, "CUDA out of memory", peak_bytes=19 * GIB)

    assert scene.state("a") == "INFEASIBLE"


@pytest.mark.parametrize("cause", [Cause.KILLED, Cause.HOST_MEMORY, Cause.PARKED])
def test_a_kill_is_not_counted_and_waits_a_little(cause: Cause) -> None:
    scene = Scene(training("a"))
    scene.turn()

    for wait_s in (5.0, 10.0, 20.0):
        scene.end("a", cause, "SIGKILL")
        assert scene.state("a") == "PARKED"
        assert starts(scene.turn(wait_s - 1.0)) == {}
        assert starts(scene.turn(1.0)) == {"a": "pc1"}
    assert scene.standing("a").failures == 0


@pytest.mark.parametrize(
    ("text", "step", "state"),
    [
        ("RuntimeError at 0x7f01 in batch 18", 500, "FAILED"),
        ("RuntimeError at 0x7f01 in batch 18", 700, "RUNNING"),
        ("RuntimeError at 0x7f01 in batch 18", None, "RUNNING"),
        ("another", 500, "RUNNING"),
    ],
)
def test_the_same_exception_at_the_same_step_is_final(
    text: str, step: int | None, state: str
) -> None:
    scene = Scene(training("a", retries=5))
    scene.turn()

    scene.end("a", Cause.EXCEPTION, "RuntimeError at 0x7f99 in batch 17", step=500)
    scene.end("a", Cause.EXCEPTION, text, step=step)

    assert scene.state("a") == state
    assert scene.standing("a").last_error == text


@pytest.mark.parametrize(
    "cause", [Cause.NAN_LOSS, Cause.BAD_CONFIG, Cause.NOT_STARTED, Cause.TIME_LIMIT]
)
def test_what_would_come_again_ends_a_job_at_once(cause: Cause) -> None:
    scene = Scene(training("a", retries=5))
    scene.turn()
    scene.end("a", cause, "it ended")
    assert scene.state("a") == "FAILED"


@pytest.mark.parametrize(
    ("job", "text", "after_s", "cause"),
    [
        ("j2", "other", 5.0, Cause.EXCEPTION),
        ("j2", "same", 61.0, Cause.EXCEPTION),
        ("j2", "same", 5.0, Cause.KILLED),
        ("j1", "same", 5.0, Cause.EXCEPTION),
    ],
    ids=["another message", "later", "another cause", "the same job"],
)
def test_what_is_not_alike_does_not_hold_the_queue(
    job: str, text: str, after_s: float, cause: Cause
) -> None:
    scene = Scene(*(command(f"j{i}", retries=1) for i in range(5)))
    scene.turn()

    scene.end("j0", Cause.EXCEPTION, "same")
    scene.end("j1", Cause.EXCEPTION, "same")
    scene.now_s += after_s
    scene.end(job, cause, text)

    assert scene.queue.facts.held is None


def test_a_full_disk_holds_the_queue_and_ends_nothing() -> None:
    scene = Scene(training("a"), training("b"), training("c"))
    scene.turn()
    scene.disk_full = "/data is full"

    scene.end("a")

    assert (scene.queue.facts.held, scene.state("b"), scene.state("c")) == (
        "/data is full",
        "RUNNING",
        "QUEUED",
    )


def test_a_job_that_met_a_full_disk_holds_the_queue() -> None:
    scene = Scene(training("a"), training("b"), training("c"))
    scene.turn(3600.0)

    scene.end("a", Cause.DISK_FULL, "No space left on device")

    assert scene.queue.facts.held == "the disk was full for a: No space left on device"


def test_outside_its_hours_a_job_rests() -> None:
    scene = Scene(training("a", hours=(22 * 60, 7 * 60)))
    assert starts(scene.turn()) == {}
    assert scene.standing("a").reason == "hours 22:00-07:00"

    scene.minute = 23 * 60
    assert starts(scene.turn()) == {"a": "pc1"}
    scene.minute = 7 * 60
    recalled = scene.see("a")
    assert [(each.name, each.details["to"]) for each in recalled] == [
        ("job_attempt_recalled", JobState.PARKED)
    ]
    scene.see("a", is_at_rest=True)
    assert (scene.state("a"), scene.standing("a").reason) == ("PARKED", "hours 22:00-07:00")

    scene.minute = 22 * 60
    assert starts(scene.turn()) == {"a": "pc1"}


@pytest.mark.parametrize("any_end", [False, True])
def test_a_job_after_one_that_is_not_there_does_not_wait(any_end: bool) -> None:
    scene = Scene(training("b", after=("a",), after_any=any_end))
    scene.turn()

    assert scene.state("b") == "SKIPPED"
    assert scene.standing("b").reason == "it comes after a, and this queue has no such job"


@pytest.mark.parametrize("looked_before", [False, True])
def test_a_job_may_come_before_the_one_that_it_waits_for(looked_before: bool) -> None:
    scene = Scene(training("b", after=("a",)))
    if looked_before:
        scene.turn()

    scene.submit(training("a"))

    assert starts(scene.turn()) == {"a": "pc1"}
    assert starts(scene.end("a")) == {"b": "pc1"}


def test_after_a_retry_what_was_skipped_waits_again() -> None:
    jobs = (training("a", retries=0), training("b", after=("a",)), training("c", after=("b",)))
    scene = Scene(*jobs)
    scene.turn()
    scene.end("a", Cause.EXCEPTION, "ValueError")
    assert (scene.state("b"), scene.state("c")) == ("SKIPPED", "SKIPPED")

    scene.say(JobOrder.RETRY, "a")

    assert (scene.state("b"), scene.state("c")) == ("WAITING", "WAITING")
    assert scene.standing("b").reason == "waits for a"
    assert starts(scene.end("a")) == {"b": "pc1"}
    assert starts(scene.end("b")) == {"c": "pc1"}


def test_retry_begins_again_with_all_its_retries() -> None:
    scene = Scene(training("a", retries=1))
    scene.turn()
    for text in ("ValueError", "KeyError"):
        scene.end("a", Cause.EXCEPTION, text)
    assert scene.state("a") == "FAILED"

    assert starts(scene.say(JobOrder.RETRY, "a")) == {"a": "pc1"}
    assert scene.standing("a").failures == 0
    assert starts(scene.end("a", Cause.EXCEPTION, "KeyError")) == {"a": "pc1"}


def test_the_longest_is_first_once_a_job_alike_was_measured() -> None:
    jobs = [training(name, steps=steps) for name, steps in (("a", 10), ("short", 20), ("long", 90))]
    scene = Scene(*jobs, cards=(BIG,))
    assert list(starts(scene.turn())) == ["a"], "nothing is known yet"

    scene.see("a", step=5, steps_per_s=2.0)

    assert list(starts(scene.end("a"))) == ["long"]


def test_two_that_both_say_so_share_a_card() -> None:
    small = {"pack": True, "memory_bytes": 2 * GIB}
    scene = Scene(training("a", **small), training("b", **small), cards=(BIG,))

    assert starts(scene.turn()) == {"a": "pc1", "b": "pc1"}
    for name in ("a", "b"):
        standing = scene.standing(name)
        assert (standing.alone, standing.budget_bytes) == (False, 2 * GIB + 256 * MIB)
    scene.see("a", step=10, steps_per_s=1.0)
    assert scene.standing("a").speeds == {}, "a shared card's speed is none of the job's"
    scene.end("b", peak_bytes=3 * GIB)
    scene.submit(training("c", **small))
    assert starts(scene.turn()) == {"c": "pc1"}
    assert scene.standing("c").budget_bytes == 3 * GIB + 3 * GIB // 10 + 1, "as one alike took"


def test_a_stopped_member_does_not_skip_what_follows_a_sweep() -> None:
    scene = Scene(
        *(training(f"lr-{i}", sweep="lr") for i in range(2)),
        training("best", after=("lr-0", "lr-1")),
        training("eval-1", after=("lr-1",)),
    )
    scene.turn()
    scene.put(replace(scene.standing("lr-1"), state=JobState.STOPPED))
    scene.turn()
    assert (scene.state("best"), scene.state("eval-1")) == ("WAITING", "SKIPPED")

    assert "best" in starts(scene.end("lr-0"))


def test_a_program_that_does_not_say_that_it_parks_is_not_preempted() -> None:
    scene = Scene(command("low"), cards=(BIG,))
    scene.turn()
    scene.see("low")
    scene.submit(training("urgent", priority=1, preempt=True))

    assert [event.name for event in scene.turn()] == ["job_submitted"]
    assert scene.standing("urgent").reason == "pc1 runs low"


@pytest.mark.parametrize(
    ("cause", "steps", "ends"),
    [(Cause.KILLED, 0, "FAILED"), (Cause.KILLED, 10, "RUNNING"), (Cause.PARKED, 0, "RUNNING")],
    ids=["killed", "killed, and further each time", "asks for it"],
)
def test_a_program_that_always_ends_soon_is_not_tried_for_ever(
    cause: Cause, steps: int, ends: str
) -> None:
    scene = Scene(command("a"), cards=(BIG,))
    for attempt in range(12):
        scene.turn(601.0)
        assert scene.standing("a").state in ON_CARD
        scene.see("a", cause=cause, text="SIGKILL", step=steps * (attempt + 1))
    scene.turn(601.0)
    assert scene.state("a") == ends
