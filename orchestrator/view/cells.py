"""Formats single values as short text for tables.

Does not know rows or columns. Functions that format a number return `None` for an unknown one; the
caller shows `MISSING` for it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from datetime import datetime
from textwrap import wrap
from typing import Final, TextIO

from rich.cells import cell_len, chop_cells

from orchestrator.record.model import finite

#: A command up to the end of its sentence.
_COMMAND: Final = re.compile(
    r"(?:python -m orchestrator|ray (?:start|status)|sudo) .*?(?=[;,.]? *$|[;,] |\. )"
)

_HUGE = 1e9
_TINY = 0.001

MISSING: Final = "–"  # noqa: RUF001 - an en dash is what the table shows for unknown
ELLIPSIS: Final = "…"
SEPARATOR: Final = " · "


def clean(text: str) -> str:
    """Return untrusted text as one line without control or other unprintable characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def shorten(text: str, width: int) -> str:
    """Return text cut to a width in terminal cells; an ellipsis marks the cut."""
    if cell_len(text) <= width:
        return text
    room = width - cell_len(ELLIPSIS)
    return chop_cells(text, room)[0].rstrip() + ELLIPSIS if room > 0 else ELLIPSIS[: max(0, width)]


def decimals_for(values: Iterable[float | None], *, significant: int = 4) -> int:
    """Return the number of decimals, 0 to 3, that shows the largest of these values with
    `significant` digits; all values of a column share it.
    """
    largest = max(
        (abs(known) for value in values if (known := finite(value)) is not None), default=0.0
    )
    whole_digits = len(str(int(largest))) if largest < _HUGE else significant
    return min(3, max(0, significant - whole_digits))


def number(value: float | None, decimals: int = 0) -> str | None:
    """Return a number with fixed decimals.

    From 1e9 on it is shown as 1e+10, so that no counter pushes a column off the screen. A value
    above 0 never appears as 0.000.
    """
    known = finite(value)
    if known is None:
        return None
    if abs(known) >= _HUGE:
        return f"{known:.0e}"
    if decimals >= 3 and 0 < known < _TINY:
        return f"<{_TINY}"
    return f"{known:.{decimals}f}"


def share_pct(share: float | None) -> str | None:
    """Return a share of 0..1 in per cent, rounded down: only a share of 1 gives 100."""
    known = finite(share)
    if known is None:
        return None
    return "100" if known >= 1.0 else f"{math.floor(max(0.0, known) * 1000) / 10:.1f}"


def clock(seconds: float) -> str:
    """Return a duration as 02:10, or 1:02:10 from an hour on: the width stays while it ticks."""
    whole_s = int(max(0.0, finite(seconds) or 0.0))
    minutes, rest_s = divmod(whole_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes:02}:{rest_s:02}"


def moment(unix_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a point in time, formatted in local time."""
    try:
        return datetime.fromtimestamp(unix_s).astimezone().strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"at second {unix_s:.6g}"  # outside the range of the calendar


def wrapped(text: str, width: int | None) -> str:
    """Return text with its lines wrapped between words, but not inside a command, so that users can
    copy it.

    A width of `None` wraps nothing. Continued lines are indented by two more than their first line.
    """
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        marked = _COMMAND.sub(lambda match: match[0].replace(" ", "\0"), line)
        lines += wrap(
            marked,
            max(20, width),
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines).replace("\0", " ")


def width_of(stream: TextIO) -> int | None:
    """Return the width of a stream's terminal; `None` if it is a pipe or a file."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None
