"""What `plan --jobs FILE` says: which job would run where and when, how long all take, and what can
never fit.

Memory is predicted as for `plan` of a training. Times follow from the rated speed of the cards, and
only for GPT presets: nothing is measured, and nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.cli.printing import Part
from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config
from orchestrator.jobs.model import Job
from orchestrator.jobs.placement import Candidate, Schedule, estimate, never_fits
from orchestrator.run.dispatcher import cards_of
from orchestrator.run.prediction import RATED_SHARE, Prediction, predict
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, TableRow, row_of
from workers.units import MIB

_NAMED: Final = 5
_COLUMNS: Final = (
    Column(key="job_name", title="job", most_cells=32),
    Column(key="job_card", title="card", priority=1),
    Column(key="job_expected_start_s", title="begins after", numeric=True, priority=2),
    Column(key="took_s", title="takes", numeric=True),
    Column(key="job_predicted_mib", title="least MiB", numeric=True, priority=3),
    Column(key="after", title="comes after", priority=4, most_cells=32),
)
"""Their keys are those of a job in JSON, as far as it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsPlan:
    """The estimate of a job file."""

    jobs: tuple[Job, ...]
    schedule: Schedule
    predicted: Prediction
    never: Mapping[str, str]
    """Why a job can never run here."""


def plan_jobs(jobs: Sequence[Job], config: Config) -> JobsPlan:
    """Return when and where these jobs would run on the cards of a configuration.

    Raises:
        UsageError: A job names what cannot be trained.
    """
    on_card = any(node.gpus for node in config.nodes.values())
    predicted, cards = predict(jobs, config, on_card=on_card), tuple(cards_of(config, config.nodes))
    never: dict[str, str] = {}
    candidates = []
    for job in jobs:
        least_bytes = predicted.least_bytes.get(job.name)
        why = never_fits(job, least_bytes, cards)
        if why is not None:
            never[job.name] = why
            continue
        candidates.append(
            Candidate(
                name=job.name,
                priority=job.priority,
                seconds=predicted.seconds.get(job.name, {}),
                memory_bytes=job.memory_bytes,
                least_room_bytes=least_bytes,
                nodes=job.nodes,
                card=job.card,
            )
        )
    schedule = estimate(candidates, cards, {job.name: job.after for job in jobs})
    never |= schedule.left
    return JobsPlan(jobs=tuple(jobs), schedule=schedule, predicted=predicted, never=never)


def plan_object(planned: JobsPlan) -> dict[str, Any]:
    """Return the estimate for JSON."""
    least_bytes, seconds = planned.predicted.least_bytes, planned.predicted.seconds
    return {
        "queue_jobs": len(planned.jobs),
        "queue_eta_s": planned.schedule.makespan_s,
        "jobs": [
            {
                "job_name": one.job,
                "job_card": one.card,
                "job_expected_start_s": one.start_s,
                "job_expected_end_s": one.end_s,
                "job_time_is_known": bool(seconds.get(one.job)),
                "job_predicted_mib": round(least_bytes[one.job] / MIB)
                if one.job in least_bytes
                else None,
            }
            for one in planned.schedule.jobs
        ],
        "never": dict(planned.never),
        "not_planned": list(planned.predicted.notes),
    }


def plan_parts(planned: JobsPlan) -> Iterator[Part]:
    """Yield the estimate for people."""
    told = plan_object(planned)
    if jobs := told["jobs"]:
        after = {job.name: ", ".join(job.after) or None for job in planned.jobs}
        rows = tuple(_row({**job, "after": after[job["job_name"]]}) for job in jobs)
        yield Table(name="plan_jobs", columns=_COLUMNS, rows=rows)
        yield from (
            "",
            f"{counted(len(jobs), 'job')}, about {_rounded(told['queue_eta_s'])} in all.",
            f"Times are of {RATED_SHARE:.1%} of the cards' rated speed; none is measured.",
        )
    if unknown := [job["job_name"] for job in jobs if not job["job_time_is_known"]]:
        names = ", ".join(unknown[:_NAMED]) + (", …" if len(unknown) > _NAMED else "")
        yield (
            f"The time of {counted(len(unknown), 'job')} is not known ({names}): it counts as that "
            "of the others, or as an hour."
        )
    yield from (f"not predicted: {note}" for note in told["not_planned"])
    yield from (f"never: {name} {why}" for name, why in told["never"].items())


def _row(job: Mapping[str, Any]) -> TableRow:
    start_s, took_s = job["job_expected_start_s"], None
    if job["job_time_is_known"]:
        took_s = job["job_expected_end_s"] - start_s
    texts = {
        "job_expected_start_s": _rounded(start_s),
        "took_s": "not known" if took_s is None else _rounded(took_s),
    }
    return row_of(_COLUMNS, job["job_name"], {**job, "took_s": took_s}, texts)


def _rounded(seconds: float) -> str:
    return "<1s" if 0 < seconds < 1 else format_duration(round(seconds))
