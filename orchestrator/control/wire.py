"""A command and its answer as they cross the socket of a head: one line of JSON each. Pure.

A line may come from any program of the user. Whatever is in it, the worst it can cause is a
`WireError`, whose text says what is wrong. Does not know which slots there are
(`core/user_commands.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from orchestrator.core.user_commands import Command, Do

VERSION: Final = 1
LINE_MOST_BYTES: Final = 64 * 1024
"""Of a line, with its end."""

#: Of an id, of a slot's name, and of the name of the program.
_TEXT_MOST: Final = 200

_KEYS: Final = frozenset({"v", *(item.name for item in fields(Command))})


class WireError(ValueError):
    """A line that is no command, or no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a command."""

    ok: bool
    id: str
    effect: str = ""
    """What becomes of each slot."""
    error: str | None = None
    """Why it was refused, and what to type instead; `None` if it was taken."""


def command_of(line: bytes) -> Command:
    """Return the command in a line; `WireError` if there is none."""
    told = _object(line)
    if told.get("v") != VERSION:
        raise WireError(
            f'a command has "v": {VERSION}; this head and what sends to it have different versions'
        )
    if unknown := sorted(told.keys() - _KEYS):
        raise WireError(
            f"a command has no key {unknown[0][:40]!r}; valid: {', '.join(sorted(_KEYS))}"
        )
    names = told.get("slots")
    try:
        do = Do(str(told.get("do")))
    except ValueError as error:
        raise WireError(f"`do` must be one of {', '.join(Do)}") from error
    if not isinstance(names, list) or not names:
        raise WireError("`slots` must be a list that names each slot")
    amount_bytes = told.get("amount_bytes")
    # bool is an int
    if amount_bytes is not None and type(amount_bytes) is not int:
        raise WireError("`amount_bytes` must be a whole number")
    if (amount_bytes is not None) != (do is Do.CAP):
        raise WireError("`cap` needs `amount_bytes`, and no other command has it")
    return Command(
        id=_text(told, "id"),
        do=do,
        slots=tuple(_text({"slots": name}, "slots") for name in names),
        by=_text(told, "by"),
        amount_bytes=amount_bytes,
    )


def answer_of(line: bytes) -> Answer:
    """Return the answer in a line; `WireError` if there is none."""
    return answer_from(_object(line))


def answer_from(told: Mapping[str, Any]) -> Answer:
    """Return the answer that some values make; `WireError` if they make none."""
    ok, effect, error = told.get("ok"), told.get("effect", ""), told.get("error")
    if not (isinstance(ok, bool) and isinstance(effect, str) and isinstance(error, str | None)):
        raise WireError("an answer has `ok`, and `effect` or `error`")
    return Answer(ok=ok, id=str(told.get("id")), effect=effect, error=error)


def command_line(command: Command) -> bytes:
    """Return a command as a line; `WireError` if it is too long."""
    line = _line({"v": VERSION, **asdict(command)})
    if len(line) > LINE_MOST_BYTES:
        raise WireError(
            f"a command with {len(command.slots)} slots is too long: name fewer of them at a time"
        )
    return line


def answer_line(answer: Answer) -> bytes:
    """Return an answer as a line."""
    return _line(asdict(answer))


def _line(values: dict[str, Any]) -> bytes:
    told = {key: value for key, value in values.items() if value is not None}
    return json.dumps(told, separators=(",", ":")).encode("ascii") + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as failure:
        raise WireError("the line is not JSON") from failure
    if not isinstance(told, dict):
        raise WireError("the line must be a JSON object")
    return told


def _text(told: dict[str, Any], key: str) -> str:
    value = told.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT_MOST or not value.isprintable():
        raise WireError(f"`{key}` must be a printable text of 1 to {_TEXT_MOST} characters")
    return value
