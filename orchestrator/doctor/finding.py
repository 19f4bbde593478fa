"""What a check found: a verdict, the words, and what to type. Decides nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    """One word, which stays the same from run to run."""
    verdict: Verdict
    found: str
    hint: str | None = None
    """What it means, or what to do where no command does it."""
    fix: str | None = None
    """What to type."""
    node: str | None = None
    """The node it is about; `None`: this machine, or the cluster as a whole."""


def ok(check: str, found: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(check=check, verdict=Verdict.OK, found=found)


def skip(check: str, found: str) -> Finding:
    """Return a finding that does not apply here."""
    return Finding(check=check, verdict=Verdict.SKIP, found=found)


def warn(check: str, found: str, *, hint: str | None = None, fix: str | None = None) -> Finding:
    """Return a finding that the user should know."""
    return Finding(check=check, verdict=Verdict.WARN, found=found, hint=hint, fix=fix)


def fail(check: str, found: str, *, hint: str | None = None, fix: str | None = None) -> Finding:
    """Return a finding that must be put right first."""
    return Finding(check=check, verdict=Verdict.FAIL, found=found, hint=hint, fix=fix)


def with_config(finding: Finding, options: str) -> Finding:
    """Return the finding with a command that reads the same configuration as the doctor did.

    Args:
        finding: As a check made it.
        options: What says which configuration that is, such as `--config mine.yaml`; empty for the usual one.
    """
    fix = finding.fix
    if not options or fix is None or not fix.startswith(_READ_CONFIG):
        return finding
    return replace(finding, fix=f"{fix} {options}")


def count(findings: Iterable[Finding], verdict: Verdict) -> int:
    """Return how many findings have this verdict."""
    return sum(finding.verdict is verdict for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if anything failed, else 0."""
    return 1 if count(findings, Verdict.FAIL) else 0


def versions(text: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`; nothing of what is no version."""
    numbers: list[int] = []
    for part in (text or "").split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def dotted(version: Sequence[int]) -> str:
    """Return the numbers of a version as it is written: `12.8`."""
    return ".".join(str(number) for number in version)
