"""TRAKer has the scores of the paper's formulas by plain loops; that they are those of the original, goldens hold."""

from __future__ import annotations

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
    make_traker,
    matrix,
    num_kept,
    run,
    target_batch,
    train_batch,
)

from trak_lite.gradient_computers import IterativeGradientComputer
from trak_lite.projectors import AbstractProjector, NoOpProjector


def expected_scores(name, projector, kept, lambda_reg):
    """Return the scores of three checkpoints by plain loops in float64."""
    train_gradients, target_gradients, q, matrices = [], [], [], []
    for model_id, state in enumerate(checkpoints(name)):
        model = make_model(name)
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


ITERATIVE = {"gradient_computer": IterativeGradientComputer, "task": "iterative_image_classification"}


@pytest.mark.parametrize(
    ("grad_wrt", "lambda_reg", "changes", "rtol"),
    [
        *((grad_wrt, lambda_reg, {}, 1e-4) for grad_wrt in ("all", "some") for lambda_reg in (0.0, 0.1)),
        ("all", 0.1, ITERATIVE, 1e-4),
        ("all", 0.1, {"use_half_precision": True}, 2e-3),
    ],
    ids=["all-0", "all-0.1", "some-0", "some-0.1", "iterative", "float16"],
)
@pytest.mark.parametrize("projector", ["dense", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_three_checkpoints_score_as_by_plain_loops(
    tmp_path, name, projector, grad_wrt, lambda_reg, changes, rtol
):
    """With a float64 model what is left is the rounding of the features to float32."""
    kept = MODELS[name][2] if grad_wrt == "some" else None
    model = make_model(name)
    if changes is ITERATIVE:  # the original's refuses frozen parameters
        model.requires_grad_(True)
    dense = injected(AbstractProjector, num_kept(model, kept))
    ours = {"model": model, "grad_wrt": kept, "lambda_reg": lambda_reg, **changes}
    ours["projector"] = dense if projector == "dense" else NoOpProjector(device="cpu")
    expected = expected_scores(name, projector, kept, lambda_reg)

    assert_scores_close(run(make_traker(tmp_path / "ours", **ours), name), expected, rtol=rtol)
    if not changes:
        model.double()
        fine = run(make_traker(tmp_path / "fine", **ours), name, dtype=torch.float64)
        assert_scores_close(fine, expected, rtol=1e-5)
