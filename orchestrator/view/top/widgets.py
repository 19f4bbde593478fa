"""What `top` is made of: a table with a cursor, and a page of text, for Textual."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static

from orchestrator.view.tables import Table, TableRow
from orchestrator.view.terminal import cell_text, fitting

#: How the parts of the screen stand, in the language of Textual.
CSS: Final = """
Screen, Static, DataTable, VerticalScroll, Input {
    background: ansi_default; color: ansi_default;
}
#header, #keys, TextPage Static { height: auto; }
DataTable, VerticalScroll { height: 1fr; scrollbar-size: 0 0; }
DataTable > .datatable--header { background: ansi_default; text-style: dim; }
DataTable > .datatable--cursor, DataTable:focus > .datatable--cursor {
    background: ansi_default; color: ansi_default; text-style: reverse;
}
Input { height: 1; border: none; padding: 0; display: none; }
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
        self._shown: tuple[Table, int] | None = None
        """What was drawn last, and in which width."""

    @property
    def row(self) -> TableRow | None:
        """The row under the cursor."""
        rows = () if self._shown is None else self._shown[0].rows
        return rows[self.cursor_row] if 0 <= self.cursor_row < len(rows) else None

    def show(self, table: Table, width: int) -> None:
        """Draw a table within a width, if it is another one than before."""
        if (table, width) == self._shown:
            return
        row, line, first = self.row, self.cursor_row, self.scroll_offset.y
        widths = fitting(table, width - 2 * self.cell_padding)
        columns = {at: table.columns[at] for at in widths}
        has_units = any(column.unit for column in columns.values())
        self.clear(columns=True)
        self.header_height = 2 if has_units else 1
        for at, column in columns.items():
            title = f"{column.title}\n{column.unit}" if has_units else column.title
            side: Literal["left", "right"] = "right" if column.numeric else "left"
            self.add_column(Text(title, justify=side), width=widths[at])
        self.add_rows(
            [cell_text(table, at, row.cells[at], cells) for at, cells in widths.items()]
            for row in table.rows
        )
        self._shown = table, width
        self.scroll_to(y=first, animate=False)
        keys = [each.key for each in table.rows]
        line = keys.index(row.key) if row is not None and row.key in keys else line
        self.move_cursor(row=max(0, min(line, len(keys) - 1)), animate=False)


class TextPage(VerticalScroll):
    """Text that scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down"),
        Binding("k", "scroll_up"),
        Binding("g", "scroll_home"),
        Binding("G", "scroll_end"),
    ]

    def compose(self) -> ComposeResult:
        """Lay the page out, see Textual."""
        yield Static()

    def show(self, text: RenderableType) -> None:
        """Draw the page."""
        self.query_one(Static).update(text)
