"""What can be wrong with a run: each alert with its condition over frames, and when it fires. Pure.

One that holds is pending, fires after a while, and is over after another, as Prometheus does it
with `for` and `keep_firing_for`. A slot that a person holds never alerts. Neither does a slot, card
or node of a run on which no head works: for that there is `HeadGone`. Metrics take what a frame
says from here, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, get_args

from orchestrator.config.schema import Severity
from orchestrator.core.slot import HeadState, SlotState
from orchestrator.jobs.model import JobState
from orchestrator.record.archive import Frame, Freshness
from orchestrator.record.model import LOW_SUCCESS_RATE, Row, rows_by_card
from workers.messages import WorkerState

OUTCOMES: Final = ("running", "good", "degraded", "interrupted", "failed")

#: As `workers.training.accumulator` words it.
_NOT_FINITE = re.compile(r"\bof optimiser step \d+ is (nan|-?inf)\b")

#: Counter of a slot -> the longest time over which it is asked for.
_WINDOWS_S: Final = {
    "restarts": 900.0,
    "oom_count": 600.0,
    "steps": 900.0,
    "steps_ok": 900.0,
    "verify_errors": 3600.0,
}
_FAILED: Final = "failed"
_FAILED_WINDOW_S: Final = 900.0
_POINTS: Final = 60
_Course: TypeAlias = tuple[tuple[float, float], ...]
_Key: TypeAlias = tuple[str, str]

SEVEREST_FIRST: Final[tuple[Severity, ...]] = get_args(Severity)
Scope: TypeAlias = Literal["run", "node", "slot", "card", "job"]

_NOT_WORKING: Final[frozenset[SlotState]] = frozenset(
    {HeadState.STARTING, HeadState.RESTARTING, HeadState.LOST}
    | {WorkerState.WARMING, WorkerState.BACKOFF, WorkerState.EMERGENCY, WorkerState.PARKED}
)
_REPORTING: Final[frozenset[SlotState]] = frozenset(WorkerState) - {
    WorkerState.DONE,
    WorkerState.STOPPED,
}

_LATE_S: Final = 15.0
_SILENT_S: Final = 30.0
_SLOW_PCT: Final = 80.0
_SLOWED_PCT: Final = 20.0
_MARGIN_C: Final = 3.0
_RESTARTS: Final = 3
_OOMS: Final = 60
_STEPS_LEAST: Final = 20


def outcome(frame: Frame) -> str:
    """Return how the run stands; one whose head was killed has not ended, and counts as running."""
    return frame.run.outcome if frame.freshness is Freshness.ENDED else "running"


def is_up(frame: Frame) -> bool:
    """Say whether a head works on the run."""
    return frame.freshness in {Freshness.LIVE, Freshness.LATE}


def rows(frame: Frame) -> tuple[Row, ...]:
    """Return the slots as they are now; none once no head works on the run."""
    return tuple(frame.snapshot.rows) if is_up(frame) else ()


def nodes_up(frame: Frame) -> Mapping[str, bool]:
    """Say of each planned node whether it is in the cluster.

    Nothing before the run has told for the first time.
    """
    if not is_up(frame) or frame.run.updated_at_unix_s is None:
        return {}
    return {node: node in frame.snapshot.nodes_seen for node in frame.snapshot.nodes_planned}


def is_held(row: Row) -> bool:
    """Say whether a person holds the slot: then it does nothing, and nothing is wrong."""
    return row.state is HeadState.HELD


def is_leaking(row: Row) -> bool:
    """Say whether its process keeps memory that its work does not need."""
    return row.reason.startswith("LEAK: ")


def is_not_finite(row: Row) -> bool:
    """Say whether its training was stopped because its loss or gradient is NaN or infinite."""
    return row.state is HeadState.QUARANTINED and _NOT_FINITE.search(row.reason) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card of the run."""

    node: str
    uuid: str
    name: str | None
    is_up: bool
    """Whether it has a worker, or slots that are held; not up while all its workers are awaited or
    lost.
    """
    teller: Row | None
    """The slot that heard of its sensors last; `None` if no worker reports."""


def cards(frame: Frame) -> tuple[Card, ...]:
    """Return the cards on which the run has workers, or waits for them."""
    waited_for = [row for row in rows(frame) if row.gpu_uuid is not None]
    waited_for = [row for row in waited_for if row.state is not HeadState.QUARANTINED]
    found = []
    for (node, uuid), slots in rows_by_card(waited_for).items():
        tellers = [row for row in slots if isinstance(row.state, WorkerState)]
        teller = min(tellers, key=_age_s, default=None)
        up = bool(tellers) or any(map(is_held, slots))
        found.append(Card(node=node, uuid=uuid, name=slots[0].gpu_name, is_up=up, teller=teller))
    return tuple(found)


def _age_s(row: Row) -> float:
    return float("inf") if row.heartbeat_age_s is None else row.heartbeat_age_s


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The last course of the counters of one run, and their values now."""

    now: Mapping[tuple[str, str], float] = field(default_factory=dict)
    courses: Mapping[tuple[str, str], _Course] = field(default_factory=dict)

    def growth(self, counter: str, slot: str = "") -> float:
        """Return how much a counter has grown within its time."""
        key = counter, slot
        return max(0.0, self.now[key] - self.courses[key][0][1]) if key in self.now else 0.0

    def after(self, frame: Frame, failed: int, now_s: float) -> History:
        """Return the history with one frame more.

        `failed` are the notifications that failed so far.
        """
        now, courses = {}, {}
        for key, value, window_s in _counted(frame, failed):
            now[key] = value
            courses[key] = _longer(self.courses.get(key, ()), value, now_s, window_s)
        return History(now=now, courses=courses)


def _counted(frame: Frame, failed: int) -> Iterator[tuple[tuple[str, str], float, float]]:
    yield (_FAILED, ""), failed, _FAILED_WINDOW_S
    for row in frame.snapshot.rows:
        for counter, window_s in _WINDOWS_S.items():
            value = row.restarts if counter == "restarts" else getattr(row.counts, counter)
            yield (counter, row.slot), value, window_s


def _longer(course: _Course, value: float, now_s: float, window_s: float) -> _Course:
    """Return a course with the value of now, if it is new, and without points that
    count no more.
    """
    if not course or value != course[-1][1]:
        # What grows at nearly the same time is one point. The first is what growth is counted from,
        # and stays.
        is_same = len(course) > 1 and now_s - course[-1][0] < window_s / _POINTS
        course = (*course[:-1], (course[-1][0], value)) if is_same else (*course, (now_s, value))
    first = 0
    while first + 1 < len(course) and course[first + 1][0] <= now_s - window_s:
        first += 1
    return course[first:]


@dataclass(frozen=True, slots=True)
class Subject:
    """What an alert is about."""

    name: str
    """The run, node or slot, or the UUID of the card."""
    node: str = ""
    card: str = ""
    text: str = ""
    """Why, in the words of the run."""

    @property
    def place(self) -> str:
        """The card or node that it belongs to: what befalls a card befalls all of its slots."""
        return f"{self.node} {self.card}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that can be wrong with a run, for people and for Prometheus."""

    name: str
    severity: Severity
    scope: Scope
    for_s: float = 0.0
    """It fires when it has held for so long."""
    keep_s: float = 0.0
    """It is over when it has not held for so long."""
    summary: str
    """One line, with `{subject}` in it."""
    what_to_do: str
    holds: Callable[[Frame, History], Iterable[Subject]]
    """The subjects for which it holds."""
    opt_in: bool = False
    """Whether only those get it who ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """An alert that fires, or is about to."""

    alert: Alert
    subject: Subject
    since_unix_s: float
    """When it began to hold."""
    fires: bool = True
    """Whether it has held for long enough."""
    over_unix_s: float | None = None
    """When it ceased to hold; it still fires for `keep_s`."""

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same at the next look."""
        return self.alert.name, self.subject.name

    @property
    def text(self) -> str:
        """What is wrong, in one line."""
        words = self.alert.summary.format(subject=self.subject.name)
        return f"{words}: {self.subject.text}" if self.subject.text else words


_Condition: TypeAlias = Callable[[Frame, History], Iterable[Subject]]


def _run(condition: Callable[[Frame], bool]) -> _Condition:
    def holds(frame: Frame, _history: History) -> Iterator[Subject]:
        if condition(frame):
            text = frame.run.error or "; ".join(frame.missed)
            yield Subject(frame.run.facts.run_id, text=text)

    return holds


def _slots(condition: Callable[[Row, History], bool]) -> _Condition:
    def holds(frame: Frame, history: History) -> Iterator[Subject]:
        for row in rows(frame):
            if not is_held(row) and condition(row, history):
                yield Subject(row.slot, row.node, row.gpu_uuid or "", row.reason)

    return holds


def _cards(condition: Callable[[Card, Frame], bool]) -> _Condition:
    def holds(frame: Frame, _history: History) -> Iterator[Subject]:
        for card in cards(frame):
            if condition(card, frame):
                text = f"{card.name or 'card'} of {card.node}"
                yield Subject(card.uuid, card.node, card.uuid, text)

    return holds


def _nodes_missing(frame: Frame, _history: History) -> Iterator[Subject]:
    return (Subject(node, node) for node, is_up in nodes_up(frame).items() if not is_up)


def _slots_not_working(frame: Frame, history: History) -> Iterator[Subject]:
    """Return slots that do not work on nodes that are there: the others are `NodeMissing`."""
    nodes = nodes_up(frame)
    subjects = _slots(lambda row, _: row.state in _NOT_WORKING)(frame, history)
    return (subject for subject in subjects if nodes.get(subject.node, True))


def _is_low(row: Row, history: History) -> bool:
    steps = history.growth("steps", row.slot)
    return steps > _STEPS_LEAST and history.growth("steps_ok", row.slot) < LOW_SUCCESS_RATE * steps


def _sensor(card: Card, key: str) -> float | None:
    value: float | None = None if card.teller is None else card.teller.value(key)
    return value


def _jobs_failed(frame: Frame, _history: History) -> Iterator[Subject]:
    for standing in () if frame.queue is None else frame.queue.standings:
        if standing.state in {JobState.FAILED, JobState.INFEASIBLE}:
            yield Subject(standing.job.name, text=standing.reason)


def _queue_held(frame: Frame, _history: History) -> Iterator[Subject]:
    if frame.queue is not None and frame.queue.held is not None:
        yield Subject(frame.run.facts.run_id, text=frame.queue.held)


WATCHER_DOWN: Final = Alert(
    name="WatcherDown",
    severity="warning",
    scope="run",
    for_s=120,
    summary="run {subject} cannot be read",
    what_to_do="On the machine with the run folder type: python -m orchestrator web",
    holds=lambda *_: (),  # there is no frame to judge
)

_OF_RUN: Final = (
    Alert(
        name="HeadGone",
        severity="critical",
        scope="run",
        for_s=30,
        summary="the head of run {subject} is gone",
        what_to_do="Type: python -m orchestrator run --resume; where it works off a queue of jobs: "
        "python -m orchestrator jobs run",
        holds=_run(lambda frame: frame.freshness is Freshness.HEAD_GONE),
    ),
    WATCHER_DOWN,
    Alert(
        name="RecordsLate",
        severity="warning",
        scope="run",
        for_s=30,
        summary="the records of run {subject} are late",
        what_to_do="Look whether the head's machine is overloaded, and whether the disk of the "
        "run folder answers.",
        holds=_run(lambda frame: is_up(frame) and frame.late_s > _LATE_S),
    ),
    Alert(
        name="RecordsIncomplete",
        severity="warning",
        scope="run",
        summary="the records of run {subject} have gaps",
        what_to_do="Look for a full disk: df -h. The run goes on, and ends with exit code 1.",
        holds=_run(lambda frame: frame.run.incomplete),
    ),
    Alert(
        name="NodeMissing",
        severity="critical",
        scope="node",
        for_s=60,
        summary="node {subject} is not in the cluster",
        what_to_do="On that PC type what this prints on the head: python -m orchestrator up",
        holds=_nodes_missing,
    ),
    Alert(
        name="RunEnded",
        severity="info",
        scope="run",
        summary="run {subject} has ended",
        what_to_do="Type: python -m orchestrator report",
        holds=_run(lambda frame: outcome(frame) in {"good", "interrupted"}),
    ),
    Alert(
        name="RunDegraded",
        severity="warning",
        scope="run",
        summary="run {subject} has ended and was not good",
        what_to_do="Type: python -m orchestrator report. It says what fell short.",
        holds=_run(lambda frame: outcome(frame) in {"degraded", "failed"}),
    ),
    Alert(
        name="QueueHeld",
        severity="critical",
        scope="run",
        summary="the queue of run {subject} is held: no job starts any more",
        what_to_do="When the cause is gone, type: python -m orchestrator jobs release",
        holds=_queue_held,
    ),
    Alert(
        name="JobFailed",
        severity="critical",
        scope="job",
        summary="job {subject} has ended badly",
        what_to_do="See what it printed: python -m orchestrator logs JOB. Then type: python "
        "-m orchestrator jobs retry JOB",
        holds=_jobs_failed,
    ),
    Alert(
        name="NotifyFailing",
        severity="warning",
        scope="run",
        summary="notifications of run {subject} are not delivered",
        what_to_do="Type: python -m orchestrator notify --test. It says which address fails, and "
        "why.",
        holds=lambda frame, history: _run(lambda _: history.growth("failed") > 0)(frame, history),
    ),
)

_OF_SLOTS: Final = (
    Alert(
        name="SlotQuarantined",
        severity="critical",
        scope="slot",
        summary="slot {subject} was given up",
        what_to_do="See docs/troubleshooting.md#quarantined, then type: python -m orchestrator "
        "reinstate SLOT",
        holds=_slots(lambda row, _: row.state is HeadState.QUARANTINED and not is_not_finite(row)),
    ),
    Alert(
        name="LossNotFinite",
        severity="critical",
        scope="slot",
        summary="the training of slot {subject} stopped: its loss is NaN or infinite",
        what_to_do="Lower train.lr or train.clip, then type: python -m orchestrator run --resume",
        holds=_slots(lambda row, _: is_not_finite(row)),
    ),
    Alert(
        name="WrongResults",
        severity="critical",
        scope="slot",
        summary="slot {subject} computed wrong results",
        what_to_do="Lower the clocks of the card, those of its memory first. Then type: python -m "
        "orchestrator burn",
        holds=_slots(
            lambda row, history: (
                row.state is WorkerState.CORRUPT or history.growth("verify_errors", row.slot) > 0
            )
        ),
    ),
    Alert(
        name="SlotNotWorking",
        severity="warning",
        scope="slot",
        for_s=300,
        keep_s=120,
        summary="slot {subject} has not worked for five minutes",
        what_to_do="Its reason says what it waits for: python -m orchestrator report",
        holds=_slots_not_working,
    ),
    Alert(
        name="SlotSilent",
        severity="warning",
        scope="slot",
        for_s=30,
        summary="slot {subject} has not reported for half a minute",
        what_to_do="Look at that PC: nvidia-smi, top. After run.hang_timeout_s its process is "
        "replaced.",
        holds=_slots(
            lambda row, _: row.state in _REPORTING and (row.heartbeat_age_s or 0.0) > _SILENT_S
        ),
    ),
    Alert(
        name="SlotRestarting",
        severity="warning",
        scope="slot",
        summary="slot {subject} has had more than three new processes in 15 minutes",
        what_to_do="See why they end: python -m orchestrator report. After run.max_deaths the "
        "slot is given up.",
        holds=_slots(lambda row, history: history.growth("restarts", row.slot) > _RESTARTS),
    ),
    Alert(
        name="OomStorm",
        severity="warning",
        scope="slot",
        for_s=600,
        summary="slot {subject} runs out of memory more than six times a minute",
        what_to_do="End other programs on the card (nvidia-smi), or start fewer workers.",
        holds=_slots(lambda row, history: history.growth("oom_count", row.slot) > _OOMS),
    ),
    Alert(
        name="SuccessLow",
        severity="warning",
        scope="slot",
        for_s=900,
        summary="slot {subject} fails in more than 5 % of its steps",
        what_to_do="Its reason says why: python -m orchestrator report. The run counts as "
        "degraded if it stays so.",
        holds=_slots(_is_low),
    ),
    Alert(
        name="Slow",
        severity="warning",
        scope="slot",
        for_s=600,
        summary="slot {subject} does less than 80 % of what such a worker has done on this card",
        what_to_do="See docs/troubleshooting.md#slow. Another program may use the card: nvidia-smi",
        holds=_slots(
            lambda row, _: (
                row.state is WorkerState.RUNNING
                and row.baseline_pct is not None
                and row.baseline_pct < _SLOW_PCT
            )
        ),
    ),
    Alert(
        name="Leaking",
        severity="warning",
        scope="slot",
        for_s=300,
        summary="the process of slot {subject} keeps memory that its work does not need",
        what_to_do="Drop every tensor in the workload's `release`. After run.leak_limit_mib its "
        "process is replaced.",
        holds=_slots(lambda row, _: is_leaking(row)),
    ),
)

_OF_CARDS: Final = (
    Alert(
        name="CardPaused",
        severity="warning",
        scope="slot",
        for_s=120,
        summary="slot {subject} pauses because its card is too hot",
        what_to_do="Check dust, airflow and the fan curve. thermal.critical_c says when it pauses.",
        holds=_slots(lambda row, _: row.state is WorkerState.PAUSED),
    ),
    Alert(
        name="CardSlowed",
        severity="warning",
        scope="card",
        for_s=300,
        summary="heat or power slows card {subject}",
        what_to_do="Check airflow, or lower its limit so that it is steady: power_limit_w in "
        "cluster.yaml.",
        holds=_cards(lambda card, _: (_sensor(card, "throttle_pct") or 0.0) > _SLOWED_PCT),
    ),
    Alert(
        name="CardTempHigh",
        severity="info",
        scope="card",
        for_s=600,
        summary="card {subject} is within 3 C of its limit",
        what_to_do="Check dust, airflow and the fan curve.",
        holds=_cards(
            lambda card, _: (
                (margin := _sensor(card, "margin_c")) is not None and margin <= _MARGIN_C
            )
        ),
        opt_in=True,
    ),
    Alert(
        name="CardVanished",
        severity="critical",
        scope="card",
        for_s=600,
        summary="no worker comes up on card {subject} any more",
        what_to_do="On its PC type: nvidia-smi; sudo dmesg | grep Xid. A card that is off the bus "
        "needs a restart.",
        holds=_cards(lambda card, frame: not card.is_up and nodes_up(frame).get(card.node, False)),
    ),
)

#: All alerts, those of the run first.
ALERTS: Final = (*_OF_RUN, *_OF_SLOTS, *_OF_CARDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertWatch:
    """What is known of one run between two judgements."""

    alerts: tuple[Alert, ...] = tuple(alert for alert in ALERTS if not alert.opt_in)
    run_id: str | None = None
    history: History = field(default_factory=History)
    active: Mapping[_Key, Firing] = field(default_factory=dict)


def judge(
    watch: AlertWatch, frame: Frame | None, now_unix_s: float, *, failed_notifications: int = 0
) -> tuple[AlertWatch, tuple[Firing, ...]]:
    """Take in how the run is now, and return what fires.

    `frame` is `None` if the run cannot be read.
    """
    if frame is not None and frame.run.facts.run_id != watch.run_id:
        watch = AlertWatch(alerts=watch.alerts, run_id=frame.run.facts.run_id)
    history, held = watch.history, tuple[tuple[Alert, Subject], ...]()
    if frame is None:
        held = ((WATCHER_DOWN, Subject(watch.run_id or "")),)
    else:
        history = history.after(frame, failed_notifications, now_unix_s)
        held = tuple(
            (alert, subject) for alert in watch.alerts for subject in alert.holds(frame, history)
        )
    active = _active_after(watch.active, held, now_unix_s)
    watch = replace(watch, history=history, active=active)
    return watch, tuple(firing for firing in active.values() if firing.fires)


def _active_after(
    active: Mapping[_Key, Firing], held: Iterable[tuple[Alert, Subject]], now_unix_s: float
) -> dict[_Key, Firing]:
    after = {}
    for alert, subject in held:
        key = alert.name, subject.name
        before = active.get(key)
        since_unix_s = now_unix_s if before is None else before.since_unix_s
        fires = (before is not None and before.fires) or now_unix_s - since_unix_s >= alert.for_s
        after[key] = Firing(alert=alert, subject=subject, since_unix_s=since_unix_s, fires=fires)

    for key, before in active.items():
        if key not in after and before.fires:
            over_unix_s = now_unix_s if before.over_unix_s is None else before.over_unix_s
            if now_unix_s - over_unix_s < before.alert.keep_s:
                after[key] = replace(before, over_unix_s=over_unix_s)
    return after


@dataclass(frozen=True, slots=True, kw_only=True)
class Badge:
    """One alert that fires, for one subject or several."""

    name: str
    severity: Severity
    subjects: tuple[str, ...]
    since_unix_s: float
    """When it began to hold for the first of them."""
    text: str
    """What is wrong with that one."""
    what_to_do: str

    @property
    def words(self) -> str:
        """What stands on it: what is wrong with the first subject, and how many
        others there are.
        """
        return (
            self.text
            if len(self.subjects) == 1
            else f"{self.text} (and {len(self.subjects) - 1} more)"
        )


def badges(firing: Iterable[Firing]) -> tuple[Badge, ...]:
    """Return a badge for each alert that fires, the severest and then the oldest first."""
    by_name: dict[str, list[Firing]] = {}
    for one in firing:
        if one.alert.severity != "info":
            by_name.setdefault(one.alert.name, []).append(one)
    made = [
        _badge(sorted(of_alert, key=lambda one: one.since_unix_s)) for of_alert in by_name.values()
    ]
    made.sort(key=lambda one: (SEVEREST_FIRST.index(one.severity), one.since_unix_s, one.name))
    return tuple(made)


def _badge(firing: list[Firing]) -> Badge:
    first = firing[0]
    return Badge(
        name=first.alert.name,
        severity=first.alert.severity,
        subjects=tuple(one.subject.name for one in firing),
        since_unix_s=first.since_unix_s,
        # The person looks at this very run.
        text=first.text.replace(f"run {first.subject.name}", "the run")
        if first.alert.scope == "run"
        else first.text,
        what_to_do=first.alert.what_to_do,
    )
