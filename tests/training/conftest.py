"""Each module here computes with one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """See `one_thread`."""
