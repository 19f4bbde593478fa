"""What users say of jobs is obeyed once, whatever state they are in."""

from __future__ import annotations

import pytest

from orchestrator.jobs.model import JobOrder
from tests.jobs.scene import Scene, starts, training
from workers.messages import Cause


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
    scene.say(JobOrder.CANCEL, "a")

    scene.end("a")

    assert scene.state("a") == "DONE"


def test_retry_begins_again_with_all_its_retries() -> None:
    scene = Scene(training("a", retries=1))
    scene.turn()
    for text in ("ValueError", "KeyError"):
        scene.end("a", Cause.EXCEPTION, text)
    assert scene.state("a") == "FAILED"

    assert starts(scene.say(JobOrder.RETRY, "a")) == {"a": "pc1"}
    assert scene.standing("a").failures == 0
    assert starts(scene.end("a", Cause.EXCEPTION, "KeyError")) == {"a": "pc1"}
