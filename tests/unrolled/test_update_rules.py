"""Optimizers are functions of their arguments alone; that their steps are torch's is in tests/retraining."""

import pytest
import torch

from trak_lite.unrolled import SGD, Adam, AdamW

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
def test_the_learning_rate_is_the_first_argument(cls):
    assert cls(0.1) == cls(lr=0.1)
    assert cls(0.1, weight_decay=0.3).weight_decay == 0.3
    with pytest.raises(TypeError, match="positional"):
        cls(0.1, 0.9)  # the momentum of torch's SGD, the betas of its Adam


def test_eps_root_is_added_under_the_root():
    gradient = torch.tensor([0.0, 1e-4, 3.0], dtype=torch.float64)
    made = Adam(lr=1.0, eps_root=1e-4, eps=0.0)
    start = made.start({"a": torch.zeros(3, dtype=torch.float64)})
    found = made.step(start, {"a": gradient}, factor=1.0, number=0).parameters["a"]
    torch.testing.assert_close(found, -gradient / (gradient**2 + 1e-4).sqrt(), rtol=1e-12, atol=1e-15)
