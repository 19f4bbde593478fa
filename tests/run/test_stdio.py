"""Whose words end up where, with real file descriptors in a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: What every script of these tests begins with; `LOG` is its only argument.
PREAMBLE = """
import os, subprocess, sys
from pathlib import Path
from orchestrator.run.stdio import own_screen
LOG = Path(sys.argv[1])
"""


def run(script: str, log: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh process and return what came out of it."""
    command = [sys.executable, "-c", PREAMBLE + script, str(log)]
    usual: dict[str, object] = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    done: subprocess.CompletedProcess[str] = subprocess.run(command, **{**usual, **changes})  # type: ignore[call-overload] # noqa: PLW1510 - in the dict
    return done


def test_our_words_go_to_the_user_and_everybody_elses_to_the_log(tmp_path: Path) -> None:
    done = run(
        """
with own_screen(LOG) as screen:
    print("ours out", file=screen.out)
    print("ours err", file=screen.err)
    print("library print")
    print("library stderr", file=sys.stderr)
    os.write(1, b"raw out\\n")
    os.write(2, b"raw err\\n")
    subprocess.run(["/bin/sh", "-c", "echo child out; echo child err >&2"], check=True)
""",
        tmp_path / "log",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ours out\n", "ours err\n")
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        "child err",
        "child out",
        "library print",
        "library stderr",
        "raw err",
        "raw out",
    ]


def test_what_was_printed_before_and_after_goes_to_the_user_in_its_order(tmp_path: Path) -> None:
    done = run(
        """
print("before", end=" ")
with own_screen(LOG) as screen:
    print("during", end=" ", file=screen.out)
    print("buried", end=" ")
print("after")
os.write(2, b"raw after\\n")
""",
        tmp_path / "log",
    )
    assert (done.stdout, done.stderr) == ("before during after\n", "raw after\n")
    assert (tmp_path / "log").read_text() == "buried "


def test_both_are_restored_after_an_exception(tmp_path: Path) -> None:
    done = run(
        """
try:
    with own_screen(LOG):
        raise RuntimeError("boom")
except RuntimeError as error:
    print("caught", error)
    subprocess.run(["/bin/sh", "-c", "echo child >&2"], check=True)
""",
        tmp_path / "log",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught boom\n", "child\n")
    assert (tmp_path / "log").read_text() == ""


def test_no_file_descriptor_is_left_open_or_handed_to_children(tmp_path: Path) -> None:
    done = run(
        """
LIST = ["/bin/sh", "-c", "ls /proc/$$/fd > " + sys.argv[1] + ".children"]
before = sorted(os.listdir("/proc/self/fd"))
for _ in range(3):
    with own_screen(LOG):
        subprocess.run(LIST, check=True)
print(sorted(os.listdir("/proc/self/fd")) == before)
""",
        tmp_path / "log",
    )
    assert done.stdout == "True\n", done.stderr
    # The shell opens one for its redirection at most; ours would be beyond 3.
    assert set((tmp_path / "log.children").read_text().split()) <= {"0", "1", "2", "3", "10"}


def test_the_log_is_appended_to_and_for_this_user_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("one", "two"):
        run(f"with own_screen(LOG): print({word!r})", log)
    assert log.read_text() == "one\ntwo\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_without_a_log_the_words_of_others_are_dropped(tmp_path: Path) -> None:
    done = run("with own_screen(None) as screen:\n    print('dropped')\n    print('shown', file=screen.out)", tmp_path)
    assert (done.stdout, done.stderr) == ("shown\n", "")


def test_a_log_that_cannot_be_written_leaves_the_screen_as_it_was(tmp_path: Path) -> None:
    done = run(
        """
try:
    with own_screen(LOG):
        print("never")
except OSError as error:
    print("refused", type(error).__name__)
""",
        tmp_path / "no folder" / "log",
    )
    assert (done.stdout, done.stderr) == ("refused FileNotFoundError\n", "")


def test_text_the_terminal_cannot_show_is_no_crash(tmp_path: Path) -> None:
    done = run(
        "with own_screen(LOG) as screen: print('3 \\u00d7 \\udcff', file=screen.out)",
        tmp_path / "log",
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stdout) == (0, "3 ? ?\n")


def test_a_reader_that_went_away_is_no_crash_at_the_end(tmp_path: Path) -> None:
    """The reader of both leaves while text waits to be written; what comes after the run still runs."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(
            """
with own_screen(LOG) as screen:
    screen.out.write("a half line")
    screen.err.write("another")
    print("library")
LOG.with_suffix(".after").write_text("reached")
""",
            tmp_path / "log",
            capture_output=False,
            stdout=writer,
            stderr=writer,
        )
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "log.after").read_text() == "reached"
    assert (tmp_path / "log").read_text() == "library\n"


def test_a_reader_that_goes_away_in_the_middle_is_told_to_whoever_writes(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(
            """
try:
    with own_screen(LOG) as screen:
        print("a line", file=screen.out)
except BrokenPipeError:
    LOG.with_suffix(".after").write_text("told")
""",
            tmp_path / "log",
            capture_output=False,
            stdout=writer,
        )
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "log.after").read_text() == "told"
