"""The fake NVML, built once, and fresh interpreters that read a card through it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.scene import ROOT, python
from workers.nvml.fake.script import prepare
from workers.settings import FakeSensors

#: Does steps one after the other in a process of its own, and prints what each reading and answer
#: was.
CHILD = """
import json, sys
from dataclasses import asdict
import pynvml
from workers.host.machine import look_at_cards, visible_cards
from workers.nvml import queries
from workers.nvml.fake import load
from workers.nvml.sensors import open_sampler
from workers.settings import FakeSensors

def ask(function, *arguments):
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        return str(error)

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
        told.append(ask("nvmlDeviceGetCount"))
    elif verb == "cards":
        told.append([asdict(card) for card in queries.cards()])
    elif verb == "once":
        used = queries.card_used_bytes(argument), queries.process_used_bytes(argument)
        told.append([*used, queries.driver_version()])
    elif verb == "shown":
        total = queries.cards()[0].total_bytes, visible_cards()[0].total_bytes
        told.append([*total, queries.card_used_bytes("0"), queries.card_free_bytes("0")])
    elif verb == "facts":
        told.append(asdict(look_at_cards()))
    elif verb == "ask":
        with queries.opened():
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            told.append([ask(*[handle if word == "card" else word for word in words]) for words in argument])
print(json.dumps(told))
"""

Step: TypeAlias = tuple[str, Any]


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
    """Do the steps in a fresh interpreter that knows only what is installed.

    Return what was told.
    """

    def told(*steps: Step, **environment: str) -> list[Any]:
        done = python("-c", CHILD, json.dumps(steps), cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return told


@pytest.fixture
def heat(library_folder: Path) -> FakeSensors:
    """The script that ships with the project, made ready."""
    return prepare(ROOT / "scripts" / "heat.json", library_folder)
