"""Sends a command to the head of a run, and says why there is none if there is none."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.byte_size import parse_bytes
from orchestrator.control.listener import places, short_name
from orchestrator.control.wire import LINE_MOST_BYTES, Answer, WireError, answer_of, command_line
from orchestrator.core.user_commands import Command, Do
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.record.archive import read_run
from orchestrator.record.folders import go_on_command

#: Between two tries of a command whose answer was lost, or that found all of the head's connections
#: in use.
_AGAIN_S = 0.1


def send(
    folder: Path,
    do: str,
    slots: Sequence[str],
    *,
    by: str,
    amount_bytes: int | None = None,
    identity: str | None = None,
    timeout_s: float = 5.0,
) -> Answer:
    """Send a command to the head of a run folder and return its answer, or one that says why there
    is none.

    If an answer is lost, the command is sent again under the same id, and obeyed once. Every slot
    is named, none by a pattern. `do` is one of `Do`; `by` is the sending program, for the event
    log. `identity` is the id of a command that the caller may send again; default: a new one.
    """
    identity, until_s = identity or secrets.token_hex(8), time.monotonic() + timeout_s
    try:
        order = Do(do)
    except ValueError:
        error = one_line(f"no command {do[:40]!r}; valid: {', '.join(Do)}")
        return Answer(ok=False, id=identity, error=error)
    command = Command(id=identity, do=order, slots=tuple(slots), by=by, amount_bytes=amount_bytes)

    try:
        line = command_line(command)
        while True:
            try:
                answer = _answered(folder, line, until_s)
            except (BlockingIOError, ConnectionResetError, BrokenPipeError):
                if time.monotonic() + _AGAIN_S >= until_s:
                    raise
                time.sleep(_AGAIN_S)
            else:
                return answer
    except WireError as error:
        return Answer(ok=False, id=identity, error=str(error))
    except OSError:
        return Answer(ok=False, id=identity, error=_why_none(folder))


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


def _answered(folder: Path, line: bytes, until_s: float) -> Answer:
    """Send a line once.

    `OSError` if no head takes it, `ConnectionResetError` if the answer was lost.
    """
    place = next((place for place in places(folder) if place.is_socket()), None)
    if place is None:
        raise FileNotFoundError(folder)
    with socket.socket(socket.AF_UNIX) as connection, short_name(place) as name:
        connection.settimeout(max(_AGAIN_S, until_s - time.monotonic()))
        connection.connect(name)
        connection.sendall(line)
        content = b""
        while not content.endswith(b"\n") and len(content) <= LINE_MOST_BYTES:
            more = connection.recv(LINE_MOST_BYTES)
            if not more:
                raise ConnectionResetError
            content += more
    return answer_of(content)


def _why_none(folder: Path) -> str:
    """Say in a sentence why no head answers, and what to type."""
    try:
        run = read_run(folder)
    except ArchiveError as error:
        return str(error)
    name, host = run.facts.run_id, run.facts.host
    if run.outcome == "running":
        return (
            f"the head of run {name} did not answer: a run takes no commands while it starts or "
            "ends, nor if an older version started it; try again in a moment"
        )
    if host != socket.gethostname() and run.exit_code is None:
        return f"the head of run {name} is on {host}: type the command there"
    on = f"`{go_on_command(folder)}` continues it, and what it was told before still holds"
    return f"run {name} has no head any more ({run.outcome})" + (
        f": {on}" if run.is_resumable else "; it is over"
    )
