"""Metasmoothness: 1 where weights follow row weights linearly, low where the training is chaotic."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from unrolled_cases import CLASSES, WIDTH, N, changed, margin, mlp, recipe, targets

from trak_lite.unrolled import SGD, Adam, unrolled
from trak_lite.unrolled import runs as runs_module


def squared(model, batch):
    return (model(batch[0]) - F.one_hot(batch[1], CLASSES)).square().sum(1)


def linear(seed):
    return nn.Linear(WIDTH, CLASSES).double()


def relu(seed):
    layers = [nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, CLASSES)]
    return nn.Sequential(*layers).double()


def chaotic():
    """A ReLU network far from the stable step size."""
    return recipe(relu, optimizer=SGD(lr=0.9, momentum=0.9), epochs=40)


@pytest.mark.quick
@pytest.mark.parametrize("steps", [1, 3])
def test_a_linear_model_with_squared_loss_and_whole_batches_is_smooth(steps):
    made = recipe(linear, squared, optimizer=SGD(lr=0.01), batch_size=N, epochs=None, steps=steps)

    assert made.train().metasmoothness() > (1 - 1e-9 if steps == 1 else 0.99)


def test_a_chaotic_training_is_not_smooth():
    run = chaotic().train()

    assert run.metasmoothness() < 0.7
    with pytest.warns(RuntimeWarning, match="metasmoothness 0.*GELU in place of ReLU"):
        scores = unrolled(run, targets(), margin)
    assert f"metasmoothness={run.metasmoothness():.4f}"[:18] in repr(scores)


def functional_relu(seed):
    class Net(nn.Linear):
        def forward(self, inputs):
            return F.relu(super().forward(inputs))

    return Net(WIDTH, CLASSES).double()


def pooled(seed):
    layers = [nn.Unflatten(1, (1, WIDTH)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(WIDTH // 2, CLASSES)]
    return nn.Sequential(*layers).double()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (recipe(relu), "GELU in place of ReLU, a smaller learning rate, larger batches"),
        (recipe(functional_relu), "GELU in place of ReLU, a smaller learning rate, larger batches"),
        (recipe(pooled), "average in place of max pooling, a smaller learning rate, larger batches"),
        (recipe(mlp, batch_size=N), "a smaller learning rate"),
        (recipe(linear, optimizer=Adam(0.1)), "a smaller learning rate, larger batches, a larger eps_root"),
    ],
)
def test_the_advice_names_what_the_training_has(made, expected):
    assert made.train().advice() == f"Smoother are: {expected}."


@pytest.mark.quick
def test_a_smooth_training_warns_of_nothing():
    run = recipe().train()
    assert run.metasmoothness() > 0.95

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unrolled(run, targets(), margin)


@pytest.mark.parametrize("h", [0.1, 0.02])
def test_the_value_is_that_of_three_trainings(h):
    made = recipe(mlp, optimizer=Adam(lr=0.05), epochs=4)
    weights = np.linspace(0.5, 1.5, N)
    run = made.train(weights=weights)
    direction = torch.randn(N, generator=torch.Generator().manual_seed(3)).double().numpy()
    finals = [
        torch.cat(
            [p.flatten() for p in made.train(weights=weights + k * h * direction).final.parameters.values()]
        )
        for k in range(3)
    ]
    total = (finals[2] - finals[0]).abs()
    signs = (finals[1] - finals[0]).sign() * (finals[2] - finals[1]).sign()

    assert run.metasmoothness(h, seed=3) == pytest.approx(
        float((signs * total / total.sum()).sum()), abs=1e-6
    )


@pytest.mark.quick
def test_the_usual_value_is_stored(tmp_path, monkeypatch):
    first, other = recipe().train(tmp_path).metasmoothness(), recipe().train()
    assert other.metasmoothness() == first
    another = recipe().train(tmp_path).metasmoothness(5.0, seed=1)
    monkeypatch.setattr(runs_module, "_side_by_side", lambda *args: pytest.fail("a training"))

    assert recipe().train(tmp_path).metasmoothness() == first
    assert other.metasmoothness() == first
    assert another != first


def test_models_that_cannot_be_stacked_are_trained_one_after_the_other():
    class Branching(nn.Linear):
        def forward(self, inputs):
            found = super().forward(inputs)
            return found if float(found.sum().detach()) > 1e9 else 2 * found

    class Plain(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    made = recipe(lambda seed: Branching(WIDTH, CLASSES).double())
    found = made.train().metasmoothness()

    expected = changed(made, model_fn=lambda seed: Plain(WIDTH, CLASSES).double()).train().metasmoothness()
    assert found == pytest.approx(expected, abs=1e-9)
