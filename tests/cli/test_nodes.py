"""The processes that `up` and `stop` find on this PC, and those that they leave alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.cli.nodes import command_for, end, execute, stop_node, stop_runs
from orchestrator.config.schema import Config
from orchestrator.core.node_commands import NODE_MARK
from orchestrator.errors import UsageError
from tests.factories import REFERENCE
from tests.scene import PATIENCE_S, ended, wait_for
from workers.keeper.processes import start_time

#: A node name that marks no other process on this machine.
NODE = f"test-{os.getpid()}"

#: Prints `ready`, and exits with 7 when it is interrupted.
INTERRUPTIBLE = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(600)
"""

Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Starter]:
    """Start processes that end with the test."""
    with contextlib.ExitStack() as stack:

        def started(command: list[str], **environment: str) -> subprocess.Popen[str]:
            usual = {name: value for name, value in os.environ.items() if name != NODE_MARK}
            process = stack.enter_context(
                subprocess.Popen(
                    command, env={**usual, **environment}, stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.kill)
            return process

        yield started


def recorded(runs: Path, pid: object, name: str = "run-1") -> Path:
    """Write the head.json of a run whose head is `pid`; return the run folder."""
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "head.json").write_text(json.dumps({"pid": pid}))
    return folder


def none_in(folder: Path) -> bool:
    """Return whether `stop_runs` finds no run, and names the folder that it searched."""
    with pytest.raises(
        UsageError, match=rf"^no run is under way in {re.escape(str(folder))}; --run-dir names"
    ):
        list(stop_runs(str(folder)))
    return True


def ready(start: Starter, *command: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process, and wait until it prints `ready`."""
    process = start([*command], **environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def head(start: Starter, body: str = INTERRUPTIBLE) -> subprocess.Popen[str]:
    return ready(start, sys.executable, "-c", body)


def test_all_runs_under_way_are_interrupted_and_no_bystander(
    start: Starter, tmp_path: Path
) -> None:
    heads, bystander = [head(start), head(start)], head(start)
    for index, process in enumerate(heads):
        recorded(tmp_path, process.pid, f"run-{index}")
    assert list(stop_runs(str(tmp_path))) == [
        f"asked run run-{index} (process {process.pid}) to end"
        for index, process in enumerate(heads)
    ]
    assert [process.wait(PATIENCE_S) for process in heads] == [7, 7]
    assert bystander.poll() is None


@pytest.mark.parametrize(
    "why", ["it has its summary", "its process is younger than its note", "its head has ended"]
)
def test_a_run_that_is_over_is_not_under_way(start: Starter, tmp_path: Path, why: str) -> None:
    process = head(start)
    folder = recorded(tmp_path, process.pid)
    if why == "it has its summary":
        (folder / "summary.json").write_text("{}")
    elif why == "its head has ended":
        process.kill()
        process.wait(PATIENCE_S)
    else:
        long_ago = time.time() - 3600
        os.utime(folder / "head.json", (long_ago, long_ago))
    assert none_in(tmp_path)
    assert (process.poll() is None) == (why != "its head has ended")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b'{"pid": null}', b'{"pid": "x"}', b"\xff\xfe", b"[" * 100_000,
        b'{"pid": true}',  # which is 1
        b'{"pid": 0}',  # every process of the group
        b'{"pid": -1}',  # every process
        b'{"pid": 1}',  # init
        b'{"pid": OWN}',  # `stop` itself
        b'{"pid": 1e400}', b'{"pid": 1000000000000000000000000}',
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_a_note_that_no_head_wrote_signals_no_process(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The only stand-in, because a test must not risk a real signal to process 1.
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(
        psutil.Process, "send_signal", lambda self, number: signalled.append((self.pid, number))
    )
    own = content.replace(b"OWN", b"%d" % os.getpid())
    (recorded(tmp_path, 0) / "head.json").write_bytes(own)
    assert none_in(tmp_path)
    assert signalled == []


def test_a_head_that_may_not_be_signalled_is_told(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, anothers = head(start), head(start)
    recorded(tmp_path, anothers.pid, "run-1")
    recorded(tmp_path, mine.pid, "run-2")
    real = psutil.Process.send_signal

    def as_this_user(process: psutil.Process, number: int) -> None:
        # Only root can make a process of another user, so the test imitates the system's refusal.
        if process.pid == anothers.pid:
            raise psutil.AccessDenied(process.pid)
        real(process, number)

    monkeypatch.setattr(psutil.Process, "send_signal", as_this_user)
    refused, asked, waits = stop_runs(str(tmp_path), wait_s=PATIENCE_S)  # waits only for one
    assert refused.startswith("run run-1 cannot be asked to end: ")
    assert asked == f"asked run run-2 (process {mine.pid}) to end"
    assert waits.startswith("waiting up to ")
    assert mine.poll() == 7


def test_a_run_that_does_not_end_is_named(start: Starter, tmp_path: Path) -> None:
    body = (
        "import signal; signal.signal(2, signal.SIG_IGN); print('ready', flush=1); signal.pause()"
    )
    recorded(tmp_path, head(start, body).pid)
    assert list(stop_runs(str(tmp_path), wait_s=0.2))[-1] == "run run-1 has not ended"


def sleeper(start: Starter, **environment: str) -> subprocess.Popen[str]:
    process = start(["sleep", "600"], **environment)
    # Before the process becomes `sleep`, it has the environment of this process.
    wait_for(lambda: psutil.Process(process.pid).name() == "sleep", "sleep")
    return process


def ended_by_stop() -> int:
    """End the node; return the number of its processes, which is printed before they are asked, and
    at the end.
    """
    lines = stop_node(NODE)
    found = int(next(lines).split()[1])
    environments = (process.info["environ"] or {} for process in psutil.process_iter(["environ"]))
    assert any(environment.get(NODE_MARK) == NODE for environment in environments)
    assert list(lines) == [f"ended {found} processes of node {NODE}"]
    return found


def test_the_marked_processes_of_a_node_and_their_children_are_ended_and_no_others(
    start: Starter,
) -> None:
    body = f"env -u {NODE_MARK} sleep 600 & echo $!; wait"
    parent = start(["/bin/sh", "-c", body], **{NODE_MARK: NODE})
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    marked = sleeper(start, **{NODE_MARK: NODE})
    others = [
        sleeper(start),
        sleeper(start, **{NODE_MARK: f"{NODE}-2"}),
        sleeper(start, OTHER=NODE),
    ]
    assert ended_by_stop() == 3
    assert None not in {parent.poll(), marked.poll()}
    assert start_time(child) is None
    assert [process.poll() for process in others] == [None] * 3


def test_a_node_of_the_same_name_in_a_container_is_left_alone(start: Starter) -> None:
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    trial = subprocess.run([*container, "true"], capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        pytest.skip(f"a namespace of processes cannot be made here: {trial.stderr.strip()}")
    body = ("env", f"{NODE_MARK}={NODE}", "sh", "-c", "echo ready; sleep 600; :")
    holder = ready(start, *container, *body)
    assert list(stop_node(NODE)) == [f"no process of node {NODE} runs here"]
    assert holder.poll() is None


def test_a_marked_process_that_will_not_end_is_killed(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cli.nodes._GRACE_S", 0.5)
    body = 'trap "" TERM; sleep 600 & echo ready; while :; do wait; done'
    stubborn = ready(start, "/bin/sh", "-c", body, **{NODE_MARK: NODE})
    assert ended_by_stop() == 2
    assert stubborn.poll() == -signal.SIGKILL


def test_a_node_without_processes_is_said_to_have_none(start: Starter) -> None:
    assert list(stop_node(NODE)) == [f"no process of node {NODE} runs here"]
    asked = f"from orchestrator.cli.nodes import stop_node; print(*stop_node({NODE!r}))"
    itself = start([sys.executable, "-c", asked], **{NODE_MARK: NODE})
    assert ended(itself)[0] == f"no process of node {NODE} runs here\n"


@pytest.mark.parametrize(
    ("typed", "configured", "host", "address"),
    [
        ("10.0.0.1:7000", "10.0.0.2:6379", "pc1.lan", "10.0.0.1:7000"),
        ("10.0.0.1", "10.0.0.2:6379", "pc1.lan", "10.0.0.1:6379"),
        ("[fe80::1]", "auto", None, r"\[fe80::1\]:6379"),
        ("fe80::2", "auto", None, r"\[fe80::2\]:6379"),
        (None, "10.0.0.2:6400", "pc1.lan", "10.0.0.2:6400"),
        (None, "auto", "pc1.lan", "pc1.lan:6379"),
        (None, "auto", None, r"\d+\.\d+\.\d+\.\d+:6379"),
    ],
)
def test_the_heads_address_is_typed_else_configured_else_its_host_else_this_pcs(
    typed: str | None, configured: str, host: str | None, address: str
) -> None:
    data = REFERENCE.model_dump()
    data["cluster"]["address"], data["nodes"]["pc1"]["host"] = configured, host
    command = command_for(Config.model_validate(data), "pc2", typed)
    assert re.fullmatch(f"--address={address}", command.argv[2])


def test_without_a_token_nothing_starts_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (("ray", f"touch {tmp_path}/started"), ("scp", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"copy ~/.ray/auth_token from the head's PC") as told:
        execute(command_for(REFERENCE, "pc2", "h:6379"))
    assert "scp -- h:.ray/auth_token" in str(told.value)
    assert not (tmp_path / "started").exists()


def test_the_heads_store_is_ended_after_all_others(tmp_path: Path) -> None:
    """If the store ended together with the others, it would wait for them until it is killed."""
    shutil.copy(shutil.which("sleep") or "sleep", tmp_path / "gcs_server")
    store = subprocess.Popen([tmp_path / "gcs_server", "600"])
    at_the_end = (
        f"sleep 0.5; grep -q zombie /proc/{store.pid}/status || touch {tmp_path}/store-lives; exit"
    )
    loop = f"touch {tmp_path}/ready; while :; do sleep 0.1; done"
    other = subprocess.Popen(["sh", "-c", f"trap '{at_the_end}' TERM; {loop}"])
    wait_for((tmp_path / "ready").exists, "trap")
    end({pid: str(start_time(pid)) for pid in (store.pid, other.pid)}, PATIENCE_S)
    assert (tmp_path / "store-lives").exists()
    assert (store.wait(PATIENCE_S), other.wait(PATIENCE_S)) == (-signal.SIGTERM, 0)
