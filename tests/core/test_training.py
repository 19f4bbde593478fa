"""How far a slot is, told by one process after the other: what had to be done again is counted once."""

from __future__ import annotations

import pytest

from orchestrator.core.training import NO_TRAINING, follow
from tests.factories import report_of
from workers.messages import NO_PROGRESS, Progress


def redone(*reports: tuple[int, int | None, int | None, int | None]) -> int | None:
    """Follow reports of an incarnation, its step, its saved step, and the steps that it says it did again."""
    training = NO_TRAINING
    for sequence, (incarnation, step, saved, own) in enumerate(reports):
        told = (
            None if step is None else Progress(train_step=step, saved_step=saved, redone_steps=own)
        )
        training = follow(training, report_of("pc1/0", incarnation, sequence, progress=told))
    return training.progress.redone_steps


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(0, 1, None, None), (0, 30, 20, None)], 0),
        ([(0, 30, 20, None), (1, 20, 20, None), (1, 40, 40, None)], 10),
        ([(0, 30, 20, None), (1, 23, 20, None)], 10),  # its first report came after three steps
        ([(0, 30, None, None), (1, 1, None, None)], 29),
        ([(0, 30, 20, None), (1, 20, 20, None), (2, 20, 20, None), (3, 35, 30, None)], 10),
        (
            [(0, 30, 20, None), (1, None, None, None), (2, 20, 20, None)],
            10,
        ),  # one that never told anything
        (
            [(0, 30, 20, 4), (0, 40, 20, 7), (1, 20, 20, 0), (1, 50, 20, 2)],
            29,
        ),  # each counts its own from 0
        ([(0, 30, 30, None), (1, 45, 30, None)], 0),
        ([(0, None, None, None)], None),
    ],
)
def test_steps_done_again(
    reports: list[tuple[int, int | None, int | None, int | None]], expected: int | None
) -> None:
    assert redone(*reports) == expected


def test_what_trains_nothing_has_no_progress() -> None:
    assert follow(NO_TRAINING, report_of("pc1/0", 0, 0)) is NO_TRAINING
    assert NO_TRAINING.progress is NO_PROGRESS


@pytest.mark.parametrize(
    "wrong", [{"loss": "0.5"}, {"train_step": 1.0}, {"train_step": True}, {"weights_sha256": b""}]
)
def test_progress_refuses_what_a_reader_could_not_read(wrong: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"progress: {next(iter(wrong))} cannot be "):
        Progress(**wrong)  # type: ignore[arg-type]  # that is the point
