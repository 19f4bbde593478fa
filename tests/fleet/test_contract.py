"""What the supervisor relies on holds without Ray, too.

`tests/cluster/test_contract.py` plays the same with Ray.
"""

from __future__ import annotations

import pytest

from tests.fleet.scenarios import SCENARIOS, play_in_process
from tests.in_child import InChild, MakeSpec


@pytest.mark.parametrize("scenario", [each.__name__ for each in SCENARIOS])
def test_in_this_process(in_child: InChild, make_spec: MakeSpec, scenario: str) -> None:
    in_child(play_in_process, make_spec(), scenario)
