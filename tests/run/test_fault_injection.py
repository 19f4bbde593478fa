"""`--chaos` under the real supervisor on a scripted fleet: what is struck when, and what becomes of each fault."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator.core.fleet import Fleet, SliceReported
from orchestrator.lab.chaos import fleet as chaos_fleet
from orchestrator.lab.chaos.fleet import ChaosFleet, chance
from orchestrator.lab.chaos.plan import parse_chaos
from orchestrator.record.events import EventLog
from orchestrator.record.model import Snapshot
from tests.factories import report_of
from tests.run.conftest import RunMaker
from tests.run.scene import Run
from tests.run.scripted_fleet import VirtualClock
from workers.messages import Directive, FaultKind, StruckDirective, WorkerEvent

pytestmark = pytest.mark.slow

STRIKES = {"poison", "kill", "segv", "exit", "hang"}

#: Workers may die as often as it takes.
ENDURING = {"hang_timeout_s": 5, "stale_after_s": 3, "death_window_s": 1}


class Faulty:
    """A run of nine workers on three nodes under faults, and what it sent and told about them."""

    def __init__(self, new_run: RunMaker, chaos: str, *, seed: int = 0, **settings: object) -> None:
        self.run: Run = new_run(
            pc1=3, pc2=3, pc3=3, chaos=chaos, chaos_seed=seed, **{**ENDURING, **settings}
        )
        self.strikes: list[tuple[str, StruckDirective]] = []
        self.run.fleet.on_submit = self.sent
        assert self.run.chaos is not None
        self.fleet = self.run.chaos

    def sent(self, slot: str, directive: Directive) -> None:
        if isinstance(directive, StruckDirective):
            self.strikes.append((slot, directive))

    def finish(self) -> list[dict[str, Any]]:
        self.run.finish()
        return self.faults()

    def faults(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [fault for fault in self.fleet.faults() if kind in {None, fault["kind"]}]

    def counts(self, kind: str) -> dict[str, Any]:
        (counts,) = (each for each in self.fleet.counts() if each["kind"] == kind)
        return {name: value for name, value in counts.items() if name != "kind"}


def test_chance_is_even_and_depends_on_every_word() -> None:
    drawn = [chance(7, "kill", f"pc1/{slot}", n) for slot in range(4) for n in range(2500)]
    assert len(set(drawn)) == len(drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.02)
    assert chance(7, "ab", "c") != chance(7, "a", "bc")


@pytest.mark.parametrize(("rate", "expected"), [(0.001, 0.0198), (0.01, 0.182), (1.0, 1.0)])
def test_a_rate_is_that_of_steps(rate: float, expected: float) -> None:
    inner, log, clock = Mock(spec=Fleet), Mock(spec=EventLog), VirtualClock()
    inner.wait.return_value = (
        SliceReported(report=report_of("pc1/0", 0, 2, steps_ok=20, wall_s=1.0)),
    )
    first, second = (
        Directive(incarnation=0, sequence=sequence, duration_s=1.0, resume=None)
        for sequence in (2, 3)
    )
    for seed in range(2000):
        plan = parse_chaos(f"kill:rate={rate}", seed)
        fleet = ChaosFleet(inner, plan, {"pc1/0": "pc1"}, "pc1", log, clock)
        fleet.on_event({"event": "counting", "slot": None, "duration_s": 1000.0})
        fleet.submit("pc1/0", first)
        fleet.wait(0.0)
        fleet.submit("pc1/0", second)
    sent = [call.args[1] for call in inner.submit.call_args_list]
    assert not any(isinstance(directive, StruckDirective) for directive in sent[::2])
    struck = sum(isinstance(directive, StruckDirective) for directive in sent[1::2])
    assert struck / 2000 == pytest.approx(expected, rel=0.25)


def test_nothing_is_struck_before_the_run_counts(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:rate=1", duration="60s")
    scene.finish()
    (counting,) = scene.run.events("counting")
    assert len(scene.strikes) > 50
    assert all(strike["at_s"] >= counting["at_s"] for strike in scene.run.events("chaos_strike"))
    assert all(
        directive.duration_s > 0 and 0.0 <= directive.at_share < 1.0
        for _, directive in scene.strikes
    )


def test_every_so_often_is_as_often_as_asked(new_run: RunMaker) -> None:
    sent = Faulty(new_run, "kill:every=10s", seed=5, duration="190s").finish()
    assert len(sent) == 15
    for number, fault in enumerate(sent, start=1):
        assert 10.0 * number <= fault["at_s"] <= 10.0 * number + 2, "within two slices of its time"
    assert len({fault["target"] for fault in sent}) > 5, "all over the fleet"


@pytest.mark.parametrize(("duration_s", "calm_s"), [(310, 60), (50, 10)])
def test_the_end_of_a_run_is_left_alone(new_run: RunMaker, duration_s: int, calm_s: int) -> None:
    scene = Faulty(
        new_run, "kill:every=1s;hang:rate=1;node:every=2s,for=1s", duration=f"{duration_s}s"
    )
    last_s = max(fault["at_s"] for fault in scene.finish())
    assert duration_s - calm_s - 15 < last_s < duration_s - calm_s


def test_what_could_not_be_sent_for_long_is_made_up_for_once(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=10s", seed=5, duration="200s")
    scene.run.fleet.at(5, lambda: scene.run.fleet.head_stands_still(100))
    scene.run.fleet.at(115, scene.run.clock.monotonic_s)
    after = [fault["at_s"] for fault in scene.finish() if fault["at_s"] < 112]
    assert len(after) == 2, "one for all that were missed, and the next one at once"


def test_a_worker_that_comes_back_is_recovered(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=20s", seed=1, duration="70s")
    faults = scene.finish()
    assert len(faults) == 2
    for fault in faults:
        assert fault["became"] == f"RUNNING again after {fault['recovered_s']:.1f} s"
        assert fault["detail"].startswith("its process ended"), "how the head saw it"
        assert 2.0 <= fault["recovered_s"] <= 5.0
    assert scene.counts("kill") == {
        "injected": 2,
        "recovered": 2,
        "given_up": 0,
        "pending": 0,
        "moot": 0,
    }


def test_a_slot_that_is_given_up_says_so(new_run: RunMaker) -> None:
    scene = Faulty(
        new_run, "kill:rate=0.05", seed=1, duration="60s", max_deaths=2, death_window_s=300
    )
    lost = [fault for fault in scene.finish() if fault["fate"] == "given_up"]
    assert len(lost) == 9
    assert all(fault["became"].startswith("given up: 2 deaths in 300 s") for fault in lost)


def test_a_node_that_comes_back_without_a_slot_says_so(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "node:pc2@5s+5s", duration="60s", max_deaths=2, death_window_s=300)
    scene.run.fleet.at(8, lambda: scene.run.fleet.dies_at_once.add("pc2/1"))
    (fault,) = scene.finish()
    assert fault["fate"] == "given_up"
    assert fault["became"] == f"back after {fault['recovered_s']:.1f} s without pc2/1"


def test_a_node_does_not_wait_for_a_slot_given_up_before(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "node:pc2@15s+5s", duration="60s", max_deaths=2, death_window_s=300)
    scene.run.fleet.dies_at_once.add("pc2/1")
    (fault,) = scene.finish()
    assert scene.run.fleet.abandoned == ["pc2/1"]
    assert fault["became"] == f"all its workers report again after {fault['recovered_s']:.1f} s"


def test_a_strike_on_a_node_that_is_ended_is_moot(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "hang:rate=1;node:pc2@2s", duration="30s")
    scene.finish()
    overtaken = [fault for fault in scene.faults("hang") if fault["target"].startswith("pc2/")][:3]
    assert {(fault["became"], fault["fate"]) for fault in overtaken} == {
        ("overtaken: its node was lost first", "moot")
    }


def test_a_death_before_the_struck_slice_is_not_the_strike(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=2s", duration="8s")
    numbers: list[int] = []

    def die_first(slot: str, directive: Directive) -> None:
        scene.sent(slot, directive)
        # From the third on, a slice is queued behind the one that runs.
        if not numbers and isinstance(directive, StruckDirective) and directive.sequence > 2:
            numbers.append(len(scene.strikes))
            scene.run.fleet.at(
                scene.run.clock.now_s - scene.run.fleet.began_s, lambda: scene.run.fleet.kill(slot)
            )

    scene.run.fleet.on_submit = die_first
    (fault,) = (fault for fault in scene.finish() if fault["number"] in numbers)
    assert fault["fate"] == "moot"
    assert fault["became"] == "overtaken: its process ended in an earlier slice first"


def test_what_is_not_back_when_the_run_ends_says_so(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "kill:every=10s;node:pc3@11s;node:pc2@100s", duration="12.6s")
    kill, node, never = scene.finish()
    assert (kill["kind"], node["kind"]) == ("kill", "node")
    assert {kill["became"], node["became"]} == {"not back when the run ended"}
    assert node["detail"] == "waiting for pc3/0, pc3/1, pc3/2"
    assert never["target"] == "pc2"
    assert never["at_s"] == 100.0
    assert never["became"] == "never struck: the run ended first"


def test_a_hang_at_the_end_is_not_a_strike_that_never_struck(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "hang:every=1s", duration="7s", hang_timeout_s=60)
    fates = Counter((fault["fate"], fault["became"]) for fault in scene.finish())
    assert set(fates) <= {
        ("not_back", "not back when the run ended"),
        ("moot", "never struck: the run ended first"),
    }
    assert fates["not_back", "not back when the run ended"] >= 4


def test_faults_of_steps_are_one_entry_for_each_slot_and_outcome(new_run: RunMaker) -> None:
    scene = Faulty(new_run, "oom:rate=0.5;raise:rate=0.1;flip:rate=0.1", duration="20s")
    counts = {FaultKind.OOM: 3, FaultKind.RAISE: 1, FaultKind.FLIP: 2}
    told = [{"kind": kind.value, "count": count} for kind, count in counts.items()]
    odd = [
        {"kind": "oom"},
        {"kind": "flood", "count": 1},
        {"kind": "kill", "count": 1},
        {"count": 2},
        {},
    ]
    events = [WorkerEvent(name="chaos", at_unix_s=0.0, detail=detail) for detail in (*told, *odd)]
    other = WorkerEvent(name="oom", at_unix_s=0.0, detail={"kind": "oom", "count": 1})
    scene.run.fleet.says["pc1/0"] = {"events": (*events, other)}
    entries = scene.finish()
    reports = scene.run.fleet.directives["pc1/0"][-1].sequence + 1
    assert [(fault["target"], fault["kind"], fault["fate"]) for fault in entries] == [
        ("pc1/0", kind.value, "survived") for kind in counts
    ]
    assert [fault["count"] for fault in entries] == [reports * count for count in counts.values()]
    became = [fault["became"] for fault in entries]
    assert became == [
        "survived in the same slice",
        "survived in the same slice",
        "not all found by the checks",
    ]
    assert scene.counts("oom") == {
        "injected": 3 * reports,
        "recovered": 3 * reports,
        "given_up": 0,
        "pending": 0,
        "moot": 0,
    }


def test_the_list_is_bounded_and_the_count_is_not(
    new_run: RunMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_fleet, "TOLD_MOST", 10)
    scene = Faulty(new_run, "kill:rate=1", duration="60s")
    faults = scene.finish()
    counted = scene.counts("kill")
    assert len(faults) == 10
    assert counted["injected"] + counted["moot"] == len(scene.strikes) == faults[-1]["number"]


PIECES = (
    "oom:rate=0.1",
    "segv:rate=0.01",
    "exit:every=1s",
    "hang:rate=0.02",
    "kill:every=2s",
    "node:pc2@3s+2s",
    "node:pc2@12s+1s;node:pc3@9s",
    "poison:rate=0.05",
    "node:every=7s,for=3s",
    "node:every=2s,for=9s",
)


class Watched(Faulty):
    """A run of which the faults are looked at whenever it is shown, and when a strike is sent."""

    def __init__(self, new_run: RunMaker, chaos: str, seed: int) -> None:
        super().__init__(new_run, chaos, seed=seed, duration="30s")
        self.final: dict[int, dict[str, Any]] = {}
        self.run.recorder.update = self.look  # type: ignore[method-assign]

    def sent(self, slot: str, directive: Directive) -> None:
        super().sent(slot, directive)
        pending = Counter(fault["target"] for fault in self.faults() if fault["fate"] == "pending")
        if isinstance(directive, StruckDirective):
            assert pending[slot] == 1, "a slot has one strike at a time"
            assert not pending[slot.partition("/")[0]], "none is struck on a node that is unwell"

    def look(self, _: Snapshot) -> None:
        now = {fault["number"]: fault for fault in self.faults()}
        assert now.items() >= self.final.items(), "an outcome is kept, and none is forgotten"
        self.final = {
            number: fault
            for number, fault in now.items()
            if fault["fate"] != "pending" and fault["kind"] not in {"oom", "raise", "flip"}
        }


@pytest.mark.parametrize("seed", range(10))
def test_a_fault_has_one_outcome_and_a_seed_the_same_faults(new_run: RunMaker, seed: int) -> None:
    drawn = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    pieces = {piece.partition("=")[0]: piece for piece in drawn.sample(PIECES, drawn.randint(1, 5))}
    chaos = ";".join(pieces.values())
    scene = Watched(new_run, chaos, seed)
    last = scene.finish()
    assert all(fault["fate"] != "pending" for fault in last)
    assert sum(fault["kind"] in STRIKES for fault in last) == len(scene.strikes)
    ends = scene.run.events("chaos_node_ended")
    assert sum(fault["kind"] == "node" and fault["fate"] != "moot" for fault in last) == len(ends)
    counts = scene.fleet.counts()
    assert [each["kind"] for each in counts] == [kind.value for kind in parse_chaos(chaos).kinds()]
    assert sum(each["injected"] + each["moot"] for each in counts) == sum(
        fault["count"] for fault in last
    )
    assert all(
        each["injected"] == each["recovered"] + each["given_up"] + each["pending"]
        for each in counts
    )
    for node in ("pc1", "pc2", "pc3"):
        mine = [
            (event["at_s"], name)
            for name in ("chaos_node_started", "chaos_node_ended")
            for event in scene.run.events(name, node=node)
        ]
        mine.sort(key=lambda event: event[0])  # of what happened at once, the start was first
        assert all(
            name == ("chaos_node_started" if index % 2 else "chaos_node_ended")
            for index, (_, name) in enumerate(mine)
        )
        downs_s = [
            later - before
            for (before, name), (later, _) in pairwise(mine)
            if name == "chaos_node_ended"
        ]
        assert all(down_s >= 0.8 for down_s in downs_s), "it is down for its whole pause"
        assert node != "pc1" or not mine, "the head's node is left alone"
    again = Faulty(new_run, chaos, seed=seed, duration="30s")
    times = {"at_unix_s": 0.0}
    assert [fault | times for fault in again.finish()] == [fault | times for fault in last]


def test_another_seed_brings_others(new_run: RunMaker) -> None:
    one, two = (
        [
            fault["target"]
            for fault in Faulty(new_run, "kill:every=2s", seed=seed, duration="30s").finish()
        ]
        for seed in (1, 2)
    )
    assert one != two
