"""What the supervisor relies on holds for every fleet: the scenarios of `tests/fleet`, with Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.core.fleet import Fleet
from tests.fleet.scenarios import SCENARIOS, play
from tests.in_child import MakeSpec
from tests.scene import ROOT

pytestmark = pytest.mark.ray

NODE = "here"


@pytest.fixture(scope="module")
def ray_fleet() -> Iterator[Fleet]:
    """A cluster for all scenarios, whose node is not ours to end."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers import the scenarios' workloads; the raylet hands its environment on to
        # them.
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "fleet"), prepend=os.pathsep)
        with rehearsed([RayletPlan(name=NODE, cpus=32, gpus=0)]) as cluster:
            from orchestrator.cluster.ray_fleet import RayFleet

            fleet = RayFleet(cluster.address(), None)
            yield fleet
            fleet.close()


@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
def test_with_ray(ray_fleet: Fleet, make_spec: MakeSpec, scenario: str) -> None:
    play(ray_fleet, NODE, make_spec(), scenario)
