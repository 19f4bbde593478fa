"""Derives slots and the settings of each worker from a configuration, and compares live nodes with
the plan. Pure.

Does not know what a worker measures on its node (it subtracts its context and other programs), nor
the commands that cure a refusal (`node_commands.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.config import team
from orchestrator.config.schema import DEFAULT_SIZE
from orchestrator.core.fleet import NodeFact
from workers.settings import MemorySettings, TeamSpec, WorkerSpec, WorkloadSpec
from workers.units import GIB, MIB

if TYPE_CHECKING:
    from orchestrator.config.schema import Config, NodeConfig


#: Default port of a member of a team; further members on the same PC use the ports after it.
TEAM_PORT = 6390

#: Ray stores resources in steps of 1/10000 and truncates the rest (its FixedPoint).
RAY_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBudget:
    """The resources of one node for its workers.

    Every number is for one worker unless its name says otherwise.
    """

    node: str
    workers: int
    gpus: int
    gpu_fraction: float
    """`num_gpus` of a worker for Ray: all workers fit on the cards, and none is split over two
    cards; 0 on a node without cards.

    Rounded down to Ray's steps: seven workers get 0.1428, because at 0.1429 the seventh would never
    be placed.
    """
    cpus_per_worker: int
    cpus_total: int
    """Logical CPUs of all workers."""
    budget_bytes: int
    """Memory that the whole worker process may hold on the device, context included."""
    workers_per_card: int
    """Workers on the fullest card; on a node without cards all workers, which share its memory."""
    card_budget_bytes: int
    """Memory of all workers on the fullest card."""
    card_total_bytes: int | None
    """Memory of the card. On a node without cards: `vram_gib`, shared by its workers, or `None`."""
    card_allowed_bytes: int | None
    """`memory_fraction` of the total."""
    duty: float | None
    """Share of wall time for which the worker may keep the device busy; `None`: no duty limit."""
    size: int
    batch: int
    dtype: str


def node_budget(name: str, node: NodeConfig, config: Config) -> NodeBudget:
    """Return the budget of node `name` under `config`."""
    total_gib = node.card_total_gib
    return NodeBudget(
        node=name,
        workers=node.workers,
        gpus=node.gpus,
        gpu_fraction=RAY_STEPS // node.workers_per_card / RAY_STEPS if node.gpus else 0.0,
        cpus_per_worker=node.cpus_per_worker,
        cpus_total=node.workers * node.cpus_per_worker,
        budget_bytes=node.budget_bytes,
        workers_per_card=node.workers_per_card,
        card_budget_bytes=node.workers_per_card * node.budget_bytes,
        card_total_bytes=None if total_gib is None else round(total_gib * GIB),
        card_allowed_bytes=node.card_allowed_bytes,
        duty=node.gpu_share
        if config.compute_share_mode == "duty" and not config.workers.mps
        else None,
        size=config.workload.size or node.size or DEFAULT_SIZE,
        batch=config.workload.batch,
        dtype=config.train.precision
        if config.workload.name == "train"
        else node.dtype or config.workload.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The machines of a run, as far as they do not follow from the configuration."""

    device: str | None = None
    """`cuda` or `cpu` for every node; `None`: each node uses its cards, or else its CPU."""
    one_machine: bool = False
    """Whether all nodes are raylets on this machine, which share its cores and its card, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """One slot: the settings of its worker, and the reservation of its actor."""

    spec: WorkerSpec
    num_cpus: float
    num_gpus: float
    """GPUs that the actor reserves in Ray; the reservation does not limit use."""
    gpu: str | None
    """The card according to the configuration; shown until the worker reports the real one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A node that cannot take its workers, and why."""

    node: str
    text: str
    is_absent: bool = False
    """Whether no live node has its label."""


def plan_slots(config: Config, target: Target) -> tuple[SlotPlan, ...]:
    """Return the slots of the configuration, in its order, as `node/0`, `node/1` and so on.

    A training has at most `train.slots` slots, and with a team only its members, which share one
    seed. The other workers get no process.
    """
    budgets = [node_budget(name, node, config) for name, node in config.nodes.items()]
    workers, workload = sum(budget.workers for budget in budgets), config.workload
    workers_bytes = sum(budget.workers * budget.budget_bytes for budget in budgets)
    of_node = {budget.node: budget.budget_bytes for budget in budgets}
    members = {slot: of_node[slot.partition("/")[0]] for slot in team.members(config)}
    if config.train.split == "layers":  # the largest leads: it also holds logits and loss
        members = dict(sorted(members.items(), key=lambda member: -member[1]))
    plans: list[SlotPlan] = []
    for budget in budgets:
        node, name = config.nodes[budget.node], budget.node
        for slot in (f"{name}/{index}" for index in range(budget.workers)):
            if members and slot not in members:
                continue
            device = target.device or ("cuda" if budget.gpus else "cpu")
            is_client = config.workers.mps and device == "cuda"
            spec = WorkerSpec(
                slot=slot,
                node=name,
                device=device,
                budget_bytes=budget.budget_bytes,
                card_budget_bytes=workers_bytes if target.one_machine else budget.card_budget_bytes,
                # Scaling has already fitted all nodes that share one real card to that card.
                memory_fraction=1.0 if target.one_machine else node.memory_fraction,
                workers_on_host=workers if target.one_machine else budget.workers,
                duty=budget.duty,
                mps=is_client,
                thread_share=node.gpu_share
                if is_client and config.compute_share_mode == "duty"
                else None,
                policy=config.memory.policy,
                memory=memory_settings(config),
                workload=WorkloadSpec(
                    name=workload.name,
                    dtype=budget.dtype,
                    size=budget.size,
                    batch=budget.batch,
                    # Workers draw different numbers, and the same ones in the next run.
                    seed=workload.seed + (0 if members else len(plans)),
                    settings=config.train.model_dump(),
                ),
                thermal=config.thermal.settings(),
                check_share=config.verify.share,
                poll_s=config.run.poll_s,
                team=_team_of(slot, members, config, target),
            )
            cpus, gpus = budget.cpus_per_worker, budget.gpu_fraction
            plans.append(SlotPlan(spec=spec, num_cpus=cpus, num_gpus=gpus, gpu=node.gpu))
    return tuple(plans[: config.train.most_slots if workload.name == "train" else None])


def _team_of(
    slot: str, members: Mapping[str, int], config: Config, target: Target
) -> TeamSpec | None:
    """Return the team of a slot. `members` has the budget of each member in bytes. An address
    without a host stands for the slot's PC, whose address is known once it has joined.
    """
    if not members:
        return None
    node = slot.partition("/")[0]
    of_node = [each for each in members if each.partition("/")[0] == node]
    listen = "127.0.0.1:0"
    if not target.one_machine and len(of_node) < len(members):
        host, _, port = (config.nodes[node].team_listen or f":{TEAM_PORT}").rpartition(":")
        listen = f"{host}:{int(port) + of_node.index(slot)}"
    return TeamSpec(
        members=tuple(members),
        listen=listen,
        split="layers" if config.train.split == "layers" else "data",
        budgets_bytes=tuple(members.values()),
    )


def listening_at(spec: WorkerSpec, address: str) -> WorkerSpec:
    """Return the spec of a worker whose PC has joined by `address`. A member of a team listens
    there unless the configuration has another address.
    """
    if spec.team is None or not spec.team.listen.startswith(":"):
        return spec
    host = f"[{address}]" if ":" in address else address
    return replace(spec, team=replace(spec.team, listen=f"{host}{spec.team.listen}"))


def idle_line(config: Config, plans: Sequence[SlotPlan]) -> str | None:
    """Return a sentence about which slots train, if there is a team or some have no process."""
    has_team = bool(team.members(config))
    idle = sum(node.workers for node in config.nodes.values()) - len(plans)
    if not idle and not has_team:
        return None
    names = ", ".join(plan.spec.slot for plan in plans)
    what = "divide the model" if config.train.split == "layers" else "share each step"
    said = f"Trained by {names}{f', which {what}' if has_team else ''}"
    by = "train.team names those that train" if has_team else "train.slots says how many"
    return f"{said}; {idle} more stay without a process ({by})" if idle else said


def memory_settings(config: Config) -> MemorySettings:
    """Return the section `memory:` in the worker's units."""
    memory = config.memory
    return MemorySettings(
        **memory.model_dump(include=set(MemorySettings.__slots__)),
        floor_bytes=round(memory.floor_mib * MIB),
        leave_free_bytes=round(memory.leave_free_mib * MIB),
    )


def refusals(config: Config, live: Iterable[NodeFact]) -> tuple[Refusal, ...]:
    """Return why live nodes cannot take their workers; empty if all of them can.

    Ray does not report this: an actor that fits on no node stays pending.
    """
    facts = tuple(live)
    refused: list[Refusal] = []
    for name, node in config.nodes.items():
        budget = node_budget(name, node, config)
        mine = [fact for fact in facts if fact.name == name]
        texts = []
        if not mine:
            text = f"no live node has the label node={name}"
            refused.append(Refusal(node=name, text=text, is_absent=True))
        elif len(mine) > 1:
            where = ", ".join(sorted(fact.address for fact in mine))
            texts = [f"{len(mine)} live nodes have the label node={name}: {where}"]
        else:
            if mine[0].cpus < budget.cpus_total:
                cpus = f"{budget.workers} workers x {budget.cpus_per_worker} = {budget.cpus_total}"
                texts = [f"{name} offers {mine[0].cpus:g} CPUs, the plan needs {cpus}"]
            if mine[0].gpus < budget.gpus:
                texts += [f"{name} offers {mine[0].gpus:g} GPUs, the plan needs {budget.gpus}"]
        refused += (Refusal(node=name, text=text) for text in texts)
    return tuple(refused)
