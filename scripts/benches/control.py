"""How soon a head answers commands, and what lines that are none cost it.

The head is that of `viewers.py`. Windows in which nothing is sent, in which commands are, and in
which as many broken lines as it takes in are sent, take turns.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from benches.common import Child, Result, in_turn, percentile, progress
from benches.viewers import RUN_ID, head
from orchestrator.control.client import send
from orchestrator.control.ears import CONNECTIONS_MOST
from orchestrator.control.place import places, short_name
from orchestrator.record.archive import read_run

_WARM_UP_S: Final = 5.0
_PATIENCE_S: Final = 60.0
_TARGET_ANSWER_MS: Final = 250.0
_TARGET_TURN_MORE_MS: Final = 5.0
_COMMAND: Final = {"v": 1, "id": "x", "do": "pause", "slots": ["pc1/0"], "by": "bench"}


def run(workers: int, rounds: int, window_s: float, seed: int) -> Result:
    drawn = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    turns_ms: dict[str, list[float]] = {}
    answers_ms: list[float] = []
    refused: list[str] = []
    lines = 0
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = Path(parent) / RUN_ID
        folder.mkdir()
        with closing(Child("the head", head, folder, workers)) as supervised:
            time.sleep(_WARM_UP_S)

            def window(kind: str, act: Callable[[float], None]) -> None:
                supervised.send("begin")
                supervised.receive(_PATIENCE_S)
                act(time.monotonic() + window_s)
                supervised.send("end")
                _, turns_s = supervised.receive(_PATIENCE_S)
                turns_ms.setdefault(kind, []).append(1e3 * percentile(turns_s, 0.99))
                progress(f"{kind:>8}: turn p99 {turns_ms[kind][-1]:.2f} ms")

            def nothing(until_s: float) -> None:
                time.sleep(until_s - time.monotonic())

            def commands(until_s: float) -> None:
                for do in _alternately("pause", "resume", until_s=until_s):
                    began_s = time.monotonic()
                    answer = send(folder, do, ["pc1/0"], by="bench")
                    answers_ms.append(1e3 * (time.monotonic() - began_s))
                    if answer.error is not None:
                        refused.append(answer.error)

            def noise(until_s: float) -> None:
                nonlocal lines
                seeds = [drawn.random() for _ in range(2 * CONNECTIONS_MOST)]
                sent = [0] * len(seeds)

                def talk(number: int) -> None:
                    mine = random.Random(seeds[number])  # noqa: S311 - as above
                    while time.monotonic() < until_s:
                        sent[number] += _sent(folder, _broken(mine))

                threads = [
                    threading.Thread(target=talk, args=[number]) for number in range(len(seeds))
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                lines += sum(sent)

            acts = {"nothing": nothing, "commands": commands, "noise": noise}
            for number in range(rounds):
                in_turn(number, {kind: partial(window, kind, act) for kind, act in acts.items()})
            held = [slot.slot for slot in read_run(folder).slots if slot.orders]
    turns = {kind: statistics.median(told) for kind, told in turns_ms.items()}
    figures: dict[str, Any] = {
        "workers": workers,
        "rounds": rounds,
        "answers": len(answers_ms),
        "answer_p50_ms": statistics.median(answers_ms),
        "answer_p99_ms": percentile(answers_ms, 0.99),
        "target_answer_p99_ms": _TARGET_ANSWER_MS,
        "broken_lines": lines,
        **{f"turn_p99_ms_{kind}": told for kind, told in turns.items()},
        "turn_p99_more_ms": turns["noise"] - turns["nothing"],
        "target_turn_p99_more_ms": _TARGET_TURN_MORE_MS,
    }
    figures["target_met"] = (
        figures["answer_p99_ms"] <= _TARGET_ANSWER_MS
        and figures["turn_p99_more_ms"] <= _TARGET_TURN_MORE_MS
    )
    broken = [
        *refused[:3],
        *(f"{slot} has orders that no command gave" for slot in held if slot != "pc1/0"),
    ]
    return Result(bench="control", figures=figures, broken=broken)


def _alternately(*choices: str, until_s: float) -> Any:  # noqa: ANN401 - an iterator
    number = 0
    while time.monotonic() < until_s or number % len(choices):
        yield choices[number % len(choices)]
        number += 1


def _broken(drawn: random.Random) -> bytes:
    """Return a line that is no command: bytes, JSON of any kind, or a command with a wrong value or
    a cut.
    """
    kind = drawn.randrange(4)
    if kind == 0:
        return drawn.randbytes(drawn.randrange(2000)).replace(b"\n", b"") + b"\n"
    if kind == 1:
        return json.dumps(drawn.choice([None, 0, [], {}, "pause", [[]] * 500])).encode() + b"\n"
    if kind == 2:
        key = drawn.choice([*_COMMAND, "more"])
        return (
            json.dumps({**_COMMAND, key: drawn.choice([None, -1, [], "", "\x00", 2**70])}).encode()
            + b"\n"
        )
    line = json.dumps(_COMMAND).encode()
    return line[: drawn.randrange(len(line))] + b"\n"


def _sent(folder: Path, line: bytes) -> int:
    """Send a line and wait for what the head says; return 1 if it said something."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE_S)
        with short_name(places(folder)[0]) as name:
            connection.connect(name)
        connection.sendall(line)
        return int(bool(connection.recv(65_536)))
    return 0
