"""A process without a slot loads what a training imports, and no setting of its later job is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.cluster.actor import WorkerActor
from tests.in_child import InChild
from tests.scene import spec_of
from workers.messages import Directive, Report, Verdict
from workers.settings import WorkerSpec

FIRST = Directive(incarnation=0, sequence=0, duration_s=0.0, resume=None)
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def in_a_spare(spec: WorkerSpec) -> tuple[list[Mapping[str, str]], list[Report | None]]:
    """Return the environment, and what it answers to a slice, before and after it has a slot."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    spare = WorkerActor()
    assert "torch._dynamo" in sys.modules
    environments, answers = [dict(os.environ)], [spare.run_slice(FIRST)]
    assert spare.process_id(spec) == spare.process_id(replace(spec, slot="other")) == os.getpid()
    answers.append(spare.run_slice(FIRST))
    return [*environments, dict(os.environ)], answers


def test_a_spare_works_once_it_is_told_its_slot(in_child: InChild) -> None:
    spec = spec_of()
    wants = replace(spec, workload=replace(spec.workload, settings={"deterministic": True}))
    (before, after), (without, report) = in_child(in_a_spare, wants)
    assert "PYTORCH_ALLOC_CONF" not in before, "torch may read it when it is imported"
    assert WORKSPACE not in before, "it is the job's to choose"
    assert after[WORKSPACE] == ":4096:8"
    assert without is None
    assert report.verdict is Verdict.OK
    assert (report.slot, report.counts.steps_ok) == (spec.slot, 1)
