"""Collects what this machine knows of the guides' claims: cards, memory plans, the newest run, and
stored tunings.

Measures nothing on a card. The memory plans are computed by a process of their own, because that
needs torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from orchestrator.config.gpu_specs import PEAK_DTYPES, PROFILES, match_profile
from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.lab.tune.claims import Claims, Workload, workload_of
from orchestrator.lab.tune.claims_verdict import Facts
from orchestrator.lab.tune.levers import PLAIN
from orchestrator.lab.tune.products import WORKLOAD, baseline_of
from orchestrator.lab.tune.rows import Row
from orchestrator.lab.tune.store import Result, results
from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.folders import LATEST, find_run
from orchestrator.record.model import Row as SlotRow
from workers.host.facts import CardFacts
from workers.host.machine import look_at_cards
from workers.units import GIB

#: About twenty plans of a second each, on a slow disk.
_TIMEOUT_S: Final = 300.0

#: Units of one multiprocessor, by generation (NVIDIA's whitepapers, as `gpu_specs.ARCHITECTURES`).
_UNITS: Final[Mapping[tuple[int, int], tuple[int, int]]] = {(8, 6): (128, 4), (8, 9): (128, 4)}

_NO_CARD: Final = "no NVIDIA card answers on this machine"


def facts_of(claims: Claims, runs_dir: Path) -> Facts:
    """Return what is known here; takes about half a minute, for the memory plans."""
    driver = look_at_cards()
    cards = [card for card in driver.cards if card.visible]
    run = _newest_run(runs_dir)
    planned, refused = _planned(claims.plan)
    absent = dict(refused)
    if not cards:
        absent |= dict.fromkeys((*_OF_A_CARD, "here"), _NO_CARD)
    devices = {card.uuid for card in cards} or {"cpu"}
    tuned = _newest([result for result in results() if result.subject.card in devices])
    return Facts(
        values={
            **dict(_card_values()),
            **planned,
            **_here(cards),
            **({} if run is None else dict(_run_values(run, {card.uuid for card in cards}))),
        },
        absent=absent,
        sources={} if run is None else {"run": f"run {run.facts.run_id}, at its end"},
        rows={workload: (*result.rows, *_chosen_row(result)) for workload, result in tuned.items()},
        plain={workload: _plain_of(result) for workload, result in tuned.items()},
        on_card=bool(cards),
        cards=frozenset(
            profile.key for card in cards if (profile := match_profile(card.name, card.total_bytes))
        ),
    )


#: What a run records of its card, by the names that claims use.
_OF_A_CARD: Final = (
    "run.temperature_c", "run.slowdown_c", "run.power_w", "run.utilisation_pct", "run.memory_used_pct",
    "run.memory_used_gib", "run.sm_clock_mhz", "run.context_gib",
)  # fmt: skip


def _newest(stored: Sequence[Result]) -> dict[Workload, Result]:
    """Return the newest result of each workload; `stored` has the newest first."""
    found: dict[Workload, Result] = {}
    for result in stored:
        workload = workload_of(result.subject.model)
        if workload is not None:
            found.setdefault(workload, result)
    return found


def _plain_of(result: Result) -> dict[str, str]:
    """Return the settings of a tuning's baseline, which has no row of its own."""
    if result.subject.model == WORKLOAD:
        return {key: _text(value) for key, value in baseline_of(0).items() if key != "size"}
    batch = {
        key: value for key, value in result.chosen.items() if key == "batch"
    }  # no lever of speed: never chosen
    return {key: _text(value) for key, value in {**PLAIN, **batch}.items()}


def _chosen_row(result: Result) -> Iterator[Row]:
    """Yield the row of the chosen set as that of the lever `all`; none if it was not measured."""
    chosen, plain = {key: _text(value) for key, value in result.chosen.items()}, _plain_of(result)
    needed = {key for key, value in plain.items() if chosen.get(key, value) != value}
    sets = [(_changes_of(row), row) for row in result.rows]
    fitting = [
        (len(changes), row)
        for changes, row in sets
        if changes.items() <= chosen.items() and needed <= {*changes}
    ]
    if needed and fitting:
        row = max(fitting, key=lambda each: each[0])[1]
        yield replace(
            row, lever="all", setting="chosen", reason=f"{row.lever}={row.setting}: {row.reason}"
        )


def _changes_of(row: Row) -> dict[str, str]:
    """Return what a row changes against the baseline, as its names say: `a + b` and `1 + 2 with c
    3`.
    """
    changes = {}
    for lever, setting in zip(row.lever.split(" + "), row.setting.split(" + "), strict=False):
        value, *beside = setting.split(" with ")
        changes[lever] = value
        changes.update((each.partition(" ")[0], each.partition(" ")[2]) for each in beside)
    return changes


def _text(value: object) -> str:
    return str(value).lower()


def _card_values() -> Iterator[tuple[str, float]]:
    for profile in PROFILES.values():
        name = f"card.{profile.key.replace('-', '_')}"
        yield f"{name}.shown_gib", profile.shown_gib
        if profile.bandwidth_gb_s is not None:
            yield f"{name}.bandwidth_gb_s", profile.bandwidth_gb_s
        for dtype, peak in zip(PEAK_DTYPES, profile.tflops, strict=True):
            if peak is not None:
                yield f"{name}.{dtype}", peak
        units = _UNITS.get(profile.compute_capability or (0, 0))
        if units is not None and profile.multiprocessors is not None:
            yield f"{name}.cuda_cores", units[0] * profile.multiprocessors
            yield f"{name}.tensor_cores", units[1] * profile.multiprocessors


def _here(cards: list[CardFacts]) -> dict[str, float]:
    """Return what the first card says of itself."""
    if not cards:
        return {}
    card = cards[0]
    told = {
        "card_gib": card.total_bytes / GIB,
        "power_limit_w": card.power_limit_w,
        "memory_clock_mhz": card.max_memory_clock_mhz,
    }
    return {f"here.{name}": value for name, value in told.items() if value is not None}


def _newest_run(runs_dir: Path) -> StoredRun | None:
    try:
        return read_run(find_run(runs_dir, LATEST))
    except (UsageError, ArchiveError):
        return None


def _run_values(run: StoredRun, uuids: Collection[str]) -> Iterator[tuple[str, float]]:
    """Yield what a run recorded at its end.

    Of several slots on the cards of this machine the highest value.
    """
    snapshot = run.snapshot()
    counts = snapshot.counts
    if counts.success_rate is not None:
        yield "run.success_pct", 100 * counts.success_rate
    yield "run.oom_count", counts.oom_count
    yield "run.verify_errors", counts.verify_errors
    yield "run.minutes", run.elapsed_s / 60
    found: dict[str, float] = {}
    for row in (each for each in snapshot.rows if each.gpu_uuid in uuids):
        for name, value in _row_values(row):
            found[name] = max(value, found.get(name, value))
    yield from found.items()


def _row_values(row: SlotRow) -> Iterator[tuple[str, float]]:
    told: dict[str, float | None] = {
        "temperature_c": row.temperature_c,
        "power_w": row.power_w,
        "utilisation_pct": row.utilisation_pct,
        "sm_clock_mhz": row.sm_clock_mhz,
    }
    if row.temperature_c is not None and row.margin_c is not None:
        told["slowdown_c"] = row.temperature_c + row.margin_c
    if row.device_used_bytes is not None and row.device_total_bytes:
        told["memory_used_gib"] = row.device_used_bytes / GIB
        told["memory_used_pct"] = 100 * row.device_used_bytes / row.device_total_bytes
    if row.budget_bytes is not None and row.cap_bytes is not None:
        told["context_gib"] = (row.budget_bytes - row.cap_bytes) / GIB
    yield from ((f"run.{name}", value) for name, value in told.items() if value is not None)


def _planned(plans: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the values of the memory plans and torch's defaults, and the names that have none with
    the reason.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "workers.training.plans_main"],
            input=json.dumps({name: dict(plan) for name, plan in plans.items()}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        told = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {}, dict.fromkeys(
            ("plan", "torch"), f"the memory plans took longer than {_TIMEOUT_S:.0f} s"
        )
    except (ValueError, IndexError):
        last = [one_line(line)[:300] for line in done.stderr.splitlines() if line.strip()][-1:]
        said = ": ".join(
            [f"the process that computes it ended with status {done.returncode}", *last]
        )
        return {}, dict.fromkeys(("plan", "torch"), said)
    values = {f"torch.{name}": float(value) for name, value in told["torch"].items()}
    refused = {}
    for name, plan in told["plans"].items():
        if "refused" in plan:
            refused[f"plan.{name}"] = plan["refused"]
        values |= {
            f"plan.{name}.{part}": value for part, value in plan.items() if part != "refused"
        }
    return values, refused
