"""Turns the state of slots into an `AttemptStatus` for each job on a card; the queue decides on
these.

Remembers how long a node has been away, how long a training has had no room, and the peak memory of
each attempt. Does not decide what follows (`jobs/queue.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from orchestrator.core.slot import Hold, Phase, Slot
from orchestrator.jobs import causes
from orchestrator.jobs.model import JOINT, AttemptStatus, Job, Standing
from orchestrator.jobs.queue import node_lost_s
from orchestrator.run.team import is_finished
from workers.messages import STARVED, Cause
from workers.units import GIB

#: A training without memory for a step is moved or parked after this time. It is longer than the
#: memory peak of a neighbour.
_NO_ROOM_S: Final = 15.0

#: A quarantined member of a team starts again after this time while another member works. The time
#: doubles with each restart in the same attempt, up to one hour.
_RESTART_AFTER_S, _RESTART_AFTER_MOST_S = 60.0, 3600.0


class AttemptsSeen:
    """The observed attempts of all jobs of one run."""

    def __init__(self, *, rooms_bytes: Mapping[str, int]) -> None:
        """Start without observations. `rooms_bytes` is what each card gives to jobs, keyed by card
        name; it has no nodes whose jobs run on processors.
        """
        self._rooms_bytes = rooms_bytes
        self._peak_bytes: dict[str, int] = {}
        self._restarts: dict[str, int] = {}
        """Restarts in this attempt, keyed by the slot of a team's member."""
        self._since_s: dict[tuple[str, str], float] = {}
        """Keyed by condition (away, starved, given up) and slot: since when the condition holds."""
        self._slots: Mapping[str, Slot] = {}
        self._placed: Mapping[str, Standing] = {}
        """Jobs of which every slot exists."""
        self._now_s = 0.0
        self.stranded: dict[str, str] = {}
        """Slots of divided models that cannot continue, and why: the other member is given up or
        lost.
        """

    def begin(self, slot: str) -> None:
        """Forget the earlier attempt in a slot."""
        self._peak_bytes.pop(slot, None)
        self._since_s.pop(("given up", slot), None)
        self._restarts.pop(slot, None)

    def observe(
        self, standings: Mapping[str, Standing], slots: Mapping[str, Slot], now_s: float
    ) -> dict[str, AttemptStatus]:
        """Return the status of each job that has a place on a card and all of its slots.

        `standings` has only such jobs. A job whose node has left, but is not lost yet, is left out.
        """
        self._slots, self._now_s = slots, now_s
        self._placed = {
            name: each for name, each in standings.items() if slots.keys() >= set(each.places)
        }
        self.stranded = {}
        found = {name: self._observe(each) for name, each in self._placed.items()}
        return {name: seen for name, seen in found.items() if seen is not None}

    def restarts(self, standing: Standing) -> Iterator[str]:
        """Yield the quarantined slots of a team that start again now."""
        members = [self._slots[name] for name in standing.places if name in self._slots]
        failed = [slot.slot for slot in members if slot.phase is Phase.QUARANTINED]
        for slot in members:
            lasts_s = self._lasts_s("given up", slot.slot, holds=slot.slot in failed)
            times = self._restarts.get(slot.slot, 0)
            may_begin = len(failed) < len(members) and not standing.job.is_divided
            if may_begin and lasts_s > min(_RESTART_AFTER_MOST_S, _RESTART_AFTER_S * 2**times):
                self._restarts[slot.slot] = times + 1
                yield slot.slot

    def _observe(self, standing: Standing) -> AttemptStatus | None:
        """Return the status of a job on a card; `None` while its node is away but not lost yet."""
        job, members = standing.job, [self._slots[name] for name in standing.places]
        gone = {
            slot.slot: f"{slot.slot}: {slot.reason}"
            for slot in (members if job.is_divided else ())
            if slot.phase is Phase.QUARANTINED or self._is_lost(slot, job)
        }
        if gone:
            why = next(iter(gone.values()))
            self.stranded |= dict.fromkeys(standing.places.keys() - gone.keys(), why)
        rests = standing.recalled_to is not None or is_finished(members) or bool(gone)
        found = {
            card: self._observe_slot(slot, card, standing, rests=rests)
            for card, slot in zip(standing.places.values(), members, strict=True)
        }
        return _of_members(job, found) if job.is_team else next(iter(found.values()))

    def _observe_slot(
        self, slot: Slot, card: str, standing: Standing, *, rests: bool
    ) -> AttemptStatus | None:
        """Return the status of one slot of a job; `rests` says whether the slot must rest."""
        name, progress, status = slot.slot, slot.training.progress, slot.status
        is_lost = self._is_lost(slot, standing.job)
        if _is_away(slot) and not is_lost:
            return None
        if status is not None and status.memory is not None:
            # Budgets and sizes of cards include the CUDA context; the peak of a status does not.
            context_bytes = 0 if slot.device is None else slot.device.context_bytes
            peak_bytes = status.memory.peak_bytes + context_bytes
            self._peak_bytes[name] = max(peak_bytes, self._peak_bytes.get(name, 0))
        starved_s = self._lasts_s("starved", name, holds=slot.state in STARVED)
        has_no_room = starved_s > _NO_ROOM_S
        cause, text, exit_code = _end(slot, standing.job)
        has_failed = cause is Cause.OUT_OF_MEMORY
        taken = self._taken_by_others(slot, card) if has_no_room or has_failed else None
        if taken is not None and has_failed:
            cause, text = Cause.CARD_TAKEN, taken
        step, steps, eta_s = progress.train_step, progress.train_steps, progress.eta_s
        left = None if step is None or steps is None else steps - step
        return AttemptStatus(
            attempt=standing.attempt,
            # A slot that a user drained keeps its place.
            is_at_rest=rests
            and slot.orders.hold is Hold.DRAIN
            and slot.phase in {Phase.HELD, Phase.ABSENT},
            node_lost=is_lost,
            cause=cause,
            text=text,
            exit_code=exit_code,
            step=step,
            value=_value(standing.job, slot),
            steps_per_s=left / eta_s if left and eta_s else None,
            eta_s=eta_s,
            peak_bytes=self._peak_bytes.get(name),
            out_of_memory=max(0, slot.counts.oom_count - standing.out_of_memory),
            has_no_room=has_no_room,
            taken=taken,
            sha256=progress.weights_sha256,
        )

    def _is_lost(self, slot: Slot, job: Job) -> bool:
        """Say whether the node of a slot has been away long enough for the attempt to end there."""
        return self._lasts_s("away", slot.slot, holds=_is_away(slot)) >= node_lost_s(job)

    def _lasts_s(self, what: str, slot: str, *, holds: bool) -> float:
        """Return for how long condition `what` has held for a slot; 0 if it does not hold."""
        if holds:
            return self._now_s - self._since_s.setdefault((what, slot), self._now_s)
        self._since_s.pop((what, slot), None)
        return 0.0

    def _taken_by_others(self, slot: Slot, card: str) -> str | None:
        """Say what other programs hold of the card on which a slot found too little memory.

        `None`: the jobs of the card could have their budgets, or nothing was measured.
        """
        status, device = slot.status, slot.device
        if status is None or card not in self._rooms_bytes:
            return None
        if status.device is None and status.counts.oom_count:  # as core/processes.py
            return f"other programs leave no room on {card} to begin"
        memory = status.memory
        if device is None or memory is None or memory.device_used_bytes is None:
            return None
        others_bytes, wanted_bytes = memory.device_used_bytes, 0
        places = [(it, each) for each in self._placed.values() for it in each.places.items()]
        for (name, at), there in places:
            other = self._slots[name]
            if other.device is None or other.device.uuid != device.uuid:
                continue
            if other.status is not None and other.status.memory is not None:
                others_bytes -= other.status.memory.reserved_bytes + other.device.context_bytes
            if at == card:
                wanted_bytes += min(there.budget_bytes or 0, self._rooms_bytes[card])
        if (memory.device_total_bytes or 0) - others_bytes >= wanted_bytes:
            return None
        return f"other programs hold {others_bytes / GIB:.1f} GiB of {card}"


def _is_away(slot: Slot) -> bool:
    """Say whether the node of a slot is away although the slot should work."""
    return slot.phase is Phase.ABSENT and slot.orders.hold is None


def _has_ended(seen: AttemptStatus) -> bool:
    return seen.cause is not None or seen.is_at_rest or seen.node_lost


def _of_members(job: Job, found: Mapping[str, AttemptStatus | None]) -> AttemptStatus | None:
    """Return the status of a team, made from the status of each member, which is keyed by its card.

    If the members divide the samples of a step, it is the status of the member that is furthest. If
    two members divide the model, it is that of the leader, whose card is first, with the cause of
    the member that failed. The attempt ends when those of all members have ended.
    """
    known = {card: seen for card, seen in found.items() if seen is not None}
    is_whole = len(known) == len(found)
    if not known or (job.is_divided and not is_whole):
        return None

    def rank(card: str) -> tuple[bool, bool, bool, int]:
        seen = known[card]
        is_done = seen.cause is Cause.DONE
        return is_done, not _has_ended(seen), seen.cause is None, seen.step or 0

    cards = [*known] if job.is_divided else sorted(known, key=rank, reverse=True)
    all_seen = [known[card] for card in cards]
    joint, *others = all_seen
    peaks_bytes = [seen.peak_bytes or 0 for seen in all_seen]
    taken = [seen.taken for seen in all_seen]
    holds = any if job.is_divided else all
    failed = next((it for it in others if it.cause is not Cause.DONE), None)
    if not (is_whole and all(map(_has_ended, all_seen))):
        joint = replace(joint, cause=None, is_at_rest=False, node_lost=False)
    elif job.is_divided and joint.cause is None and failed is not None:
        text = joint.text if failed.cause is None else failed.text
        joint = replace(joint, cause=failed.cause, text=text, exit_code=failed.exit_code)
    return replace(
        joint,
        cards=JOINT.join(cards),
        peak_bytes=(sum if job.is_divided else max)(peaks_bytes) or None,
        out_of_memory=sum(seen.out_of_memory for seen in all_seen),
        has_no_room=is_whole and holds(seen.has_no_room for seen in all_seen),
        taken=next(filter(None, taken)) if is_whole and holds(taken) else None,
    )


def _end(slot: Slot, job: Job) -> tuple[Cause | None, str, int | None]:
    """Return the cause, text and exit code of an ended attempt; cause `None`: it continues."""
    if slot.phase not in {Phase.DONE, Phase.QUARANTINED}:
        return None, slot.reason, None
    ended = None if slot.status is None else slot.status.ended
    if ended is not None:
        return ended.cause, slot.reason, ended.exit_code
    if slot.phase is Phase.DONE and job.command is None:
        return Cause.DONE, slot.reason, None
    if slot.phase is Phase.DONE:
        return Cause.KILLED, "the head ended before it knew how the program had ended", None
    error_text = None if slot.status is None else slot.status.error
    return causes.cause_of_failure(slot.failure, error_text), slot.reason, None


def _value(job: Job, slot: Slot) -> float | None:
    """Return the last value of the job's metric; `None` before its first report."""
    metric = "loss" if job.milestones is None else job.milestones.metric
    metrics = {} if slot.status is None else slot.status.metrics
    return metrics.get(metric, slot.training.progress.loss if metric == "loss" else None)
