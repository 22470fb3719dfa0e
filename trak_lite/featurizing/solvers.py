"""Iterative solvers of (H + Lambda) x = b for many right-hand sides, given products with H.

Shapes: m right-hand sides, P parameter entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import wide_dtype

Product: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map ``(m, P) -> (m, P)``, row by row."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Convergence:
    """How far an iterative solver came for each target."""

    iterations: NDArray[np.int64]
    """``(m,)`` iterations."""
    residuals: NDArray[np.float64]
    """``(m,)`` norm of the final residual b - (H + Lambda) x divided by that of b; 0 if b is zero. Conjugate gradients
    update the residual in every iteration; below the rounding of the dtype this is not the residual of x."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the convergence of consecutive blocks of targets."""
        return cls(
            np.concatenate([part.iterations for part in parts]),
            np.concatenate([part.residuals for part in parts]),
        )


def conjugate_gradients(
    product: Product, precondition: Product, right: Tensor, *, tolerance: float, max_iterations: int
) -> tuple[Tensor, Convergence]:
    """Solve A x = b by preconditioned conjugate gradients, for each right-hand side b ``(m, P)`` on its own.

    Targets whose residual is at most the share ``tolerance`` of the norm of b take no more products. The iteration of a
    target also ends at a direction in which A is not positive. ``product`` multiplies by A, ``precondition`` by an
    approximation of its inverse; both are symmetric and positive definite. Returns x ``(m, P)``, and the convergence.
    """
    x, units = torch.zeros_like(right), row_units(right)
    r = right / units
    norms = row_norms(r)
    residuals, iterations = (norms > 0).to(norms), torch.zeros(len(right), dtype=torch.int64, device="cpu")
    active = torch.nonzero(norms > 0).flatten()
    r = r[active]
    p = precondition(r)
    rz = _dots(r, p)
    for _ in range(max_iterations):
        if not len(active):
            break
        image = product(p)
        curvature = _dots(p, image)
        positive = curvature > 0
        step = torch.where(positive, rz / curvature, 0.0).to(r)[:, None]
        x[active] += step * p
        r = r - step * image
        iterations[active.cpu()] += 1
        share = row_norms(r) / norms[active]
        residuals[active] = share
        going = positive & (share > tolerance)
        active, r, p, rz = active[going], r[going], p[going], rz[going]
        if not len(active):
            break
        z = precondition(r)
        now = _dots(r, z)
        p = z + (now / rz).to(z)[:, None] * p
        rz = now
    return x.mul_(units), Convergence(iterations.numpy(), residuals.cpu().double().numpy())


def neumann_series(product: Product, right: Tensor, *, scale: float, depth: int) -> Tensor:
    """Iterate x <- x + (b - A_t x) / scale from x = b / scale, ``depth`` times, for b ``(m, P)``.

    Each call of ``product`` may multiply by another estimate A_t of A. ``scale`` is above half of the largest
    eigenvalue.
    """
    x = right / scale
    for _ in range(depth):
        x += (right - product(x)) / scale
    return x


def largest_eigenvalue(product: Product, like: Tensor, *, iterations: int, seed: int) -> float:
    """Return an estimate, from below, of the largest eigenvalue of A by power iterations.

    ``product`` multiplies by A; ``like`` is a tensor ``(m, P)`` of the dtype and device of vectors.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    vector = torch.randn(1, like.shape[1], generator=generator, dtype=torch.float32, device="cpu").to(like)
    value = 0.0
    for _ in range(iterations):
        vector = vector / vector.norm()
        image = product(vector)
        value = float(_dots(vector, image))
        vector = image / row_units(image)
    return value


def row_units(rows: Tensor) -> Tensor:
    """Return a power of 2 near the largest entry of each row ``(m, 1)``.

    Division by it changes no bits, and no square of the quotients that matters underflows or overflows.
    """
    exponents = rows.norm(math.inf, 1, keepdim=True).log2().floor()  # -inf for zeros
    most = -math.log2(torch.finfo(rows.dtype).tiny)
    units: Tensor = exponents.clamp(-most, most).exp2()
    return units


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def row_norms(rows: Tensor) -> Tensor:
    """Return the norms of rows ``(m, P)`` in float64, or in float32 on a device without float64."""
    norms: Tensor = rows.norm(dim=1).to(wide_dtype(rows.device))
    return norms
