"""A rehearsal keeps to itself: its Ray listens on loopback only, and its token stays in its file and goes with it."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import stat
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import SMALL, Starter
from tests.scene import wait_for

pytestmark = pytest.mark.ray

#: Ray would prepare this with the help of an agent that a rehearsal does not start. So it must not
#: be asked for.
RUNTIME_ENVIRONMENT = {
    "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"UNUSED": "1"}}}'
}

#: The head and what cleans up behind it, Ray's own two, what stands for Ray's agents, workers, and
#: what watches them.
PROGRAMS = (
    "python",
    "gcs_server",
    "raylet",
    "cat",
    "ray::WorkerActor",
    "ray::Observer",
    "ray::IDLE",
)


def listening(processes: list[psutil.Process]) -> dict[str, set[tuple[str, int]]]:
    """Return what listens, by the program's name: addresses and ports of TCP, and of UDP too."""
    found: dict[str, set[tuple[str, int]]] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                    found.setdefault(process.name(), set()).add(
                        (connection.laddr.ip, connection.laddr.port)
                    )
    return found


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def addresses_in_the_network() -> set[str]:
    """Addresses of this machine that others can reach; none where it has only loopback."""
    all_of_it = [address for card in psutil.net_if_addrs().values() for address in card]
    return {
        each.address
        for each in all_of_it
        if each.family is socket.AF_INET and not is_loopback(each.address)
    }


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


def test_a_rehearsal_listens_on_loopback_and_keeps_its_token(
    start: Starter, short_tmp: Path
) -> None:
    head = start(
        "--rehearse", "--duration", "10", "--plain", *SMALL, environment=RUNTIME_ENVIRONMENT
    )
    head.wait_until_running(3)
    own = psutil.Process(head.process.pid)
    processes = [own, *own.children(recursive=True)]
    found = listening(processes)
    assert {"gcs_server", "raylet"} < set(found), found
    # Of the head, Ray's store, two raylets with two each, and three workers.
    assert sum(map(len, found.values())) >= 9
    assert [at for each in found.values() for at in each if not is_loopback(at[0])] == []
    for address in addresses_in_the_network():
        for port in {port for each in found.values() for _, port in each}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5).close()
    names = {process.name() for process in processes if process.is_running()}
    assert {name for name in names if not name.startswith(PROGRAMS)} == set()

    token = wait_for(lambda: next(iter(short_tmp.glob("orch-*/auth_token")), None), "the token")
    secret = token.read_text(encoding="ascii")
    assert len(secret) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700

    lines = command_lines(own)
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
