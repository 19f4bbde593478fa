"""What the supervisor relies on holds for every fleet: the same scenarios with Ray and without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.core.fleet import Fleet
from tests.fleet.scenarios import SCENARIOS, play, play_in_process
from tests.in_child import InChild, MakeSpec

NODE = "here"


@pytest.fixture(scope="module")
def ray_fleet() -> Iterator[Fleet]:
    """A cluster for all scenarios, whose node is not ours to end."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers import the scenarios' workloads; the raylet hands its environment on to them.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with rehearsed([RayletPlan(name=NODE, cpus=32, gpus=0)]) as cluster:
            from orchestrator.cluster.ray_fleet import RayFleet

            fleet = RayFleet(cluster.address(), None)
            yield fleet
            fleet.close()


@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
@pytest.mark.ray
def test_with_ray(ray_fleet: Fleet, make_spec: MakeSpec, scenario: str) -> None:
    play(ray_fleet, NODE, make_spec(), scenario)


@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
def test_in_this_process(in_child: InChild, make_spec: MakeSpec, scenario: str) -> None:
    in_child(play_in_process, make_spec(), scenario)
