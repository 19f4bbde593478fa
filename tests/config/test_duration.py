"""Durations as typed and as shown."""

import math

import pytest

from orchestrator.config.duration import MAX_DURATION_S, format_duration, parse_duration


@pytest.mark.parametrize(
    ("typed", "seconds"),
    [
        (5, 300.0), (0.5, 30.0), ("5", 300.0), ("1.5", 90.0), ("30s", 30.0), ("2h", 7200.0), ("5m", 300.0),
        ("1h30m", 5400.0), ("1h 30m", 5400.0), (" 1H30M15S ", 5415.0), ("1d", 86_400.0), ("0.5h", 1800.0),
        ("365d", MAX_DURATION_S),
    ],
)  # fmt: skip
def test_what_may_be_typed(typed: str | float, seconds: float) -> None:
    assert parse_duration(typed) == seconds


@pytest.mark.parametrize(
    "typed",
    [
        *(0, -5, "0s", "-5", math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e300),
        *("366d", "999999999999h", "", "   ", "s", "5x", "30m1h", "1h-30m", "-30s", "nan", "1e3"),
        *(True, None, [5], "\u0665", "1h" + " " * 100_000 + "x", "9" * 100_000),
    ],
)
def test_a_refusal_says_what_was_typed_and_what_is_valid(typed: object) -> None:
    with pytest.raises(ValueError, match=r"is not a duration; valid: .*30s, 2h, 1h30m") as caught:
        parse_duration(typed)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (300, "5m"), (5400, "1h 30m"), (45, "45s"), (0, "0s"), (0.25, "0.2s"), (59.99, "59.9s"), (61.9, "1m 1s"),
        (3600, "1h"), (90_061, "1d 1h 1m 1s"),
        *((unknown, "–") for unknown in (math.inf, math.nan, -1)),  # noqa: RUF001  # the sign of the tables
    ],
)  # fmt: skip
def test_how_a_duration_is_shown(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown
