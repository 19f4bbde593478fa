"""A data set in RAM, kept as its batches are made for the first time; later epochs are served from
it.

Rows are kept as they are in a batch, so a batch from RAM has the same bits. Does not decide whether
there is room (see `loader_numbers`), and cannot keep rows whose shape changes from batch to batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from workers.training import host_memory


class RamCache:
    """The rows of all items, by their index."""

    def __init__(self, items: int) -> None:
        self._items = items
        self._seen = torch.zeros(items, dtype=torch.bool)
        self._rows: Any = None
        self.failed = False
        """Whether rows of different shapes have come, or there was no memory after all; then
        nothing is kept.
        """
        self.complete = False
        """Whether all items are here."""

    def keep(self, indices: Sequence[int], batch: Any) -> None:  # noqa: ANN401 - any batch
        """Keep the rows of a batch."""
        if self.failed:
            return
        try:
            rooms = tree_map(self._room_for, batch) if self._rows is None else self._rows
        except (RuntimeError, OSError, OverflowError):
            self.failed = True
            return
        pairs = list(zip(tree_leaves(rooms), tree_leaves(batch), strict=False))
        if any(
            room.shape[1:] != rows.shape[1:] or room.dtype != rows.dtype for room, rows in pairs
        ):
            self._rows, self.failed = None, True
            return
        places = torch.tensor(indices)
        for room, rows in pairs:
            room[places] = rows
        self._rows = rooms
        self._seen[places] = True
        self.complete = bool(self._seen.all())

    def batch(self, indices: Sequence[int], *, pin: bool) -> Any:  # noqa: ANN401 - any batch
        """Return a batch of rows that are all here."""
        places = torch.tensor(indices)

        def rows_of(room: Tensor) -> Tensor:
            rows = room[places]
            return rows.pin_memory() if pin else rows

        return tree_map(rows_of, self._rows)

    def _room_for(self, rows: Tensor) -> Tensor:
        # Memory that the cap of a worker on a CPU does not count, and that is taken page by page as
        # rows come.
        return host_memory.like(
            torch.empty((self._items, *rows.shape[1:]), dtype=rows.dtype, device="meta")
        )


def row_bytes(batch: Any) -> int | None:  # noqa: ANN401 - any batch
    """Return the bytes of a row of a batch.

    `None`: not all of it is tensors of so many rows, so it cannot be kept.
    """
    leaves = tree_leaves(batch)
    if not leaves or not all(
        isinstance(each, Tensor) and each.dim() and len(each) for each in leaves
    ):
        return None
    if len({len(each) for each in leaves}) > 1:
        return None
    return sum(int(each.nbytes) // len(each) for each in leaves)
