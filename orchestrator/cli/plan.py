"""What `plan` shows: where each worker will go and what it may use, with the sums of each card.

No Ray, no device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from orchestrator.cli.plan_training import cap_about_bytes, training_lines
from orchestrator.config.schema import Config
from orchestrator.core.placement import NodeBudget, node_budget
from orchestrator.view.cells import MISSING
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, TableRow, row_of
from orchestrator.view.terminal import plain_text, table_lines
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


def plan_json(config: Config, training: Mapping[str, Any] | None = None) -> str:
    """Return the plan as one JSON object, with what `plan_training` says where something is
    trained.
    """
    nodes = [_node(budget, config) for budget in budgets(config)]
    common: dict[str, Any] = {
        "compute_share_mode": config.compute_share_mode,
        "workload": config.workload.name,
        "policy": config.memory.policy,
    }
    if training is not None:
        common["training"] = training
    return json.dumps({"schema": 1, **common, "nodes": nodes}, indent=2)


def plan_text(
    config: Config, training: Mapping[str, Any] | None = None, width: int | None = None
) -> str:
    """Return the plan for people, its tables within `width` cells; `None` cuts nothing."""
    found = budgets(config)
    rows = tuple(row for budget in found for row in _rows(_node(budget, config)))
    table = Table(name="plan", columns=_COLUMNS, rows=rows)
    kind = f"{config.workload.name} with the policy {config.memory.policy}"
    context = f"the CUDA context, about {ASSUMED_CONTEXT_BYTES / GIB:.2f} GiB"
    fits = () if training is None else ("", *training_lines(training, width))
    notes = (
        f"Each worker runs {kind}, and an equal share of its PC's cores as threads.",
        f"The cap is the budget less {context}; each worker measures its own.",
    )
    drawn = plain_text(table_lines(table, width))
    return "\n".join([drawn, "", *map(_sum_line, found), "", *notes, *fits])


def _rows(node: Mapping[str, Any]) -> Iterator[TableRow]:
    for worker in node["workers"]:
        texts = {
            "card": "CPU" if worker["card"] is None else f"{node['gpu']} #{worker['card']}",
            "gpu_fraction": f"{worker['gpu_fraction']:.4f}",
            "budget_bytes": f"{worker['budget_bytes'] / GIB:.2f} GiB",
            "cap_about_bytes": f"{worker['cap_about_bytes'] / GIB:.2f} GiB",
            "duty": MISSING if worker["duty"] is None else f"{worker['duty']:.0%}",
        }
        yield row_of(_COLUMNS, worker["slot"], worker, texts)


def budgets(config: Config) -> list[NodeBudget]:
    """Return what each worker of each node gets."""
    return [node_budget(name, node, config) for name, node in config.nodes.items()]


def _sum_line(budget: NodeBudget) -> str:
    each = (
        f"{budget.workers_per_card} x {budget.budget_bytes / GIB:.2f} GiB = "
        f"{budget.card_budget_bytes / GIB:.2f} GiB"
    )
    share = budget.workers_per_card * budget.gpu_fraction
    holder = "a card holds" if budget.gpus else "its memory holds"
    words = [
        (
            f"{budget.node}: {counted(budget.workers, 'worker')}, "
            f"{counted(budget.cpus_total, 'CPU')}, {holder} {each}"
        )
    ]
    if budget.card_allowed_bytes is not None and budget.card_total_bytes is not None:
        words.append(
            f"of {budget.card_allowed_bytes / GIB:.2f} GiB allowed "
            f"({budget.card_total_bytes / GIB:.2f} GiB shown)"
        )
    if budget.gpus:
        words.append(f"and {share:.4f} of its Ray GPU")
    if budget.duty is not None and budget.gpus:
        words.append(
            f"and {budget.duty * budget.workers_per_card:.0%} duty in sum (turns are shared when "
            "over 100%)"
        )
    return ", ".join(words)


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
