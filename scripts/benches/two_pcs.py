"""Two PCs on one machine: namespaces of network and processes, each with a home, a Ray and a cable
to a switch.

A cut is what pulling pc2's cable out of the switch does: pc2 loses its carrier, pc1 gets no answer.
Needs root and the command `ip`. The kernel removes all of it when the processes that hold the
namespaces end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

#: Nothing outside the namespaces has a route to them.
ADDRESSES = {"pc1": "10.77.0.1", "pc2": "10.77.0.2"}

#: What tells the product these addresses; Ray would look for a route to the internet.
HOSTS = tuple(f"--set=nodes.{pc}.host={address}" for pc, address in ADDRESSES.items())

#: All orphans of a process namespace become children of its first process; it reaps them by
#: ignoring SIGCHLD.
_FIRST_PROCESS = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True: signal.pause()
"""

_HOLDER = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")


def missing() -> str | None:
    """Say why there can be no two PCs here; `None` if there can."""
    if shutil.which("ip") is None:
        return "the command `ip` is not installed"
    links = "ip link add name x type veth && ip link add name y type bridge"
    trial = subprocess.run(
        [*_HOLDER, "sh", "-c", links], capture_output=True, text=True, check=False
    )
    return " ".join(trial.stderr.split()) or "the kernel refuses" if trial.returncode else None


class TwoPCs:
    """What can be typed on pc1 and pc2, and what can be done to the cable between them."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._inside = {name: _hold(stack) for name in ("switch", *ADDRESSES)}
        self._ip("switch", "link", "add", "bridge", "type", "bridge")
        self._ip("switch", "link", "set", "bridge", "up")
        for pc, address in ADDRESSES.items():
            other_end = ("peer", "name", pc, "netns", str(self._inside["switch"]))
            self._ip(pc, "link", "add", "eth0", "type", "veth", *other_end)
            self._ip("switch", "link", "set", pc, "master", "bridge", "up")
            self._ip(pc, "address", "add", f"{address}/24", "dev", "eth0")
            self._ip(pc, "link", "set", "eth0", "up")
            self._ip(pc, "link", "set", "lo", "up")
            (folder / pc / "home").mkdir(parents=True)

    def cable(self, *, plugged: bool) -> None:
        """Pull pc2's cable out of the switch, or put it back."""
        self._ip("switch", "link", "set", "pc2", "up" if plugged else "down")

    def slow_down(self, rate: str) -> None:
        """Limit what each PC sends to a rate such as `5mbit`."""
        for pc in ADDRESSES:
            queue = (
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "32kbit",
                "latency",
                "400ms",
            )
            _run([*self._enter(pc), "tc", "qdisc", "replace", *queue])

    def copy_token(self) -> None:
        """Give pc2 the head's secret, as scp would."""
        target = self._folder / "pc2" / "home" / ".ray"
        target.mkdir(mode=0o700, exist_ok=True)
        (target / "auth_token").write_bytes(
            (self._folder / "pc1" / "home" / ".ray" / "auth_token").read_bytes()
        )
        (target / "auth_token").chmod(0o600)

    def start(self, pc: str, *arguments: str, output: Path) -> subprocess.Popen[bytes]:
        """Start `python -m orchestrator` on a PC; what it prints is added to a file."""
        home = self._folder / pc
        scripts = str(Path(sys.executable).parent)
        environment = {
            **os.environ,
            "HOME": str(home / "home"),
            "RAY_TMPDIR": str(home),
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        }
        with output.open("ab") as stream:
            return subprocess.Popen(
                [*self._enter(pc), sys.executable, "-m", "orchestrator", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def do(self, pc: str, *arguments: str) -> str:
        """Run `python -m orchestrator` on a PC to its end; return what it printed."""
        output = self._folder / f"{pc}.log"
        output.write_bytes(b"")
        code = self.start(pc, *arguments, output=output).wait()
        text = output.read_text(encoding="utf-8", errors="replace")
        if code != 0:
            raise RuntimeError(f"`{' '.join(arguments)}` on {pc} ended with {code}: {text}")
        return text

    def raylets(self, pc: str) -> list[int]:
        """The process ids that a PC's raylets have on that PC."""
        found = subprocess.run(
            [*self._enter(pc), "pgrep", "-x", "raylet"], capture_output=True, text=True, check=False
        )
        return [int(line) for line in found.stdout.split()]

    def kill(self, pc: str, pid: int) -> None:
        """Kill a process, by its process id on that PC."""
        _run([*self._enter(pc), "kill", "-KILL", str(pid)])

    def _ip(self, where: str, *arguments: str) -> None:
        # Not in the process namespace: `netns` takes a process id of this one.
        _run([*self._enter(where, "--net"), "ip", *arguments])

    def _enter(self, where: str, *namespaces: str) -> tuple[str, ...]:
        return (
            "nsenter",
            f"--target={self._inside[where]}",
            f"--wd={_ROOT}",
            *(namespaces or ("--net", "--pid", "--mount")),
        )


@contextlib.contextmanager
def two_pcs(folder: Path) -> Iterator[TwoPCs]:
    """Make the two PCs, and end all that runs on them."""
    with contextlib.ExitStack() as stack:
        yield TwoPCs(folder, stack)


def _hold(stack: contextlib.ExitStack) -> int:
    """Make namespaces and return the process that holds them: the first of its kind, with which all
    others end.
    """
    command = [*_HOLDER, sys.executable, "-c", _FIRST_PROCESS]
    holder = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(holder.kill)
    if holder.stdout is None or holder.stdout.readline() != "ready\n":
        raise RuntimeError("the kernel refuses namespaces")
    return int(
        Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        .read_text(encoding="ascii")
        .split()[0]
    )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}`: {done.stderr}")
