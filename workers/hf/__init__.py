"""Models, tokenizers and trainers of Hugging Face: the presets `hf-causal` and `hf-pairs`, and
`ElasticMixin` for a user's own Trainer. Needs the extra `hf`, which is imported inside functions.
Never contacts the Hub, and runs no code of a folder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["ElasticMixin"]

if TYPE_CHECKING:
    from workers.hf.elastic_mixin import ElasticMixin
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("workers.hf.elastic_mixin"), name)
