"""Which slice carries a fault of its process, when a node is ended and started again, and what
becomes of each fault.

Rules:

1. A slot has at most one strike under way, and none while its node is down or on its way back.
2. Same plan, same seed, same sequence of calls: same faults. Chance is a hash of the seed.

The outcomes follow from how slots change. Performs nothing (`run/fault_injection.py` does). Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.chaos.faults import Fault, FaultLog, FaultOutcome
from orchestrator.core.chaos.plan import STEP_FAULTS, ChaosPlan, FaultRule
from orchestrator.core.slot import Phase, Slot
from workers.messages import Directive, FaultKind, ProcessFault, Report, Verdict

#: The last seconds of a run that are left alone, and how much of a short run at most. A process
#: that was killed is back after some seconds, a node after half a minute.
_CALM_S = 60.0
_CALM_SHARE = 0.2

#: Of a process that works as it should.
_WELL = frozenset({Verdict.OK, Verdict.DONE})

_RUN_ENDED_FIRST = "never struck: the run ended first"
_NOT_BACK = "not back when the run ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """Start the raylet of a node, or end it."""

    node: str
    start: bool


@dataclass(slots=True, kw_only=True)
class _Timer:
    """The next fault of a kind that happens every so often."""

    rule: FaultRule
    every_s: float
    at_s: float
    count: int = 0

    def drawn_from(self, targets: Sequence[str], seed: int) -> str:
        """Return the target that the chance of this time falls on."""
        return targets[int(chance(seed, self.rule.kind, self.count) * len(targets))]

    def wind(self, now_s: float) -> None:
        """Set it to its next time; of several that were missed, one is made up for."""
        self.at_s = max(self.at_s + self.every_s, now_s)
        self.count += 1


@dataclass(slots=True, kw_only=True)
class _Strike:
    """A fault under way in a slot."""

    fault: Fault
    sequence: int
    """It strikes in this slice or, if no step of that one met it, in a later one."""
    last_heard_s: float | None = None
    """The last report before it struck; `None` while it has not been seen to strike."""

    def can_have_met(self, before: Slot) -> bool:
        """Whether the slice that was running is the one it was sent with, or came after it."""
        return bool(before.in_flight) and before.in_flight[0].sequence >= self.sequence

    def struck(self, before: Slot, how: str, now_s: float) -> None:
        """Note that it has struck, as far as the head knows; a second death changes nothing."""
        if self.last_heard_s is None:
            self.last_heard_s = before.heard_at_s if before.heard_at_s is not None else now_s
            self.fault.detail = how


@dataclass(slots=True, kw_only=True)
class _Down:
    fault: Fault
    ended_at_s: float
    start_at_s: float | None
    """`None` once it was started again."""
    waiting: set[str]
    given_up: list[str]


@dataclass(eq=False)
class Chaos:
    """The faults of a plan, decided slice by slice; nothing is injected before `begin`."""

    plan: ChaosPlan
    homes: Mapping[str, str]
    """The node of each slot."""
    head_node: str
    """Never ended."""
    log: FaultLog = field(default_factory=FaultLog)
    _began_s: float | None = None
    _calm_from_s: float = math.inf
    """From then on nothing is struck by the clock or by chance."""
    _over: bool = False
    _working: set[str] = field(default_factory=set)
    """Slots whose present process has reported."""
    _over_for_good: set[str] = field(default_factory=set)
    """Slots that get no process any more: quarantined, or done."""
    _timers: list[_Timer] = field(default_factory=list)
    _strikes: dict[str, _Strike] = field(default_factory=dict)
    _down: dict[str, _Down] = field(default_factory=dict)
    _steps: dict[tuple[FaultKind, str, str], Fault] = field(default_factory=dict)
    """Of each kind, slot and outcome the one entry."""

    def __post_init__(self) -> None:
        self._planned = list(self.plan.node_faults)

    def begin(self, now_s: float, ends_at_s: float) -> None:
        """The run begins to count: all times of the plan are from here.

        Shortly before `ends_at_s` nothing is struck by the clock or by chance any more, so that
        what was struck can come back and the outcome of the run says something. A node that the
        plan names is ended when the plan says so.
        """
        self._began_s = now_s
        self._timers = [
            _Timer(rule=rule, every_s=rule.every_s, at_s=now_s + rule.every_s)
            for rule in self.plan.rules
            if rule.every_s is not None
        ]
        self._calm_from_s = ends_at_s - min(_CALM_S, _CALM_SHARE * (ends_at_s - now_s))

    def strike_for(self, slot: Slot, submit: Directive, now_s: float) -> ProcessFault | None:
        """Decide whether the next slice carries a strike.

        The first one never does: its process is not at work yet.
        """
        name = slot.slot
        targets = self._targets()
        if name not in targets or now_s >= self._calm_from_s:
            return None
        kind = self._due(targets, name, now_s) or self._by_chance(slot, submit)
        if kind is None:
            return None
        self._strikes[name] = _Strike(
            fault=self._enter(kind, name, now_s), sequence=submit.sequence
        )
        return ProcessFault(
            kind=kind, at_share=chance(self.plan.seed, "share", name, submit.sequence)
        )

    def node_commands(self, now_s: float) -> list[NodeCommand]:
        """Return what to do with nodes now.

        Everything overdue at once, but a node is down for its whole pause.
        """
        commands: list[NodeCommand] = []
        if self._began_s is None or self._over:
            return commands
        for planned in list(self._planned):
            down = self._down.get(planned.node)
            if now_s - self._began_s >= planned.at_s and (down is None or down.start_at_s is None):
                self._planned.remove(planned)
                commands.append(self._end_node(planned.node, planned.pause_s, now_s))
        for timer in self._timers if now_s < self._calm_from_s else ():
            if timer.rule.kind is FaultKind.NODE and now_s >= timer.at_s:
                at_work = {self.homes[slot] for slot in self._working}
                if nodes := sorted(at_work - {self.head_node, *self._down}):
                    node = timer.drawn_from(nodes, self.plan.seed)
                    timer.wind(now_s)
                    commands.append(self._end_node(node, timer.rule.pause_s, now_s))
        for node, down in list(self._down.items()):
            if down.start_at_s is not None and now_s >= down.start_at_s:
                down.start_at_s = None
                self._close_if_back(node, now_s)
                commands.append(NodeCommand(node=node, start=True))
        return commands

    def watch(self, before: Slot, after: Slot, accepted: Report | None, now_s: float) -> None:
        """Take in what an event made of a slot; called at every one, before the commands that
        follow are performed.

        `accepted` is the report that the event brought, if it was accepted; `now_s` are monotonic
        seconds.
        """
        if after is before or self._over:
            return
        slot = after.slot
        died = after.restarts > before.restarts
        left = after.phase is Phase.ABSENT and before.phase is not Phase.ABSENT
        given_up = after.phase is Phase.QUARANTINED and before.phase is not Phase.QUARANTINED
        silent = (
            after.phase is Phase.STOPPED
            and bool(before.in_flight)
            and not after.in_flight
            and accepted is None
        )
        if accepted is not None:
            self._take_step_faults(after, accepted, given_up=given_up, now_s=now_s)
        if died or left:
            self._process_gone(before, after, accepted, died=died, now_s=now_s)
        elif (
            silent
            and (strike := self._strikes.get(slot)) is not None
            and strike.can_have_met(before)
        ):
            strike.struck(before, "no report when the run ended", now_s)
        if after.phase is Phase.DONE:
            self._over_for_good.add(slot)
        if given_up:
            self._slot_given_up(after, now_s)
        elif (
            after.ready
            and not before.ready
            and not died
            and after.report
            and after.report.verdict in _WELL
        ):
            self._slot_back(after, now_s)
        if after.phase is Phase.WORKING and after.ready and not after.draining:
            self._working.add(slot)
        else:
            self._working.discard(slot)

    def end(self, now_s: float) -> None:
        """The run is over: give every fault that is under way its outcome.

        Nothing is injected or started again.
        """
        if self._over:
            return
        self._over = True
        for strike in self._strikes.values():
            if strike.last_heard_s is not None:
                self.log.close(strike.fault, FaultOutcome.NOT_BACK, _NOT_BACK)
            else:
                self.log.close(strike.fault, FaultOutcome.MOOT, _RUN_ENDED_FIRST)
        for down in self._down.values():
            missing = ", ".join(sorted(down.waiting))
            down.fault.detail = f"waiting for {missing}" if missing else "still down"
            self.log.close(down.fault, FaultOutcome.NOT_BACK, _NOT_BACK)
        for planned in self._planned:
            fault = self._enter(FaultKind.NODE, planned.node, now_s)
            fault.at_s = planned.at_s
            self.log.close(fault, FaultOutcome.MOOT, _RUN_ENDED_FIRST)

    def _enter(self, kind: FaultKind, target: str, now_s: float) -> Fault:
        return self.log.enter(
            kind, target, now_s - self._began_s if self._began_s is not None else 0.0
        )

    def _targets(self) -> list[str]:
        if self._began_s is None or self._over:
            return []
        return sorted(
            slot
            for slot in self._working
            if slot not in self._strikes and self.homes[slot] not in self._down
        )

    def _due(self, targets: list[str], slot: str, now_s: float) -> FaultKind | None:
        """The kind whose due strike falls on this slot.

        It draws again when the targets change, so none is lost.
        """
        for timer in self._timers:
            due = timer.rule.kind is not FaultKind.NODE and now_s >= timer.at_s
            if due and timer.drawn_from(targets, self.plan.seed) == slot:
                timer.wind(now_s)
                return timer.rule.kind
        return None

    def _by_chance(self, slot: Slot, submit: Directive) -> FaultKind | None:
        """Draw for each kind with a rate, as often as the slice is expected to have steps.

        The first that hits.
        """
        report, steps = slot.report, 1.0
        if report is not None and report.wall_s > 0:
            steps = max(1.0, report.counts.steps / report.wall_s * submit.duration_s)
        for rule in self.plan.rules:
            if rule.rate is not None and rule.kind not in STEP_FAULTS:
                share = 1.0 if rule.rate >= 1.0 else -math.expm1(steps * math.log1p(-rule.rate))
                if chance(self.plan.seed, rule.kind, slot.slot, submit.sequence) < share:
                    return rule.kind
        return None

    def _end_node(self, node: str, pause_s: float, now_s: float) -> NodeCommand:
        if (before := self._down.pop(node, None)) is not None:
            self.log.close(
                before.fault, FaultOutcome.NOT_BACK, "not back before it was ended again"
            )
        self._down[node] = _Down(
            fault=self._enter(FaultKind.NODE, node, now_s),
            ended_at_s=now_s,
            start_at_s=now_s + pause_s,
            waiting={slot for slot, home in self.homes.items() if home == node}
            - self._over_for_good,
            given_up=[],
        )
        return NodeCommand(node=node, start=False)

    def _process_gone(
        self, before: Slot, after: Slot, accepted: Report | None, *, died: bool, now_s: float
    ) -> None:
        """The slot's process is gone: by the injected fault, or by something else."""
        down = self._down.get(self.homes[after.slot])
        if down is not None:
            down.waiting.add(after.slot)
        strike = self._strikes.get(after.slot)
        if strike is None or strike.last_heard_s is not None:
            return
        if not died or down is not None:
            first = "its node was lost"
        elif accepted is not None and accepted.verdict is Verdict.OK:
            first = "its process was replaced"
        elif not strike.can_have_met(before):
            first = "its process ended in an earlier slice"
        else:
            strike.struck(before, after.reason, now_s)
            return
        self._close_strike(after.slot, FaultOutcome.MOOT, f"overtaken: {first} first")

    def _close_strike(
        self, slot: str, fate: FaultOutcome, became: str, recovered_s: float | None = None
    ) -> None:
        self.log.close(self._strikes.pop(slot).fault, fate, became, recovered_s)

    def _slot_back(self, after: Slot, now_s: float) -> None:
        strike = self._strikes.get(after.slot)
        if strike is not None and strike.last_heard_s is not None:
            took_s = now_s - strike.last_heard_s
            became = f"{after.state} again after {took_s:.1f} s"
            self._close_strike(after.slot, FaultOutcome.RECOVERED, became, took_s)
        node = self.homes[after.slot]
        if node in self._down:
            self._down[node].waiting.discard(after.slot)
            self._close_if_back(node, now_s)

    def _slot_given_up(self, after: Slot, now_s: float) -> None:
        slot, node = after.slot, self.homes[after.slot]
        self._over_for_good.add(slot)
        if (strike := self._strikes.get(slot)) is not None:
            if strike.last_heard_s is not None:
                self._close_strike(slot, FaultOutcome.GIVEN_UP, f"given up: {after.reason}")
            else:
                self._close_strike(
                    slot, FaultOutcome.MOOT, "overtaken: its slot was given up first"
                )
        if node in self._down and slot in self._down[node].waiting:
            self._down[node].waiting.discard(slot)
            self._down[node].given_up.append(slot)
            self._close_if_back(node, now_s)

    def _close_if_back(self, node: str, now_s: float) -> None:
        down = self._down[node]
        if down.start_at_s is not None or down.waiting:
            return
        del self._down[node]
        took_s = now_s - down.ended_at_s
        fate, became = FaultOutcome.RECOVERED, f"all its workers report again after {took_s:.1f} s"
        if down.given_up:
            fate, became = (
                FaultOutcome.GIVEN_UP,
                f"back after {took_s:.1f} s without {', '.join(down.given_up)}",
            )
        self.log.close(down.fault, fate, became, took_s)

    def _take_step_faults(
        self, after: Slot, report: Report, *, given_up: bool, now_s: float
    ) -> None:
        fate, became = FaultOutcome.SURVIVED, "survived in the same slice"
        if given_up:
            fate, became = FaultOutcome.GIVEN_UP, f"given up: {after.reason}"
        elif report.error is not None:
            became = "ended its slice; the process continued"
        for event in report.events:
            kind, count = event.detail.get("kind"), event.detail.get("count")
            if event.name != "chaos" or kind not in STEP_FAULTS or not isinstance(count, int):
                continue
            words = became
            if kind == FaultKind.FLIP:
                words = (
                    "found by the check"
                    if report.counts.verify_errors >= count
                    else "not all found by the checks"
                )
            key = (FaultKind(str(kind)), after.slot, words)
            if key in self._steps:
                self._steps[key].count += count
            else:
                self._steps[key] = fault = self._enter(key[0], after.slot, now_s)
                fault.fate, fault.became, fault.count = fate, words, count


def chance(seed: int, *words: object) -> float:
    """Return a number in [0, 1) that looks random and is always the same for the same seed and
    words.
    """
    text = "\x1f".join(str(word) for word in (seed, *words))
    drawn = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(drawn, "big") >> 11) / 2**53
