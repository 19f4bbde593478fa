"""What can be wrong with a run: one plain function for each alert. Pure.

Each looks at a run as it is now. Once no head works on a run nothing is known of its slots: then
only that is wrong. Does not send alerts (`notify`) or draw them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias, get_args

from orchestrator.config.schema import Severity
from orchestrator.core.slot import HeadState, SlotState
from orchestrator.jobs.model import JobState
from orchestrator.record.archive import Frame, Freshness
from orchestrator.record.model import Row, natural_order, rows_by_card
from orchestrator.view.cells import clean
from orchestrator.view.tables import Tone
from workers.messages import WorkerState
from workers.units import GIB

SEVEREST_FIRST: Final[tuple[Severity, ...]] = get_args(Severity)
NODE_MISSING: Final = "NodeMissing"

_TONES: Final[Mapping[Severity, Tone]] = MappingProxyType(
    {"critical": Tone.BAD, "warning": Tone.WARN, "info": Tone.NOTE}
)
_NOT_WORKING: Final[frozenset[SlotState]] = frozenset(
    {HeadState.STARTING, HeadState.RESTARTING, HeadState.LOST}
    | {WorkerState.WARMING, WorkerState.BACKOFF, WorkerState.EMERGENCY, WorkerState.PARKED}
)
_SLOWED_PCT: Final = 20.0
#: The head writes several times a second.
_SILENT_HEAD_S: Final = 15.0
_DISK_LEAST_BYTES: Final = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that is wrong with a run."""

    name: str
    """What kind it is, such as `SlotQuarantined`."""
    severity: Severity
    subject: str
    """The run, node, slot or job, or the UUID of the card."""
    node: str | None = None
    """The node that the subject is on."""
    text: str
    """What is wrong: one line, without control characters."""
    what_to_do: str
    lasts_s: float = 0.0
    """It is told once it has been wrong for so long."""
    since_unix_s: float = 0.0
    """When it was first seen."""

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same alert at the next look."""
        return self.name, self.subject

    @property
    def tone(self) -> Tone:
        """The tone of its text."""
        return _TONES[self.severity]

    def to_json(self) -> dict[str, Any]:
        """Return it for the page, the report and `--json`."""
        return {
            "name": self.name,
            "severity": self.severity,
            "tone": self.tone.value,
            "subject": self.subject,
            "node": self.node,
            "text": self.text,
            "what_to_do": self.what_to_do,
            "since_unix_s": self.since_unix_s,
        }


#: (run, name, subject) of all that is wrong -> when it was first seen, in Unix seconds.
Since: TypeAlias = Mapping[tuple[str, str, str], float]


def alerts(
    frame: Frame, now_unix_s: float, since: Since = MappingProxyType({})
) -> tuple[tuple[Alert, ...], Since]:
    """Return what is wrong with a run, the severest and then the oldest first.

    `since` is the second value of the call before. It is empty at the first look: what must last
    for some time is counted from that look.
    """
    run_id = frame.run.facts.run_id
    wrong = [alert for rule in RULES for alert in rule(frame)]
    since = {(run_id, *one.key): since.get((run_id, *one.key), now_unix_s) for one in wrong}
    wrong = [_cleaned(one, since[run_id, *one.key]) for one in wrong]
    told = [one for one in wrong if now_unix_s - one.since_unix_s >= one.lasts_s]
    return tuple(sorted(told, key=_order)), since


def _cleaned(alert: Alert, since_unix_s: float) -> Alert:
    text, what_to_do = clean(alert.text), clean(alert.what_to_do)
    return replace(alert, since_unix_s=since_unix_s, text=text, what_to_do=what_to_do)


def _order(alert: Alert) -> tuple[int, float, str, tuple[str | int, ...]]:
    rank = SEVEREST_FIRST.index(alert.severity)
    return rank, alert.since_unix_s, alert.name, natural_order(alert.subject)


def is_up(frame: Frame) -> bool:
    """Say whether a head works on the run."""
    return frame.freshness in {Freshness.LIVE, Freshness.LATE}


def rows(frame: Frame) -> tuple[Row, ...]:
    """Return the slots as they are now; none once no head works on the run."""
    return tuple(frame.snapshot.rows) if is_up(frame) else ()


def nodes_up(frame: Frame) -> Mapping[str, bool]:
    """Say of each planned node whether it is in the cluster.

    Nothing before the head has written for the first time.
    """
    if not is_up(frame) or frame.run.updated_at_unix_s is None:
        return {}
    return {node: node in frame.snapshot.nodes_seen for node in frame.snapshot.nodes_planned}


def _head_gone(frame: Frame) -> Iterator[Alert]:
    run_id = frame.run.facts.run_id
    is_silent = is_up(frame) and frame.late_s > _SILENT_HEAD_S
    if is_silent or frame.freshness is Freshness.HEAD_GONE:
        what = f"has written nothing for {frame.late_s:.0f} s" if is_silent else "is gone"
        yield Alert(
            name="HeadGone",
            severity="critical",
            subject=run_id,
            text=f"the head of run {run_id} {what}",
            what_to_do="If its process has ended, type: python -m orchestrator run --resume; for "
            "a queue of jobs: python -m orchestrator jobs run",
            lasts_s=30.0,
        )


def _records_incomplete(frame: Frame) -> Iterator[Alert]:
    run_id, free_bytes = frame.run.facts.run_id, frame.disk_free_bytes
    is_full = is_up(frame) and free_bytes is not None and free_bytes < _DISK_LEAST_BYTES
    if is_full or frame.run.incomplete:
        full = f"the disk of run {run_id} has {(free_bytes or 0) / GIB:.2f} GiB free"
        gaps = f"the records of run {run_id} have gaps: some could not be written"
        yield Alert(
            name="RecordsIncomplete",
            severity="warning",
            subject=run_id,
            text=gaps if frame.run.incomplete else full,
            what_to_do="Make room on the disk: df -h. A run with gaps goes on, and ends with exit "
            "code 1.",
        )


def _node_missing(frame: Frame) -> Iterator[Alert]:
    for node, is_there in nodes_up(frame).items():
        if not is_there:
            yield Alert(
                name=NODE_MISSING,
                severity="critical",
                subject=node,
                node=node,
                text=f"node {node} is not in the cluster",
                what_to_do="On that PC type what this prints on the head: python -m orchestrator "
                f"up {node}",
            )


def _slot_quarantined(frame: Frame) -> Iterator[Alert]:
    for row in rows(frame):
        if row.state is HeadState.QUARANTINED:
            yield Alert(
                name="SlotQuarantined",
                severity="critical",
                subject=row.slot,
                node=row.node,
                text=f"slot {row.slot} was given up: {row.reason}",
                what_to_do="See docs/troubleshooting.md#quarantined, then type: python -m "
                f"orchestrator reinstate {row.slot}",
            )


def _slot_not_working(frame: Frame) -> Iterator[Alert]:
    nodes = nodes_up(frame)
    for row in rows(frame):
        # Where the node is missing, the node is what is wrong.
        if row.state in _NOT_WORKING and nodes.get(row.node, True):
            yield Alert(
                name="SlotNotWorking",
                severity="warning",
                subject=row.slot,
                node=row.node,
                text=f"slot {row.slot} has not worked for five minutes: {row.reason}",
                what_to_do=f"See what its process printed: python -m orchestrator logs {row.slot}",
                lasts_s=300.0,
            )


def _wrong_results(frame: Frame) -> Iterator[Alert]:
    for row in rows(frame):
        is_held = row.state is HeadState.HELD
        if row.state is WorkerState.CORRUPT or (row.counts.verify_errors and not is_held):
            yield Alert(
                name="WrongResults",
                severity="critical",
                subject=row.slot,
                node=row.node,
                text=f"slot {row.slot} computed wrong results: {row.reason}",
                what_to_do="Lower the clocks of the card, those of its memory first. Then type: "
                "python -m orchestrator burn",
            )


def _card_hot(frame: Frame) -> Iterator[Alert]:
    on_cards = [row for row in rows(frame) if row.gpu_uuid is not None]
    for (node, uuid), slots in rows_by_card(on_cards).items():
        is_paused = any(row.state is WorkerState.PAUSED for row in slots)
        if is_paused or any((row.throttle_pct or 0.0) > _SLOWED_PCT for row in slots):
            card = f"{slots[0].gpu_name or 'card'} of {node}"
            slowed = f"{card} is slowed by heat or power more than {_SLOWED_PCT:.0f} % of the time"
            yield Alert(
                name="CardPaused" if is_paused else "CardSlowed",
                severity="critical" if is_paused else "warning",
                subject=uuid,
                node=node,
                text=f"{card} is so hot that its workers pause" if is_paused else slowed,
                what_to_do="Check dust, airflow and the fan curve, or lower power_limit_w in "
                "cluster.yaml. thermal.critical_c says when workers pause.",
                lasts_s=0.0 if is_paused else 300.0,
            )


def _queue_held(frame: Frame) -> Iterator[Alert]:
    if frame.queue is not None and frame.queue.held is not None:
        yield Alert(
            name="QueueHeld",
            severity="critical",
            subject=frame.run.facts.run_id,
            text=f"the queue is held, no job starts any more: {frame.queue.held}",
            what_to_do="When the cause is gone, type: python -m orchestrator jobs release",
        )


def _job_failed(frame: Frame) -> Iterator[Alert]:
    for standing in () if frame.queue is None else frame.queue.standings:
        if standing.state in {JobState.FAILED, JobState.INFEASIBLE}:
            name = standing.job.name
            yield Alert(
                name="JobFailed",
                severity="critical",
                subject=name,
                text=f"job {name} has ended badly: {standing.reason}",
                what_to_do=f"See what it printed: python -m orchestrator logs {name}. Then "
                f"type: python -m orchestrator jobs retry {name}",
            )


#: Each yields what is wrong. A new alert is one more function, and its line here.
RULES: Final = (
    _head_gone,
    _records_incomplete,
    _node_missing,
    _slot_quarantined,
    _slot_not_working,
    _wrong_results,
    _card_hot,
    _queue_held,
    _job_failed,
)
