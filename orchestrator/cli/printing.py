"""How a verb prints: words and tables for people, one object for programs.

Does not decide what is printed. Errors are printed by `main`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.cells import width_of, wrapped
from orchestrator.view.tables import Table
from orchestrator.view.terminal import plain_text, table_lines

Part: TypeAlias = str | Text | Table
"""Words, which may come from a file, or a table."""


def tell(*parts: Part) -> None:
    """Print words and tables: on a terminal in colours and within its width, elsewhere in full."""
    width = width_of(sys.stdout)
    lines = [*drawn(parts, width)]
    if width is not None:
        console = Console(width=width, highlight=False)
        for line in lines:
            console.print(line, soft_wrap=True)
    elif lines:
        # Not by `echo`, which chooses an encoding; `main` has what ours lacks shown as `?`.
        print(plain_text(lines), flush=True)  # noqa: T201 - this is where verbs print


def drawn(parts: Iterable[Part], width: int | None) -> Iterator[Text]:
    """Yield the lines of words and tables within `width` cells; `None` breaks and cuts nothing.

    Lines are broken between words; text that is marked `no_wrap`, a command to be copied, is not.
    """
    for part in parts:
        if isinstance(part, Table):
            yield from table_lines(part, width)
        elif isinstance(part, Text) and part.no_wrap:
            yield part
        else:
            words, style = (part, "") if isinstance(part, str) else (part.plain, part.style)
            yield from (Text(line, style) for line in wrapped(words, width).split("\n"))


def print_json(told: Mapping[str, Any] | str) -> None:
    """Print one object, or the JSON of one: it is UTF-8, whatever the terminal is."""
    text = told if isinstance(told, str) else summary_text({"schema": SCHEMA, **told})
    typer.echo(text.encode("utf-8", "backslashreplace"))
