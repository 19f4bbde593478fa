"""A member of a team as a process: the real engine, whose orders come from a file."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.team import tasks
from workers.engine.engine import Engine
from workers.messages import Begin, Orders, TeamOrders, Verdict
from workers.team import place, tensors
from workers.team.desk import Desk
from workers.team.following import Following
from workers.team.leader import Leader
from workers.team.wire import Connection
from workers.training.checkpoints import weights_sha256
from workers.training.trainer import MicroBatch, Trainer

CODE = "import sys\nfrom tests.team.process import main\nmain(sys.argv[1])\n"


class Channel:
    """Orders that are read from a file, and statuses that are written to one."""

    def __init__(self, folder: Path, slot: str) -> None:
        self._orders, self._status = folder / f"{slot}.orders", folder / f"{slot}.json"
        self._read = 0

    def orders(self) -> Orders:
        """Return the newest."""
        try:
            self._read = self._orders.stat().st_mtime_ns
            said = json.loads(self._orders.read_text())
        except OSError:
            return Orders()
        rests = said.pop("rests")  # asked for its state before, as the head does
        team = TeamOrders(**{**said, "secret": bytes.fromhex(said["secret"])})
        return Orders(team=team, saves=int(rests), holds=rests)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for others."""
        until_s = time.monotonic() + seconds
        while True:
            try:
                if self._orders.stat().st_mtime_ns != self._read:
                    return True
            except OSError:
                pass
            if time.monotonic() >= until_s:
                return False
            time.sleep(min(0.005, max(0.0, until_s - time.monotonic())))

    def tell(self, status: dict[str, Any]) -> None:
        """Write it."""
        half = self._status.with_suffix(".half")
        half.write_text(json.dumps(status))
        half.replace(self._status)


def main(given: str) -> None:
    """Work until all is done."""
    folder, spec, pace, incarnation, seed, inside = pickle.loads(Path(given).read_bytes())  # noqa: S301 - ours
    if inside is not None:  # the network of another process
        with Path(f"/proc/{inside}/ns/net").open() as there:
            ctypes.CDLL(None).setns(there.fileno(), 0)
    os.environ["ORCHESTRATOR_STATE_DIR"] = str(folder / "state")
    torch.set_num_threads(1)
    vars(tasks.PACE).update(pace)
    name = spec.slot.replace("/", "-")
    log = (folder / f"{name}.log").open("a", buffering=1)
    _observe(log, seed, folder / f"{name}.planted")
    if tasks.PACE.away_s is not None:
        vars(place)["AWAY_S"] = tasks.PACE.away_s
    _slow_state()
    _die_inside(log, folder / f"{name}.dies")
    channel = Channel(folder, name)
    engine = Engine(spec, Begin(fresh=not incarnation), incarnation)
    while True:
        status = engine.turn(channel.orders(), 0.1, channel.wait)
        for event in status.events:
            log.write(json.dumps({"t": time.time(), "event": event.name, **event.detail}) + "\n")
        if status.error:
            log.write(json.dumps({"error": status.error}) + "\n")
        team = None if status.team is None else asdict(status.team)
        channel.tell(
            {
                "pid": os.getpid(), "verdict": status.verdict, "reason": status.reason, "team": team,
                "t": time.time(), "ooms": status.counts.steps_oom,
                "rests": status.is_held and not status.save_due,
            }
        )  # fmt: skip
        if status.verdict is not Verdict.OK:
            break
    weights = None if status.progress is None else status.progress.weights_sha256
    log.write(
        json.dumps({"end": status.verdict, "reason": status.reason, "weights": weights}) + "\n"
    )


def _observe(log: Any, seed: int | None, planted: Path) -> None:
    """Write down each update; draw the sizes of parts anew if there is a seed; change a weight where
    a file asks for it.
    """
    finish, part, rng = Trainer._finish, Desk.part, random.Random(seed)  # noqa: S311

    def finished(self: Trainer, *agreed: Any) -> None:
        rows = self.done_rows
        finish(self, *agreed)
        if planted.exists():
            planted.unlink()
            with torch.no_grad():
                self.parameters[0].view(-1)[3] += 1e-3
        sha = weights_sha256(self.model.state_dict())[:16]
        log.write(
            json.dumps(
                {
                    "t": time.time(),
                    "step": self.step,
                    "loss": self.course.losses[-1],
                    "sha": sha,
                    "rows": rows,
                }
            )
            + "\n"
        )

    def drawn(self: Desk, most_rows: int, level: int) -> MicroBatch | None:
        return part(self, rng.randint(1, most_rows) if seed else most_rows, level)

    Trainer._finish, Desk.part = finished, drawn  # type: ignore[method-assign]


def _slow_state() -> None:
    """Have the state take as long on the wire as is set."""
    send = tensors.send

    def slow(connection: Connection, state: Mapping[str, Any]) -> None:
        time.sleep(tasks.PACE.state_s)
        send(connection, state)

    vars(tensors)["send"] = slow


def _die_inside(log: Any, planted: Path) -> None:
    """Kill this process at a drawn moment of the next sums where a file asks for it."""
    summed, hand_over, update = Leader._summed, Following._hand_over, Following._update
    inside = [False]

    def die() -> None:
        log.write(json.dumps({"t": time.time(), "killed": True, "inside": inside[0]}) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def begin() -> None:
        inside[0] = True
        if planted.exists():
            planted.unlink()
            threading.Timer(random.uniform(0, 0.006), die).start()  # noqa: S311 - no secret

    def leads(self: Leader, *given: Any) -> Any:
        begin()
        try:
            return summed(self, *given)
        finally:
            inside[0] = False

    def follows(self: Following, round_: int) -> None:
        begin()
        hand_over(self, round_)

    def updates(self: Following, *given: Any) -> Any:
        inside[0] = False
        return update(self, *given)

    Leader._summed = leads  # type: ignore[method-assign]
    Following._hand_over, Following._update = follows, updates  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1])
