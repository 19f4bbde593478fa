"""Fixtures for runs on a scripted fleet, which are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run.jobs_scene import JobsMaker
from tests.run.scene import Run

RunMaker = Callable[..., Run]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[RunMaker]:
    """Make a run in a fresh folder; see `Run`, or another `kind`."""
    runs: list[Run] = []

    def make(**settings: Any) -> Run:
        folder = settings.pop("folder", tmp_path / f"run{len(runs)}")
        folder.mkdir(exist_ok=True)
        kind: type[Run] = settings.pop("kind", Run)
        runs.append(kind(folder, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def new_jobs(tmp_path: Path) -> Iterator[JobsMaker]:
    maker = JobsMaker(tmp_path)
    yield maker
    for run in maker.runs:
        run.die()
