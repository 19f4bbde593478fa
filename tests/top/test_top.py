"""`top` on terminals of several sizes: the screens as text and the keys."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from orchestrator.core.slot import HeadState
from orchestrator.record.model import STATES_WORST_FIRST, Row
from orchestrator.view.top import Rows, Top
from tests.factories import FACTS, STARTED_UNIX_S, add_event, begun_run, event, make_row
from tests.web.scene import put_turn, with_queue

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
    gone = replace(FACTS, head_pid=2**22 - 1, head_started="1", host=socket.gethostname())
    store = begun_run(place, FACTS if lives else gone)
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
) -> list[str]:
    """Return the lines of the screen after some keys."""

    async def drive() -> list[str]:
        top = Top(folder)
        async with top.run_test(size=size) as pilot:
            await pilot.pause()
            if keys is not None:
                await keys(pilot)
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
    assert first_words(driven(folder, (120, 20), pressed("a", "escape")), "pc1")


def test_the_cursor_stays_with_its_slot_while_rows_move(tmp_path: Path) -> None:
    rows = [make_row(slot=f"pc1/{number}", temperature_c=60.0 - number) for number in range(30)]
    folder = made(tmp_path, rows, outcome=None, lives=True)
    seen: list[str] = []

    async def moved(pilot: Pilot[None]) -> None:
        top, rows_there = pilot.app, pilot.app.query_one(Rows)
        assert isinstance(top, Top)
        await pilot.press("down", "down", "down")
        store = begun_run(folder)
        worse = [make_row(slot="pc1/29", state=HeadState.LOST), *rows[:20]]
        put_turn(store, 5.0, worse)
        top.read()
        await pilot.pause()
        assert rows_there.row is not None
        seen.append(rows_there.row.key)

    lines = driven(folder, (120, 24), moved)
    assert seen == ["pc1/3"]
    assert any("LOST" in line for line in lines)


def test_events_and_cards_have_pages_and_hostile_text_is_text(tmp_path: Path) -> None:
    row = make_row(temperature_c=79.0, reason=HOSTILE, gpu_name=HOSTILE)
    folder = made(tmp_path, [row], [row])
    pages = {key: driven(folder, (120, 20), pressed(key)) for key in ("escape", "e", "d")}
    text = "\n".join(line for lines in pages.values() for line in lines)
    assert "[bold]markup[/bold]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert any("STARTING to RUNNING" in line for line in pages["e"])
    assert any("pc1" in line and "79" in line for line in pages["d"])


def test_a_run_with_a_queue_has_a_line_and_a_page_of_jobs(tmp_path: Path) -> None:
    folder = made(tmp_path, [make_row(slot="pc1/0")])
    assert any("no queue of jobs" in line for line in driven(folder, (120, 20), pressed("J")))
    lines = driven(with_queue(folder, "lr-0", "lr-1"), (120, 20), pressed("J"))
    assert any("jobs: 2 queued" in line for line in lines)
    assert first_words(lines, "lr-") == ["lr-0", "lr-1"]
