"""The two ways a worker gives up on a directive.

Covers errors raised by devices and workloads and turned into a `Verdict` by the engine. Does not cover
out-of-memory, which never ends a worker, nor the workload's own exceptions, which are reported as text.
"""

from __future__ import annotations

from typing import ClassVar


class IncompatibleError(Exception):
    """The directive can never work on this machine: wrong card, unknown workload, a cap too small.

    `sentence` tells the user what does not fit and what would; it is the whole message. Survives pickling.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class ContextCorruptedError(Exception):
    """The device no longer answers this process; a fresh process may well succeed.

    `sentence` says what the device did; it is the whole message. Survives pickling.
    """

    retryable: ClassVar[bool] = True

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
