"""What is seen of real processes: those that compute, starve, sleep and are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.scene import wait_for
from workers.host.processes import Activity, SilenceMeter

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(1000)"
#: The work is done by a child, as by the processes of a data loader.
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return started[-1].pid

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _becomes(meter: SilenceMeter, pid: int, is_active: bool) -> Activity:
    def seen() -> Activity | None:
        activity = meter.activity(pid)
        return activity if (activity.wanted_s > 0.5 * activity.interval_s) is is_active else None

    return wait_for(seen, f"activity {is_active} of {pid}")


@pytest.mark.parametrize("code", [SPIN, CHILD])
def test_what_computes_wants_the_cpu_all_the_time(start: Callable[[str], int], code: str) -> None:
    _becomes(SilenceMeter(on_card=False), start(code), is_active=True)


def test_what_starves_wants_it_too(start: Callable[[str], int]) -> None:
    pid = start(f"import os; os.nice(19)\n{SPIN}")
    for _ in range(os.cpu_count() or 1):
        start(SPIN)
    meter = SilenceMeter(on_card=False)

    def starves() -> bool:
        activity = _becomes(meter, pid, is_active=True)
        return activity.cpu_s < 0.5 * activity.interval_s

    wait_for(starves, "a process that gets less than half a core")


def test_what_sleeps_or_is_stopped_wants_none(start: Callable[[str], int]) -> None:
    _becomes(SilenceMeter(on_card=False), start(SLEEP), is_active=False)
    meter, stopped = SilenceMeter(on_card=False), start(SPIN)
    _becomes(meter, stopped, is_active=True)
    os.kill(stopped, signal.SIGSTOP)
    _becomes(meter, stopped, is_active=False)


def test_what_is_gone_did_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    meter = SilenceMeter(on_card=True)
    assert meter.activity(gone.pid) is None
    quiet = meter.measure(gone.pid, 0.0)
    assert (quiet.idle_s, quiet.computed_s) == (quiet.seconds, 0.0)
