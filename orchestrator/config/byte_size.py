"""Amounts of memory as people type them: `2GiB`, `900 MiB`, or bytes as a number."""

from __future__ import annotations

import re

from orchestrator.config.duration import shown
from workers.units import GIB, MIB

_TYPED = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(|b|mib|gib)", re.ASCII)
_UNITS = {"": 1, "b": 1, "mib": MIB, "gib": GIB}


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` means; `ValueError` says what would be valid."""
    found = _TYPED.fullmatch(text[:60].strip().lower())
    amount = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
    if not 0 < amount < 2**63:
        raise ValueError(
            f"{shown(text)} is no amount of memory; valid: 2GiB, 900MiB, or a number of bytes"
        )
    return amount
