"""Teams of real processes, and a stand-in for their head: the member with the newest step leads."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.fork_server import Child, ForkServer
from tests.scene import MIB, ROOT, Patience, spec_of
from tests.team.process import CODE
from workers.settings import TeamSpec, WorkerSpec
from workers.training.settings import TrainSettings

#: The modules that a member imports beside torch.
MODULES = ("torch._dynamo", "pydantic", "psutil")

SECRET = bytes(range(32))


def member_spec(
    slot: str, members: Sequence[str], keys: dict[str, Any], address: str = "127.0.0.1"
) -> WorkerSpec:
    """Return the spec of one member."""
    settings = {
        "preset": "tests.team.tasks:gpt", "batch": 32, "steps": 40, "precision": "fp32",
        "save_every_s": 1e6, **keys,
    }  # fmt: skip
    usual = spec_of(name="train", policy="adaptive", budget_bytes=400 * MIB)
    return replace(
        usual,
        slot=slot,
        run_id="r",
        workers_on_host=64,
        team=TeamSpec(
            members=tuple(members),
            listen=f"{address}:0",
            split=keys.get("split", "data"),
            budgets_bytes=tuple(range(len(members), 0, -1)),
        ),
        workload=replace(
            usual.workload, settings=TrainSettings.model_validate(settings).model_dump()
        ),
    )


class Team:
    """The processes of one training, and a stand-in for their head."""

    def __init__(
        self, server: ForkServer, folder: Path, members: int = 2, seed: int | None = None,
        paces: dict[int, dict[str, Any]] | None = None,
        networks: dict[int, tuple[int, str]] | None = None, silent_s: float | None = None,
        **keys: Any,
    ) -> None:  # fmt: skip
        """`networks` has the process and the address of members in the network of another process;
        `silent_s` applies to all members.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.members = folder, [f"pc{number}/0" for number in range(members)]
        self._server, self._seed, self._keys, self._paces = server, seed, keys, paces or {}
        self._networks, self._silent_s = networks or {}, silent_s
        self.children: dict[str, Child] = {}
        self._incarnations = dict.fromkeys(self.members, -1)
        self.generation, self.leader = 0, ""
        self._named = "", ""
        self.able = self.members[:1] if keys.get("split") == "layers" else self.members
        """The members that may lead."""
        self.stopped: set[str] = set()
        self.resting: set[str] = set()
        """The members that must save and then rest."""
        self._logs: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    def __enter__(self) -> Team:
        for slot in self.members:
            self.start(slot)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGCONT)
            child.close()

    def start(self, slot: str) -> None:
        """Start the next process of a slot."""
        self._incarnations[slot] += 1
        given = self.folder / f"{self._name(slot)}.given"
        number = self.members.index(slot)
        inside, address = self._networks.get(number, (None, "127.0.0.1"))
        spec = member_spec(slot, self.members, self._keys, address)
        seed = None if self._seed is None else self._seed + 10 * number + self._incarnations[slot]
        pace = {"silent_s": self._silent_s, **self._paces.get(number, {})}
        given.write_bytes(
            pickle.dumps((self.folder, spec, pace, self._incarnations[slot], seed, inside))
        )
        (self.folder / f"{self._name(slot)}.json").unlink(missing_ok=True)
        if slot in self.children:
            self.children.pop(slot).close()
        self.children[slot] = self._server.start(CODE, str(given), cwd=ROOT)

    def kill(self, slot: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a slot."""
        os.kill(self.children[slot].pid, number)
        if number == signal.SIGSTOP:
            self.stopped.add(slot)
        if number == signal.SIGCONT:
            self.hears_again(slot)

    def hears_again(self, slot: str) -> None:
        """Send orders to a `stopped` slot again."""
        self.stopped.discard(slot)
        if self.generation:
            self.order(*self._named)

    def status(self, slot: str) -> dict[str, Any]:
        """Return the last status of the slot's present process; empty if it has sent none."""
        with suppress(OSError, ValueError):
            said = json.loads((self.folder / f"{self._name(slot)}.json").read_text())
            return said if said["pid"] == self.children[slot].pid else {}
        return {}

    def role(self, slot: str) -> str:
        """Return `leader` or `helper`."""
        return "leader" if slot == self.leader else "helper"

    def is_in(self, slot: str) -> bool:
        """Return whether the slot leads, or follows a leader."""
        team = self.status(slot).get("team") or {"state": "REJOINING"}
        return bool(team["state"] != "REJOINING")

    def alive(self, slot: str) -> bool:
        """Return whether the slot's process lives."""
        with suppress(psutil.Error):
            return psutil.Process(self.children[slot].pid).status() != psutil.STATUS_ZOMBIE
        return False

    def look(self) -> None:
        """Name another leader if there is none, as a head does."""
        teams = {
            slot: team
            for slot in self.able
            if self.alive(slot) and slot not in self.stopped
            and (team := self.status(slot).get("team")) and team["step"] is not None
        }  # fmt: skip
        if self.generation == 0 and len(teams) < len(self.able):
            return
        is_lost = (
            self.leader not in teams
            or teams[self.leader]["listens"] != self._named[1]
            or any(team["lost"] == self.generation for team in teams.values())
        )
        waiting = {
            slot: team for slot, team in teams.items()
            if team["lost"] == self.generation or team["state"] == "REJOINING"
        }  # fmt: skip
        if not is_lost or not waiting or (self.leader in teams and self.leader not in waiting):
            return
        self.generation += 1
        self.leader = max(
            waiting, key=lambda slot: (waiting[slot]["step"], -self.members.index(slot))
        )
        self.order(self.leader, waiting[self.leader]["listens"])

    def order(self, leader: str, address: str) -> None:
        """Name a leader to all reachable members."""
        self._named = leader, address
        said = {
            "generation": self.generation, "leader": leader, "address": address,
            "secret": SECRET.hex(),
        }  # fmt: skip
        for slot in self.members:
            if slot not in self.stopped:
                half = self.folder / "orders.half"
                half.write_text(json.dumps({**said, "rests": slot in self.resting}))
                half.replace(self.folder / f"{self._name(slot)}.orders")

    def rest(self, *slots: str) -> None:
        """Order these slots, and no others, to save and rest."""
        self.resting = set(slots)
        self.order(*self._named)

    def rests(self, slot: str) -> bool:
        """Return whether the slot has saved and rests."""
        return bool(self.status(slot).get("rests"))

    def step(self) -> int:
        """Return the newest logged step of all members."""
        return max([0, *(each["step"] for slot in self.members for each in self.steps(slot))])

    def log(self, slot: str) -> list[dict[str, Any]]:
        """Return the log of a slot."""
        at, known = self._logs.setdefault(slot, (0, []))
        with suppress(OSError), (self.folder / f"{self._name(slot)}.log").open("rb") as file:
            file.seek(at)
            whole = file.read().rpartition(b"\n")[0]
            known += [json.loads(line) for line in whole.splitlines()]
            self._logs[slot] = at + len(whole) + bool(whole), known
        return known

    def steps(self, slot: str) -> list[dict[str, Any]]:
        """Return the logged updates of a slot."""
        return [each for each in self.log(slot) if "step" in each and "sha" in each]

    def shas(self) -> dict[int, dict[str, str]]:
        """Return the SHA-256 of the weights after each step, keyed by step and member."""
        found: dict[int, dict[str, str]] = {}
        for slot in self.members:
            for each in self.steps(slot):
                found.setdefault(each["step"], {})[slot] = each["sha"]
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this name, of all slots."""
        return [
            each for slot in self.members for each in self.log(slot) if each.get("event") == name
        ]

    def until(self, is_so: Callable[[], bool], turn: Callable[[], None] = lambda: None) -> None:
        """Act as the head until `is_so` is true."""
        patience = Patience(self.step, 60.0)
        while not is_so():
            assert not patience.is_over(), self._told()
            self.look()
            turn()
            time.sleep(0.05)

    def run(self, turn: Callable[[], None] = lambda: None) -> None:
        """Act as the head until one member has ended, and all others ended, died or left."""
        self.until(lambda: any(map(self.has_ended, self.members)), turn)
        self.until(
            lambda: all(
                self.has_ended(slot) or not self.alive(slot) or not self.is_in(slot)
                for slot in self.members
            )
        )

    def has_ended(self, slot: str) -> bool:
        """Return whether a process of the slot has ended by itself."""
        return any("end" in each for each in self.log(slot))

    def _told(self) -> str:
        return "\n".join(
            f"{slot}: {self.status(slot)} {str(self.log(slot)[-3:])[-900:]} "
            f"{self.children[slot].err[-900:]}"
            for slot in self.members
        )

    @staticmethod
    def _name(slot: str) -> str:
        return slot.replace("/", "-")
