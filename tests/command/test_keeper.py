"""No process of a program is left, whatever is killed in whatever order."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from tests.command.scenes import Slot, command_spec, is_gone, kill, parent_of, start_worker, told
from tests.scene import wait_for

#: Starts a child in a new session with an empty environment, and writes both process ids. Both
#: processes ignore SIGTERM.
STUBBORN = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c",
        "import time; time.sleep(600)"], {})
with open("pids", "w") as file:
    json.dump([os.getpid(), child], file)
time.sleep(600)
"""

#: Single kills, and pairs in which one process might have noticed the first kill. Another test
#: kills keeper and server at once.
ORDERS = [
    ("worker",), ("keeper",), ("server",), ("program",),
    ("worker", "keeper"), ("keeper", "worker"), ("server", "worker"), ("server", "program"),
]  # fmt: skip


@pytest.fixture
def stubborn(tmp_path: Path, state_dir: Path) -> Iterator[Mapping[str, int]]:
    """The processes of a job, keyed by role."""
    spec = command_spec("-c", STUBBORN, cwd=str(tmp_path), grace_s=0.3)
    worker = start_worker(spec, tmp_path)
    program, child = told(tmp_path / "pids")
    keeper = parent_of(program)
    yield {
        "worker": worker.pid,
        "keeper": keeper,
        "server": parent_of(keeper),
        "program": program,
        "child": child,
    }
    worker.kill()
    worker.wait()


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_nothing_is_left(order: tuple[str, ...], stubborn: Mapping[str, int]) -> None:
    for role in order:
        kill(stubborn[role])
        time.sleep(0.05)
    ended = {"program", "child", "keeper"} if order != ("server",) else set()
    # The server stays for the next program of its worker.
    ended |= {"server"} if "worker" in order else set()
    left = [pid for role, pid in stubborn.items() if role in ended]
    wait_for(lambda: all(map(is_gone, left)), f"end of {stubborn}")


def kill_keepers(program: int) -> None:
    keeper = parent_of(program)
    for pid in (parent_of(keeper), keeper):
        kill(pid)


FORKS = """
import json, os, time
child = os.fork()
if child:
    with open("pids", "w") as file:
        json.dump([os.getpid(), child], file)
time.sleep(600)
"""


def test_next_attempt_ends_what_kills_left(tmp_path: Path, state_dir: Path) -> None:
    spec = command_spec("-c", FORKS, cwd=str(tmp_path), grace_s=0.3)
    slot = Slot(spec)
    slot.begin()
    program, child = told(tmp_path / "pids")
    kill_keepers(program)
    wait_for(lambda: is_gone(program), "the program's end by the kernel")
    assert not is_gone(child)
    report = Slot(command_spec("-c", "pass", cwd=str(tmp_path)), incarnation=1).end()
    assert (report.ended and report.ended.exit_code, is_gone(child)) == (0, True)
    slot.end()


def test_worker_ends_what_its_keepers_left(tmp_path: Path, state_dir: Path) -> None:
    slot = Slot(command_spec("-c", STUBBORN, cwd=str(tmp_path)))
    slot.begin()
    program, child = told(tmp_path / "pids")
    slot.poll()
    kill_keepers(program)
    report = slot.end()
    assert (report.ended.signal, is_gone(child)) == (9, True)


#: Holds a semaphore with a file, as loader processes of torch do, and writes its name.
HOLDS = """
import json, multiprocessing, os, time
lock = multiprocessing.get_context("spawn").Lock()
with open("pids", "w") as file:
    json.dump([os.getpid(), "/dev/shm/sem." + lock._semlock.name.lstrip("/")], file)
time.sleep(600)
"""


@pytest.mark.parametrize("role", ["worker", "keeper", "program"])
def test_no_file_of_its_semaphores_is_left(role: str, tmp_path: Path, state_dir: Path) -> None:
    worker = start_worker(command_spec("-c", HOLDS, cwd=str(tmp_path), grace_s=0.0), tmp_path)
    program, semaphore = told(tmp_path / "pids")
    assert Path(semaphore).exists()
    kill({"worker": worker.pid, "keeper": parent_of(program), "program": program}[role])
    wait_for(lambda: not Path(semaphore).exists(), f"end of {semaphore}")
    worker.kill()
    worker.wait()


def test_worker_that_ignores_its_children_learns_the_end(state_dir: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        report = Slot(command_spec("-c", "raise SystemExit(3)")).end()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert report.ended.exit_code == 3


SLEEPS = "import time; time.sleep(600)"


def test_a_program_ends_when_the_head_is_silent(tmp_path: Path, state_dir: Path) -> None:
    slot = Slot(command_spec("-c", SLEEPS, cwd=str(tmp_path), lease_s=1.0))
    slot.begin()
    program = slot.actor._pid
    wait_for(lambda: is_gone(program), "the end of the program")

    ended = slot.end().ended
    assert (ended.signal, ended.was_asked) == (signal.SIGTERM, False)
    assert "no word from the head for 1 s" in ended.text


def test_being_asked_keeps_a_program_alive(tmp_path: Path, state_dir: Path) -> None:
    """The test judges only rounds in which this process and the keeper ran in time."""
    was_in_time = False
    while not was_in_time:
        slot = Slot(command_spec("-c", SLEEPS, cwd=str(tmp_path), lease_s=5.0))
        asked_s = [time.monotonic()]
        while asked_s[-1] < asked_s[0] + 7.0:
            report = slot.poll(1.0)
            asked_s.append(time.monotonic())
        was_in_time = max(later - sooner for sooner, later in pairwise(asked_s)) < 2.0
        assert report.ended is None or not was_in_time
        slot.rest()
