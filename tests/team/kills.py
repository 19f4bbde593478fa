"""Measures the faults that a team survives. Started by hand, because it takes minutes.

    python -m tests.team.kills kills [SECONDS] [SEED]   # three members; a third of kills in the sums
    python -m tests.team.kills stop             # SIGSTOP for 10 s, of a helper and of the leader
    python -m tests.team.kills cable [SECONDS]  # cut between two network namespaces; needs root
    python -m tests.team.kills strangers        # 198 at the port, and 1 GiB of noise
    python -m tests.team.kills slow             # a member slowed 3x, in turns with DDP

Each trial prints figures. The head is a stand-in (`scene.py`).
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.fork_server import ForkServer
from tests.scene import ROOT
from tests.team import tasks
from tests.team.scene import MODULES, Team, member_spec
from tests.team.test_team import Killer, alone, strangers_come
from workers.training.settings import TrainSettings

WIDE: dict[str, Any] = {"preset": "tests.team.tasks:wide", "batch": 8, "save_every_s": 0.5}


@contextmanager
def team_of(members: int, **how: Any) -> Iterator[Team]:
    """A team of real processes, which end with the block."""
    server = ForkServer(*MODULES)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Team(server, Path(folder), members, **how) as team,
        ):
            yield team
    finally:
        server.close()


class ThirdInSums(Killer):
    """Makes every third victim die inside the sums, and records the time of each death."""

    def __init__(self, team: Team, seed: int) -> None:
        super().__init__(team, 10**6, "anybody", seed, least=len(team.members))
        self.killed: list[tuple[str, float]] = []

    def kill(self, slot: str) -> None:
        """Kill the process of a slot."""
        role, at_s = self.team.role(slot), time.time()
        if len(self.killed) % 3 == 0:
            planted = self.team.folder / f"{slot.replace('/', '-')}.dies"
            planted.touch()
            self.team.until(lambda: not self.team.alive(slot))
            role, at_s = f"{role} inside the sums", planted.stat().st_mtime
            planted.unlink()
        else:
            super().kill(slot)
        self.killed.append((role, at_s))


def ends(team: Team) -> dict[int, float]:
    """Return the Unix time in seconds at which each step was first done, keyed by step."""
    first: dict[int, float] = {}
    for slot in team.members:
        for each in team.steps(slot):
            first[each["step"]] = min(each["t"], first.get(each["step"], each["t"]))
    return first


def pauses(team: Team, moments: list[float]) -> list[float]:
    """Return the longest wait for one of the three new steps after each moment."""
    found, done = [], sorted(ends(team).values())
    for at_s in moments:
        after = [at_s, *[end for end in done if end > at_s][:3]]
        found.append(max(later - earlier for earlier, later in itertools.pairwise(after)))
    return found


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201 - its purpose


def told(what: str, seconds: list[float]) -> None:
    """Print the median and the maximum of some times."""
    say(
        f"{what}: {len(seconds)}, median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s"
    )


def kills(seconds: int = 240, seed: int = 1) -> None:
    """Kill members at random moments for `seconds`, every third one inside the sums."""
    until_s = time.monotonic() + seconds
    keys = {**WIDE, "steps": 100_000}
    with team_of(3, paces={each: {"row_s": 0.01} for each in range(3)}, **keys) as team:
        killer = ThirdInSums(team, seed)
        team.until(lambda: time.monotonic() >= until_s, killer)
        killer.left = 0
        team.until(lambda: all(map(team.is_in, team.members)), killer)
        at = team.step()
        team.until(lambda: team.step() >= at + 5)
        for role in sorted({role for role, _ in killer.killed}):
            moments = [at_s for each, at_s in killer.killed if each == role]
            told(f"{role} killed, next step", pauses(team, moments))
        shas = team.shas()
        differ = sum(len(set(each.values())) > 1 for each in shas.values())
        say(f"{len(killer.killed)} kills in {len(shas)} steps; in {differ} of them weights differ")
        say(f"rows lacking or twice: {len(team.events('team_rows'))}")
        losses = [
            (each["step"], each["loss"]) for slot in team.members for each in team.steps(slot)
        ]
        one, control = (alone(micro, max(losses)[0], **keys) for micro in (8, 5))
        gap = max(abs(loss - one[step - 1]) for step, loss in losses)
        say(f"loss gap {gap:.2g}, control {max(map(abs, map(float.__sub__, one, control))):.2g}")


def away(
    team: Team, seconds: float, leave: Callable[[str], None], come: Callable[[str], None]
) -> None:
    """Make a helper unreachable for a time, and then the leader; print the lost time."""
    for role in ("helper", "leader"):
        at = team.step()
        team.until(lambda at=at: team.step() > at + 20)  # type: ignore[misc]
        slot = next(each for each in team.members if team.role(each) == role)
        at_s = time.time()
        leave(slot)
        team.stopped.add(slot)
        team.until(lambda at_s=at_s: time.time() > at_s + seconds)  # type: ignore[misc]
        others = max(team.steps(each)[-1]["step"] for each in team.members if each != slot)
        joined, back_s = len(team.events("team_joined")), time.time()
        come(slot)
        team.hears_again(slot)
        team.until(lambda joined=joined: len(team.events("team_joined")) > joined)  # type: ignore[misc]
        say(f"{slot} back after {time.time() - back_s:.2f} s")
        at = team.step() + 1
        team.until(lambda at=at: len(team.shas().get(at, ())) == len(team.members))  # type: ignore[misc]
        what = f"{slot} away for {seconds:g} s, others at step {others}, next step"
        told(what, pauses(team, [at_s]))
        weights, sent = set(team.shas()[at].values()), team.events("team_joined")[-1]["state_sent"]
        say(f"weights after it: {len(weights)}; states sent: {sent}")


def stop() -> None:
    """Stop a helper, and then the leader, for 10 s."""
    with team_of(3, paces={each: {"row_s": 0.002} for each in range(3)}, steps=10**6) as team:
        away(
            team, 10.0, lambda slot: team.kill(slot, signal.SIGSTOP),
            lambda slot: team.kill(slot, signal.SIGCONT),
        )  # fmt: skip


def cable(seconds: float = 6.0) -> None:
    """Cut the cable of a helper, and then the cable of the leader."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from benches.cable import Switch

    with ExitStack() as stack:
        addresses = {f"pc{number}": f"10.77.0.{number + 1}" for number in range(3)}
        switch = Switch(stack, addresses)
        networks = {
            number: (switch.inside[pc], address)
            for number, (pc, address) in enumerate(addresses.items())
        }
        paces = {each: {"row_s": 0.002} for each in range(3)}
        team = stack.enter_context(team_of(3, paces=paces, networks=networks, steps=10**6))
        away(
            team, seconds, lambda slot: switch.cut(slot.partition("/")[0]),
            lambda slot: switch.plug(slot.partition("/")[0]),
        )  # fmt: skip


def strangers(rounds: int = 6) -> None:
    """Send 33 strangers in each round, and 1 GiB of noise, to the port of the leader."""
    with team_of(2, paces={each: {"row_s": 0.002} for each in range(2)}, steps=10**6) as team:
        team.until(lambda: team.step() > 50)
        address = team.status(team.leader)["team"]["listens"]
        host, port = address.split(":")
        noise, sent, before, began_s = os.urandom(1 << 20), 0, team.step(), time.time()
        for _ in range(rounds):
            strangers_come(address)
        while sent < 1 << 30:
            with closing(socket.create_connection((host, int(port)))) as end, suppress(OSError):
                while True:
                    sent += end.send(noise)
        took_s, at = time.time() - began_s, team.step()
        team.until(lambda: team.step() > at + 20)
        refused = team.events("team_refused")
        say(f"{sent} bytes of noise and others in {took_s:.1f} s, {at - before} steps meanwhile")
        say(f"refused: {sum(each['count'] for each in refused)}")
        say(f"lost members: {len(team.events('team_lost'))}")
        say("\n".join(sorted({each["reason"] for each in refused})))


def slow(rounds: int = 2) -> None:
    """Slow a member by a factor of 3, in turns with DDP, whose shares are equal."""
    batch, steps = 24, 40
    for _ in range(rounds):
        for slowed in (0, 1):
            paces = {slowed: {"row_s": 0.03}, 1 - slowed: {"row_s": 0.01}}
            with team_of(2, paces=paces, steps=steps, batch=batch) as team:
                team.run()
                first = ends(team)
                rows = [sum(one["rows"] for one in team.steps(slot)[10:]) for slot in team.members]
            took = {step: first[step] - first[step - 1] for step in range(11, steps + 1)}
            # Each 2^n-th batch also checks whether its parts add up, which is slowed as well.
            usual = [took[step] for step in took if step & (step - 1)]
            ideal_s = batch / (1 / 0.03 + 1 / 0.01)
            middle, mean = statistics.median(took.values()), statistics.mean(took.values())
            say(
                f"slow {'leader' if slowed == 0 else 'helper'}: its share {rows[slowed] / sum(rows):.3f}, "
                f"step to ideal: median {middle / ideal_s:.2f}, mean {mean / ideal_s:.2f}, without looks "
                f"{statistics.mean(usual) / ideal_s:.2f}, which is {statistics.mean(usual):.3f} s"
            )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(ddp_member, (port, batch, steps), nprocs=2)  # type: ignore[no-untyped-call]


def ddp_member(rank: int, port: int, batch: int, steps: int) -> None:
    """Run one process of DDP."""
    torch.set_num_threads(1)
    tasks.PACE.row_s = (0.03, 0.01)[rank]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    spec = member_spec("pc0/0", ["pc0/0"], {"batch": batch})
    settings = TrainSettings.model_validate(spec.workload.settings)
    task = tasks.gpt(settings)
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.AdamW(model.parameters())
    took, rows = [], batch // 2
    for step in range(steps):
        began_s = time.perf_counter()
        first = step * batch + rank * rows
        samples = torch.stack(
            [task.dataset[(first + row) % len(task.dataset)] for row in range(rows)]
        )
        optimizer.zero_grad()
        task.loss(model, samples).backward()
        optimizer.step()
        took.append(time.perf_counter() - began_s)
    if rank == 0:
        say(
            f"DDP: step median {statistics.median(took[10:]):.3f} s, mean {statistics.mean(took[10:]):.3f} s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    torch.set_num_threads(1)  # more threads would wait for each other beside the members
    trials: dict[str, Callable[..., None]] = {
        each.__name__: each for each in (kills, stop, cable, strangers, slow)
    }
    trials[name](*map(int, rest))
