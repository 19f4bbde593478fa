"""The report of `doctor`: a table of findings, what to type, and JSON for scripts. Pure.

A finding is a verdict, a text, and a command to type. A command is on a separate line, which is
never wrapped. Decides nothing, and draws no table (`terminal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from rich.text import Text

from orchestrator.view.cells import MISSING, clean
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, TableRow, Tone, row_of
from orchestrator.view.terminal import STYLES


class Verdict(StrEnum):
    """How bad a finding is, in ascending order."""

    OK = "ok"
    #: The check does not apply here.
    SKIP = "skip"
    #: It works, but not well, or not for every use.
    WARN = "warn"
    #: A run on this machine, or on this cluster, will fail.
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the doctor's report."""

    verdict: Verdict
    found: str
    hint: str | None = None
    """What the finding means, or what to do if no command does it."""
    fix: str | None = None
    """The command to type."""
    node: str | None = None
    """The node of the finding; `None`: this machine, or the cluster as a whole."""
    check: str = ""
    """Name of the check, a stable word: its function in `checks.py`."""

    @property
    def subject(self) -> str:
        """Node and check of the finding."""
        return " ".join(filter(None, (self.node, self.check)))


ok = partial(Finding, Verdict.OK)
skip = partial(Finding, Verdict.SKIP)
warn = partial(Finding, Verdict.WARN)
fail = partial(Finding, Verdict.FAIL)


_TONES: Final[Mapping[Verdict, Tone]] = MappingProxyType(
    {Verdict.FAIL: Tone.BAD, Verdict.WARN: Tone.WARN, Verdict.OK: Tone.GOOD, Verdict.SKIP: Tone.DIM}
)
_WORST_FIRST: Final = tuple(_TONES)
_COLUMNS: Final = (
    Column("verdict", "verdict"),
    Column("node", "node", priority=1),
    Column("check", "check"),
    Column("found", "found"),
)
_SHOWN_CELLS: Final = 55
"""On a terminal of 80 columns the table cuts longer texts; below it they appear in full."""
_KEYS: Final = ("node", "check", "verdict", "found", "hint", "fix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings, and where they were found."""

    where: str
    """The checked cluster or machine, in words."""
    is_cluster: bool
    has_card: bool
    has_config: bool
    findings: tuple[Finding, ...]
    options: str = ""
    """Options that name the configuration, such as `--config mine.yaml`; empty for the default."""

    def count(self, verdict: Verdict) -> int:
        """Return the number of findings with this verdict."""
        return sum(finding.verdict is verdict for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if anything failed, else 0."""
        return 1 if self.count(Verdict.FAIL) else 0

    def to_json(self) -> dict[str, Any]:
        """Return the report for JSON; `None` is unknown or not needed."""
        return {
            "where": self.where,
            "is_cluster": self.is_cluster,
            "exit_code": self.exit_code,
            **{f"{verdict}_count": self.count(verdict) for verdict in Verdict},
            "findings": [{key: getattr(one, key) for key in _KEYS} for one in self.findings],
        }

    def parts(self) -> Iterator[Text | Table]:
        """Yield a table of the findings, the worst first, then their meaning and what to type."""
        worst_first = sorted(self.findings, key=lambda one: _WORST_FIRST.index(one.verdict))
        yield Text(clean(f"Checked {self.where}."), style="bold")
        yield Text()
        yield Table(name="doctor", columns=_COLUMNS, rows=tuple(map(_row, worst_first)))
        for one in worst_first:
            is_bad, is_cut = (
                one.verdict in {Verdict.FAIL, Verdict.WARN},
                len(one.found) > _SHOWN_CELLS,
            )
            if one.hint or one.fix or is_bad or is_cut:
                text = "; ".join(filter(None, (one.found, one.hint)))
                yield Text()
                yield Text(clean(f"{one.subject}: {text}"), STYLES[_TONES[one.verdict]])
                if one.fix is not None:
                    yield Text("type: ", no_wrap=True).append(clean(one.fix), "bold")
        yield Text()
        yield Text(clean(self._closing()), style="bold")

    def _closing(self) -> str:
        """Return the last line: what to do next."""
        options = self.options and f" {self.options}"
        command = "python -m orchestrator"
        warnings = counted(self.count(Verdict.WARN), "warning")
        if failures := self.count(Verdict.FAIL):
            return f"{counted(failures, 'failure')} to put right first, {warnings}."
        if not self.has_config:
            return f"Only a configuration is missing; {warnings}. Type `{command} init`."
        if self.is_cluster:
            return f"Ready for `{command} run{options}`; {warnings}."
        how = "--local" if self.has_card else "--rehearse"
        return f"No obstacle found; {warnings}. This PC alone: `{command} run {how}{options}`."


def _row(finding: Finding) -> TableRow:
    word = MISSING if finding.verdict is Verdict.SKIP else finding.verdict.value.upper()
    values = {key: getattr(finding, key) for key in _KEYS} | {"verdict": word}
    return row_of(_COLUMNS, finding.subject, values, {"verdict": _TONES[finding.verdict]})
