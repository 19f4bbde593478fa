"""The actor of a slot that runs a program of the user: turns its keeper's news into a status.

The program has no channel. The status says that it has started, what it prints, its results, and
how and why it ended (`orchestrator/jobs/causes.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

import psutil
import pynvml

from orchestrator.cluster.actor import SlotActor, end_words, last_line
from orchestrator.jobs.causes import cause_of
from workers import oom
from workers.command.code import CODE, code_of, is_same_code
from workers.command.files import Record, Results, folder_of, keep_outputs, take_note
from workers.command.folder import CommandFolder
from workers.command.launch import ATTEMPT, JOB_DIR, RESUME, Launch, launch
from workers.host.machine import look_at_cards
from workers.host.processes import worker_and_raylet
from workers.keeper.kept import Ended, Kept
from workers.keeper.task import Task
from workers.messages import (
    Cause,
    DeviceInfo,
    Ending,
    MemoryInfo,
    Orders,
    Status,
    StepCounts,
    Verdict,
    WorkerState,
)
from workers.nvml import queries
from workers.settings import WorkerSpec
from workers.units import MIB

#: A log is renamed when it has grown to this, so that both logs take at most twice as much.
LOG_BYTES: Final = 32 * MIB

#: Seconds between two measurements of the program's memory; its end is noticed at once.
_MEASURE_EVERY_S: Final = 0.5

#: A file system with less free space counts as full.
_FULL_BYTES: Final = MIB

#: What a reason says besides the exit code or signal.
_WORDS: Final = {
    Cause.TIME_LIMIT: " after its time limit",
    Cause.HOST_MEMORY: " for want of RAM",
    Cause.DISK_FULL: " with a full disk",
    Cause.NAN_LOSS: " after a loss that is no number",
}


class CommandActor(SlotActor):
    """Keeps the user's program of one slot, which may be started several times."""

    def __init__(self, spec: WorkerSpec, folder: CommandFolder | None = None) -> None:
        """Start nothing. `folder` is the program's folder on this PC, if not the one it names."""
        assert spec.command is not None  # noqa: S101 - the fleet asks
        # The PC's variables for torch are left to the program, but cards are numbered as by NVML.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        self._command, self._problem = spec.command, None if folder is None else folder.problem
        if folder is not None:
            self._command = replace(spec.command, cwd=folder.path)
        super().__init__(spec, Path(spec.command.env.get(JOB_DIR) or folder_of(spec)))
        self._incarnation: int | None = None
        self._saves = 0
        self._wall_s = 0.0
        """Seconds that the ended programs of this incarnation ran."""
        self._results = Results(self._folder / "results.jsonl")
        self._record = Record()
        self._plan = Launch(argv=(), env={}, cwd="")
        self._began_s = self._began_unix_s = 0.0
        self._is_told_to_end = self._was_asked = self._out_of_time = False
        self._held_bytes, self._peak_bytes = 0, 0
        self._pid: int | None = None
        """`None` until the program has started."""
        self._ending: Ending | None = None
        self._note = ""
        """Says, for the reason, that the program's code has changed."""

    def _follow(self, orders: Orders) -> None:
        rests, is_other = orders.holds or not orders.runs, orders.incarnation != self._incarnation
        if self._kept is not None:
            if rests or is_other or orders.saves > self._saves:
                self._was_asked = True
                self._ask_to_end(self._kept)
        elif is_other and orders.begin is not None:
            self._incarnation, self._wall_s = orders.incarnation, 0.0
            self._begin(rests=rests)
        elif self._ending is not None and self._ending.was_asked and not (rests or is_other):
            self._begin(rests=False)  # its slot must work again
        if orders.incarnation == self._incarnation:
            self._saves = orders.saves

    def _begin(self, *, rests: bool) -> None:
        """Start the program, unless its attempt has ended already or must not run."""
        attempt, record = self._command.env.get(ATTEMPT), Record.of(self._folder)
        self._ending, self._pid, self._held_bytes, self._peak_bytes = None, None, 0, 0
        self._is_told_to_end = self._was_asked = self._out_of_time = False
        self._record = Record(starts=record.starts, attempt=attempt)
        if attempt is not None and record.attempt == attempt and record.ending is not None:
            self._ending, self._has_news = record.ending, True
        elif rests:
            text = "it had not begun"
            self._end(Ending(cause=Cause.PARKED, was_asked=True, text=text))
        elif self._problem is not None:
            self._end(Ending(cause=Cause.NOT_STARTED, text=self._problem))
        else:
            try:
                self._start(resumes=record.starts > 0)
            except OSError as error:
                text = f"cannot use {self._folder}: {error.strerror or error}"
                is_full = error.errno in oom.DISK_FULL
                cause = Cause.DISK_FULL if is_full else Cause.NOT_STARTED
                self._end(Ending(cause=cause, text=text))

    def _start(self, *, resumes: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._record = replace(self._record, starts=self._record.starts + 1)
        self._record.write(self._folder)
        self._plan = plan = launch(self._spec, self._command, self._folder, resumes=resumes)
        if plan.problem is not None:
            text = f"cannot be started: {plan.problem}"
            self._end(Ending(cause=Cause.NOT_STARTED, text=text))
            return
        self._results.begin()
        take_note(self._folder)  # of an earlier program
        self._began_s, self._began_unix_s = time.monotonic(), time.time()
        self._keep(
            Task(
                argv=plan.argv,
                env=plan.env,
                cwd=plan.cwd,
                place=str(self._folder),
                log_bytes=LOG_BYTES,
                grace_s=self._command.grace_s,
                lease_s=self._command.lease_s,
                watch=worker_and_raylet(),
            )
        )

    def _ask_to_end(self, kept: Kept) -> None:
        if not self._is_told_to_end:
            self._is_told_to_end = True
            kept.end(self._command.grace_s)
            self._note_event("program_told_to_end", pid=kept.pid, grace_s=self._command.grace_s)

    def _listen(self, kept: Kept, wait_s: float) -> None:
        kept.listen(min(_MEASURE_EVERY_S, wait_s))
        if kept.pid is not None and self._pid is None:
            self._note_start(kept.pid)
        if kept.refused is not None:
            text = f"cannot be started: {kept.refused}"
            self._end(Ending(cause=Cause.NOT_STARTED, text=text))
        elif kept.ended is not None:
            if kept.ended.left:
                self._note_event("program_left_processes", count=kept.ended.left)
            self._end(self._judged(kept.ended, kept.pid))
        else:
            self._measure(kept.processes())
            limit_s = self._command.time_limit_s
            if limit_s is not None and time.monotonic() - self._began_s > limit_s:
                self._out_of_time = self._out_of_time or not self._is_told_to_end
                self._ask_to_end(kept)

    def _note_start(self, pid: int) -> None:
        """Log that the program runs, and whether its code has changed since it was submitted."""
        self._pid, self._has_news = pid, True
        plan, submitted, self._note = self._plan, self._command.env.get(CODE), ""
        cap = {"uncapped": plan.uncapped} if plan.uncapped else {"cap_bytes": plan.cap_bytes}
        self._note_event(
            "program_started",
            pid=pid,
            program=" ".join(plan.argv)[:300],
            cwd=plan.cwd,
            resumes=RESUME in plan.env,
            log=str(self._folder / "output.log"),
            **cap,
        )
        present = None if submitted is None else code_of(plan.cwd)
        if submitted and present and not is_same_code(submitted, present):
            self._note = (
                f"; its code was changed since it was submitted: {submitted}, now {present}"
            )
            self._note_event("code_changed", submitted=submitted, present=present, cwd=plan.cwd)

    def _judged(self, ended: Ended, pid: int | None) -> Ending:
        """Return how the program ended, and why, from what only this PC can observe."""
        code, text = ended.status, ended.tail
        self._results.read(is_over=True)
        try:
            keep_outputs(self._command.outputs, self._plan.cwd, self._folder, self._began_unix_s)
        except OSError as error:
            self._note_event("outputs_not_kept", reason=str(error))
        noted = take_note(self._folder)
        failed = code != 0 and not self._was_asked
        memory = oom.judge_log(text) if failed else None
        if failed and memory is None and pid in noted:
            memory = "card" if noted[pid] == "cuda" else "host"
        # A program without a torch for CUDA is capped in the PC's RAM, even if it has a card.
        on_host = memory == "host" and self._on_card and "cpu" not in noted.values()
        # The kernel may have killed a child of the program.
        was_killed = code in {-signal.SIGKILL, 128 + signal.SIGKILL} or "Killed" in text
        seen = {
            Cause.TIME_LIMIT: self._out_of_time,
            Cause.PARKED: self._was_asked,
            Cause.OUT_OF_MEMORY: memory is not None and not on_host,
            Cause.HOST_MEMORY: failed and (on_host or (was_killed and self._was_memory_short())),
            Cause.DISK_FULL: failed and _is_full(str(self._folder), self._plan.cwd),
            Cause.NAN_LOSS: failed and self._results.nan_loss,
        }
        return Ending(
            cause=cause_of(code, text, (cause for cause, holds in seen.items() if holds)),
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            text=text,
            was_asked=self._was_asked,
            peak_bytes=self._peak_bytes or None,
        )

    def _end(self, ending: Ending) -> None:
        if self._kept is not None:
            self._wall_s += time.monotonic() - self._began_s
        self._release()
        self._ending, self._has_news = ending, True
        self._note_event(
            "program_ended",
            exit_code=ending.exit_code,
            signal=ending.signal,
            was_asked=ending.was_asked,
            peak_bytes=ending.peak_bytes,
            last=last_line(ending.text),
        )
        if not ending.was_asked:
            with contextlib.suppress(OSError):
                replace(self._record, ending=ending).write(self._folder)

    def _measure(self, pids: list[int]) -> None:
        held_bytes, most_bytes = _of_card(pids) if self._on_card else _resident(pids)
        self._held_bytes = held_bytes
        self._peak_bytes = max(held_bytes, most_bytes, self._peak_bytes)

    def _status_of_program(self, orders: Orders) -> Status:
        slot, ending, verdict = self._spec.slot, self._ending, Verdict.OK
        if ending is None and self._pid is None:
            return Status(slot=slot, incarnation=self._incarnation)
        self._results.read()
        if ending is None:
            words = "was told to end" if self._is_told_to_end else "runs"
            state = WorkerState.RUNNING
            reason = f"its program {words}, process {self._pid}{self._note}"
        elif ending.was_asked:
            state, reason = WorkerState.STOPPED, f"its program ended as asked: {_in_words(ending)}"
        else:
            verdict, reason = Verdict.DONE, f"{_in_words(ending)}{self._note}"
            state = WorkerState.DONE if ending.exit_code == 0 else WorkerState.STOPPED
        # Each second of work counts as a good step, and so does a good end.
        is_good = ending is None or ending.exit_code == 0 or ending.was_asked
        wall_s = self._wall_s + (0.0 if ending is not None else time.monotonic() - self._began_s)
        return Status(
            slot=slot,
            incarnation=self._incarnation,
            verdict=verdict,
            state=state,
            reason=reason,
            is_up=True,
            is_held=orders.holds and ending is not None,
            saves=self._saves,
            device=self._device,
            memory=self._memory(),
            lease_bytes=orders.lease_bytes,
            counts=StepCounts(
                steps_ok=int(wall_s) + is_good, steps_error=int(not is_good), busy_s=wall_s
            ),
            wall_s=wall_s,
            errors_in_a_row=int(not is_good),
            # Always set: the head then asks for a save, which ends the program, before a rest.
            progress=self._results.progress,
            save_due=ending is None and self._was_asked,
            metrics=dict(self._results.metrics),
            ended=ending,
        )

    @property
    def _on_card(self) -> bool:
        return self._spec.device == "cuda"

    @property
    def _cap_bytes(self) -> int:
        return self._plan.cap_bytes or self._spec.budget_bytes

    @cached_property
    def _device(self) -> DeviceInfo:
        shown, cards = queries.visible_card(), look_at_cards().cards if self._on_card else ()
        card = next((card for card in cards if shown in {card.uuid, str(card.index)}), None)
        return DeviceInfo(
            kind=self._spec.device,
            name="CPU" if card is None else card.name or "card",
            uuid=None if card is None else card.uuid,
            total_bytes=psutil.virtual_memory().total if card is None else card.total_bytes,
            cap_bytes=self._cap_bytes,
            pid=os.getpid(),
            driver=queries.driver_version() if self._on_card else None,
        )

    def _memory(self) -> MemoryInfo:
        card = queries.visible_card()
        held_bytes = 0 if self._ending is not None else self._held_bytes
        return MemoryInfo(
            device_total_bytes=queries.card_total_bytes(card) if self._on_card else None,
            device_used_bytes=queries.card_used_bytes(card) if self._on_card else None,
            allocated_bytes=held_bytes,
            reserved_bytes=held_bytes,
            peak_bytes=self._peak_bytes,
            alloc_retries=0,
        )


def _in_words(ending: Ending) -> str:
    """Say how a program ended, with the last line that it printed."""
    status = -ending.signal if ending.signal is not None else ending.exit_code
    if status is None:
        return ending.text
    words = _WORDS.get(ending.cause, "")
    last = "" if ending.exit_code == 0 else last_line(ending.text)
    return f"ended {end_words(status)}{words}" + (f": {last}" if last else "")


def _is_full(*folders: str) -> bool:
    for folder in folders:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(folder).free < _FULL_BYTES:
                return True
    return False


def _resident(pids: list[int]) -> tuple[int, int]:
    """Return the bytes of RAM that these processes hold, and the peak of the largest one."""
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):
            lines += Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    held, most = (
        [int(line.split()[1]) * 1024 for line in lines if line.startswith(name)]
        for name in ("VmRSS:", "VmHWM:")
    )
    return sum(held), max(most, default=0)


def _of_card(pids: list[int]) -> tuple[int, int]:
    """Return the bytes of the visible card that these processes hold, twice; 0 if NVML has none."""
    held_bytes = 0
    with contextlib.suppress(pynvml.NVMLError), queries.opened():
        on_card = queries.find_card(queries.visible_card()).processes()
        held_bytes = sum(on_card.get(pid) or 0 for pid in pids)
    return held_bytes, held_bytes
