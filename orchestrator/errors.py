"""Errors of the head, each with the exit code the program ends with.

What happens to a worker is no exception but a value in its status. Each error can be pickled, and
says what the user can do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

AnyProblem = TypeVar("AnyProblem")


def one_line(text: str) -> str:
    """Return `text` with line breaks and terminal control characters written as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def in_words(value: object) -> str:
    """Return a value for a refusal, as its author may have typed it, short enough for one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    # Python refuses the repr of an int of more than 4300 digits.
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    whole = repr(value)
    return whole if len(whole) <= 60 else f"{whole[:57]}…"


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
        place = _shortened(self.source) + ("" if self.line is None else f":{self.line}")
        parts = (place, self.key and _shortened(self.key), _shortened(self.text, 400))
        sentence = ": ".join(part for part in parts if part)
        return one_line(sentence if self.valid is None else f"{sentence}; valid: {self.valid}")


def _shortened(typed: str, most: int = 200) -> str:
    """Return what the user typed, without its middle if it is too long for a sentence."""
    return typed if len(typed) <= most else f"{typed[: most * 2 // 3]}…{typed[-most // 4 :]}"


class OrchestratorError(Exception):
    """Base of all errors that end a command of the head with a sentence instead of a traceback."""

    exit_code: ClassVar[int] = 1
    """What the process returns to the shell. 2: what was typed or written must change. 3: a retry
    may succeed, once the cluster or the missing node is there.
    """


class UsageError(OrchestratorError):
    """The command line asks for something that is not possible."""

    exit_code = 2


class ArchiveError(OrchestratorError):
    """What a run left behind cannot be read.

    The sentence names the file and says what can be done.
    """

    exit_code = 2

    def __str__(self) -> str:
        return one_line(super().__str__())


class NothingStoredError(ArchiveError):
    """A run folder without a record: its head ended, or was killed, before the work began."""

    def __str__(self) -> str:
        folder, name = self.args
        return one_line(
            f"{folder} holds no record of a run ({name}): its head ended before the work began; "
            "what it said "
            f"is in summary.json, events.jsonl and ray.log there, as far as they exist"
        )


class _ProblemsError(OrchestratorError, Generic[AnyProblem]):
    """An error that carries every problem found, not just the first, and shows each on a line of
    its own.
    """

    problems: tuple[AnyProblem, ...]

    def __init__(self, problems: Iterable[AnyProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(one_line(str(problem)) for problem in self.problems)


class ConfigError(_ProblemsError[Problem]):
    """The configuration cannot be used."""

    exit_code = 2


class NoClusterError(OrchestratorError):
    """No Ray cluster answers at the configured address; starting one is enough."""

    exit_code = 3


class PreflightError(_ProblemsError[str]):
    """The cluster is there but differs from what the configuration plans.

    Carries one sentence for each difference.
    """

    exit_code = 3
