"""The verbs that send a command: `pause`, `resume`, `drain`, `reinstate`, `cap` and `save`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.byte_size import parse_bytes
from orchestrator.control.client import send
from orchestrator.errors import UsageError


def command(folder: Path, do: str, slots: Sequence[str], amount: str | None = None) -> str:
    """Send a command, and return what becomes of its slots; `UsageError` if it is refused."""
    try:
        amount_bytes = None if amount is None else parse_bytes(amount)
    except ValueError as error:
        raise UsageError(str(error)) from error
    answer = send(folder, do, slots, by="command line", amount_bytes=amount_bytes)
    if not answer.ok:
        raise UsageError(answer.error or "the head has refused it")
    return f"{', '.join(slots)}: {answer.effect}"
