"""What is known of jobs before they run: their configuration, and the least memory of trainings.

Memory is predicted as for `plan` of a training, by a process of its own. Measures nothing, and
starts no job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError, one_line
from orchestrator.jobs.model import Job
from orchestrator.jobs.places import SAME_STEP
from orchestrator.run.child import ask_child
from workers.settings import ASSUMED_CONTEXT_BYTES

#: A large model of the user, on a slow disk.
_TIMEOUT_S: Final = 300.0
#: Larger than any card: what the smallest step takes is asked for, and not what fits.
_NO_CAP_BYTES: Final = 2**60
#: Predictions are within a tenth (docs/results/hugging-face.md): a job is refused only
#: where so much of it does not fit.
_SURE: Final = 0.9


def job_config(base: Config, job: Job) -> Config:
    """Return the configuration of a job's worker: that of the run, with what the job says.

    `ConfigError` if that is not valid; `jobs/spec.py` has refused it before.
    """
    # On any node; and the state of a training must be able to move to another PC.
    workers = sum(node.workers for node in base.nodes.values())
    fixed: dict[str, object] = {"train.slots": workers}
    if job.command is None:
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

    Trainings that differ in what changes no memory are asked for once. What was asked for is kept
    in `known`, for the next call.

    Raises:
        UsageError: A job names what cannot be trained.
    """
    context_bytes = ASSUMED_CONTEXT_BYTES if on_card else 0
    cap = {"device": "cuda" if on_card else "cpu", "cap_bytes": _NO_CAP_BYTES}
    known = {} if known is None else known
    least_bytes = {}
    for job in jobs:
        if job.command is not None:
            continue
        own = job_config(config, job)
        key = own.train.model_dump_json(exclude=set(SAME_STEP))
        if key not in known:
            known[key] = memory_plan(own, [cap])
        if "not_planned" not in known[key]:
            total_bytes = known[key]["caps"][0]["steps"][-1]["total_bytes"]
            least_bytes[job.name] = int(_SURE * (total_bytes + context_bytes))
    return least_bytes
