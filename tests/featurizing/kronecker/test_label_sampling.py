"""Labels drawn from a model's own distribution, and losses whose gradients are the curvature's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trak_lite._random import row_noise
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import AbstractModelOutput, CLIPModelOutput, ModelCall, resolve_task
from trak_lite.modelout_functions._sampling import LossModelOutput
from trak_lite.modelout_functions.language_modeling import CausalLanguageModelingModelOutput

COUNT = 1000


def evenly(shape: Sequence[int]) -> Tensor:
    """The numbers (i + 1/2) / COUNT: frequencies are probabilities, up to one draw per class."""
    grid = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
    return grid.reshape(COUNT, *[1] * len(shape)).expand(COUNT, *shape)


class Fixed(nn.Module):
    """Gives the same output for every sample."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = nn.Parameter(output)

    def forward(self, x: Tensor | None = None, input_ids: Tensor | None = None, **_: Any) -> Tensor:
        count = len(input_ids if x is None else x)
        return self.output.expand(count, *self.output.shape)


@dataclass
class Named:
    """A batch as a dataclass."""

    x: Tensor
    labels: Tensor


X = torch.zeros(COUNT, 1)
LABELS = torch.zeros(COUNT, dtype=torch.long)


def as_tuple(labels: Tensor) -> Any:
    return X, labels


@pytest.mark.parametrize("task", ["image_classification", "iterative_image_classification"])
@pytest.mark.parametrize(
    "batch", [(X, LABELS), [X, LABELS], {"x": X, "label": LABELS}, Named(X, LABELS)], ids=type
)
def test_classes_come_as_often_as_the_softmax_says(task: str, batch: Any) -> None:
    logits = torch.tensor([1.0, -1.0, 0.5])

    drawn = resolve_task(task).sample_labels(ModelCall(Fixed(logits)), batch, evenly)

    kept = (
        drawn["label"] if isinstance(drawn, dict) else drawn.labels if isinstance(drawn, Named) else drawn[1]
    )
    shares = torch.bincount(kept, minlength=3) / COUNT
    torch.testing.assert_close(shares, logits.softmax(0), rtol=0, atol=2 / COUNT)
    assert type(drawn) is (tuple if isinstance(batch, list) else type(batch))


def test_a_temperature_flattens_what_is_drawn() -> None:
    task = resolve_task("text_classification")
    task.temperature = 2.0
    batch = {"input_ids": X, "labels": LABELS}
    logits = torch.tensor([1.0, -1.0, 0.5])

    drawn = task.sample_labels(ModelCall(Fixed(logits)), batch, evenly)["labels"]

    shares = torch.bincount(drawn, minlength=3) / COUNT
    torch.testing.assert_close(shares, (logits / 2).softmax(0), rtol=0, atol=2 / COUNT)


@pytest.mark.parametrize("task", ["binary_classification", "multilabel_classification"])
def test_answers_come_as_often_as_the_sigmoid_says(task: str) -> None:
    logits = torch.tensor([0.7]) if task.startswith("binary") else torch.tensor([0.7, -2.0])

    drawn = resolve_task(task).sample_labels(ModelCall(Fixed(logits)), (X, LABELS), evenly)[1]

    shares = drawn.reshape(COUNT, -1).mean(0)
    torch.testing.assert_close(shares, logits.sigmoid(), rtol=0, atol=2 / COUNT)


def test_regression_targets_have_unit_variance_around_the_prediction() -> None:
    model = Fixed(torch.tensor([3.0], dtype=torch.float64))

    drawn = resolve_task("regression").sample_labels(ModelCall(model), (X, torch.zeros(COUNT, 1)), evenly)[1]

    assert abs(float(drawn.mean()) - 3) < 1e-9
    assert abs(float(drawn.var()) - 1) < 1e-2


def test_tokens_are_drawn_where_one_is_predicted_and_kept_elsewhere() -> None:
    task = resolve_task("causal_language_modeling")
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0], [9.0, 0.0, 0.0]])
    ids = torch.zeros(COUNT, 3, dtype=torch.long)
    labels = torch.tensor([1, 2, -100]).expand(COUNT, 3)

    drawn = task.sample_labels(ModelCall(Fixed(logits)), {"input_ids": ids, "labels": labels}, evenly)

    shares = torch.bincount(drawn["labels"][:, 1], minlength=3) / COUNT
    torch.testing.assert_close(shares, logits[0].softmax(0), rtol=0, atol=2 / COUNT)
    assert bool((drawn["labels"][:, [0, 2]] == labels[:, [0, 2]]).all())
    assert drawn["input_ids"] is ids
    assert bool((labels[:, 1] == 2).all()), "the data's labels were written on"


def test_a_task_without_a_distribution_says_so() -> None:
    task = CLIPModelOutput()

    assert not task.can_sample
    with pytest.raises(InvalidInputError, match="fisher='empirical'"):
        task.sample_labels(ModelCall(Fixed(torch.zeros(2))), (X, X), evenly)


def loss_of(task: str, logits: Tensor, labels: Tensor) -> Tensor:
    if task == "image_classification":
        return functional.cross_entropy(logits, labels)
    if task == "causal_language_modeling":
        return functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    if task == "regression":
        return (logits - labels).square().sum() / 2
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


CASES = {
    "image_classification": (torch.tensor([0.3, -1.0, 2.0]), torch.tensor(1)),
    "binary_classification": (torch.tensor([0.3]), torch.tensor([0.0])),
    "multilabel_classification": (torch.tensor([0.3, -1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])),
    "regression": (torch.tensor([0.3]), torch.tensor([2.0])),
    "causal_language_modeling": (
        torch.tensor([[0.3, -1.0], [2.0, 0.1], [0.0, 1.0]]),
        torch.tensor([0, 1, 0]),
    ),
}


@pytest.mark.parametrize("task", CASES)
def test_the_loss_output_has_minus_the_gradient_of_the_training_loss(task: str) -> None:
    """That of the summed cross-entropy too, where the margins have no scalar q for it."""
    logits, labels = (part.double() if part.is_floating_point() else part for part in CASES[task])
    model = Fixed(logits.clone())
    batch = (torch.zeros(1, len(labels) if labels.dim() else 1), labels.unsqueeze(0))
    (expected,) = torch.autograd.grad(loss_of(task, model.output, labels), [model.output])

    output = LossModelOutput(resolve_task(task)).evaluate(ModelCall(model), batch).output

    (found,) = torch.autograd.grad(output.sum(), [model.output])
    torch.testing.assert_close(found, -expected)


def test_the_curvature_weight_makes_the_square_of_a_gradient_a_gauss_newton_term() -> None:
    model = Fixed(torch.tensor([0.7], dtype=torch.float64))
    batch = (X[:1], torch.ones(1, 1))

    output = LossModelOutput(resolve_task("binary_classification"), weight="loss_curvature")

    (found,) = torch.autograd.grad(output.evaluate(ModelCall(model), batch).output.sum(), [model.output])
    p = torch.tensor([0.7], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(found.square(), p * (1 - p))


def test_a_log_likelihood_keeps_how_tokens_are_aligned() -> None:
    likelihood: AbstractModelOutput | None = CausalLanguageModelingModelOutput(shift=False).log_likelihood()

    assert likelihood is not None
    assert likelihood.settings() == {"output": "log_prob", "shift": False}


def test_noise_belongs_to_the_row_and_looks_uniform() -> None:
    rows = np.arange(500)
    noise = row_noise(rows, seed=5, draw=1)((20,))

    assert torch.equal(row_noise(rows[7:9], seed=5, draw=1)((3,)), noise[7:9, :3])
    assert not torch.equal(row_noise(rows, seed=5, draw=0)((20,)), noise)
    assert not torch.equal(row_noise(rows, seed=6, draw=1)((20,)), noise)
    assert 0 < float(noise.min()) <= float(noise.max()) < 1
    shares = torch.histc(noise, 10, 0, 1) / noise.numel()
    assert float((shares - 0.1).abs().max()) < 0.015  # five standard deviations of a share
    assert abs(float(torch.corrcoef(noise.T)[0, 1])) < 0.2
