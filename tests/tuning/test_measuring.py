"""How many arms of a tuning live at the same time: as many as their parked states leave the host's memory for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from orchestrator.tuning.journal import Journal
from orchestrator.tuning.levers import Candidate
from orchestrator.tuning.measuring import BaselineError, Clock, Measuring, Plan
from orchestrator.tuning.rounds import BASELINE
from workers.tuning.messages import Opened

GIB = 2**30
#: gpt2-small in fp32: weights, sums of gradients and two moments.
PARKED_BYTES = 4 * 475 * 2**20


def waves(folder: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> list[int]:
    """Return how many candidates of 20 live at the same time, wave by wave."""
    opened = Opened(parked_bytes=PARKED_BYTES)
    plan = Plan(budget_s=60, turn_s=1, least_steps=1, resolve=0.1, confidence=0.95, at_once=20)
    journal = Journal(folder)
    journal.note_opened(BASELINE, opened, 0.0)
    measuring = Measuring(plan, journal, Clock(0.0), lambda *_: None, lambda _: None)  # type: ignore[arg-type, return-value]
    sizes: list[int] = []

    def wave(_name: str, wave: Sequence[Candidate], *_: Any) -> None:  # noqa: ANN401
        sizes.append(len(wave))

    monkeypatch.setattr(measuring, "_wave", wave)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_bytes))
    candidates = [Candidate(lever=f"lever {number}", setting="on", changes={}) for number in range(20)]
    measuring.run("singles", candidates, 10.0)
    return sizes


def test_parked_arms_fit_half_of_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = waves(tmp_path, monkeypatch, 60 * GIB)
    assert sum(sizes) == 20
    assert (max(sizes) + 2) * PARKED_BYTES <= 30 * GIB
    assert len(sizes) == 2


def test_memory_for_less_than_three_arms_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaselineError, match=r"an arm takes 2\.1 GiB of host memory .* and 4\.0 GiB are free for at"):
        waves(tmp_path, monkeypatch, 4 * GIB)
