"""TRAKer gives the numbers of the original release 0.3.2 when both multiply by the same matrix."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import reference
import torch
from traker_cases import (
    MODELS,
    assert_scores_close,
    checkpoints,
    injected,
    make_model,
    make_original,
    make_traker,
    matrix,
    num_kept,
    original,
    run,
    target_batch,
    train_batch,
)

import trak_lite.projectors
from trak_lite.gradient_computers import IterativeGradientComputer

LAMBDAS = [0.0, 0.1]
PROJECTORS = ["dense", "none"]
GRAD_WRT = ["all", "some"]


def settings(name, projector, grad_wrt, lambda_reg):
    """Return what the original is made with, and what ours is made with."""
    kept = MODELS[name][2] if grad_wrt == "some" else None
    num_params = num_kept(make_model(name), kept)
    made = []
    for package in (original(), trak_lite):
        base = package.projectors
        projected = injected(base.AbstractProjector, num_params)
        chosen = projected if projector == "dense" else base.NoOpProjector(device="cpu")
        made.append(
            {"model": make_model(name), "projector": chosen, "grad_wrt": kept, "lambda_reg": lambda_reg}
        )
    return made[0], made[1]


def expected_scores(name, projector, grad_wrt, lambda_reg, *, num_checkpoints=3):
    """Return the scores by plain loops in float64."""
    kept = MODELS[name][2] if grad_wrt == "some" else None
    train_gradients, target_gradients, q, matrices = [], [], [], []
    for model_id, state in enumerate(checkpoints(name, num_checkpoints)):
        model = copy.deepcopy(make_model(name))
        model.load_state_dict(state)
        model = model.double().requires_grad_(True)
        names = [key for key, _ in model.named_parameters() if kept is None or key in kept]

        def margin(model, sample):
            return reference.margin(model(sample[0]), sample[1])

        for found, batch in ((train_gradients, train_batch(name)), (target_gradients, target_batch(name))):
            samples = reference.samples_of((batch[0].double(), batch[1]))
            found.append(reference.flatten(reference.per_sample_gradients(model, margin, samples, names)))
        inputs, labels = train_batch(name)
        q.append(reference.out_to_loss_grad(model(inputs.double()), labels))
        width = train_gradients[0].shape[1]
        dense = projector == "dense"
        matrices.append(matrix(width, model_id).double().numpy() if dense else np.eye(width))
    return reference.trak_scores(train_gradients, q, target_gradients, matrices, lambda_reg=lambda_reg)


@pytest.mark.parametrize("lambda_reg", LAMBDAS)
@pytest.mark.parametrize("grad_wrt", GRAD_WRT)
@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("name", MODELS)
def test_three_checkpoints_score_as_with_the_original_and_by_plain_loops(
    tmp_path, name, projector, grad_wrt, lambda_reg
):
    """With a float64 model what is left is the rounding of the features to float32."""
    theirs, ours = settings(name, projector, grad_wrt, lambda_reg)
    scores = run(make_traker(tmp_path / "ours", **ours), name)
    ours["model"].double()
    fine = run(make_traker(tmp_path / "fine", **ours), name, dtype=torch.float64)

    assert_scores_close(scores, run(make_original(tmp_path / "original", **theirs), name), rtol=1e-4)
    assert_scores_close(fine, expected_scores(name, projector, grad_wrt, lambda_reg), rtol=1e-5)


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("name", MODELS)
def test_iterative_computers_score_as_with_the_original(tmp_path, name, projector):
    """Where the original's works: every parameter kept, and none of them frozen."""
    theirs, ours = settings(name, projector, "all", 0.1)
    task = "iterative_image_classification"
    for made in (theirs, ours):
        made["model"].requires_grad_(True)
        made["task"] = task
    theirs["gradient_computer"] = original().gradient_computers.IterativeGradientComputer
    ours["gradient_computer"] = IterativeGradientComputer

    expected = run(make_original(tmp_path / "original", **theirs), name)
    scores = run(make_traker(tmp_path / "ours", **ours), name)

    assert_scores_close(scores, expected, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_scores_agree_to_float16(tmp_path, name):
    """Both store float16; ours multiplies it in float64, so it is nearer to the truth than the original is."""
    theirs, ours = settings(name, "dense", "all", 0.1)

    rough = run(make_original(tmp_path / "original", use_half_precision=True, **theirs), name)
    scores = run(make_traker(tmp_path / "ours", use_half_precision=True, **ours), name)

    exact = expected_scores(name, "dense", "all", 0.1)
    assert_scores_close(scores, exact, rtol=2e-3)
    largest = np.abs(exact).max()
    np.testing.assert_allclose(scores, rough.astype(np.float64), rtol=0, atol=2e-2 * largest)
    assert np.abs(scores - exact).max() < np.abs(rough - exact).max()
