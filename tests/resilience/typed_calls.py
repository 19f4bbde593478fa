"""What a type checker sees of `resilient`: the function without its batch size.

`make types` reads it, and no test runs it. Each line that is wrong has its error ignored; strict
mypy tells of one that is right.
"""

from __future__ import annotations

from workers import AdaptiveSize, resilient


@resilient
def bare(batch_size: int, model: str) -> float:
    return batch_size * 0.1


@resilient(starting_batch_size=512)
def with_options(batch_size: int, model: str, *, rate: float = 0.1) -> float:
    return batch_size * rate


class Trainer:
    @resilient(starting_batch_size=64)
    def step(self, batch_size: int, rows: list[int]) -> list[int]:
        return rows[:batch_size]


loss: float = bare("m") + with_options("m", rate=0.2)
rows: list[int] = Trainer().step([1]) + Trainer.step(Trainer(), [1])
size: int | None = bare.batch_size or Trainer().step.batch_size or AdaptiveSize(4).next()
bare.reset()
resilient(max, 8)
bare(64, "m")  # type: ignore[call-arg, arg-type]
bare(3)  # type: ignore[arg-type]
with_options("m", rate="fast")  # type: ignore[arg-type]
Trainer().step(64, [1])  # type: ignore[call-arg, arg-type]
name: str = bare("m")  # type: ignore[assignment]
resilient(starting_batch_size="many")  # type: ignore[call-overload]
unheard = resilient.unheard_of  # type: ignore[attr-defined]
