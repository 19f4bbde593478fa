"""The verb `plan`: shows where workers will run and what each may use, and, for a training, the
parts of its memory and whether they fit the cap of each worker.

A child process with torch computes the memory. Uses neither Ray nor a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

from orchestrator.cli.printing import Part
from orchestrator.config.schema import Config
from orchestrator.config.team import members, with_team_alone
from orchestrator.core.node_commands import firewall_lines
from orchestrator.core.placement import NodeBudget, Target, idle_line, node_budget, plan_slots
from orchestrator.errors import UsageError, one_line
from orchestrator.run.prediction import (
    cap_about_bytes,
    caps_of_nodes,
    divided_where_needed,
    memory_plan,
)
from orchestrator.run.team_forecast import forecast
from orchestrator.view.tables import Cell, Column, Table, TableRow, row_of
from workers.hf.folder_files import check_folder
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.training.errors import TrainingError
from workers.training.settings import PRESETS
from workers.units import GIB, MIB

_Json: TypeAlias = Mapping[str, Any]

#: Parts of memory that are shown only if they are not 0.
_OPTIONAL = {"average_bytes", "on_host_bytes"}


_ON_NAMED_PORTS: Final = "Each listens for the others at one port of its PC, and nowhere else."

_COLUMNS: Final = (
    Column("node", "node"),
    Column("workers", "workers", numeric=True),
    Column("gpu", "card", priority=3),
    Column("dtype", "type", priority=8),
    Column("budget_bytes", "budget", numeric=True),
    Column("cap_about_bytes", "cap about", numeric=True, priority=1),
    Column("card_budget_bytes", "sum of a card", numeric=True, priority=2),
    Column("card_allowed_bytes", "allowed", numeric=True, priority=2),
    Column("gpu_fraction", "Ray GPU", numeric=True, priority=9),
    Column("cpus_total", "CPUs", numeric=True, priority=7),
    Column("duty", "duty", numeric=True, priority=6),
    Column("size", "size", numeric=True, priority=4),
    Column("batch", "batch", numeric=True, priority=5),
)
"""The keys are those of a node, or of one of its workers, in JSON."""


def refuse_folder(config: Config) -> None:
    """Refuse a `train.model` that is a path on this machine and cannot be used.

    `UsageError`: the message names the file and says what to do.
    """
    name = config.train.model
    if config.workload.name == "train" and name and Path(name).expanduser().exists():
        try:
            check_folder(name)
        except TrainingError as error:
            raise UsageError(one_line(str(error))) from error


def plan_object(config: Config) -> dict[str, Any]:
    """Return the plan for JSON, with the key `training` for the workload train.

    `UsageError`: the training of the section `train:` is not possible.
    """
    config = divided_where_needed(with_team_alone(config), Target())
    budgets = [node_budget(name, node, config) for name, node in config.nodes.items()]
    training = _training(config, budgets)
    return {
        "compute_share_mode": config.compute_share_mode,
        "workload": config.workload.name,
        "policy": config.memory.policy,
        **({} if training is None else {"training": training}),
        **({} if (team := _team(config, training)) is None else {"team": team}),
        "nodes": [_node(budget, config) for budget in budgets],
    }


def plan_parts(plan: _Json) -> Iterator[Part]:
    """Yield the plan of `plan_object` for people."""
    yield Table(name="plan", columns=_COLUMNS, rows=tuple(map(_row, plan["nodes"])))
    yield ""
    yield (
        f"Each worker runs {plan['workload']} with the policy {plan['policy']}, and an equal share "
        "of its PC's cores as threads. Where the sum of duties is over 100%, they take turns."
    )
    context = _gib(ASSUMED_CONTEXT_BYTES)
    yield f"The cap is the budget less the CUDA context, about {context}; each measures its own."
    if (team := plan.get("team")) is not None:
        yield from ("", f"{team['sentence']}. {_ON_NAMED_PORTS}", *team["firewall"])
        if team["forecast"] is not None:
            yield from ("", f"Does it pay? {team['forecast']['sentence']}")
    if (training := plan.get("training")) is not None:
        yield ""
        yield from _training_parts(training)


def _team(config: Config, training: _Json | None) -> dict[str, Any] | None:
    """Return the key `team` of `plan --json`; `None` without a team."""
    if not members(config):
        return None
    plans = plan_slots(config, Target())
    hosts = {name: node.host for name, node in config.nodes.items() if node.host is not None}
    sums_bytes = None if training is None else training["sums_bytes"]
    return {
        "sentence": idle_line(config, plans),
        "firewall": list(firewall_lines(plans, hosts)),
        # Members that divide a model gain memory, but no time.
        "forecast": None if config.train.split == "layers" else forecast(config, sums_bytes),
    }


def _row(node: _Json) -> TableRow:
    worker = node["workers"][0]
    values = {**worker, **node, "workers": len(node["workers"])}
    values |= {key: _gib(values[key]) for key in values if key.endswith("_bytes")}
    values["gpu"] = f"{node['gpus']} x {node['gpu']}" if node["gpus"] else "CPU"
    values["gpu_fraction"] = f"{worker['gpu_fraction']:.4f}"
    values["duty"] = None if worker["duty"] is None else f"{worker['duty']:.0%}"
    return row_of(_COLUMNS, node["node"], values)


def _node(budget: NodeBudget, config: Config) -> dict[str, Any]:
    data = asdict(budget)
    keys = ("gpu_fraction", "budget_bytes", "duty", "size", "batch", "dtype")
    of_each = {key: data.pop(key) for key in keys}
    about_bytes = cap_about_bytes(budget.budget_bytes, on_card=bool(budget.gpus))
    of_each |= {"cpus": data.pop("cpus_per_worker"), "cap_about_bytes": about_bytes}
    workers = [
        {
            "slot": f"{budget.node}/{index}",
            "card": index // budget.workers_per_card if budget.gpus else None,
            **of_each,
        }
        for index in range(budget.workers)
    ]
    return {**data, "gpu": config.nodes[budget.node].gpu, "workers": workers}


def _gib(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / GIB:.2f} GiB"


def _training(config: Config, budgets: Sequence[NodeBudget]) -> dict[str, Any] | None:
    """Return the key `training` of `plan --json`; `None` for another workload than train.

    `UsageError`: the training of the section `train:` is not possible.
    """
    if config.workload.name != "train":
        return None
    planned = memory_plan(config, Target(), caps_of_nodes(budgets))
    return {
        **config.train.model_dump(include={"preset", "batch", "precision", "recompute"}),
        "blocks": planned.get("blocks"),
        "lent": planned.get("lent"),
        "sums_bytes": planned.get("sums_bytes"),
        "not_planned": planned.get("not_planned"),
        "caps": [{**cap, **_judge(cap, config)} for cap in planned.get("caps", ())],
    }


def _training_parts(training: _Json) -> Iterator[Part]:
    """Yield the key `training` for people: a table and a sentence for each cap."""
    kind = f"{training['preset']}, {training['precision']}, batch {training['batch']}"
    yield f"Will it fit? {kind}, train.recompute: {training['recompute']}"
    if training["not_planned"] is not None:
        yield f"Not known, so the run finds out by itself: {one_line(training['not_planned'])}"
        return
    if training["lent"] is not None:
        yield _division_line(training)
    for cap in training["caps"]:
        names = ", ".join(cap["nodes"])
        yield from ("", f"{names}: cap about {cap['cap_bytes'] / MIB:.0f} MiB, {cap['device']}")
        yield _steps_table(cap["steps"], cap["blocks"])
        yield f"{names}: {cap['sentence']}"
    yield ""
    yield (
        "The total counts the larger of activations and update. On a CPU, libraries keep more for "
        "each shape."
    )


def _division_line(training: _Json) -> str:
    """Return a sentence on which member of a team computes which blocks of its divided model."""
    (leader,), (other,) = (cap["nodes"] for cap in training["caps"])
    first, end = training["lent"]
    lent, last = f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}", end
    own = "block 0" if first == 1 else f"blocks 0 to {first - 1}"
    return (
        f"{leader} leads with {own} and block {last}, and what is before and after them; {other} "
        f"has {lent}. Both compute parts of as many samples as fit both."
    )


def _steps_table(steps: Sequence[_Json], blocks: int) -> Table:
    """Return a table with a row for each part of memory and a column for each step."""
    rows = {"recomputed blocks": [f"{step['memory_level']} of {blocks}" for step in steps]}
    for key in (key for key in steps[0] if key.endswith("_bytes")):
        if key not in _OPTIONAL or any(step[key] for step in steps):
            title = f"{key.removesuffix('_bytes')}, MiB"
            rows[title] = [f"{step[key] / MIB:.1f}" for step in steps]
    rows["fits"] = ["yes" if step["fits"] else "no" for step in steps]
    titles = [f"{step['micro_batch']} x {step['accumulation']}" for step in steps]
    columns = [
        Column("part", "micro x accumulation"),
        *(Column(f"{at}", title, numeric=True, priority=at) for at, title in enumerate(titles, 1)),
    ]
    drawn = (
        TableRow(key=part, cells=tuple(Cell(text=text) for text in (part, *texts)))
        for part, texts in rows.items()
    )
    return Table(name="training", columns=tuple(columns), rows=tuple(drawn))


def _judge(cap: _Json, config: Config) -> dict[str, str]:
    """Return the verdict on a cap, as a word (`verdict`) and a sentence (`sentence`)."""
    train, (*_, smallest), blocks = config.train, cap["steps"], cap["blocks"]
    cap_text = f"{cap['cap_bytes'] / MIB:.0f} MiB"
    fixed = {"auto": None, "none": 0, "all": blocks}.get(str(train.recompute), train.recompute)
    largest = {step["memory_level"]: step for step in reversed(cap["steps"]) if step["fits"]}
    usual, fullest = largest.get(min(int(fixed or 0), blocks)), largest.get(blocks)
    if usual is not None:
        whole = usual["accumulation"] == 1
        text = f"{'fits whole' if whole else 'fits'} with {_split(usual)} of {cap_text}"
        return {"verdict": "fits" if whole else "fits_in_parts", "sentence": text}
    if fullest is not None:
        how = f"with recomputation of all {blocks} blocks, with {_split(fullest)} of {cap_text}"
        if fixed is None:
            return {"verdict": "fits_recomputed", "sentence": f"fits only {how}"}
        now = f"does not fit with train.recompute: {train.recompute}"
        text = f"{now}; it fits {how}: set train.recompute: auto"
        return {"verdict": "does_not_fit", "sentence": text}
    needs_bytes, has_card = smallest["total_bytes"], cap["device"] == "cuda"
    gib = math.ceil(100 * (needs_bytes + ASSUMED_CONTEXT_BYTES * has_card) / GIB) / 100
    node, *others = [name.partition("/")[0] for name in cap["nodes"]]
    key = "their vram_per_worker_gib" if others else f"nodes.{node}.vram_per_worker_gib"

    cures = [f"set {key} to {gib:.2f} or more", "take a smaller model"]
    if len(members(config)) == 2 and train.split != "layers" and blocks > 2:
        cures.append("divide it with train.split: layers")
    is_long = needs_bytes - smallest["activations_bytes"] < cap["cap_bytes"]
    if is_long and train.preset in PRESETS and train.preset.startswith("gpt"):
        cures.insert(1, "lower train.seq")
    recomputed = f", with all {blocks} blocks recomputed," if blocks else ""
    sentence = (
        f"does not fit: the smallest step{recomputed} needs {needs_bytes / MIB:.0f} MiB, the cap "
        f"is about {cap_text}; {', or '.join(cures)}"
    )
    return {"verdict": "does_not_fit", "sentence": sentence}


def _split(step: _Json) -> str:
    micro, takes_mib = step["micro_batch"], step["total_bytes"] / MIB
    return f"micro-batch {micro} x accumulation {step['accumulation']}, which takes {takes_mib:.0f}"
