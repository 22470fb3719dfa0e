"""Dense random projections with the matrix distributions of the original TRAK.

phi = sum over parameters of ``g_name.flatten(1) @ R_name`` (TRAK, arXiv:2303.14186, section 3.2). Entry
(i, j) of R_name is a pure function of (seed, model_id, parameter name, i, j): features do not depend on batch
size, parameter order, memory budget or device beyond the rounding of a matrix product, and a larger P or K
only appends rows or columns.

Shapes: B samples, K features (``proj_dim``), p entries of a parameter.
Numerics: float64 gradients are accumulated in float64, all others in float32. On CUDA, float32 products with signs
are computed by a Triton kernel that generates the same signs on the fly, or by torch operations without triton.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from trak_lite._validate import one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import AbstractFeatureAccumulator, AbstractProjector, ProjectionType
from trak_lite.projectors._blocks import block_rows, check_grad_dim
from trak_lite.projectors._kernels import usable_kernels
from trak_lite.projectors.dense.matrices import MatrixCache
from trak_lite.projectors.random.entries import AbstractEntries, GaussianEntries, RademacherEntries
from trak_lite.projectors.random.hash import Stream, parameter_key
from trak_lite.types import GradientBlock, ParameterShapes

__all__ = [
    "DEFAULT_MEMORY_BUDGET",
    "AbstractDenseProjector",
    "AbstractMatrixMap",
    "AbstractScaledProjector",
    "DenseMap",
    "GaussianProjector",
    "RademacherProjector",
    "integer_seed",
    "projection_type",
]

DEFAULT_MEMORY_BUDGET = 1 << 30
"""Memory limit of a dense projector in bytes: enough for a matrix of 512 columns and half a million rows."""

_CAST_BYTES = 2 << 20  # gradients of another dtype or device are converted in pieces of about this size
_COPY_BYTES = 256 << 20  # gradients on another device than a kernel are copied in pieces of about this size
_KERNEL_DEVICES = frozenset({"cuda"})  # where the Triton kernel is tried

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


def projection_type(proj_type: str) -> ProjectionType:
    """Return the distribution with this name.

    Raises:
        InvalidInputError: If there is none.
    """
    return ProjectionType(one_of([kind.value for kind in ProjectionType], proj_type=proj_type))


class AbstractMatrixMap(ABC):
    """A family of random matrices, one per (model_id, parameter name), and the scale of their products."""

    @abstractmethod
    def __init__(
        self,
        proj_dim: int,
        *,
        kind: str,
        seed: int,
        device: str | torch.device | None,
        dtype: torch.dtype | None,
        scaled: bool,
    ) -> None:
        """Store the settings; nothing is drawn.

        Args:
            proj_dim: K, number of features per sample.
            kind: Name of the map in the store's manifest.
            seed: Any integer.
            device: Device of the products; ``None`` for the gradients' device.
            dtype: Dtype of the features; ``None`` for the dtype of the sums.
            scaled: Whether features are divided by ``sqrt(K)``; entries have variance 1.

        Raises:
            InvalidInputError: If the dtype is not floating point.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidInputError(f"dtype must be a floating-point dtype or None, got {dtype}.")
        self.proj_dim = proj_dim
        self.seed = seed
        self.device = None if device is None else torch.device(device)
        self.dtype = dtype
        self.scale = 1 / math.sqrt(proj_dim) if scaled else 1.0
        numbers = {"proj_dim": proj_dim, "seed": seed, "version": 1}
        self._fingerprint: dict[str, Any] = {"kind": kind, **numbers, "scaled": scaled}

    @abstractmethod
    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which products with gradients of ``dtype`` are summed."""

    @abstractmethod
    def add_product_(self, total: Tensor, rows: Tensor, *, name: str, model_id: int) -> None:
        """Add ``rows @ matrix`` of one parameter to ``total``.

        Args:
            total: ``(b, K)`` in :meth:`sum_dtype`, unscaled.
            rows: ``(b, p)`` gradient rows on any device.
            name: Canonical parameter name.
            model_id: The checkpoint.
        """

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the features."""
        return dict(self._fingerprint)

    def clear(self) -> None:
        """Free all matrices and workspaces; they are generated again when needed."""
        return


@final
class DenseMap(AbstractMatrixMap):
    """Matrices generated by the hash, identical on every device, within a memory budget.

    ``settings`` are those of :class:`AbstractMatrixMap`.
    """

    def __init__(
        self,
        proj_dim: int,
        proj_type: ProjectionType,
        *,
        memory_budget: int,
        precision: str = "ieee",
        **settings: Any,
    ) -> None:
        entries = _ENTRIES[proj_type]
        super().__init__(proj_dim, kind=f"dense_{entries.kind}", **settings)
        one_of(["ieee", "tf32"], precision=precision)
        if precision != "ieee" and entries is not RademacherEntries:
            raise InvalidInputError(
                f"precision={precision!r} is for the signs of a Rademacher projection, got {proj_type.value} "
                "entries. Leave precision at 'ieee'."
            )
        budget = positive_int(memory_budget=memory_budget)
        self.matrices = MatrixCache(entries, proj_dim, seed=self.seed, memory_budget=budget)
        self._precision = precision
        self._has_signs = entries is RademacherEntries
        if precision != "ieee":
            self._fingerprint["precision"] = precision

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float64 if the chosen dtype, or without one the gradients' dtype, is float64; else float32."""
        wide = (self.dtype or dtype) == torch.float64
        return torch.float64 if wide else torch.float32

    def add_product_(self, total: Tensor, rows: Tensor, *, name: str, model_id: int) -> None:
        """Add ``rows @ matrix``; see :meth:`AbstractMatrixMap.add_product_`."""
        kernel = self._kernel_for(total, rows)
        if kernel is not None:  # it generates the signs on the fly, without a matrix in memory
            key = parameter_key(self.seed, model_id, name, Stream.RADEMACHER)
            for start, piece in _pieces_on(rows, total.device):
                kernel.add_signed_product_(total, piece, key, start, precision=self._precision)
            return
        matrix_blocks = self.matrices.blocks(
            name, rows.shape[1], model_id=model_id, dtype=total.dtype, device=total.device
        )
        for start, matrix in matrix_blocks:
            _add_product_(total, rows[:, start : start + matrix.shape[0]], matrix)

    def clear(self) -> None:
        """Free all matrices and workspaces; they are generated again when needed."""
        self.matrices.clear()

    def _kernel_for(self, total: Tensor, rows: Tensor) -> ModuleType | None:
        """Return the Triton kernel's module if it supports this product: signs, float32, a device with Triton."""
        if not self._has_signs or total.device.type not in _KERNEL_DEVICES or total.dtype != torch.float32:
            return None
        kernel = usable_kernels(_load, "Dense Rademacher projections", total.device)
        return kernel if kernel is not None and rows.dtype in kernel.DTYPES else None


def _load() -> ModuleType:
    from trak_lite.projectors.dense import triton as _triton_dense

    return _triton_dense


@final
@dataclass(eq=False)
class _MatrixAccumulator(AbstractFeatureAccumulator):
    """Adds ``gradient rows @ matrix`` block by block; gradients are never concatenated."""

    _map: AbstractMatrixMap
    _num_samples: int
    _model_id: int
    _parameters: ParameterShapes
    _sums: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, block: GradientBlock) -> None:
        rows = block_rows(block, self._num_samples, self._parameters)
        total = self._sum(self._map.sum_dtype(rows.dtype), rows.device)
        part = total[block.start : block.start + block.num_samples]
        self._map.add_product_(part, rows, name=block.name, model_id=self._model_id)

    def features(self) -> Tensor:
        if not self._sums:
            self._sum(torch.float32, torch.device("cpu"))
        total = functools.reduce(torch.add, self._sums.values())  # float32 + float64 gives float64
        return (total * self._map.scale).to(self._map.dtype or total.dtype)

    def _sum(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the running sum for gradients of this precision, on the device of the first block."""
        if dtype not in self._sums:
            first = next((total.device for total in self._sums.values()), device)
            self._sums[dtype] = torch.zeros(
                self._num_samples, self._map.proj_dim, dtype=dtype, device=self._map.device or first
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


def _pieces_on(rows: Tensor, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield rows ``(b, p)`` as ``(first entry, rows (b, n))`` on a device, in pieces if they must be copied."""
    if rows.device == device:
        yield 0, rows
        return
    width = max(1, _COPY_BYTES // (rows.element_size() * max(1, rows.shape[0])))
    for start in range(0, rows.shape[1], width):
        yield start, rows[:, start : start + width].to(device)


class AbstractDenseProjector(AbstractProjector):
    """Base class of projections by dense random matrices; a subclass defines only its constructor."""

    _map: AbstractMatrixMap

    @abstractmethod
    def __init__(self, grad_dim: int, matrix_map: AbstractMatrixMap, proj_type: str | ProjectionType) -> None:
        super().__init__(grad_dim, matrix_map.proj_dim, matrix_map.seed, proj_type, matrix_map.device)
        self._map = matrix_map
        self.dtype = matrix_map.dtype

    def accumulator(
        self, num_samples: int, *, model_id: int, parameters: ParameterShapes
    ) -> AbstractFeatureAccumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows.

        Raises:
            InvalidInputError: If the parameters do not have ``grad_dim`` entries.
        """
        check_grad_dim(self.grad_dim, parameters)
        return _MatrixAccumulator(self._map, num_samples, model_id, parameters)

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON values that determine the features, equal for classes that compute the same map."""
        return self._map.fingerprint()

    def free_memory(self) -> None:
        """Free all matrices and workspaces; they are generated again when needed."""
        self._map.clear()


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
        dense_map = DenseMap(
            positive_int(proj_dim=proj_dim),
            self._proj_type,
            seed=integer_seed(seed),
            device=device,
            dtype=dtype,
            memory_budget=memory_budget,
            scaled=True,
            precision=precision,
        )
        super().__init__(0, dense_map, self._proj_type)


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
