"""A worker whose first directive leases it nothing: it opens its device, and climbs once it knows its share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from tests.engine.scene import events, names, slices
from tests.in_child import InChild
from tests.scene import MIB, spec_of
from workers.devices.base import alone_on
from workers.messages import Verdict, WorkerState


def test_it_opens_waits_and_climbs_in_bytes_of_its_own(in_child: InChild) -> None:
    resume = {"policy": "adaptive", "units": 20 * MIB, "fixed_bytes": 0.0, "unit_bytes": 1.0}
    leases = [
        {"lease_bytes": lease_bytes, "resume": resume} for lease_bytes in (0, 0, 40 * MIB, None)
    ]
    *waiting, leased, free = in_child(slices, spec_of(policy="adaptive"), leases)
    for report in waiting:
        assert report.verdict == Verdict.OK
        assert report.state == WorkerState.WARMING
        assert report.counts.steps_ok == 0
        assert "waits for its share" in report.reason
        assert report.device is not None
        assert report.memory.allocated_bytes < 2 * MIB, "nothing but an arena of Python is held yet"
        assert (report.counts.oom_count, report.counts.emergency_count) == (0, 0)
        assert "claimed" not in names(report)
        assert report.resume["units"] == 20 * MIB, "what the slot had learned is not forgotten"
    assert (leased.state, leased.counts.oom_count) == (WorkerState.RUNNING, 0)
    assert "resumed" in names(leased)
    assert [event.detail["target_bytes"] for event in events(leased, "claimed")] == [40 * MIB]
    assert leased.memory.allocated_bytes <= 40 * MIB
    assert free.counts.steps_ok > 0


def test_a_worker_that_may_hold_nothing_gives_all_back(in_child: InChild) -> None:
    reports = in_child(slices, spec_of(policy="adaptive"), [{}, {}, {"lease_bytes": 0}, {}, {}])
    held = [report.memory.allocated_bytes for report in reports]
    assert held[1] > 20 * MIB
    assert held[2] < 2 * MIB
    assert reports[2].state is WorkerState.WARMING
    assert [report.counts.emergency_count for report in reports] == [0] * 5
    assert held[-1] > 20 * MIB


HOLDS_UNTIL_TOLD = """
import sys
from workers.devices.base import alone_on

with alone_on("a device of this test"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_who_climbs_is_alone_and_a_dead_one_in_no_ones_way() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS_UNTIL_TOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    entered: list[float] = []

    def enter() -> None:
        with alone_on("a device of this test"):
            entered.append(time.monotonic())

    waiting = threading.Thread(target=enter, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert entered == [], "the other process is still there"
    other.kill()
    other.communicate()
    waiting.join(60)
    assert len(entered) == 1
