"""What is known of jobs before they run: where they are submitted, their configuration, and the
least memory of trainings.

Memory is predicted as for `plan` of a training, by a process of its own. Measures nothing, and
starts no job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.core.placement import Target
from orchestrator.errors import UsageError, one_line
from orchestrator.jobs.model import SAME_STEP, Job, Submitted
from orchestrator.run.child import ask_child
from workers.command.code import code_of
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
    fixed: dict[str, object] = {} if job.is_team else {"train.slots": workers}
    if job.command is None:
        fixed |= {"workload.name": "train", "train.checkpoints": "head"}
    data: dict[str, Any] = base.model_dump()
    for dotted, value in {**job.overrides, **fixed}.items():
        section, _, key = dotted.partition(".")
        data[section] = {**data[section], key: value}
    return config_from_data(data, f"job {job.name}")


def memory_plan(
    config: Config, caps: Sequence[Mapping[str, Any]], budgets_bytes: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return what a training takes under these caps, or `not_planned`. `budgets_bytes` of two
    members divide the model, and the caps are theirs.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    question = {"settings": config.train.model_dump(), "seed": config.workload.seed, "caps": caps}
    if budgets_bytes is not None:
        question["budgets_bytes"] = budgets_bytes
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


def on_target(
    jobs: Sequence[Job], config: Config, target: Target
) -> Callable[[Config, Target], tuple[Submitted, ...]]:
    """Return what makes the records of jobs for a run on the target that is found in the end.

    What cannot be is refused here, before anything starts.
    """
    expected = submitted(jobs, config, target)
    return lambda config, found: expected if found == target else submitted(jobs, config, found)


def submitted(jobs: Iterable[Job], config: Config, target: Target) -> tuple[Submitted, ...]:
    """Return the records of jobs that are submitted here and now, to a run on `target`.

    `UsageError` where a job names what cannot be trained.
    """
    ready = prepared(jobs, None if target.one_machine else config.head_node)
    known = [job for job in ready if not job.awaits_settings]
    on_card = target.device != "cpu" and any(node.gpus for node in config.nodes.values())
    least = least_room_of(known, config, on_card=on_card)
    return tuple(
        Submitted(at_s=job.submitted_at_unix_s, job=job, least_bytes=least.get(job.name))
        for job in ready
    )


def prepared(jobs: Iterable[Job], head_node: str | None) -> tuple[Job, ...]:
    """Return jobs as they are submitted here and now: with the time, the folder of a command, and
    its code.

    The folders of jobs are on the head's PC. Where other PCs work too, `head_node` is its name: a
    job that names the folder of another then runs there.
    """
    codes: dict[str, str | None] = {}  # to hash a folder takes too long to do it for each job

    def of_here(job: Job) -> Job:
        now = replace(job, submitted_at_unix_s=time.time())
        command = job.command
        texts = [*map(str, job.overrides.values())]
        if command is not None:
            texts += [*command.argv, *command.env.values(), command.cwd or ""]
        anywhere = not job.nodes and not job.is_team
        if head_node is not None and anywhere and any(".dir}" in text for text in texts):
            now = replace(now, nodes=(head_node,))
        if command is None or ".dir}" in (command.cwd or ""):
            return now
        cwd = str(Path.cwd() / Path(command.cwd or "").expanduser())
        if cwd not in codes:
            codes[cwd] = code_of(cwd) if Path(cwd).is_dir() else None
        return replace(now, command=replace(command, cwd=cwd), code=codes[cwd])

    return tuple(map(of_here, jobs))
