"""What a check found: a verdict, the words, and what to type.

Decides nothing and prints nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

_Subject = TypeVar("_Subject")


class Verdict(StrEnum):
    """How bad it is; in this order."""

    OK = "ok"
    #: The check does not apply here.
    SKIP = "skip"
    #: It works, but not well, or not for every use.
    WARN = "warn"
    #: A run on this machine, or on this cluster, cannot go well.
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the doctor's report."""

    verdict: Verdict
    found: str
    hint: str | None = None
    """What it means, or what to do where no command does it."""
    fix: str | None = None
    """What to type."""
    node: str | None = None
    """The node it is about; `None`: this machine, or the cluster as a whole."""
    check: str = ""
    """One word, which stays the same from run to run; `checked` sets it."""


ok = partial(Finding, Verdict.OK)
skip = partial(Finding, Verdict.SKIP)
warn = partial(Finding, Verdict.WARN)
fail = partial(Finding, Verdict.FAIL)


def checked(
    checks: Mapping[str, Callable[[_Subject], Iterable[Finding]]], subject: _Subject
) -> list[Finding]:
    """Return what some checks find on a machine or cluster, with their names."""
    return [
        replace(finding, check=name) for name, check in checks.items() for finding in check(subject)
    ]


def count(findings: Iterable[Finding], verdict: Verdict) -> int:
    """Return how many findings have this verdict."""
    return sum(finding.verdict is verdict for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if anything failed, else 0."""
    return 1 if count(findings, Verdict.FAIL) else 0


def versions(text: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`.

    Nothing of what is no version.
    """
    leading = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(map(int, leading[0].split("."))) if leading else ()


def dotted(version: Sequence[int]) -> str:
    """Return the numbers of a version as it is written: `12.8`."""
    return ".".join(map(str, version))
