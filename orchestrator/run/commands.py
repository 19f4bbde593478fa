"""Takes commands from the socket of a run, judges and records them, and answers once they are
stored.

What they do to a slot: `core/user_commands.py` and the lifecycle. The supervisor calls both methods
once a turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from orchestrator.control.listener import Connection, Listener
from orchestrator.control.wire import Answer, WireError, answer_from, command_of
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Event, Slot
from orchestrator.core.user_commands import EFFECTS, Command, RefusedError, events_of
from orchestrator.errors import NothingStoredError
from orchestrator.record.archive import read_answers
from orchestrator.record.store import COMMANDS_KNOWN, CommandRecord
from orchestrator.run.clock import Clock
from orchestrator.view.live import Outlets


def answers_before(folder: Path) -> dict[str, Answer]:
    """Return what earlier heads of a run answered last, by the ids of the commands."""
    answers = {}
    with suppress(NothingStoredError):
        for identity, told in read_answers(folder).items():
            with suppress(WireError):  # of another version
                answers[identity] = answer_from(told)
    return answers


class Commands:
    """Those of one run, until it is closed."""

    def __init__(
        self, folder: Path, outlets: Outlets, clock: Clock, answers: Mapping[str, Answer]
    ) -> None:
        """Listen in a run folder.

        `answers` are those that earlier heads gave, by the ids of the commands.
        """
        self._listener = Listener(folder)
        self.problem = self._listener.problem
        """Why none can come; `None` if they can."""
        self.close = self._listener.close
        self._outlets = outlets
        self._clock = clock
        self._answers = dict(answers)
        self._waiting: list[tuple[Connection, Answer]] = []

    def heard(
        self,
        slots: Mapping[str, Slot],
        plans: Mapping[str, SlotPlan],
        nodes: Collection[str],
        *,
        is_ending: bool,
    ) -> Iterator[tuple[str, Event]]:
        """Yield what happens to which slot; each is to happen before the next one is asked for.

        A command that comes twice gets the same answer, and nothing happens again.
        """
        for connection, line in self._listener.received():
            try:
                command = command_of(line)
            except WireError as error:
                self._waiting.append((connection, Answer(ok=False, id="", error=str(error))))
                continue
            if command.id not in self._answers:
                try:
                    events = events_of(command, slots, plans, nodes, is_ending=is_ending)
                    answer = Answer(ok=True, id=command.id, effect=EFFECTS[command.do])
                except RefusedError as error:
                    events, answer = (), Answer(ok=False, id=command.id, error=str(error))
                yield from events
                self._record(command, answer)
            self._waiting.append((connection, self._answers[command.id]))

    def answer(self) -> None:
        """Send the answers that wait; what they say is stored."""
        waiting, self._waiting = self._waiting, []
        for connection, answer in waiting:
            self._listener.answer(connection, answer)

    def _record(self, command: Command, answer: Answer) -> None:
        self._answers[command.id] = answer
        if len(self._answers) > COMMANDS_KNOWN:
            del self._answers[next(iter(self._answers))]
        told = asdict(command)
        at_unix_s = self._clock.unix_s()
        self._outlets.store.command(
            CommandRecord(**told, at_unix_s=at_unix_s, answer=asdict(answer))
        )
        slot = command.slots[0] if len(command.slots) == 1 else None
        said = {"effect": answer.effect} if answer.ok else {"refused": answer.error}
        self._outlets.events.write("command", slot=slot, **told, **said)
