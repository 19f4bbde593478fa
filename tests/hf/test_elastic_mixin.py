"""A Trainer of transformers with ElasticMixin: the same losses in any parts, or a refusal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.hf.folders import make_folder
from tests.in_child import InChild
from workers.training.errors import TaskError


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


class Comparing(torch.optim.Optimizer):
    """Keeps the gradient tensor until the next step, which has another tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            parameter.sub_(0.05 * (2 * parameter.grad - state.get("before", 0)))
            state["before"] = parameter.grad


def _trained(
    folder: Path,
    family: str,
    head: str,
    limit: int,
    *,
    compares: bool = False,
    counts: bool = True,
    elastic: bool = True,
    loss: Any = summed,
    **arguments: Any,
) -> Any:
    """Train with batches of eight unequal samples, of which `limit` fit; return the losses."""
    warnings.simplefilter("ignore")
    from workers.hf import ElasticMixin
    from workers.hf.elastic_mixin import _Parts
    from workers.hf.folder import transformers
    from workers.settings import FailureKind
    from workers.testing import injected_error

    torch.set_num_threads(1)
    library = transformers()
    # Dropout outside the attention stays, because its masks are drawn for each sample.
    no_dropout = {"attn_pdrop": 0.0, "attention_probs_dropout_prob": 0.0}
    if not counts:  # for the comparison with a plain Trainer, which draws other masks
        no_dropout |= {"hidden_dropout_prob": 0.0, "classifier_dropout": 0.0, "dropout_rate": 0.0}
    path = make_folder(folder / f"{family}{head}", family, head=head, **no_dropout)
    model = getattr(library, f"AutoModelFor{head}").from_pretrained(path)
    draw = torch.Generator().manual_seed(0)
    is_causal = head in {"CausalLM", "TokenClassification", "Seq2SeqLM"}
    samples = []
    for place in range(32):
        tokens = torch.randint(5, 300, (4 + place % 7,), generator=draw)
        by_token = tokens % 2 if head == "TokenClassification" else tokens
        samples.append({"input_ids": tokens, "labels": by_token if is_causal else place % 2})

    def collate(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad([one["input_ids"] for one in some], batch_first=True)
        labels = [one["labels"] for one in some]
        return {
            "input_ids": tokens,
            "attention_mask": (tokens != 0).long(),
            "labels": pad(labels, batch_first=True, padding_value=-100)
            if is_causal
            else torch.tensor(labels),
        }

    bases = (ElasticMixin, library.Trainer) if elastic else (library.Trainer,)
    inner = _Parts._loss

    def within_limit(self: _Parts, part: dict[str, Any], items: Any) -> Any:
        if len(part["input_ids"]) > limit and torch.is_grad_enabled():
            raise injected_error(FailureKind.DEFINITE)
        return inner(self, part, items)

    _Parts._loss = within_limit  # type: ignore[method-assign]
    options = _options(folder, learning_rate=1e-3, **arguments)
    trainer = type("Small", bases, {})(
        model=model, args=options, train_dataset=samples, data_collator=collate,
        compute_loss_func=loss if family == "bert" and counts else None,
        optimizers=(Comparing(model.parameters()) if compares else None, None),
    )  # fmt: skip
    trainer.train()
    return _losses(trainer)


def _options(folder: Path, **arguments: Any) -> Any:
    from workers.hf.folder import transformers

    usual = {"per_device_train_batch_size": 8, "max_steps": 6, "logging_steps": 1, "seed": 1}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return transformers().TrainingArguments(
        output_dir=str(folder / "out"), **{**usual, **quiet, **arguments}
    )


def _losses(trainer: Any) -> list[float]:
    """Return the loss of each step."""
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def _gap(folder: str, family: str, head: str) -> float:
    trained = partial(_trained, Path(folder), family, head, compares=family == "gpt2")
    whole, apart = trained(8), trained(3)
    accumulated = trained(3, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert len(whole) == 6
    return max(
        max(abs(one - other) / one for one, other in zip(whole, run, strict=True))
        for run in (apart, accumulated)
    )


@pytest.mark.parametrize(
    ("family", "head"), [("gpt2", "CausalLM"), ("bert", "SequenceClassification")]
)
def test_the_course_is_the_same_in_smaller_parts(
    hf_child: InChild, tmp_path: Path, family: str, head: str
) -> None:
    # Gradients of BERT's key biases are only rounding, from which Adam makes full steps.
    assert hf_child(_gap, str(tmp_path), family, head) < {"gpt2": 2e-6, "bert": 1e-4}[family]


def _beside_plain(folder: str, family: str, head: str) -> float:
    """Return the largest gap to a plain Trainer if the model ignores `num_items_in_batch`."""
    trained = partial(_trained, Path(folder), family, head, counts=False)
    gaps = []
    for several in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}):
        plain, apart = trained(8, elastic=False, **several), trained(3, **several)
        assert len(plain) == 6
        gaps += [abs(one - other) / one for one, other in zip(plain, apart, strict=True)]
    return max(gaps)


@pytest.mark.parametrize(
    ("family", "head", "most"),
    [
        ("gemma", "SequenceClassification", 1e-5),
        ("bert", "SequenceClassification", 1e-4),
        ("llama", "TokenClassification", 1e-5),
        ("t5", "Seq2SeqLM", 1e-5),
    ],
)
def test_a_model_that_returns_a_mean_trains_as_in_a_plain_trainer(
    hf_child: InChild, tmp_path: Path, family: str, head: str, most: float
) -> None:
    """The mean is over samples, or over labels, whose number differs between samples."""
    assert hf_child(_beside_plain, str(tmp_path), family, head) < most


def _said(train: Callable[[], Any]) -> str:
    """Return the refusal of a training, or an empty text."""
    try:
        train()
    except TaskError as error:
        return str(error)
    return ""


def _refusal(folder: str) -> str:
    def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return functional.cross_entropy(outputs.logits, labels) ** 2

    return _said(lambda: _trained(Path(folder), "bert", "SequenceClassification", 8, loss=squared))


def test_a_loss_that_is_no_mean_is_refused(hf_child: InChild, tmp_path: Path) -> None:
    assert "compute_loss_func" in hf_child(_refusal, str(tmp_path))


def _small(folder: Path, *, elastic: bool, dropout: float = 0.0, **arguments: Any) -> Any:
    """Return a Trainer with `model_init`, and its log."""
    warnings.simplefilter("ignore")
    from workers.hf import ElasticMixin
    from workers.hf.folder import transformers

    library = transformers()
    path = make_folder(folder / "model", "gpt2", attn_pdrop=0.0)
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": arguments.pop("attn", 0)}
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 300, (32, 9), generator=draw)
    bases = (ElasticMixin, library.Trainer) if elastic else (library.Trainer,)
    options = _options(folder, learning_rate=1e-2, **arguments)
    load = library.AutoModelForCausalLM.from_pretrained
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    return type("Small", bases, {})(
        args=options, train_dataset=samples, eval_dataset=samples[:8],
        model_init=lambda: load(path, **drops),
    )  # fmt: skip


def _evaluated_twice(folder: str, elastic: bool) -> list[float]:
    trainer = _small(Path(folder), elastic=elastic)
    found = []
    for rate in (1e-2, 1e-3):
        trainer.args.learning_rate = rate
        trainer.train()
        found.append(trainer.evaluate()["eval_loss"])
    return found


def test_a_trainer_that_trains_again_trains_its_new_model(
    hf_child: InChild, tmp_path: Path
) -> None:
    plain = hf_child(_evaluated_twice, str(tmp_path), False)
    assert hf_child(_evaluated_twice, str(tmp_path), True) == pytest.approx(plain, rel=1e-5)
    assert plain[0] < plain[1]


def _ends(folder: str) -> list[float]:
    whole = _small(Path(folder), elastic=True, dropout=0.3, save_strategy="steps", save_steps=3)
    whole.train()
    again = _small(Path(folder), elastic=True, dropout=0.3)
    again.train(resume_from_checkpoint=str(Path(folder, "out", "checkpoint-3")))
    return [_losses(one)[-1] for one in (whole, again)]


def test_a_resumed_trainer_draws_the_masks_that_were_due(hf_child: InChild, tmp_path: Path) -> None:
    whole, again = hf_child(_ends, str(tmp_path))
    assert again == pytest.approx(whole, rel=1e-6)


def _with_dropout_in_attention(folder: str) -> tuple[str, list[str]]:
    told: list[str] = []
    trainer = _small(Path(folder), elastic=True, attn=0.2)
    said = _said(trainer.train)
    type(trainer).on_hazard = staticmethod(told.append)
    trainer.train()
    return said, told


def test_a_hazard_is_refused_or_told_as_by_elastic_step(hf_child: InChild, tmp_path: Path) -> None:
    said, told = hf_child(_with_dropout_in_attention, str(tmp_path))
    assert "attn_pdrop" in said
    assert len(told) == 1


def _of_old_scripts(folder: str) -> list[float]:
    """Return the gaps to a plain Trainer with losses and batches of older user scripts."""
    warnings.simplefilter("ignore")
    from workers.hf import ElasticMixin
    from workers.hf.elastic_mixin import _count_next_labels
    from workers.hf.folder import transformers

    library = transformers()
    path = make_folder(Path(folder) / "model", "gpt2", attn_pdrop=0.0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

    class Uncounted(library.Trainer):  # type: ignore[name-defined,misc]  # has no types
        """Does not pass the number of items in the batch, and logs."""

        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            self.log({"seen": 1.0})
            return super().compute_loss(model, inputs)

    class ByAttribute(Uncounted):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            logits = model(input_ids=inputs.input_ids).logits[:, :-1].flatten(0, 1)
            return functional.cross_entropy(logits, inputs.labels[:, 1:].flatten())

    class OfTuple(Uncounted):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            tokens, _ = inputs
            return model(input_ids=tokens).logits.square().mean()

    def collate(some: list[Any]) -> dict[str, torch.Tensor]:
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        return {"input_ids": pad(some), "labels": pad(some, padding_value=-100)}

    draw = torch.Generator().manual_seed(0)
    # At first all samples have equally many labels, which does not show what a mean is over.
    samples = [
        torch.randint(5, 300, (9 if at < 8 else 4 + at % 7,), generator=draw) for at in range(32)
    ]

    def run(
        base: Any, made: Any, *, elastic: bool, dtype: str = "float32", **keys: Any
    ) -> tuple[list[float], int]:
        options = _options(Path(folder), learning_rate=0.1, optim="sgd", **keys)
        options.train_sampling_strategy = "sequential"
        trainer = type("Own", (ElasticMixin, base) if elastic else (base,), {})(
            model=library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **drops), args=options,
            train_dataset=samples, data_collator=lambda some: made(collate(some)),
        )  # fmt: skip
        trainer.train()
        if elastic:
            assert max(trainer._elastic_parts.batch.parts) > 1
            assert (
                base is not Uncounted or trainer._elastic_parts._count_of_mean is _count_next_labels
            )
        return _losses(trainer), sum("seen" in each for each in trainer.state.log_history)

    run(Uncounted, dict, elastic=True, dtype="bfloat16")  # in bf16 other means seem right too
    gaps = []
    encoded, columns = library.BatchEncoding, lambda batch: tuple(batch.values())
    for base, made in ((Uncounted, dict), (ByAttribute, encoded), (OfTuple, columns)):
        for keys in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}):
            (plain, seen), (apart, again) = (
                run(base, made, elastic=each, **keys) for each in (False, True)
            )
            assert seen == again
            assert len(plain) == 6
            gaps += [abs(one - other) / one for one, other in zip(plain, apart, strict=True)]
    return gaps


def test_losses_of_old_scripts_train_as_in_a_plain_trainer(
    hf_child: InChild, tmp_path: Path
) -> None:
    """The mean is over the labels that a language model predicts. A batch keeps its type, and logs
    of a loss during the comparison are discarded.
    """
    assert max(hf_child(_of_old_scripts, str(tmp_path))) < 1e-5


def _with_noise(folder: str) -> list[str]:
    """Return the refusals of noise in a mean of labels, and of noise that the Trainer adds."""
    dropped = partial(_trained, Path(folder), "bart", "Seq2SeqLM", 8)
    noisy = partial(_small, Path(folder), elastic=True, neftune_noise_alpha=5)
    return [_said(dropped), _said(lambda: noisy().train())]


def test_noise_is_refused_by_its_own_name(hf_child: InChild, tmp_path: Path) -> None:
    of_model, of_trainer = hf_child(_with_noise, str(tmp_path))
    assert "random numbers" in of_model
    assert "neftune_noise_alpha" in of_trainer


def _with_a_step_of_its_own(folder: str) -> str:
    from workers.hf.folder import transformers

    def step(self: Any, *given: Any) -> torch.Tensor:
        raise AssertionError(self, given)

    library = transformers()
    library.Trainer = type("Own", (library.Trainer,), {"training_step": step})
    step.__qualname__ = "Own.training_step"
    return _said(_small(Path(folder), elastic=True).train)


def test_a_step_that_would_not_be_called_is_refused(hf_child: InChild, tmp_path: Path) -> None:
    said = hf_child(_with_a_step_of_its_own, str(tmp_path))
    assert "Own.training_step" in said
    assert "before ElasticMixin" in said
