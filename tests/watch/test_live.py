"""The watchers at a terminal, at a pipe, and when either goes away."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from orchestrator.core.slot import HeadState
from orchestrator.view.live import LiveTable, PlainLines
from tests.factories import STARTED_UNIX_S, make_row, make_snapshot
from tests.watch.scene import Clock
from workers.messages import Progress, WorkerState


class Lost(io.StringIO):
    """A stream whose other end is gone after some writes."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure: Exception | None = failure

    def write(self, text: str) -> int:
        if self.failure is not None:
            raise self.failure
        return super().write(text)


def terminal(stream: io.StringIO, width: int = 100, height: int = 20) -> Console:
    return Console(
        file=stream,
        force_terminal=True,
        width=width,
        height=height,
        color_system=None,
        _environ={"TERM": "xterm"},
    )


def test_the_table_is_drawn_four_times_a_second() -> None:
    stream, now = io.StringIO(), Clock()
    table = LiveTable(terminal(stream), now)
    for _ in range(1000):
        now.now_s += 0.01
        table.update(make_snapshot(make_row()))
    drawn = stream.getvalue().count("TFLOP/s ·")
    table.close(make_snapshot(make_row()))

    assert 38 <= drawn <= 41


def test_the_last_frame_stays_whole_and_the_cursor_is_back() -> None:
    stream, now = io.StringIO(), Clock()
    table = LiveTable(terminal(stream), now)
    snapshot = make_snapshot(
        *(make_row(slot=f"pc1/{index}") for index in range(70)), restart_count=2
    )
    stdout = sys.stdout
    table.update(snapshot)
    assert "more" in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex(
        "\x1b[?25l"
    )  # never hidden for long
    stream.truncate(0)
    table.close(snapshot)

    last = stream.getvalue()
    assert all(f"pc1/{index} " in last for index in range(70))
    assert "2 restarts" in last
    assert last.rindex("\x1b[?25h") > last.rfind("\x1b[?25l")
    assert sys.stdout is stdout


def test_a_resized_terminal_gets_a_table_of_its_new_width() -> None:
    stream, now = io.StringIO(), Clock()
    console = terminal(stream, width=200)
    table = LiveTable(console, now)
    table.update(make_snapshot(make_row()))
    console.size = (60, 10)
    now.now_s = 1.0
    stream.truncate(0)
    stream.seek(0)
    table.update(make_snapshot(make_row(state=WorkerState.BACKOFF)))
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", stream.getvalue())
    table.close(make_snapshot(make_row()))

    assert "BACKOFF" in shown
    assert max(map(len, shown.splitlines())) <= 60


def test_closed_before_the_first_update_it_still_shows_the_end() -> None:
    stream = io.StringIO()
    LiveTable(terminal(stream)).close(make_snapshot(make_row()))

    assert "pc1/0" in stream.getvalue()


@pytest.mark.parametrize("failure", [OSError(5, "terminal gone"), BrokenPipeError()])
def test_a_lost_terminal_does_not_end_the_run(
    failure: OSError | ValueError, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Lost(failure)
    console = terminal(stream)

    def broken_pipe() -> None:
        raise SystemExit(1)  # what rich does, less its change to this process's own stdout

    monkeypatch.setattr(console, "on_broken_pipe", broken_pipe)
    stdout = sys.stdout
    table = LiveTable(console)
    table.update(make_snapshot(make_row()))
    table.update(make_snapshot(make_row()))
    table.close(make_snapshot(make_row()))

    assert sys.stdout is stdout


def test_plain_lines_say_changes_once_and_progress_regularly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    stream = io.StringIO()
    plain = PlainLines(stream)
    fallen = make_row(
        progress=Progress(train_step=12, train_steps=40),
        state=WorkerState.BACKOFF,
        size=5734,
        reason="out of memory\x1b[31m\nat 8192",
        oom_count=3,
    )
    for elapsed_s in (0.0, 1.0, 2.0):
        plain.update(make_snapshot(make_row(), elapsed_s=elapsed_s))
    for elapsed_s in (5.0, 9.9, 10.2, 15.0, 30.2, 31.0):
        plain.update(make_snapshot(fallen, elapsed_s=elapsed_s, notices=("pc2 has not joined",)))

    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "AT ", line) for line in stream.getvalue().splitlines()]
    assert lines == [
        "AT pc1/0 RUNNING size 8192: steady",
        "AT pc1/0 BACKOFF step 12/40: out of memory [31m at 8192",
        "AT ! pc2 has not joined",
        "00:10 of 00:30  nodes 2/2  1 BACKOFF  9.610 TFLOP/s  oom 3",
        "00:30 of 00:30  nodes 2/2  1 BACKOFF  9.610 TFLOP/s  oom 3",
    ]


def test_plain_lines_report_progress_while_workers_start() -> None:
    stream = io.StringIO()
    plain = PlainLines(stream)
    for second in (0.0, 9.9, 10.1, 20.2, 24.0):
        now_unix_s = STARTED_UNIX_S + second
        plain.update(
            make_snapshot(make_row(), elapsed_s=0.0, starting_s=second, now_unix_s=now_unix_s)
        )
    set_back = make_snapshot(make_row(), elapsed_s=0.0, now_unix_s=STARTED_UNIX_S - 3600.0)
    plain.update(set_back)
    plain.update(set_back)

    assert [line.partition("  ")[0] for line in stream.getvalue().splitlines()[1:]] == [
        "starting for 00:10, then 00:30 of work",
        "starting for 00:20, then 00:30 of work",
        "00:00 of 00:30",
    ]


def test_plain_lines_end_with_the_table_and_the_sums() -> None:
    stream = io.StringIO()
    rows = (make_row(), make_row(slot="pc2/0", node="pc2", tflops=None, steps_ok=0))
    PlainLines(stream).close(make_snapshot(*rows, restart_count=1, elapsed_s=1.0))

    lines = stream.getvalue().splitlines()
    assert lines[-1] == (
        "100 % of 400 steps good · 0 OOM · 0 emergencies · 1 restart · 824 checks, 0 wrong"
    )
    assert [line.split()[0] for line in lines if "8192/128" in line] == ["pc1/0", "pc2/0"]


@pytest.mark.parametrize(
    ("failure", "goes_on"),
    [(BrokenPipeError(), False), (ValueError("closed"), False), (OSError(28, "disk full"), True)],
)
def test_plain_lines_survive_their_stream_and_a_full_disk(
    failure: OSError | ValueError, goes_on: bool
) -> None:
    stream = Lost(failure)
    plain = PlainLines(stream)
    plain.update(make_snapshot(make_row()))
    stream.failure = None
    plain.close(make_snapshot(make_row(state=HeadState.LOST)))

    assert ("LOST" in stream.getvalue()) == goes_on
