"""A queue of jobs through the real command on real Ray: a killed worker and a killed head do not
change the results.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.jobs.model import JobState
from orchestrator.record.jobs import QUEUE_NAME
from tests.cluster.conftest import Starter, undisturbed
from tests.cluster.night import KEYS, RATES, Night

pytestmark = pytest.mark.ray

NIGHT = {
    "jobs": [
        {
            "name": "lr",
            "train": KEYS,
            "sweep": {"method": "grid", "over": {"train.lr": list(RATES)}},
        },
        {
            "name": "eval",
            "after": ["lr"],
            "command": ["cp", "{lr-0.dir}/checkpoint.pt", "copied"],
            "cwd": "{lr-0.dir}",
        },
    ]
}


def test_a_queue_survives_the_death_of_worker_and_head(start: Starter, short_tmp: Path) -> None:
    night = Night(start, short_tmp, "--rehearse")
    first = night.begin("--stay")
    first.wait(lambda: list(night.runs.glob(f"*/{QUEUE_NAME}")), "a queue")
    night.submit(night.file_of(NIGHT))
    first.wait(night.trains, "a checkpoint")
    name = str(night.trains())
    (pid,) = first.opened(name)
    os.kill(pid, 9)
    first.wait(lambda: first.events("restored"), "a process that goes on")
    first.wait(night.trains, "a checkpoint")
    first.kill()
    night.submit("--", "true")

    code, out, err = night.begin(str(night.file)).finish()
    assert code == 0, out + err
    assert "Continuing the queue" in err
    standings = night.standings()
    assert {each.state for each in standings.values()} == {JobState.DONE}
    assert len(standings) == len(RATES) + 2
    for number, rate in enumerate(RATES):
        assert standings[f"lr-{number}"].sha256 == undisturbed(KEYS, lr=rate)[0]
    files = night.head.folder() / QUEUE_NAME / "files" / "lr-0"
    assert (files / "copied").read_bytes() == (files / "checkpoint.pt").read_bytes()
