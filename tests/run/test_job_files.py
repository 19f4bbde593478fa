"""The files that a job leaves: done only when they are there, fetched and written again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

from orchestrator.jobs.model import Cause, JobState, Word
from orchestrator.record.events import EventLog
from orchestrator.run.job_files import JobFiles
from tests.jobs.scene import command
from tests.run.jobs_scene import JobsMaker, JobsRun, check_ends, hash_after, short
from tests.scene import spec_of


def blocked(run: JobsRun, name: str) -> Path:
    """Put a file in the way of a job's folder."""
    place = run.queue_folder / "files" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("not a folder")
    return place


def test_a_training_is_done_once_its_files_are_there(new_jobs: JobsMaker) -> None:
    run = new_jobs(short("one", nodes=("pc1",)), short("two", nodes=("pc1",)))
    place = blocked(run, "one")
    run.until_state("one", JobState.PARKED)
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
    run.until_state("one", JobState.PARKED)
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
    run.until_state("one", JobState.PARKED)
    run.say(Word.CANCEL, "one")
    assert run.finish()["one"].state is JobState.CANCELLED


@pytest.mark.torch
def test_a_model_that_cannot_be_exported_fails_with_weights(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", unix_s=lambda: 0.0)
    files = JobFiles(tmp_path / "jobs", one_machine=True, events=log)
    state = tmp_path / "states" / "one.pt"
    state.parent.mkdir()
    state.write_text("no checkpoint")
    spec = spec_of()
    spec = replace(spec, workload=replace(spec.workload, settings={"model": str(tmp_path)}))
    end = None, ""
    while end[0] is None:
        sleep(0.05)
        end = files.end_of(short("one"), 1, spec, 0.0)
    assert end[0] is Cause.EXCEPTION
    assert str(files.of("one")) in end[1]
    assert (files.of("one") / "checkpoint.pt").read_text() == state.read_text()
    log.close()


def test_what_a_remote_program_left_is_fetched_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", unix_s=lambda: 0.0)
    files = JobFiles(tmp_path / "jobs", one_machine=False, events=log)  # and there is no cluster

    def why(now_s: float) -> str:
        while (end := files.end_of(command("one"), 1, spec_of(), now_s))[0] is None:
            if "one" in files.problems:
                return end[1]
            sleep(0.05)
        return str(end[0])

    assert str(files.of("one")) in why(0.0)
    assert str(files.of("one")) in why(61.0)
    assert (files.of("one")).rmdir() is None
    files.of("one").write_text("in the way")
    files.problems.clear()
    assert "File exists" in why(62.0), "it was tried again"
    log.close()
