"""What is known of jobs before they run: configuration, least memory, and time on each card.

Memory is predicted as for `plan` of a training, by a process of its own. Times follow from the
rated speed of the cards, and only for GPT presets. Measures nothing, and starts no job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.config.gpu_specs import PEAK_DTYPES, PROFILES, peak_tflops
from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError, one_line
from orchestrator.jobs.model import Job, Kind
from orchestrator.jobs.places import SAME_STEP
from orchestrator.run.child import ask_child
from workers.settings import ASSUMED_CONTEXT_BYTES

#: A large model of the user, on a slow disk.
_TIMEOUT_S: Final = 300.0
#: Operations of a training for each parameter and token (Kaplan et al., 2020, arXiv 2001.08361).
_FLOP_PER_PARAMETER: Final = 6
#: Of the rated operations; what good training code reaches on such cards.
RATED_SHARE: Final = 0.375

#: Larger than any card: what the smallest step takes is asked for, and not what fits.
_NO_CAP_BYTES: Final = 2**60
#: Predictions are within a tenth (docs/results/hugging-face.md): a job is refused only
#: where so much of it does not fit.
_SURE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is known of jobs before one has run, by name."""

    least_bytes: Mapping[str, int]
    """What the smallest step of a training takes on a card, the context included."""
    seconds: Mapping[str, Mapping[str, float]]
    """What a training takes on each card."""
    notes: tuple[str, ...]
    """Why something could not be predicted."""


def job_config(base: Config, job: Job) -> Config:
    """Return the configuration of a job's worker: that of the run, with what the job says.

    `ConfigError` if that is not valid; `jobs/spec.py` has refused it before.
    """
    # On any node; and the state of a training must be able to move to another PC.
    workers = sum(node.workers for node in base.nodes.values())
    fixed: dict[str, object] = {"train.slots": workers}
    if job.kind is Kind.TRAIN:
        fixed |= {"workload.name": "train", "train.checkpoints": "head"}
    data: dict[str, Any] = base.model_dump()
    for dotted, value in {**job.overrides, **fixed}.items():
        section, _, key = dotted.partition(".")
        data[section] = {**data[section], key: value}
    return config_from_data(data, f"job {job.name}")


def memory_plan(config: Config, caps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a training takes under these caps, or `not_planned`.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    question = {"settings": config.train.model_dump(), "seed": config.workload.seed, "caps": caps}
    told = ask_child("workers.training.memory_plan", question, _TIMEOUT_S)
    if isinstance(told, str):
        return {"not_planned": told}
    if "refused" in told:
        raise UsageError(one_line(told["refused"]))
    return told


def least_room_of(
    jobs: Sequence[Job], config: Config, *, on_card: bool, known: dict[str, Any] | None = None
) -> dict[str, int]:
    """Return the bytes that a card must have for each job, where that can be predicted.

    What was asked for is kept in `known`, for the next call.

    Raises:
        UsageError: A job names what cannot be trained.
    """
    predicted = predict(jobs, config, on_card=on_card, known=known).least_bytes
    return {name: int(_SURE * least_bytes) for name, least_bytes in predicted.items()}


def predict(
    jobs: Sequence[Job], config: Config, *, on_card: bool, known: dict[str, Any] | None = None
) -> Prediction:
    """Return what is known of jobs; trainings that differ in what changes no memory are asked for
    once.

    Raises:
        UsageError: A job names what cannot be trained.
    """
    context_bytes = ASSUMED_CONTEXT_BYTES if on_card else 0
    cap = {"device": "cuda" if on_card else "cpu", "cap_bytes": _NO_CAP_BYTES}
    known = {} if known is None else known
    least_bytes, seconds, notes = {}, {}, []
    for job in jobs:
        if job.kind is not Kind.TRAIN:
            continue
        own = job_config(config, job)
        key = own.train.model_dump_json(exclude=set(SAME_STEP))
        if key not in known:
            known[key] = memory_plan(own, [cap])
        told = known[key]
        if "not_planned" in told:
            notes.append(f"{job.name}: {one_line(told['not_planned'])}")
            continue
        step = {**told["caps"][0]["steps"][-1], "tokens": told["tokens"]}
        least_bytes[job.name] = step["total_bytes"] + context_bytes
        seconds[job.name] = _seconds(job, own, step, config)
    return Prediction(least_bytes=least_bytes, seconds=seconds, notes=tuple(notes))


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
                seconds[card] = flop / (RATED_SHARE * rated * 1e12)
    return seconds
