"""Forecasts for `plan` what a team gains before it trains: from the last run of this training, and
from the links as `doctor` last measured them. Measures nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import Config
from orchestrator.config.team import members
from orchestrator.core.placement import node_budget
from orchestrator.core.team_time import StepTimes, least_alone_s, step_times
from orchestrator.errors import ArchiveError, ConfigError
from orchestrator.record.archive import StoredRun
from orchestrator.record.events import read_events
from orchestrator.record.folders import list_runs
from orchestrator.run.environment import Mode, config_and_target_of
from workers.files import read_small, replace_whole
from workers.learned_limits import default_path
from workers.messages import TeamPace

_LINKS_MOST_BYTES: Final = 2**20


def link_of(node: str, other: str) -> str:
    """Return the name of the link between two PCs."""
    return " ".join(sorted((node, other)))


def known_links() -> dict[str, tuple[float, float]]:
    """Return the bytes per second of each link, and when they were measured (Unix seconds)."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        stored = json.loads(read_small(_links_path(), _LINKS_MOST_BYTES))
        return {str(name): (float(rate), float(at)) for name, (rate, at) in stored.items()}
    return {}


def remember_links(bytes_per_s: Mapping[str, float]) -> None:
    """Store the measured links; if they cannot be stored, `plan` does not know them."""
    new = {name: (rate, time.time()) for name, rate in bytes_per_s.items()}
    with suppress(OSError):
        _links_path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_whole(_links_path(), json.dumps({**known_links(), **new}))


def _links_path() -> Path:
    return default_path().with_name("links.json")


def forecast(config: Config, sums_bytes: int | None) -> dict[str, Any]:
    """Return the expected times of a step of a team, as far as known, and a sentence.

    `sums_bytes` is the size of the sums of gradients; `None` if unknown.
    """
    links, slots = known_links(), members(config)
    first, *others = (slot.partition("/")[0] for slot in slots)
    names = [link_of(first, node) for node in others if node != first]
    if lacking := [name for name in dict.fromkeys(names) if name not in links]:
        said = ", ".join(lacking)
        return {"sentence": f"The link of {said} is not measured: python -m orchestrator doctor"}
    if sums_bytes is None:
        return {"sentence": "The time of a step's sums on the wire is not known"}
    # The sums of every member on another PC use the one link of the leader.
    wire_s = sum(sums_bytes / links[name][0] for name in names)
    speeds = _rated(config)
    times, source = _known(config, speeds, wire_s)
    if times is None:
        return {"wire_s": wire_s, "sentence": _by_rating(speeds, wire_s)}
    for name in dict.fromkeys(names):
        rate, at = links[name]
        day = time.strftime("%Y-%m-%d", time.localtime(at))
        source += f"; link of {name}: {rate * 8e-6:.0f} Mb/s on {day}"
    figures = {**asdict(times), "gain_pct": 100 * times.gain, "source": source}
    return {**figures, "sentence": f"{times.sentence} ({source})"}


def _rated(config: Config) -> dict[str, float]:
    """Return the rated speeds of the members, TFLOP/s; empty unless all are known."""
    speeds = dict[str, float]()
    for slot in members(config):
        node = config.nodes[slot.partition("/")[0]]
        if node.gpu not in PROFILES:
            return {}
        speeds[slot] = PROFILES[node.gpu].peak_tflops(node_budget(slot, node, config).dtype)
    return speeds


def _by_rating(speeds: Mapping[str, float], wire_s: float) -> str:
    """Say from which step time on the team pays, if no run has measured a member."""
    said = f"The sums take {wire_s:.3g} s a step on the wire. No run of this training is stored"
    if not speeds:
        return f"{said}, so that it is not known whether the team is faster"
    fastest = max(speeds, key=speeds.__getitem__)
    least_s = least_alone_s(list(speeds.values()), wire_s)
    if least_s is None:
        return f"{said}; by the ratings of its cards, it is not a tenth faster than {fastest} alone"
    return (
        f"{said}; by the ratings of its cards, it is a tenth faster where {fastest} alone takes "
        f"{least_s:.3g} s a step or more"
    )


def _known(
    config: Config, speeds: Mapping[str, float], wire_s: float
) -> tuple[StepTimes | None, str]:
    """Return the times of a step, and the run they come from: the newest run of this team; else the
    newest of a member alone, and ratings for the other members.
    """
    alone: tuple[StepTimes, str] | None = None
    for listed in list_runs(Path(config.run.dir)):
        before = None if listed.run is None else _same_training(listed.run, config)
        if listed.run is None or before is None:
            continue
        if before.train.team is None:
            paces = _paces_alone(listed.run, before, config, speeds) if alone is None else None
            if paces is not None:
                times = step_times(paces, wire_s, equal=config.train.exact)
                alone = times, f"run {listed.run_id} on one of them, the others by their ratings"
        elif members(before) == members(config) and before.nodes == config.nodes:
            with suppress(ArchiveError, IndexError):
                event = read_events(listed.run.folder, ("team_times",))[-1].details
                times = StepTimes(event["fastest"], event["alone_s"], event["compute_s"], wire_s)
                return times, f"measured by run {listed.run_id}"
    return alone or (None, "")


def _same_training(stored: StoredRun, config: Config) -> Config | None:
    """Return the configuration of a run if it trained the same on the cluster; else `None`."""
    with suppress(ConfigError):
        before, _ = config_and_target_of(stored.facts)
        is_same = before.train.fingerprint() == config.train.fingerprint()
        if is_same and before.workload.name == "train" and stored.facts.mode == Mode.CLUSTER:
            return before
    return None


def _paces_alone(
    stored: StoredRun, before: Config, config: Config, speeds: Mapping[str, float]
) -> dict[str, TeamPace] | None:
    """Return the pace of each member, from that of one which had its card alone, and ratings."""
    if len(stored.slots) != 1:
        return None
    row = stored.slots[0].row
    known = next((slot for slot in speeds if slot.partition("/")[0] == row.node), None)
    if known is None or before.nodes[row.node].gpu != config.nodes[row.node].gpu:
        return None
    if not row.progress.samples_per_s:
        return None
    # In a team, a member has the whole card.
    step_s = config.train.batch / row.progress.samples_per_s * (row.duty_requested or 1.0)
    update_share = (row.progress.optimizer_pct or 0.0) / 100
    each_s = {slot: step_s * speeds[known] / speed for slot, speed in speeds.items()}
    return {
        slot: TeamPace(steps=1, step_s=alone_s, alone_s=alone_s, update_s=alone_s * update_share)
        for slot, alone_s in each_s.items()
    }
