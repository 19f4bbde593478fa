"""The values of the queue: a job, how it stands, what users send, and what is seen of the cards.

Frozen values without behaviour. How a job may move is in `lifecycle.py`, what a turn decides in
`queue.py`. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Final, TypeAlias

from workers.messages import Cause
from workers.settings import CommandSpec, Scalar

#: Values by key, such as `train.lr`.
Settings: TypeAlias = Mapping[str, Scalar]

#: Between the names of the cards that a team has at the same time.
JOINT: Final = "+"

#: Settings of a training that change neither its memory nor the time of a step.
SAME_STEP: Final = frozenset(
    {"steps", "epochs", "lr", "warmup_steps", "weight_decay", "dropout", "label_smoothing"}
)
_SAME_STEP_KEYS: Final = {f"train.{key}" for key in SAME_STEP} | {"train.from", "workload.seed"}


class JobState(StrEnum):
    """How a job stands. Shown."""

    #: The jobs that it comes after have not ended.
    WAITING = "WAITING"
    #: It may start, and waits for a place on a card.
    QUEUED = "QUEUED"
    #: An attempt of it has a place.
    RUNNING = "RUNNING"
    #: Its attempt saves, and then goes on elsewhere.
    MOVING = "MOVING"
    #: Its work is done, its card is given back, and what it leaves is put into its folder.
    SAVING = "SAVING"
    #: Its attempt gave the card back, and waits for it: hours, a full card, a lost node.
    PARKED = "PARKED"
    #: It reached a milestone, and others go first.
    PAUSED = "PAUSED"
    #: It saved and gave its card to a job of higher priority, and is in line again.
    PREEMPTED = "PREEMPTED"
    #: The user has it wait.
    HELD = "HELD"
    DONE = "DONE"
    FAILED = "FAILED"
    #: Its milestone sent it to rest, and its sweep has ended.
    STOPPED = "STOPPED"
    CANCELLED = "CANCELLED"
    #: A job that it comes after did not end well.
    SKIPPED = "SKIPPED"
    #: No card here can ever hold it.
    INFEASIBLE = "INFEASIBLE"


#: A job in one of these states has ended; only `retry` begins it again.
ENDED = frozenset(
    {
        JobState.DONE,
        JobState.FAILED,
        JobState.STOPPED,
        JobState.CANCELLED,
        JobState.SKIPPED,
        JobState.INFEASIBLE,
    }
)

#: A job in one of these states has an attempt on a card.
ON_CARD = frozenset({JobState.RUNNING, JobState.MOVING})


#: A job in one of these states starts as soon as it has a place.
IN_LINE = frozenset({JobState.QUEUED, JobState.PREEMPTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """When members of a sweep are compared (ASHA; Li et al., 2020, arXiv 1810.05934).

    Counted in optimiser steps, never in time, so that a slow card costs no job its place.
    """

    metric: str
    """`loss`, `validation_loss`, or what a program writes into its results."""
    is_min: bool
    first: int | None = None
    """`None`: the metric alone is named, and no member is paused."""
    factor: int = 3
    last: int | None = None
    """`None`: the steps of each member."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a user wants done. Never changes."""

    name: str
    """Unique in its queue; the name of its slot and of its folder. Slots of a team begin with it.
    """
    id: str
    """Hash of its content, with the number of its occurrence: the same file gives the same ids."""
    sweep: str | None = None
    """The entry that made it, together with others."""
    settings: Settings = field(default_factory=dict)
    """What distinguishes it within its sweep, as dotted keys."""
    ranges: Mapping[str, tuple[str, Sequence[Scalar]]] = field(default_factory=dict)
    """Of a sweep of method optuna: the kind and the bounds or choices of each of its settings."""
    seed: int = 0
    """Of the same sweep."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Of a training: dotted keys of cluster.yaml and their values."""
    command: CommandSpec | None = None
    """`None`: it is a training."""
    after: tuple[str, ...] = ()
    after_any: bool = False
    """Whether it may start however those of `after` ended."""
    priority: int = 0
    retries: int = 1
    nodes: tuple[str, ...] = ()
    """Where it may run; empty: anywhere."""
    card: str | None = None
    """A part of the card's name that it needs."""
    memory_bytes: int | None = None
    """What it needs on a card, as the user says; `None`: predicted or measured."""
    pack: bool = False
    """Whether it may share a card with another job that says so."""
    preempt: bool = False
    """Whether jobs of lower priority save and make room for it where it has no card else."""
    parks: bool = False
    """Of a command: whether it saves at SIGTERM and goes on when it is started again."""
    hours: tuple[int, int] | None = None
    """Minutes of the local day from and to which it may run; may cross midnight."""
    milestones: Milestones | None = None
    steps: int | None = None
    """Optimiser steps of a training, where they are known."""
    origin: str = ""
    """Where it was typed, such as `night.yaml:7`."""
    submitted_at_unix_s: float = 0.0
    code: str | None = None
    """Git commit and hash of the files of its folder when it was submitted."""

    @cached_property
    def likeness(self) -> str | None:
        """What jobs have in common whose steps cost the same; `None`: nothing says that."""
        if self.command is not None or self.steps is None:
            return None
        cost = {key: value for key, value in self.overrides.items() if key not in _SAME_STEP_KEYS}
        return json.dumps(cost, sort_keys=True, default=str)

    @property
    def hours_text(self) -> str | None:
        """Its hours such as `22:00-07:00`."""
        hours = self.hours
        return hours and "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in hours)

    @property
    def is_team(self) -> bool:
        """Whether it takes all cards of the PCs that `train.team` names, at the same time."""
        return self.overrides.get("train.team") is not None

    @property
    def is_divided(self) -> bool:
        """Whether it is a team whose members divide the model: none goes on without the other."""
        return self.is_team and self.overrides.get("train.split") == "layers"

    def out_of_hours(self, minute: int) -> str | None:
        """Return its hours in words where it may not run at this minute of the day."""
        start, end = self.hours or (0, 24 * 60)
        is_within = start <= minute < end if start < end else minute >= start or minute < end
        return None if is_within else f"hours {self.hours_text}"

    @property
    def awaits_settings(self) -> bool:
        """Whether its settings are chosen when a place becomes free."""
        return bool(self.ranges) and not self.settings

    def with_settings(self, settings: Settings) -> Job:
        """Return it with these settings: in its overrides, or in the words of its command."""

        def filled(text: str) -> str:
            for key, value in settings.items():
                text = text.replace(f"{{{key}}}", str(value))
            return text

        if self.command is not None:
            return replace(self.with_texts(filled), settings=settings)
        steps: object = settings.get("train.steps", self.steps)
        has_steps = self.steps is not None and settings.get("train.epochs") is None
        return replace(
            self,
            settings=settings,
            overrides={**self.overrides, **settings},
            steps=steps if has_steps and isinstance(steps, int) else None,
        )

    def with_texts(self, changed: Callable[[str], str]) -> Job:
        """Return it with another text for each of its overrides and of the words of its command."""
        overrides = self.overrides.items()
        command = self.command
        if command is not None:
            command = replace(
                command,
                argv=tuple(map(changed, command.argv)),
                cwd=None if command.cwd is None else changed(command.cwd),
                env={name: changed(text) for name, text in command.env.items()},
            )
        return replace(
            self,
            overrides={key: changed(it) if isinstance(it, str) else it for key, it in overrides},
            command=command,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card as it is now, with what it can give to jobs."""

    name: str
    """`pc1`, or `pc1:1` on a node with several; of a team's cards together `pc1+pc2`."""
    node: str
    title: str
    """What it is, such as `RTX 3090`."""
    room_bytes: int
    """All shares of its workers together, contexts included."""
    speed: float
    """Relative to the others: rated until it is measured."""
    closed: str | None = None
    """Why nothing may start there now: its node is away, a foreign program has it; `None`: it may.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """What is seen of the attempt of a job that has a place."""

    attempt: int
    is_at_rest: bool = False
    """Whether its process has ended because it was asked to; its state is saved."""
    node_lost: bool = False
    cause: Cause | None = None
    """Why it ended; `None` while it goes on."""
    text: str = ""
    """In words: the error, or what it does now."""
    exit_code: int | None = None
    step: int | None = None
    """Optimiser steps, or what the program tells."""
    value: float | None = None
    """Of the job's metric, at `step`."""
    steps_per_s: float | None = None
    eta_s: float | None = None
    peak_bytes: int | None = None
    out_of_memory: int = 0
    """Times that this happened in the attempt."""
    has_no_room: bool = False
    """Whether not even its smallest step fits."""
    taken: str | None = None
    """What other programs hold of its card, where that is why."""
    sha256: str | None = None
    """Of its weights, once it is done."""
    cards: str | None = None
    """Of a team: its cards, first that of the member of which all of this is: the one that is
    furthest, or leads a divided model.
    """


class JobOrder(StrEnum):
    """What a user says of jobs."""

    HOLD = "hold"
    RELEASE = "release"
    CANCEL = "cancel"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A user wants a job done."""

    job: Job
    least_bytes: int | None = None
    """Below this not even its smallest step fits, as predicted; `None`: not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOrder:
    """A user says something of a job, or of the queue."""

    id: str
    """Of the command, so that one that comes twice is obeyed once."""
    order: JobOrder
    job: str | None
    """`None`: HOLD has nothing start any more, RELEASE has it go on."""
    by: str


#: What users send to a queue.
Sent: TypeAlias = Submitted | UserOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All that a decision depends on besides the queue itself."""

    now_s: float
    """Unix seconds that never go back."""
    minute_of_day: int
    """Local."""
    cards: tuple[Card, ...]
    seen: Mapping[str, AttemptStatus] = field(default_factory=dict)
    """By job, of each that has a place."""
    left: Mapping[str, tuple[JobState, str]] = field(default_factory=dict)
    """By job that is SAVING, once something is known of what it leaves: DONE, FAILED where that can
    never be put into its folder, or SAVING where it cannot be yet; and why.
    """
    chosen: Mapping[str, tuple[Settings, int | None] | str] = field(default_factory=dict)
    """By member of a sweep of method optuna: its settings with its `least_bytes` as of `Submitted`,
    or why there are none.
    """
    sent: Sequence[Sent] = ()
    """By users, and not taken yet."""
    away_s: float = 0.0
    """For so long until now no head was at work, or the PC was suspended: nothing ran or waited."""
    disk_full: str | None = None
    """One sentence where nothing can be written any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a job stands: all that is stored of it."""

    job: Job
    number: int = 0
    """In order of submission."""
    state: JobState
    reason: str
    since_s: float
    """When it came into this state; of one on a card later by the time without a head."""
    attempt: int = 0
    """Of the last or present one; 0 before the first."""
    last_card: str | None = None
    """Where its present or last attempt is or was; of a team that is done, first the card of the
    member which has ended it, and of a divided model always that of the member which leads.
    """
    budget_bytes: int | None = None
    alone: bool = True
    recalled_to: JobState | None = None
    """Where it goes once its attempt is at rest."""
    wake_at_s: float = 0.0
    """While PARKED: not before."""
    failures: int = 0
    """Attempts that count against its retries."""
    in_vain: int = 0
    """Attempts in a row that ended soon, by what is not its fault as far as is known."""
    in_row: int = 0
    """Attempts in a row that were not counted, of which the last ones ended soon."""
    no_room: int = 0
    """Times in a row that it had no room, and no card was larger."""
    last_error: str | None = None
    out_of_memory: int = 0
    moves: int = 0
    """Attempts on another card than the one before."""
    ran_s: float = 0.0
    parked_s: float = 0.0
    step: int | None = None
    value: float | None = None
    best: float | None = None
    best_step: int | None = None
    peak_bytes: int | None = None
    """Most that any attempt of it took."""
    least_room_bytes: int | None = None
    """A card with less room is not tried (again): predicted, or its attempt ran out of memory."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Steps per second by the title of a card."""
    measured_at_s: float = 0.0
    reached: tuple[tuple[int, float, float], ...] = ()
    """Its milestones: the step, the value of its metric, and the world's time."""
    exit_code: int | None = None
    sha256: str | None = None
    expected_start_s: float | None = None
    """World seconds; only for those who look."""

    @property
    def card(self) -> str | None:
        """Where its attempt is; `None` where it has none now."""
        return self.last_card if self.state in ON_CARD else None

    @property
    def places(self) -> dict[str, str]:
        """The card of each of its slots, also when these have ended. A team has a slot for each."""
        cards = (self.last_card or "").split(JOINT)
        if not self.job.is_team or self.last_card is None:
            return {self.job.name: cards[0]}
        parts = ((card, card.partition(":")) for card in cards)
        return {f"{self.job.name}/{node}/{index or 0}": card for card, (node, _, index) in parts}

    @property
    def milestone(self) -> int:
        """The last that it reached; 0 before the first."""
        return self.reached[-1][0] if self.reached else 0
