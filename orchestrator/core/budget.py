"""What each worker of a node gets: GPU fraction, bytes, CPUs, duty, size. Numbers in, numbers out.

Does not cover what is measured on a live node (context, other tenants): the worker subtracts that.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.config.capacity import (
    DEFAULT_SIZE,
    budget_bytes,
    card_total_gib,
    workers_per_card,
)
from workers.units import GIB

if TYPE_CHECKING:
    from orchestrator.config.schema import Config, NodeConfig


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
    """The worker's `num_gpus` for Ray; 0 on a node without cards."""
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


def gpu_fraction(workers: int, gpus: int) -> float:
    """Return the `num_gpus` of one worker, so that all of them fit on the cards and none is split
    over two.

    Rounded down to Ray's steps: seven workers get 0.1428, because at 0.1429 the seventh would wait
    without end.
    """
    return RAY_STEPS // workers_per_card(workers, gpus) / RAY_STEPS if gpus else 0.0


def node_budget(name: str, node: NodeConfig, config: Config) -> NodeBudget:
    """Return what each worker of node `name` gets under `config`."""
    shared_by = workers_per_card(node.workers, node.gpus)
    total_gib = card_total_gib(node)
    return NodeBudget(
        node=name,
        workers=node.workers,
        gpus=node.gpus,
        gpu_fraction=gpu_fraction(node.workers, node.gpus),
        cpus_per_worker=node.cpus_per_worker,
        cpus_total=node.workers * node.cpus_per_worker,
        budget_bytes=budget_bytes(node),
        workers_per_card=shared_by,
        card_budget_bytes=shared_by * budget_bytes(node),
        card_total_bytes=None if total_gib is None else round(total_gib * GIB),
        card_allowed_bytes=None
        if total_gib is None
        else round(node.memory_fraction * total_gib * GIB),
        duty=node.gpu_share if config.compute_share_mode == "duty" else None,
        size=config.workload.size or node.size or DEFAULT_SIZE,
        batch=config.workload.batch,
        dtype=config.train.precision
        if config.workload.name == "train"
        else node.dtype or config.workload.dtype,
    )
