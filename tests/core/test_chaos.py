"""`--chaos`: its grammar in tables, and its book against the real lifecycle on a simulated fleet in simulated time."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.chaos.outcomes import ended, watch
from orchestrator.core.chaos.plan import ChaosPlan, parse_chaos
from orchestrator.core.chaos.schedule import begin, chance, node_commands, open_book, strike_for
from orchestrator.core.chaos.state import ChaosState, EndNode, Fault, FaultOutcome, KindTally, StartNode, faults, tally
from orchestrator.core.fleet import SliceFailed, SliceFailure, SliceReported
from orchestrator.core.lifecycle import advance
from orchestrator.core.slot import (
    Accept,
    Close,
    Command,
    Drain,
    Event,
    HeadState,
    NodeJoined,
    NodeLeft,
    Phase,
    Restart,
    Rules,
    Slot,
    Submit,
    Tick,
)
from workers.messages import (
    FaultKind,
    ProcessFault,
    Report,
    StepCounts,
    Verdict,
    WorkerEvent,
    WorkerState,
)

STRIKES = (FaultKind.KILL, FaultKind.SEGV, FaultKind.EXIT, FaultKind.HANG, FaultKind.POISON)


@given(st.integers(), st.lists(st.one_of(st.text(), st.integers(), st.floats())))
def test_chance_is_a_share_and_repeats(seed: int, words: list[object]) -> None:
    drawn = chance(seed, *words)
    assert 0.0 <= drawn < 1.0
    assert drawn == chance(seed, *words)


def test_chance_is_even_and_depends_on_every_word() -> None:
    drawn = [chance(7, "kill", f"pc1/{slot}", n) for slot in range(4) for n in range(2500)]
    assert len(set(drawn)) == len(drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.02)
    assert chance(7, "ab", "c") != chance(7, "a", "bc")


# --- the book, on a simulated fleet --------------------------------------------------------------------------------

RULES = Rules(
    slice_s=1.0,
    hang_timeout_s=5.0,
    stale_after_s=2.0,
    start_timeout_s=60.0,
    restart_backoff_s=1.0,
    restart_backoff_max_s=5.0,
    max_deaths=1000,
    death_window_s=300.0,
    max_workload_errors=3,
)

#: pc1 carries the head.
HOMES = {f"{node}/{index}": node for node in ("pc1", "pc2", "pc3") for index in range(3)}

TURN_S = 0.25
STEPS_PER_SLICE = 20
START_S = 2.0
RAY_NOTICES_S = 3.0
JOIN_S = 4.0


@dataclass
class Process:
    """What sits in a slot: when it is up, what it has to do, and whether it still does it."""

    up_at_s: float = 0.0
    queue: list[tuple[Submit, ProcessFault | None]] = field(default_factory=list)
    free_at_s: float = 0.0
    hangs: bool = False


class Fleet:
    """A cluster of simulated workers under the real lifecycle, with the book beside it as the supervisor keeps it."""

    def __init__(self, plan: ChaosPlan, rules: Rules = RULES, duration_s: float | None = None) -> None:
        self.now_s = 1000.0
        self.rules = rules
        self.book = open_book(plan, HOMES, "pc1")
        self.slots = {name: Slot(slot=name) for name in HOMES}
        self.processes = {name: Process() for name in HOMES}
        self.later: list[tuple[float, str, Event]] = []
        self.commands: list[tuple[float, EndNode | StartNode]] = []
        self.strikes: list[tuple[str, Submit, ProcessFault]] = []
        self.events: tuple[WorkerEvent, ...] = ()
        self.down: set[str] = set()
        for name in HOMES:
            self.feed(name, NodeJoined())
        while not all(slot.ready for slot in self.slots.values()):
            self.turn()
        self.began_s = self.now_s
        self.book = begin(self.book, self.now_s, None if duration_s is None else self.now_s + duration_s)

    def run(self, seconds: float) -> Fleet:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.turn()
        return self

    def finish(self) -> ChaosState:
        for name in HOMES:
            self.feed(name, Drain())
        for _ in range(10):
            self.turn(draining=True)
        for name in HOMES:
            self.feed(name, Close())
        self.book = ended(self.book, self.now_s)
        return self.book

    def turn(self, *, draining: bool = False) -> None:
        self.now_s += TURN_S
        if not draining:
            self.book, commands = node_commands(self.book, self.now_s)
            for command in commands:
                self.commands.append((self.now_s, command))
                self.end_node(command.node) if isinstance(command, EndNode) else self.start_node(command.node)
        due = [item for item in self.later if item[0] <= self.now_s]
        self.later = [item for item in self.later if item[0] > self.now_s]
        for _, name, event in due:
            if self.is_news(name, event):
                self.feed(name, event)
        for name, process in self.processes.items():
            self.work(name, process)
            self.feed(name, Tick())

    def is_news(self, name: str, event: Event) -> bool:
        """Whether the membership would tell it: a node joins after it was away, and leaves after it was there."""
        absent = self.slots[name].phase is Phase.ABSENT
        return absent if isinstance(event, NodeJoined) else not (absent and isinstance(event, NodeLeft))

    def end_node(self, node: str) -> None:
        assert node not in self.down, "a node is ended while it is down"
        self.down.add(node)
        for name, home in HOMES.items():
            if home == node:
                process = self.processes[name]
                process.up_at_s = float("inf")
                for submit, _ in process.queue:
                    self.later.append((self.now_s + 0.5, name, failed(name, submit)))
                process.queue.clear()
                self.later.append((self.now_s + RAY_NOTICES_S, name, NodeLeft()))

    def start_node(self, node: str) -> None:
        assert node in self.down, "a node is started that was not down"
        self.down.discard(node)
        for name, home in HOMES.items():
            if home == node:
                turn = int(name.rpartition("/")[2])  # one worker after the other
                self.processes[name] = Process(up_at_s=self.now_s + JOIN_S + turn * START_S)
                self.later.append((self.now_s + JOIN_S, name, NodeJoined()))

    def work(self, name: str, process: Process) -> None:
        while process.queue and not process.hangs and self.now_s >= process.up_at_s:
            submit, process_fault = process.queue[0]
            if self.now_s < max(process.free_at_s, process.up_at_s) + submit.duration_s:
                return
            process.free_at_s = self.now_s
            if process_fault is not None and process_fault.kind is FaultKind.HANG:
                process.hangs = True
                return
            process.queue.pop(0)
            if process_fault is not None and process_fault.kind is not FaultKind.POISON:
                lost = [submit, *(queued for queued, _ in process.queue)]
                self.processes[name] = Process(up_at_s=self.now_s + START_S)
                for each in lost:
                    self.feed(name, failed(name, each))
                return
            self.feed(name, self.report(name, submit, poisoned=process_fault is not None))

    def report(self, name: str, submit: Submit, *, poisoned: bool) -> SliceReported:
        events, self.events = self.events, ()
        return SliceReported(
            report=Report(
                slot=name,
                incarnation=submit.incarnation,
                sequence=submit.sequence,
                verdict=Verdict.CONTEXT_CORRUPTED if poisoned else Verdict.OK,
                state=HeadState.RESTARTING if poisoned else WorkerState.RUNNING,
                reason="an illegal memory access was encountered" if poisoned else "",
                device=None,
                memory=None,
                size=256,
                batch=32,
                claim_bytes=None,
                counts=StepCounts(steps_ok=STEPS_PER_SLICE if submit.duration_s else 1),
                wall_s=submit.duration_s or 0.05,
                events=events,
            )
        )

    def feed(self, name: str, event: Event) -> None:
        before = self.slots[name]
        after, commands = advance(before, event, self.now_s, self.rules, None)
        self.slots[name] = after
        accepted = next((command.report for command in commands if isinstance(command, Accept)), None)
        self.book = watch(self.book, before, after, accepted, self.now_s)
        for command in commands:
            self.perform(name, command)

    def perform(self, name: str, command: Command) -> None:
        match command:
            case Submit():
                self.book, process_fault = strike_for(self.book, self.slots[name], command, self.now_s)
                if process_fault is not None:
                    self.strikes.append((name, command, process_fault))
                self.processes[name].queue.append((command, process_fault))
            case Restart():
                up_at_s = self.processes[name].up_at_s
                self.processes[name] = Process(up_at_s=max(up_at_s, self.now_s + START_S))
            case _:
                pass


def failed(name: str, submit: Submit) -> SliceFailed:
    return SliceFailed(
        slot=name,
        incarnation=submit.incarnation,
        sequence=submit.sequence,
        failure=SliceFailure.DIED,
        text="the actor died",
    )


def of(book: ChaosState, kind: FaultKind) -> list[Fault]:
    return [fault for fault in faults(book) if fault.kind is kind]


def test_nothing_is_injected_before_the_run_counts() -> None:
    fleet = Fleet(parse_chaos("kill:rate=1;node:pc2@1s"))
    assert fleet.strikes == []
    assert fleet.commands == []
    assert faults(fleet.book) == ()


def test_a_slice_that_proves_a_process_carries_no_strike() -> None:
    fleet = Fleet(parse_chaos("kill:rate=1")).run(60.0)
    assert len(fleet.strikes) > 100
    assert all(submit.duration_s > 0 for _, submit, _ in fleet.strikes)
    assert all(0.0 <= strike.at_share < 1.0 for _, _, strike in fleet.strikes)


@pytest.mark.parametrize("kind", STRIKES)
def test_every_so_often_is_as_often_as_asked(kind: FaultKind) -> None:
    fleet = Fleet(parse_chaos(f"{kind}:every=10s", 5)).run(305.0)
    sent = of(fleet.book, kind)
    assert len(sent) == 30
    for number, fault in enumerate(sent, start=1):
        assert 10.0 * number <= fault.at_s <= 10.0 * number + 2 * RULES.slice_s, "within two slices of its time"
    assert len({fault.target for fault in sent}) > 5, "all over the fleet"


@pytest.mark.parametrize(("duration_s", "calm_s"), [(600.0, 60.0), (100.0, 20.0)])
def test_the_end_of_a_run_is_left_alone(duration_s: float, calm_s: float) -> None:
    text = "kill:every=1s;hang:rate=1;node:every=2s,for=1s"
    fleet = Fleet(parse_chaos(text), duration_s=duration_s).run(duration_s)
    at_s = [fault.at_s for fault in faults(fleet.finish())]
    assert max(at_s) < duration_s - calm_s
    assert max(at_s) > duration_s - calm_s - 15.0


def test_what_could_not_be_sent_for_long_is_made_up_for_once() -> None:
    fleet = Fleet(parse_chaos("kill:every=10s", 5))
    fleet.now_s += 100.0  # this process was suspended
    fleet.run(9.0)
    assert len(of(fleet.book, FaultKind.KILL)) == 2


@pytest.mark.parametrize(("rate", "expected"), [(0.001, 0.0198), (0.01, 0.182), (1.0, 1.0)])
def test_a_rate_is_that_of_steps(rate: float, expected: float) -> None:
    fleet = Fleet(parse_chaos("kill:every=1h"))
    book = begin(open_book(parse_chaos(f"kill:rate={rate}", 3), HOMES, "pc1"), 0.0)
    slot = fleet.slots["pc1/0"]
    book = watch(book, Slot(slot="pc1/0"), slot, slot.report, 0.0)
    struck = 0
    for sequence in range(4000):
        submit = Submit(incarnation=0, sequence=sequence, duration_s=1.0, step_limit=10**6, resume=None)
        _, process_fault = strike_for(book, slot, submit, 0.0)
        struck += process_fault is not None
    assert struck / 4000 == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("kind", STRIKES)
def test_a_worker_that_comes_back_is_recovered(kind: FaultKind) -> None:
    fleet = Fleet(parse_chaos(f"{kind}:every=20s", 1)).run(50.0)
    first, second = of(fleet.book, kind)
    for fault in (first, second):
        assert fault.fate is FaultOutcome.RECOVERED
        assert fault.became == f"RUNNING again after {fault.recovered_s:.1f} s"
        assert fault.detail, "how the head saw it"
        assert fault.recovered_s is not None
        assert (
            START_S
            <= fault.recovered_s
            <= START_S + 2 * RULES.slice_s + (RULES.hang_timeout_s + 1.0 if kind is FaultKind.HANG else 0.0)
        )
    assert tally(fleet.book)[kind] == KindTally(injected=2, recovered=2, given_up=0, pending=0, moot=0)


def test_a_slot_that_is_given_up_says_so() -> None:
    fleet = Fleet(parse_chaos("kill:rate=0.05", 1), Rules(**{**vars_of(RULES), "max_deaths": 2})).run(60.0)
    lost = [fault for fault in faults(fleet.book) if fault.fate is FaultOutcome.GIVEN_UP]
    assert len(lost) == len(HOMES)
    assert all(fault.became.startswith("given up: 2 deaths in 300 s") for fault in lost)


def vars_of(rules: Rules) -> dict[str, object]:
    return {name: getattr(rules, name) for name in Rules.__slots__}


def test_a_node_is_ended_at_its_time_and_comes_back() -> None:
    fleet = Fleet(parse_chaos("node:pc2@10s+5s")).run(40.0)
    (ended_at_s, end), (started_at_s, start) = fleet.commands
    assert (end, start) == (EndNode(node="pc2"), StartNode(node="pc2"))
    assert ended_at_s - fleet.began_s == pytest.approx(10.0, abs=TURN_S)
    assert started_at_s - ended_at_s == pytest.approx(5.0, abs=TURN_S)
    (fault,) = faults(fleet.book)
    assert (fault.kind, fault.target, fault.fate) == (FaultKind.NODE, "pc2", FaultOutcome.RECOVERED)
    assert fault.recovered_s == pytest.approx(5.0 + JOIN_S + 2 * START_S, abs=1.0), "the last of the three"
    assert fault.became == f"all its workers report again after {fault.recovered_s:.1f} s"


def test_a_strike_under_way_on_a_node_that_is_ended_is_not_counted_as_struck() -> None:
    fleet = Fleet(parse_chaos("hang:rate=1;node:pc2@2s")).run(5.0)
    overtaken = [fault for fault in of(fleet.book, FaultKind.HANG) if HOMES[fault.target] == "pc2"]
    assert len(overtaken) == 3
    assert {fault.became for fault in overtaken} == {"overtaken: its node was lost first"}
    assert {fault.fate for fault in overtaken} == {FaultOutcome.MOOT}


def test_a_death_before_the_struck_slice_is_not_the_strike() -> None:
    fleet = Fleet(parse_chaos("kill:rate=1"))
    while not fleet.strikes:
        fleet.turn()
    name, submit, _ = fleet.strikes[0]
    running = fleet.slots[name].in_flight[0].sequence
    assert running < submit.sequence
    died = SliceFailed(slot=name, incarnation=submit.incarnation, sequence=running, failure=SliceFailure.DIED, text="")
    fleet.feed(name, died)
    fault = next(fault for fault in faults(fleet.book) if fault.target == name)
    assert (fault.fate, fault.became) == (FaultOutcome.MOOT, "overtaken: its process ended in an earlier slice first")


def test_what_is_not_back_when_the_run_ends_says_so() -> None:
    fleet = Fleet(parse_chaos("kill:every=10s;node:pc3@8s;node:pc2@100s")).run(11.6)
    book = fleet.finish()
    kill, node, never = faults(book)
    assert (kill.kind, node.kind) in {(FaultKind.KILL, FaultKind.NODE), (FaultKind.NODE, FaultKind.KILL)}
    assert {kill.became, node.became} == {"not back when the run ended"}
    assert {kill.detail, node.detail} >= {"waiting for pc3/0, pc3/1, pc3/2"}
    assert (never.target, never.at_s, never.became) == ("pc2", 100.0, "never struck: the run ended first")
    assert book == ended(book, fleet.now_s), "an end is an end"
    assert node_commands(book, fleet.now_s + 1000.0) == (book, ())


def test_a_hang_at_the_end_is_told_from_a_strike_that_never_struck() -> None:
    fleet = Fleet(parse_chaos("hang:rate=0.02")).run(2.5)
    struck = {name for name, _, _ in fleet.strikes}
    spared = fleet.strikes[0][0]
    fleet.processes[spared].queue = [(submit, None) for submit, _ in fleet.processes[spared].queue]  # no step met it
    book = fleet.finish()
    hanging = {name for name, process in fleet.processes.items() if process.hangs}
    assert hanging == struck - {spared} != set()
    assert {fault.target for fault in faults(book) if fault.fate is FaultOutcome.NOT_BACK} == hanging
    (never,) = (fault for fault in faults(book) if fault.fate is FaultOutcome.MOOT)
    assert (never.target, never.became) == (spared, "never struck: the run ended first")


def event_of(kind: FaultKind, count: int) -> WorkerEvent:
    return WorkerEvent(name="chaos", at_unix_s=0.0, detail={"kind": kind.value, "count": count})


def test_faults_of_steps_are_one_entry_for_each_slot_and_outcome() -> None:
    fleet = Fleet(parse_chaos("oom:rate=0.5;raise:rate=0.1"))
    for _ in range(20):
        fleet.events = (event_of(FaultKind.OOM, 3), event_of(FaultKind.RAISE, 1))
        fleet.run(1.0)
    entries = faults(fleet.book)
    assert len({(fault.target, fault.kind) for fault in entries}) == len(entries) < 20
    assert sum(fault.count for fault in entries if fault.kind is FaultKind.OOM) == 60
    assert {fault.became for fault in entries} == {"survived in the same slice"}
    assert tally(fleet.book)[FaultKind.OOM] == KindTally(injected=60, recovered=60, given_up=0, pending=0, moot=0)


def test_events_of_others_and_of_other_versions_are_left_alone() -> None:
    fleet = Fleet(parse_chaos("oom:rate=0.5"))
    odd = ({"kind": "oom"}, {"kind": "flood", "count": 1}, {"kind": "kill", "count": 1}, {"count": 2}, {})
    fleet.events = (
        *(WorkerEvent(name="chaos", at_unix_s=0.0, detail=detail) for detail in odd),
        WorkerEvent(name="oom", at_unix_s=0.0, detail={"kind": "oom", "count": 1}),
    )
    fleet.run(2.0)
    assert faults(fleet.book) == ()


def test_the_list_is_bounded_and_the_count_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.core.chaos.state.MAX_KEPT", 10)
    fleet = Fleet(parse_chaos("kill:rate=1")).run(60.0)
    book = fleet.finish()
    assert len(faults(book)) == 10
    counted = tally(book)[FaultKind.KILL]
    assert counted.injected + counted.moot == len(fleet.strikes)
    assert faults(book)[-1].number == len(fleet.strikes)


PLANS = st.lists(
    st.sampled_from(
        [
            "oom:rate=0.1",
            "segv:rate=0.01",
            "exit:every=1s",
            "hang:rate=0.02",
            "kill:every=2s",
            "node:pc2@3s+2s",
            "node:pc2@9s+1s;node:pc3@9s",
            "poison:rate=0.05",
            "node:every=7s,for=3s",
            "node:every=2s,for=9s",
        ]
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda piece: piece.partition("=")[0],
).map(";".join)


@settings(max_examples=25)
@given(text=PLANS, seed=st.integers(0, 99), seconds=st.floats(1.0, 45.0))
def test_each_fault_gets_exactly_one_outcome_and_keeps_it(text: str, seed: int, seconds: float) -> None:
    plan = parse_chaos(text, seed)
    fleet = Fleet(plan)
    final: dict[int, Fault] = {}
    for now in faults_over_time(fleet, seconds):
        numbers = [fault.number for fault in now]
        assert len(set(numbers)) == len(numbers)
        for fault in now:
            if fault.number in final:
                assert fault == final[fault.number], "an outcome is kept"
            elif fault.fate is not FaultOutcome.PENDING:
                final[fault.number] = fault
        assert final.keys() <= set(numbers), "none is forgotten"
    last = faults(fleet.book)
    assert all(fault.fate is not FaultOutcome.PENDING for fault in last)
    assert sum(fault.kind in STRIKES for fault in last) == len(fleet.strikes)
    ends = sum(isinstance(command, EndNode) for _, command in fleet.commands)
    assert sum(fault.kind is FaultKind.NODE and fault.fate is not FaultOutcome.MOOT for fault in last) == ends
    counted = tally(fleet.book)
    assert tuple(counted) == plan.kinds()
    assert sum(each.injected + each.moot for each in counted.values()) == sum(fault.count for fault in last)
    assert all(each.injected == each.recovered + each.given_up + each.pending for each in counted.values())
    assert pickle.loads(pickle.dumps(fleet.book)) == fleet.book  # noqa: S301 - written in this line


def faults_over_time(fleet: Fleet, seconds: float) -> Iterator[tuple[Fault, ...]]:
    end_s = fleet.now_s + seconds
    while fleet.now_s < end_s:
        fleet.turn()
        yield faults(fleet.book)
    fleet.finish()
    yield faults(fleet.book)


@settings(max_examples=10)
@given(text=PLANS, seed=st.integers(0, 99))
def test_the_same_seed_brings_the_same_faults(text: str, seed: int) -> None:
    plan = parse_chaos(text, seed)
    one, two = (Fleet(plan).run(20.0) for _ in range(2))
    assert one.strikes == two.strikes
    assert one.commands == two.commands
    assert one.finish() == two.finish()


def test_another_seed_brings_others() -> None:
    one, two = (Fleet(parse_chaos("kill:every=2s", seed)).run(30.0) for seed in (1, 2))
    assert [name for name, _, _ in one.strikes] != [name for name, _, _ in two.strikes]


@settings(max_examples=25)
@given(text=PLANS.filter(lambda text: "node" in text), seed=st.integers(0, 99))
def test_a_node_is_ended_and_started_in_turn_and_the_head_never(text: str, seed: int) -> None:
    fleet = Fleet(parse_chaos(text, seed)).run(60.0)
    for node in ("pc1", "pc2", "pc3"):
        mine = [(at_s, command) for at_s, command in fleet.commands if command.node == node]
        assert all(isinstance(command, EndNode) == (index % 2 == 0) for index, (_, command) in enumerate(mine))
        for (end_s, end), (start_s, _) in pairwise(mine):
            if isinstance(end, EndNode):
                assert start_s - end_s >= 1.0, "it is down for its whole pause"
    assert all(command.node != "pc1" for _, command in fleet.commands)


@settings(max_examples=10)
@given(text=PLANS, seed=st.integers(0, 99))
def test_a_slot_has_one_strike_at_a_time_and_none_on_a_node_that_is_unwell(text: str, seed: int) -> None:
    fleet = Fleet(parse_chaos(text, seed))
    sent = 0
    unwell_before: set[int] = set()
    for now in faults_over_time(fleet, 30.0):
        pending = [fault for fault in now if fault.fate is FaultOutcome.PENDING]
        struck = [fault.target for fault in pending if fault.kind in STRIKES]
        assert len(set(struck)) == len(struck)
        unwell = {fault.number: fault.target for fault in pending if fault.kind is FaultKind.NODE}
        nodes = {node for number, node in unwell.items() if number in unwell_before}
        assert not nodes & {HOMES[name] for name, _, _ in fleet.strikes[sent:]}
        sent, unwell_before = len(fleet.strikes), set(unwell)
    assert all(slot.phase in {Phase.STOPPED, Phase.QUARANTINED, Phase.ABSENT} for slot in fleet.slots.values())
