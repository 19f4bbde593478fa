"""`tune` with real processes: a whole tuning, Ctrl-C and a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from orchestrator.config.load import load_config
from tests.scene import COMMAND, PATIENCE_S, ROOT, ended, enough, spec_of, wait_for
from workers.tuning import messages

#: A model so small that a round takes a second.
SMALL = ("--set", "train.batch=4", "--set", "train.seq=16")
CONFIG = ("--config", str(ROOT / "cluster.yaml"))


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "ORCHESTRATOR_STATE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    head = subprocess.Popen(
        [*COMMAND, "tune", *CONFIG, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )
    try:
        yield head
    finally:
        head.kill()
        head.communicate()


def first_verdict(head: subprocess.Popen[str]) -> str:
    """Wait until a lever was measured, and return the line that says so."""
    for line in head.stderr:
        if line.endswith("s left\n"):
            return line
    raise AssertionError("it ended before a lever was measured")


def arms_of(head: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(head.pid).children(recursive=True)


@pytest.mark.torch
def test_a_tuning_leaves_verdicts_and_your_file_though_a_process_dies(tmp_path: Path) -> None:
    levers = ("--levers", "micro=2,recompute=all,precision=tf32")
    with started(tmp_path, "--rehearse", "--budget", enough(60), *levers, "--json", *SMALL) as head:
        first_verdict(head)
        wait_for(lambda: newest_arm(tmp_path, head), "the second lever's process").kill()
        output, errors = ended(head)
    assert head.returncode == 0, errors
    result = json.loads(output)
    (folder,) = tmp_path.glob("tunings/*")
    assert result == json.loads((folder / "tune.json").read_text())
    assert result["model"] == "gpt-nano"
    assert result["whole"]

    micro, tf32, killed = result["rows"]
    assert micro["speed_ratio"] > 0
    assert (micro["speed_low"] is None) is (micro["rounds"] < 6)
    assert micro["verdict"] not in {"BROKEN", "UNAVAILABLE"}
    assert micro["loss_gap"] < 1e-6
    assert tf32["verdict"] == killed["verdict"] == "UNAVAILABLE"
    assert "ended by SIGKILL" in killed["reason"]

    config, tuned = load_config(str(ROOT / "cluster.yaml")), load_config(str(folder / "tuned.yaml"))
    assert tuned.model_copy(update={"train": config.train}) == config
    assert tuned.train.batch == 4, "what was measured is in the file"
    assert tuned.train.precision == config.train.precision, "a rehearsal's own is not"


@pytest.mark.torch
def test_ctrl_c_prints_what_is_known_and_leaves_nobody(tmp_path: Path) -> None:
    with started(
        tmp_path, "--rehearse", "--budget", enough(60), "--levers", "micro", *SMALL
    ) as head:
        verdict = first_verdict(head)
        arms = arms_of(head)
        assert arms
        head.send_signal(signal.SIGINT)
        output, _ = ended(head)
    assert head.returncode == 130
    assert verdict.split(":")[0] in output
    assert "micro=1: not begun before the tuning ended" in " ".join(output.split())
    assert psutil.wait_procs(arms, timeout=PATIENCE_S)[1] == []
    assert list(tmp_path.glob("tunings/*/tune.json"))


@pytest.mark.torch
def test_no_process_of_a_killed_tuning_stays(tmp_path: Path) -> None:
    with started(
        tmp_path, "--rehearse", "--budget", enough(120), "--levers", "micro", *SMALL
    ) as head:
        arms = wait_for(lambda: arms_of(head)[2:] and arms_of(head), "the baseline's process")
        head.send_signal(signal.SIGKILL)
        head.communicate()
        assert psutil.wait_procs(arms, timeout=PATIENCE_S)[1] == []


def newest_arm(folder: Path, head: subprocess.Popen[str]) -> psutil.Process | None:
    """Return the process of the lever beside the baseline's, which began earlier."""
    (log,) = folder.glob("tunings/*/arms.log")
    arms = [each for each in arms_of(head) if logs_to(each, log)]
    return max(arms, key=psutil.Process.create_time) if len(arms) > 1 else None


def logs_to(process: psutil.Process, log: Path) -> bool:
    try:
        return Path(f"/proc/{process.pid}/fd/1").resolve(strict=True) == log.resolve()
    except OSError:
        return False


@pytest.mark.torch
def test_matmul_is_measured_with_several_workers(tmp_path: Path) -> None:
    arguments = ("--workload", "matmul", "--levers", "workers", "--json")
    with started(tmp_path, "--rehearse", "--budget", enough(40), *arguments) as head:
        output, errors = ended(head)
    assert head.returncode == 0, errors
    rows = json.loads(output)["rows"]
    assert [(row["lever"], row["setting"]) for row in rows] == [("workers", "2"), ("workers", "3")]
    assert all(row["rounds"] for row in rows)
    assert not list(tmp_path.glob("tunings/*/tuned.yaml"))


def serve(connection: Connection, _: object) -> None:
    """Tell the environment, in place of an arm."""
    connection.send(dict(os.environ))


def test_an_arm_has_the_environment_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With another allocator or order of cards, something else would be measured than what runs."""
    monkeypatch.setattr(messages, "_ARM", __name__)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    ours, theirs = multiprocessing.Pipe()
    spec = spec_of()
    spec = replace(spec, workload=replace(spec.workload, settings={"deterministic": True}))
    child = multiprocessing.get_context("fork").Process(
        target=messages.run_arm, args=(theirs, spec, tmp_path / "log")
    )
    child.start()
    environment = ours.recv()
    child.join()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
