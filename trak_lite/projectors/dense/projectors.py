"""Dense random projections with the matrix distributions of the original TRAK.

phi = sum over parameters of ``g_name.flatten(1) @ R_name`` (TRAK, arXiv:2303.14186, section 3.2). Entry
(i, j) of R_name is a pure function of (seed, model_id, parameter name, i, j): features do not depend on batch
size, parameter order, memory budget or device beyond the rounding of a matrix product, and a larger P or K
only appends rows or columns.

Shapes: B samples, K features (``proj_dim``), p entries of a parameter.
Numerics: float64 gradients are accumulated in float64, all others in float32.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from trak_lite.core.validate import integer, one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import (
    AbstractProjector,
    Accumulator,
    ProjectionType,
    block_rows,
)
from trak_lite.projectors._scratch import FeatureRows
from trak_lite.projectors.dense.fast_jl import MOST_ROWS, FastJLMatrices, fast_jl_matrices
from trak_lite.projectors.dense.matrices import HashedMatrices
from trak_lite.types import GradientBlock, ParameterShapes, num_entries

DEFAULT_MEMORY_BUDGET = 1 << 30
"""Memory limit of a dense projector in bytes: enough for a matrix of 512 columns and half a million rows."""


class AbstractDenseProjector(AbstractProjector):
    """Base class of projections by dense random matrices; a subclass defines only its constructor."""

    _fast_jl_rows: int | None = None
    """Rows per call of ``fast_jl``; ``None`` for the matrices of this package."""

    @abstractmethod
    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device | None,
        dtype: torch.dtype | None,
        *,
        scaled: bool,
        memory_budget: int,
        precision: str = "ieee",
    ) -> None:
        """Store the settings; arguments are those of :class:`AbstractScaledProjector`.

        ``scaled`` tells whether features are divided by ``sqrt(K)``; entries have variance 1.
        """
        kind = ProjectionType(one_of([kind.value for kind in ProjectionType], proj_type=proj_type))
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidInputError(f"dtype must be a floating-point dtype or None, got {dtype}.")
        where = None if device is None else torch.device(device)
        super().__init__(grad_dim, positive_int(proj_dim=proj_dim), integer(seed=seed), proj_type, where)
        self.dtype = dtype
        self.scaled = scaled
        extension = None
        if self._fast_jl_rows is not None:
            extension = fast_jl_matrices(where, kind, most_rows=self._fast_jl_rows)
        if extension is not None:
            self.device = extension.device
        self._matrices: HashedMatrices | FastJLMatrices = extension or HashedMatrices(
            kind, proj_dim, memory_budget=memory_budget, precision=precision
        )

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch; raise if the parameters do not have ``grad_dim`` entries.

        It adds ``gradient rows @ matrix`` block by block; gradients are never concatenated.
        """
        entries = num_entries(parameters)
        if self.grad_dim and entries != self.grad_dim:
            raise InvalidInputError(
                f"The gradients have {entries} entries per sample, but the projector has grad_dim={self.grad_dim}. "
                "Pass grad_dim = the number of entries of all parameters in grad_wrt."
            )
        sums = FeatureRows(num_samples, self.proj_dim, self.device)
        matrices = self._matrices

        def add(block: GradientBlock) -> None:
            rows = block_rows(block, num_samples, parameters)
            is_wide = matrices.has_float64 and (self.dtype or rows.dtype) == torch.float64
            total = sums.of(torch.float64 if is_wide else torch.float32, rows.device)
            part = total[block.start : block.start + block.num_samples]
            matrices.add_product_(part, rows, seed=self.seed, model_id=model_id, name=block.name)

        def features() -> Tensor:
            total = sums.whole()
            scale = 1 / math.sqrt(self.proj_dim) if self.scaled else 1.0
            return (total * scale).to(self.dtype or total.dtype)

        return Accumulator(add, features)

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the features, equal for classes that compute the same map."""
        return {**super().fingerprint(), "scaled": self.scaled, **self._matrices.fingerprint()}

    def free_memory(self) -> None:
        """Free all matrices and workspaces; they are generated again when needed."""
        self._matrices.clear()


class AbstractScaledProjector(AbstractDenseProjector):
    """Dense projection with entries scaled by 1/sqrt(K); a subclass defines their distribution."""

    _proj_type: ClassVar[ProjectionType]

    def __init__(
        self,
        proj_dim: int,
        *,
        seed: int = 0,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
        precision: str = "ieee",
    ) -> None:
        """Store the settings; nothing is drawn.

        Args:
            proj_dim: K, number of features per sample.
            seed: Any integer.
            device: Device of the projection; ``None`` for the gradients' device.
            dtype: Dtype of the features; float64 also computes the products in float64. ``None`` gives float64
                features for float64 gradients and float32 for all others.
            memory_budget: Limit of matrices and workspaces in bytes, for one model at a time. Matrices that fit
                are generated once, others for every batch, with the same values. With triton, Rademacher
                matrices take no memory on CUDA.
            precision: ``"ieee"`` for float32 products. ``"tf32"`` lets the Triton kernel of Rademacher
                projections round gradients to 10 mantissa bits (relative error 5e-4) and use tensor cores;
                it changes the fingerprint. float16 and bfloat16 gradients are multiplied there in both cases,
                without rounding.

        Raises:
            InvalidInputError: If an argument is out of range.
        """
        super().__init__(
            0, proj_dim, seed, self._proj_type, device, dtype,
            scaled=True, memory_budget=memory_budget, precision=precision,
        )  # fmt: skip


@final
class RademacherProjector(AbstractScaledProjector):
    r"""Dense projection with entries :math:`\pm 1/\sqrt{K}`.

    :math:`E\|\phi\|^2 = \|g\|^2`, and inner products are unbiased with variance
    :math:`(\|x\|^2\|y\|^2 + \langle x, y\rangle^2 - 2\sum_i x_i^2 y_i^2) / K`.

    Source: Achlioptas, "Database-friendly random projections" (2003); TRAK (arXiv:2303.14186), section 3.2.

    Example:
        >>> projector = RademacherProjector(4)
        >>> projector.project({"weight": torch.ones(1, 1)}, model_id=0)
        tensor([[-0.5000,  0.5000, -0.5000,  0.5000]])
    """

    _proj_type = ProjectionType.rademacher


@final
class GaussianProjector(AbstractScaledProjector):
    r"""Dense projection with normal entries of variance 1/K.

    :math:`E\|\phi\|^2 = \|g\|^2`, and inner products are unbiased with variance
    :math:`(\|x\|^2\|y\|^2 + \langle x, y\rangle^2) / K`.

    Source: TRAK (arXiv:2303.14186), section 3.2.

    Example:
        >>> GaussianProjector(3).project(torch.zeros(2, 5), model_id=0)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """

    _proj_type = ProjectionType.normal


@final
class FastJLProjector(AbstractDenseProjector):
    """Dense projection by an installed ``fast_jl`` on CUDA, scaled by ``1/sqrt(K)``.

    Gradients are rounded to float16's 11 significant bits, scaled by the largest entry of their row: the relative
    error of features is about 2e-4.

    If the extension is missing, fails its self-test, or the device is not an NVIDIA GPU, one warning is logged and
    the projector computes the map of :class:`~trak_lite.projectors.RademacherProjector` (``GaussianProjector`` for
    normal entries) and has its fingerprint. The matrices differ, so a store made with one is not usable with the other.

    Example:
        >>> FastJLProjector(512, device="cpu").fingerprint()["kind"]
        'dense_rademacher'
    """

    _fast_jl_rows = MOST_ROWS

    def __init__(
        self,
        proj_dim: int,
        *,
        seed: int = 0,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        proj_type: str | ProjectionType = ProjectionType.rademacher,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        """Find and test the extension, once per process, device and distribution.

        Args:
            proj_dim: K, number of features per sample; the extension's cost is rounded up to a multiple of 512.
            seed: Any integer.
            device: Where the projection runs; ``None`` for the current GPU.
            dtype: Dtype of the features; ``None`` gives float32.
            proj_type: ``"rademacher"`` or ``"normal"``.
            memory_budget: Limit of matrices in bytes if the extension cannot be used.

        Raises:
            InvalidInputError: If an argument is out of range.
        """
        super().__init__(
            0, proj_dim, seed, proj_type, device, dtype, scaled=True, memory_budget=memory_budget
        )
