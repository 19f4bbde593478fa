"""The main job in rehearsal: real Ray, real processes, real out-of-memory; and it keeps to itself."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shutil
import signal
import socket
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.config.load import load_config
from tests.cluster.conftest import SMALL, Head, Starter, read_events, short_folder, starting
from tests.reaper import Reaper
from tests.scene import ROOT, ended, python, wait_for

pytestmark = pytest.mark.ray

#: The guides' own way of finding a size, by failing: only so do these runs run out of memory.
GUIDES = ("--set", "memory.policy=classic", "--set", "run.min_success_rate=0")

#: Too big for every cap, also after scaling to a quarter: three matrices of 6144 x 6144 need 432
#: MiB. The caps are small, because MKL is ten times slower where it gets no memory of its own, and
#: ten workers share two cores.
TOO_BIG = (
    *("--set", "workload.size=24576", "--set", "workload.dtype=fp32"),
    *("--set", "nodes.pc1.vram_per_worker_gib=1.25", "--set", "nodes.pc2.vram_per_worker_gib=1.25"),
)

#: Ray would prepare this with the help of an agent that a rehearsal does not start. So it must not
#: be asked for.
RUNTIME_ENVIRONMENT = '{"runtime_env": {"env_vars": {"UNUSED": "1"}}}'

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

#: Leaves a file behind when the head, of all processes, loads torch.
_TELL_TALE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and any("orchestrator/__main__.py" in part for part in sys.argv):
            open(r"{witness}", "w").close()
sys.meta_path.insert(0, Finder())
"""

#: An editable installation would find the folder where the sources are.
_NO_EDITABLE = """
import sys
sys.meta_path = [each for each in sys.meta_path if "Editable" not in getattr(each, "__name__", "")]
"""


@dataclass
class Looked:
    """What was seen of a rehearsal while it ran, and what it has left."""

    listening: dict[str, set[tuple[str, int]]]
    """By the program's name: addresses and ports of TCP, and of UDP too."""
    reached: list[tuple[str, int]]
    """Of these, those that answered under an address of the network."""
    programs: set[str]
    command_lines: list[str]
    token: str
    modes: tuple[int, int]
    """Of the token's file and of its folder."""
    holders: list[Path]
    """The files in which the token stands; and then those in which it stood after the end."""
    left_in: list[Path]
    code: int
    out: str
    err: str
    folder: Path
    summary: dict[str, Any]
    head_loaded_torch: bool


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def listening(processes: list[psutil.Process]) -> dict[str, set[tuple[str, int]]]:
    found: dict[str, set[tuple[str, int]]] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                    address = (connection.laddr.ip, connection.laddr.port)
                    found.setdefault(process.name(), set()).add(address)
    return found


def reached(ports: set[int]) -> Iterator[tuple[str, int]]:
    """Try the ports at each address of this machine that others can reach."""
    for card in psutil.net_if_addrs().values():
        for each in card:
            if each.family is socket.AF_INET and not is_loopback(each.address):
                for port in ports:
                    with contextlib.suppress(ConnectionRefusedError):
                        socket.create_connection((each.address, port), timeout=5).close()
                        yield each.address, port


def holders(folder: Path, secret: str) -> list[Path]:
    """Return the files below `folder` in which `secret` stands."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a socket, or gone meanwhile
            if path.is_file() and secret.encode() in path.read_bytes():
                found.append(path)
    return found


def looked_at(head: Head, folder: Path) -> Looked:
    """Look at a run while all of its workers are at work, and wait for its end."""

    def have_opened() -> bool:
        opened = [event["slot"] for event in head.events() if event["event"] == "device_opened"]
        return len(set(opened)) == 10

    head.wait(have_opened, "ten workers")
    own = psutil.Process(head.process.pid)
    processes = [own, *own.children(recursive=True)]
    found = listening(processes)
    lines, programs = [], set()
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            programs.add(process.name())
            lines.append(" ".join(process.cmdline()))
    (path,) = wait_for(lambda: list(folder.glob("orch-*/auth_token")), "the token")
    token, modes = path.read_text(encoding="ascii"), (path.stat(), path.parent.stat())
    logs = [path for path in path.parent.glob("ray/session_*/logs/*") if path.is_file()]
    assert any(path.stat().st_size for path in logs), "Ray has written its logs"
    hold = holders(folder, token)
    answered = list(reached({port for each in found.values() for _, port in each}))
    assert head.process.poll() is None, "all this while it ran"
    code, out, err = head.finish()
    assert hold == [path], "the token stands in its file alone"
    return Looked(
        listening=found,
        reached=answered,
        programs=programs,
        command_lines=lines,
        token=token,
        modes=(stat.S_IMODE(modes[0].st_mode), stat.S_IMODE(modes[1].st_mode)),
        holders=hold,
        left_in=holders(folder, token),
        code=code,
        out=out,
        err=err,
        folder=head.folder(),
        summary=head.summary(),
        head_loaded_torch=(folder / "the-head-loaded-torch").exists(),
    )


@pytest.fixture(scope="module")
def ten(session_reaper: Reaper) -> Iterator[Looked]:
    """The reference pair's ten workers, with sizes that fit no cap."""
    with short_folder(session_reaper) as folder, starting(folder) as start:
        witness = folder / "the-head-loaded-torch"
        (folder / "sitecustomize.py").write_text(_TELL_TALE.format(witness=witness))
        environment = {
            "PYTHONPATH": str(folder),
            "RAY_JOB_CONFIG_JSON_ENV_VAR": RUNTIME_ENVIRONMENT,
        }
        arguments = ("--rehearse", "--duration", "20s", "--json", *TOO_BIG, *GUIDES)
        yield looked_at(start(*arguments, environment=environment), folder)


def test_ten_workers_survive_sizes_too_big_for_every_cap(ten: Looked) -> None:
    assert not ten.head_loaded_torch
    assert ten.code == 0, ten.out + ten.err
    summary = json.loads(ten.out)
    assert summary == ten.summary
    assert (summary["outcome"], summary["restart_count"]) == ("good", 0)
    assert summary["nodes_seen"] == ["pc1", "pc2"]
    assert [row["node"] for row in summary["workers"]] == ["pc1"] * 7 + ["pc2"] * 3
    for row in summary["workers"]:
        assert min(row["oom_count"], row["emergency_count"], row["steps_ok"]) >= 1
        assert 0 < row["size"] < 6144
        assert row["state"] == "RUNNING"
        cap_bytes = row["cap_bytes"]
        assert 0.95 * cap_bytes <= row["reserved_bytes"] <= cap_bytes <= row["budget_bytes"]
    assert load_config(str(ten.folder / "config.yaml")).nodes["pc1"].workers == 7
    names = {event["event"] for event in read_events(ten.folder)}
    assert {"run_started", "node_joined", "device_opened", "oom", "backoff", "run_ended"} <= names
    with contextlib.closing(sqlite3.connect(ten.folder / "run.sqlite")) as store:
        assert store.execute("SELECT COUNT(DISTINCT slot) FROM samples").fetchone() == (10,)
    assert ten.err == ""  # nothing of Ray's, and nothing of ours beside the one object


def test_a_rehearsal_listens_on_loopback_and_keeps_its_token(ten: Looked) -> None:
    assert {"gcs_server", "raylet"} < set(ten.listening), ten.listening
    # Of the head, Ray's store, two raylets with two each, and the workers.
    assert sum(map(len, ten.listening.values())) >= 9
    assert [at for each in ten.listening.values() for at in each if not is_loopback(at[0])] == []
    assert ten.reached == []
    assert {name for name in ten.programs if not name.startswith(PROGRAMS)} == set()
    assert (len(ten.token), ten.modes) == (64, (0o600, 0o700))
    assert sum("raylet" in line for line in ten.command_lines) >= 2, ten.command_lines
    assert [line for line in ten.command_lines if ten.token in line] == []
    assert ten.token not in ten.out + ten.err
    assert ten.left_in == []


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A copy of the product without orchestrator/lab."""
    for package in ("orchestrator", "workers"):
        ignored = shutil.ignore_patterns("__pycache__", *(["lab"] * (package == "orchestrator")))
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "sitecustomize.py").write_text(_NO_EDITABLE)
    assert not (tmp_path / "orchestrator" / "lab").exists()
    return tmp_path


def test_this_machine_alone_runs_without_a_reader(start: Starter, product: Path) -> None:
    """And without the laboratory."""
    head = start(
        "--local", "--duration", "3s", cwd=product, environment={"PYTHONPATH": str(product)}
    )
    for stream in (head.process.stdout, head.process.stderr):
        assert stream is not None
        stream.close()
    head.process.stdout = head.process.stderr = None
    ended(head.process)
    assert head.process.returncode == 0
    summary = head.summary()
    assert (summary["outcome"], summary["nodes_seen"]) == ("good", ["local"])
    assert summary["workers"]
    assert all(row["steps_ok"] > 0 and row["state"] == "RUNNING" for row in summary["workers"])


@pytest.mark.parametrize(
    "arguments", [("burn", "--rehearse"), ("run", "--rehearse", "--chaos", "kill:every=5s")]
)
def test_what_belongs_to_the_laboratory_says_so(product: Path, arguments: tuple[str, ...]) -> None:
    shutil.copy(ROOT / "cluster.yaml", product)
    done = python("-m", "orchestrator", *arguments, cwd=product, PYTHONPATH=str(product))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the laboratory, orchestrator/lab, which is not installed" in done.stderr


def test_an_interrupt_while_the_cluster_starts_leaves_nothing(start: Starter) -> None:
    head = start("--rehearse", "--duration", "10", "--json", *SMALL)
    head.folder()
    head.process.send_signal(signal.SIGINT)
    code, out, _ = head.finish()
    assert code == 130
    assert json.loads(out)["outcome"] == "interrupted"
