"""From a configuration to slots, and from live nodes to what is missing.

Covers which slot goes where, what its worker gets, and the refusals with their reasons. Does not cover the sums
on a card (`budget.py`), nor what to type to cure a refusal (`node_commands.py`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from orchestrator.core.budget import NodeBudget, node_budget
from orchestrator.core.fleet import NodeFact, Reservation
from workers.settings import MemorySettings, WorkerSpec, WorkloadSpec
from workers.units import MIB

if TYPE_CHECKING:
    from orchestrator.config.schema import Config


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

    reservation: Reservation
    spec: WorkerSpec
    gpu: str | None
    """The card the configuration promises, until the worker has seen it."""


class Missing(StrEnum):
    """What a node lacks."""

    NODE = "node"
    CPUS = "cpus"
    GPUS = "gpus"
    TWICE = "twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A node that cannot take its workers, and why."""

    node: str
    missing: Missing
    text: str


def plan_slots(config: Config, target: Target) -> tuple[SlotPlan, ...]:
    """Return every slot of the configuration, in its order, as `node/0`, `node/1` and so on."""
    budgets = [node_budget(name, node, config) for name, node in config.nodes.items()]
    sharing = sum(budget.workers for budget in budgets) if target.one_machine else None
    shared_bytes = sum(budget.workers * budget.budget_bytes for budget in budgets) if target.one_machine else None
    slots = [(budget, f"{budget.node}/{index}") for budget in budgets for index in range(budget.workers)]
    return tuple(
        _slot_plan(config, target, budget, slot, seed, sharing, shared_bytes)
        # Each worker draws its own numbers, and the same ones in the next run.
        for seed, (budget, slot) in enumerate(slots, start=config.workload.seed)
    )


def _slot_plan(
    config: Config,
    target: Target,
    budget: NodeBudget,
    slot: str,
    seed: int,
    sharing: int | None,
    shared_bytes: int | None,
) -> SlotPlan:
    node = config.nodes[budget.node]
    spec = WorkerSpec(
        slot=slot,
        node=budget.node,
        device=target.device or ("cuda" if budget.gpus else "cpu"),
        budget_bytes=budget.budget_bytes,
        card_budget_bytes=shared_bytes or budget.card_budget_bytes,
        # Nodes that share one real card were made to fit it when they were scaled, all of them together.
        memory_fraction=1.0 if target.one_machine else node.memory_fraction,
        workers_on_host=sharing or budget.workers,
        duty=budget.duty,
        thread_share=node.gpu_share if config.compute_share_mode == "mps" else None,
        policy=config.memory.policy,
        memory=memory_settings(config),
        workload=WorkloadSpec(
            name=config.workload.name,
            dtype=budget.dtype,
            size=budget.size,
            batch=budget.batch,
            seed=seed,
        ),
        thermal=config.thermal.settings(),
        check_share=config.verify.share,
    )
    reservation = Reservation(
        slot=slot, node=budget.node, num_cpus=budget.cpus_per_worker, num_gpus=budget.gpu_fraction
    )
    return SlotPlan(reservation=reservation, spec=spec, gpu=node.gpu)


def memory_settings(config: Config) -> MemorySettings:
    """Return the section `memory:` in the worker's units."""
    memory = config.memory
    return MemorySettings(
        first_fraction=memory.first_fraction,
        retry_reduction=memory.retry_reduction,
        floor_bytes=round(memory.floor_mib * MIB),
        size_decay=memory.size_decay,
        size_floor=memory.size_floor,
        batch_step=memory.batch_step,
        batch_floor=memory.batch_floor,
        emergency_size=memory.emergency_size,
        cleanup_every=memory.cleanup_every,
        failures_per_minute=memory.failures_per_minute,
        leave_free_bytes=round(memory.leave_free_mib * MIB),
    )


def refusals(config: Config, live: Iterable[NodeFact]) -> tuple[Refusal, ...]:
    """Return what stands in the way of the plan on these live nodes; nothing if all is there.

    Ray itself would not say: it leaves an actor that fits nowhere pending, silently.
    """
    found: list[Refusal] = []
    facts = tuple(live)
    for name, node in config.nodes.items():
        found.extend(_node_refusals(node_budget(name, node, config), [fact for fact in facts if fact.name == name]))
    return tuple(found)


def _node_refusals(budget: NodeBudget, facts: list[NodeFact]) -> Iterable[Refusal]:
    name = budget.node
    if not facts:
        yield Refusal(node=name, missing=Missing.NODE, text=f"no live node has the label node={name}")
        return
    if len(facts) > 1:
        where = ", ".join(sorted(fact.address for fact in facts))
        yield Refusal(
            node=name, missing=Missing.TWICE, text=f"{len(facts)} live nodes have the label node={name}: {where}"
        )
        return
    fact = facts[0]
    if fact.cpus < budget.cpus_total:
        sum_text = f"{budget.workers} workers x {budget.cpus_per_worker} = {budget.cpus_total}"
        yield Refusal(
            node=name, missing=Missing.CPUS, text=f"{name} offers {fact.cpus:g} CPUs, the plan needs {sum_text}"
        )
    if fact.gpus < budget.gpus:
        yield Refusal(
            node=name, missing=Missing.GPUS, text=f"{name} offers {fact.gpus:g} GPUs, the plan needs {budget.gpus}"
        )


def unnamed(live: Iterable[NodeFact]) -> tuple[str, ...]:
    """Return the addresses of live nodes without the label, the usual cause of a missing one."""
    return tuple(sorted(fact.address for fact in live if fact.name is None))
