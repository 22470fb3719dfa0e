"""Dense projectors with the original TRAK's names, constructors and scale, but this package's matrices.

All classes compute ``g @ R`` with entries of variance 1 and without ``1/sqrt(K)``, like the original. The
entries come from the hash, so they differ from the original's. They are the same on CPU and CUDA and in all of
these classes, and different for each seed, model_id and parameter. The original repeats columns (block 100 of
model 0 is block 0 of model 1); these classes do not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from trak_lite.core.validate import positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.projectors._base import (
    AbstractProjector,
    Accumulator,
    ProjectionType,
    named_gradients,
    project_named,
    routed,
)
from trak_lite.projectors.dense.projectors import DEFAULT_MEMORY_BUDGET, AbstractDenseProjector
from trak_lite.types import ParameterShapes, num_entries


class BasicSingleBlockProjector(AbstractDenseProjector):
    """The same map as :class:`BasicProjector`, with the original TRAK's name and constructor."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device | None,
        dtype: torch.dtype | None = torch.float32,
        model_id: int = 0,
        *,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
        **kwargs: object,
    ) -> None:
        """Store the settings; nothing is drawn.

        Args:
            grad_dim: P, number of gradient entries per sample; 0 accepts any.
            proj_dim: K, number of features per sample.
            seed: Any integer.
            proj_type: ``"normal"`` or ``"rademacher"``.
            device: Device of the projection; ``None`` for the gradients' device.
            dtype: Dtype of the features; float64 also computes the products in float64.
            model_id: Stored, but not used; :meth:`project` takes the model_id.
            memory_budget: Limit of matrices and workspaces in bytes.
            **kwargs: Ignored; accepts the arguments of other projectors.

        Raises:
            InvalidInputError: If an argument is out of range.
        """
        super().__init__(
            grad_dim, proj_dim, seed, proj_type, device, dtype, scaled=False, memory_budget=memory_budget
        )
        self.model_id = model_id


@final
class BasicProjector(BasicSingleBlockProjector):
    """Dense projection without ``1/sqrt(K)``, with the original TRAK's name and constructor.

    Example:
        >>> projector = BasicProjector(2, 4, 0, "rademacher", "cpu")
        >>> projector.project(torch.tensor([[1.0, 0.0]]), model_id=0).abs()
        tensor([[1., 1., 1., 1.]])
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device | None,
        block_size: int = 100,
        dtype: torch.dtype | None = torch.float32,
        model_id: int = 0,
        **kwargs: Any,
    ) -> None:
        """Store the settings; arguments as for :class:`BasicSingleBlockProjector`.

        ``block_size`` is validated and stored, but not used; ``memory_budget`` limits memory instead.
        """
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id, **kwargs)
        self.block_size = min(proj_dim, positive_int(block_size=block_size))


@final
class CudaProjector(BasicSingleBlockProjector):
    """The same map as :class:`BasicProjector`, with the same entries on CUDA and CPU.

    It supports any K, any number of rows and any floating-point dtype, and needs no compiled extension. With
    ``use_fast_jl=True`` it uses the original's extension if available.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device | None,
        max_batch_size: int,
        dtype: torch.dtype | None = torch.float32,
        *,
        use_fast_jl: bool = False,
        **kwargs: Any,
    ) -> None:
        """Store the settings; arguments as for :class:`BasicSingleBlockProjector`.

        ``max_batch_size`` is the number of rows per call of ``fast_jl``: 8, 16 or 32. Without ``fast_jl`` it is
        validated and stored only. ``use_fast_jl`` uses an installed ``fast_jl``; if it cannot be used, a warning is
        logged and this package's map is used.
        """
        self.max_batch_size = positive_int(max_batch_size=max_batch_size)
        if use_fast_jl:
            self._fast_jl_rows = max_batch_size
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, **kwargs)


@final
class ChunkedCudaProjector(AbstractProjector):
    """Sum of several projectors, each for a chunk of consecutive parameters (the original TRAK's class).

    Each gradient goes directly to the projector of its chunk; no common buffer is allocated.
    """

    def __init__(
        self,
        projector_per_chunk: Sequence[AbstractProjector],
        max_chunk_size: int,
        params_per_chunk: Sequence[int],
        feat_bs: int,
        device: str | torch.device | None,
        dtype: torch.dtype,
    ) -> None:
        """Store the chunks.

        Args:
            projector_per_chunk: One projector per chunk, all with the same ``proj_dim``.
            max_chunk_size: Stored, but not used.
            params_per_chunk: Gradient entries of each chunk; chunk boundaries must be parameter boundaries.
            feat_bs: Stored, but not used; batches of any size are accepted.
            device: Device of the features; ``None`` for the device of the chunks' features.
            dtype: Dtype of the features.

        Raises:
            InvalidInputError: If there is no chunk, or the lists or the chunks' ``proj_dim`` disagree.
        """
        widths = {projector.proj_dim for projector in projector_per_chunk}
        if len(projector_per_chunk) != len(params_per_chunk) or len(widths) != 1:
            raise InvalidInputError(
                f"Got {len(projector_per_chunk)} projectors with proj_dim {sorted(widths)} for "
                f"{len(params_per_chunk)} chunks. Expected one projector per chunk, at least one chunk, "
                "and one proj_dim."
            )
        first = projector_per_chunk[0]
        super().__init__(sum(params_per_chunk), first.proj_dim, first.seed, first.proj_type, device)
        self.projector_per_chunk = list(projector_per_chunk)
        self.params_per_chunk = list(params_per_chunk)
        self.max_chunk_size = max_chunk_size
        self.feat_bs = feat_bs
        self.dtype = dtype

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project collected gradients by name, or the columns of one ``(B, P)`` tensor chunk by chunk.

        Raises:
            InvalidInputError: If the gradients do not divide into the chunks.
        """
        named, _ = named_gradients(grads)
        if isinstance(grads, Tensor):
            if grads.shape[1] != self.grad_dim:
                raise InvalidInputError(
                    f"The gradients have {grads.shape[1]} entries per sample, the chunks {self.grad_dim}. "
                    "Compute params_per_chunk from these gradients."
                )
            columns = torch.split(grads, self.params_per_chunk, dim=1)
            # Different names give chunks different matrices even if their projectors share a seed.
            named = {f"chunk {i}": part for i, part in enumerate(columns)}
        return project_named(self, named, model_id)

    def accumulator(self, num_samples: int, *, model_id: int, parameters: ParameterShapes) -> Accumulator:
        """Return a new accumulator for one batch of ``num_samples`` rows.

        Raises:
            InvalidInputError: If chunk boundaries are not parameter boundaries, in model order.
        """
        chunks: list[dict[str, tuple[int, ...]]] = [{} for _ in self.params_per_chunk]
        ends = list(accumulate(self.params_per_chunk))
        start = 0
        for name, shape in parameters.items():  # to the chunk in which its first entry lies
            chunks[min(bisect_right(ends, start), len(ends) - 1)][name] = shape
            start += math.prod(shape)
        sizes = [num_entries(chunk) for chunk in chunks]
        if sizes != self.params_per_chunk:
            raise InvalidInputError(
                f"Parameters with {num_entries(parameters)} entries do not divide into chunks of "
                f"{self.params_per_chunk}: cut where parameters end, they give {sizes}. "
                "Compute params_per_chunk from these parameters."
            )
        parts = list(zip(self.projector_per_chunk, chunks, strict=True))
        return routed(parts, num_samples, model_id, self._summed)

    def _summed(self, parts: list[Tensor]) -> Tensor:
        total, *others = parts
        for features in others:
            total = total + features.to(total.device)
        return total.to(self.device, self.dtype)

    def fingerprint(self) -> dict[str, Any]:
        """Return the usual entries plus the chunks' sizes and fingerprints."""
        return {
            "kind": "chunked",
            "proj_dim": self.proj_dim,
            "seed": self.seed,
            "version": 1,
            "params_per_chunk": self.params_per_chunk,
            "chunks": [projector.fingerprint() for projector in self.projector_per_chunk],
        }

    def free_memory(self) -> None:
        """Free the matrices of every chunk."""
        for projector in self.projector_per_chunk:
            projector.free_memory()
