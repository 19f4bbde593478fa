"""Features of drawn courses: optimisers, hooks, batches, and actions between steps."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils

from tests.training.courses import STEPS, Columns, Course, feature

EACH: Final = ({"foreach": True}, {"foreach": False}, {"maximize": True}, {"weight_decay": 0.1})
FUSED: Final = ({"fused": True}, {"fused": True, "weight_decay": 0.1}, *EACH)
ADAM: Final = (*FUSED, {"amsgrad": True}, {"amsgrad": True, "foreach": True})
MOMENTUM: Final = ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True})


def _option(
    kind: Any, share: float, *variants: dict[str, Any], without: str = "", **keys: Any
) -> None:
    """Register an optimiser, with one of the variants, as a feature."""

    def add(course: Course) -> None:
        course.makes = [partial(kind, **keys, **course.draw.choice([{}, *variants]))]

    add.__name__ = kind.__name__.lower()
    feature(share, without=without, of="optimizer")(add)


#: Features whose gradients may be only rounding, so that optimisers by sign give random updates.
_NO_SIGNS = (
    "conv transformer batch-norm batch-norm-in-eval weight-norm spectral-norm single "
    "head-in-single "
)

_option(optim.SGD, 4, *MOMENTUM, *FUSED, lr=0.05)
_option(optim.Adam, 2, *ADAM, lr=0.01, eps=1e-2)
_option(optim.AdamW, 3, *ADAM, lr=0.01, eps=1e-2)
_option(optim.RMSprop, 1, *EACH, {"momentum": 0.9}, {"centered": True}, lr=0.01, eps=1e-2)
_option(optim.Adagrad, 1, *FUSED, {"lr_decay": 0.1}, lr=0.05, eps=1e-2)
_option(optim.Adadelta, 1, *EACH, eps=1e-2)
_option(optim.Adamax, 1, *EACH, lr=0.01, eps=1e-2)
_option(optim.NAdam, 1, *EACH, lr=0.01, eps=1e-2)
_option(optim.RAdam, 1, *EACH, lr=0.01, eps=1e-2)
_option(optim.Rprop, 0.7, {"foreach": True}, lr=0.001, without=_NO_SIGNS)
_option(optim.ASGD, 0.7, *EACH, lr=0.01)
_option(optim.Adafactor, 0.7, lr=0.01, eps=(1e-2, 1e-3))


@feature(0.7, without="single head-in-single", of="optimizer")
def muon(course: Course) -> None:
    course.split = lambda _, parameter: 0 if parameter.dim() == 2 else 1
    course.makes = [
        partial(optim.Muon, lr=0.01, eps=1e-3), partial(optim.AdamW, lr=0.01, eps=1e-2)
    ]  # fmt: skip


@feature(0.08, without="muon")
def two_optimizers(course: Course) -> None:
    by = course.draw.choice(["head", "weight"])
    course.split = lambda name, _: int(by in name)
    second: Any = course.draw.choice([course.makes[0], _ADAMW])
    course.makes = [course.makes[0], second]


@feature(0.05, without="muon two-optimizers")
def adversary(course: Course) -> None:
    """A second model with a separate loss, as in a GAN."""
    course.outside["critic"] = nn.Linear(course.classes, 1)
    course.split = lambda name, _: int("critic" in name)
    second: Any = _ADAMW
    course.makes = [course.makes[0], second]

    def against(outputs: Tensor, columns: Columns, sign: float = 1.0) -> Tensor:
        said = course.outside["critic"](outputs)[..., 0]
        return 0.3 * course.reduce(functional.softplus(sign * said), columns)

    course.critic = lambda outputs, columns: against(outputs.detach(), columns, -1.0)
    course.terms.append(against)


@feature(0.05, without="muon two-optimizers adversary")
def joint(course: Course) -> None:
    """Two optimisers, and one backward for both."""
    two_optimizers(course)
    course.joint = True


_ADAMW: Final = partial(optim.AdamW, lr=0.01, eps=1e-2)


@feature(0.15, without="added-group")
def groups(course: Course) -> None:
    course.groups = lambda parameters: [
        {"params": parameters[::2], "lr": 0.02},
        {"params": parameters[1::2], "weight_decay": 0.05},
    ][: len(parameters)]


@feature(0.07, without="kept-out muon two-optimizers joint")
def added_group(course: Course) -> None:
    names = [name for name, _ in course.named()]
    course.kept_out |= set(course.draw.sample(names, max(1, len(names) // 3)))
    late, when = sorted(course.kept_out), course.draw.randrange(STEPS)

    def add(step: int) -> None:
        if step == when:
            named = dict(course.named())
            course.optimizers[0].add_param_group({"params": [named[name] for name in late]})

    course.structure.append(add)


@feature(0.2)
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


@feature(0.3)
def clipped(course: Course) -> None:
    course.clip = course.draw.choice([0.05, 0.5, 5.0])


def _some(course: Course) -> list[nn.Parameter]:
    found = [each for _, each in course.named() if each.requires_grad]
    return course.draw.sample(found, max(1, len(found) // 2))


@feature(0.07)
def scaling_hook(course: Course) -> None:
    for parameter in _some(course):
        parameter.register_hook(lambda gradient: gradient * 0.3)  # type: ignore[no-untyped-call]


@feature(0.07)
def clamping_hook(course: Course) -> None:
    for parameter in _some(course):
        parameter.register_hook(lambda own: own.clamp(-1e-4, 1e-4))  # type: ignore[no-untyped-call]


@feature(0.07)
def module_hooks(course: Course) -> None:
    head = course.model.head
    head.register_full_backward_hook(
        lambda _module, inputs, _outputs: tuple(
            None if each is None else each * 0.5 for each in inputs
        )
    )
    head.register_forward_hook(lambda _module, _inputs, made: made * 1.5)
    head.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.9, *inputs[1:]))


@feature(0.07)
def optimizer_hooks(course: Course) -> None:
    def scale(optimizer: optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.3)

    def prepared() -> None:
        for optimizer in course.optimizers:
            optimizer.register_step_pre_hook(scale)

    course.prepare.append(prepared)


@feature(0.1)
def frozen(course: Course) -> None:
    names = [name for name, _ in course.named()]
    chosen = set(course.draw.sample(names, max(1, len(names) // 2)))
    if course.draw.random() < 0.5:
        chosen = {name for name in names if name.startswith("body.")}
    for name, parameter in course.named():
        parameter.requires_grad_(name not in chosen)


@feature(0.1, without="frozen")
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


@feature(0.08)
def modes(course: Course) -> None:
    steps = set(course.draw.sample(range(STEPS), 8))
    course.before.insert(0, lambda step: course.model.train(step in steps))


@feature(0.12)
def evaluation(course: Course) -> None:
    def evaluate(step: int) -> None:
        was = course.model.training
        course.model.eval()
        with torch.no_grad():
            course.seen.setdefault("evaluation", []).append(
                float(course.loss(course.batch(step), room=True))
            )
        course.model.train(was)

    course.after.append(evaluate)


@feature(0.06)
def probe(course: Course) -> None:
    """Compute the gradient of another loss, read it, and clear it."""

    def look(step: int) -> None:
        was = course.model.training
        course.model.eval()
        course.loss(course.batch(step), room=True).backward()
        norms = [each.grad.norm() for _, each in course.named() if each.grad is not None]
        course.seen.setdefault("probe", []).append(float(torch.stack(norms).norm()))
        course.model.train(was)
        course.model.zero_grad()
        course.outside.zero_grad()

    course.after.append(look)


@feature(0.06)
def swapped(course: Course) -> None:
    """Evaluate with other weights, and restore the training's weights."""

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


@feature(0.06)
def loaded(course: Course) -> None:
    """Load weights and optimiser in place from copies of themselves."""
    when = course.draw.randrange(1, STEPS)

    def load(step: int) -> None:
        if step == when:
            course.model.load_state_dict(copy.deepcopy(course.model.state_dict()))
            for optimizer in course.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    course.after.append(load)


@feature(
    0.04,
    without="tied heads-by-step heads-by-sample head-in-single outside two-optimizers "
    "adversary joint added-group muon module-hooks restart averaged kept-out weight-norm "
    "spectral-norm frozen changing",
)
def replaced_head(course: Course) -> None:
    """Replace the head, and the parameters of the old head in the optimiser."""
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


@feature(0.1)
def averaged(course: Course) -> None:
    def prepared() -> None:
        decay = swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        course.average = swa_utils.AveragedModel(
            course.model, multi_avg_fn=decay, use_buffers=False
        )

    course.prepare.append(prepared)
    course.after.append(lambda _: course.average.update_parameters(course.model))


@feature(0.2)
def sizes(course: Course) -> None:
    course.rows = [course.draw.choice([1, 2, 3, 5, 8, 13]) for _ in range(STEPS)]


@feature(0.5)
def parts(course: Course) -> None:
    choices = [4, 5, 100] if course.careful else [1, 2, 3, 5, 100]
    course.most = [course.draw.choice(choices) for _ in range(STEPS)]


@feature(0.25)
def memory(course: Course) -> None:
    course.memory = [
        (course.draw.choice([1, 2, 4, 7, 100]), course.draw.choice(["begin", "forward", "back"]))
        for _ in range(STEPS)
    ]
    if course.careful:
        course.memory = [(max(4, rows), place) for rows, place in course.memory]


@feature(0.15)
def restart(course: Course) -> None:
    course.restart = course.draw.randrange(1, STEPS)


@feature(0.1)
def told(course: Course) -> None:
    course.hazards = []
