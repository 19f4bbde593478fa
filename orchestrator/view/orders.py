"""Gives a person's orders: those to slots are answered by the head, those to jobs wait for it.

`top` and the page send orders through here. Does not decide who may give one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.control import queue, slots
from orchestrator.core.user_commands import Do
from orchestrator.errors import ArchiveError, UsageError
from orchestrator.jobs.model import Said, Word
from orchestrator.record.jobs import QUEUE_NAME


def give(
    folder: Path,
    order: Do | Word,
    names: Sequence[str],
    amount_bytes: int | None = None,
    *,
    by: str,
    identity: str | None = None,
) -> str:
    """Give an order to slots (a `Do`) or jobs (a `Word`) of a run, each named, and return what
    becomes of them. `by` is the program that sends it. Of orders that come with the same
    `identity`, the first is obeyed alone; by default each has its own.

    Raises:
        UsageError: The head refuses it, or there is none.
        ArchiveError: Nothing can be left for the queue, or its folder is not to be trusted.
    """
    identity = identity or secrets.token_hex(8)
    if isinstance(order, Do):
        answer = slots.send(
            folder, order, names, by=by, amount_bytes=amount_bytes, identity=identity
        )
        if not answer.ok:
            raise UsageError(answer.error or "the head has refused it")
        return str(answer.effect)
    now_s = time.time()
    said = [
        Said(at_s=now_s, id=f"{identity}-{name}", word=order, job=name, by=by) for name in names
    ]
    try:
        queue.put(folder / QUEUE_NAME, said)
    except OSError as failure:
        raise ArchiveError(f"the queue cannot be told: {failure.strerror}") from failure
    return f"{order}: {', '.join(names)}"
