"""The adaptive size for a loop of your own: ask for a size, run a step, report how it went
(docs/resilient.md).

    size = sizes.next(free_bytes=free_now())  # or next(), without a signal
    if size is None:
        ...  # nothing fits now: run nothing, ask again a little later
    sizes.failed(size)  # outside the handler, after memory was released
    sizes.succeeded(size, peak_bytes=torch.cuda.max_memory_allocated())

It is the sizes of a `workers.elastic.loop.Loop`, too. `workers.policy.sizer` decides. Measures no
memory and releases none; `workers.resilient` does both around a function. Loads neither torch nor
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
    """The largest size that fits, as memory comes and goes. Not for several threads at once."""

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
        """Start knowing nothing, or what was learned before.

        Args:
            largest: No size is larger.
            smallest: No size is smaller; when this fails, `next` returns `None` for a while.
            quantum: Sizes are multiples of this, but for `smallest` and `largest` themselves.
            power: Memory grows as size^power: 1 for a batch, 2 for the n of an n x n matrix.
            failures_per_minute: Never more failures within any 60 s; `next` returns `None` when
            they are used up.
            exact_samples: Whether `free_bytes` is true to the byte when `next` is told it, as from
            the device's own count; else it is taken for noisy, and smoothed.
            learned: What `learned` returned in an earlier run on the same card with the same
            workload.
            clock: Seconds that only go forward.

        Raises:
            ValueError: No size could satisfy this.
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
