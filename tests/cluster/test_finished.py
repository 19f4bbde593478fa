"""A training on real Ray: a killed worker goes on from its checkpoint to the same weights.

All done, the run ends.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SMALL, Starter
from tests.scene import python

pytestmark = pytest.mark.ray

#: Parts of a batch stay as they are, so that a kill changes no bit; memory is there for all of
#: them.
KEYS: dict[str, Any] = {
    "steps": 80, "batch": 8, "micro": 4, "exact": True, "seq": 16, "precision": "fp32", "dropout": 0.1,
    "save_every_s": 0.5, "checkpoints": "head",
}  # fmt: skip
TRAINING = (
    "--workload",
    "train",
    *(f"--set=train.{key}={json.dumps(value)}" for key, value in KEYS.items()),
)


#: Trains without the engine, and without an interruption; prints the hash of the weights for each
#: seed.
UNDISTURBED = f"""
import torch
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
torch.set_num_threads(1)
settings = TrainSettings(**{KEYS})
for seed in range(3):
    trainer = Trainer(find_task(settings, seed), settings, torch.device("cpu"), seed)
    while not trainer.finished:
        trainer.micro_batch(4)
    print(trainer.weights_sha256())
"""


def test_a_killed_training_ends_with_the_same_weights(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    head = start("--rehearse", *SMALL, "--duration", "30m", "--json", *TRAINING)
    head.wait_until_running(3)
    head.wait(lambda: head.rows().get("pc1/0", {}).get("saved_step"), "a checkpoint of pc1/0")
    opened = next(
        event
        for event in head.events()
        if event["event"] == "device_opened" and event["slot"] == "pc1/0"
    )
    os.kill(opened["pid"], signal.SIGKILL)
    code, out, err = head.finish()
    assert code == 0, out + err
    summary = json.loads(out)
    assert summary["outcome"] == "good"
    assert summary["duration_s"] < 1800
    rows = {row["slot"]: row for row in summary["workers"]}
    assert {
        slot: (row["state"], row["train_step"], row["saved_step"]) for slot, row in rows.items()
    } == dict.fromkeys(("pc1/0", "pc1/1", "pc2/0"), ("DONE", 80, 80))
    assert all(row["loss"] < row["first_loss"] for row in rows.values())
    assert {slot: row["restarts"] for slot, row in rows.items()} == {
        "pc1/0": 1,
        "pc1/1": 0,
        "pc2/0": 0,
    }
    assert [event["slot"] for event in head.events() if event["event"] == "restored"] == ["pc1/0"]
    assert [row["redone_steps"] for slot, row in sorted(rows.items())][1:] == [0, 0]
    undisturbed = python("-c", UNDISTURBED).stdout.split()
    assert [row["weights_sha256"] for _, row in sorted(rows.items())] == undisturbed
    for slot in rows:  # the head's copy is the last checkpoint
        copy = (head.folder() / "states" / f"{slot}.pt").read_bytes()
        assert copy in {path.read_bytes() for path in tmp_path.rglob(f"{slot}/generation-?.pt")}
