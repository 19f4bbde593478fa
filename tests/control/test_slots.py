"""Commands to slots: what is one, and that no row is anything else than a command or a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.control.slots import CommandRefusedError, command_of, parse_bytes

PAUSE = {"id": "a1", "do": "pause", "slots": ["pc1/3", "pc2/0"], "by": "top"}


def row(**changes: Any) -> bytes:
    return json.dumps({**PAUSE, **changes}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (row(do="stop"), "do: Input should be 'pause', 'unpause'"),
        (row(slots=[]), "slots: a printable text"),
        (row(slots=["pc1/3", 7]), r"slots\.1: Input should be a valid string"),
        (row(id="x" * 201), "id: a printable text has 1 to 200"),
        (row(by="a\x1b[2J"), "by: a printable"),
        (row(all=True), "all: Unexpected"),
        (row(amount_bytes=5), "no other command has it"),
        (row(do="cap"), "`cap` needs `amount_bytes`"),
        (row(do="cap", amount_bytes=2.5), "amount_bytes: Input should be a valid int"),
        (b"[" * 50_000, "a command: Invalid JSON"),
        (b"\xff\x00", "a command: Invalid JSON"),
    ],
)
def test_what_is_no_command_is_refused_with_what_would_be_one(content: bytes, words: str) -> None:
    with pytest.raises(CommandRefusedError, match=words):
        command_of(content)


@pytest.mark.parametrize(
    ("typed", "count"),
    [("2GiB", 2**31), (" 1.5 gib ", 3 * 2**29), ("900MiB", 900 * 2**20), ("12345", 12345)],
)
def test_an_amount_is_read_as_typed(typed: str, count: int) -> None:
    assert parse_bytes(typed) == count


@pytest.mark.parametrize("typed", ["", "0", "-1", "nan", "1e9", "2 apples", "9" * 400, str(2**63)])
def test_what_is_no_amount_is_refused_with_one(typed: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory; valid: 2GiB, 900MiB"):
        parse_bytes(typed)
