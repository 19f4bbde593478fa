"""Each recovery collects garbage, and all that torch has loaded makes it a long search."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_is_new() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
