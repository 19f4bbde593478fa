"""The main job in rehearsal: real Ray, real processes, real out-of-memory."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path

import psutil
import pytest

from orchestrator.config.load import load_config
from tests.cluster.conftest import SMALL, Starter, read_events, wait_for

pytestmark = pytest.mark.ray

#: The guides' own way of finding a size, by failing: only so do these runs run out of memory.
GUIDES = ("--set", "memory.policy=classic", "--set", "run.min_success_rate=0")

#: Far too big for every cap, also after scaling to a quarter: 16384 x 16384 needs 1.5 GiB for three matrices.
TOO_BIG = ("--set", "workload.size=65536")


#: Leaves a file behind when the head, of all processes, loads torch.
_TELL_TALE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and any("orchestrator/__main__.py" in part for part in sys.argv):
            open(r"{witness}", "w").close()
sys.meta_path.insert(0, Finder())
"""


def test_ten_workers_survive_sizes_far_too_big_for_every_cap(start: Starter, short_tmp: Path) -> None:
    witness = short_tmp / "the-head-loaded-torch"
    (short_tmp / "sitecustomize.py").write_text(_TELL_TALE.format(witness=witness))
    watched = {"PYTHONPATH": str(short_tmp)}
    head = start("--rehearse", "--duration", "6s", "--json", *TOO_BIG, *GUIDES, environment=watched)
    code, out, err = head.finish()
    assert not witness.exists()
    assert code == 0, out + err
    summary = json.loads(out)
    assert summary == head.summary()
    assert summary["outcome"] == "good"
    assert summary["restart_count"] == 0
    assert summary["nodes_seen"] == ["pc1", "pc2"]
    assert [row["node"] for row in summary["workers"]] == ["pc1"] * 7 + ["pc2"] * 3
    for row in summary["workers"]:
        assert row["oom_count"] >= 1
        assert row["emergency_count"] >= 1
        assert row["steps_ok"] > 0
        assert 0 < row["size"] < 16384
        assert row["state"] == "RUNNING"
        assert 0.95 * row["cap_bytes"] <= row["reserved_bytes"] <= row["cap_bytes"] <= row["budget_bytes"]

    folder = head.folder()
    assert load_config(str(folder / "config.yaml")).nodes["pc1"].workers == 7
    names = {event["event"] for event in read_events(folder)}
    assert {"run_started", "node_joined", "device_opened", "claimed", "oom", "backoff", "state", "run_ended"} <= names
    with sqlite3.connect(folder / "run.sqlite") as store:
        (slots,) = store.execute("SELECT COUNT(DISTINCT slot) FROM samples").fetchone()
    store.close()
    assert slots == 10
    assert err == ""  # nothing of Ray's, and nothing of ours beside the one object


def test_a_killed_worker_comes_back_in_its_slot_at_the_size_it_had_learned(start: Starter) -> None:
    head = start("--rehearse", "--duration", "12s", "--json", *TOO_BIG, *SMALL, *GUIDES)
    head.wait_until_running(3)
    opened = next(event for event in head.events() if event["event"] == "device_opened" and event["slot"] == "pc1/1")
    victim = psutil.Process(opened["pid"])
    os.kill(victim.pid, signal.SIGKILL)

    def reopened() -> bool:
        return len([e for e in head.events() if e["event"] == "device_opened" and e["slot"] == "pc1/1"]) == 2

    wait_for(reopened, 60, "second process of pc1/1")
    code, out, err = head.finish()
    assert code == 0, out + err
    events = head.events()
    rows = {row["slot"]: row for row in json.loads(out)["workers"]}
    row = rows["pc1/1"]
    assert row["restarts"] == 1
    assert row["state"] == "RUNNING"
    # Only the first process ran out of memory: the second began where it had left off.
    assert row["oom_count"] == rows["pc1/0"]["oom_count"] > 0
    assert row["size"] == rows["pc1/0"]["size"]
    assert row["steps_oom"] == row["oom_count"]
    causes = [e["cause"] for e in events if e["event"] == "state" and e["slot"] == "pc1/1"]
    assert any("its process ended" in cause for cause in causes)
    assert rows["pc1/0"]["restarts"] == rows["pc2/0"]["restarts"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_its_summary_and_leaves_nothing(start: Starter, number: signal.Signals) -> None:
    head = start("--rehearse", "--duration", "10", "--json", *SMALL)
    head.wait_until_running(3)
    head.process.send_signal(number)
    code, out, _ = head.finish(30)
    assert code == 130
    assert json.loads(out)["outcome"] == head.summary()["outcome"] == "interrupted"
    assert head.summary()["steps_ok"] > 0


def test_this_machine_alone_runs_with_what_it_really_has(start: Starter) -> None:
    code, out, err = start("--local", "--duration", "3s", "--json").finish()
    assert code == 0, out + err
    summary = json.loads(out)
    assert summary["nodes_seen"] == ["local"]
    assert summary["workers"]
    assert all(row["steps_ok"] > 0 and row["state"] == "RUNNING" for row in summary["workers"])


def test_a_reader_that_goes_away_does_not_undo_a_finished_run(start: Starter) -> None:
    head = start("--rehearse", "--duration", "3s", *SMALL)
    for stream in (head.process.stdout, head.process.stderr):
        assert stream is not None
        stream.close()
    assert head.process.wait(90) == 0
    assert head.summary()["outcome"] == "good"
    assert head.summary()["steps_ok"] > 0


def test_an_interrupt_while_the_cluster_starts_leaves_nothing(start: Starter) -> None:
    head = start("--rehearse", "--duration", "10", "--json", *SMALL)
    head.folder()
    head.process.send_signal(signal.SIGINT)
    code, out, _ = head.finish(60)
    assert code == 130
    assert json.loads(out)["outcome"] == "interrupted"


def test_a_head_that_is_killed_takes_everything_with_it(start: Starter) -> None:
    head = start("--rehearse", "--duration", "10", *SMALL)
    head.wait_until_running(3)
    head.process.kill()
    head.process.wait()
    # Nobody of the head is left to clean up, and yet `start` and `nothing_left` find nothing.
    wait_for(lambda: not list(head.runs.parent.glob("orch-*")), 10, "removal of the rehearsal's folder")


#: The first worker to come past a marker meets a fault there, once.
_FAULTY = """
import os, time, torch
from workers.workloads.base import StepResult, Workload
class Once(Workload):
    steps = 0
    def step(self, size, batch):
        Once.steps += 1
        torch.ones(256, 256) @ torch.ones(256, 256)
        time.sleep(0.05)
        if Once.steps == 20:
            for fault in ("hang", "poison"):
                try:
                    os.mkdir(os.path.join({folder!r}, fault))
                except FileExistsError:
                    continue
                if fault == "hang":
                    time.sleep(10_000)
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return StepResult(flop=2.0 * 256**3)
    def release(self): pass
"""


def test_a_hung_worker_and_a_poisoned_one_are_replaced(start: Starter, short_tmp: Path) -> None:
    (short_tmp / "faulty.py").write_text(_FAULTY.format(folder=str(short_tmp)))
    patience = ("--set", "run.hang_timeout_s=10", "--set", "run.stale_after_s=4", "--set", "run.slice_s=0.5")
    one_each = ("--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=1")
    workload = ("--workload", "faulty:Once", "--duration", "40s")
    head = start("--rehearse", "--json", *workload, *one_each, *patience, cwd=short_tmp)
    code, out, err = head.finish()
    assert code == 0, out + err
    rows = json.loads(out)["workers"]
    assert [row["restarts"] for row in rows] == [1, 1]
    assert [row["state"] for row in rows] == ["RUNNING", "RUNNING"]
    causes = " / ".join(e["cause"] for e in head.events() if e["event"] == "state" and e["to_state"] == "RESTARTING")
    assert "no report for" in causes
    assert "illegal memory access" in causes
