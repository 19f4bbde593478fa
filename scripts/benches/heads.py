"""A head inside this process: the real supervisor with its event log and its store.

Does not start Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.config.load import dump_config
from orchestrator.config.schema import Config
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan
from orchestrator.record.events import EventLog
from orchestrator.record.model import Snapshot
from orchestrator.record.output import OutputFiles
from orchestrator.record.store import STORE_NAME, RunFacts, RunStore
from orchestrator.run.learned_limits import LearnedLimits
from orchestrator.run.resume import Past
from orchestrator.run.run_dir import CheckpointKeeper
from orchestrator.run.supervisor import Clock, Commands, Supervisor
from orchestrator.view.live import Outlets, Watcher
from workers.host.processes import start_time


def supervise(
    config: Config,
    plans: Sequence[SlotPlan],
    fleet: Fleet,
    folder: Path,
    duration_s: float,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    clock: Clock | None = None,
    watchers: Sequence[Watcher] = (),
) -> Snapshot:
    """Run all slots for so long, or until interrupted; return the last snapshot."""
    clock = clock or Clock()
    started_at_unix_s = clock.unix_s()
    store = RunStore(folder / STORE_NAME, clock.monotonic_s)
    about = RunFacts(
        run_id="bench", started_at_unix_s=started_at_unix_s, duration_s=duration_s,
        min_success_rate=0.0, mode="rehearse", device="cpu", one_machine=True,
        config_yaml=dump_config(config), chaos=None, nodes_planned=tuple(config.nodes),
        head_pid=os.getpid(), head_started=start_time(os.getpid()), host=socket.gethostname(),
    )  # fmt: skip
    store.begin(about)
    events = EventLog(folder / "events.jsonl", unix_s=clock.unix_s, also=store.event)
    outlets = Outlets(watchers=tuple(watchers), events=events, store=store)
    commands = Commands(folder, outlets, clock, {})
    snapshot = Supervisor(
        facts=about, past=Past(), config=config, plans=tuple(plans), fleet=fleet,
        outlets=outlets, interrupted=interrupted, learned_limits=LearnedLimits(None, events),
        checkpoints=CheckpointKeeper(folder / "states"), output=OutputFiles(folder),
        commands=commands, clock=clock,
    ).run()  # fmt: skip
    commands.close()
    store.end("good", 0, None, ())
    events.close()
    return snapshot
