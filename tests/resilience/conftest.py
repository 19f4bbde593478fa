"""Makes recoveries fast: each one collects garbage, which is slow with all objects of torch."""

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
