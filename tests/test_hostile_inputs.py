"""Hostile command lines, configurations and run folders are refused in words; 300 are tried by hand."""

from __future__ import annotations

import pytest

from tests.hostile_inputs import judged

pytestmark = pytest.mark.slow


def test_hostile_inputs_are_refused_in_words() -> None:
    assert [(one.kind, one.words, found) for one, _, found in judged(38, 60) if found] == []
