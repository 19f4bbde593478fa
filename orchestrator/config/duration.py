"""Durations as people type and read them: `5` (minutes), `30s`, `1h30m` and back.

Does not cover wall-clock times or time zones, and reads no clock.
"""

from __future__ import annotations

import math
import re

from orchestrator.errors import in_words

#: Longest duration accepted: a year. More is a typing error.
MAX_DURATION_S = 365 * 24 * 3600.0

#: What may be typed where a duration is wanted; part of every refusal.
VALID_DURATION = (
    "minutes as a number (5), or text such as 30s, 2h, 1h30m; above 0 and at most one year"
)

_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_NUMBER = r"\d{1,12}(?:\.\d{1,9})?"
_WITH_UNITS = r"\s*".join(rf"(?:({_NUMBER}){unit})?" for unit in _UNITS_S)
#: Its groups are minutes without a unit, then the count of each unit.
_TYPED = re.compile(rf"({_NUMBER})|{_WITH_UNITS}", re.ASCII)


def parse_duration(typed: object) -> float:
    """Return the seconds that `typed` means; a plain number means minutes.

    `ValueError` says what would be valid.
    """
    seconds = 0.0
    if isinstance(typed, str):
        # No duration needs 60 characters; the bound keeps hostile text away from the pattern.
        found = _TYPED.fullmatch(typed.strip().lower()) if len(typed) <= 60 else None
        counts = zip(found.groups("0") if found else (), (60, *_UNITS_S.values()), strict=False)
        seconds = sum(float(count) * unit_s for count, unit_s in counts)
    elif isinstance(typed, (int, float)) and not isinstance(typed, bool):
        seconds = typed * 60
    if not 0 < seconds <= MAX_DURATION_S:
        raise ValueError(f"{in_words(typed)} is not a duration; valid: {VALID_DURATION}")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """Return `seconds` for people: `0.5s`, `45s`, `5m`, `1h 30m`; no fractions from a minute on.

    Infinite, negative and NaN are shown as `–`, like any value that is not known.
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "–"  # noqa: RUF001  # the sign the tables use for an unknown value
    if seconds < 60:
        return f"{math.floor(seconds * 10) / 10:g}s"
    remaining = int(seconds)
    parts = []
    for unit, unit_s in _UNITS_S.items():
        count, remaining = divmod(remaining, int(unit_s))
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts)
