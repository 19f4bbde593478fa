"""The values of the queue: jobs, their standings, messages of users, cards and observed attempts.

Frozen values without behaviour. `lifecycle.py` has the legal transitions of a job, `queue.py` the
decisions of a turn. Pure.
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

#: Separates the names of the cards that a team holds at the same time.
JOINT: Final = "+"

#: Settings of a training that change neither its memory nor the time of a step.
SAME_STEP: Final = frozenset(
    {"steps", "epochs", "lr", "warmup_steps", "weight_decay", "dropout", "label_smoothing"}
)
_SAME_STEP_KEYS: Final = {f"train.{key}" for key in SAME_STEP} | {"train.from", "workload.seed"}


class JobState(StrEnum):
    """The state of a job, as users see it."""

    #: The jobs that it comes after have not ended.
    WAITING = "WAITING"
    #: The job may start, and waits for a place on a card.
    QUEUED = "QUEUED"
    #: An attempt of the job has a place.
    RUNNING = "RUNNING"
    #: The attempt saves, and the job then continues on another card.
    MOVING = "MOVING"
    #: The work is done and the card is free; the files are copied into the job's folder.
    SAVING = "SAVING"
    #: The job left its card and waits for a cause to pass: hours, a full card, a lost node.
    PARKED = "PARKED"
    #: The job reached a milestone, and better members of its sweep go first.
    PAUSED = "PAUSED"
    #: The job saved, gave its card to a job of higher priority, and is in line again.
    PREEMPTED = "PREEMPTED"
    #: The user holds the job.
    HELD = "HELD"
    DONE = "DONE"
    FAILED = "FAILED"
    #: The job was PAUSED at a milestone when its sweep ended.
    STOPPED = "STOPPED"
    CANCELLED = "CANCELLED"
    #: A job that it comes after did not end well.
    SKIPPED = "SKIPPED"
    #: No card of this run can ever hold the job.
    INFEASIBLE = "INFEASIBLE"


#: A job in one of these states has ended; only `retry` starts it again.
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
    """`loss`, `validation_loss`, or a key that a program writes into its results."""
    is_min: bool
    first: int | None = None
    """`None`: only the metric is named, and no member is paused."""
    factor: int = 3
    last: int | None = None
    """`None`: the number of steps of each member."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work that a user has submitted. A job never changes."""

    name: str
    """Unique in its queue; also names its folder and its slot. Slots of a team begin with it."""
    id: str
    """Hash of the job's content, name included: the same file always gives the same ids."""
    sweep: str | None = None
    """The name of the sweep's entry in the job file; `None`: the job is no member of a sweep."""
    settings: Settings = field(default_factory=dict)
    """The settings that distinguish a member within its sweep, as dotted keys."""
    ranges: Mapping[str, tuple[str, Sequence[Scalar]]] = field(default_factory=dict)
    """Sweeps of method optuna only: kind, and bounds or choices, of each setting."""
    seed: int = 0
    """Seed of a sweep of method optuna."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Trainings only: dotted keys of cluster.yaml and their values."""
    command: CommandSpec | None = None
    """`None`: the job is a training."""
    after: tuple[str, ...] = ()
    after_any: bool = False
    """Whether the job may start even if jobs of `after` did not end well."""
    priority: int = 0
    retries: int = 1
    nodes: tuple[str, ...] = ()
    """Nodes on which the job may run; empty: all."""
    card: str | None = None
    """Text that the name of its card must contain."""
    memory_bytes: int | None = None
    """Memory that it needs on a card according to the user; `None`: predicted or measured."""
    pack: bool = False
    """Whether the job may share a card with another job that has `pack`."""
    preempt: bool = False
    """Whether jobs of lower priority save and make room if the job has no card otherwise."""
    parks: bool = False
    """Commands only: whether the program saves at SIGTERM and resumes when it is started again."""
    hours: tuple[int, int] | None = None
    """First and last minute of the local day at which it may run; may cross midnight."""
    milestones: Milestones | None = None
    steps: int | None = None
    """Optimiser steps of a training; `None`: unknown."""
    origin: str = ""
    """Where the user typed the job, such as `night.yaml:7`."""
    submitted_at_unix_s: float = 0.0
    code: str | None = None
    """Git commit and hash of the files of its folder when it was submitted."""

    @cached_property
    def likeness(self) -> str | None:
        """A key that jobs share if their steps cost the same; `None`: their cost is unknown."""
        if self.command is not None or self.steps is None:
            return None
        cost = {key: value for key, value in self.overrides.items() if key not in _SAME_STEP_KEYS}
        return json.dumps(cost, sort_keys=True, default=str)

    @property
    def hours_text(self) -> str | None:
        """The hours in which the job may run, such as `22:00-07:00`."""
        hours = self.hours
        return hours and "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in hours)

    @property
    def is_team(self) -> bool:
        """Whether the job holds all cards of the PCs in `train.team` at the same time."""
        return self.overrides.get("train.team") is not None

    @property
    def is_divided(self) -> bool:
        """Whether the job is a team whose members divide the model, so all of them must run."""
        return self.is_team and self.overrides.get("train.split") == "layers"

    def out_of_hours(self, minute: int) -> str | None:
        """Return the job's hours as text if it may not run at `minute` of the day, else `None`."""
        start, end = self.hours or (0, 24 * 60)
        is_within = start <= minute < end if start < end else minute >= start or minute < end
        return None if is_within else f"hours {self.hours_text}"

    @property
    def awaits_settings(self) -> bool:
        """Whether Optuna has not chosen the settings yet; it does when a place is free."""
        return bool(self.ranges) and not self.settings

    def with_settings(self, settings: Settings) -> Job:
        """Return the job with `settings` in its overrides, or in the text of its command."""

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
        """Return the job with `changed` applied to the texts of its overrides and its command."""
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
    """A card, its memory for jobs, and whether jobs may start there now."""

    name: str
    """`pc1`, or `pc1:1` on a node with several cards; `pc1+pc2` for the cards of a team together.
    """
    node: str
    title: str
    """The product, such as `RTX 3090`."""
    room_bytes: int
    """Memory for jobs: the sum of the shares of its workers, contexts included."""
    speed: float
    """Relative to the other cards: the rated speed until one is measured."""
    closed: str | None = None
    """Why no job may start there now: lost node, foreign program; `None`: jobs may start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """The observed status of the attempt of a job that has a place."""

    attempt: int
    is_at_rest: bool = False
    """Whether the process has saved its state and ended because the head asked it to."""
    node_lost: bool = False
    cause: Cause | None = None
    """Why the attempt ended; `None` while it runs."""
    text: str = ""
    """The error, or what the attempt does now."""
    exit_code: int | None = None
    step: int | None = None
    """Optimiser steps, or the step that the program reports."""
    value: float | None = None
    """Value of the job's metric at `step`."""
    steps_per_s: float | None = None
    eta_s: float | None = None
    peak_bytes: int | None = None
    out_of_memory: int = 0
    """How often the attempt has run out of memory."""
    has_no_room: bool = False
    """Whether not even its smallest step fits into its memory."""
    taken: str | None = None
    """A sentence with the memory that other programs hold, if that leaves the job no room."""
    sha256: str | None = None
    """Hash of its weights, once it is done."""
    cards: str | None = None
    """Teams only: the cards of the team. First is the card of the member that these values
    describe: the one with most steps, or the leader of a divided model.
    """


class JobOrder(StrEnum):
    """What a user can order for a job."""

    HOLD = "hold"
    RELEASE = "release"
    CANCEL = "cancel"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A user submits a job."""

    job: Job
    least_bytes: int | None = None
    """Predicted memory of its smallest step; `None`: not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOrder:
    """A user gives an order for a job or for the queue."""

    id: str
    """Identifies the command: one that arrives twice is obeyed once."""
    order: JobOrder
    job: str | None
    """`None`: the order is for the queue. HOLD lets no job start, RELEASE ends that."""
    by: str


#: A message of a user to the queue.
Sent: TypeAlias = Submitted | UserOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The input of a turn besides the queue itself."""

    now_s: float
    """Unix seconds that never go back."""
    minute_of_day: int
    """In local time."""
    cards: tuple[Card, ...]
    statuses: Mapping[str, AttemptStatus] = field(default_factory=dict)
    """Observed attempts, keyed by job name; only jobs that have a place."""
    left: Mapping[str, tuple[JobState, str]] = field(default_factory=dict)
    """Progress of copying files, keyed by the name of a SAVING job, with the reason. DONE: all
    are in the job's folder. SAVING: they cannot be copied yet. FAILED: they never can be.
    """
    chosen: Mapping[str, tuple[Settings, int | None] | str] = field(default_factory=dict)
    """Keyed by the name of a member of an optuna sweep: its new settings with `least_bytes` (as in
    `Submitted`), or why it cannot have settings.
    """
    sent: Sequence[Sent] = ()
    """Messages of users that no turn has processed yet."""
    away_s: float = 0.0
    """Length of the gap that ends now and in which no head ran or the PC was suspended."""
    disk_full: str | None = None
    """A sentence if the disk of the queue's folder is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A job with its present state and history: everything that the queue stores for it."""

    job: Job
    number: int = 0
    """Position in the order of submission, from 0."""
    state: JobState
    reason: str
    since_s: float
    """World seconds at which the state began; on a card, later by the time without a head."""
    attempt: int = 0
    """Number of the present or last attempt; 0 before the first."""
    last_card: str | None = None
    """The card of the present or last attempt; for a team, its cards joined by `JOINT`. First is
    the card of the leader of a divided model, or, once DONE, of the member that ended the job.
    """
    budget_bytes: int | None = None
    alone: bool = True
    recalled_to: JobState | None = None
    """The state that the job enters once its attempt has saved and ended."""
    wake_at_s: float = 0.0
    """World seconds before which a PARKED job stays PARKED."""
    failures: int = 0
    """Failed attempts that count against `retries`."""
    in_vain: int = 0
    """Consecutive attempts that ended soon, without progress, from a cause outside the job."""
    in_row: int = 0
    """Consecutive attempts that did not count as failures; starts at 1 after a long attempt."""
    no_room: int = 0
    """Consecutive times that the job had no room and no card was larger."""
    last_error: str | None = None
    out_of_memory: int = 0
    moves: int = 0
    """Attempts that began on another card than the attempt before."""
    ran_s: float = 0.0
    parked_s: float = 0.0
    step: int | None = None
    value: float | None = None
    best: float | None = None
    best_step: int | None = None
    peak_bytes: int | None = None
    """The highest memory use of any attempt."""
    least_room_bytes: int | None = None
    """Cards with less room are not tried: the prediction, or the result of earlier attempts."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Steps per second, keyed by the title of a card."""
    measured_at_s: float = 0.0
    reached: tuple[tuple[int, float, float], ...] = ()
    """The milestones that the job has passed: step, value of the metric, world seconds."""
    exit_code: int | None = None
    sha256: str | None = None
    expected_start_s: float | None = None
    """World seconds; for display only."""

    @property
    def card(self) -> str | None:
        """The card of the present attempt; `None` if the job is on no card."""
        return self.last_card if self.state in ON_CARD else None

    @property
    def places(self) -> dict[str, str]:
        """The last card of each slot of the job, keyed by slot; a team has one slot per card."""
        cards = (self.last_card or "").split(JOINT)
        if not self.job.is_team or self.last_card is None:
            return {self.job.name: cards[0]}
        parts = ((card, card.partition(":")) for card in cards)
        return {f"{self.job.name}/{node}/{index or 0}": card for card, (node, _, index) in parts}

    @property
    def milestone(self) -> int:
        """The step of the last milestone that the job has passed; 0 before the first."""
        return self.reached[-1][0] if self.reached else 0
