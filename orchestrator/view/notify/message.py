"""Words a message: a title that says enough on a locked phone, what is new, and how the run is.
Pure.

Text from a run may be hostile: it comes out as harmless lines of bounded length. Does not decide
what is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Severity
from orchestrator.record.archive import Frame
from orchestrator.record.folders import go_on_command
from orchestrator.record.model import Snapshot
from orchestrator.view.alerts import SEVEREST_FIRST, Alert
from orchestrator.view.cells import MISSING, clean, shorten
from orchestrator.view.notify.outbox import Message
from orchestrator.view.phrases import totals
from orchestrator.view.slots import cards_table, headline

_LINES_MOST = 20
"""Of one kind. Some services take only 4,000 characters."""
_CELLS_MOST = 300
_TITLE_CELLS = 120
_SUBJECTS_MOST = 8
_YOUNG_RUN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageText:
    """A message as it is sent."""

    title: str
    body: str
    severity: Severity


def message_text(message: Message, frame: Frame, unix_s: float) -> MessageText:
    """Return the words of a message about a run."""
    run, snapshot = frame.run, frame.snapshot
    states = ", ".join(f"{count} {state.value}" for state, count in snapshot.state_counts.items())
    begun, over = _grouped(message.begun), _grouped(message.over)
    news = [*map(_headline, begun), *(f"over: {_headline(group)}" for group in over)]
    more = f", {len(news) - 1} more" if len(news) > 1 else ""
    essence = [f"{news[0]}{more}"] if news else [states or "no workers yet"]
    severity = begun[0][0].severity if begun else "info"
    end: list[str] = []
    if message.is_last:
        essence = [_end(frame), *news[:1]]
        end = [_end(frame), *([] if run.error is None else [run.error]), *frame.missed]
        if run.exit_code != 0 and severity != "critical":
            severity = "critical" if run.exit_code is None else "warning"
    elif message.is_first:
        is_young = snapshot.elapsed_s < _YOUNG_RUN_S
        essence.insert(0, "the run has started" if is_young else "the run is under way")
    new_lines = [line for group in begun for line in _lines(group)]
    new_lines += [f"over: {_headline(one)}, after {_age(one[0], unix_s)}" for one in over]
    still = [
        f"still: {_headline(one)}, for {_age(one[0], unix_s)}" for one in _grouped(message.still)
    ]
    status = [
        f"run {snapshot.run_id}: {', '.join(cell.text for cell in headline(snapshot))}",
        ", ".join(totals(snapshot)),
        *snapshot.notices,
        *_cards(snapshot),
    ]
    blocks = [_cut(block) for block in (end, new_lines, still, status) if block]
    return MessageText(
        title=_line(f"{run.facts.run_id[-4:]}: {'; '.join(essence)}", _TITLE_CELLS),
        body="\n\n".join("\n".join(block) for block in blocks),
        severity=severity,
    )


def _grouped(alerts: Iterable[Alert]) -> list[list[Alert]]:
    """Return the alerts of one kind on one node together, the severest first."""
    groups: defaultdict[tuple[str, str | None], list[Alert]] = defaultdict(list)
    for alert in sorted(alerts, key=lambda one: SEVEREST_FIRST.index(one.severity)):
        groups[alert.name, alert.node].append(alert)
    return list(groups.values())


def _headline(group: Sequence[Alert]) -> str:
    subjects = [alert.subject for alert in group]
    more = f" and {len(subjects) - _SUBJECTS_MOST} more" if len(subjects) > _SUBJECTS_MOST else ""
    return f"{group[0].name} {' '.join(subjects[:_SUBJECTS_MOST])}{more}"


def _lines(group: Sequence[Alert]) -> Iterator[str]:
    yield f"{group[0].severity}: {_headline(group)}"
    yield f"  {group[0].text}"
    yield f"  {group[0].what_to_do}"


def _age(alert: Alert, unix_s: float) -> str:
    return format_duration(max(0.0, unix_s - alert.since_unix_s))


def _end(frame: Frame) -> str:
    run = frame.run
    if run.exit_code is not None:
        return f"the run has ended: {run.outcome}, exit code {run.exit_code}"
    return f"the head is gone; `{go_on_command(run.folder)}` continues the run"


def _cards(snapshot: Snapshot) -> Iterator[str]:
    """Yield a line for each card, with the columns of the table of cards that have a value."""
    table = cards_table(snapshot)
    for row in table.rows:
        node, card, *others = row.cells
        words = [
            f"{column.title} {column.unit} {cell.text}"
            for column, cell in zip(table.columns[2:], others, strict=True)
            if cell.text != MISSING
        ]
        yield f"{node.text} {card.text}: {', '.join(words)}"


def _line(text: str, cells: int = _CELLS_MOST) -> str:
    indent = "  " if text.startswith("  ") else ""
    return indent + shorten(clean(text), cells)


def _cut(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - _LINES_MOST} lines more"] if len(lines) > _LINES_MOST else []
    return [*map(_line, lines[:_LINES_MOST]), *more]
