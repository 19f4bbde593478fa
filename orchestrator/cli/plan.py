"""What `plan` shows: where each worker will go and what it may use, with the sums of each card.

No Ray, no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from orchestrator.cli.plan_training import cap_about_bytes, training_parts, training_plan
from orchestrator.cli.printing import Part
from orchestrator.config.schema import Config
from orchestrator.core.placement import NodeBudget, node_budget
from orchestrator.view.cells import MISSING
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, TableRow, row_of
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.units import GIB

_COLUMNS: Final = (
    Column(key="slot", title="worker"),
    Column(key="card", title="card", priority=4),
    Column(key="dtype", title="type", priority=7),
    Column(key="gpu_fraction", title="Ray GPU", numeric=True, priority=8),
    Column(key="cpus", title="CPUs", numeric=True, priority=6),
    Column(key="budget_bytes", title="budget", numeric=True),
    Column(key="cap_about_bytes", title="cap about", numeric=True, priority=1),
    Column(key="duty", title="duty", numeric=True, priority=5),
    Column(key="size", title="size", numeric=True, priority=2),
    Column(key="batch", title="batch", numeric=True, priority=3),
)
"""Their keys are those of a worker in JSON."""


def plan_object(config: Config) -> dict[str, Any]:
    """Return the plan for JSON, with what `training_plan` says where something is trained.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    budgets = [node_budget(name, node, config) for name, node in config.nodes.items()]
    training = training_plan(config, budgets)
    return {
        "compute_share_mode": config.compute_share_mode,
        "workload": config.workload.name,
        "policy": config.memory.policy,
        **({} if training is None else {"training": training}),
        "nodes": [_node(budget, config) for budget in budgets],
    }


def plan_parts(plan: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the same for people."""
    rows = tuple(row for node in plan["nodes"] for row in _rows(node))
    yield Table(name="plan", columns=_COLUMNS, rows=rows)
    yield ""
    for node in plan["nodes"]:
        yield _sum_line(node)
    yield from (
        "",
        (
            f"Each worker runs {plan['workload']} with the policy {plan['policy']}, and an equal "
            "share of its PC's cores as threads."
        ),
        (
            "The cap is the budget less the CUDA context, about "
            f"{_gib(ASSUMED_CONTEXT_BYTES)}; each worker measures its own."
        ),
    )
    if (training := plan.get("training")) is not None:
        yield ""
        yield from training_parts(training)


def _rows(node: Mapping[str, Any]) -> Iterator[TableRow]:
    for worker in node["workers"]:
        texts = {
            "card": "CPU" if worker["card"] is None else f"{node['gpu']} #{worker['card']}",
            "gpu_fraction": f"{worker['gpu_fraction']:.4f}",
            "budget_bytes": _gib(worker["budget_bytes"]),
            "cap_about_bytes": _gib(worker["cap_about_bytes"]),
            "duty": MISSING if worker["duty"] is None else f"{worker['duty']:.0%}",
        }
        yield row_of(_COLUMNS, worker["slot"], worker, texts)


def _sum_line(node: Mapping[str, Any]) -> str:
    worker, per_card, has_cards = node["workers"][0], node["workers_per_card"], node["gpus"] > 0
    said = [
        f"{node['node']}: {counted(len(node['workers']), 'worker')}",
        counted(node["cpus_total"], "CPU"),
        (
            f"{'a card' if has_cards else 'its memory'} holds {per_card} x "
            f"{_gib(worker['budget_bytes'])} = {_gib(node['card_budget_bytes'])}"
        ),
    ]
    if node["card_total_bytes"] is not None:
        allowed, total = _gib(node["card_allowed_bytes"]), _gib(node["card_total_bytes"])
        said.append(f"of {allowed} allowed ({total} shown)")
    if has_cards:
        said.append(f"and {per_card * worker['gpu_fraction']:.4f} of its Ray GPU")
    if has_cards and worker["duty"] is not None:
        duty = f"{worker['duty'] * per_card:.0%}"
        said.append(f"and {duty} duty in sum (turns are shared when over 100%)")
    return ", ".join(said)


def _node(budget: NodeBudget, config: Config) -> dict[str, Any]:
    workers = [
        {
            "slot": f"{budget.node}/{index}",
            "card": index // budget.workers_per_card if budget.gpus else None,
            "gpu_fraction": budget.gpu_fraction,
            "cpus": budget.cpus_per_worker,
            "threads": None,
            "budget_bytes": budget.budget_bytes,
            "cap_bytes": None,
            "cap_about_bytes": cap_about_bytes(budget),
            "duty": budget.duty,
            "size": budget.size,
            "batch": budget.batch,
            "dtype": budget.dtype,
        }
        for index in range(budget.workers)
    ]
    return {
        "node": budget.node,
        "gpu": config.nodes[budget.node].gpu,
        "gpus": budget.gpus,
        "cpus_total": budget.cpus_total,
        "workers_per_card": budget.workers_per_card,
        "card_budget_bytes": budget.card_budget_bytes,
        "card_allowed_bytes": budget.card_allowed_bytes,
        "card_total_bytes": budget.card_total_bytes,
        "workers": workers,
    }


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
