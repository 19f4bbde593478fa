"""How often Python looks for cycles of garbage while a run goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects that may be made for each slot between two collections. Reports leave no cycles behind, so a head of many
#: slots would spend a quarter of its time on looking for them in vain.
_OBJECTS_PER_SLOT = 20


@contextmanager
def adapted(slots: int) -> Iterator[None]:
    """Collect as often as a run of so many slots needs; what was loaded before it is not looked at."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(before[0], _OBJECTS_PER_SLOT * slots), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
