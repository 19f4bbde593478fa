"""Formats a frame as metrics for Prometheus. Pure.

No state is kept between two scrapes: a slot that is gone and a value that is unknown have no
series. `record/model.py` assigns the keys of a row to metrics. Does not serve them (`server.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from orchestrator.jobs.model import JobState
from orchestrator.record.model import FIELDS, Field, Row, rows_by_card
from orchestrator.view.alerts import Frame, Freshness
from workers.messages import WorkerState

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

#: Field of a slot's counts, name and help of its metric.
_WORKED: Final = (
    ("work_flop", "slot_work_flop", "Work done, in floating-point operations."),
    ("busy_s", "slot_busy_seconds", "Time the device was kept busy."),
)
_SLOT: Final = ("node", "slot")
_CARD: Final = ("node", "gpu_uuid")

#: Label values of a series, and its value; `None` is unknown and has no series.
_Values: TypeAlias = Iterable[tuple[Sequence[str], float | None]]
_Rows: TypeAlias = Sequence[tuple[Sequence[str], Row]]


def exposition(frame: Frame) -> bytes:
    """Return all metrics of a run as text."""
    lines = [*_of_run(frame), *_of_slots(frame), *_of_cards(frame)]
    return ("\n".join(lines) + "\n").encode()


def _of_run(frame: Frame) -> Iterator[str]:
    run, queue = frame.run, frame.queue
    about = [((run.facts.run_id, run.facts.mode), 1)]
    yield from _gauges("run_info", "Which run it is.", ("run_id", "mode"), about)
    # A run whose head was killed has not ended, and counts as running.
    outcome = run.outcome if frame.freshness is Freshness.ENDED else "running"
    yield from _gauges("run_outcome", "1 for the run's outcome.", ("outcome",), [((outcome,), 1)])
    for name, text, value in (
        ("head_up", "1 while a head works on the run.", frame.is_up),
        ("run_elapsed_seconds", "Time that the run has worked.", frame.snapshot.elapsed_s),
        ("frame_age_seconds", "Time since the records last changed.", frame.late_s),
    ):
        yield from _gauges(name, text, (), [((), value)])
    nodes = (((node,), up) for node, up in frame.nodes_up.items())
    yield from _gauges("node_up", "1 while a planned node is in the cluster.", ("node",), nodes)
    alerts = (((one.name, one.severity, one.subject, one.node or ""), 1) for one in frame.alerts)
    labels = ("name", "severity", "subject", "node")
    yield from _gauges("alert", "1 for each present alert, else absent.", labels, alerts)
    if queue is not None:
        counts = Counter(standing.state for standing in queue.standings)
        by_state = (((state.value.lower(),), counts[state]) for state in JobState)
        yield from _gauges("jobs", "Jobs of the queue by state.", ("state",), by_state)
        held = [((), queue.held is not None)]
        yield from _gauges("queue_held", "1 while the queue starts nothing.", (), held)


def _of_slots(frame: Frame) -> Iterator[str]:
    # Counters stay valid when the head has ended; gauges do not.
    everything: _Rows = [((row.node, row.slot), row) for row in frame.snapshot.rows]
    now: _Rows = [((row.node, row.slot), row) for row in frame.rows]
    # Only the present state has a series: zeros for the others would be most of all series.
    states = (((*of, row.state.value.lower()), 1) for of, row in now)
    text = "1 for the state of the slot; other states are absent."
    yield from _gauges("slot_state", text, (*_SLOT, "state"), states)
    updated_unix_s = frame.snapshot.now_unix_s
    reported = (
        (of, None if row.heartbeat_age_s is None else updated_unix_s - row.heartbeat_age_s)
        for of, row in now
    )
    text = "When its worker last reported."
    yield from _gauges("slot_last_report_timestamp_seconds", text, _SLOT, reported)
    on_card = (
        ((*of, row.gpu_uuid, row.gpu_name or ""), 1) for of, row in everything if row.gpu_uuid
    )
    labels = (*_SLOT, "gpu_uuid", "gpu_name")
    yield from _gauges("slot_info", "The card of the slot.", labels, on_card)
    steps = (
        ((*of, result), getattr(row.counts, f"steps_{result}"))
        for of, row in everything
        for result in ("ok", "oom", "error")
    )
    yield from _counters("slot_steps", "Steps by how they ended.", (*_SLOT, "result"), steps)
    for key, name, text in _WORKED:
        worked = (((it.row.node, it.slot), getattr(it.row.counts, key)) for it in frame.run.slots)
        yield from _counters(name, text, _SLOT, worked)
    for field in FIELDS.values():
        if field.metric and field.of == "slot":
            yield from _of_field(field, _SLOT, everything if field.counter else now)


def _of_cards(frame: Frame) -> Iterator[str]:
    """Yield the metrics of each card on which workers report."""
    reporting = [row for row in frame.rows if row.gpu_uuid and isinstance(row.state, WorkerState)]

    def age_s(row: Row) -> float:
        return float("inf") if row.heartbeat_age_s is None else row.heartbeat_age_s

    # The slot with the newest report of the card's sensors.
    newest: _Rows = [
        (card, min(slots, key=age_s)) for card, slots in rows_by_card(reporting).items()
    ]
    for field in FIELDS.values():
        if field.metric and field.of == "card":
            yield from _of_field(field, _CARD, newest)


def _of_field(field: Field, labels: Sequence[str], rows: _Rows) -> Iterator[str]:
    values = []
    for of, row in rows:
        value = field.value(row)
        # Skip a temperature of the processor.
        if isinstance(value, int | float) and (
            field.key != "temperature_c" or row.temperature_of == "card"
        ):
            values.append((of, value * field.factor))
    family = _counters if field.counter else _gauges
    return family(f"{field.of}_{field.metric}", field.help, labels, values)


def _counters(name: str, text: str, labels: Sequence[str], values: _Values) -> Iterator[str]:
    return _gauges(f"{name}_total", text, labels, values, kind="counter")


def _gauges(
    name: str, text: str, labels: Sequence[str], values: _Values, kind: str = "gauge"
) -> Iterator[str]:
    """Yield the lines of one metric in the text format of Prometheus."""
    yield f"# HELP orchestrator_{name} {text}"
    yield f"# TYPE orchestrator_{name} {kind}"
    for of, value in values:
        if value is not None:
            named = zip(labels, map(_escaped, of), strict=True)
            pairs = ",".join(f'{label}="{content}"' for label, content in named)
            # More digits only need space.
            yield f"orchestrator_{name}{{{pairs}}} {value:.12g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
