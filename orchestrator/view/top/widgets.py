"""What `top` is made of: a table with a cursor, and a page of text with courses, for Textual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Label, Sparkline, Static

from orchestrator.view.tables import Table, TableRow
from orchestrator.view.terminal import cell_text, fitting
from orchestrator.view.top.pages import COURSES, Courses

#: How the parts of the screen stand, in the language of Textual.
CSS: Final = """
Screen, Static, DataTable, VerticalScroll, Input, Label {
    background: ansi_default; color: ansi_default;
}
#header, #keys, #lines { height: auto; }
DataTable, VerticalScroll { height: 1fr; scrollbar-size: 0 0; }
DataTable > .datatable--header { background: ansi_default; text-style: dim; }
DataTable > .datatable--cursor, DataTable:focus > .datatable--cursor {
    background: ansi_default; color: ansi_default; text-style: reverse;
}
Input { height: 1; border: none; padding: 0; display: none; }
.course { height: 1; }
.course Label { width: 12; text-style: dim; }
.course .ends { width: 24; padding-left: 2; }
Sparkline { width: 1fr; height: 1; }
Sparkline > .sparkline--min-color, Sparkline > .sparkline--max-color { color: ansi_cyan; }
"""


class Rows(DataTable[Text]):
    """A table with a cursor, which stays with its row while the rows move."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down"),
        Binding("k", "cursor_up"),
        Binding("g", "scroll_top"),
        Binding("G", "scroll_bottom"),
    ]

    def __init__(self) -> None:
        super().__init__(cursor_type="row")
        self._rows: tuple[TableRow, ...] = ()
        self._layout: object = None
        self._cells: list[list[Text]] = []

    @property
    def row(self) -> TableRow | None:
        """The row under the cursor."""
        at = self.cursor_row
        return self._rows[at] if 0 <= at < len(self._rows) else None

    def show(self, table: Table, width: int) -> None:
        """Draw a table within a width; only cells that changed are drawn again."""
        row, line, first = self.row, self.cursor_row, self.scroll_offset.y
        widths = fitting(table, width - 2 * self.cell_padding)
        cells = [
            [cell_text(table, at, row.cells[at], cells) for at, cells in widths.items()]
            for row in table.rows
        ]
        layout = table.columns, widths, len(cells)
        if layout != self._layout:
            self._lay_out(table, widths)
            self.add_rows(cells)
            self.scroll_to(y=first, animate=False)
        else:
            for at, (before, now) in enumerate(zip(self._cells, cells, strict=True)):
                for place, cell in enumerate(now):
                    if cell != before[place]:
                        self.update_cell_at(Coordinate(at, place), cell)
        self._rows, self._layout, self._cells = table.rows, layout, cells
        keys = [one.key for one in table.rows]
        line = keys.index(row.key) if row is not None and row.key in keys else line
        self.move_cursor(row=max(0, min(line, len(keys) - 1)), animate=False)

    def _lay_out(self, table: Table, widths: dict[int, int]) -> None:
        columns = [table.columns[at] for at in widths]
        has_units = any(column.unit for column in columns)
        self.clear(columns=True)
        self.header_height = 2 if has_units else 1
        for column, cells in zip(columns, widths.values(), strict=True):
            title = f"{column.title}\n{column.unit}" if has_units else column.title
            side: Literal["left", "right"] = "right" if column.numeric else "left"
            self.add_column(Text(title, justify=side), width=cells)


class TextPage(VerticalScroll):
    """A title, the courses of a slot, and lines of text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down"),
        Binding("k", "scroll_up"),
        Binding("g", "scroll_home"),
        Binding("G", "scroll_end"),
    ]

    def compose(self) -> ComposeResult:
        """Lay the page out, see Textual."""
        yield Static(id="title")
        for key, title in COURSES.items():
            with Horizontal(id=key, classes="course"):
                yield Label(title)
                yield Sparkline()
                yield Label(classes="ends")
        yield Static(id="lines")

    def show(self, title: Text, courses: Courses, lines: Sequence[Text]) -> None:
        """Draw the page; a course without values is left out."""
        self.query_one("#title", Static).update(title)
        self.query_one("#lines", Static).update(Text("\n").join(lines))
        for key in COURSES:
            values, ends = courses.get(key, ((), ""))
            course = self.query_one(f"#{key}", Horizontal)
            course.display = bool(values)
            course.query_one(Sparkline).data = values
            course.query_one(".ends", Label).update(ends)
