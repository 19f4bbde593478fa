"""The verbs of `jobs` on the queue of a dead head, and the queue that `jobs run` continues."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.jobs import _unfinished_queue
from orchestrator.control.queue import waiting
from orchestrator.errors import UsageError
from orchestrator.jobs.model import Job, JobOrder, JobState, Standing, Submitted, UserOrder
from orchestrator.record.archive import read_run
from orchestrator.record.folders import command_for, go_on_command
from orchestrator.record.jobs import queue_snapshot
from orchestrator.record.output import OutputFiles
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.run.resume import environment_of
from tests.cli.conftest import Command
from tests.factories import FACTS, begun_run, make_job, make_standing, store_queue
from tests.jobs.scene import training
from tests.run.jobs_scene import JobsRun
from tests.scene import COMMAND, ROOT, ended, wait_for

RUN_ID = "20261126-010203-0b76"
NIGHT = ROOT / "docs" / "jobs.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run with a queue of two jobs in an empty folder, and change to it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "cluster.yaml", tmp_path)
    queue = tmp_path / "runs" / RUN_ID / "jobs"
    store_queue(queue, begun(make_job("lr-0")), make_standing("lr-1"))
    return queue


def begun(job: Job) -> Standing:
    return make_standing(job.name, "RUNNING", job=job, attempt=1, last_card="pc1")


@pytest.mark.usefixtures("folder")
def test_the_list_shows_every_job_and_that_the_head_is_dead(command: Command) -> None:
    done = command("jobs", "list")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["lr-0", "PARKED"], ["lr-1", "QUEUED"]]
    assert "its head is not running" in lines[-1]


def test_a_queue_goes_on_only_where_it_was_begun(command: Command, folder: Path) -> None:
    store = begun_run(folder.parent, replace(FACTS, run_id=RUN_ID, mode="rehearse"))
    store.commit()
    Path("cluster.yaml").unlink()  # a rehearsal needs none
    Path("more.yaml").write_text("jobs: [{name: more, command: ['true']}]")
    done = command("jobs", "run", "more.yaml")
    assert done.returncode == 2
    said = f"the unfinished queue of run {RUN_ID} is one of --rehearse; continue it: python -m"
    assert said in done.stderr


def test_a_queue_without_a_cluster_can_be_begun_again(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "cluster.yaml", tmp_path)
    Path("q.yaml").write_text("jobs: [{name: a, command: ['true']}]")
    nowhere = ("--set", "cluster.address=127.0.0.1:1")
    for typed, runs in ((("q.yaml",), 1), (("q.yaml",), 2), ((), 2)):
        done = command("jobs", "run", *typed, *nowhere)
        assert (done.returncode, len(list(Path("runs").iterdir()))) == (3, runs), done.stderr


def test_a_command_is_submitted_with_its_folder_and_code(command: Command, folder: Path) -> None:
    done = command("jobs", "submit", "--name", "ev", "--", "python", "train.py", "--lr", "3e-4")
    assert done.returncode == 0, done.stderr
    assert "submitted to run 20261126-010203-0b76: ev\n2 unfinished before it" in done.stdout
    (record,) = waiting(folder)
    assert isinstance(record, Submitted)
    assert record.job.command is not None
    assert record.job.command.argv == ("python", "train.py", "--lr", "3e-4")
    assert record.job.command.cwd == str(Path.cwd())
    assert record.job.code is not None


def test_a_job_that_was_not_taken_is_listed_and_its_name_is_taken(
    command: Command, folder: Path
) -> None:
    command("jobs", "submit", "--name", "ev", "--", "true")
    assert "the head has not processed it yet" in command("jobs", "show", "ev").stdout
    again = command("jobs", "submit", "--name", "ev", "--", "false")
    assert again.returncode == 2
    Path("lr.yaml").write_text("jobs: [{name: lr, command: 'x {n}', sweep: {over: {n: [1, 2]}}}]")
    said = command("jobs", "submit", "lr.yaml").stderr
    assert "lr.yaml:1: the queue has another job lr-0" in said
    Path("same.yaml").write_text("jobs: [{name: more, command: ['true']}]")
    command("jobs", "submit", "same.yaml")
    assert "in the queue already" in command("jobs", "submit", "same.yaml").stdout
    assert len(waiting(folder)) == 2


@pytest.mark.parametrize("section", [0, 1])
@pytest.mark.torch
@pytest.mark.usefixtures("folder")
def test_the_commands_of_the_documents_can_be_typed(command: Command, section: int) -> None:
    """Except `jobs run`, which needs a cluster."""
    page = NIGHT.read_text(encoding="utf-8").replace("gpt2-small", "gpt-nano")  # sooner planned
    (night,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    Path("night.yaml").write_text(night)
    Path("more.yaml").write_text("jobs: [{name: more, command: ['true']}]")
    block = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[section]
    for line in block.replace("lr-2", "lr-1").splitlines():
        words = shlex.split(line, comments=True)[3:]
        if words[:2] == ["jobs", "run"]:
            continue
        done = command(*words)
        assert done.returncode == 0, (line, done.stderr)
    assert len(night.splitlines()) <= 25


@pytest.mark.parametrize("order", list(JobOrder))
def test_a_word_about_jobs_waits_for_the_head(
    command: Command, folder: Path, order: JobOrder
) -> None:
    said = command("jobs", order.value, "lr-1", "lr-0", "lr-1").stdout
    records = [record for record in waiting(folder) if isinstance(record, UserOrder)]
    assert [(one.order, one.job) for one in records] == [(order, "lr-1"), (order, "lr-0")]
    assert said.startswith(f"{order}: lr-1, lr-0, in the queue of run {RUN_ID}\n")


@pytest.mark.usefixtures("folder")
def test_the_list_shows_what_was_said_while_the_head_is_dead(command: Command) -> None:
    command("jobs", "hold", "lr-0", "lr-1")
    lines = command("jobs", "list").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["lr-0", "HELD"], ["lr-1", "HELD"]]
    command("jobs", "release", "lr-1")
    command("jobs", "hold")
    assert "lr-1  QUEUED" in (shown := command("jobs", "list").stdout)
    assert "the queue is held: " in shown
    command("jobs", "release")
    assert "the queue is held: " not in command("jobs", "list").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "lr-9"), "did you mean lr-"),
        (("cancel", "\x1b[2Jx"), "there is no job"),
        (("list", "--run", "beef"), "there is no run 'beef'"),
        (("list", "--run-dir", "elsewhere"), "`python -m orchestrator jobs run FILE` begins one"),
        (("submit",), "Missing argument"),
        (("submit", "none.yaml"), "none.yaml: no such file"),
        (("submit", "-c", "cluster.yaml", "no.yml"), "no.yml: no such file"),
        (("submit", "--", "echo hi | wc"), "no shell reads it"),
        (("submit", "--prioritty", "3", "--", "echo", "hi"), "No such option"),
        (("submit", "python", "train.py", "--lr", "1"), "No such option: --lr"),
        (("submit", "--name", "x", "none.yaml"), "is a job file"),
        (("submit", "--wait", "two.yaml"), "--wait is for one job"),
        (("submit", "--wait", "--json", "--", "true"), "--wait is for one job"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_is_one_sentence(
    command: Command, words: tuple[str, ...], said: str
) -> None:
    Path("two.yaml").write_text("jobs: [{name: a, command: [x]}, {name: b, command: [x]}]")
    done = command("jobs", *words)
    assert done.returncode == 2
    assert said in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("words", [("list",), ("run",), ("submit", "--", "true")])
def test_a_queue_of_an_earlier_version_is_refused_with_what_to_do(
    command: Command, folder: Path, words: tuple[str, ...]
) -> None:
    with closing(sqlite3.connect(folder.parent / STORE_NAME)) as store:
        store.execute("PRAGMA user_version = 2")
    done = command("jobs", *words)
    assert done.returncode == 2
    assert "was written by another version of this program" in done.stderr
    assert "`jobs run FILE --new`" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_the_head_expects_is_shown_of_jobs_that_wait(folder: Path) -> None:
    store = RunStore(folder.parent / STORE_NAME)
    store.outlook({"lr-1": ("pc1 is taken", 9.0), "lr-0": ("must not be shown", None)})
    store.close()
    picture = queue_snapshot(folder.parent, (), 0.0)
    assert picture is not None
    shown = {one.job.name: (one.reason, one.expected_start_s) for one in picture.standings}
    assert shown["lr-1"] == ("pc1 is taken", 9.0)
    assert shown["lr-0"][0] != "must not be shown"


def test_an_interrupted_wait_leaves_the_job_as_it_is(folder: Path) -> None:
    words = [*COMMAND, "jobs", "submit", "--wait", "--name", "ev", "--", "true"]
    waits = subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert waits.stderr is not None
    assert "submitted to run" in waits.stderr.readline()
    assert "the queue waits for a head: `python -m" in waits.stderr.readline()
    waits.send_signal(signal.SIGINT)
    out, said = ended(waits)
    assert (waits.returncode, out) == (130, "")
    assert "ev continues; to see it: python -m orchestrator jobs show ev" in said
    assert [record.job.name for record in waiting(folder) if isinstance(record, Submitted)] == [
        "ev"
    ]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"state": JobState.DONE, "exit_code": 0}, 0),
        ({"state": JobState.FAILED, "exit_code": 7}, 7),
        ({"state": JobState.FAILED}, 1),
    ],
)
def test_a_wait_prints_what_the_job_prints_and_has_its_exit_code(
    folder: Path, end: dict[str, Any], code: int
) -> None:
    """The test itself stores the queue as a head would."""
    words = [*COMMAND, "jobs", "submit", "--wait", "--name", "ev", "--", "true"]
    waits = subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = OutputFiles(folder.parent)
    try:
        (record,) = wait_for(lambda: waiting(folder), "message")
        assert isinstance(record, Submitted)
        store_queue(folder, begun(record.job))
        output._add(folder.parent / "output" / "ev.log", b"one\ntw")
        assert waits.stdout is not None
        first = waits.stdout.readline()
        assert first == "one\n", ended(waits)
        output._add(folder.parent / "output" / "ev.log", b"o\nthree")
        store_queue(folder, replace(begun(record.job), reason="so it ended", **end))
        out, said = ended(waits)
    finally:
        waits.kill()
    assert (waits.returncode, out) == (code, "two\nthree")
    assert said.splitlines()[-1].startswith("ev is ")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[JobsRun]:
    (tmp_path / "runs" / RUN_ID).mkdir(parents=True)
    made = JobsRun(tmp_path / "runs" / RUN_ID, training("one", steps=40))
    yield made
    made.die()


def test_who_stays_waits_in_the_queue_that_is_over(run: JobsRun) -> None:
    run.finish()
    mode = read_run(run.folder).facts.mode
    assert _unfinished_queue(run.folder.parent) is None
    stored = _unfinished_queue(run.folder.parent, mode)
    assert stored is not None
    assert stored.folder == run.folder
    assert environment_of(stored, stays=True).config.run.duration == "365d"
    with pytest.raises(UsageError, match="finished all that there was to do"):
        environment_of(stored)
    assert _unfinished_queue(run.folder.parent, "another") is None


def test_another_head_goes_on_with_a_queue_by_jobs_run(run: JobsRun) -> None:
    runs = run.folder.parent
    assert go_on_command(run.folder) == f"python -m orchestrator jobs run --run-dir {runs}"
    (runs / "20261127-010203-0b76" / "jobs").mkdir(parents=True)
    assert f"run --resume {RUN_ID} " in go_on_command(run.folder), "that is not the newest"
    assert f"jobs results --run {RUN_ID} " in command_for(run.folder, "jobs", "results")
