"""What users say of jobs is obeyed once, whatever state they are in."""

from __future__ import annotations

import pytest

from orchestrator.jobs.lifecycle import IllegalRecordError
from orchestrator.jobs.model import (
    AttemptRecalled,
    Cause,
    JobOrder,
    Submitted,
    UserOrder,
)
from tests.jobs.scene import Scene, starts, training


def test_a_running_job_is_held_after_it_has_saved() -> None:
    scene = Scene(training("a"))
    scene.turn()

    (recalled,) = scene.say(JobOrder.HOLD, "a")
    assert isinstance(recalled, AttemptRecalled)
    assert scene.say(JobOrder.HOLD, "a") != [], "said again: it is told again"
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


def test_a_word_that_comes_twice_is_obeyed_once() -> None:
    scene = Scene(training("a"))
    scene.say(JobOrder.HOLD, "a", "m1")
    scene.say(JobOrder.RELEASE, "a", "m2")
    said = UserOrder(at_s=0.0, id="m1", order=JobOrder.HOLD, job="a", by="ann")

    assert scene.queue.why_refused(said) == "it has been obeyed already"
    scene.take(said)

    assert scene.state("a") != "HELD"


def test_a_word_about_a_job_that_there_is_not_is_refused() -> None:
    said = UserOrder(at_s=0.0, id="m1", order=JobOrder.HOLD, job="x", by="ann")
    assert Scene(training("a")).queue.why_refused(said) == "there is no job called x"


def test_a_job_that_comes_twice_is_one() -> None:
    scene = Scene(training("a"))
    again = Submitted(at_s=0.0, job=training("a"))

    assert scene.queue.why_refused(again) == "a has been submitted already"
    scene.take(again)
    assert list(scene.queue.standings) == ["a"]


def test_another_job_with_the_same_name_is_refused() -> None:
    scene = Scene(training("a", origin="night.yaml:7"))
    other = Submitted(at_s=0.0, job=training("a", id="other"))

    assert scene.queue.why_refused(other) == "there is another job called a (night.yaml:7)"
    with pytest.raises(IllegalRecordError, match="another job"):
        scene.queue.apply(other)
