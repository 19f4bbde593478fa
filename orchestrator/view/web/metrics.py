"""A frame as metrics of Prometheus, in its text format. Pure.

Nothing is kept between two scrapes: a slot that is gone has no series any more, and what is unknown
has none either. Which key of a row is which metric stands in `record/model.py`. Does not serve
them (`server.py`).
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeAlias

import yaml
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
from orchestrator.view.jobs import current, job_object
from workers.messages import WorkerState

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

#: Key of a job in JSON, name, help.
_JOB_METRICS: Final = (
    ("job_step", "job_step", "Optimiser steps that the job has done."),
    ("job_steps", "job_steps", "Optimiser steps after which it is done."),
    ("job_metric", "job_metric", "Its metric, at its last step."),
    ("job_best", "job_best", "The best of its metric."),
    ("job_ran_s", "job_ran_seconds", "Time that it was on a card."),
    ("job_oom", "job_out_of_memory", "Times that it ran out of memory."),
    ("job_moves", "job_moves", "Times that it went to another card."),
)
#: Counter of a slot, name, help.
_WORKED: Final = (
    ("work_flop", "slot_work_flop", "Work done, in floating-point operations."),
    ("busy_s", "slot_busy_seconds", "Time the device was kept busy."),
)
_OUTCOMES: Final = ("running", "good", "degraded", "interrupted", "failed")
_SLOT: Final = ("node", "slot")
_CARD: Final = ("node", "gpu_uuid")


#: How often the user gave each command, by name and `taken` or `refused`.
Commands: TypeAlias = Mapping[tuple[str, str], int]
#: Labels of a series with its value.
_Value: TypeAlias = tuple[Sequence[str], float]
_Values: TypeAlias = Iterable[_Value]


class _Families(Collector):
    """The families of one scrape, in their order."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        """Return all of them."""
        return self._families


def exposition(frame: Frame, alerts: Iterable[Alert], commands: Commands) -> bytes:
    """Return all metrics of a run as text."""
    families = [*_of_run(frame, commands), *_of_slots(frame), *_of_cards(frame)]
    told = (((one.name, one.severity, one.subject, one.node or ""), 1.0) for one in alerts)
    text, labels = "1 for each thing that is wrong, else absent.", ("name", "severity", "subject")
    families.append(_gauges("alert", text, (*labels, "node"), told))
    if frame.queue is not None:
        families += _of_queue(frame.queue)
    return generate_latest(_Families(families))


def _of_run(frame: Frame, commands: Commands) -> Iterator[Metric]:
    run, snapshot = frame.run, frame.snapshot
    policies = sorted({row.policy for row in snapshot.rows if row.policy is not None})
    build = {
        "version": _version("oom-orchestrator"),
        "ray": _version("ray"),
        "python": platform.python_version(),
    }
    about = {
        "run_id": run.facts.run_id,
        "mode": run.facts.mode,
        "policy": ",".join(policies),
        "workload": _workload(run.facts.config_yaml),
    }
    yield InfoMetricFamily("orchestrator_build", "Versions of what shows the run.", value=build)
    yield InfoMetricFamily("orchestrator_run", "Which run it is.", value=about)
    # One whose head was killed has not ended, and counts as running.
    now = run.outcome if frame.freshness is Freshness.ENDED else "running"
    outcomes = (((outcome,), float(outcome == now)) for outcome in _OUTCOMES)
    yield _gauges("run_outcome", "1 for how the run stands.", ("outcome",), outcomes)
    for name, text, value in (
        ("head_up", "1 while a head works on the run.", is_up(frame)),
        ("run_started_timestamp_seconds", "When the run began.", snapshot.started_at),
        ("run_updated_timestamp_seconds", "When the head told last.", run.updated_at_unix_s),
        ("run_elapsed_seconds", "Time that the run has worked.", snapshot.elapsed_s),
        ("run_planned_seconds", "Planned length of the run.", snapshot.duration_s),
        ("records_incomplete", "1 if anything of the run could not be stored.", run.incomplete),
        ("notices", "Warnings shown in the header.", len(snapshot.notices)),
        (
            "steps_lost_upper_bound",
            "Most good steps that ended processes may have done unseen.",
            snapshot.steps_lost_upper_bound,
        ),
        ("frame_age_seconds", "Time since the records last changed.", frame.late_s),
    ):
        values = () if value is None else (((), float(value)),)
        yield _gauges(name, text, (), values)
    nodes = (((node,), float(up)) for node, up in nodes_up(frame).items())
    yield _gauges("node_up", "1 while a planned node is in the cluster.", ("node",), nodes)
    given = sorted(commands.items())
    yield _counters("commands", "Commands of the user.", ("command", "result"), given)


def _of_slots(frame: Frame) -> Iterator[Metric]:
    # Counts stay true when the head has ended; what a slot is or holds does not.
    everything = [((row.node, row.slot), row) for row in frame.snapshot.rows]
    now = [((row.node, row.slot), row) for row in rows(frame)]
    # What a slot is not has no series: with zeros, these would be most of all series.
    states = (((*labels, row.state.value.lower()), 1.0) for labels, row in now)
    text = "1 for the state of the slot; other states are absent."
    yield _gauges("slot_state", text, (*_SLOT, "state"), states)
    held = ((labels, 1.0) for labels, row in now if row.state is HeadState.HELD)
    yield _gauges("slot_held", "1 while a person holds the slot, else absent.", _SLOT, held)
    updated = frame.snapshot.now_unix_s
    ages = ((of, row.heartbeat_age_s) for of, row in now)
    heard = ((of, round(updated - age_s, 1)) for of, age_s in ages if age_s is not None)
    text = "When its worker last reported."
    yield _gauges("slot_last_report_timestamp_seconds", text, _SLOT, heard)
    on_card = (((*of, row.gpu_uuid), 1.0) for of, row in everything if row.gpu_uuid is not None)
    yield _gauges("slot_info", "On which card the slot is.", (*_SLOT, "gpu_uuid"), on_card)
    steps = (
        ((*of, result), getattr(row.counts, f"steps_{result}"))
        for of, row in everything
        for result in ("ok", "oom", "error")
    )
    yield _counters("slot_steps", "Steps by how they ended.", (*_SLOT, "result"), steps)
    for key, name, text in _WORKED:
        # More digits would only take space.
        counted = (
            ((slot.node, slot.slot), float(f"{slot.counters[key]:.9g}"))
            for slot in frame.run.slots
            if key in slot.counters
        )
        yield _counters(name, text, _SLOT, counted)
    for field in FIELDS.values():
        if field.metric and field.of == "slot":
            yield _family(field, _SLOT, everything if field.counter else now)


def _of_cards(frame: Frame) -> Iterator[Metric]:
    """Yield the metrics of each card on which the run has workers, or waits for them."""
    names, ups, tellers = list[_Value](), list[_Value](), list[tuple[Sequence[str], Row]]()
    waited_for = [row for row in rows(frame) if row.gpu_uuid is not None]
    waited_for = [row for row in waited_for if row.state is not HeadState.QUARANTINED]
    for of, slots in rows_by_card(waited_for).items():
        reporting = [row for row in slots if isinstance(row.state, WorkerState)]
        is_held = any(row.state is HeadState.HELD for row in slots)
        names.append(((*of, slots[0].gpu_name or ""), 1.0))
        ups.append((of, float(bool(reporting) or is_held)))
        if reporting:  # the one that heard of the card's sensors last tells
            tellers.append((of, min(reporting, key=_age_s)))
    yield _gauges("card_info", "Which card it is.", (*_CARD, "gpu_name"), names)
    text = "1 while a worker on the card reports, 0 while all are awaited."
    yield _gauges("card_up", text, _CARD, ups)
    for field in FIELDS.values():
        if field.metric and field.of == "card":
            yield _family(field, _CARD, tellers)


def _age_s(row: Row) -> float:
    return float("inf") if row.heartbeat_age_s is None else row.heartbeat_age_s


def _of_queue(queue: QueueSnapshot) -> Iterator[Metric]:
    jobs = [job_object(standing, queue) for standing in current(queue)]
    counts = Counter(standing.state.value.lower() for standing in queue.standings)
    by_state = (((state.lower(),), counts[state.lower()]) for state in JobState)
    yield _gauges("jobs", "Jobs of the queue by state.", ("state",), by_state)
    held = ((), float(queue.held is not None))
    yield _gauges("queue_held", "1 while the queue starts nothing.", (), (held,))
    for key, name, text in _JOB_METRICS:
        values = (((job["job_name"],), float(job[key])) for job in jobs if job[key] is not None)
        yield _gauges(name, text, ("job",), values)


def _family(
    field: Field, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Row]]
) -> Metric:
    values = []
    for of, row in rows:
        value = field.value(row)
        if isinstance(value, int | float) and (
            field.key != "temperature_c" or row.temperature_of == "card"
        ):
            values.append((of, value if field.factor == 1 else round(value * field.factor, 3)))
    family = _counters if field.counter else _gauges
    return family(f"{field.of}_{field.metric}", field.help, labels, values)


def _gauges(name: str, text: str, labels: Sequence[str], values: _Values) -> Metric:
    return _filled(GaugeMetricFamily(f"orchestrator_{name}", text, labels=labels), values)


def _counters(name: str, text: str, labels: Sequence[str], values: _Values) -> Metric:
    return _filled(CounterMetricFamily(f"orchestrator_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
    for of, value in values:
        family.add_metric(of, value)
    return family


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _workload(config_yaml: str) -> str:
    """Return the name of the workload in a configuration; empty if it is not in there."""
    try:
        return str(yaml.safe_load(config_yaml)["workload"]["name"])
    except (yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError):
        return ""
