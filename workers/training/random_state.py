"""The random numbers that all users of a process share: go back to where they were."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The random numbers of torch, on the host and on a card, of Python, and those of NumPy that
    all its users share.
    """

    def __init__(self, device: torch.device) -> None:
        self._card = device if device.type == "cuda" else None
        self._of_host, self._of_python = torch.get_rng_state(), random.getstate()
        self._numpy: Any = sys.modules.get("numpy.random")  # `None`: nothing draws from them
        self._of_numpy = None if self._numpy is None else self._numpy.get_state()
        self._of_card = None if self._card is None else torch.cuda.get_rng_state(self._card)

    def restore(self) -> None:
        """Go back to them."""
        torch.set_rng_state(self._of_host)
        random.setstate(self._of_python)
        if self._numpy is not None:
            self._numpy.set_state(self._of_numpy)
        if self._card is not None and self._of_card is not None:
            torch.cuda.set_rng_state(self._of_card, self._card)


def drawn_on_host() -> object:
    """Return what changes with each number that Python or NumPy draws."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate()
    _, words, *rest = numpy.get_state()
    return random.getstate(), words.tobytes(), rest
