"""What is to be done to a node for the length of a run, and what came of it; both as one line of JSON.

Covers the words between the head and the agent process of a node. Does not do any of it (`agent.py` does).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from workers.settings import FakeSensors


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrders:
    """What one node is to have done to it until the run ends."""

    node: str
    run_id: str
    """Names the folder of an own MPS daemon: an agent that is started again finds the same place."""
    card_count: int
    """How many cards the node lends to the cluster: the first ones that CUDA_VISIBLE_DEVICES leaves visible."""
    cards: tuple[str, ...] = ()
    """The cards themselves, as UUIDs or indices in the order of the PCI bus; empty: as `card_count` says."""
    mps: bool = False
    """See to it that an MPS control daemon runs."""
    power_limit_w: float | None = None
    """Set this limit on every card, and put back what was there; `None` leaves the limits alone."""
    fake: FakeSensors | None = None
    """Instead of the driver's NVML."""

    def to_json(self) -> str:
        """Return the orders as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> AgentOrders:
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            told = json.loads(line)
            fake = None if told["fake"] is None else FakeSensors(**told["fake"])
            return cls(**{**told, "cards": tuple(told["cards"]), "fake": fake})
        except (TypeError, KeyError) as error:
            raise ValueError(f"these are no orders: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """What was done to a node. A problem is a sentence that names the cause and what helps."""

    pipe_directory: str | None = None
    """Where the workers of this node find MPS; `None` where it is not on."""
    mps_problem: str | None = None
    """Why MPS was asked for and is not on."""
    power_problem: str | None = None
    """Why the power limit was not set; then it is as it was before on every card."""
    notes: tuple[str, ...] = ()
    """What was done, and what an earlier run had left behind."""

    def to_json(self) -> str:
        """Return the outcome as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> AgentOutcome:
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            told = json.loads(line)
            return cls(**{**told, "notes": tuple(told["notes"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"this is no outcome: {error}") from None
