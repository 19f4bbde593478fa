"""What is known of jobs and trainings before they run: where jobs are submitted, their
configuration, the memory of trainings, and whether two members divide a model.

Memory is predicted as for `plan` of a training, by a process of its own. Measures nothing, and
starts no job.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any, Final

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.config.team import members
from orchestrator.core.placement import NodeBudget, Target, plan_slots
from orchestrator.errors import ConfigError, UsageError, one_line
from orchestrator.jobs.model import SAME_STEP, Job, Submitted
from orchestrator.jobs.sweep import job_config
from orchestrator.run.child import ask_child, never
from workers.command.folder import look
from workers.settings import ASSUMED_CONTEXT_BYTES, TeamSpec

#: A large model of the user, on a slow disk.
_TIMEOUT_S: Final = 300.0
#: Larger than any card: what the smallest step takes is asked for, and not what fits.
_NO_CAP_BYTES: Final = 2**60
#: Predictions are within a tenth (docs/results/hugging-face.md): a job is refused only
#: where so much of it does not fit.
_SURE: Final = 0.9

#: Said where `train.split: auto` becomes `layers`.
DIVIDES: Final = "The training fits neither member alone: they divide the model (split: layers)"


def memory_plan(
    config: Config,
    target: Target,
    caps: Sequence[Mapping[str, Any]],
    interrupted: Callable[[], bool] = never,
) -> dict[str, Any]:
    """Return what a training takes under these caps, or `not_planned`. Two members that divide the
    model have caps of their own.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    question = {"settings": config.train.model_dump(), "seed": config.workload.seed, "caps": caps}
    if (team := dividing(config, target)) is not None:
        question |= {"caps": caps_of(team, config, target), "budgets_bytes": team.budgets_bytes}
    told = ask_child("workers.training.memory_plan", question, _TIMEOUT_S, interrupted)
    if isinstance(told, str):
        return {"not_planned": told}
    if "refused" in told:
        raise UsageError(one_line(told["refused"]))
    return told


def cap_about_bytes(budget_bytes: int, *, on_card: bool) -> int:
    """Return the cap of a worker, as far as it is known before one has measured its CUDA
    context.
    """
    return max(0, budget_bytes - (ASSUMED_CONTEXT_BYTES if on_card else 0))


def dividing(config: Config, target: Target) -> TeamSpec | None:
    """Return the team whose members divide the model, the one that leads first; `None`: none do."""
    if config.train.split != "layers" or not members(config):
        return None
    return plan_slots(config, target)[0].spec.team


def caps_of(team: TeamSpec, config: Config, target: Target) -> list[dict[str, Any]]:
    """Return the caps of the members of a team, as `memory_plan` wants them."""
    caps = []
    for slot, budget_bytes in zip(team.members, team.budgets_bytes, strict=True):
        on_card = target.device != "cpu" and config.nodes[slot.partition("/")[0]].gpus > 0
        cap_bytes = cap_about_bytes(budget_bytes, on_card=on_card)
        device = "cuda" if on_card else "cpu"
        caps.append({"nodes": [slot], "device": device, "cap_bytes": cap_bytes})
    return caps


def caps_of_nodes(budgets: Sequence[NodeBudget]) -> list[dict[str, Any]]:
    """Return the same of workers that train for themselves, each cap with its nodes."""
    groups = defaultdict[tuple[int, str], list[str]](list)
    for budget in budgets:
        cap_bytes = cap_about_bytes(budget.budget_bytes, on_card=bool(budget.gpus))
        groups[cap_bytes, "cuda" if budget.gpus else "cpu"].append(budget.node)
    return [
        {"nodes": nodes, "device": device, "cap_bytes": cap_bytes}
        for (cap_bytes, device), nodes in groups.items()
    ]


def divided_where_needed(
    config: Config, target: Target, interrupted: Callable[[], bool] = never
) -> Config:
    """Return the configuration with `split: layers` in the place of `auto` where a training of two
    members fits neither, and fits both together; else as it is. Takes as long as `plan`.
    """
    if config.train.split != "auto" or len(members(config)) != 2:
        return config
    data = config.model_dump()
    try:
        divided = config_from_data(
            {**data, "train": {**data["train"], "split": "layers"}}, "train.split: auto"
        )
        fits = partial(_fits, target=target, interrupted=interrupted)
        if fits(config) is False and fits(divided):
            return divided
    except (ConfigError, UsageError):
        pass  # it cannot be divided: the run shows what falls short
    return config


def _fits(config: Config, target: Target, interrupted: Callable[[], bool]) -> bool | None:
    """Say whether a training fits one of its members, or all of them where they divide it; `None`:
    that is not known.
    """
    team = plan_slots(config, target)[0].spec.team
    assert team is not None  # noqa: S101 - it has members
    told = memory_plan(config, target, caps_of(team, config, target), interrupted)
    if "not_planned" in told:
        return None
    return (all if config.train.split == "layers" else any)(
        cap["steps"][-1]["fits"] for cap in told["caps"]
    )


def least_room_of(
    jobs: Sequence[Job],
    config: Config,
    target: Target,
    *,
    known: dict[str, int | None] | None = None,
) -> dict[str, int]:
    """Return the bytes that a card must have for each job, where that can be predicted; for a job
    whose members divide the model, its cards together.

    Trainings that differ in what changes no memory are asked for once. What was asked for is kept
    in `known`, for the next call.

    Raises:
        UsageError: A job names what cannot be trained.
    """
    known = {} if known is None else known
    least_bytes = {}
    for job in jobs:
        if job.command is not None:
            continue
        own = job_config(config, job)
        key = own.train.model_dump_json(exclude=set(SAME_STEP))
        if key not in known:
            known[key] = _least_bytes(own, target)
        if (needed_bytes := known[key]) is not None:
            least_bytes[job.name] = int(_SURE * needed_bytes)
    return least_bytes


def _least_bytes(config: Config, target: Target) -> int | None:
    """Return what the smallest step of a training takes, contexts included; `None`: unknown."""
    on_card = target.device != "cpu" and any(node.gpus for node in config.nodes.values())
    team = dividing(config, target)
    caps = [{"device": "cuda" if on_card else "cpu", "cap_bytes": _NO_CAP_BYTES}]
    told = memory_plan(config, target, caps)
    if "not_planned" in told:
        return None
    context_bytes = ASSUMED_CONTEXT_BYTES if on_card else 0
    taken_bytes = [cap["steps"][-1]["total_bytes"] + context_bytes for cap in told["caps"]]
    if team is None:
        return int(taken_bytes[0])
    # Which blocks each member has follows from the budgets. So both cards are too small by as much
    # as the fuller one is.
    fullest = max(map(truediv, taken_bytes, team.budgets_bytes))
    return int(fullest * sum(team.budgets_bytes))


def on_target(
    jobs: Sequence[Job], config: Config, target: Target
) -> Callable[[Config, Target], tuple[Submitted, ...]]:
    """Return what makes the records of jobs for a run on the target that is found in the end.

    What cannot be is refused here, before anything starts.
    """
    expected = submitted(jobs, config, target)
    return lambda config, found: expected if found == target else submitted(jobs, config, found)


def submitted(jobs: Iterable[Job], config: Config, target: Target) -> tuple[Submitted, ...]:
    """Return the records of jobs that are submitted here and now, to a run on `target`: with the
    time, the folder of a command, and its code.

    The folders of jobs are on the head's PC. Where other PCs work too, a job that names the folder
    of another runs there. `UsageError` where a job names what cannot be trained.
    """
    codes: dict[str, str | None] = {}  # to hash a folder takes too long to do it for each job

    def of_here(job: Job) -> Job:
        now = replace(job, submitted_at_unix_s=time.time())
        command = job.command
        texts = [*map(str, job.overrides.values())]
        if command is not None:
            texts += [*command.argv, *command.env.values(), command.cwd or ""]
        anywhere = not job.nodes and not job.is_team
        if not target.one_machine and anywhere and any(".dir}" in text for text in texts):
            now = replace(now, nodes=(config.head_node,))
        if command is None or ".dir}" in (command.cwd or ""):
            return now
        cwd = str(Path.cwd() / Path(command.cwd or "").expanduser())
        if cwd not in codes:
            codes[cwd] = look(cwd)
        return replace(now, command=replace(command, cwd=cwd), code=codes[cwd])

    ready = [*map(of_here, jobs)]
    least = least_room_of([job for job in ready if not job.awaits_settings], config, target)
    return tuple(Submitted(job=job, least_bytes=least.get(job.name)) for job in ready)
