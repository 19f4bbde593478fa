"""Durations as people type and read them: `5` (minutes), `30s`, `1h30m` and back.

Does not cover wall-clock times or time zones, and reads no clock.
"""

from __future__ import annotations

import math
import re

#: Longest duration accepted: a year. More is a typing error.
MAX_DURATION_S = 365 * 24 * 3600.0

#: What may be typed where a duration is wanted; part of every refusal.
VALID_DURATION = (
    "minutes as a number (5), or text such as 30s, 2h, 1h30m; above 0 and at most one year"
)

_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_NUMBER = r"\d{1,12}(?:\.\d{1,9})?"
_PLAIN = re.compile(rf"[+-]?{_NUMBER}", re.ASCII)
_WITH_UNITS = re.compile(r"\s*".join(rf"(?:({_NUMBER}){unit})?" for unit in _UNITS_S), re.ASCII)


def parse_duration(text: str | int | float) -> float:
    """Return the seconds that `text` means, a plain number minutes.

    `ValueError` says what would be valid.
    """
    seconds = _seconds(text)
    if seconds is None or math.isnan(seconds):
        raise ValueError(f"{shown(text)} is not a duration; valid: {VALID_DURATION}")
    if seconds <= 0:
        raise ValueError(f"{shown(text)} is not longer than nothing; valid: {VALID_DURATION}")
    if seconds > MAX_DURATION_S:
        raise ValueError(f"{shown(text)} is longer than a year; valid: {VALID_DURATION}")
    return seconds


def format_duration(seconds: float) -> str:
    """Return `seconds` for people: `45s`, `5m`, `1h 30m`; below a minute with tenths where there
    are any.

    Parts of a second are dropped from a minute on. Infinite, negative and NaN are shown as `–`,
    like any value that is not known.
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


def shown(value: object) -> str:
    """Return a value of a configuration for a refusal, short enough for a line."""
    # Python refuses the repr of a longer int.
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    whole = repr(value)
    return whole if len(whole) <= 60 else f"{whole[:57]}…"


def _seconds(text: str | int | float) -> float | None:
    if isinstance(text, bool):
        return None
    if not isinstance(text, str):
        # Beyond these bounds it is refused anyway, and too large an int does not convert.
        return float(min(max(text, -1), MAX_DURATION_S)) * 60.0
    # No duration needs 60 characters; the bound keeps hostile text away from the pattern.
    typed = text.strip().lower()
    if len(typed) > 60:
        return None
    if _PLAIN.fullmatch(typed):
        return float(typed) * 60.0
    found = _WITH_UNITS.fullmatch(typed)
    if found is None or not any(found.groups()):
        return None
    counts = zip(found.groups("0"), _UNITS_S.values(), strict=True)
    return sum(float(count) * unit_s for count, unit_s in counts)
