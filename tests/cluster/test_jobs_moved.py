"""A job that is preempted and continues on another PC, through the real command on real Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.jobs.model import JobState
from tests.cluster.conftest import Starter, undisturbed
from tests.cluster.night import KEYS, LONG, RATES, RESTING_JOB, Night
from tests.scene import ROOT, ended

pytestmark = pytest.mark.ray

#: More steps, because a job that ends within 15 s is not preempted.
LONGER = 5 * LONG

#: Waits until the file exists; ending the shell ends its `sleep`.
UNTIL = "until [ -e {} ]; do sleep 0.1; done"


def urgent(folder: Path) -> dict[str, object]:
    """Return jobs. The last one takes the card of the training after a file `begin` exists, and
    keeps it until a file `end` exists. Meanwhile another job occupies the other card.
    """
    begin, end = (["sh", "-c", UNTIL.format(name)] for name in ("begin", "end"))
    return {
        "defaults": {"cwd": str(folder)},
        "jobs": [
            {"name": "low", "train": {**KEYS, "lr": RATES[0], "steps": LONGER}, "priority": -1},
            {"name": "first", "command": begin, "nodes": ["pc2"]},
            {"name": "urgent", "after": ["first"], "command": end, "nodes": ["pc1"],
             "priority": 1, "preempt": True},
        ],
    }  # fmt: skip


@pytest.fixture
def two_pcs(start: Starter, short_tmp: Path) -> Iterator[Night]:
    """A queue on two raylets that the command has not started, with separate state folders."""
    command = [sys.executable, "-m", "tests.cluster.two_pcs", str(short_tmp)]
    pcs = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert pcs.stdout is not None
    where = f"--set=cluster.address={pcs.stdout.readline().strip()}"
    environment = {
        "RAY_AUTH_TOKEN_PATH": str(short_tmp / "auth_token"),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # use loopback addresses unchanged
    }
    night = Night(start, short_tmp, where, RESTING_JOB, **environment)
    yield night
    night.head.close()
    ended(pcs)


def test_a_preempted_training_goes_on_from_the_heads_copy_to_the_bit(
    two_pcs: Night, short_tmp: Path
) -> None:
    head = two_pcs.begin(two_pcs.file_of(urgent(short_tmp)))
    head.wait(lambda: two_pcs.trains() == "low", "a checkpoint")
    assert two_pcs.standings()["low"].card == "pc1"
    (short_tmp / "begin").touch()
    head.wait(lambda: two_pcs.standings()["urgent"].card == "pc1", "another job on its card")
    head.wait(lambda: head.events("restored"), "a training that goes on")
    assert two_pcs.standings()["low"].card == "pc2"
    (short_tmp / "end").touch()

    code, out, err = head.finish()
    assert code == 0, out + err
    low = two_pcs.standings()["low"]
    assert (low.state, low.last_card, low.failures) == (JobState.DONE, "pc2", 0)
    (recalled,) = head.events("job_attempt_recalled", job="low")
    assert recalled["reason"] == "makes room for urgent"
    assert all(0 < event["step"] < LONGER for event in head.events("restored"))
    assert low.sha256 == undisturbed(KEYS, steps=LONGER, lr=RATES[0])[0]
