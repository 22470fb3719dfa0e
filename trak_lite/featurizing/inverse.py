"""Inverse curvature times unprojected target gradients: by EK-FAC, or by an iterative solver that EK-FAC helps.

Shapes: m targets, P parameter entries.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from trak_lite.data.datasets import spread_rows
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.featurizing.gauss_newton import CurvatureProducts
from trak_lite.featurizing.kronecker.precondition import (
    AbstractPreconditionedProjector,
    PreconditionedProjector,
    Preconditioner,
)
from trak_lite.featurizing.solvers import (
    Convergence,
    conjugate_gradients,
    largest_eigenvalue,
    neumann_series,
    row_norms,
)
from trak_lite.featurizing.unprojected import by_name
from trak_lite.methods import CG, EKFAC, AbstractInverseMethod, LiSSA
from trak_lite.projectors import AbstractProjector, NoOpProjector
from trak_lite.projectors._base import AbstractFeatureAccumulator, project_named
from trak_lite.types import GradientBlock, ParameterShapes

__all__ = ["InverseCurvature", "Solution", "SolvingProjector"]

logger = logging.getLogger(__name__)

_POWER_ITERATIONS = 10
_LISSA_RESIDUAL = 0.1  # relative residual above which LiSSA warns
_MARGIN = 1.5
"""Scale of LiSSA by default, in units of the estimated largest eigenvalue, which power iterations underestimate."""


class Solution(NamedTuple):
    """Target gradients multiplied by the inverse curvature."""

    gradients: Tensor
    """``(m, P)``."""
    convergence: Convergence | None
    """``None`` for EKFAC, which is not iterative."""


@final
class InverseCurvature:
    """The inverse curvature of a method at the loaded checkpoint."""

    def __init__(
        self,
        method: AbstractInverseMethod,
        preconditioner: Preconditioner,
        products: CurvatureProducts,
        parameters: ParameterShapes,
        *,
        num_rows: int,
        device: torch.device,
        label: str,
    ) -> None:
        """Store the arguments.

        Args:
            method: The method.
            preconditioner: The inverse of the method's EK-FAC.
            products: Products with the Gauss-Newton matrix or an estimate; EKFAC does not use them.
            parameters: Shapes of the kept parameters, in model order.
            num_rows: N.
            device: Device of the model.
            label: Name of the checkpoint in messages.
        """
        self._method = method
        self._ekfac = PreconditionedProjector(NoOpProjector(device=device), preconditioner)
        self._lambdas = preconditioner.lambdas
        self._products = products
        self._parameters = parameters
        self._num_rows = num_rows
        self._label = label
        self._scale: float | None = None

    @torch.no_grad()
    def solve(self, gradients: Tensor) -> Solution:
        """Return target gradients ``(m, P)`` multiplied by the inverse.

        Raises:
            NonFiniteError: If LiSSA diverges.
            UnsupportedModelError: If ``torch.func`` cannot transform the model.
        """
        if isinstance(self._method, CG):
            return self._solve_by_cg(self._method, gradients)
        if isinstance(self._method, LiSSA):
            return self._solve_by_lissa(self._method, gradients)
        if not isinstance(self._method, EKFAC):
            raise InvalidInputError(
                f"{self._method.name} is neither EKFAC nor CG nor LiSSA, and no solver is known for it."
            )
        return Solution(self._precondition(gradients), None)

    def _precondition(self, gradients: Tensor) -> Tensor:
        return self._ekfac.project(by_name(gradients, self._parameters), 0)

    def _solve_by_cg(self, method: CG, gradients: Tensor) -> Solution:
        damping, right = self._damping(gradients)
        wanted = spread_rows(self._num_rows, method.max_rows)
        scale = self._num_rows / len(wanted)
        found, convergence = conjugate_gradients(
            lambda vectors: self._products(vectors, wanted, scale=scale) + damping * vectors,
            self._precondition,
            right,
            tolerance=method.tolerance,
            max_iterations=method.max_iterations,
        )
        self._report(convergence, method.tolerance, "max_iterations")
        return Solution(found, convergence)

    def _solve_by_lissa(self, method: LiSSA, gradients: Tensor) -> Solution:
        damping, right = self._damping(gradients)
        everything = np.arange(self._num_rows)

        def whole(vectors: Tensor) -> Tensor:
            return self._products(vectors, everything) + damping * vectors

        if method.scale is None and self._scale is None:
            largest = largest_eigenvalue(whole, gradients, iterations=_POWER_ITERATIONS, seed=method.seed)
            self._scale = _MARGIN * largest
            logger.info("LiSSA, %s: the largest eigenvalue is about %.3g.", self._label, largest)
        scale = method.scale or self._scale or 1.0
        drawn = np.random.default_rng(method.seed)
        count = min(method.rows, self._num_rows)

        def estimated(vectors: Tensor) -> Tensor:
            rows = np.sort(drawn.permutation(self._num_rows)[:count])
            return self._products(vectors, rows, scale=self._num_rows / count) + damping * vectors

        found = torch.zeros_like(right)
        for _ in range(method.repeats):
            found += neumann_series(estimated, right, scale=scale, depth=method.depth) / method.repeats
        if not bool(found.isfinite().all()):
            raise NonFiniteError(
                f"LiSSA diverged at scale={scale:.3g}. Use a larger scale, more rows per step, or CG."
            )
        norms = row_norms(right)
        residual = row_norms(right - whole(found)) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        iterations = np.full(len(right), method.depth * method.repeats)
        convergence = Convergence(iterations, residual.cpu().double().numpy())
        self._report(convergence, _LISSA_RESIDUAL, "depth, rows or scale")
        return Solution(found, convergence)

    def _damping(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return lambda of every parameter entry ``(P,)``, and the gradients where it is above 0.

        Where it is 0 no train row has a gradient, so the entries do not affect scores, and the system is singular.
        """
        parts = [
            gradients.new_full((int(np.prod(shape)),), self._lambdas[name])
            for name, shape in self._parameters.items()
        ]
        damping = torch.cat(parts)
        return damping, torch.where(damping > 0, gradients, 0.0)

    def _report(self, convergence: Convergence, tolerance: float, remedy: str) -> None:
        """Log the iterations and residuals, and warn of targets that did not converge."""
        iterations, residuals = convergence.iterations, convergence.residuals
        name = self._method.name
        logger.info(
            "%s, %s: %d to %d iterations for %d targets; relative residuals: median %.2g, largest %.2g.",
            name,
            self._label,
            iterations.min(),
            iterations.max(),
            len(iterations),
            np.median(residuals),
            residuals.max(),
        )
        missed = ~(residuals <= tolerance)
        if missed.any():
            warnings.warn(
                f"{name} did not converge to a relative residual of {tolerance:g} for {int(missed.sum())} of "
                f"{len(residuals)} targets at {self._label}; the largest is {residuals.max():.2g}. Change {remedy}, or "
                "use more damping.",
                UserWarning,
                stacklevel=2,
            )


@final
class SolvingProjector(AbstractPreconditionedProjector):
    """Collects the gradients of a batch, multiplies them by an inverse curvature, then projects them."""

    def __init__(self, projector: AbstractProjector, inverse: InverseCurvature) -> None:
        """Wrap a projector.

        Args:
            projector: The projector of the train rows.
            inverse: The inverse curvature of the checkpoint.
        """
        super().__init__(projector)
        self._inverse = inverse

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch."""
        whole = NoOpProjector(device=self._projector.device).accumulator(
            num_samples, model_id=model_id, parameters=parameters
        )

        def finish(gradients: Tensor) -> Tensor:
            found = by_name(self._inverse.solve(gradients).gradients, parameters)
            return project_named(self._projector, found, model_id)

        return _SolvingAccumulator(whole, finish)


@final
class _SolvingAccumulator(AbstractFeatureAccumulator):
    """Passes the whole gradients of a batch to a function."""

    def __init__(self, whole: AbstractFeatureAccumulator, finish: Callable[[Tensor], Tensor]) -> None:
        self._whole = whole
        self._finish = finish

    def add(self, block: GradientBlock) -> None:
        self._whole.add(block)

    def features(self) -> Tensor:
        return self._finish(self._whole.features())
