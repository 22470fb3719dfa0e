"""The reference itself, against closed forms that need no code at all."""

import numpy as np
import reference
import torch
from torch import nn


def test_the_gradient_of_a_linear_output_is_its_input():
    model = nn.Linear(3, 1).double()
    inputs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    grads = reference.per_sample_gradients(
        model, lambda model, batch: model(batch[0])[:, 0], reference.samples_of((inputs,)), ["weight", "bias"]
    )

    np.testing.assert_allclose(grads["weight"][:, 0], inputs.numpy(), rtol=1e-14)
    np.testing.assert_array_equal(grads["bias"], np.ones((4, 1)))


def test_an_unused_parameter_has_zero_gradient():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})

    grads = reference.per_sample_gradients(
        model,
        lambda model, batch: model["used"](batch["x"])[:, 0],
        reference.samples_of({"x": torch.ones(3, 2)}),
        ["unused.weight"],
    )

    np.testing.assert_array_equal(grads["unused.weight"], np.zeros((3, 1, 2)))


def test_features_of_identity_matrices_are_the_sum_over_parameters():
    grads = {"a": np.arange(4.0).reshape(2, 2), "b": np.ones((2, 1, 2))}

    rows = reference.features(grads, {"a": np.eye(2), "b": np.eye(2)})

    np.testing.assert_array_equal(rows, [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(reference.flatten(grads), [[0, 1, 1, 1], [2, 3, 1, 1]])


def test_two_equal_logits_have_margin_zero_and_half_probability():
    logits, labels = torch.zeros(1, 2), torch.tensor([1])

    assert reference.margin(logits, labels).item() == 0.0
    assert reference.out_to_loss_grad(logits, labels).item() == 0.5
    assert reference.loss_curvature(logits, labels).item() == 0.25


def test_q_and_w_are_derivatives_of_cross_entropy_along_the_margin():
    """For a margin f the loss is log(1 + exp(-f)), so q = -dL/df and w = d2L/df2 can be differentiated."""
    logits = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 0])
    f = reference.margin(logits, labels).requires_grad_()
    loss = nn.functional.softplus(-f)

    (first,) = torch.autograd.grad(loss.sum(), f, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), f)

    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(loss.detach().numpy(), losses.numpy(), rtol=1e-12)
    np.testing.assert_allclose(
        reference.out_to_loss_grad(logits, labels), -first.detach().numpy(), rtol=1e-12
    )
    np.testing.assert_allclose(reference.loss_curvature(logits, labels), second.numpy(), rtol=1e-12)


def test_one_feature_scores_by_hand():
    """phi = (1, 2), w = (1, .5): H = 3, lambda = 1 mean eigenvalue = 3 (damping=1), so a score is phi * t / 6 * q."""
    scores = reference.kernel_scores(
        [np.array([[1.0], [2.0]])],
        [np.array([0.5, 0.25])],
        [np.array([1.0, 0.5])],
        [np.array([[6.0], [12.0]])],
        segments=[(0, 1)],
        damping=1.0,
    )

    np.testing.assert_allclose(scores, [[0.5, 1.0], [0.5, 1.0]], rtol=1e-15)


def test_trak_scores_do_not_depend_on_the_scale_of_a_kernel_inverse():
    """One feature: the rescaled inverse is 1, so scores are products of features over P."""
    scores = reference.trak_scores(
        [np.array([[1.0, 1.0], [2.0, 0.0]])],
        [np.array([1.0, 0.5])],
        [np.array([[3.0, 1.0]])],
        [np.array([[1.0], [1.0]])],
        lambda_reg=0.1,
    )

    np.testing.assert_allclose(scores, [[4.0], [2.0]], rtol=1e-14)


def test_top_k_puts_the_lower_of_equal_rows_first():
    scores = np.array([[1.0], [3.0], [3.0], [0.0]])

    rows, values = reference.top_k(scores, 3)

    np.testing.assert_array_equal(rows, [[1, 2, 0]])
    np.testing.assert_array_equal(values, [[3.0, 3.0, 1.0]])
    np.testing.assert_array_equal(reference.top_k(scores, 2, sign="harmful")[0], [[3, 0]])
