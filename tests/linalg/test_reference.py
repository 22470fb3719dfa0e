"""The reference itself, against closed forms that need no code at all."""

import numpy as np
import reference
import torch
from torch import nn


def test_the_gradient_of_a_linear_output_is_its_input_and_of_an_unused_parameter_zero():
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)}).double()
    inputs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names = ["used.weight", "used.bias", "unused.weight"]
    for batch, read in (((inputs,), lambda batch: batch[0]), ({"x": inputs}, lambda batch: batch["x"])):
        grads = reference.per_sample_gradients(
            model,
            lambda model, batch, read=read: model["used"](read(batch))[:, 0],
            reference.samples_of(batch),
            names,
        )
        np.testing.assert_allclose(grads["used.weight"][:, 0], inputs.numpy(), rtol=1e-14)
        np.testing.assert_array_equal(grads["used.bias"], np.ones((4, 1)))
        np.testing.assert_array_equal(grads["unused.weight"], np.zeros((4, 1, 3)))


def test_features_of_identity_matrices_are_the_sum_over_parameters():
    grads = {"a": np.arange(4.0).reshape(2, 2), "b": np.ones((2, 1, 2))}
    rows = reference.features(grads, {"a": np.eye(2), "b": np.eye(2)})
    np.testing.assert_array_equal(rows, [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(reference.flatten(grads), [[0, 1, 1, 1], [2, 3, 1, 1]])


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
    q = reference.out_to_loss_grad(logits, labels)
    np.testing.assert_allclose(q, -first.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(reference.loss_curvature(logits, labels), second.numpy(), rtol=1e-12)
    equal = torch.zeros(1, 2), torch.tensor([1])
    assert reference.margin(*equal).item() == 0.0
    assert reference.out_to_loss_grad(*equal).item() == 0.5
    assert reference.loss_curvature(*equal).item() == 0.25


def test_scores_of_one_feature_by_hand():
    """phi = (1, 2), w = (1, .5): H = 3, lambda = 1 mean eigenvalue = 3 (damping=1), so a score is phi * t / 6 * q.

    With the rescaled inverse, which is 1, scores are products of features over P, whatever the kernel.
    """
    arrays = [[1.0], [2.0]], [0.5, 0.25], [1.0, 0.5], [[6.0], [12.0]]
    scores = reference.kernel_scores(*([np.array(x)] for x in arrays), segments=[(0, 1)], damping=1.0)
    np.testing.assert_allclose(scores, [[0.5, 1.0], [0.5, 1.0]], rtol=1e-15)
    arrays = [[1.0, 1.0], [2.0, 0.0]], [1.0, 0.5], [[3.0, 1.0]], [[1.0], [1.0]]
    scores = reference.trak_scores(*([np.array(x)] for x in arrays), lambda_reg=0.1)
    np.testing.assert_allclose(scores, [[4.0], [2.0]], rtol=1e-14)


def test_top_k_puts_the_lower_of_equal_rows_first():
    scores = np.array([[1.0], [3.0], [3.0], [0.0]])
    rows, values = reference.top_k(scores, 3)
    np.testing.assert_array_equal(rows, [[1, 2, 0]])
    np.testing.assert_array_equal(values, [[3.0, 3.0, 1.0]])
    np.testing.assert_array_equal(reference.top_k(scores, 2, sign="harmful")[0], [[3, 0]])
