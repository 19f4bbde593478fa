"""Commands to a run: rows for the real supervisor, with the real store, in virtual time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from orchestrator.control.slots import Do, send
from orchestrator.core.run_outcome import outcome_of
from orchestrator.record.archive import read_run
from orchestrator.record.command_file import any_waits, put
from orchestrator.run.resume import past_of
from tests.run.conftest import RunMaker
from tests.run.scene import Asked, Run
from tests.scene import ROOT, events_in, python
from workers.messages import WorkerState


def outcome(run: Run) -> str:
    return outcome_of(run.supervisor.shortfalls(), interrupted=False)[0]


def test_a_command_is_obeyed_once_and_no_row_is_one(new_run: RunMaker) -> None:
    run = new_run(duration="30s")
    Asked(run, 5, "pause", "pc1/0", id="one")
    Asked(run, 25, "unpause", "pc1/0")
    again = Asked(run, 26, "pause", "pc1/0", id="one")
    noise = Asked(run, 27, "explode", "pc1/0")
    run.finish()
    assert outcome(run) == "good", "it was held for more than half of its time"
    assert run.fleet.abandoned == [], "it keeps its process"
    assert again.answer()["effect"].startswith("held when its step ends")
    assert noise.answer()["error"].startswith("do: Input should be 'pause', 'unpause'")
    assert run.states("pc1/0") == ["RUNNING", "HELD", "RUNNING"]
    assert [event["do"] for event in run.events("command")] == ["pause", "unpause", ""]
    assert not any_waits(run.folder)
    over = send(run.folder, Do.PAUSE, ["pc1/0"], by="test")
    assert str(over.error).endswith("has no head any more (good); it is over")


def test_a_reinstated_slot_works_again_where_its_node_is(new_run: RunMaker) -> None:
    run = new_run(max_deaths=2, duration="40s")
    run.fleet.dies_at_once.add("pc2/0")
    run.fleet.at(15, run.fleet.dies_at_once.clear)
    Asked(run, 20, "reinstate", "pc2/0")
    assert run.finish()["pc2/0"].state is WorkerState.RUNNING
    assert run.states("pc2/0")[-3:] == ["QUARANTINED", "STARTING", "RUNNING"]


#: A head that is killed after a command was stored, and before its effects.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.run.scene import Asked, Run

run = Run(Path(sys.argv[1]), duration="40s")
commit = run.store.commit

def commit_and_die():
    has_command = any(table == "commands" for table, _ in run.store._waiting)
    is_stored = commit()
    if has_command:
        os.kill(os.getpid(), signal.SIGKILL)
    return is_stored

run.store.commit = commit_and_die
Asked(run, 5, "drain", "pc1/0", id="once")
run.finish()
"""


def test_a_stored_hold_is_obeyed_by_the_next_head_once(new_run: RunMaker, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    done = python("-c", KILLED, str(folder), cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = new_run(duration="40s", folder=folder, past=past_of(read_run(folder)))
    again, resume = Asked(run, 20, "drain", "pc1/0", id="once"), Asked(run, 15, "unpause", "pc1/0")
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


#: A verb that is suspended while it writes.
STOPPED = """
import os, signal, sys
from pathlib import Path
from orchestrator.record.command_file import put
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGSTOP)
put(Path(sys.argv[1]), b"{}", identity="stopped")
"""


def test_a_stopped_verb_holds_neither_the_head_nor_others(new_run: RunMaker) -> None:
    run = new_run(duration="40s")
    first = {"id": "first", "do": "pause", "slots": ["pc1/0"], "by": "test"}
    put(run.folder, json.dumps(first).encode(), identity="first")
    verb = subprocess.Popen([sys.executable, "-c", STOPPED, run.folder], cwd=ROOT)
    try:
        assert os.waitid(os.P_PID, verb.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_status == (
            signal.SIGSTOP
        )
        pause, unpause = Asked(run, 5, "pause", "pc2/0"), Asked(run, 10, "unpause", "pc2/0")
        run.finish()
    finally:
        verb.kill()
        verb.wait()
    assert run.states("pc2/0") == ["RUNNING", "HELD", "RUNNING"]
    assert (pause.answer()["ok"], unpause.answer()["ok"]) == (True, True)
    assert len(run.events("command", do="pause", slot="pc1/0")) == 1, (
        "what was put before is obeyed"
    )
