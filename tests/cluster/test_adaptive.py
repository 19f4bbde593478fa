"""The default policy in rehearsal: every worker at nearly all of its cap, nothing fails, and the next run knows it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SMALL, Head, Starter, samples
from tests.scene import COMMAND, ROOT, ran

pytestmark = pytest.mark.ray

#: Far too big for every cap, also after scaling to a quarter: 16384 x 16384 needs 1.5 GiB for three
#: matrices.
TOO_BIG = ("--set", "workload.size=65536")

ONE_EACH = ("--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=1")

#: The share of its cap that a worker must hold while no other program wants the memory.
HELD = 0.95


def interrupted_when_held(
    head: Head, least: float = HELD, workers: int = 3, failures_most: int = 0
) -> dict[str, Any]:
    """Interrupt a run once each worker holds this share of its cap, and no more went wrong.

    Return its summary.
    """

    def held_by_all() -> bool:
        shares = [held(row) for row in head.rows().values() if row["state"] == "RUNNING"]
        return len(shares) == workers and min(shares) >= least

    summary = head.interrupt_when(held_by_all, f"{least:.0%} of its cap in each worker")
    assert (
        max(summary["oom_count"], summary["emergency_count"], summary["steps_oom"]) <= failures_most
    )
    assert summary["steps_error"] == 0
    for row in summary["workers"]:
        assert (row["state"], row["policy"]) == ("RUNNING", "adaptive")
        assert row["steps_ok"] > 0
    assert {row["slot"]: held(row) for row in summary["workers"] if held(row) < least} == {}
    return summary


def held(row: Mapping[str, Any]) -> float:
    """Share of its cap that a worker's live tensors take; 0 before its first report."""
    return float((row["allocated_bytes"] or 0) / (row["cap_bytes"] or 1))


def remembered(head: Head) -> list[str]:
    """The slots that began with what an earlier run had learned."""
    return sorted(event["slot"] for event in head.events() if event["event"] == "remembered")


def limits() -> dict[str, Any]:
    """What `limits` says of the store that the runs of this test used."""
    command = [*COMMAND, "limits", "--json"]
    done = ran(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_too_large_sizes_fail_nowhere_and_are_remembered(start: Starter, state_dir: Path) -> None:
    """Workers hold nearly all of their caps, also one that was killed, and so does the next run."""
    # A product as large as 3.30 GiB / 16 allows takes a processor many seconds, and a step must end
    # in each slice.
    quick = ("--set", "nodes.pc1.vram_per_worker_gib=1.5", "--set", "compute_share_mode=none")
    arguments = ("--rehearse", "--duration", "10", "--json", *TOO_BIG, *SMALL, *quick)
    assert limits()["limits"] == []
    first = start(*arguments)
    first.wait_until_running(3)

    def opened() -> list[dict[str, Any]]:
        return [e for e in first.events() if e["event"] == "device_opened" and e["slot"] == "pc1/1"]

    os.kill(opened()[0]["pid"], signal.SIGKILL)
    first.wait(lambda: len(opened()) == 2, "second process of pc1/1")
    # 3 MiB of these small caps stay free for the kernels of the processor.
    summary = interrupted_when_held(first, HELD - 0.02)
    rows = {row["slot"]: row for row in summary["workers"]}
    slots = ["pc1/0", "pc1/1", "pc2/0"]
    assert {slot: row["restarts"] for slot, row in rows.items()} == dict(
        zip(slots, (0, 1, 0), strict=True)
    )
    assert all(256 < row["size"] < 16384 for row in rows.values())
    # The second process went on where the first had been.
    assert [event["slot"] for event in first.events() if event["event"] == "resumed"] == ["pc1/1"]
    assert rows["pc1/1"]["claim_bytes"] == pytest.approx(rows["pc1/0"]["claim_bytes"], rel=0.12)
    taken = samples(first.folder())["pc1/1"]
    sizes = [sample["size"] for sample in taken if sample["size"] is not None]
    assert min(sizes) >= 0.9 * max(sizes), "never small, not even after the kill"
    assert not {"oom", "backoff", "emergency"} & {event["event"] for event in first.events()}
    assert remembered(first) == []

    second = start(*arguments)
    summary = interrupted_when_held(second, HELD - 0.02)
    assert remembered(second) == slots
    known = limits()
    assert known["path"] == str(state_dir / "limits.json")
    assert known["limits"]
    caps_bytes = {row["cap_bytes"] for row in summary["workers"]}
    for limit in known["limits"]:
        assert limit["workload"].startswith("matmul@")
        assert limit["workload"].endswith("size=16384")
        assert limit["dtype"] == summary["workers"][0]["dtype"]
        assert min(caps_bytes) * 0.98 <= limit["cap_bytes"] <= max(caps_bytes) * 1.02
        assert 0.85 * limit["cap_bytes"] <= limit["size"] <= limit["cap_bytes"]


#: Runs out of memory for real where it is let; has a fixed part, and says nothing about its needs.
_ROWS = """
import time, torch
from workers.workloads.base import StepResult, Workload
class Rows(Workload):
    size_power = 0.0
    held = ()
    def step(self, size, batch):
        self.held = ()
        self.held = (torch.empty(8 << 20, dtype=torch.uint8), torch.empty(batch << 14, dtype=torch.uint8))
        time.sleep(0.02)
        return StepResult(flop=1.0)
    def release(self):
        self.held = ()
"""


def test_a_users_workload_finds_the_largest_batch(start: Starter, short_tmp: Path) -> None:
    (short_tmp / "mine.py").write_text(_ROWS)
    workload = ("--workload", "mine:Rows", "--set", "workload.batch=16384")
    head = start("--rehearse", "--duration", "10", "--json", *workload, *ONE_EACH, cwd=short_tmp)
    # What the other threads of a process map may take a step that fills its cap to the last byte
    # beyond it, once.
    interrupted_when_held(head, 0.9, workers=2, failures_most=1)
