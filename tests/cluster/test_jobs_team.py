"""A job that uses the cards of two rehearsed PCs at once, on real Ray: it leaves both at once, and
survives the death of its leader and of the head.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from orchestrator.jobs.model import JobOrder, JobState, Standing
from tests.cluster.conftest import Head, Starter, undisturbed
from tests.cluster.night import KEYS, RATES, Night
from tests.scene import ROOT, orchestrator

pytestmark = pytest.mark.ray

STEPS = {"data": 1600, "layers": 400}  # with `data` the other member continues after a kill
TRAIN = {**KEYS, "lr": RATES[0], "team": ["pc1", "pc2"]}
SLOTS = ["both/pc1/0", "both/pc2/0"]


def steps_of(head: Head) -> int:
    """Return the newest step of a member, while both members make each step; else 0."""
    rows = [head.rows().get(slot, {}) for slot in SLOTS]
    together = all(row.get("team_state") == "TOGETHER" for row in rows)
    return max(row["train_step"] or 0 for row in rows) if together else 0


def both(night: Night) -> Standing:
    return night.standings()["both"]


@pytest.mark.parametrize("split", ["data", "layers"])
def test_a_team_is_one_job(start: Starter, short_tmp: Path, split: str) -> None:
    night = Night(start, short_tmp, "--rehearse")
    train = {**TRAIN, "split": split, "steps": STEPS[split]}
    head = night.begin(night.file_of({"jobs": [{"name": "both", "train": train}]}))
    head.wait(lambda: steps_of(head) > 5, "both members")
    leader, step = head.events("team_leader")[-1]["slot"], steps_of(head)
    os.kill(head.opened(leader)[-1], signal.SIGKILL)
    head.wait(lambda: steps_of(head) > step, "both members again")
    assert (both(night).card, both(night).attempt) == ("pc1+pc2", 1)
    told = orchestrator(
        *("jobs", "list", "--json", "--run-dir", str(night.runs)), cwd=ROOT, **night.environment
    )
    (row,) = json.loads(told.stdout)["jobs"]
    assert sorted(row["job_team"]) == SLOTS

    night.say(JobOrder.HOLD, "both")
    head.wait(lambda: both(night).state is JobState.HELD, "both cards")
    assert {head.rows()[slot]["state"] for slot in SLOTS} == {"HELD"}
    night.say(JobOrder.RELEASE, "both")
    head.wait(lambda: both(night).attempt == 2, "another attempt")
    restored = {"data": 2, "layers": 1}[split] + len(head.events("restored"))
    head.wait(lambda: len(head.events("restored")) >= restored, "both members once more")
    head.kill()

    code, out, err = night.begin(str(night.file)).finish()
    assert code == 0, out + err
    assert (both(night).state, both(night).failures) == (JobState.DONE, 0)
    # Bit for bit as one process trains.
    assert both(night).sha256 == undisturbed(KEYS, steps=STEPS[split], lr=RATES[0])[0]
    assert (night.head.folder() / "jobs" / "files" / "both" / "checkpoint.pt").exists()
