"""A worker whose first directive leases it nothing: it opens its device, and climbs once it knows its share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from workers.devices.init_lock import alone_on
from workers.engine.engine import Engine
from workers.messages import Directive, Report, ResumeState, Verdict, WorkerState
from workers.settings import WorkerSpec

MIB = 2**20

InChild: TypeAlias = Callable[..., Any]
MakeSpec: TypeAlias = Callable[..., WorkerSpec]


def slices(spec: WorkerSpec, leases_bytes: Sequence[int | None], resume: ResumeState | None) -> list[Report]:
    """Run a slice for each lease; in a process of its own."""
    engine = Engine(spec)
    return [
        engine.run_slice(
            Directive(incarnation=0, sequence=sequence, duration_s=0.0, resume=resume, lease_bytes=lease_bytes)
        )
        for sequence, lease_bytes in enumerate(leases_bytes)
    ]


@pytest.fixture(scope="module")
def opened(in_child: InChild, make_spec: MakeSpec) -> list[Report]:
    resume = {"policy": "adaptive", "units": 20 * MIB, "fixed_bytes": 0.0, "unit_bytes": 1.0}
    reports: list[Report] = in_child(slices, make_spec(policy="adaptive"), [0, 0, 40 * MIB, None], resume)
    return reports


def test_it_opens_its_device_and_waits(opened: list[Report]) -> None:
    for report in opened[:2]:
        assert (report.verdict, report.state, report.counts.steps_ok) == (Verdict.OK, WorkerState.WARMING, 0)
        assert "waits for its share" in report.reason
        assert report.device is not None
        assert report.memory is not None
        assert report.memory.allocated_bytes < MIB, "nothing is held yet"
        assert (report.counts.oom_count, report.counts.emergency_count) == (0, 0)
        assert "claimed" not in [event.name for event in report.events]


def test_what_the_slot_had_learned_is_not_forgotten_while_it_waits(opened: list[Report]) -> None:
    assert all(report.resume is not None and report.resume["units"] == 20 * MIB for report in opened[:2])
    assert "resumed" in [event.name for event in opened[2].events]


def test_then_it_climbs_in_bytes_of_its_own(opened: list[Report]) -> None:
    assert (opened[2].state, opened[2].counts.oom_count) == (WorkerState.RUNNING, 0)
    claimed = [event for event in opened[2].events if event.name == "claimed"]
    assert [event.detail["target_bytes"] for event in claimed] == [40 * MIB]
    assert opened[2].memory is not None
    assert opened[2].memory.allocated_bytes <= 40 * MIB
    assert opened[3].counts.steps_ok > 0


def test_a_worker_that_may_hold_nothing_any_more_gives_all_of_it_back_and_is_in_no_emergency(
    in_child: InChild, make_spec: MakeSpec
) -> None:
    reports = in_child(slices, make_spec(policy="adaptive"), [None, None, 0, None, None], None)
    held = [report.memory.allocated_bytes for report in reports]
    assert held[1] > 20 * MIB
    assert held[2] < MIB
    assert reports[2].state is WorkerState.WARMING
    assert [report.counts.emergency_count for report in reports] == [0] * 5
    assert held[-1] > 20 * MIB


HOLDS_UNTIL_TOLD = """
import sys
from workers.devices.init_lock import alone_on

with alone_on("a device of this test"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_who_climbs_is_alone_on_the_device_and_a_dead_one_is_in_nobodys_way() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS_UNTIL_TOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
