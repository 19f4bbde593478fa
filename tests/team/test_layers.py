"""A model whose blocks two members divide trains as in one process with the whole model."""

from __future__ import annotations

import copy
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.export.scene import labelled
from tests.hf.folders import make_folder
from tests.team.conftest import Start
from tests.team.scene import Team
from tests.training.scene import CPU
from workers.messages import TeamOrders
from workers.settings import FailureKind, TeamSpec
from workers.team import place, wire
from workers.team.layers import Leader, Lender
from workers.team.place import TeamMember
from workers.testing import injected_error
from workers.training.batches import tensors_in
from workers.training.cut import choose_lent_range
from workers.training.errors import TaskError, UpdateInterruptedError
from workers.training.memory_plan import answer
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow 30 s of silence: members of a `Pair` share an interpreter, and wait for each other."""
    monkeypatch.setattr(wire, "SILENT_S", 30.0)


SPEC = TeamSpec(
    members=("pc1/0", "pc2/0"), listen="127.0.0.1:0", split="layers", budgets_bytes=(2, 1)
)
SEED = 7

#: Settings for real processes.
DEEP: dict[str, Any] = {"preset": "tests.team.tasks:deep", "batch": 8, "micro": 2}
TO_THE_BIT = {**DEEP, "exact": True, "clip": None}

#: Qwen with blocks of two kinds, which the model finds by their index.
MIXED = {
    "use_sliding_window": True, "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"] * 3,
}  # fmt: skip


def settings_of(**keys: Any) -> TrainSettings:
    """Return settings with which each bit of a gradient changes the update."""
    usual = {"batch": 6, "steps": 5, "precision": "fp32", "clip": None, "lr": 0.01}
    return TrainSettings.model_validate({**usual, **keys})


def folder_keys(tmp_path: Path, family: str, **config: Any) -> dict[str, Any]:
    """Return settings that train a folder of six blocks on documents of unequal lengths."""
    blocks = "n_layer" if family == "gpt2" else "num_hidden_layers"
    folder = make_folder(tmp_path / family, family, **{blocks: 6}, **config)
    keys = {"model": str(folder), "data": str(labelled(tmp_path)), "dropout": 0.1}
    if "head" in config:
        return {**keys, "preset": "hf-pairs"}
    return {**keys, "preset": "hf-causal", "seq": 24, "documents": "lines"}


@dataclass
class Pair:
    """Both members of a team in one process, each in its own thread."""

    settings: TrainSettings
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)
    is_held: bool = False
    """Whether the lender must not compute."""
    rests: bool = False
    """Whether the lender pauses for its duty, or because its card is hot."""
    held_at: int | None = None
    """The step at which the lender paused."""

    def __post_init__(self) -> None:
        self.leader = Leader(SPEC, "pc1/0", self._tell)
        self.lender = Lender(SPEC, "pc2/0", self._tell)
        self.first, self.second = self.trainer(self.leader), self.trainer(self.lender)
        self.leader.open(self.first)
        self.lender.open(self.second)
        orders = TeamOrders(
            generation=1, leader="pc1/0", address=self.leader.status().listens, secret=bytes(32)
        )
        for member in (self.leader, self.lender):
            member.obey(orders)
        self._thread = threading.Thread(target=self._lend, daemon=True)
        self._thread.start()

    def trainer(self, member: Leader | Lender) -> Trainer:
        """Make the trainer of a member."""
        task = find_task(self.settings, SEED)
        return Trainer(task, self.settings, CPU, SEED, portion=member.portion)

    def turn(self, most_rows: int, level: int = 0) -> None:
        """Let the leader compute a part, if the lender is connected."""
        if self.failed:
            raise self.failed[0]
        if self.leader.wait(0.01):
            self.leader.part(most_rows, level)

    def train(self, most_rows: Callable[[], int], level: Callable[[], int] = lambda: 0) -> Trainer:
        """Train to the end."""
        while not self.first.finished:
            self.turn(most_rows(), level())
        return self.first

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this name."""
        return [figures for each, figures in self.events if each == name]

    def close(self) -> None:
        """End both members."""
        self.leader.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _tell(self, name: str, **figures: Any) -> None:
        self.events.append((name, figures))

    def _lend(self) -> None:
        try:
            while self.lender.is_needed:
                if self.is_held:
                    self.held_at = self.second.step
                    time.sleep(0.01)
                    if self.rests:
                        self.lender.attend()
                    else:
                        self.lender._attended_s = -math.inf
                elif self.lender.wait(0.01):
                    try:
                        self.lender.part(1, 0)
                    except UpdateInterruptedError:  # handled as in the workload
                        self.lender.leave()
                        self.second = self.trainer(self.lender)
                        self.lender.open(self.second)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failed.append(error)


@contextmanager
def divided(settings: TrainSettings) -> Iterator[Pair]:
    """A training that two members divide; it ends with the block."""
    pair = Pair(settings)
    yield pair
    pair.close()


def alone(settings: TrainSettings, most_rows: int = 2) -> Trainer:
    """Train with the whole model in one process."""
    run = Trainer(find_task(settings, SEED), settings, CPU, SEED)
    while not run.finished:
        run.micro_batch(most_rows)
    return run


@pytest.mark.parametrize(
    ("family", "keys", "config"),
    [
        ("gpt2", {}, {}),
        ("llama", {"adapter": "lora", "weights": "nf4"}, {}),
        ("llama", {"precision": "bf16", "recompute": "all"}, {}),
        ("llama", {"optimizer": "adamw-8bit"}, {}),
        ("qwen3", {"recompute": "all"}, MIXED),
        ("gemma", {"adapter": "dora"}, {}),
        ("mistral", {"weights": "as-stored"}, {"dtype": "bfloat16"}),
        ("bert", {}, {"head": "SequenceClassification"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each.values()))[:20],
)
def test_a_folder_that_is_divided_has_the_gradients_of_the_whole(
    tmp_path: Path, family: str, keys: dict[str, Any], config: dict[str, Any]
) -> None:
    settings = settings_of(**folder_keys(tmp_path, family, **config), **keys)
    whole = alone(settings)
    with divided(settings) as pair:
        together = pair.train(lambda: 2)
        assert together.course.losses == whole.course.losses
        assert together.weights_sha256() == whole.weights_sha256()


def test_a_folder_as_stored_takes_no_host_memory_before_it_is_cut(tmp_path: Path) -> None:
    keys = folder_keys(tmp_path, "llama", dtype="bfloat16", intermediate_size=65536)
    settings = settings_of(**keys, weights="as-stored")
    task, before_bytes = find_task(settings, SEED), _private_bytes()
    model = task.model()
    whole_bytes = sum(each.nbytes for each in model.parameters())
    assert whole_bytes > 2**25
    assert _private_bytes() - before_bytes < whole_bytes / 3


def _private_bytes() -> int:
    """Return the resident memory of this process that no file backs, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_drawn_parts_and_recomputation_change_nothing_but_rounding() -> None:
    draw = random.Random(3)  # noqa: S311 - sizes of parts
    settings = settings_of(preset="gpt-nano", dropout=0.1, clip=1.0, steps=20)
    whole, control = alone(settings, 6), alone(settings, 1)
    with divided(settings) as pair:
        together = pair.train(lambda: draw.randint(1, 6), lambda: draw.randint(0, 3))
        gaps = [
            max(abs(a - b) for a, b in zip(whole.course.losses, each.course.losses, strict=True))
            for each in (together, control)
        ]
        assert gaps[0] <= max(1e-6, 3 * gaps[1])
        assert pair.leader.status().share_pct == 75
        assert pair.lender.status().share_pct == 25


@pytest.mark.parametrize("preset", ["gpt-nano", "tests.team.tasks:grouped_by_place"])
def test_the_state_of_both_is_that_of_one_process(preset: str) -> None:
    settings = settings_of(preset=preset, steps=6, lr=None)
    whole = Trainer(find_task(settings, SEED), settings, CPU, SEED)
    with divided(settings) as pair:
        while pair.first.step < 3:
            pair.turn(2)
        state = pair.first.state()
        assert pair.first.identity == whole.identity
        whole.load(state)
        while not whole.finished:
            whole.micro_batch(2)
        assert pair.train(lambda: 2).weights_sha256() == whole.weights_sha256()


def test_memory_of_either_member_shrinks_the_parts_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The finished parts of a batch are kept, and no row is in the gradients twice."""
    settings = settings_of(preset="gpt-nano", dropout=0.1)
    whole = alone(settings, 1)
    with divided(settings) as pair:
        for trainer in (pair.first, pair.second):
            block = (trainer.cut.blocks if trainer.cut else [])[0]
            block.register_full_backward_pre_hook(_short_of_memory(2))
        done, failing = pair.lender._answer_call, [injected_error(FailureKind.DEFINITE)]

        def answer(**said: Any) -> None:
            if failing:  # there is no memory for the answer
                raise failing.pop()
            done(**said)

        monkeypatch.setattr(pair.lender, "_answer_call", answer)
        rows = 6
        while not pair.first.finished:
            try:
                pair.turn(rows)
                rows = 6
            except torch.OutOfMemoryError:
                rows = {6: 2, 2: 1}[rows]
        assert pair.first.course.losses == pytest.approx(whole.course.losses, abs=1e-6)
        assert pair.named("team_lost") == []


def _short_of_memory(most_rows: int) -> Callable[..., None]:
    def hook(_: object, gradients: tuple[torch.Tensor, ...]) -> None:
        if len(gradients[0]) > most_rows:
            raise injected_error(FailureKind.DEFINITE)

    return hook


def test_a_member_without_the_state_of_the_step_sends_the_leader_back() -> None:
    settings = settings_of(preset="gpt-nano", dropout=0.1, clip=1.0, steps=8)
    whole = alone(settings)
    with divided(settings) as pair:
        while pair.first.step < 2:
            pair.turn(2)
        saved = copy.deepcopy(dict(pair.first.state()))
        while pair.first.step < 5 or pair.first.at_boundary:
            pair.turn(2)
        # A cut cable costs nothing: both members have the same step.
        pair.lender._link.close()  # type: ignore[union-attr]
        while len(pair.named("team_joined")) < 2:
            pair.turn(2)
        assert pair.first.step == 5
        # A new process has no step.
        pair.lender.training.invalidate("the process is another one")
        with pytest.raises(UpdateInterruptedError, match="pc2/0 has lost its blocks of step"):
            pair.train(lambda: 2)
        pair.first.load(saved)
        together = pair.train(lambda: 2)
        assert together.course.losses == pytest.approx(whole.course.losses, abs=1e-6)
        assert pair.named("team_joined")[-1]["state_sent"]


def test_a_member_that_rests_is_waited_for_and_one_that_is_held_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, looks, is_attended = (
        Mock(monotonic=lambda: now.s, s=0.0),
        Counter[str](),
        TeamMember.is_attended,
    )

    def counted(self: TeamMember) -> bool:
        looks[self.slot] += 1
        return is_attended(self)

    monkeypatch.setattr(place, "time", now)
    monkeypatch.setattr(TeamMember, "is_attended", counted)
    with divided(settings_of(preset="gpt-nano", steps=8)) as pair:
        while pair.first.step < 2:
            pair.turn(2)
        pair.is_held = pair.rests = True
        for _ in range(3):
            now.s += 0.9 * place.AWAY_S
            looks.clear()
            while min(looks["pc1/0"], looks["pc2/0"]) < 2 or pair.lender._attended_s < now.s:
                pair.leader.attend()  # as the engine does, once a second
                time.sleep(0.01)
        assert pair.leader.status().state == pair.lender.status().state == "TOGETHER"
        pair.rests = False
        while not pair.named("team_lost"):
            pair.turn(2)
        assert pair.leader.status().state == "REJOINING"
        pair.is_held = False
        assert pair.train(lambda: 2).step == 8
        assert [each["step"] for each in pair.named("team_joined")] == [0, pair.held_at]


def test_killed_processes_cost_no_step(start: Start) -> None:
    """Kill either member, or both at once, at random moments."""
    keys = {**TO_THE_BIT, "steps": 60, "save_every_s": 0.2}
    team = start(2, split="layers", paces={0: {"row_s": 0.002}}, **keys)
    draw, kills = random.Random(4), [(0,), (1,), (0, 1), (1,)]  # noqa: S311 - moments
    at_step = 4.0

    def kill() -> None:
        nonlocal at_step
        if not kills or team.step() < at_step or not team.is_in(team.members[1]):
            return
        time.sleep(draw.uniform(0, 0.03))  # a random moment within a step
        for number in kills.pop():
            team.kill(team.members[number])
            team.start(team.members[number])
        at_step = team.step() + draw.uniform(2, 8)

    team.run(kill)
    assert not kills
    lone = alone(settings_of(**keys, lr=None))
    (weights,) = {each["weights"] for each in team.log("pc0/0") if "end" in each}
    assert weights == lone.weights_sha256()


def goes_on(team: Team) -> None:
    """Continue a resting team, and check that no step is lost or done twice."""
    at = team.step()
    team.rest()
    team.until(lambda: team.step() > at + 5)
    steps = [each["step"] for each in team.steps("pc0/0")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("others_s", [0.0, 0.3])
def test_the_end_of_a_run_loses_no_step(start: Start, others_s: float) -> None:
    """The lender continues until its leader, which may be asked later, has saved both states."""
    team = start(2, split="layers", paces={0: {"row_s": 0.005}}, **TO_THE_BIT, steps=10**6)
    team.until(lambda: team.step() >= 5)
    team.rest("pc1/0", *([] if others_s else ["pc0/0"]))
    time.sleep(others_s)
    team.rest("pc0/0", "pc1/0")
    team.until(lambda: all(map(team.rests, team.members)))
    for slot in team.members:
        team.kill(slot)
        team.start(slot)
    goes_on(team)


def test_a_leader_whose_lender_is_gone_for_good_says_so_and_comes_to_rest(start: Start) -> None:
    """It does not wait forever for a state that no member has."""
    paces = {0: {"row_s": 0.005, "away_s": 1.0}}
    team = start(2, split="layers", paces=paces, **DEEP, steps=10**6)
    team.until(lambda: team.step() >= 5)
    team.kill("pc1/0")
    team.stopped.add("pc1/0")

    def reason() -> str:
        return str(team.status("pc0/0").get("reason"))

    team.until(lambda: reason().startswith("no step is done without pc1/0, which computes blocks"))
    assert "`reinstate pc1/0`" in reason()
    team.rest("pc0/0")
    team.until(lambda: team.rests("pc0/0"))


def test_the_lender_alone_rests_and_comes_back(start: Start) -> None:
    team = start(2, split="layers", paces={0: {"row_s": 0.005}}, **DEEP, steps=10**6)
    team.until(lambda: team.step() >= 5)
    team.rest("pc1/0")
    team.until(lambda: team.rests("pc1/0"))
    goes_on(team)


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("tests.team.tasks:gpt", "has 2 blocks, and train.split: layers needs 3 or more"),
        (
            "tests.team.tasks:with_skips",
            "does more between its blocks than pass on hidden states",
        ),
        ("tests.team.tasks:with_own_optimizer", "may combine all parameters"),
        ("tests.team.tasks:called_twice", "calls its blocks twice for a loss"),
    ],
)
def test_what_cannot_be_divided_is_refused(preset: str, said: str) -> None:
    with pytest.raises(TaskError, match=said), divided(settings_of(preset=preset, lr=None)) as pair:
        pair.train(lambda: 2)


@pytest.mark.parametrize(
    ("rest", "budgets", "lent"),
    [(0, (1, 1), 4), (40, (2, 1), 4), (0, (3, 1), 2), (0, (100, 1), 1), (1000, (1, 1), 6)],
)
def test_the_fuller_member_is_as_empty_as_can_be(
    rest: int, budgets: tuple[int, int], lent: int
) -> None:
    first, end = choose_lent_range([10] * 8, rest, budgets)
    assert (end, end - first) == (7, lent)


@pytest.mark.parametrize("preset", ["gpt-nano", "hf-causal"])
def test_both_parts_are_planned_as_they_are(tmp_path: Path, preset: str) -> None:
    keys = {"preset": preset} if preset == "gpt-nano" else folder_keys(tmp_path, "llama")
    settings = settings_of(**keys, optimizer="adamw-foreach")
    caps = [{"cap_bytes": 2**34, "device": "cpu"}] * 2
    question = {"settings": settings.model_dump(), "seed": SEED, "caps": caps}
    (whole, _) = answer(question)["caps"]
    told = answer({**question, "budgets_bytes": SPEC.budgets_bytes})
    with divided(settings) as pair:
        pair.train(lambda: 6)
        for part, trainer in zip(told["caps"], (pair.first, pair.second), strict=True):
            assert trainer.cut is not None
            assert told["lent"] == trainer.cut.lent_range
            assert part["blocks"] == len(trainer.cut.blocks)
            held = sum(each.nbytes for each in trainer.model.parameters())
            assert part["steps"][0]["weights_bytes"] == pytest.approx(held, rel=1e-3)
        saved_bytes, lent_bytes = (
            sum(each.nbytes for each in tensors_in(state))
            for state in (pair.first.state(), pair.first.lent_state)
        )
    steps = [part["steps"][0] for part in told["caps"]]
    for key in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert sum(step[key] for step in steps) == pytest.approx(whole["steps"][0][key], rel=1e-3)
    copied, on_host = (
        [step[key] for step in steps] for key in ("checkpoint_copy_bytes", "on_host_bytes")
    )
    assert copied == [pytest.approx(saved_bytes, rel=1e-2), 0]
    assert on_host == [pytest.approx(saved_bytes + lent_bytes, rel=1e-2), 0]
    # Both members also hold the activations that pass from one to the other.
    between = sum(step["activations_bytes"] for step in steps)
    assert 1 < between / whole["steps"][0]["activations_bytes"] < 1.3
