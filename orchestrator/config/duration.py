"""Durations as people type and read them: `5` (minutes), `30s`, `1h30m` and back.

Does not cover wall-clock times or time zones, and reads no clock.
"""

from __future__ import annotations

import math
import re

#: Longest duration accepted: a year. More is a typing error.
MAX_DURATION_S = 365 * 24 * 3600.0

#: What may be typed where a duration is wanted; part of every refusal.
VALID_DURATION = "minutes as a number (5), or text such as 30s, 2h, 1h30m; above 0 and at most one year"

_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_NUMBER = r"\d{1,12}(?:\.\d{1,9})?"
_PLAIN = re.compile(rf"[+-]?{_NUMBER}", re.ASCII)
_WITH_UNITS = re.compile(
    rf"(?:(?P<d>{_NUMBER})d)?\s*(?:(?P<h>{_NUMBER})h)?\s*(?:(?P<m>{_NUMBER})m)?\s*(?:(?P<s>{_NUMBER})s)?", re.ASCII
)


def parse_duration(text: str | int | float) -> float:
    """Return the seconds that `text` means; a plain number is minutes.

    Raises:
        ValueError: not a duration, not above zero, or longer than a year; the text says what is valid.
    """
    seconds = _seconds(text)
    if seconds is None or math.isnan(seconds):
        raise ValueError(f"{_shown(text)} is not a duration; valid: {VALID_DURATION}")
    if seconds <= 0:
        raise ValueError(f"{_shown(text)} is not longer than nothing; valid: {VALID_DURATION}")
    if seconds > MAX_DURATION_S:
        raise ValueError(f"{_shown(text)} is longer than a year; valid: {VALID_DURATION}")
    return seconds


def format_duration(seconds: float) -> str:
    """Return `seconds` for people: `45s`, `5m`, `1h 30m`; below a minute with tenths where there are any.

    Parts of a second are dropped from a minute on. Infinite, negative and NaN are shown as `–`, like any value
    that is not known.
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


def _seconds(text: str | int | float) -> float | None:
    """Return the seconds meant, out of range or not; `None` where nothing can be read."""
    if isinstance(text, bool):
        return None
    if isinstance(text, int):
        # Beyond these bounds it is refused anyway, and too large an int does not convert.
        return float(min(max(text, -1), int(MAX_DURATION_S))) * 60.0
    if isinstance(text, float):
        return text * 60.0
    return _seconds_typed(text.strip().lower())


def _seconds_typed(typed: str) -> float | None:
    # No duration needs 60 characters; the bound keeps hostile text away from the pattern.
    found = _WITH_UNITS.fullmatch(typed) if 0 < len(typed) <= 60 else None
    if found is not None:
        return sum(float(count) * _UNITS_S[unit] for unit, count in found.groupdict().items() if count is not None)
    return float(typed) * 60.0 if len(typed) <= 60 and _PLAIN.fullmatch(typed) else None


def _shown(text: str | int | float) -> str:
    if isinstance(text, int) and abs(text) >= 10**18:
        return "a number of more than 18 digits"
    whole = repr(text)
    return whole if len(whole) <= 40 else f"{whole[:37]}…"
