"""The health table on a real console: every width, nasty data, and what is left out first."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from orchestrator.core.slot import HeadState
from orchestrator.record.model import Row, Snapshot
from orchestrator.view.cells import (
    EMPTY,
    FULL,
    MISSING,
    PART,
    RULE,
    bar,
    clock,
    number,
    share_pct,
    shorten,
    whole,
)
from orchestrator.view.table import columns_for, health_table, kept_longest_first
from tests.factories import make_row, make_snapshot
from tests.watch.strategies import ANY_ROW
from workers.messages import Progress, WorkerState

WIDTHS = (200, 150, 120, 100, 80, 60, 40)

NASTY = (
    {"reason": "out of memory " * 200},
    {"reason": "[red]x[/red] [bold", "state": WorkerState.BACKOFF},
    {"reason": "two\nlines\x1b[31m\x07\t\u202eright to left", "state": WorkerState.PAUSED},
    {"reason": "メモリ不足 " * 30, "gpu_name": "カード" * 20, "state": WorkerState.EMERGENCY},
    {"size": 10**40, "batch": 10**400, "tflops": 1e300, "steps_ok": 10**30, "oom_count": 10**12},
    {"tflops": math.nan, "power_w": math.inf, "heartbeat_age_s": 1e9, "temperature_c": -273.15},
    {"allocated_bytes": 10**400, "reserved_bytes": 0, "cap_bytes": 0, "device_used_bytes": 10**400},
    {"slot": "the-workstation-in-the-cellar-of-the-house/12", "state": HeadState.LOST},
    {
        "progress": Progress(
            train_step=10**400, loss=math.nan, first_loss=10**400, eta_s=math.inf, micro_batch=-1
        )
    },
    {"dtype": "\udc80", "gpu_name": "", "reason": "", "state": WorkerState.WARMING},
)


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


def table_of(snapshot: Snapshot, width: int, height: int | None = None) -> list[str]:
    """Print the table to a real console of a width and return its lines, without colour."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(
        health_table(snapshot, width, height)
    )
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_nasty_rows_keep_to_their_lines(width: int) -> None:
    rows = [make_row(**{"slot": f"pc1/{index}", **nasty}) for index, nasty in enumerate(NASTY)]
    snapshot = make_snapshot(
        *rows,
        Row(slot="pc1/77", node="pc1", state=HeadState.STARTING, reason=""),
        notices=("disk\nfull" * 50,),
    )

    lines = table_of(snapshot, width)

    assert all(cell_len(line) <= width for line in lines)
    assert all(line.replace(" ", "a").isprintable() for line in lines)
    rule = next(number for number, line in enumerate(lines) if set(line.strip()) == {RULE})
    assert (
        sum(state.value in line for line in lines[rule:] for state in (*WorkerState, *HeadState))
        == len(NASTY) + 1
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_slot_state_size_and_throughput_are_always_there(width: int) -> None:
    snapshot = make_snapshot(make_row(state=HeadState.QUARANTINED), make_row(slot="pc1/10"))

    lines = table_of(snapshot, width)

    for slot in ("pc1/0 ", "pc1/10"):
        (line,) = (line for line in lines if line.startswith(slot))
        assert "8192/128" in line
        assert "9.61" in line
    assert any("QUARANTINED" in line and "8192/128" in line for line in lines)


@settings(deadline=None)
@given(st.lists(ANY_ROW, max_size=5), st.integers(1, 220), st.one_of(st.none(), st.integers(1, 60)))
def test_any_rows_fit_any_width(rows: list[Row], width: int, height: int | None) -> None:
    table = health_table(
        make_snapshot(*rows, elapsed_s=0.0, duration_s=0.0, nodes_seen=()), width, height
    )

    assert all(cell_len(line.plain) <= width for line in table.renderables)


def test_markup_in_a_reason_is_shown_as_it_is() -> None:
    snapshot = make_snapshot(make_row(state=WorkerState.BACKOFF, reason="[red]x[/red]"))

    assert "[red]x[/red]" in "\n".join(table_of(snapshot, 200))
    assert "[red]x[/red]" in "\n".join(table_of(snapshot, 60))


def test_nothing_that_is_asked_for_is_missing_when_there_is_room() -> None:
    row = make_row(oom_count=3, emergency_count=1, steps_ok=9997, steps_error=3, verify_errors=2)

    text = "\n".join(table_of(make_snapshot(row), 230))

    for shown in (
        "nodes 2/2", "1 RUNNING", "9.610 TFLOP/s", "00:10 of 00:30", "33 %", "00:20 left",
        "RTX 3090", "8192/128", "fp16", " 97 ", "███████▒▒░", "1.90/2.40/2.63", "3/1", "99.9", "60/59", " 71/24 ",
        " 62 ", "281/350", "412/2", " 0.8", "21.0/24.0", "steady",
    ):  # fmt: skip
        assert shown in text


def test_columns_without_one_value_go_before_any_other() -> None:
    sensors = {
        "temperature_c": None,
        "margin_c": None,
        "power_w": None,
        "power_limit_w": None,
        "throttle_pct": None,
    }
    snapshot = make_snapshot(make_row(**sensors))

    assert "temp" not in "\n".join(table_of(snapshot, 120))
    wide = table_of(snapshot, 230)
    assert "temp" in "\n".join(wide)
    assert f"  {MISSING}  " in next(line for line in wide if line.startswith("pc1/0"))


def test_what_a_card_does_not_report_is_said() -> None:
    def drawn(**values: object) -> str:
        return "\n".join(table_of(make_snapshot(make_row(**values)), 120))

    assert "VRAM temperature: not reported by GeForce" in drawn(gpu_name="NVIDIA GeForce RTX 3090")
    assert "not reported" not in drawn(
        gpu_name="NVIDIA GeForce RTX 3090", memory_temperature_c=84.0
    )
    assert "not reported" not in drawn(gpu_name="NVIDIA H100 80GB HBM3")
    assert "not reported" not in drawn(gpu_name="NVIDIA GeForce RTX 3090", temperature_c=None)


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "step loss samples ETA micro saved"),
        (120, "step loss samples ETA micro saved level data MFU"),
        (
            200,
            "step loss samples ETA micro saved level data MFU epoch tokens redone card VRAM OOM good",
        ),
    ],
)
def test_what_trains_shows_how_far_it_is_and_nothing_else_does(width: int, shown: str) -> None:
    lines = table_of(make_snapshot(TRAINING, make_row(slot="pc1/1")), width)
    heading = next(line for line in lines if line.lstrip().startswith("slot"))
    assert set(shown.split()) <= set(heading.split()), "\n".join(lines)
    (row,) = [line for line in lines if line.startswith("pc1/0")]
    for cell in ("1250/20000", "2.04/10.53", "38.6", "1:37:12", "3x4", "1210"):
        assert f" {cell} " in f"{row} ", row
    without = table_of(make_snapshot(make_row()), 200)
    assert not {"step", "loss", "ETA", "micro"} & set("\n".join(without).split())


def test_every_column_has_a_place_in_the_order() -> None:
    for row in (make_row(), TRAINING):
        names = [*(column.name for column in columns_for([row])), "reason"]
        assert sorted(names) == sorted(kept_longest_first([row]))


def test_a_reason_gets_its_own_line_when_narrow() -> None:
    snapshot = make_snapshot(
        make_row(state=WorkerState.BACKOFF, reason="out of memory at 8192"),
        make_row(slot="pc1/1", reason="all is well"),
        make_row(slot="pc1/2", reason="the card computes wrongly", verify_errors=1),
    )

    text = "\n".join(table_of(snapshot, 80))

    assert "  └ out of memory at 8192" in text
    assert "  └ the card computes wrongly" in text
    assert "all is well" not in text


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "different"])
def test_80x24_shows_the_reference_pair_and_its_worst_reasons(alike: bool) -> None:
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

    lines = table_of(make_snapshot(*rows, starting_s=12.0, elapsed_s=0.0), 80, 23)

    assert sorted(line.split()[0] for line in lines if line.startswith("pc")) == slots
    reasons = [line.split(maxsplit=1)[1] for line in lines if "└" in line]
    if alike:
        assert reasons == ["these 10: its process starts"]
    else:
        assert reasons == [f"the reason of {slot}" for slot in ("pc1/0", "pc1/3", "pc1/6", "pc2/2")]
        assert len(lines) == 23
    assert "starting for 00:12, then 00:30 of work" in "\n".join(lines)


def test_where_not_all_rows_fit_the_worst_keep_their_reasons() -> None:
    rows = [
        make_row(slot=f"a/{index}", state=WorkerState.BACKOFF, reason=f"{index}")
        for index in range(20)
    ]

    lines = table_of(make_snapshot(*rows), 80, 23)

    assert [line for line in lines if "└" in line] == ["  └ 0", "  └ 1", "  └ 2"]
    long = table_of(
        make_snapshot(make_row(state=WorkerState.BACKOFF, reason="out of memory, " * 20)), 80, 23
    )
    (reason,) = (line for line in long if "└" in line)
    assert reason.endswith("…"), reason
    assert "… and 10 more BACKOFF" in lines
    assert len(lines) == 23


@pytest.mark.parametrize("height", [5, 10, 12, 24, 50])
def test_seventy_rows_end_in_a_line_that_counts_the_rest(height: int | None) -> None:
    rows = [make_row(slot=f"pc1/{index}") for index in range(69)]
    lost = make_row(slot="pc2/0", state=HeadState.LOST, reason="pc2 is gone")
    snapshot = make_snapshot(*rows, lost, notices=tuple(f"notice {index}" for index in range(30)))

    lines = table_of(snapshot, 120, height)

    shown = sum(line.startswith(("pc1/", "pc2/")) for line in lines)
    assert shown >= 1
    assert any(line == f"… and {70 - shown} more RUNNING" for line in lines)
    assert any(line.startswith("pc2/0") for line in lines)
    assert len(lines) <= max(height, 10)


def test_hidden_rows_of_several_states_are_counted_by_state() -> None:
    rows = [make_row(slot=f"a/{i}", state=WorkerState.BACKOFF, reason="") for i in range(10)]
    snapshot = make_snapshot(*rows, *(make_row(slot=f"b/{i}") for i in range(10)))

    assert "… and 13 more: 3 BACKOFF, 10 RUNNING" in table_of(snapshot, 120, 13)


def test_bytes_of_a_rehearsal_are_in_mib() -> None:
    row = make_row(allocated_bytes=100 * 2**20, reserved_bytes=160 * 2**20, cap_bytes=213 * 2**20)

    assert "100/160/213" in "\n".join(table_of(make_snapshot(row), 100))


def test_no_workers_yet() -> None:
    lines = table_of(make_snapshot(notices=("pc2 has not joined",)), 80)

    assert "no workers yet" in lines
    assert "! pc2 has not joined" in lines


def test_bars_and_what_is_missing_are_one_cell_wide() -> None:
    assert {cell_len(char) for char in (FULL, PART, EMPTY, MISSING)} == {1}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (share_pct(0.99999), "99.9"),
        (share_pct(1.0), "100"),
        (share_pct(None), None),
        (share_pct(-1.8e305), "-2e+305"),
        (number(0.0, 3), "0.000"),
        (number(0.0004, 3), "<0.001"),
        (number(1e300, 0), "1e+300"),
        (number(math.nan, 0), None),
        (whole(10**9), "1e+9"),
        (whole(0), "0"),
        (clock(3725), "1:02:05"),
        (clock(math.nan), "00:00"),
        (bar(full=0.001, part=5.0, width=4), "█▒▒▒"),
        (bar(full=0.0, part=0.0, width=4), "░░░░"),
        (shorten("メモリ", 4), "メ…"),
        (shorten("abc", 0), ""),
    ],
)
def test_values_as_text(shown: object, expected: object) -> None:
    assert shown == expected
