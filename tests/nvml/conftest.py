"""Scripted cards for this process, by the stub of nvidia-ml-py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.cards import STUB, script_cards
from workers.host import machine, processes
from workers.nvml import queries, sensors

#: Gives this process the cards that it is called with; called again, others.
Script: TypeAlias = Callable[..., None]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what asks NVML in this process ask the stub, without a driver at first."""
    monkeypatch.syspath_prepend(str(STUB))
    monkeypatch.delitem(sys.modules, "pynvml")
    module = importlib.import_module("pynvml")
    for asking in (queries, sensors, machine, processes):
        monkeypatch.setattr(asking, "pynvml", module)


@pytest.fixture
def script(stub: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """Return what writes the script of the stub."""
    path = tmp_path / "cards.json"
    monkeypatch.setenv("NVML_SCRIPT", str(path))

    def write(*cards: dict[str, object], **more: object) -> None:
        script_cards(path, *cards, **more)

    write()
    return write
