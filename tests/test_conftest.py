"""What `conftest.py` promises of every test: examples are the same whatever else has been imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def test_a_module_that_was_imported_changes_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis would draw the numbers that stand in it."""
    (tmp_path / "full_of_numbers.py").write_text(f"NUMBERS = {list(range(10**6, 10**6 + 400))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    drawn: list[int] = []

    @settings(max_examples=200, derandomize=True, database=None)
    @given(st.integers())
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    before = drawn.copy()
    drawn.clear()
    importlib.import_module("full_of_numbers")
    draw()
    assert drawn == before
