"""Saves and restores the global random generators of a process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """State of the global random generators: torch on the host and on a card, Python, and NumPy."""

    def __init__(self, device: torch.device) -> None:
        self._card = device if device.type == "cuda" else None
        self._host_state, self._python_state = torch.get_rng_state(), random.getstate()
        self._numpy: Any = sys.modules.get("numpy.random")  # `None`: nothing draws from it
        self._numpy_state = None if self._numpy is None else self._numpy.get_state()
        self._card_state = None if self._card is None else torch.cuda.get_rng_state(self._card)

    def restore(self) -> None:
        """Restore the saved state."""
        torch.set_rng_state(self._host_state)
        random.setstate(self._python_state)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)
        if self._card is not None and self._card_state is not None:
            torch.cuda.set_rng_state(self._card_state, self._card)


def host_generator_state() -> object:
    """Return a value that changes with each number drawn from Python's or NumPy's generator."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate()
    _, words, *rest = numpy.get_state()
    return random.getstate(), words.tobytes(), rest
