"""A limit as a run learns it, and others like it."""

from __future__ import annotations

import dataclasses
from typing import Any

from workers.settings import Learned, LimitKey, StoredLimit

NOW_S = 1.7e9

KEY = LimitKey(
    card="NVIDIA GeForce RTX 3090",
    total_bytes=24 * 2**30,
    driver="580.65.06",
    torch="2.13.0+cu130",
    dtype="fp16",
    workload="mine.steps:Mlp@0123456789ab",
    cap_bytes=10**9,
)


def limit(size: int = 1, *, learned_at_unix_s: float = NOW_S, **changed: Any) -> StoredLimit:
    """Return a limit under this key; name what is different in the key."""
    return StoredLimit(
        key=dataclasses.replace(KEY, **changed),
        learned=Learned(size=size, fixed_bytes=1e6, unit_bytes=2.5),
        peak_bytes=10**8,
        learned_at_unix_s=learned_at_unix_s,
    )
