"""What courses are drawn from: optimisers, hooks, batches, and what a loop does between steps."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils

from tests.training.courses import (
    STEPS,
    Columns,
    Course,
    tensor_of,
)


class Sample(NamedTuple):
    """A batch as a tuple with names."""

    x: Tensor
    y: Tensor
    w: Tensor
    task: Any


# ---- optimisers


def _made(course: Course, kind: Any, *variants: dict[str, Any], **keys: Any) -> None:
    course.makes = [partial(kind, **keys, **course.draw.choice([{}, *variants]))]


def option(kind: Any, *variants: dict[str, Any], **keys: Any) -> Callable[[Course], None]:
    return lambda course: _made(course, kind, *variants, **keys)


EACH: Final = ({"foreach": True}, {"foreach": False}, {"maximize": True}, {"weight_decay": 0.1})
FUSED: Final = ({"fused": True}, {"fused": True, "weight_decay": 0.1}, *EACH)
ADAM: Final = (*FUSED, {"amsgrad": True}, {"amsgrad": True, "foreach": True})


def muon(course: Course) -> None:
    course.split = lambda _, parameter: 0 if parameter.dim() == 2 else 1
    course.makes = [
        partial(optim.Muon, lr=0.01, eps=1e-3), partial(optim.AdamW, lr=0.01, eps=1e-2)
    ]  # fmt: skip


def for_sparse(course: Course) -> None:
    kind = course.draw.choice(["SparseAdam", "SGD", "Adagrad"])
    if kind == "SparseAdam":
        course.split = lambda _, parameter: 0 if parameter.shape == (11, 8) else 1
        course.makes = [
            partial(optim.SparseAdam, lr=0.01, eps=1e-2), partial(optim.AdamW, lr=0.01, eps=1e-2)
        ]  # fmt: skip
    else:
        course.makes = [partial(getattr(optim, kind), lr=0.05)]


def two_optimizers(course: Course) -> None:
    by = course.draw.choice(["head", "weight"])
    course.split = lambda name, _: int(by in name)
    second: Any = course.draw.choice([course.makes[0], _ADAMW])
    course.makes = [course.makes[0], second]


def joint(course: Course) -> None:
    """Two optimisers, and one backward for both."""
    two_optimizers(course)
    course.joint = True


def adversary(course: Course) -> None:
    """A second model with a loss of its own, as the two of a GAN."""
    course.outside["critic"] = nn.Linear(course.classes, 1)
    course.split = lambda name, _: int("critic" in name)
    second: Any = _ADAMW
    course.makes = [course.makes[0], second]

    def against(outputs: Tensor, columns: Columns, sign: float = 1.0) -> Tensor:
        said = course.outside["critic"](outputs)[..., 0]
        return 0.3 * course.reduce(functional.softplus(sign * said), columns)

    course.critic = lambda outputs, columns: against(outputs.detach(), columns, -1.0)
    course.terms.append(against)


_ADAMW: Final = partial(optim.AdamW, lr=0.01, eps=1e-2)


def groups(course: Course) -> None:
    course.groups = lambda parameters: [
        {"params": parameters[::2], "lr": 0.02},
        {"params": parameters[1::2], "weight_decay": 0.05},
    ][: len(parameters)]


def added_group(course: Course) -> None:
    names = [name for name, _ in course.named()]
    course.kept_out |= set(course.draw.sample(names, max(1, len(names) // 3)))
    late, when = sorted(course.kept_out), course.draw.randrange(STEPS)

    def add(step: int) -> None:
        if step == when:
            named = dict(course.named())
            course.optimizers[0].add_param_group({"params": [named[name] for name in late]})

    course.structure.append(add)


def scheduled(course: Course) -> None:
    kind = course.draw.choice(["step", "cycle", "lambda", "plateau", "cosine"])
    course.schedulers_of = {
        "step": lambda of: lr_scheduler.StepLR(of, 5, 0.5),
        "cycle": lambda of: lr_scheduler.OneCycleLR(
            of,
            0.05,
            total_steps=STEPS + 1,
            cycle_momentum="momentum" in of.defaults or "betas" in of.defaults,
        ),
        "lambda": lambda of: lr_scheduler.LambdaLR(of, lambda step: 1 / (1 + step)),
        "plateau": lambda of: lr_scheduler.ReduceLROnPlateau(of, patience=1),
        "cosine": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 6),
    }[kind]


def clipped(course: Course) -> None:
    course.clip = course.draw.choice([0.05, 0.5, 5.0])


# ---- hooks


def _some(course: Course) -> list[nn.Parameter]:
    found = [each for _, each in course.named() if each.requires_grad]
    return course.draw.sample(found, max(1, len(found) // 2))


def scaling_hook(course: Course) -> None:
    for parameter in _some(course):
        parameter.register_hook(lambda gradient: gradient * 0.3)  # type: ignore[no-untyped-call]


def clamping_hook(course: Course) -> None:
    for parameter in _some(course):
        parameter.register_hook(lambda own: own.clamp(-1e-4, 1e-4))  # type: ignore[no-untyped-call]


def accumulated_hook(course: Course) -> None:
    for parameter in _some(course):
        parameter.register_post_accumulate_grad_hook(_scale_own)  # type: ignore[no-untyped-call]


def _scale_own(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.3)


def late_hook(course: Course) -> None:
    """As `accumulated_hook`, at a later step."""
    when, chosen = course.draw.randrange(1, STEPS), _some(course)

    def add(step: int) -> None:
        for parameter in chosen if step == when else ():
            parameter.register_post_accumulate_grad_hook(_scale_own)  # type: ignore[no-untyped-call]

    course.structure.append(add)


def module_hooks(course: Course) -> None:
    head = course.model.head
    head.register_full_backward_hook(
        lambda _module, inputs, _outputs: tuple(
            None if each is None else each * 0.5 for each in inputs
        )
    )
    head.register_forward_hook(lambda _module, _inputs, made: made * 1.5)
    head.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.9, *inputs[1:]))


def optimizer_hooks(course: Course) -> None:
    def scale(optimizer: optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            _scale_own(parameter)

    def prepared() -> None:
        for optimizer in course.optimizers:
            optimizer.register_step_pre_hook(scale)

    course.prepare.append(prepared)


# ---- what a loop does between steps


def frozen(course: Course) -> None:
    names = [name for name, _ in course.named()]
    chosen = set(course.draw.sample(names, max(1, len(names) // 2)))
    if course.draw.random() < 0.5:
        chosen = {name for name in names if name.startswith("body.")}
    for name, parameter in course.named():
        parameter.requires_grad_(name not in chosen)


def changing(course: Course) -> None:
    """Freeze or unfreeze some parameters at drawn steps."""
    names = [name for name, _ in course.named()]
    chosen = course.draw.sample(names, max(1, len(names) // 2))
    steps = sorted(course.draw.sample(range(STEPS), 3))
    first = course.draw.random() < 0.5

    def change(step: int) -> None:
        named = dict(course.named())
        for name in chosen:
            named[name].requires_grad_((sum(step >= at for at in steps) % 2 == 0) == first)

    course.structure.append(change)
    change(-1)


def modes(course: Course) -> None:
    steps = set(course.draw.sample(range(STEPS), 8))
    course.before.insert(0, lambda step: course.model.train(step in steps))


def evaluation(course: Course) -> None:
    def evaluate(step: int) -> None:
        was = course.model.training
        course.model.eval()
        with torch.no_grad():
            course.seen.setdefault("evaluation", []).append(
                float(tensor_of(course.loss(course.batch(step), room=True)))
            )
        course.model.train(was)

    course.after.append(evaluate)


def replaced_head(course: Course) -> None:
    """A new head, with its parameters in place of the old ones in the optimiser."""
    when = course.draw.randrange(1, STEPS)

    def replace(step: int) -> None:
        if step == when:
            old = course.model.head
            torch.manual_seed(step)
            course.model.head = nn.Linear(8, course.classes).to(course.dtype)
            dropped = set(old.parameters())
            for group in course.optimizers[0].param_groups:
                group["params"] = [each for each in group["params"] if each not in dropped]
            course.optimizers[0].add_param_group({"params": list(course.model.head.parameters())})

    course.structure.append(replace)


def swapped(course: Course) -> None:
    """Evaluate with other weights for a while, and put the own ones back."""

    def swap(_: int) -> None:
        own = {name: each.data for name, each in course.named()}
        for _name, each in course.named():
            each.data = torch.zeros_like(each)
        was = course.model.training
        course.model.eval()
        with torch.no_grad():
            course.loss(course.batch(0), room=True)
        course.model.train(was)
        for name, each in course.named():
            each.data = own[name]

    course.after.append(swap)


def loaded(course: Course) -> None:
    """Weights and optimiser are loaded from a copy of themselves, in place."""
    when = course.draw.randrange(1, STEPS)

    def load(step: int) -> None:
        if step == when:
            course.model.load_state_dict(copy.deepcopy(course.model.state_dict()))
            for optimizer in course.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    course.after.append(load)


def probe(course: Course) -> None:
    """Look at the gradient of something else, and clear it."""

    def look(step: int) -> None:
        was = course.model.training
        course.model.eval()
        tensor_of(course.loss(course.batch(step), room=True)).backward()
        norms = [each.grad.norm() for _, each in course.named() if each.grad is not None]
        course.seen.setdefault("probe", []).append(float(torch.stack(norms).norm()))
        course.model.train(was)
        course.model.zero_grad()
        course.outside.zero_grad()

    course.after.append(look)


def averaged(course: Course) -> None:
    def prepared() -> None:
        decay = swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        course.average = swa_utils.AveragedModel(
            course.model, multi_avg_fn=decay, use_buffers=False
        )

    course.prepare.append(prepared)
    course.after.append(lambda _: course.average.update_parameters(course.model))


def cast_late(course: Course) -> None:
    """A model that becomes float64 before the first step, after the optimiser was made."""
    course.model.to(torch.float32)

    def cast(step: int) -> None:
        if step == 0:
            course.model.double()
            course.outside.double()

    course.structure.append(cast)


# ---- batches, and what only the tested course has


def sizes(course: Course) -> None:
    course.rows = [course.draw.choice([1, 2, 3, 5, 8, 13]) for _ in range(STEPS)]


def last_smaller(course: Course) -> None:
    course.rows = [3 if step % 5 == 4 else 8 for step in range(STEPS)]


def form(course: Course) -> None:
    kind = course.draw.choice(
        ["tuple", "list", "named", "extras", "nested", "numbers", "alone", "texts"]
    )
    if kind in {"tuple", "list"}:
        make = {"tuple": tuple, "list": list}[kind]
        course.pack = lambda columns: make(columns.values())
        course.unpack = lambda batch: dict(zip(("x", "y", "w", "task"), batch, strict=True))
    elif kind == "named":
        course.pack = lambda columns: Sample(**columns)
        course.unpack = lambda batch: batch._asdict()
    elif kind == "extras":
        course.pack = lambda columns: columns | {
            "names": [f"sample {place}" for place in range(len(columns["x"]))],
            "none": None, "rate": 0.5, "what": "all", "ids": list(range(len(columns["x"]))),
        }  # fmt: skip
    elif kind == "alone":
        course.pack = lambda columns: columns["x"]
        course.unpack = lambda x: course.columns(x, course.step)
    elif kind == "texts":
        course.pack = lambda columns: columns | {"y": [str(each) for each in columns["y"].tolist()]}
        course.unpack = lambda batch: (
            batch | {"y": torch.tensor([ast.literal_eval(each) for each in batch["y"]])}
        )
    elif kind == "nested":
        course.pack = lambda columns: {"inputs": {"x": columns["x"]}, "rest": columns}
        course.unpack = lambda batch: batch["rest"] | batch["inputs"]
    else:
        course.pack = lambda columns: columns | {"w": columns["w"].tolist()}
        course.unpack = lambda batch: (
            batch | {"w": torch.tensor(batch["w"], dtype=course.dtype).flatten()}
        )


def parts(course: Course) -> None:
    choices = [4, 5, 100] if course.careful else [1, 2, 3, 5, 100]
    course.most = [course.draw.choice(choices) for _ in range(STEPS)]


def whole(course: Course) -> None:
    course.most = [1000] * STEPS


def memory(course: Course) -> None:
    course.memory = [
        (course.draw.choice([1, 2, 4, 7, 100]), course.draw.choice(["begin", "forward", "back"]))
        for _ in range(STEPS)
    ]
    if course.careful:
        course.memory = [(max(4, rows), place) for rows, place in course.memory]


def restart(course: Course) -> None:
    course.restart = course.draw.randrange(1, STEPS)


def told(course: Course) -> None:
    course.hazards = []
