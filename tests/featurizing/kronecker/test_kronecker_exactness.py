"""Fitted curvatures against dense matrices and plain loops, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kronecker_reference import (
    batches_of,
    damped_solve,
    ekfac,
    fitted,
    gradients,
    preconditioned,
)
from torch import Tensor, nn
from torch.nn import functional

from trak_lite.featurizing.kronecker.fit import fit_curvature
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import (
    CallableModelOutput,
    ImageClassificationModelOutput,
    ModelCall,
    RegressionModelOutput,
)
from trak_lite.projectors import CountSketchProjector

pytestmark = pytest.mark.quick

DOUBLE = torch.float64


class Bilinear(nn.Module):
    """``g^T W a``: the gradient of W is the outer product of two parts of the sample."""

    def __init__(self, d_out: int, d_in: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d_in, d_out, bias=False, dtype=DOUBLE)

    def forward(self, a: Tensor, g: Tensor) -> Tensor:
        return (self.layer(a) * g).sum(1)


def forward(call: ModelCall, batch: tuple[Tensor, ...]) -> Tensor:
    return call(*batch)


BILINEAR = CallableModelOutput(forward)
LABELS = "image_classification"


def mlp(generator: torch.Generator) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(DOUBLE)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=DOUBLE)
    return model.eval()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@given(
    d_in=st.integers(1, 6),
    count=st.integers(2, 12),
    damping=st.sampled_from([0.01, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_a_layer_with_one_output_has_the_dense_gauss_newton_solve(
    d_in: int, count: int, damping: float, seed: int
) -> None:
    """With one output the second factor is a number: Kronecker structure is exact, bias included."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(d_in, 1, dtype=DOUBLE)
    x, y, targets = (
        torch.randn(n, d, generator=generator, dtype=DOUBLE)
        for n, d in ((count, d_in), (count, 1), (3, d_in))
    )
    rows = np.concatenate([x.numpy(), np.ones((count, 1))], 1)
    right = np.concatenate([targets.numpy(), np.ones((3, 1))], 1)

    curvature = fitted(model, RegressionModelOutput(), batches_of(x, y), fisher="curvature")
    found = preconditioned(model, RegressionModelOutput(), (targets, torch.zeros(3, 1)), curvature, damping)

    np.testing.assert_allclose(found, damped_solve(rows.T @ rows, right, damping), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("corrected", [True, False])
def test_independent_factors_give_the_dense_solve(generator: torch.Generator, corrected: bool) -> None:
    """Where every input meets every output gradient, the second moment is exactly a Kronecker product."""
    inputs, grads = (torch.randn(n, d, generator=generator, dtype=DOUBLE) for n, d in ((6, 4), (5, 3)))
    a, g = inputs.repeat_interleave(5, 0), grads.repeat(6, 1)
    model = Bilinear(3, 4)
    outer = np.einsum("no,ni->noi", g.numpy(), a.numpy()).reshape(30, -1)

    curvature = fitted(model, BILINEAR, batches_of(a, g, size=7), correct_eigenvalues=corrected)
    found = preconditioned(model, BILINEAR, (a[:4], g[:4]), curvature, 0.3)

    np.testing.assert_allclose(found, damped_solve(outer.T @ outer, outer[:4], 0.3), rtol=1e-8)


@pytest.mark.parametrize("corrected", [True, False])
def test_layers_equal_plain_loops(generator: torch.Generator, corrected: bool) -> None:
    model = mlp(generator)
    x = torch.randn(9, 5, generator=generator, dtype=DOUBLE)
    y = torch.randint(3, (9,), generator=generator)
    first = model[0](x)
    second = model[2](torch.tanh(first))
    losses = functional.cross_entropy(second, y, reduction="none")
    margins = gradients(model, -torch.log(torch.expm1(losses)))  # log(p / (1 - p)) of the label
    g1, g2 = (grad.numpy() for grad in torch.autograd.grad(losses.sum(), [first, second]))
    inputs = (x, torch.tanh(first).detach())
    a1, a2 = (np.concatenate([rows.numpy(), np.ones((9, 1))], 1) for rows in inputs)
    blocks = []
    column = 0
    for a, g in ((a1, g1), (a2, g2)):
        dense = ekfac(np.einsum("no,ni->noi", g, a), a, g, corrected=corrected)
        width, out = a.shape[1], g.shape[1]
        size = width * out
        weight = margins[:, column : column + size - out].reshape(9, out, width - 1)
        bias = margins[:, column + size - out : column + size].reshape(9, out, 1)
        joint = damped_solve(dense, np.concatenate([weight, bias], 2).reshape(9, -1), 0.1).reshape(
            9, out, width
        )
        blocks += [joint[:, :, :-1].reshape(9, -1), joint[:, :, -1]]
        column += size
    expected = np.concatenate(blocks, 1)

    curvature = fitted(model, LABELS, batches_of(x, y), fisher="empirical", correct_eigenvalues=corrected)

    np.testing.assert_allclose(preconditioned(model, LABELS, (x, y), curvature, 0.1), expected, rtol=1e-6)


class Patches(nn.Module):
    """A convolution written as a linear layer on unfolded patches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(functional.unfold(x, 3, padding=1, stride=2).transpose(1, 2)).square().sum(1)


class Convolved(nn.Module):
    """The same as a convolution."""

    def __init__(self, twin: Patches) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3, padding=1, stride=2)
        self.layer.weight.data = twin.layer.weight.data.reshape(3, 2, 3, 3).clone()
        self.layer.bias.data = twin.layer.bias.data.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(2).square().sum(2)


@pytest.mark.parametrize("corrected", [True, False])
def test_a_convolution_equals_a_linear_layer_on_its_patches(
    generator: torch.Generator, corrected: bool
) -> None:
    twin = Patches().to(DOUBLE)
    conv = Convolved(twin).to(DOUBLE)
    x = torch.randn(7, 2, 5, 5, generator=generator, dtype=DOUBLE)
    y = torch.randint(3, (7,), generator=generator)

    found = [
        preconditioned(
            model,
            LABELS,
            (x, y),
            fitted(model, LABELS, batches_of(x, y, size=3), fisher="sampled", correct_eigenvalues=corrected),
            0.1,
        )
        for model in (conv, twin)
    ]

    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


@given(order=st.permutations(range(10)), size=st.integers(1, 10))
@settings(max_examples=10, deadline=None)
def test_a_fit_does_not_depend_on_batches_or_order(order: list[int], size: int) -> None:
    """Drawn labels included: they belong to the row, not to the batch."""
    generator = torch.Generator().manual_seed(3)
    model = mlp(generator)
    x = torch.randn(10, 5, generator=generator, dtype=DOUBLE)
    y = torch.zeros(10, dtype=torch.long)
    plain = fitted(model, LABELS, batches_of(x, y, size=10), fisher="sampled", draws=2)

    other = fitted(model, LABELS, batches_of(x, y, size=size, order=order), fisher="sampled", draws=2)

    torch.testing.assert_close(
        preconditioned(model, LABELS, (x, y), other, 0.1),
        preconditioned(model, LABELS, (x, y), plain, 0.1),
        rtol=1e-6,
        atol=1e-9,
    )


def test_features_are_projections_of_the_preconditioned_gradients(generator: torch.Generator) -> None:
    model = mlp(generator)
    x = torch.randn(6, 5, generator=generator, dtype=DOUBLE)
    y = torch.randint(3, (6,), generator=generator)
    curvature = fitted(model, LABELS, batches_of(x, y))
    whole = preconditioned(model, LABELS, (x, y), curvature, 0.1)
    sizes = [p.numel() for p in model.parameters()]
    named = {
        name: part.reshape(6, *p.shape)
        for (name, p), part in zip(model.named_parameters(), whole.split(sizes, 1), strict=True)
    }
    projector = CountSketchProjector(16)

    found = preconditioned(model, LABELS, (x, y), curvature, 0.1, projector)

    torch.testing.assert_close(found, projector.project(named, 0), rtol=1e-6, atol=1e-7)


def test_rows_beyond_those_fitted_on_are_counted(generator: torch.Generator) -> None:
    model = mlp(generator)
    x = torch.randn(4, 5, generator=generator, dtype=DOUBLE)
    y = torch.randint(3, (4,), generator=generator)
    part, whole = (
        fit_curvature(
            model,
            ImageClassificationModelOutput(),
            batches_of(x, y),
            method=EKFAC(fisher="empirical"),
            num_rows=count,
        )
        for count in (None, 12)
    )

    torch.testing.assert_close(whole.units[0].values, 3 * part.units[0].values)
