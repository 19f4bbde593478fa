"""A queue of jobs through the real command on real Ray: a killed worker, a killed head, another card,
and the same end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control.queue import put
from orchestrator.jobs.model import ON_CARD, JobOrder, JobState, Standing, UserOrder
from orchestrator.record.jobs import QUEUE_NAME, queue_of
from tests.cluster.conftest import SMALL, Head, Starter
from tests.scene import ROOT, ended, orchestrator, python

pytestmark = pytest.mark.ray

RATES = (1e-4, 1e-3, 3e-3)

#: Parts of a batch stay as they are, so that a kill changes no bit.
KEYS: dict[str, Any] = {
    "preset": "gpt-nano", "steps": 120, "batch": 4, "micro": 2, "exact": True, "precision": "fp32",
    "save_every_s": 0.5,
}  # fmt: skip

#: Steps of a training that is to be held while it trains.
LONG = 600

#: Of one that is to be preempted: what ends within 15 s is waited for.
LONGER = 5 * LONG

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

#: As soon as the first one rests, the second has its card until it is cancelled.
CROWDED = {
    "jobs": [
        {"name": "moved", "train": {**KEYS, "lr": RATES[0], "steps": LONG}},
        {"name": "stays", "command": ["sleep", "100000"], "nodes": ["pc1"], "priority": -1},
    ]
}

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

#: Trains without the engine, and without an interruption; prints the hash of the weights for each
#: rate.
UNDISTURBED = f"""
import sys, torch
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
torch.set_num_threads(1)
for rate in map(float, sys.argv[2:]):
    settings = TrainSettings(**{KEYS} | {{"steps": int(sys.argv[1])}}, lr=rate)
    trainer = Trainer(find_task(settings, 0), settings, torch.device("cpu"), 0)
    while not trainer.finished:
        trainer.micro_batch(2)
    print(trainer.weights_sha256())
"""


class Night:
    """A queue under the command, and what it says."""

    def __init__(self, start: Starter, folder: Path, *where: str, **environment: str) -> None:
        self.start, self.where, self.runs = start, where, folder / "runs"
        self.file = folder / "night.yaml"
        self.environment = {**environment, "PYTHONPATH": str(ROOT)}

    def begin(self, *words: str) -> Head:
        self.head = self.start(
            *(*words, *self.where, "--plain", *SMALL),
            verb=("jobs", "run"),
            runs=self.runs,
            cwd=self.file.parent,
            environment=self.environment,
        )
        return self.head

    def file_of(self, jobs: object) -> str:
        """Write the jobs into the file, and return its name."""
        self.file.write_text(json.dumps(jobs))
        return str(self.file)

    def submit(self, *words: str) -> None:
        where = ("--run-dir", str(self.runs))
        done = orchestrator("jobs", "submit", *where, *words, cwd=ROOT, **self.environment)
        assert done.returncode == 0, done.stderr

    def say(self, order: JobOrder, job: str) -> None:
        """Have the head hear a order about a job, as `jobs hold` and the like do."""
        now_ns = time.time_ns()
        said = UserOrder(at_s=now_ns / 1e9, id=f"{now_ns}-{job}", order=order, job=job, by="test")
        put(self.head.folder() / QUEUE_NAME, [said])

    def standings(self) -> dict[str, Standing]:
        return dict(queue_of(self.head.folder()).standings)

    def trains(self) -> str | None:
        """Return a job that has a checkpoint, and is at work."""
        rows = self.head.rows()
        for name, standing in self.standings().items():
            if standing.state in ON_CARD and rows.get(name, {}).get("saved_step"):
                return name
        return None


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
    night = Night(start, short_tmp, where, **environment)
    yield night
    night.head.close()
    ended(pcs)


def test_a_queue_survives_the_death_of_worker_and_head(start: Starter, short_tmp: Path) -> None:
    night = Night(start, short_tmp, "--rehearse")
    first = night.begin("--stay")
    first.wait(lambda: list(night.runs.glob(f"*/{QUEUE_NAME}")), "a queue")
    night.submit(night.file_of(NIGHT))
    first.wait(night.trains, "a checkpoint")
    name = str(night.trains())
    (pid,) = first.opened(name)
    os.kill(pid, 9)
    first.wait(
        lambda: [event for event in first.events() if event["event"] == "restored"],
        "a process that goes on",
    )
    first.wait(night.trains, "a checkpoint")
    first.kill()
    night.submit("--", "true")

    code, out, err = night.begin(str(night.file)).finish()
    assert code == 0, out + err
    assert "Going on with the queue" in err
    standings = night.standings()
    assert {each.state for each in standings.values()} == {JobState.DONE}
    assert len(standings) == len(RATES) + 2
    words = ["-c", UNDISTURBED, str(KEYS["steps"]), *map(str, RATES)]
    undisturbed = python(*words, cwd=ROOT).stdout.split()
    assert [standings[f"lr-{number}"].sha256 for number in range(len(RATES))] == undisturbed
    files = night.head.folder() / QUEUE_NAME / "files" / "lr-0"
    assert (files / "copied").read_bytes() == (files / "checkpoint.pt").read_bytes()


def test_a_job_that_is_waited_for_prints_here_and_ends_with_its_code(
    start: Starter, short_tmp: Path
) -> None:
    night = Night(start, short_tmp, "--rehearse")
    head = night.begin("--stay")
    head.wait(lambda: list(night.runs.glob(f"*/{QUEUE_NAME}")), "a queue")
    words = ("jobs", "submit", "--wait", "--run-dir", str(night.runs), "--", sys.executable, "-c")
    for program, code, printed in (
        ("print('good')", 0, "good\n"),
        ("print('bad'); raise SystemExit(7)", 7, "bad\n" * 2),  # it is retried once
    ):
        done = orchestrator(*words, program, cwd=ROOT, **night.environment)
        assert (done.returncode, done.stdout) == (code, printed), done.stderr


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
    undisturbed = python("-c", UNDISTURBED, str(LONG), str(RATES[0]), cwd=ROOT).stdout.split()
    assert [moved.sha256] == undisturbed


def test_a_preempted_training_ends_with_the_same_weights(start: Starter, short_tmp: Path) -> None:
    night = Night(start, short_tmp, "--rehearse")
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
    undisturbed = python("-c", UNDISTURBED, str(LONGER), str(RATES[0]), cwd=ROOT).stdout.split()
    assert [low.sha256] == undisturbed
    steps = restored_steps(head)
    assert all(0 < step < LONGER for step in steps)
    assert steps == sorted(steps)
    course = [event for event in events if event.get("job") == "low"]
    assert (low.state, low.failures) == (JobState.DONE, 0), course
    assert low.attempt > TIMES, "a busy machine may have it begin once more"


def restored_steps(head: Head) -> list[int]:
    """Return the steps from which the training went on."""
    return [event["step"] for event in head.events() if event["event"] == "restored"]
