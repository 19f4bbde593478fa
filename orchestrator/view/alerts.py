"""The alerts of a run, found in a `Frame`, which is all that its folder says at one moment.

`KINDS` lists every alert; one function for each part of a run finds them. Pure. Without a head, the
state of slots is unknown, and they have no alerts. Does not read the folder (`look`), send alerts
(`notify`) or draw them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from orchestrator.config.schema import Severity
from orchestrator.core.slot import HeadState, SlotState
from orchestrator.jobs.model import JobState
from orchestrator.record.archive import StoredRun
from orchestrator.record.events import StoredEvent
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import Row, Snapshot, natural_order, rows_by_card
from orchestrator.view.cells import clean
from orchestrator.view.tables import Tone
from workers.messages import WorkerState
from workers.units import GIB

SEVEREST_FIRST: Final[tuple[Severity, ...]] = get_args(Severity)
HEAD_GONE: Final = "HeadGone"
NODE_MISSING: Final = "NodeMissing"

_TONES: Final = dict(zip(SEVEREST_FIRST, (Tone.BAD, Tone.WARN, Tone.NOTE), strict=True))
_NOT_WORKING: Final[frozenset[SlotState]] = frozenset(
    {HeadState.STARTING, HeadState.RESTARTING, HeadState.LOST}
    | {WorkerState.WARMING, WorkerState.BACKOFF, WorkerState.EMERGENCY, WorkerState.PARKED}
)
_SLOWED_PCT: Final = 20.0
#: A head writes several times a second.
_SILENT_HEAD_S: Final = 15.0
_DISK_LEAST_BYTES: Final = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that is wrong with a run."""

    name: str
    """A key of `KINDS`, such as `SlotQuarantined`."""
    severity: Severity
    subject: str
    """The run, node, slot or job, or the UUID of the card."""
    node: str | None = None
    """The node that the subject is on."""
    text: str
    """What is wrong: one line, without control characters."""
    what_to_do: str
    since_unix_s: float = 0.0
    """When a frame first showed it."""

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the alert in successive frames."""
        return self.name, self.subject

    @property
    def tone(self) -> Tone:
        """The tone of its text."""
        return _TONES[self.severity]

    def to_json(self) -> dict[str, Any]:
        """Return it for the page, the report and `--json`."""
        return {**asdict(self), "tone": self.tone.value}


class Freshness(StrEnum):
    """Whether the displayed state is the present state of the run."""

    LIVE = "live"
    LATE = "late"
    HEAD_GONE = "head gone"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All that the folder of a run says at one moment."""

    run: StoredRun
    snapshot: Snapshot
    """Includes the summary line of the queue."""
    events: tuple[StoredEvent, ...]
    """The newest events, including those that earlier frames had."""
    freshness: Freshness
    late_s: float
    """Seconds since the store last changed."""
    queue: QueueSnapshot | None = None
    """The queue of jobs, if the run has one."""
    disk_free_bytes: int | None = None
    """Free space of the file system with the run folder; `None` if unknown."""
    alerts: tuple[Alert, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """What fell short in an ended run, a sentence each; empty for a good one."""
        ends = [event.details.get("missed") for event in self.events if event.event == "run_ended"]
        missed = ends[-1] if ends and self.freshness is Freshness.ENDED else None
        return tuple(map(str, missed)) if isinstance(missed, list) else ()

    @property
    def is_up(self) -> bool:
        """Whether a head works on the run."""
        return self.freshness in {Freshness.LIVE, Freshness.LATE}

    @property
    def rows(self) -> tuple[Row, ...]:
        """The slots as they are now; empty if no head works on the run."""
        return self.snapshot.rows if self.is_up else ()

    @property
    def nodes_up(self) -> Mapping[str, bool]:
        """Whether each planned node is in the cluster; empty until the head has first written."""
        if not self.is_up or self.run.updated_at_unix_s is None:
            return {}
        return {node: node in self.snapshot.nodes_seen for node in self.snapshot.nodes_planned}


class Kind(NamedTuple):
    """The common properties of all alerts with one name."""

    severity: Severity
    lasts_s: float
    """An alert is reported once its condition has lasted for this time."""
    what_to_do: str
    """`{0}` stands for the subject."""


_COOL: Final = (
    "Check dust, airflow and the fan curve, or lower power_limit_w in cluster.yaml. "
    "thermal.critical_c says when workers pause."
)
_RESUME: Final = (
    "If its process has ended, type: python -m orchestrator run --resume; for a queue of jobs: "
    "python -m orchestrator jobs run"
)
_ROOM: Final = "Make room on the disk: df -h. A run with gaps continues, and ends with exit code 1."
_UP: Final = "On that PC type what this prints on the head: python -m orchestrator up {0}"
_REINSTATE: Final = (
    "See docs/troubleshooting.md#quarantined, then type: python -m orchestrator reinstate {0}"
)
_LOGS: Final = "See what it printed: python -m orchestrator logs {0}"
_CLOCKS: Final = (
    "Lower the clocks of the card, those of its memory first. Then type: "
    "python -m orchestrator burn"
)
_RELEASE: Final = "When the cause is gone, type: python -m orchestrator jobs release"
_RETRY: Final = _LOGS + ". Then type: python -m orchestrator jobs retry {0}"

#: A new alert needs an entry here, and code below that finds it.
KINDS: Final[Mapping[str, Kind]] = {
    HEAD_GONE: Kind("critical", 30.0, _RESUME),
    "RecordsIncomplete": Kind("warning", 0.0, _ROOM),
    NODE_MISSING: Kind("critical", 0.0, _UP),
    "SlotQuarantined": Kind("critical", 0.0, _REINSTATE),
    "SlotNotWorking": Kind("warning", 300.0, _LOGS),
    "WrongResults": Kind("critical", 0.0, _CLOCKS),
    "CardPaused": Kind("critical", 0.0, _COOL),
    "CardSlowed": Kind("warning", 300.0, _COOL),
    "QueueHeld": Kind("critical", 0.0, _RELEASE),
    "JobFailed": Kind("critical", 0.0, _RETRY),
}

#: Name and subject of each alert -> when a frame first showed it, in Unix seconds.
FirstSeen: TypeAlias = Mapping[tuple[str, str], float]
_AlertParts: TypeAlias = Iterator[tuple[str, str, str | None, str]]
"""Name, subject, node and text of alerts."""


def alerts(
    frame: Frame, now_unix_s: float, since: FirstSeen = MappingProxyType({})
) -> tuple[tuple[Alert, ...], FirstSeen]:
    """Return the alerts of a run, the severest first, then the oldest.

    `since` is the second value of the previous call. It is empty for the first frame: durations of
    conditions count from there.
    """
    first_seen, reported = dict[tuple[str, str], float](), []
    for part in (_of_run, _of_slots, _of_cards, _of_queue):
        for name, subject, node, text in part(frame):
            key, kind = (name, subject), KINDS[name]
            first_seen[key] = since.get(key, now_unix_s)
            alert = Alert(
                name=name,
                severity=kind.severity,
                subject=subject,
                node=node,
                text=clean(text),
                what_to_do=clean(kind.what_to_do.format(subject)),
                since_unix_s=first_seen[key],
            )
            if now_unix_s - alert.since_unix_s >= kind.lasts_s:
                reported.append(alert)

    def order(alert: Alert) -> tuple[object, ...]:
        rank = SEVEREST_FIRST.index(alert.severity)
        return rank, alert.since_unix_s, alert.name, natural_order(alert.subject)

    return tuple(sorted(reported, key=order)), first_seen


def _of_run(frame: Frame) -> _AlertParts:
    run_id, free_bytes = frame.run.facts.run_id, frame.disk_free_bytes
    if frame.freshness is Freshness.HEAD_GONE:
        yield HEAD_GONE, run_id, None, f"the head of run {run_id} is gone"
    elif frame.is_up and frame.late_s > _SILENT_HEAD_S:
        text = f"the head of run {run_id} has written nothing for {frame.late_s:.0f} s"
        yield HEAD_GONE, run_id, None, text
    if frame.run.incomplete:
        text = f"the records of run {run_id} have gaps: some could not be written"
        yield "RecordsIncomplete", run_id, None, text
    elif frame.is_up and free_bytes is not None and free_bytes < _DISK_LEAST_BYTES:
        text = f"the disk of run {run_id} has {free_bytes / GIB:.2f} GiB free"
        yield "RecordsIncomplete", run_id, None, text
    for node, is_there in frame.nodes_up.items():
        if not is_there:
            yield NODE_MISSING, node, node, f"node {node} is not in the cluster"


def _of_slots(frame: Frame) -> _AlertParts:
    for row in frame.rows:
        slot, state, node, why = row.slot, row.state, row.node, row.reason
        if state is HeadState.QUARANTINED:
            yield "SlotQuarantined", slot, node, f"slot {slot} was given up: {why}"
        # If the node is missing, NodeMissing is reported instead.
        if state in _NOT_WORKING and frame.nodes_up.get(node, True):
            text = f"slot {slot} has not worked for five minutes: {why}"
            yield "SlotNotWorking", slot, node, text
        has_errors = row.counts.verify_errors and state is not HeadState.HELD
        if state is WorkerState.CORRUPT or has_errors:
            yield "WrongResults", slot, node, f"slot {slot} computed wrong results: {why}"


def _of_cards(frame: Frame) -> _AlertParts:
    on_cards = [row for row in frame.rows if row.gpu_uuid is not None]
    for (node, uuid), slots in rows_by_card(on_cards).items():
        card = f"{slots[0].gpu_name or 'card'} of {node}"
        if any(row.state is WorkerState.PAUSED for row in slots):
            yield "CardPaused", uuid, node, f"{card} is so hot that its workers pause"
        elif any((row.sensors.throttle_pct or 0.0) > _SLOWED_PCT for row in slots):
            why = f"is slowed by heat or power more than {_SLOWED_PCT:.0f} % of the time"
            yield "CardSlowed", uuid, node, f"{card} {why}"


def _of_queue(frame: Frame) -> _AlertParts:
    if frame.queue is None:
        return
    if frame.queue.held is not None:
        text = f"the queue is held, no job starts any more: {frame.queue.held}"
        yield "QueueHeld", frame.run.facts.run_id, None, text
    for standing in frame.queue.standings:
        if standing.state in {JobState.FAILED, JobState.INFEASIBLE}:
            name = standing.job.name
            yield "JobFailed", name, None, f"job {name} has ended badly: {standing.reason}"
