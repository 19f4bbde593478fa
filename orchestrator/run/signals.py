"""Ctrl-C as a question: the run asks at every turn whether the user wants to stop. Does not stop anything itself."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """Turns the first Ctrl-C (or SIGTERM, or a closed terminal) into a question the run asks; the second raises."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = False
        self._before = {number: signal.getsignal(number) for number in self._NUMBERS}

    def install(self) -> None:
        """Take the signals; to be called again after Ray has connected, which takes SIGTERM for itself."""
        for number in self._NUMBERS:
            # `nohup` has this ignored, and means that the run outlives the terminal.
            if self._before[number] is not signal.SIG_IGN:
                signal.signal(number, self._ask)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            if handler is not None:  # set by code that is not Python, and cannot be restored
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
