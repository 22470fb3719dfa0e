"""Models that change in eval mode: they keep values computed from parameters, as LeViT, or rescale, as RWKV."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import UnsupportedModelError

TRAIN = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3)


class Biased(nn.Module):
    """Adds a table of biases, looked up once in eval mode and dropped when it is put into train mode."""

    def __init__(self, *, keeps=True):
        super().__init__()
        self.linear, self.biases, self.keeps = nn.Linear(4, 3), nn.Parameter(torch.randn(5)), keeps
        self.kept: Tensor | None = None

    def train(self, mode=True):
        if mode:
            self.kept = None
        return super().train(mode)

    def forward(self, x):
        found = self.biases[[0, 2, 2]] if self.kept is None else self.kept
        if self.keeps and not self.training:
            self.kept = found
        return torch.tanh(self.linear(x) + found)


class Rescaling(nn.Module):
    """Halves a weight when it comes into eval mode, doubles it when it leaves, and notes which state it is in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.rescaled = False

    def forward(self, inputs):
        if self.rescaled == self.training:
            with torch.no_grad():
                self.first.weight.mul_(2.0 if self.training else 0.5)
            self.rescaled = not self.training
        hidden = self.first(inputs).tanh()
        return self.last(hidden * 2 if self.rescaled else hidden)


def biased(*, keeps):
    torch.manual_seed(0)
    return nn.Sequential(Biased(keeps=keeps), nn.Linear(3, 3))


def scores(model, engine, states=None):
    settings = {"projector": "none", "dtype": "float32", "method": "GradDot", "progress": False}
    attributor = Attributor(model, "image_classification", None, gradient_computer=engine, **settings)
    attributor.featurize(Rows(TRAIN, batch_size=4), states)
    return attributor.score(Rows(TRAIN, batch_size=4)).numpy()


@pytest.mark.parametrize("engine", ["auto", "hook", "functional", "iterative"])
def test_what_a_model_keeps_in_eval_mode_stands_for_no_parameter_and_no_other_checkpoint(engine):
    model, plain, inputs = biased(keeps=True).eval(), biased(keeps=False).eval(), TRAIN.tensors[0]
    states = [{k: v * factor for k, v in plain.state_dict().items()} for factor in (1.0, -2.0)]
    model[1].training = True
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        before = model(inputs)  # leaves constants in the place of parameters

    found = scores(model, engine, states)

    np.testing.assert_allclose(found, scores(plain, engine, states), rtol=1e-5, atol=1e-6)
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        assert model(inputs).equal(before)


@pytest.mark.parametrize("engine", ["auto", "hook", "iterative"])
def test_a_forward_pass_that_changes_parameters_is_refused_and_the_model_comes_back(engine):
    model, untouched = Rescaling(), Rescaling()

    with pytest.raises(UnsupportedModelError, match=r"changes 1 of its parameters in place.*'first.weight'"):
        scores(model, engine)

    assert torch.equal(model.first.weight, untouched.first.weight)
    assert model.training
    assert torch.equal(model.eval()(TRAIN.tensors[0]), untouched.eval()(TRAIN.tensors[0]))


def test_after_a_pass_in_eval_mode_the_same_rows_come_out_every_time():
    model, calls = Rescaling().eval(), []
    model(TRAIN.tensors[0])

    def make_inputs_require_grads(*_):  # the name that Transformers gives it
        calls.append("called")

    handle = model.first.register_forward_hook(make_inputs_require_grads)

    first = scores(model, "auto")

    assert not calls
    assert model.first._forward_hooks == {handle.id: make_inputs_require_grads}
    assert model.rescaled
    np.testing.assert_array_equal(scores(model, "auto"), first)
