"""What a function of `resilient` has learned, from one process to the next.

Knows the store and the circumstances (card, cap, versions) under which a size holds. Decides no
size.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Final

import psutil

from workers.learned_limits import LimitStore
from workers.nvml import queries
from workers.settings import Learned, LimitKey, StoredLimit

#: A write costs some milliseconds.
_KEEP_EVERY_S: Final = 10.0

_log = logging.getLogger(__name__)


class Recall:
    """What one function has learned, across processes.

    An error of the store is only logged, each once. Initialises CUDA if torch is loaded and sees a
    card, because the card must be known before the first call.
    """

    def __init__(self, workload: str, clock: Callable[[], float]) -> None:
        self._workload = workload
        self._clock = clock
        self._store = LimitStore()
        self._kept: Learned | None = None
        self._kept_at_s = float("-inf")
        self._told: str | None = None
        """The problem that was logged last."""

    def best(self) -> Learned | None:
        """Return what was learned here; `None` if nothing was, or it is too old."""
        limit = self._store.best(_key(self._workload), time.time())
        self._tell()
        self._kept = None if limit is None else limit.learned
        return self._kept

    def keep(self, learned: Learned | None, peak_bytes: int | None) -> None:
        """Store what is known now, where it differs from what was stored and that was a while ago."""
        is_recent = self._clock() - self._kept_at_s < _KEEP_EVERY_S
        if learned is None or learned == self._kept or is_recent:
            return
        self._kept, self._kept_at_s = learned, self._clock()
        key, now_unix_s = _key(self._workload), time.time()
        self._store.remember(
            StoredLimit(
                key=key, learned=learned, peak_bytes=peak_bytes, learned_at_unix_s=now_unix_s
            )
        )
        self._tell()

    def _tell(self) -> None:
        if self._store.problem not in {None, self._told}:
            self._told = self._store.problem
            _log.warning("%s", self._told)


def _key(workload: str) -> LimitKey:
    import resource  # noqa: PLC0415 - only on Unix

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.current_device()
        card, driver = torch.cuda.get_device_properties(device), queries.driver_version()
        name, total_bytes = card.name, card.total_memory
        cap_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    else:
        name, total_bytes, driver = "CPU", psutil.virtual_memory().total, None
        limits = [
            resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)
        ]
        cap_bytes = min(
            [total_bytes, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]
        )
    return LimitKey(
        card=name,
        total_bytes=total_bytes,
        driver=driver,
        torch="none" if torch is None else str(torch.__version__),
        # A function does not report the types in which it computes; its name stands for that.
        dtype="any",
        workload=workload,
        cap_bytes=cap_bytes,
    )
