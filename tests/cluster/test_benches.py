"""The benchmarks that start Ray, with arguments so small that only their mechanics are tested: no figure is judged."""

from __future__ import annotations

import os

import pytest
from benches.two_pcs import missing

from tests.bench_command import bench

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: `tests/cluster` kills workers, heads and nodes, too.
by_hand = pytest.mark.skipif(
    "BENCHES" not in os.environ, reason="a bench of half a minute; BENCHES=1 runs it, too"
)


@by_hand
def test_storm_in_an_actor() -> None:
    result = bench("oom-storm", "--errors", "200", "--budget-mib", "64")
    assert result["where"] == "Ray actor"
    assert result["kinds"] == {"definite": 200}


@by_hand
def test_overhead() -> None:
    result = bench("overhead", "--rounds", "1", "--seconds", "1.5", "--size", "512")
    (turn,) = result["rounds"]
    assert turn["ratio"] == pytest.approx(turn["product_gflops"] / turn["bare_gflops"])
    assert 0 < turn["in_steps"] <= turn["in_slices"] <= 1.05


@by_hand
def test_startup() -> None:
    small = ["--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=1"]
    result = bench("startup", "--rounds", "1", *small)
    assert result["workers"] == 2
    assert result["rounds"][0]["product_s"] > 0
    assert result["rounds"][0]["bare_s"] > 0


def test_soak() -> None:
    result = bench("soak", "--minutes", "0.3", "--pace", "2")
    # Which of them a short run meets depends on how fast the machine starts processes.
    assert (
        len(
            {"kill", "segv", "exit", "poison", "hang", "node"}
            & {row["kind"] for row in result["kinds"]}
        )
        >= 3
    )
    assert result["strikes_and_nodes"] >= 3
    assert result["steps_ok"] > 0
    assert 0 <= result["steps_really_lost"] <= result["steps_lost_at_most"]
    assert result["looks_at_the_ledger"] > 5


@by_hand
def test_kills() -> None:
    result = bench(
        "kills", "--kills", "2", "--set", "nodes.pc1.workers=2", "--set", "nodes.pc2.workers=1"
    )
    assert result["kills"] == result["restarts"] == 2
    assert result["slots_lost"] == 0
    assert result["ratio_of_medians"] == pytest.approx(
        result["ours_median_s"] / result["bare_median_s"]
    )


@by_hand
def test_head_kills() -> None:
    result = bench("head-kills", "--rounds", "1", "--seed", "2")  # that seed strikes late
    assert result["killed"] == {"at work": 1}
    assert result["readable"] == result["resumed"] == "1/1"
    assert result["left"] == 0


@by_hand
def test_rejoin() -> None:
    result = bench("rejoin", "--cycles", "1", "--quiet-s", "5", "--cycle-s", "27")
    (cycle,) = result["rounds"]
    assert cycle["ratio"] == pytest.approx(cycle["steps_per_s"] / cycle["quiet_steps_per_s"])
    assert 0 < cycle["lost_after_s"] < cycle["back_after_s"]


def test_cuts() -> None:
    """A short cut leaves the node as it is.

    After a long one Ray has declared it dead, and it is replaced.
    """
    if (why := missing()) is not None:
        pytest.skip(f"two PCs of namespaces cannot be made here: {why}")
    result = bench("cuts", "--seconds", "5", "75", "--workers", "1")
    assert [(row["event"], row["is_back"], row["is_new_node"]) for row in result["rounds"]] == [
        ("cut of 5 s", True, False),
        ("cut of 75 s", True, True),
        ("raylet killed", True, True),
    ]
