"""Errors of the head, each with the exit code the program ends with.

Covers what stops the head before or between runs. Does not cover what happens to a worker: that is a value in its
report, never an exception. Every error can be pickled, and its text says what the user can do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar


def one_line(text: str) -> str:
    """Return `text` with line breaks and terminal control characters written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the configuration, and what would be right."""

    source: str
    """The file as the user named it, or the override as typed: `--set nodes.pc1.workers=0`."""
    line: int | None
    """Counted from 1; `None` when the problem has no line (an override, a missing file)."""
    key: str | None
    """Dotted path of the key, `nodes.pc1.workers`; `None` when the whole source is meant."""
    text: str
    valid: str | None
    """What may be typed instead; `None` when nothing can be listed."""

    def __str__(self) -> str:
        """Return the problem as one line, `cluster.yaml:7: nodes.pc1.workers: 0 is too small; valid: …`."""
        source = _shortened(self.source)
        place = source if self.line is None else f"{source}:{self.line}"
        parts = [place, self.text] if self.key is None else [place, _shortened(self.key), self.text]
        sentence = ": ".join(parts)
        return one_line(sentence if self.valid is None else f"{sentence}; valid: {self.valid}")


def _shortened(typed: str) -> str:
    """Return what the user typed, without its middle if it is too long for a sentence."""
    return typed if len(typed) <= 200 else f"{typed[:120]}…{typed[-60:]}"


class OrchestratorError(Exception):
    """Base of all errors that end a command of the head with a sentence instead of a traceback."""

    exit_code: ClassVar[int] = 1
    """What the process returns to the shell."""
    retryable: ClassVar[bool] = False
    """Whether the same command may succeed later with nothing changed in its arguments or files."""


class UsageError(OrchestratorError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class ArchiveError(OrchestratorError):
    """What a run left behind cannot be read; the sentence names the file and says what can be done."""

    exit_code = 2


class NothingStoredError(ArchiveError):
    """A run folder without a record: its head ended, or was killed, before the work began."""

    def __init__(self, folder: object, name: str) -> None:
        self.folder = folder
        self.name = name
        super().__init__(folder, name)

    def __str__(self) -> str:
        """Return the sentence."""
        return one_line(
            f"{self.folder} holds no record of a run ({self.name}): its head ended before the work began; what it said "
            f"is in summary.json, events.jsonl and ray.log there, as far as they exist"
        )


class ConfigError(OrchestratorError):
    """The configuration cannot be used; carries every problem found, not just the first."""

    exit_code = 2
    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """Return one line for each problem."""
        return "\n".join(str(problem) for problem in self.problems)


class NoClusterError(OrchestratorError):
    """No Ray cluster answers at the configured address; starting one is enough."""

    exit_code = 3
    retryable = True


class PreflightError(OrchestratorError):
    """The cluster is there but is not what the configuration plans; carries one sentence for each difference.

    Retryable, because the usual difference is a node that has not joined yet.
    """

    exit_code = 3
    retryable = True
    problems: tuple[str, ...]

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """Return one line for each problem."""
        return "\n".join(one_line(problem) for problem in self.problems)
