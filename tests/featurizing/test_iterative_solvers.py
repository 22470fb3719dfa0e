"""CG and LiSSA against dense solves with a Gauss-Newton matrix of autograd's Jacobians, in float64."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import labelled
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Refine, Rows
from trak_lite.data.datasets import rows_of
from trak_lite.errors import InvalidInputError, NonFiniteError, StateError, UnsupportedModelError
from trak_lite.featurizing.gauss_newton import FisherProducts, GaussNewtonProducts
from trak_lite.featurizing.solvers import conjugate_gradients, largest_eigenvalue
from trak_lite.methods import CG, EKFAC, LiSSA
from trak_lite.modelout_functions import resolve_task

N, M = 30, 4
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)


def doubled(data: TensorDataset) -> TensorDataset:
    return TensorDataset(*(part.double() if part.is_floating_point() else part for part in data.tensors))


class Normalized(nn.Module):
    """Layers with buffers, one frozen parameter and one that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)) + self.frozen)
        return self.last(torch.tanh(self.second(torch.tanh(self.second(hidden)))))


class Attention(nn.Module):
    """Tied embedding and fused attention, whose kernels have no forward-mode derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 12)

    def forward(self, ids: Tensor) -> Any:
        q, k, v = self.inner(self.table(ids)).chunk(3, -1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return {"logits": (self.table(ids) + found) @ self.table.weight.T, "ids": ids}


class OnlyBackward(torch.autograd.Function):
    """x**3 without a forward-mode derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(OnlyBackward.apply(self.first(x)))


def prepared(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make().double()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape) + (0.5 if "var" in name else 0))
    return model.eval()


def kept(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def dense_matrix(model: nn.Module, inputs: Tensor, loss_of: Any) -> Tensor:
    """Sum over rows of J^T H J, with the Jacobian and Hessian of one row at a time, ``(P, P)``."""
    values = kept(model)
    total = 0
    for row in range(len(inputs)):

        def logits(parameters: dict[str, Tensor], row: int = row) -> Tensor:
            out = functional_call(model, parameters, (inputs[row : row + 1],))
            return (out["logits"] if isinstance(out, dict) else out).flatten()

        jacobian = torch.cat([part.flatten(1) for part in jacrev(logits)(values).values()], 1)
        hessian = torch.autograd.functional.hessian(lambda z, row=row: loss_of(z, row), logits(values))
        total = total + jacobian.T @ hessian @ jacobian
    return total


def cross_entropy(labels: Tensor) -> Any:
    return lambda z, row: functional.cross_entropy(z[None], labels[row : row + 1])


def next_token(ids: Tensor) -> Any:
    def loss(z: Tensor, row: int) -> Tensor:
        logits = z.reshape(ids.shape[1], -1)
        return functional.cross_entropy(logits[:-1], ids[row, 1:], reduction="sum")

    return loss


IDS = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(2))
WORDS = TensorDataset(IDS, IDS)
CASES = {
    "buffers": (Normalized, "image_classification", doubled(TRAIN), cross_entropy(TRAIN.tensors[1])),
    "language model": (Attention, "causal_language_modeling", WORDS, next_token(IDS)),
    "no forward mode": (Cubed, "image_classification", doubled(TRAIN), cross_entropy(TRAIN.tensors[1])),
}


def products(name: str, batch_size: int = 7) -> tuple[GaussNewtonProducts, Tensor]:
    make, task, data, loss = CASES[name]
    model = prepared(make)
    shapes = {key: tuple(p.shape) for key, p in kept(model).items()}
    rows = rows_of(data, what="rows", batch_size=batch_size)
    made = GaussNewtonProducts(model, resolve_task(task), rows, shapes, device=torch.device("cpu"))
    return made, dense_matrix(model, data.tensors[0], loss)


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_dense_matrix(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trak_lite"):
        made, matrix = products(name)
        vectors = torch.randn(3, len(matrix), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        found = made(vectors, np.arange(len(CASES[name][2])))

    torch.testing.assert_close(found, vectors @ matrix, rtol=1e-9, atol=1e-9)
    assert ("two backward passes" in caplog.text) == (name == "no forward mode")


def test_many_vectors_go_through_the_model_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trak_lite.featurizing.gauss_newton._TANGENTS", 8)
    made, matrix = products("buffers")
    vectors = torch.randn(3, len(matrix), dtype=torch.float64)

    rows = np.array([3, 4, 11])
    model, data = prepared(Normalized), doubled(TRAIN)
    some = dense_matrix(model, data.tensors[0][rows], cross_entropy(data.tensors[1][rows]))
    torch.testing.assert_close(made(vectors, rows, scale=2.0), 2 * vectors @ some, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["buffers", "language model"])
def test_products_with_drawn_labels_estimate_the_dense_matrix(name: str) -> None:
    make, task, data, loss = CASES[name]
    model = prepared(make)
    matrix = dense_matrix(model, data.tensors[0], loss)
    shapes = {key: tuple(p.shape) for key, p in kept(model).items()}
    rows = rows_of(data, what="rows", batch_size=7)
    vectors = torch.randn(3, len(matrix), dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    errors = []
    for draws in (20, 320):
        made = FisherProducts(
            model, resolve_task(task), rows, shapes, draws=draws, seed=0, device=torch.device("cpu")
        )
        found = made(vectors, np.arange(len(data)))
        errors.append(float((found - vectors @ matrix).norm() / (vectors @ matrix).norm()))
        again = made(vectors[1:2], np.arange(len(data)), scale=2.0)
        torch.testing.assert_close(again, 2 * found[1:2])

    assert errors[1] < 0.2
    assert errors[1] < errors[0] / 2, "the error falls with the root of the draws"


def attributor(model: nn.Module, task: str = "image_classification", **changes: Any) -> Attributor:
    return Attributor(model, task, None, progress=False, **changes)


def margins(model: nn.Module, data: TensorDataset) -> tuple[Tensor, Tensor]:
    """Gradients of the margin ``(n, P)`` and q ``(n,)``, by autograd."""
    rows, q = [], []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for inputs, label in data:
        p = model(inputs[None])[0].softmax(0)[label]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad((p / (1 - p)).log(), parameters)]))
        q.append(1 - p.detach())
    return torch.stack(rows), torch.stack(q)


def exact_scores(model: nn.Module, damping: float, matrix: Tensor) -> np.ndarray:
    train, q = margins(model, doubled(TRAIN))
    targets, _ = margins(model, doubled(TARGETS))
    solved = torch.linalg.solve(matrix + damping * torch.eye(len(matrix), dtype=torch.float64), targets.T)
    return (q[:, None] * (train @ solved)).numpy()


@pytest.mark.quick
def test_cg_is_the_dense_solve_for_every_target() -> None:
    model = prepared(Normalized)
    matrix = dense_matrix(model, doubled(TRAIN).tensors[0], cross_entropy(TRAIN.tensors[1]))
    method = CG(damping=0.5, absolute=True, tolerance=1e-9, max_iterations=500)

    found = attributor(model).stream_scores(
        Rows(doubled(TRAIN), batch_size=8), doubled(TARGETS), method=method
    )

    expected = exact_scores(model, 0.5, matrix)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6 * abs(expected).max())
    (convergence,) = found.convergence
    assert convergence.iterations.shape == convergence.residuals.shape == (M,)
    assert (convergence.residuals <= 1e-9).all()
    assert 1 < convergence.iterations.max() <= 150


def test_lissa_converges_to_the_dense_solve() -> None:
    model = prepared(Normalized)
    matrix = dense_matrix(model, doubled(TRAIN).tensors[0], cross_entropy(TRAIN.tensors[1]))
    expected = exact_scores(model, 5.0, matrix)

    whole = LiSSA(damping=5.0, absolute=True, depth=100, rows=N)
    found = attributor(model).stream_scores(doubled(TRAIN), doubled(TARGETS), method=whole)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5 * abs(expected).max())
    assert found.convergence[0].residuals.max() < 1e-4

    drawn = LiSSA(damping=5.0, absolute=True, depth=100, rows=N // 2, repeats=2)
    found = attributor(model).stream_scores(doubled(TRAIN), doubled(TARGETS), method=drawn)
    assert np.corrcoef(found.numpy().flatten(), expected.flatten())[0, 1] > 0.99


def test_convex_logistic_regression_has_the_exact_influence() -> None:
    """Of the regularised loss: at its minimum the Gauss-Newton matrix is the Hessian."""
    torch.manual_seed(0)
    model, (inputs, labels), decay = nn.Linear(4, 3).double(), doubled(TRAIN).tensors, 0.05

    def loss(flat: Tensor) -> Tensor:
        logits = inputs @ flat[:12].reshape(3, 4).T + flat[12:]
        return functional.cross_entropy(logits, labels, reduction="sum") + N * decay / 2 * flat @ flat

    flat = torch.zeros(15, dtype=torch.float64)
    for _ in range(20):  # Newton's method
        gradient = torch.autograd.functional.jacobian(loss, flat)
        flat = flat - torch.linalg.solve(torch.autograd.functional.hessian(loss, flat), gradient)
    with torch.no_grad():
        model.weight.copy_(flat[:12].reshape(3, 4))
        model.bias.copy_(flat[12:])
    train, q = margins(model, doubled(TRAIN))
    targets, _ = margins(model, doubled(TARGETS))
    hessian = torch.autograd.functional.hessian(loss, flat)
    expected = (q[:, None] * (train @ torch.linalg.solve(hessian, targets.T))).numpy()

    method = CG(damping=N * decay, absolute=True, tolerance=1e-7, max_iterations=100)
    found = attributor(model).stream_scores(doubled(TRAIN), doubled(TARGETS), method=method)

    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


def test_the_damping_has_the_units_of_ekfac() -> None:
    """With much damping both inverses are that of the damping alone."""
    model = prepared(Normalized)
    scores = [
        attributor(model).stream_scores(doubled(TRAIN), doubled(TARGETS), method=method).numpy()
        for method in (EKFAC(damping=1e5), CG(damping=1e5))
    ]

    np.testing.assert_allclose(*scores, rtol=2e-2, atol=1e-3 * abs(scores[0]).max())


def test_what_did_not_converge_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = prepared(Normalized)
    method = CG(damping=1e-3, max_iterations=2, tolerance=1e-8)

    with (
        caplog.at_level(logging.INFO, "trak_lite"),
        pytest.warns(UserWarning, match=r"CG did not converge .* 1e-08 for 4 of 4 targets at current"),
    ):
        found = attributor(model).stream_scores(doubled(TRAIN), doubled(TARGETS), method=method)

    assert "2 to 2 iterations for 4 targets" in caplog.text
    assert (found.convergence[0].residuals > 1e-8).all()
    with pytest.raises(NonFiniteError, match="diverged at scale=1e-06"):
        attributor(model).stream_scores(
            doubled(TRAIN), doubled(TARGETS), method=LiSSA(scale=1e-6, depth=400, rows=N)
        )


def test_scores_of_stored_rows_refine_and_parts_of_targets_agree() -> None:
    model = prepared(Normalized)
    data, targets = doubled(TRAIN), doubled(TARGETS)
    method = CG(damping=0.3, tolerance=1e-6, max_iterations=100)
    made = attributor(model, projector="none", dtype="float32")
    made.featurize(data)

    stored = made.score(Rows(targets, batch_size=3), method=method)
    again = made.score(Rows(targets, batch_size=3), method=method)
    streamed = attributor(model).stream_scores(data, targets, method=method, max_bytes=30_000)
    refined = made.score(targets, refine=Refine(candidates=N, method=method))

    np.testing.assert_array_equal(stored.numpy(), again.numpy())
    small = 1e-4 * abs(stored.numpy()).max()
    np.testing.assert_allclose(streamed.numpy(), stored.numpy(), rtol=1e-3, atol=small)
    np.testing.assert_allclose(refined.numpy(), stored.numpy(), rtol=1e-3, atol=small)
    assert refined.convergence[0].iterations.shape == streamed.convergence[0].iterations.shape == (M,)


def test_stored_targets_are_found_again_without_the_train_data(tmp_path: Path) -> None:
    method = CG(damping=1.0, draws=2)
    made = Attributor(
        prepared(Normalized), "image_classification", tmp_path / "s", proj_dim=8, progress=False
    )
    made.featurize(doubled(TRAIN))
    first = made.score(doubled(TARGETS), method=method).numpy()

    again = Attributor.open(tmp_path / "s", prepared(Normalized))

    np.testing.assert_array_equal(again.scores(method=method).numpy(), first)
    for checkpoints in (None, prepared(Normalized).state_dict()):
        found = again.score(doubled(TARGETS), method=method, checkpoints=checkpoints)
        np.testing.assert_array_equal(found.numpy(), first)
    with pytest.raises(StateError, match="CG has to be fitted to the train data"):
        again.score(doubled(TARGETS), "new", method=method)


def test_cg_with_drawn_labels_is_close_to_cg() -> None:
    model = prepared(Normalized)
    scores = [
        attributor(model).stream_scores(doubled(TRAIN), doubled(TARGETS), method=method).numpy().flatten()
        for method in (CG(damping=3.0, tolerance=1e-4), CG(damping=3.0, tolerance=1e-4, draws=50))
    ]

    assert np.corrcoef(*scores)[0, 1] > 0.97
    with pytest.raises(InvalidInputError, match="fisher='sampled' draws labels"):
        attributor(model, lambda call, batch: call(batch[0])[:, 0]).stream_scores(  # type: ignore[arg-type]
            doubled(TRAIN), doubled(TARGETS), method=CG(draws=1)
        )


def test_some_rows_stand_for_all() -> None:
    model = prepared(Normalized)
    scores = [
        attributor(model)
        .stream_scores(doubled(TRAIN), doubled(TARGETS), method=CG(damping=3.0, max_rows=count))
        .numpy()
        for count in (None, N, 20)
    ]

    np.testing.assert_array_equal(scores[0], scores[1])
    assert 0.9 < np.corrcoef(scores[0].flatten(), scores[2].flatten())[0, 1] < 1


def test_solvers_of_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    matrix = root.T @ root
    right = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    right[1] = 0

    found, convergence = conjugate_gradients(
        lambda v: v @ matrix, lambda v: v / matrix.diagonal(), right, tolerance=1e-10, max_iterations=50
    )
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right.T).T)
    assert convergence.iterations[1] == convergence.residuals[1] == 0
    _, indefinite = conjugate_gradients(lambda v: -v, lambda v: v, right, tolerance=0.1, max_iterations=50)
    assert indefinite.residuals.tolist() == [1, 0, 1]
    largest = largest_eigenvalue(lambda v: v @ matrix, right, iterations=200, seed=0)
    assert largest == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-6)


class Sampled(nn.Module):
    """A model that torch.func cannot transform."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out * float(self.inner.weight.detach().numpy().sum())


def test_models_that_cannot_be_transformed_and_invalid_settings_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedModelError, match=r"Gauss-Newton products of Sampled.*EKFAC"):
            attributor(prepared(Sampled)).stream_scores(doubled(TRAIN), doubled(TARGETS), method=CG())
    for cls, values in (
        (CG, {"damping": 0}),
        (CG, {"tolerance": 0}),
        (CG, {"max_iterations": 0}),
        (LiSSA, {"scale": -1}),
        (LiSSA, {"depth": 0}),
    ):
        with pytest.raises(InvalidInputError, match=next(iter(values))):
            cls(**values)
