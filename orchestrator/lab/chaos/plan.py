"""What `run --chaos` asks for: the grammar of the option, and what a cluster must
be for it. Pure.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from orchestrator.config.duration import format_duration, parse_duration
from orchestrator.errors import Problem, UsageError
from workers.messages import FaultKind

#: Longest text of the option; a plan that needs more is a typing error.
_MAX_CHARS = 2000

#: A fault more often than this would meet workers that have not reported since the last one.
_MIN_EVERY_S = 1.0

#: How long an ended node stays down unless the user says: long enough for Ray to notice.
_NODE_PAUSE_S = 15.0

#: Faults of single steps and checks, which reports name by their events.
STEP_FAULTS = frozenset({FaultKind.OOM, FaultKind.RAISE, FaultKind.FLIP})

#: Faults of a whole process.
_STRIKES = tuple(kind for kind in FaultKind if kind not in {*STEP_FAULTS, FaultKind.NODE})

_VALID = {
    FaultKind.OOM: "oom:rate=0.05, oom:num=2,skip=10 or both",
    FaultKind.RAISE: "raise:rate=0.001",
    FaultKind.FLIP: "flip:rate=0.1",
    FaultKind.NODE: "node:NAME@30s, node:NAME@30s+20s, or node:every=120s,for=15s",
    **{kind: f"{kind}:every=20s or {kind}:rate=0.001" for kind in _STRIKES},
}
_RATE = re.compile(r"(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(?:e-?\d{1,2})?", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """One kind of fault: by chance, by the clock, or in given steps.

    Each kind has some of the fields.
    """

    kind: FaultKind
    rate: float | None = None
    """Chance for each step or check, above 0, at most 1."""
    every_s: float | None = None
    num: int = 0
    """So many steps of each process, after the first `skip`."""
    skip: int = 0
    pause_s: float = _NODE_PAUSE_S
    """How long a random node other than the head's stays down."""

    def describe(self) -> list[str]:
        """The rule in words, for the user."""
        words = []
        if self.kind is FaultKind.FLIP:
            words.append(f"flip a bit before {100 * (self.rate or 0.0):g} % of checks")
        elif self.rate is not None:
            words.append(f"{self.kind} in {100 * self.rate:g} % of steps")
        if self.num:
            words.append(
                f"{self.kind} in {self.num} steps after the first {self.skip} of each process"
            )
        if self.every_s is not None:
            every = f"every {format_duration(self.every_s)}"
            is_node = self.kind is FaultKind.NODE
            words.append(
                f"a random node {every} for {format_duration(self.pause_s)}"
                if is_node
                else f"{self.kind} {every}"
            )
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """A named node is ended at a time of the run, and comes back."""

    node: str
    at_s: float
    """Seconds after the run began to count."""
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """What `--chaos` asks for."""

    seed: int
    rules: tuple[FaultRule, ...] = ()
    """At most one of each kind, in the order of `FaultKind`."""
    node_faults: tuple[NodeFault, ...] = ()
    """In the order of their times."""

    def step_faults(self) -> dict[str, Any] | None:
        """What every worker gets: fields of `workers.workloads.chaos.StepFaults`.

        `None` if no fault of this plan happens inside a worker.
        """
        if all(rule.kind is FaultKind.NODE for rule in self.rules):
            return None
        faults: dict[str, Any] = {"seed": self.seed}
        for rule in self.rules:
            if rule.kind in STEP_FAULTS:
                faults[f"{rule.kind}_rate"] = rule.rate or 0.0
            if rule.kind is FaultKind.OOM:
                faults |= {"oom_num": rule.num, "oom_skip": rule.skip}
        return faults

    def kinds(self) -> tuple[FaultKind, ...]:
        """The kinds of fault that it can bring, in the order of `FaultKind`."""
        kinds = {rule.kind for rule in self.rules} | (
            {FaultKind.NODE} if self.node_faults else set()
        )
        return tuple(kind for kind in FaultKind if kind in kinds)

    def describe(self) -> str:
        """The plan in one line, for the user."""
        words: dict[FaultKind, list[str]] = {kind: [] for kind in FaultKind}
        words[FaultKind.NODE] = [
            f"node {fault.node} at {format_duration(fault.at_s)} for "
            f"{format_duration(fault.pause_s)}"
            for fault in self.node_faults
        ]
        for rule in self.rules:
            words[rule.kind] += rule.describe()
        return f"{'; '.join(itertools.chain(*words.values()))} (seed {self.seed})"


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
    typed: dict[FaultKind, tuple[str, dict[str, Any]]] = {}
    node_faults: list[NodeFault] = []
    for piece in pieces:
        kind, rest = _kind_of(piece)
        if kind is FaultKind.NODE and "@" in rest:
            node_faults.append(_node_fault(piece, rest))
        else:
            _, before = typed.get(kind, ("", {}))
            typed[kind] = (piece, before | _options(piece, kind, rest, before))
    return ChaosPlan(
        seed=seed,
        rules=tuple(_rule(kind, *typed[kind]) for kind in FaultKind if kind in typed),
        node_faults=_in_order(node_faults),
    )


def check_nodes(
    plan: ChaosPlan, nodes: Collection[str], head_node: str, *, is_rehearsal: bool
) -> None:
    """Refuse, as a `UsageError`, faults of nodes that cannot be ended here."""
    if FaultKind.NODE not in plan.kinds():
        return
    what = "node:…"
    if not is_rehearsal:
        raise _refusal(
            what,
            "only a rehearsal owns the raylets that it could end",
            "faults of workers, or --rehearse",
        )
    others = [node for node in nodes if node != head_node]
    valid = ", ".join(others) or "no node: the head's is the only one"
    if not others:
        raise _refusal(
            what, f"{head_node} is the only node, and its raylet carries the head", valid
        )
    for node in (fault.node for fault in plan.node_faults):
        if node == head_node:
            raise _refusal(
                f"node:{node}", "its raylet carries the head, which would end with it", valid
            )
        if node not in nodes:
            raise _refusal(f"node:{node}", f"there is no such node{_nearest(node, others)}", valid)


def _refusal(piece: str, text: str, valid: str | None = None) -> UsageError:
    return UsageError(str(Problem(f"--chaos {piece}", None, None, text, valid)))


def _nearest(word: str, valid: Sequence[str]) -> str:
    near = get_close_matches(word[:50].lower(), valid, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _kind_of(piece: str) -> tuple[FaultKind, str]:
    word, _, rest = (part.strip() for part in piece.partition(":"))
    valid = [kind.value for kind in FaultKind]
    if word not in valid:
        raise _refusal(piece, f"there is no such fault{_nearest(word, valid)}", ", ".join(valid))
    if not rest:
        raise _refusal(piece, "does not say how often", _VALID[FaultKind(word)])
    return FaultKind(word), rest


def _options(piece: str, kind: FaultKind, rest: str, before: Collection[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for option in rest.split(","):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in _OPTIONS[kind]:
            raise _refusal(
                piece,
                f"{kind} takes {', '.join(f'{valid}=' for valid in _OPTIONS[kind])}",
                _VALID[kind],
            )
        name, read = _OPTIONS[kind][key]
        if name in options or name in before:
            raise _refusal(piece, f"{key} of {kind} is given twice", _VALID[kind])
        options[name] = read(piece, value)
    return options


def _rule(kind: FaultKind, piece: str, options: dict[str, Any]) -> FaultRule:
    rule, problem = FaultRule(kind=kind, **options), None
    if kind is FaultKind.OOM:
        if rule.rate is None and not rule.num:
            problem = "says neither rate nor num"
        elif "skip" in options and not rule.num:
            problem = "says skip without num"
    elif rule.rate is None and rule.every_s is None:
        problem = "does not say how often"
    elif rule.rate is not None and rule.every_s is not None:
        problem = f"{kind} happens by the clock or by chance, not both"
    if problem is not None:
        raise _refusal(piece, problem, _VALID[kind])
    return rule


def _node_fault(piece: str, rest: str) -> NodeFault:
    node, _, when = (part.strip() for part in rest.partition("@"))
    if not node:
        raise _refusal(piece, "names no node before the @", _VALID[FaultKind.NODE])
    at, plus, pause = (part.strip() for part in when.partition("+"))
    return NodeFault(
        node=node, at_s=_time(piece, at), pause_s=_time(piece, pause) if plus else _NODE_PAUSE_S
    )


def _in_order(faults: Sequence[NodeFault]) -> tuple[NodeFault, ...]:
    ordered = tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.node)))
    down_until_s: dict[str, float] = {}
    for fault in ordered:
        if fault.at_s <= down_until_s.get(fault.node, 0.0):
            text = f"it is still down then, until {format_duration(down_until_s[fault.node])}"
            raise _refusal(
                f"node:{fault.node}@{format_duration(fault.at_s)}",
                text,
                "a later time, or a shorter pause",
            )
        down_until_s[fault.node] = fault.at_s + fault.pause_s
    return ordered


def _every(piece: str, text: str) -> float:
    every_s = _time(piece, text)
    if every_s < _MIN_EVERY_S:
        raise _refusal(
            piece, f"{format_duration(every_s)} is too often", f"every={_MIN_EVERY_S:g}s and longer"
        )
    return every_s


def _time(piece: str, text: str) -> float:
    # Elsewhere a plain number means minutes; after an @ that would be unexpected.
    if text[-1:].isalpha():
        with contextlib.suppress(ValueError):
            return parse_duration(text)
    raise _refusal(piece, f"{_quoted(text)} is not a time", "a time with its unit: 30s, 2m, 1h30m")


def _rate(piece: str, text: str) -> float:
    rate = float(text) if _RATE.fullmatch(text) else 0.0
    if not 0.0 < rate <= 1.0:
        raise _refusal(
            piece,
            f"{_quoted(text)} is not a rate",
            "a share of steps above 0, at most 1: 0.05 is 5 %",
        )
    return rate


def _count(piece: str, text: str, *, at_least: int) -> int:
    count = int(text) if _COUNT.fullmatch(text) else -1
    if count < at_least:
        raise _refusal(
            piece, f"{_quoted(text)} is not a count", f"a whole number from {at_least} to 999999999"
        )
    return count


def _quoted(text: str) -> str:
    return f"'{text}'" if len(text) <= 40 else f"'{text[:37]}…'"


#: Of each kind its keys: the field of the rule, and what reads the value.
_OPTIONS: Mapping[FaultKind, Mapping[str, tuple[str, Callable[[str, str], Any]]]] = {
    FaultKind.OOM: {
        "rate": ("rate", _rate),
        "num": ("num", partial(_count, at_least=1)),
        "skip": ("skip", partial(_count, at_least=0)),
    },
    FaultKind.RAISE: {"rate": ("rate", _rate)},
    FaultKind.FLIP: {"rate": ("rate", _rate)},
    FaultKind.NODE: {"every": ("every_s", _every), "for": ("pause_s", _time)},
    **{kind: {"every": ("every_s", _every), "rate": ("rate", _rate)} for kind in _STRIKES},
}
