"""A rehearsal keeps to itself: its Ray listens on loopback only, and starts no process that a run does not need."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket

import psutil
import pytest

from tests.cluster.conftest import SMALL, Starter

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


def family(pid: int) -> list[psutil.Process]:
    head = psutil.Process(pid)
    return [head, *head.children(recursive=True)]


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


def test_no_port_of_a_rehearsal_can_be_reached_from_another_machine(start: Starter) -> None:
    head = start(
        "--rehearse", "--duration", "10", "--plain", *SMALL, environment=RUNTIME_ENVIRONMENT
    )
    head.wait_until_running(3)
    processes = family(head.process.pid)
    found = listening(processes)
    assert {"gcs_server", "raylet"} < set(found), found
    assert sum(map(len, found.values())) >= 9, (
        "of the head, Ray's store, two raylets with two each, and three workers"
    )
    assert [
        (name, at) for name, each in found.items() for at in each if not is_loopback(at[0])
    ] == []
    for address in addresses_in_the_network():
        for port in {port for each in found.values() for _, port in each}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5).close()

    names = {process.name() for process in processes if process.is_running()}
    assert {name for name in names if not name.startswith(PROGRAMS)} == set()
    head.process.send_signal(signal.SIGINT)
    code, out, err = head.finish()
    assert code == 130, out + err
