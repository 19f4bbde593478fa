"""The files of a finished job: it is DONE only when they exist, fetched and written again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import sleep

import psutil
import pytest

from orchestrator.jobs.model import JobOrder, JobState
from orchestrator.record.events import EventLog
from orchestrator.run import job_files
from orchestrator.run.job_files import JobFiles
from tests.jobs.scene import command
from tests.run.jobs_scene import JobsMaker, JobsRun, check_ends, hash_after, short
from tests.scene import PATIENCE_S, ROOT, python, spec_of


def blocked(run: JobsRun, name: str) -> Path:
    """Make a file at the path of a job's folder."""
    place = run.queue_folder / "files" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("not a folder")
    return place


def test_a_training_is_done_once_its_files_are_there(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", nodes=("pc1",)), short("two", nodes=("pc1",)))
    place = blocked(run, "one")
    run.until_state("one", JobState.SAVING)
    run.until_state("two", JobState.RUNNING)  # on the card that the first job has released
    run.until(run.clock.now_s - run.fleet.began_s + 1.0)
    assert str(place) in run.standing("one").reason
    assert any(str(place) in notice for notice in run.supervisor.snapshot().notices)
    run.until_state("two", JobState.DONE)
    assert run.standing("one").state is not JobState.DONE
    place.unlink()
    run.finish()
    check_ends(run)
    assert (place / "checkpoint.pt").read_text().split() == ["100", hash_after("one", 100)]
    assert not (run.folder / "states" / "one.pt").exists()


def test_the_next_head_completes_what_was_not_written(new_jobs: JobsMaker) -> None:
    asked = False
    run = new_jobs(short("one"), interrupted=lambda: asked)
    place = blocked(run, "one")
    run.until_state("one", JobState.SAVING)
    asked = True
    run.finish()
    assert (run.folder / "states" / "one.pt").exists()
    place.unlink()
    run = new_jobs.next_head(run)
    run.finish()
    check_ends(run)
    assert (place / "checkpoint.pt").exists()


def test_a_job_whose_files_cannot_be_written_is_cancelled(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one"))
    blocked(run, "one")
    run.until_state("one", JobState.SAVING)
    run.say(JobOrder.CANCEL, "one")
    assert run.finish()["one"].state is JobState.CANCELLED


#: A head whose job has an export that hangs: opening its checkpoint waits for another process.
HANGS = """
import os, sys, time
from pathlib import Path
import psutil
from tests.run.test_job_files import exporting
files, left_by = exporting(Path(sys.argv[1]))
os.mkfifo(files.of("one").parents[2] / "states" / "one.pt")
assert left_by() is None
while not (children := psutil.Process().children()):
    time.sleep(0.05)
print(children[0].pid)
"""


def exporting(folder: Path) -> tuple[JobFiles, Callable[[], tuple[JobState, str] | None]]:
    """Return the files of a queue, and a function that asks for the state of its job's files."""
    log = EventLog(folder / "events.jsonl", unix_s=lambda: 0.0)
    files = JobFiles(folder / "jobs", one_machine=True, events=log)
    (folder / "states").mkdir()
    spec = spec_of()
    spec = replace(
        spec, slot="one", workload=replace(spec.workload, settings={"model": str(folder)})
    )
    return files, lambda: files.left_by(short("one"), 1, lambda: spec, 0.0)


@pytest.mark.torch
@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_an_export_that_hangs_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    files, left_by = exporting(tmp_path)
    state = tmp_path / "states" / "one.pt"
    if how == "hangs":
        monkeypatch.setattr(job_files, "_EXPORT_MOST_S", 1.0)
        os.mkfifo(state)
    else:
        state.write_text("no checkpoint")
    while (left := left_by()) is None:
        sleep(0.05)
    files._events.close()
    assert (left[0], str(files.of("one")) in left[1]) == (JobState.FAILED, True)
    assert "; its weights are in checkpoint.pt" in left[1]
    assert ("it took longer than 1 s" in left[1]) == (how == "hangs")
    assert (files.of("one") / "checkpoint.pt").samefile(state)


@pytest.mark.torch
def test_a_head_ends_while_an_export_hangs_and_so_does_the_export(tmp_path: Path) -> None:
    done = python("-c", HANGS, str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(PATIENCE_S)


def test_what_a_remote_program_left_is_fetched_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", unix_s=lambda: 0.0)
    files = JobFiles(tmp_path / "jobs", one_machine=False, events=log)  # and there is no cluster

    def why(now_s: float) -> str:
        while (left := files.left_by(command("one"), 1, spec_of, now_s)) is None:
            sleep(0.05)
        assert left[0] is JobState.SAVING
        return left[1]

    assert str(files.of("one")) in why(0.0)
    assert str(files.of("one")) in why(61.0)
    assert (files.of("one")).rmdir() is None
    files.of("one").write_text("in the way")
    assert "File exists" in why(122.0), "it was tried again"
    log.close()
