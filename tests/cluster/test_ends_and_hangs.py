"""Ways in which the process of a slot ends or hangs, and the actor's reports, with real processes.

Without Ray: the tests call the actor's class as Ray would.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.command.scenes import Slot, is_gone
from tests.scene import MIB, spec_of, wait_for
from workers.engine import pieces
from workers.messages import Begin, Cause, Orders, Status
from workers.settings import Scalar
from workers.workloads.base import StepResult, Workload, WorkloadContext

#: Steps before the fault, after which the process has sent a status.
BEFORE = 3


def segfault() -> None:
    ctypes.string_at(0)


def aborts() -> None:
    """End as Python does after a fatal error."""
    ctypes.pythonapi.Py_FatalError(b"cannot go on")


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    while True:
        time.sleep(0.1)


def deadlocked_with_the_gil() -> None:
    """Wait for a lock that is never released, in a C function that keeps the GIL."""
    lock = (ctypes.c_char * 64)()
    mutex = ctypes.PyDLL(None)
    mutex.pthread_mutex_lock(lock)
    mutex.pthread_mutex_lock(lock)


def loops() -> None:
    while True:
        pass


class Acts(Workload):
    """Does what its environment variable says after some steps."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.steps = 0
        if context.checkpoint is not None:
            Path("copy").write_bytes(context.checkpoint.read_bytes())

    def step(self, size: int, batch: int) -> StepResult:
        torch.ones(64, 64) @ torch.ones(64, 64)
        self.steps += 1
        if self.steps > BEFORE:
            self.act(*os.environ["ACT"].split(":"))
        return StepResult(flop=2.0 * 64**3)

    def act(self, what: str, argument: str = "") -> None:
        match what:
            case "exit":
                os._exit(int(argument))
            case "signal":
                os.kill(os.getpid(), int(argument))
            case "raise":
                raise {"SystemExit": SystemExit, "MemoryError": MemoryError}[argument](3)
            case "do":
                globals()[argument]()

    def release(self) -> None:
        pass


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Slot]]:
    """Make slots whose processes end or hang after some steps."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    slots: list[Slot] = []

    def make(act: str) -> Slot:
        monkeypatch.setenv("ACT", act)
        spec = spec_of(name=f"{Path(__file__).stem}:Acts", size=64)
        slots.append(Slot(replace(spec, slot=f"pc1/{len(slots)}", poll_s=0.1)))
        return slots[-1]

    yield make
    for slot in slots:
        slot.poll(runs=False)


@pytest.mark.parametrize(
    ("act", "cause", "words"),
    [
        ("exit:0", Cause.EXCEPTION, "exit code 0"),
        ("exit:75", Cause.EXCEPTION, "exit code 75"),
        ("signal:9", Cause.KILLED, "SIGKILL"),
        ("signal:15", Cause.KILLED, "SIGTERM"),
        ("do:segfault", Cause.KILLED, "SIGSEGV"),
        ("do:aborts", Cause.KILLED, "SIGABRT"),
    ],
)
def test_an_end_has_its_cause(
    acting: Callable[[str], Slot], act: str, cause: Cause, words: str
) -> None:
    slot = acting(act)
    status = slot.until(lambda told: told.died is not None)
    assert status.died is not None
    assert status.died.cause is cause
    assert words in status.died.text
    assert status.incarnation == 0
    slot.orders = replace(slot.orders, incarnation=1, begin=Begin(resume=status.resume))
    slot.until(lambda told: told.incarnation == 1 and told.counts.steps_ok > 0)


@pytest.mark.parametrize(
    "act", ["raise:SystemExit", "raise:MemoryError", f"signal:{int(signal.SIGINT)}"]
)
def test_what_ends_no_process_is_told_and_the_process_goes_on(
    acting: Callable[[str], Slot], act: str
) -> None:
    slot = acting(act)
    first = slot.until(lambda told: told.counts.steps > BEFORE)
    again = slot.until(lambda told: told.counts.steps > first.counts.steps + 2)
    assert again.died is None
    assert first.device is not None
    assert again.device is not None
    assert again.device.pid == first.device.pid


def test_a_kill_of_the_keeper_is_told(acting: Callable[[str], Slot]) -> None:
    slot = acting("work")
    status = slot.until(lambda told: told.counts.steps_ok > BEFORE)
    assert status.device is not None
    process = psutil.Process(status.device.pid)
    os.kill(process.ppid(), signal.SIGKILL)
    ended = slot.until(lambda told: told.died is not None)
    assert ended.died is not None
    assert ended.died.cause is Cause.KILLED
    wait_for(lambda: is_gone(process.pid), "end of the process")


def shared_files(pid: int) -> list[Path]:
    """Return the files in /dev/shm that a process has mapped, including semaphores."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    return [Path(line.split()[5]) for line in maps.splitlines() if " /dev/shm/" in line]


@pytest.mark.parametrize("moment", ["loading", "at work"])
def test_a_training_whose_processes_are_killed_at_once_leaves_nothing(
    moment: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_tmp))
    keys: dict[str, Scalar] = {
        "preset": "gpt-nano", "seq": 32, "batch": 4, "micro": 2, "loader_workers": 1,
    }  # fmt: skip
    spec = spec_of(budget_bytes=512 * MIB, name="train", policy="adaptive")
    workload = replace(spec.workload, settings=keys)
    slot = Slot(replace(spec, workload=workload, poll_s=0.1))
    engine = slot.until(lambda told: told.device is not None).device
    assert engine is not None
    keeper = psutil.Process(engine.pid).parent()
    assert keeper is not None
    server = keeper.parent()
    assert server is not None

    def is_there(_: Status) -> bool:
        names = [" ".join(each.cmdline()) for each in keeper.children(recursive=True)]
        forks = sum("forkserver" in name for name in names)
        return forks > (0 if moment == "loading" else 1)

    slot.until(is_there)
    everything = [server, *server.children(recursive=True)]
    shared = {file for each in everything for file in shared_files(each.pid)}
    for each in (server, keeper, psutil.Process(engine.pid)):
        each.kill()
    slot.until(lambda told: told.died is not None)
    wait_for(lambda: all(is_gone(each.pid) for each in everything), f"end of {everything}")
    if moment == "at work":  # earlier, its folder may not be known yet
        wait_for(lambda: not list(short_tmp.glob("pymp-*")), "end of the loader's folder")
    wait_for(lambda: not [file for file in shared if file.exists()], f"end of {shared}")


@pytest.mark.parametrize(
    ("act", "line", "computes"),
    [
        ("do:sleeps", "in sleeps", False),
        ("do:deadlocked_with_the_gil", "in deadlocked_with_the_gil", False),
        ("do:stopped", "in stopped", False),
        ("do:loops", "in loops", True),
    ],
)
def test_a_hang_is_seen_with_what_the_process_does_and_where_it_stands(
    acting: Callable[[str], Slot], act: str, line: str, computes: bool
) -> None:
    slot = acting(act)
    slot.until(lambda told: told.counts.steps_ok > 0)

    def shows(told: Status) -> bool:
        quiet = told.quiet
        return quiet is not None and (quiet.computed_s if computes else quiet.idle_s) > 2.0

    status = slot.until(shows)
    assert status.counts.steps_ok <= BEFORE
    assert status.quiet is not None
    # An idle process has also computed a little: the end of its work before.
    assert (status.quiet.computed_s > status.quiet.idle_s) is computes
    slot.orders = replace(slot.orders, runs=False)
    ended = slot.until(lambda told: told.quiet is not None and told.quiet.stands_at is not None)
    assert ended.quiet is not None
    assert line in str(ended.quiet.stands_at)
    assert ended.died is None, "it was ended as ordered"
    assert slot.details("silent_process_ended")["stands_at"] == ended.quiet.stands_at
    slot.orders = replace(slot.orders, runs=True, incarnation=1, begin=Begin())
    slot.until(lambda told: told.incarnation == 1 and told.counts.steps_ok > 0)


def test_an_answer_that_is_lost_loses_no_event(acting: Callable[[str], Slot]) -> None:
    """Nothing depends on a single answer: the test discards every second answer."""
    slot = acting("raise:MemoryError")

    def has_failed_often(told: Status) -> bool:
        slot.actor.poll(slot.orders, 0.1)
        return told.counts.steps_oom > 5

    last = slot.until(has_failed_often)
    told = [event for event in slot.events if event.name == "oom"]
    assert len(told) == last.counts.steps_oom


def test_a_process_begins_once_all_of_its_copy_is_there(
    acting: Callable[[str], Slot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10)
    state, sent, slot = tmp_path / "state.pt", pieces.SavedPieces(), acting("work")
    state.write_bytes(bytes(range(35)))
    whole = pieces.whole_of(state)
    slot.orders = replace(slot.orders, begin=Begin(copy=whole))
    for size_bytes in (10, 20, 30):
        copied = slot.poll().copied
        slot.orders = replace(slot.orders, copy=sent.piece(str(state), copied))
        status = slot.poll()
        assert (status.copied and status.copied.size_bytes, status.incarnation) == (
            size_bytes,
            None,
        )
    slot.orders = replace(slot.orders, copy=sent.piece(str(state), status.copied))
    status = slot.until(lambda told: told.counts.steps_ok > 0)
    assert (tmp_path / "copy").read_bytes() == bytes(range(35))
    assert status.copied == whole


def test_orders_for_another_process_of_the_actor_start_nothing(
    acting: Callable[[str], Slot],
) -> None:
    slot = acting("work")
    status = slot.actor.poll(Orders(actor="of a process that was killed", begin=Begin()), 5.0)
    assert status.incarnation is None
    assert not slot.actor.poll(replace(slot.orders, actor=None), 5.0).is_up
