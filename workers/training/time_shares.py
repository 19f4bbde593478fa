"""Shares of a training's time that every status reports. Records no trace of kernels."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch

Part: TypeAlias = Literal["copies", "optimizer"]
"""Work whose time is measured. `copies`: parts of batches from the host to the device. `optimizer`:
norm of the gradient, clipping, the update of the weights, and their average.
"""


class TimeShares:
    """Measures the shares of a training's time for copies to the device and for the optimiser.

    On a card the time between two events in its stream is used, so measuring does not wait for the
    card; on a CPU wall-clock time is used. Does not count the wait for data (see `loader`), nor
    copies that torch makes inside a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began_s: float | None = None
        self._sums_s: dict[Part, float] = {"copies": 0.0, "optimizer": 0.0}
        self._on_card: deque[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Add the time of the `with` block to `part`; on a card only if the block succeeds."""
        began_s = time.perf_counter()
        self._began_s = began_s if self._began_s is None else self._began_s
        if self._device.type != "cuda":
            try:
                yield
            finally:
                self._sums_s[part] += time.perf_counter() - began_s
            return
        stream = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # no types here
        began.record(stream)
        # Not in `finally`: after an error the card may refuse even an event.
        yield
        ended.record(stream)
        self._on_card.append((part, began, ended))
        self._collect()

    def pct(self, part: Part) -> float | None:
        """Return the share of the time since the first measurement; `None`: there was none."""
        if self._began_s is None:
            return None
        self._collect()
        elapsed_s = time.perf_counter() - self._began_s
        return min(100.0, 100 * self._sums_s[part] / elapsed_s) if elapsed_s > 0 else 0.0

    def _collect(self) -> None:
        """Add the times that the card has finished; the events are in the order of its stream."""
        while self._on_card and self._on_card[0][2].query():  # type: ignore[no-untyped-call]
            part, began, ended = self._on_card.popleft()
            self._sums_s[part] += began.elapsed_time(ended) / 1e3
