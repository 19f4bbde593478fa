"""What `plan` shows: where each worker will go and what it may use, with the sums of each card; and
of a training whether it fits the cap of each worker, by the parts of its memory.

A child process computes the latter, because that needs torch. No Ray, no device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from orchestrator.cli.printing import Part
from orchestrator.config.schema import Config
from orchestrator.core.placement import NodeBudget, node_budget
from orchestrator.errors import UsageError, one_line
from orchestrator.run.prediction import memory_plan
from orchestrator.view.cells import MISSING
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Cell, Column, Table, TableRow, row_of
from workers.hf.folder_files import check_folder
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.training.errors import TrainingError
from workers.training.settings import PRESETS, TrainSettings
from workers.units import GIB, MIB

_Told: TypeAlias = Mapping[str, Any]

#: So many nodes are named, the others are counted.
_MOST_NAMES = 3

#: Shown where there is something.
_OPTIONAL = {"average_bytes", "on_host_bytes"}

_ALL_PCT = 100

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


def refuse_folder(config: Config) -> None:
    """Refuse a `train.model` that lies on this machine and cannot be used.

    Raises:
        UsageError: The message names the file and says what to do.
    """
    name = config.train.model
    if config.workload.name == "train" and name and Path(name).expanduser().exists():
        try:
            check_folder(name)
        except TrainingError as error:
            raise UsageError(one_line(str(error))) from error


def plan_object(config: Config) -> dict[str, Any]:
    """Return the plan for JSON, with the key `training` where something is trained.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    budgets = [node_budget(name, node, config) for name, node in config.nodes.items()]
    training = _training(config, budgets)
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
        yield from _training_parts(training)


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
            "cap_about_bytes": _cap_about_bytes(budget),
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


def _cap_about_bytes(budget: NodeBudget) -> int:
    """Return the cap of a worker, as far as it is known before one has measured its
    CUDA context.
    """
    return max(0, budget.budget_bytes - (ASSUMED_CONTEXT_BYTES if budget.gpus else 0))


def _training(config: Config, budgets: Sequence[NodeBudget]) -> dict[str, Any] | None:
    """Return the key `training` of `plan --json`; `None` where nothing is trained.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    if config.workload.name != "train":
        return None
    groups = defaultdict[tuple[int, str], list[str]](list)
    for budget in budgets:
        groups[_cap_about_bytes(budget), "cuda" if budget.gpus else "cpu"].append(budget.node)
    caps = [
        {"nodes": nodes, "device": device, "cap_bytes": bound}
        for (bound, device), nodes in groups.items()
    ]
    told = memory_plan(config, caps)
    return {
        **config.train.model_dump(include={"preset", "batch", "precision", "recompute"}),
        "blocks": told.get("blocks"),
        "not_planned": told.get("not_planned"),
        "caps": [{**cap, **_judged(cap, config, told["blocks"])} for cap in told.get("caps", ())],
    }


def _training_parts(training: _Told) -> Iterator[Part]:
    """Yield the same for people: a table and a sentence for each cap."""
    kind = f"{training['preset']}, {training['precision']}, batch {training['batch']}"
    yield f"Will it fit? {kind}, train.recompute: {training['recompute']}"
    if training["not_planned"] is not None:
        yield f"Not known, so the run finds out by itself: {one_line(training['not_planned'])}"
        return
    for cap in training["caps"]:
        names = ", ".join(cap["nodes"][:_MOST_NAMES])
        if more := cap["nodes"][_MOST_NAMES:]:
            names += f" and {len(more)} more"
        yield from ("", f"{names}: cap about {cap['cap_bytes'] / MIB:.0f} MiB, {cap['device']}")
        yield _steps_table(cap["steps"], training["blocks"])
        yield f"{names}: {cap['sentence']}"
    yield from (
        "",
        (
            "The total counts the larger of activations and update. On a CPU, libraries keep more "
            "for each shape."
        ),
    )


def _steps_table(steps: Sequence[_Told], blocks: int) -> Table:
    """Return the parts of memory of each step, a column for each step."""
    rows = {"recomputed blocks": [f"{step['memory_level']} of {blocks}" for step in steps]}
    for key in (key for key in steps[0] if key.endswith("_bytes")):
        if key not in _OPTIONAL or any(step[key] for step in steps):
            title = f"{key.removesuffix('_bytes')}, MiB"
            rows[title] = [f"{step[key] / MIB:.1f}" for step in steps]
    rows["fits"] = ["yes" if step["fits"] else "no" for step in steps]
    titles = [f"{step['micro_batch']} x {step['accumulation']}" for step in steps]
    columns = [
        Column(key=f"step {number}", title=title, numeric=True, priority=number)
        for number, title in enumerate(titles, start=1)
    ]
    return Table(
        name="training",
        columns=(Column(key="part", title="micro x accumulation"), *columns),
        rows=tuple(
            TableRow(key=part, cells=tuple(Cell(text=text) for text in (part, *texts)))
            for part, texts in rows.items()
        ),
    )


def _judged(cap: _Told, config: Config, blocks: int) -> dict[str, str]:
    """Return the verdict on a cap, as a word and as a sentence."""
    train, (*_, smallest) = config.train, cap["steps"]
    cap_text = f"{cap['cap_bytes'] / MIB:.0f} MiB"
    fixed = (
        train.recompute
        if isinstance(train.recompute, int)
        else {"none": 0, "all": blocks}.get(train.recompute)
    )
    largest = {step["memory_level"]: step for step in reversed(cap["steps"]) if step["fits"]}
    usual, fullest = largest.get(min(fixed or 0, blocks)), largest.get(blocks)
    if usual is not None:
        whole = usual["accumulation"] == 1
        on_host = "states on the host and " if _is_shared(usual, train) else ""
        said = f"{'fits whole' if whole else 'fits'} with {on_host}{_split(usual)} of {cap_text}"
        return {"verdict": "fits" if whole else "fits_in_parts", "sentence": said}
    if fullest is not None:
        is_shared = _is_shared(fullest, train)
        how = f"with recomputation of all {blocks} blocks" + (
            " and states on the host" if is_shared else ""
        )
        said = f"fits {'' if is_shared else 'only '}{how}, with {_split(fullest)} of {cap_text}"
        if fixed is None:
            return {"verdict": "fits_recomputed", "sentence": said}
        advice = (
            f"does not fit with train.recompute: {train.recompute}; it {said}: set "
            "train.recompute: auto"
        )
        return {"verdict": "does_not_fit", "sentence": advice}
    needs_bytes, has_card = smallest["total_bytes"], cap["device"] == "cuda"
    gib = math.ceil(100 * (needs_bytes + ASSUMED_CONTEXT_BYTES * has_card) / GIB) / 100
    node, *others = cap["nodes"]
    key = "their vram_per_worker_gib" if others else f"nodes.{node}.vram_per_worker_gib"
    is_preset, is_gpt = train.preset in PRESETS, train.preset.startswith("gpt")
    cures = {
        f"set {key} to {gib:.2f} or more": True,
        "lower train.seq": is_preset and is_gpt and _would_fit_without("activations_bytes", cap),
        "raise train.states_on_host": train.states_on_host not in {"auto", _ALL_PCT}
        and _would_fit_without("optimizer_bytes", cap),
        "lower train.micro": smallest["micro_batch"] > 1,
        "take a smaller train.preset": is_preset,
        "make the model smaller": not is_preset,
    }
    said = ", or ".join(cure for cure, helps in cures.items() if helps)
    recomputed = f", with all {blocks} blocks recomputed," if blocks else ""
    needs = (
        f"the smallest step{recomputed} needs {needs_bytes / MIB:.0f} MiB, the cap is about "
        f"{cap_text}"
    )
    return {"verdict": "does_not_fit", "sentence": f"does not fit: {needs}; {said}"}


def _would_fit_without(part: str, cap: _Told) -> bool:
    smallest: _Told = cap["steps"][-1]
    return bool(smallest["total_bytes"] - smallest[part] < cap["cap_bytes"])


def _is_shared(step: _Told, train: TrainSettings) -> bool:
    """Whether memory has decided on states as well: steps between those that are shown may fit,
    too.
    """
    return step["on_host_bytes"] > step["checkpoint_copy_bytes"] and train.states_on_host == "auto"


def _split(step: _Told) -> str:
    micro, accumulation = step["micro_batch"], step["accumulation"]
    return (
        f"micro-batch {micro} x accumulation {accumulation}, which takes "
        f"{step['total_bytes'] / MIB:.0f}"
    )
