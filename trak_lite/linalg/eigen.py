"""Eigendecompositions of gram matrices, which solve for the targets at many lambdas.

Shapes: M targets, K feature width, k columns of one segment, L dampings.
Numerics: as in :mod:`trak_lite.linalg.kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trak_lite.core.devices import eigh_of_positive
from trak_lite.core.validate import real_at_least
from trak_lite.errors import SingularKernelError
from trak_lite.linalg.gram import check_rows
from trak_lite.linalg.kernel import (
    KernelSettings,
    check_widths,
    matching_rows,
    mean_eigenvalues,
    noise_floor,
)
from trak_lite.types import FeatureLayout

__all__ = ["EigenKernel", "eigenpath", "eigenpath_segments", "precondition_path"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class EigenKernel:
    """Eigendecomposition of one segment's kernel, usable for every lambda."""

    eigenvalues: Tensor
    """``(k,)`` ascending."""
    eigenvectors: Tensor
    """``(k, k)``, one per column."""

    @property
    def width(self) -> int:
        """Number of columns k."""
        return self.eigenvectors.shape[0]

    @property
    def mean_eigenvalue(self) -> float:
        """``trace(H) / k``, the unit of a relative damping."""
        return float(self.eigenvalues.mean())

    @torch.no_grad()
    def solve(self, targets: Tensor, lambda_reg: float) -> Tensor:
        """Return ``(H + lambda I)^-1 t`` for each row t.

        Args:
            targets: ``(M, k)`` of any floating dtype.
            lambda_reg: Absolute lambda, in units of a squared feature.

        Returns:
            ``(M, k)`` in the eigenvectors' dtype.

        Raises:
            InvalidInputError: If the width is not k, the dtype is not floating, or lambda is negative.
            SingularKernelError: If the smallest damped eigenvalue is rounding noise.
        """
        lambda_reg = real_at_least(0.0, lambda_reg=lambda_reg)
        rows = matching_rows(targets, self.width, self.eigenvectors)
        damped = self.eigenvalues + lambda_reg
        smallest, largest = float(damped[0]), float(damped[-1])
        if smallest <= noise_floor(damped) * largest:
            raise SingularKernelError(
                f"The kernel of width {self.width} is numerically singular at lambda = {lambda_reg:g}: "
                f"its damped eigenvalues run from {smallest:.3g} to {largest:.3g}. "
                f"Use a larger lambda (the mean eigenvalue is {self.mean_eigenvalue:.3g})."
            )
        return ((rows @ self.eigenvectors) / damped) @ self.eigenvectors.T


@torch.no_grad()
def eigenpath(gram: Tensor, *, segment: str = "joint") -> EigenKernel:
    """Return the eigendecomposition of one segment's gram matrix, for solves with many lambdas.

    Args:
        gram: ``(k, k)`` symmetric, as :func:`gram` returns it; not changed.
        segment: Name for messages.

    Raises:
        SingularKernelError: If the gram matrix is zero.
        NonFiniteError: If the gram matrix holds NaN or an infinite value.
        InvalidInputError: If it is not a square floating matrix.
    """
    mean_eigenvalues([gram], [segment])
    return EigenKernel(*eigh_of_positive(gram))


@torch.no_grad()
def eigenpath_segments(grams: Sequence[Tensor], *, layout: FeatureLayout) -> list[EigenKernel]:
    """Return the eigendecompositions of all segments' gram matrices.

    If some but not all gram matrices vanish, their decompositions have no eigenvalues and the segments add nothing to
    any score, as in :func:`factorise_segments`.

    Raises:
        SingularKernelError: If all gram matrices are zero.
        NonFiniteError: If a gram matrix holds NaN or an infinite value; names the segment.
        InvalidInputError: If the matrices do not fit the layout.
    """
    check_widths([matrix.shape[-1] for matrix in grams], layout, what="gram matrices")
    means = mean_eigenvalues(grams, [segment.name for segment in layout.segments])
    return [
        EigenKernel(*eigh_of_positive(matrix))
        if mean > 0.0
        else EigenKernel(matrix.new_zeros(0), matrix.new_zeros(segment.width, 0))
        for matrix, mean, segment in zip(grams, means, layout.segments, strict=True)
    ]


@torch.no_grad()
def precondition_path(
    targets: Tensor,
    kernels: Sequence[EigenKernel],
    dampings: Sequence[float | None],
    *,
    layout: FeatureLayout,
    num_rows: int,
    settings: KernelSettings | None = None,
) -> Tensor:
    """Return the targets multiplied by (H + lambda I)^-1 for every damping.

    Args:
        targets: ``(M, K)`` target features of any floating dtype.
        kernels: One decomposition per segment.
        dampings: L lambdas in units of each segment's mean eigenvalue; ``None`` is the default damping.
        layout: The segments.
        num_rows: N, rows that the gram matrices were summed over.
        settings: Weighting of the kernels, which sets the default damping; ``None`` for the default settings.

    Returns:
        ``(L, M, K)`` in the kernels' dtype; ``[l]`` is the result of :func:`precondition` at ``dampings[l]``.

    Raises:
        InvalidInputError: If targets or kernels do not fit the layout, or a damping is negative.
        SingularKernelError: If a kernel is numerically singular at a damping.
    """
    settings = KernelSettings() if settings is None else settings
    check_rows(targets, layout)
    check_widths([kernel.width for kernel in kernels], layout)
    first = kernels[0].eigenvectors
    result = torch.zeros(len(dampings), *targets.shape, dtype=first.dtype, device=first.device)
    for segment, kernel in zip(layout.segments, kernels, strict=True):
        if not len(kernel.eigenvalues):
            continue
        columns = targets[:, segment.start : segment.stop]
        for solved, damping in zip(result, dampings, strict=True):
            if damping is None:
                squares = float(kernel.eigenvalues.square().sum())
                lambda_reg = settings.default_lambda(squares, width=kernel.width, num_rows=num_rows)
            else:
                lambda_reg = real_at_least(0.0, damping=damping) * kernel.mean_eigenvalue
            solved[:, segment.start : segment.stop] = kernel.solve(columns, lambda_reg)
    return result
