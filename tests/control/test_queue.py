"""Messages to a queue: nothing is lost or half there, and only what a user may say is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from orchestrator.control.queue import NoMessageError, message_of, put, waiting
from orchestrator.jobs.model import AttemptStatus, JobOrder, Submitted, UserOrder
from orchestrator.record import command_file
from tests.jobs.scene import command, training


def submitted(name: str) -> Submitted:
    return Submitted(job=command(name), least_bytes=7)


SAID = UserOrder(id="m", order=JobOrder.HOLD, job="a", by="ann")
MEMBER = training("hp-0", sweep="hp", ranges={"train.lr": ("log", [1e-5, 1.0])}, seed=3)


def test_messages_come_as_they_were_in_the_order_of_their_putting(tmp_path: Path) -> None:
    trained = training("t", steps=9, after=("a",), overrides={"train.lr": 1e-4, "list": [1, "x"]})
    tool = command("b")
    assert tool.command is not None
    odd = replace(tool, command=replace(tool.command, argv=("cat", "\udcff")))
    messages = [
        (Submitted(job=odd),),
        (submitted("a"), Submitted(job=trained)),
        (SAID,),
        (Submitted(job=MEMBER), replace(SAID, job=None)),
    ]

    for message in messages:
        put(tmp_path, message)

    assert waiting(tmp_path) == [one for message in messages for one in message]
    assert MEMBER.awaits_settings


def told(**changes: Any) -> bytes:
    values = {"at_s": 1.0, "id": "m", "order": "hold", "job": "a", "by": "ann", **changes}
    return json.dumps([values]).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"hello", b"{}", b"[1]", b"[[]]", b"\xff", b"[" * 50_000),
        told(kind="Other"),
        told(order="explode"),
        told(job=7),
        told(at_s="soon"),
        b"[%s]" % TypeAdapter(AttemptStatus).dump_json(AttemptStatus(attempt=1)),
        json.dumps([{"at_s": 1.0, "job": {"name": "a", "id": "x", "kind": "train", "steps": "x"}}]),
    ],
)
def test_what_is_no_message_blocks_nothing(tmp_path: Path, content: bytes | str) -> None:
    raw = content.encode() if isinstance(content, str) else content
    with pytest.raises(NoMessageError):
        message_of(raw)
    command_file.put(tmp_path, raw, identity="x")
    put(tmp_path, [SAID])

    assert waiting(tmp_path) == [SAID]
