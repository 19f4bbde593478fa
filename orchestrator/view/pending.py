"""Stands in for tables that other branches bring."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.record.folders import Listed
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import FIELDS, STATE_STYLES, Row, worst_first
from orchestrator.view.cells import clean
from orchestrator.view.jobs import TITLES, current, job_cells
from orchestrator.view.table import columns_for, kept_longest_first
from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone
from workers.messages import WorkerState

_T = {
    "bold red": Tone.BAD,
    "red": Tone.BAD,
    "magenta": Tone.WARN,
    "bold yellow": Tone.WARN,
    "yellow": Tone.WARN,
    "cyan": Tone.NOTE,
    "green": Tone.GOOD,
    "bold green": Tone.GOOD,
    "dim": Tone.DIM,
}


def slots_table(rows: Sequence[Row]) -> Table:
    columns = columns_for(rows)
    rank = {name: at for at, name in enumerate(kept_longest_first(rows))}
    made = []
    for row in worst_first(rows):
        cells = []
        for column in columns:
            text = column.cell(row)
            field = next((f for f in FIELDS.values() if f.column and f.column.name == column.name))
            value = field.value(row)
            if text is None:
                cells.append(Cell())
            else:
                cells.append(
                    Cell(
                        text=text.plain,
                        tone=_T.get(str(text.style), Tone.PLAIN),
                        value=value if isinstance(value, str | int | float) else text.plain,
                    )
                )
        quiet = row.state in {WorkerState.RUNNING, WorkerState.DONE, WorkerState.STOPPED}
        made.append(
            TableRow(
                key=row.slot,
                cells=tuple(cells),
                reason="" if quiet else clean(row.reason),
                tone=Tone.WARN,
            )
        )
    return Table(
        name="slots",
        columns=tuple(
            Column(
                key=c.name,
                title=c.title,
                unit=c.unit,
                numeric=not c.is_words,
                priority=max(0, rank.get(c.name, 50) - 3),
            )
            for c in columns
        ),
        rows=tuple(made),
    )


def cards_table(rows: Sequence[Row]) -> Table:
    return Table(
        name="cards",
        columns=(Column(key="card", title="card"),),
        rows=tuple(
            TableRow(key=r.gpu_uuid or "?", cells=(Cell(text=r.gpu_name or ""),))
            for r in {r.gpu_uuid: r for r in rows}.values()
        ),
    )


def jobs_table(queue: QueueSnapshot) -> Table:
    return Table(
        name="jobs",
        columns=tuple(Column(key=t, title=t) for t in TITLES),
        rows=tuple(
            TableRow(
                key=s.job.name,
                cells=tuple(Cell(text=t, value=t) for t in job_cells(s, queue).values()),
            )
            for s in current(queue)
        ),
    )


def runs_table(listed: Sequence[Listed]) -> Table:
    return Table(
        name="runs",
        columns=(Column(key="run", title="run"), Column(key="outcome", title="outcome")),
        rows=tuple(
            TableRow(
                key=r.run_id,
                cells=(Cell(text=r.run_id, value=r.run_id), Cell(text=r.outcome, value=r.outcome)),
            )
            for r in listed
        ),
    )
