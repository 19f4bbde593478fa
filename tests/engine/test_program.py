"""The engine as a separate program: the statuses and the orders on its channel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scene import MIB, ROOT, Patience, computed, spec_of, wait_for
from workers.engine.spec_file import read_spec, write_spec
from workers.keeper.channel import receive_all, send
from workers.keeper.task import CHANNEL
from workers.messages import Begin, Cause, Orders, Status, Verdict
from workers.settings import CommandSpec, Learned, PolicyState, ThermalSettings, WorkerSpec


class Program:
    """An engine in a separate process, and the test's end of its channel."""

    def __init__(self, spec: WorkerSpec, folder: Path, orders: Orders | None = None) -> None:
        path = write_spec(folder, spec, 0, Begin(fresh=True))
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard: list[Status] = []
        with theirs, (folder / "printed").open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers.engine", str(path)],
                env=os.environ | {CHANNEL: str(theirs.fileno()), "PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                cwd=folder,
                stdout=printed,
                stderr=printed,
            )
        self.order(orders or Orders())

    def order(self, orders: Orders) -> None:
        assert send(self.end, orders)

    def until(self, holds: Callable[[Status], bool]) -> Status:
        """Receive statuses until `holds` accepts one."""
        patience = Patience(lambda: computed(self.process.pid))
        while True:
            for status in receive_all(self.end):
                self.heard.append(status)
                if holds(status):
                    return status
            assert not patience.is_over(), f"it never came: {self.heard[-1:]}"
            time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def started(spec: WorkerSpec, orders: Orders | None = None) -> Program:
        programs.append(Program(spec, tmp_path, orders))
        return programs[-1]

    yield started
    for program in programs:
        program.process.kill()
        program.process.wait()
        program.end.close()


def test_orders_end_a_long_turn_at_once_and_a_closed_channel_the_program(
    start: Callable[..., Program],
) -> None:
    program = start(replace(spec_of(), poll_s=3600.0))
    program.until(lambda status: status.counts.steps_ok > 0)
    program.order(Orders(holds=True, saves=1))
    held = program.until(lambda status: status.is_held)
    assert held.saves == 1
    program.order(Orders(saves=1))
    program.order(Orders(saves=1, lease_bytes=64 * MIB))
    leased = program.until(lambda status: status.lease_bytes == 64 * MIB)
    assert not leased.is_held
    program.end.close()
    assert program.process.wait(60) == 0


def test_it_opens_nothing_while_it_is_held(start: Callable[..., Program]) -> None:
    program = start(replace(spec_of(), poll_s=0.05), Orders(holds=True))
    program.until(lambda status: status.is_held)
    again = program.until(lambda status: status.is_held)
    assert again.device is None
    program.order(Orders())
    assert not program.until(lambda status: status.counts.steps_ok > 0).is_held


def test_a_last_verdict_is_repeated(start: Callable[..., Program]) -> None:
    program = start(replace(spec_of(name="no_such_workload"), poll_s=0.05))
    for _ in range(3):
        last = program.until(lambda status: status.verdict is not Verdict.OK)
        assert (last.verdict, last.verdict_cause) == (Verdict.INCOMPATIBLE, Cause.BAD_CONFIG)
        assert "cannot be loaded" in last.reason


CHATS = """
from workers.workloads.base import Workload
class Chats(Workload):
    told = 0
    def step(self, size, batch):
        if Chats.told < 500:
            Chats.told += 1
            self.context.tell("chat", number=Chats.told, text="x" * 2000)
        else:
            open("all_told", "w").close()
    def release(self):
        pass
"""


def test_no_event_is_lost_while_it_is_not_heard(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    (tmp_path / "chats.py").write_text(CHATS)
    program = start(replace(spec_of(name="chats:Chats"), poll_s=0.01))
    wait_for((tmp_path / "all_told").exists, "end of the chat")
    numbers: list[Any] = []

    def has_all(status: Status) -> bool:
        numbers.extend(each.detail["number"] for each in status.events if each.name == "chat")
        return len(numbers) >= 500

    program.until(has_all)
    assert numbers == list(range(1, 501))


def test_a_person_can_start_it(tmp_path: Path) -> None:
    path = write_spec(tmp_path, spec_of(name="no_such_workload"), 0, Begin(fresh=True))
    done = subprocess.run(
        [sys.executable, "-m", "workers.engine", str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "STOPPED: 0 steps" in done.stdout
    assert "'no_such_workload' cannot be loaded on this machine" in done.stdout


def test_a_spec_file_holds_all_that_a_worker_must_know(tmp_path: Path) -> None:
    spec = replace(
        spec_of(),
        thermal=ThermalSettings(critical_c=None),
        command=CommandSpec(argv=("a", "b"), env={"c": "d"}),
    )
    copy = tmp_path / "copy"
    copy.write_bytes(b"\0" * 8)
    begin = Begin(resume=PolicyState(learned=(None, Learned(size=3, unit_bytes=0.5))))
    path = write_spec(tmp_path, spec, 7, begin, copy)
    found = read_spec(path)
    expected = replace(begin, checkpoint=copy)
    assert (found.spec, found.begin, found.incarnation) == (spec, expected, 7)
    assert path.stat().st_mode & 0o777 == 0o600
    write_spec(tmp_path, spec, 8, Begin())
    assert read_spec(path).begin == Begin(), "a process without a copy gets none"
