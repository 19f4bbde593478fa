"""Which jobs the queue has share a card: those that ask for it, and those for which a trial shows that it pays."""

from __future__ import annotations

import pytest

from orchestrator.jobs.model import JobState, Packed
from tests.jobs.scene import BIG, Scene, starts, training
from workers.units import GIB, MIB


def test_two_jobs_that_may_share_a_card_start_on_one() -> None:
    small = {"pack": True, "memory_bytes": 2 * GIB}
    scene = Scene(training("a", **small), training("b", **small), cards=(BIG,))

    assert starts(scene.turn()) == {"a": "pc1", "b": "pc1"}
    for name in ("a", "b"):
        standing = scene.standing(name)
        assert (standing.alone, standing.budget_bytes) == (False, 2 * GIB + 256 * MIB)


def test_without_pack_or_a_size_a_job_is_alone() -> None:
    sized = {"memory_bytes": 2 * GIB}
    auto = Scene(training("a", **sized), training("b", pack=True, **sized), cards=(BIG,))
    unsized = Scene(training("a", pack=True), training("b", pack=True), cards=(BIG,))

    for scene in (auto, unsized):
        assert starts(scene.turn()) == {"a": "pc1"}
        assert scene.standing("a").alone


def on_trial() -> Scene:
    """Two like one that was measured alone have begun together; a third waits."""
    jobs = [
        training(name, steps=100_000, overrides={"train.lr": n}) for n, name in enumerate("abcd")
    ]
    scene = Scene(*jobs, cards=(BIG,))
    scene.turn()
    assert scene.standing("a").alone, "nothing is known yet"
    scene.see("a", step=10, steps_per_s=8.0, paces=(10.0,) * 6)
    started = starts(scene.end("a", peak_bytes=2 * GIB))
    assert started == {"b": "pc1", "c": "pc1"}
    assert scene.standing("b").budget_bytes == 2 * GIB + 256 * MIB
    return scene


def paced(scene: Scene, pace: float) -> None:
    for name in ("b", "c"):
        scene.see(name, step=100, paces=(pace,) * 6, steps_per_s=pace)


def test_two_alike_share_a_card_where_a_trial_shows_that_it_pays() -> None:
    scene = on_trial()
    paced(scene, 6.5)
    (tried,) = (each for each in scene.records if isinstance(each, Packed))
    assert (tried.gain, tried.low) == (pytest.approx(1.3), pytest.approx(1.3))
    assert {scene.state("b"), scene.state("c")} == {"RUNNING"}
    assert starts(scene.end("b")) == {"d": "pc1"}
    assert not scene.standing("d").alone
    assert scene.standing("c").speeds == {}, "a shared card's speed is none of the job's"


def test_two_alike_part_where_a_trial_shows_that_it_does_not_pay() -> None:
    scene = on_trial()
    paced(scene, 5.2)
    assert scene.standing("c").recalled_to is JobState.QUEUED
    assert "1.04 times the steps of one on pc1" in scene.standing("c").reason
    scene.see("c", is_at_rest=True, step=100)
    assert (scene.state("b"), scene.state("c"), scene.state("d")) == ("RUNNING", "QUEUED", "QUEUED")
    assert len(starts(scene.end("b"))) == 1, "and so does everyone after them"


def test_what_a_trial_has_shown_outlives_the_head() -> None:
    scene = on_trial()
    paced(scene, 6.5)
    scene.next_head()
    assert starts(scene.end("b")) == {"d": "pc1"}


def test_a_short_rest_is_not_worth_a_trial() -> None:
    jobs = [training(name, steps=1000) for name in "abc"]
    scene = Scene(*jobs, cards=(BIG,))
    scene.turn()
    scene.see("a", step=10, steps_per_s=10.0)
    assert starts(scene.end("a", peak_bytes=2 * GIB)) == {"b": "pc1"}
