"""The doctor's report: a table of all findings, what to type, and JSON for scripts. Pure.

A command stands on a line of its own, which is never broken. Does not draw tables (`terminal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from rich.text import Text

from orchestrator.doctor.finding import Finding, Verdict, count, exit_code
from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.cells import MISSING, clean, wrapped
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone
from orchestrator.view.terminal import STYLES, table_lines

_TONES: Final[Mapping[Verdict, Tone]] = MappingProxyType(
    {
        Verdict.FAIL: Tone.BAD,
        Verdict.WARN: Tone.WARN,
        Verdict.OK: Tone.GOOD,
        Verdict.SKIP: Tone.DIM,
    }
)
_WORST_FIRST: Final = tuple(_TONES)
_COLUMNS: Final = (
    Column(key="verdict", title="verdict"),
    Column(key="node", title="node", priority=1),
    Column(key="check", title="check"),
    Column(key="found", title="found"),
)
_KEYS: Final = ("node", "check", "verdict", "found", "hint", "fix")


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


def diagnosis_json(diagnosis: Diagnosis) -> str:
    """Return the report as one JSON object; `null` is unknown or not needed."""
    findings = diagnosis.findings
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "where": diagnosis.where,
        "is_cluster": diagnosis.is_cluster,
        "exit_code": exit_code(findings),
        **{f"{verdict}_count": count(findings, verdict) for verdict in Verdict},
        "findings": [{key: getattr(finding, key) for key in _KEYS} for finding in findings],
    }
    return summary_text(report)


def findings_table(diagnosis: Diagnosis) -> Table:
    """Return what was found, the worst first."""
    return Table(name="doctor", columns=_COLUMNS, rows=tuple(map(_row, _sorted(diagnosis))))


def _sorted(diagnosis: Diagnosis) -> list[Finding]:
    return sorted(diagnosis.findings, key=lambda one: _WORST_FIRST.index(one.verdict))


def _row(finding: Finding) -> TableRow:
    is_skipped = finding.verdict is Verdict.SKIP
    word = MISSING if is_skipped else finding.verdict.value.upper()
    tone = _TONES[finding.verdict]
    texts = [clean(text or "") for text in (finding.node, finding.check, finding.found)]
    cells = (Cell(text=word, tone=tone), *(Cell(text=text, value=text) for text in texts))
    return TableRow(key=" ".join(filter(None, texts[:2])), cells=cells)


def diagnosis_lines(diagnosis: Diagnosis, width: int | None) -> Iterator[Text]:
    """Yield the table, then what findings mean and what to type.

    Without a width no line is broken.
    """
    yield Text(clean(f"Looked at {diagnosis.where}."), style="bold")
    yield Text()
    yield from table_lines(findings_table(diagnosis), width)
    for finding in _sorted(diagnosis):
        if finding.hint or finding.fix or finding.verdict in {Verdict.FAIL, Verdict.WARN}:
            subject = " ".join(filter(None, (finding.node, finding.check)))
            words = f"{subject}: {'; '.join(filter(None, (finding.found, finding.hint)))}"
            yield Text()
            for line in wrapped(clean(words), width).split("\n"):
                yield Text(line, STYLES[_TONES[finding.verdict]])
            if finding.fix is not None:
                yield Text("type: ").append(clean(finding.fix), "bold")
    yield Text()
    for line in wrapped(clean(_closing(diagnosis)), width).split("\n"):
        yield Text(line, style="bold")


def _closing(diagnosis: Diagnosis) -> str:
    """Return what to do next."""
    findings, options = diagnosis.findings, diagnosis.options and f" {diagnosis.options}"
    command = "python -m orchestrator"
    warnings = counted(count(findings, Verdict.WARN), "warning")
    if failures := count(findings, Verdict.FAIL):
        return f"{counted(failures, 'failure')} to put right first, {warnings}."
    if diagnosis.is_cluster:
        return f"Ready for `{command} run{options}`; {warnings}."
    if not diagnosis.has_config:
        return f"Only a configuration is missing; {warnings}. Type `{command} init`."
    if not diagnosis.has_card:
        return f"Ready for a rehearsal; {warnings}. Type `{command} run --rehearse{options}`."
    return (
        f"No obstacle found here; {warnings}. This machine alone: `{command} run "
        f"--local{options}`; with others: `{command} up NODE{options}`."
    )
