"""From a configuration to slots, and from live nodes to what is missing.

Does not cover the sums on a card (`budget.py`), nor what to type to cure a refusal
(`node_commands.py`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from orchestrator.core.budget import node_budget
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
    workers, workload = sum(budget.workers for budget in budgets), config.workload
    workers_bytes = sum(budget.workers * budget.budget_bytes for budget in budgets)
    memory, thermal, settings = (
        memory_settings(config),
        config.thermal.settings(),
        config.train.model_dump(),
    )
    plans: list[SlotPlan] = []
    for budget in budgets:
        node, name = config.nodes[budget.node], budget.node
        for slot in (f"{name}/{index}" for index in range(budget.workers)):
            spec = WorkerSpec(
                slot=slot,
                node=name,
                device=target.device or ("cuda" if budget.gpus else "cpu"),
                budget_bytes=budget.budget_bytes,
                card_budget_bytes=workers_bytes if target.one_machine else budget.card_budget_bytes,
                # Nodes that share one real card were made to fit it when they were scaled, all of
                # them together.
                memory_fraction=1.0 if target.one_machine else node.memory_fraction,
                workers_on_host=workers if target.one_machine else budget.workers,
                duty=budget.duty,
                thread_share=node.gpu_share if config.compute_share_mode == "mps" else None,
                policy=config.memory.policy,
                memory=memory,
                workload=WorkloadSpec(
                    name=workload.name,
                    dtype=budget.dtype,
                    size=budget.size,
                    batch=budget.batch,
                    # Each worker draws its own numbers, and the same ones in the next run.
                    seed=workload.seed + len(plans),
                    settings=settings,
                ),
                thermal=thermal,
                check_share=config.verify.share,
            )
            cpus, gpus = budget.cpus_per_worker, budget.gpu_fraction
            reservation = Reservation(slot=slot, node=name, num_cpus=cpus, num_gpus=gpus)
            plans.append(SlotPlan(reservation=reservation, spec=spec, gpu=node.gpu))
    return tuple(plans)


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
    found: list[Refusal] = []
    for name, node in config.nodes.items():
        budget, mine = (
            node_budget(name, node, config),
            [fact for fact in facts if fact.name == name],
        )
        needs: dict[Missing, str] = {}
        if not mine:
            needs[Missing.NODE] = f"no live node has the label node={name}"
        elif len(mine) > 1:
            where = ", ".join(sorted(fact.address for fact in mine))
            needs[Missing.TWICE] = f"{len(mine)} live nodes have the label node={name}: {where}"
        else:
            if mine[0].cpus < budget.cpus_total:
                cpus = f"{budget.workers} workers x {budget.cpus_per_worker} = {budget.cpus_total}"
                needs[Missing.CPUS] = f"{name} offers {mine[0].cpus:g} CPUs, the plan needs {cpus}"
            if mine[0].gpus < budget.gpus:
                needs[Missing.GPUS] = (
                    f"{name} offers {mine[0].gpus:g} GPUs, the plan needs {budget.gpus}"
                )
        found += (Refusal(node=name, missing=missing, text=text) for missing, text in needs.items())
    return tuple(found)


def unnamed(live: Iterable[NodeFact]) -> tuple[str, ...]:
    """Return the addresses of live nodes without the label, the usual cause of a missing one."""
    return tuple(sorted(fact.address for fact in live if fact.name is None))
