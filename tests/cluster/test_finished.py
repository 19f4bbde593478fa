"""Trainings on real Ray: a killed worker continues from its checkpoint to the same weights.

The run ends when all are done; another run begins with its weights.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SMALL, Head, Starter, short_folder, starting, undisturbed
from tests.reaper import Reaper
from workers.learned_limits import STATE_DIR_VARIABLE

pytestmark = pytest.mark.ray

#: The parts of a batch are constant, so that a kill changes no bit; memory suffices for all
#: parts.
KEYS: dict[str, Any] = {
    "steps": 400, "batch": 8, "micro": 4, "exact": True, "seq": 16, "precision": "fp32", "dropout": 0.1,
    "save_every_s": 0.5, "checkpoints": "head",
}  # fmt: skip
TRAINING = (
    "--workload",
    "train",
    *(f"--set=train.{key}={json.dumps(value)}" for key, value in KEYS.items()),
)


@dataclass
class Finished:
    """A run of three training slots, one of which was killed."""

    head: Head
    summary: dict[str, Any]
    state: Path
    start: Starter


def killed_and_finished(head: Head, workers: int) -> dict[str, Any]:
    """Kill pc1/0 after it has saved; return the summary of the finished run."""
    head.wait_until_running(workers)
    head.wait(lambda: head.rows().get("pc1/0", {}).get("saved_step"), "a checkpoint of pc1/0")
    os.kill(head.opened("pc1/0")[0], signal.SIGKILL)
    code, out, err = head.finish()
    assert code == 0, out + err
    return dict(json.loads(out))


@pytest.fixture(scope="module")
def finished(
    session_reaper: Reaper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Finished]:
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch, short_folder(session_reaper) as folder:
        patch.setenv(STATE_DIR_VARIABLE, str(state))
        with starting(folder) as start:
            head = start("--rehearse", *SMALL, "--duration", "10h", "--json", *TRAINING)
            summary = killed_and_finished(head, 3)
            yield Finished(head, summary, state, start)


def test_a_killed_training_ends_with_the_same_weights(finished: Finished) -> None:
    summary = finished.summary
    assert summary["outcome"] == "good"
    assert summary["duration_s"] < 36_000
    rows = {row["slot"]: row for row in summary["workers"]}
    assert {
        slot: (row["state"], row["train_step"], row["saved_step"], row["restarts"])
        for slot, row in rows.items()
    } == {
        "pc1/0": ("DONE", 400, 400, 1),
        "pc1/1": ("DONE", 400, 400, 0),
        "pc2/0": ("DONE", 400, 400, 0),
    }
    assert all(row["loss"] < row["first_loss"] for row in rows.values())
    assert [event["slot"] for event in finished.head.events("restored")] == ["pc1/0"]
    assert [row["redone_steps"] for slot, row in sorted(rows.items())][1:] == [0, 0]
    for seed, (_, row) in enumerate(sorted(rows.items())):
        assert row["weights_sha256"] == undisturbed(KEYS, seed)[0]
    for slot in rows:  # the head's copy is the last checkpoint
        copy = (finished.head.folder() / "states" / f"{slot}.pt").read_bytes()
        assert copy in {
            path.read_bytes() for path in finished.state.rglob(f"{slot}/generation-?.pt")
        }


def test_it_begins_once_with_them_and_is_resumed_from_its_own(finished: Finished) -> None:
    earlier = finished.head.folder()
    (earlier / "head.json").unlink()  # tests find the folder of the next run by this file
    head = finished.start(
        *("--rehearse", *SMALL, "--duration", "10h", "--json", *TRAINING),
        *("--set=train.slots=1", "--set=train.checkpoints=node"),
        f"--set=train.from={earlier.name}/pc1/0",
        runs=finished.head.runs,
    )
    (row,) = (row for row in killed_and_finished(head, 1)["workers"] if row["slot"] == "pc1/0")
    assert (row["train_step"], row["restarts"]) == (400, 1)
    assert (len(head.events("began_with")), len(head.events("restored"))) == (1, 1)
    weights = earlier / "states" / "pc1" / "0.weights"
    assert row["weights_sha256"] == undisturbed(KEYS, earlier=weights)[0]
