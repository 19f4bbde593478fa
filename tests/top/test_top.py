"""`top` on terminals of several sizes: the screens as text, and the keys.

And `--once` and `--json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchestrator.record.query import WORST_FIRST, Order, parse
from textual.events import Key, MouseScrollDown
from textual.pilot import Pilot
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.control.wire import Answer
from orchestrator.core.slot import HeadState
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, Journal
from orchestrator.jobs.model import Submitted
from orchestrator.record.archive import Follower
from orchestrator.record.model import STATES_WORST_FIRST, Row
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.view.top.app import LinesView, Top
from orchestrator.view.top.pages import read_slot_lines
from orchestrator.view.top.view import SORTS, Send, View, follow, move, sort_by_next
from tests.factories import FACTS, event, make_job, make_row, make_snapshot, record
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
        store.slots(
            record(row.slot, state=row.state.value, reason=row.reason, row=row.to_dict())
            for row in rows
        )
        told = {"from_state": "STARTING", "to_state": "RUNNING", "cause": HOSTILE}
        store.event({**event(name="state", **told), "slot": rows[0].slot if rows else None})
        store.update(make_snapshot(*rows, elapsed_s=float(second)))
    if outcome is not None:
        store.end(outcome, 0, None, ())
    return place


def every_state() -> list[Row]:
    return [
        make_row(slot=f"pc1/{index}", state=state, reason=f"the reason of {state.value}")
        for index, state in enumerate(STATES_WORST_FIRST)
    ]


def screen(top: Top) -> list[str]:
    return [
        line.plain.rstrip()
        for name in ("#header", "#rows", "#keys")
        for line in top.query_one(name, LinesView).lines
    ]


def driven(
    folder: Path,
    size: tuple[int, int],
    keys: Callable[[Pilot[None]], Awaitable[None]] | None = None,
    send: Send | None = None,
) -> list[str]:
    """Return the screen after some keys."""

    async def drive() -> list[str]:
        top = Top(folder, View(), send)
        async with top.run_test(size=size) as pilot:
            await pilot.pause()
            top.look()
            await pilot.pause()
            if keys is not None:
                await keys(pilot)
                await top.workers.wait_for_complete()
                await pilot.pause()
            top.draw()
            return screen(top)

    return asyncio.run(drive())


def pressed(*keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def press(pilot: Pilot[None]) -> None:
        await pilot.press(*keys)

    return press


CASES: dict[str, tuple[list[Row], str | None]] = {
    "states": (every_state(), "good"),
    "many": (
        [make_row(slot=f"pc{n // 50}/{n % 50}", node=f"pc{n // 50}") for n in range(1_000)],
        "good",
    ),
    "killed": (
        [make_row(), make_row(slot="pc1/1", state=WorkerState.BACKOFF, reason="memory ran out")],
        None,
    ),
    "empty": ([], "good"),
}


def comparable(lines: list[str]) -> list[str]:
    """Leave out how long the head has been gone: that depends on the day."""
    return [line.partition(" for ")[0] if line.startswith("head gone") else line for line in lines]


def assert_golden(lines: list[str], name: str) -> None:
    golden = GOLDENS / f"{name}.txt"
    if UPDATE:
        golden.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == golden.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("case", "size"),
    [("states", (80, 24)), ("states", (200, 60)), ("many", (120, 30)), ("killed", (80, 24)),
     ("empty", (120, 30))],
    ids=str,
)  # fmt: skip
def test_the_screen_is_the_one_that_was_looked_at(
    tmp_path: Path, case: str, size: tuple[int, int]
) -> None:
    rows, outcome = CASES[case]
    lines = comparable(driven(made(tmp_path, rows, outcome=outcome), size))
    assert_golden(lines, f"{case}-{size[0]}x{size[1]}")
    assert all(len(line) <= size[0] for line in lines)


@pytest.mark.parametrize("size", [(40, 10), (20, 5)], ids="{0[0]}x{0[1]}".format)
def test_a_tiny_terminal_shows_what_fits(tmp_path: Path, size: tuple[int, int]) -> None:
    lines = driven(made(tmp_path, every_state()), size)
    assert any("pc1/0" in line for line in lines)
    assert_golden(lines, f"tiny-{size[0]}x{size[1]}")


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

    lines = driven(folder, (120, 30), waited)
    assert lines[-1].startswith("late for 00:12")
    assert_golden(lines, "late-120x30")


def test_alerts_stand_on_top_and_have_a_page_with_what_to_do(tmp_path: Path) -> None:
    lost = [
        make_row(slot=f"pc1/{number}", state=HeadState.QUARANTINED, reason=HOSTILE)
        for number in range(7)
    ]
    folder = made(tmp_path, lost, outcome=None, lives=True)
    assert driven(folder, (120, 20))[0].startswith("! slot pc1/0 was given up: [31mred")
    assert driven(folder, (120, 20))[0].endswith("(and 6 more)")
    page = driven(folder, (120, 20), pressed("a"))
    at = next(number for number, line in enumerate(page) if line.startswith("critical · for 00:0"))
    assert page[at].endswith("pc1/0, pc1/1, pc1/2, pc1/3, pc1/4, pc1/5, pc1/6")
    assert page[at + 1].startswith("   slot pc1/0 was given up: ")
    assert "reinstate" in "".join(page[at + 2 :])
    (other := tmp_path / "other").mkdir()
    assert "nothing is wrong" in "".join(driven(made(other, [make_row()]), (120, 20), pressed("a")))


def test_keys_sort_filter_and_move(tmp_path: Path) -> None:
    rows = [
        make_row(slot="pc1/0", temperature_c=60.0),
        make_row(slot="pc1/1", temperature_c=80.0),
        make_row(slot="pc2/0", node="pc2", temperature_c=None),
    ]
    folder = made(tmp_path, rows)

    def slots(*keys: str) -> list[str]:
        lines = driven(folder, (120, 20), pressed(*keys))
        return [line.split()[0] for line in lines if line.startswith("pc") and "/128" in line]

    assert slots() == ["pc1/0", "pc1/1", "pc2/0"]
    assert slots("greater_than_sign", "r") == ["pc2/0", "pc1/1", "pc1/0"], "by slot, reversed"
    assert slots("slash", *"temp>75", "enter") == ["pc1/1"]
    assert slots("slash", *"!pc2", "enter") == ["pc1/0", "pc1/1"]
    wrong = driven(folder, (120, 20), pressed("slash", *"cap>3", "enter"))
    assert "write a unit" in wrong[-1], "it can be corrected"
    assert "pc1/1" in driven(folder, (120, 20), pressed("j", "enter"))[1]
    assert slots("o", *"temp", "enter") == ["pc1/1", "pc1/0", "pc2/0"]
    assert any("goes back" in line for line in driven(folder, (120, 40), pressed("question_mark")))


def test_a_mouse_moves_the_cursor_and_opens_a_slot(tmp_path: Path) -> None:
    folder = made(
        tmp_path, [make_row(slot=f"pc1/{number}", reason=f"of {number}") for number in range(30)]
    )

    def clicked(line: int, times: int = 1, notches: int = 0) -> list[str]:
        async def hands(pilot: Pilot[None]) -> None:
            for _ in range(notches):
                await pilot._post_mouse_events([MouseScrollDown], "#rows")
            await pilot.click("#rows", offset=(5, line), times=times)

        return driven(folder, (120, 24), hands)

    titles = 3
    assert "pc1/4 RUNNING: of 4" in clicked(titles + 4)
    assert "pc1/2 RUNNING: of 2" in clicked(titles + 2, notches=1), (
        "what is on the screen stays there"
    )
    assert "pc1/4" in clicked(titles + 4, times=2)[1]


def test_the_page_of_a_slot_shows_all_and_hostile_text_is_text(tmp_path: Path) -> None:
    looks = [
        [
            make_row(
                slot="pc1/0",
                temperature_c=50.0 + second,
                oom_count=second // 5,
                reason=HOSTILE,
                gpu_name=HOSTILE,
            )
        ]
        for second in range(30)
    ]
    lines = driven(made(tmp_path, *looks), (120, 60), pressed("enter"))
    text = "\n".join(lines)
    assert "50 to 79" in text
    assert "0 to 1" in text, "out-of-memory errors are drawn as their growth"
    assert "RUNNING" in text
    assert "[bold]markup[/bold]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "temp C" in "\n".join(driven(tmp_path / FACTS.run_id, (60, 60), pressed("enter", "m")))
    cards = driven(tmp_path / FACTS.run_id, (120, 20), pressed("d"))
    assert any("1 worker " in line and "79" in line for line in cards)
    assert any("state" in line for line in driven(tmp_path / FACTS.run_id, (120, 20), pressed("e")))


def test_pages_of_nodes_and_runs(tmp_path: Path) -> None:
    folder = made(tmp_path, [make_row(slot="pc1/0")])
    shutil.copytree(folder, tmp_path / "20261121-051500-0b77")
    assert any(
        "pc1" in line and "1 RUNNING" in line for line in driven(folder, (120, 20), pressed("n"))
    )
    listed = driven(folder, (120, 20), pressed("u"))
    assert [line[:20] for line in listed if line.startswith("2026")] == [
        "20261121-051500-0b77",
        FACTS.run_id,
    ]
    assert any("pc1/0" in line for line in driven(folder, (120, 20), pressed("u", "j", "enter")))


def test_a_run_with_a_queue_has_a_line_and_a_page_of_jobs(tmp_path: Path) -> None:
    folder = made(tmp_path, [make_row(slot="pc1/0")])
    assert any("no queue of jobs" in line for line in driven(folder, (120, 20), pressed("J")))
    (folder / QUEUE_NAME).mkdir()
    journal = Journal(folder / QUEUE_NAME / JOURNAL_NAME)
    journal.append([Submitted(at_s=0.0, job=make_job("lr-0"))])
    journal.close()
    lines = driven(folder, (120, 20), pressed("J"))
    assert any("jobs: 1 queued" in line for line in lines)
    assert any(line.split()[:2] == ["lr-0", "QUEUED"] for line in lines)


def test_commands_name_each_slot_and_wait_for_yes(tmp_path: Path) -> None:
    rows = [make_row(slot=f"pc1/{number}") for number in range(3)]
    folder = made(tmp_path, rows, outcome=None, lives=True)
    sent: list[tuple[str, tuple[str, ...], int | None]] = []

    def send(to: Path, do: str, slots: Sequence[str], *, amount_bytes: int | None) -> Answer:
        assert to == folder
        sent.append((do, tuple(slots), amount_bytes))
        return Answer(ok=do != "drain", id="1", effect="held after its slice", error="not now")

    def shown(*keys: str, by: Send | None = send) -> list[str]:
        sent.clear()
        return driven(folder, (120, 20), pressed(*keys), send=by)

    asked = shown("P")
    assert any("pause 1 slot? y sends it" in line for line in asked)
    assert "  pc1/0" in asked
    assert not sent
    shown("P", "escape", "y")
    assert not sent, "after esc there is nothing to agree to"
    shown("space", "space", "P", "y")
    assert sent == [("pause", ("pc1/0", "pc1/1"), None)]
    shown("space", "slash", *"pc1/2", "enter", "U", "y")
    assert sent == [("unpause", ("pc1/2",), None)], "a new filter clears the marks"
    shown("C", *"3", "x", "enter", "backspace", "backspace", *"2GiB", "enter", "y")
    assert sent == [("cap", ("pc1/0",), 2 * 2**30)], "what is no amount can be corrected"
    assert "refused: not now" in shown("D", "y")[-1]
    assert "read-only" in shown("R", "y", by=None)[-1]
    assert not sent


def test_a_finished_run_is_shown_as_it_ended(tmp_path: Path) -> None:
    looks = [[make_row(slot="pc1/0", size=1_000 + second)] for second in range(20)]
    lines = driven(made(tmp_path, *looks), (200, 20))
    assert any(line.startswith("pc1/0 ") and " 1019/128" in line for line in lines)
    assert lines[-1].startswith("ended, good")


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    folder = made(tmp_path, [make_row(slot="pc1/0")], outcome=None)

    async def changed(pilot: Pilot[None]) -> None:
        store = RunStore(folder / STORE_NAME)
        row = make_row(slot="pc1/0", state=HeadState.LOST, reason="its node has left")
        store.begin(FACTS)
        store.slots([record(row.slot, state="LOST", reason=row.reason, row=row.to_dict())])
        store.update(make_snapshot(row, elapsed_s=5.0))
        top = pilot.app
        assert isinstance(top, Top)
        top.look()

    assert any("LOST" in line for line in driven(folder, (120, 20), changed))


def test_once_and_json_print_what_the_screen_would_show(tmp_path: Path) -> None:
    rows = [
        make_row(slot="pc1/0", temperature_c=60.0),
        make_row(slot="pc1/1", temperature_c=80.0, reason=HOSTILE),
    ]
    made(tmp_path, rows)
    where = ["--run-dir", str(tmp_path)]
    once = CliRunner().invoke(app, ["top", "--once", "--sort", "temp", *where])
    lines = [line.split()[0] for line in once.output.splitlines() if line.startswith("pc1/")]
    assert (once.exit_code, lines) == (0, ["pc1/1", "pc1/0"])
    assert "\x1b" not in once.output
    told = json.loads(
        CliRunner().invoke(app, ["top", "--json", "--filter", "temp<75", *where]).output
    )
    assert told["schema"] == 1
    assert told["freshness"] == "ended"
    assert [row["slot"] for row in told["workers"]] == ["pc1/0"]
    wrong = CliRunner().invoke(app, ["top", "--once", "--filter", "cap>3", *where])
    assert "write a unit" in str(wrong.exception)


def test_a_slot_shows_what_it_printed_and_all_of_its_error(tmp_path: Path) -> None:
    folder = made(tmp_path, [make_row()])
    kept = folder / "output" / "pc1" / "0.log"
    kept.parent.mkdir(parents=True)
    kept.write_text("\x1b[2J    epoch 1\n", encoding="utf-8")
    cause = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10), in the layer head"
    error = {**event(name="workload_error", traceback=f"Traceback:\n  {cause}"), "slot": "pc1/0"}
    store = RunStore(folder / STORE_NAME)
    store.event(error)
    store.commit()
    frame = Follower(folder).look()
    (row,) = frame.snapshot.rows
    lines = [line.plain for line in read_slot_lines(folder, row, frame.snapshot, None, 60)]
    assert lines[-2:] == ["printed", "    epoch 1"]
    assert all(len(line) <= 60 for line in lines[4:])
    assert cause.replace(" ", "") in "".join("".join(lines).split())


frames = st.lists(
    st.builds(
        lambda number, state, heat: make_row(slot=f"pc1/{number}", state=state, temperature_c=heat),
        st.integers(0, 30),
        st.sampled_from(STATES_WORST_FIRST),
        st.none() | st.floats(20, 90),
    ),
    max_size=30,
    unique_by=lambda row: row.slot,
)
orders = st.builds(Order, st.sampled_from(SORTS), st.booleans())


@given(
    st.lists(st.tuples(frames, orders, st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(-40, 40),
)
def test_the_cursor_stays_with_its_slot_on_the_screen(
    looks: list[tuple[list[Row], Order, int]], by: int
) -> None:
    view = View()
    for index, (rows, order, height) in enumerate(looks):
        before = view.slot
        view = View(order=order, slot=view.slot, line=view.line, first=view.first)
        shown = view.rows(rows)
        view = follow(view, shown, height)
        if index == 0:
            view = move(view, shown, by, height)
        elif before in {row.slot for row in rows}:
            assert view.slot == before
        if not shown:
            assert view.slot is None
            continue
        assert shown[view.line].slot == view.slot
        assert view.first <= view.line < view.first + height
        assert view.first == 0 or view.first + height <= len(shown), "no line is left empty below"


def test_every_column_sorts_and_the_round_ends_at_worst_first() -> None:
    view = View()
    seen = []
    for _ in SORTS:
        seen.append(view.order.key)
        view = sort_by_next(view, 1)
    assert tuple(seen) == SORTS
    assert view.order == WORST_FIRST
    assert sort_by_next(view, -1).order.key == SORTS[-1]


def test_the_cursor_goes_to_a_neighbour_of_a_filtered_row() -> None:
    rows = [make_row(slot=f"pc1/{number}", state=WorkerState.RUNNING) for number in range(9)]
    view = move(View(), View().rows(rows), 5, 4)
    assert (view.slot, view.first) == ("pc1/5", 2)
    narrow = View(wanted=parse("!pc1/5"), slot=view.slot, line=view.line, first=view.first)
    assert follow(narrow, narrow.rows(rows), 4).slot == "pc1/6"
