"""What `plan` says of a training: whether it fits the cap of each worker, by the parts of its
memory.

A child process computes it, because that needs torch. No Ray, no device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.cli.printing import Part
from orchestrator.config.schema import Config
from orchestrator.core.placement import NodeBudget
from orchestrator.errors import UsageError, one_line
from orchestrator.run.prediction import memory_plan
from orchestrator.view.tables import Cell, Column, Table, TableRow
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


def cap_about_bytes(budget: NodeBudget) -> int:
    """Return the cap of a worker, as far as it is known before one has measured its
    CUDA context.
    """
    return max(0, budget.budget_bytes - (ASSUMED_CONTEXT_BYTES if budget.gpus else 0))


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


def training_plan(config: Config, budgets: Sequence[NodeBudget]) -> dict[str, Any] | None:
    """Return the key `training` of `plan --json`; `None` where nothing is trained.

    Raises:
        UsageError: The section `train:` names what cannot be trained.
    """
    if config.workload.name != "train":
        return None
    groups = defaultdict[tuple[int, str], list[str]](list)
    for budget in budgets:
        groups[cap_about_bytes(budget), "cuda" if budget.gpus else "cpu"].append(budget.node)
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


def training_parts(training: _Told) -> Iterator[Part]:
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
