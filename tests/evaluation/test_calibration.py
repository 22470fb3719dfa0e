"""Calibration weights, which ``trak_lite.evaluation`` does not export."""

import numpy as np
import pytest

from trak_lite.errors import InvalidInputError
from trak_lite.evaluation.calibration import fit_weights

PENALTIES = (1e-2, 1e-1, 1.0, 10.0, 100.0, np.inf)
PRIOR = np.array([0.5, 0.5, 0.0, 0.0])


def parts_of(num_parts=4, num_subsets=30, num_targets=20, seed=0):
    return np.random.default_rng(seed).normal(size=(num_parts, num_subsets, num_targets))


def ridge(parts, y, prior, penalty):
    """Weights near the scaled default weights, by one stacked least-squares problem; and the scale."""
    centred = (parts - parts.mean(axis=1, keepdims=True)).reshape(len(parts), -1).T
    truth = (y - y.mean(axis=0)).reshape(-1)
    default = centred @ prior
    scale = max(default @ truth / (default @ default), 0.05)
    if np.isinf(penalty):
        return scale * prior, scale
    size = np.sqrt((centred**2).mean(axis=0))
    stacked = np.vstack([centred / size, np.sqrt(penalty * len(truth)) * np.eye(len(parts))])
    residual = np.concatenate([truth - scale * default, np.zeros(len(parts))])
    return scale * prior + np.linalg.lstsq(stacked, residual, rcond=None)[0] / size, scale


def cross_validated(parts, outputs, prior, across):
    """Ridge regression towards the default weights, with the penalty that is best on what is left out."""
    spread = outputs.std(axis=0)
    y, parts = outputs / spread, parts / np.tensordot(prior, parts, 1).std(axis=0)
    errors = []
    for penalty in PENALTIES:
        total = 0.0
        for own in range(y.shape[0 if across == "subsets" else 1]):
            others = np.delete(np.arange(y.shape[0 if across == "subsets" else 1]), own)
            if across == "subsets":
                weights, _ = ridge(parts[:, others], y[others], prior, penalty)
                centre, centres = y[others].mean(axis=0), parts[:, others].mean(axis=1)
                gap = y[own] - centre - weights @ (parts[:, own] - centres)
            else:
                weights, _ = ridge(parts[:, :, others], y[:, others], prior, penalty)
                part = parts[:, :, own]
                gap = y[:, own] - y[:, own].mean() - weights @ (part - part.mean(axis=1, keepdims=True))
            total += (gap**2).sum()
        errors.append(total)
    weights, scale = ridge(parts, y, prior, PENALTIES[int(np.argmin(errors))])
    return weights / scale


@pytest.mark.quick
@pytest.mark.parametrize("across", ["subsets", "targets"])
@pytest.mark.parametrize("noise", [0.1, 3.0, 30.0])
def test_weights_are_those_of_cross_validated_ridge_regression_towards_the_default(across, noise):
    parts = parts_of(3, 7, 5)
    outputs = np.tensordot([0.2, 0.7, 0.1], parts, 1) + noise * parts_of(1, 7, 5, seed=1)[0]
    prior = np.array([1.0, 0.5, 0.0])
    found = fit_weights(parts, outputs, prior, across=across)
    np.testing.assert_allclose(found, cross_validated(parts, outputs, prior, across), rtol=1e-8, atol=1e-10)


def test_weights_do_not_depend_on_the_scale_of_parts_or_outputs():
    parts, outputs = parts_of(), parts_of()[1] + 0.1 * parts_of(1, seed=1)[0]
    scale = np.array([1.0, 10.0, 0.1, 5.0])
    found = fit_weights(parts * scale[:, None, None], 7 * outputs + 3, PRIOR / scale)
    np.testing.assert_allclose(found * scale, fit_weights(parts, outputs, PRIOR), rtol=1e-6, atol=1e-9)


def test_parts_that_never_change_keep_their_weight_and_targets_that_never_change_do_not_count():
    parts = parts_of()
    parts[2] = 3.0
    assert fit_weights(parts, parts[0], PRIOR)[2] == PRIOR[2]
    parts = parts_of()
    outputs = parts[0] + 0.5 * parts[2]
    dead, others = outputs.copy(), np.delete(np.arange(20), 5)
    dead[:, 5] = 1.0
    alive = fit_weights(parts[:, :, others], outputs[:, others], PRIOR)
    np.testing.assert_allclose(fit_weights(parts, dead, PRIOR), alive)


ONES = np.ones((30, 20))
NOTHING_VARIES = "For every target, the outputs or the default predictions are the same for all subsets"


@pytest.mark.parametrize(
    ("given", "across", "said"),
    [
        ((parts_of(num_subsets=2), ONES[:2]), "subsets", "at least 3 subsets, got 2"),
        ((parts_of(), ONES), "subsets", NOTHING_VARIES),
        ((parts_of(num_targets=1), parts_of()[0, :, :1]), "targets", "needs at least 2 targets"),
    ],
)
def test_what_means_nothing_is_refused(given, across, said):
    with pytest.raises(InvalidInputError, match=said):
        fit_weights(*given, PRIOR, across=across)
