"""Predicts before jobs and trainings run: the memory of trainings, and whether two members divide a
model. Makes the records with which jobs are submitted.

A child process predicts memory, as for `plan` of a training. Measures nothing, and starts no job.
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
from workers.command.folder import code_at
from workers.settings import ASSUMED_CONTEXT_BYTES, TeamSpec

#: Enough for a large model of the user on a slow disk.
_TIMEOUT_S: Final = 300.0
#: Larger than any card, to ask for the memory of the smallest step and not for what fits.
_NO_CAP_BYTES: Final = 2**60
#: Predictions are within a tenth (docs/results/hugging-face.md). A job is refused only if this
#: share of the predicted memory does not fit.
_SURE: Final = 0.9

#: Tells the user that `train.split: auto` has become `layers`.
DIVIDES: Final = "The training fits neither member alone: they divide the model (split: layers)"


def memory_plan(
    config: Config,
    target: Target,
    caps: Sequence[Mapping[str, Any]],
    interrupted: Callable[[], bool] = never,
) -> dict[str, Any]:
    """Return the memory of the steps of a training under these caps, or `not_planned` with a
    reason. If two members divide the model, their caps replace `caps`.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    question = {"settings": config.train.model_dump(), "seed": config.workload.seed, "caps": caps}
    if (team := dividing(config, target)) is not None:
        question |= {"caps": caps_of(team, config, target), "budgets_bytes": team.budgets_bytes}
    answer = ask_child("workers.training.memory_plan", question, _TIMEOUT_S, interrupted)
    if isinstance(answer, str):
        return {"not_planned": answer}
    if "refused" in answer:
        raise UsageError(one_line(answer["refused"]))
    return answer


def cap_about_bytes(budget_bytes: int, *, on_card: bool) -> int:
    """Return the approximate cap of a worker, known before one has measured its CUDA context."""
    return max(0, budget_bytes - (ASSUMED_CONTEXT_BYTES if on_card else 0))


def dividing(config: Config, target: Target) -> TeamSpec | None:
    """Return the team whose members divide the model, its leader first; `None` without one."""
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
    """Return the caps of workers that train alone, for `memory_plan`, with their nodes."""
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
    """Return the configuration with `split: layers` instead of `auto` if a training of two members
    fits neither member, and fits both together; else unchanged. Takes as long as `plan`.
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
    """Say whether a training fits one of its members, or all of them if they divide it; `None` if
    unknown.
    """
    team = plan_slots(config, target)[0].spec.team
    assert team is not None  # noqa: S101 - the caller has found two members
    plan = memory_plan(config, target, caps_of(team, config, target), interrupted)
    if "not_planned" in plan:
        return None
    return (all if config.train.split == "layers" else any)(
        cap["steps"][-1]["fits"] for cap in plan["caps"]
    )


def least_room_of(
    jobs: Sequence[Job],
    config: Config,
    target: Target,
    *,
    known: dict[str, int | None] | None = None,
) -> dict[str, int]:
    """Return the bytes that a card must have for each job whose memory can be predicted; if the
    members of a job divide the model, the bytes of their cards together.

    One prediction serves all trainings that differ only in settings without influence on memory. It
    is kept in `known`, for the next call.

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
    """Return the bytes of the smallest step of a training, with contexts; `None` if unknown."""
    on_card = target.device != "cpu" and any(node.gpus for node in config.nodes.values())
    team = dividing(config, target)
    caps = [{"device": "cuda" if on_card else "cpu", "cap_bytes": _NO_CAP_BYTES}]
    plan = memory_plan(config, target, caps)
    if "not_planned" in plan:
        return None
    context_bytes = ASSUMED_CONTEXT_BYTES if on_card else 0
    taken_bytes = [cap["steps"][-1]["total_bytes"] + context_bytes for cap in plan["caps"]]
    if team is None:
        return int(taken_bytes[0])
    # The budgets decide which blocks each member has, so both cards are too small by the same
    # factor as the fuller one.
    fullest = max(map(truediv, taken_bytes, team.budgets_bytes))
    return int(fullest * sum(team.budgets_bytes))


def on_target(
    jobs: Sequence[Job], config: Config, target: Target
) -> Callable[[Config, Target], tuple[Submitted, ...]]:
    """Return a function that makes the records of jobs for the target that is found in the end.

    This call refuses impossible jobs, before anything starts.
    """
    expected = submitted(jobs, config, target)
    return lambda config, found: expected if found == target else submitted(jobs, config, found)


def submitted(jobs: Iterable[Job], config: Config, target: Target) -> tuple[Submitted, ...]:
    """Return the records of jobs that are submitted now to a run on `target`, with the time, the
    folder of a command, and the hash of its code.

    The folders of jobs are on the head's PC, so a job that names another job's folder runs there if
    other PCs work too. `UsageError` if a job names what cannot be trained.
    """
    codes: dict[str, str | None] = {}  # hashing the folder for each job takes too long

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
            codes[cwd] = code_at(cwd)
        return replace(now, command=replace(command, cwd=cwd), code=codes[cwd])

    ready = [*map(of_here, jobs)]
    least = least_room_of([job for job in ready if not job.awaits_settings], config, target)
    return tuple(Submitted(job=job, least_bytes=least.get(job.name)) for job in ready)
