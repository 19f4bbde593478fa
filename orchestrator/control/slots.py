"""Commands to the slots of a running run: how they are sent, parsed, checked and answered.

The sender writes a file next to the run's store (`record/command_file.py`), and waits until the
store has the answer. A command names each of its slots, and changes all of them or none. A refusal
is one sentence that says what to type instead. Does not apply the resulting events to slots
(`core/lifecycle.py`).
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import (
    Capped,
    Event,
    HeadState,
    Held,
    Hold,
    Phase,
    Reinstated,
    SaveAsked,
    Slot,
    Unheld,
)
from orchestrator.errors import ArchiveError, UsageError, in_words, one_line
from orchestrator.record.archive import read_answer, read_run
from orchestrator.record.command_file import put
from orchestrator.record.folders import go_on_command
from workers.units import MIB

#: Most characters of an id, a slot's name, or the sender's name.
_TEXT_MOST: Final = 200
_POLL_EVERY_S: Final = 0.02
_PATIENCE_S: Final = 5.0


class Do(StrEnum):
    """The action of a command."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    DRAIN = "drain"
    REINSTATE = "reinstate"
    CAP = "cap"
    SAVE = "save"


#: The effect on each slot, as shown to the user once the head has accepted the command.
EFFECTS: Final[Mapping[Do, str]] = {
    Do.PAUSE: "held when its step ends; its process and its memory stay",
    Do.UNPAUSE: "gets work again",
    Do.DRAIN: "held when its step ends; then its process ends, and its memory is free",
    Do.REINSTATE: "starts again; its failures are forgotten",
    Do.CAP: "capped from its next step on",
    Do.SAVE: "saves its state as soon as it can",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A user's command to some slots of a running run."""

    id: str
    """Chosen by the sender: a command that arrives twice is obeyed once."""
    do: Do
    slots: tuple[str, ...]
    by: str
    """The sending program, such as `top`."""
    amount_bytes: int | None = None
    """The cap; for CAP only."""


class CommandRefusedError(ValueError):
    """A command that is invalid or cannot be obeyed; the text says what to type instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The head's answer to a command."""

    ok: bool
    id: str
    effect: str = ""
    """The effect on each slot."""
    error: str | None = None
    """Why the command was refused, and what to type instead; `None`: it was accepted."""


_COMMAND: Final = TypeAdapter(Command)
_AMOUNT: Final = TypeAdapter(Annotated[ByteSize, Field(gt=0, lt=2**63)])


def command_of(content: bytes) -> Command:
    """Return the command in the content of a file; `CommandRefusedError` if it is invalid."""
    try:
        command = _COMMAND.validate_json(content, strict=True, extra="forbid")
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "a command"
        raise CommandRefusedError(one_line(f"{where[:80]}: {first['msg']}")) from failure
    for name, texts in (("id", [command.id]), ("by", [command.by]), ("slots", command.slots)):
        if not texts or not all(0 < len(it) <= _TEXT_MOST and it.isprintable() for it in texts):
            raise CommandRefusedError(f"{name}: a printable text has 1 to {_TEXT_MOST} characters")
    if (command.amount_bytes is not None) != (command.do is Do.CAP):
        raise CommandRefusedError("`cap` needs `amount_bytes`, and no other command has it")
    return command


def events_of(
    command: Command,
    slots: Mapping[str, Slot],
    plans: Mapping[str, SlotPlan],
    *,
    is_ending: bool = False,
    queued: Collection[str] = (),
) -> tuple[tuple[str, Event], ...]:
    """Return the event of a command for each of its slots.

    `is_ending`: the run is ending. `queued` are slots of jobs that have no place, or must leave it;
    only the queue decides when these work. `CommandRefusedError`: the command is impossible for one
    of the slots, and no slot changes.
    """
    if is_ending:
        raise CommandRefusedError("the run is ending: nothing can be changed any more")
    if unknown := [name for name in command.slots if name not in slots]:
        lists = "`python -m orchestrator top --once` lists its slots"
        raise CommandRefusedError(one_line(f"this run has no slot {unknown[0][:80]!r}; {lists}"))
    for name in command.slots:
        if name in queued:
            raise CommandRefusedError(
                f"{name} is a job without a place on a card: `python -m orchestrator jobs show "
                f"{name}` says why, and `jobs release` or `jobs retry` lets it continue"
            )
        why_not = _why_not(command, slots[name], plans[name])
        if why_not:
            raise CommandRefusedError(f"{name} {why_not}; nothing was changed")
    return tuple((name, _event(command, plans[name])) for name in dict.fromkeys(command.slots))


def _event(command: Command, plan: SlotPlan) -> Event:
    match command.do:
        case Do.PAUSE:
            return Held(hold=Hold.PAUSE)
        case Do.DRAIN:
            return Held(hold=Hold.DRAIN)
        case Do.UNPAUSE:
            return Unheld()
        case Do.REINSTATE:
            return Reinstated()
        case Do.CAP:
            # A cap at the budget lifts the cap. Whole MiB are compared: few budgets are whole MiB.
            is_budget = (command.amount_bytes or 0) // MIB == plan.spec.budget_bytes // MIB
            return Capped(cap_bytes=None if is_budget else command.amount_bytes)
        case Do.SAVE:
            return SaveAsked()


def _why_not(command: Command, slot: Slot, plan: SlotPlan) -> str:
    """Return why a command cannot be obeyed; empty if it can."""
    name, is_held = slot.slot, slot.orders.hold is not None
    if slot.phase is Phase.DONE:
        return "has finished its work, and gets no more"
    if command.do is Do.CAP:
        return _why_no_cap(command.amount_bytes or 0, plan)
    if (command.do is Do.REINSTATE) != (slot.phase is Phase.QUARANTINED):
        if slot.phase is Phase.QUARANTINED:
            return f"is QUARANTINED: `reinstate {name}` starts it again"
        what_then = f"`unpause {name}` sends it work" if is_held else "it needs no reinstating"
        return f"is {slot.state}, not QUARANTINED: {what_then}"
    if command.do is Do.UNPAUSE and not is_held:
        return f"is {slot.state}, and not held: it gets work already"
    return _why_no_save(slot, plan) if command.do is Do.SAVE else ""


def _why_no_cap(amount_bytes: int, plan: SlotPlan) -> str:
    budget_mib = plan.spec.budget_bytes // MIB
    if not plan.spec.follows_memory:
        policy = plan.spec.policy
        return f"cannot be capped under the policy {policy}: run with --set memory.policy=adaptive"
    if not 1 <= amount_bytes // MIB <= budget_mib:
        return f"has a budget of {budget_mib} MiB: type an amount from 1MiB to {budget_mib}MiB"
    return ""


def _why_no_save(slot: Slot, plan: SlotPlan) -> str:
    if plan.spec.command is not None:
        return f"runs a program that saves when it ends: `drain {slot.slot}` makes it save and end"
    if slot.orders.hold is not None:
        return f"is held and does no work that it could save: `unpause {slot.slot}` first"
    if slot.phase is not Phase.WORKING or isinstance(slot.state, HeadState):
        return f"has no process at work ({slot.state}): wait until it runs"
    if slot.status is None or slot.status.progress is None:
        return "keeps no state that could be saved: only a training does"
    return ""


def send(
    folder: Path,
    do: Do,
    slots: Sequence[str],
    *,
    by: str,
    amount_bytes: int | None = None,
    identity: str | None = None,
) -> Answer:
    """Send a command to the head of a run folder, and return its answer, or one that says why there
    is no answer.

    `slots` are full names, not patterns. `by` is the sending program, for the event log. Of
    commands with the same `identity` only the first is obeyed, and all get its answer; by default
    each call has its own. The head ignores a command that is more than `_PATIENCE_S` old.
    """
    identity = identity or secrets.token_hex(8)
    command = Command(id=identity, do=do, slots=tuple(slots), by=by, amount_bytes=amount_bytes)
    content, answer = json.dumps(asdict(command)).encode("ascii"), None
    try:
        if (why := _why_none(folder)) is None:
            put(folder, content, identity=identity, until_unix_s=time.time() + _PATIENCE_S)
            answer = _answered(folder, identity, time.monotonic() + _PATIENCE_S)
            why = _why_none(folder)
    except OSError as failure:
        why = f"no command can be written to {folder}: {failure.strerror}"
    except ArchiveError as failure:
        why = str(failure)
    silent = (
        f"the head of run {folder.name} did not answer: a run takes no commands while it starts or "
        "ends; try again in a moment"
    )
    return answer or Answer(ok=False, id=identity, error=why or silent)


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` means: `2GiB`, `900 MiB`, or bytes as a number.

    `ValueError` says what would be valid.
    """
    try:
        return int(_AMOUNT.validate_python(text[:60]))
    except ValidationError:
        raise ValueError(
            f"{in_words(text)} is not an amount of memory; valid: 2GiB, 900MiB, or a byte count"
        ) from None


def command(folder: Path, do: str, slots: Sequence[str], amount: str | None = None) -> str:
    """Send a command, and return its effect on the slots; `UsageError` if it is refused."""
    try:
        amount_bytes = None if amount is None else parse_bytes(amount)
    except ValueError as error:
        raise UsageError(str(error)) from error
    answer = send(folder, Do(do), slots, by="command line", amount_bytes=amount_bytes)
    if not answer.ok:
        raise UsageError(answer.error or "the head has refused it")
    return f"{', '.join(slots)}: {answer.effect}"


def _answered(folder: Path, identity: str, until_s: float) -> Answer | None:
    """Return the stored answer once there is one; `None` at `until_s`, or if the head ends."""
    has_head = True
    while has_head and time.monotonic() < until_s:
        time.sleep(_POLL_EVERY_S)
        has_head = _why_none(folder) is None  # first: a head that ends may still have answered
        if (answer := read_answer(folder, identity)) is not None:
            return Answer(**answer)
    return None


def _why_none(folder: Path) -> str | None:
    """Return why a run has no head that could answer, and what to type; `None`: it has a head.

    `ArchiveError`: the run cannot be read.
    """
    run = read_run(folder)
    name, host = run.facts.run_id, run.facts.host
    if run.outcome == "running":
        return None
    if host != socket.gethostname() and run.exit_code is None:
        return f"the head of run {name} is on {host}: type the command there"
    on = f"`{go_on_command(folder)}` continues it, and earlier commands still hold"
    return f"run {name} has no head any more ({run.outcome})" + (
        f": {on}" if run.is_resumable else "; it is over"
    )
