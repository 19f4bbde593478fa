"""`advise` on run folders that the product's own store has written: the right cause first, and what to type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.core.slot import HeadState, SlotState
from orchestrator.errors import UsageError
from orchestrator.lab.advise import answer
from orchestrator.lab.advise.advice import FROM_COUNTERS, FROM_DRIVER, advice
from orchestrator.lab.advise.answer import _percents
from orchestrator.lab.advise.causes import Cause, answers, divide
from orchestrator.lab.advise.facts import CardHistory, RunHistory, SlotHistory
from orchestrator.lab.tune.results import (
    LeverRow,
    LeverVerdict,
    TunedSubject,
    TuningResult,
    write_result,
)
from orchestrator.record.model import Row
from orchestrator.record.store import STORE_NAME, RunStore
from tests.factories import FACTS, event, make_row, make_snapshot, record
from tests.scene import ROOT
from workers.host.facts import Holder
from workers.messages import Progress, WorkerState

SECONDS = 120
GIB = 2**30

#: A worker that has the card for itself and keeps it busy; nothing is wrong.
BUSY: Mapping[str, Any] = {
    "duty_requested": 1.0,
    "duty_measured": 0.98,
    "baseline_pct": 99.0,
    "utilisation_pct": 97.0,
    "throttle_pct": 0.0,
    "sm_clock_mhz": 1800,
    "temperature_c": 65.0,
    "device_used_bytes": 3 * GIB,
    "progress": Progress(train_step=40, data_wait_pct=1.0, copies_pct=1.5, optimizer_pct=4.0),
}


def make_run(
    runs_dir: Path,
    *workers: Callable[[int], Mapping[str, Any]] | Mapping[str, Any],
    config: str = "train: {loader_workers: 0}",
    seconds: int = SECONDS,
    events: Iterable[Mapping[str, object]] = (),
) -> Path:
    """Make the folder of a run on one card.

    A worker is what differs from `BUSY`, maybe by second.
    """
    folder = runs_dir / FACTS.run_id
    folder.mkdir(parents=True)
    store = RunStore(folder / STORE_NAME)
    store.begin(replace(FACTS, run_id=folder.name, config_yaml=config, duration_s=float(seconds)))
    states: dict[str, SlotState | None] = {}
    for told_event in events:
        store.event(told_event)
    for second in range(seconds):
        rows = [_row(f"pc1/{index}", worker, second) for index, worker in enumerate(workers)]
        for row in rows:
            if states.get(row.slot) != row.state:
                store.event(_change(row, states.get(row.slot), second))
                states[row.slot] = row.state
        _write(store, rows, second)
    store.end("good", 0, None, ())
    return folder


def _row(
    slot: str, worker: Callable[[int], Mapping[str, Any]] | Mapping[str, Any], second: int
) -> Row:
    return make_row(
        slot=slot, **{**BUSY, **(worker if isinstance(worker, Mapping) else worker(second))}
    )


def _write(store: RunStore, rows: Iterable[Row], second: int) -> None:
    rows = tuple(rows)
    store.slots(
        record(row.slot, state=row.state.value, reason=row.reason, row=row.to_dict())
        for row in rows
    )
    store.update(make_snapshot(*rows, elapsed_s=float(second)))


def _change(row: Row, before: SlotState | None, second: int) -> dict[str, object]:
    at = datetime.fromtimestamp(FACTS.started_at_unix_s + second, tz=UTC).isoformat(
        timespec="milliseconds"
    )
    from_state = None if before is None else before.value
    return {
        "at": at.replace("+00:00", "Z"),
        "event": "state",
        "slot": row.slot,
        "from_state": from_state,
        "to_state": row.state.value,
        "cause": row.reason,
    }


def hot(second: int) -> Mapping[str, Any]:
    """Return a worker that pauses for a minute of every two, and does less before."""
    if second % 120 < 60:
        return {
            "state": WorkerState.THROTTLED,
            "duty_measured": 0.6,
            "temperature_c": 81.0,
            "throttle_pct": 20.0,
        }
    return {
        "state": WorkerState.PAUSED,
        "duty_measured": 0.0,
        "temperature_c": 84.0,
        "utilisation_pct": 0.0,
    }


Worker = Callable[[int], Mapping[str, Any]] | Mapping[str, Any]


def asked(runs_dir: Path, *more: str) -> tuple[int, Any]:
    """Type `advise --json` and return its exit code and what it says."""
    done = CliRunner().invoke(app, ["advise", "--json", "--run-dir", str(runs_dir), *more])
    return done.exit_code, json.loads(done.stdout)


def trains(**changed: float) -> dict[str, Any]:
    """Return the progress of a training that is otherwise busy."""
    usual = {"train_step": 40, "data_wait_pct": 1.0, "copies_pct": 1.5, "optimizer_pct": 4.0}
    return {"progress": Progress(**{**usual, **changed})}  # type: ignore[arg-type]  # numbers of either kind


SITUATIONS: dict[str, tuple[list[Worker], str, float, str | None]] = {
    "starved loader": (
        [{**trains(data_wait_pct=55.0), "utilisation_pct": 42.0}],
        *("data", 55.0, "train.loader_workers"),
    ),
    "transfers": ([trains(copies_pct=38.0)], "copies", 38.0, "train.non_blocking"),
    "heat": ([hot], "heat", 69.5, None),
    "a neighbour": (
        [
            {
                "baseline_pct": 45.0,
                "utilisation_pct": 100.0,
                "device_used_bytes": 11 * GIB,
                "duty_measured": 0.97,
            }
        ],
        *("neighbour", 53.0, None),
    ),
    "duty": (
        [{"duty_requested": 0.6, "duty_measured": 0.59, "utilisation_pct": 60.0}],
        *("duty", 40.0, "nodes.pc1.gpu_share"),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_right_cause_is_named_first(situation: str, tmp_path: Path) -> None:
    workers, cause, share_pct, key = SITUATIONS[situation]
    make_run(tmp_path, *workers, config="train: {loader_workers: 0, non_blocking: false}")
    code, told = asked(tmp_path)
    assert code == answer.ADVICE
    (card,) = told["cards"]
    assert card["causes"][0]["cause"] == cause, card
    assert card["causes"][0]["share_pct"] == pytest.approx(share_pct, abs=3.0)
    first = told["advice"][0]
    assert (first["cause"], first["key"]) == (cause, key)
    assert first["gain_high"] == pytest.approx(100 / (100 - card["causes"][0]["share_pct"]))
    assert first["command"]


def test_a_hot_card_is_advised_a_lower_power_limit(tmp_path: Path) -> None:
    make_run(tmp_path, hot)
    command = asked(tmp_path)[1]["advice"][0]["command"]
    assert command.endswith("--apply-power-limit --set nodes.pc1.power_limit_w=275")


def test_a_busy_card_needs_no_change(tmp_path: Path) -> None:
    rests = {
        "duty_requested": 0.6,
        "duty_measured": 0.58,
        "device_used_bytes": 18 * GIB,
        **trains(),
    }
    for name, workers in {"one": [BUSY], "seven": [rests] * 7}.items():
        make_run(tmp_path / name, *workers)
        code, told = asked(tmp_path / name)
        assert (code, told["advice"]) == (answer.NOTHING, [])
        assert told["cards"][0]["busy_pct"] == pytest.approx(97, abs=3)


def test_what_cannot_be_told_is_said_and_has_a_code_of_its_own(tmp_path: Path) -> None:
    assert asked(tmp_path / "empty")[0] == answer.CANNOT_TELL
    make_run(tmp_path / "short", BUSY, seconds=5)
    code, told = asked(tmp_path / "short")
    assert (code, told["cards"][0]["causes"]) == (answer.CANNOT_TELL, [])
    assert "too short" in told["cards"][0]["unknown"]
    with pytest.raises(UsageError):
        answer.advise(tmp_path / "short", "0000", print, json=True)


def test_the_text_says_share_cause_gain_source_and_what_to_type(tmp_path: Path) -> None:
    make_run(tmp_path, trains(data_wait_pct=50.0))
    said: list[str] = []
    assert answer.advise(tmp_path, "latest", said.append, json=False) == answer.ADVICE
    text = "\n".join(said)
    for words in (
        "Why is the card not busy?",
        "50 %  data",
        "at most 2.00 x",
        "the counters of this run",
        "type: ",
    ):
        assert words in text


def test_the_page_shows_what_is_said(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "advise.md").read_text(encoding="utf-8")
    (shown,) = re.findall(
        r"^\$ python -m orchestrator advise\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    starved = {**trains(data_wait_pct=55.0), "utilisation_pct": 42.0}
    make_run(tmp_path, starved, config=TRAINS.replace("gpt-mini", "gpt2-small"))
    said: list[str] = []
    answer.advise(tmp_path, "latest", said.append, json=False)
    told = "\n".join(said).replace(" --rehearse", "")
    assert told + "\n" == re.sub(r"run [\d-]+\w+", f"run {FACTS.run_id}", shown, count=1)


def test_a_pass_of_the_profiler_tells_synchronisations_from_gaps(tmp_path: Path) -> None:
    shares = {
        "kernels_pct": 40.0,
        "copies_pct": 8.0,
        "synchronisations_pct": 35.0,
        "idle_pct": 17.0,
    }
    told = {**event(name="profiled", **shares), "slot": "pc1/0"}
    make_run(tmp_path, {**trains(), "utilisation_pct": 45.0}, config=TRAINS, events=[told])
    (card,) = asked(tmp_path)[1]["cards"]
    found = {each["cause"]: each["share_pct"] for each in card["causes"]}
    assert list(found) == ["synchronisations", "gaps", "copies"]
    assert found == pytest.approx({"synchronisations": 34.3, "gaps": 15.7, "copies": 7.8}, abs=0.2)


TRAINS = "workload: {name: train}\ntrain: {preset: gpt-mini, loader_workers: 0, precision: fp32, compile: off}"


#: What a worker tells once its device is open.
OPENED = {**event(name="device_opened", torch="2.13", driver="580"), "slot": "pc1/0"}


def test_a_tuning_with_the_runs_versions_goes_first(tmp_path: Path, state_dir: Path) -> None:
    tuned(state_dir, torch="2.9")
    tuned(state_dir, card="GPU-9")
    make_run(tmp_path / "new", trains(data_wait_pct=60.0), config=TRAINS, events=[OPENED])
    assert (
        asked(tmp_path / "new")[1]["advice"][0]["source"]
        == "measured on the same card type, tuning of-GPU-9"
    )
    make_run(tmp_path / "old", trains(data_wait_pct=60.0), config=TRAINS)
    source = asked(tmp_path / "old")[1]["advice"][0]["source"]
    assert "with torch 2.9 and driver 580, this run has not recorded its own" in source


def test_the_shares_of_a_training_are_those_of_all_its_processes(tmp_path: Path) -> None:
    """Each process tells a share of its own time, so that of the last one says nothing of those before it."""

    def killed_at_90(second: int) -> Mapping[str, Any]:
        if second < 90:
            return trains(copies_pct=40.0)
        return (
            {"state": HeadState.RESTARTING, "progress": Progress()}
            if second < 92
            else trains(copies_pct=4.0)
        )

    make_run(tmp_path, killed_at_90)
    causes = {each["cause"]: each["share_pct"] for each in asked(tmp_path)[1]["cards"][0]["causes"]}
    # 90 s at 40 % and 28 s at 4 %, of the time in which it reported.
    assert causes["copies"] == pytest.approx(31.5 * 118 / 120, abs=1.0)


def test_what_the_driver_says_is_advice_with_its_source() -> None:
    slot = SlotHistory(slot="pc1/0", states_s={WorkerState.RUNNING: 60.0}, duty_got=1.0, copies=0.3)
    told = {
        "power_limit_w": 250.0,
        "usual_power_limit_w": 350.0,
        "pcie_lanes": 4,
        "most_pcie_lanes": 16,
    }
    card = CardHistory(node="pc1", name="card", uuid="GPU-0", slots=(slot,), **told)  # type: ignore[arg-type]
    run = RunHistory(run_id="night", cards=(card,))
    made = advice(run, answers(run), ())
    assert [one.source for one in made] == [FROM_COUNTERS, FROM_DRIVER, FROM_DRIVER]
    assert made[1].command == "sudo nvidia-smi -i GPU-0 -pl 350"
    assert "4 of 16 PCIe lanes" in made[2].text
    asked_for = RunHistory(
        run_id="night", cards=(card,), keys={"nodes": {"pc1": {"power_limit_w": 250.0}}}
    )
    assert all("-pl" not in one.command for one in advice(asked_for, answers(asked_for), ()))


def test_several_trainings_on_one_card_are_told_of(tmp_path: Path) -> None:
    make_run(tmp_path, *[trains(data_wait_pct=60.0)] * 3, config=TRAINS)
    said: list[str] = []
    answer.advise(tmp_path, "latest", said.append, json=False, width=60)
    assert "The 3 workers on" in "\n".join(said)
    assert any(line.endswith("--set nodes.pc1.workers=1") for line in said)
    commands = ("type: ", "measure: ")
    assert all(len(line) <= 60 for line in said if not line.strip().startswith(commands))


def tuned(folder: Path, **subject: str) -> None:
    """Keep a tuning as `tune` does."""
    rows = [("loader_workers", "auto", 1.4), ("precision", "bf16", 1.8), ("compile", "block", 1.1)]
    made = [
        LeverRow(
            lever=lever,
            setting=setting,
            speed_ratio=ratio,
            speed_low=ratio - (0.2 if lever == "compile" else 0.05),
            speed_high=ratio + 0.05,
            verdict=LeverVerdict.CONFIRMED,
            reason="measured",
        )
        for lever, setting, ratio in rows
    ]
    here = {"card": "GPU-0", "driver": "580", "torch": "2.13", "model": "gpt-mini", **subject}
    path = folder / "tunings" / f"of-{here['card']}"
    path.mkdir(parents=True)
    result = TuningResult(
        tune_id=path.name,
        subject=TunedSubject(**here),  # type: ignore[arg-type]  # all of them are texts here
        device_name="NVIDIA GeForce RTX 3090",
        created_at="2026-11-23T20:00:00Z",
        duration_s=60.0,
        rounds=40,
        rows=tuple(made),
        chosen={"loader_workers": "auto", "precision": "bf16", "compile": "block"},
    )
    write_result(path, result)


@pytest.mark.parametrize(
    ("subject", "source"),
    [
        ({}, "measured here, tuning of-GPU-0"),
        ({"card": "GPU-9"}, "measured on the same card type, tuning of-GPU-9"),
        ({"torch": "2.9"}, "measured here with torch 2.9, this run has 2.13, tuning of-GPU-0"),
        (
            {"card": "GPU-9", "torch": "2.9", "driver": "550"},
            "measured on the same card type with torch 2.9 and driver 550, this run has 2.13 and 580, tuning of-GPU-9",
        ),
        ({"model": "cnn-small"}, None),
    ],
)
def test_what_a_tuning_measured_goes_before_the_counters(
    tmp_path: Path, state_dir: Path, subject: dict[str, str], source: str | None
) -> None:
    tuned(state_dir, **subject)
    make_run(tmp_path / "runs", trains(data_wait_pct=60.0), config=TRAINS, events=[OPENED])
    _, told = asked(tmp_path / "runs")
    by_key = {one["key"]: one for one in told["advice"]}
    first = by_key["train.loader_workers"]
    assert (
        first["measure"]
        == "python -m orchestrator tune --rehearse --preset gpt-mini --levers loader_workers"
    )
    if source is None:
        assert first["source"].startswith(FROM_COUNTERS)
        assert "tune --rehearse --preset gpt-mini" in told["notes"][0]
        assert list(by_key) == ["train.loader_workers"]
        return
    assert first["source"] == source
    assert (first["gain_low"], first["gain_high"]) == pytest.approx((1.35, 1.45))
    assert list(by_key) == ["train.loader_workers", "train.precision"], (
        "compile may as well be slower"
    )
    assert by_key["train.precision"]["value"] == "bf16"
    assert by_key["train.precision"]["cause"] is None


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        # The same loss of speed: whether another program is there decides what it is called.
        ({"used_bytes": 20 * GIB}, Cause.NEIGHBOUR),
        ({"holders": (Holder(pid=7, name="game", used_bytes=6 * GIB),)}, Cause.NEIGHBOUR),
        ({}, Cause.SLOW),
    ],
)
def test_another_program_is_blamed_only_if_one_is_seen(
    changed: dict[str, Any], cause: Cause
) -> None:
    slot = SlotHistory(
        slot="pc1/0",
        states_s={WorkerState.RUNNING: 60.0},
        duty_got=1.0,
        of_best=0.5,
        own_bytes=3 * GIB,
    )
    card = CardHistory(
        node="pc1",
        name="card",
        uuid="GPU-0",
        slots=(slot,),
        used_bytes=3 * GIB,
        total_bytes=24 * GIB,
    )
    shares = divide(
        CardHistory(**{**{name: getattr(card, name) for name in CardHistory.__slots__}, **changed})
    ).shares
    assert max(shares, key=lambda each: shares[each]) is cause


_STATES: list[SlotState] = [*WorkerState, *HeadState]
_SHARES = st.one_of(st.none(), st.floats(0, 1))


@given(
    states_s=st.dictionaries(st.sampled_from(_STATES), st.floats(0, 1e5), max_size=4),
    told=st.fixed_dictionaries(
        dict.fromkeys(("duty_asked", "duty_got", "data_wait", "copies", "of_best"), _SHARES)
    ),
    of_card=st.fixed_dictionaries(dict.fromkeys(("utilisation", "slowed", "clock"), _SHARES)),
    uuid=st.sampled_from([None, "GPU-0"]),
    workers=st.integers(1, 3),
)
def test_every_share_is_a_share(
    states_s: dict[SlotState, float],
    told: dict[str, float | None],
    of_card: dict[str, float | None],
    uuid: str | None,
    workers: int,
) -> None:
    slots = tuple(
        SlotHistory(slot=f"pc1/{index}", states_s=states_s, **told) for index in range(workers)
    )
    division = divide(CardHistory(node="pc1", name="card", uuid=uuid, slots=slots, **of_card))
    assert all(0 <= share <= 1 for share in division.shares.values())
    assert division.busy is None or 0 <= division.busy <= 1


@given(st.lists(st.floats(0.0, 1.0), max_size=8))
def test_the_shares_of_a_card_and_the_rest_sum_to_100(shares: list[float]) -> None:
    percents = _percents(shares)
    assert (len(percents), sum(percents)) == (len(shares) + 1, 100)
    if sum(shares) <= 1:
        assert all(
            abs(percent - 100 * share) < 1 for percent, share in zip(percents, shares, strict=False)
        )
