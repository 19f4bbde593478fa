"""A queue of jobs through the real command on real Ray: a killed worker, a killed head, another card,
and the same end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.jobs import inbox
from orchestrator.jobs.journal import QUEUE_NAME, queue_of
from orchestrator.jobs.model import ON_CARD, JobState, Said, Standing, Word
from tests.cluster.conftest import PATIENT, SMALL, Head
from tests.scene import COMMAND, PATIENCE_S, ROOT, python, wait_for

pytestmark = pytest.mark.ray

RATES = (1e-4, 3e-4, 1e-3, 3e-3)

#: Parts of a batch stay as they are, so that a kill changes no bit.
KEYS: dict[str, Any] = {
    "preset": "gpt-nano", "steps": 160, "batch": 4, "micro": 2, "exact": True, "precision": "fp32",
    "save_every_s": 0.5,
}  # fmt: skip

#: Steps of a training that is to be held while it trains.
LONG = 800

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


def say(folder: Path, word: Word, job: str) -> None:
    """Have the head hear a word about a job, as `jobs hold` and the like do."""
    now_ns = time.time_ns()
    inbox.put(
        folder, [Said(at_s=now_ns / 1e9, id=f"{now_ns}-{job}", word=word, job=job, by="test")]
    )


class Night:
    """The command, and what its queue says."""

    def __init__(self, folder: Path, jobs: object, *where: str, **environment: str) -> None:
        self.runs = folder / "runs"
        self.file = folder / "night.yaml"
        self.file.write_text(json.dumps(jobs))
        self.where = where
        self.environment = {**os.environ, "TMPDIR": str(folder), **environment}
        self.head = self.begin()

    def begin(self) -> Head:
        words = ("jobs", "run", str(self.file), *self.where, "--plain", *SMALL, *PATIENT)
        where = ("--config", str(ROOT / "cluster.yaml"), "--run-dir", str(self.runs))
        process = subprocess.Popen(
            [*COMMAND, *words, *where],
            cwd=self.file.parent,
            env={**self.environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.head = Head(process=process, runs=self.runs)
        return self.head

    def submit(self) -> None:
        words = ["-m", "orchestrator", "jobs", "submit", "--run-dir", str(self.runs), "--", "true"]
        done = python(*words, cwd=ROOT, **self.environment)
        assert done.returncode == 0, done.stderr

    def standings(self) -> dict[str, Standing]:
        return dict(queue_of(self.head.folder() / QUEUE_NAME).standings)

    def trains(self) -> str | None:
        """Return a job that has a checkpoint, and is at work."""
        rows = self.head.rows()
        for name, standing in self.standings().items():
            if standing.state in ON_CARD and rows.get(name, {}).get("saved_step"):
                return name
        return None


@contextlib.contextmanager
def ended(night: Night) -> Iterator[Night]:
    """End the command after the test, if it has not."""
    try:
        yield night
    finally:
        if night.head.process.poll() is None:
            night.head.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                night.head.process.wait(PATIENCE_S)
            night.head.process.kill()
        night.head.process.communicate()


@pytest.fixture
def night(nothing_left: None, short_tmp: Path) -> Iterator[Night]:
    with ended(Night(short_tmp, NIGHT, "--rehearse")) as made:
        yield made
    wait_for(lambda: not list(short_tmp.glob("orch-*")), "end of the temporary folders")


@pytest.fixture
def crowded(nothing_left: None, short_tmp: Path) -> Iterator[Night]:
    """A night on two raylets that are not the command's, and share no state folder."""
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
    try:
        with ended(Night(short_tmp, CROWDED, where, **environment)) as made:
            yield made
    finally:
        pcs.communicate(timeout=PATIENCE_S)


def test_a_queue_survives_the_death_of_worker_and_head(night: Night) -> None:
    first = night.head
    first.wait(night.trains, "a checkpoint")
    name = night.trains()
    opened = [event for event in first.events() if event["event"] == "device_opened"]
    pid = next(event["pid"] for event in reversed(opened) if event["slot"] == name)
    os.kill(pid, 9)
    first.wait(
        lambda: [event for event in first.events() if event["event"] == "restored"],
        "a process that goes on",
    )
    first.wait(night.trains, "a checkpoint")
    first.process.kill()
    first.process.communicate()
    night.submit()

    code, out, err = night.begin().finish()
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
    illegal = [event for event in night.head.events() if event["event"] == "illegal_event"]
    assert illegal == []


def test_a_moved_training_goes_on_from_the_heads_copy(crowded: Night) -> None:
    head = crowded.head
    head.wait(crowded.trains, "a checkpoint")
    queue = head.folder() / QUEUE_NAME
    say(queue, Word.HOLD, "moved")
    head.wait(lambda: crowded.standings()["stays"].card, "another job on its card")
    assert crowded.standings()["moved"].last_card == "pc1"
    say(queue, Word.RELEASE, "moved")
    head.wait(lambda: crowded.standings()["moved"].sha256, "its end")
    say(queue, Word.CANCEL, "stays")

    code, out, err = head.finish()
    assert code == 0, out + err
    moved = crowded.standings()["moved"]
    assert (moved.state, moved.last_card, moved.attempt) == (JobState.DONE, "pc2", 2)
    restored = [event["step"] for event in head.events() if event["event"] == "restored"]
    assert len(restored) == 1
    assert 0 < restored[0] < LONG
    undisturbed = python("-c", UNDISTURBED, str(LONG), str(RATES[0]), cwd=ROOT).stdout.split()
    assert [moved.sha256] == undisturbed
