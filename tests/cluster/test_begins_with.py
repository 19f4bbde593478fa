"""A training on real Ray that begins with the weights of another: killed, it goes on from its own checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import SMALL, Starter
from tests.cluster.test_finished import KEYS, TRAINING
from tests.scene import python

pytestmark = pytest.mark.ray

#: Begins with the file that is named, and trains without the engine and without an interruption.
UNDISTURBED = f"""
import sys, torch
from pathlib import Path
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
torch.set_num_threads(1)
settings = TrainSettings(**{KEYS})
trainer = Trainer(find_task(settings, 0), settings, torch.device("cpu"), 0)
trainer.earlier = Path(sys.argv[1])
trainer.rollback(None)
print(trainer.weights_sha256())
while not trainer.finished:
    trainer.micro_batch(4)
print(trainer.weights_sha256())
"""


def test_it_begins_once_with_them_and_is_resumed_from_its_own(
    start: Starter, tmp_path: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    usual = ("--rehearse", *SMALL, "--duration", "30m", "--json", *TRAINING)
    usual += ("--set=train.slots=1", "--set=train.checkpoints=node")
    first = start(*usual, "--set=train.steps=20", "--set=workload.seed=5")
    code, out, err = first.finish()
    assert code == 0, out + err
    trained = json.loads(out)["workers"][0]["weights_sha256"]
    earlier, runs = first.folder(), short_tmp / "runs"
    (earlier / "head.json").unlink()  # the folder of the next run is found by it
    (runs / earlier.name).parent.mkdir()
    earlier = earlier.rename(runs / earlier.name)

    second = start(*usual, f"--set=train.from={earlier.name}/pc1/0", runs=runs)
    second.wait_until_running(1)
    second.wait(lambda: second.rows().get("pc1/0", {}).get("saved_step"), "a checkpoint")
    opened = next(event for event in second.events() if event["event"] == "device_opened")
    os.kill(opened["pid"], signal.SIGKILL)
    code, out, err = second.finish()
    assert code == 0, out + err
    row = json.loads(out)["workers"][0]
    told = [event["event"] for event in second.events()]
    assert (row["train_step"], row["restarts"]) == (80, 1)
    assert (told.count("began_with"), told.count("restored")) == (1, 1)
    weights = earlier / "states" / "pc1" / "0.weights"
    assert python("-c", UNDISTURBED, str(weights)).stdout.split() == [
        trained,
        row["weights_sha256"],
    ]
