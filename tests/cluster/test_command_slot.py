"""On real Ray a program of the user ends with its worker, its raylet and its head.

Settings of cards are restored when the block or the head that requested them ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cards import script_cards, scripted_card
from tests.command.scenes import is_gone, kill, parent_of, told
from tests.scene import orchestrator, wait_for
from workers.host.processes import is_alive
from workers.learned_limits import STATE_DIR_VARIABLE

pytestmark = pytest.mark.ray

#: A head that sets a card twice, places commands on two nodes, and polls them.
HEAD = """
import contextlib, dataclasses, json, os, sys, time
from pathlib import Path
from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.core.fleet import StatusReceived
from tests.command.scenes import command_spec
from workers.card_settings import WantedSettings
from workers.messages import Begin, Orders

def tell(name, value):
    Path(name + ".new").write_text(json.dumps(value))
    os.rename(name + ".new", name)

FORKS = '''
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setsid()
else:
    name = os.environ["ORCHESTRATOR_JOB"]
    with open(name + ".new", "w") as file:
        json.dump([os.getpid(), child, os.getppid(), os.environ["ORCHESTRATOR_JOB_DIR"]], file)
    os.rename(name + ".new", name)
time.sleep(600)
'''
with rehearsed({"pc1": {"num_cpus": 5, "num_gpus": 1}, "pc2": {"num_cpus": 4, "num_gpus": 0}}) as fleet:
    fleet.nodes()
    from orchestrator.cluster.node_tasks import with_cards_set  # Ray reads its settings when imported
    wanted = {"pc1": WantedSettings(node="pc1", cards=1, power_limit_w=280)}
    done = []
    note = lambda event, node, lines: done.append(f"{event} {node} {lines}")
    def limit_w():
        return json.loads(Path("cards.set").read_text())["CARD"]["power_limit_w"]
    with with_cards_set(wanted, note, lambda: False):
        during_w = limit_w()
    between_w = limit_w()
    stays = contextlib.ExitStack()
    stays.enter_context(with_cards_set(wanted, note, lambda: False))
    tell("limits", [done[0], during_w, between_w, done[2], limit_w()])
    for name, node in (("first", "pc1"), ("second", "pc2"), ("third", "pc1")):
        spec = command_spec("-c", FORKS, slot=name, cwd=os.getcwd(), grace_s=1.0)
        fleet.place(dataclasses.replace(spec, node=node), 1, 0)
        assert fleet._folder(dataclasses.replace(spec, node=node)) is None, "it is on this PC"
        fleet.order(name, Orders(begin=Begin()))
    from orchestrator.cluster import node_tasks
    fleet._own_address = lambda: "another PC"
    node_tasks.code_at = lambda cwd: None  # and it has no copy of the folder
    Path("project").mkdir()
    Path("project", "train.py").write_text("print(1)")
    spec = command_spec("-c", FORKS, slot="sent", cwd=str(Path("project").absolute()), grace_s=1.0)
    fleet.place(dataclasses.replace(spec, node="pc1"), 1, 0)
    fleet.order("sent", Orders(begin=Begin()))
    workers = {}
    while True:
        for heard in fleet.wait(0.5):
            if isinstance(heard, StatusReceived):
                status = heard.status
                if status.device is not None:
                    workers[status.slot] = status.device.pid
                begin = Begin() if status.incarnation is None else None
                orders = Orders(actor=status.actor, begin=begin, heard=status.news)
                fleet.order(status.slot, orders)
        tell("workers", workers)
"""


class Scene:
    """A head in a separate process, and the processes of its slots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = Path(os.environ[STATE_DIR_VARIABLE])
        card = scripted_card()
        cards = script_cards(folder / "cards.json", card)
        code = HEAD.replace("CARD", card["uuid"])
        self.head = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, env={**os.environ, **cards}
        )

    def of(self, slot: str) -> list[int]:
        """Return the program, its child, and its keeper."""
        program, child, keeper, _ = told(self.folder / slot)
        return [program, child, keeper]

    def worker(self, slot: str) -> int:
        return int(wait_for(lambda: told(self.folder / "workers").get(slot), f"a report of {slot}"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("commands"))
    yield made
    made.head.kill()
    made.head.wait()


def await_end(pids: list[int]) -> None:
    wait_for(lambda: all(map(is_gone, pids)), f"end of {pids}")


def test_folder_travels_where_there_is_none(scene: Scene) -> None:
    folder = scene.state / "state" / "run" / ".code"
    found = wait_for(lambda: list(folder.glob("sent-*/sent")), "the program in its folder")
    assert (found[0].parent / "train.py").read_text() == "print(1)"


def test_nothing_outlives_the_worker(scene: Scene) -> None:
    pids, worker = scene.of("first"), scene.worker("first")
    kill(worker)
    await_end(pids)


def test_nothing_outlives_the_raylet(scene: Scene) -> None:
    pids, worker = scene.of("second"), scene.worker("second")
    server = parent_of(pids[-1])
    kill(parent_of(worker))
    await_end([*pids, server])  # Ray's worker stays longer, until it misses its raylet


def test_a_limit_is_put_back_when_its_block_ends(scene: Scene) -> None:
    first, during_w, between_w, second, again_w = told(scene.folder / "limits")
    assert (during_w, between_w, again_w) == (280, 350, 280)
    for words in (first, second):
        assert words.startswith("node_kept pc1")
        assert "power limit 280 W until the run ends (before: 350 W)" in words


def test_nothing_outlives_the_head(scene: Scene) -> None:
    pids, worker = scene.of("third"), scene.worker("third")
    kill(scene.head.pid)
    await_end([*pids, worker])


def test_a_limit_is_put_back_after_the_head_was_killed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(scene.head.pid)
    (record,) = (scene.state / "kept").glob("*/*.json")
    holder = json.loads(record.read_text())
    wait_for(lambda: not is_alive(holder["pid"], holder["started"]), "end of the actor")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(scene.state))
    cards = script_cards(scene.folder / "cards.json", scripted_card())
    done = orchestrator("stop", cwd=scene.folder, **cards)
    assert "is back at 350 W" in done.stdout, done.stdout + done.stderr
    values: dict[str, Any] = json.loads((scene.folder / "cards.set").read_text())
    assert values[scripted_card()["uuid"]]["power_limit_w"] == 350
