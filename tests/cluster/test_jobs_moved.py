"""A job that goes on on another PC, through the real command on real Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.jobs.model import JobOrder, JobState
from tests.cluster.conftest import Starter, undisturbed
from tests.cluster.night import KEYS, LONG, RATES, RESTING_JOB, Night
from tests.scene import ROOT, ended

pytestmark = pytest.mark.ray

#: As soon as the first one rests, the second has its card until it is cancelled.
CROWDED = {
    "jobs": [
        {"name": "moved", "train": {**KEYS, "lr": RATES[0], "steps": LONG}},
        {"name": "stays", "command": ["sleep", "100000"], "nodes": ["pc1"], "priority": -1},
    ]
}


@pytest.fixture
def two_pcs(start: Starter, short_tmp: Path) -> Iterator[Night]:
    """A queue on two raylets that are not the command's, and share no state folder."""
    command = [sys.executable, "-m", "tests.cluster.two_pcs", str(short_tmp)]
    pcs = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert pcs.stdout is not None
    where = f"--set=cluster.address={pcs.stdout.readline().strip()}"
    environment = {
        "RAY_AUTH_TOKEN_PATH": str(short_tmp / "auth_token"),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback is meant as it is
    }
    night = Night(start, short_tmp, where, RESTING_JOB, **environment)
    yield night
    night.head.close()
    ended(pcs)


def test_a_moved_training_goes_on_from_the_heads_copy(two_pcs: Night) -> None:
    head = two_pcs.begin(two_pcs.file_of(CROWDED))
    head.wait(two_pcs.trains, "a checkpoint")
    two_pcs.say(JobOrder.HOLD, "moved")
    head.wait(lambda: two_pcs.standings()["stays"].card, "another job on its card")
    assert two_pcs.standings()["moved"].last_card == "pc1"
    two_pcs.say(JobOrder.RELEASE, "moved")
    head.wait(lambda: two_pcs.standings()["moved"].sha256, "its end")
    two_pcs.say(JobOrder.CANCEL, "stays")

    code, out, err = head.finish()
    assert code == 0, out + err
    moved = two_pcs.standings()["moved"]
    assert (moved.state, moved.last_card, moved.attempt) == (JobState.DONE, "pc2", 2)
    restored = [event["step"] for event in head.events() if event["event"] == "restored"]
    assert len(restored) == 1
    assert 0 < restored[0] < LONG
    assert moved.sha256 == undisturbed(KEYS, steps=LONG, lr=RATES[0])[0]
