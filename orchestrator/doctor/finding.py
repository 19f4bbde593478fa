"""What a check found: a verdict, the words, and what to type.

Decides nothing and prints nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

#: Verbs that read the configuration.
_READ_CONFIG = tuple(f"python -m orchestrator {verb} " for verb in ("run", "up"))


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
    """One line of the doctor's report."""

    verdict: Verdict
    found: str
    hint: str | None = None
    """What it means, or what to do where no command does it."""
    fix: str | None = None
    """What to type."""
    check: str = ""
    """One word, which stays the same from run to run; `named` sets it."""
    node: str | None = None
    """The node it is about; `None`: this machine, or the cluster as a whole."""


ok = partial(Finding, Verdict.OK)
skip = partial(Finding, Verdict.SKIP)
warn = partial(Finding, Verdict.WARN)
fail = partial(Finding, Verdict.FAIL)


def named(checks: Mapping[str, Finding | Iterable[Finding]]) -> list[Finding]:
    """Return what checks found, with the names of the checks."""
    return [
        replace(finding, check=check)
        for check, found in checks.items()
        for finding in ([found] if isinstance(found, Finding) else found)
    ]


def with_config(finding: Finding, options: str) -> Finding:
    """Return the finding with a command that reads the doctor's configuration, which `options` name
    if any do.
    """
    if options and (finding.fix or "").startswith(_READ_CONFIG):
        return replace(finding, fix=f"{finding.fix} {options}")
    return finding


def count(findings: Iterable[Finding], verdict: Verdict) -> int:
    """Return how many findings have this verdict."""
    return sum(finding.verdict is verdict for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if anything failed, else 0."""
    return 1 if count(findings, Verdict.FAIL) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found, and of what."""

    where: str
    """What was looked at, in words."""
    is_cluster: bool
    has_card: bool
    has_config: bool
    findings: tuple[Finding, ...]
    options: str = ""
    """What says which configuration was read, such as `--config mine.yaml`; empty for the usual
    one.
    """


def versions(text: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`.

    Nothing of what is no version.
    """
    leading = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(map(int, leading[0].split("."))) if leading else ()


def dotted(version: Sequence[int]) -> str:
    """Return the numbers of a version as it is written: `12.8`."""
    return ".".join(map(str, version))
