"""A queue of jobs through the real command on real Ray: a killed worker, a killed head, and the same end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.jobs.journal import QUEUE_NAME, queue_of
from orchestrator.jobs.model import ON_CARD, JobState, Standing
from tests.cluster.conftest import PATIENT, SMALL, Head
from tests.scene import COMMAND, PATIENCE_S, ROOT, python, wait_for

pytestmark = pytest.mark.ray

RATES = (1e-4, 3e-4, 1e-3, 3e-3)

#: Parts of a batch stay as they are, so that a kill changes no bit.
KEYS: dict[str, Any] = {
    "preset": "gpt-nano", "steps": 160, "batch": 4, "micro": 2, "exact": True, "precision": "fp32",
    "save_every_s": 0.5,
}  # fmt: skip

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

#: Trains without the engine, and without an interruption; prints the hash of the weights for each
#: rate.
UNDISTURBED = f"""
import torch
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
torch.set_num_threads(1)
for rate in {RATES}:
    settings = TrainSettings(**{KEYS}, lr=rate)
    trainer = Trainer(find_task(settings, 0), settings, torch.device("cpu"), 0)
    while not trainer.finished:
        trainer.micro_batch(2)
    print(trainer.weights_sha256())
"""


class Night:
    """The command, and what its queue says."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.file = folder / "night.yaml"
        self.file.write_text(json.dumps(NIGHT))
        self.environment = {**os.environ, "TMPDIR": str(folder)}
        self.environment["ORCHESTRATOR_STATE_DIR"] = str(folder / "state")
        self.head = self.begin()

    def begin(self) -> Head:
        words = ("jobs", "run", str(self.file), "--rehearse", "--plain", *SMALL, *PATIENT)
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


@pytest.fixture
def night(nothing_left: None, short_tmp: Path) -> Iterator[Night]:
    made = Night(short_tmp)
    yield made
    if made.head.process.poll() is None:
        made.head.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.head.process.wait(PATIENCE_S)
        made.head.process.kill()
    made.head.process.communicate()
    wait_for(lambda: not list(short_tmp.glob("orch-*")), "end of the temporary folders")


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
    undisturbed = python("-c", UNDISTURBED, cwd=ROOT).stdout.split()
    assert [standings[f"lr-{number}"].sha256 for number in range(len(RATES))] == undisturbed
    files = night.head.folder() / QUEUE_NAME / "files" / "lr-0"
    assert (files / "copied").read_bytes() == (files / "checkpoint.pt").read_bytes()
    illegal = [event for event in night.head.events() if event["event"] == "illegal_event"]
    assert illegal == []
