"""Calibration by a teacher: known weights are found again, noise is refused, and sizes are checked."""

import numpy as np
import pytest
import torch
from held_scores import held_scores
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Scores, calibrate, calibrated_scores
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.methods import GradDot

N, M = 90, 24


@pytest.fixture(scope="module")
def attributor():
    torch.manual_seed(3)
    inputs = torch.randn(N + M, 5)
    labels = (inputs[:, 0] + torch.randn(N + M) > 0).long()
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    made = Attributor(model, "image_classification", None, proj_dim=32, dtype="float32")
    made.featurize(TensorDataset(inputs[:N], labels[:N]))
    made.score(TensorDataset(inputs[N:], labels[N:]), "t")
    made.score(TensorDataset(inputs[N:], labels[N:]), "t", method=GradDot())
    return made


def test_weights_of_another_kernel_are_found_again(attributor):
    scores = attributor.scores("t")
    low, high = scores.damping_path([0.1, 10.0]).numpy()
    truth = low - 2.0 * high
    columns = np.arange(3, 15)
    found = calibrate(scores, held_scores(truth[:, columns]), columns)
    assert found.kept
    assert found.gain.low > 0.0
    assert (found.across, found.num_held_out) == ("targets", 6)
    assert "held-out targets" in str(found)
    better = calibrated_scores(scores, found)
    assert isinstance(better, Scores)
    assert (better.name, better.method, better.task) == (scores.name, scores.method, scores.task)
    assert better.settings["calibrated_on"] == "6 held-out targets"
    np.testing.assert_array_equal(better.top(2).indices[0], np.argsort(-better.numpy()[:, 0])[:2])
    unseen = np.setdiff1d(np.arange(M), columns)
    before, after = (
        [np.corrcoef(matrix[:, target], truth[:, target])[0, 1] for target in unseen]
        for matrix in (scores.numpy(), better.numpy())
    )
    assert min(after) > 0.99
    assert np.median(before) < 0.95


@pytest.mark.quick
def test_noise_teaches_nothing(attributor):
    scores = attributor.scores("t")
    found = calibrate(scores, held_scores(np.random.default_rng(0).normal(size=(N, 12))))
    assert not found.kept
    with pytest.raises(StateError, match="not significantly better"):
        calibrated_scores(scores, found)


@pytest.mark.parametrize(
    ("shape", "targets"),
    [((N - 1, 12), None), ((N, 3), None), ((N, 6), [0, 1, 2, 3, 4, 4]), ((N, 6), [0, 1]), ((N, M + 1), None)],
)
def test_sizes_that_do_not_fit_are_refused(attributor, shape, targets):
    with pytest.raises(InvalidInputError, match="The teacher must have the 90 train rows"):
        calibrate(attributor.scores("t"), held_scores(np.ones(shape)), targets)


def test_scores_without_a_kernel_are_refused(attributor):
    with pytest.raises(InvalidInputError, match="no kernel"):
        calibrate(attributor.scores("t", method=GradDot()), held_scores(np.ones((N, 6))))
