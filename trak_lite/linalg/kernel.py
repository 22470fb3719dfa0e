r"""The attribution kernel: damping of the gram matrix, and solves for the targets.

Implements section 3.2 of Park et al., "TRAK: Attributing Model Behavior at Scale" (arXiv:2303.14186), including
the Gauss-Newton weights of its derivation: :math:`H = \sum_i w_i \phi_i \phi_i^\top` is damped by
:math:`\lambda I`, factorised once, and solved for the targets, which are fewer than the train rows.

With fewer rows than features the kernel is factorised on the side of the rows: for rows W that are multiplied by the
roots of their weights, :math:`(W^\top W + \lambda I)^{-1} t = (t - W^\top (W W^\top + \lambda I)^{-1} W t) / \lambda`.

Shapes: N train rows, M targets, b rows of a block, K feature width, k columns of one segment.
Numerics: float64, or float32 on a device without float64. Only the lower triangle of a gram matrix is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self, final

import torch
from torch import Tensor

from trak_lite.core.devices import eigh_of_positive
from trak_lite.core.validate import flag, known_names, one_of, real_at_least
from trak_lite.errors import InvalidInputError, NonFiniteError, SingularKernelError
from trak_lite.linalg.gram import check_rows, lower_product
from trak_lite.types import FeatureLayout, Segment

__all__ = [
    "DEFAULT_SHARES",
    "KernelSettings",
    "SegmentKernel",
    "factorise",
    "precondition",
]

DEFAULT_SHARES: Final[Mapping[str, float]] = {"curvature": 0.2, "none": 0.2, "fisher": 0.02}
"""The default lambda by weighting, as a share of the root mean square of the eigenvalues that can be above zero.

Chosen by leaving one problem out (``benchmarks/lds/defaults.py``). A gram matrix of N rows has at most N positive
eigenvalues, so one share suits narrow and wide segments, few and many train rows. Stored scores do not record the
shares: increase :attr:`AbstractMethod.version` of the methods with a kernel if you change them.
"""
_SMALL_LAMBDA: Final = 1e-6
"""Lambda below this share of the trace is not used on the side of the rows: that form subtracts numbers which are
``trace(H) / lambda`` times as large as the result, and so loses as many digits."""
_PIVOT_MARGIN: Final = 16.0
"""A pivot below this factor times ``k * eps`` times its diagonal entry counts as rounding noise."""
_SMALLEST: Final = torch.finfo(torch.float32).tiny
"""Smallest normal number of the dtype in which rows are stored, and products of solutions with them are computed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """Settings of the kernel.

    Raises:
        InvalidInputError: If a value is of the wrong type or out of range.

    Example:
        >>> KernelSettings(damping=0.5).to_json()
        {'weighting': 'curvature', 'damping': 0.5, 'lambda_reg': None, 'rescale_inverse': False}
    """

    weighting: Literal["curvature", "none", "fisher"] = "curvature"
    """``"curvature"`` weights each train row by its loss curvature w; ``"none"`` is TRAK's unweighted gram matrix;
    ``"fisher"`` is the gram matrix of gradients for labels drawn from the model, which is fitted separately and
    stored rather than computed from the stored rows."""
    damping: float | None = None
    """Lambda in units of the mean eigenvalue ``trace(H) / k``, per segment. ``None`` uses :data:`DEFAULT_SHARES`."""
    lambda_reg: float | None = None
    """Absolute lambda, in units of a squared feature; overrides ``damping``."""
    rescale_inverse: bool = False
    """Divide the inverse by the mean of its absolute entries, as the original TRAK does (for parity only)."""

    def __post_init__(self) -> None:
        one_of(("curvature", "none", "fisher"), weighting=self.weighting)
        if self.damping is not None:
            object.__setattr__(self, "damping", real_at_least(0.0, damping=self.damping))
        if self.lambda_reg is not None:
            object.__setattr__(self, "lambda_reg", real_at_least(0.0, lambda_reg=self.lambda_reg))
        flag(rescale_inverse=self.rescale_inverse)

    def default_lambda(self, squares: float, *, width: int, num_rows: int) -> float:
        """Return the lambda that is used if neither ``damping`` nor ``lambda_reg`` is given.

        Args:
            squares: Sum of the squared eigenvalues.
            width: k, columns of the segment.
            num_rows: N. It does not limit the rank of ``"fisher"``, whose matrix is fitted to more gradients.
        """
        count = width if self.weighting == "fisher" else min(width, num_rows)
        return DEFAULT_SHARES[self.weighting] * float((squares / count) ** 0.5)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings that :meth:`to_json` serialised.

        Raises:
            InvalidInputError: For an unknown name or an invalid value.
        """
        known_names(values, [field.name for field in fields(cls)], what="kernel settings")
        return cls(**values)


@final
@dataclass(frozen=True, slots=True, eq=False)
class SegmentKernel:
    """The damped kernel of one segment, factorised."""

    factor: Tensor
    """``(k, k)`` lower Cholesky factor of ``H + lambda I``; or, for a pseudo-inverse, the ``(k, rank)`` matrix R such
    that ``R @ R.T`` is the pseudo-inverse; or, with :attr:`rows`, the ``(N, N)`` factor of ``W @ W.T + lambda I``."""
    lambda_reg: float
    """The lambda used, in units of a squared feature."""
    multiplier: float = 1.0
    """Factor of all solutions: 1, or ``1 / mean|inverse|`` for parity, or 0 if the gram matrix vanishes."""
    is_pseudo_inverse: bool = False
    """Whether the damped matrix is singular and ``factor`` belongs to its pseudo-inverse."""
    rows: Tensor | None = None
    """``(N, k)`` weighted rows W of a kernel that is factorised on the side of the rows, else ``None``."""

    @property
    def width(self) -> int:
        """Number of columns k."""
        return self.factor.shape[0] if self.rows is None else self.rows.shape[1]

    @torch.no_grad()
    def solve(self, targets: Tensor) -> Tensor:
        """Return ``(H + lambda I)^-1 t`` for each row t, or the pseudo-inverse times t.

        Args:
            targets: ``(M, k)`` of any floating dtype.

        Returns:
            ``(M, k)`` in the factor's dtype.

        Raises:
            InvalidInputError: If the width is not k or the dtype is not floating.
        """
        rows = _matching_rows(targets, self.width, self.factor)
        if self.is_pseudo_inverse:
            return (rows @ self.factor @ self.factor.T).mul_(self.multiplier)
        right = rows if self.rows is None else rows @ self.rows.T
        half = torch.linalg.solve_triangular(self.factor, right.T, upper=False)
        solved: Tensor = torch.linalg.solve_triangular(self.factor.mT, half, upper=True).T
        if self.rows is not None:
            solved = torch.addmm(rows, solved, self.rows, alpha=-1.0).div_(self.lambda_reg)
        return solved.mul_(self.multiplier)

    @torch.no_grad()
    def quadratic_form(self, rows: Tensor) -> Tensor:
        """Return ``r^T (H + lambda I)^-1 r``, at least 0, for each row r; costs half as much as a solve.

        Args:
            rows: ``(b, k)`` of any floating dtype.

        Returns:
            ``(b,)`` in the factor's dtype.

        Raises:
            InvalidInputError: If the width is not k or the dtype is not floating.
        """
        rows = _matching_rows(rows, self.width, self.factor)
        columns = rows.T if self.rows is None else (rows @ self.rows.T).T
        whitened = (
            self.factor.T @ columns
            if self.is_pseudo_inverse
            else torch.linalg.solve_triangular(self.factor, columns, upper=False)
        )
        values: Tensor = whitened.square_().sum(0)
        if self.rows is not None:
            values = (rows.square().sum(1) - values).div_(self.lambda_reg).clamp_(min=0)
        return values.mul_(self.multiplier)


@torch.no_grad()
def factorise(
    grams: Sequence[Tensor],
    settings: KernelSettings,
    *,
    num_rows: int,
    layout: FeatureLayout,
    allow_singular: bool = False,
) -> list[SegmentKernel]:
    """Damp the gram matrices of all segments of a row and factorise them.

    If some but not all gram matrices vanish (a module that the output does not depend on, or whose gradients are lost
    on their way through many layers), the kernels of these segments solve to zero, so the segments add nothing to any
    score. A gram matrix vanishes if its mean eigenvalue is zero or beneath the smallest normal number of float32.

    Args:
        grams: For each segment a symmetric ``(k, k)`` matrix, or the ``(N, k)`` weighted rows of which it is the gram
            matrix, with N < k, as :class:`GramAccumulator` returns them; not changed.
        settings: Damping and scaling of the inverse.
        num_rows: N, rows that the gram matrices were summed over.
        layout: The segments.
        allow_singular: Use the pseudo-inverse if a damped matrix is singular. Its eigendecomposition takes about
            twenty times as long.

    Returns:
        One kernel per segment, ready to solve.

    Raises:
        SingularKernelError: If all gram matrices are zero; without ``allow_singular`` also if a damped one is
            numerically singular.
        NonFiniteError: If a gram matrix holds NaN or an infinite value; names the segment.
        InvalidInputError: If the matrices are not floating, or do not fit the layout.
    """
    names = [segment.name for segment in layout.segments]
    check_widths([matrix.shape[-1] for matrix in grams], layout, what="gram matrices")
    return [
        _factorised(matrix, mean, name, settings, num_rows, allow_singular)
        if mean > 0.0
        else SegmentKernel(torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device), 0.0, 0.0)
        for matrix, mean, name in zip(grams, _mean_eigenvalues(grams, names, num_rows), names, strict=True)
    ]


@torch.no_grad()
def precondition(targets: Tensor, kernels: Sequence[SegmentKernel], *, layout: FeatureLayout) -> Tensor:
    """Return the targets with each segment multiplied by its (H + lambda I)^-1.

    Args:
        targets: ``(M, K)`` target features of any floating dtype.
        kernels: One kernel per segment.
        layout: The segments.

    Returns:
        ``(M, K)`` in the kernels' dtype; ``train @ result.T`` are the scores.

    Raises:
        InvalidInputError: If targets or kernels do not fit the layout.
    """
    check_rows(targets, layout)
    check_widths([kernel.width for kernel in kernels], layout)
    first = kernels[0].factor
    result = torch.empty(targets.shape, dtype=first.dtype, device=first.device)
    for segment, kernel in zip(layout.segments, kernels, strict=True):
        result[:, segment.start : segment.stop] = kernel.solve(targets[:, segment.start : segment.stop])
    return result


def _factorised(
    gram: Tensor, mean: float, segment: str, settings: KernelSettings, num_rows: int, allow_singular: bool
) -> SegmentKernel:
    """Damp the gram matrix of one segment, whose mean eigenvalue is above zero, and factorise it."""
    width = gram.shape[1]
    rows = gram if len(gram) < width else None
    if rows is not None:
        gram = lower_product(rows)  # has the eigenvalues of H that can be above zero
    lambda_reg = settings.lambda_reg
    if lambda_reg is None and settings.damping is not None:
        lambda_reg = settings.damping * mean
    elif lambda_reg is None:
        below = torch.linalg.vector_norm(gram.tril(-1)).square()
        squares = float(2.0 * below + gram.diagonal().square().sum())  # of the eigenvalues
        lambda_reg = settings.default_lambda(squares, width=width, num_rows=num_rows)
    if rows is not None:
        large = lambda_reg >= _SMALL_LAMBDA * mean * width and not settings.rescale_inverse
        factor = _cholesky(gram, lambda_reg) if large else None
        if factor is not None:
            return SegmentKernel(factor, lambda_reg, rows=rows)
        gram = lower_product(rows.T)
    where = f"segment {segment!r} ({width} features, {num_rows} train rows, mean eigenvalue {mean:.3g})"
    if lambda_reg == 0.0 and width > num_rows:
        if allow_singular:
            return _pseudo_inverse(gram, settings, lambda_reg)
        raise SingularKernelError(
            f"The kernel of {where} has no inverse at lambda = 0: there are more features than rows. "
            f"Use damping > 0, damping=None (a share of the eigenvalues), or at most {num_rows} features."
        )
    factor = _cholesky(gram, lambda_reg)
    if factor is None and allow_singular:
        return _pseudo_inverse(gram, settings, lambda_reg)
    if factor is None:
        raise SingularKernelError(
            f"The kernel of {where} is numerically singular at lambda = {lambda_reg:g}: some features "
            "are linear combinations of others. Use a larger damping, or damping=None (a share of the eigenvalues)."
        )
    multiplier = 1.0
    if settings.rescale_inverse:
        multiplier /= float(torch.cholesky_inverse(factor).abs_().mean())
    return SegmentKernel(factor, lambda_reg, multiplier)


def _cholesky(gram: Tensor, lambda_reg: float) -> Tensor | None:
    """Return the lower factor of ``gram + lambda I``, or ``None`` if a pivot is negative or rounding noise.

    A pivot is the residual of a feature after projection on the preceding features. If the exact residual is zero,
    rounding can leave a small positive number, by which a plain Cholesky factorisation would divide.
    """
    damped = gram.clone()
    damped.diagonal().add_(lambda_reg)
    diagonal = damped.diagonal().clone()
    factor, failed = torch.linalg.cholesky_ex(damped)
    noise = _noise_floor(diagonal) * diagonal
    singular = bool(failed) or bool((factor.diagonal().square() <= noise).any())
    return None if singular else factor


def _pseudo_inverse(gram: Tensor, settings: KernelSettings, lambda_reg: float) -> SegmentKernel:
    """Return the pseudo-inverse of ``gram + lambda I``; eigenvalues that are rounding noise count as zero."""
    eigenvalues, eigenvectors = eigh_of_positive(gram)
    damped = eigenvalues + lambda_reg
    large = damped > _noise_floor(damped) * damped[-1]
    root = eigenvectors[:, large] / damped[large].sqrt()
    multiplier = 1.0 / float((root @ root.T).abs_().mean()) if settings.rescale_inverse else 1.0
    return SegmentKernel(root, lambda_reg, multiplier, is_pseudo_inverse=True)


def check_widths(widths: Sequence[int], layout: FeatureLayout, *, what: str = "kernels") -> None:
    """Raise if there is not one width per segment of the layout, or one differs."""
    expected = [segment.width for segment in layout.segments]
    if not expected or list(widths) != expected:
        raise InvalidInputError(
            f"The {what} have widths {list(widths)} but the segments of the layout have {expected}. "
            "Use the layout that the features were made with."
        )


def _matching_rows(rows: Tensor, width: int, like: Tensor) -> Tensor:
    """Return rows ``(n, width)`` in the dtype and on the device of ``like``."""
    check_rows(rows, FeatureLayout((Segment("kernel", 0, width),)))
    return rows.to(like)


def _mean_eigenvalues(grams: Sequence[Tensor], segments: Sequence[str], num_rows: int) -> list[float]:
    """Return ``trace(H) / k`` of valid gram matrices, 0 if one vanishes; raise if all of them do.

    Each may be given by ``num_rows`` weighted rows, fewer than k. A NaN or infinite feature always makes the diagonal
    non-finite, so only the trace is checked.
    """
    for gram, segment in zip(grams, segments, strict=True):
        fits = gram.dim() == 2 and (
            gram.shape[0] == gram.shape[1] or num_rows == gram.shape[0] < gram.shape[1]
        )
        if not (fits and gram.is_floating_point()):
            raise InvalidInputError(
                f"The gram matrix of segment {segment!r} must be a square floating matrix, "
                f"got shape {tuple(gram.shape)} of {gram.dtype}."
            )
    traces = [g.diagonal().mean() if len(g) == g.shape[1] else g.square().sum() / g.shape[1] for g in grams]
    means: list[float] = torch.stack(traces).tolist()  # waits once
    for mean, segment in zip(means, segments, strict=True):
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"The gram matrix of segment {segment!r} holds NaN or infinite values. "
                "Check the features that it was summed over."
            )
    # 1 / H of a smaller matrix is beyond float32. If all are smaller (an output in other units), they count as long as
    # the entries of the rows, the roots of those of H, are normal numbers.
    floor = _SMALLEST if max(means) >= _SMALLEST else _SMALLEST**2
    if max(means) < floor:
        where = "every segment" if len(segments) > 1 else f"segment {segments[0]!r}"
        raise SingularKernelError(
            f"The gram matrix of {where} is zero or too small. Either every train row has a weight of zero (a loss "
            "that is linear in the output, a model that is certain of every train row): use weighting='none' "
            "(Attributor: method=TRAK(damping=None, layout='stored'), the default for tasks with has_curvature = "
            "False). Or all features are zero (the output does not depend on the kept parameters): keep other "
            "parameters."
        )
    return [mean if mean >= floor else 0.0 for mean in means]


def _noise_floor(values: Tensor) -> float:
    """Return the relative size below which a pivot or eigenvalue of ``k`` values is indistinguishable from zero."""
    return _PIVOT_MARGIN * values.shape[0] * torch.finfo(values.dtype).eps
