"""A filter chooses rows of a table by words; a column is found by its name, key, title or beginning."""

from __future__ import annotations

import pytest

from orchestrator.core.slot import HeadState
from orchestrator.errors import UsageError
from orchestrator.view.slots import COLUMNS, slots_table
from orchestrator.view.top.view import View, column_of
from tests.factories import make_row, make_snapshot

TABLE = slots_table(
    make_snapshot(
        make_row(slot="pc1/10", temperature_c=90.0),
        make_row(slot="pc1/2", temperature_c=60.0, reason="memory ran out: 3.1 GiB asked"),
        make_row(
            slot="pc2/0", temperature_c=None, state=HeadState.LOST, reason="its node has left"
        ),
        make_row(slot="pc2/1", temperature_c=70.0, gpu_name="NVIDIA RTX 3070"),
    )
)


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        ("", ["pc2/0", "pc1/2", "pc1/10", "pc2/1"]),
        ("state:lost", ["pc2/0"]),
        ("slot:PC2 !state:lost", ["pc2/1"]),
        ("3070", ["pc2/1"]),
        ("ran out", ["pc1/2"]),
        ("out:", ["pc1/2"]),
        ("/1", ["pc1/10", "pc2/1"]),
        ("!pc1", ["pc2/0", "pc2/1"]),
        ("colour:red", []),
    ],
)
def test_a_filter_keeps_rows_that_match_all_words(words: str, slots: list[str]) -> None:
    assert [row.key for row in View(words=words).of(TABLE).rows] == slots


def test_numbers_fall_words_rise_and_unknown_ones_stay_last() -> None:
    def slots(view: View) -> list[str]:
        return [row.key for row in view.of(TABLE).rows]

    assert slots(View(column="temperature")) == ["pc1/10", "pc2/1", "pc1/2", "pc2/0"]
    assert slots(View(column="temperature", reverse=True)) == ["pc1/2", "pc2/1", "pc1/10", "pc2/0"]
    assert slots(View(column="slot")) == ["pc1/2", "pc1/10", "pc2/0", "pc2/1"]
    assert slots(View(reverse=True)) == ["pc2/1", "pc1/10", "pc1/2", "pc2/0"]


def test_a_column_is_found_by_its_name_key_title_or_beginning() -> None:
    assert all(column_of(column.key) == column.key for column in COLUMNS)
    assert column_of("good") == "success"
    assert column_of("temper") == "temperature"
    assert column_of("allocated_bytes") == "vram"
    with pytest.raises(UsageError, match="'t' may be train_step, tokens"):
        column_of("t")
    with pytest.raises(UsageError, match="no column is called 'colour'; there are slot, card"):
        column_of("colour")
