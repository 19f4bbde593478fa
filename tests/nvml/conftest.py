"""The fake NVML, built once, and fresh interpreters that read a card through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from workers.nvml.fake.prepare import prepare
from workers.settings import FakeSensors

#: Does steps one after the other in a process of its own, and prints what each reading and answer was.
CHILD = """
import json, sys
from dataclasses import asdict
import pynvml
from workers.nvml import queries
from workers.nvml.fake.library import load
from workers.settings import FakeSensors
from workers.nvml.sampler import open_sampler

sampler, told = None, []
for verb, argument in json.loads(sys.argv[1]):
    if verb == "load":
        load(FakeSensors(**argument))
    elif verb == "open":
        sampler = open_sampler("cuda", argument)
    elif verb == "read":
        reading = sampler.sample_if_due(argument)
        told.append(None if reading is None else asdict(reading))
    elif verb == "close":
        sampler.close()
        try:
            pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            told.append(str(error))
    elif verb == "cards":
        told.append([asdict(card) for card in queries.cards()])
    elif verb == "once":
        questions = (queries.card_used_bytes, queries.process_used_bytes, queries.driver_version)
        told.append([question(argument) for question in questions])
print(json.dumps(told))
"""

Step: TypeAlias = tuple[str, Any]


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library is built. Without a C compiler this fails, and so does every test that needs it."""
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture
def scene(library_folder: Path, tmp_path: Path) -> Callable[..., Step]:
    """Make ready a script of some cards; return the step that loads it."""
    numbers = count()

    def ready(*cards: dict[str, Any], elapsed_s: float = 0.0, **script: object) -> Step:
        path = tmp_path / f"{tmp_path.name}-{next(numbers)}.json"
        path.write_text(json.dumps({"cards": cards, **script}))
        return "load", asdict(prepare(path, library_folder, elapsed_s=elapsed_s))

    return ready


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., list[Any]]:
    """Do the steps in a fresh interpreter that knows only what is installed; return what was told."""

    def told(*steps: Step, **environment: str) -> list[Any]:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(steps)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return told


@pytest.fixture
def heat(library_folder: Path) -> FakeSensors:
    """The script that ships with the project, made ready."""
    return prepare(Path(__file__).parents[2] / "scripts" / "heat.json", library_folder)
