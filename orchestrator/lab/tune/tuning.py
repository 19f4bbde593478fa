"""The verb `tune`: which levers, each against the user's own settings, and the files that stay."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from orchestrator.config.load import config_from_text
from orchestrator.config.schema import Config, TuneConfig
from orchestrator.core.placement import plan_slots
from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune import levers
from orchestrator.lab.tune.choice import chosen_of, row_of
from orchestrator.lab.tune.levers import MATMUL, Candidate
from orchestrator.lab.tune.measuring import ArmError, Bench, MakeSpec
from orchestrator.lab.tune.results import LeverRow, TuningResult, json_text, tunings_folder
from orchestrator.lab.tune.statistics import LeverVerdict
from orchestrator.lab.tune.tuned_yaml import tuned_yaml
from orchestrator.run.environment import in_rehearsal, on_this_machine
from workers.files import replace_whole
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.tuning.messages import ArmSpec
from workers.units import MIB

#: The length of a rehearsal that is given no budget.
_REHEARSAL_S: Final = 270.0

#: The baseline and a lever load torch, take their first steps and six rounds: half a minute.
_LEAST_S: Final = 60.0

#: Of the budget: no round begins later, and none of a single lever of a training.
_LAST: Final = 0.95
_LAST_OF_LEVERS: Final = 0.85

#: A lever that compiles gets so many times the time of another one.
_SLOW_WEIGHT: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is tuned, and how."""

    folder: Path
    file_text: str
    """The user's file as it is, without overrides and scaling: tuned.yaml is made of it."""
    model: str
    """As results are found again by: a preset, or `matmul`."""
    own: Mapping[str, Any]
    """The section with the user's own settings: the baseline."""
    candidates: Sequence[Candidate]
    make_spec: MakeSpec
    budget_s: float
    rules: TuneConfig

    @property
    def trains(self) -> bool:
        """Whether losses are compared, and a file is written."""
        return self.model != MATMUL

    @property
    def computes_in_fp32(self) -> bool:
        """Whether the baseline does."""
        return self.own.get("precision") == "fp32"


def names_in(text: str) -> list[str]:
    """Return the names in a text such as `precision, optimizer=adamw-fused`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def prepare(
    config: Config,
    file_text: str,
    *,
    rehearse: bool,
    budget_s: float | None,
    names: Sequence[str],
    workload: str = "train",
) -> Tuning:
    """Return the tuning that a command line asks for, with its folder.

    Raises:
        UsageError: A lever is named that there is none of, the budget ends before a lever can be
            judged, or this machine leaves a worker no memory.
    """
    if budget_s is not None and budget_s < _LEAST_S:
        raise UsageError(
            f"--budget {budget_s:g}s ends before any lever has had its rounds; the least is "
            f"{_LEAST_S:g}s"
        )
    if workload not in {"train", MATMUL}:
        raise UsageError(
            f"--workload {workload}: no levers are known of it; valid: train, {MATMUL}"
        )
    where = "--levers" if names else "tune.levers"
    if not names and config.tune.levers != "all" and workload == "train":
        names = names_in(config.tune.levers)
    config_from_text(file_text, "the configuration")  # tuned.yaml is made of it without `--set`
    environment = in_rehearsal(config, None) if rehearse else on_this_machine(config)
    config = environment.config
    spec = plan_slots(config, environment.target)[0].spec
    if spec.device == "cuda":  # the arm that waits keeps its context on the card
        room_bytes = spec.card_budget_bytes - ASSUMED_CONTEXT_BYTES
        spec = replace(spec, budget_bytes=max(1, min(spec.budget_bytes, room_bytes)))
    if workload == "train":
        own = config.train.model_dump()
        candidates = levers.train_candidates(config.train, on_card=spec.device == "cuda")
    else:
        own = {"dtype": "fp32"}
        candidates = levers.matmul_candidates()
    candidates = levers.named(candidates, names, where)
    if rehearse and not names and workload == "train":
        candidates = levers.for_rehearsal(candidates)
    folder = tunings_folder() / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700, parents=True)

    def make_spec(name: str, changes: Mapping[str, Any]) -> ArmSpec:
        keys = {**own, **changes}
        work = replace(spec.workload, name=workload)
        if workload == MATMUL:
            work = replace(work, **keys)
        return ArmSpec(
            name=name,
            spec=replace(spec, slot=f"tune/{name}", duty=None, workload=work),
            settings=keys if workload == "train" else {},
            log=folder / "arms.log",
        )

    usual_s = min(config.tune.budget_s, _REHEARSAL_S) if rehearse else config.tune.budget_s
    return Tuning(
        folder=folder,
        file_text=file_text,
        model=config.train.preset if workload == "train" else MATMUL,
        own=own,
        candidates=candidates,
        make_spec=make_spec,
        budget_s=budget_s or usual_s,
        rules=config.tune,
    )


def tune(tuning: Tuning, say: Callable[[str], None]) -> tuple[TuningResult, bool]:
    """Measure, write the files, and return the result, and whether all of it was measured.

    Ctrl-C ends the measuring; what is known until then is the result. `say` is told each row.

    Raises:
        UsageError: The user's own settings cannot be measured here.
    """
    created_at, began_s = datetime.now(UTC), time.monotonic()
    possible = [each for each in tuning.candidates if each.unavailable is None]
    rows: dict[str, LeverRow] = {}
    bench = Bench(tuning.make_spec, tuning.rules, tuning.budget_s, len(possible))
    is_whole = False

    def measure(candidate: Candidate, share: float, last: float) -> None:
        now_s, measured = time.monotonic(), None
        last_s = began_s + last * tuning.budget_s
        if now_s < last_s:
            measured = bench.measure(candidate, now_s + share * (last_s - now_s), last_s)
        row = row_of(
            candidate, measured, bench.opened, tuning.rules, in_fp32=tuning.computes_in_fp32
        )
        rows[candidate.name] = row
        say(f"{row.name}: {row.verdict}, {max(0.0, last_s - time.monotonic()):.0f} s left")

    try:
        opened = bench.baseline()
        weights = [_SLOW_WEIGHT if each.slow else 1.0 for each in possible]
        last = _LAST_OF_LEVERS if tuning.trains else _LAST
        for place, candidate in enumerate(possible):
            measure(candidate, weights[place] / sum(weights[place:]), last)
        chosen = chosen_of(possible, rows, tuning.rules)
        if len(chosen) > 1:
            whole = levers.together(chosen)
            measure(whole, 1.0, _LAST)
            if not chosen_of([whole], rows, tuning.rules):
                chosen = chosen[:1]
        is_whole = True
    except ArmError as error:
        raise UsageError(
            f"your settings cannot be measured here: {one_line(str(error))}; see "
            f"{tuning.folder / 'arms.log'}"
        ) from error
    except KeyboardInterrupt:
        if bench.opened is None:
            raise
        opened, chosen = bench.opened, chosen_of(possible, rows, tuning.rules)[:1]
    finally:
        bench.close()
    for candidate in tuning.candidates:
        rows.setdefault(candidate.name, row_of(candidate, None, None, tuning.rules))
    changes = {key: value for each in chosen for key, value in each.changes.items()}
    names = ", ".join(each.name for each in chosen)
    result = TuningResult(
        tune_id=tuning.folder.name,
        subject={
            "card": opened.card,
            "driver": opened.driver,
            "torch": opened.torch,
            "model": tuning.model,
        },
        device_name=opened.device_name,
        created_at=created_at.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - began_s, 1),
        rounds=sum(row.rounds for row in rows.values()),
        rows=tuple(rows.values()),
        chosen={**tuning.own, **changes},
        choice=f"Chosen for {tuning.rules.objective}: {names or 'your own settings stay'}",
        decided=is_whole
        and all(row.verdict is not LeverVerdict.TOO_FEW_ROUNDS for row in rows.values()),
    )
    replace_whole(tuning.folder / "tune.json", json_text(result))
    if tuning.trains:
        _write_tuned(tuning, chosen, rows)
    return result, is_whole


def _write_tuned(tuning: Tuning, chosen: Sequence[Candidate], rows: Mapping[str, LeverRow]) -> None:
    """Write the user's file with what was measured and chosen; a note says what each key brings."""
    file = config_from_text(tuning.file_text, "the configuration")
    written = file.train.model_dump()
    changes = {key: value for key, value in tuning.own.items() if written.get(key) != value}
    notes = dict.fromkeys(changes, "as it was measured")
    for candidate in chosen:
        changes |= candidate.changes
        notes |= dict.fromkeys(candidate.changes, _note(rows[candidate.name]))
    notes = {key: f"tune {tuning.folder.name}: {note}" for key, note in notes.items()}
    text = tuned_yaml(tuning.file_text, file, changes, notes)
    replace_whole(tuning.folder / "tuned.yaml", text)


def _note(row: LeverRow) -> str:
    return (
        f"{row.speed_ratio:.3f} x the speed ({row.speed_low:.3f} to {row.speed_high:.3f}), "
        f"{(row.peak_delta_bytes or 0) / MIB:+.1f} MiB peak memory"
    )
