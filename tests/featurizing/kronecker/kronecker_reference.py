"""EK-FAC and K-FAC of a plain feed-forward model as slow, obvious loops in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.featurizing.kronecker.curvature import KroneckerCurvature
from trak_lite.featurizing.kronecker.fit import fit_curvature
from trak_lite.featurizing.kronecker.precondition import PreconditionedProjector, Preconditioner
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import AbstractModelOutput, resolve_task
from trak_lite.projectors import AbstractProjector, NoOpProjector

Batches = Callable[[], Iterable[tuple[NDArray[np.int64], tuple[Tensor, ...]]]]


def batches_of(*data: Tensor, size: int = 4, order: Iterable[int] | None = None) -> Batches:
    """Return what gives these rows in batches, in this order."""
    rows = np.arange(len(data[0])) if order is None else np.array(list(order))

    def batches() -> Iterable[tuple[NDArray[np.int64], tuple[Tensor, ...]]]:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield part, tuple(column[part] for column in data)

    return batches


def fitted(
    model: nn.Module, task: str | AbstractModelOutput, batches: Batches, **settings: object
) -> KroneckerCurvature:
    """Return a curvature fitted with these settings."""
    return fit_curvature(
        model,
        resolve_task(task),
        batches,
        method=EKFAC(**settings),  # type: ignore[arg-type]
    )


def preconditioned(
    model: nn.Module,
    task: str | AbstractModelOutput,
    batch: tuple[Tensor, ...],
    curvature: KroneckerCurvature,
    damping: float,
    projector: AbstractProjector | None = None,
) -> Tensor:
    """Return the gradients of a batch times the inverse curvature, projected; ``(B, P)`` by default."""
    computer = HookGradientComputer(model, resolve_task(task))
    wrapped = PreconditionedProjector(
        projector or NoOpProjector(), Preconditioner(curvature, damping=damping)
    )
    accumulator = wrapped.accumulator(len(batch[0]), model_id=0, parameters=computer.parameters)
    computer.stream_gradients(batch, accumulator.add)
    return accumulator.features()


def gradients(model: nn.Module, outputs: Tensor) -> NDArray[np.float64]:
    """Return the gradient ``(B, P)`` of each of the outputs by one backward pass each."""
    rows = []
    for output in outputs:
        found = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([grad.flatten() for grad in found]).numpy())
    return np.stack(rows)


def damped_solve(
    matrix: NDArray[np.float64], right: NDArray[np.float64], damping: float
) -> NDArray[np.float64]:
    """Return ``(H + damping * mean eigenvalue * I)^-1 right^T`` as rows."""
    size = len(matrix)
    damped = matrix + damping * np.trace(matrix) / size * np.eye(size)
    return np.linalg.solve(damped, right.T).T


def ekfac(
    grads: NDArray[np.float64],
    inputs: NDArray[np.float64],
    output_grads: NDArray[np.float64],
    *,
    corrected: bool,
) -> NDArray[np.float64]:
    """Return the dense curvature of one linear layer, row-major over ``(d_out, d_in)``.

    Args:
        grads: ``(N, d_out, d_in)``.
        inputs: ``(positions, d_in)`` of all rows.
        output_grads: ``(positions, d_out)``.
        corrected: EK-FAC; else K-FAC.
    """
    in_values, in_vectors = np.linalg.eigh(inputs.T @ inputs)
    out_values, out_vectors = np.linalg.eigh(output_grads.T @ output_grads)
    values = np.outer(out_values, in_values) / len(inputs)
    if corrected:
        values = sum((out_vectors.T @ grad @ in_vectors) ** 2 for grad in grads)
    basis = np.kron(out_vectors, in_vectors)
    return basis @ np.diag(values.flatten()) @ basis.T
