"""Lines of the socket: what is a command, and that no line is anything else than a command or a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.control.wire import (
    Answer,
    WireError,
    answer_line,
    answer_of,
    command_line,
    command_of,
)
from orchestrator.core.user_commands import Command, Do

PAUSE = {"v": 1, "id": "a1", "do": "pause", "slots": ["pc1/3", "pc2/0"], "by": "top"}
WITHOUT = object()


def line(**changes: Any) -> bytes:
    told = {key: value for key, value in {**PAUSE, **changes}.items() if value is not WITHOUT}
    return json.dumps(told).encode() + b"\n"


def test_a_command_and_an_answer_come_through_as_they_were() -> None:
    paused = Command(id="a1", do=Do.PAUSE, slots=("pc1/3", "pc2/0"), by="top")
    assert command_of(line()) == paused == command_of(command_line(paused))
    capped = Command(id="x", do=Do.CAP, slots=("pc1/0",), by="web", amount_bytes=2**31)
    assert command_of(command_line(capped)) == capped
    for answer in (
        Answer(ok=True, id="x", effect="held"),
        Answer(ok=False, id="", error="no such slot"),
    ):
        assert answer_of(answer_line(answer)) == answer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v": 2}, "different versions"),
        ({"do": "stop"}, "pause, unpause, drain, reinstate, cap, save"),
        ({"slots": []}, "names each slot"),
        ({"slots": ["pc1/3", 7]}, "`slots` must be a printable text"),
        ({"id": "x" * 201}, "`id` must be a printable text of 1 to 200"),
        ({"by": "a\x1b[2J"}, "`by` must be"),
        ({"all": True}, "no key 'all'"),
        ({"amount_bytes": 5}, "no other command has it"),
        ({"do": "cap"}, "`cap` needs `amount_bytes`"),
        ({"do": "cap", "amount_bytes": 2.5}, "whole number"),
    ],
)
def test_what_is_no_command_is_refused_with_what_would_be_one(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(WireError, match=words):
        command_of(line(**changes))
