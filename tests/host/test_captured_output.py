"""What a worker's process prints, by real processes: in Python, natively, too much, and last before it dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scene import ROOT
from workers.host.captured_output import KEPT_BYTES

_BEGIN = """
import ctypes, json, os, sys, time
from workers.host.captured_output import CapturedOutput
output = CapturedOutput("run-pc1/3")
def told():
    taken = output.take()
    return None if taken is None else [taken.text, taken.dropped_bytes]
"""


def printed_by(code: str, folder: Path, exit_code: int = 0) -> object:
    """Run code behind a capture, in a process of its own; return what it writes into a file."""
    answer = folder / "answer.json"
    end = f"\nopen({str(answer)!r}, 'w').write(json.dumps(answer))\n" if exit_code == 0 else ""
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + code + end], cwd=ROOT, env={"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    return json.loads(answer.read_text()) if exit_code == 0 else None


def test_python_and_native_output_comes_with_the_slice(tmp_path: Path) -> None:
    code = """
print("from Python"); print("an error", file=sys.stderr)
ctypes.CDLL(None).puts(b"from C")
answer = [told(), told()]
print("later")
answer.append(told())
"""
    first, nothing, later = printed_by(code, tmp_path)
    assert sorted(first[0].splitlines()) == ["an error", "from C", "from Python"]
    assert (nothing, later) == (None, ["later\n", 0])


def test_a_step_that_prints_10_mb_is_not_held_up(tmp_path: Path) -> None:
    code = """
began = time.process_time()
for number in range(100_000):
    os.write(1, b"%099d\\n" % number)
spent_s = time.process_time() - began
answer = [told(), spent_s, os.fstat(1).st_size]
"""
    (text, dropped_bytes), spent_s, left_bytes = printed_by(code, tmp_path)
    assert len(text) + dropped_bytes == 10_000_000
    assert KEPT_BYTES - 100 <= len(text) <= KEPT_BYTES
    assert (text[:1], text[-3:], left_bytes) == ("0", "99\n", 0)
    assert spent_s < 5.0  # of processor time, 1 s on a slow machine


@pytest.mark.parametrize(
    "death", ["ctypes.string_at(0)", "os.kill(os.getpid(), 9)"], ids=["segv", "kill"]
)
def test_the_next_process_tells_the_last_words_of_the_one_before(
    tmp_path: Path, death: str
) -> None:
    printed_by(
        f"ctypes.CDLL(None).puts(b'native words'); {death}",
        tmp_path,
        -11 if "string_at" in death else -9,
    )
    text, _ = printed_by("print('hello'); answer = told()", tmp_path)
    assert text.splitlines() == [
        "native words",
        "",
        "[the process ended here; another one begins]",
        "hello",
    ]
