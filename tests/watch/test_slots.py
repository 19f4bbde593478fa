"""The health table and the table of cards of a run, and its lines at every width."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.slot import HeadState
from orchestrator.record.model import Row, Snapshot
from orchestrator.view.cells import MISSING
from orchestrator.view.live import health_lines
from orchestrator.view.slots import cards_table, slots_table
from orchestrator.view.tables import Table, Tone
from tests.factories import make_row, make_snapshot
from tests.watch.strategies import ANY_ROW
from workers.messages import Progress, WorkerState

PROGRESS = Progress(
    train_step=1250,
    train_steps=20_000,
    epoch=0.31,
    loss=2.0413,
    first_loss=10.5312,
    samples_per_s=38.6,
    tokens_per_s=39_526.0,
    micro_batch=3,
    accumulation=4,
    memory_level=2,
    saved_step=1210,
    redone_steps=17,
    data_wait_pct=0.4,
    mfu_pct=31.2,
    eta_s=5832.0,
)
TRAINING = make_row(progress=PROGRESS)


def lines_of(snapshot: Snapshot, width: int) -> list[str]:
    """Return the lines of a terminal of this width, without colours."""
    return [line.plain.rstrip() for line in health_lines(snapshot, width)]


def cell_of(table: Table, name: str, row: int = 0) -> str:
    at = [column.key for column in table.columns].index(name)
    return table.rows[row].cells[at].text


@settings(deadline=None, max_examples=30)
@given(st.lists(ANY_ROW, max_size=5), st.integers(40, 220))
def test_any_rows_fit_any_width_and_steer_no_terminal(rows: list[Row], width: int) -> None:
    snapshot = make_snapshot(*rows, elapsed_s=0.0, duration_s=0.0, nodes_seen=())
    for line in health_lines(snapshot, width):
        assert line.cell_len <= width
        assert line.plain.replace(" ", "a").isprintable() or not line.plain
    assert cards_table(snapshot).name == "cards"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "step loss samples ETA micro saved"),
        (120, "step loss samples ETA micro saved level data MFU"),
        (200, "step loss samples ETA micro saved level data MFU epoch tokens redone card OOM good"),
    ],
)
def test_a_training_shows_how_far_it_is(width: int, shown: str) -> None:
    lines = lines_of(make_snapshot(TRAINING, make_row(slot="pc1/1")), width)

    heading = next(line for line in lines if line.startswith("slot"))
    assert set(shown.split()) <= set(heading.split()), "\n".join(lines)
    row = next(line for line in lines if line.startswith("pc1/0"))
    for cell in ("1250/20000", "2.04/10.53", "38.6", "1:37:12", "3/4", "1210"):
        assert f" {cell} " in f"{row} ", row


def test_a_reason_is_bad_where_the_slot_is_in_trouble() -> None:
    rows = (
        make_row(state=WorkerState.BACKOFF, reason="out of memory\nat 8192"),
        make_row(slot="pc1/1", reason="its lease is short"),
        make_row(slot="pc1/2", reason="the card computes wrongly", verify_errors=1),
    )
    told = {row.key: (row.reason, row.tone) for row in slots_table(make_snapshot(*rows)).rows}
    assert told == {
        "pc1/0": ("out of memory at 8192", Tone.WARN),
        "pc1/2": ("the card computes wrongly", Tone.BAD),
        "pc1/1": ("its lease is short", Tone.DIM),
    }


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "different"])
def test_80x24_shows_ten_slots_and_the_worst_reasons(alike: bool) -> None:
    slots = [*(f"pc1/{index}" for index in range(7)), *(f"pc2/{index}" for index in range(3))]
    states = (HeadState.QUARANTINED, WorkerState.BACKOFF, WorkerState.BACKOFF)
    rows = [
        make_row(
            slot=slot,
            state=HeadState.STARTING if alike else states[index % 3],
            reason="its process starts" if alike else f"the reason of {slot}",
        )
        for index, slot in enumerate(slots)
    ]

    lines = lines_of(make_snapshot(*rows, starting_s=12.0, elapsed_s=0.0), 80)[:23]

    shown = [line.split()[0] for line in lines if line.startswith("pc") and "8192" in line]
    assert sorted(shown) == slots
    text = "\n".join(lines)
    assert ("its process starts" if alike else "pc1/0: the reason of pc1/0") in text
    assert "starting for 00:12, then 00:30 of work" in text


def test_a_card_shows_its_sensors_and_what_its_workers_do() -> None:
    ended = make_row(state=HeadState.LOST, tflops=None, temperature_c=None, margin_c=None)
    rows = (ended, make_row(slot="pc1/1"), make_row(slot="pc1/2", tflops=1.0))
    other = make_row(slot="pc2/0", node="pc2", gpu_name="NVIDIA GeForce RTX 3070", power_w=None)

    table = cards_table(make_snapshot(*rows, other))

    assert [row.cells[0].text for row in table.rows] == ["pc1", "pc2"]
    shown = {column.key: cell_of(table, column.key) for column in table.columns}
    assert shown["card"] == "RTX 3090"
    assert shown["workers"] == "3"
    assert shown["tflops"] == "10.61"
    assert shown["temperature"] == "71/24"
    assert shown["card_memory"] == "21.0/24.0"
    assert cell_of(table, "power", 1) == f"{MISSING}/350"
