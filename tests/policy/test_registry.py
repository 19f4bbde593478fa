"""What holds for every policy that a user can name: how it is made, and whose state it loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.test_adaptive import Said
from tests.scene import GUIDES
from workers.policy import make_policy
from workers.policy.base import Policy
from workers.settings import PolicyState, WorkloadSpec

SAID = Said(size_power=2.0, batch_power=0.0, says=lambda size, _: 6 * size**2)


@pytest.fixture(params=["adaptive", "classic"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """Return the policy of this name."""
    return made(request.param)


def made(name: str) -> Policy:
    asked = WorkloadSpec(name="mine:Mlp", dtype="fp16", size=4096, batch=128, seed=0)
    return make_policy(name, GUIDES, asked, SAID, clock=lambda: 0.0, held_bytes=lambda: 0)


def test_the_state_of_another_policy_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="told by policy 'other'"):
        policy.resume(replace(policy.state, policy="other"))


def test_a_state_of_more_levels_than_there_are_is_refused() -> None:
    policy = made("adaptive")
    with pytest.raises(ValueError, match="3 levels, not 1"):
        policy.resume(PolicyState(policy="adaptive", learned=(None, None, None)))
