"""A slot whose work is a program of the user: started, watched and ended as the head wants it.

The program runs on between two polls, and a poll only waits: it is never late, whatever the program
does. Imports no torch and does not judge why the program ended (`orchestrator/jobs/causes.py`
does). A keeper starts and ends it (`workers/keeper/`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

import psutil
import pynvml

from workers import oom
from workers.command.code import CODE, code_of, is_same_code
from workers.command.files import LOG_BYTES, Log, Record, Results, folder_of, keep_outputs
from workers.command.launch import JOB_DIR, launch
from workers.host.machine import look_at_cards
from workers.host.processes import oom_kills, worker_and_raylet
from workers.keeper.kept import Ended, Kept
from workers.keeper.task import Task
from workers.messages import (
    DeviceInfo,
    Ending,
    MemoryInfo,
    Orders,
    Status,
    StepCounts,
    Verdict,
    WorkerEvent,
    WorkerState,
)
from workers.nvml import queries
from workers.settings import Scalar, WorkerSpec

#: Of the command's environment, the number of the job's attempt. A program that has ended is not
#: started again under the number that it had: its end is told again.
ATTEMPT: Final = "ORCHESTRATOR_ATTEMPT"

#: Between two looks at what the program takes; its end is seen at once.
_POLL_S: Final = 0.5

#: A keeper starts in a few hundredths of a second, on a busy PC in some seconds.
_START_S: Final = 60.0

#: Below this a file system counts as full.
_FULL_BYTES: Final = 2**20


class CommandEngine:
    """The worker of one slot, in this process."""

    def __init__(self, spec: WorkerSpec, problem: str | None = None) -> None:
        """Touch nothing: the first poll starts the program, unless there is a `problem`."""
        assert spec.command is not None  # noqa: S101 - `load_worker` asks
        self._spec, self._command = spec, spec.command
        self._attempt = self._command.env.get(ATTEMPT)
        self._folder = Path(self._command.env.get(JOB_DIR) or folder_of(spec))
        self._log = Log(self._folder / "output.log")
        self._results = Results(self._folder / "results.jsonl")
        self._kept: Kept | None = None
        self._record = Record()
        self._began_s = self._began_unix_s = 0.0
        self._cwd = ""
        self._incarnation, self._saves = 0, 0
        self._counts, self._wall_s, self._counted_s = StepCounts(), 0.0, 0.0
        self._is_stopping = False
        self._was_asked = False
        self._out_of_time = False
        self._kills = 0
        self._peak_bytes: int | None = None
        self._held_bytes = 0
        self._ending: Ending | None = None
        self._cap_bytes: int | None = None
        self._events: list[WorkerEvent] = []
        self._problem = problem
        self._note = ""
        """What is to be known of its code."""

    def poll(self, orders: Orders, wait_s: float) -> Status:
        """Start the program or have it end, as far as that is wanted, and say how it is.

        Watch it for at most so long before; return at once when it has started or ended.
        """
        rests = orders.holds or not orders.runs
        if orders.incarnation > self._incarnation and self._kept is None:
            self._incarnation, self._saves, self._ending = orders.incarnation, 0, None
            self._counts, self._wall_s = StepCounts(), 0.0
        if self._ending is not None and self._ending.was_asked and not rests:
            self._ending = None  # its slot is to work again
        has_ended = self._ending is not None
        if self._kept is not None:
            self._kept.on()
            if rests or orders.saves > self._saves or orders.incarnation > self._incarnation:
                self._stop()
                self._was_asked = True
            self._watch(wait_s)
        elif rests and not has_ended:
            # Nothing runs, and nothing is to.
            self._ending = Ending(was_asked=True, text="it had not begun")
            has_ended = True
        elif not has_ended:
            self._counted_s = time.monotonic()
            self._begin(orders.incarnation)
            self._watch(0.0)
        if orders.incarnation == self._incarnation:
            self._saves = orders.saves
        if not has_ended:
            self._count()
        return self._status(orders)

    def _watch(self, wait_s: float) -> None:
        until_s = time.monotonic() + wait_s
        while self._ending is None:
            self._look(min(_POLL_S, max(0.0, until_s - time.monotonic())))
            limit_s = self._command.time_limit_s
            if limit_s is not None and time.monotonic() - self._began_s > limit_s:
                self._out_of_time = self._out_of_time or not self._is_stopping
                self._stop()
            if time.monotonic() >= until_s:
                break

    def _count(self) -> None:
        """Count a good step for each second that it ran, and its end."""
        ending, now_s = self._ending, time.monotonic()
        self._wall_s += now_s - self._counted_s
        self._counted_s = now_s
        is_good = ending is None or ending.exit_code == 0 or ending.was_asked
        steps_ok = 1 + int(self._wall_s) if is_good else self._counts.steps_ok
        self._counts = StepCounts(
            steps_ok=steps_ok, steps_error=int(not is_good), busy_s=self._wall_s
        )

    def _begin(self, incarnation: int) -> None:
        """Start the program, or find that its attempt has ended already."""
        record = Record.of(self._folder)
        if self._attempt is not None and record.attempt == self._attempt and record.ending:
            self._ending = record.ending
            return
        self._was_asked = self._out_of_time = self._is_stopping = False
        self._record = Record(starts=record.starts, attempt=self._attempt)
        if self._problem is not None:
            self._end(Ending(started=False, text=self._problem))
            return
        # A job's processes are counted over all its places: its attempt says whether it continues.
        is_later = incarnation > 0 and ATTEMPT not in self._command.env
        resumes = is_later or record.starts > 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._record = replace(self._record, starts=record.starts + 1)
            self._record.write(self._folder)
            plan = launch(self._spec, self._command, self._folder, resumes=resumes)
            self._cap_bytes, self._cwd = plan.cap_bytes, plan.cwd
            if plan.problem is not None:
                self._end(Ending(started=False, text=f"cannot be started: {plan.problem}"))
                return
            watched = worker_and_raylet()
            self._start(
                Task(
                    argv=plan.argv,
                    env=plan.env,
                    cwd=plan.cwd,
                    place=str(self._folder),
                    log_bytes=LOG_BYTES,
                    grace_s=self._command.grace_s,
                    lease_s=self._command.lease_s,
                    watch=watched,
                ),
                server=watched[-1],
            )
        except OSError as error:
            text = f"cannot use {self._folder}: {error.strerror or error}"
            full = error.errno in oom.DISK_FULL
            self._end(Ending(started=False, text=text, disk_full=full))
            return
        self._compare_code(plan.cwd)
        if self._ending is None:
            cap = {"uncapped": plan.uncapped} if plan.uncapped else {"cap_bytes": plan.cap_bytes}
            self._tell(
                "program_started",
                pid=self._pid,
                program=" ".join(plan.argv)[:300],
                cwd=plan.cwd,
                resumes=resumes,
                log=str(self._log.path),
                **cap,
            )

    def _compare_code(self, cwd: str) -> None:
        """Say whether the program's code is another than when the job was submitted."""
        submitted, self._note = self._command.env.get(CODE), ""
        present = None if submitted is None else code_of(cwd)
        if submitted is None or present is None or is_same_code(submitted, present):
            return
        self._note = f"; its code was changed since it was submitted: {submitted}, now {present}"
        self._tell("code_changed", submitted=submitted, present=present, cwd=cwd)

    def _start(self, task: Task, server: tuple[int, str]) -> None:
        self._log.begin()
        self._results.begin()
        self._kills, self._peak_bytes = oom_kills(), None
        self._began_s, self._began_unix_s = time.monotonic(), time.time()
        self._kept = Kept(task, server)
        deadline_s = time.monotonic() + _START_S
        while not (self._kept is None or self._kept.pid) and time.monotonic() < deadline_s:
            self._look(_POLL_S)

    @property
    def _pid(self) -> int | None:
        return None if self._kept is None else self._kept.pid

    def _stop(self) -> None:
        """Have the program end, once."""
        if self._is_stopping or self._kept is None:
            return
        self._is_stopping = True
        self._kept.end(self._command.grace_s)
        self._tell("program_told_to_end", pid=self._kept.pid, grace_s=self._command.grace_s)

    def _look(self, wait_s: float) -> None:
        """Wait for news of the keeper, and measure."""
        kept = self._kept
        assert kept is not None  # noqa: S101 - asked by callers
        kept.listen(wait_s)
        if kept.refused is not None:
            self._end(Ending(started=False, text=f"cannot be started: {kept.refused}"))
        elif kept.ended is not None:
            if kept.ended.left:
                self._tell("program_left_processes", count=kept.ended.left)
            self._judge(kept.ended)
        else:
            self._measure(kept.processes())

    def _judge(self, ended: Ended) -> None:
        """Say how the program ended, by what only this PC can see."""
        code = ended.status
        self._results.read(is_over=True)
        try:
            keep_outputs(self._command.outputs, self._cwd, self._folder, self._began_unix_s)
        except OSError as error:
            self._tell("outputs_not_kept", reason=str(error))
        text = self._log.tail()
        failed = code != 0 and not self._was_asked
        memory = oom.judge_log(text) if failed else None
        on_card = self._spec.device == "cuda"
        # A program without a torch for CUDA is capped in the PC's RAM on a card, too.
        on_host = memory == "host" and on_card and "GiB of private memory" not in text
        # The kernel may have chosen one of its children.
        was_killed = code in {-signal.SIGKILL, 128 + signal.SIGKILL} or "Killed" in text
        killed = was_killed and oom_kills() > self._kills
        self._end(
            Ending(
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                text=text,
                was_asked=self._was_asked,
                time_limit=self._out_of_time,
                out_of_memory=memory is not None and not on_host,
                host_memory=failed and (killed or on_host),
                disk_full=failed and _is_full(self._folder, self._command.cwd),
                nan_loss=failed and self._results.nan_loss,
                peak_bytes=self._peak_bytes,
            )
        )

    def _end(self, ending: Ending) -> None:
        if self._kept is not None:
            self._kept.close()
        self._kept = None
        self._ending = ending
        self._tell(
            "program_ended",
            exit_code=ending.exit_code,
            signal=ending.signal,
            was_asked=ending.was_asked,
            peak_bytes=ending.peak_bytes,
            last=_last_line(ending.text),
        )
        if not ending.was_asked:
            with contextlib.suppress(OSError):
                replace(self._record, ending=ending).write(self._folder)

    def _measure(self, pids: list[int]) -> None:
        on_card = self._spec.device == "cuda"
        held_bytes, most_bytes = (_on_card(pids), 0) if on_card else _resident(pids)
        if held_bytes is not None:
            self._held_bytes = held_bytes
            self._peak_bytes = max(held_bytes, most_bytes, self._peak_bytes or 0)

    def _status(self, orders: Orders) -> Status:
        self._results.read()
        ending, verdict = self._ending, Verdict.OK
        if ending is None:
            words = "was told to end" if self._is_stopping else "runs"
            note = "" if self._is_stopping else self._note
            state = WorkerState.RUNNING
            reason = f"its program {words}, process {self._pid}{note}"
        elif ending.was_asked:
            state, reason = WorkerState.STOPPED, f"its program ended as asked: {in_words(ending)}"
        else:
            verdict, reason = Verdict.DONE, f"{in_words(ending)}{self._note}"
            state = WorkerState.DONE if ending.exit_code == 0 else WorkerState.STOPPED
        events, self._events = tuple(self._events), []
        return Status(
            slot=self._spec.slot,
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
            counts=self._counts,
            wall_s=self._wall_s,
            errors_in_a_row=self._counts.steps_error,
            events=events,
            # Always: so the head has it save, which is to end, before its slot rests.
            progress=self._results.progress,
            save_due=ending is None and self._was_asked,
            output=self._log.take(),
            metrics=dict(self._results.metrics),
            ended=ending,
        )

    @cached_property
    def _device(self) -> DeviceInfo:
        on_card, shown = self._spec.device == "cuda", queries.visible_card()
        cards = look_at_cards().cards if on_card else ()
        card = next((card for card in cards if shown in {card.uuid, str(card.index)}), None)
        return DeviceInfo(
            kind=self._spec.device,
            name="CPU" if card is None else card.name or "card",
            uuid=None if card is None else card.uuid,
            total_bytes=psutil.virtual_memory().total if card is None else card.total_bytes,
            context_bytes=0,
            context_source="not measured: of a program of the user",
            peak_source="NVML's list of processes"
            if on_card
            else "resident memory of its processes",
            cap_bytes=self._cap_bytes or self._spec.budget_bytes,
            dtype="",
            threads=0,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            torch_version="",
            driver=queries.driver_version() if on_card else None,
        )

    def _memory(self) -> MemoryInfo:
        on_card = self._spec.device == "cuda"
        card = queries.visible_card()
        held_bytes = 0 if self._ending is not None else self._held_bytes
        return MemoryInfo(
            device_total_bytes=queries.card_total_bytes(card) if on_card else None,
            device_used_bytes=queries.card_used_bytes(card) if on_card else None,
            free_bytes=max(0, (self._cap_bytes or self._spec.budget_bytes) - held_bytes),
            allocated_bytes=held_bytes,
            reserved_bytes=held_bytes,
            peak_bytes=self._peak_bytes or 0,
            alloc_retries=0,
        )

    def _tell(self, name: str, **detail: Scalar) -> None:
        self._events.append(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))


def in_words(ending: Ending) -> str:
    """Say how a program ended, with its last words."""
    if not ending.started or (ending.exit_code is None and ending.signal is None):
        return ending.text
    words = f"with exit code {ending.exit_code}"
    if ending.signal is not None:
        words = f"by signal {ending.signal}"
        with contextlib.suppress(ValueError):
            words = f"by {signal.Signals(ending.signal).name}"
    words += (
        ending.time_limit * " after its time limit"
        or ending.host_memory * " for want of RAM"
        or ending.disk_full * " with a full disk"
        or ending.nan_loss * " after a loss that is no number"
    )
    last = "" if ending.exit_code == 0 else _last_line(ending.text)
    return f"ended {words}: {last}" if last else f"ended {words}"


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()[:300]


def _is_full(folder: Path, cwd: str | None) -> bool:
    for place in (str(folder), cwd or os.getcwd()):  # noqa: PTH109
        with contextlib.suppress(OSError):
            if shutil.disk_usage(place).free < _FULL_BYTES:
                return True
    return False


def _resident(pids: list[int]) -> tuple[int, int]:
    """Return what these processes hold of the PC's RAM, and the most that one of them ever did."""
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):
            lines += Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    held, most = (
        [int(line.split()[1]) * 1024 for line in lines if line.startswith(name)]
        for name in ("VmRSS:", "VmHWM:")
    )
    return sum(held), max(most, default=0)


def _on_card(pids: list[int]) -> int | None:
    """Return what these processes hold of the visible card; `None` where NVML does not say."""
    with contextlib.suppress(pynvml.NVMLError), queries.opened():
        on_card = queries.find_card(queries.visible_card()).processes()
        held = [on_card[pid] for pid in pids if on_card.get(pid) is not None]
        return sum(filter(None, held)) if held else None
    return None
