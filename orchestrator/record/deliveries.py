"""How many notifications of a run were taken or failed, as a small file in its folder.

`notify` counts, metrics read. It holds no addresses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from workers.files import read_small, replace_whole

DELIVERIES_NAME: Final = "notifications.json"

_MOST_BYTES: Final = 4096


class Deliveries(NamedTuple):
    """Messages times addresses, over all processes that told of the run."""

    taken: int = 0
    failed: int = 0


def read_deliveries(folder: Path) -> Deliveries:
    """Return what was counted; zeros where nothing was, or where the file makes no sense."""
    try:
        told = json.loads(read_small(folder / DELIVERIES_NAME, _MOST_BYTES))
        counts = [told[name] for name in Deliveries._fields]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return Deliveries()
    return (
        Deliveries(*counts)
        if all(type(count) is int and count >= 0 for count in counts)
        else Deliveries()
    )


def write_deliveries(folder: Path, deliveries: Deliveries) -> None:
    """Write the counts; `OSError` where that is not possible."""
    replace_whole(folder / DELIVERIES_NAME, json.dumps(deliveries._asdict()) + "\n")
