"""Nodes that are gone from one moment to the next, and that come back, with too little or with all they had."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any

import psutil
import pytest

from orchestrator.core.node_commands import NODE_MARK
from orchestrator.record.archive import read_run
from tests.cluster.conftest import SMALL, ByHand, Starter, at_unix_s, descendants, samples
from tests.scene import wait_for

pytestmark = pytest.mark.ray

#: Far too big for every cap: three matrices of this edge need 1.5 GiB, also after scaling. So sizes
#: must be learned, the guides' way: by failing.
TOO_BIG = (
    "--set",
    "workload.size=65536",
    "--set",
    "memory.policy=classic",
    "--set",
    "run.min_success_rate=0",
)

_COUNTERS = ("steps_ok", "steps_oom", "steps_error", "oom_count", "emergency_count", "restarts")


def states(events: list[dict[str, Any]], slot: str, state: str) -> list[dict[str, Any]]:
    return [
        e for e in events if e["event"] == "state" and e["slot"] == slot and e["to_state"] == state
    ]


def test_slots_of_an_ended_node_are_lost_and_go_on_when_back(start: Starter) -> None:
    workers = ("--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=2")
    fault = ("--chaos", "node:pc2@3s+3s", "--chaos-seed", "1")
    head = start("--rehearse", "--duration", "10", "--json", *TOO_BIG, *workers, *fault)
    wait_for(lambda: states(head.events(), "pc2/0", "LOST"), "LOST of pc2")
    steps_ok = head.rows()["pc1/0"]["steps_ok"]
    # Ray takes a quarter of a minute to give up the old node, and only then starts its actors on
    # the new one.
    before = len(head.events())
    head.wait_until_running(2, after=before)
    summary = head.interrupt_when(
        lambda: head.rows()["pc1/0"]["steps_ok"] > steps_ok, "work on pc1 meanwhile"
    )
    events = head.events()
    (ended,) = [event for event in events if event["event"] == "chaos_node_ended"]
    (left,) = [event for event in events if event["event"] == "node_left"]
    assert left["node"] == "pc2"
    rows = {row["slot"]: row for row in summary["workers"]}
    taken = samples(head.folder())
    for slot in ("pc2/0", "pc2/1"):
        assert len(states(events, slot, "LOST")) == 1
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
    assert states(events, "pc1/0", "LOST") == states(events, "pc1/0", "RESTARTING") == []

    (told,) = summary["faults"]
    assert (told["kind"], told["target"], told["fate"]) == ("node", "pc2", "recovered")
    assert told["recovered_s"] >= 3.0
    assert summary["steps_lost_upper_bound"] > 0


def raylet_of(node: str) -> psutil.Process:
    """The raylet that `up` started for a node."""
    found = []
    for process in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # since it was listed
            if process.name() == "raylet" and process.environ().get(NODE_MARK) == node:
                found.append(process)
    (raylet,) = found
    return raylet


def test_a_killed_raylet_comes_back_and_outlives_a_killed_head(
    start: Starter, by_hand: ByHand
) -> None:
    by_hand.arguments = (*by_hand.arguments, *SMALL)
    by_hand.type_what_up_prints("pc1")
    by_hand.type_what_up_prints("pc2")
    head = start("--duration", "10", "--json", *by_hand.arguments, environment=by_hand.environment)
    head.wait_until_running(3)
    folder = head.folder()

    raylet_of("pc2").kill()
    wait_for(lambda: states(head.events(), "pc2/0", "LOST"), "LOST of pc2/0")

    script = by_hand.orchestrator("up", "pc2")
    assert "--num-cpus=4" in script
    by_hand.type(script.replace("--num-cpus=4", "--num-cpus=2"))

    def refused() -> bool:
        return any(
            "pc2 cannot be used: pc2 offers 2 CPUs" in notice for notice in read_run(folder).notices
        )

    wait_for(refused, "refusal of pc2")
    stored = {slot.slot: slot for slot in read_run(folder).slots}
    assert "offers 2 CPUs, the plan needs" in stored["pc2/0"].reason
    assert "pc2 offers 2 CPUs" in next(
        e["reason"] for e in head.events() if e["event"] == "node_refused"
    )
    steps_ok = stored["pc1/0"].counters["steps_ok"]
    wait_for(
        lambda: head.rows()["pc1/0"]["steps_ok"] > steps_ok, "work on pc1 beside the refused node"
    )

    by_hand.stop_node("pc2")
    before = len(head.events())
    by_hand.type_what_up_prints("pc2")
    wait_for(lambda: states(head.events()[before:], "pc2/0", "RUNNING"), "work on pc2")
    assert [e for e in head.events() if e["event"] == "state" and e["slot"] in {"pc1/0", "pc1/1"}][
        2:
    ] == []

    raylets = {raylet_of("pc1").pid, raylet_of("pc2").pid}
    opened = {e["slot"]: e["pid"] for e in head.events() if e["event"] == "device_opened"}
    assert sorted(opened) == ["pc1/0", "pc1/1", "pc2/0"]
    assert all(psutil.pid_exists(pid) for pid in opened.values())
    head.process.kill()
    head.process.wait()
    workers = set(opened.values())
    wait_for(lambda: not workers & {process.pid for process in descendants()}, "end of the workers")
    assert {raylet_of("pc1").pid, raylet_of("pc2").pid} == raylets
    stored_run = read_run(folder)
    assert stored_run.was_killed

    before = len(head.events())
    again = start(
        "--resume", folder.name, "--json", runs=head.runs, environment=by_hand.environment
    )
    again.wait_until_running(3, after=before)
    os.kill(again.process.pid, signal.SIGINT)
    code, out, err = again.finish()
    assert code == 130, out + err
    summary = json.loads(out)
    assert summary["run_id"] == folder.name
    assert summary["duration_s"] > stored_run.elapsed_s
    rows = {row["slot"]: row for row in summary["workers"]}
    for slot in stored_run.slots:
        assert rows[slot.slot]["steps_ok"] > slot.counters["steps_ok"]
        assert rows[slot.slot]["restarts"] >= slot.counters["restarts"]
    assert {raylet_of("pc1").pid, raylet_of("pc2").pid} == raylets
