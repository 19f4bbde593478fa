"""Prints the output of verbs: text and tables for people, or one JSON object for programs.

Does not decide what is printed. `main` prints errors.
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
"""Text, which may come from a file, or a table."""


def print_text(*parts: Part) -> None:
    """Print text and tables: on a terminal in colours and within its width, elsewhere in full."""
    width = width_of(sys.stdout)
    lines = [*text_lines(parts, width)]
    if width is not None:
        console = Console(width=width, highlight=False)
        for line in lines:
            console.print(line, soft_wrap=True)
    elif lines:
        # Not with `echo`, which chooses an encoding. `main` makes stdout print "?" for characters
        # that its encoding lacks.
        print(plain_text(lines), flush=True)  # noqa: T201 - this is where verbs print


def text_lines(parts: Iterable[Part], width: int | None) -> Iterator[Text]:
    """Yield the lines of text and tables within `width` cells; `None` wraps and cuts nothing.

    Lines are wrapped between words. `Text` with `no_wrap`, a command to copy, is not wrapped.
    """
    for part in parts:
        if isinstance(part, Table):
            yield from table_lines(part, width)
        elif isinstance(part, Text) and part.no_wrap:
            yield part
        else:
            words, style = (part, "") if isinstance(part, str) else (part.plain, part.style)
            yield from (Text(line, style) for line in wrapped(words, width).split("\n"))


def print_json(data: Mapping[str, Any] | str) -> None:
    """Print an object, or its JSON, as UTF-8 regardless of the terminal's encoding."""
    text = data if isinstance(data, str) else summary_text({"schema": SCHEMA, **data})
    typer.echo(text.encode("utf-8", "backslashreplace"))
