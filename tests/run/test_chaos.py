"""`--chaos` under the real supervisor: the targets and the effects of each fault."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import UsageError
from orchestrator.lab.chaos import ChaosPlan, parse_chaos
from tests.run.conftest import RunMaker
from tests.run.scene import Run

#: Settings with which workers may die any number of times.
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
        return self.run.chaos.injected()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oom:rate=.05", ChaosPlan(oom_rate=0.05)),
        ("kill : every = 1m30s ;", ChaosPlan(kill_every_s=90.0)),
        ("node:pc2@2m;node:pc3@30s", ChaosPlan(nodes={"pc2": 120.0, "pc3": 30.0})),
    ],
)
def test_reads_what_is_documented(text: str, expected: ChaosPlan) -> None:
    assert parse_chaos(text) == expected


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
        assert 10.0 * number <= fault["at_s"] <= 10.0 * number + 2, "within two polls of its time"
    assert len({fault["target"] for fault in killed}) > 5, "all over the fleet"


def test_a_worker_that_comes_back_is_recovered(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=20s", seed=1, duration="70s")
    faults = scene.finish()
    assert [(fault["kind"], fault["fate"]) for fault in faults] == [("kill", "recovered")] * 2
    assert all(2.0 <= fault["recovered_s"] <= 6.0 for fault in faults)
    restarts = {row.slot: row.restarts for row in scene.run.recorder.shown[-1].rows}
    assert {slot for slot, count in restarts.items() if count} == {
        each["target"] for each in faults
    }


def test_a_slot_that_is_given_up_says_so(new_run: RunMaker) -> None:
    limits = {"max_deaths": 2, "death_window_s": 300}
    faults = Faulty(new_run, "kill:every=1s", seed=1, duration="60s", **limits).finish()
    assert sum(fault["fate"] == "given_up" for fault in faults) > 3


def test_what_is_not_back_when_the_run_ends_says_so(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=9s;node:pc3@11s;node:pc2@100s", duration="12.6s")
    kill, node = scene.finish()
    assert (kill["kind"], node["kind"], node["target"]) == ("kill", "node", "pc3")
    assert {kill["fate"], node["fate"]} == {"not_back"}
    assert kill["recovered_s"] is None


def test_a_seed_brings_the_same_faults(new_run: RunMaker) -> None:
    chaos = "kill:every=2s;node:pc2@3s;node:pc3@9s"
    first = Faulty(new_run, chaos, seed=1, duration="40s").finish()
    assert {fault["kind"] for fault in first} == {"kill", "node"}
    assert Faulty(new_run, chaos, seed=1, duration="40s").finish() == first
    other = Faulty(new_run, chaos, seed=101, duration="40s").finish()
    assert [fault["target"] for fault in other] != [fault["target"] for fault in first]
