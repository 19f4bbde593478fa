"""Policies: how large the next part of a step is. No torch, no clock, no randomness, no I/O.

The way from the name that a user writes to a policy, without discovery, plug-ins or defaults.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.policy.adaptive import AdaptivePolicy
from workers.policy.base import Needs, Policy
from workers.policy.classic import ClassicPolicy
from workers.settings import Learned, MemorySettings, WorkloadSpec


def make_policy(
    name: str,
    memory: MemorySettings,
    asked: WorkloadSpec,
    needs: Needs,
    *,
    clock: Callable[[], float],
    held_bytes: Callable[[], int],
    learned: Learned | None = None,
) -> Policy:
    """Return the policy called `name`, built from the settings of one worker.

    Args:
        name: As a user writes it.
        memory: Bounds and floors.
        asked: The largest size and batch.
        needs: What the workload says of its memory.
        clock: Monotonic seconds.
        held_bytes: Returns what is held between two parts.
        learned: What an earlier run has learned, for a policy that learns.

    Raises:
        ValueError: no policy has this name (the message lists those there are), or it refuses the
            settings.
    """
    if name == AdaptivePolicy.name:
        return AdaptivePolicy(
            memory, asked, needs, clock=clock, held_bytes=held_bytes, learned=learned
        )
    if name == ClassicPolicy.name:
        if needs.stages() is not None:
            raise ValueError(
                f"workload {asked.name!r} needs memory.policy: adaptive; classic knows no stages"
            )
        return ClassicPolicy(memory, asked, needs)
    raise ValueError(
        f"no policy is called {name!r}; there are: {AdaptivePolicy.name}, {ClassicPolicy.name}"
    )
