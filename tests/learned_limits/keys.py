"""The circumstances under which the tests learn."""

from __future__ import annotations

from workers.learned_limits import LimitKey

KEY = LimitKey(
    card="NVIDIA GeForce RTX 3090",
    total_bytes=24 * 2**30,
    driver="580.65.06",
    torch="2.13.0+cu130",
    dtype="fp16",
    workload="mine.steps:Mlp@0123456789ab",
    cap_bytes=10**9,
)
