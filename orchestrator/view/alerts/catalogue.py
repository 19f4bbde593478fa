"""The catalogue of alerts: each with its condition over frames, and the same condition in PromQL.
Pure.

A slot that a person holds never alerts. Neither does a slot, card or node of a run on which no head
works: for that there is `HeadGone`. A test compares both conditions of each alert on the same
made-up runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from orchestrator.core.slot import HeadState, SlotState
from orchestrator.record.follow import Frame, Freshness
from orchestrator.record.model import LOW_SUCCESS_RATE, Row
from orchestrator.view.alerts import facts
from orchestrator.view.alerts.facts import Card
from orchestrator.view.alerts.history import History
from orchestrator.view.alerts.model import Alert, Sight, Subject
from workers.messages import WorkerState

_NOT_WORKING: Final[frozenset[SlotState]] = frozenset(
    {HeadState.STARTING, HeadState.RESTARTING, HeadState.LOST}
    | {WorkerState.WARMING, WorkerState.BACKOFF, WorkerState.EMERGENCY, WorkerState.PARKED}
)
_REPORTING: Final[frozenset[SlotState]] = frozenset(WorkerState) - {
    WorkerState.DONE,
    WorkerState.STOPPED,
}

_LATE_S: Final = 15.0
_SILENT_S: Final = 30.0
_SLOW_PCT: Final = 80.0
_SLOWED_PCT: Final = 20.0
_MARGIN_C: Final = 3.0
_RESTARTS: Final = 3.5
"""Half a restart more than may be: `increase` of Prometheus adds a little to a count."""
_OOMS: Final = 60.0
_STEPS_LEAST: Final = 20.0

_BY_SLOT: Final = "by (instance, node, slot)"
_ON_SLOT: Final = "on (instance, node, slot)"
#: What is computed from counters must also say that the slot counts now: counters outlive the head.
_COUNTS_NOW: Final = (
    f"unless {_ON_SLOT} orchestrator_slot_held == 1 and on (instance) orchestrator_head_up == 1"
)

_Condition: TypeAlias = Callable[[Sight], Iterable[Subject]]


def _words(states: Iterable[SlotState]) -> str:
    """Return states as a regular expression for the label `state`."""
    return "|".join(sorted(state.value.lower() for state in states))


def _run(condition: Callable[[Frame], bool]) -> _Condition:
    def holds(sight: Sight) -> Iterator[Subject]:
        if condition(sight.frame):
            run = sight.frame.run
            yield Subject(run.facts.run_id, text=run.error or "; ".join(sight.frame.missed))

    return holds


def _slots(condition: Callable[[Row, History], bool]) -> _Condition:
    def holds(sight: Sight) -> Iterator[Subject]:
        for row in facts.rows(sight.frame):
            if not facts.is_held(row) and condition(row, sight.history):
                yield Subject(row.slot, row.node, row.gpu_uuid or "", row.reason)

    return holds


def _cards(condition: Callable[[Card, Frame], bool]) -> _Condition:
    def holds(sight: Sight) -> Iterator[Subject]:
        for card in facts.cards(sight.frame):
            if condition(card, sight.frame):
                yield Subject(
                    card.uuid, card.node, card.uuid, f"{card.name or 'card'} of {card.node}"
                )

    return holds


def _nodes_missing(sight: Sight) -> Iterator[Subject]:
    for node, is_up in facts.nodes_up(sight.frame).items():
        if not is_up:
            yield Subject(node, node)


def _slots_not_working(sight: Sight) -> Iterator[Subject]:
    """Yield slots that do not work on nodes that are there: the others are `NodeMissing`."""
    nodes = facts.nodes_up(sight.frame)
    for subject in _slots(lambda row, _: row.state in _NOT_WORKING)(sight):
        if nodes.get(subject.node, True):
            yield subject


def _is_low(row: Row, history: History) -> bool:
    steps = history.growth("steps", row.slot)
    return steps > _STEPS_LEAST and history.growth("steps_ok", row.slot) < LOW_SUCCESS_RATE * steps


def _is_vanished(card: Card, frame: Frame) -> bool:
    return not card.is_up and facts.nodes_up(frame).get(card.node, False)


def _sensor(card: Card, key: str) -> float | None:
    value: float | None = None if card.teller is None else card.teller.value(key)
    return value


WATCHER_DOWN: Final = Alert(
    name="WatcherDown",
    severity="warning",
    scope="run",
    for_s=120,
    summary="run {subject} cannot be read",
    what_to_do="On the machine with the run folder type: python -m orchestrator web",
    promql='up{job="orchestrator"} == 0 or absent(up{job="orchestrator"})',
    holds=lambda _: (),  # there is no frame to judge
)

_OF_RUN: Final = (
    Alert(
        name="HeadGone",
        severity="critical",
        scope="run",
        for_s=30,
        summary="the head of run {subject} is gone",
        what_to_do="Type: python -m orchestrator run --resume",
        promql="orchestrator_head_up == 0 and on (instance) "
        'orchestrator_run_outcome{outcome="running"} == 1',
        holds=_run(lambda frame: frame.freshness is Freshness.HEAD_GONE),
    ),
    WATCHER_DOWN,
    Alert(
        name="RecordsLate",
        severity="warning",
        scope="run",
        for_s=30,
        summary="the records of run {subject} are late",
        what_to_do="Look whether the head's machine is overloaded, and whether the disk of the "
        "run folder answers.",
        promql=f"orchestrator_frame_age_seconds > {_LATE_S:.0f} and on (instance) "
        "orchestrator_head_up == 1",
        holds=_run(lambda frame: facts.is_up(frame) and frame.late_s > _LATE_S),
    ),
    Alert(
        name="RecordsIncomplete",
        severity="warning",
        scope="run",
        summary="the records of run {subject} have gaps",
        what_to_do="Look for a full disk: df -h. The run goes on, and ends with exit code 1.",
        promql="orchestrator_records_incomplete == 1",
        holds=_run(lambda frame: frame.run.incomplete),
    ),
    Alert(
        name="NodeMissing",
        severity="critical",
        scope="node",
        for_s=60,
        summary="node {subject} is not in the cluster",
        what_to_do="On that PC type what this prints on the head: python -m orchestrator up",
        promql="orchestrator_node_up == 0",
        holds=_nodes_missing,
    ),
    Alert(
        name="RunEnded",
        severity="info",
        scope="run",
        summary="run {subject} has ended",
        what_to_do="Type: python -m orchestrator report",
        promql='orchestrator_run_outcome{outcome=~"good|interrupted"} == 1',
        holds=_run(lambda frame: facts.outcome(frame) in {"good", "interrupted"}),
    ),
    Alert(
        name="RunDegraded",
        severity="warning",
        scope="run",
        summary="run {subject} has ended and was not good",
        what_to_do="Type: python -m orchestrator report. It says what fell short.",
        promql='orchestrator_run_outcome{outcome=~"degraded|failed"} == 1',
        holds=_run(lambda frame: facts.outcome(frame) in {"degraded", "failed"}),
    ),
    Alert(
        name="NotifyFailing",
        severity="warning",
        scope="run",
        summary="notifications of run {subject} are not delivered",
        what_to_do="Type: python -m orchestrator notify --test. It says which address fails, and "
        "why.",
        promql='increase(orchestrator_notifications_total{result="failed"}[15m]) > 0',
        holds=lambda sight: _run(lambda _: sight.history.growth("failed") > 0)(sight),
    ),
)

_OF_SLOTS: Final = (
    Alert(
        name="SlotQuarantined",
        severity="critical",
        scope="slot",
        summary="slot {subject} was given up",
        what_to_do="See docs/troubleshooting.md#quarantined, then type: python -m orchestrator "
        "reinstate SLOT",
        promql='orchestrator_slot_state{state="quarantined"} == 1'
        f" unless {_ON_SLOT} orchestrator_slot_loss_not_finite == 1",
        holds=_slots(
            lambda row, _: row.state is HeadState.QUARANTINED and not facts.is_not_finite(row)
        ),
    ),
    Alert(
        name="LossNotFinite",
        severity="critical",
        scope="slot",
        summary="the training of slot {subject} stopped: its loss is NaN or infinite",
        what_to_do="Lower train.lr or train.clip, then type: python -m orchestrator run --resume",
        promql="orchestrator_slot_loss_not_finite == 1",
        holds=_slots(lambda row, _: facts.is_not_finite(row)),
    ),
    Alert(
        name="WrongResults",
        severity="critical",
        scope="slot",
        summary="slot {subject} computed wrong results",
        what_to_do="Lower the clocks of the card, those of its memory first. Then type: python -m "
        "orchestrator burn",
        promql=f"max {_BY_SLOT} (increase(orchestrator_slot_wrong_results_total[1h]) > 0"
        f' or orchestrator_slot_state{{state="corrupt"}}) {_COUNTS_NOW}',
        holds=_slots(
            lambda row, history: (
                row.state is WorkerState.CORRUPT or history.growth("verify_errors", row.slot) > 0
            )
        ),
    ),
    Alert(
        name="SlotNotWorking",
        severity="warning",
        scope="slot",
        for_s=300,
        keep_s=120,
        summary="slot {subject} has not worked for five minutes",
        what_to_do="Its reason says what it waits for: python -m orchestrator report",
        promql=f'max {_BY_SLOT} (orchestrator_slot_state{{state=~"{_words(_NOT_WORKING)}"}})'
        " unless on (instance, node) orchestrator_node_up == 0",
        holds=_slots_not_working,
    ),
    Alert(
        name="SlotSilent",
        severity="warning",
        scope="slot",
        for_s=30,
        summary="slot {subject} has not reported for half a minute",
        what_to_do="Look at that PC: nvidia-smi, top. After run.hang_timeout_s its process is "
        "replaced.",
        promql="orchestrator_run_updated_timestamp_seconds - on (instance) group_right ()"
        f" orchestrator_slot_last_report_timestamp_seconds > {_SILENT_S:.0f}"
        f' and {_ON_SLOT} orchestrator_slot_state{{state=~"{_words(_REPORTING)}"}} == 1',
        holds=_slots(
            lambda row, _: row.state in _REPORTING and (row.heartbeat_age_s or 0.0) > _SILENT_S
        ),
    ),
    Alert(
        name="SlotRestarting",
        severity="warning",
        scope="slot",
        summary="slot {subject} has had more than three new processes in 15 minutes",
        what_to_do="See why they end: python -m orchestrator report. After run.max_deaths the "
        "slot is given up.",
        promql=f"increase(orchestrator_slot_restarts_total[15m]) > {_RESTARTS} {_COUNTS_NOW}",
        holds=_slots(lambda row, history: history.growth("restarts", row.slot) > _RESTARTS),
    ),
    Alert(
        name="OomStorm",
        severity="warning",
        scope="slot",
        for_s=600,
        summary="slot {subject} runs out of memory more than six times a minute",
        what_to_do="End other programs on the card (nvidia-smi), or start fewer workers.",
        promql=f"increase(orchestrator_slot_ooms_total[10m]) > {_OOMS:.0f} {_COUNTS_NOW}",
        holds=_slots(lambda row, history: history.growth("oom_count", row.slot) > _OOMS),
    ),
    Alert(
        name="SuccessLow",
        severity="warning",
        scope="slot",
        for_s=900,
        summary="slot {subject} fails in more than 5 % of its steps",
        what_to_do="Its reason says why: python -m orchestrator report. The run counts as "
        "degraded if it stays so.",
        promql=f'sum {_BY_SLOT} (increase(orchestrator_slot_steps_total{{result="ok"}}[15m]))'
        f" / sum {_BY_SLOT} (increase(orchestrator_slot_steps_total[15m])) < {LOW_SUCCESS_RATE}"
        f" and {_ON_SLOT} sum {_BY_SLOT} (increase(orchestrator_slot_steps_total[15m])) > "
        f"{_STEPS_LEAST:.0f}"
        f" {_COUNTS_NOW}",
        holds=_slots(_is_low),
    ),
    Alert(
        name="Slow",
        severity="warning",
        scope="slot",
        for_s=600,
        summary="slot {subject} does less than 80 % of what such a worker has done on this card",
        what_to_do="See docs/troubleshooting.md#slow. Another program may use the card: nvidia-smi",
        promql=f"orchestrator_slot_baseline_ratio < {_SLOW_PCT / 100}"
        f' and {_ON_SLOT} orchestrator_slot_state{{state="running"}} == 1',
        holds=_slots(
            lambda row, _: (
                row.state is WorkerState.RUNNING
                and row.baseline_pct is not None
                and row.baseline_pct < _SLOW_PCT
            )
        ),
    ),
    Alert(
        name="Leaking",
        severity="warning",
        scope="slot",
        for_s=300,
        summary="the process of slot {subject} keeps memory that its work does not need",
        what_to_do="Drop every tensor in the workload's `release`. After run.leak_limit_mib its "
        "process is replaced.",
        promql="orchestrator_slot_leaking == 1",
        holds=_slots(lambda row, _: facts.is_leaking(row)),
    ),
)

_OF_CARDS: Final = (
    Alert(
        name="CardPaused",
        severity="warning",
        scope="slot",
        for_s=120,
        summary="slot {subject} pauses because its card is too hot",
        what_to_do="Check dust, airflow and the fan curve. thermal.critical_c says when it pauses.",
        promql='orchestrator_slot_state{state="paused"} == 1',
        holds=_slots(lambda row, _: row.state is WorkerState.PAUSED),
    ),
    Alert(
        name="CardSlowed",
        severity="warning",
        scope="card",
        for_s=300,
        summary="heat or power slows card {subject}",
        what_to_do="Check airflow, or lower its limit so that it is steady: power_limit_w in "
        "cluster.yaml.",
        promql=f"orchestrator_card_slowed_ratio > {_SLOWED_PCT / 100}",
        holds=_cards(lambda card, _: (_sensor(card, "throttle_pct") or 0.0) > _SLOWED_PCT),
    ),
    Alert(
        name="CardTempHigh",
        severity="info",
        scope="card",
        for_s=600,
        summary="card {subject} is within 3 C of its limit",
        what_to_do="Check dust, airflow and the fan curve.",
        promql=f"orchestrator_card_temperature_margin_celsius <= {_MARGIN_C:.0f}",
        holds=_cards(
            lambda card, _: (
                (margin := _sensor(card, "margin_c")) is not None and margin <= _MARGIN_C
            )
        ),
        opt_in=True,
    ),
    Alert(
        name="CardVanished",
        severity="critical",
        scope="card",
        for_s=600,
        summary="no worker comes up on card {subject} any more",
        what_to_do="On its PC type: nvidia-smi; sudo dmesg | grep Xid. A card that is off the bus "
        "needs a restart.",
        promql="orchestrator_card_up == 0 and on (instance, node) orchestrator_node_up == 1",
        holds=_cards(_is_vanished),
    ),
)

#: All alerts, those of the run first.
ALERTS: Final = (*_OF_RUN, *_OF_SLOTS, *_OF_CARDS)
