"""What holds for every policy that a user can name: how it is made, and whose state it loads."""

from __future__ import annotations

import pytest

from tests.policy.test_adaptive import Said
from tests.scene import GUIDES
from workers.policy import make_policy
from workers.policy.base import Policy
from workers.settings import WorkloadSpec

SAID = Said(size_power=2.0, batch_power=0.0, says=lambda size, _: 6 * size**2)


@pytest.fixture(params=["adaptive", "classic"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """Return the policy of this name."""
    return made(request.param)


def made(name: str) -> Policy:
    asked = WorkloadSpec(name="mine:Mlp", dtype="fp16", size=4096, batch=128, seed=0)
    return make_policy(name, GUIDES, asked, SAID, clock=lambda: 0.0, held_bytes=lambda: 0)


def test_the_state_of_another_policy_is_refused(policy: Policy) -> None:
    data = policy.dump()
    for foreign, name in (
        ({**data, "policy": "other"}, "'other'"),
        ({**data, "policy": None}, "None"),
        ({}, "None"),
    ):
        with pytest.raises(ValueError, match=f"written by policy {name}"):
            policy.load(foreign)


def test_a_missing_or_unknown_key_is_refused_by_name(policy: Policy) -> None:
    data = policy.dump()
    for key in [*(data.keys() - {"policy"}), "surprise"]:
        other = (
            {**data, "surprise": 1}
            if key == "surprise"
            else {name: data[name] for name in data if name != key}
        )
        with pytest.raises(ValueError, match=key):
            policy.load(other)
