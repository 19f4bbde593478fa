"""What the live nodes mean for a run: who joined, who left, who cannot be used, and what a person is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.fleet import NodeFact
from orchestrator.core.slot import NodeJoined, NodeLeft, NodeRefused
from orchestrator.run.node_watch import Membership, NodeEvent, notices, updated
from tests.factories import config_of

CONFIG = config_of({name: {"workers": 2, "cpus_per_worker": 4} for name in ("pc1", "pc2")})
SILENT = NodeLeft(reason="its node does not answer")
TOO_FEW = "pc1 offers 4 CPUs, the plan needs 2 workers x 4 = 8"


def fact(
    name: str | None = "pc1", node_id: str = "a", *, cpus: float = 8.0, answers: bool = True
) -> NodeFact:
    return NodeFact(
        name=name,
        node_id=node_id,
        address=f"10.0.0.{node_id}",
        cpus=cpus,
        gpus=1.0,
        answers=answers,
    )


class Watcher:
    """Looks at one list of nodes after the other."""

    def __init__(self, *facts: NodeFact) -> None:
        self.known = Membership()
        self.look(*facts)

    def look(self, *facts: NodeFact) -> list[tuple[str, NodeEvent]]:
        self.known, events = updated(self.known, CONFIG, facts)
        return list(events)

    @property
    def notices(self) -> list[str]:
        return notices(self.known, CONFIG)


def test_a_silent_node_is_gone_although_ray_lists_it() -> None:
    watcher = Watcher(fact())
    assert watcher.look(fact(answers=False)) == [("pc1", SILENT)]
    assert watcher.look(fact(answers=False)) == []
    assert watcher.notices == ["pc1 has left", "pc2 has not joined"]
    # Ray finds out later; nothing is left to tell.
    assert watcher.look() == []


def test_two_answering_nodes_of_one_name_are_refused() -> None:
    watcher = Watcher()
    text = "2 live nodes have the label node=pc1: 10.0.0.a, 10.0.0.b"
    assert watcher.look(fact(node_id="b"), fact(node_id="a")) == [("pc1", NodeRefused(reason=text))]
    assert watcher.look(fact(node_id="a"), fact(node_id="b")) == []
    assert watcher.notices == [f"pc1 cannot be used: {text}", "pc2 has not joined"]
    assert watcher.look(fact(node_id="b")) == [("pc1", NodeJoined())]
    assert watcher.notices == ["pc2 has not joined"]


def test_a_second_node_of_a_name_does_not_disturb_the_first() -> None:
    watcher = Watcher(fact(node_id="a"))
    assert watcher.look(fact(node_id="a"), fact(node_id="b")) == []
    assert watcher.notices == ["pc2 has not joined"]
    assert watcher.known.refused == {}
    assert watcher.look(fact(node_id="b")) == [("pc1", NodeLeft()), ("pc1", NodeJoined())]


def test_another_reason_is_told_and_the_same_after_a_return() -> None:
    watcher = Watcher(fact(cpus=4.0))
    other = "pc1 offers 6 CPUs, the plan needs 2 workers x 4 = 8"
    assert watcher.look(fact(cpus=6.0)) == [("pc1", NodeRefused(reason=other))]
    assert watcher.look() == [("pc1", NodeRefused(reason="its node has left the cluster"))]
    assert watcher.look(fact(cpus=6.0)) == [("pc1", NodeRefused(reason=other))]


facts = st.lists(
    st.builds(
        fact,
        st.sampled_from(["pc1", "pc2", "pc9", None]),
        st.sampled_from("abcd"),
        cpus=st.sampled_from([4.0, 8.0]),
        answers=st.booleans(),
    ),
    max_size=4,
    # Ray gives each id once.
    unique_by=lambda one: one.node_id,
)


def usable(live: Sequence[NodeFact], name: str) -> bool:
    answering = [one for one in live if one.name == name and one.answers]
    return len(answering) == 1 and answering[0].cpus >= 8


@given(looks=st.lists(facts, max_size=30))
def test_each_node_joins_and_leaves_in_turn(looks: list[list[NodeFact]]) -> None:
    watcher = Watcher()
    here: dict[str, bool] = dict.fromkeys(CONFIG.nodes, False)
    ever: set[str] = set()
    for live in looks:
        for name, event in watcher.look(*live):
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
        assert watcher.look(*live) == [], "the same again is no news"
        assert set(watcher.known.present) == {name for name, there in here.items() if there}
        assert watcher.known.seen == ever
        ids = {one.node_id for one in live if one.answers}
        assert set(watcher.known.present.values()) <= ids, "who does not answer is not in use"
        for name, there in here.items():
            assert there or not usable(live, name), "who can be used is in use"
        missing = [name for name, there in here.items() if not there]
        assert [line.split()[0] for line in watcher.notices] == missing
        assert set(watcher.known.refused) <= set(missing)
