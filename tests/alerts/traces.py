"""Made-up runs: for each alert one that it must tell of, and a similar one that it must not.

Two PCs with a card and two slots each, looked at every fifteen seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from orchestrator.core.slot import HeadState
from orchestrator.record.archive import Frame, Freshness, StoredRun
from orchestrator.record.folders import Deliveries
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import Row
from orchestrator.view.alerts import ALERTS, AlertWatch, Firing, judge
from tests.factories import FACTS, STARTED_UNIX_S, make_row, make_standing, record
from workers.messages import StepCounts, WorkerState

STEP_S: Final = 15
SLOT: Final = "pc1/0"
"""To which something happens."""
NOT_FINITE: Final = f"{SLOT}: the loss of optimiser step 12 is nan; training stopped"

_FACTS: Final = replace(
    FACTS,
    run_id="20231114-221320-0b76",
    duration_s=7200.0,
    mode="cluster",
    one_machine=False,
    config_yaml="workload: {name: matmul}\n",
    head_pid=1,
)

#: What a moment differs in from one at which all is well: fields of a frame, its run, or of the
#: slot.
Moment = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A made-up run."""

    alert: str
    fires: bool
    """Whether its alert must fire at the end."""
    looks: tuple[tuple[Frame | None, Deliveries], ...]
    """One every `STEP_S`; `None` where the run could not be read."""


def frame_at(second: float, *, slots_per_node: int = 2, **changed: Any) -> Frame:
    """Return a healthy run so many seconds after its beginning, but for what is said: `on` slots of
    such names.
    """
    of_slot = {
        key: changed.pop(key) for key in (*Row.__slots__, *StepCounts.__slots__) if key in changed
    }
    nodes, where = changed.pop("nodes_seen", ("pc1", "pc2")), changed.pop("on", SLOT)
    held = changed.pop("held", None)
    jobs = tuple(make_standing("lr-0", state) for state in changed.pop("jobs", ()))
    queue = QueueSnapshot(standings=jobs, held=held, now_s=STARTED_UNIX_S + second)
    freshness, late_s = changed.pop("freshness", Freshness.LIVE), changed.pop("late_s", 0.25)
    names = [
        (node, f"{node}/{index}") for node in ("pc1", "pc2") for index in range(slots_per_node)
    ]
    well = {"steps_ok": int(8 * second), "verify_checks": int(second)}
    well |= {"sm_clock_mhz": 1695, "utilisation_pct": 98.0, "fan_pct": 60.0}
    rows = tuple(
        make_row(
            slot=name,
            node=node,
            gpu_uuid=f"GPU-{node}",
            **{**well, **(of_slot if name.startswith(where) else {})},
        )
        for node, name in names
    )
    counters = {"work_flop": 1e13 * second, "busy_s": 0.6 * second}
    run = StoredRun(
        folder=Path(),
        facts=_FACTS,
        outcome=changed.pop("outcome", "running"),
        exit_code=changed.pop("exit_code", None),
        error=None,
        elapsed_s=second,
        updated_at_unix_s=STARTED_UNIX_S + second - late_s,
        nodes_seen=nodes,
        notices=(),
        restart_count=0,
        steps_lost_upper_bound=0,
        incomplete=changed.pop("incomplete", False),
        heads=1,
        faults=(),
        slots=tuple(
            record(row.slot, state=row.state.value, reason=row.reason, row={}, counters=counters)
            for row in rows
        ),
    )  # fmt: skip
    if changed:
        raise TypeError(f"nothing has {', '.join(changed)}")
    snapshot = replace(run.snapshot(), rows=rows)
    return Frame(
        number=1,
        run=run,
        snapshot=snapshot,
        events=(),
        freshness=freshness,
        late_s=late_s,
        queue=queue if jobs or held else None,
    )


Course = Callable[[int], Moment | None]
"""What is different at a second; `None`: the run cannot be read."""


def _trace(alert: str, fires: bool, seconds: int, course: Course) -> Trace:
    looks = []
    for second in range(0, seconds + 1, STEP_S):
        moment = course(second)
        failed = 0 if moment is None else moment.get("failed", 0)
        others = (
            {}
            if moment is None
            else {key: value for key, value in moment.items() if key != "failed"}
        )
        looks.append(
            (None if moment is None else frame_at(second, **others), Deliveries(5, failed))
        )
    return Trace(alert=alert, fires=fires, looks=tuple(looks))


def _from(begin: int, end: int = 10**9, **different: Any) -> Course:
    """Return a course that is different from one second on, until another."""
    return lambda second: different if begin <= second < end else {}


def _growing(key: str, by: int, every_s: int) -> Course:
    """Return a course on which a counter of the slot grows in jumps."""
    return lambda second: {key: by * (second // every_s)}


def _failing(errors: int, of: int) -> Course:
    """Return a course on which some of the steps fail."""
    return lambda second: {
        "steps_ok": second // STEP_S * (of - errors),
        "steps_error": second // STEP_S * errors,
    }


def _wrong(second: int) -> Moment:
    """Return a slot that is CORRUPT before a wrong result is counted."""
    return (
        {"state": WorkerState.CORRUPT}
        if 45 <= second < 75
        else {"verify_errors": int(second >= 105)}
    )


_ENDED: Final[dict[str, Any]] = {"freshness": Freshness.ENDED}
_LOST: Final[dict[str, Any]] = {"on": "pc1", "state": HeadState.LOST, "heartbeat_age_s": 90.0}


#: Alert -> how long its runs are, one that it must tell of, and one that it must not.
_COURSES: Final[Mapping[str, tuple[int, Course, Course]]] = MappingProxyType(
    {
        "HeadGone": (
            120,
            _from(45, freshness=Freshness.HEAD_GONE),
            _from(45, 60, freshness=Freshness.HEAD_GONE),  # another head goes on
        ),
        "WatcherDown": (
            240,
            lambda second: None if second >= 60 else {},
            lambda s: None if 60 <= s < 120 else {},
        ),
        "RecordsLate": (120, _from(45, late_s=40.0), _from(45, late_s=10.0)),
        "RecordsIncomplete": (60, _from(30, incomplete=True), _from(30, late_s=10.0)),
        "NodeMissing": (
            180,
            _from(60, nodes_seen=("pc2",), **_LOST),
            _from(60, 105, nodes_seen=("pc2",), **_LOST),
        ),
        "RunEnded": (60, _from(30, outcome="good", exit_code=0, **_ENDED), _from(30, late_s=40.0)),
        "RunDegraded": (
            60,
            _from(30, outcome="degraded", exit_code=1, **_ENDED),
            _from(30, outcome="good", exit_code=0, **_ENDED),
        ),
        "QueueHeld": (60, _from(30, held="three jobs failed alike"), _from(0, jobs=["QUEUED"])),
        "JobFailed": (60, _from(30, jobs=["FAILED"]), _from(30, jobs=["CANCELLED"])),
        "NotifyFailing": (120, _from(60, failed=1), _from(0, failed=1)),
        "SlotQuarantined": (
            60,
            _from(30, state=HeadState.QUARANTINED, reason="5 processes died within 300 s"),
            _from(30, state=HeadState.QUARANTINED, reason=NOT_FINITE),
        ),
        "LossNotFinite": (
            60,
            _from(30, state=HeadState.QUARANTINED, reason=NOT_FINITE),
            _from(30, state=HeadState.QUARANTINED, reason="5 processes died within 300 s"),
        ),
        "WrongResults": (150, _wrong, _from(0, verify_errors=1)),
        "SlotNotWorking": (
            450,
            lambda second: (
                {"state": WorkerState.BACKOFF if second % 30 else WorkerState.WARMING}
                if 15 <= second < 360
                else {}
            ),  # it fires for two minutes after it works again
            lambda second: {} if second in {0, 240} else {"state": HeadState.STARTING},
        ),
        "SlotSilent": (120, _from(45, heartbeat_age_s=45.0), _from(45, heartbeat_age_s=20.0)),
        "SlotRestarting": (600, _growing("restarts", 1, 120), _growing("restarts", 1, 300)),
        "OomStorm": (900, _growing("oom_count", 40, 150), _growing("oom_count", 14, 150)),
        "SuccessLow": (1200, _failing(2, 12), _failing(1, 30)),
        "Slow": (720, _from(60, baseline_pct=71.0), _from(60, 600, baseline_pct=71.0)),
        "Leaking": (
            420,
            _from(60, reason="LEAK: its process keeps 300 MiB"),
            _from(60, reason="keeps a ring"),
        ),
        "CardPaused": (
            240,
            _from(60, state=WorkerState.PAUSED),
            _from(60, 150, state=WorkerState.PAUSED),
        ),
        "CardSlowed": (
            420,
            _from(60, throttle_pct=35.0, heartbeat_age_s=0.1),
            _from(60, throttle_pct=15.0),
        ),
        "CardTempHigh": (
            720,
            _from(60, margin_c=2.0, heartbeat_age_s=0.1),
            _from(60, margin_c=5.0),
        ),
        "CardVanished": (
            720,
            _from(60, on="pc1", state=HeadState.RESTARTING),
            _from(60, nodes_seen=("pc2",), **_LOST),
        ),
    }
)


def traces() -> tuple[Trace, ...]:
    """Return all made-up runs."""
    return tuple(
        _trace(alert, fires, seconds, course)
        for alert, (seconds, bad, good) in _COURSES.items()
        for fires, course in ((True, bad), (False, good))
    )


def verdicts(trace: Trace) -> list[tuple[Firing, ...]]:
    """Return what fires, look by look."""
    watch, firing_by_look = AlertWatch(alerts=ALERTS), []
    for number, (frame, deliveries) in enumerate(trace.looks):
        watch, firing = judge(watch, frame, number * STEP_S, failed_notifications=deliveries.failed)
        firing_by_look.append(firing)
    return firing_by_look
