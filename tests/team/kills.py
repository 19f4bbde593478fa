"""What a team survives, measured. By hand, since it takes minutes.

    python -m tests.team.kills kills [SECONDS] [SEED]   # three members; a third of kills in the sums
    python -m tests.team.kills stop             # SIGSTOP for 10 s, of a helper and of the leader
    python -m tests.team.kills cable [SECONDS]  # cut between two network namespaces; needs root
    python -m tests.team.kills strangers        # 200 at the port, one with 1 GiB of noise
    python -m tests.team.kills slow             # a member slowed 3x, in turns with DDP

Each prints figures. The head is a stand-in (`scene.py`).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import statistics
import subprocess
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
from tests.team.scene import MODULES, SECRET, Team, member_spec
from tests.team.test_team import alone
from workers.team import wire
from workers.team.wire import Kind, LostError
from workers.training.settings import TrainSettings

WIDE: dict[str, Any] = {"preset": "tests.team.tasks:wide", "batch": 8, "save_every_s": 0.5}


@contextmanager
def team_of(members: int, **how: Any) -> Iterator[Team]:
    """Start a team, and end its processes."""
    server = ForkServer(*MODULES)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Team(server, Path(folder), members, **how) as team,
        ):
            yield team
    finally:
        server.close()


def pauses(team: Team, moments: list[float]) -> list[float]:
    """Return for each moment the longest of the waits for the three new steps that follow it."""
    first: dict[int, float] = {}
    for slot in team.members:
        for each in team.steps(slot):
            first[each["step"]] = min(each["t"], first.get(each["step"], each["t"]))
    found = []
    for at_s in moments:
        after = [at_s, *sorted(end for end in first.values() if end > at_s)[:3]]
        found.append(max(later - earlier for earlier, later in itertools.pairwise(after)))
    return found


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201 - its purpose


def told(what: str, seconds: list[float]) -> None:
    """Print the median and the most of some times."""
    if seconds:
        say(
            f"{what}: {len(seconds)}, median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s"
        )


def kills(seconds: int = 240, seed: int = 1) -> None:
    """Kill members at drawn moments for so long, every third one inside the sums."""
    draw, until_s = random.Random(seed), time.monotonic() + seconds  # noqa: S311 - no secrets
    keys = {**WIDE, "steps": 100_000}
    killed: list[tuple[str, float]] = []
    with team_of(3, paces={each: {"row_s": 0.01} for each in range(3)}, **keys) as team:

        def is_whole() -> bool:
            said = [team.status(slot) for slot in team.members]
            return all(each is not None and each["team"]["state"] != "REJOINING" for each in said)

        def passes(steps: int) -> None:
            at = team.step() + steps
            team.until(lambda: team.step() >= at)

        team.until(is_whole)
        while time.monotonic() < until_s:
            passes(draw.randint(2, 5))
            slot = draw.choice(team.members)
            role, inside = "leader" if slot == team.leader else "helper", ""
            if len(killed) % 3 == 0:
                (team.folder / f"{slot.replace('/', '-')}.dies").touch()
                team.until(lambda slot=slot: not team.alive(slot))  # type: ignore[misc]
                last = [each for each in team.log(slot) if "killed" in each][-1]
                at_s, inside = last["t"], " inside the sums" if last["inside"] else ""
            else:
                time.sleep(draw.uniform(0, 0.06))
                at_s = time.time()
                team.kill(slot)
            killed.append((role + inside, at_s))
            passes(3)
            team.start(slot)
            team.until(is_whole)
        passes(5)
        for role in sorted({role for role, _ in killed}):
            told(
                f"{role} killed, next step",
                pauses(team, [at for each, at in killed if each == role]),
            )
        shas: dict[int, set[str]] = {}
        losses: dict[int, list[float]] = {}
        for slot in team.members:
            for each in team.steps(slot):
                shas.setdefault(each["step"], set()).add(each["sha"])
                losses.setdefault(each["step"], []).append(each["loss"])
        differ = sum(len(each) > 1 for each in shas.values())
        say(f"{len(killed)} kills in {len(shas)} steps; steps in which weights differ: {differ}")
        say(f"rows lacking or twice: {len(team.events('team_rows'))}")
        one, control = (alone(micro, max(losses), **keys) for micro in (8, 5))
        gap = max(abs(loss - one[step - 1]) for step in losses for loss in losses[step])
        say(f"loss gap {gap:.2g}, control {max(map(abs, map(float.__sub__, one, control))):.2g}")


def away(team: Team, slot: str, seconds: float, leave: Any, come: Any) -> None:
    """Have a member away for so long; print what that costs."""
    at_s = time.time()
    leave()
    team.stopped.add(slot)
    team.until(lambda: time.time() > at_s + seconds)
    others = max(team.steps(each)[-1]["step"] for each in team.members if each != slot)
    joined, back_s = len(team.events("team_joined")), time.time()
    come()
    team.hears_again(slot)
    team.until(lambda: len(team.events("team_joined")) > joined)
    say(f"{slot} back after {time.time() - back_s:.2f} s")
    at = team.step()
    team.until(lambda: min(team.steps(each)[-1]["step"] for each in team.members) > at)
    shas = {
        each["sha"] for one in team.members for each in team.steps(one) if each["step"] == at + 1
    }  # fmt: skip
    told(f"{slot} away for {seconds:g} s, others at step {others}, next step", pauses(team, [at_s]))
    say(
        f"weights after it: {len(shas)}; states sent: {team.events('team_joined')[-1]['state_sent']}"
    )


def stop() -> None:
    """Stop a helper, and then the leader, for 10 s."""
    with team_of(3, paces={each: {"row_s": 0.002} for each in range(3)}, steps=10**6) as team:
        for who in ("helper", "leader"):
            at = team.step()
            team.until(lambda at=at: team.step() > at + 20)  # type: ignore[misc]
            slot = next(each for each in team.members if (each == team.leader) == (who == "leader"))
            away(
                team, slot, 10.0, lambda slot=slot: team.kill(slot, signal.SIGSTOP),
                lambda slot=slot: team.kill(slot, signal.SIGCONT),
            )  # fmt: skip


def cable(seconds: float = 6.0) -> None:
    """Cut the cable of a helper, and then that of the leader."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from benches.cable import _hold

    with ExitStack() as stack:
        switch, *inside = [_hold(stack) for _ in range(4)]

        def ip(where: int, words: str) -> None:
            subprocess.run(
                ["nsenter", f"--target={where}", "--net", "ip", *words.split()], check=True
            )

        ip(switch, "link add bridge type bridge")
        ip(switch, "link set bridge up")
        networks = {}
        for number, pc in enumerate(inside):
            networks[number] = pc, f"10.77.0.{number + 1}"
            ip(pc, f"link add eth0 type veth peer name pc{number} netns {switch}")
            ip(switch, f"link set pc{number} master bridge up")
            ip(pc, f"address add {networks[number][1]}/24 dev eth0")
            ip(pc, "link set eth0 up")
        paces = {each: {"row_s": 0.002} for each in range(3)}
        team = stack.enter_context(team_of(3, paces=paces, networks=networks, steps=10**6))
        for who in ("helper", "leader"):
            at = team.step()
            team.until(lambda at=at: team.step() > at + 20)  # type: ignore[misc]
            slot = next(each for each in team.members if (each == team.leader) == (who == "leader"))
            end = f"pc{team.members.index(slot)}"
            away(
                team, slot, seconds, lambda end=end: ip(switch, f"link set {end} down"),
                lambda end=end: ip(switch, f"link set {end} up"),
            )  # fmt: skip


def strangers(number: int = 200) -> None:
    """Have strangers at the port of the leader."""
    with team_of(2, paces={each: {"row_s": 0.002} for each in range(2)}, steps=10**6) as team:
        team.until(lambda: team.step() > 50)
        said = team.status(team.leader)
        assert said is not None
        address = said["team"]["listens"]
        host, port = address.split(":")
        noise, sent, before, began_s = os.urandom(1 << 20), 0, team.step(), time.time()
        for count in range(number):
            kind = count % 4
            if kind == 0:
                with suppress(LostError):
                    wire.connect(address, b"another secret")
            elif kind == 1:
                old = wire.connect(address, SECRET)
                old.tell(Kind.HELLO, 0, slot="pc1/0", generation=0, version=[0, 0], constant=0)
                assert "generation 0" in old.frame().said["reason"]
                old.release()
            else:
                with closing(socket.create_connection((host, int(port)))) as end, suppress(OSError):
                    end.sendall(noise[: count if kind == 2 else 1 << 20])
        while sent < 1 << 30:
            with closing(socket.create_connection((host, int(port)))) as end, suppress(OSError):
                while True:
                    sent += end.send(noise)
        took_s = time.time() - began_s
        at = team.step()
        team.until(lambda: team.step() > at + 20)
        refused = team.events("team_refused")
        say(
            f"{number} strangers and {sent} bytes of noise in {took_s:.1f} s, {at - before} steps meanwhile"
        )
        say(
            f"refused: {sum(each['count'] for each in refused)}; lost members: {len(team.events('team_lost'))}"
        )
        say("\n".join(sorted({each["reason"] for each in refused})))


def slow(rounds: int = 2) -> None:
    """Slow a member 3x, in turns with DDP, whose shares are equal."""
    batch, steps = 24, 40
    for _ in range(rounds):
        for slowed in (0, 1):
            paces = {slowed: {"row_s": 0.03}, 1 - slowed: {"row_s": 0.01}}
            with team_of(2, paces=paces, steps=steps, batch=batch) as team:
                team.run()
                first: dict[int, float] = {}
                for slot in team.members:
                    for one in team.steps(slot):
                        first[one["step"]] = min(one["t"], first.get(one["step"], one["t"]))
                rows = [sum(one["rows"] for one in team.steps(slot)[10:]) for slot in team.members]
            took = {step: first[step] - first[step - 1] for step in range(11, steps + 1)}
            # In each 2^n-th batch it is looked whether parts add up, which is slowed as well.
            usual = [took[step] for step in took if step & (step - 1)]
            ideal_s = batch / (1 / 0.03 + 1 / 0.01)
            middle, mean = statistics.median(took.values()), statistics.mean(took.values())
            say(
                f"slow {'leader' if slowed == 0 else 'helper'}: its share {rows[slowed] / sum(rows):.3f}, "
                f"step to ideal: median {middle / ideal_s:.2f}, mean {mean / ideal_s:.2f}, without looks "
                f"{statistics.mean(usual) / ideal_s:.2f}, which is {statistics.mean(usual):.3f} s"
            )
        ddp(batch, steps)


def ddp(batch: int, steps: int) -> None:
    """The same with DDP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = (
        "import sys; from tests.team.kills import ddp_member; ddp_member(*map(int, sys.argv[1:]))"
    )
    members = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, (rank, port, batch, steps))], cwd=ROOT
        )
        for rank in range(2)
    ]
    assert [each.wait() for each in members] == [0, 0]


def ddp_member(rank: int, port: int, batch: int, steps: int) -> None:
    """One process of it."""
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
    torch.set_num_threads(1)  # more wait for each other where members compute as well
    trials: dict[str, Callable[..., None]] = {
        each.__name__: each for each in (kills, stop, cable, strangers, slow)
    }
    trials[name](*map(int, rest))
