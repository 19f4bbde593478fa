"""`python -m workers.training.plans_main`: computes named memory plans for a card, without one.

Reads one JSON object of plans from standard input, and writes one as the last line of standard
output, with torch's defaults. `plan` asks `plan_main` whether a configuration fits; this answers
for trainings that are not configured.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from pydantic import ValidationError

from workers.training.errors import TrainingError
from workers.training.memory_plan import MemoryPlan, MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.units import GIB

#: Beside the keys of `train:`, see `answer`.
_OWN = ("rows", "level", "cap_gib")

#: Where a plan names no batch; no part is larger.
_BATCH = 32

#: Bytes of a weight: they are fp32 whatever the precision.
_WEIGHT_BYTES = 4


def answer(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parts of each plan in GiB, or why it cannot be computed; and torch's defaults.

    A plan holds keys of `train:` and either `rows`, the samples computed at once, or `cap_gib`, for
    which the largest micro-batch up to the batch that fits is found (0: none). `level` is `none` or
    `all`: blocks that are recomputed.
    """
    return {
        "plans": {name: _plan(plan) for name, plan in plans.items()},
        "torch": {"tf32_in_products": int(torch.backends.cuda.matmul.allow_tf32)},
    }


def _plan(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        keys = {key: value for key, value in asked.items() if key not in _OWN}
        planner, batch = _planner(TrainSettings.model_validate({"batch": _BATCH, **keys}))
        level = planner.most_level if asked.get("level") == "all" else 0
        if "rows" in asked:
            return _told(planner.plan(asked["rows"], level))
        fitting = range(1, batch + 1)
        rows = bisect_right(
            fitting,
            asked["cap_gib"] * GIB,
            key=lambda micro: planner.plan(micro, level).total_bytes,
        )
        return _told(planner.plan(rows, level)) if rows else {"micro": 0}
    except ValidationError as error:
        told = (
            f"{'.'.join(['train', *map(str, each['loc'])])}: {each['msg']}"
            for each in error.errors()
        )
        return {"refused": f"this version cannot plan it: {'; '.join(told)}"}
    except TrainingError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - one plan that fails must not hide the others
        return {
            "refused": f"its memory cannot be computed: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        }


@cache
def _planner(settings: TrainSettings) -> tuple[MemoryPlanner, int]:
    """Return one planner for all plans that differ in their parts only, and the most samples of a
    part.
    """
    return MemoryPlanner(find_task(settings, 0), settings, on_card=True), settings.batch


def _told(plan: MemoryPlan) -> dict[str, float]:
    return {
        "micro": plan.micro,
        "parameters_m": plan.weights_bytes / _WEIGHT_BYTES / 1e6,
        "weights_gib": plan.weights_bytes / GIB,
        "gradients_gib": plan.gradients_bytes / GIB,
        "optimizer_gib": plan.optimizer_bytes / GIB,
        "average_gib": plan.average_bytes / GIB,
        "activations_gib": plan.activations_bytes / GIB,
        "total_gib": plan.total_bytes / GIB,
    }


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(answer(json.load(sys.stdin))), file=output)
