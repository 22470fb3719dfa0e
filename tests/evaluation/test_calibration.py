"""Calibration weights: found where they are planted, left alone where nothing is to be found."""

import numpy as np
import pytest

from trak_lite.errors import InvalidInputError
from trak_lite.evaluation import calibration
from trak_lite.evaluation.calibration import fit_weights


def parts_of(num_parts=4, num_subsets=30, num_targets=20, seed=0):
    return np.random.default_rng(seed).normal(size=(num_parts, num_subsets, num_targets))


PRIOR = np.array([0.5, 0.5, 0.0, 0.0])


def test_planted_weights_are_found_up_to_their_scale():
    parts = parts_of()
    planted = np.array([0.1, 0.5, 0.3, 0.0])

    # The deviation of each default prediction is divided out, and is about the same for all targets.
    found = fit_weights(parts, np.tensordot(planted, parts, 1), PRIOR)

    np.testing.assert_allclose(found / found.sum(), planted / planted.sum(), atol=0.02)


def test_default_weights_that_are_right_stay_about_the_same():
    parts = parts_of()
    outputs = np.tensordot(PRIOR, parts, 1) + parts_of(1, seed=1)[0]

    np.testing.assert_allclose(fit_weights(parts, outputs, PRIOR), PRIOR, atol=0.1)


def test_weights_do_not_depend_on_the_scale_of_parts_or_outputs():
    parts, outputs = parts_of(), parts_of()[:, ::1][1] + 0.1 * parts_of(1, seed=1)[0]
    scale = np.array([1.0, 10.0, 0.1, 5.0])

    found = fit_weights(parts * scale[:, None, None], 7 * outputs + 3, PRIOR / scale)

    np.testing.assert_allclose(found * scale, fit_weights(parts, outputs, PRIOR), rtol=1e-6, atol=1e-9)


def test_a_part_that_never_changes_keeps_its_weight():
    parts = parts_of()
    parts[2] = 3.0

    assert fit_weights(parts, parts[0], PRIOR)[2] == PRIOR[2]


def test_targets_that_never_change_do_not_count():
    parts = parts_of()
    outputs = parts[0] + 0.5 * parts[2]
    dead = outputs.copy()
    dead[:, 5] = 1.0
    others = np.delete(np.arange(20), 5)

    np.testing.assert_allclose(
        fit_weights(parts, dead, PRIOR), fit_weights(parts[:, :, others], outputs[:, others], PRIOR)
    )


def test_the_path_is_ridge_regression_towards_the_default():
    parts, outputs = parts_of(3, 6, 2), parts_of(1, 6, 2, seed=1)[0]
    prior = np.array([1.0, 0.0, 0.0])
    centred = (parts - parts.mean(axis=1, keepdims=True)).reshape(3, -1).T
    truth = (outputs - outputs.mean(axis=0)).reshape(-1)
    size = np.sqrt((centred**2).mean(axis=0))
    scale = max(centred[:, 0] @ truth / (centred[:, 0] @ centred[:, 0]), 0.05)

    path = calibration._ridge_path(parts, outputs, prior)

    for penalty, found in zip(calibration._PENALTIES[:-1], path, strict=False):
        stacked = np.vstack([centred / size, np.sqrt(penalty * len(truth)) * np.eye(3)])
        residual = np.concatenate([truth - centred @ (scale * prior), np.zeros(3)])
        correction = np.linalg.lstsq(stacked, residual, rcond=None)[0] / size
        np.testing.assert_allclose(found, scale * prior + correction, atol=1e-10)
    np.testing.assert_array_equal(path[-1], scale * prior)


@pytest.mark.parametrize(
    ("outputs", "seen"),
    [
        (np.ones((2, 20)), "at least 3 subsets, got 2"),
        (
            np.ones((30, 20)),
            "For every target, the outputs or the default predictions are the same for all subsets",
        ),
    ],
)
def test_what_cannot_be_calibrated_on_is_refused(outputs, seen):
    with pytest.raises(InvalidInputError, match=seen):
        fit_weights(parts_of(num_subsets=len(outputs)), outputs, PRIOR)
