"""What a loop knows of a card, where this process has none under way. With one: `tests/gpu`."""

from __future__ import annotations

from workers.elastic.card_memory import CurrentCard


def test_without_a_card_nothing_is_known() -> None:
    card = CurrentCard()
    assert card.allowed_bytes() is None
    assert card.measured(lambda: bytes(1000)) == bytes(1000)
    assert card.peak_bytes() is None, "a number, however small, would be taken for a measurement"
