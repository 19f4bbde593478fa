"""Which cards a run sets, and its messages about cards that it does not change."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.load import load_config
from orchestrator.core.placement import Target
from orchestrator.errors import UsageError
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.node_setup import cards_set, wanted_settings
from tests.scene import ROOT
from workers.card_settings import WantedSettings

LIMIT = "nodes.pc1.power_limit_w=280"
OFFSET = "nodes.pc1.memory_offset_mhz=500"
BOTH = WantedSettings(node="pc1", cards=1, power_limit_w=280.0, memory_offset_mhz=500)
ONLY_LIMIT = WantedSettings(node="pc1", cards=1, power_limit_w=280.0)


def environment(
    *overrides: str, mode: Mode = Mode.CLUSTER, device: str | None = None
) -> Environment:
    config = load_config(str(ROOT / "cluster.yaml"), overrides)
    return Environment(mode=mode, config=config, target=Target(device=device))


def wanted(
    made: Environment, *, apply: bool = True, yes_really: bool = False
) -> tuple[list[WantedSettings], list[str]]:
    """Return the wanted settings, and the messages to the user."""
    told: list[str] = []
    settings = wanted_settings(
        made, made.plans, apply_power_limit=apply, yes_really=yes_really, tell=told.append
    )
    return list(settings.values()), told


@pytest.mark.parametrize(
    ("made", "asked", "expected", "told"),
    [
        (environment(), {"apply": False}, [], []),
        (environment(LIMIT), {}, [ONLY_LIMIT], []),
        (environment(LIMIT, OFFSET), {"yes_really": True}, [BOTH], []),
        (environment(LIMIT, OFFSET), {}, [ONLY_LIMIT],
         ["pc1: memory_offset_mhz 500 is not set; to set it: --apply-power-limit --yes-really"]),
        (environment(LIMIT), {"apply": False, "yes_really": True}, [],
         ["pc1: power_limit_w 280 is not set; to set it: --apply-power-limit"]),
        (environment(LIMIT, "nodes.pc1.gpus=0"), {}, [], []),
        (environment(LIMIT, mode=Mode.REHEARSE), {}, [],
         ["pc1: its cards are left as they are: this run uses no card of that PC"]),
        (environment(LIMIT, device="cpu"), {}, [],
         ["pc1: its cards are left as they are: this run uses no card of that PC"]),
    ],
)  # fmt: skip
def test_cards_are_set_only_as_far_as_the_user_asks(
    made: Environment, asked: dict[str, bool], expected: list[WantedSettings], told: list[str]
) -> None:
    assert wanted(made, **asked) == (expected, told)


def test_settings_that_nobody_has_are_refused_with_what_to_type() -> None:
    with pytest.raises(UsageError, match=r"--set nodes.pc1.power_limit_w=250"):
        wanted(environment())


class Bare:
    """A fleet whose nodes have not joined."""

    def nodes(self) -> tuple[()]:
        return ()


def test_a_node_that_is_not_there_yet_is_told() -> None:
    told: list[str] = []
    fleet: Any = Bare()
    settings = {"pc1": ONLY_LIMIT}
    log: Any = None
    with cards_set(fleet, settings, tell=told.append, events=log, interrupted=lambda: False):
        pass
    assert told == ["pc1: its cards are left as they are: it has not joined yet"]


@pytest.mark.parametrize(
    ("mode", "expected"), [("duty", (True, None, 0.6)), ("none", (True, None, None))]
)
def test_clients_of_mps_have_their_share_in_place_of_time(
    mode: str, expected: tuple[bool, float | None, float | None]
) -> None:
    made = environment("workers.mps=true", f"compute_share_mode={mode}")
    spec = made.plans[0].spec
    assert (spec.mps, spec.duty, spec.thread_share) == expected
    rehearsed = environment("workers.mps=true", device="cpu").plans[0].spec
    assert (rehearsed.mps, rehearsed.thread_share) == (False, None)
