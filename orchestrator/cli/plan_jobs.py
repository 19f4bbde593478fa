"""What `plan --jobs FILE` says: which job would run where and when, how long all take, and what can
never fit.

Memory is predicted as for `plan` of a training. Times follow from the rated speed of the cards, and
only for GPT presets: nothing is measured, and nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from orchestrator.cli.printing import Part
from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config
from orchestrator.jobs import places
from orchestrator.jobs.model import Card, Job
from orchestrator.jobs.places import Candidate, Place
from orchestrator.run.job_plans import cards_of
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
class ScheduledJob:
    """A job in the estimate of a queue, which starts at 0."""

    job: str
    card: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsPlan:
    """The estimate of a job file."""

    jobs: tuple[Job, ...]
    schedule: tuple[ScheduledJob, ...]
    """By start."""
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
        why = places.never_fits(job, least_bytes, cards)
        if why is not None:
            never[job.name] = why
            continue
        candidates.append(
            Candidate(
                job=replace(job, pack=False),
                seconds=predicted.seconds.get(job.name, {}),
                least_room_bytes=least_bytes,
            )
        )
    schedule, left = estimate(candidates, cards)
    never |= left
    return JobsPlan(jobs=tuple(jobs), schedule=schedule, predicted=predicted, never=never)


def estimate(
    candidates: Sequence[Candidate], cards: Sequence[Card]
) -> tuple[tuple[ScheduledJob, ...], dict[str, str]]:
    """Return when and where each job would run, and of each that never starts why.

    It asks for places in virtual time from 0. Every job is taken to be alone on its card, and to
    take as long as is known, or as the median; nothing fails.
    """
    typical_s = places.typical_work_s(candidates, cards)
    waiting = {each.job.name: set(each.job.after) for each in candidates}
    left = {each.job.name: each for each in candidates}
    on_card: dict[str, Place] = {}
    scheduled: list[ScheduledJob] = []
    now_s = 0.0
    while True:
        ready = [each for name, each in left.items() if not waiting[name]]
        found = places.plan(ready, cards, tuple(on_card.values()), now_s, typical_s)
        for start in found.starts:
            del left[start.job]
            on_card[start.job] = start
            end_s = start.ends_at_s or now_s
            scheduled.append(
                ScheduledJob(job=start.job, card=start.card, start_s=now_s, end_s=end_s)
            )
        if not on_card:
            break
        now_s, ended = min((place.ends_at_s or now_s, name) for name, place in on_card.items())
        del on_card[ended]
        for names in waiting.values():
            names.discard(ended)
    reasons = dict(found.reasons)
    for name, before in waiting.items():
        if before:
            reasons[name] = f"comes after {', '.join(sorted(before))}, which never ends"
    return tuple(scheduled), reasons


def plan_object(planned: JobsPlan) -> dict[str, Any]:
    """Return the estimate for JSON."""
    least_bytes, seconds = planned.predicted.least_bytes, planned.predicted.seconds
    return {
        "queue_jobs": len(planned.jobs),
        "queue_eta_s": max((one.end_s for one in planned.schedule), default=0.0),
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
            for one in planned.schedule
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
