"""A job that is preempted, through the real command on real Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.jobs.model import JobState
from tests.cluster.conftest import Head, Starter, undisturbed
from tests.cluster.night import KEYS, LONG, RATES, RESTING_JOB, Night

pytestmark = pytest.mark.ray

#: Of one that is to be preempted: what ends within 15 s is waited for.
LONGER = 5 * LONG

#: Until the file is there; a shell's `sleep` ends with it.
_UNTIL = "until [ -e {} ]; do sleep 0.1; done"

#: Times that a training is preempted.
TIMES = 3

#: Once there is a file `begin-0`, a program takes the training's card until there is `end-0`, then
#: the next one waits for `begin-1`.
URGENT = {
    "jobs": [
        {"name": "low", "train": {**KEYS, "lr": RATES[0], "steps": LONGER}, "nodes": ["pc1"]},
        *(
            each
            for time in range(TIMES)
            for each in (
                {
                    "name": f"first-{time}",
                    "after": [f"urgent-{time - 1}"] if time else [],
                    "command": ["sh", "-c", _UNTIL.format(f"begin-{time}")],
                    "nodes": ["pc2"],
                },
                {
                    "name": f"urgent-{time}",
                    "after": [f"first-{time}"],
                    "command": ["sh", "-c", _UNTIL.format(f"end-{time}")],
                    "nodes": ["pc1"],
                    "priority": 1,
                    "preempt": True,
                },
            )
        ),
    ]
}


def test_a_preempted_training_ends_with_the_same_weights(start: Starter, short_tmp: Path) -> None:
    night = Night(start, short_tmp, "--rehearse", RESTING_JOB)
    head = night.begin(night.file_of({**URGENT, "defaults": {"cwd": str(short_tmp)}}))
    head.wait(night.trains, "a checkpoint")
    for time_ in range(TIMES):
        began = len(restored_steps(head))
        (short_tmp / f"begin-{time_}").touch()
        head.wait(lambda: night.standings()["low"].state is JobState.PREEMPTED, "a card left")
        urgent = f"urgent-{time_}"
        head.wait(lambda urgent=urgent: night.standings()[urgent].card == "pc1", "a job there")
        (short_tmp / f"end-{time_}").touch()
        head.wait(lambda began=began: len(restored_steps(head)) > began, "a training that goes on")

    code, out, err = head.finish()
    assert code == 0, out + err
    low, events = night.standings()["low"], head.events()
    assert low.sha256 == undisturbed(KEYS, steps=LONGER, lr=RATES[0])[0]
    steps = restored_steps(head)
    assert all(0 < step < LONGER for step in steps)
    assert steps == sorted(steps)
    course = [event for event in events if event.get("job") == "low"]
    assert (low.state, low.failures) == (JobState.DONE, 0), course
    assert low.attempt > TIMES, "a busy machine may have it begin once more"


def restored_steps(head: Head) -> list[int]:
    """Return the steps from which the training went on."""
    return [event["step"] for event in head.events() if event["event"] == "restored"]
