"""What ``docs/pages/porting.md`` says of other libraries' scores, against their formulas in float64."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.evaluation import spearman
from trak_lite.methods import CG, TracIn

N, M, REGULARIZATION = 200, 60, 1e-2


@pytest.fixture(scope="module")
def trained():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = torch.randn(N + M, 16)
        labels = (inputs @ torch.randn(16, 4) + torch.randn(N + M, 4)).argmax(1)
        model = nn.Linear(16, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-2)
        for _ in range(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[:N]), labels[:N]).backward()
            optimizer.step()
    return model, inputs, labels


def influences(model, inputs, labels):
    """Gradients g of train losses times those of targets, and g (Hessian of the mean loss + regularization)^-1 g."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])

    def loss(values, x, y):
        parts = values.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, weights, x), y)

    x = inputs.double()
    gradients = vmap(grad(lambda v, a, b: loss(v, a[None], b[None])), (None, 0, 0))(flat, x, labels)
    damped = hessian(lambda v: loss(v, x[:N], labels[:N]), flat) + REGULARIZATION * torch.eye(len(flat))
    return gradients[:N] @ gradients[N:].T, gradients[:N] @ torch.linalg.solve(damped, gradients[N:].T)


def test_dattris_example_orders_train_rows_alike(trained):
    """Target by target; positive is helpful in both."""
    model, inputs, labels = trained
    train_set = TensorDataset(inputs[:N], labels[:N])
    attributor = Attributor(model, "image_classification", None, method="Fisher")
    attributor.featurize(train_set)
    scores = attributor.score(TensorDataset(inputs[N:], labels[N:])).numpy()
    expected = influences(model, inputs, labels)[1].numpy()
    correlations = [spearman(scores[:, target], expected[:, target]) for target in range(M)]
    assert np.mean(correlations) > 0.9


def test_scores_of_minus_the_loss_are_those_of_captum_and_dattri(trained):
    """TracIn's of ``TracInCP`` of one checkpoint, those of CG, times N, of ``IFAttributorExplicit``."""
    model, inputs, labels = trained
    train_set, targets = TensorDataset(inputs[:N], labels[:N]), TensorDataset(inputs[N:], labels[N:])

    def minus_loss(model_call, batch):
        return -nn.functional.cross_entropy(model_call(batch[0]), batch[1], reduction="none")

    attributor = Attributor(model, "image_classification", None, projector="none", dtype="float32")
    attributor.featurize(train_set)
    products = attributor.score(targets, task=minus_loss, method=TracIn(learning_rates=[0.05]))
    cg = CG(damping=N * REGULARIZATION, absolute=True, tolerance=1e-6)
    exact = attributor.stream_scores(train_set, targets, task=minus_loss, method=cg)

    expected = [part.numpy() for part in influences(model, inputs, labels)]
    for ours, theirs in zip((products.numpy() / 0.05, N * exact.numpy()), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * abs(theirs).max())
