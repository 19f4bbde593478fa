"""Commands to the run: what a key asks for, and the question that names each slot before anything
is sent. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.text import Text

from orchestrator.control.wire import Answer
from orchestrator.core.user_commands import EFFECTS, Do
from orchestrator.record.follow import Frame, Freshness
from orchestrator.view.cells import Glyphs
from orchestrator.view.phrases import counted
from workers.units import MIB


class Send(Protocol):
    """Sends a command to the head and waits for its answer."""

    def __call__(
        self, folder: Path, do: str, slots: Sequence[str], *, amount_bytes: int | None
    ) -> Answer:
        """Return what the head answered: `ok`, `effect` and `error`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A command that is not sent yet. Its slots stay those of the moment of the key."""

    do: str
    slots: tuple[str, ...]
    amount_bytes: int | None = None


def question_lines(ask: Ask, glyphs: Glyphs) -> list[Text]:
    """Return the question: what would happen, and a line for each slot."""
    amount = "" if ask.amount_bytes is None else f" at {ask.amount_bytes / MIB:.0f} MiB"
    return [
        Text(
            f"{ask.do} {counted(len(ask.slots), 'slot')}{amount}? y sends it, esc does not",
            "bold yellow",
        ),
        Text(f"each of them: {EFFECTS[Do(ask.do)]}", "dim"),
        *(Text(f"  {glyphs.clean(slot)}") for slot in ask.slots),
    ]


def refusal(*, can_send: bool, is_replay: bool, frame: Frame | None) -> str:
    """Return why no command can be sent now; empty if one can."""
    if not can_send:
        return "no commands: top was started with --read-only"
    if is_replay:
        return "no commands in a replay: t goes back to now"
    if frame is None or frame.freshness in {Freshness.ENDED, Freshness.HEAD_GONE}:
        return "no commands: this run has no head any more"
    return ""
