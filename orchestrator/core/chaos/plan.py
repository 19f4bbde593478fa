"""What `run --chaos` asks for: the grammar of the option, and what a cluster must be for it.

Does not choose the slices (`schedule.py`), and injects nothing. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

from orchestrator.config.duration import format_duration, parse_duration
from orchestrator.errors import Problem, UsageError
from workers.messages import FaultKind
from workers.settings import FailureKind, StepFaults

#: Longest text of the option; a plan that needs more is a typing error.
_MAX_CHARS = 2000

#: A fault more often than this would meet workers that have not reported since the last one.
_MIN_EVERY_S = 1.0

#: How long an ended node stays down unless the user says: long enough for Ray to notice.
_NODE_PAUSE_S = 15.0

_STRIKES = (FaultKind.KILL, FaultKind.SEGV, FaultKind.EXIT, FaultKind.HANG, FaultKind.POISON)

_VALID = {
    FaultKind.OOM: "oom:rate=0.05, oom:num=2,skip=10 or both; and kind=definite or kind=probable",
    FaultKind.RAISE: "raise:rate=0.001",
    FaultKind.FLIP: "flip:rate=0.1",
    FaultKind.NODE: "node:NAME@30s, node:NAME@30s+20s, or node:every=120s,for=15s",
    **{kind: f"{kind}:every=20s or {kind}:rate=0.001" for kind in _STRIKES},
}
_KEYS = {
    FaultKind.OOM: ("rate", "num", "skip", "kind"),
    FaultKind.RAISE: ("rate",),
    FaultKind.FLIP: ("rate",),
    FaultKind.NODE: ("every", "for"),
    **dict.fromkeys(_STRIKES, ("every", "rate")),
}
_VALID_TIME = "a time with its unit: 30s, 2m, 1h30m"
_RATE = re.compile(r"(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(?:e-?\d{1,2})?", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)

#: What was typed for each key of a kind: the piece it stood in, and the value.
_Typed: TypeAlias = dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeRule:
    """One kind of fault, by the clock or by chance; exactly one of the two is given."""

    kind: FaultKind
    every_s: float | None
    rate: float | None
    """Chance for each step, above 0, at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """A named node is ended at a time of the run, and comes back."""

    node: str
    at_s: float
    """Seconds after the run began to count."""
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomNodes:
    """A random node other than the head's is ended every so often, and comes back."""

    every_s: float
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """What `--chaos` asks for."""

    seed: int
    steps: StepFaults | None = None
    strikes: tuple[StrikeRule, ...] = ()
    node_faults: tuple[NodeFault, ...] = ()
    """In the order of their times."""
    random_nodes: RandomNodes | None = None

    def step_faults(self) -> StepFaults | None:
        """What every worker gets; `None` if no fault of this plan happens inside a worker."""
        return self.steps or (StepFaults(seed=self.seed) if self.strikes else None)

    def nodes_named(self) -> tuple[str, ...]:
        """The nodes that the plan names, each once."""
        return tuple(dict.fromkeys(fault.node for fault in self.node_faults))

    def kinds(self) -> tuple[FaultKind, ...]:
        """The kinds of fault that it can bring, in the order of `FaultKind`."""
        kinds = {rule.kind for rule in self.strikes}
        if self.steps is not None and (self.steps.oom_rate or self.steps.oom_num):
            kinds.add(FaultKind.OOM)
        if self.steps is not None and self.steps.raise_rate:
            kinds.add(FaultKind.RAISE)
        if self.steps is not None and self.steps.flip_rate:
            kinds.add(FaultKind.FLIP)
        if self.node_faults or self.random_nodes is not None:
            kinds.add(FaultKind.NODE)
        return tuple(kind for kind in FaultKind if kind in kinds)

    def describe(self) -> str:
        """The plan in one line, for the user."""
        words = [] if self.steps is None else _described_steps(self.steps)
        for rule in self.strikes:
            often = f"every {format_duration(rule.every_s)}" if rule.every_s is not None else _share(rule.rate or 0.0)
            words.append(f"{rule.kind} {often}")
        for fault in self.node_faults:
            words.append(f"node {fault.node} at {format_duration(fault.at_s)} for {format_duration(fault.pause_s)}")
        if self.random_nodes is not None:
            every, pause = format_duration(self.random_nodes.every_s), format_duration(self.random_nodes.pause_s)
            words.append(f"a random node every {every} for {pause}")
        return f"{'; '.join(words)} (seed {self.seed})"


def _described_steps(steps: StepFaults) -> list[str]:
    words = []
    kind = "" if steps.oom_kind is FailureKind.DEFINITE else f" ({steps.oom_kind})"
    if steps.oom_rate:
        words.append(f"oom{kind} {_share(steps.oom_rate)}")
    if steps.oom_num:
        words.append(f"oom{kind} in {steps.oom_num} steps after the first {steps.oom_skip} of each process")
    if steps.raise_rate:
        words.append(f"raise {_share(steps.raise_rate)}")
    if steps.flip_rate:
        words.append(f"flip a bit before {100 * steps.flip_rate:g} % of checks")
    return words


def _share(rate: float) -> str:
    return f"in {100 * rate:g} % of steps"


def parse_chaos(text: str, seed: int = 0) -> ChaosPlan:
    """Return the plan that `text` describes, `oom:rate=0.05;kill:every=20s;node:pc2@30s`.

    Raises:
        UsageError: It cannot be read; names the piece that is wrong and what may be typed instead.
    """
    if len(text) > _MAX_CHARS:
        raise _refusal(text, f"is longer than {_MAX_CHARS} characters")
    pieces = [piece.strip() for piece in text.split(";") if piece.strip()]
    if not pieces:
        raise _refusal(text, "names no fault", ", ".join(FaultKind))
    typed: dict[FaultKind, _Typed] = {}
    node_faults: list[NodeFault] = []
    for piece in pieces:
        kind, rest = _kind_of(piece)
        if kind is FaultKind.NODE and "@" in rest:
            node_faults.append(_node_fault(piece, rest))
        else:
            _collect(piece, kind, rest, typed.setdefault(kind, {}))
    return ChaosPlan(
        seed=seed,
        steps=_steps(typed, seed),
        strikes=tuple(_strike_rule(kind, typed[kind]) for kind in _STRIKES if kind in typed),
        node_faults=_in_order(node_faults),
        random_nodes=_random_nodes(typed.get(FaultKind.NODE)),
    )


def check(plan: ChaosPlan, nodes: Collection[str], head_node: str, *, is_rehearsal: bool) -> None:
    """Refuse what this cluster cannot do.

    Raises:
        UsageError: Faults of nodes outside a rehearsal, or of a node that is not there or carries the head.
    """
    if FaultKind.NODE not in plan.kinds():
        return
    what = "node:…"
    if not is_rehearsal:
        raise _refusal(what, "only a rehearsal owns the raylets that it could end", "faults of workers, or --rehearse")
    others = [node for node in nodes if node != head_node]
    valid = ", ".join(others) or "no node: the head's is the only one"
    if not others:
        raise _refusal(what, f"{head_node} is the only node, and its raylet carries the head", valid)
    for node in plan.nodes_named():
        if node == head_node:
            raise _refusal(f"node:{node}", "its raylet carries the head, which would end with it", valid)
        if node not in nodes:
            near = get_close_matches(node, others, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _refusal(f"node:{node}", f"there is no such node{hint}", valid)


def _refusal(piece: str, text: str, valid: str | None = None) -> UsageError:
    return UsageError(str(Problem(f"--chaos {piece}", None, None, text, valid)))


def _kind_of(piece: str) -> tuple[FaultKind, str]:
    word, colon, rest = (part.strip() for part in piece.partition(":"))
    known = [kind.value for kind in FaultKind]
    if word not in known:
        near = get_close_matches(word[:50].lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _refusal(piece, f"there is no such fault{hint}", ", ".join(known))
    kind = FaultKind(word)
    if not colon or not rest:
        raise _refusal(piece, "does not say how often", _VALID[kind])
    return kind, rest


def _collect(piece: str, kind: FaultKind, rest: str, into: _Typed) -> None:
    for option in rest.split(","):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in _KEYS[kind]:
            raise _refusal(piece, f"{kind} takes {', '.join(f'{known}=' for known in _KEYS[kind])}", _VALID[kind])
        if key in into:
            raise _refusal(piece, f"{key} of {kind} is given twice", _VALID[kind])
        into[key] = (piece, value)


def _steps(typed: Mapping[FaultKind, _Typed], seed: int) -> StepFaults | None:
    oom, raising, flipping = (typed.get(kind, {}) for kind in (FaultKind.OOM, FaultKind.RAISE, FaultKind.FLIP))
    if not oom and not raising and not flipping:
        return None
    for piece, _ in oom.values():
        if "rate" not in oom and "num" not in oom:
            raise _refusal(piece, "says neither rate nor num", _VALID[FaultKind.OOM])
        if "skip" in oom and "num" not in oom:
            raise _refusal(piece, "says skip without num", _VALID[FaultKind.OOM])
    kinds = {kind.value: kind for kind in (FailureKind.DEFINITE, FailureKind.PROBABLE)}
    piece, kind = oom.get("kind", ("", FailureKind.DEFINITE.value))
    if kind not in kinds:
        raise _refusal(piece, "there is no such kind of out-of-memory", ", ".join(kinds))
    return StepFaults(
        seed=seed,
        oom_rate=_rate(*oom["rate"]) if "rate" in oom else 0.0,
        oom_num=_count(*oom["num"], at_least=1) if "num" in oom else 0,
        oom_skip=_count(*oom["skip"], at_least=0) if "skip" in oom else 0,
        oom_kind=kinds[kind],
        raise_rate=_rate(*raising["rate"]) if "rate" in raising else 0.0,
        flip_rate=_rate(*flipping["rate"]) if "rate" in flipping else 0.0,
    )


def _strike_rule(kind: FaultKind, typed: _Typed) -> StrikeRule:
    if len(typed) > 1:
        raise _refusal(typed["rate"][0], f"{kind} happens by the clock or by chance, not both", _VALID[kind])
    if "every" in typed:
        return StrikeRule(kind=kind, every_s=_every(*typed["every"]), rate=None)
    return StrikeRule(kind=kind, every_s=None, rate=_rate(*typed["rate"]))


def _random_nodes(typed: _Typed | None) -> RandomNodes | None:
    if typed is None:
        return None
    if "every" not in typed:
        raise _refusal(typed["for"][0], "does not say how often", _VALID[FaultKind.NODE])
    pause_s = _time(*typed["for"]) if "for" in typed else _NODE_PAUSE_S
    return RandomNodes(every_s=_every(*typed["every"]), pause_s=pause_s)


def _node_fault(piece: str, rest: str) -> NodeFault:
    node, _, when = (part.strip() for part in rest.partition("@"))
    if not node:
        raise _refusal(piece, "names no node before the @", _VALID[FaultKind.NODE])
    at, plus, pause = (part.strip() for part in when.partition("+"))
    pause_s = _time(piece, pause) if plus else _NODE_PAUSE_S
    return NodeFault(node=node, at_s=_time(piece, at), pause_s=pause_s)


def _in_order(faults: Sequence[NodeFault]) -> tuple[NodeFault, ...]:
    ordered = tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.node)))
    down_until_s: dict[str, float] = {}
    for fault in ordered:
        if fault.at_s <= down_until_s.get(fault.node, 0.0):
            text = f"it is still down then, until {format_duration(down_until_s[fault.node])}"
            raise _refusal(f"node:{fault.node}@{format_duration(fault.at_s)}", text, "a later time, or a shorter pause")
        down_until_s[fault.node] = fault.at_s + fault.pause_s
    return ordered


def _every(piece: str, text: str) -> float:
    every_s = _time(piece, text)
    if every_s < _MIN_EVERY_S:
        raise _refusal(piece, f"{format_duration(every_s)} is too often", f"every={_MIN_EVERY_S:g}s and longer")
    return every_s


def _time(piece: str, text: str) -> float:
    # Elsewhere a plain number means minutes; after an @ that would be unexpected.
    if text[-1:].isalpha():
        try:
            return parse_duration(text)
        except ValueError:
            pass
    raise _refusal(piece, f"{_quoted(text)} is not a time", _VALID_TIME)


def _rate(piece: str, text: str) -> float:
    rate = float(text) if _RATE.fullmatch(text) else 0.0
    if not 0.0 < rate <= 1.0:
        raise _refusal(piece, f"{_quoted(text)} is not a rate", "a share of steps above 0, at most 1: 0.05 is 5 %")
    return rate


def _count(piece: str, text: str, *, at_least: int) -> int:
    count = int(text) if _COUNT.fullmatch(text) else -1
    if count < at_least:
        raise _refusal(piece, f"{_quoted(text)} is not a count", f"a whole number from {at_least} to 999999999")
    return count


def _quoted(text: str) -> str:
    return f"'{text}'" if len(text) <= 40 else f"'{text[:37]}…'"
