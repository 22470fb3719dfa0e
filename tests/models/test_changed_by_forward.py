"""Models that write into their own parameters in their first pass in eval mode, as RWKV does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import UnsupportedModelError

TRAIN = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3)


class Rescaling(nn.Module):
    """Halves a weight when it comes into eval mode, doubles it when it leaves, and notes which state it is in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.rescaled = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.rescaled == self.training:
            with torch.no_grad():
                self.first.weight.mul_(2.0 if self.training else 0.5)
            self.rescaled = not self.training
        hidden = self.first(inputs).tanh()
        return self.last(hidden * 2 if self.rescaled else hidden)


def rows(model: nn.Module, engine: str) -> np.ndarray:
    made = Attributor(model, "image_classification", None, proj_dim=64, gradient_computer=engine)
    made.featurize(Rows(TRAIN, batch_size=4))
    return made.score(Rows(TRAIN, batch_size=4)).numpy()


@pytest.mark.parametrize("engine", ["auto", "hook", "iterative"])
def test_a_forward_pass_that_changes_parameters_is_refused_and_the_model_comes_back(engine: str) -> None:
    model, untouched = Rescaling(), Rescaling()

    with pytest.raises(UnsupportedModelError, match=r"changes 1 of its parameters in place.*'first.weight'"):
        rows(model, engine)

    assert torch.equal(model.first.weight, untouched.first.weight)
    assert model.training
    assert torch.equal(model.eval()(TRAIN.tensors[0]), untouched.eval()(TRAIN.tensors[0]))


def test_after_a_pass_in_eval_mode_the_same_rows_come_out_every_time() -> None:
    model = Rescaling().eval()
    model(TRAIN.tensors[0])

    first = rows(model, "auto")

    assert model.rescaled
    np.testing.assert_array_equal(rows(model, "auto"), first)
