"""Looks up what an earlier process learned of a function on this card, and stores what this one learns.

Covers where a function runs (`LimitKey`) and when a change is large enough to write. Does not cover the file
(`workers.learned_limits.store`), nor how a limit is used: the first call begins there, and it is kept only if that call
succeeds. Initialises CUDA if torch is loaded and sees a card, because the card must be known before the first call.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable
from typing import Final

import psutil
import pynvml

from workers.learned_limits.store import LimitStore
from workers.settings import Learned, LimitKey, StoredLimit

#: A function does not report the types in which it computes; its name stands for that.
_ANY_DTYPE: Final = "any"

#: A size that moved less than this is what is written already, and a write costs some milliseconds.
_WORTH_KEEPING: Final = 0.05
_KEEP_EVERY_S: Final = 10.0

_log = logging.getLogger(__name__)


class Recall:
    """What one function has learned, across processes. An error of the store is only logged, once."""

    def __init__(self, workload: str, clock: Callable[[], float]) -> None:
        self._workload = workload
        self._clock = clock
        self._store = LimitStore()
        self._kept: Learned | None = None
        self._kept_at_s: float | None = None
        self._complained = False

    def best(self) -> Learned | None:
        """Return what was learned here; `None` if nothing was, or it is too old."""
        found = self._store.best(_key(self._workload), time.time())
        self._complain()
        self._kept = None if found is None else found.learned
        return self._kept

    def keep(self, learned: Learned | None, peak_bytes: int | None) -> None:
        """Write down what is known now, if it is news."""
        if learned is None or not self._news(learned):
            return
        limit = StoredLimit(
            key=_key(self._workload), learned=learned, peak_bytes=peak_bytes, learned_at_unix_s=time.time()
        )
        self._store.remember(limit)
        self._complain()
        self._kept, self._kept_at_s = learned, self._clock()

    def _news(self, learned: Learned) -> bool:
        if self._kept_at_s is not None and self._clock() - self._kept_at_s < _KEEP_EVERY_S:
            return False
        kept = self._kept
        if kept is None or (kept.unit_bytes is None) != (learned.unit_bytes is None):
            return True
        return abs(learned.size - kept.size) > _WORTH_KEEPING * kept.size

    def _complain(self) -> None:
        if self._store.problem is not None and not self._complained:
            _log.warning("%s", self._store.problem)
            self._complained = True


def _key(workload: str) -> LimitKey:
    torch = sys.modules.get("torch")
    version = "none" if torch is None else str(torch.__version__)
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.current_device()
        card = torch.cuda.get_device_properties(device)
        return LimitKey(
            card=card.name,
            total_bytes=card.total_memory,
            driver=_driver(),
            torch=version,
            dtype=_ANY_DTYPE,
            workload=workload,
            cap_bytes=int(torch.cuda.get_per_process_memory_fraction(device) * card.total_memory),
        )
    total_bytes = psutil.virtual_memory().total
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return LimitKey(
        card="CPU",
        total_bytes=total_bytes,
        driver=None,
        torch=version,
        dtype=_ANY_DTYPE,
        workload=workload,
        cap_bytes=min([total_bytes, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]),
    )


def _driver() -> str | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
