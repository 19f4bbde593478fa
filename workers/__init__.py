"""The engine: torch and the card. Never imports ray or orchestrator.

Importing it loads nothing else. `resilient` and `AdaptiveSize`, for code outside this product, are loaded at their
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["AdaptiveSize", "OutOfBatchError", "Retry", "resilient"]

if TYPE_CHECKING:
    from workers.resilience.adaptive_size import AdaptiveSize
    from workers.resilience.decorator import resilient
    from workers.resilience.retry import OutOfBatchError, Retry
else:
    _HOMES = {
        "AdaptiveSize": "workers.resilience.adaptive_size",
        "OutOfBatchError": "workers.resilience.retry",
        "Retry": "workers.resilience.retry",
        "resilient": "workers.resilience.decorator",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
