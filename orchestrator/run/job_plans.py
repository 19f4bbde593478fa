"""From a job that has a place on a card to the plan of its slot. Pure.

Covers budgets and reservations, the folders of other jobs in commands and settings, and the cards
that a configuration has. Does not decide which card a job gets (`jobs/places.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import Config
from orchestrator.core.placement import NodeBudget, SlotPlan, Target, node_budget, plan_slots
from orchestrator.jobs.model import Card, Job, Standing
from orchestrator.jobs.queue import COMMAND_LEASE_S
from orchestrator.jobs.sweep import FOLDER
from orchestrator.run.prediction import job_config
from workers.command.code import CODE
from workers.command.launch import ATTEMPT, JOB_DIR, RESUME
from workers.settings import CommandSpec, WorkerSpec


class JobPlans:
    """The plans of the jobs of one run."""

    def __init__(
        self,
        config: Config,
        target: Target,
        run_id: str,
        folder_of: Callable[[str], Path],
    ) -> None:
        """Make none yet; `folder_of` is by the name of a job."""
        self._config = config
        self._target = target
        self._run_id = run_id
        self._folder_of = folder_of
        self.budgets = {
            name: node_budget(name, node, config) for name, node in config.nodes.items()
        }
        """By node."""

    def cards(self, nodes: Collection[str]) -> tuple[Card, ...]:
        """Return the cards of the configuration, closed where the node is not one of `nodes`."""
        return tuple(
            Card(
                name=name if node.gpus <= 1 else f"{name}:{index}",
                node=name,
                title=PROFILES[node.gpu].product if node.gpu in PROFILES else node.gpu,
                room_bytes=self.budgets[name].card_budget_bytes,
                speed=_speed(node.gpu, self.budgets[name]),
                closed=None if name in nodes else f"{name} is not there",
            )
            for name, node in self._config.nodes.items()
            for index in range(max(1, node.gpus))
        )

    def plan_of(self, standing: Standing) -> SlotPlan:
        """Return the slot of a job that has a place, or had one.

        Raises:
            ConfigError: Its configuration is not possible any more.
        """
        job = standing.job.with_texts(
            lambda text: FOLDER.sub(lambda named: str(self._folder_of(named[1])), text)
        )
        node, budget_bytes = str(standing.last_card).partition(":")[0], standing.budget_bytes or 0
        config = job_config(self._config, job)
        plan = next(each for each in plan_slots(config, self._target) if each.spec.node == node)
        share, whole = self.budgets[node], self.budgets[node].card_budget_bytes
        part = 1.0 if standing.alone else min(1.0, budget_bytes / whole)
        duty = None if share.duty is None else share.duty * share.workers_per_card
        if duty is not None and duty < 1 and not standing.alone:
            duty /= 2  # of two jobs that share the card
        spec = replace(
            plan.spec,
            slot=job.name,
            budget_bytes=budget_bytes,
            card_budget_bytes=budget_bytes if standing.alone else whole,
            duty=None if duty is None or duty >= 1 else duty,
            # The same on every card of a machine: how a sum is split decides on its last bit.
            workers_on_host=sum(max(1, each.gpus) for each in self.budgets.values())
            if self._target.one_machine
            else max(1, share.gpus),
            workload=replace(plan.spec.workload, seed=config.workload.seed),
            run_id=self._run_id,
            command=job.command and self._command(job, job.command, standing.attempt, node),
        )
        return replace(
            plan,
            spec=spec,
            num_cpus=share.cpus_per_worker * max(1, int(share.workers_per_card * part)),
            num_gpus=math.floor(1e4 * part) / 1e4 if share.gpus else 0.0,
        )

    def spec_of(self, standing: Standing) -> WorkerSpec:
        """Return what the process of the slot is told; see `plan_of`."""
        return self.plan_of(standing).spec

    def _command(self, job: Job, command: CommandSpec, attempt: int, node: str) -> CommandSpec:
        """Return a command with what its attempt is told."""
        env = {**command.env, ATTEMPT: str(attempt)}
        if attempt > 1:
            env[RESUME] = "1"
        if job.code is not None:
            env[CODE] = job.code
        if self._target.one_machine:
            env[JOB_DIR] = str(self._folder_of(job.name))
        # The head's own PC cannot be cut off from it.
        is_remote = not self._target.one_machine and node != self._config.head_node
        return replace(command, lease_s=COMMAND_LEASE_S if is_remote else None, env=env)


def _speed(gpu: str, budget: NodeBudget) -> float:
    """Return the rated speed of a card, in TFLOP/s of its node's number type; 1 where unknown."""
    profile = PROFILES.get(gpu)
    return 1.0 if profile is None else profile.peak_tflops(budget.dtype)
