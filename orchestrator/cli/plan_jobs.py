"""What `plan --jobs FILE` says: which job would run where and when, how long all take, and what can
never fit.

Memory is predicted as for `plan` of a training. Times follow from the rated speed of the cards, and
only for GPT presets: nothing is measured, and nothing is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.cli.plan_training import smallest_step
from orchestrator.config.duration import format_duration
from orchestrator.config.gpu_specs import PEAK_DTYPES, PROFILES, peak_tflops
from orchestrator.config.schema import Config
from orchestrator.errors import one_line
from orchestrator.jobs.model import Job, Kind
from orchestrator.jobs.placement import Candidate, Schedule, estimate, never_fits
from orchestrator.run.dispatcher import cards_of, job_config
from orchestrator.view.cells import UNICODE, aligned
from orchestrator.view.phrases import counted
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.units import MIB

#: Operations of a training for each parameter and token (Kaplan et al., 2020, arXiv 2001.08361).
_FLOP_PER_PARAMETER: Final = 6
#: Of the rated operations; what good training code reaches on such cards.
_USED: Final = 0.375

#: Larger than any card: what the smallest step takes is asked for, and not what fits.
_NO_CAP_BYTES: Final = 2**60
_NAMED: Final = 5
#: Predictions are within a tenth (docs/results/2026-11-26-own-training.md): a job is refused only
#: where so much of it does not fit.
_SURE: Final = 0.9

#: Settings of a training that change neither its memory nor its time.
_SAME_STEP: Final = frozenset(
    {"steps", "epochs", "lr", "warmup_steps", "weight_decay", "dropout", "label_smoothing"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is known of jobs before one has run, by name."""

    least_bytes: Mapping[str, int]
    """What the smallest step of a training takes on a card, the context included."""
    seconds: Mapping[str, Mapping[str, float]]
    """What a training takes on each card."""
    notes: tuple[str, ...]
    """Why something could not be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsPlan:
    """The estimate of a job file."""

    jobs: tuple[Job, ...]
    schedule: Schedule
    predicted: Prediction
    never: Mapping[str, str]
    """Why a job can never run here."""


def least_room_of(jobs: Sequence[Job], config: Config, *, on_card: bool) -> dict[str, int]:
    """Return the bytes that a card must have for each job, where that can be predicted.

    Raises:
        UsageError: A job names what cannot be trained.
    """
    predicted = predict(jobs, config, on_card=on_card).least_bytes
    return {name: int(_SURE * least_bytes) for name, least_bytes in predicted.items()}


def predict(jobs: Sequence[Job], config: Config, *, on_card: bool) -> Prediction:
    """Return what is known of jobs; trainings that differ in what changes no memory are asked for
    once.

    Raises:
        UsageError: A job names what cannot be trained.
    """
    context_bytes = ASSUMED_CONTEXT_BYTES if on_card else 0
    cap = {"device": "cuda" if on_card else "cpu", "cap_bytes": _NO_CAP_BYTES}
    steps: dict[str, dict[str, Any]] = {}
    least_bytes, seconds, notes = {}, {}, []
    for job in jobs:
        if job.kind is not Kind.TRAIN:
            continue
        own = job_config(config, job)
        key = own.train.model_dump_json(exclude=set(_SAME_STEP))
        if key not in steps:
            steps[key] = smallest_step(own, cap)
        step = steps[key]
        if "not_planned" in step:
            notes.append(f"{job.name}: {one_line(step['not_planned'])}")
            continue
        least_bytes[job.name] = step["total_bytes"] + context_bytes
        seconds[job.name] = _seconds(job, own, step, config)
    return Prediction(least_bytes=least_bytes, seconds=seconds, notes=tuple(notes))


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


def _seconds(job: Job, own: Config, step: Mapping[str, Any], config: Config) -> dict[str, float]:
    """Return what a training takes on each card; empty where that is not known."""
    train, seconds = own.train, {}
    steps = job.steps or train.steps
    dtype = train.precision if train.precision in PEAK_DTYPES else "fp32"
    if step["tokens"] is None or train.epochs is not None:
        return {}
    parameters = step["weights_bytes"] / 4
    flop = _FLOP_PER_PARAMETER * parameters * step["tokens"] * train.batch * steps
    for name, node in config.nodes.items():
        profile = PROFILES.get(node.gpu)
        rated = None if profile is None else peak_tflops(profile, dtype)
        for index in range(max(1, node.gpus)):
            if rated:
                card = name if node.gpus <= 1 else f"{name}:{index}"
                seconds[card] = flop / (_USED * rated * 1e12)
    return seconds


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


def plan_jobs_text(planned: JobsPlan) -> str:
    """Return the estimate for people."""
    after = {job.name: ", ".join(job.after) for job in planned.jobs}
    rows = [("job", "card", "begins after", "takes", "least MiB", "comes after")]
    for one in planned.schedule.jobs:
        is_known, needs = _is_known(planned, one.job), _mib(planned, one.job)
        rows.append(
            (
                one.job,
                one.card,
                _rounded(one.start_s),
                _rounded(one.end_s - one.start_s) if is_known else "not known",
                UNICODE.missing if needs is None else str(needs),
                after[one.job] or UNICODE.missing,
            )
        )
    lines = list(aligned(rows, {"job", "card", "comes after"})) if len(rows) > 1 else []
    if lines:
        took = _rounded(planned.schedule.makespan_s)
        lines += ["", f"{counted(len(rows) - 1, 'job')}, about {took} in all."]
        lines.append(f"Times are of {_USED:.1%} of the cards' rated speed; none is measured.")
    unknown = [one.job for one in planned.schedule.jobs if not _is_known(planned, one.job)]
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


def _rounded(seconds: float) -> str:
    return "<1s" if 0 < seconds < 1 else format_duration(round(seconds))


def _is_known(planned: JobsPlan, name: str) -> bool:
    return bool(planned.predicted.seconds.get(name))


def _mib(planned: JobsPlan, name: str) -> int | None:
    least_bytes = planned.predicted.least_bytes.get(name)
    return None if least_bytes is None else round(least_bytes / MIB)
