"""The watchers at a terminal and at a pipe, and after either is closed."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from orchestrator.core.slot import HeadState
from orchestrator.view.live import LiveTable, PlainLines
from tests.factories import make_row, make_snapshot
from workers.messages import WorkerState


class Lost(io.StringIO):
    """A stream whose other end closes after some writes."""

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


def test_the_last_frame_stays_whole_and_the_cursor_is_back() -> None:
    stream = io.StringIO()
    table = LiveTable(terminal(stream))
    snapshot = make_snapshot(
        *(make_row(slot=f"pc1/{index}", restarts=index // 68) for index in range(70))
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


@pytest.mark.parametrize("height", [8, 20, 50])
def test_a_short_terminal_shows_the_worst_rows_and_says_how_much_is_hidden(height: int) -> None:
    stream = io.StringIO()
    rows = [make_row(slot=f"pc1/{index}") for index in range(69)]
    lost = make_row(slot="pc2/0", state=HeadState.LOST)
    notices = tuple(f"notice {index}" for index in range(30))
    snapshot = make_snapshot(*rows, lost, notices=notices)
    table = LiveTable(terminal(stream, width=120, height=height))
    table.update(snapshot)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", stream.getvalue()).splitlines()
    table.close(snapshot)

    assert len(shown) <= height - 1
    assert re.fullmatch(r"… \d\d lines more", shown[-1].strip())
    assert any("27 more warnings" in line for line in shown)
    assert height == 8 or any(line.startswith("pc2/0") for line in shown)


@pytest.mark.parametrize("failure", [OSError(5, "terminal gone"), BrokenPipeError()])
def test_a_lost_terminal_does_not_end_the_run(
    failure: OSError | ValueError, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Lost(failure)
    console = terminal(stream)

    def broken_pipe() -> None:
        raise SystemExit(1)  # as rich does, without its change of this process's stdout

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
        "AT pc1/0 RUNNING: steady",
        "AT pc1/0 BACKOFF: out of memory [31m at 8192",
        "AT ! pc2 has not joined",
        "nodes 2/2 · 1 BACKOFF · 9.610 TFLOP/s · 00:10 of 00:30",
        "nodes 2/2 · 1 BACKOFF · 9.610 TFLOP/s · 00:30 of 00:30",
    ]


def test_plain_lines_end_with_the_table_and_the_sums() -> None:
    stream = io.StringIO()
    rows = (make_row(restarts=1), make_row(slot="pc2/0", node="pc2", tflops=None, steps_ok=0))
    PlainLines(stream).close(make_snapshot(*rows, elapsed_s=1.0))

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
