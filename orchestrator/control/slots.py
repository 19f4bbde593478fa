"""Commands to the slots of a running run: how one is sent, read, judged and answered.

The sender puts it as a file beside the run's store (`record/command_file.py`), and waits until the
store has its answer. A command names each slot that it is for. It changes all of them or none, with
one sentence about what to type instead. Does not say what the events that it means do to a slot
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

#: Of an id, of a slot's name, and of the name of the program.
_TEXT_MOST: Final = 200
_LOOK_EVERY_S: Final = 0.02
_PATIENCE_S: Final = 5.0


class Do(StrEnum):
    """What a command asks for."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    DRAIN = "drain"
    REINSTATE = "reinstate"
    CAP = "cap"
    SAVE = "save"


#: What becomes of each slot, once the command was taken.
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
    """What a user asks of some slots of a running run."""

    id: str
    """Made by the sender: a command that comes twice is obeyed once."""
    do: Do
    slots: tuple[str, ...]
    by: str
    """With what it was typed, such as `top`."""
    amount_bytes: int | None = None
    """Of CAP."""


class CommandRefusedError(ValueError):
    """A command that cannot be obeyed, or is none; its text says what to type instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a command."""

    ok: bool
    id: str
    effect: str = ""
    """What becomes of each slot."""
    error: str | None = None
    """Why it was refused, and what to type instead; `None` if it was taken."""


_COMMAND: Final = TypeAdapter(Command)
_AMOUNT: Final = TypeAdapter(Annotated[ByteSize, Field(gt=0, lt=2**63)])


def command_of(content: bytes) -> Command:
    """Return the command that a file holds; `CommandRefusedError` if it holds none."""
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
    """Return what happens to which slot; `is_ending` says so of the run. Of jobs that are `queued`
    the queue alone says when they work.

    `CommandRefusedError`: one of the slots cannot be treated so; then nothing happens to any.
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
                f"{name}` says why, and `jobs release` or `jobs retry` sends it on"
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
            # At the budget, which is seldom a whole number of MiB, there is nothing left to bound.
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
        return f"is {slot.state}, and not held: it gets work as it is"
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
        return f"runs a program that saves when it ends: `drain {slot.slot}` has it do that"
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
    """Send a command to the head of a run folder and return its answer, or one that says why there
    is none.

    Every slot is named, none by a pattern. `by` is the sending program, for the event log. Of
    commands with the same `identity` the first is obeyed, and all get its answer; default: a new
    one. After 5 s it is not obeyed any more.
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
            f"{in_words(text)} is no amount of memory; valid: 2GiB, 900MiB, or a number of bytes"
        ) from None


def command(folder: Path, do: str, slots: Sequence[str], amount: str | None = None) -> str:
    """Send a command, and return what becomes of its slots; `UsageError` if it is refused."""
    try:
        amount_bytes = None if amount is None else parse_bytes(amount)
    except ValueError as error:
        raise UsageError(str(error)) from error
    answer = send(folder, Do(do), slots, by="command line", amount_bytes=amount_bytes)
    if not answer.ok:
        raise UsageError(answer.error or "the head has refused it")
    return f"{', '.join(slots)}: {answer.effect}"


def _answered(folder: Path, identity: str, until_s: float) -> Answer | None:
    """Return the stored answer as soon as there is one; `None` at `until_s`, or without a head."""
    has_head = True
    while has_head and time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
        has_head = _why_none(folder) is None  # before the look at what it has stored
        if (told := read_answer(folder, identity)) is not None:
            return Answer(**told)
    return None


def _why_none(folder: Path) -> str | None:
    """Say why a run has no head that could answer, and what to type; `None` if it has one.

    `ArchiveError` where the run cannot be read.
    """
    run = read_run(folder)
    name, host = run.facts.run_id, run.facts.host
    if run.outcome == "running":
        return None
    if host != socket.gethostname() and run.exit_code is None:
        return f"the head of run {name} is on {host}: type the command there"
    on = f"`{go_on_command(folder)}` continues it, and what it was told before still holds"
    return f"run {name} has no head any more ({run.outcome})" + (
        f": {on}" if run.is_resumable else "; it is over"
    )
