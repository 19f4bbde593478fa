"""Which queue `jobs run` goes on with, and what other screens say of one whose head is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.cli.jobs import _queue_before
from orchestrator.errors import UsageError
from orchestrator.record.archive import read_run
from orchestrator.record.folders import command_for, go_on_command
from orchestrator.run.resume import environment_of
from tests.jobs.scene import training
from tests.run.jobs_scene import JobsRun

RUN_ID = "20261126-010203-0b76"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[JobsRun]:
    (tmp_path / "runs" / RUN_ID).mkdir(parents=True)
    made = JobsRun(tmp_path / "runs" / RUN_ID, training("one", steps=40))
    yield made
    made.die()


def test_who_stays_waits_in_the_queue_that_is_over(run: JobsRun) -> None:
    run.finish()
    mode = read_run(run.folder).facts.mode
    assert _queue_before(run.folder.parent) is None
    stored = _queue_before(run.folder.parent, mode)
    assert stored is not None
    assert stored.folder == run.folder
    assert environment_of(stored, stays=True).config.run.duration == "365d"
    with pytest.raises(UsageError, match="finished all that there was to do"):
        environment_of(stored)
    assert _queue_before(run.folder.parent, "another") is None


def test_another_head_goes_on_with_a_queue_by_jobs_run(run: JobsRun) -> None:
    runs = run.folder.parent
    assert go_on_command(run.folder) == f"python -m orchestrator jobs run --run-dir {runs}"
    (runs / "20261127-010203-0b76" / "jobs").mkdir(parents=True)
    assert f"run --resume {RUN_ID} " in go_on_command(run.folder), "that is not the newest"
    assert f"jobs results --run {RUN_ID} " in command_for(run.folder, "jobs", "results")
