"""Settings of cards are restored however a run ends: by the run, by the next run, or by `stop`.

Each process here imports the stub of nvidia-ml-py; all of them share the settings of its cards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cards import script_cards, scripted_card
from tests.scene import orchestrator, python

#: Sets cards, prints what was done, and restores them when its input ends; it may be killed before.
HOLDER = """
import json, sys
from workers.card_settings import CardSettingError, WantedSettings, put_back_own, set_cards
try:
    print(json.dumps(set_cards(WantedSettings(**json.loads(sys.argv[1])))), flush=True)
except (CardSettingError, OSError) as error:
    print(json.dumps(str(error)), flush=True)
sys.stdin.read()
print(json.dumps(put_back_own()), flush=True)
"""

ASK = """
import json, pynvml
pynvml.nvmlInit()
handles = list(map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())))
print(json.dumps([[pynvml.nvmlDeviceGetPowerManagementLimit(each) // 1000,
                   pynvml.nvmlDeviceGetMemClkVfOffset(each)] for each in handles]))
"""


class Pc:
    """A machine with some cards, and the processes that set them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._script, self._patch = folder / "cards.json", patch
        self.holders: list[subprocess.Popen[str]] = []

    def has(self, *cards: dict[str, Any]) -> None:
        for name, value in script_cards(self._script, *cards).items():
            self._patch.setenv(name, value)

    def set(self, **wanted: Any) -> tuple[subprocess.Popen[str], Any]:
        """Start a process that sets the cards; return it and its first output."""
        settings = json.dumps({"node": "pc1", "cards": 1, **wanted})
        command = [sys.executable, "-c", HOLDER, settings]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        holder: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes)
        self.holders.append(holder)
        assert holder.stdout is not None
        return holder, json.loads(holder.stdout.readline())

    def killed(self, **wanted: Any) -> None:
        """Set the cards in a process, and kill it."""
        holder, _ = self.set(**wanted)
        holder.kill()
        holder.wait()

    def values(self) -> list[list[int]]:
        """Return the power limit in W and the memory offset in MHz of each card."""
        done = python("-c", ASK)
        return list(json.loads(done.stdout))


def end(holder: subprocess.Popen[str]) -> list[str]:
    """Let a process restore its cards; return its output."""
    out, _ = holder.communicate("")
    return list(json.loads(out))


@pytest.fixture
def pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pc]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = Pc(tmp_path, monkeypatch)
    made.has(scripted_card())
    yield made
    for holder in made.holders:
        holder.kill()
        holder.communicate()


@pytest.fixture
def kept(state_dir: Path) -> Callable[[], list[Path]]:
    """Return a function that lists the records of changed settings."""
    return lambda: list((state_dir / "kept").glob("*/*.json"))


def test_cards_are_set_and_put_back(pc: Pc, kept: Callable[[], list[Path]]) -> None:
    pc.has(scripted_card(1, memory_offset_mhz=-100), scripted_card(2), scripted_card(3))
    holder, lines = pc.set(cards=2, power_limit_w=280, memory_offset_mhz=450)
    name = "pc1's NVIDIA GeForce RTX 3090"
    assert lines[:2] == [
        f"{name}: power limit 280 W until the run ends (before: 350 W)",
        f"{name}: memory offset 450 MHz until the run ends (before: -100 MHz)",
    ]
    assert pc.values() == [[280, 450], [280, 450], [350, 0]]
    assert len(kept()) == 4
    back = end(holder)
    assert len(back) == 4
    assert back[-1].endswith("is back at 350 W")
    assert pc.values() == [[350, -100], [350, 0], [350, 0]]
    assert kept() == []


def test_only_the_cards_that_are_visible_are_set(pc: Pc, monkeypatch: pytest.MonkeyPatch) -> None:
    pc.has(scripted_card(1), scripted_card(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(scripted_card(2)["uuid"]))
    holder, _ = pc.set(power_limit_w=210)
    assert pc.values() == [[350, 0], [210, 0]]
    end(holder)


@pytest.mark.parametrize(
    ("changes", "wanted", "words"),
    [
        ({}, {"power_limit_w": 99}, "power_limit_w 99 is out of range: NVIDIA GeForce RTX 3090 takes 100"),
        ({"power_limit_w": None}, {"power_limit_w": 280}, "cannot be set: Not Supported"),
        ({"fails": {"set_power_limit_w": "no_permission"}}, {"power_limit_w": 280},
         "only root may: start Ray as root on pc1"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_set_is_a_sentence(
    pc: Pc, kept: Callable[[], list[Path]], changes: dict[str, Any], wanted: Any, words: str
) -> None:
    pc.has(scripted_card(**changes))
    _, refusal = pc.set(**wanted)
    assert words in refusal
    assert kept() == []


def test_what_one_card_refuses_is_set_on_none(pc: Pc) -> None:
    pc.has(scripted_card(1), scripted_card(2, fails={"set_power_limit_w": "no_permission"}))
    _, refusal = pc.set(cards=2, power_limit_w=280, memory_offset_mhz=100)
    assert "only root may" in refusal
    assert pc.values() == [[350, 0], [350, 0]]


def test_the_limit_that_a_card_has_needs_no_root(pc: Pc) -> None:
    pc.has(scripted_card(fails={"set_power_limit_w": "no_permission"}))
    holder, lines = pc.set(power_limit_w=350)
    assert (lines, end(holder)) == ([], [])


def test_what_a_killed_run_left_is_put_back_by_the_next(pc: Pc) -> None:
    pc.killed(power_limit_w=280)
    assert pc.values() == [[280, 0]]
    holder, lines = pc.set(power_limit_w=300)
    assert lines[0].startswith("left by a run that was killed: pc1: the power limit of card GPU-1")
    assert lines[1].endswith("300 W until the run ends (before: 350 W)")
    end(holder)
    assert pc.values() == [[350, 0]]


def test_what_a_killed_run_left_is_put_back_by_stop(nowhere: Path, pc: Pc) -> None:
    pc.killed(power_limit_w=280)
    done = orchestrator("stop", "--run-dir", str(nowhere))
    assert done.returncode == 0, done.stderr
    assert "is back at 350 W" in done.stdout
    assert pc.values() == [[350, 0]]
    again = orchestrator("stop", "--run-dir", str(nowhere))
    assert again.returncode == 2, "nothing is left to do"


def test_what_another_program_has_set_meanwhile_stays(pc: Pc) -> None:
    holder, _ = pc.set(power_limit_w=280)
    python("-c", "import pynvml as p; p.nvmlInit(); p.nvmlDeviceSetPowerManagementLimit(0, 320000)")
    (line,) = end(holder)
    assert line.endswith("stays at 320 W, which another program set")
    assert pc.values() == [[320, 0]]


def test_what_cannot_be_put_back_is_told_and_tried_again(
    pc: Pc, kept: Callable[[], list[Path]]
) -> None:
    holder, _ = pc.set(power_limit_w=280)
    pc.has(scripted_card(fails={"set_power_limit_w": "no_permission"}))  # no longer root
    (line,) = end(holder)
    assert "is not back at 350 W: Insufficient Permissions; type as root: python -m" in line
    assert len(kept()) == 1
    pc.has(scripted_card())
    pc.set(power_limit_w=350)
    assert pc.values() == [[350, 0]]


def test_two_runs_do_not_set_the_same_cards(pc: Pc) -> None:
    first, _ = pc.set(power_limit_w=280)
    _, refusal = pc.set(power_limit_w=200)
    assert f"another run has set the cards of this PC (process {first.pid})" in refusal
    assert pc.values() == [[280, 0]]


def test_nothing_is_set_that_cannot_be_written_down(
    pc: Pc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path / "file"))
    _, refusal = pc.set(power_limit_w=280)
    assert "Not a directory" in refusal
    assert pc.values() == [[350, 0]]


def test_what_is_no_record_of_this_machine_is_left_alone(
    pc: Pc, kept: Callable[[], list[Path]]
) -> None:
    pc.killed(power_limit_w=280)
    (own,) = kept()
    own.parent.rename(own.parent.with_name("elsewhere"))  # several PCs may share a home folder
    own.parent.mkdir()
    for name, text in {"a": "", "b": "[]", "c": '{"schema": 1}'}.items():
        (own.parent / f"{name}.json").write_text(text)
    holder, lines = pc.set(power_limit_w=300)
    assert "(before: 280 W)" in lines[0]
    end(holder)
    assert len(kept()) == 4
