"""Dense random projections: the matrix families of the original TRAK, with entries that depend on names only.

phi = sum over parameters of ``g_name.flatten(1) @ R_name`` (TRAK, arXiv:2303.14186, section 3.2). Entry
(i, j) of R_name is a pure function of (seed, model_id, parameter name, i, j): features do not depend on batch
size, parameter order, memory budget or device beyond the rounding of a matrix product, and a larger P or K
only appends rows or columns.

Shapes: B samples, K features (``proj_dim``), p entries of a parameter.
Numerics: float64 gradients are accumulated in float64, all others in float32.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from trak_lite._validate import positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import AbstractFeatureAccumulator, AbstractProjector, ProjectionType
from trak_lite.projectors._blocks import block_rows, check_grad_dim, project_named
from trak_lite.projectors._entries import AbstractEntries, GaussianEntries, RademacherEntries
from trak_lite.projectors._matrices import MatrixCache
from trak_lite.types import GradientBlock, ParameterShapes

__all__ = [
    "DEFAULT_MEMORY_BUDGET",
    "AbstractDenseProjector",
    "AbstractScaledProjector",
    "DenseMap",
    "GaussianProjector",
    "RademacherProjector",
    "integer_seed",
]

DEFAULT_MEMORY_BUDGET = 1 << 30
"""Bytes that a dense projector may hold: a matrix of 512 columns for half a million parameters."""

_CAST_BYTES = 2 << 20  # gradients of another dtype or device are converted in pieces of about this size

_ENTRIES: dict[ProjectionType, type[AbstractEntries]] = {
    ProjectionType.rademacher: RademacherEntries,
    ProjectionType.normal: GaussianEntries,
}


def integer_seed(seed: object) -> int:
    """Return the seed as a Python integer of any size and sign.

    Raises:
        InvalidInputError: If it is not an integer.
    """
    if not isinstance(seed, bool):
        try:
            return operator.index(seed)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidInputError(f"seed must be an integer, got {seed!r}.")


@final
class DenseMap:
    """A family of dense random matrices, the memory they may take, and how their products are scaled."""

    def __init__(
        self,
        proj_dim: int,
        proj_type: ProjectionType,
        *,
        seed: int,
        device: str | torch.device | None,
        dtype: torch.dtype | None,
        memory_budget: int,
        scaled: bool,
    ) -> None:
        """Store the settings; nothing is drawn.

        Raises:
            InvalidInputError: If the dtype is not floating point or the budget does not hold one row.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidInputError(f"dtype must be a floating-point dtype or None, got {dtype}.")
        entries = _ENTRIES[proj_type]
        budget = positive_int(memory_budget=memory_budget)
        self.matrices = MatrixCache(entries, proj_dim, seed=seed, memory_budget=budget)
        self.proj_dim = proj_dim
        self.device = None if device is None else torch.device(device)
        self.dtype = dtype
        self.scale = 1 / math.sqrt(proj_dim) if scaled else 1.0
        self._fingerprint = {
            "kind": f"dense_{entries.kind}",
            "proj_dim": proj_dim,
            "seed": seed,
            "version": 1,
            "scaled": scaled,
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the features, as JSON values."""
        return dict(self._fingerprint)


@final
class _DenseAccumulator(AbstractFeatureAccumulator):
    """Adds ``gradient rows @ matrix`` block by block; gradients are never joined."""

    def __init__(
        self, dense_map: DenseMap, num_samples: int, model_id: int, parameters: ParameterShapes
    ) -> None:
        self._map = dense_map
        self._num_samples = num_samples
        self._model_id = model_id
        self._parameters = parameters
        self._device = dense_map.device
        self._sums: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        """Add one block; raises InvalidInputError if it does not fit the parameters or the batch."""
        rows = block_rows(block, self._num_samples, self._parameters)
        wide = (self._map.dtype or rows.dtype) == torch.float64
        total = self._sum(torch.float64 if wide else torch.float32, rows.device)
        part = total[block.start : block.start + block.num_samples]
        matrix_blocks = self._map.matrices.blocks(
            block.name, rows.shape[1], model_id=self._model_id, dtype=total.dtype, device=total.device
        )
        for start, matrix in matrix_blocks:
            _add_product_(part, rows[:, start : start + matrix.shape[0]], matrix)

    def features(self) -> Tensor:
        """Return ``(B, K)`` in the projector's dtype, or in the widest that was accumulated."""
        if not self._sums:
            self._sum(torch.float32, torch.device("cpu"))
        total = functools.reduce(torch.add, self._sums.values())  # float32 + float64 gives float64
        return (total * self._map.scale).to(self._map.dtype or total.dtype)

    def _sum(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the running sum for gradients of this precision, on the device of the first block."""
        if dtype not in self._sums:
            self._device = self._device or device
            self._sums[dtype] = torch.zeros(
                self._num_samples, self._map.proj_dim, dtype=dtype, device=self._device
            )
        return self._sums[dtype]


def _add_product_(total: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """Add ``rows (b, n) @ matrix (n, K)`` to ``total (b, K)``; rows of another dtype are cast in pieces."""
    if rows.dtype == matrix.dtype and rows.device == matrix.device:
        total.addmm_(rows, matrix)
        return
    width = max(1, _CAST_BYTES // (matrix.element_size() * max(1, rows.shape[0])))
    for start in range(0, rows.shape[1], width):
        piece = rows[:, start : start + width].to(matrix.device, matrix.dtype)
        total.addmm_(piece, matrix[start : start + width])


class AbstractDenseProjector(AbstractProjector):
    """Features are products with dense random matrices; a subclass defines only its constructor."""

    _map: DenseMap

    @abstractmethod
    def __init__(
        self,
        grad_dim: int,
        dense_map: DenseMap,
        proj_type: str | ProjectionType,
    ) -> None:
        """Store the map under the original TRAK's attribute names."""
        seed = dense_map.fingerprint()["seed"]
        super().__init__(grad_dim, dense_map.proj_dim, seed, proj_type, dense_map.device)
        self._map = dense_map
        self.dtype = dense_map.dtype

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project collected gradients.

        Args:
            grads: Per-sample gradients by parameter name, each ``(B, *parameter.shape)``, or one ``(B, P)``
                tensor, which counts as one parameter without a name and so has a matrix of its own.
            model_id: The checkpoint; every checkpoint has matrices of its own.

        Returns:
            Features ``(B, K)``, on the projector's device, or where the gradients are if it has none.

        Raises:
            InvalidInputError: If there is no gradient, the gradients disagree on B, are not floating point,
                or do not have ``grad_dim`` entries.
        """
        return project_named(self, grads, model_id)

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a fresh accumulator for one batch of ``num_samples`` rows.

        Raises:
            InvalidInputError: If the parameters do not have ``grad_dim`` entries.
        """
        check_grad_dim(self.grad_dim, parameters)
        return _DenseAccumulator(self._map, num_samples, model_id, parameters)

    def fingerprint(self) -> dict[str, Any]:
        """Return what determines the features; classes that compute the same map share it."""
        return self._map.fingerprint()

    def free_memory(self) -> None:
        """Drop all matrices and workspaces; they are drawn again when needed."""
        self._map.matrices.clear()


class AbstractScaledProjector(AbstractDenseProjector):
    """Entries scaled by 1/sqrt(K); a subclass names their distribution."""

    _proj_type: ClassVar[ProjectionType]

    def __init__(
        self,
        proj_dim: int,
        *,
        seed: int = 0,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        """Store the settings; nothing is drawn.

        Args:
            proj_dim: K, number of features per sample.
            seed: Any integer.
            device: Where the projection runs; ``None`` for where the gradients are.
            dtype: Dtype of the features, and of the products where it is float64; ``None`` gives float64
                features for float64 gradients and float32 for all others.
            memory_budget: Bytes that matrices and workspaces may take together, for one model at a time.
                Matrices that fit are drawn once, others again for every batch; the numbers are the same.

        Raises:
            InvalidInputError: If an argument is out of range.
        """
        dense_map = DenseMap(
            positive_int(proj_dim=proj_dim),
            self._proj_type,
            seed=integer_seed(seed),
            device=device,
            dtype=dtype,
            memory_budget=memory_budget,
            scaled=True,
        )
        super().__init__(0, dense_map, self._proj_type)


@final
class RademacherProjector(AbstractScaledProjector):
    r"""Dense projection with entries :math:`\pm 1/\sqrt{K}`.

    Laws: :math:`E\|\phi\|^2 = \|g\|^2`, inner products are unbiased with variance
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

    Laws: :math:`E\|\phi\|^2 = \|g\|^2`, inner products are unbiased with variance
    :math:`(\|x\|^2\|y\|^2 + \langle x, y\rangle^2) / K`.

    Source: TRAK (arXiv:2303.14186), section 3.2.

    Example:
        >>> GaussianProjector(3).project(torch.zeros(2, 5), model_id=0)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """

    _proj_type = ProjectionType.normal
