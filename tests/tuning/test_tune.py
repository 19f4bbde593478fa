"""`tune` with real arms: killed and resumed, with an arm that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.config.load import load_config
from tests.scene import COMMAND, PATIENCE_S, ROOT, wait_for

#: A model so small that a round takes a second.
SMALL = ("--set", "train.batch=4", "--set", "train.seq=16")
LEVERS = "micro=2,optimizer=adamw-loop,precision=tf32"


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "ORCHESTRATOR_STATE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*COMMAND, "tune", "--config", str(ROOT / "cluster.yaml"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )


def kept(folder: Path) -> dict[str, Any]:
    """Return what the journal has of the first pass."""
    for path in folder.glob("tunings/*/rounds.json"):
        return dict(json.loads(path.read_text())["passes"].get("alone", {}))
    return {}


@pytest.mark.torch
def test_a_tuning_goes_on_after_a_kill(tmp_path: Path) -> None:
    first = started(tmp_path, "--rehearse", "--budget", "30m", "--levers", LEVERS, *SMALL)
    wait_for(lambda: len(kept(tmp_path).get("rounds", ())) >= 2, "two rounds")
    (folder,) = tmp_path.glob("tunings/*")
    # The third one that began: after the baseline, without which there is no comparison, and its
    # repetition.
    arms = [
        each
        for each in psutil.Process(first.pid).children(recursive=True)
        if _logs_to(each, folder / "arms.log")
    ]
    sorted(arms, key=psutil.Process.create_time)[2].kill()
    wait_for(lambda: kept(tmp_path).get("lost"), "the loss of an arm")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert psutil.wait_procs(arms, timeout=PATIENCE_S)[1] == [], "arms outlived their head"

    measured = kept(tmp_path)
    second = started(tmp_path, "--resume", folder.name[-4:], "--budget", "1s", "--json")
    output, errors = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, errors
    result = json.loads(output)
    assert result == json.loads((folder / "tune.json").read_text())
    assert kept(tmp_path)["rounds"] == measured["rounds"]
    assert (result["rounds"], result["dropped"]) == (len(measured["rounds"]), measured["dropped"])
    rows = {f"{row['lever']}={row['setting']}": row for row in result["rows"]}
    assert rows["precision=tf32"]["verdict"] == "UNAVAILABLE"
    assert rows["optimizer=adamw-loop"]["verdict"] == "UNDECIDED"
    assert "ended by SIGKILL" in rows["optimizer=adamw-loop"]["reason"]
    assert rows["micro=2"]["parity_class"] == "exact"
    assert rows["micro=2"]["verdict"] != "BROKEN"
    assert rows["micro=2"]["speed_ratio"] > 0
    assert rows["micro=2"]["samples_per_s"] > 0
    assert rows["micro=2"]["host_bytes"] > 0
    assert list(result["rows"][0]) == [
        "lever", "setting", "speed_ratio", "speed_low", "speed_high", "peak_bytes", "parity_class",
        "loss_gap_noise", "verdict", "reason", "samples_per_s", "tflops", "mfu_pct", "peak_delta_bytes", "host_bytes",
        "host_delta_bytes", "once_s", "pays_after_s",
    ]  # fmt: skip
    config, tuned = load_config(str(ROOT / "cluster.yaml")), load_config(str(folder / "tuned.yaml"))
    assert tuned.model_copy(update={"train": config.train}) == config
    assert tuned.train.batch == 4, "what was measured is in the file"


def _logs_to(process: psutil.Process, log: Path) -> bool:
    """Whether this is an arm: it writes to the log of arms."""
    return Path(f"/proc/{process.pid}/fd/1").resolve() == log.resolve()
