"""`python -m workers.training.plan_main`: says for `plan` what memory a training takes, without a
card.

Reads one JSON object from standard input, and writes one as the last line of standard output. What
a user's task prints goes to standard error. Does not judge: `plan` makes the sentences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from workers.training.errors import TrainingError
from workers.training.memory_plan import MemoryPlan, MemoryPlanner
from workers.training.models import GPTS
from workers.training.rungs import offered_micro_batches
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task

#: Of an error's text that is not our own.
_LONGEST = 300

_ALL_PCT = 100


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks of the model, and each cap with the steps to show for it; or why that
    cannot be told.

    `asked` holds `settings`, `seed` and `caps`, each of these with `cap_bytes` and `device`.
    """
    settings = TrainSettings.model_validate(asked["settings"])
    if settings.preset in GPTS:
        # What the text says changes no size, and it may lie on the other PCs alone.
        least = settings.min_seq if settings.documents == "windows" else 1
        settings = settings.model_copy(
            update={"data": None, "documents": "windows", "min_seq": least}
        )
    try:
        task = find_task(settings, asked["seed"])
        devices = {cap["device"] for cap in asked["caps"]}
        planners = {
            device: MemoryPlanner(task, settings, on_card=device == "cuda") for device in devices
        }
        return {
            "blocks": max(planner.most_level for planner in planners.values()),
            "caps": [
                {**cap, "steps": _steps(planners[cap["device"]], settings, cap["cap_bytes"])}
                for cap in asked["caps"]
            ],
        }
    except TrainingError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - a user's model may do what tensors without data cannot
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
        return {"not_planned": f"the model cannot be computed on tensors without data: {said}"}


def _steps(planner: MemoryPlanner, settings: TrainSettings, cap_bytes: int) -> list[dict[str, Any]]:
    """Return the smallest step, and if that fits the largest ones with and without what saves
    memory, each one once.
    """
    least, share_pct = offered_micro_batches(settings)[0], settings.first_share_pct
    most_share_pct = _ALL_PCT if settings.states_on_host == "auto" else share_pct
    usual = [(level, share_pct) for level in (0, planner.level_of(0), planner.most_level)]
    smallest = planner.plan(least, planner.most_level, most_share_pct)
    found = []
    if smallest.total_bytes <= cap_bytes:
        points = dict.fromkeys([*usual, (0, most_share_pct), (planner.most_level, most_share_pct)])
        found = [
            planner.largest_micro(cap_bytes, *point) or planner.plan(least, *point)
            for point in points
        ]
    return [_told(plan, settings.batch, cap_bytes) for plan in dict.fromkeys([*found, smallest])]


def _told(plan: MemoryPlan, batch: int, cap_bytes: int) -> dict[str, Any]:
    parts = {key: value for key, value in asdict(plan).items() if key.endswith("_bytes")}
    split = {
        "micro_batch": plan.micro,
        "accumulation": -(-batch // plan.micro),
        "memory_level": plan.level,
    }
    on_host = {key: parts.pop(key) for key in ("checkpoint_copy_bytes", "on_host_bytes")}
    return {
        **split,
        **parts,
        "total_bytes": plan.total_bytes,
        **on_host,
        "fits": plan.total_bytes <= cap_bytes,
    }


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(answer(json.load(sys.stdin))), file=output)
