"""A member of a team as a process: the real engine, which reads its orders from a file."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.team import tasks
from workers.engine.engine import Engine
from workers.messages import Begin, Orders, TeamOrders, Verdict
from workers.team import place, tensors, wire
from workers.team.desk import Desk
from workers.team.wire import Connection, Frame
from workers.training.checkpoints import weights_sha256
from workers.training.trainer import MicroBatch, Trainer

CODE = "import sys\nfrom tests.team.process import main\nmain(sys.argv[1])\n"


class Channel:
    """Reads orders from a file, and writes statuses to another."""

    def __init__(self, folder: Path, slot: str) -> None:
        self._orders, self._status = folder / f"{slot}.orders", folder / f"{slot}.json"
        self._read = 0

    def orders(self) -> Orders:
        """Return the newest orders."""
        try:
            self._read = self._orders.stat().st_mtime_ns
            said = json.loads(self._orders.read_text())
        except OSError:
            return Orders()
        rests = said.pop("rests")  # a resting member first saves its state, as in a run
        team = TeamOrders(**{**said, "secret": bytes.fromhex(said["secret"])})
        return Orders(team=team, saves=int(rests), holds=rests)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for new orders; return whether there are any."""
        until_s = time.monotonic() + seconds
        while not (self._orders.exists() and self._orders.stat().st_mtime_ns != self._read):
            if time.monotonic() >= until_s:
                return False
            time.sleep(min(0.005, max(0.0, until_s - time.monotonic())))
        return True

    def tell(self, status: dict[str, Any]) -> None:
        """Write a status."""
        half = self._status.with_suffix(".half")
        half.write_text(json.dumps(status))
        half.replace(self._status)


def main(given: str) -> None:
    """Run the engine until the training is done."""
    folder, spec, pace, incarnation, seed, inside = pickle.loads(Path(given).read_bytes())  # noqa: S301 - ours
    if inside is not None:  # join the network of another process
        with Path(f"/proc/{inside}/ns/net").open() as there:
            ctypes.CDLL(None).setns(there.fileno(), 0)
    os.environ["ORCHESTRATOR_STATE_DIR"] = str(folder / "state")
    torch.set_num_threads(1)
    vars(tasks.PACE).update(pace)
    name = spec.slot.replace("/", "-")
    file = (folder / f"{name}.log").open("a", buffering=1)

    def log(**fields: Any) -> None:
        file.write(json.dumps(fields) + "\n")

    _observe(log, seed, folder / f"{name}.planted")
    if tasks.PACE.away_s is not None:
        vars(place)["AWAY_S"] = tasks.PACE.away_s
    if tasks.PACE.silent_s is not None:
        vars(wire)["SILENT_S"] = tasks.PACE.silent_s
    _hold_state(folder / "state.held")
    _die_inside(folder / f"{name}.dies")
    channel = Channel(folder, name)
    engine = Engine(spec, Begin(fresh=not incarnation), incarnation)
    while True:
        status = engine.turn(channel.orders(), 0.1, channel.wait)
        for event in status.events:
            log(**{"t": time.time(), "event": event.name, **event.detail})
        if status.error:
            log(error=status.error)
        team = None if status.team is None else asdict(status.team)
        channel.tell(
            {
                "pid": os.getpid(), "verdict": status.verdict, "reason": status.reason, "team": team,
                "rests": status.is_held and not status.save_due,
            }
        )  # fmt: skip
        if status.verdict is not Verdict.OK:
            break
    weights = None if status.progress is None else status.progress.weights_sha256
    log(end=status.verdict, reason=status.reason, weights=weights)


def _observe(log: Callable[..., None], seed: int | None, planted: Path) -> None:
    """Log each update. With a seed, draw the sizes of parts. Change a weight if the file `planted`
    exists.
    """
    finish, part, rng = Trainer.finish, Desk.part, random.Random(seed)  # noqa: S311

    def finished(self: Trainer, *agreed: Any) -> None:
        rows = self.done_rows
        finish(self, *agreed)
        if planted.exists():
            planted.unlink()
            with torch.no_grad():
                self.parameters[0].view(-1)[3] += 1e-3
        sha = weights_sha256(self.model.state_dict())[:16]
        log(t=time.time(), step=self.step, loss=self.course.losses[-1], sha=sha, rows=rows)

    def drawn(self: Desk, most_rows: int, level: int) -> MicroBatch | None:
        return part(self, rng.randint(1, most_rows) if seed else most_rows, level)

    Trainer.finish, Desk.part = finished, drawn  # type: ignore[method-assign]


def _hold_state(held: Path) -> None:
    """Delay a state while the file `held` exists; make a file `.waits` while a state is delayed."""
    send = tensors.send

    def sent(connection: Connection, state: Mapping[str, Any]) -> None:
        while held.exists():
            held.with_suffix(".waits").touch()
            time.sleep(0.01)
        send(connection, state)

    vars(tensors)["send"] = sent


def _die_inside(planted: Path) -> None:
    """Kill this process at a random chunk of the next sums if the file `planted` exists. The kill
    sets the time of the file.
    """
    receive_chunk = Connection.receive_chunk

    def received(self: Connection, view: memoryview, frame: Frame) -> None:
        if planted.exists() and random.random() < 0.3:  # noqa: S311 - no secret
            planted.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        receive_chunk(self, view, frame)

    Connection.receive_chunk = received  # type: ignore[method-assign]
