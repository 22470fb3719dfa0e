"""Scores of a replay equal derivatives of the real training by its row weights; published models: ``tests/zoo``."""

import numpy as np
import pytest
import torch.nn.functional as F
import unrolled_cases as cases
from torch import nn

from trak_lite.unrolled import SGD, Adam, AdamW

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")


def tied(seed):
    first, second = (nn.Linear(cases.WIDTH, cases.WIDTH) for _ in range(2))
    last = nn.Linear(cases.WIDTH, cases.CLASSES)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).double()


def with_unused(seed):
    layer = nn.Linear(cases.WIDTH, cases.CLASSES)
    layer.unused = nn.Linear(2, 2)
    return layer.double()


def normalised(seed):
    norm = nn.BatchNorm1d(6).eval()
    norm.running_var.fill_(2.0)
    return nn.Sequential(nn.Linear(cases.WIDTH, 6), norm, nn.Linear(6, cases.CLASSES)).double()


class Padded(nn.Embedding):
    """The mean of looked-up rows, of which one is for padding and has a gradient of zero."""

    def forward(self, inputs):
        return super().forward((inputs.abs() * 3).long().clamp(max=4)).mean(1).tanh()


def padded(seed):
    return nn.Sequential(Padded(5, 8, padding_idx=0), nn.Linear(8, cases.CLASSES)).double()


def dict_loss(model, batch):
    """Takes its columns out of the batch."""
    return F.cross_entropy(model(batch.pop("inputs")), batch.pop("labels"), reduction="none")


MOMENTUM = SGD(lr=0.1, momentum=0.8, weight_decay=0.01)
CASES = {
    "nesterov": {"optimizer": SGD(lr=0.1, momentum=0.8, nesterov=True)},
    "adam": {"optimizer": Adam(lr=0.02, eps_root=1e-6)},
    "adamw": {"optimizer": AdamW(lr=0.02, eps_root=1e-6, weight_decay=0.3)},
    "clipping at some steps": {"optimizer": MOMENTUM, "clip_norm": 0.5},
    "clipping and adam": {"optimizer": AdamW(lr=0.02, eps_root=1e-6), "clip_norm": 0.05},
    "accumulation": {"optimizer": MOMENTUM, "accumulate": 3},
    "row weights": {"optimizer": MOMENTUM, "weights": [1.5, 0.5, 1.3, 0.2, 2.0, 1.0, 0.0, 0.7, 0.0, 1.9, 0.4]},
    "dropout and accumulation": {"model_fn": cases.dropping, "accumulate": 2, "optimizer": MOMENTUM},
    "tied weights": {"model_fn": tied, "optimizer": MOMENTUM},
    "steps that end inside an epoch": {"epochs": None, "steps": 5, "optimizer": MOMENTUM},
    "fewer steps than an epoch has": {"epochs": None, "steps": 2},
    "batches of one row": {"batch_size": 1, "epochs": 1},
    "a batch larger than the data": {"batch_size": 99, "epochs": 4},
    "last layer": {"grad_wrt": ["2.weight", "2.bias"], "optimizer": MOMENTUM},
    "unused parameters": {"model_fn": with_unused, "optimizer": Adam(lr=0.02)},
    "schedule": {"optimizer": MOMENTUM, "schedule": lambda step: 1 / (1 + step)},
    "batch norm in eval mode": {"model_fn": normalised},
    "a row for padding": {"model_fn": padded, "optimizer": MOMENTUM},
    "dict batches": {"data": cases.Dicts(*cases.vectors(cases.N, 0)), "loss_fn": dict_loss},
}  # fmt: skip
QUICK = ("adam", "dropout and accumulation")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.quick] * (case in QUICK)) for case in CASES]
)
def test_scores_equal_differences_of_repeated_trainings(case):
    settings = dict(CASES[case])
    weights = settings.pop("weights", None)
    made = cases.recipe(**settings)
    data, function = cases.targets(), cases.margin
    if case == "dict batches":
        data, function = cases.Dicts(*cases.vectors(4, 1)), cases.dict_margin
    rows = np.random.default_rng(0).choice(cases.N, 3, replace=False)
    expected = cases.differences(made, rows, data, function, weights)
    assert np.abs(expected).max() > 1e-4
    cases.assert_close(cases.replayed(made.train(weights=weights), data, function)[rows], expected)


@pytest.mark.quick
def test_a_row_that_no_step_uses_has_the_score_zero():
    made = cases.recipe(epochs=None, steps=1)
    used = made.order(0, num_rows=cases.N, seed=0)
    scores = cases.replayed(made.train())
    assert (scores[np.setdiff1d(np.arange(cases.N), used)] == 0).all()
    assert (scores[used] != 0).all()


def test_losses_of_float32_models_are_derived_in_float32():
    run = cases.recipe(lambda seed: cases.mlp(seed).float(), data=cases.halves(cases.N, 0)).train()
    scores = cases.replayed(run, cases.halves(4, 1))
    # Initial weights are drawn in float32 in both.
    np.testing.assert_allclose(scores, cases.replayed(cases.recipe().train()), rtol=1e-3, atol=1e-5)
