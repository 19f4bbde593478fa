"""The virtual table: only rows on the screen are made, and only lines that differ are drawn.

And lines as a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text
from textual.events import Click
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

#: How the parts of the screen stand, in the language of Textual.
SCREEN_CSS = """
Screen { layout: vertical; background: ansi_default; color: ansi_default; }
LinesView { height: 1fr; background: ansi_default; }
#header { height: 2; }
#keys { height: 2; }
Input { height: 1; border: none; padding: 0; display: none; background: ansi_default; }
"""

_LINES_PER_NOTCH = 3
"""Of the wheel of a mouse."""


class LinesView(Widget):
    """Shows lines of text as they are given, from the top.

    What it is given again is not drawn again.
    """

    can_focus = True

    def __init__(self, *, name: str) -> None:
        super().__init__(id=name)
        self._lines: list[Text] = []
        self._strips: list[Strip] = []
        self._marked: int | None = None

    def show(self, lines: Sequence[Text], marked: int | None = None) -> None:
        """Draw the lines that differ from those shown before; the `marked` one in reverse."""
        height, width = max(1, self.size.height), self.size.width
        given = list(lines[:height])
        before = self._lines
        changed = [
            index
            for index in range(max(len(given), len(before)))
            if index >= len(given) or index >= len(before) or given[index] != before[index]
        ]
        changed += [
            line for line in (marked, self._marked) if line is not None and self._marked != marked
        ]
        self._lines, self._marked = given, marked
        self._strips = self._strips[: len(given)] + [Strip.blank(width)] * (
            len(given) - len(self._strips)
        )
        for index in set(changed):
            if index < len(given):
                self._strips[index] = self._strip(given[index], is_marked=index == marked)
            self.refresh(Region(0, index, max(1, width), 1))

    @property
    def lines(self) -> tuple[Text, ...]:
        """What is shown."""
        return tuple(self._lines)

    def on_resize(self) -> None:
        """Forget what was drawn for another width."""
        self._lines, self._strips = [], []

    async def on_click(self, event: Click) -> None:
        """Move the cursor to the line; a second click opens what it is on."""
        if self._marked is not None and event.y < len(self._lines):
            await self.app.run_action(f"move({event.y - self._marked})")
            if event.chain > 1:
                await self.app.run_action("page('slot')")

    async def on_mouse_scroll_down(self) -> None:
        """Move on."""
        await self.app.run_action(f"move({_LINES_PER_NOTCH})")

    async def on_mouse_scroll_up(self) -> None:
        """Move back."""
        await self.app.run_action(f"move({-_LINES_PER_NOTCH})")

    def render_line(self, y: int) -> Strip:
        """Return a line, see Textual."""
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def _strip(self, line: Text, *, is_marked: bool) -> Strip:
        text = line.copy()
        text.no_wrap, text.end = True, ""
        if is_marked:
            text.stylize("reverse")
        strip = Strip(text.render(self.app.console)).simplify()
        return strip.adjust_cell_length(max(1, self.size.width), None)


def saved(path: Path, lines: Iterable[Text]) -> str:
    """Write lines as plain text; return where they are, or why they could not be written."""
    try:
        path.write_text("\n".join(line.plain for line in lines) + "\n", encoding="utf-8")
    except OSError as failure:
        return f"{path} cannot be written: {os.strerror(failure.errno or 0)}"
    return f"saved as {path}"
