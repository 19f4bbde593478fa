"""A run store whose slots change state, followed by `notify`, with a real receiver."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from orchestrator.config.schema import NotifyConfig
from orchestrator.core.slot import HeadState
from orchestrator.errors import UsageError
from orchestrator.record.store import RunStore
from orchestrator.run.notify_urls import URLS_VARIABLE
from orchestrator.view import alerts, notify
from orchestrator.view.alerts import HEAD_GONE, KINDS
from orchestrator.view.notify import LOCK_NAME, Notifier
from tests.factories import add_event, begun_run, event, make_row
from tests.fleet.in_process import CONFIG, IN_PROCESS
from tests.notify.receivers import Receiver, http_receiver
from tests.scene import COMMAND, PATIENCE_S, ended, orchestrator, python, wait_for
from tests.web.scene import facts_here, put_turn
from workers.files import locked
from workers.keeper.processes import start_time

pytestmark = pytest.mark.filterwarnings("ignore:'(imghdr|cgi)':DeprecationWarning")  # apprise
RUN_ID = "20261123-101500-0b76"
HUSH = "hush-hush"
NODES = {"pc1": 7, "pc2": 3}
LOST = {f"pc2/{number}": HeadState.LOST for number in range(3)}
BROKEN = {f"pc1/{number}": HeadState.QUARANTINED for number in range(7)}
#: Writes down what workers see of their environment.
WORKLOAD = """
import os
from pathlib import Path
from types import MappingProxyType
from workers.workloads.base import StepResult, Workload

class Mine(Workload):
    def step(self, size, batch):
        Path("environment.txt").write_text(repr(dict(os.environ)))
        return StepResult(flop=1.0)

    def release(self):
        pass
"""
SMALL = "nodes: {pc1: {gpu: rtx-3090, workers: 1, vram_per_worker_gib: 1}}\n"


def turn(
    store: RunStore,
    states: Mapping[str, HeadState] = MappingProxyType({}),
    *,
    gone: str = "",
    reason: str = "of it",
) -> None:
    """Store a turn in which slots work that have no state, and a node is gone."""
    troubled = {slot: {"state": state, "reason": reason} for slot, state in states.items()}
    rows = [
        make_row(slot=slot, node=node, gpu_uuid=f"GPU-{node}", **troubled.get(slot, {}))
        for node, slots in NODES.items()
        for slot in (f"{node}/{number}" for number in range(slots))
    ]
    put_turn(store, 10.0, rows, nodes_seen=tuple(node for node in NODES if node != gone))
    store.commit()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN_ID


def begun(folder: Path, **facts: object) -> RunStore:
    """Make the folder of a run whose slots all work."""
    store = begun_run(folder, facts_here(RUN_ID, **facts))
    turn(store)
    return store


@pytest.fixture
def store(folder: Path) -> Iterator[RunStore]:
    made = begun(folder)
    yield made
    made.end("good", 0, None, [])


@pytest.fixture
def told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, str]]]:
    """Return what follows the run without pauses, and lets a step happen after each look."""

    def follow(receiver: Receiver, *steps: Callable[[], object]) -> tuple[int, str]:
        said, waiting = list[str](), [*steps]
        notifier = Notifier(
            folder=folder,
            settings=NotifyConfig(),
            urls=[receiver.json_url(HUSH)],
            say=said.append,
            sleep=lambda _: waiting.pop(0)() if waiting else None,
        )
        return notifier.follow(), "\n".join(said)

    before = signal.getsignal(signal.SIGTERM)
    for name in ("GATHER_S", "BETWEEN_S"):
        monkeypatch.setattr(notify, name, 0.0)
    monkeypatch.setattr(notify, "OVER_S", 1e-9)
    yield follow
    signal.signal(signal.SIGTERM, before)


def holders(folder: Path) -> list[Path]:
    """Return the files that hold a part of an address."""
    parts = (HUSH, "deep-path", "X-Token")
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(part.encode() in path.read_bytes() for part in parts)
    ]


def test_start_node_slots_and_end_are_a_message_each(
    folder: Path, store: RunStore, told: Any
) -> None:
    def end() -> None:
        add_event(store, event(name="run_ended", missed=["pc1/0 ended QUARANTINED"]))
        store.end("degraded", 1, None, [])

    why = "died 5 times in 300 s: \x1b[31mthe card\nis broken"
    with http_receiver() as http:
        code, said = told(
            http,
            partial(turn, store, LOST, gone="pc2"),
            partial(turn, store),
            partial(turn, store, BROKEN, reason=why),
            end,
        )
    first, second, third, fourth, last = ("\n".join(message) for message in http.messages)
    assert first.startswith("0b76: 10 RUNNING\n")
    assert second.startswith("0b76: NodeMissing pc2\n")
    assert "pc2/0" not in second, "its slots went with it"
    assert third.startswith("0b76: over: NodeMissing pc2\n")
    assert fourth.startswith("0b76: SlotQuarantined pc1/0, 6 more\n")
    assert "died 5 times in 300 s: [31mthe card is broken" in fourth
    assert "pc1 RTX 3090: workers 7, " in fourth
    assert last.startswith("0b76: the run has ended: degraded, exit code 1\n")
    assert "\npc1/0 ended QUARANTINED\n" in last
    assert all(f"still: SlotQuarantined {slot}, for" in last for slot in BROKEN)
    assert (code, said.count("  accepted")) == (0, 5)
    assert HUSH not in said + http.text()
    assert holders(folder.parent) == []


def test_a_killed_head_is_told_of_and_the_telling_ends(
    folder: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = KINDS[HEAD_GONE]._replace(lasts_s=0.0)
    monkeypatch.setattr(alerts, "KINDS", {**KINDS, HEAD_GONE: at_once})
    with subprocess.Popen(["sleep", "1000"]) as process, http_receiver() as http:
        begun(folder, head_pid=process.pid, head_started=start_time(process.pid))

        def kill() -> None:
            process.kill()
            process.wait()

        assert told(http, kill)[0] == 0
    (_, (title, body)) = http.messages
    assert title.startswith("0b76: the head is gone")
    assert f"run --resume {RUN_ID}" in body


def test_only_one_process_tells_of_a_run(
    folder: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "LOCK_PATIENCE_S", 0.1)
    second = Notifier(folder=folder, settings=NotifyConfig(), urls=[], say=print)
    with (
        locked(folder / LOCK_NAME, PATIENCE_S),
        pytest.raises(UsageError, match="another process sends messages about run"),
    ):
        second.follow()


def test_what_is_less_severe_than_asked_for_is_not_sent(folder: Path, store: RunStore) -> None:
    store.incomplete = True
    turn(store)
    for severity, is_told in (("warning", True), ("critical", False)):
        settings = NotifyConfig(severity=severity)  # type: ignore[arg-type]  # two of the three
        with http_receiver() as http:
            notifier = Notifier(folder=folder, settings=settings, urls=[http.json_url()], say=print)
            assert notifier.once() == 0
        assert ("still: RecordsIncomplete" in http.text()) is is_told


def test_without_an_answer_the_telling_ends_after_some_tries(
    folder: Path, store: RunStore, told: Any
) -> None:
    store.end("good", 0, None, [])
    with http_receiver(status=500) as http:
        code, said = told(http)
    assert (code, len(http.messages)) == (1, 3)
    assert "failed: " in said
    assert HUSH not in said, "neither in reasons nor in warnings of apprise"


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
    nowhere: Path, urls_file: Path, folder: Path, store: RunStore
) -> None:
    with http_receiver() as http:
        options = typed(nowhere, urls_file, http)
        command = [*COMMAND, "notify", "0b76", *options]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            wait_for(lambda: len(http.messages) == 1, "the first message")
            turn(store, LOST, gone="pc2")
            done = orchestrator("notify", "--once", *options)
            assert done.returncode == 0, done.stderr
            assert "still: NodeMissing pc2" in http.messages[1][1]
            process.send_signal(signal.SIGTERM)
            said, _ = ended(process)
        assert process.returncode == 130, said
    assert HUSH not in said + done.stdout + done.stderr
    assert holders(folder.parent) == []


@pytest.mark.torch
def test_a_run_writes_its_report_and_tells_of_its_end_by_a_process_that_outlives_it(
    nowhere: Path, urls_file: Path
) -> None:
    browser, opened = nowhere / "browser", nowhere / "opened"
    browser.write_text(f"#!/bin/sh\necho $1 >> {opened}\n")
    browser.chmod(0o700)
    shown = {"DISPLAY": ":99", "BROWSER": f"{browser} %s"}
    with http_receiver() as http:
        typed(nowhere, urls_file, http)
        (nowhere / "mine.py").write_text(WORKLOAD, encoding="utf-8")
        (nowhere / "cluster.yaml").write_text(CONFIG, encoding="utf-8")
        run = (*IN_PROCESS, "run", "--duration", "1s", "--workload", "mine:Mine")
        wanted = (*run, "--set", "run.report=true")
        done = python(*wanted, **{URLS_VARIABLE: http.json_url(HUSH), **shown})
        assert done.returncode == 0, done.stderr
        wait_for(lambda: "the run has ended: good, exit code 0" in http.text(), "the end")
        (folder,) = Path("runs").iterdir()
        urls_file.chmod(0o644)
        refused = python(*run, "--set", f"notify.urls_file={urls_file}")
    assert refused.returncode == 2
    assert f"chmod 600 {urls_file}" in refused.stderr
    assert list(Path("runs").iterdir()) == [folder], "it was refused before there was a run"
    report = folder / "report.html"
    assert f"Report: {report}" in done.stderr
    assert "ended: good" in report.read_text(encoding="utf-8")
    wait_for(opened.exists, "the browser")
    assert opened.read_text() == f"{report.resolve().as_uri()}\n"
    wait_for(lambda: "accepted" in (folder / "notify.log").read_text(), "line of the log")
    assert HUSH not in done.stdout + done.stderr + refused.stderr
    assert "PYTHONPATH" in (nowhere / "environment.txt").read_text()
    assert holders(nowhere) == [urls_file], "neither the run nor its workers hold it"
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "good"
