"""What `plan --jobs FILE` says: which job would run where and when, how long all take, and what can
never fit.

Memory is predicted as for `plan` of a training. Times follow from the rated speed of the cards, and
only for GPT presets: nothing is measured, and nothing is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config
from orchestrator.jobs.model import Job
from orchestrator.jobs.placement import Candidate, Schedule, estimate, never_fits
from orchestrator.run.dispatcher import cards_of
from orchestrator.run.prediction import RATED_SHARE, Prediction, predict
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, row_of
from orchestrator.view.terminal import plain_text, table_lines
from workers.units import MIB

_NAMED: Final = 5
_COLUMNS: Final = (
    Column(key="job", title="job", most_cells=32),
    Column(key="card", title="card", priority=1),
    Column(key="start_s", title="begins after", numeric=True, priority=2),
    Column(key="took_s", title="takes", numeric=True),
    Column(key="least_mib", title="least MiB", numeric=True, priority=3),
    Column(key="after", title="comes after", priority=4, most_cells=32),
)


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
    return JobsPlan(jobs=tuple(jobs), schedule=schedule, predicted=predicted, never=never)


def plan_jobs_json(planned: JobsPlan) -> str:
    """Return the estimate as one JSON object."""
    return json.dumps(
        {
            "schema": 1,
            "queue_jobs": len(planned.jobs),
            "queue_eta_s": planned.schedule.makespan_s,
            "jobs": [
                {
                    "job_name": one.job,
                    "job_card": one.card,
                    "job_expected_start_s": one.start_s,
                    "job_expected_end_s": one.end_s,
                    "job_time_is_known": _is_known(planned, one.job),
                    "job_predicted_mib": _mib(planned, one.job),
                }
                for one in planned.schedule.jobs
            ],
            "never": {**planned.never, **planned.schedule.left},
            "not_planned": list(planned.predicted.notes),
        },
        indent=2,
    )


def plan_jobs_text(planned: JobsPlan, width: int | None = None) -> str:
    """Return the estimate for people, its table within `width` cells; `None` cuts nothing."""
    jobs = planned.schedule.jobs
    lines = []
    if jobs:
        took = _rounded(planned.schedule.makespan_s)
        lines = [
            plain_text(table_lines(_table(planned), width)),
            "",
            f"{counted(len(jobs), 'job')}, about {took} in all.",
            f"Times are of {RATED_SHARE:.1%} of the cards' rated speed; none is measured.",
        ]
    unknown = [one.job for one in jobs if not _is_known(planned, one.job)]
    if unknown:
        names = ", ".join(unknown[:_NAMED]) + (", …" if len(unknown) > _NAMED else "")
        lines.append(
            f"The time of {counted(len(unknown), 'job')} is not known ({names}): it counts as that "
            "of the others, or as an hour."
        )
    lines += (f"not predicted: {note}" for note in planned.predicted.notes)
    left = {**planned.never, **planned.schedule.left}
    lines += (f"never: {name} {why}" for name, why in left.items())
    return "\n".join(lines)


def _table(planned: JobsPlan) -> Table:
    after = {job.name: ", ".join(job.after) for job in planned.jobs}
    rows = []
    for one in planned.schedule.jobs:
        took_s = one.end_s - one.start_s if _is_known(planned, one.job) else None
        values = {
            "job": one.job,
            "card": one.card,
            "start_s": one.start_s,
            "took_s": took_s,
            "least_mib": _mib(planned, one.job),
            "after": after[one.job] or None,
        }
        texts = {
            "start_s": _rounded(one.start_s),
            "took_s": "not known" if took_s is None else _rounded(took_s),
        }
        rows.append(row_of(_COLUMNS, one.job, values, texts))
    return Table(name="plan_jobs", columns=_COLUMNS, rows=tuple(rows))


def _rounded(seconds: float) -> str:
    return "<1s" if 0 < seconds < 1 else format_duration(round(seconds))


def _is_known(planned: JobsPlan, name: str) -> bool:
    return bool(planned.predicted.seconds.get(name))


def _mib(planned: JobsPlan, name: str) -> int | None:
    least_bytes = planned.predicted.least_bytes.get(name)
    return None if least_bytes is None else round(least_bytes / MIB)
