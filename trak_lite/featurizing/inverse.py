"""Inverse curvature times unprojected target gradients: by EK-FAC, or by an iterative solver that EK-FAC helps.

Shapes: m targets, P parameter entries.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from trak_lite.core.devices import full_float32, precise, wide_dtype
from trak_lite.data.datasets import RowNumbers, spread_rows
from trak_lite.errors import InvalidInputError, NonFiniteError
from trak_lite.featurizing.gauss_newton import CurvatureProducts
from trak_lite.featurizing.kronecker.curvature import PreconditionedProjector, Preconditioner
from trak_lite.featurizing.solvers import (
    Convergence,
    conjugate_gradients,
    largest_eigenvalue,
    neumann_series,
    row_norms,
    row_units,
)
from trak_lite.methods import CG, EKFAC, AbstractInverseMethod, LiSSA
from trak_lite.projectors import AbstractProjector, NoOpProjector
from trak_lite.projectors._base import Accumulator, project_named
from trak_lite.types import ParameterShapes, by_name

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
@dataclass(eq=False)
class InverseCurvature:
    """The inverse curvature of a method at the loaded checkpoint."""

    method: AbstractInverseMethod
    preconditioner: Preconditioner
    """The inverse of the method's EK-FAC; with ``samples`` its square root."""
    products: CurvatureProducts | None
    """Products with the Gauss-Newton matrix or an estimate, for methods that read the train rows."""
    label: str
    """Name of the checkpoint in messages."""
    parameters: ParameterShapes
    _scale: float | None = None
    _samples: tuple[Tensor, Tensor] | None = None

    def accumulator(
        self, projector: AbstractProjector, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> Accumulator:
        """Return a new accumulator; see :class:`Preconditioner`. Some methods need the gradients of a whole batch."""
        if not self.method.reads_rows:
            return self.preconditioner.accumulator(
                projector, num_samples, model_id=model_id, parameters=parameters
            )
        whole = NoOpProjector(device=projector.device).accumulator(
            num_samples, model_id=model_id, parameters=parameters
        )

        def features() -> Tensor:
            gradients = by_name(self.solve(whole.features()).gradients, parameters)
            return project_named(projector, gradients, model_id)

        return Accumulator(whole.add, features)

    @torch.no_grad()
    def solve(self, gradients: Tensor) -> Solution:
        """Return target gradients ``(m, P)`` multiplied by the inverse; raises if LiSSA diverges."""
        solution: Solution = self.method.solve(self, gradients)
        return solution

    def precondition(self, gradients: Tensor) -> Solution:
        """Return gradients multiplied by the inverse of the EK-FAC, or by its square root; see ``preconditioner``."""
        whole = NoOpProjector(device=gradients.device)
        named = by_name(gradients, self.parameters)
        return Solution(
            PreconditionedProjector(whole, self.preconditioner.accumulator).project(named, 0), None
        )

    def with_samples(self, method: EKFAC, gradients: Tensor) -> Solution:
        """Return target gradients multiplied by the inverse of a mixture of the EK-FAC and of sampled gradients.

        With A the damped share of the EK-FAC, G ``(n, P)`` the samples, c their factor and W = G A^-1/2, the inverse of
        A + c G^T G is A^-1/2 (I - W^T (I / c + W W^T)^-1 W) A^-1/2 (Woodbury).
        """
        gradients = precise(gradients)
        if self._samples is None:
            self._samples = self._sampled(method, gradients)
        samples, factor = self._samples
        white = self.precondition(gradients).gradients
        with full_float32(white.device):
            products = torch.cholesky_solve((samples @ white.T).to(factor), factor)
            white -= products.T.to(white) @ samples
        return self.precondition(white)

    def _sampled(self, method: EKFAC, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return W ``(n, P)`` and the Cholesky factor of I / c + W W^T; c is the share times N / n.

        W has the dtype and device of ``like``, gradients of targets.
        """
        products, count, share = self.products, method.samples or 0, method.kronecker_share or 0.0
        assert products is not None  # of a method that reads rows
        num_rows = len(products.rows)
        wanted = spread_rows(num_rows, min(num_rows, count))
        # The labels after those of the two passes of the fit.
        first, draws = 2 * method.draws, count // len(wanted)
        shape = draws * len(wanted), like.shape[1]
        try:
            samples, start = like.new_empty(shape), 0
        except RuntimeError as error:
            raise InvalidInputError(
                f"The {shape[0]} sampled gradients of {method.name} have {shape[1]} entries each: they take "
                f"{math.prod(shape) * like.element_size()} bytes, which there are not. Use fewer samples."
            ) from error
        for part in products.drawn_gradients(wanted, range(first, first + draws)):
            samples[start : start + len(part)] = self.precondition(part).gradients
            start += len(part)
        with full_float32(samples.device):
            gram = (samples @ samples.T).to(wide_dtype(samples.device))
        gram.diagonal().add_(len(samples) / ((1 - share) * num_rows))
        factor, failed = torch.linalg.cholesky_ex(gram)
        if bool(failed) or not bool(factor.isfinite().all()):
            raise NonFiniteError(
                f"The products of the sampled gradients of {method.name} at {self.label} are not finite, or too "
                "inaccurate in their dtype. Use more damping, or parameters in float64."
            )
        return samples, factor

    def _system(self, gradients: Tensor) -> tuple[Callable[[Tensor, RowNumbers], Tensor], Tensor, int]:
        """Return products with H + Lambda, the right-hand sides, and the number of train rows.

        H is estimated by the rows that are given with the vectors. Where Lambda is 0 no train row has a gradient, so
        the entries do not affect scores, and the system is singular: there the right-hand sides are 0.
        """
        products = self.products
        if products is None:
            raise InvalidInputError(f"{self.method.name} has no products with the curvature.")
        num_rows, lambdas = len(products.rows), self.preconditioner.lambdas
        sizes = {name: math.prod(shape) for name, shape in self.parameters.items()}
        damping = torch.cat([gradients.new_full((size,), lambdas[name]) for name, size in sizes.items()])

        def damped(vectors: Tensor, rows: RowNumbers) -> Tensor:
            return products(vectors, rows, scale=num_rows / len(rows)) + damping * vectors

        return damped, torch.where(damping > 0, gradients, 0.0), num_rows

    def conjugate_gradients(self, method: CG, gradients: Tensor) -> Solution:
        """Return the solutions of :func:`~trak_lite.featurizing.solvers.conjugate_gradients`."""
        damped, right, num_rows = self._system(gradients)
        wanted = spread_rows(num_rows, method.max_rows)
        solutions, convergence = conjugate_gradients(
            lambda vectors: damped(vectors, wanted),
            lambda vectors: self.precondition(vectors).gradients,
            right,
            tolerance=method.tolerance,
            max_iterations=method.max_iterations,
        )
        self._report(convergence, method.tolerance, "max_iterations")
        return Solution(solutions, convergence)

    def neumann_series(self, method: LiSSA, gradients: Tensor) -> Solution:
        """Return the solutions of :func:`~trak_lite.featurizing.solvers.neumann_series`."""
        damped, right, num_rows = self._system(gradients)

        def whole(vectors: Tensor) -> Tensor:
            return damped(vectors, np.arange(num_rows))

        if method.scale is None and self._scale is None:
            largest = largest_eigenvalue(whole, gradients, iterations=_POWER_ITERATIONS, seed=method.seed)
            self._scale = _MARGIN * largest
            logger.info("LiSSA, %s: the largest eigenvalue is about %.3g.", self.label, largest)
        scale = method.scale or self._scale or 1.0
        drawn = np.random.default_rng(method.seed)
        count = min(method.rows, num_rows)

        def estimated(vectors: Tensor) -> Tensor:
            return damped(vectors, np.sort(drawn.permutation(num_rows)[:count]))

        solutions = torch.zeros_like(right)
        for _ in range(method.repeats):
            solutions += neumann_series(estimated, right, scale=scale, depth=method.depth) / method.repeats
        if not bool(solutions.isfinite().all()):
            raise NonFiniteError(
                f"LiSSA diverged at scale={scale:.3g}. Use a larger scale, more rows per step, or CG."
            )
        units = row_units(right)
        norms = row_norms(right / units)
        residual = row_norms((right - whole(solutions)) / units) / norms.clamp(
            min=torch.finfo(norms.dtype).tiny
        )
        iterations = np.full(len(right), method.depth * method.repeats)
        convergence = Convergence(iterations, residual.cpu().double().numpy())
        self._report(convergence, _LISSA_RESIDUAL, "depth, rows or scale")
        return Solution(solutions, convergence)

    def _report(self, convergence: Convergence, tolerance: float, remedy: str) -> None:
        iterations, residuals = convergence.iterations, convergence.residuals
        name = self.method.name
        logger.info(
            "%s, %s: %d to %d iterations for %d targets; relative residuals: median %.2g, largest %.2g.",
            name,
            self.label,
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
                f"{len(residuals)} targets at {self.label}; the largest is {residuals.max():.2g}. Change {remedy}, or "
                "use more damping.",
                UserWarning,
                stacklevel=2,
            )
