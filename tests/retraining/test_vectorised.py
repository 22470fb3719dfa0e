"""Many models at once: the same weights as the plain loop, and clear refusals."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from trak_lite.errors import InvalidInputError, ManifestMismatchError, RetrainingError, UnsupportedModelError
from trak_lite.evaluation import removal_masks, subset_masks
from trak_lite.retraining import retrain, retrain_many
from trak_lite.retraining.side_by_side import VectorisedTraining

N, TARGETS = 24, 5
MASKS = subset_masks(N, 3)


def mlp(seed):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3))


def cnn(seed):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3, bias=False)
    )


def recipe(build=mlp, **changes):
    generator = torch.Generator().manual_seed(0)
    settings = {
        "loss": nn.functional.cross_entropy,
        "inputs": torch.randn(N, 1, 6, 6, generator=generator),
        "labels": torch.randint(3, (N,), generator=generator),
        "epochs": 3,
        "batch_size": 5,
        "lr": 0.1,
    }
    return VectorisedTraining(build_model=build, **{**settings, **changes})


def logits(model):
    generator = torch.Generator().manual_seed(1)
    return model(torch.randn(TARGETS, 1, 6, 6, generator=generator))[:, 0]


OPTIMIZERS = [
    {"momentum": 0.9, "weight_decay": 0.01},
    {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
]


@pytest.mark.parametrize("build", [mlp, cnn])
@pytest.mark.parametrize("settings", OPTIMIZERS)
def test_models_trained_side_by_side_equal_the_loop(build, settings):
    training = recipe(build, **settings)

    many = retrain_many(training, MASKS, logits, models_at_once=4)

    loop = retrain(training, MASKS, logits)
    np.testing.assert_allclose(many.outputs, loop.outputs, rtol=1e-4, atol=1e-4)
    for one, other in pairwise(many.outputs.reshape(-1, TARGETS)):
        assert np.abs(one - other).max() > 0.05


def test_the_loop_equals_a_training_written_out():
    training = recipe(momentum=0.9)
    indices = np.flatnonzero(MASKS[1])

    found = training(indices, 4)

    torch.manual_seed(4)
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        order = indices[torch.randperm(12, generator=generator).numpy()]
        for rows in (order[:5], order[5:10], order[10:]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(training.inputs[rows]), training.labels[rows]).backward()
            optimizer.step()
    assert not found.training
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], weight, rtol=0, atol=0)


def test_training_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)

    recipe().train_many([np.arange(5)], [7])

    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_frozen_and_tied_parameters_train_as_in_the_loop():
    def build(seed):
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36), nn.Linear(36, 3))
        model[3].weight = model[1].weight
        model[4].weight.requires_grad_(False)
        return model

    training = recipe(build)

    np.testing.assert_allclose(
        retrain_many(training, MASKS, logits).outputs,
        retrain(training, MASKS, logits).outputs,
        rtol=1e-4,
        atol=1e-4,
    )


def test_subsets_of_several_sizes_are_trained_in_groups():
    masks = np.concatenate([MASKS, removal_masks(np.random.default_rng(0).normal(size=(N, 2)), 4)])
    training = recipe()

    many = retrain_many(training, masks, logits, models_at_once=3, seeds=(0,))

    np.testing.assert_allclose(
        many.outputs, retrain(training, masks, logits, seeds=(0,)).outputs, rtol=1e-4, atol=1e-4
    )


def test_the_loop_continues_what_many_models_at_once_began(tmp_path):
    calls = []

    def stops(model):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(1)
        return logits(model)

    training = recipe(epochs=1)
    given = {"path": tmp_path / "r", "train_id": "mlp"}
    with pytest.raises(KeyboardInterrupt):
        retrain_many(training, MASKS, stops, models_at_once=3, **given)
    calls.clear()

    found = retrain(training, MASKS, stops, **given)

    assert len(calls) == 2
    np.testing.assert_allclose(found.outputs, retrain(training, MASKS, logits).outputs, rtol=1e-4, atol=1e-4)


def test_another_learning_rate_or_other_labels_are_another_training(tmp_path):
    training = recipe(epochs=1)
    retrain_many(training, MASKS, logits, path=tmp_path / "r")

    with pytest.raises(ManifestMismatchError, match=r"fields\.lr is '0\.1' there, '0\.2' here"):
        retrain_many(replace(training, lr=0.2), MASKS, logits, path=tmp_path / "r")
    with pytest.raises(ManifestMismatchError, match=r"fields\.labels\.sha256"):
        retrain_many(replace(training, labels=1 - training.labels), MASKS, logits, path=tmp_path / "r")


@pytest.mark.parametrize(
    ("part", "seen"),
    [
        (nn.Dropout(0.5), r"1 \(Dropout\) draws random numbers"),
        (nn.BatchNorm1d(36), r"1 \(BatchNorm1d\) keeps running statistics"),
    ],
)
def test_models_that_cannot_be_stacked_are_refused(part, seen):
    training = recipe(lambda seed: nn.Sequential(nn.Flatten(), part, nn.Linear(36, 3)))

    with pytest.raises(UnsupportedModelError, match=seen):
        retrain_many(training, MASKS, logits)


def test_dropout_of_zero_and_batch_statistics_of_the_moment_are_stacked():
    training = recipe(
        lambda seed: nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.0),
            nn.BatchNorm1d(36, track_running_stats=False),
            nn.Linear(36, 3),
        ),
        batch_size=4,
    )

    np.testing.assert_allclose(
        retrain_many(training, MASKS, logits).outputs,
        retrain(training, MASKS, logits).outputs,
        rtol=1e-4,
        atol=1e-4,
    )


class Hidden(nn.Module):
    """Draws random numbers where no module says so."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(36, 3)

    def forward(self, inputs):
        return nn.functional.dropout(self.linear(inputs.flatten(1)), 0.5)


def test_what_vmap_cannot_do_is_refused_with_its_reason():
    with pytest.raises(UnsupportedModelError, match=r"Hidden .* side by side \(RuntimeError: .*random"):
        retrain_many(recipe(lambda seed: Hidden()), MASKS, logits)


def test_a_model_that_cannot_be_built_names_the_subsets():
    def build(seed):
        raise ValueError("no such model")

    with pytest.raises(RetrainingError, match=r"subset 0, seed 0 .*; subset 0, seed 1 .*no such model"):
        retrain_many(recipe(build), MASKS, logits)


def test_an_output_function_that_fails_names_subset_and_seed():
    with pytest.raises(RetrainingError, match=r"subset 0, seed 0 .*\(IndexError"):
        retrain_many(recipe(epochs=1), MASKS, lambda model: logits(model)[9])


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"epochs": 0}, "epochs must be an integer"),
        ({"batch_size": 0}, "batch_size must be an integer"),
        ({"lr": -1.0}, "lr must be a finite number"),
        ({"momentum": -1.0}, "momentum must be a finite number"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum=0.9 is a setting of SGD"),
        ({"labels": torch.zeros(3)}, "inputs have 24 rows and labels 3"),
    ],
)
def test_settings_that_cannot_train_are_refused(changes, seen):
    with pytest.raises(InvalidInputError, match=seen):
        recipe(**changes)


def test_models_side_by_side_need_subsets_of_one_size():
    with pytest.raises(InvalidInputError, match=r"got 2 subsets of sizes \[2, 3\] and 2 seeds"):
        recipe().train_many([np.arange(2), np.arange(3)], [0, 1])


def test_models_at_once_must_be_positive():
    with pytest.raises(InvalidInputError, match="models_at_once must be an integer"):
        retrain_many(recipe(), MASKS, logits, models_at_once=0)
