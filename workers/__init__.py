"""The engine, which uses torch and the card. Never imports ray or orchestrator.

Importing it loads nothing else. The names in `__all__`, for code outside this product and a user's
own training (`TrainTask`), are loaded at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["AdaptiveSize", "ElasticStep", "OutOfBatchError", "Retry", "TrainTask", "resilient"]

if TYPE_CHECKING:
    from workers.resilience.adaptive_size import AdaptiveSize
    from workers.resilience.attempts import OutOfBatchError, Retry
    from workers.resilience.decorator import resilient
    from workers.training.elastic import ElasticStep
    from workers.training.tasks import TrainTask
else:
    _HOMES = {
        "AdaptiveSize": "workers.resilience.adaptive_size",
        "ElasticStep": "workers.training.elastic",
        "OutOfBatchError": "workers.resilience.attempts",
        "Retry": "workers.resilience.attempts",
        "TrainTask": "workers.training.tasks",
        "resilient": "workers.resilience.decorator",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
