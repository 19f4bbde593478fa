"""A head inside this process: the real supervisor with its event log and its store, and who hears each report first.

Does not start Ray.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.cluster.orphan_reaper import start_time
from orchestrator.config.load import dump_config
from orchestrator.config.schema import Config
from orchestrator.core.fleet import Fleet, SliceEnded, SliceReported
from orchestrator.core.placement import SlotPlan
from orchestrator.run.learned_limits import LearnedLimits
from orchestrator.run.run_info import RunInfo
from orchestrator.run.supervisor import Supervisor
from orchestrator.watch.events import EventLog
from orchestrator.watch.model import Snapshot
from orchestrator.watch.records import STORE_NAME, RunFacts
from orchestrator.watch.sinks import Outlets
from orchestrator.watch.store import RunStore
from workers.messages import Report


class Arrivals:
    """A fleet that tells of each report when it arrives, in monotonic seconds, and passes everything on."""

    def __init__(self, fleet: Fleet, heard: Callable[[float, Report], None]) -> None:
        self._fleet = fleet
        self._heard = heard

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the fleet has
        return getattr(self._fleet, name)

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        """See `Fleet.wait`."""
        outcomes = self._fleet.wait(timeout_s)
        now_s = time.monotonic()
        for outcome in outcomes:
            if isinstance(outcome, SliceReported):
                self._heard(now_s, outcome.report)
        return outcomes


def supervise(
    config: Config,
    plans: Sequence[SlotPlan],
    fleet: Fleet,
    heard: Callable[[float, Report], None],
    folder: Path,
    duration_s: float,
    interrupted: threading.Event | None = None,
) -> Snapshot:
    """Run all slots for so long, or until interrupted; return the last picture. The run's files lie in `folder`."""
    started_at_unix_s = time.time()
    store = RunStore(folder / STORE_NAME)
    store.begin(facts(config, started_at_unix_s, duration_s))
    events = EventLog(folder / "events.jsonl", also=store.event)
    snapshot = Supervisor(
        info=RunInfo(run_id="bench", started_at_unix_s=started_at_unix_s, duration_s=duration_s),
        config=config,
        plans=tuple(plans),
        fleet=Arrivals(fleet, heard),
        outlets=Outlets(watchers=(), events=events, store=store),
        interrupted=(interrupted or threading.Event()).is_set,
        learned_limits=LearnedLimits(None, events),
    ).run()
    store.end("good", 0, None, ())
    events.close()
    return snapshot


def facts(config: Config, started_at_unix_s: float, duration_s: float) -> RunFacts:
    """Return what the store keeps of a run of this process."""
    return RunFacts(
        run_id="bench",
        started_at_unix_s=started_at_unix_s,
        duration_s=duration_s,
        min_success_rate=0.0,
        mode="rehearse",
        device="cpu",
        one_machine=True,
        config_yaml=dump_config(config),
        chaos=None,
        nodes_planned=tuple(config.nodes),
        head_pid=os.getpid(),
        head_started=start_time(os.getpid()),
        host=socket.gethostname(),
    )
