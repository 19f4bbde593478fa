"""`top` on terminals of several sizes: the screens as text, and the keys.

And `--once` and `--json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from textual.events import Key
from textual.pilot import Pilot
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.control.queue import waiting
from orchestrator.core.slot import HeadState
from orchestrator.core.user_commands import Do
from orchestrator.errors import UsageError
from orchestrator.jobs.model import Said, Word
from orchestrator.record.archive import Follower
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.record.model import STATES_WORST_FIRST, Row
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.view.orders import give
from orchestrator.view.top.app import Give, Top
from orchestrator.view.top.view import View
from orchestrator.view.top.widgets import Rows
from tests.factories import FACTS, STARTED_UNIX_S, add_event, event, make_row
from tests.web.scene import put_turn, with_queue
from workers.messages import WorkerState

GOLDENS = Path(__file__).parent / "goldens"
#: `UPDATE_GOLDENS=1 pytest tests/top` writes them anew; look at what has changed.
UPDATE = bool(os.environ.get("UPDATE_GOLDENS"))

HOSTILE = "\x1b[31mred\x1b[0m [bold]markup[/bold] \u202eturned\nline"


def made(
    folder: Path, *looks: list[Row], outcome: str | None = "good", lives: bool = False
) -> Path:
    """Make the folder of a run that looked like this, second by second.

    Its head lives on another PC, or is gone.
    """
    place = folder / FACTS.run_id
    place.mkdir(parents=True)
    store = RunStore(place / STORE_NAME)
    gone = replace(FACTS, head_pid=2**22 - 1, head_started="1", host=socket.gethostname())
    store.begin(FACTS if lives else gone)
    for second, rows in enumerate(looks):
        change = event(name="state", from_state="STARTING", to_state="RUNNING", cause=HOSTILE)
        add_event(store, {**change, "slot": rows[0].slot if rows else None})
        put_turn(store, float(second), rows, started_at=STARTED_UNIX_S, duration_s=30.0)
    if outcome is not None:
        store.end(outcome, 0, None, ())
    return place


def every_state() -> list[Row]:
    return [
        make_row(slot=f"pc1/{index}", state=state, reason=f"the reason of {state.value}")
        for index, state in enumerate(STATES_WORST_FIRST)
    ]


def driven(
    folder: Path,
    size: tuple[int, int],
    keys: Callable[[Pilot[None]], Awaitable[None]] | None = None,
    give: Give | None = None,
) -> list[str]:
    """Return the lines of the screen after some keys."""

    async def drive() -> list[str]:
        top = Top(folder, View(), give)
        async with top.run_test(size=size) as pilot:
            await pilot.pause()
            if keys is not None:
                await keys(pilot)
                await top.workers.wait_for_complete()
            await pilot.pause()
            strips = top.screen._compositor.render_strips()
            return [strip.text.rstrip() for strip in strips]

    return asyncio.run(drive())


def pressed(*keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def press(pilot: Pilot[None]) -> None:
        await pilot.press(*keys)

    return press


def first_words(lines: Sequence[str], begin: str) -> list[str]:
    """Return the names of the rows that begin so; the last two lines are no rows."""
    return [line.split()[0] for line in lines[:-2] if line.strip().startswith(begin)]


@pytest.mark.parametrize("size", [(80, 24), (120, 30), (200, 40), (40, 10)], ids=str)
def test_the_screen_is_the_one_that_was_looked_at(tmp_path: Path, size: tuple[int, int]) -> None:
    lines = driven(made(tmp_path, every_state()), size)
    golden = GOLDENS / f"states-{size[0]}x{size[1]}.txt"
    if UPDATE:
        golden.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == golden.read_text(encoding="utf-8").splitlines()
    assert all(len(line) <= size[0] for line in lines)
    assert driven(made(tmp_path / "empty", []), size)[-1].startswith("ended: good")


def test_what_is_typed_at_once_after_a_key_goes_into_the_filter(tmp_path: Path) -> None:
    """Otherwise a filter that is pasted would press the keys of the commands."""

    async def pasted(pilot: Pilot[None]) -> None:
        for key in ("slash", *"Pyte", "enter"):
            pilot.app.post_message(Key(key, key if len(key) == 1 else None))
        await pilot.pause(0.1)

    lines = driven(made(tmp_path, [make_row()]), (80, 24), pasted)
    assert "filter Pyte" in lines[-1]


def test_a_head_that_writes_nothing_is_shown_as_late(tmp_path: Path) -> None:
    folder = made(tmp_path, every_state(), outcome=None, lives=True)
    now_s = [0.0]

    async def waited(pilot: Pilot[None]) -> None:
        top = pilot.app
        assert isinstance(top, Top)
        top._follower = Follower(folder, lambda: now_s[0])
        top.look()
        now_s[0] = 12.0
        top.look()

    assert driven(folder, (120, 30), waited)[-1].startswith("late 12 s")


def test_alerts_stand_on_top_and_have_a_page_with_what_to_do(tmp_path: Path) -> None:
    lost = [
        make_row(slot=f"pc1/{number}", state=HeadState.QUARANTINED, reason=HOSTILE)
        for number in range(7)
    ]
    folder = made(tmp_path, lost, outcome=None, lives=True)
    first, *_ = driven(folder, (120, 20))
    assert first.startswith("! slot pc1/0 was given up: [31mred")
    assert first.endswith("(and 6 more)")
    page = driven(folder, (120, 20), pressed("a"))
    assert first_words(page, "critical") == ["critical"] * 7
    assert "reinstate" in page[-2], "what to do against the alert under the cursor"


def test_keys_sort_filter_and_move(tmp_path: Path) -> None:
    rows = [
        make_row(slot="pc1/0", temperature_c=60.0),
        make_row(slot="pc1/1", temperature_c=80.0, reason="of pc1/1"),
        make_row(slot="pc2/0", node="pc2", temperature_c=None),
    ]
    folder = made(tmp_path, rows)

    def after(*keys: str) -> list[str]:
        return driven(folder, (120, 20), pressed(*keys))

    assert first_words(after(), "pc") == ["pc1/0", "pc1/1", "pc2/0"]
    by_slot = after("greater_than_sign", "r")
    assert first_words(by_slot, "pc") == ["pc2/0", "pc1/1", "pc1/0"], by_slot[-1]
    assert first_words(after("slash", *"temp:80", "enter"), "pc") == ["pc1/1"]
    assert first_words(after("slash", *"!pc2", "enter"), "pc") == ["pc1/0", "pc1/1"]
    assert after("j")[-2] == "pc1/1: of pc1/1"
    assert any("this help" in line for line in after("question_mark"))


def test_the_cursor_stays_with_its_slot_while_rows_move(tmp_path: Path) -> None:
    rows = [make_row(slot=f"pc1/{number}", temperature_c=60.0 - number) for number in range(30)]
    folder = made(tmp_path, rows, outcome=None, lives=True)
    seen: list[str] = []

    async def moved(pilot: Pilot[None]) -> None:
        top, rows_there = pilot.app, pilot.app.query_one(Rows)
        assert isinstance(top, Top)
        await pilot.press("down", "down", "down")
        store = RunStore(folder / STORE_NAME)
        store.begin(FACTS)
        worse = [make_row(slot="pc1/29", state=HeadState.LOST), *rows[:20]]
        put_turn(store, 5.0, worse)
        top.look()
        await pilot.pause()
        assert rows_there.row is not None
        seen.append(rows_there.row.key)

    lines = driven(folder, (120, 24), moved)
    assert seen == ["pc1/3"]
    assert any("LOST" in line for line in lines)


def test_a_mouse_moves_the_cursor_and_opens_a_slot(tmp_path: Path) -> None:
    rows = [make_row(slot=f"pc1/{number}", reason=f"of {number}") for number in range(30)]
    folder = made(tmp_path, rows)

    def clicked(line: int, times: int) -> list[str]:
        async def hand(pilot: Pilot[None]) -> None:
            for _ in range(times):
                await pilot.click(Rows, offset=(5, line))

        return driven(folder, (120, 24), hand)

    titles = 2
    assert clicked(titles + 4, 1)[-2] == "pc1/4: of 4"
    assert any(line.startswith("pc1/4 of 4") for line in clicked(titles + 4, 2))


def test_the_page_of_a_slot_shows_all_and_hostile_text_is_text(tmp_path: Path) -> None:
    looks = [
        [make_row(temperature_c=50.0 + second, reason=HOSTILE, gpu_name=HOSTILE)]
        for second in range(30)
    ]
    folder = made(tmp_path, *looks)
    text = "\n".join(driven(folder, (120, 60), pressed("enter")))
    assert any("temperature, C" in line and "50 to 79" in line for line in text.splitlines())
    assert "RUNNING" in text
    assert "[bold]markup[/bold]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert any("state" in line for line in driven(folder, (120, 20), pressed("e")))
    assert any("pc1" in line and "79" in line for line in driven(folder, (120, 20), pressed("d")))


def test_a_slot_shows_what_it_printed_and_all_of_its_error(tmp_path: Path) -> None:
    folder = made(tmp_path, [make_row()])
    kept = folder / "output" / "pc1" / "0.log"
    kept.parent.mkdir(parents=True)
    kept.write_text("\x1b[2J    epoch 1\n", encoding="utf-8")
    cause = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10), in head"
    error = {**event(name="workload_error", traceback=f"Traceback:\n  {cause}"), "slot": "pc1/0"}
    store = RunStore(folder / STORE_NAME)
    add_event(store, error)
    store.commit()
    lines = driven(folder, (60, 60), pressed("enter"))
    assert "    epoch 1" in lines
    assert cause.replace(" ", "") in "".join("".join(lines).split())


def test_a_run_with_a_queue_has_a_line_and_a_page_of_jobs(tmp_path: Path) -> None:
    folder = made(tmp_path, [make_row(slot="pc1/0")])
    assert any("no queue of jobs" in line for line in driven(folder, (120, 20), pressed("J")))
    lines = driven(
        with_queue(folder, "lr-0", "lr-1"), (120, 20), pressed("J", "slash", *"lr-1", "enter")
    )
    assert any("jobs: 2 queued" in line for line in lines)
    assert [line.split()[:2] for line in lines if "QUEUED" in line] == [["lr-1", "QUEUED"]]


def test_orders_name_each_slot_and_wait_for_yes(tmp_path: Path) -> None:
    rows = [make_row(slot=f"pc1/{number}") for number in range(3)]
    folder = made(tmp_path, rows, outcome=None, lives=True)
    given: list[tuple[Do | Word, Sequence[str], int | None]] = []

    def give(to: Path, order: Do | Word, names: Sequence[str], amount: int | None) -> str:
        assert to == folder
        given.append((order, names, amount))
        if order is Do.DRAIN:
            raise UsageError("refused: not now")
        return "held"

    def shown(*keys: str, by: Give | None = give) -> str:
        given.clear()
        return driven(folder, (120, 20), pressed(*keys), by)[-1]

    assert shown("P").startswith("pause pc1/0? y sends it, esc does not · held when")
    assert not given
    shown("P", "escape", "y")
    assert not given, "after esc there is nothing to agree to"
    assert "unpause pc1/1: held" in shown("j", "U", "y")
    assert given == [(Do.UNPAUSE, ["pc1/1"], None)]
    shown("C", *"3", "x", "enter", "backspace", "backspace", *"2GiB", "enter", "y")
    assert given == [(Do.CAP, ["pc1/0"], 2 * 2**30)], "what is no amount can be corrected"
    assert "refused: not now" in shown("D", "y")
    assert "read-only" in shown("R", "y", by=None)
    assert not given


def test_orders_to_jobs_reach_their_queue(tmp_path: Path) -> None:
    folder = with_queue(made(tmp_path, [make_row()]), "lr-0", "lr-1")
    driven(folder, (120, 20), pressed("J", "j", *"PyUyRyXy"), partial(give, by="top"))
    said = [one for message in waiting(folder / QUEUE_NAME) for one in message]
    assert all(isinstance(one, Said) and one.job == "lr-1" for one in said)
    words = [one.word for one in said if isinstance(one, Said)]
    assert sorted(words) == sorted([Word.HOLD, Word.RELEASE, Word.RETRY, Word.CANCEL])


def test_once_and_json_print_what_the_screen_would_show(tmp_path: Path) -> None:
    rows = [
        make_row(slot="pc1/0", temperature_c=60.0),
        make_row(slot="pc1/1", temperature_c=80.0, reason=HOSTILE, state=WorkerState.BACKOFF),
    ]
    made(tmp_path, rows)
    where = ["--run-dir", str(tmp_path)]
    once = CliRunner().invoke(app, ["top", "--once", "--sort", "temp", *where])
    assert once.exit_code == 0
    assert first_words(once.output.splitlines(), "pc1/") == ["pc1/1", "pc1/0"]
    assert "\x1b" not in once.output
    told = json.loads(
        CliRunner().invoke(app, ["top", "--json", "--filter", "temp:60", *where]).output
    )
    assert (told["schema"], told["freshness"]) == (1, "ended")
    assert [row["slot"] for row in told["workers"]] == ["pc1/0"]
    wrong = CliRunner().invoke(app, ["top", "--once", "--sort", "colour", *where])
    assert "no column is called 'colour'" in str(wrong.exception)
