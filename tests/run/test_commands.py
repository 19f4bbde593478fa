"""Commands to a running run: put as rows for the real supervisor, with the real store, in virtual time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from orchestrator.control.slots import send
from orchestrator.core.run_outcome import outcome_of
from orchestrator.core.slot import HeadState
from orchestrator.core.user_commands import Do
from orchestrator.record.archive import read_answers, read_run
from orchestrator.record.command_file import any_waits, put
from orchestrator.run.resume import past_of
from orchestrator.run.supervisor import answers_before
from tests.run.conftest import RunMaker
from tests.run.scene import Run, events_in
from tests.run.scripted_fleet import STEPS_PER_S
from tests.scene import MIB, ROOT, python
from workers.messages import Orders, WorkerState


class Asked:
    """A command that is put while a run goes on; the answer is read after the run."""

    def __init__(self, run: Run, after_s: float, do: str, *slots: str, **more: Any) -> None:
        self._folder, self._id = run.folder, more.pop("id", f"{do} at {after_s}")
        told = {"id": self._id, "do": do, "slots": list(slots), "by": "test", **more}
        content = json.dumps(told).encode()
        run.fleet.at(after_s, lambda: put(run.folder, content, identity=self._id))

    def answer(self) -> dict[str, Any]:
        return dict(read_answers(self._folder, self._id).get(self._id, {}))


Ask: TypeAlias = Callable[..., Asked]


@pytest.fixture
def ask() -> Ask:
    """Put commands; see `Asked`."""
    return Asked


def ordered_at(run: Run, slot: str) -> Callable[[float], Orders]:
    """Note when something is ordered of a slot; return what gives what was wanted at a time."""
    at: list[tuple[float, Orders]] = []

    def note(name: str, orders: Orders) -> None:
        if name == slot:
            at.append((run.clock.now_s - run.fleet.began_s, orders))

    run.fleet.on_order = note
    return lambda after_s: [orders for at_s, orders in at if at_s <= after_s][-1]


def shown_at(run: Run, slot: str, after_s: float) -> Any:
    """Return the row of a slot in the first snapshot from then on."""
    from_s = run.began_unix_s + after_s
    snapshot = next(shown for shown in run.recorder.shown if shown.now_unix_s >= from_s)
    return next(row for row in snapshot.rows if row.slot == slot)


def outcome(run: Run) -> str:
    return outcome_of(run.supervisor.shortfalls(), interrupted=False)[0]


def test_a_paused_slot_keeps_its_process_until_resumed(ask: Ask, new_run: RunMaker) -> None:
    run = new_run(duration="40s")
    wanted = ordered_at(run, "pc1/0")
    pause, resume = ask(run, 5, "pause", "pc1/0"), ask(run, 30, "unpause", "pc1/0")
    rows = run.finish()
    held = "held when its step ends; its process and its memory stay"
    assert pause.answer()["effect"] == held
    assert resume.answer()["effect"] == "gets work again"
    assert [wanted(after_s).holds for after_s in (4, 6, 29, 31)] == [False, True, True, False]
    assert run.states("pc1/0") == ["RUNNING", "HELD", "RUNNING"]
    row = shown_at(run, "pc1/0", 20)
    assert row.state == HeadState.HELD
    assert row.heartbeat_age_s is None
    assert row.reserved_bytes is not None
    assert run.fleet.placed == ["pc1/0", "pc2/0"]
    assert run.fleet.abandoned == []
    assert rows["pc2/0"].counts.steps_ok == pytest.approx(40 * STEPS_PER_S, rel=0.1), (
        "the other one works on"
    )
    assert rows["pc1/0"].counts.steps_ok == pytest.approx(16 * STEPS_PER_S, rel=0.2)
    assert outcome(run) == "good", "it was held for more than half of its time"
    first, second = run.events("command")
    told = {"id": "pause at 5", "do": "pause", "slots": ["pc1/0"], "slot": "pc1/0", "by": "test"}
    assert first.items() >= told.items()
    assert first["effect"].startswith("held")
    assert second["do"] == "unpause"


def test_a_cap_is_ordered_until_it_is_lifted(ask: Ask, new_run: RunMaker) -> None:
    run = new_run(duration="30s")
    wanted = ordered_at(run, "pc1/0")
    budget_bytes = 2 * 1024 * MIB
    ask(run, 5, "cap", "pc1/0", amount_bytes=512 * MIB)
    run.fleet.at(10, lambda: run.fleet.kill("pc1/0"))
    ask(run, 20, "cap", "pc1/0", amount_bytes=budget_bytes)
    run.finish()
    leases = [wanted(after_s).lease_bytes for after_s in (4, 6, 19, 21)]
    assert leases == [None, 512 * MIB, 512 * MIB, None]
    assert [wanted(after_s).incarnation for after_s in (6, 19)] == [0, 1]
    assert [orders.lease_bytes for orders in run.fleet.begun["pc2/0"]] == [None]


def test_a_command_is_obeyed_once_and_no_row_is_one(ask: Ask, new_run: RunMaker) -> None:
    run = new_run(duration="30s")
    ask(run, 5, "pause", "pc1/0", id="one")
    ask(run, 10, "unpause", "pc1/0")
    again = ask(run, 15, "pause", "pc1/0", id="one")
    noise = ask(run, 16, "explode", "pc1/0")
    run.finish()
    assert again.answer()["effect"].startswith("held when its step ends")
    assert noise.answer()["error"].startswith("do: Input should be 'pause', 'unpause'")
    assert run.states("pc1/0") == ["RUNNING", "HELD", "RUNNING"]
    assert [event["do"] for event in run.events("command")] == ["pause", "unpause", ""]
    assert not any_waits(run.folder)
    over = send(run.folder, Do.PAUSE, ["pc1/0"], by="test")
    assert str(over.error).endswith("has no head any more (good); it is over")


#: A head that is killed when a command was stored, and before anything that follows from it.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.run.scene import Run
from tests.run.test_commands import Asked as ask

run = Run(Path(sys.argv[1]), duration="40s")
commit = run.store.commit

def commit_and_die():
    has_command = any(table == "commands" for table, _ in run.store._waiting)
    is_stored = commit()
    if has_command:
        os.kill(os.getpid(), signal.SIGKILL)
    return is_stored

run.store.commit = commit_and_die
ask(run, 5, "drain", "pc1/0", id="once")
run.finish()
"""


def test_a_stored_hold_is_obeyed_by_the_next_head_once(
    ask: Ask, new_run: RunMaker, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    done = python("-c", KILLED, str(folder), cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    past = replace(past_of(read_run(folder)), answers=answers_before(folder))
    run = new_run(duration="40s", folder=folder, past=past)
    again, resume = ask(run, 20, "drain", "pc1/0", id="once"), ask(run, 15, "unpause", "pc1/0")
    rows = run.finish()
    assert (again.answer()["ok"], resume.answer()["ok"]) == (True, True)
    assert rows["pc1/0"].state is WorkerState.RUNNING, "the same id again changes nothing"
    assert [event["do"] for event in events_in(run.folder, "command")] == ["drain", "unpause"]
    assert run.fleet.placed == ["pc2/0", "pc1/0"], "it is placed when it is resumed"


def test_a_command_whose_sender_has_given_up_is_not_obeyed(new_run: RunMaker) -> None:
    run = new_run(duration="20s")
    told = {"id": "late", "do": "pause", "slots": ["pc1/0"], "by": "test"}
    until_unix_s = run.began_unix_s + 5
    late = json.dumps(told).encode()
    run.fleet.at(10, lambda: put(run.folder, late, identity="late", until_unix_s=until_unix_s))
    run.finish()
    assert run.events("command") == []
    assert not any_waits(run.folder)


#: A verb that is stopped while it writes.
STOPPED = """
import os, signal, sys
from pathlib import Path
from orchestrator.record.command_file import put
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGSTOP)
put(Path(sys.argv[1]), b"{}", identity="stopped")
"""


def test_a_stopped_verb_holds_neither_the_head_nor_others(ask: Ask, new_run: RunMaker) -> None:
    run = new_run(duration="40s")
    first = {"id": "first", "do": "pause", "slots": ["pc1/0"], "by": "test"}
    put(run.folder, json.dumps(first).encode(), identity="first")
    verb = subprocess.Popen([sys.executable, "-c", STOPPED, run.folder], cwd=ROOT)
    try:
        assert os.waitid(os.P_PID, verb.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_status == (
            signal.SIGSTOP
        )
        pause, unpause = ask(run, 5, "pause", "pc2/0"), ask(run, 10, "unpause", "pc2/0")
        run.finish()
    finally:
        verb.kill()
        verb.wait()
    assert run.states("pc2/0") == ["RUNNING", "HELD", "RUNNING"]
    assert (pause.answer()["ok"], unpause.answer()["ok"]) == (True, True)
    assert len(run.events("command", do="pause", slot="pc1/0")) == 1, (
        "what was put before is obeyed"
    )
