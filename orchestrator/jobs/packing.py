"""What jobs get of a card that they share.

Does not say which jobs may share one (`pack: true` does), and measures nothing. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from workers.units import MIB

#: A packed job gets what was measured for it, and this share more, or `RESERVE_BYTES` if that is
#: more: an allocator fragments, and the next long sequence takes more than the last.
RESERVE: Final = 0.10
RESERVE_BYTES: Final = 256 * MIB


def packed_budgets(measured: Sequence[int | None], room_bytes: int) -> tuple[int, ...] | None:
    """Return the budgets of jobs that share a card, from the most that each has taken.

    `None` where one of them was never measured, or where their sum is more than the card's room.
    """
    budgets = tuple(
        each + max(RESERVE_BYTES, math.ceil(each * RESERVE))
        for each in measured
        if each is not None
    )
    return budgets if len(budgets) == len(measured) and sum(budgets) <= room_bytes else None
