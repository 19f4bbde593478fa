"""A table on a terminal: the omissions on a narrow or short terminal, and hostile text."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.view.tables import Cell, Column, Table, TableRow, Tone
from orchestrator.view.terminal import plain_text, table_lines

COLUMNS = (
    Column(key="slot", title="slot"),
    Column(key="state", title="state"),
    Column(key="size", title="size", unit="rows", numeric=True, priority=1),
    Column(key="card", title="card", priority=3, most_cells=8),
    Column(key="temp", title="temp", unit="C", numeric=True, priority=2),
)


def made(
    rows: Sequence[tuple[str, ...]], reasons: Sequence[str] = (), tone: Tone = Tone.BAD
) -> Table:
    """Return a table with these rows, and a reason for the first ones."""
    told = (*reasons, *("" for _ in rows))
    return Table(
        name="slots",
        columns=COLUMNS,
        rows=tuple(
            TableRow(
                key=row[0],
                cells=tuple(Cell(text=text) for text in row),
                reason=reason,
                tone=tone,
            )
            for row, reason in zip(rows, told, strict=False)
        ),
    )


ROW = ("pc1/0", "RUNNING", "512", "RTX 3090 Ti", "71")


def slots(count: int) -> list[tuple[str, ...]]:
    return [(f"pc1/{number}", *ROW[1:]) for number in range(count)]


def drawn(table: Table, width: int | None) -> list[str]:
    return plain_text(table_lines(table, width)).split("\n")


def test_columns_fall_away_by_priority() -> None:
    titles = [drawn(made([ROW]), width)[0].split() for width in (60, 33, 25, 15)]
    assert titles == [
        ["slot", "state", "size", "card", "temp"],
        ["slot", "state", "size", "temp"],
        ["slot", "state", "size"],
        ["slot", "state"],
    ]


def test_without_a_terminal_nothing_is_cut() -> None:
    long = "x" * 300
    lines = drawn(made([(long, "RUNNING", "512", long, "71")], [long]), None)
    assert [line.count(long) for line in lines[3:]] == [2, 0, 2]


def test_reasons_stand_below_and_equal_ones_share_a_line() -> None:
    reasons = ["its node has left", "memory ran out", *["its node has left"] * 4]
    lines = drawn(made(slots(7), reasons), 80)
    assert lines[-3:] == [
        "",
        "pc1/0, pc1/2, pc1/3 and 2 more: its node has left",
        "pc1/1: memory ran out",
    ]
