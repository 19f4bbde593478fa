"""The main job in rehearsal: real Ray, real processes, real out-of-memory."""

from __future__ import annotations

import json
import signal
import sqlite3
from pathlib import Path

import pytest

from orchestrator.config.load import load_config
from tests.cluster.conftest import SMALL, Starter, read_events
from tests.scene import PATIENCE_S

pytestmark = pytest.mark.ray

#: The guides' own way of finding a size, by failing: only so do these runs run out of memory.
GUIDES = ("--set", "memory.policy=classic", "--set", "run.min_success_rate=0")

#: Too big for every cap, also after scaling to a quarter: three matrices of 6144 x 6144 need 432
#: MiB. The caps are small, because MKL is ten times slower where it gets no memory of its own, and
#: ten workers share two cores.
TOO_BIG = (
    *("--set", "workload.size=24576", "--set", "workload.dtype=fp32"),
    *("--set", "nodes.pc1.vram_per_worker_gib=1.25", "--set", "nodes.pc2.vram_per_worker_gib=1.25"),
)


#: Leaves a file behind when the head, of all processes, loads torch.
_TELL_TALE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and any("orchestrator/__main__.py" in part for part in sys.argv):
            open(r"{witness}", "w").close()
sys.meta_path.insert(0, Finder())
"""


def test_ten_workers_survive_sizes_too_big_for_every_cap(start: Starter, short_tmp: Path) -> None:
    witness = short_tmp / "the-head-loaded-torch"
    (short_tmp / "sitecustomize.py").write_text(_TELL_TALE.format(witness=witness))
    watched = {"PYTHONPATH": str(short_tmp)}
    head = start(
        "--rehearse", "--duration", "20s", "--json", *TOO_BIG, *GUIDES, environment=watched
    )
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
        assert 0 < row["size"] < 6144
        assert row["state"] == "RUNNING"
        assert (
            0.95 * row["cap_bytes"]
            <= row["reserved_bytes"]
            <= row["cap_bytes"]
            <= row["budget_bytes"]
        )

    folder = head.folder()
    assert load_config(str(folder / "config.yaml")).nodes["pc1"].workers == 7
    names = {event["event"] for event in read_events(folder)}
    assert {
        "run_started",
        "node_joined",
        "device_opened",
        "claimed",
        "oom",
        "backoff",
        "state",
        "run_ended",
    } <= names
    with sqlite3.connect(folder / "run.sqlite") as store:
        (slots,) = store.execute("SELECT COUNT(DISTINCT slot) FROM samples").fetchone()
    store.close()
    assert slots == 10
    assert err == ""  # nothing of Ray's, and nothing of ours beside the one object


def test_this_machine_alone_runs_without_a_reader(start: Starter) -> None:
    head = start("--local", "--duration", "3s")
    for stream in (head.process.stdout, head.process.stderr):
        assert stream is not None
        stream.close()
    assert head.process.wait(PATIENCE_S) == 0
    summary = head.summary()
    assert summary["outcome"] == "good"
    assert summary["nodes_seen"] == ["local"]
    assert summary["workers"]
    assert all(row["steps_ok"] > 0 and row["state"] == "RUNNING" for row in summary["workers"])


def test_an_interrupt_while_the_cluster_starts_leaves_nothing(start: Starter) -> None:
    head = start("--rehearse", "--duration", "10", "--json", *SMALL)
    head.folder()
    head.process.send_signal(signal.SIGINT)
    code, out, _ = head.finish()
    assert code == 130
    assert json.loads(out)["outcome"] == "interrupted"
