"""A real run of the real command, looked at from outside: its counts, its processes, and what it
leaves behind.

The workload is the witness (`witness.py`); the store is compared with what the workers have noted
themselves. Changes nothing in a run and judges no figure: what does not hold becomes a sentence.
Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from benches.common import ROOT
from orchestrator.config.load import config_from_data
from orchestrator.core.placement import Target, plan_slots
from orchestrator.errors import ArchiveError, NothingStoredError
from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.store import SlotRecord

#: Workers find it because runs are started in `ROOT`.
WITNESS = "scripts.benches.witness:Witness"
#: As in `witness.py`, which is not imported here: it loads torch.
WITNESS_FOLDER = "ORCH_WITNESS_DIR"
#: For a run to start and to end, beyond its planned length.
PATIENCE_S = 180.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SHARED = Path("/dev/shm")  # noqa: S108 - looked at, not written
#: Sentences about one kind of thing; the rest would say the same.
_SENTENCES_MOST = 20


class Scene:
    """Folders of its own for some runs, and an account of every process that they bring."""

    def __init__(self) -> None:
        # What a run leaves behind becomes a child of this process, and is found.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Short, because Ray's sockets lie below it and a socket's path ends at 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
        self.runs = self.folder / "runs"
        self.steps = self.folder / "steps"
        self.steps.mkdir()
        self._heads: list[subprocess.Popen[bytes]] = []
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._shared_before = set(_SHARED.iterdir())
        self._seen: dict[int, psutil.Process] = {}

    def run(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `python -m orchestrator run --json` with the shipped cluster.yaml.

        Its output goes to files.
        """
        number = len(self._heads)
        command = [sys.executable, "-m", "orchestrator", "run", "--json"]
        command += ["--config", str(ROOT / "cluster.yaml"), "--run-dir", str(self.runs)]
        env = {**os.environ, "TMPDIR": str(self.folder), WITNESS_FOLDER: str(self.steps)}
        with (
            self._output(number, "json").open("wb") as out,
            self._output(number, "err").open("wb") as err,
        ):
            head = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
                stderr=err,
            )  # fmt: skip
        self._heads.append(head)
        return head

    def ended(self, head: subprocess.Popen[bytes], within_s: float = 0.0) -> tuple[int | None, str]:
        """Wait for a run's end; return its exit code (`None`: it was killed now) and its words."""
        deadline_s = time.monotonic() + within_s
        while head.poll() is None and time.monotonic() < deadline_s:
            self.look()
            time.sleep(0.5)
        code = head.poll()
        if code is None:
            head.kill()
            head.wait()
        number = self._heads.index(head)
        out, err = (
            self._output(number, name).read_text(encoding="utf-8") for name in ("json", "err")
        )
        return code, out or err

    def newest_run(self) -> Path | None:
        return max(self.runs.glob("*"), default=None)

    def look(self) -> list[psutil.Process]:
        """Note which processes of the runs live now; reap those that have ended."""
        heads = {head.pid for head in self._heads}
        for child in psutil.Process().children():
            if child.pid not in heads | self._before and _is_dead(child):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        everything = psutil.Process().children(recursive=True)
        found = [child for child in everything if child.pid not in self._before]
        self._seen.update((child.pid, child) for child in found)
        return [child for child in found if not _is_dead(child)]

    def leftovers(self, within_s: float) -> list[str]:
        """Return a sentence for each thing that ended runs have left for so long, and end it."""
        deadline_s = time.monotonic() + within_s
        while (left := self._left()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        for process in self._alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        return left[:_SENTENCES_MOST]

    def close(self, *, keep: bool) -> str | None:
        """End what still runs; remove the folders, or keep them and say where they are."""
        for head in self._heads:
            self.ended(head)
        self.leftovers(0.0)
        if keep:
            return str(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        return None

    def _output(self, number: int, name: str) -> Path:
        return self.folder / f"out-{number}.{name}"

    def _alive(self) -> list[psutil.Process]:
        self.look()
        return [each for each in self._seen.values() if each.is_running() and not _is_dead(each)]

    def _left(self) -> list[str]:
        alive = self._alive()
        shared = set(_SHARED.iterdir()) - self._shared_before
        return [
            *(f"process {process.pid} still lives: {_called(process)}" for process in alive),
            *(f"{path} was left" for path in self.folder.glob("orch-*")),
            *(f"{path} was left" for path in sorted(shared) if not _in_use(path)),
        ]


class Ledger:
    """Compares the store of a run with what its workers have noted in the witness's folder, look by
    look.

    The store is committed before anything is sent to a worker, and a report is counted after its
    steps were done. So of two counts of the witness, one before the store is read and one after,
    must hold for each slot at any moment::

        counted <= witnessed after        witnessed before <= counted + lost at most + at risk

    Both are strict: no step that is done during a look falls between them. Counters only grow.
    """

    def __init__(self, steps: Path) -> None:
        self._steps = steps
        self._seeds: dict[str, int] = {}
        self._last: dict[str, dict[str, float]] = {}
        self.broken: list[str] = []

    def look(self, folder: Path) -> StoredRun | None:
        """Compare once, and return the run as its store knows it; `None`: it stores nothing yet."""
        try:
            run = read_run(folder)
        except NothingStoredError:
            return None
        except ArchiveError as error:
            self._demand(False, f"the store cannot be read: {error}")
            return None
        after = self._counts()
        self._seeds = self._seeds or _seeds_of(run)
        for slot in run.slots:
            seed = self._seeds[slot.slot]
            self._compare(slot, after.get(seed, 0))
        return run

    def rows(self, run: StoredRun) -> list[dict[str, Any]]:
        """Return a line for each slot of a run whose processes are gone."""
        counts = self._counts()
        return [
            {
                "slot": slot.slot, "steps_ok": slot.counters["steps_ok"],
                "witnessed": (witnessed := counts.get(self._seeds[slot.slot], 0)),
                "really_lost": witnessed - slot.counters["steps_ok"],
                "restarts": slot.counters["restarts"], "state": slot.state, "reason": slot.reason,
            }
            for slot in run.slots
        ]  # fmt: skip

    def _compare(self, slot: SlotRecord, after: int) -> None:
        counted = slot.counters["steps_ok"]
        self._demand(
            counted <= after,
            f"{slot.slot}: {counted} steps are counted, and {after} were done: counted too often",
        )
        grows = {**slot.counters, "incarnation": slot.incarnation}
        for name, value in self._last.get(slot.slot, {}).items():
            self._demand(
                grows[name] >= value, f"{slot.slot}: {name} went back from {value} to {grows[name]}"
            )
        self._last[slot.slot] = grows

    def _counts(self) -> dict[int, int]:
        return {int(path.stem): path.stat().st_size for path in self._steps.glob("*.steps")}

    def _demand(self, holds: bool, sentence: str) -> None:
        if not holds and len(self.broken) < _SENTENCES_MOST:
            self.broken.append(sentence)


def sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    kinds = ("ok", "really_lost")
    return {
        f"steps_{kind}": sum(row["steps_ok" if kind == "ok" else kind] for row in rows)
        for kind in kinds
    }


def _seeds_of(run: StoredRun) -> dict[str, int]:
    """Return the seed of each slot's workload: by it the witness names its files."""
    config = config_from_data(yaml.safe_load(run.facts.config_yaml), "the run's configuration")
    plans = plan_slots(config, Target(device=run.facts.device, one_machine=run.facts.one_machine))
    return {plan.spec.slot: plan.spec.workload.seed for plan in plans}


def _in_use(path: Path) -> bool:
    """Tell whether a living process maps this file: it is another program's, ours are told of."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(path) in maps.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def _is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _called(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200] or process.name()
    except psutil.Error:
        return "gone meanwhile"
