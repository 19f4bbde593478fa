"""`--chaos` under the real supervisor: what is struck, and what becomes of each fault."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import UsageError
from orchestrator.lab.chaos import ChaosPlan, NodeFault, parse_chaos
from tests.run.conftest import RunMaker
from tests.run.scene import Run
from workers.messages import WorkerEvent

#: Workers may die as often as it takes.
ENDURING = {"hang_timeout_s": 5, "stale_after_s": 3, "death_window_s": 1}


class Faulty:
    """A run of nine workers on three nodes under faults."""

    def __init__(self, new_run: RunMaker, chaos: str, *, seed: int = 0, **settings: object) -> None:
        self.run: Run = new_run(
            pc1=3, pc2=3, pc3=3, chaos=chaos, chaos_seed=seed, **{**ENDURING, **settings}
        )

    def finish(self) -> list[dict[str, Any]]:
        self.run.finish()
        assert self.run.chaos is not None
        return self.run.chaos.told()[0]

    def counts(self, kind: str) -> dict[str, Any]:
        assert self.run.chaos is not None
        (counts,) = (each for each in self.run.chaos.told()[1] if each["kind"] == kind)
        return {name: value for name, value in counts.items() if name != "kind"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oom:rate=.05", ChaosPlan(seed=7, oom_rate=0.05)),
        ("kill : every = 1m30s ;", ChaosPlan(seed=7, kill_every_s=90.0)),
        (
            "node:pc2@2m+20s;node:pc2@30s",
            ChaosPlan(
                seed=7,
                nodes=(
                    NodeFault(node="pc2", at_s=30.0, pause_s=15.0),
                    NodeFault(node="pc2", at_s=120.0, pause_s=20.0),
                ),
            ),
        ),
    ],
)
def test_reads_what_is_documented(text: str, expected: ChaosPlan) -> None:
    assert parse_chaos(text, 7) == expected


@pytest.mark.parametrize(
    "text",
    [
        " ; ;", "kil:every=20s", "kill", "kill:every=20", "kill:every=0.5s", "oom:rate=1.5",
        "oom:rate=nan", "node:@30s", "node:pc2@30s+", "kill:every=1s\x1b[2J",
        "kill:every=20s;" * 1000 + "x" * 1000,
    ],
)  # fmt: skip
def test_refuses_with_the_piece_and_what_is_valid(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_chaos(text)
    said = str(caught.value)
    assert said.startswith("--chaos ")
    assert "valid: oom:rate=0.05" in said
    assert said.isprintable()
    assert len(said) < 300


def test_every_so_often_is_as_often_as_asked(new_run: RunMaker) -> None:
    killed = Faulty(new_run, "kill:every=10s", seed=5, duration="190s").finish()
    assert len(killed) == 15
    for number, fault in enumerate(killed, start=1):
        assert 10.0 * number <= fault["at_s"] <= 10.0 * number + 2, "within two slices of its time"
    assert len({fault["target"] for fault in killed}) > 5, "all over the fleet"


def test_a_worker_that_comes_back_is_recovered(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=20s", seed=1, duration="70s")
    faults = scene.finish()
    assert len(faults) == 2
    for fault in faults:
        assert fault["became"] == f"reports again after {fault['recovered_s']:.1f} s"
        assert fault["detail"].startswith("its process ended"), "how the head saw it"
        assert 2.0 <= fault["recovered_s"] <= 6.0
    assert scene.counts("kill") == {
        "injected": 2,
        "recovered": 2,
        "given_up": 0,
        "pending": 0,
        "moot": 0,
    }
    restarts = {row.slot: row.restarts for row in scene.run.recorder.shown[-1].rows}
    assert {slot for slot, count in restarts.items() if count} == {
        each["target"] for each in faults
    }


def test_a_slot_that_is_given_up_says_so(new_run: RunMaker) -> None:
    limits = {"max_deaths": 2, "death_window_s": 300}
    scene = Faulty(new_run, "kill:every=1s", seed=1, duration="60s", **limits)
    lost = [fault for fault in scene.finish() if fault["fate"] == "given_up"]
    assert len(lost) == scene.counts("kill")["given_up"] > 3
    assert all(fault["became"].startswith("given up: 2 deaths in 300 s") for fault in lost)


def test_a_node_comes_back_with_all_its_workers(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "node:pc2@5s+5s", duration="60s")
    (fault,) = scene.finish()
    assert (fault["kind"], fault["target"], fault["fate"]) == ("node", "pc2", "recovered")
    assert fault["became"] == f"all its workers report again after {fault['recovered_s']:.1f} s"
    (ended,), (began) = scene.run.events("chaos_node_ended"), scene.run.events("chaos_node_started")
    assert [event["at_s"] - ended["at_s"] >= 5 for event in began] == [True], "its whole pause"


def test_what_is_not_back_when_the_run_ends_says_so(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=9s;node:pc3@11s;node:pc2@100s", duration="12.6s")
    kill, node, never = scene.finish()
    assert (kill["kind"], node["kind"]) == ("kill", "node")
    assert {kill["became"], node["became"]} == {"not back at the end"}
    assert node["detail"] == "waiting for pc3/0, pc3/1, pc3/2"
    assert (never["target"], never["at_s"]) == ("pc2", 100.0)
    assert (never["fate"], never["became"]) == ("moot", "never struck: the run ended first")


def test_faults_of_steps_are_one_entry_for_each_slot(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "oom:rate=0.5", duration="20s")
    told = [
        WorkerEvent(name=name, at_unix_s=0.0, detail=detail)
        for name, detail in (("chaos", {"kind": "oom", "count": 3}), ("oom", {"count": 1}))
    ]
    for second in (5, 9, 14):
        scene.run.fleet.at(second, lambda: scene.run.fleet.tell("pc1/0", *told))
    (fault,) = scene.finish()
    assert (fault["target"], fault["kind"], fault["fate"]) == ("pc1/0", "oom", "survived")
    assert fault["count"] == scene.counts("oom")["recovered"] == 3 * 3


def test_a_seed_brings_the_same_faults_and_each_one_an_outcome(new_run: RunMaker) -> None:
    chaos = "kill:every=2s;node:pc2@3s+2s;node:pc3@9s;node:pc2@12s+1s"
    scene = Faulty(new_run, chaos, seed=1, duration="40s")
    first = scene.finish()
    assert all(fault["fate"] != "pending" for fault in first)
    for kind in ("kill", "node"):
        counts = scene.counts(kind)
        assert counts["injected"] == counts["recovered"] + counts["given_up"] + counts["pending"]
        assert counts["injected"] == sum(fault["kind"] == kind for fault in first)
    times = {"at_unix_s": 0.0}
    again = Faulty(new_run, chaos, seed=1, duration="40s").finish()
    assert [fault | times for fault in again] == [fault | times for fault in first]
    other = Faulty(new_run, chaos, seed=101, duration="40s").finish()
    assert [fault["target"] for fault in other] != [fault["target"] for fault in first]
