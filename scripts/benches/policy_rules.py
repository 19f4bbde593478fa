"""The rules in use today for the size of a step after an out-of-memory, behind one surface.

All of them are blind: they learn from success and failure, and take no notice of what they are told of memory. Written
anew from what their authors' code and texts do; it is not their code that runs here, and the decorators around it
(which clear the cache, and run the failed step again) are left out: the simulator charges a failure the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benches.policy_world import Rule


class Accelerate:
    """accelerate 1.15, `find_executable_batch_size`: 0.9 of it after a failure, cut to a whole; never grows."""

    def __init__(self, largest: int) -> None:
        self._size = largest

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        """Return the size of the next step; None where accelerate raises, at zero."""
        return self._size or None

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Take no notice."""

    def failed(self, size: int) -> None:
        """Reduce to 90 %."""
        self._size = int(size * 0.9)


class Toma:
    """toma 1.1, `batch` without a cache between calls: half of it after a failure; never grows."""

    def __init__(self, largest: int) -> None:
        self._size = largest

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        """Return the size of the next step; None where toma raises, at zero."""
        return self._size or None

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Take no notice."""

    def failed(self, size: int) -> None:
        """Halve."""
        self._size = size // 2


class Guide:
    """The 3070 guide: max(floor, int(base * 0.7 ** failures)); its count of failures never goes down."""

    def __init__(self, largest: int, *, floor: int = 256) -> None:
        self._largest, self._floor, self._failures = largest, floor, 0

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        """Return the size of the next step."""
        return max(self._floor, int(self._largest * 0.7**self._failures))

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:
        """Take no notice."""

    def failed(self, size: int) -> None:  # noqa: ARG002
        """Count it, for good."""
        self._failures += 1


class Aimd:
    """As TCP does it: 0.7 of it after a failure, 2 % more after ten good steps; begins anew at neither."""

    def __init__(self, largest: int) -> None:
        self._largest, self._size, self._good = largest, float(largest), 0

    def next(self, free_bytes: int | None = None) -> int | None:  # noqa: ARG002
        """Return the size of the next step."""
        return int(self._size)

    def succeeded(self, size: int, peak_bytes: int | None = None) -> None:  # noqa: ARG002
        """Count it; after ten in a row, grow by 2 %."""
        self._good += 1
        if self._good == 10:
            self._size, self._good = min(self._largest, self._size * 1.02), 0

    def failed(self, size: int) -> None:  # noqa: ARG002
        """Reduce to 70 %."""
        self._size, self._good = max(1.0, self._size * 0.7), 0


RULES: Mapping[str, Callable[[int], Rule]] = {"accelerate": Accelerate, "toma": Toma, "guide": Guide, "aimd": Aimd}
"""By name; each is made with the largest size, which it starts from."""
