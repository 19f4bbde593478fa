"""A rehearsal of a run with real Ray, real processes and real out-of-memory errors is isolated."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shutil
import signal
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from orchestrator.config.load import load_config
from tests.cluster.conftest import SMALL, Head, Starter, samples, short_folder, starting
from tests.reaper import Reaper
from tests.scene import ROOT, ended, enough, python, wait_for

pytestmark = pytest.mark.ray

#: The guides' policy finds a size by failing; with any other, these runs have no OOM errors.
GUIDES = ("--set", "memory.policy=classic", "--set", "run.min_success_rate=0")

#: Too big for every cap, also after scaling to a quarter: three matrices of 6144 x 6144 need 432
#: MiB. The caps are small, because MKL is ten times slower where it gets no memory of its own, and
#: ten workers share two cores.
TOO_BIG = (
    *("--set", "workload.size=24576", "--set", "workload.dtype=fp32"),
    *("--set", "nodes.pc1.vram_per_worker_gib=1.25", "--set", "nodes.pc2.vram_per_worker_gib=1.25"),
)

#: Ray would need an agent to prepare this, and a rehearsal starts no agents. So the product must
#: not request it.
RUNTIME_ENVIRONMENT = '{"runtime_env": {"env_vars": {"UNUSED": "1"}}}'

#: The head and its cleaner, the two processes of Ray, stand-ins for Ray's agents, and workers.
PROGRAMS = (
    "python",
    "gcs_server",
    "raylet",
    "cat",
    "ray::WorkerActor",
    "ray::IDLE",
    "orch-engine",
    "job-keeper",
    "keeper-server",
)

#: Writes a file if the head loads torch.
_TELL_TALE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and any("orchestrator/__main__.py" in part for part in sys.argv):
            open(r"{witness}", "w").close()
sys.meta_path.insert(0, Finder())
"""

#: Hides an editable installation, which would find the folder in the sources.
_NO_EDITABLE = """
import sys
sys.meta_path = [each for each in sys.meta_path if "Editable" not in getattr(each, "__name__", "")]
"""


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def listening(names: Mapping[int, str]) -> dict[str, set[tuple[str, int]]]:
    """Return the listening TCP addresses and ports, and those of UDP, keyed by process name."""
    found: dict[str, set[tuple[str, int]]] = {}
    for each in psutil.net_connections("inet"):
        listens = each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM
        if listens and each.pid in names:
            found.setdefault(names[each.pid], set()).add((each.laddr.ip, each.laddr.port))
    return found


def addresses_in_the_network() -> set[str]:
    """Return the addresses of this machine that others can reach, without loopback."""
    every = [address for card in psutil.net_if_addrs().values() for address in card]
    return {
        each.address
        for each in every
        if each.family is socket.AF_INET and not is_loopback(each.address)
    }


def holders(folder: Path, secret: str) -> list[Path]:
    """Return the files below `folder` that contain `secret`."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a socket, or a removed file
            if path.is_file() and secret.encode() in path.read_bytes():
                found.append(path)
    return found


@pytest.fixture(scope="module")
def ten(session_reaper: Reaper) -> Iterator[Head]:
    """A run of the reference pair's ten workers, with sizes that fit no cap."""
    with short_folder(session_reaper) as folder, starting(folder) as start:
        witness = folder / "the-head-loaded-torch"
        (folder / "sitecustomize.py").write_text(_TELL_TALE.format(witness=witness))
        environment = {
            "PYTHONPATH": str(folder),
            "RAY_JOB_CONFIG_JSON_ENV_VAR": RUNTIME_ENVIRONMENT,
        }
        arguments = ("--rehearse", "--duration", "1h", "--json", *TOO_BIG, *GUIDES)
        yield start(*arguments, environment=environment)


def test_a_rehearsal_listens_on_loopback_and_keeps_its_token(ten: Head) -> None:
    def have_opened() -> bool:
        return len({event["slot"] for event in ten.events("device_opened")}) == 10

    ten.wait(have_opened, "ten workers")
    own, folder = psutil.Process(ten.process.pid), ten.runs.parent
    names, lines = {}, []
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            names[process.pid] = process.name()
            lines.append(" ".join(process.cmdline()))
    found = listening(names)
    assert {name for name in names.values() if not name.startswith(PROGRAMS)} == set()
    assert {"gcs_server", "raylet"} < set(found), found
    # The head, Ray's store, two raylets with two ports each, and the workers.
    assert sum(map(len, found.values())) >= 9
    assert [at for each in found.values() for at in each if not is_loopback(at[0])] == []
    for address in addresses_in_the_network():
        for port in {port for each in found.values() for _, port in each}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5).close()
    (token,) = wait_for(lambda: list(folder.glob("orch-*/auth_token")), "the token")
    secret = token.read_text(encoding="ascii")
    assert len(secret) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert sum("raylet" in line for line in lines) >= 2, lines
    assert [line for line in lines if secret in line] == []
    logs = [path for path in token.parent.glob("ray/session_*/logs/*") if path.is_file()]
    assert any(path.stat().st_size for path in logs), "Ray has written its logs"
    assert holders(folder, secret) == [token]


def test_ten_workers_survive_sizes_too_big_for_every_cap(ten: Head) -> None:
    def have_filled_their_caps() -> bool:
        return all(
            row["state"] == "RUNNING"
            and (row["reserved_bytes"] or 0) >= 0.95 * (row["cap_bytes"] or 1)
            for row in ten.rows().values()
        )

    ten.wait(have_filled_their_caps, "caps that are filled")
    ten.process.send_signal(signal.SIGINT)
    code, out, err = ten.finish()
    assert not (ten.runs.parent / "the-head-loaded-torch").exists()
    assert code == 130, out + err
    summary = json.loads(out)
    assert summary == ten.summary()
    assert (summary["outcome"], summary["restart_count"]) == ("interrupted", 0)
    assert summary["nodes_seen"] == ["pc1", "pc2"]
    assert [row["node"] for row in summary["workers"]] == ["pc1"] * 7 + ["pc2"] * 3
    for row in summary["workers"]:
        assert min(row["oom_count"], row["emergency_count"], row["steps_ok"]) >= 1
        assert 0 < row["size"] < 6144
        assert row["state"] == "RUNNING"
        cap_bytes = row["cap_bytes"]
        assert 0.95 * cap_bytes <= row["reserved_bytes"] <= cap_bytes <= row["budget_bytes"]
    folder = ten.folder()
    assert load_config(str(folder / "config.yaml")).nodes["pc1"].workers == 7
    names = {event["event"] for event in ten.events()}
    assert {"run_started", "node_joined", "device_opened", "oom", "backoff", "run_ended"} <= names
    assert len(samples(folder)) == 10
    assert err == ""  # nothing of Ray's, and nothing of ours beside the one object


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """Return a copy of the product without orchestrator/lab."""
    for package in ("orchestrator", "workers"):
        ignored = shutil.ignore_patterns("__pycache__", *(["lab"] * (package == "orchestrator")))
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "sitecustomize.py").write_text(_NO_EDITABLE)
    assert not (tmp_path / "orchestrator" / "lab").exists()
    return tmp_path


def test_this_machine_alone_runs_without_a_reader(start: Starter, product: Path) -> None:
    """The copy has no laboratory either."""
    head = start(
        "--local", "--duration", enough(3), cwd=product, environment={"PYTHONPATH": str(product)}
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
