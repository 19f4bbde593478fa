"""A queue of exact trainings through the real command on real Ray, and its expected results."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from orchestrator.control.queue import put
from orchestrator.jobs.model import ON_CARD, JobOrder, Standing, UserOrder
from orchestrator.record.jobs import QUEUE_NAME, queue_of
from tests.cluster.conftest import SMALL, Head, Starter
from tests.scene import ROOT, orchestrator

RATES = (1e-4, 1e-3, 3e-3)

#: The parts of a batch are constant, so that a kill changes no bit.
KEYS: dict[str, Any] = {
    "preset": "gpt-nano", "steps": 120, "batch": 4, "micro": 2, "exact": True, "precision": "fp32",
    "save_every_s": 0.5,
}  # fmt: skip

#: Steps of a training that must leave its card while it trains. It rests between steps for most of
#: the time, so that it takes long and computes little.
LONG = 60

#: A single job on the card of pc1 has the shares of its two workers, and so computes 10 % of the
#: time.
RESTING_JOB = "--set=nodes.pc1.gpu_share=0.05"


class Night:
    """A queue under the command, and its state."""

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
        """Write the jobs into the job file; return its name."""
        self.file.write_text(json.dumps(jobs))
        return str(self.file)

    def submit(self, *words: str) -> None:
        where = ("--run-dir", str(self.runs))
        done = orchestrator("jobs", "submit", *where, *words, cwd=ROOT, **self.environment)
        assert done.returncode == 0, done.stderr

    def say(self, order: JobOrder, job: str) -> None:
        """Send the head an order about a job, as `jobs hold` and similar verbs do."""
        now_ns = time.time_ns()
        said = UserOrder(id=f"{now_ns}-{job}", order=order, job=job, by="test")
        put(self.head.folder() / QUEUE_NAME, [said])

    def standings(self) -> dict[str, Standing]:
        return dict(queue_of(self.head.folder()).standings)

    def trains(self) -> str | None:
        """Return a job that has a checkpoint and is training."""
        rows = self.head.rows()
        for name, standing in self.standings().items():
            if standing.state in ON_CARD and rows.get(name, {}).get("saved_step"):
                return name
        return None
