"""Teams of real processes train like one process, whatever faults occur."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest
import torch

from tests.scene import Patience
from tests.team.conftest import Start
from tests.team.scene import SECRET, Team, member_spec
from workers.team import wire
from workers.team.wire import Connection, Kind, LostError
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

pytestmark = pytest.mark.torch

#: With this number of steps a late member finds a running training, even on a busy machine.
ENDLESS = 10**6


def alone(micro: int, most: int | None = None, **keys: Any) -> list[float]:
    """Return the losses of one process with parts of `micro` samples, for up to `most` steps."""
    settings = TrainSettings.model_validate(member_spec("pc0/0", ["pc0/0"], keys).workload.settings)
    training = Trainer(find_task(settings, 7), settings, torch.device("cpu"), 7)
    losses = []
    while not training.finished and len(losses) != most:
        if training.micro_batch(micro).updated:
            losses.append(training.course.losses[-1])
    return losses


def refuse_gap(team: Team, **keys: Any) -> None:
    """Compare all losses with one process, whose losses with other parts set the tolerance."""
    seen = [(each["step"], each["loss"]) for slot in team.members for each in team.steps(slot)]
    one, control = (alone(rows, max(seen)[0], steps=ENDLESS, **keys) for rows in (32, 5))
    by_chance = max(abs(a - b) for a, b in zip(one, control, strict=True))
    assert {step for step, _ in seen} == set(range(1, len(one) + 1))
    gap = max(abs(loss - one[step - 1]) for step, loss in seen)
    assert gap <= max(1e-6, 3 * by_chance), (gap, by_chance)


def common(team: Team) -> list[int]:
    """Return the steps that all members have done."""
    return [step for step, each in team.shas().items() if len(each) == len(team.members)]


def go_on(team: Team, turn: Callable[[], None] = lambda: None) -> None:
    """Wait until all members have done three more steps, and compare their weights."""
    at = team.step()
    team.until(lambda: sum(step > at for step in common(team)) >= 3, turn)
    shas = team.shas()
    assert all(len(set(shas[step].values())) == 1 for step in common(team) if step > at)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("members", [2, 3])
def test_members_with_drawn_parts_train_as_one(start: Start, members: int) -> None:
    team = start(members, seed=5, steps=ENDLESS)
    team.until(lambda: len(common(team)) > 80)
    together = common(team)
    assert all(len(set(each.values())) == 1 for each in team.shas().values())
    rows = Counter[int]()
    for slot in team.members:
        rows.update({each["step"]: each["rows"] for each in team.steps(slot)})
    assert {rows[step] for step in together} == {32}
    refuse_gap(team)


@pytest.mark.parametrize("slow", [0, 1], ids=["as leader", "as helper"])
def test_a_slow_member_gets_its_share(start: Start, slow: int) -> None:
    paces = {slow: {"row_s": 0.03}, 1 - slow: {"row_s": 0.01}}
    team = start(paces=paces, steps=ENDLESS, batch=24)
    team.until(lambda: len(common(team)) > 30)
    late = set(common(team)[10:])
    rows = [
        sum(each["rows"] for each in team.steps(slot) if each["step"] in late)
        for slot in team.members
    ]
    alone_s = [team.status(slot)["team"]["pace"]["alone_s"] for slot in team.members]
    assert alone_s[slow] >= 24 * 0.03
    # Uses the measured time of a sample, because the machine may have other load.
    fair = alone_s[1 - slow] / sum(alone_s)
    assert rows[slow] / sum(rows) == pytest.approx(fair, abs=0.15), (rows, alone_s)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("small", [0, 1], ids=["leader", "helper"])
def test_memory_of_one_member_shrinks_its_own_parts_alone(start: Start, small: int) -> None:
    team = start(paces={small: {"most_rows": 3}}, steps=ENDLESS)

    def ooms(slot: str) -> int:
        return sum(each.get("event") == "oom" for each in team.log(slot))

    team.until(lambda: ooms(team.members[small]) > 0 and len(common(team)) > 20)
    assert ooms(team.members[1 - small]) == 0
    assert team.events("team_lost") == []
    refuse_gap(team)


class Killer:
    """Kills members at drawn moments, and starts them again."""

    def __init__(self, team: Team, kills: int, who: str, seed: int, least: int = 2) -> None:
        """Make `kills` kills of members with the role `who`, if `least` members train together."""
        self.team, self.left, self.who, self._least = team, kills, who, least
        self._draw = random.Random(seed)  # noqa: S311 - moments, not secrets
        self._dead: str | None = None
        self._at_step = 3.0

    def __call__(self) -> None:
        """Kill or restart a member if it is time."""
        team = self.team
        if self._dead is not None:
            if team.step() >= self._at_step:
                team.start(self._dead)
                self._dead, self._at_step = None, team.step() + self._draw.uniform(2, 6)
            return
        if not self.left or team.step() < self._at_step:
            return
        joined = [slot for slot in team.members if team.is_in(slot)]
        chosen = [slot for slot in joined if self.who in {"anybody", team.role(slot)}]
        if len(joined) >= self._least and chosen:
            self._dead = self._draw.choice(chosen)
            self.kill(self._dead)
            self.left -= 1
            self._at_step = team.step() + 2

    def kill(self, slot: str) -> None:
        """Kill the process of a slot at a random moment within a step."""
        time.sleep(self._draw.uniform(0, 0.03))
        self.team.kill(slot)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("who", ["helper", "leader"])
def test_killed_members_cost_no_step(start: Start, who: str) -> None:
    keys = {"preset": "tests.team.tasks:wide", "batch": 8}
    paces = {number: {"row_s": 0.01} for number in range(3)}
    team = start(3, paces=paces, steps=ENDLESS, save_every_s=0.5, **keys)
    killer = Killer(team, 4, who, 3)
    team.until(lambda: killer.left == 0, killer)
    go_on(team, killer)
    team.until(lambda: any(each["state_sent"] for each in team.events("team_joined")))
    refuse_gap(team, **keys)


@pytest.mark.parametrize("who", ["helper", "leader"])
def test_a_stopped_member_returns_by_itself(start: Start, who: str) -> None:
    paces = {number: {"row_s": 0.002} for number in range(3)}
    team = start(3, paces=paces, steps=ENDLESS, silent_s=None)
    team.until(lambda: team.step() > 10)
    stopped = next(each for each in team.members if team.role(each) == who)
    others = [each for each in team.members if each != stopped]
    team.kill(stopped, signal.SIGSTOP)
    before = team.step()
    team.until(lambda: min(team.steps(each)[-1]["step"] for each in others) > before + 20)
    team.kill(stopped, signal.SIGCONT)
    joined = len(team.events("team_joined"))
    team.until(lambda: len(team.events("team_joined")) > joined)
    go_on(team)


@pytest.mark.parametrize("who", ["nobody", "nobody again", "helper", "leader"])
def test_exact_trainings_have_the_same_bits(
    start: Start, exact: dict[int, set[str]], who: str
) -> None:
    keys = {"steps": ENDLESS, "exact": True, "micro": 4, "save_every_s": 0.3}
    team = start(paces={0: {"row_s": 0.003}, 1: {"row_s": 0.001}}, **keys)
    killer = Killer(team, 0 if "nobody" in who else 2, who, 1)
    team.until(lambda: killer.left == 0 and len(common(team)) > 30, killer)
    for step, shas in team.shas().items():
        exact[step] |= {*shas.values()}
    assert all(len(each) == 1 for each in exact.values())


@pytest.fixture(scope="module")
def exact() -> dict[int, set[str]]:
    """The hashes of the weights after each step in earlier trainings, keyed by step."""
    return defaultdict(set)


def test_a_planted_difference_is_found_told_and_repaired(start: Start) -> None:
    team = start(steps=ENDLESS)
    team.until(lambda: team.step() > 5)
    helper = next(each for each in team.members if team.role(each) == "helper")
    (team.folder / f"{helper.replace('/', '-')}.planted").touch()
    team.until(lambda: bool(team.events("team_differs")))
    (told,) = team.events("team_differs")
    at = told["step"]
    planted = min(step for step, each in team.shas().items() if len(set(each.values())) == 2)
    assert at - planted <= 10

    def since() -> list[set[str]]:
        """Return the hashes of both members' weights after each common step since `at`."""
        both = [(step, each) for step, each in team.shas().items() if len(each) == 2]
        return [set(each.values()) for step, each in both if step > at]

    team.until(lambda: len(since()) > 3)
    assert all(len(each) == 1 for each in since())


def connected(address: str) -> Connection:
    """Connect with the secret, and retry while the leader refuses because of many strangers."""
    patience = Patience()
    while True:
        with suppress(LostError):
            return wire.connect(address, SECRET)
        assert not patience.is_over()


def strangers_come(address: str) -> None:
    """Connect as 33 strangers: noise, another secret, an old generation, another training."""
    host, port = address.split(":")
    noise = os.urandom(1 << 16)
    for length in range(0, 120, 4):
        with closing(socket.create_connection((host, int(port)))) as end, suppress(OSError):
            end.sendall(noise[:length] if length < 110 else noise * 16)
    with pytest.raises(LostError):
        wire.connect(address, b"another secret")
    for generation, why in ((0, "generation 0"), (1, "settings, data or model")):
        other = connected(address)
        said = {"generation": generation, "identity": "", "version": [0, 0], "constant": 0}
        other.send_json(Kind.HELLO, slot="pc1/0", **said)
        assert why in other.next_frame().message["reason"]
        other.release()


def test_strangers_are_refused_while_the_training_goes_on(start: Start) -> None:
    team = start(steps=ENDLESS)
    team.until(lambda: team.step() > 5)
    strangers_come(team.status(team.leader)["team"]["listens"])
    before = team.step()
    team.until(lambda: team.step() > before + 20)
    told = " ".join(each["reason"] for each in team.events("team_refused"))
    for why in ("does not know the secret", "generation 0", "settings, data or model differ"):
        assert why in told
    assert team.events("team_lost") == []


@pytest.mark.parametrize(
    "keys",
    [
        {"ema_decay": 0.9, "states_on_host": 50, "adapter": "lora"},
        {"precision": "fp16", "optimizer": "adamw-foreach"},
    ],
    ids=["adapter, average and states on the host", "fp16"],
)
def test_a_newcomer_takes_all_of_the_state(start: Start, keys: dict[str, Any]) -> None:
    team = start(paces={0: {"row_s": 0.003}}, steps=ENDLESS, **keys)
    team.until(lambda: team.step() > 5)
    team.kill("pc1/0")
    team.until(lambda: team.step() > 15)
    team.start("pc1/0")
    team.until(
        lambda: any(each["state_sent"] and each["step"] > 15 for each in team.events("team_joined"))
    )
    go_on(team)
    assert team.events("team_differs") == []


def test_a_member_that_returns_is_given_the_state_beside_the_steps(start: Start) -> None:
    """No update waits for the state, however long its transfer takes."""
    keys = {"preset": "tests.team.tasks:wide", "steps": ENDLESS, "batch": 8}
    team = start(2, paces={number: {"row_s": 0.005} for number in range(2)}, **keys)
    team.until(lambda: team.leader == "pc0/0" and team.step() > 10)
    team.kill("pc1/0")
    team.until(lambda: not team.alive("pc1/0"))
    joined, held = len(team.events("team_joined")), team.folder / "state.held"
    held.touch()
    team.start("pc1/0")
    team.until(held.with_suffix(".waits").exists)
    at = team.step()
    team.until(lambda: team.step() > at + 20)
    held.unlink()
    team.until(lambda: len(team.events("team_joined")) > joined)
    told = team.events("team_joined")[-1]
    team.until(
        lambda: min(team.steps(slot)[-1]["step"] for slot in team.members) > told["step"] + 5
    )
    assert told["state_sent"]
    both = {step: set(each.values()) for step, each in team.shas().items() if len(each) == 2}
    assert both.keys() >= set(range(at + 1, at + 20)), "done again from what was added up"
    assert all(len(each) == 1 for each in both.values())


def test_what_cannot_be_shared_is_refused_in_words(start: Start) -> None:
    team = start(preset="tests.team.tasks:with_batch_norm")
    team.until(lambda: all(map(team.has_ended, team.members)))
    for slot in team.members:
        said = team.status(slot)
        assert said["verdict"] == "bad input"
        assert "cannot be shared by a team" in said["reason"]


def test_all_come_to_rest_wherever_their_step_is(start: Start) -> None:
    """The leader rests first, while the helper has computed a part of a step. The helper saves the
    step before, and waits for no leader.
    """
    team = start(2, paces={0: {"row_s": 0.001}, 1: {"row_s": 0.02}}, steps=ENDLESS, batch=32)
    team.until(lambda: team.step() > 8)
    other = next(slot for slot in team.members if team.role(slot) == "helper")
    team.rest(team.leader)
    team.until(lambda: team.rests(team.leader))
    team.rest(*team.members)
    team.until(lambda: team.rests(other))
