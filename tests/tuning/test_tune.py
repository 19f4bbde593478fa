"""`tune` with real arms: killed and resumed, with an arm that dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from orchestrator.config.load import load_config
from orchestrator.lab.tune.arms import BASELINE
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import BaselineError, Journal, Measuring, Plan, arms_at_once
from tests.scene import COMMAND, PATIENCE_S, ROOT, wait_for
from workers.tuning import messages
from workers.tuning.messages import ArmSpec, Opened

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


def test_an_arm_has_the_environment_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With another allocator or order of cards, something else would be measured than what runs."""
    monkeypatch.setattr(messages, "_ARM", "tests.tuning.telling_arm")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    ours, theirs = multiprocessing.Pipe()
    spec = ArmSpec(
        name="baseline", spec=None, log=tmp_path / "log", settings={"deterministic": True}
    )  # type: ignore[arg-type]
    child = multiprocessing.get_context("fork").Process(
        target=messages.run_arm, args=(theirs, spec)
    )
    child.start()
    environment = ours.recv()
    child.join()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


GIB = 2**30
#: gpt2-small in fp32: weights, sums of gradients and two moments.
PARKED_BYTES = 4 * 475 * 2**20


def test_parked_arms_fit_half_of_the_free_memory() -> None:
    at_once = arms_at_once(20, PARKED_BYTES, 60 * GIB)
    assert (at_once + 2) * PARKED_BYTES <= 30 * GIB < (at_once + 4) * (PARKED_BYTES + 250 * 2**20)
    assert arms_at_once(3, PARKED_BYTES, 60 * GIB) == 3


def test_memory_for_less_than_three_arms_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.opened[BASELINE] = Opened(parked_bytes=PARKED_BYTES)
    plan = Plan(budget_s=60, turn_s=1, least_steps=1, resolve=0.1, confidence=0.95, at_once=20)
    measuring = Measuring(plan, journal, lambda *_: None, lambda _: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * GIB))
    with pytest.raises(
        BaselineError, match=r"an arm takes 2\.1 GiB of host memory .* and 4\.0 GiB are free for at"
    ):
        measuring.run(
            "singles", [Candidate(lever="lever", setting="on", changes={})], 10.0, lambda _: False
        )
