"""Nodes that join late, leave, return, are silent or too small, and a suspended head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.fleet import Fleet, NodeFact
from orchestrator.core.slot import HeadState, NodeJoined, NodeLeft, NodeRefused
from orchestrator.errors import PreflightError
from orchestrator.record.events import EventLog
from orchestrator.run.node_watch import NodeWatch
from orchestrator.run.runner import check_nodes
from tests.factories import config_of, node_fact
from tests.run.conftest import RunMaker
from tests.run.scripted_fleet import START_S, STEPS_PER_S
from workers.messages import WorkerState


def test_a_node_that_joins_late_works_from_then_on(new_run: RunMaker) -> None:
    run = new_run(pc2=2, absent=("pc2",))
    run.fleet.at(10, lambda: run.fleet.join("pc2"))
    rows = run.finish()
    (counting,) = run.events("counting")
    assert counting["startup_s"] < 3, "the run does not wait for a node that is not there"
    assert run.recorder.shown[0].notices == ("pc2 has not joined",)
    assert run.recorder.shown[0].nodes_seen == ("pc1",)
    assert run.recorder.shown[-1].notices == ()
    assert run.recorder.shown[-1].nodes_seen == ("pc1", "pc2")
    assert [event["at_s"] for event in run.events("node_joined", node="pc2")] == [
        pytest.approx(10, abs=1.1)
    ]
    late_s = START_S + 20 - 10 - START_S
    for slot in ("pc2/0", "pc2/1"):
        assert rows[slot].state is WorkerState.RUNNING
        assert rows[slot].counts.steps_ok == pytest.approx(
            late_s * STEPS_PER_S, abs=1.5 * STEPS_PER_S
        )


def test_a_silent_node_is_there_while_its_workers_report(new_run: RunMaker) -> None:
    run = new_run()
    run.fleet.at(5, lambda: run.fleet.silence("pc2"))
    rows = run.finish()
    assert run.events("node_left") == []
    assert (rows["pc2/0"].state, rows["pc2/0"].restarts) == (WorkerState.RUNNING, 0)


def test_a_node_that_refuses_has_left_despite_a_report(new_run: RunMaker) -> None:
    run = new_run()
    run.fleet.at(10.2, lambda: run.fleet.silence("pc2", refuses=True))
    rows = run.finish()
    (left,) = run.events("node_left", node="pc2")
    assert left["at_s"] == pytest.approx(10.7, abs=0.7)
    assert rows["pc2/0"].state is HeadState.LOST


@pytest.mark.parametrize("how", ["incompatible", "unbuildable"])
def test_a_late_node_that_cannot_work_costs_its_slots_alone(new_run: RunMaker, how: str) -> None:
    run = new_run(absent=("pc2",))
    run.can_never_work("pc2/0", how)
    run.fleet.at(10, lambda: run.fleet.join("pc2"))
    rows = run.finish()
    assert rows["pc2/0"].state is HeadState.QUARANTINED
    assert rows["pc2/0"].reason.startswith("pc2/0: ")
    assert run.fleet.abandoned == ["pc2/0"]
    assert rows["pc1/0"].counts.steps_ok == pytest.approx(20 * STEPS_PER_S, rel=0.1)
    assert len(run.events("unreached")) == (how == "unbuildable")


@pytest.mark.parametrize(("what", "stood_still_s"), [("head", 9.0), ("machine", 100.0)])
def test_a_head_that_stood_still_blames_no_worker_and_no_node(
    new_run: RunMaker, what: str, stood_still_s: float
) -> None:
    run = new_run(hang_timeout_s=5, stale_after_s=3, duration="200s")
    stand_still = run.fleet.head_stands_still if what == "head" else run.fleet.machine_stands_still
    run.fleet.at(10.2, lambda: stand_still(stood_still_s))
    rows = run.finish()
    assert all((row.state, row.restarts) == (WorkerState.RUNNING, 0) for row in rows.values())
    assert run.events("node_left") == run.events("unreached") == run.events("process_ended") == []
    assert not any("STALE" in row.reason for row in run.shown("pc1/0"))


CONFIG = config_of({name: {"workers": 2, "cpus_per_worker": 4} for name in ("pc1", "pc2")})


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventLog]:
    with contextlib.closing(EventLog(tmp_path_factory.mktemp("run") / "events.jsonl")) as events:
        yield events


def test_two_answering_nodes_of_one_name_are_refused(events: EventLog) -> None:
    watcher = NodeWatch(CONFIG, events)
    text = "2 live nodes have the label node=pc1: 10.0.0.a, 10.0.0.b"
    assert watcher.update([node_fact(node_id="b"), node_fact(node_id="a")]) == [
        ("pc1", NodeRefused(reason=text))
    ]
    assert watcher.update([node_fact(node_id="a"), node_fact(node_id="b")]) == []
    assert watcher.notices() == [f"pc1 cannot be used: {text}", "pc2 has not joined"]
    assert watcher.update([node_fact(node_id="b")]) == [("pc1", NodeJoined())]
    assert watcher.notices() == ["pc2 has not joined"]


facts = st.lists(
    st.builds(
        node_fact,
        st.sampled_from(["pc1", "pc2", "pc9", None]),
        st.sampled_from("abcd"),
        cpus=st.sampled_from([4.0, 8.0]),
        answers=st.booleans(),
    ),
    max_size=4,
    # Ray uses each id once.
    unique_by=lambda one: one.node_id,
)


def usable(live: Sequence[NodeFact], name: str) -> bool:
    answering = [one for one in live if one.name == name and one.answers]
    return len(answering) == 1 and answering[0].cpus >= 8


@given(looks=st.lists(facts, max_size=30))
def test_each_node_joins_and_leaves_in_turn(looks: list[list[NodeFact]], events: EventLog) -> None:
    watcher = NodeWatch(CONFIG, events)
    here: dict[str, bool] = dict.fromkeys(CONFIG.nodes, False)
    ever: set[str] = set()
    for live in looks:
        for name, event in watcher.update(live):
            match event:
                case NodeJoined():
                    assert not here[name]
                    here[name] = True
                    ever.add(name)
                case NodeLeft():
                    assert here[name]
                    here[name] = False
                case NodeRefused(reason=reason):
                    assert not here[name], "a node in use is never refused"
                    assert reason
        assert watcher.update(live) == [], "the same again is no news"
        assert set(watcher.present) == {name for name, there in here.items() if there}
        assert set(watcher.in_use()) == set(watcher.present)
        ids = {one.node_id for one in live if one.answers}
        assert set(watcher.present.values()) <= ids, "who does not answer is not in use"
        for name, there in here.items():
            assert there or not usable(live, name), "who can be used is in use"
        missing = [name for name, there in here.items() if not there]
        assert [line.split()[0] for line in watcher.notices()] == missing
        assert set(watcher.refused) <= set(missing)


def test_a_node_without_a_label_is_named_by_its_address() -> None:
    nameless = [node_fact(None, node_id) for node_id in "93"]
    there = SimpleNamespace(nodes=lambda: nameless, address=lambda: "10.0.0.3:6379")
    config = config_of({"pc1": {"workers": 1}})
    with pytest.raises(PreflightError, match=r"the node at 10\.0\.0\.3, 10\.0\.0\.9 has no label"):
        check_nodes(config, cast("Fleet", there), wait_for_nodes=False)
