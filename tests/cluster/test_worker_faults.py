"""Workers that crash, exit, leak memory or fill the PC's RAM for real, and the effects on their
slots and their card.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from orchestrator.record.archive import read_run
from orchestrator.record.output import last_lines
from tests.cluster.conftest import Starter

pytestmark = pytest.mark.ray

GIB = 2**30

#: Each slot fails in another way, chosen by the seed, which is the number of the slot.
_FAULTS = """
import ctypes, mmap, os, time
import torch
from workers.workloads.base import StepResult, Workload

MIB = 2**20


def once(name):
    try:
        os.mkdir(os.path.join({folder!r}, name))
    except FileExistsError:
        return False
    return True


class Fine(Workload):
    def __init__(self, context):
        super().__init__(context)
        self.steps = 0
        self.kept = []
        self.grown_at = 0.0

    def step(self, size, batch):
        self.steps += 1
        torch.ones(256, 256) @ torch.ones(256, 256)
        time.sleep(0.05)
        self.fail(self.context.seed)
        return StepResult(flop=2.0 * 256**3)

    def fail(self, seed):
        pass

    def release(self):
        pass

    def keep(self, mib):
        # Shared memory is outside the cap: RLIMIT_DATA counts what is private.
        block = mmap.mmap(-1, mib * MIB)
        for _ in range(mib):
            block.write(b"x" * MIB)
        self.kept.append(block)


class BySlot(Fine):
    def fail(self, seed):
        if seed == 0 and self.steps == 20 and once("crashed"):
            print("about to crash")
            ctypes.string_at(0)
        if seed == 1 and self.steps == 20 and once("left"):
            os._exit(3)
        if seed in (2, 3) and time.monotonic() - self.grown_at >= 0.5:
            self.grown_at = time.monotonic()
            if seed == 2:
                self.keep(20)
            elif len(self.kept) < 14:
                self.keep(10)
        if seed == 4 and self.steps % 4 == 0:
            self.kept.append(torch.ones(2 * MIB, dtype=torch.uint8))  # within the cap, out of the reach of `release`
        if seed >= 5 and self.steps == 10:
            os._exit(3)


class Greedy(Fine):
    def fail(self, seed):
        if seed == 0 and self.steps == 20 and once("greedy"):
            while len(self.kept) * 64 * MIB < {most_bytes}:
                self.keep(64)
            time.sleep(20)
"""


def write_faults(folder: Path, most_bytes: int = 0) -> None:
    (folder / "faults.py").write_text(_FAULTS.format(folder=str(folder), most_bytes=most_bytes))


def test_crashed_and_leaking_workers_are_replaced(start: Starter, short_tmp: Path) -> None:
    write_faults(short_tmp)
    slots = ("--set", "nodes.pc1.workers=5", "--set", "nodes.pc2.workers=2")
    rules = ("poll_s=0.5", "leak_flag_mib=30", "leak_limit_mib=100")
    leaks = tuple(f"--set=run.{rule}" for rule in rules)
    workload = ("--workload", "faults:BySlot", "--duration", "10")
    head = start("--rehearse", "--json", *workload, *slots, *leaks, cwd=short_tmp)

    def all_came_to_their_end() -> bool:
        rows = head.rows()
        if len(rows) < 7:
            return False
        back = all(
            rows[slot]["state"] == "RUNNING" and rows[slot]["restarts"] == 1
            for slot in ("pc1/0", "pc1/1")
        )
        given_up = all(rows[slot]["state"] == "QUARANTINED" for slot in ("pc2/0", "pc2/1"))
        told = {event["slot"] for event in head.events("leak")}
        replaced = (
            all(rows[slot]["restarts"] >= 1 for slot in ("pc1/2", "pc1/4"))
            and rows["pc1/4"]["state"] == "RUNNING"
        )
        return back and given_up and replaced and "pc1/3" in told

    summary = head.interrupt_when(
        all_came_to_their_end, "two slots that are back, two replaced, one leak, one card"
    )
    assert summary["steps_error"] == 0
    rows = {row["slot"]: row for row in summary["workers"]}

    def causes(slot: str) -> list[str]:
        return [it["cause"] for it in head.events("state", slot=slot, to_state="RESTARTING")]

    for slot in ("pc1/0", "pc1/1"):
        assert rows[slot]["restarts"] == 1, rows[slot]
        assert rows[slot]["state"] == "RUNNING"
        (cause,) = causes(slot)
        assert cause.startswith(("its process ended", "its process was ended by SIGSEGV"))

    last_words = last_lines(head.folder(), "pc1/0")
    assert "about to crash" in last_words
    assert "Fatal Python error: Segmentation fault" in last_words
    assert "[the process ended here; another one begins]" in last_words

    leaky, slightly = rows["pc1/2"], rows["pc1/3"]
    assert len(causes("pc1/2")) == leaky["restarts"] >= 1
    for cause in (*causes("pc1/2"), *causes("pc1/4")):
        assert "that its work does not need" in cause
        assert "was replaced" in cause
    assert not head.events("state", slot="pc1/4", to_state="EMERGENCY")
    assert leaky["state"] in {"RUNNING", "RESTARTING"}
    assert slightly["restarts"] == 0
    assert slightly["state"] == "RUNNING"
    told = [event["slot"] for event in head.events("leak")]
    assert {"pc1/2", "pc1/3"} <= set(told) <= {"pc1/2", "pc1/3", "pc1/4"}
    assert told.count("pc1/3") == 1

    (given_up,) = head.events("card_quarantined")
    assert given_up["card"].startswith("pc2")
    for slot in ("pc2/0", "pc2/1"):
        assert rows[slot]["state"] == "QUARANTINED"
        assert rows[slot]["reason"] == given_up["reason"]
        assert rows[slot]["restarts"] >= 3
    assert slightly["reason"].startswith("LEAK: its process keeps ")


@pytest.mark.alone(free_ram_gib=10.0)
def test_a_worker_that_eats_the_ram_is_replaced(start: Starter, short_tmp: Path) -> None:
    memory = psutil.virtual_memory()
    room_bytes = (
        5 * GIB
    )  # for the cluster itself, and for programs that start on this machine meanwhile
    write_faults(short_tmp, most_bytes=room_bytes + 2 * GIB)
    threshold = (memory.total - memory.available + room_bytes) / memory.total
    slots = ("--set", "nodes.pc1.workers=2", "--set", "nodes.pc2.workers=1")
    workload = ("--workload", "faults:Greedy", "--duration", "10m")
    environment = {"RAY_memory_usage_threshold": f"{threshold:.4f}"}
    head = start("--rehearse", "--json", *workload, *slots, cwd=short_tmp, environment=environment)
    head.wait_until_running(3)
    # Ray may also end other workers of the PC, and does not report the reason to the head.
    head.wait(lambda: head.rows()["pc1/0"]["restarts"] >= 1, "a death for want of RAM")
    summary = head.interrupt_when(
        lambda: all(
            slot.row.state == "RUNNING" and slot.row.counts.steps_ok
            for slot in read_run(head.folder()).slots
        ),
        "work of all slots",
    )
    rows = {row["slot"]: row for row in summary["workers"]}
    assert (short_tmp / "greedy").exists()
    assert rows["pc1/0"]["restarts"] >= 1
    assert all(row["state"] == "RUNNING" and row["steps_ok"] > 0 for row in rows.values()), rows
