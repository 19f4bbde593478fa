"""Commands to the slots of a running run: how one is sent, read and answered.

The sender puts it as a file beside the run's store (`record/command_file.py`), and waits until the
store has its answer. Does not know which slots there are (`core/user_commands.py`).
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from orchestrator.core.user_commands import Command, Do
from orchestrator.errors import ArchiveError, UsageError, in_words, one_line
from orchestrator.record.archive import read_answers, read_run
from orchestrator.record.command_file import put
from orchestrator.record.folders import go_on_command

COMMAND_MOST_BYTES: Final = 64 * 1024
#: Of an id, of a slot's name, and of the name of the program.
_TEXT_MOST: Final = 200
_LOOK_EVERY_S: Final = 0.02


class NoCommandError(ValueError):
    """What is no command, with what would be one."""


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
    """Return the command that a file holds; `NoCommandError` if it holds none."""
    if len(content) > COMMAND_MOST_BYTES:
        raise NoCommandError(f"a command has at most {COMMAND_MOST_BYTES} bytes")
    try:
        command = _COMMAND.validate_json(content, strict=True, extra="forbid")
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "a command"
        raise NoCommandError(one_line(f"{where[:80]}: {first['msg']}")) from failure
    for name, texts in (("id", [command.id]), ("by", [command.by]), ("slots", command.slots)):
        if not texts or not all(0 < len(it) <= _TEXT_MOST and it.isprintable() for it in texts):
            raise NoCommandError(f"{name}: a printable text has 1 to {_TEXT_MOST} characters")
    if (command.amount_bytes is not None) != (command.do is Do.CAP):
        raise NoCommandError("`cap` needs `amount_bytes`, and no other command has it")
    return command


def send(
    folder: Path,
    do: Do,
    slots: Sequence[str],
    *,
    by: str,
    amount_bytes: int | None = None,
    identity: str | None = None,
    timeout_s: float = 5.0,
) -> Answer:
    """Send a command to the head of a run folder and return its answer, or one that says why there
    is none.

    Every slot is named, none by a pattern. `by` is the sending program, for the event log. Of
    commands with the same `identity` the first is obeyed, and all get its answer; default: a new
    one. After `timeout_s` it is not obeyed any more.
    """
    identity = identity or secrets.token_hex(8)
    command = Command(id=identity, do=do, slots=tuple(slots), by=by, amount_bytes=amount_bytes)
    content = json.dumps(asdict(command)).encode("ascii")
    if len(content) > COMMAND_MOST_BYTES:
        error = f"a command with {len(slots)} slots is too long: name fewer of them at a time"
        return Answer(ok=False, id=identity, error=error)

    answer = None
    try:
        if (why := _why_none(folder)) is None:
            put(folder, content, identity=identity, until_unix_s=time.time() + timeout_s)
            answer = _answered(folder, identity, time.monotonic() + timeout_s)
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
        if (told := read_answers(folder, identity).get(identity)) is not None:
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
