"""Policies: events in, decisions out. No torch, no clock, no randomness, no I/O.

The way from the name that a user writes to a policy, without discovery, plug-ins or defaults.
"""

from __future__ import annotations

from typing import Any

from workers.policy.adaptive import AdaptivePolicy
from workers.policy.base import Growth, Policy
from workers.policy.classic import ClassicPolicy
from workers.settings import MemorySettings, WorkloadSpec


# Each policy has a state type of its own, and callers only pass it back: hence Any.
def make_policy(
    name: str, memory: MemorySettings, workload: WorkloadSpec, growth: Growth
) -> Policy[Any]:
    """Return the policy called `name`, built from the settings of one worker.

    Raises:
        ValueError: no policy has this name (the message lists those there are), or it refuses the
            settings.
    """
    if name == AdaptivePolicy.name:
        return AdaptivePolicy(memory, workload, growth)
    if name == ClassicPolicy.name:
        if growth.stages is not None:
            raise ValueError(
                f"workload {workload.name!r} needs memory.policy: adaptive; classic knows no stages"
            )
        return ClassicPolicy(memory, workload)
    raise ValueError(
        f"no policy is called {name!r}; there are: {AdaptivePolicy.name}, {ClassicPolicy.name}"
    )
