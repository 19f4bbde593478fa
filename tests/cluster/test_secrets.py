"""The token of a rehearsal stays in its file while the rehearsal lives, and goes with it."""

from __future__ import annotations

import contextlib
import signal
import stat
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import SMALL, Starter
from tests.scene import wait_for

pytestmark = pytest.mark.ray


def command_lines(root: psutil.Process) -> list[str]:
    """What `ps` shows of a process and everything below it."""
    lines = []
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            lines.append(" ".join(process.cmdline()))
    return lines


def holders(folder: Path, secret: str) -> list[Path]:
    """Return the files below `folder` in which `secret` stands."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a socket, or gone meanwhile
            if path.is_file() and secret.encode() in path.read_bytes():
                found.append(path)
    return found


def test_the_token_of_a_rehearsal_is_in_its_file_alone_and_gone_after_an_interrupt(
    start: Starter, short_tmp: Path
) -> None:
    head = start("--rehearse", "--duration", "10", "--plain", *SMALL)
    head.wait_until_running(3)
    token = wait_for(lambda: next(iter(short_tmp.glob("orch-*/auth_token")), None), "the token")
    secret = token.read_text(encoding="ascii")
    assert len(secret) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700

    lines = command_lines(psutil.Process(head.process.pid))
    assert sum("raylet" in line for line in lines) >= 2, lines
    assert [line for line in lines if secret in line] == []
    logs = [path for path in token.parent.glob("ray/session_*/logs/*") if path.is_file()]
    assert any(path.stat().st_size for path in logs), "Ray has written its logs"
    assert holders(short_tmp, secret) == [token]
    assert head.process.poll() is None, "all this while it ran"

    head.process.send_signal(signal.SIGTERM)
    code, out, err = head.finish()
    assert code == 130, out + err
    assert "Run folder:" in err
    assert secret not in out + err
    assert head.summary()["outcome"] == "interrupted"
    assert head.summary()["steps_ok"] > 0
    assert holders(short_tmp, secret) == []
    assert not token.exists()
