"""From a configuration to slots and what each worker gets, and from live nodes to what is missing.

Does not cover what is measured on a live node (context, other tenants: the worker subtracts that),
nor what to type to cure a refusal (`node_commands.py`). Pure.
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


#: Where a member of a team listens if nothing is said; the next one of its PC at the port after it.
TEAM_PORT = 6390

#: Ray keeps resources in steps of 1/10000 and cuts off the rest (its FixedPoint).
RAY_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBudget:
    """What one node gives its workers.

    Every number is for one worker unless its name says otherwise.
    """

    node: str
    workers: int
    gpus: int
    gpu_fraction: float
    """The worker's `num_gpus` for Ray, so that all of them fit on the cards and none is split over
    two; 0 on a node without cards.

    Rounded down to Ray's steps: seven workers get 0.1428, because at 0.1429 the seventh would wait
    without end.
    """
    cpus_per_worker: int
    cpus_total: int
    """Of all workers, logical."""
    budget_bytes: int
    """What the whole worker process may hold on the device, context included."""
    workers_per_card: int
    """On the fullest card; all of them on a node without cards, which share its memory."""
    card_budget_bytes: int
    """Of all workers on the fullest card."""
    card_total_bytes: int | None
    """What the card shows; `None` on a node without cards unless `vram_gib` says what its workers
    share.
    """
    card_allowed_bytes: int | None
    """`memory_fraction` of the total."""
    duty: float | None
    """Share of wall time the worker may keep the device busy; `None` where duty is not what limits
    it.
    """
    size: int
    batch: int
    dtype: str


def node_budget(name: str, node: NodeConfig, config: Config) -> NodeBudget:
    """Return what each worker of node `name` gets under `config`."""
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
    """Where the workers of a run stand: what does not follow from the configuration."""

    device: str | None = None
    """`cuda` or `cpu` for every node; `None` takes cards where a node has any."""
    one_machine: bool = False
    """All nodes are raylets on this machine and share its cores, and its card if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """One slot: where its actor sits and what its worker gets."""

    spec: WorkerSpec
    num_cpus: float
    num_gpus: float
    """What its actor reserves; nothing limits use."""
    gpu: str | None
    """The card the configuration promises, until the worker has seen it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A node that cannot take its workers, and why."""

    node: str
    text: str
    is_absent: bool = False
    """Whether no live node has its label."""


def plan_slots(config: Config, target: Target) -> tuple[SlotPlan, ...]:
    """Return the slots of the configuration, in its order, as `node/0`, `node/1` and so on.

    Of a training no more than `train.slots`, and of one with a team its members alone, which share
    one seed; the others get no process.
    """
    budgets = [node_budget(name, node, config) for name, node in config.nodes.items()]
    workers, workload = sum(budget.workers for budget in budgets), config.workload
    workers_bytes = sum(budget.workers * budget.budget_bytes for budget in budgets)
    of_node = {budget.node: budget.budget_bytes for budget in budgets}
    members = {slot: of_node[slot.partition("/")[0]] for slot in team.members(config)}
    if config.train.split == "layers":  # the first one leads: it has logits and loss as well
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
                # Nodes that share one real card were made to fit it when they were scaled, all of
                # them together.
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
                    # Each worker draws its own numbers, and the same ones in the next run.
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
    """Return what a slot is told of its team, of which each member may hold so many bytes; an
    address without a host is one of its PC's, which is known once that has joined.
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
    """Return what a worker is told where `address` is the one by which its PC has joined: a member
    of a team listens there if nothing else is said.
    """
    if spec.team is None or not spec.team.listen.startswith(":"):
        return spec
    host = f"[{address}]" if ":" in address else address
    return replace(spec, team=replace(spec.team, listen=f"{host}{spec.team.listen}"))


def idle_line(config: Config, plans: Sequence[SlotPlan]) -> str | None:
    """Say which slots train, where a team shares one training or some have no process."""
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
    """Return what stands in the way of the plan on these live nodes; nothing if all is there.

    Ray itself would not say: it leaves an actor that fits nowhere pending, silently.
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
