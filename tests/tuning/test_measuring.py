"""How many arms of a tuning live at the same time: as many as their parked states leave the host's memory for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from orchestrator.lab.tune.arms import BASELINE
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import BaselineError, Journal, Measuring, Plan, arms_at_once
from workers.tuning.messages import Opened

GIB = 2**30
#: gpt2-small in fp32: weights, sums of gradients and two moments.
PARKED_BYTES = 4 * 475 * 2**20


def test_parked_arms_fit_half_of_the_free_memory() -> None:
    at_once = arms_at_once(20, PARKED_BYTES, 60 * GIB)
    assert (at_once + 2) * PARKED_BYTES <= 30 * GIB < (at_once + 4) * (PARKED_BYTES + 250 * 2**20)
    assert arms_at_once(3, PARKED_BYTES, 60 * GIB) == 3


def test_memory_for_less_than_three_arms_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.opened[BASELINE] = Opened(parked_bytes=PARKED_BYTES)
    plan = Plan(budget_s=60, turn_s=1, least_steps=1, resolve=0.1, confidence=0.95, at_once=20)
    measuring = Measuring(plan, journal, lambda *_: None, lambda _: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * GIB))
    with pytest.raises(
        BaselineError, match=r"an arm takes 2\.1 GiB of host memory .* and 4\.0 GiB are free for at"
    ):
        measuring.run(
            "singles", [Candidate(lever="lever", setting="on", changes={})], 10.0, lambda _: False
        )
