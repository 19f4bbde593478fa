"""The bench of the checks, with arguments so small that only its mechanics are tested."""

from __future__ import annotations

import pytest
from benches import verify

from workers.verification.freivalds import Tolerance, tolerance


def test_it_counts_checks_and_flips() -> None:
    result = verify.run(checks=200, flips=1, seed=3, device="cpu", dtypes=["bf16", "fp32"])
    figures = result.figures
    assert result.broken == []
    assert (
        figures["checks"]
        == sum(row["freivalds"] + row["repeat"] for row in figures["rounds"])
        >= 200
    )
    assert figures["false_alarms"] == 0
    assert 0 < figures["largest_ratio"] < 1
    flipped = {(row["dtype"], row["bits"]): row for row in figures["flips"]}
    assert flipped["bf16", "exponent"]["flips"] == 2 * 8  # of two sizes
    assert {row["by_repeat"] for row in flipped.values()} == {1.0}
    assert {row["large_by_freivalds"] for row in flipped.values()} == {1.0}


def test_it_tells_of_false_alarms_and_of_missed_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "workers.verification.freivalds.tolerance", lambda *given: _scaled(tolerance(*given), 1e-4)
    )
    alarmed = verify.run(checks=20, flips=1, seed=3, device="cpu", dtypes=["fp32"])
    assert alarmed.figures["false_alarms"] > 0
    assert "a right product was refused: fp32" in alarmed.broken[0]
    monkeypatch.setattr(
        "workers.verification.freivalds.tolerance", lambda *given: _scaled(tolerance(*given), 1e4)
    )
    missed = verify.run(checks=20, flips=1, seed=3, device="cpu", dtypes=["fp32"])
    assert any("Freivalds missed bit" in sentence for sentence in missed.broken)


def _scaled(allowed: Tolerance, factor: float) -> Tolerance:
    return Tolerance(
        stored=allowed.stored * factor, summed=allowed.summed * factor, least=allowed.least * factor
    )
