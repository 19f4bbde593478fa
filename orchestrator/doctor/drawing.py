"""The doctor's report as text for people and as JSON for scripts. No I/O.

A verdict is a word and a colour; no information is in the colour alone. A command stands on a line
of its own, which is never broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import wrap
from typing import Any

from rich.text import Text

from orchestrator.doctor.finding import Diagnosis, Finding, Verdict, count, exit_code
from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.cells import MISSING, clean
from orchestrator.view.phrases import counted

_STYLES = {
    Verdict.OK: "green",
    Verdict.SKIP: "dim",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
}

#: Columns before the words: two blanks, the verdict, the check.
_VERDICT_WIDTH = 6
_CHECK_WIDTH = 14
_INDENT = 2 + _VERDICT_WIDTH + _CHECK_WIDTH

#: Longest line of text, so that it is easy to read.
_WIDEST = 110


def diagnosis_json(diagnosis: Diagnosis) -> str:
    """Return the report as one JSON object; `null` is unknown or not needed."""
    findings = diagnosis.findings
    keys = ("node", "check", "verdict", "found", "hint", "fix")
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "where": diagnosis.where,
        "is_cluster": diagnosis.is_cluster,
        "exit_code": exit_code(findings),
        **{f"{verdict}_count": count(findings, verdict) for verdict in Verdict},
        "findings": [{key: getattr(finding, key) for key in keys} for finding in findings],
    }
    return summary_text(report)


def diagnosis_lines(diagnosis: Diagnosis, width: int | None) -> Iterator[Text]:
    """Yield the report, line by line: what concerns all first, then each node.

    Without a width no line is broken.
    """
    room = None if width is None else max(20, min(width, _WIDEST) - _INDENT)
    yield Text(clean(f"Looked at {diagnosis.where}."), style="bold")
    ordered = sorted(diagnosis.findings, key=lambda finding: finding.node or "")
    for node, findings in groupby(ordered, key=lambda finding: finding.node):
        yield Text()
        if node is not None:
            yield Text(clean(f"{node}:"), style="bold")
        for finding in findings:
            yield from _finding_lines(finding, room)
    yield Text()
    yield from _closing(diagnosis, width)


def _finding_lines(finding: Finding, room: int | None) -> Iterator[Text]:
    word = MISSING if finding.verdict is Verdict.SKIP else finding.verdict.value.upper()
    first, *others = _wrapped(clean(finding.found), room) or [""]
    line = Text("  ").append(word.ljust(_VERDICT_WIDTH), _STYLES[finding.verdict])
    yield line.append(finding.check.ljust(_CHECK_WIDTH)).append(first)
    hints = [] if finding.hint is None else _wrapped(clean(finding.hint), room)
    for text in (*others, *hints):
        yield Text(" " * _INDENT + text)
    if finding.fix is not None:
        yield Text("type: ".rjust(_INDENT)).append(clean(finding.fix), "bold")


def _wrapped(text: str, room: int | None) -> list[str]:
    return (
        [text] if room is None else wrap(text, room, break_on_hyphens=False, break_long_words=False)
    )


def _closing(diagnosis: Diagnosis, width: int | None) -> Iterator[Text]:
    options = f" {diagnosis.options}" if diagnosis.options else ""
    failures, warnings = (
        count(diagnosis.findings, verdict) for verdict in (Verdict.FAIL, Verdict.WARN)
    )
    if failures:
        words = (
            f"{counted(failures, 'failure')} to put right first, {counted(warnings, 'warning')}."
        )
    elif diagnosis.is_cluster:
        words = f"Ready for `python -m orchestrator run{options}`; {counted(warnings, 'warning')}."
    elif not diagnosis.has_config:
        words = (
            f"Only a configuration is missing; {counted(warnings, 'warning')}. Type `python "
            "-m orchestrator init`."
        )
    elif diagnosis.has_card:
        words = (
            f"No obstacle found here; {counted(warnings, 'warning')}. This machine alone: "
            f"`python -m orchestrator run --local{options}`; with others: `python -m orchestrator "
            f"up NODE{options}`."
        )
    else:
        words = (
            f"Ready for a rehearsal; {counted(warnings, 'warning')}. Type "
            f"`python -m orchestrator run --rehearse{options}`."
        )
    for line in _wrapped(clean(words), None if width is None else min(width, _WIDEST)):
        yield Text(line, style="bold")
