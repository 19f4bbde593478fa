"""A training in small on real Ray: a killed worker goes on from its snapshot, and the run ends when all is done."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.cluster.conftest import SMALL, Starter

pytestmark = pytest.mark.ray

STEPS = 300
COUNTING = (
    "--workload",
    "tests.engine.counting_steps:Counting",
    "--set",
    f"train.steps={STEPS}",
    "--set",
    "train.batch=8",
)


def test_a_run_whose_work_is_finished_ends_before_its_time_and_is_good(start: Starter) -> None:
    head = start("--rehearse", *SMALL, "--duration", "30m", "--json", *COUNTING)
    head.wait_until_running(3)
    head.wait(lambda: (head.rows().get("pc1/0", {}).get("saved_step") or 0) > 20, "saved steps of pc1/0")
    opened = next(event for event in head.events() if event["event"] == "device_opened" and event["slot"] == "pc1/0")
    os.kill(opened["pid"], signal.SIGKILL)
    code, out, err = head.finish()
    assert code == 0, out + err
    summary = json.loads(out)
    assert summary["outcome"] == "good"
    assert summary["duration_s"] < 1800
    rows = {row["slot"]: row for row in summary["workers"]}
    assert {slot: (row["state"], row["train_step"], row["saved_step"]) for slot, row in rows.items()} == dict.fromkeys(
        ("pc1/0", "pc1/1", "pc2/0"), ("DONE", STEPS, STEPS)
    )
    assert {row["weights_sha256"] for row in rows.values()} == {"0" * 64}
    assert {slot: row["restarts"] for slot, row in rows.items()} == {"pc1/0": 1, "pc1/1": 0, "pc2/0": 0}
    # A step of the books is a micro-batch of at most 8 samples, of which each optimiser step takes 8.
    assert all(row["steps_ok"] >= STEPS for slot, row in rows.items() if slot != "pc1/0")
