"""What users say of jobs is obeyed once, whatever state they are in."""

from __future__ import annotations

import pytest

from orchestrator.jobs.lifecycle import IllegalRecordError
from orchestrator.jobs.model import (
    Cause,
    JobOrder,
    JobState,
    Record,
    Submitted,
    UserOrder,
)
from tests.jobs.scene import Scene, starts, training


def test_a_running_job_is_held_after_it_has_saved() -> None:
    scene = Scene(training("a"))
    scene.turn()

    scene.say(JobOrder.HOLD, "a")
    assert (scene.state("a"), scene.standing("a").recalled_to) == ("RUNNING", JobState.HELD)
    scene.see("a", is_at_rest=True)

    assert (scene.state("a"), scene.standing("a").reason) == ("HELD", "held by ann")
    assert starts(scene.say(JobOrder.RELEASE, "a")) == {"a": "pc1"}


@pytest.mark.parametrize("ends_itself", [False, True], ids=["at rest", "killed meanwhile"])
def test_a_running_job_is_cancelled(ends_itself: bool) -> None:
    scene = Scene(training("a"))
    scene.turn()
    scene.say(JobOrder.CANCEL, "a")
    assert scene.state("a") == "RUNNING"

    if ends_itself:
        scene.end("a", Cause.EXCEPTION, "KeyboardInterrupt")
    else:
        scene.see("a", is_at_rest=True)

    assert (scene.state("a"), scene.queue.is_over) == ("CANCELLED", True)


def test_what_is_done_before_it_is_cancelled_is_done() -> None:
    scene = Scene(training("a"))
    scene.turn()
    scene.take(UserOrder(at_s=0.0, id="m", order=JobOrder.CANCEL, job="a", by="ann"))

    scene.end("a")

    assert scene.state("a") == "DONE"


def test_a_job_in_line_is_cancelled_at_once() -> None:
    scene = Scene(training("a"), cards=())

    assert scene.say(JobOrder.CANCEL, "a") == []
    assert scene.state("a") == "CANCELLED"


def test_retry_begins_again_with_all_its_retries() -> None:
    scene = Scene(training("a", retries=1))
    scene.turn()
    for text in ("ValueError", "KeyError"):
        scene.end("a", Cause.EXCEPTION, text)
    assert scene.state("a") == "FAILED"

    assert starts(scene.say(JobOrder.RETRY, "a")) == {"a": "pc1"}
    assert scene.standing("a").failures == 0
    assert starts(scene.end("a", Cause.EXCEPTION, "KeyError")) == {"a": "pc1"}


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (UserOrder(at_s=0.0, id="m1", order=JobOrder.HOLD, job="a", by="ann"), "obeyed already"),
        (UserOrder(at_s=0.0, id="m3", order=JobOrder.HOLD, job="x", by="ann"), "no job called x"),
        (Submitted(at_s=0.0, job=training("a", origin="night.yaml:7")), "submitted already"),
        (
            Submitted(at_s=0.0, job=training("a", id="other")),
            r"another job called a \(night.yaml:7\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(record: Record, why: str) -> None:
    scene = Scene(training("a", origin="night.yaml:7"))
    scene.say(JobOrder.HOLD, "a", "m1")
    scene.say(JobOrder.RELEASE, "a", "m2")
    before = dict(scene.queue.standings)

    with pytest.raises(IllegalRecordError, match=why):
        scene.queue.apply(record)

    assert scene.queue.standings == before
