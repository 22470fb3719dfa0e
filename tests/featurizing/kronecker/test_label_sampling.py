"""Labels drawn from a model's own distribution come as often as the model says."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import (
    CausalLanguageModelingModelOutput,
    CLIPModelOutput,
    ModelCall,
    TextClassificationModelOutput,
    resolve_task,
)

COUNT = 1000
X, LABELS = torch.zeros(COUNT, 1), torch.zeros(COUNT, dtype=torch.long)
LOGITS = torch.tensor([1.0, -1.0, 0.5])


def evenly(shape):
    """The numbers (i + 1/2) / COUNT: frequencies are probabilities, up to one draw per class."""
    grid = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
    return grid.reshape(COUNT, *[1] * len(shape)).expand(COUNT, *shape)


class Fixed(nn.Module):
    """Gives the same output for every sample."""

    def __init__(self, output):
        super().__init__()
        self.output = nn.Parameter(output)

    def forward(self, x=None, input_ids=None, **_):
        count = len(input_ids if x is None else x)
        return self.output.expand(count, *self.output.shape)


@dataclass
class Named:
    """A batch as a dataclass."""

    x: Tensor
    labels: Tensor


def drawn(task, output, batch=(X, LABELS)):
    return resolve_task(task).sample_labels(ModelCall(Fixed(output)), batch, evenly)


def assert_shares(classes, expected):
    shares = torch.bincount(classes, minlength=3) / COUNT
    torch.testing.assert_close(shares, expected, rtol=0, atol=2 / COUNT)


ALL = [(X, LABELS), [X, LABELS], {"x": X, "label": LABELS}, Named(X, LABELS)]
CLASSES = [
    *(("image_classification", batch, 1) for batch in ALL),
    (TextClassificationModelOutput(temperature=2.0), {"input_ids": X, "labels": LABELS}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("task", "batch", "temperature"), CLASSES)
def test_classes_come_as_often_as_the_softmax_says(task, batch, temperature):
    """A temperature flattens what is drawn."""
    found = drawn(task, LOGITS, batch)
    if isinstance(found, dict):
        kept = found["label" if "label" in found else "labels"]
    else:
        kept = found.labels if isinstance(found, Named) else found[1]
    assert_shares(kept, (LOGITS / temperature).softmax(0))
    assert type(found) is (tuple if isinstance(batch, list) else type(batch))


@pytest.mark.parametrize(
    ("mean", "dtype", "most"),
    [(3.0, "float64", None), (1e8, "float64", None), (4e6, "float32", None), (-5e6, "float32", "4.2e\\+06")],
)
def test_regression_targets_have_unit_variance_around_the_prediction(mean, dtype, most):
    """A dtype in whose steps the noise is lost is refused."""
    output = torch.tensor([mean], dtype=getattr(torch, dtype))
    refused = pytest.raises(
        InvalidInputError, match=rf"predictions\[0, 0\] is .* Expected at most {most} in size"
    )
    with refused if most else nullcontext():
        found = drawn("regression", output, (X, torch.zeros(COUNT, 1)))[1].double() - mean
        assert abs(float(found.mean())) < (1e-9 if mean == 3 else 1e-2)
        assert abs(float(found.var()) - 1) < 1e-2


def test_tokens_are_drawn_where_one_is_predicted_and_kept_elsewhere():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0], [9.0, 0.0, 0.0]])
    ids = torch.zeros(COUNT, 3, dtype=torch.long)
    labels = torch.tensor([1, 2, -100]).expand(COUNT, 3)
    found = drawn("causal_language_modeling", logits, {"input_ids": ids, "labels": labels})
    assert_shares(found["labels"][:, 1], logits[0].softmax(0))
    assert bool((found["labels"][:, [0, 2]] == labels[:, [0, 2]]).all())
    assert found["input_ids"] is ids
    assert bool((labels[:, 1] == 2).all()), "the data's labels were written on"
    likelihood = CausalLanguageModelingModelOutput(shift=False).log_likelihood()
    assert likelihood is not None
    assert likelihood.settings() == {"output": "log_prob", "shift": False}


def test_a_task_without_a_distribution_says_so():
    assert not CLIPModelOutput().can_sample
    with pytest.raises(InvalidInputError, match="fisher='empirical'"):
        drawn(CLIPModelOutput(), torch.zeros(2), (X, X))
