"""A run store whose slots change state, followed by the verb in a process of its own, with real receivers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.config.notify_urls import URLS_VARIABLE
from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import UsageError
from orchestrator.view.notify.notifier import Notifier
from tests.fleet.in_process import CONFIG, IN_PROCESS
from tests.notify.head import RUN_ID, Head, head_of
from tests.notify.receivers import Receiver, http_receiver
from tests.scene import COMMAND, PATIENCE_S, ROOT, orchestrator, python, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:'(imghdr|cgi)':DeprecationWarning")  # apprise
HUSH = "hush-hush"
LOST = {
    slot: {"state": "LOST", "reason": "its node has left"} for slot in ("pc2/0", "pc2/1", "pc2/2")
}
#: Writes down what workers see of their environment.
WORKLOAD = """
import os
from pathlib import Path
from workers.workloads.base import StepResult, Workload

class Mine(Workload):
    def step(self, size, batch):
        Path("environment.txt").write_text(repr(dict(os.environ)))
        return StepResult(flop=1.0)

    def release(self):
        pass
"""
SMALL = "nodes: {pc1: {gpu: rtx-3090, workers: 1, vram_per_worker_gib: 1}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN_ID


@pytest.fixture
def head(folder: Path) -> Iterator[Head]:
    with head_of(folder) as head:
        yield head


@contextlib.contextmanager
def teller(folder: Path, receiver: Receiver) -> Iterator[subprocess.Popen[str]]:
    """Let the verb follow a run at a quick pace; it is killed at the end if it has not ended."""
    command = [sys.executable, "-m", "tests.notify.notifier_process", str(folder)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, URLS_VARIABLE: receiver.json_url(HUSH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def message(receiver: Receiver, number: int) -> str:
    """Wait for a message; return its title and text."""
    wait_for(lambda: len(receiver.messages) >= number, f"message {number}")
    return "\n".join(receiver.messages[number - 1])


def holders(folder: Path) -> list[Path]:
    """Return the files that hold a part of an address."""
    parts = (HUSH, "deep-path", "X-Token")
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(part.encode() in path.read_bytes() for part in parts)
    ]


def test_start_node_slots_and_end_are_a_message_each(folder: Path, head: Head) -> None:
    with http_receiver() as http, teller(folder, http) as process:
        assert message(http, 1).startswith("0b76: the run has started; 10 RUNNING\n")
        head.store(gone=["pc2"], states=LOST)
        second = message(http, 2)
        assert second.startswith("0b76: NodeMissing pc2\n")
        assert "pc2/0" not in second, "its slots went with it"
        head.store()
        assert message(http, 3).startswith("0b76: over: NodeMissing pc2\n")
        why = "died 5 times in 300 s: \x1b[31mthe card\nis broken"
        slots = [f"pc1/{number}" for number in range(7)]
        quarantined = {slot: {"state": "QUARANTINED", "reason": why} for slot in slots}
        head.store(states=quarantined)
        fourth = message(http, 4)
        assert fourth.startswith(f"0b76: SlotQuarantined {' '.join(slots)}\n")
        assert "died 5 times in 300 s: [31mthe card is broken" in fourth
        assert "pc1 RTX 3090: workers 7, " in fourth
        head.store(states=quarantined, end="degraded", code=1, missed=["pc1/0 ended QUARANTINED"])
        last = message(http, 5)
        assert last.startswith("0b76: the run has ended: degraded, exit code 1\n")
        assert "\npc1/0 ended QUARANTINED\n" in last
        assert f"still: SlotQuarantined {' '.join(slots)}, for" in last
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
    assert len(http.messages) == 5
    assert said.count("  taken\n") == 5
    assert HUSH not in said + http.text()
    assert holders(folder.parent) == []


def test_a_killed_head_is_told_of_and_the_process_ends(folder: Path, head: Head) -> None:
    with http_receiver() as http, teller(folder, http) as process:
        message(http, 1)
        head.process.kill()
        head.process.wait()
        last = message(http, 2)
        assert last.startswith("0b76: the head is gone")
        assert f"run --resume {RUN_ID}" in last
        assert process.wait(PATIENCE_S) == 0
    assert len(http.messages) == 2


def test_only_one_process_tells_of_a_run(folder: Path, head: Head) -> None:
    said: list[str] = []
    with http_receiver() as http, teller(folder, http) as process:
        message(http, 1)
        second = Notifier(
            folder=folder, settings=NotifyConfig(), urls=[], say=said.append, lock_patience_s=0.1
        )
        with pytest.raises(UsageError, match="another process tells of run"):
            second.follow()
        assert "once no other process does" in said[0]
        process.kill()
        process.wait()
        with teller(folder, http):
            message(http, 2)


def test_what_is_less_severe_than_asked_for_is_not_sent(folder: Path, head: Head) -> None:
    head.store(incomplete=True)
    for severity, is_told in (("warning", True), ("critical", False)):
        settings = NotifyConfig(severity=severity)  # type: ignore[arg-type]  # two of the three
        with http_receiver() as http:
            notifier = Notifier(folder=folder, settings=settings, urls=[http.json_url()], say=print)
            assert notifier.once() == 0
        assert ("still: RecordsIncomplete" in http.text()) is is_told


def test_without_an_answer_the_process_ends_after_some_tries(folder: Path, head: Head) -> None:
    head.store(end="good", code=0, missed=[])
    with http_receiver(status=500) as http, teller(folder, http) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
    assert "not taken: " in said
    assert HUSH not in said, "neither in reasons nor in warnings of apprise"
    assert len(http.messages) == 3


@pytest.fixture
def urls_file(tmp_path: Path) -> Path:
    return tmp_path / "urls"


def typed(nowhere: Path, urls_file: Path, receiver: Receiver) -> list[str]:
    """Write the configuration and the file of addresses; return the options that name them."""
    urls_file.write_text(f"# mine\n{receiver.json_url(HUSH)}\n", encoding="utf-8")
    urls_file.chmod(0o600)
    (nowhere / "cluster.yaml").write_text(SMALL, encoding="utf-8")
    return ["--set", f"notify.urls_file={urls_file}"]


def test_the_command_keeps_its_pace_and_ends_when_asked_to(
    nowhere: Path, urls_file: Path, folder: Path, head: Head
) -> None:
    with http_receiver() as http:
        options = typed(nowhere, urls_file, http)
        command = [*COMMAND, "notify", "0b76", *options]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            message(http, 1)
            head.store(gone=["pc2"], states=LOST)
            done = orchestrator("notify", "--once", *options)
            assert done.returncode == 0, done.stderr
            assert "still: NodeMissing pc2" in message(http, 2)
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, said
    assert HUSH not in said + done.stdout + done.stderr
    assert holders(folder.parent) == []


@pytest.mark.torch
def test_a_run_tells_of_its_end_by_a_process_that_outlives_it(
    nowhere: Path, urls_file: Path
) -> None:
    with http_receiver() as http:
        typed(nowhere, urls_file, http)
        (nowhere / "mine.py").write_text(WORKLOAD, encoding="utf-8")
        (nowhere / "cluster.yaml").write_text(CONFIG, encoding="utf-8")
        run = (*IN_PROCESS, "run", "--duration", "1s", "--workload", "mine:Mine")
        done = python(*run, **{URLS_VARIABLE: http.json_url(HUSH)})
        assert done.returncode == 0, done.stderr
        wait_for(lambda: "the run has ended: good, exit code 0" in http.text(), "the end")
        (folder,) = Path("runs").iterdir()
        urls_file.chmod(0o644)
        refused = python(*run, "--set", f"notify.urls_file={urls_file}")
    assert refused.returncode == 2
    assert f"chmod 600 {urls_file}" in refused.stderr
    assert list(Path("runs").iterdir()) == [folder], "it was refused before there was a run"
    wait_for(lambda: "taken" in (folder / "notify.log").read_text(), "line of the log")
    assert HUSH not in done.stdout + done.stderr + refused.stderr
    assert "PYTHONPATH" in (nowhere / "environment.txt").read_text()
    assert holders(nowhere) == [urls_file], "neither the run nor its workers hold it"
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "good"
