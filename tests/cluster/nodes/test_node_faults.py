"""A node that disappears suddenly, and returns."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Starter, at_unix_s, samples

pytestmark = pytest.mark.ray

#: Too big for every cap: three matrices of this edge need 1.5 GiB, also after scaling. So workers
#: must learn a size as in the guides, by failing.
TOO_BIG = (
    "--set",
    "workload.size=65536",
    "--set",
    "memory.policy=classic",
    "--set",
    "run.min_success_rate=0",
)

_COUNTERS = ("steps_ok", "steps_oom", "steps_error", "oom_count", "emergency_count", "restarts")


def test_slots_of_an_ended_node_are_lost_and_go_on_when_back(start: Starter) -> None:
    workers = ("--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=2")
    fault = ("--chaos", "node:pc2@3s", "--chaos-seed", "1")
    head = start("--rehearse", "--duration", "10", "--json", *TOO_BIG, *workers, *fault)
    head.wait(lambda: head.events("state", slot="pc2/0", to_state="LOST"), "LOST of pc2")
    steps_ok = head.rows()["pc1/0"]["steps_ok"]
    # Ray takes 15 s to give up the old node, and only then starts its actors on the new
    # node.
    before = len(head.events())
    head.wait_until_running(2, after=before)
    summary = head.interrupt_when(
        lambda: head.rows()["pc1/0"]["steps_ok"] > steps_ok, "work on pc1 meanwhile"
    )
    (ended,), (left,) = head.events("chaos_node_ended"), head.events("node_left")
    assert left["node"] == "pc2"
    rows = {row["slot"]: row for row in summary["workers"]}
    taken = samples(head.folder())
    for slot in ("pc2/0", "pc2/1"):
        assert len(head.events("state", slot=slot, to_state="LOST")) == 1
        assert rows[slot]["state"] == "RUNNING"
        before = [sample for sample in taken[slot] if sample["at_unix_s"] <= at_unix_s(ended)]
        assert before[-1]["oom_count"] > 0, "something was learned before the node was ended"
        assert rows[slot]["size"] == before[-1]["size"] < 16384
        assert rows[slot]["oom_count"] == before[-1]["oom_count"], "and it was not learned again"
        assert rows[slot]["steps_ok"] > before[-1]["steps_ok"]
    for slot, lines in taken.items():
        for counter in _COUNTERS:
            values = [line[counter] for line in lines] + [rows[slot][counter]]
            assert values == sorted(values), (slot, counter)

    assert rows["pc1/0"]["restarts"] == 0
    moved = {event["to_state"] for event in head.events("state", slot="pc1/0")}
    assert not moved & {"LOST", "RESTARTING"}

    (told,) = summary["faults"]
    assert (told["kind"], told["target"], told["fate"]) == ("node", "pc2", "recovered")
    assert told["recovered_s"] >= 15.0
