"""The policies a user can name.

Covers the way from a name to a policy, nothing else: no discovery, no plug-ins, no defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from workers.policy.adaptive.policy import AdaptivePolicy
from workers.policy.base import Growth, Policy
from workers.policy.classic import ClassicPolicy
from workers.settings import MemorySettings, WorkloadSpec

# Each policy has a state type of its own, and callers only pass it back: hence Any.
PolicyFactory: TypeAlias = Callable[[MemorySettings, WorkloadSpec, Growth], Policy[Any]]

POLICIES: Final[Mapping[str, PolicyFactory]] = MappingProxyType(
    {
        AdaptivePolicy.name: AdaptivePolicy,
        ClassicPolicy.name: lambda memory, workload, _growth: ClassicPolicy(memory, workload),
    }
)


def make_policy(name: str, memory: MemorySettings, workload: WorkloadSpec, growth: Growth) -> Policy[Any]:
    """Return the policy called `name`, built from the settings of one worker.

    Raises:
        ValueError: no policy has this name (the message lists those there are), or it refuses the settings.
    """
    if name not in POLICIES:
        raise ValueError(f"no policy is called {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](memory, workload, growth)
