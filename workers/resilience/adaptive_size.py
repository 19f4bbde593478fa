"""The adaptive size for your own loop: ask for a size, run a step, report the result
(docs/resilient.md).

    size = sizes.next(free_bytes=free_now())  # or next(), without a signal
    if size is None:
        ...  # nothing fits now: run nothing, ask again a little later
    sizes.failed(size)  # outside the handler, after memory was released
    sizes.succeeded(size, peak_bytes=torch.cuda.max_memory_allocated())

It also implements `Sizes` of `workers.elastic.loop.Loop`. `workers.policy.sizer` decides. Measures
and releases no memory; `workers.resilient` does both around a function. Loads neither torch nor
Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.policy.sizer import Sizer
from workers.policy.sizes_tried import Bounds
from workers.settings import Learned

__all__ = ["AdaptiveSize", "Learned"]


class AdaptiveSize(Sizer):
    """The largest size that fits while free memory changes. Not thread-safe."""

    def __init__(
        self,
        largest: int,
        *,
        smallest: int = 1,
        quantum: int = 1,
        power: float = 1.0,
        failures_per_minute: int = 6,
        exact_samples: bool = False,
        learned: Learned | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without knowledge, or with what was learned before.

        Args:
            largest: No size is larger.
            smallest: No size is smaller; after it fails, `next` returns `None` for a while.
            quantum: Sizes are multiples of this, except `smallest` and `largest` themselves.
            power: Memory grows as size^power: 1 for a batch, 2 for the n of an n x n matrix.
            failures_per_minute: Most failures within any 60 s; then `next` returns `None`.
            exact_samples: Whether the `free_bytes` of `next` is exact to the byte, as from the
                device's own count; else it is treated as noisy, and smoothed.
            learned: The value of `learned` from an earlier run on the same card with the same
                workload.
            clock: Returns seconds that never go back.

        Raises:
            ValueError: No size can satisfy this.
        """
        bounds = Bounds(
            largest=largest,
            smallest=smallest,
            quantum=quantum,
            power=power,
            failures_per_minute=failures_per_minute,
            exact_samples=exact_samples,
        )
        super().__init__(bounds, learned, clock=clock)
