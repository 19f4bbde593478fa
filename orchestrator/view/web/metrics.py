"""A frame as metrics of Prometheus. Pure.

Nothing is kept between two scrapes: a slot that is gone has no series any more, and what is unknown
has none either. Which key of a row is which metric stands in `record/model.py`. Does not serve
them (`server.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from orchestrator.core.slot import HeadState
from orchestrator.jobs.model import JobState
from orchestrator.record.archive import Frame, Freshness
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import FIELDS, Field, Row, rows_by_card
from orchestrator.view.alerts import Alert, is_up, nodes_up, rows
from workers.messages import WorkerState

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

#: Counter of a slot, name, help.
_WORKED: Final = (
    ("work_flop", "slot_work_flop", "Work done, in floating-point operations."),
    ("busy_s", "slot_busy_seconds", "Time the device was kept busy."),
)
_OUTCOMES: Final = ("running", "good", "degraded", "interrupted", "failed")
_SLOT: Final = ("node", "slot")
_CARD: Final = ("node", "gpu_uuid")

#: Labels of a series with its value; `None` is unknown and has no series.
_Values: TypeAlias = Iterable[tuple[Sequence[str], float | None]]
_Rows: TypeAlias = Sequence[tuple[Sequence[str], Row]]


class _Families(Collector):
    """The families of one scrape, in their order."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        """Return all of them."""
        return self._families


def exposition(frame: Frame, alerts: Iterable[Alert]) -> bytes:
    """Return all metrics of a run as text."""
    wrong = (((one.name, one.severity, one.subject, one.node or ""), 1) for one in alerts)
    text, labels = "1 for each thing that is wrong, else absent.", ("name", "severity", "subject")
    families = [*_of_run(frame), *_of_slots(frame), *_of_cards(frame)]
    families.append(_gauges("alert", text, (*labels, "node"), wrong))
    if frame.queue is not None:
        families += _of_queue(frame.queue)
    return generate_latest(_Families(families))


def _of_run(frame: Frame) -> Iterator[Metric]:
    run, snapshot = frame.run, frame.snapshot
    about = {"run_id": run.facts.run_id, "mode": run.facts.mode}
    yield InfoMetricFamily("orchestrator_run", "Which run it is.", value=about)
    # One whose head was killed has not ended, and counts as running.
    now = run.outcome if frame.freshness is Freshness.ENDED else "running"
    outcomes = (((outcome,), outcome == now) for outcome in _OUTCOMES)
    yield _gauges("run_outcome", "1 for how the run stands.", ("outcome",), outcomes)
    for name, text, value in (
        ("head_up", "1 while a head works on the run.", is_up(frame)),
        ("run_started_timestamp_seconds", "When the run began.", snapshot.started_at),
        ("run_updated_timestamp_seconds", "When the head told last.", run.updated_at_unix_s),
        ("run_elapsed_seconds", "Time that the run has worked.", snapshot.elapsed_s),
        ("run_planned_seconds", "Planned length of the run.", snapshot.duration_s),
        ("records_incomplete", "1 if anything of the run could not be stored.", run.incomplete),
        ("frame_age_seconds", "Time since the records last changed.", frame.late_s),
    ):
        yield _gauges(name, text, (), [((), value)])
    nodes = (((node,), up) for node, up in nodes_up(frame).items())
    yield _gauges("node_up", "1 while a planned node is in the cluster.", ("node",), nodes)


def _of_slots(frame: Frame) -> Iterator[Metric]:
    # Counts stay true when the head has ended; what a slot is or holds does not.
    everything: _Rows = [((row.node, row.slot), row) for row in frame.snapshot.rows]
    now: _Rows = [((row.node, row.slot), row) for row in rows(frame)]
    # What a slot is not has no series: with zeros, these would be most of all series.
    states = (((*labels, row.state.value.lower()), 1) for labels, row in now)
    text = "1 for the state of the slot; other states are absent."
    yield _gauges("slot_state", text, (*_SLOT, "state"), states)
    held = ((labels, 1) for labels, row in now if row.state is HeadState.HELD)
    yield _gauges("slot_held", "1 while a person holds the slot, else absent.", _SLOT, held)
    updated_unix_s = frame.snapshot.now_unix_s
    heard = (
        (labels, None if row.heartbeat_age_s is None else updated_unix_s - row.heartbeat_age_s)
        for labels, row in now
    )
    text = "When its worker last reported."
    yield _gauges("slot_last_report_timestamp_seconds", text, _SLOT, heard)
    on_card = (
        ((*labels, row.gpu_uuid, row.gpu_name or ""), 1)
        for labels, row in everything
        if row.gpu_uuid is not None
    )
    labels = (*_SLOT, "gpu_uuid", "gpu_name")
    yield _gauges("slot_info", "On which card the slot is.", labels, on_card)
    steps = (
        ((*of, result), getattr(row.counts, f"steps_{result}"))
        for of, row in everything
        for result in ("ok", "oom", "error")
    )
    yield _counters("slot_steps", "Steps by how they ended.", (*_SLOT, "result"), steps)
    for key, name, text in _WORKED:
        worked = (((it.row.node, it.slot), getattr(it.row.counts, key)) for it in frame.run.slots)
        yield _counters(name, text, _SLOT, worked)
    for field in FIELDS.values():
        if field.metric and field.of == "slot":
            yield _of_field(field, _SLOT, everything if field.counter else now)


def _of_cards(frame: Frame) -> Iterator[Metric]:
    """Yield the metrics of each card on which workers report."""
    reporting = [
        row
        for row in rows(frame)
        if row.gpu_uuid is not None and isinstance(row.state, WorkerState)
    ]
    # The slot that heard of the card's sensors last tells.
    newest: _Rows = [
        (card, min(slots, key=_age_s)) for card, slots in rows_by_card(reporting).items()
    ]
    for field in FIELDS.values():
        if field.metric and field.of == "card":
            yield _of_field(field, _CARD, newest)


def _age_s(row: Row) -> float:
    return float("inf") if row.heartbeat_age_s is None else row.heartbeat_age_s


def _of_queue(queue: QueueSnapshot) -> Iterator[Metric]:
    counts = Counter(standing.state for standing in queue.standings)
    by_state = (((state.value.lower(),), counts[state]) for state in JobState)
    yield _gauges("jobs", "Jobs of the queue by state.", ("state",), by_state)
    held = [((), queue.held is not None)]
    yield _gauges("queue_held", "1 while the queue starts nothing.", (), held)


def _of_field(field: Field, labels: Sequence[str], told: _Rows) -> Metric:
    values = []
    for of, row in told:
        value = field.value(row)
        # A processor's temperature is not that of its card.
        if isinstance(value, int | float) and (
            field.key != "temperature_c" or row.temperature_of == "card"
        ):
            values.append((of, value * field.factor))
    family = _counters if field.counter else _gauges
    return family(f"{field.of}_{field.metric}", field.help, labels, values)


def _gauges(name: str, text: str, labels: Sequence[str], values: _Values) -> Metric:
    return _filled(GaugeMetricFamily(f"orchestrator_{name}", text, labels=labels), values)


def _counters(name: str, text: str, labels: Sequence[str], values: _Values) -> Metric:
    return _filled(CounterMetricFamily(f"orchestrator_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
    for labels, value in values:
        if value is not None:
            # More digits would only take space.
            family.add_metric(labels, float(f"{value:.12g}"))
    return family
